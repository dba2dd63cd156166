"""A geography in which one link is slow in one direction."""

from dataclasses import dataclass, replace

from noloco_p2p.core.messages import PeerId
from noloco_p2p.sim.links import Geography, Link


@dataclass(frozen=True)
class SlowLine(Geography):
    pair: tuple[PeerId, PeerId] = ("", "")
    """From, to."""
    pair_bytes_per_s: float = 1.0

    def link(self, sender: PeerId, receiver: PeerId) -> Link:
        link = super().link(sender, receiver)
        return replace(link, bytes_per_s=self.pair_bytes_per_s) if (sender, receiver) == self.pair else link
