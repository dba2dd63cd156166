"""Taking a stage: choose one, wait for the others, and take the weights of a run that has begun (ARCHITECTURE.md,
"Joining")."""

from collections.abc import Sequence
from math import inf

from noloco_p2p.core import agreement, balance, resume
from noloco_p2p.core import members as membership
from noloco_p2p.core.guardians import WITH_WEIGHTS
from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.core.status import Resource
from noloco_p2p.core.timeouts import TRANSFER_DEADLINE_S
from noloco_p2p.node.directory_loop import RENEWALS_PER_TTL, MembershipLoop
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.restore import WeightRestorer
from noloco_p2p.node.state import NodeState

RETURN_LIFETIMES = 20
"""How long a node waits for trained weights of a stage before it begins afresh in a run that has done rounds, in advert
lifetimes: 10 minutes by default, in which a line or a machine is usually back."""


class Joining:
    """Takes one node from its first announcement to its first step in a stage."""

    def __init__(
        self, node: NodeState, swarm: Membership, membership_loop: MembershipLoop, weights: WeightRestorer
    ) -> None:
        self._node = node
        self._swarm = swarm
        self._membership_loop = membership_loop
        self._weights = weights
        self._reported = ""

    async def choose_stage(self) -> None:
        """Settle on a stage: that of this node's newest checkpoint, otherwise the stage that needs a node most.

        Others choose at the same time, so two readings in a row must show that nobody needs to move.
        """
        node, members, quiet = self._node, self._swarm.members, 0
        await self._weights.find_own()
        if node.chosen_stage is None and self._weights.own:
            node.update(stage=self._weights.own[-1].stage, settled=True)
        self._weights.show_own()
        await self._membership_loop.next_reading()
        while not (node.advert.settled or node.draining):
            stage = balance.choose_stage(node.advert, members.all(), node.manifest.stages)
            missing = self._missing(membership.PRESENT)
            if stage != node.chosen_stage:
                node.publish(stage=stage)
                quiet = 0
            elif any(a.state in membership.TRAINED for a in members.all()) or not missing:
                quiet += 1
                if quiet == 2:
                    node.update(settled=True)
            else:
                quiet = 0
                self._report_missing(missing)
            await self._membership_loop.next_reading()
        if not node.draining:
            node.event("info", message=f"holds stage {node.index} of {node.manifest.stages}")

    async def wait_for_others(self) -> bool:
        """Wait until every stage has enough replicas. Then, if the run has already begun, take its weights.

        A run begins with `start_replicas` nodes per stage; to continue, it needs one (see `_missing`). Returns False if
        the run is complete: this node has done all steps and nobody needs it, or it arrives at the end without weights.
        """
        node, manifest, began = self._node, self._node.manifest, self._node.now()
        if node.advert.state == "syncing":  # it has moved, and may have held this stage before
            self._weights.withhold()
            await self._weights.find_own()
        self._weights.show_own()
        # A node that was here before the run began starts with the others, unless it learns of that much later.
        goes_on = late = any(a.state in membership.TRAINED for a in self._swarm.members.all())
        if late or self._weights.own_of_stage():
            self._weights.withhold()
        if not self._weights.own_of_stage():
            await self._weights.open_data()
        # Nobody should wait for weights that this node will not have for a while, or take its initial weights.
        node.update(partner_from_round=agreement.NOT_YET if late else 0)
        if node.advert.state == "starting":
            node.enter("made", "the weights are made")

        def may_begin() -> bool:
            nonlocal goes_on
            # If adverts list weights, the run had begun before everybody stopped. Those that train again list none.
            goes_on |= any(a.holds or resume.age(a) > resume.NEAR_ROUNDS for a in self._swarm.everybody())
            missing = self._missing(membership.IN_ROUNDS, node.now() - began)
            if late or node.draining or not missing:
                return True
            self._report_missing(missing)
            return False

        longest_s = 3 * node.config.directory.ttl_s if resume.has_last_step(node.advert, manifest.steps) else None
        while not await node.waits.until(may_begin, "replicas of every stage", Resource.SWARM, longest_s):
            if all(resume.has_last_step(a, manifest.steps) for a in self._swarm.members.all()):
                return self._complete(f"this node has done all {manifest.steps} steps, and no other node lacks any")
        if node.advert.state == "waiting":
            node.enter("begin")
        reason: str | None = "every stage has enough nodes"
        if goes_on:
            reason = await self._take_weights()
        if reason is None:
            return self._complete(f"nobody has weights of stage {node.index} any more, and the run has ended")
        if not node.draining:
            await self._weights.open_data()
        if not node.draining:
            node.update(holds=())
            node.enter("synced", reason)
        return True

    async def catch_up(self) -> bool:
        """After a pause: ask the replicas of this stage, and copy a living one whose weights are of a greater age by
        more than one outer round. If none is left or gives its state, take such weights from a guardian.

        Silent replicas are asked again for a while, because the network may be down at first. So are newer ones that
        leave, because they hand their weights over, or that have stood still. Returns whether it copied.
        """
        node, inquiry, began, failed = self._node, self._swarm.inquiry, self._node.now(), set[PeerId]()
        inquiry.forget()
        states = WITH_WEIGHTS | {"syncing"}
        while not node.draining:
            await self._membership_loop.next_reading()
            mates = [a for a in self._swarm.members.of_stage(node.index, states) if a.peer_id not in failed]
            said = [a for b in await inquiry.answering_now(mates, states) if (a := inquiry.with_answer(b))]
            living = [a for a in said if a.state in membership.TRAINED]
            newer = [a for a in said if resume.age(a) - resume.age(node.advert) > resume.NEAR_ROUNDS]
            ahead = [a for a in newer if a in living]
            late = node.now() - began > node.config.directory.ttl_s / RENEWALS_PER_TTL
            if not (living or late) and (newer or len(said) < len(mates)):
                continue
            guards = [] if living else resume.guards_ahead(node.advert, self._swarm.members.all())
            if living or guards:
                # From all stages, because some of this stage may have been cut off as well.
                await self._weights.know_the_clock()
            stages, credible = node.manifest.stages, self._weights.credible_round()
            sources = resume.restore_sources(node.advert, ahead, [], stages, credible=credible) if ahead else []
            for source in sources or guards:
                if await self._weights.restore(source):
                    return True
            if not ahead:
                break
            failed.update(a.peer_id for a in ahead)
        await self._weights.keep_up()
        return False

    def of_earlier_lineage(self) -> tuple[PeerId, ...]:
        """The replicas of this stage that answer that their weights are of an earlier lineage than this node's, and at
        least of the same age."""
        node, members, inquiry, me = self._node, self._swarm.members, self._swarm.inquiry, self._node.advert
        mates = members.of_stage(node.index, membership.TRAINED)
        older = [a for a in mates if a.fresh_round < me.fresh_round and not members.is_aside(a.peer_id, now=node.now())]
        asked = inquiry.few(older)
        inquiry.ask(asked)
        said = filter(None, map(inquiry.with_answer, inquiry.answering(asked, membership.TRAINED)))
        return tuple(a.peer_id for a in said if a.fresh_round < me.fresh_round and resume.age(a) >= resume.age(me))

    async def take_over(self, ahead: Sequence[PeerId]) -> None:
        """Copy one of the replicas that a round has shown to be ahead, or that are of an earlier lineage. If none gives
        its state, try after the next round."""
        node, counted_from, lineage = self._node, self._node.advert.partner_from_round, self._node.advert.fresh_round
        node.event("warning", message=f"differs from {len(ahead)} replicas of its stage: copying their state")
        node.publish(partner_from_round=agreement.NOT_YET)
        for peer in ahead:
            donor = self._swarm.members.get(peer)
            if donor and await self._weights.restore(resume.RestoreSource("peer", "this replica differs", donor)):
                return
            if donor and donor.fresh_round < lineage and not node.draining:
                self._swarm.members.failed(peer, now=node.now())  # its word does not hold up training at every border
        node.publish(partner_from_round=counted_from)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _missing(self, states: frozenset[str], waited_s: float = inf) -> dict[int, int]:
        """How many replicas in one of `states` each stage lacks, after a wait of `waited_s`, for the run to go ahead.

        One per stage is enough to continue, but while nobody trains only after a third of an advert's lifetime: nodes
        that are restarted together announce themselves one by one, and the first may have old weights.
        """
        run, others = self._node.manifest, self._swarm.members.all()
        early = waited_s < self._node.config.directory.ttl_s / RENEWALS_PER_TTL
        await_more = early and not any(a.state in membership.TRAINED for a in others)
        least = 1 if resume.run_has_begun(self._swarm.everybody()) and not await_more else run.start_replicas
        return resume.lacking(self._node.advert, others, run.stages, least, states)

    def _report_missing(self, missing: dict[int, int]) -> None:
        self._report("waiting for " + ", ".join(f"{n} more of stage {s}" for s, n in sorted(missing.items())))

    def _report(self, message: str) -> None:
        """Report a message, unless it is the same as the last one."""
        if message != self._reported:
            self._reported = message
            self._node.event("info", message=message)

    def _complete(self, why: str) -> bool:
        """There is nothing left to do for this node: report `why`, and return False."""
        self._node.update(step=float(self._node.manifest.steps))
        self._node.event("info", message=f"{why}: the run is complete")
        return False

    async def _take_weights(self) -> str | None:
        """Get the weights of a run that has begun, from the best source that has them. Returns a reason for the log, or
        None if the run has ended and only initial weights are left, which would pass for those of its end, or nobody
        has given any for as long as a transfer may take."""
        node, began, over = self._node, self._node.now(), self._swarm.first_stage_is_done
        broke_at: float | None = None
        self._weights.withhold()
        while not node.draining:
            if self._swarm.run_ended and node.now() - began > TRANSFER_DEADLINE_S:
                return None
            if not await self._weights.know_the_clock() and node.now() - began < 3 * node.config.directory.ttl_s:
                self._report("waiting for an answer from a node in training")
                await self._membership_loop.next_reading()
                continue
            # Only now, because rounds go on while a silent node is waited for.
            others, own = await self._ask_around(), self._weights.own_of_stage()
            self._swarm.note_rounds(others)
            if late := node.now() - began > TRANSFER_DEADLINE_S:  # nobody has resumed from the newer ones listed
                others = [a for a in others if a.stage != node.index or a.state in membership.TRAINED]
            guarded, stages, credible = self._weights.guarded(), node.manifest.stages, self._weights.credible_round()
            sources = resume.restore_sources(node.advert, others, own, stages, guarded, credible=credible, late=late)
            for source in sources:
                if node.draining:
                    break
                fresh = source.kind == "fresh"
                if source.kind == "wait":
                    self._report(f"waiting: {source.reason}")
                elif fresh and not over() and (await self._is_alone() or self._may_come_back(others, began, broke_at)):
                    self._report(f"waiting for a node with weights of stage {node.index}")
                elif source.kind != "peer" and await self._answers_after_all(others):  # Others may just have begun.
                    break
                elif fresh and (over() or self._weights.at_the_end()):
                    return None
                elif await self._weights.restore(source):
                    return f"continuing at outer round {node.advert.outer_round}, step {node.step}"
                elif source.kind == "peer":
                    broke_at = node.now()
                elif source.kind == "guardian" and broke_at is None:  # strangers may claim to be one
                    broke_at = began
            await self._membership_loop.next_reading()
        if (guarded := self._weights.guarded()) and not self._swarm.members.of_stage(node.index, membership.TRAINED):
            # It moved here, and nobody else may have these weights. It can hand them over only as its own.
            await self._weights.restore(resume.RestoreSource("guardian", "nobody else has them", holding=guarded))
        return ""

    def _may_come_back(self, others: Sequence[Advert], began: float, broke_at: float | None) -> bool:
        """Whether a node with trained weights of this stage may still turn up, although it does not answer now or has
        no live advert.

        For a replica that answers, or whose transfer broke off, and for a guardian that still lists the weights and did
        not give them, this node waits as long as a transfer may take. In a run that has done rounds it waits
        RETURN_LIFETIMES. Before the first round the initial weights are as good as any, unless a replica has trained
        on or a guardian has its weights: it waits for one that is listed no longer than an advert can outlive it.
        """
        node, members, ttl_s = self._node, self._swarm.members, self._node.config.directory.ttl_s
        mates, known = members.of_stage(node.index, membership.TRAINED), [*others, *members.all()]
        waited_s = node.now() - (began if broke_at is None else broke_at)
        held, listed = (any(h.stage == node.index for a in some for h in a.holds) for some in (others, known))
        broke = broke_at is not None and (held or broke_at > began)  # a guardian that restarted lists them no longer
        if broke or self._swarm.inquiry.answering(mates, membership.TRAINED):
            return waited_s < TRANSFER_DEADLINE_S
        lifetimes = RETURN_LIFETIMES if self._swarm.rounds_done else 3 if listed or mates else 0
        return waited_s < lifetimes * ttl_s

    async def _is_alone(self) -> bool:
        """Whether no node of any other stage answers. Fresh weights would be useless then, and wrong once others do."""
        node, swarm = self._node, self._swarm
        others = [a for a in swarm.members.all() if a.stage != node.index and a.state in membership.PRESENT]
        needed = node.manifest.stages > 1 and not swarm.run_ended
        return needed and not await swarm.inquiry.answering_now(others, membership.PRESENT)

    async def _answers_after_all(self, others: Sequence[Advert]) -> bool:
        """Whether a replica of this stage answers now, if none is in `others`: the line may be back."""
        if any(map(self._is_living_mate, others)):
            return False
        mates = self._swarm.members.of_stage(self._node.index, membership.TRAINED)
        return bool(await self._swarm.inquiry.answering_now(mates, membership.TRAINED))

    def _is_living_mate(self, advert: Advert) -> bool:
        return advert.stage == self._node.index and advert.state in membership.TRAINED

    async def _ask_around(self) -> list[Advert]:
        """The others' adverts, updated by asking the peers that decide where the weights come from, eight at a time,
        until a living replica of this stage answers. A peer that does not answer is left out, so that others decide.
        Replicas that have failed to give their weights are asked after those that have failed less often.
        """
        node, inquiry, failures = self._node, self._swarm.inquiry, self._weights.failures
        answered: dict[PeerId, Advert | None] = {}
        while True:
            listed = [a for a in self._swarm.members.all() if a.peer_id not in answered]
            known = [a for a in answered.values() if a is not None]
            fewest = min((failures[a.peer_id] for a in listed if self._is_living_mate(a)), default=0)
            likely = [a for a in listed if failures[a.peer_id] <= fewest or not self._is_living_mate(a)]
            living = any(map(self._is_living_mate, known))
            asked = inquiry.few([] if living else resume.deciding(node.advert, known, likely, node.manifest.stages))
            if not asked or node.draining:
                return sorted(known + [a for a in listed if not self._is_living_mate(a)], key=lambda a: a.peer_id)
            await inquiry.until_asked(asked, anew=True)
            answered |= {a.peer_id: inquiry.with_answer(a) for a in asked}
