"""How far a partner's vector may be from a replica's own before it is clipped, and before it is refused.

METHOD.md, "What a partner may move". This is centred clipping (Karimireddy, He and Jaggi, arXiv 2012.10333, algorithm
2) around the replica's own vector: a partner that is far away moves it, but no further than partners usually do.
Distances and radii are norms of groups of tensors, in the order of the groups.
"""

import re
from collections import deque
from collections.abc import Iterable, Sequence
from math import hypot, inf, isfinite
from statistics import median

from noloco_p2p.core.messages import TensorSpec

RADIUS = 4.0
"""A partner is clipped beyond this many times the usual distance, which is the lower quartile of those of earlier
partners: one liar makes its victims, and whoever meets these next, appear far away. Figures: METHOD.md."""
REFUSED = 10.0
"""A vector is refused if all groups together are more than this many radii away. Honest replicas are not that far
apart, even after a long separation. A single group may be: its usual distance can be tiny, if it consists of a few
values that all replicas move alike until they are separated."""
WINDOW, FEWEST = 12, 3
"""The quartile is over at most WINDOW and at least FEWEST distances."""
UNKNOWN = 0.5
"""With fewer distances, the radius is this fraction of the norm of the replica's own group."""
FURTHEST = 1.5
"""A vector that would be clipped is refused if it is further away than this many times the norm of the replica's own.
The replica's own vector with the opposite sign is two norms away."""

LIMIT = 2.0
"""In a codec with bounds, a single value may be this many radii of sizes away. The size of a group's difference is
‖d‖² / Σ|d|: the mean magnitude in which larger values weigh more, so values that no replica moves do not count, and a
few far ones hardly."""

NOTICEABLE = 0.8
"""A vector of which only single values are too far counts as clipped if less than this share of some group's distance
is left: a few values of honest ones often are."""

LARGEST_NORM, NORMS_KEPT = 3.0, 64
"""A returning gradient is clipped to LARGEST_NORM times the median norm of the last NORMS_KEPT."""


def group_of(parameter: TensorSpec) -> str:
    """The group of a parameter. A matrix belongs to its layer's group; outside of the layers it is a group of its own.
    All other tensors together are one group: in a matrix's group their few values could be anything, and so few values
    alone have no usual distance."""
    if len(parameter.shape) < 2:
        return "vectors"
    layer = re.match(r".*?\.\d+(?=\.)", parameter.name)
    return layer[0] if layer else parameter.name


class PairDistances:
    """How far away the vectors were that a replica merged, in absolute terms and per unit of learning rate.

    Steps at a higher rate drive replicas further apart at once; the effect of earlier steps fades over the rounds.
    """

    def __init__(self) -> None:
        self._taken: deque[Sequence[float]] = deque(maxlen=WINDOW)
        self._scaled: deque[Sequence[float]] = deque(maxlen=WINDOW)

    def radii(self, learning_rate: float) -> tuple[float, ...]:
        """How far away a partner may be, by group. Empty while too few distances are known; 0 where still unknown."""
        if len(self._taken) < FEWEST:
            return ()
        both, quarter = (self._taken, self._scaled), len(self._taken) // 4
        taken, scaled = ([sorted(group)[quarter] for group in zip(*found, strict=True)] for found in both)
        return tuple(RADIUS * max(one, other * learning_rate) for one, other in zip(taken, scaled, strict=True))

    def observe(self, distances: Sequence[float], learning_rate: float) -> None:
        """A vector this far away, after clipping, was merged. So the radii grow if all partners are far away."""
        if learning_rate > 0:
            self._taken.append(distances)
            self._scaled.append([distance / learning_rate for distance in distances])


def moved_by(radii: Sequence[float], gain: float) -> tuple[float, ...]:
    """The radii of an offer of two values, of which the second eventually moves the first by `gain` times its norm.

    Replicas begin with equal first values, and a pair leaves each round with equal ones. So in the first rounds the
    distances of first values are far too small, or 0.
    """
    half = len(radii) // 2
    first, second = radii[:half], radii[half:]
    return (*(max(one, gain * other) for one, other in zip(first, second, strict=True)), *second)


def limits(sizes: Sequence[float]) -> tuple[float, ...]:
    """How far a single value may be, by group, given the radii of sizes; infinite where those are 0, thus unknown."""
    return tuple(LIMIT * size or inf for size in sizes)


def factors(distances: Sequence[float], radii: Sequence[float]) -> tuple[float, ...] | None:
    """The factor, at most 1, by which each group's difference is clipped; None if the vector is refused, which it also
    is if a distance is not finite.

    An infinite radius means that it is unknown: the group is not clipped.
    """
    pairs = list(zip(distances, radii, strict=True))
    known = [pair for pair in pairs if pair[1] < inf]
    far, usual = (hypot(*(pair[which] for pair in known)) for which in (0, 1))
    if far > REFUSED * usual or not all(map(isfinite, distances)):
        return None
    return tuple(1.0 if distance <= radius else radius / distance for distance, radius in pairs)


class NormClip:
    """Clips to a multiple of the running median of norms. Each norm is remembered as it is after clipping."""

    def __init__(self, norms: Iterable[float] = ()) -> None:
        """`norms`: those to begin with, oldest first."""
        self._norms = deque(norms, maxlen=NORMS_KEPT)

    @property
    def norms(self) -> tuple[float, ...]:
        """The remembered norms, oldest first."""
        return tuple(self._norms)

    def factor(self, norm: float) -> float:
        """The factor for values of this norm, which is finite: at most 1, and 1 while few norms are known. Remembers
        the norm."""
        known = len(self._norms) >= NORMS_KEPT // 4
        bound = LARGEST_NORM * median(self._norms) if known else norm
        if norm > 0:
            self._norms.append(min(norm, bound))
        return 1.0 if norm <= bound else bound / norm
