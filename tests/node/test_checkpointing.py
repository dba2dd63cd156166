"""When one replica writes checkpoints, and what it waits for before it leaves or pauses."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from elastic import config_for, manifest_for

from noloco_p2p.config import NodeConfig, OuterSettings, RunManifest
from noloco_p2p.core.messages import Advert, Checkpoint, Holding, NodeDescription, ReplicaState, TensorSpec
from noloco_p2p.core.snapshots import FrozenRound
from noloco_p2p.errors import LocalError, Unreachable
from noloco_p2p.node.checkpointing import LAST_WORDS_S, Checkpointer
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.state import NodeState
from noloco_p2p.sim import virtual_time
from noloco_p2p.sim.world import SimPlan, SimSwarm

M, STEPS, EVERY = 4, 80, 8
HIDDEN = TensorSpec("hidden", "float32", (1, 1, 1))
CAPTURE_S = 0.25


class Place:
    """A replica of stage 0 of 2 at round 3, its disk, and its peers."""

    def __init__(self, every_steps: int | None = EVERY, pairing: str = "matched") -> None:
        fields: dict[str, Any] = {"rule": "noloco", "inner_steps": M, "pairing": pairing}
        manifest = RunManifest(stages=2, steps=STEPS, outer=OuterSettings(**fields))
        config = NodeConfig(checkpoint={"every_steps": every_steps}, limits={"drain_s": 20.0})  # type: ignore[arg-type]
        me = Advert("me", manifest.run_id, 0, (), state="training", outer_round=3, step=12.0)
        self.events: list[tuple[str, dict[str, Any]]] = []
        telemetry = SimpleNamespace(event=lambda kind, **fields: self.events.append((kind, fields)))
        self.node = NodeState(me, manifest, config, cast(Any, telemetry))
        state = SimpleNamespace(hidden=HIDDEN, gradient=HIDDEN)
        self.node.hold(cast(Any, SimpleNamespace(state=state, capture=self._capture)))
        self.node.inner_steps = 12
        self.swarm = Membership(self.node)
        self.silent: set[str] = set()
        self.saves_s = 0.0
        self.error: Exception | None = None
        self.saving = 0
        self.saved: list[tuple[int, float, bool]] = []
        self.written: list[Checkpoint] = []
        self.frozen: list[int] = []
        rounds = SimpleNamespace(freeze=self._freeze, end=self._end, lacks_rounds=self._lacks_rounds)
        self.checkpointer = Checkpointer(self.node, self.swarm, cast(Any, self), cast(Any, rounds))
        self.checkpointer.go_on()

    async def _capture(self, round: int, step: float, inner_steps: int) -> ReplicaState:
        await asyncio.sleep(CAPTURE_S)
        return ReplicaState("me", 0, round, step, inner_steps, inner_steps, ())

    async def _freeze(self, round: int) -> FrozenRound:
        self.frozen.append(round)
        return cast(FrozenRound, SimpleNamespace(round=round, step=self.node.step, fresh_round=0))

    def _lacks_rounds(self) -> bool:
        return self.node.advert.outer_round < STEPS // M - 1

    async def _end(self, reason: str) -> float:
        assert reason == "leaving"
        self.node.update(outer_round=self.node.advert.outer_round + 1)
        return 0.0

    async def save(self, checkpoint: Checkpoint, *, pin: bool) -> None:
        assert not self.saving, "one at a time"
        self.saving += 1
        await asyncio.sleep(self.saves_s)
        self.saving -= 1
        if self.error is not None:
            raise self.error
        self.saved.append((checkpoint.state.round, checkpoint.state.step, pin))
        self.written.append(checkpoint)

    async def describe(self, peer: Advert) -> NodeDescription:
        await asyncio.sleep(0.1)
        if peer.peer_id in self.silent:
            raise Unreachable("nobody is there")
        said = peer.stage, peer.state, peer.step, peer.outer_round, "", peer.fresh_round
        return NodeDescription(peer.peer_id, peer.run_id, *said)

    def sees(self, *adverts: Advert) -> None:
        """Read the membership: these peers, which have answered before."""
        self.swarm.members.update([replace(one, announced_at=self.node.now()) for one in adverts], now=self.node.now())
        for advert in adverts:
            self.swarm.members.answered(advert.peer_id)
        self.node.waits.pulse()

    def mate(self, peer: str = "b", round: int = 3, state: str = "training") -> Advert:
        return Advert(peer, self.node.run_id, 0, (), state=state, outer_round=round, step=float(M * round))

    def guardian(self, peer: str = "g", *holds: Holding) -> Advert:
        return Advert(peer, self.node.run_id, 1, (), state="training", outer_round=3, step=12.0, holds=holds)

    async def comes_to(self, step: float, round: int) -> None:
        self.node.update(step=float(step), outer_round=round)
        await self.checkpointer.save_if_due()

    async def leaves(self) -> float:
        """Hand over. Returns how long it took."""
        self.node.drain("told to leave")
        began = self.node.now()
        await self.checkpointer.hand_over()
        return self.node.now() - began

    def said(self, what: str) -> int:
        return sum(what in str(fields.get("message")) for _, fields in self.events)


def at(scenario: Callable[[Place], Awaitable[None]], **fields: Any) -> None:
    async def main() -> None:
        place = Place(**fields)
        asking = asyncio.create_task(place.swarm.inquiry.run(cast(Any, place), lambda: None))
        await scenario(place)
        await place.checkpointer.settle()
        asking.cancel()
        await asyncio.wait([asking])

    virtual_time.run(main(), limit_s=10_000)


def test_it_saves_after_the_first_round_at_or_beyond_each_multiple() -> None:
    async def scenario(place: Place) -> None:
        for step in range(13, 34):
            # The round of a step is done two steps later.
            await place.comes_to(step, (step - 2) // M)
        await place.checkpointer.settle()
        assert place.saved == [(4, 18.0, False), (6, 26.0, False)], "round 8 is not done yet"
        await place.comes_to(STEPS, STEPS // M)
        await place.checkpointer.settle()
        assert place.saved[2:] == [(STEPS // M, STEPS, False)]

    at(scenario)


def test_a_copy_that_arrives_at_the_end_is_not_saved_as_weights_of_the_last_step_if_it_lacks_rounds() -> None:
    async def scenario(place: Place) -> None:
        for round in (4, STEPS // M - 2, STEPS // M - 1):
            place.node.go_on_at(STEPS, 12, 0)
            await place.comes_to(STEPS, round)
        await place.checkpointer.settle()
        assert [round for round, _, _ in place.saved] == [STEPS // M - 1]

    at(scenario)


def test_the_end_of_the_run_is_saved_whatever_its_step() -> None:
    async def scenario(place: Place) -> None:
        await place.comes_to(STEPS - 2, STEPS // M - 1)
        await place.comes_to(STEPS, STEPS // M)
        await place.checkpointer.settle()
        assert [round for round, _, _ in place.saved] == [STEPS // M - 1, STEPS // M]

    at(scenario, every_steps=STEPS - 4)


def test_without_rounds_the_clock_decides() -> None:
    async def scenario(place: Place) -> None:
        place.node.update(outer_round=0)
        place.checkpointer.go_on()
        for step in range(13, 34):
            await place.comes_to(step, 0)
        await place.checkpointer.settle()
        assert [step for _, step, _ in place.saved] == [16.0, 24.0, 32.0]
        await place.leaves()
        await place.checkpointer.settle()
        assert place.saved[3:] == [(8, 33.0, False)]

    at(scenario, pairing="none")


def test_the_last_checkpoint_names_the_round_of_the_weights_that_it_holds() -> None:
    """A replica that copies one of an earlier lineage may come to weights of an earlier round. What it saved as it left
    named the round of its last checkpoint, and counted as older by those rounds than it was."""

    async def scenario(place: Place) -> None:
        await place.comes_to(32, round=8)
        place.node.update(step=33.0, outer_round=6)  # a copy
        await place.leaves()
        await place.checkpointer.settle()
        assert [(round, step) for round, step, _ in place.saved] == [(8, 32.0), (7, 33.0)], "the open round has ended"

    at(scenario)


def test_the_end_of_the_run_is_saved_again_if_other_weights_replaced_those_that_were_saved() -> None:
    """A replica whose last round shows that others are of an earlier lineage copies one of them after its own weights
    had been saved as those of the end. The last checkpoint kept these."""

    async def scenario(place: Place) -> None:
        await place.comes_to(STEPS, STEPS // M)
        await place.comes_to(STEPS, STEPS // M)
        place.node.go_on_at(STEPS, 12, 0)
        await place.comes_to(STEPS, STEPS // M - 1)
        await place.checkpointer.settle()
        assert [round for round, _, _ in place.saved] == [STEPS // M, STEPS // M - 1]

    at(scenario)


def test_nothing_is_saved_of_the_weights_that_it_goes_on_from() -> None:
    async def scenario(place: Place) -> None:
        place.node.go_on_at(31.0, 12, 0)
        place.node.update(outer_round=7)
        place.checkpointer.go_on()
        await place.comes_to(32, round=7)
        await place.comes_to(36, round=8)
        await place.checkpointer.settle()
        assert [round for round, _, _ in place.saved] == [8]

    at(scenario)


def test_no_checkpoints_are_written_if_none_are_wanted() -> None:
    async def scenario(place: Place) -> None:
        await place.comes_to(STEPS, STEPS // M)
        assert await place.leaves() == 0.0
        await place.checkpointer.settle()
        assert place.saved == []

    at(scenario, every_steps=None)


def test_a_checkpoint_has_the_position_in_the_data_and_the_lineage_of_the_weights() -> None:
    async def scenario(place: Place) -> None:
        cursor = {"document": 7}
        place.node.read_from(cast(Any, SimpleNamespace(cursor=cursor)))
        place.node.update(fresh_round=2)
        await place.comes_to(16, 4)
        await place.checkpointer.settle()
        assert [(one.cursor, one.state.fresh_round) for one in place.written] == [(cursor, 2)]

    at(scenario)


def test_training_goes_on_while_one_is_written_and_the_next_one_waits_for_it() -> None:
    async def scenario(place: Place) -> None:
        place.saves_s, began = 5.0, place.node.now()
        await place.comes_to(16, 4)
        assert place.node.now() - began == pytest.approx(CAPTURE_S)
        await place.comes_to(24, 6)
        assert place.node.now() - began == pytest.approx(5.0 + 2 * CAPTURE_S)
        await place.checkpointer.settle()
        assert [round for round, _, _ in place.saved] == [4, 6]

    at(scenario)


def test_a_disk_that_is_full_is_reported_until_it_is_not() -> None:
    async def scenario(place: Place) -> None:
        for error, troubles in ((LocalError("the disk is full"), 1), (None, 0)):
            place.error = error
            await place.comes_to(place.node.step + EVERY, place.node.advert.outer_round + 2)
            await place.checkpointer.settle()
            assert len(place.node.troubles(place.node.now())) == troubles
        assert [kind for kind, _ in place.events if kind == "checkpoint"] == ["checkpoint"]
        assert place.said("the disk is full") == 1

    at(scenario)


def test_a_node_stops_if_a_checkpoint_fails_in_a_way_that_nobody_expected() -> None:
    """Such an error was lost: the node trained on without checkpoints, and ended as if all was well."""

    async def scenario(place: Place) -> None:
        place.error = MemoryError("no memory")
        await place.comes_to(16, 4)
        await place.checkpointer.settle()
        assert place.node.error is place.error

    at(scenario)


def test_a_node_whose_last_checkpoint_fails_like_that_does_not_end_as_if_all_was_well() -> None:
    swarm = SimSwarm(SimPlan(manifest_for((2,)), (2,), config=config_for()))

    async def save(checkpoint: Checkpoint, *, pin: bool = False) -> None:
        await asyncio.sleep(1.0)
        if checkpoint.state.step >= swarm.plan.manifest.steps:
            raise MemoryError("no memory")

    swarm.at(0.001, lambda: setattr(swarm.process("s0r1").ports.checkpoints, "save", save))
    with pytest.raises(MemoryError):
        swarm.run(limit_s=1000)
    assert swarm.process("s0r1").state == "left"


def test_a_last_replica_leaves_once_a_guardian_that_answers_lists_its_weights() -> None:
    async def scenario(place: Place) -> None:
        place.sees(place.guardian())
        place.silent.add("g")
        leaving = asyncio.create_task(place.leaves())
        await asyncio.sleep(2.0)
        assert place.frozen == [5], "the round that was open is done, and the last weights have the next one's number"
        place.sees(place.guardian("g", Holding(0, 5, 12)))
        await asyncio.sleep(2.0)
        assert not leaving.done(), "it may have died"
        place.sees(place.guardian("h", Holding(0, 4, 12)))
        await asyncio.sleep(1.0)
        assert not leaving.done(), "these are older"
        place.sees(place.guardian("h", Holding(0, 5, 12)))
        await asyncio.sleep(1.0)
        assert leaving.done()
        assert not place.said("no guardian has the weights")
        assert place.saved == [(4, 12.0, False)]

    at(scenario)


def test_a_last_replica_leaves_once_its_guardian_has_left() -> None:
    async def scenario(place: Place) -> None:
        place.sees(place.guardian())
        leaving = asyncio.create_task(place.leaves())
        await asyncio.sleep(2.0)
        assert not leaving.done()
        place.sees(replace(place.guardian(), state="left"))
        await asyncio.sleep(0.1)
        assert leaving.done()

    at(scenario)


def test_a_last_replica_hands_over_what_it_has_trained_since_a_pause_in_the_same_round() -> None:
    """What it froze before the pause has the same number as its last weights."""

    async def scenario(place: Place) -> None:
        place.sees(place.guardian("g", Holding(0, 5, 11)))
        leaving = asyncio.create_task(place.leaves())
        await asyncio.sleep(2.0)
        assert not leaving.done()
        place.sees(place.guardian("g", Holding(0, 5, 12)))
        await asyncio.sleep(1.0)
        assert leaving.done()

    at(scenario)


def test_a_last_replica_whose_guardian_does_not_come_leaves_in_time() -> None:
    async def scenario(place: Place) -> None:
        place.sees(place.guardian())
        assert await place.leaves() == pytest.approx(20.0 - LAST_WORDS_S)
        assert place.said("no guardian has the weights of stage 0") == 1

    at(scenario)


def test_a_node_that_leaves_with_the_only_weights_of_another_stage_says_whose_they_are() -> None:
    """It called them its own."""

    async def scenario(place: Place) -> None:
        place.node.update(holds=(Holding(1, 3, 12),))
        place.sees(place.mate())
        await place.leaves()
        assert place.said("leaving although no guardian has the weights of stage 1") == 1

    at(scenario)


@pytest.mark.parametrize(("round", "silent", "last"), [(3, "", False), (3, "b", True), (2, "", False), (-20, "", True)])
@pytest.mark.parametrize("pauses", [False, True])
def test_who_has_a_mate_that_answers_and_has_come_as_far_entrusts_nothing(
    round: int, silent: str, last: bool, pauses: bool
) -> None:
    """`round`: that of the mate. A guardian may be a few rounds behind, because it pulls now and then only."""

    async def scenario(place: Place) -> None:
        place.node.update(outer_round=30, step=120.0)
        place.silent.update(silent)
        place.sees(place.mate(round=27 + round), place.guardian())
        if pauses:
            assert await place.checkpointer.entrust() == last
            assert place.frozen == [31] * last
            assert place.said("no other replica") == last
        else:
            assert (await place.leaves() > 5.0) == last
            assert place.frozen == [32] * last

    at(scenario)


@pytest.mark.parametrize("pairing", ["matched", "none"])
def test_nobody_waits_for_guardians_that_do_not_exist(pairing: str) -> None:
    async def scenario(place: Place) -> None:
        if pairing == "none":
            place.sees(place.guardian())
        assert not await place.checkpointer.entrust()
        assert place.said("no other replica") == 1
        assert await place.leaves() < 2.0
        assert place.frozen == []

    at(scenario, pairing=pairing)


@pytest.mark.parametrize(("inner_steps", "fresh_round", "kept"), [(0, 3, False), (5, 3, True), (0, 1, True)])
def test_initial_weights_are_neither_saved_nor_entrusted(inner_steps: int, fresh_round: int, kept: bool) -> None:
    """Those of a guardian are kept, though this node has not trained them yet."""

    async def scenario(place: Place) -> None:
        place.node.inner_steps = inner_steps
        place.node.update(outer_round=3, fresh_round=fresh_round)
        place.sees(place.guardian())
        assert (await place.leaves() > 5.0) == kept
        assert (len(place.saved), place.frozen) == (kept, [5] * kept)

    at(scenario)


def test_what_it_guards_of_a_stage_that_nobody_holds_is_handed_over_too() -> None:
    async def scenario(place: Place) -> None:
        held, further = Holding(1, 3, 12), Holding(2, 3, 12)
        place.node.update(holds=(held, further, Holding(0, 3, 12)))
        place.sees(place.mate(), Advert("c", place.node.run_id, 0, (), state="training", outer_round=3, step=12.0))
        leaving = asyncio.create_task(place.leaves())
        await asyncio.sleep(5.0)
        for listed in ((), (held,), (further,), (held, further)):
            assert not leaving.done()
            place.sees(replace(place.mate("c"), holds=listed))
            await asyncio.sleep(1.0)
        assert leaving.done()
        assert place.frozen == []

    at(scenario)


def test_its_own_checkpoints_are_not_handed_over_like_what_it_guards() -> None:
    """Those that it found as it started are listed until it trains."""

    async def scenario(place: Place) -> None:
        place.node.inner_steps = 0
        place.node.update(outer_round=0, holds=(Holding(0, 3, 12),))
        place.sees(place.guardian())
        assert await place.leaves() == 0.0

    at(scenario)


def test_in_a_series_of_alarms_only_the_checkpoint_before_the_first_is_pinned() -> None:
    async def scenario(place: Place) -> None:
        for number, alarms in enumerate((0, 1, 1, 0, 1)):
            place.node.alarms += alarms
            await place.comes_to(16 + 8 * number, 4 + 2 * number)
        await place.checkpointer.settle()
        assert [pin for _, _, pin in place.saved] == [False, True, False, False, True]

    at(scenario)


def test_the_checkpoint_before_the_alarms_is_pinned_once_the_disk_has_space_again() -> None:
    async def scenario(place: Place) -> None:
        for number, full in enumerate((False, True, True, False, False)):
            place.error = LocalError("no space left") if full else None
            place.node.alarms += number in (1, 2)
            await place.comes_to(16 + 8 * number, 4 + 2 * number)
            await place.checkpointer.settle()
        assert [pin for _, _, pin in place.saved] == [False, True, False]

    at(scenario)


def test_nobody_waits_until_others_have_what_a_replica_still_holds() -> None:
    async def scenario(place: Place) -> None:
        place.node.update(holds=(Holding(1, 3, 12),))
        place.sees(place.mate(), place.guardian())
        assert await place.leaves() < 2.0

    at(scenario)
