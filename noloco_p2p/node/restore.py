"""Loads the weights that a node starts with: a peer's, a guardian's, its own checkpoint's, or initial ones
(ARCHITECTURE.md, "Recovery")."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from statistics import median
from typing import TypeVar

from noloco_p2p.core import members as membership
from noloco_p2p.core import schedule
from noloco_p2p.core.messages import Advert, Checkpoint, Holding, PeerId
from noloco_p2p.core.resume import BOLD_STEPS, RestoreSource
from noloco_p2p.core.snapshots import SnapshotRequest
from noloco_p2p.core.status import Resource, Task
from noloco_p2p.core.timeouts import TRANSFER_DEADLINE_S
from noloco_p2p.errors import Declined, LocalError, PeerError
from noloco_p2p.node.guardian import Guardian
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.outer_round import OuterRounds
from noloco_p2p.node.state import NodeState
from noloco_p2p.ports import World

R = TypeVar("R")
HOLDINGS_SHOWN = 4
"""How many checkpoints an advert lists, the newest ones."""


class WeightRestorer:
    """Loads weights, and at stage 0 the position in the data, from one source at a time."""

    def __init__(
        self, node: NodeState, swarm: Membership, world: World, rounds: OuterRounds, guardian: Guardian
    ) -> None:
        self._node = node
        self._swarm = swarm
        self._world = world
        self._rounds = rounds
        self._guardian = guardian
        self._starts = node.advert.state == "starting"
        """Whether this node has just been started: it does not move."""
        self.own: list[Holding] = []
        """The checkpoints that this node has, of any stage, oldest first."""
        self.failures: Counter[PeerId] = Counter()
        """How often each peer has not given its weights when this node asked for them."""

    async def find_own(self) -> None:
        """Find this node's checkpoints. Raises LocalError at the start; a node that moves continues without them."""
        with self._unless_moving(), self._node.waits.waiting("own checkpoints", Resource.DISK):
            self.own = await self._world.checkpoints.held()

    def own_of_stage(self) -> list[Holding]:
        """The checkpoints that this node has of its stage, oldest first."""
        return [held for held in self.own if held.stage == self._node.chosen_stage]

    def show_own(self) -> None:
        """List this node's checkpoints in the advert, until it trains."""
        self._node.update(holds=tuple(self.own_of_stage()[-HOLDINGS_SHOWN:]))

    def withhold(self) -> None:
        """Stop offering this node's initial weights (round 0): the run has begun, and they are not its weights."""
        self._rounds.frozen.clear()

    def guarded(self) -> Holding | None:
        """What this node, as a guardian, holds of the stage that it joins."""
        return self._guardian.holding(self._node.index)

    async def restore(self, source: RestoreSource) -> bool:
        """Take the weights of the source. Returns False if it cannot provide them."""
        node, peer = self._node, source.peer.peer_id if source.peer else None
        try:
            match source.kind:
                case "peer":
                    assert source.peer is not None
                    await self._from_peer(source.peer)
                case "shard":
                    assert source.holding is not None
                    if not await self._from_shard(source.holding):
                        return False
                case "guardian":
                    await self._from_guardian(source.peer)
                case _:
                    await self._fresh()
        except PeerError as error:
            node.event("warning", message=f"could not start from {source.kind}: {error}")
            if peer:
                self.failures[peer] += 1
            return False
        self.failures.clear()
        node.event("resumed", source=source.kind, round=node.advert.outer_round, step=node.advert.step, peer=peer)
        return True

    async def know_the_clock(self) -> bool:
        """Whether a training node has answered, or none is listed. Otherwise this node may not reach the others."""
        inquiry, listed = self._swarm.inquiry, [a for a in self._swarm.members.all() if a.state in membership.TRAINED]
        asked = inquiry.few([a for a in listed if not inquiry.is_silent(a.peer_id)] or listed)
        await inquiry.until_asked(asked, anew=False)
        return not listed or bool(inquiry.answering(asked, membership.TRAINED))

    def credible_round(self) -> int:
        """The outer round that a replica may claim without being taken for bold (`core/resume`), whatever the others of
        its stage claim: these may have stood still, or lie."""
        return (int(self._clock_of_others()) + BOLD_STEPS) // self._node.manifest.outer.inner_steps

    def at_the_end(self) -> bool:
        """Whether the clock of the others has reached the last step: weights taken now would not be trained on."""
        return self._clock_of_others() >= self._node.manifest.steps

    async def keep_up(self) -> None:
        """Take over the others' clock, as after a copy, if this one is more than a step behind: under `balanced`, the
        other replicas of stage 0 would wait for each of these steps."""
        node, inquiry = self._node, self._swarm.inquiry
        mates = self._swarm.members.of_stage(node.index, membership.TRAINED)
        if mates and not inquiry.answering(mates, membership.TRAINED):
            await self.know_the_clock()  # what went before, such as a transfer that failed, may have taken minutes
        clock = self._clock_of_others()
        if clock > node.advert.step + 1.0 and inquiry.answering(mates, membership.TRAINED):
            node.update(step=self._latest_step(node.advert.step, clock))

    async def open_data(self, checkpoint: Checkpoint | None = None) -> None:
        """At stage 0: open the data at the position in the checkpoint. Without one, open them where this node left the
        stage, otherwise at that in its newest readable checkpoint that has one, otherwise at the beginning. Data that
        are open stay open."""
        if self._node.index != 0 or self._node.batches is not None:
            return
        own, cursor = self.own_of_stage(), (None if checkpoint is None else checkpoint.cursor) or self._node.cursor
        while cursor is None and own:
            cursor = None if (older := await self._load(own.pop())) is None else older.cursor
        with self._node.waits.waiting("opened data", Resource.DATA):
            self._node.read_from(await self._world.make_batches(cursor))

    # --- the sources ------------------------------------------------------------------------------------------------

    async def _from_peer(self, donor: Advert) -> None:
        """Copy the full state of a living replica. Partners may pull from here after the first complete outer interval.

        The clock is set to the others' clock: they trained on during the copy, and under `balanced` they would wait for
        every step that this node is behind. A clock never goes back.
        """
        node = self._node
        await self.open_data()  # before the transfer, because the others train on meanwhile
        with node.waits.waiting("state", donor.peer_id, TRANSFER_DEADLINE_S):
            transfer = self._world.transport.fetch_state(donor, TRANSFER_DEADLINE_S, node.stage.state.replica)
            state = await self._unless_leaving(transfer)
        if state.stage != node.index:
            raise Declined(f"{donor.peer_id} holds stage {state.stage}")
        if state.fresh_round != donor.fresh_round:
            raise Declined(f"the state of {donor.peer_id} began at round {state.fresh_round}, not {donor.fresh_round}")
        await self._check_possible(state.round, state.step, donor.peer_id)
        with node.waits.computing("restored state"):
            await node.stage.restore(state)  # nothing else is awaited until the labels follow: others may copy it now
        step = self._latest_step(state.step, self._clock_of_others())
        from_round = max(state.round, int(step) // node.manifest.outer.inner_steps) + 2
        await self._go_on_at(state.round, step, state.inner_steps, state.fresh_round, from_round)

    async def _unless_leaving(self, transfer: Coroutine[object, object, R]) -> R:
        """The result of a transfer. Raises Declined, and ends it, if this node is told to leave or move meanwhile."""
        node, fetching = self._node, asyncio.create_task(transfer)
        fetching.add_done_callback(lambda _: node.waits.pulse())
        try:
            await node.waits.until(lambda: fetching.done() or node.draining, "transfer", Resource.OWNER, idle=True)
            if not fetching.done():
                raise Declined("this node is to leave its stage")
            return fetching.result()
        finally:
            fetching.cancel()
            await asyncio.wait([fetching])

    async def _from_shard(self, held: Holding) -> bool:
        """Load this node's own checkpoint. Returns False if it turns out to be damaged."""
        node, mine = self._node, await self._load(held)
        if mine is None:
            self.own.remove(held)
            self.show_own()
            return False
        with node.waits.computing("restored state"):
            await node.stage.restore(mine.state)
        node.rng.setstate(mine.random_state)
        state, step = mine.state, self._latest_step(mine.state.step)
        await self._go_on_at(state.round, step, state.inner_steps, state.fresh_round)
        await self.open_data(mine)
        await self.keep_up()
        return True

    async def _from_guardian(self, guardian: Advert | None) -> None:
        """Take a lost stage's weights from a guardian (None: this node is one). The optimizer starts from zero.

        If the run has ended, they are not trained on: they would pass for those of the last step.
        """
        node = self._node
        theirs = self._guardian.snapshot_of(node.index)
        if guardian is not None:
            expected = node.stage.state.weights[node.index]
            request = SnapshotRequest(node.index, weights=expected.dtype)
            with node.waits.waiting("weights", guardian.peer_id, TRANSFER_DEADLINE_S, Task.LOST_STAGE):
                theirs = await self._unless_leaving(
                    self._world.transport.fetch_snapshot(guardian, request, TRANSFER_DEADLINE_S, (expected,))
                )
            await self._check_possible(theirs.round, theirs.step, guardian.peer_id)
        assert theirs is not None, "a source without a peer is this node's own"
        with node.waits.computing("adopted weights"):
            await node.stage.adopt(theirs)
        clock = float(node.manifest.steps) if self._swarm.first_stage_is_done() else self._clock_of_others()
        step = max(theirs.step, clock, node.advert.step)
        await self._go_on_at(theirs.round, step, node.inner_steps, theirs.fresh_round)

    async def _fresh(self) -> None:
        """Start from the initial weights at the others' clock, because nobody has newer ones."""
        node, step = self._node, self._clock_of_others()
        outer, round = node.manifest.outer, int(step) // node.manifest.outer.inner_steps
        # Replicas that add up gradients go in step, so one that clings to older weights would hold up all others.
        exempt = outer.update.gradients or outer.pairing == "none"
        await self._go_on_at(round, step, node.inner_steps, fresh_round=0 if exempt else round)
        node.event("warning", message=f"nobody has the weights of stage {node.index}: starting from initial weights")

    async def _load(self, held: Holding) -> Checkpoint | None:
        with self._unless_moving(), self._node.waits.waiting("checkpoint", Resource.DISK):
            return await self._world.checkpoints.load(held)
        return None

    @contextmanager
    def _unless_moving(self) -> Iterator[None]:
        """Raises a LocalError only at the start: a node that moves continues without its own checkpoints."""
        try:
            yield
        except LocalError as error:
            if self._starts:
                raise
            self._node.event("warning", message=f"moving without its own checkpoints: {error}")

    async def _check_possible(self, round: int, step: float, whose: PeerId) -> None:
        """Raises Declined if the run cannot have reached the step of these weights yet, judging by the peers that have
        answered and by this node's own clock, which may be newer than their answers. Afterwards the clock is known."""
        node, run, ttl_s = self._node, self._node.manifest, self._node.config.directory.ttl_s
        listed = [a for a in self._swarm.members.all() if a.state in membership.TRAINED]
        answering = self._swarm.inquiry.answering(listed, membership.TRAINED)
        limit, m = float(run.steps), run.outer.inner_steps
        if answering:
            speed = median(a.steps_per_s for a in answering)
            limit = min(limit, schedule.furthest(max(self._clock_of_others(), node.advert.step), ttl_s, speed, m))
        if step > limit or round > limit // m + 2:
            raise Declined(f"the weights of {whose} are of round {round}, step {step:g}, which the run has not reached")
        if not answering:
            await self.know_the_clock()  # their answers are out of date; beside silent peers this takes seconds

    def _clock_of_others(self) -> float:
        """The median clock, in steps, of the peers with trained weights that have answered: one liar cannot move it."""
        listed = [a for a in self._swarm.members.all() if a.state in membership.TRAINED]
        clocks = [a.step for a in self._swarm.inquiry.answering(listed, membership.TRAINED)]
        usual = schedule.clock_median(clocks)
        return 0.0 if usual is None else min(usual, float(self._node.manifest.steps))

    def _latest_step(self, step: float, clock: float = 0.0) -> float:
        """The largest of a state's step, the others' clock, and the clock that this node brought from its previous
        stage. Under a rule of gradients always the state's step: the gradients that the others keep are needed from
        there on."""
        return step if self._node.manifest.outer.update.gradients else max(step, clock, self._node.advert.step)

    async def _go_on_at(
        self, round: int, step: float, inner_steps: int, fresh_round: int, partner_from_round: int = 0
    ) -> None:
        self._node.update(outer_round=round, fresh_round=fresh_round)
        self._node.go_on_at(step, inner_steps, partner_from_round)
        await self._rounds.freeze_anew()
