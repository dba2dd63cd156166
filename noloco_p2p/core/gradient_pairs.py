"""Which microbatches go out twice, and whose gradients are not those of the others (METHOD.md, "The same data twice").

Pure. One object belongs to one node of stage 0, which compares what came back of the same data over two routes.
"""

from collections import deque
from math import comb, sqrt
from statistics import quantiles
from typing import NamedTuple

from noloco_p2p.core.messages import MicrobatchId, PeerId
from noloco_p2p.core.seeds import generator

EARLY, CALM, SUSPICIOUS = 1 / 10, 1 / 100, 1 / 2
"""Share of the microbatches that go out twice: at first, usually, and with an outlier among the last pairs."""
EARLY_PAIRS, SUSPICIOUS_PAIRS = 32, 16
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


Route = tuple[PeerId, ...]
"""Who served a microbatch, from stage 1 on."""


class _Pair(NamedTuple):
    routes: tuple[Route, Route]
    outlier: bool

    def at(self, hop: int) -> tuple[PeerId, ...]:
        """Who served the two at a hop, where 0 is stage 1; nobody: one replica served both, so it tells nothing."""
        peers = tuple(route[hop] for route in self.routes if len(route) > hop)
        return peers if len(set(peers)) == 2 else ()

    def before(self, hop: int, peer: PeerId) -> PeerId | None:
        """Who called a peer that served one of the two at this hop; None: I did."""
        return self.routes[self.at(hop).index(peer)][hop - 1] if hop else None


class GradientPairs:
    """What one node has seen. `secret` is known to nobody else, so nobody can foresee what goes out twice; with None
    nothing does."""

    def __init__(self, secret: int | None) -> None:
        self._secret = secret
        self._apart: deque[float] = deque(maxlen=COMPARED)
        self._pairs: deque[_Pair] = deque(maxlen=REMEMBERED)

    def repeats(self, microbatch: MicrobatchId) -> bool:
        """The one after this microbatch has the same data."""
        suspicious = any(pair.outlier for pair in list(self._pairs)[-SUSPICIOUS_PAIRS:])
        share = SUSPICIOUS if suspicious else EARLY if len(self._pairs) < EARLY_PAIRS else CALM
        return self._secret is not None and generator(self._secret, "repeats", *microbatch).random() < share

    def observe(self, one: Route, other: Route, apart: float) -> tuple[bool, PeerId | None]:
        """Whether a pair is an outlier, and who on the two routes dissents from all others of its stage.

        The pairs of one that dissents are forgotten: they must not be held against the others.
        """
        outlier = apart > max(LEAST, FACTOR * quantiles(self._apart)[0] if len(self._apart) > 1 else 0.0)
        self._apart.append(apart)
        self._pairs.append(pair := _Pair((one, other), outlier))
        suspects = ((hop, peer) for hop in range(len(one)) for peer in pair.at(hop) if outlier)
        dissenter = next((peer for hop, peer in suspects if self._dissents(hop, peer)), None)
        if dissenter is not None:
            kept = [pair for pair in self._pairs if not any(dissenter in route for route in pair.routes)]
            self._pairs = deque(kept, maxlen=REMEMBERED)
        return outlier, dissenter

    def _dissents(self, hop: int, peer: PeerId) -> bool:
        pairs = [(pair, peers) for pair in self._pairs if (peers := pair.at(hop))]
        credible = {name for pair, peers in pairs if not pair.outlier for name in peers}
        mine = [(pair, peers) for pair, peers in pairs if peer in peers][-RECENT:]
        # Who agrees with nobody is at fault in its pairs: they tell nothing of others.
        held = [
            (pair, other) for pair, peers in mine if pair.outlier for other in credible.intersection(peers) - {peer}
        ]
        rest = [pair.outlier for pair, peers in pairs if peer not in peers and credible.issuperset(peers)]
        count, usual = len(held) + sum(not pair.outlier for pair, _ in mine), (1 + sum(rest)) / (2 + len(rest))
        chance = comb(count, len(held)) * usual ** len(held)
        # Further on, those before name it: one of them alone could name whom it likes.
        by = {pair.before(hop, peer) for pair, _ in held}
        enough = len(held) >= max(FEWEST, SHARE * count) and len({other for _, other in held}) >= OTHERS
        return enough and (hop == 0 or len(by) >= OTHERS) and chance <= CHANCE
