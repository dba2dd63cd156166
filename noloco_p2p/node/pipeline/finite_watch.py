"""Finds out whose fault it is when one result after the other is not finite (ARCHITECTURE.md, "A microbatch")."""

from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.nonfinite import LONGEST_STREAK, REASON, NonFiniteStreak
from noloco_p2p.errors import LocalError
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.state import NodeState


class FiniteWatch:
    """Of one node."""

    def __init__(self, node: NodeState, swarm: Membership) -> None:
        self._node = node
        self._swarm = swarm
        self._streak = NonFiniteStreak()

    async def ended(self, finite: bool, peer: PeerId) -> None:
        """A microbatch has ended; `peer` as in `NonFiniteStreak.record`. After ten that are not finite the stage
        makes a pass of its own: if that fails, or nobody else took part, the node stops; else it blames its peers."""
        node, peers = self._node, self._streak.record(finite, peer)
        if not peers:
            return
        with node.waits.computing("soundness check"):
            sound = await node.stage.is_sound()
        others = sorted(peers - {node.me})
        if not (sound and others):
            node.fail(LocalError(REASON))
            return
        for other in others:
            self._swarm.failed(other)
        node.distrust("not_finite")
        came = f"{LONGEST_STREAK} microbatches in a row were not finite, and this node computes well"
        node.event("warning", message=f"{came}: they came from or through {', '.join(others)}")
