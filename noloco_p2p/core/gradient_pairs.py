"""Which microbatches go out twice, and whose gradients are not those of the others (METHOD.md, "The same data twice").

Pure. One object belongs to one node of stage 0, which compares what two replicas of stage 1 made of the same data.
"""

from collections import deque
from math import comb, sqrt
from statistics import quantiles
from typing import NamedTuple

from noloco_p2p.core.messages import MicrobatchId, PeerId
from noloco_p2p.core.seeds import generator

CALM, SUSPICIOUS = 1 / 100, 1 / 4
"""The share of microbatches that go out twice: usually, and while there is an outlier among the last pairs."""
SUSPICIOUS_PAIRS = 16
LEAST, FACTOR = 0.9, 3.0
"""An outlier is further apart than LEAST, and than FACTOR times what honest pairs are. Figures: METHOD.md."""
COMPARED = 64
"""Honest pairs are as far apart as the lower quartile of so many: it holds while up to three quarters have a liar."""
REMEMBERED, RECENT = 1024, 16
"""Pairs in all, and of one replica: those before tell nothing of what it does now."""
FEWEST, OTHERS, SHARE, CHANCE = 4, 3, 0.5, 1e-5
"""A replica dissents if at least FEWEST and SHARE of its recent pairs are outliers, with at least OTHERS others, and so
many would come by chance with at most this probability, were it like the others. These may have outliers, too: what
comes back has also passed through later stages."""


class GradientLikeness(NamedTuple):
    """Two gradients with respect to the same hidden states, held against each other."""

    norms: tuple[float, float]
    cosine: float
    """0 if one of them is zero."""

    @classmethod
    def of(cls, square: float, other_square: float, product: float) -> "GradientLikeness":
        """From the inner products a·a, b·b and a·b."""
        norms = sqrt(square), sqrt(other_square)
        both = norms[0] * norms[1]
        return cls(norms, product / both if both else 0.0)

    @property
    def apart(self) -> float:
        """‖a − b‖ / √(‖a‖² + ‖b‖²): 0 if equal, 1 at right angles or if one is far longer, √2 if opposite."""
        longest = max(self.norms)
        if not longest:
            return 0.0
        a, b = (norm / longest for norm in self.norms)
        return sqrt(max(0.0, 1 - 2 * self.cosine * a * b / (a * a + b * b)))


class _Pair(NamedTuple):
    peers: tuple[PeerId, PeerId]
    outlier: bool


class GradientPairs:
    """What one node has seen. `secret` is known to nobody else: so nobody can foresee what goes out twice."""

    def __init__(self, secret: int) -> None:
        self._secret = secret
        self._apart: deque[float] = deque(maxlen=COMPARED)
        self._pairs: deque[_Pair] = deque(maxlen=REMEMBERED)

    def repeats(self, microbatch: MicrobatchId) -> bool:
        """The one after this microbatch has the same data."""
        suspicious = any(pair.outlier for pair in list(self._pairs)[-SUSPICIOUS_PAIRS:])
        draw = generator(self._secret, "repeats", *microbatch).random()
        return draw < (SUSPICIOUS if suspicious else CALM)

    def observe(self, one: PeerId, other: PeerId, apart: float) -> tuple[bool, PeerId | None]:
        """Whether a pair of two different replicas is an outlier, and who of the two dissents from all others.

        The pairs of one that dissents are forgotten: they must not be held against the others.
        """
        outlier = apart > max(LEAST, FACTOR * quantiles(self._apart)[0] if len(self._apart) > 1 else 0.0)
        self._apart.append(apart)
        self._pairs.append(_Pair((one, other), outlier))
        dissenter = next((peer for peer in (one, other) if outlier and self._dissents(peer)), None)
        if dissenter is not None:
            kept = [pair for pair in self._pairs if dissenter not in pair.peers]
            self._pairs = deque(kept, maxlen=REMEMBERED)
        return outlier, dissenter

    def _dissents(self, peer: PeerId) -> bool:
        credible = {name for pair in self._pairs if not pair.outlier for name in pair.peers}
        mine = [pair for pair in self._pairs if peer in pair.peers][-RECENT:]
        # Who agrees with nobody is at fault in its pairs: they tell nothing of others.
        held = [other for pair in mine if pair.outlier for other in credible.intersection(pair.peers) - {peer}]
        rest = [pair.outlier for pair in self._pairs if peer not in pair.peers and credible.issuperset(pair.peers)]
        count, usual = len(held) + sum(not pair.outlier for pair in mine), (1 + sum(rest)) / (2 + len(rest))
        chance = comb(count, len(held)) * usual ** len(held)
        return len(held) >= max(FEWEST, SHARE * count) and len(set(held)) >= OTHERS and chance <= CHANCE
