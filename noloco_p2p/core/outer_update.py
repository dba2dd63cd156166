"""The arithmetic of an outer round: N1, N2 and N3 (METHOD.md, "Outer round"), and the stability bound S1 (METHOD.md,
"Stability"). Works on any type with +, - and *.

Source: NoLoCo (arXiv 2506.10911) eq. 1–3 and A.2. The paper prints eq. 2 with a minus before β, which would be
gradient *ascent* for its own Δ = θ − φ; its proofs (eq. 32) and its code use a plus, and so do we (N1).
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from operator import add
from typing import Any

Vector = Any
"""A number, a fraction, or an array or tensor of any shape."""
Scalar = float | Fraction


def total(vectors: Sequence[Vector]) -> Vector:
    """The sum of one or more vectors, added from first to last."""
    return reduce(add, vectors)


def mean(vectors: Sequence[Vector]) -> Vector:
    """The mean of one or more vectors."""
    return total(vectors) / len(vectors) if len(vectors) > 1 else vectors[0]


def round_vector(phi: Vector, delta: Vector, *, beta: Scalar, gamma: Scalar) -> Vector:
    """u = β·Δ + γ·φ: all that N1 needs from a member of the group. *Derived*, exact for any β and γ."""
    return delta * beta + phi * gamma


def outer_step(
    phi: Vector, momentum: Vector, vectors: Sequence[Vector], *, alpha: Scalar, gamma: Scalar
) -> tuple[Vector, Vector]:
    """N1 and N2 for one replica: (φ after, δ after). θ after is φ after. No argument is modified.

    `phi` and `momentum` are φ_i and δ_i. `vectors` has u_j of every member of the group, this replica's included, in
    any order; for a replica alone this is plain momentum. A sum of two does not depend on its order, so both replicas
    of a pair round alike: equal φ and δ stay equal bit for bit.
    """
    momentum_after = momentum * alpha + (mean(vectors) - phi * gamma)
    return phi + momentum_after, momentum_after


def carried_over(phi_after: Vector, theta: Vector, frozen: Vector) -> Vector:
    """N3: θ after a round that was frozen at θ_f = `frozen`, while the replica trained on to `theta`.

    What it trained meanwhile stays in θ, and so in the Δ of the next round: it is neither lost nor counted twice.
    """
    return phi_after + (theta - frozen)


def largest_gamma(*, alpha: float, group: int = 2) -> float:
    """γ_max of S1 for groups of `group` ≥ 2 replicas: at or above it the replicas drift apart in mean square."""
    k = (group - 1) / group
    return 2 * (1 - alpha * alpha) / (1 + alpha * (1 - 2 * k))


def instability(*, alpha: float, gamma: float, group: int = 2) -> str | None:
    """None if S1 (METHOD.md, "Stability") holds, otherwise one line that quotes S1 and the numbers."""
    bound = largest_gamma(alpha=alpha, group=group)
    if 0 < gamma < bound:
        return None
    return (
        f"alpha {alpha:g} and gamma {gamma:g} break the stability bound S1, 0 < γ < 2(1−α²) / (1 + α(1−2k)) with "
        f"k = (n−1)/n: for groups of n = {group} gamma must lie between 0 and {bound:.4g} (best {bound / 2:.4g})"
    )
