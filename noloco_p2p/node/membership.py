"""What a node knows about the others (ARCHITECTURE.md, "Membership")."""

from collections.abc import Sequence
from dataclasses import replace

from noloco_p2p.core import members, routing, schedule
from noloco_p2p.core.messages import Advert, Origin, PeerId
from noloco_p2p.core.status import AnyReplica
from noloco_p2p.node.inquiry import Inquiry
from noloco_p2p.node.state import NodeState

DISTRUST = "gradients"
"""The trouble of a node that has set a peer aside for its gradients, wherever it has moved since."""
DESERTED_S = 2.0
"""A stage that nobody serves is reported after so long: where a whole swarm ends, the last nodes soon end, too."""


class Membership:
    """The swarm as one node knows it. The node's duties read it; only the methods here change it.

    `members` holds the others' adverts, and the peers not to call for a while. A duty may report the outcome of its own
    calls to it (`failed`, `answered`); everything else in it is changed here.
    """

    def __init__(self, node: NodeState) -> None:
        self._node = node
        self.members = members.Members(node.me, node.config.directory.ttl_s)
        self.inquiry = Inquiry(node, self.members)
        self.view = routing.StepView(node.me)
        self.heard_at = float("-inf")
        """When the last microbatch arrived, or at stage 0 the last gradient."""
        self.deserted: dict[int, float] = {}
        """Stages that nobody serves, as far as this node knows, and since when, on the loop's clock."""
        self._reported: set[int] = set()
        """Those of them that have been reported."""
        self.run_ended = False
        """Some node of stage 0 has finished; it may have left since."""
        self.unlisted_called = False
        """Since the last reading a peer has called that is not listed in the stage before."""

    def read(self, adverts: Sequence[Advert]) -> None:
        """Take over a reading of the directory."""
        node = self._node
        joined, departed = self.members.update(adverts, now=node.now())
        own, counts = (node.advert.stage, node.advert.state), self.members.counts()
        counts[own] = counts.get(own, 0) + 1
        node.event("membership", counts=counts, joined=joined, departed=departed)
        if not self.members.distrusted(node.now()):
            node.trouble(DISTRUST, None)
        self.look_for_the_end()
        self.inquiry.ask_first_stage()

    def look_for_the_end(self) -> None:
        """The run has ended if a finished node of stage 0 answers so itself. It has also ended if one is or was listed
        and either my clock agrees or nobody has served some stage for longer than adverts outlive their nodes."""
        node, finished, now = self._node, self.members.of_stage(0, {"finished"}), self._node.now()
        if self.run_ended or not (finished or self.members.left_at_step >= node.manifest.steps):
            return
        empty = [since for stage, since in self.deserted.items() if not self.members.anybody(stage)]
        near = node.furthest_step() >= node.manifest.steps
        stands_still = any(now - since > 3 * node.config.directory.ttl_s for since in empty)
        self.run_ended = near or stands_still or bool(self.inquiry.answering(finished, {"finished"}))
        if not self.run_ended:
            self.inquiry.ask(finished)

    def everybody(self) -> list[Advert]:
        """All adverts, mine included."""
        return [*self.members.all(), self._node.advert]

    def fix_view(self) -> None:
        """Fix the membership that the coming inner step starts with."""
        node = self._node

        def ids(stage: int) -> tuple[PeerId, ...]:
            found = self.members.ids(stage, members.READY)
            return tuple(sorted([*found, node.me]) if stage == node.index else found)

        def speeds(stage: int) -> dict[PeerId, float]:
            found = {advert.peer_id: advert.capacity_per_s for advert in self.members.of_stage(stage, members.READY)}
            return found | ({node.me: node.advert.capacity_per_s} if stage == node.index else {})

        self.view = routing.StepView(node.me, ids(0), ids(node.index), ids(node.index + 1))
        if node.manifest.routing == "weighted":
            shares, mine = routing.odds(speeds(node.index + 1)), routing.odds(speeds(node.index))[node.me]
            self.view = replace(self.view, shares=shares, my_share=mine)

    def heard(self, origin: Origin | None = None) -> None:
        """A microbatch of `origin` came, or at stage 0 a gradient arrived. Its label counts only as far as its
        origin can have got since it announced itself."""
        self.heard_at = self._node.now()
        if origin is None or (advert := self.members.get(origin.peer)) is None:
            return
        age_s, m = self.heard_at - advert.announced_at, self._node.manifest.outer.inner_steps
        limit = schedule.furthest(advert.step, age_s, self._node.advert.steps_per_s, m)
        self.members.heard(replace(origin, step=min(origin.step, int(limit))), now=self.heard_at)

    def refused_unlisted(self) -> None:
        """A microbatch came from a peer that is not listed in the stage before. It may be new there."""
        if not self.unlisted_called:
            self.unlisted_called = True
            self._node.waits.pulse()

    def take_unlisted_call(self) -> bool:
        """A reading begins. Whether such a peer has called since the one before."""
        called, self.unlisted_called = self.unlisted_called, False
        return called

    def first_stage_is_done(self) -> bool:
        """Some node of stage 0 has finished, and all that are listed as at work have fallen silent."""
        at_work = self.inquiry.few(self.members.of_stage(0, members.STAGE_0_AT_WORK)) if self.run_ended else ()
        return self.run_ended and all(self.inquiry.is_gone(advert.peer_id) for advert in at_work)

    def is_left_behind(self) -> bool:
        """The run has ended, and the next stage has no replica left."""
        return self.run_ended and not self.members.anybody(self._node.index + 1)

    # --- calls to the next stage, and stages without anybody --------------------------------------------------------

    def answered(self, peer: PeerId) -> None:
        """A replica of the next stage has answered, no matter what."""
        self.members.answered(peer)
        if self.deserted:
            self.update_deserted()

    def failed(self, peer: PeerId) -> None:
        """A call to a replica of the next stage has failed."""
        self.members.failed(peer, now=self._node.now())
        self.update_deserted()

    def update_deserted(self, *, reading: bool = False) -> None:
        """Keep `deserted` up to date; report what has lasted when it changes, and at each `reading` while it does."""
        node, now = self._node, self._node.now()
        found = self.members.deserted(node.manifest.stages, node.index) if node.advert.state == "training" else []
        changed = found != sorted(self.deserted)
        self.deserted = {stage: self.deserted.get(stage, now) for stage in found}
        lasting = {stage: now - since for stage, since in self.deserted.items() if now - since >= DESERTED_S}
        if lasting.keys() != self._reported or (reading and lasting):
            self._reported = set(lasting)
            node.event("deserted", stages=lasting)
        if changed:
            node.waits.pulse()

    def nobody_there(self) -> bool:
        """A later stage has no replica at all, so nothing that stage 0 sends could come back.

        False once some node of stage 0 has finished: then none is needed.
        """
        if not self.deserted or self.run_ended:
            return False
        return any(not self.members.anybody(stage) for stage in self._later_deserted())

    def cut_short(self) -> bool:
        """This node is to pause, and nothing that stage 0 has sent could come back: it does not wait until it does."""
        return self._node.pausing and self.nobody_there()

    async def until_served(self) -> bool:
        """Wait while a later stage is deserted and has no replica. False: none was deserted, or this node leaves or
        pauses."""
        deserted = self._later_deserted()
        if self.run_ended or not deserted:
            return False
        node = self._node

        def over() -> bool:
            return node.draining or node.pausing or not self.nobody_there()

        await node.waits.until(over, "replica", AnyReplica(min(deserted)))
        return not (node.draining or self.cut_short())

    def _later_deserted(self) -> list[int]:
        return [stage for stage in self.deserted if stage > self._node.index]
