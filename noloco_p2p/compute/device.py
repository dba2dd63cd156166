"""The device's thread. It runs the event loop's calls one at a time, the most urgent first, each to its end.

Nothing here knows torch.

The order: a backward pass ends what the previous stage waits for and frees a graph, so it goes before a forward pass,
which only adds to what is in flight (as in the "one forward, one backward" schedule of pipelines). An inner step or a
merge is as urgent, because the replica admits nothing until it is done. Evaluation has no deadline and goes last.
Within a priority calls run in their order.
"""

import asyncio
import contextlib
import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from noloco_p2p.errors import LocalError

URGENT, NORMAL, IDLE = 0, 1, 2
"""Priorities: backward passes and what ends steps and rounds; forward passes; evaluation."""
CLOSED = "the device has been closed"
MEMORY_SIGNS = ("out of memory", "can't allocate memory", "not enough memory")

R = TypeVar("R")


@dataclass(order=True, slots=True)
class DeviceCall:
    """A call in the queue. `future` is None if nobody waits for its result."""

    priority: int
    number: int
    work: Callable[[], Any] = field(compare=False)
    future: asyncio.Future[Any] | None = field(compare=False, default=None)
    lost: Callable[[Any], None] | None = field(compare=False, default=None)


class Device:
    """A thread and its priority queue. Use `call` from an event loop, `post` from anywhere."""

    def __init__(self, name: str) -> None:
        self._queue: list[DeviceCall] = []
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        self._closed = False
        self._busy_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(self, priority: int, work: Callable[[], R], *, lost: Callable[[R], None] | None = None) -> R:
        """Run `work` on the thread, and return its result or raise what it raised (out of memory: LocalError).

        If cancelled before the work starts, it is not run. If cancelled later, it runs to its end and `lost` gets the
        result, on the loop. Raises LocalError: the device is closed.
        """
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        if not self._push(priority, work, future, lost):
            raise LocalError(CLOSED)
        try:
            return await future
        finally:
            del future, work  # an error holds this frame: with the future in it, work (and weights) would outlive both

    def post(self, work: Callable[[], object]) -> None:
        """Run `work` urgently without waiting for it. After `close` it is dropped."""
        self._push(URGENT, work)

    def take_busy_s(self) -> float:
        """Seconds that the thread has worked since the last call of this. Called on the thread, inside a call."""
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def close(self) -> None:
        """End the thread after the running call; waiting calls get LocalError. Returns at once. May be called again."""
        with self._wake:
            self._closed = True
            waiting, self._queue = self._queue, []
            self._wake.notify()
        for queued in waiting:
            _deliver(queued, None, LocalError(CLOSED))

    def join(self) -> None:
        """Wait until the thread has ended (after `close`)."""
        self._thread.join()

    def _push(self, priority: int, work: Callable[[], Any], *rest: Any) -> bool:
        with self._wake:
            if self._closed:
                return False
            heapq.heappush(self._queue, DeviceCall(priority, next(self._numbers), work, *rest))
            self._wake.notify()
        return True

    def _next(self) -> DeviceCall | None:
        """Wait for the most urgent job. None: closed."""
        with self._wake:
            while not self._queue and not self._closed:
                self._wake.wait()
            return None if self._closed else heapq.heappop(self._queue)

    def _run(self) -> None:
        _compute_in_batches()
        while (queued := self._next()) is not None:
            if queued.future is not None and queued.future.cancelled():
                continue
            result, error = None, None
            began_at = time.perf_counter()
            try:
                result = queued.work()
            except BaseException as raised:  # noqa: BLE001 - it is raised again, in whoever waits for the call
                error = _local(raised)
            self._busy_s += time.perf_counter() - began_at
            _deliver(queued, result, error)
            del queued, result, error


def _compute_in_batches() -> None:
    """Schedule the calling thread as SCHED_BATCH, where the system has it (Linux).

    The thread then never preempts another one when it wakes up: several nodes on few cores disturb each other's caches
    less, and event loops still run at once.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it; it is slower without, nothing else
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _deliver(queued: DeviceCall, result: Any, error: BaseException | None) -> None:
    """Schedule the hand-over on the waiter's loop. If that loop is closed, nobody waits any more."""
    if queued.future is None:
        return
    loop = queued.future.get_loop()
    try:
        loop.call_soon_threadsafe(_hand_over, queued, result, error)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _hand_over(queued: DeviceCall, result: Any, error: BaseException | None) -> None:
    """On the loop: give the outcome to the waiter, or, if it is gone, the result to `lost`."""
    assert queued.future is not None
    if queued.future.cancelled():
        if error is None and queued.lost is not None:
            queued.lost(result)
    elif error is None:
        queued.future.set_result(result)
    else:
        queued.future.set_exception(error)


def _local(error: BaseException) -> BaseException:
    """LocalError for a lack of memory on the host or the device; any other error unchanged."""
    named = isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in MEMORY_SIGNS)
    if not (named or isinstance(error, MemoryError)):
        return error
    local = LocalError("not enough memory on the device: set compute.recompute, or use more stages")
    local.__cause__ = error
    return local
