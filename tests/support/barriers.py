"""Barriers of a simulated network, by the faults that put them up."""

from functools import cache

from noloco_p2p.core.messages import PeerId
from noloco_p2p.sim.faults import Fault
from noloco_p2p.sim.network import Barrier


@cache
def barrier(kind: str, *peers: PeerId) -> Barrier:
    """What a fault of this kind blocks; always the same object, so that a test can remove one without keeping it."""
    return Fault(0.0, kind, peers).blocks
