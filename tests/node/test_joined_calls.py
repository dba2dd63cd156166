"""Two calls with the same microbatch are one attempt, whichever of the two callers disconnects first."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import pytest

from noloco_p2p.config import OuterSettings, RunManifest
from noloco_p2p.core.messages import Activation, Gradient, Header, PeerId
from noloco_p2p.errors import Busy
from noloco_p2p.node.pipeline.serve import MicrobatchServer
from noloco_p2p.ports import Body
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.world import SimPlan, SimSwarm

R = TypeVar("R")


class NeverComes:
    """The body of a caller whose link is dead."""

    received = 0

    def reply_soon(self) -> None:
        raise AssertionError("a reply cannot follow soon")

    async def __call__(self) -> Activation:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


Serve = Callable[[], Coroutine[Any, Any, Gradient]]
Call = asyncio.Task[Gradient]


def run_with_a_lost_body(
    patch: pytest.MonkeyPatch, meanwhile: Callable[[Call, Serve], Coroutine[Any, Any, R]]
) -> tuple[R, Outcome]:
    """The body of the first call never comes. `meanwhile` gets that call, and a way to serve its microbatch again."""
    right, begun, found = MicrobatchServer.propagate, list[Call](), list[R]()

    async def propagate(server: MicrobatchServer, caller: PeerId, header: Header, body: Body) -> Gradient:
        serve = partial(right, server, caller, header)
        if not begun:
            begun.append(asyncio.create_task(serve(NeverComes())))
            await asyncio.sleep(0.01)
            found.append(await meanwhile(begun[0], partial(serve, body)))
        return await serve(body)

    patch.setattr(MicrobatchServer, "propagate", propagate)
    outcome = SimSwarm(
        SimPlan(RunManifest(stages=2, start_replicas=1, steps=4, outer=OuterSettings(rule="noloco")), (1, 1))
    ).run(limit_s=1000)
    return found[0], outcome


def test_a_caller_that_has_joined_a_call_gets_busy_when_the_body_goes_with_the_first_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This happens when a call is retried before this node knows that the previous one has ended."""

    async def the_first_caller_goes(first: Call, serve: Serve) -> BaseException | None:
        second = asyncio.create_task(serve())
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait([first, second])
        return second.exception()

    error, outcome = run_with_a_lost_body(monkeypatch, the_first_caller_goes)
    assert isinstance(error, Busy)
    [origin] = outcome.of_stage(0)
    assert origin.microbatches["dropped"] == 0
    assert outcome.trace.of("reroute") == []


def test_a_retry_does_not_join_a_body_that_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call is still open: its link has died silently, and that would be noticed only after a while."""

    async def a_second_call(first: Call, serve: Serve) -> tuple[BaseException | None, float]:
        began, second = asyncio.get_running_loop().time(), asyncio.create_task(serve())
        await asyncio.wait([second])
        took_s = asyncio.get_running_loop().time() - began
        await asyncio.wait([first])
        return second.exception(), took_s

    (error, took_s), outcome = run_with_a_lost_body(monkeypatch, a_second_call)
    assert isinstance(error, Busy)
    assert took_s == 0.0
    [origin] = outcome.of_stage(0)
    assert origin.microbatches["dropped"] == 0


def test_a_call_that_is_cut_off_before_it_has_begun_hears_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outer round begins in the same loop iteration in which its header arrived. If its handler were cancelled, gRPC
    would not answer, and the caller would wait until the call counts as lost."""
    right, found = MicrobatchServer.propagate, list[BaseException | None]()

    async def propagate(server: MicrobatchServer, caller: PeerId, header: Header, body: Body) -> Gradient:
        if not found:
            server.intake.seal()
            first = asyncio.create_task(right(server, caller, header, body))
            await asyncio.sleep(0)
            server.close()
            await asyncio.wait([first])
            server.open()
            found.append(asyncio.CancelledError() if first.cancelled() else first.exception())
        return await right(server, caller, header, body)

    monkeypatch.setattr(MicrobatchServer, "propagate", propagate)
    SimSwarm(SimPlan(RunManifest(stages=2, start_replicas=1, steps=4, outer=OuterSettings(rule="noloco")), (1, 1))).run(
        limit_s=1000
    )
    assert isinstance(found[0], Busy), "the handler was cancelled"
