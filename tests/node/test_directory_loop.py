"""When a node announces itself and reads the membership, under virtual time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import NO_STAGE, Advert, Holding
from noloco_p2p.core.schedule import READING_S
from noloco_p2p.errors import Unreachable
from noloco_p2p.node.directory_loop import FIRST_S, RENEWALS_PER_TTL, MembershipLoop
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.state import NodeState
from noloco_p2p.sim import virtual_time

TTL_S, REFRESH_S = 30.0, 5.0
RENEWAL_S = TTL_S / RENEWALS_PER_TTL
STEP_S = 0.125


class Place:
    """A node of stage 1 of 3 in training, and a directory that notes when it is used."""

    def __init__(self, stage: int, state: str) -> None:
        manifest = RunManifest(stages=3, outer={"rule": "noloco", "inner_steps": 5})  # type: ignore[arg-type]
        config = NodeConfig(directory={"ttl_s": TTL_S, "refresh_s": REFRESH_S})  # type: ignore[arg-type]
        me = Advert("me", manifest.run_id, stage, (), state=state)
        self.warnings: list[str] = []
        self.node = NodeState(me, manifest, config, cast(Any, SimpleNamespace(event=self._event)))
        self.swarm = Membership(self.node)
        self.announced: list[float] = []
        self.read: list[float] = []
        self.left: list[float] = []
        self.adverts: list[Advert] = []
        self.error: Exception | None = None
        self.changed = 0
        self.loop = MembershipLoop(self.node, self.swarm, cast(Any, self), self._changed)

    def _event(self, kind: str, **fields: object) -> None:
        self.warnings += [str(fields["message"])] if kind == "warning" else []

    def _changed(self) -> None:
        self.changed += 1

    async def announce(self, advert: Advert, ttl_s: float) -> None:
        assert (advert, ttl_s) == (self.node.advert, TTL_S)
        self.announced.append(self.node.now())
        if self.error is not None:
            raise self.error

    async def peers(self) -> Sequence[Advert]:
        self.read.append(self.node.now())
        if self.error is not None:
            raise self.error
        return self.adverts

    async def withdraw(self, step: float) -> None:
        self.left.append(step)
        if self.error is not None:
            raise self.error

    async def trains_for(self, seconds: float) -> tuple[list[float], list[float]]:
        """When it was announced and when it read the membership from now on, while microbatches arrive."""
        began, before = self.node.now(), (len(self.announced), len(self.read))
        for _ in range(round(seconds / STEP_S)):
            self.swarm.heard()
            await asyncio.sleep(STEP_S)
        times = self.announced[before[0] :], self.read[before[1] :]
        announced, read = ([at_s - began for at_s in one if at_s < began + seconds] for one in times)
        return announced, read


def at(scenario: Callable[[Place], Awaitable[None]], *, stage: int = 1, state: str = "training") -> None:
    async def main() -> None:
        place = Place(stage, state)
        running = asyncio.create_task(place.loop.run())
        await scenario(place)
        assert not running.done(), "it never ends"
        running.cancel()
        await asyncio.wait([running])

    virtual_time.run(main(), limit_s=10_000)


def every(period_s: float, times: list[float], began: float = 0.0) -> bool:
    """Whether it looked at these times: when it was due, or at the end of the shortest sleep after that."""
    gaps = [later - earlier for earlier, later in zip([began, *times], times, strict=False)]
    return bool(gaps) and all(period_s <= gap <= period_s + READING_S for gap in gaps[1:])


def test_a_later_stage_renews_its_advert_and_reads_now_and_then() -> None:
    async def scenario(place: Place) -> None:
        announced, read = await place.trains_for(60.0)
        assert every(REFRESH_S, read)
        assert every(RENEWAL_S, announced)
        assert len(announced) >= 60.0 / (RENEWAL_S + READING_S)
        assert place.changed == len(place.read)

    at(scenario)


def test_the_first_stage_reads_every_interval_and_announces_its_clock_each_time() -> None:
    async def scenario(place: Place) -> None:
        announced, read = await place.trains_for(10.0)
        assert every(FIRST_S, read)
        assert announced == read
        for speed, period_s in ((5.0, 1.0), (0.01, REFRESH_S)):
            place.node.update(steps_per_s=speed)
            await place.trains_for(FIRST_S)
            announced, read = await place.trains_for(20.0)
            assert every(period_s, read)
            assert announced == read

    at(scenario, stage=0)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("state", ["starting", "syncing", "paused"])
def test_a_node_that_does_not_train_reads_often(state: str, stage: int) -> None:
    async def scenario(place: Place) -> None:
        announced, read = await place.trains_for(20.0)
        assert len(read) == 20.0 / READING_S
        assert every(RENEWAL_S, announced)

    at(scenario, stage=stage, state=state)


def test_a_large_swarm_is_read_less_often() -> None:
    async def scenario(place: Place) -> None:
        peers = [f"p{number}" for number in range(400)]
        place.adverts = [Advert(peer, place.node.run_id, 2, (), state="training") for peer in peers]
        _, read = await place.trains_for(20.0)
        assert every(2.0, read)

    at(scenario, state="syncing")


def test_a_node_from_which_nothing_is_heard_reads_often_once_it_is_quiet_for_longer_than_its_steps() -> None:
    async def scenario(place: Place) -> None:
        await place.trains_for(10.0)
        began = place.node.now()
        await asyncio.sleep(REFRESH_S)
        assert len([at_s for at_s in place.read if at_s > began]) >= (REFRESH_S - 2.0) / READING_S
        place.node.step_seconds.extend([9.0, 9.0, 3.0, 2.0, 2.0])
        await place.trains_for(10.0)
        began = place.node.now()
        await asyncio.sleep(2.9)
        assert len([at_s for at_s in place.read if at_s > began]) <= 1, "its steps take 3 s at most"
        await asyncio.sleep(2.0)
        assert len([at_s for at_s in place.read if at_s > began + 2.9]) >= 3

    at(scenario)


def test_news_are_announced_at_once() -> None:
    async def scenario(place: Place) -> None:
        await place.trains_for(1.0)
        held = (Holding(1, 2, 20),)
        news = {"moving_to": 2, "partner_from_round": 3, "settled": True, "holds": held, "evaluated": True}
        for field, value in (news | {"state": "finished", "stage": 2}).items():
            place.announced.clear()
            place.node.publish(**{field: value})
            await asyncio.sleep(0.01)
            assert len(place.announced) == 1, field
        place.announced.clear()
        place.node.publish(step=7.0)
        await asyncio.sleep(0.01)
        assert place.announced == [], "others learn of it with the next renewal"

    at(scenario)


def test_a_node_without_a_stage_is_not_announced() -> None:
    async def scenario(place: Place) -> None:
        announced, read = await place.trains_for(20.0)
        assert (announced, len(read)) == ([], 20.0 / READING_S)
        place.node.publish(stage=1)
        await asyncio.sleep(0.01)
        assert len(place.announced) == 1

    at(scenario, stage=NO_STAGE, state="starting")


def test_a_directory_that_fails_is_tried_again() -> None:
    async def scenario(place: Place) -> None:
        place.error = Unreachable("the table cannot be reached")
        announced, read = await place.trains_for(4.0)
        assert len(announced) == 4.0 / READING_S, "nobody has its advert"
        assert len(read) == 1
        assert (len(place.warnings), place.changed) == (len(place.announced) + len(place.read), 0)
        place.error = None
        announced, read = await place.trains_for(20.0)
        assert announced[0] <= READING_S
        assert every(RENEWAL_S, announced)
        assert read[0] <= REFRESH_S - 4.0 + READING_S

    at(scenario)


def test_a_caller_that_is_not_listed_brings_one_reading_forward_but_not_two() -> None:
    async def scenario(place: Place) -> None:
        await place.trains_for(12.0)
        for brings_forward in (True, False):
            place.swarm.refused_unlisted()
            _, read = await place.trains_for(1.0)
            assert bool(read) == brings_forward
        _, read = await place.trains_for(10.0)
        assert REFRESH_S - 2.0 <= read[0] <= REFRESH_S - 2.0 + READING_S

    at(scenario)


def test_while_a_stage_is_deserted_it_is_looked_for() -> None:
    async def scenario(place: Place) -> None:
        place.adverts = [
            Advert(peer, place.node.run_id, stage, (), state="training") for peer, stage in (("a", 0), ("c", 2))
        ]
        await place.trains_for(6.0)
        for _ in range(2):
            place.swarm.failed("c")
            await asyncio.sleep(5.0)
            place.swarm.heard()
        assert place.swarm.deserted
        _, read = await place.trains_for(5.0)
        assert len(read) >= 9

    at(scenario)


@pytest.mark.parametrize("fails", [False, True])
def test_a_node_that_leaves_says_so(fails: bool) -> None:
    async def scenario(place: Place) -> None:
        await place.trains_for(1.0)
        place.node.update(step=7.5)
        place.error = Unreachable("the table cannot be reached") if fails else None
        await place.loop.withdraw()
        assert (place.left, len(place.warnings)) == ([7.5], fails)

    at(scenario)


def test_the_next_reading_is_waited_for_unless_the_node_leaves() -> None:
    async def scenario(place: Place) -> None:
        await place.trains_for(1.0)
        waiting = asyncio.create_task(place.loop.next_reading())
        await place.trains_for(3.0)
        assert not waiting.done()
        await place.trains_for(1.5)
        assert waiting.done()
        waiting = asyncio.create_task(place.loop.next_reading())
        await asyncio.sleep(0.1)
        place.error = Unreachable("the table cannot be reached")
        place.node.drain("told to leave")
        await asyncio.sleep(10.0)
        assert waiting.done()

    at(scenario)
