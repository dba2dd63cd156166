"""Geographies beyond the uniform one: regions with distances between them, and access that differs from node to node.

geography = Drawn(Regions(("eu", "us"), ((2.0, 90.0), (90.0, 2.0))), Access(2.5e6, 12.5e6), spread=0.6, seed=1)
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.seeds import generator
from noloco_p2p.errors import ConfigError
from noloco_p2p.sim.links import Access, Geography, Link


@dataclass(frozen=True, slots=True)
class Regions:
    """The Geography of nodes that stand in regions. Raises ConfigError for a matrix that does not fit its names."""

    names: tuple[str, ...]
    round_trip_ms: tuple[tuple[float, ...], ...]
    """Median round trip between a node of the row's region and one of the column's, milliseconds; half of it each way.

    The diagonal is the round trip within a region.
    """
    bytes_per_s: tuple[tuple[float | None, ...], ...] | None = None
    """What one node can send to one other, from the row's region to the column's; none: no limit but their access."""
    spread: float = 0.0
    """Sigma of the log-normal latency of every link; 0: constant."""
    loss: float = 0.0
    """Chance that a packet is lost, on every link."""
    home: Mapping[PeerId, str] = field(default_factory=dict)
    """Region of the nodes that are named here. All others stand in turn: node `…7` in region 7 modulo their count, so
    that the replicas of one number have theirs in common."""
    each: Access = field(default_factory=Access)
    """Of every node."""

    def __post_init__(self) -> None:
        """Check what was given."""
        if not self.names or len({*self.names}) < len(self.names):
            raise ConfigError(f"regions need different names, got {list(self.names)}")
        for what, matrix in (("round_trip_ms", self.round_trip_ms), ("bytes_per_s", self.bytes_per_s)):
            if matrix is not None and [len(row) for row in matrix] != [len(self.names)] * len(self.names):
                raise ConfigError(f"{what} needs {len(self.names)} rows of {len(self.names)}, one for each region")
        flat = [value for matrix in (self.round_trip_ms, self.bytes_per_s or ()) for row in matrix for value in row]
        if any(value is not None and not 0 < value < math.inf for value in flat):
            raise ConfigError("round trips and bandwidths between regions must be above 0")
        strange = sorted({*self.home.values()} - {*self.names})
        if strange:
            raise ConfigError(f"there is no region {strange[0]!r}; there are {', '.join(self.names)}")

    def region(self, peer: PeerId) -> str:
        """Where a node stands. Raises ConfigError for one that is not named and has no number at its end."""
        return self.names[self._index(peer)]

    def link(self, sender: PeerId, receiver: PeerId) -> Link:
        """See `Geography`."""
        row, column = self._index(sender), self._index(receiver)
        speed = self.bytes_per_s[row][column] if self.bytes_per_s else None
        return Link(self.round_trip_ms[row][column] / 2000.0, self.spread, speed, loss=self.loss)

    def access(self, peer: PeerId) -> Access:
        """See `Geography`."""
        return self.each

    def _index(self, peer: PeerId) -> int:
        if peer in self.home:
            return self.names.index(self.home[peer])
        number = re.search(r"\d+$", peer)
        if number is None:
            raise ConfigError(f"node {peer} has no region: name one for it, or give it a number")
        return int(number[0]) % len(self.names)


@dataclass(frozen=True, slots=True)
class Drawn:
    """The Geography whose nodes differ in their access: each draws one log-normal factor for both directions.

    With one factor a fast line is fast both ways, and every line is as asymmetric as the median one.
    """

    within: Geography
    """Where the links come from, and the access of the directions that have no median."""
    median: Access
    spread: float
    """Sigma of the log-normal factor."""
    seed: int
    """A node's factor is a function of this and its id."""

    def link(self, sender: PeerId, receiver: PeerId) -> Link:
        """See `Geography`."""
        return self.within.link(sender, receiver)

    def access(self, peer: PeerId) -> Access:
        """See `Geography`."""
        factor = math.exp(generator(self.seed, "access", peer).gauss(0.0, self.spread))
        up, down, plain = self.median.up_bytes_per_s, self.median.down_bytes_per_s, self.within.access(peer)
        return Access(
            plain.up_bytes_per_s if up is None else up * factor,
            plain.down_bytes_per_s if down is None else down * factor,
        )
