"""The donor: callers at about the same time share a frozen copy; there are at most two; unused copies are dropped."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import cast

import pytest

from noloco_p2p.config import NodeConfig, OuterSettings, RunManifest
from noloco_p2p.core.messages import Advert, ReplicaState, TensorSpec
from noloco_p2p.core.outer_rules import RuleName
from noloco_p2p.errors import Declined
from noloco_p2p.node.device_stage import DeviceStage
from noloco_p2p.node.state import NodeState
from noloco_p2p.node.state_donor import KEPT_S, STALE_INTERVALS, StateDonor
from noloco_p2p.ports import Telemetry
from noloco_p2p.sim.virtual_time import run

CAPTURE_S = 0.5
M = 10
"""Inner steps per outer interval."""

HIDDEN = TensorSpec("hidden", "float32", (1, 1, 1))


class FakeStage:
    """Freezes nothing, but counts how often it is asked to."""

    state = SimpleNamespace(hidden=HIDDEN, gradient=HIDDEN)

    def __init__(self) -> None:
        self.captures = 0
        self.fails = False

    async def capture(self, round: int, step: float, inner_steps: int) -> ReplicaState:
        self.captures += 1
        await asyncio.sleep(CAPTURE_S)
        if self.fails:
            raise RuntimeError("the device is gone")
        return ReplicaState("me", 0, round, step, inner_steps, inner_steps, ())


class Place:
    """One node with a fake stage, and its donor."""

    def __init__(self, incarnation: int = 1, rule: RuleName = "noloco") -> None:
        events: list[tuple[str, dict[str, object]]] = []
        telemetry = SimpleNamespace(event=lambda kind, **fields: events.append((kind, fields)))
        manifest = RunManifest(outer=OuterSettings(rule=rule, inner_steps=1 if rule == "sync" else M))
        advert = Advert("me", manifest.run_id, 0, ("127.0.0.1:1",), state="training", step=25.0, outer_round=2)
        self.node = NodeState(advert, manifest, NodeConfig(), cast(Telemetry, telemetry))
        self.stage = FakeStage()
        self.node.hold(cast(DeviceStage, self.stage))
        self.node.inner_steps = 25
        self.donor = StateDonor(self.node, incarnation)
        self.events = events

    async def ask(self, number: int | None = None, reads_s: float = 0.0) -> ReplicaState:
        async with self.donor.lend_state("newcomer", number) as state:
            await asyncio.sleep(reads_s)
            return state

    def step_on(self, steps: float) -> None:
        self.node.update(step=self.node.advert.step + steps)


def at(scenario: Callable[[Place], Awaitable[None]], rule: RuleName = "noloco") -> None:
    async def main() -> None:
        failures: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        place = Place(rule=rule)
        await scenario(place)
        place.donor.close()
        await asyncio.sleep(2 * KEPT_S)
        assert not failures, "no timer is left that drops a copy a second time"

    run(main(), limit_s=1000)


def test_callers_at_about_the_same_time_share_one_copy() -> None:
    async def scenario(place: Place) -> None:
        first = await asyncio.gather(*(place.ask(reads_s=1.0) for _ in range(5)))
        later = await place.ask()
        assert all(state is first[0] for state in [*first, later])
        assert place.stage.captures == 1, "even if they ask before the first copy exists"
        assert (first[0].round, first[0].step, first[0].inner_steps) == (2, 25.0, 25)
        assert [kind for kind, _ in place.events] == ["info"]

    at(scenario)


def test_a_copy_is_dropped_some_time_after_its_last_user() -> None:
    async def scenario(place: Place) -> None:
        reading = asyncio.create_task(place.ask(reads_s=3 * KEPT_S))
        state = await place.ask()
        await asyncio.sleep(2 * KEPT_S)
        assert await place.ask(state.number) is state, "a caller still reads it"
        await reading
        await asyncio.sleep(KEPT_S - 0.1)
        assert await place.ask(state.number) is state, "a caller whose transfer broke off returns for the rest"
        await asyncio.sleep(KEPT_S - 0.1)
        assert await place.ask(state.number) is state, "each use extends its life"
        await asyncio.sleep(KEPT_S + 0.1)
        with pytest.raises(Declined, match=str(state.number)):
            await place.ask(state.number)
        fresh = await place.ask()
        assert fresh.number != state.number
        assert place.stage.captures == 2

    at(scenario)


def test_a_number_that_was_never_given_is_declined() -> None:
    async def scenario(place: Place) -> None:
        with pytest.raises(Declined, match="no longer has copy 7"):
            await place.ask(7)
        assert place.stage.captures == 0

    at(scenario)


@pytest.mark.parametrize("state", ["starting", "waiting", "syncing", "training", "paused", "finished", "draining"])
def test_only_a_node_with_trained_weights_lends(state: str) -> None:
    async def scenario(place: Place) -> None:
        place.node.update(state=state)
        if state in ("training", "paused", "finished"):
            await place.ask()
        else:
            with pytest.raises(Declined, match=f"is {state}"):
                await place.ask()
        assert place.stage.captures == (state in ("training", "paused", "finished"))

    at(scenario)


def test_a_copy_that_lags_behind_is_only_for_callers_that_have_begun_it() -> None:
    async def scenario(place: Place) -> None:
        old = await place.ask()
        reading = asyncio.create_task(place.ask(old.number, reads_s=5.0))
        place.step_on(STALE_INTERVALS * M)
        assert await place.ask() is old
        place.step_on(1)
        fresh = await place.ask()
        assert (fresh.step, fresh.number == old.number) == (25.0 + STALE_INTERVALS * M + 1, False)
        assert await place.ask(old.number) is old
        assert await place.ask() is fresh
        await reading

    at(scenario)


def test_a_copy_from_before_rounds_that_the_clock_has_jumped_over_is_not_for_new_callers() -> None:
    """A replica that was out of reach has the others' clock before it has done a round with them."""

    async def scenario(place: Place) -> None:
        first = await place.ask()
        place.node.update(outer_round=2 + STALE_INTERVALS)
        assert (await place.ask()).number == first.number
        place.node.update(outer_round=3 + STALE_INTERVALS)
        assert (await place.ask()).round == 3 + STALE_INTERVALS

    at(scenario)


@pytest.mark.parametrize(("rule", "shared"), [("noloco", True), ("diloco", False), ("sync", True)])
def test_a_copy_from_before_the_newest_round_is_for_new_callers_if_they_can_catch_up(
    rule: RuleName, shared: bool
) -> None:
    async def scenario(place: Place) -> None:
        first = await place.ask()
        place.node.update(outer_round=3)
        assert ((await place.ask()) is first) == shared

    at(scenario, rule)


def test_a_copy_of_weights_that_were_replaced_is_not_for_new_callers() -> None:
    """A replica that copies an earlier lineage, or one from which it differs, may be at the same round before and after
    it: newcomers would decline its old copy, or differ as well."""

    async def scenario(place: Place) -> None:
        old, advert = await place.ask(), place.node.advert
        reading = asyncio.create_task(place.ask(old.number, reads_s=5.0))
        place.node.go_on_at(advert.step, place.node.inner_steps, advert.outer_round + 2)
        fresh = await place.ask()
        assert (fresh.round, fresh.step) == (old.round, old.step)
        assert fresh.number != old.number
        assert await reading is old

    at(scenario)


def test_there_are_never_more_than_two_copies() -> None:
    async def scenario(place: Place) -> None:
        states = []
        for _ in range(2):
            states.append(await place.ask())
            place.step_on(3 * M)
        readers = [asyncio.create_task(place.ask(state.number, reads_s=5.0)) for state in states]
        await asyncio.sleep(0.1)
        assert await place.ask() is states[1], "both are in use, so the newer one must do"
        readers[0].cancel()
        await asyncio.sleep(0.1)
        third = await place.ask()
        assert third.number not in [state.number for state in states]
        with pytest.raises(Declined):
            await place.ask(states[0].number)
        assert await readers[1] is states[1]
        assert place.stage.captures == 3

    at(scenario)


def test_a_caller_that_leaves_during_the_capture_takes_it_from_nobody() -> None:
    async def scenario(place: Place) -> None:
        first = asyncio.create_task(place.ask())
        second = asyncio.create_task(place.ask())
        await asyncio.sleep(CAPTURE_S / 2)
        first.cancel()
        assert (await second).step == 25.0
        assert place.stage.captures == 1

    at(scenario)


def test_a_copy_whose_only_caller_leaves_during_the_capture_is_dropped_as_any_other() -> None:
    async def scenario(place: Place) -> None:
        for times in (1, 2):
            asking = asyncio.create_task(place.ask())
            await asyncio.sleep(CAPTURE_S / 2)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await place.ask()
            assert place.stage.captures == times
            await asyncio.sleep(KEPT_S + 0.1)

    at(scenario)


def test_a_caller_that_waits_for_a_copy_gets_declined_if_the_node_ends_or_moves() -> None:
    async def scenario(place: Place) -> None:
        asking = [asyncio.create_task(place.ask()) for _ in range(2)]
        await asyncio.sleep(CAPTURE_S / 2)
        asking[1].cancel()
        place.donor.close()
        with pytest.raises(Declined, match="is leaving its stage"):
            await asking[0]
        await asyncio.wait(asking)
        assert place.stage.captures == 1

    at(scenario)


def test_labels_are_those_of_the_device_operations_before_the_copy() -> None:
    async def scenario(place: Place) -> None:
        asking = asyncio.create_task(place.ask())
        await asyncio.sleep(CAPTURE_S / 2)
        place.node.inner_steps = 26
        place.node.update(step=26.0, outer_round=3, fresh_round=1)
        state = await asking
        assert (state.inner_steps, state.step, state.round, state.fresh_round) == (26, 26.0, 3, 1)

    at(scenario)


def test_a_failed_capture_fails_its_askers_and_the_next_one_begins_anew() -> None:
    async def scenario(place: Place) -> None:
        place.stage.fails = True
        failed = await asyncio.gather(place.ask(), place.ask(), return_exceptions=True)
        assert [type(error) for error in failed] == [RuntimeError, RuntimeError]
        place.stage.fails = False
        await place.ask()
        assert place.stage.captures == 2

    at(scenario)


def test_numbers_are_reproducible_and_differ_between_processes_and_copies() -> None:
    async def numbers(incarnation: int) -> list[int]:
        place = Place(incarnation)
        before = place.node.rng.getstate()
        found = []
        for _ in range(3):
            found.append((await place.ask()).number)
            place.step_on(3 * M)
        assert place.node.rng.getstate() == before, "routes draw from that generator"
        place.donor.close()
        return found

    first, again, restarted = (run(numbers(incarnation)) for incarnation in (1, 1, 2))
    assert first == again
    assert len({*first, *restarted}) == 6
    assert all(0 < number < 2**64 for number in first)
