"""How far a partner's vector may be from one's own before it is clipped, and before it is refused.

METHOD.md, "What a partner may move". Centred clipping (Karimireddy, He and Jaggi, arXiv 2012.10333, algorithm 2) around
one's own vector: whoever is far moves me, but no further than a partner usually does. Distances and radii are norms of
groups of tensors, in the order of the groups.
"""

import re
from collections import deque
from collections.abc import Sequence
from statistics import median

from noloco_p2p.core.messages import TensorSpec

RADIUS = 5.0
"""A partner may be so many times as far as the median of those before it. Figures: METHOD.md."""
REFUSED = 8.0
"""Beyond so many radii nothing of it is taken: honest replicas that were apart for long are not as far."""
WINDOW, FEWEST = 16, 3
"""The median is over so many distances at most, and at least."""
UNKNOWN = 0.5
"""With fewer of them a partner may be so far, as a share of the norm of one's own group."""
FURTHEST = 1.5
"""Nor is anything taken beyond so many norms of one's own vector: the same with the other sign is two away."""

LARGEST_NORM, NORMS_KEPT = 3.0, 64
"""A gradient that comes back may be so many times as long as the median of the last ones."""


def group_of(parameter: TensorSpec) -> str:
    """Its layer; itself outside of the layers. All that are no matrices are one group: they are few, so that in the
    group of a matrix they could be anything, and a group of a few values by itself has no usual distance."""
    if len(parameter.shape) < 2:
        return "vectors"
    layer = re.match(r".*?\.\d+(?=\.)", parameter.name)
    return layer[0] if layer else parameter.name


class PairDistances:
    """Of one replica: how far the partners were whose vectors it took, as they were and per unit of learning rate.

    Steps at a higher rate lead further apart at once; what earlier ones left fades with the rounds.
    """

    def __init__(self) -> None:
        self._taken: deque[Sequence[float]] = deque(maxlen=WINDOW)
        self._scaled: deque[Sequence[float]] = deque(maxlen=WINDOW)

    def radii(self, learning_rate: float) -> tuple[float, ...]:
        """How far a partner may be; empty while too few are known, 0 where it is not known."""
        if len(self._taken) < FEWEST:
            return ()
        taken, scaled = (map(median, zip(*found, strict=True)) for found in (self._taken, self._scaled))
        return tuple(RADIUS * max(one, other * learning_rate) for one, other in zip(taken, scaled, strict=True))

    def observe(self, distances: Sequence[float], learning_rate: float) -> None:
        """A vector has been merged that was so far away once it was clipped: so a radius grows where all are far."""
        if learning_rate > 0:
            self._taken.append(distances)
            self._scaled.append([distance / learning_rate for distance in distances])


def factors(distances: Sequence[float], radii: Sequence[float]) -> tuple[float, ...] | None:
    """What each group's difference is multiplied by, 1 at most; None: it is refused, also where it is not finite."""
    pairs = list(zip(distances, radii, strict=True))
    if not all(distance <= REFUSED * radius for distance, radius in pairs):
        return None
    return tuple(1.0 if distance <= radius else radius / distance for distance, radius in pairs)


class NormClip:
    """Clips to a multiple of the running median of norms; what is remembered is the norm after the clip."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=NORMS_KEPT)

    def factor(self, norm: float) -> float:
        """What values of that norm, which is finite, are multiplied by: 1 at most, and while few are known."""
        known = len(self._norms) >= NORMS_KEPT // 4
        bound = LARGEST_NORM * median(self._norms) if known else norm
        if norm > 0:
            self._norms.append(min(norm, bound))
        return 1.0 if norm <= bound else bound / norm
