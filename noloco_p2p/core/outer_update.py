"""The outer round: N1, N2 and N3 (METHOD.md, "Outer round"), and the stability bound S1 (METHOD.md,
"Stability"). On any type with + - *.

Source: NoLoCo (arXiv 2506.10911) eq. 1–3 and A.2. The paper prints eq. 2 with a minus before β, which would be
gradient *ascent* for its own Δ = θ − φ; its proofs (eq. 32) and its code use the plus, and so do we (N1).
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol, TypeVar


class Vector(Protocol):
    """What N1 needs of a value: a number, a fraction, or an array or tensor of any shape."""

    def __add__(self, other: Any, /) -> Any:
        """Element by element."""
        ...

    def __sub__(self, other: Any, /) -> Any:
        """Element by element."""
        ...

    def __mul__(self, factor: Any, /) -> Any:
        """By a scalar."""
        ...

    def __truediv__(self, divisor: Any, /) -> Any:
        """By a whole number."""
        ...


V = TypeVar("V", bound=Vector)
Scalar = float | Fraction


def round_vector(phi: V, delta: V, *, beta: Scalar, gamma: Scalar) -> V:
    """u = β·Δ + γ·φ: all that N1 needs of a member of the group. *Derived*, exact for any β and γ."""
    vector: V = delta * beta + phi * gamma
    return vector


def outer_step(phi: V, momentum: V, vectors: Sequence[V], *, alpha: Scalar, gamma: Scalar) -> tuple[V, V]:
    """N1 and N2 for one replica: (φ after, δ after). θ after is φ after. No argument is changed.

    `phi` and `momentum` are φ_i and δ_i; `vectors` is u_j of every member of the group, mine included, in any order; a
    group of mine alone is plain momentum. The sum of two does not depend on their order, so the two of a pair round
    alike: equal φ and δ stay equal bit for bit. Raises ValueError for an empty group.
    """
    if not vectors:
        raise ValueError("a group holds at least the replica itself")
    total = vectors[0]
    for vector in vectors[1:]:
        total = total + vector
    momentum_after: V = momentum * alpha + (total / len(vectors) - phi * gamma)
    phi_after: V = phi + momentum_after
    return phi_after, momentum_after


def carried_over(phi_after: V, theta: V, frozen: V) -> V:
    """N3: θ after a round that was frozen at θ_f = `frozen`, while the replica trained on to `theta`.

    What it trained meanwhile stays in θ, and so in the Δ of the next round: neither lost nor counted twice.
    """
    trained: V = theta - frozen
    after: V = phi_after + trained
    return after


def largest_gamma(*, alpha: float, group: int = 2) -> float:
    """γ_max of S1 for groups of `group` ≥ 2 replicas: at or above it the replicas drift apart in mean square."""
    if group < 2:
        raise ValueError(f"S1 is about groups of two replicas or more, not {group}")
    k = (group - 1) / group
    return 2 * (1 - alpha * alpha) / (1 + alpha * (1 - 2 * k))


def instability(*, alpha: float, gamma: float, group: int = 2) -> str | None:
    """None if S1 (METHOD.md, "Stability") holds, else one line that quotes S1 and the numbers."""
    bound = largest_gamma(alpha=alpha, group=group)
    if 0 < gamma < bound:
        return None
    return (
        f"alpha {alpha:g} and gamma {gamma:g} break the stability bound S1, 0 < γ < 2(1−α²) / (1 + α(1−2k)) with "
        f"k = (n−1)/n: for groups of n = {group} gamma must lie between 0 and {bound:.4g} (best {bound / 2:.4g})"
    )
