"""One node that is paused, stands still, or has a device that hangs."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from noloco_p2p.config import NodeConfig, OuterSettings, RunManifest
from noloco_p2p.core.messages import NO_STAGE, Advert, TensorSpec
from noloco_p2p.errors import LocalError
from noloco_p2p.node.pauses import HUNG_S, LOOK_S, UNLUCKY_STEPS, Pauses
from noloco_p2p.node.state import NodeState
from noloco_p2p.sim import virtual_time

M = 4
HIDDEN = TensorSpec("hidden", "float32", (1, 1, 1))


class Place:
    """A node in training whose wall clock is `ahead_s` of the loop's, and which shows midnight at the beginning."""

    def __init__(self, hours: tuple[str, ...] = (), stage: int | None = None) -> None:
        fields: dict[str, Any] = {"rule": "noloco", "inner_steps": M}
        config = NodeConfig(stage=stage, limits={"hours": hours})  # type: ignore[arg-type]
        manifest = RunManifest(outer=OuterSettings(**fields))
        me = Advert("me", manifest.run_id, 0, (), state="training", outer_round=3, moving_to=1, settled=True)
        self.states: list[str] = []
        self.node = NodeState(me, manifest, config, cast(Any, SimpleNamespace(event=self._event)))
        self.runs_s = 0.0
        self.hung: list[bool] = []
        state = SimpleNamespace(hidden=HIDDEN, gradient=HIDDEN)
        device = SimpleNamespace(state=state, running_s=lambda: self.runs_s, close=lambda hung: self.hung.append(hung))
        self.node.hold(cast(Any, device))
        self.ahead_s = 0.0
        self.pauses = Pauses(self.node, self._local_time)
        self.did: list[object] = []
        self.entrusts = True
        self.catches_up: list[Callable[[], None]] = []
        self.copies = True

    def _event(self, kind: str, **fields: object) -> None:
        if kind == "state":
            self.states.append(str(fields["state"]))

    def _local_time(self) -> datetime:
        return datetime.fromtimestamp(self.node.now() + self.ahead_s, UTC)

    async def forget(self) -> None:
        self.did.append("forget")

    async def entrust(self) -> bool:
        self.did.append("entrust")
        return self.entrusts

    async def freeze_anew(self) -> None:
        self.did.append(self.node.advert.outer_round)

    async def catch_up(self) -> bool:
        self.did.append("catch up")
        if self.catches_up:
            self.catches_up.pop(0)()
        return self.copies

    async def pause(self) -> None:
        await self.pauses.pause(cast(Any, self), cast(Any, self), cast(Any, self))


def at(scenario: Callable[[Place], Awaitable[None]], *hours: str, stage: int | None = None) -> None:
    async def main() -> None:
        await scenario(Place(hours, stage))

    virtual_time.run(main(), limit_s=100_000)


@pytest.mark.parametrize("entrusts", [False, True])
def test_a_pause_lasts_until_the_owner_gives_the_device_back(entrusts: bool) -> None:
    async def scenario(place: Place) -> None:
        place.entrusts = entrusts
        for _ in range(UNLUCKY_STEPS):
            place.pauses.stepped(4)
        place.node.pause(True)
        pausing = asyncio.create_task(place.pause())
        await asyncio.sleep(100.0)
        assert (place.node.advert.state, place.node.advert.moving_to) == ("paused", None)
        assert place.did == ["forget", "entrust"]
        place.node.pause(False)
        await pausing
        assert place.did[2:] == ["catch up", *[3] * entrusts], "the weights have the number of the next round"
        assert place.states == ["paused", "training"]
        place.pauses.stepped(0)
        assert not place.node.stood_still, "it has not trained on nothing"

    at(scenario)


@pytest.mark.parametrize("when", ["before", "meanwhile", "afterwards"])
def test_a_node_that_is_to_leave_does_not_come_back_from_a_pause(when: str) -> None:
    async def scenario(place: Place) -> None:
        place.node.pause(True)
        if when == "before":
            place.node.drain("told to leave")
        if when == "afterwards":
            place.catches_up.append(lambda: place.node.drain("told to leave"))
        pausing = asyncio.create_task(place.pause())
        await asyncio.sleep(1.0)
        if when == "meanwhile":
            place.node.drain("told to leave")
        if when == "afterwards":
            place.node.pause(False)
        await pausing
        assert place.states == {"before": ["draining"]}.get(when, ["paused", "draining"])
        assert ("catch up" in place.did) == (when == "afterwards")

    at(scenario)


@pytest.mark.parametrize("before", [True, False])
def test_a_node_that_is_to_leave_does_not_come_back_from_a_standstill(before: bool) -> None:
    async def scenario(place: Place) -> None:
        place.node.stand_still(True)
        place.catches_up.append(lambda: None if before else place.node.drain("told to leave"))
        if before:
            place.node.drain("told to leave")
        await place.pause()
        assert place.states == (["draining"] if before else ["syncing", "draining"])
        assert not place.node.pausing

    at(scenario)


def test_a_node_that_has_stood_still_catches_up_until_it_has_not_stood_still_meanwhile() -> None:
    async def scenario(place: Place) -> None:
        def sleeps_again() -> None:
            place.ahead_s += 1000.0
            place.pauses.check_clock()

        for _ in range(UNLUCKY_STEPS):
            place.pauses.stepped(4)
        await asyncio.sleep(100.0)
        place.catches_up.append(sleeps_again)
        place.ahead_s = 1000.0
        place.pauses.check_clock()
        assert place.node.pausing
        await place.pause()
        assert place.did == ["catch up"] * 2
        assert (place.states, place.node.pausing) == (["syncing", "training"], False)
        place.pauses.stepped(0)
        assert not place.node.stood_still

    at(scenario)


@pytest.mark.parametrize(
    ("still_s", "speed", "noticed"),
    [(2 * LOOK_S - 1, 0.0, False), (2 * LOOK_S + 1, 0.0, True), (2 * LOOK_S + 1, 0.05, False), (81.0, 0.05, True)],
)
def test_what_counts_as_a_standstill(still_s: float, speed: float, noticed: bool) -> None:
    """At 0.05 steps/s an outer interval takes 80 s."""

    async def scenario(place: Place) -> None:
        place.node.update(steps_per_s=speed)
        await asyncio.sleep(3 * LOOK_S)
        place.pauses.check_clock()
        place.node.stand_still(False)
        place.ahead_s -= 7200.0
        place.pauses.check_clock()
        assert not place.node.stood_still, "a clock that is set back"
        place.ahead_s += still_s
        place.pauses.check_clock()
        assert place.node.stood_still == noticed

    at(scenario)


@pytest.mark.parametrize(
    ("steps", "idle_s", "evaluated_s", "speed", "asks"),
    [
        (UNLUCKY_STEPS, 29.0, 0.0, 1.0, False),
        (UNLUCKY_STEPS, 31.0, 0.0, 1.0, True),
        (UNLUCKY_STEPS - 1, 31.0, 0.0, 1.0, False),
        (UNLUCKY_STEPS, 50.0, 21.0, 1.0, False),
        (UNLUCKY_STEPS, 50.0, 19.0, 1.0, True),
        (UNLUCKY_STEPS, 79.0, 0.0, UNLUCKY_STEPS / 80.0, False),
    ],
)
def test_a_node_that_trains_on_nothing_for_long_asks_the_others(
    steps: int, idle_s: float, evaluated_s: float, speed: float, asks: bool
) -> None:
    """For longer than an advert lives, 30 s, and than UNLUCKY_STEPS steps take, without evaluations."""

    async def scenario(place: Place) -> None:
        place.node.update(steps_per_s=speed)
        place.node.spend_on_evaluation(100.0)
        for _ in range(steps):
            await asyncio.sleep(1.0)
            place.pauses.stepped(4)
        place.node.spend_on_evaluation(evaluated_s)
        for part_s in (idle_s - 10.0, 10.0):
            assert not place.node.stood_still
            await asyncio.sleep(part_s)
            place.pauses.stepped(0)
        assert place.node.stood_still == asks
        place.node.stand_still(False)
        place.pauses.begin()
        place.pauses.stepped(0)
        assert not place.node.stood_still, "with new weights it counts anew"

    at(scenario)


def test_a_node_that_goes_on_training_on_nothing_asks_the_others_again_only_after_as_long() -> None:
    """While it asks it serves nobody, so asking at each empty step would keep its steps empty."""

    async def scenario(place: Place) -> None:
        place.copies = False
        place.node.update(steps_per_s=1.0)
        for _ in range(UNLUCKY_STEPS):
            place.pauses.stepped(4)
        asked_at = []
        for _ in range(70):
            await asyncio.sleep(1.0)
            place.pauses.stepped(0)
            if place.node.stood_still:
                asked_at.append(place.node.now())
                await place.pause()
        assert asked_at == [31.0, 62.0]

    at(scenario)


def test_a_device_hangs_if_two_looks_find_it_at_one_call_for_too_long() -> None:
    async def scenario(place: Place) -> None:
        watching = asyncio.create_task(place.pauses.keep_watch())
        for runs_s, looks in ((HUNG_S - 1, 5), (HUNG_S, 1), (0.0, 1), (HUNG_S, 1)):
            place.runs_s = runs_s
            await asyncio.sleep(looks * LOOK_S)
            assert not watching.done()
        await asyncio.sleep(LOOK_S)
        assert isinstance(watching.exception(), LocalError)
        assert place.hung == [True], "what waits for the device hears of it"

    at(scenario)


def test_the_watch_begins_and_ends_the_owner_s_hours() -> None:
    async def scenario(place: Place) -> None:
        watching = asyncio.create_task(place.pauses.keep_watch())
        pausing = asyncio.create_task(place.pause())
        await asyncio.sleep(50.0)
        assert (place.node.closed_until, place.node.advert.state) == ("00:01", "paused")
        await asyncio.sleep(10.0 + LOOK_S)
        assert pausing.done()
        await asyncio.sleep(60.0)
        assert place.node.closed_until == "00:01"
        watching.cancel()
        await asyncio.wait([watching])

    at(scenario, "00:01-00:02")


def test_a_machine_that_sleeps_until_the_owner_s_hours_have_begun_resumes_when_it_wakes() -> None:
    """Nothing woke the pause: the node was to do no work before as well as after, first for its owner, then to find out
    how far the others are."""

    async def scenario(place: Place) -> None:
        watching = asyncio.create_task(place.pauses.keep_watch())
        pausing = asyncio.create_task(place.pause())
        await asyncio.sleep(20.0)
        place.ahead_s = 50.0
        await asyncio.sleep(LOOK_S + 0.1)
        assert (place.node.closed_until, place.node.stood_still) == (None, True)
        assert pausing.done()
        watching.cancel()
        await asyncio.wait([watching])

    at(scenario, "00:01-00:02")


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("stage", [None, 1])
def test_a_node_joins_when_its_hours_begin(leaves: bool, stage: int | None) -> None:
    async def scenario(place: Place) -> None:
        place.node.update(stage=NO_STAGE, state="starting")
        place.node.microbatch = None
        del place.node.stage  # there are no weights yet
        watching = asyncio.create_task(place.pauses.keep_watch())
        opening = asyncio.create_task(place.pauses.until_open())
        await asyncio.sleep(30.0)
        assert not opening.done()
        if leaves:
            place.node.drain("told to leave")
        else:
            await asyncio.sleep(30.0 + LOOK_S)
        await asyncio.sleep(0.1)
        assert opening.done()
        assert place.node.advert.stage == (NO_STAGE if leaves or stage is None else stage), "it is announced only now"
        assert not watching.done()
        watching.cancel()
        await asyncio.wait([watching])

    at(scenario, "00:01-00:02", stage=stage)
