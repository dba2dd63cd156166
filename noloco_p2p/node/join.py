"""Arriving: choosing a stage, waiting for the others, taking up a run that has begun (design.md §4, Start, and §6)."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from noloco_p2p.core import balance, resume
from noloco_p2p.core import members as membership
from noloco_p2p.core.messages import Advert, NodeDescription, PeerId
from noloco_p2p.core.status import Resource
from noloco_p2p.errors import Declined, PeerError
from noloco_p2p.node.guardian import Guardian
from noloco_p2p.node.membership import MembershipLoop
from noloco_p2p.node.outer_round import OuterRounds
from noloco_p2p.node.restore import WeightRestorer
from noloco_p2p.node.state import NodeState


class Joining:
    """The way of one node from its first announcement to its first step on a stage."""

    def __init__(self, node: NodeState, watch: MembershipLoop, rounds: OuterRounds, guardian: Guardian) -> None:
        self._node = node
        self._watch = watch
        self._rounds = rounds
        self._weights = WeightRestorer(node, rounds, guardian)
        self._said = ""

    async def choose_stage(self) -> None:
        """Settle on a stage: that of my newest checkpoint, else the one that needs a node most.

        Others choose as well: two readings in a row must show that nobody need move.
        """
        node, manifest, quiet = self._node, self._node.manifest, 0
        with node.waiting("own checkpoints", Resource.DISK):
            self._weights.own = await node.world.checkpoints.held()
        if node.index < 0 and self._weights.own:
            node.update(stage=self._weights.own[-1].stage, settled=True)
        self._weights.show_own()
        await self._watch.next_reading()
        while not (node.advert.settled or node.draining):
            others = node.members.all()
            stage = balance.stage_to_take(node.advert, others, manifest.stages)
            missing = membership.lacking(
                node.advert, others, manifest.stages, manifest.start_replicas, membership.PRESENT
            )
            if stage != node.index:
                node.update(stage=stage)
                node.pulse()
                quiet = 0
            elif self._run_has_begun() or not missing:
                quiet += 1
                if quiet == 2:
                    node.update(settled=True)
            else:
                quiet = 0
                self._say_missing(missing)
            await self._watch.next_reading()
        node.event("info", message=f"holds stage {node.index} of {manifest.stages}")

    async def wait_for_others(self) -> None:
        """Until every stage has enough replicas; weights of a run that has begun are then taken from where they are.

        A run begins with `start_replicas` a stage; one that has begun needs one.
        """
        node, manifest = self._node, self._node.manifest
        self._weights.show_own()
        # Who was there before the others began starts with them, whatever is announced meanwhile.
        late = any(a.state in membership.TRAINED for a in node.members.all())
        if not any(held.stage == node.index for held in self._weights.own):
            await self._weights.open_data(None)
        if node.advert.state == "starting":
            node.enter("made", "the weights are made")

        def may_begin() -> bool:
            needed = 1 if self._run_has_begun() else manifest.start_replicas
            missing = membership.lacking(node.advert, node.members.all(), manifest.stages, needed, membership.IN_ROUNDS)
            if missing and not late:
                self._say_missing(missing)
                return node.draining
            return True

        await node.until(may_begin, "replicas of every stage", Resource.SWARM)
        if node.draining:
            return
        if node.advert.state == "waiting":
            node.enter("begin")
        told = "everybody is here"
        if late or self._run_had_begun():
            told = await self._take_up()
        if node.draining:
            return
        await self._weights.open_data(None)
        node.update(holds=())
        node.enter("synced", told)

    async def catch_up(self) -> None:
        """After a pause: weights of a living replica when the stage is ahead by more than one outer interval."""
        node = self._node
        mates = node.members.of_stage(node.index, membership.HOLDING)
        ahead = max((a.outer_round for a in mates), default=0)
        if ahead - self._rounds.done <= resume.NEAR_ROUNDS:
            return
        for source in resume.sources(node.advert, node.members.all(), [], node.manifest.stages):
            if source.kind == "peer" and await self._weights.tried(source):
                return

    # --- inside -----------------------------------------------------------------------------------------------------

    def _run_has_begun(self) -> bool:
        return resume.run_has_begun([*self._node.members.all(), self._node.advert])

    def _run_had_begun(self) -> bool:
        """Before everybody was stopped: somebody has weights to go on from."""
        return any(a.holds for a in (*self._node.members.all(), self._node.advert))

    def _say_missing(self, missing: dict[int, int]) -> None:
        self._say("waiting for " + ", ".join(f"{n} more of stage {s}" for s, n in sorted(missing.items())))

    def _say(self, what: str) -> None:
        if what != self._said:
            self._said = what
            self._node.event("info", message=what)

    async def _take_up(self) -> str:
        """Get the weights of a run that has begun from the best source that gives them; says which."""
        node, began = self._node, self._node.now()
        while not node.draining:
            others = await self._asked()
            own = [held for held in self._weights.own if held.stage == node.index]
            for source in resume.sources(node.advert, others, own, node.manifest.stages, self._weights.guarded()):
                if node.draining:
                    return ""
                if source.kind == "wait":
                    self._say(f"waiting: {source.reason}")
                elif source.kind == "fresh" and self._may_come_back(others, began):
                    self._say(f"waiting for somebody who has weights of stage {node.index}")
                elif await self._weights.tried(source):
                    return f"goes on at outer round {self._rounds.done}, step {node.step}"
            await self._watch.next_reading()
        return ""

    def _may_come_back(self, others: Sequence[Advert], began: float) -> bool:
        """Who has trained weights of the stage does not answer now, or may be out of sight for as long as adverts live.

        Before the first outer round the initial weights are as good as any, unless a replica has trained on.
        """
        node, ttl_s = self._node, self._node.config.directory.ttl_s
        if node.members.of_stage(node.index, membership.TRAINED):
            return True
        waited_s = node.now() - began
        held = any(held.stage == node.index for a in others for held in a.holds)
        rounds = max((a.outer_round for a in (*others, *node.members.all())), default=0)
        return (held and waited_s < 3 * ttl_s) or (rounds > 0 and waited_s < ttl_s)

    async def _asked(self) -> list[Advert]:
        """Everybody with the outer round of now; who trains and does not answer is left out.

        A living replica of my stage is all that is needed: the others are asked only when there is none.
        """
        node = self._node
        told: dict[PeerId, NodeDescription | None] = {}

        async def ask(advert: Advert) -> None:
            try:
                with node.waiting("description", advert.peer_id):
                    told[advert.peer_id] = await node.world.transport.describe(advert)
            except Declined:
                pass
            except PeerError:
                node.members.failed(advert.peer_id, now=node.now())
                told[advert.peer_id] = None

        def answered(advert: Advert) -> Advert | None:
            if advert.peer_id not in told:
                return advert
            now = told[advert.peer_id]
            if now is None:
                return None
            return replace(advert, state=now.state, outer_round=now.outer_round, step=now.step)

        at_work = [a for a in node.members.all() if a.state in membership.TRAINED]
        await asyncio.gather(*(ask(a) for a in at_work if a.stage == node.index))
        if not any(told.values()):
            await asyncio.gather(*(ask(a) for a in at_work if a.stage != node.index))
        # Asking who hangs takes seconds: the membership is that of now.
        found = [answered(advert) for advert in node.members.all()]
        return [advert for advert in found if advert is not None]
