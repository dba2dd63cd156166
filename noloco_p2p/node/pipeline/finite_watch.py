"""Finds out whose fault it is when one result after the other is not finite (ARCHITECTURE.md, "A microbatch")."""

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import LocalError
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.state import NodeState

LONGEST_STREAK = 10
REASON = (
    f"{LONGEST_STREAK} microbatches in a row had a loss or gradient that is not finite: "
    "this node's weights or device are broken; restart it, perhaps with a lower inner.peak_learning_rate"
)


class FiniteWatch:
    """Of one node: counts microbatches in a row whose loss or gradient was not finite."""

    def __init__(self, node: NodeState, swarm: Membership) -> None:
        self._node = node
        self._swarm = swarm
        self._streak: list[PeerId] = []
        """The peers that they came from or through."""

    async def ended(self, finite: bool, peer: PeerId) -> None:
        """A microbatch has ended; `peer` is its origin, or at stage 0 the replica that it went through.

        After ten in a row that are not finite the streak begins anew, and the stage makes a pass of its own: if that
        fails, or nobody else took part, the node stops; else it blames its peers.
        """
        node = self._node
        self._streak = [] if finite else [*self._streak, peer]
        if len(self._streak) < LONGEST_STREAK:
            return
        others, self._streak = sorted({*self._streak} - {node.me}), []
        with node.waits.computing("soundness check"):
            sound = await node.stage.is_sound()
        if not (sound and others):
            node.fail(LocalError(REASON))
            return
        for other in others:
            self._swarm.failed(other)
        node.distrust("not_finite")
        came = f"{LONGEST_STREAK} microbatches in a row were not finite, and this node computes well"
        node.event("warning", message=f"{came}: they came from or through {', '.join(others)}")
