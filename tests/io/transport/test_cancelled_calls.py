"""Calls that the server cancels, at every point at which they await something, leave nothing behind."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from machine import in_time
from transport_fixture import (
    Node,
    Pair,
    activation,
    alive,
    echo,
    hold_nothing,
    is_far,
    pair,
    run,
    tensor,
    watched_buffers,
)

from noloco_p2p.core.messages import Gradient, Header, PeerId, ReplicaState
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.errors import Busy, PeerError
from noloco_p2p.io.transport import service
from noloco_p2p.ports import Body

METHODS = ("Propagate", "Evaluate", "Stripe", "FetchSnapshot", "FetchState", "Warm", "Progress", "Describe")
"""In the order in which the service registers them."""
MIDDLE = (3, 333, 777)
"""3 MiB: a few messages."""
WEIGHTS = tensor("w", "float32", (1 << 20,))
ENDED_S = 10.0

Answer = Callable[[Any, Any], Awaitable[None]]


class Cancels:
    """Cancels a call of a method at the `at`-th point at which any call of that method waits.

    All calls are counted, because one of several that carry a body may have nothing to do, and one that its caller has
    cancelled in an earlier round may arrive late.
    """

    def __init__(self, method: str, bounded: Callable[..., Answer]) -> None:
        self._method, self._bounded = method, bounded
        self._names = iter(METHODS)
        self.at = self.points = 0
        """`points` counts how often the calls have waited."""
        self.cancelled = asyncio.Event()

    def bounded(self, *arguments: Any) -> Answer:
        """Replaces `service._bounded`."""
        answer, name = self._bounded(*arguments), next(self._names)

        async def cancelled(request: Any, context: Any) -> None:
            call = answer(request, context)
            await (Stepped(self, call) if name == self._method else call)

        return cancelled

    def waits(self, task: "asyncio.Task[Any]") -> None:
        """The call is about to wait."""
        self.points += 1
        if self.points == self.at:
            asyncio.get_running_loop().call_soon(task.cancel)
            self.cancelled.set()


class Stepped:
    """Awaits a call, and reports each time that it waits."""

    def __init__(self, cancels: Cancels, call: Awaitable[None]) -> None:
        self._cancels, self._call = cancels, call

    def __await__(self) -> Generator[Any, Any, None]:
        task, call = asyncio.current_task(), self._call.__await__()
        assert task is not None
        assert isinstance(call, Generator | Coroutine)
        resume, value = call.send, None
        while True:
            try:
                waited = resume(value)
            except StopIteration:
                return
            self._cancels.waits(task)
            try:
                yield waited
                resume, value = call.send, None
            except BaseException as error:  # noqa: BLE001
                resume, value = call.throw, error


@asynccontextmanager
async def lend(caller: PeerId, number: int | None) -> AsyncIterator[ReplicaState]:
    yield ReplicaState("B", 1, 3, 30.0, 30, 30, (WEIGHTS,), 7)


async def freeze(request: SnapshotRequest) -> Snapshot:
    return Snapshot("B", 4, 40, (WEIGHTS,))


async def refuse(header: Header, body: Body) -> Gradient:
    raise Busy("who are you?", late=True)


def ours() -> set["asyncio.Task[Any]"]:
    """All tasks except the one in which gRPC waits for the next call."""
    return {one for one in asyncio.all_tasks() if "AioServer" not in repr(one)}


ASKED: dict[str, Callable[[Pair], Coroutine[Any, Any, object]]] = {
    "Propagate": lambda both: both.a.propagate(both.peer, activation(MIDDLE)),
    "Stripe": lambda both: both.a.propagate(both.peer, activation(MIDDLE)),
    "Evaluate": lambda both: both.a.evaluate(both.peer, activation()),
    "FetchSnapshot": lambda both: both.a.fetch_snapshot(both.peer, SnapshotRequest(1, 4), 20.0, (WEIGHTS.spec,)),
    "FetchState": lambda both: both.a.fetch_state(both.peer, 20.0, (WEIGHTS.spec,)),
    "Progress": lambda both: both.a.progress(both.peer, [activation().header.microbatch], 20.0),
    "Describe": lambda both: both.a.describe(both.peer),
}


@pytest.mark.parametrize(
    ("method", "far", "serve"),
    [
        *((method, False, echo) for method in ASKED if method != "Stripe"),
        *((method, True, echo) for method in ("Propagate", "Stripe", "FetchSnapshot")),
        ("Propagate", False, refuse),
    ],
)
def test_a_call_cancelled_at_any_point_leaves_nothing(
    method: str, far: bool, serve: Callable[[Header, Body], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers, cancels = watched_buffers(monkeypatch), Cancels(method, service._bounded)
    monkeypatch.setattr(service, "_bounded", cancels.bounded)

    async def ask(both: Pair) -> None:
        if far:
            is_far(both)
        with suppress(PeerError):
            await ASKED[method](both)

    async def cancel(both: Pair) -> None:
        """Cancel both ends of one call; whatever the calling end still holds is freed with this frame."""
        asking, reached = (asyncio.create_task(one) for one in (ask(both), cancels.cancelled.wait()))
        await asyncio.wait([asking, reached], return_when=asyncio.FIRST_COMPLETED)
        asking.cancel()
        reached.cancel()
        await asyncio.wait([asking, reached])

    async def scenario() -> None:
        async with pair(Node(serve, freeze, lend)) as both:
            served = both.b._servicer
            await ask(both)
            before = ours()
            while cancels.at == 0 or cancels.cancelled.is_set():
                skipped = cancels.at // 8 if method == "Stripe" else 0  # 15 stripes wait at about 100 points.
                cancels.at, cancels.points = cancels.at + 1 + skipped, 0
                cancels.cancelled.clear()
                await cancel(both)
                began_at = time.monotonic()
                while ours() - before or not hold_nothing(served.callers) or alive(buffers):
                    assert in_time(time.monotonic() - began_at, ENDED_S)
                    await asyncio.sleep(0.01)
                for left in (served._replies, served._striped._known, served._striped._waiting):
                    assert not left
                assert not served.callers.unread
            assert cancels.at > 2

    run(scenario())
