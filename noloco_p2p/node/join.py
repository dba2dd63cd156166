"""Taking a stage: choose one, wait for the others, go on with a run that has begun (ARCHITECTURE.md, "Joining"), and
move to another one while training (ARCHITECTURE.md, "Rebalancing")."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from noloco_p2p.core import agreement, balance, resume
from noloco_p2p.core import members as membership
from noloco_p2p.core.messages import Advert, NodeDescription, PeerId
from noloco_p2p.core.status import Resource
from noloco_p2p.errors import Declined, PeerError
from noloco_p2p.node.membership import Membership, MembershipLoop
from noloco_p2p.node.restore import WeightRestorer
from noloco_p2p.node.state import NodeState
from noloco_p2p.node.waits import Waits
from noloco_p2p.ports import Transport

READINGS_BEFORE = 2
"""Readings of the membership between the announcement of a move and the move: others may announce one as well."""


class Joining:
    """The way of one node from its first announcement to its first step on a stage."""

    def __init__(
        self,
        node: NodeState,
        swarm: Membership,
        waits: Waits,
        transport: Transport,
        membership_loop: MembershipLoop,
        weights: WeightRestorer,
    ) -> None:
        self._node = node
        self._swarm = swarm
        self._waits = waits
        self._transport = transport
        self._membership_loop = membership_loop
        self._weights = weights
        self._reported = ""

    async def choose_stage(self) -> None:
        """Settle on a stage: that of my newest checkpoint, else the one that needs a node most.

        Others choose as well: two readings in a row must show that nobody need move.
        """
        node, manifest, quiet = self._node, self._node.manifest, 0
        await self._weights.find_own()
        if node.chosen_stage is None and self._weights.own:
            node.update(stage=self._weights.own[-1].stage, settled=True)
        self._weights.show_own()
        await self._membership_loop.next_reading()
        while not (node.advert.settled or node.draining):
            stage = balance.choose_stage(node.advert, self._swarm.members.all(), manifest.stages)
            missing = self._missing(manifest.start_replicas, membership.PRESENT)
            if stage != node.chosen_stage:
                node.publish(stage=stage)
                quiet = 0
            elif self._run_has_begun() or not missing:
                quiet += 1
                if quiet == 2:
                    node.update(settled=True)
            else:
                quiet = 0
                self._report_missing(missing)
            await self._membership_loop.next_reading()
        node.event("info", message=f"holds stage {node.advert.stage} of {manifest.stages}")

    async def wait_for_others(self) -> None:
        """Until every stage has enough replicas; weights of a run that has begun are then taken from where they are.

        A run begins with `start_replicas` a stage; one that has begun needs one.
        """
        node, manifest = self._node, self._node.manifest
        self._weights.show_own()
        # A node that was there before the others began starts with them, whatever is announced meanwhile.
        late = any(a.state in membership.TRAINED for a in self._swarm.members.all())
        if not self._weights.own_of_stage():
            await self._weights.open_data(None)
        if late and manifest.outer.update.common:
            # Nobody is to wait for what this node will not have for a while.
            node.update(partner_from_round=agreement.NOT_YET)
        if node.advert.state == "starting":
            node.enter("made", "the weights are made")

        def may_begin() -> bool:
            missing = self._missing(1 if self._run_has_begun() else manifest.start_replicas, membership.IN_ROUNDS)
            if missing and not late:
                self._report_missing(missing)
                return node.draining
            return True

        await self._waits.until(may_begin, "replicas of every stage", Resource.SWARM)
        if node.draining:
            return
        if node.advert.state == "waiting":
            node.enter("begin")
        reason = "everybody is here"
        # Weights that anybody lists are of a run that everybody was stopped in.
        if late or any(a.holds for a in self._swarm.everybody()):
            reason = await self._take_weights()
        if node.draining:
            return
        await self._weights.open_data(None)
        node.update(holds=())
        node.enter("synced", reason)

    async def catch_up(self) -> None:
        """After a pause: weights of a living replica when the stage is ahead by more than one outer interval."""
        node, members = self._node, self._swarm.members
        ahead = max((a.outer_round for a in members.of_stage(node.index, membership.HOLDING)), default=0)
        if ahead - node.advert.outer_round <= resume.NEAR_ROUNDS:
            return
        for source in resume.restore_sources(node.advert, members.all(), [], node.manifest.stages):
            if source.kind == "peer" and await self._weights.restore(source):
                return

    async def take_over(self, ahead: Sequence[PeerId]) -> None:
        """Become one of those that a round has shown to be ahead; where none gives its state, the next round tells."""
        node, counted_from = self._node, self._node.advert.partner_from_round
        node.event("warning", message=f"differs from {len(ahead)} replicas of its stage: takes over their state")
        node.publish(partner_from_round=agreement.NOT_YET)
        for peer in ahead:
            donor = self._swarm.members.get(peer)
            if donor and await self._weights.restore(resume.RestoreSource("peer", "this replica differs", donor)):
                return
        node.publish(partner_from_round=counted_from)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _run_has_begun(self) -> bool:
        return resume.run_has_begun(self._swarm.everybody())

    def _missing(self, replicas: int, states: frozenset[str]) -> dict[int, int]:
        node = self._node
        return membership.lacking(node.advert, self._swarm.members.all(), node.manifest.stages, replicas, states)

    def _report_missing(self, missing: dict[int, int]) -> None:
        self._report("waiting for " + ", ".join(f"{n} more of stage {s}" for s, n in sorted(missing.items())))

    def _report(self, message: str) -> None:
        """Once, until something else is to be reported."""
        if message != self._reported:
            self._reported = message
            self._node.event("info", message=message)

    async def _take_weights(self) -> str:
        """Get the weights of a run that has begun from the best source that gives them; returns which, in words."""
        node, began = self._node, self._node.now()
        while not node.draining:
            others, own = await self._ask_around(), self._weights.own_of_stage()
            for source in resume.restore_sources(
                node.advert, others, own, node.manifest.stages, self._weights.guarded()
            ):
                if node.draining:
                    return ""
                if source.kind == "wait":
                    self._report(f"waiting: {source.reason}")
                elif source.kind == "fresh" and self._may_come_back(others, began):
                    self._report(f"waiting for somebody who has weights of stage {node.index}")
                elif await self._weights.restore(source):
                    return f"goes on at outer round {node.advert.outer_round}, step {node.step}"
            await self._membership_loop.next_reading()
        return ""

    def _may_come_back(self, others: Sequence[Advert], began: float) -> bool:
        """A node that has trained weights of the stage may be out of sight: not answering, or without a live advert.

        Before the first outer round the initial weights are as good as any, unless a replica has trained on.
        """
        node, members, ttl_s = self._node, self._swarm.members, self._node.config.directory.ttl_s
        if members.of_stage(node.index, membership.TRAINED):
            return True
        waited_s = node.now() - began
        held = any(held.stage == node.index for a in others for held in a.holds)
        rounds = max((a.outer_round for a in (*others, *members.all())), default=0)
        return (held and waited_s < 3 * ttl_s) or (rounds > 0 and waited_s < ttl_s)

    async def _ask_around(self) -> list[Advert]:
        """The others' adverts with the outer round that they have now; a node in training that does not answer is
        left out.

        A living replica of my stage is all that is needed: the others are asked only when there is none.
        """
        node, members = self._node, self._swarm.members
        answers: dict[PeerId, NodeDescription | None] = {}

        async def ask(advert: Advert) -> None:
            try:
                with self._waits.waiting("description", advert.peer_id):
                    answers[advert.peer_id] = await self._transport.describe(advert)
            except Declined:
                pass
            except PeerError:
                members.failed(advert.peer_id, now=node.now())
                answers[advert.peer_id] = None

        def answered(advert: Advert) -> Advert | None:
            if advert.peer_id not in answers:
                return advert
            now = answers[advert.peer_id]
            if now is None:
                return None
            return replace(advert, state=now.state, outer_round=now.outer_round, step=now.step)

        at_work = [a for a in members.all() if a.state in membership.TRAINED]
        await asyncio.gather(*(ask(a) for a in at_work if a.stage == node.index))
        if not any(answers.values()):
            await asyncio.gather(*(ask(a) for a in at_work if a.stage != node.index))
        # Asking a node that hangs takes seconds: the membership is read after that.
        found = [answered(advert) for advert in members.all()]
        return [advert for advert in found if advert is not None]


class Rebalancer:
    """Decides after each reading of the membership whether to move. A node that was told its stage stays there."""

    def __init__(self, node: NodeState, swarm: Membership) -> None:
        self._node = node
        self._swarm = swarm
        self._readings = 0

    def consider(self) -> None:
        """Announce, withdraw, or begin a move."""
        node, manifest = self._node, self._node.manifest
        if not node.config.rebalance or node.config.stage is not None:
            return
        if node.advert.state != "training" or node.draining:
            return
        others = self._swarm.members.all()
        rounds_left = (manifest.steps - node.advert.step) / manifest.outer.inner_steps
        target, reason = balance.choose_move(node.advert, others, manifest.stages, rounds_left)
        if target != node.advert.moving_to:
            self._readings = 0
            node.publish(moving_to=target)
            return
        self._readings += 1
        if target is not None and self._readings >= READINGS_BEFORE and balance.may_move(node.advert, others):
            node.event("moved", stage=target, reason=reason)
            node.drain(f"moves to stage {target}: {reason}", next_stage=target)
