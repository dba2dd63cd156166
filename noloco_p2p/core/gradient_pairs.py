"""Which data is sent twice, and which replica's gradients differ from the others' (METHOD.md, "The same data twice").

Pure. Each stage-0 node has one `GradientPairs`, with which it compares what came back for the same data over two
routes.
"""

from collections import deque
from math import comb, sqrt
from statistics import quantiles
from typing import NamedTuple

from noloco_p2p.core.messages import MicrobatchId, PeerId
from noloco_p2p.core.seeds import generator

EARLY, CALM, SUSPICIOUS = 1 / 10, 1 / 100, 1 / 2
"""Share of the microbatches whose data is sent twice: for the first EARLY_PAIRS pairs, usually, and while one of the
last SUSPICIOUS_PAIRS pairs is an outlier."""
EARLY_PAIRS, SUSPICIOUS_PAIRS = 32, 16
MIN_DISTANCE, FACTOR = 0.9, 3.0
"""An outlier is further apart than MIN_DISTANCE, and FACTOR times the distance of honest pairs. Figures: METHOD.md."""
COMPARED = 64
"""The distance of honest pairs is the lower quartile of this many pairs: right while at most three quarters include a
liar."""
REMEMBERED, RECENT = 1024, 16
"""How many pairs count in all, and of one replica: older ones say nothing about what it does now."""
FEWEST, OTHERS, SHARE, CHANCE = 4, 3, 0.5, 1e-5
"""A replica dissents if at least FEWEST, and at least the share SHARE, of its recent pairs are outliers, with at least
OTHERS different replicas on the other route, and if a replica like the others would have that many with a probability
of at most CHANCE. Honest replicas have outliers, too, because a gradient has also passed through later stages."""


class GradientLikeness(NamedTuple):
    """A comparison of two gradients with respect to the same hidden states."""

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
"""The replicas that served a microbatch, from stage 1 on."""


class _Pair(NamedTuple):
    routes: tuple[Route, Route]
    outlier: bool

    def at(self, hop: int) -> tuple[PeerId, ...]:
        """The two replicas at a hop, where hop 0 is stage 1; empty if one served both: then the pair shows nothing."""
        peers = tuple(route[hop] for route in self.routes if len(route) > hop)
        return peers if len(set(peers)) == 2 else ()


class GradientPairs:
    """The pairs that one node has seen. Nobody else knows `secret`, so nobody can foresee which data is sent twice;
    with None, no data is."""

    def __init__(self, secret: int | None) -> None:
        self._secret = secret
        self._apart: deque[float] = deque(maxlen=COMPARED)
        self._pairs: deque[_Pair] = deque(maxlen=REMEMBERED)

    def repeats(self, microbatch: MicrobatchId) -> bool:
        """Whether the microbatch after this one has the same data."""
        suspicious = any(pair.outlier for pair in list(self._pairs)[-SUSPICIOUS_PAIRS:])
        share = SUSPICIOUS if suspicious else EARLY if len(self._pairs) < EARLY_PAIRS else CALM
        return self._secret is not None and generator(self._secret, "repeats", *microbatch).random() < share

    def observe(self, one: Route, other: Route, apart: float) -> tuple[bool, PeerId | None]:
        """Record a pair. Returns whether it is an outlier, and the replica on its routes that dissents, if any.

        The pairs of a replica that dissents are forgotten: they must not be held against the others.
        """
        outlier = apart > max(MIN_DISTANCE, FACTOR * quantiles(self._apart)[0] if len(self._apart) > 1 else 0.0)
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
        # A replica that agrees with nobody is at fault in its pairs, which show nothing about others.
        held = [
            (pair, other) for pair, peers in mine if pair.outlier for other in credible.intersection(peers) - {peer}
        ]
        rest = [pair.outlier for pair, peers in pairs if peer not in peers and credible.issuperset(peers)]
        count, usual = len(held) + sum(not pair.outlier for pair, _ in mine), (1 + sum(rest)) / (2 + len(rest))
        chance = comb(count, len(held)) * usual ** len(held)
        # After stage 1, the hop before names the replica: one liar there could name any.
        by = {route[hop - 1] for pair, _ in held for route in pair.routes if route[hop] == peer}
        enough = len(held) >= max(FEWEST, SHARE * count) and len({other for _, other in held}) >= OTHERS
        return enough and (hop == 0 or len(by) >= OTHERS) and chance <= CHANCE
