"""Where the replicas of a stage diverge: the outer round without training, in theory and in simulation.

Training adds Δ, which is curvature and noise; what remains without it is linear. With x and δ a replica's deviations
from the mean over N replicas, and g the deviation of its φ from its pair's mean, one round of N1 and N2 (METHOD.md,
"Outer round") is δ ← α·δ − γ·g, x ← x + δ. Over matchings drawn anew in each round E[g²] = E[x·g] = k·E[x²] and E[δ·g]
= k·E[δ·x], where k = ½·N/(N − 1). So the second moments E[x²], E[x·δ], E[δ²] follow a 3×3 matrix, and the replicas stay
together in mean square if and only if its spectral radius is below one. For N → ∞ that is S1.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from noloco_p2p.core import outer_update, pairing
from noloco_p2p.core.messages import PeerId
from noloco_p2p.sim.world import peer_id

Array = NDArray[np.float64]

GROUP = 2
"""Replicas in a group: a pair."""


def s1(alpha: float, replicas: int | None = None) -> float:
    """γ_max of S1 for pairs of an even number of matched replicas; None: infinitely many (METHOD.md, "Stability")."""
    if replicas is None:
        return outer_update.largest_gamma(alpha=alpha, group=GROUP)
    return 2 * (1 - alpha * alpha) / (1 - alpha / (replicas - 1))


def equation_74(alpha: float, group: int = GROUP) -> tuple[float, float]:
    """The range of γ by eq. 74 of arXiv 2506.10911, as far as it is known: √(n/(2(n−1))) times (α to 2 + α)."""
    factor = math.sqrt(group / (2 * (group - 1)))
    return factor * alpha, factor * (2 + alpha)


def conditions(alpha: float, replicas: int, typical: float) -> dict[str, tuple[float, float]]:
    """The range of γ in which the replicas stay together, by name. `typical`: the `typical_bound`."""
    return {
        "S1": (0.0, s1(alpha)),
        "S1 for N": (0.0, s1(alpha, replicas)),
        "nearly every run": (0.0, typical),
        "eq. 74, n = 2": equation_74(alpha),
        "eq. 74, n = N": equation_74(alpha, replicas),
    }


def crossing(growth: Sequence[tuple[float, float | None]]) -> float | None:
    """The γ at which the logarithm of (γ, growth) first becomes positive, interpolated linearly in γ."""
    logs = sorted((gamma, math.log(factor)) for gamma, factor in growth if factor is not None)
    for (low, falls), (high, grows) in itertools.pairwise(logs):
        if falls < 0 <= grows:
            return low + (high - low) * -falls / (grows - falls)
    return None


def moments(alpha: float, gamma: float, replicas: int | None = None) -> Array:
    """The 3×3 matrix that maps Σx², Σx·δ and Σδ² through one round, averaged over the matchings."""
    k = 0.5 if replicas is None else 0.5 * replicas / (replicas - 1)
    squared_momentum = np.array([gamma * gamma * k, -2 * alpha * gamma * k, alpha * alpha])
    moved = np.array([-gamma * k, alpha, 0.0])  # Σx·δ with the new δ and the old x
    kept = np.array([1.0, 0.0, 0.0])
    return np.array([kept + 2 * moved + squared_momentum, moved + squared_momentum, squared_momentum])


def growth(alpha: float, gamma: float, replicas: int | None = None) -> float:
    """Long-run factor per round on the root mean square deviation; below one the replicas stay together."""
    return math.sqrt(float(np.abs(np.linalg.eigvals(moments(alpha, gamma, replicas))).max()))


def typical_growth(alpha: float, gamma: float, replicas: int, *, seed: int, rounds: int = 2000) -> float:
    """Long-run factor per round on the deviation of nearly every run without Δ (exp of the Lyapunov exponent).

    It is below `growth`, because a few unlucky sequences of pairs dominate the mean square.
    """
    order = [f"{number:04d}" for number in range(replicas)]
    phi = np.random.default_rng(seed).standard_normal((replicas, 1))
    phi -= phi.mean(0)
    momentum, log = np.zeros_like(phi), 0.0
    for round in range(1, rounds + 1):
        phi, momentum = play(phi, momentum, partners(seed, round, order), alpha, gamma)
        size = float(np.sqrt(np.square(phi).sum() + np.square(momentum).sum()))
        phi, momentum, log = phi / size, momentum / size, log + math.log(size)
    return math.exp(log / rounds)


def typical_bound(alpha: float, replicas: int, *, seed: int, accuracy: float = 0.01) -> float:
    """The γ up to which nearly every run stays together without Δ, by bisection between 0.5 and 4 times S1."""
    low, high = 0.5 * s1(alpha), 4.0 * s1(alpha)
    while high - low > accuracy * low:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if typical_growth(alpha, middle, replicas, seed=seed) < 1 else (low, middle)
    return 0.5 * (low + high)


def members(replicas: int) -> list[PeerId]:
    """The sorted peer ids of the only stage of a simulated run."""
    return sorted(peer_id(0, replica) for replica in range(replicas))


def partners(seed: int, round: int, members: Sequence[PeerId]) -> list[int]:
    """The index of each member's partner in the matching of this round; its own if it has none."""
    found = pairing.matching(seed, round, members)
    places = {peer: place for place, peer in enumerate(members)}
    return [places[found.get(peer, peer)] for peer in members]


def play(phi: Array, momentum: Array, partner: Sequence[int], alpha: float, gamma: float) -> tuple[Array, Array]:
    """N1 and N2 for all replicas at once, if Δ is 0: (φ after, δ after). Rows are replicas.

    A replica that is its own partner goes alone, because the mean of two equal snapshots is that snapshot.
    """
    own = outer_update.round_vector(phi, np.zeros_like(phi), beta=0.0, gamma=gamma)
    return outer_update.outer_step(phi, momentum, [own, own[list(partner)]], alpha=alpha, gamma=gamma)


def slope(values: Sequence[float]) -> float:
    """Factor per round on positive values, from the least-squares line through their logarithms."""
    logs = np.log(np.asarray(values, dtype=np.float64))
    return math.exp(float(np.polyfit(np.arange(len(logs)), logs, 1)[0]))
