"""Under `balanced`: a replica does not wait forever for origins that have fallen silent."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from elastic import plan_of

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.intake import AttemptKey
from noloco_p2p.core.messages import Advert, MicrobatchId, Origin
from noloco_p2p.core.status import AnyReplica
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.pipeline.origins import LONGEST_PAUSE
from noloco_p2p.node.pipeline.serve import MicrobatchServer
from noloco_p2p.node.state import NodeState
from noloco_p2p.sim import virtual_time
from noloco_p2p.sim.faults import Fault, FaultySwarm


def server_of_two_origins() -> MicrobatchServer:
    """The later stage of a run under `balanced`, in a step that waits for two microbatches each of A and B."""
    manifest = RunManifest(routing="balanced", microbatches_per_step=2)
    me = Advert("me", manifest.run_id, 1, (), state="training")
    node = NodeState(me, manifest, NodeConfig(), cast(Any, SimpleNamespace(event=lambda *_, **__: None)))
    swarm = Membership(node)
    swarm.read([Advert(peer, manifest.run_id, 0, (), state="training") for peer in ("A", "B")])
    for peer in "AB":
        swarm.members.answered(peer)
    server = MicrobatchServer(node, swarm, cast(Any, None))
    assert server.may_open()
    server.open()
    return server


def test_an_origin_whose_microbatch_breaks_off_is_given_up_even_after_the_others() -> None:
    """One of two origins was silent; the other hung later, when all that was due had come. The step never ended."""

    async def scenario() -> None:
        server = server_of_two_origins()
        of_b = [AttemptKey(MicrobatchId("B", 1, index), index) for index in range(2)]
        for index, key in enumerate(of_b):
            server.intake.offer(key, Origin("B", 0, index))
        step = asyncio.create_task(server.until_ready(lambda: False))
        await asyncio.sleep(700)
        assert server.intake.missing_origins == [], "A has been given up"
        for key in of_b:
            server.intake.leave(key)
        assert server.intake.missing_origins == ["B"]
        async with asyncio.timeout(1300):
            await step

    virtual_time.run(scenario(), limit_s=10_000)


def test_an_origin_that_sends_and_never_fills_its_slots_is_given_up() -> None:
    """It held up the step for as long as it sent anything."""

    async def scenario() -> None:
        server = server_of_two_origins()
        for index in range(2):
            key = AttemptKey(MicrobatchId("B", 1, index), index)
            server.intake.offer(key, Origin("B", 0, index))
            server.intake.done(key, counted=True)
        step = asyncio.create_task(server.until_ready(lambda: False))
        for _ in range(10):
            await asyncio.sleep(100)
            server._origins.heard(Origin("A", 0, 7))
        assert not step.done(), "it may yet send what is missing"
        for _ in range(40):
            await asyncio.sleep(100)
            server._origins.heard(Origin("A", 0, 7))
        assert step.done()

    virtual_time.run(scenario(), limit_s=10_000)


def test_an_origin_that_stays_silent_is_not_waited_for_again() -> None:
    async def scenario() -> None:
        server, loop = server_of_two_origins(), asyncio.get_running_loop()
        origins, waits = server._origins, server._node.waits
        await asyncio.sleep(100)
        origins.give_up(["A"], began=0.0, silence_s=10.0)
        assert origins.is_silent("A")
        await asyncio.sleep(1_000)
        origins.give_up(["B"], began=loop.time(), silence_s=10.0)
        assert not origins.is_silent("B")
        assert [origins.waits_for(origin) for origin in "AB"] == [False, True]
        waiting = asyncio.create_task(waits.until(lambda: origins.waits_for("A"), "A", AnyReplica(0)))
        await asyncio.sleep(1.0)
        origins.heard(Origin("A", 0, 0))
        await asyncio.wait_for(waiting, 1.0)

    virtual_time.run(scenario(), limit_s=10_000)


def test_an_origin_that_falls_silent_again_and_again_is_waited_for_less_and_less() -> None:
    """One of three origins reached nobody for three seconds out of four: the others took 292 s."""
    plan = plan_of((3, 3), routing="balanced", steps=150)

    def others_took_s(faults: tuple[Fault, ...]) -> float:
        outcome = FaultySwarm(plan, faults).run(limit_s=1000)
        return max(
            e.at_s for one in ("s0r0", "s0r1") for e in outcome.trace.of("state", one) if e.get("state") == "finished"
        )

    assert others_took_s(tuple(Fault(at_s, "mute", ("s0r2",), 3.0) for at_s in range(8, 600, 4))) < 2 * others_took_s(
        ()
    )


NOW, SILENCE_S = 100.0, 10.0


@pytest.mark.parametrize("all_missing", [False, True])
@pytest.mark.parametrize(
    ("state", "began", "heard", "announced", "given_up"),
    [
        ("training", 95.0, None, 0.0, (False, False)),
        ("training", 80.0, 95.0, 0.0, (False, False)),
        ("training", 80.0, 85.0, 0.0, (True, True)),
        ("training", 55.0, 95.0, 0.0, (True, False)),
        ("training", 80.0, None, 95.0, (True, False)),
        ("training", 80.0, None, 85.0, (True, True)),
        ("paused", 80.0, None, 95.0, (True, False)),
        ("waiting", 80.0, None, 95.0, (True, True)),
        ("syncing", 95.0, 95.0, 95.0, (True, True)),
        ("left", 95.0, None, 0.0, (True, True)),
    ],
)
def test_which_origin_is_given_up(
    state: str, began: float, heard: float | None, announced: float, given_up: tuple[bool, bool], all_missing: bool
) -> None:
    """`given_up`: whether it is if the other origin sends, and if that one is missing as well."""

    async def scenario() -> None:
        server = server_of_two_origins()
        origins, swarm = server._origins, server._swarm
        if heard is not None:
            await asyncio.sleep(heard)
            origins.heard(Origin("A", 0, 0))
        await asyncio.sleep(NOW - (heard or 0.0))
        found = Advert("A", "run", 0, (), state=state, announced_at=announced)
        swarm.read([found, Advert("B", "run", 0, (), state="training", announced_at=NOW)])
        origins.give_up(["A", "B"] if all_missing else ["A"], began, SILENCE_S)
        assert [origins.is_silent(origin) for origin in "AB"] == [given_up[all_missing], False]
        await asyncio.sleep(1.0)
        origins.heard(Origin("A", 0, 1))
        assert origins.is_silent("A") == (state == "left"), "it is waited for again, if it is listed"

    virtual_time.run(scenario(), limit_s=1000)


def test_an_origin_that_is_doubted_is_waited_for_once_it_has_sent_something() -> None:
    async def scenario() -> None:
        server = server_of_two_origins()
        server._swarm.read([Advert("C", "run", 0, (), state="training")])
        assert server._swarm.members.doubted() == {"C"}
        assert server._origins.is_silent("C")
        server._origins.heard(Origin("C", 0, 0))
        assert not server._origins.is_silent("C")

    virtual_time.run(scenario(), limit_s=1000)


def test_the_pause_after_each_lapse_doubles_up_to_a_limit_and_lapses_are_forgotten() -> None:
    async def scenario() -> None:
        origins, loop = server_of_two_origins()._origins, asyncio.get_running_loop()

        async def lapse_s() -> float:
            """Give A up, hear of it again, and return how long it was not waited for."""
            await asyncio.sleep(SILENCE_S + 1.0)
            began = loop.time()
            origins.give_up(["A"], began - SILENCE_S, SILENCE_S)
            assert origins.is_silent("A")
            await asyncio.sleep(0.5)
            origins.heard(Origin("A", 0, 0))
            for _ in range(1000):
                if origins.waits_for("A"):
                    break
                await asyncio.sleep(1.0)
            return loop.time() - began

        pauses = [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_PAUSE, LONGEST_PAUSE]
        assert [await lapse_s() for _ in pauses] == pytest.approx([SILENCE_S * one for one in pauses], abs=1.5)
        await asyncio.sleep((LONGEST_PAUSE - 2.0) * SILENCE_S)
        assert await lapse_s() > SILENCE_S, "they are not forgotten yet"
        await asyncio.sleep((LONGEST_PAUSE + 1.0) * SILENCE_S)
        assert await lapse_s() < 1.0
        assert await lapse_s() > SILENCE_S - 1.0
        await asyncio.sleep(SILENCE_S + 1.0)
        origins.give_up(["A"], loop.time() - SILENCE_S, SILENCE_S)
        assert origins.is_silent("A")
        await asyncio.sleep(1.0)
        origins.heard(Origin("A", 0, 0))
        assert not origins.waits_for("A")
        origins.give_up(["B"], loop.time() - 2 * SILENCE_S, SILENCE_S)
        assert origins.is_silent("B")
        assert origins.waits_for("A"), "no other is left"

    virtual_time.run(scenario(), limit_s=100_000)
