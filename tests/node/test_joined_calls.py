"""Two calls with the same microbatch are one attempt, whoever of the two callers goes first."""

import asyncio
from typing import Any

import pytest

from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import Activation, Gradient, Header, PeerId
from noloco_p2p.errors import Busy
from noloco_p2p.node.pipeline.serve import MicrobatchServer
from noloco_p2p.ports import Body
from noloco_p2p.sim.world import SimPlan, SimSwarm


class NeverComes:
    """The body of a caller whose link is dead."""

    received = 0

    async def __call__(self) -> Activation:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


def test_who_has_joined_a_call_hears_busy_when_its_body_goes_with_its_first_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when a call is tried again before the end of the one before it is known here."""
    right, ends = MicrobatchServer.propagate, list[Any]()

    async def twice(server: MicrobatchServer, caller: PeerId, header: Header, body: Body) -> Gradient:
        if ends:
            return await right(server, caller, header, body)
        ends.append("first")
        first = asyncio.create_task(right(server, caller, header, NeverComes()))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(right(server, caller, header, body))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait([first, second])
        ends.append(second.exception())
        return await second

    monkeypatch.setattr(MicrobatchServer, "propagate", twice)
    outcome = SimSwarm(SimPlan(RunManifest(stages=2, start_replicas=1, steps=4), (1, 1))).run(limit_s=1000)
    assert isinstance(ends[1], Busy)
    [origin] = outcome.of_stage(0)
    assert origin.microbatches["dropped"] == 0
    assert outcome.trace.of("reroute") == []


def test_a_retry_does_not_join_a_body_that_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call is still here: its link is dead without a word, and its end would be known only after a while."""
    right, ends = MicrobatchServer.propagate, list[Any]()

    async def twice(server: MicrobatchServer, caller: PeerId, header: Header, body: Body) -> Gradient:
        if ends:
            return await right(server, caller, header, body)
        ends.append("first")
        first = asyncio.create_task(right(server, caller, header, NeverComes()))
        await asyncio.sleep(0.01)
        began = asyncio.get_running_loop().time()
        second = asyncio.create_task(right(server, caller, header, body))
        await asyncio.wait([second])
        ends.append((second.exception(), asyncio.get_running_loop().time() - began))
        await asyncio.wait([first])
        return await right(server, caller, header, body)

    monkeypatch.setattr(MicrobatchServer, "propagate", twice)
    outcome = SimSwarm(SimPlan(RunManifest(stages=2, start_replicas=1, steps=4), (1, 1))).run(limit_s=1000)
    error, seconds = ends[1]
    assert isinstance(error, Busy)
    assert seconds == 0.0
    [origin] = outcome.of_stage(0)
    assert origin.microbatches["dropped"] == 0
