"""Finds out whose fault it is when many results in a row are not finite (ARCHITECTURE.md, "A microbatch")."""

from collections import Counter

from noloco_p2p.core.members import LONGEST_ASIDE_S
from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import LocalError
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.state import NodeState

LONGEST_STREAK = 10
REASON = (
    f"{LONGEST_STREAK} microbatches in a row had a loss or gradient that is not finite: "
    "this node's weights or device are broken; restart it, or begin a new run with a lower inner.peak_learning_rate"
)


class FiniteWatch:
    """For one node: counts microbatches in a row whose loss or gradient was not finite."""

    def __init__(self, node: NodeState, swarm: Membership) -> None:
        self._node = node
        self._swarm = swarm
        self._streak: list[PeerId] = []
        """For each of them, the peer that it came from or went through."""
        self._through: Counter[PeerId] = Counter()
        """How many in a row through each replica of the next stage, whatever came through others meanwhile."""

    async def ended(self, finite: bool, peer: PeerId) -> None:
        """Note that a microbatch has ended; `peer` is its origin, or at stage 0 the replica that it went through.

        After LONGEST_STREAK in a row that were not finite, or as many in a row through one replica of the next stage,
        the stage runs a pass of its own. If that is not finite either, or if no other node took part, this node stops;
        otherwise it blames its peers, sends elsewhere if there are others, and starts counting again.
        """
        node, following = self._node, {*self._swarm.view.following}
        self._streak = [] if finite else [*self._streak, peer]
        if finite:
            del self._through[peer]
        elif peer in following:
            self._through[peer] += 1
        if max(len(self._streak), self._through[peer]) < LONGEST_STREAK:
            return
        blamed = {peer} if len(self._streak) < LONGEST_STREAK else {*self._streak} - {node.me}
        self._streak, self._through = [], Counter()
        with node.waits.computing("soundness check"):
            sound = await node.stage.is_sound()
        if not (sound and blamed):
            node.fail(LocalError(REASON))
            return
        for one in blamed if blamed < following else ():
            self._swarm.members.distrust(one, now=node.now(), for_s=LONGEST_ASIDE_S)
        node.distrust("not_finite")
        blame = f"{LONGEST_STREAK} microbatches in a row were not finite, but this node computes correctly"
        node.event("warning", message=f"{blame}: they came from or went through {', '.join(sorted(blamed))}")
