"""How far a partner's vector may be from one's own before it is clipped, and before it is refused.

METHOD.md, "What a partner may move". This is centred clipping (Karimireddy, He and Jaggi, arXiv 2012.10333, algorithm
2) around one's own vector: a partner that is far away moves a replica, but no further than partners usually do.
Distances and radii are norms of groups of tensors, in the order of the groups.
"""

import re
from collections import deque
from collections.abc import Iterable, Sequence
from math import hypot, inf, isfinite
from statistics import median

from noloco_p2p.core.messages import TensorSpec

RADIUS = 5.0
"""A partner is clipped beyond so many times the median distance of those before it. Figures: METHOD.md."""
REFUSED = 8.0
"""A vector is refused if all groups together are beyond so many radii. Honest replicas are not so far apart, even after
a long separation. A single group may be: its usual distance can be tiny, as that of a few values that all replicas move
alike until they are separated."""
WINDOW, FEWEST = 16, 3
"""The median is over at most WINDOW and at least FEWEST distances."""
UNKNOWN = 0.5
"""With fewer distances, the radius is this share of the norm of one's own group."""
FURTHEST = 1.5
"""A vector that would be clipped is refused beyond so many norms of one's own. With the other sign it is two away."""

LARGEST_NORM, NORMS_KEPT = 3.0, 64
"""A returning gradient is clipped to so many times the median norm of the last NORMS_KEPT."""


def group_of(parameter: TensorSpec) -> str:
    """A matrix belongs to its layer's group; outside of the layers it is a group of its own. All other tensors are one
    group: in a matrix's group their few values could be anything, and a few values alone have no usual distance."""
    if len(parameter.shape) < 2:
        return "vectors"
    layer = re.match(r".*?\.\d+(?=\.)", parameter.name)
    return layer[0] if layer else parameter.name


class PairDistances:
    """For one replica: how far away the vectors were that it merged, as such and per unit of learning rate.

    Steps at a higher rate lead further apart at once; the effect of earlier ones fades with the rounds.
    """

    def __init__(self) -> None:
        self._taken: deque[Sequence[float]] = deque(maxlen=WINDOW)
        self._scaled: deque[Sequence[float]] = deque(maxlen=WINDOW)

    def radii(self, learning_rate: float) -> tuple[float, ...]:
        """How far away a partner may be; empty while too few distances are known, 0 for a group where none is known."""
        if len(self._taken) < FEWEST:
            return ()
        taken, scaled = (map(median, zip(*found, strict=True)) for found in (self._taken, self._scaled))
        return tuple(RADIUS * max(one, other * learning_rate) for one, other in zip(taken, scaled, strict=True))

    def observe(self, distances: Sequence[float], learning_rate: float) -> None:
        """A vector was merged that was this far away after clipping, so a radius grows if all partners are far away."""
        if learning_rate > 0:
            self._taken.append(distances)
            self._scaled.append([distance / learning_rate for distance in distances])


def moved_by(radii: Sequence[float], gain: float) -> tuple[float, ...]:
    """Radii of the groups of two values, if the second moves the first, in the end by `gain` times its length.

    Replicas begin with the same first value, and partners leave each round with it. So in the first rounds its own
    distances are far too small, or 0.
    """
    half = len(radii) // 2
    first, second = radii[:half], radii[half:]
    return (*(max(one, gain * other) for one, other in zip(first, second, strict=True)), *second)


def factors(distances: Sequence[float], radii: Sequence[float]) -> tuple[float, ...] | None:
    """What each group's difference is multiplied by, 1 at most; None: refused, also if a distance is not finite.

    An infinite radius is unknown.
    """
    pairs = list(zip(distances, radii, strict=True))
    known = [(distance, radius) for distance, radius in pairs if radius < inf]
    far, usual = (hypot(*values) for values in zip(*known, strict=True)) if known else (0.0, 0.0)
    if far > REFUSED * usual or not all(map(isfinite, distances)):
        return None
    return tuple(1.0 if distance <= radius else radius / distance for distance, radius in pairs)


class NormClip:
    """Clips to a multiple of the running median of norms, which remembers each norm after the clip."""

    def __init__(self, norms: Iterable[float] = ()) -> None:
        """`norms`: those remembered before."""
        self._norms = deque(norms, maxlen=NORMS_KEPT)

    @property
    def norms(self) -> tuple[float, ...]:
        """Those remembered, oldest first."""
        return tuple(self._norms)

    def factor(self, norm: float) -> float:
        """What values of this norm, which is finite, are multiplied by: at most 1, and 1 while few norms are known."""
        known = len(self._norms) >= NORMS_KEPT // 4
        bound = LARGEST_NORM * median(self._norms) if known else norm
        if norm > 0:
            self._norms.append(min(norm, bound))
        return 1.0 if norm <= bound else bound / norm
