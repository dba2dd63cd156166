"""Compares gradients of the same data from two routes (ARCHITECTURE.md, "The same data twice")."""

from typing import NamedTuple

from noloco_p2p.core.gradient_pairs import OTHERS, GradientPairs, Route
from noloco_p2p.core.messages import MAX_AVOIDED, Batch, Gradient, MicrobatchId, PeerId
from noloco_p2p.core.status import Resource, for_microbatch
from noloco_p2p.node.membership import DISTRUST, Membership
from noloco_p2p.node.pipeline.task import StageResult
from noloco_p2p.node.state import NodeState


class _TwinReply(NamedTuple):
    microbatch: MicrobatchId
    gradient: Gradient
    route: Route


class Twins:
    """Two successive microbatches with the same data, and the replies to them so far."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.replies: list[_TwinReply] = []


class GradientAudit:
    """The gradient audit of one stage-0 node; `secret` is `World.secret`."""

    def __init__(self, node: NodeState, swarm: Membership, secret: int | None) -> None:
        self._node = node
        self._swarm = swarm
        self._pairs = GradientPairs(secret)
        self._dissenters = set[PeerId]()
        """The replicas that are set aside because their gradients differ."""

    def twins(self, microbatch: MicrobatchId, batch: Batch) -> Twins | None:
        """The pair that this microbatch opens, if the next one is to have the same data; otherwise None.

        Only if routes can differ, and the next stage has enough replicas to tell which of them is wrong.
        """
        node, swarm = self._node, self._swarm
        may = len(swarm.view.following) > OTHERS and node.manifest.routing != "fixed"
        return Twins(batch) if may and self._pairs.repeats(microbatch) else None

    def avoided(self) -> tuple[PeerId, ...]:
        """Distrusted replicas of the stages beyond the next one. Other nodes choose among those, and leave these out
        for this node's microbatches."""
        distrusted, mine = self._swarm.members.distrusted(self._node.now()), self._swarm.view.following
        return tuple([peer for peer in distrusted if peer not in mine][-MAX_AVOIDED:])

    async def ended(self, twins: Twins, microbatch: MicrobatchId, result: StageResult) -> None:
        """Note that one of the two is back. After the second, their gradients are compared if the routes differ."""
        if result.finite and result.next_hop is not None and result.reply is not None:
            route = result.next_hop, *result.reply.served[1 : self._node.manifest.stages - 1]
            twins.replies.append(_TwinReply(microbatch, result.reply, route))
        if len(twins.replies) == 2 and twins.replies[0].route != twins.replies[1].route:
            await self._compare(*twins.replies)

    async def _compare(self, one: _TwinReply, other: _TwinReply) -> None:
        node = self._node
        with node.waits.waiting("compared gradients", Resource.DEVICE, why=for_microbatch(other.microbatch)):
            likeness = await node.stage.compare(one.gradient, other.gradient)
        outlier, dissenter = self._pairs.observe(one.route, other.route, likeness.apart)
        for each, norm in zip((one, other), likeness.norms, strict=True):
            found = {"norm": norm, "cosine": likeness.cosine, "outlier": outlier}
            peer, *rest = each.route
            node.event("gradient_pair", microbatch=each.microbatch.counter, peer=peer, route=" ".join(rest), **found)
        if dissenter is None:
            return
        self._swarm.members.distrust(dissenter, now=node.now())
        node.distrust("dissenter", peer=dissenter)
        self._dissenters = {*self._dissenters, dissenter} & self._swarm.members.distrusted(node.now()).keys()
        named = ", ".join(sorted(self._dissenters))
        node.trouble(DISTRUST, f"gradients of {named} differ from those of all others for the same data: set aside")
