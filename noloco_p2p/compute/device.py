"""The device: a thread that runs calls of the event loop one at a time, the most urgent first, each to its end.

Only `make_stage` imports torch, and it does so on that thread.
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

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import LocalError
from noloco_p2p.ports import DEVICE_CLOSED, Device, Operation, Stage

MEMORY_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "alloc_failed")

R = TypeVar("R")


@dataclass(order=True, slots=True)
class DeviceCall:
    """A queued call. `future` is None if nobody waits for its result."""

    priority: int
    number: int
    work: Callable[[], Any] = field(compare=False)
    future: asyncio.Future[Any] | None = field(compare=False, default=None)
    lost: Callable[[Any], None] | None = field(compare=False, default=None)


class DeviceThread:
    """Implements the Device port with a thread and a priority queue."""

    def __init__(self, name: str) -> None:
        self._queue: list[DeviceCall] = []
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        self._closed = False
        self._busy_s = 0.0
        self._running: tuple[DeviceCall, float] | None = None
        """The call in execution, and when it began."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(self, operation: Operation, work: Callable[[], R], *, lost: Callable[[R], None] | None = None) -> R:
        """See `ports.Device`."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        if not self._push(operation.priority, work, future, lost):
            raise LocalError(DEVICE_CLOSED)
        try:
            return await future
        except asyncio.CancelledError:
            if lost is not None and not future.cancelled() and future.exception() is None:
                lost(future.result())  # it arrived in the same iteration of the loop as the cancellation
            raise
        finally:
            del future, work  # an error refers to this frame, and would keep the work (and weights) alive

    async def on_host(self, work: Callable[[], R]) -> R:
        """See `ports.Device`. Runs in another thread."""
        return await asyncio.to_thread(work)

    def post(self, work: Callable[[], object]) -> None:
        """See `ports.Device`. Callable from any thread."""
        self._push(0, work)

    def take_busy_s(self) -> float:
        """See `ports.Device`."""
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def running_s(self) -> float:
        """See `ports.Device`."""
        running = self._running
        return 0.0 if running is None else time.perf_counter() - running[1]

    def close(self, *, hung: bool = False) -> None:
        """See `ports.Device`. The thread ends, unless it hangs. May be called more than once."""
        with self._wake:
            self._closed = True
            waiting, self._queue = self._queue, []
            if hung and self._running is not None:
                waiting.append(self._running[0])
                self._running = None
            self._wake.notify()
        for queued in waiting:
            _deliver(queued, None, LocalError(DEVICE_CLOSED))

    def _push(self, priority: int, work: Callable[[], Any], *rest: Any) -> bool:
        with self._wake:
            if self._closed:
                return False
            heapq.heappush(self._queue, DeviceCall(priority, next(self._numbers), work, *rest))
            self._wake.notify()
        return True

    def _next(self) -> DeviceCall | None:
        """Wait for the most urgent call; None once the device is closed."""
        with self._wake:
            while not self._queue and not self._closed:
                self._wake.wait()
            return None if self._closed else heapq.heappop(self._queue)

    def _run(self) -> None:
        _compute_in_batches()
        while (queued := self._next()) is not None:
            if queued.future is not None and queued.future.cancelled():
                del queued  # waiting for the next call, this frame would keep the work (and weights) alive
                continue
            result, error = None, None
            began_at = time.perf_counter()
            self._running = queued, began_at
            try:
                result = queued.work()
            except BaseException as raised:  # noqa: BLE001 - it is raised again in the task that waits for the call
                error = as_local(raised)
            self._busy_s += time.perf_counter() - began_at
            with self._wake:
                given_up, self._running = self._running is None, None
            if not given_up:
                _deliver(queued, result, error)
            del queued, result, error


def _compute_in_batches() -> None:
    """Schedule the calling thread as SCHED_BATCH, where the system has that (Linux).

    The thread then never preempts another one when it wakes up. So several nodes on few cores disturb each other's
    caches less, and event loops still run at once.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it, which only makes the node slower
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _deliver(queued: DeviceCall, result: Any, error: BaseException | None) -> None:
    """Schedule the hand-over on the waiter's loop. If that loop is closed, nobody is waiting any more."""
    if queued.future is None:
        return
    loop = queued.future.get_loop()
    try:
        loop.call_soon_threadsafe(_hand_over, queued, result, error)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _hand_over(queued: DeviceCall, result: Any, error: BaseException | None) -> None:
    """On the loop: give the outcome to the waiter, or, if that was cancelled, the result to `lost`."""
    assert queued.future is not None
    if queued.future.cancelled():
        if error is None and queued.lost is not None:
            queued.lost(result)
    elif error is None:
        queued.future.set_result(result)
    else:
        queued.future.set_exception(error)


def as_local(error: BaseException) -> BaseException:
    """LocalError if host or device ran out of memory; any other error unchanged."""
    named = isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in MEMORY_SIGNS)
    if not (named or isinstance(error, MemoryError)):
        return error
    local = LocalError("not enough memory on the device: set compute.recompute, or use more stages")
    local.__cause__ = error
    return local


async def make_stage(manifest: RunManifest, node: NodeConfig, index: int, peer_id: PeerId) -> tuple[Stage, Device]:
    """Make stage `index` with its initial weights on its own device thread, without blocking the loop.

    Raises like `factory.make_torch_stage`.
    """
    device = DeviceThread(f"device-{index}")

    def make() -> Stage:
        from noloco_p2p.compute.factory import make_torch_stage
        from noloco_p2p.compute.hardware import set_threads

        set_threads(node.threads)
        recompute = node.compute.recompute
        return make_torch_stage(manifest, index, peer_id, device=node.device, audit=node.audit, recompute=recompute)

    try:
        stage = await device.call(Operation.OUTER, make)
        await device.call(Operation.OUTER, device.take_busy_s)  # the time to make it belongs to no inner step
        return stage, device
    except BaseException:
        device.close()
        raise
