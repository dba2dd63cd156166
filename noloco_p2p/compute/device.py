"""The device's thread. It runs the event loop's calls one at a time, the most urgent first, each to its end.

`DeviceStage` is the Stage port over a synchronous stage. Nothing here knows torch.

The order: a backward pass ends what the previous stage waits for and frees a graph, so it goes before a forward pass,
which only adds to what is in flight (as in the "one forward, one backward" schedule of pipelines). An inner step or a
merge is as urgent, because the replica admits nothing until it is done. Evaluation has no deadline and goes last.
Within a priority calls run in their order.
"""

import asyncio
import contextlib
import dataclasses
import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.gradient_pairs import GradientLikeness
from noloco_p2p.core.messages import Gradient, HostTensor, LossSum, MicrobatchId, PeerId, ReplicaState
from noloco_p2p.core.snapshots import FrozenRound, PartnerVector, Snapshot, SnapshotRequest
from noloco_p2p.core.stage_values import Contribution, MergeResult, StepLabel, StepResult
from noloco_p2p.errors import LocalError

if TYPE_CHECKING:
    from noloco_p2p.compute.stage import TorchStage

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


class DeviceStage:
    """The Stage port over a synchronous stage on its device thread."""

    def __init__(self, stage: "TorchStage", device: Device) -> None:
        self._stage: TorchStage | None = stage
        self._device = device
        self.state = stage.state

    @property
    def places(self) -> int | None:
        """As in the port."""
        return None if self._stage is None else self._stage.memory.places

    async def forward(self, inputs: HostTensor, mask: HostTensor | None) -> tuple[int, HostTensor]:
        """As in the port. A graph whose waiter is gone is freed."""
        work = partial(self._open_stage().forward, inputs, mask)
        return await self._device.call(NORMAL, work, lost=lambda result: self.discard(result[0]))

    async def backward(self, graph: int, microbatch: MicrobatchId, gradient: Gradient) -> Contribution:
        """As in the port."""
        return await self._device.call(URGENT, partial(self._open_stage().backward, graph, microbatch, gradient))

    async def loss_backward(
        self, microbatch: MicrobatchId, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None
    ) -> Contribution:
        """As in the port."""
        work = partial(self._open_stage().loss_backward, microbatch, inputs, targets, mask)
        return await self._device.call(URGENT, work)

    def discard(self, graph: int) -> None:
        """As in the port. Freed on the device thread, and after `close` with everything else."""
        if self._stage is not None:
            self._device.post(partial(self._stage.discard, graph))

    async def evaluate(self, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None) -> HostTensor | LossSum:
        """As in the port."""
        return await self._device.call(IDLE, partial(self._open_stage().evaluate, inputs, targets, mask))

    async def is_sound(self) -> bool:
        """As in the port."""
        return await self._device.call(NORMAL, self._open_stage().is_sound)

    async def compare(self, one: Gradient, other: Gradient) -> GradientLikeness:
        """As in the port. Runs beside the device."""
        return await asyncio.to_thread(self._open_stage().compare, one, other)

    async def inner_step(self, label: StepLabel) -> StepResult:
        """As in the port, with the seconds that the device worked from the start of the previous inner step to now."""
        take = self._open_stage().inner_step

        def work() -> StepResult:
            return dataclasses.replace(take(label), busy_s=self._device.take_busy_s())

        return await self._device.call(URGENT, work)

    async def snapshot(self, round: int, step: int) -> FrozenRound:
        """As in the port."""
        return await self._device.call(URGENT, partial(self._open_stage().snapshot, round, step))

    async def encode(self, frozen: FrozenRound, request: SnapshotRequest, caller: PeerId) -> Snapshot:
        """As in the port. Runs beside the device."""
        return await asyncio.to_thread(self._open_stage().encode, frozen, request, caller)

    async def decode(
        self, mine: FrozenRound, request: SnapshotRequest, theirs: Snapshot, before: PartnerVector | None = None
    ) -> PartnerVector:
        """As in the port. Runs beside the device."""
        return await asyncio.to_thread(self._open_stage().decode, mine, request, theirs, before)

    async def merge(self, mine: FrozenRound, theirs: Sequence[PartnerVector] = (), counted: bool = True) -> MergeResult:
        """As in the port."""
        return await self._device.call(URGENT, partial(self._open_stage().merge, mine, theirs, counted))

    async def adopt(self, theirs: Snapshot) -> None:
        """As in the port."""
        await self._device.call(URGENT, partial(self._open_stage().adopt, theirs))

    async def capture(self, round: int, step: float, inner_steps: int) -> ReplicaState:
        """As in the port."""
        return await self._device.call(URGENT, partial(self._open_stage().capture, round, step, inner_steps))

    async def restore(self, theirs: ReplicaState) -> None:
        """As in the port."""
        await self._device.call(URGENT, partial(self._open_stage().restore, theirs))

    def close(self) -> None:
        """End the device thread after the running call and release the stage. May be called again. Waiting and later
        calls get LocalError. The stage's memory is free once the running call has ended."""
        self._device.close()
        self._stage = None

    def _open_stage(self) -> "TorchStage":
        """The stage. Raises LocalError: closed."""
        if self._stage is None:
            raise LocalError(CLOSED)
        return self._stage


async def make_stage(manifest: RunManifest, node: NodeConfig, index: int, peer_id: PeerId) -> DeviceStage:
    """Make stage `index` with its initial weights on its own device thread, without blocking the loop.
    Raises ConfigError: the model cannot be split like this; LocalError: no such device, no memory, no audit directory.
    """
    device = Device(f"device-{index}")

    def make() -> "TorchStage":
        from noloco_p2p.compute.factory import make_torch_stage
        from noloco_p2p.compute.hardware import set_threads

        set_threads(node.threads)
        return make_torch_stage(
            manifest,
            index,
            peer_id,
            device=node.device,
            audit_dir=node.audit.dir,
            audit_weights=node.audit.weights,
            recompute=node.compute.recompute,
        )

    try:
        stage = await device.call(URGENT, make)
        await device.call(URGENT, device.take_busy_s)  # making it belongs to no inner step
        return DeviceStage(stage, device)
    except BaseException:
        device.close()
        raise
