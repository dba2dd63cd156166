"""What a node knows about the other nodes of the swarm (ARCHITECTURE.md, "Membership")."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from noloco_p2p.core import members, resume, routing, schedule
from noloco_p2p.core.messages import Advert, Origin, PeerId
from noloco_p2p.core.status import AnyReplica
from noloco_p2p.core.timeouts import TRANSFER_DEADLINE_S
from noloco_p2p.core.trials import Trials
from noloco_p2p.node.inquiry import Inquiry
from noloco_p2p.node.state import NodeState

DISTRUST = "gradients"
"""Name of the trouble that a node reports while a peer is set aside for its gradients; it outlives a move."""
DESERTED_S = 2.0
"""Seconds after which a stage that nobody serves is reported: when a whole swarm ends, its last nodes usually end
sooner."""


class Membership:
    """The swarm as one node knows it. The node's duties read it; only the methods here change it.

    `members` holds the others' adverts, and which peers are set aside. A duty may report the outcome of its own calls
    there (`failed`, `answered`); everything else in it is changed here.
    """

    def __init__(self, node: NodeState) -> None:
        self._node = node
        self.members = members.Members(node.me, node.config.directory.ttl_s)
        self.inquiry = Inquiry(node, self.members)
        self.trials = Trials(node.config.limits.patience_floor_s, node.now, self.members.get)
        self.view = routing.StepView(node.me)
        self.heard_at = -inf
        """When the last microbatch arrived, or at stage 0 the last gradient."""
        self.deserted: dict[int, float] = {}
        """Stages that nobody serves, as far as this node knows → since when, on the loop's clock."""
        self._reported: set[int] = set()
        """The deserted stages that have been reported."""
        self.rounds_done = False
        """Whether any node has shown weights of a later round than 0; all that have may be gone."""
        self.run_ended = False
        """Whether some node of stage 0 has finished; it may have left since."""
        self._ended_at = inf
        """When this node learnt that."""
        self.unlisted_called = False
        """Whether a peer that is not listed in the stage before has called since the last reading."""
        self.readings = 0
        """How often the directory has been read."""

    def read(self, adverts: Sequence[Advert]) -> None:
        """Take over the result of a reading of the directory."""
        node = self._node
        self.readings += 1
        begun = any(advert.state in members.TRAINED for advert in (node.advert, *adverts))
        joined, departed = self.members.update(adverts, now=node.now(), doubts=begun)
        own, counts = (node.advert.stage, node.advert.state), self.members.counts()
        counts[own] = counts.get(own, 0) + 1
        node.event("membership", counts=counts, joined=joined, departed=departed)
        if not self.members.distrusted(node.now()):
            node.trouble(DISTRUST, None)
        self.note_rounds(adverts)
        self.look_for_the_end()
        self.inquiry.ask_first_stage()
        self.inquiry.meet()

    def note_rounds(self, adverts: Sequence[Advert]) -> None:
        """Note whether these nodes show that the run has done rounds. Checkpoints of this node's own stage do not."""
        mine = self._node.chosen_stage
        found = (a for a in adverts if a.state in members.TRAINED or mine not in (a.stage, None))
        self.rounds_done = self.rounds_done or any(held.round > 0 for a in found for held in resume.claimed(a))

    def look_for_the_end(self) -> None:
        """Find out whether the run has ended. It has if a node of stage 0 answers that it has finished. It also has if
        such a node is listed, or one of any stage left at the last step, and either this node's clock agrees, or some
        stage has had no replica for longer than adverts can outlive their nodes."""
        node, finished, now = self._node, self.members.of_stage(0, {"finished"}), self._node.now()
        if self.run_ended or not (finished or self.members.left_at_step >= node.manifest.steps):
            return
        empty = [since for stage, since in self.deserted.items() if not self.members.anybody(stage)]
        near = node.furthest_step() >= node.manifest.steps
        stands_still = any(now - since > 3 * node.config.directory.ttl_s for since in empty)
        self.run_ended = near or stands_still or bool(self.inquiry.answering(finished, {"finished"}))
        if self.run_ended:
            self._ended_at = now
        else:
            self.inquiry.ask(finished)

    def everybody(self) -> list[Advert]:
        """All adverts, including this node's own."""
        return [*self.members.all(), self._node.advert]

    def partners(self, round: int) -> list[Advert]:
        """The other replicas of this stage from which this one may pull in an outer round: after their first complete
        interval, with weights of the same lineage, and not doubted."""
        me, doubted = self._node.advert, self.members.doubted()
        mates = [a for a in self.members.of_stage(me.stage, members.IN_ROUNDS) if a.peer_id not in doubted]
        return [a for a in mates if a.partner_from_round <= round and a.fresh_round == me.fresh_round]

    def fix_view(self) -> None:
        """Fix the membership on which the coming inner step is based, without peers that are doubted. Under `balanced`
        all nodes must see the same replicas: there one that only this node cannot reach counts, unless more than a
        third of its stage are doubted. If all of the next stage are, one of them must serve."""
        node, doubted = self._node, self.members.doubted()

        def speeds(stage: int) -> dict[PeerId, float]:
            listed = [*self.members.of_stage(stage, members.READY), *([node.advert] if stage == node.index else [])]
            found = [advert for advert in listed if advert.peer_id not in doubted]
            few_doubted = node.manifest.routing == "balanced" and 3 * len(found) >= 2 * len(listed)
            take_all = few_doubted or (stage == node.index + 1 and not found)
            return {advert.peer_id: advert.capacity_per_s for advert in (listed if take_all else found)}

        origins, mates, following = map(speeds, (0, node.index, node.index + 1))
        self.view = routing.StepView(node.me, tuple(sorted(origins)), tuple(sorted(mates)), tuple(sorted(following)))
        if node.manifest.routing == "weighted":
            shares, mine = routing.odds(following), routing.odds(mates)[node.me]
            self.view = replace(self.view, shares=shares, my_share=mine)

    def heard(self, origin: Origin | None = None) -> None:
        """Note that a microbatch of `origin` has arrived, or at stage 0 a gradient (None). The step in its label counts
        only as far as the origin can have got since its advert."""
        self.heard_at = self._node.now()
        if origin is None or (advert := self.members.get(origin.peer)) is None:
            return
        age_s, m = self.heard_at - advert.announced_at, self._node.manifest.outer.inner_steps
        limit = schedule.furthest(advert.step, age_s, self._node.advert.steps_per_s, m)
        self.members.heard(replace(origin, step=min(origin.step, int(limit))), now=self.heard_at)

    def refused_unlisted(self) -> None:
        """Note that a microbatch came from a peer that is not listed in the stage before. It may be new there."""
        if not self.unlisted_called:
            self.unlisted_called = True
            self._node.waits.pulse()

    def take_unlisted_call(self) -> bool:
        """Whether an unlisted peer has called since the previous reading. Resets this for the reading that begins."""
        called, self.unlisted_called = self.unlisted_called, False
        return called

    def first_stage_is_done(self) -> bool:
        """Whether some node of stage 0 has finished, and all those listed as still at work have fallen silent, or have
        sent no microbatch for as long as one may take, or for as long as the transfer of their weights may.

        To a node of stage 0, the others there are at work only if they answer that they train: two that still fetch
        their weights would wait for each other.
        """
        if not self.run_ended:
            return False
        if self._node.index == 0:
            return not self.inquiry.answering(self.members.of_stage(0), members.TRAINING)
        longest_s = self._node.config.limits.microbatch_deadline_s

        def is_idle(advert: Advert) -> bool:
            since = max(self._ended_at, self.members.heard_at(advert.peer_id))
            return self._node.now() - since > (TRANSFER_DEADLINE_S if advert.state == "syncing" else longest_s)

        at_work = [a for a in self.members.of_stage(0, members.STAGE_0_AT_WORK) if not is_idle(a)]
        return all(self.inquiry.is_gone(advert.peer_id) for advert in self.inquiry.few(at_work))

    def is_left_behind(self) -> bool:
        """Whether the run has ended, and the next stage has no replica left, or another later one for a while."""
        return self.run_ended and (self.nobody_there() or not self.members.anybody(self._node.index + 1))

    # --- calls to the next stage, and deserted stages ---------------------------------------------------------------

    def answered(self, peer: PeerId) -> None:
        """Note that a replica of the next stage has answered, no matter what."""
        self.members.answered(peer)
        if self.deserted:
            self.update_deserted()

    def failed(self, peer: PeerId) -> None:
        """Note that a call to a replica of the next stage has failed, and set that replica aside."""
        self.members.failed(peer, now=self._node.now())
        self.update_deserted()

    def update_deserted(self, *, reading: bool = False) -> None:
        """Update `deserted`. Report the stages that have been deserted for DESERTED_S when they change, and again at
        each `reading` while there are any."""
        node, now = self._node, self._node.now()
        looks = node.advert.state in ("syncing", "training")  # Who syncs may have only this to tell it of the end.
        found = self.members.deserted(node.manifest.stages, node.index) if looks else []
        changed = found != sorted(self.deserted)
        self.deserted = {stage: self.deserted.get(stage, now) for stage in found}
        lasting = {stage: now - since for stage, since in self.deserted.items() if now - since >= DESERTED_S}
        if lasting.keys() != self._reported or (reading and lasting):
            self._reported = set(lasting)
            node.event("deserted", stages=lasting)
        if changed:
            node.waits.pulse()

    def nobody_there(self) -> bool:
        """Whether a later stage has no replica at all, so that nothing this node sends can come back.

        After the end of the run this takes `linger_s`, as it does if the next stage has nobody to ask.
        """
        since = [self.deserted[stage] for stage in self._later_deserted() if not self.members.anybody(stage)]
        if self.run_ended:
            return any(self._node.now() - at > self._node.config.limits.linger_s for at in since)
        return bool(since)

    def cut_short(self) -> bool:
        """Whether this node is to pause while nothing that it has sent can come back: then it does not wait for it."""
        return self._node.pausing and self.nobody_there()

    async def until_served(self) -> bool:
        """Wait while a later stage has no replica. False if none was deserted, or this node leaves or pauses."""
        node, deserted = self._node, self._later_deserted()
        if self.run_ended or not deserted:
            return False

        def over() -> bool:
            return node.draining or node.pausing or self.run_ended or not self.nobody_there()

        await node.waits.until(over, "replica", AnyReplica(min(deserted)))
        return not (node.draining or self.cut_short())

    def _later_deserted(self) -> list[int]:
        return [stage for stage in self.deserted if stage > self._node.index]
