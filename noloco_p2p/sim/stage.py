"""The Stage port over a synchronous stage: one device with virtual time, a cost per operation, no thread."""

import asyncio
import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from noloco_p2p.core.gradient_pairs import GradientLikeness
from noloco_p2p.core.messages import Gradient, HostTensor, LossSum, MicrobatchId, PeerId, ReplicaState
from noloco_p2p.core.snapshots import FrozenRound, PartnerVector, Snapshot, SnapshotRequest
from noloco_p2p.core.stage_values import Contribution, MergeResult, StageState, StepLabel, StepResult
from noloco_p2p.errors import LocalError

BACKWARD, FORWARD, EVALUATE = 0, 1, 2
"""Priorities of operations that wait for the device; the lowest goes first."""
CLOSED = "the device has been closed"

T = TypeVar("T")


class SyncStage(Protocol):
    """The methods of `ports.Stage`, synchronous. Implemented by `sim.linear_stage` and `compute.stage`."""

    @property
    def state(self) -> StageState:
        """See `ports.Stage`."""

    def forward(self, inputs: HostTensor, mask: HostTensor | None) -> tuple[int, HostTensor]:
        """See `ports.Stage`."""

    def backward(self, graph: int, microbatch: MicrobatchId, gradient: Gradient) -> Contribution:
        """See `ports.Stage`."""

    def loss_backward(
        self, microbatch: MicrobatchId, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None
    ) -> Contribution:
        """See `ports.Stage`."""

    def discard(self, graph: int) -> None:
        """See `ports.Stage`."""

    def evaluate(self, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None) -> HostTensor | LossSum:
        """See `ports.Stage`."""

    def is_sound(self) -> bool:
        """See `ports.Stage`."""

    def compare(self, one: Gradient, other: Gradient) -> GradientLikeness:
        """See `ports.Stage`."""

    def inner_step(self, label: StepLabel) -> StepResult:
        """See `ports.Stage`. The device fills in `busy_s`."""

    def snapshot(self, round: int, step: int) -> FrozenRound:
        """See `ports.Stage`."""

    def encode(self, frozen: FrozenRound, request: SnapshotRequest, caller: PeerId) -> Snapshot:
        """See `ports.Stage`."""

    def decode(
        self, mine: FrozenRound, request: SnapshotRequest, theirs: Snapshot, before: PartnerVector | None = None
    ) -> PartnerVector:
        """See `ports.Stage`."""

    def merge(self, mine: FrozenRound, theirs: Sequence[PartnerVector] = (), counted: bool = True) -> MergeResult:
        """See `ports.Stage`."""

    def adopt(self, theirs: Snapshot) -> None:
        """See `ports.Stage`."""

    def capture(self, round: int, step: float, inner_steps: int) -> ReplicaState:
        """See `ports.Stage`."""

    def restore(self, theirs: ReplicaState) -> None:
        """See `ports.Stage`."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Virtual device seconds. `loss_backward` costs a forward and a backward pass, `evaluate` a forward pass."""

    forward_s: float = 0.010
    backward_s: float = 0.020
    inner_step_s: float = 0.005
    outer_s: float = 0.005
    """A snapshot, merge, adoption, capture or restoration."""
    spread: float = 0.0
    """Sigma of the log-normal factor on each operation; 0: constant."""


class TimedStage:
    """The Stage port. `slowness` multiplies every cost from the next operation on; 1.0 is normal.

    An operation takes effect at its end. If its waiter is cancelled before it starts, it does not run; once started it
    runs to its end, and a graph that nobody waits for any more is freed.
    """

    def __init__(self, stage: SyncStage, costs: Costs, rng: random.Random) -> None:
        self.state = stage.state
        self.stage = stage
        self.slowness = 1.0
        self._costs = costs
        self._rng = rng
        self._line: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._in_use = False
        self._halted = False
        self._closed = False
        self._work: asyncio.Task[object] | None = None
        self._busy_s = 0.0

    @property
    def places(self) -> None:
        """See `ports.Stage`. Memory is not limited here."""
        return None

    async def forward(self, inputs: HostTensor, mask: HostTensor | None) -> tuple[int, HostTensor]:
        """See `ports.Stage`. A graph whose waiter is gone is freed."""

        def free(abandoned: tuple[int, HostTensor]) -> None:
            self.stage.discard(abandoned[0])

        return await self._run(FORWARD, self._costs.forward_s, partial(self.stage.forward, inputs, mask), free)

    async def backward(self, graph: int, microbatch: MicrobatchId, gradient: Gradient) -> Contribution:
        """See `ports.Stage`."""
        work = partial(self.stage.backward, graph, microbatch, gradient)
        return await self._run(BACKWARD, self._costs.backward_s, work)

    async def loss_backward(
        self, microbatch: MicrobatchId, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None
    ) -> Contribution:
        """See `ports.Stage`."""
        work = partial(self.stage.loss_backward, microbatch, inputs, targets, mask)
        return await self._run(BACKWARD, self._costs.forward_s + self._costs.backward_s, work)

    def discard(self, graph: int) -> None:
        """See `ports.Stage`."""
        self.stage.discard(graph)

    async def evaluate(self, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None) -> HostTensor | LossSum:
        """See `ports.Stage`."""
        return await self._run(EVALUATE, self._costs.forward_s, partial(self.stage.evaluate, inputs, targets, mask))

    async def is_sound(self) -> bool:
        """See `ports.Stage`."""
        return await self._run(FORWARD, self._costs.forward_s, self.stage.is_sound)

    async def compare(self, one: Gradient, other: Gradient) -> GradientLikeness:
        """See `ports.Stage`; takes no time of the device."""
        return self.stage.compare(one, other)

    async def inner_step(self, label: StepLabel) -> StepResult:
        """See `ports.Stage`."""
        result = await self._run(BACKWARD, self._costs.inner_step_s, partial(self.stage.inner_step, label))
        busy_s, self._busy_s = self._busy_s, 0.0
        return replace(result, busy_s=busy_s)

    async def snapshot(self, round: int, step: int) -> FrozenRound:
        """See `ports.Stage`."""
        return await self._run(BACKWARD, self._costs.outer_s, partial(self.stage.snapshot, round, step))

    async def encode(self, frozen: FrozenRound, request: SnapshotRequest, caller: PeerId) -> Snapshot:
        """See `ports.Stage`. Takes no device time."""
        return self.stage.encode(frozen, request, caller)

    async def decode(
        self, mine: FrozenRound, request: SnapshotRequest, theirs: Snapshot, before: PartnerVector | None = None
    ) -> PartnerVector:
        """See `ports.Stage`. Takes no device time."""
        return self.stage.decode(mine, request, theirs, before)

    async def merge(self, mine: FrozenRound, theirs: Sequence[PartnerVector] = (), counted: bool = True) -> MergeResult:
        """See `ports.Stage`."""
        return await self._run(BACKWARD, self._costs.outer_s, partial(self.stage.merge, mine, theirs, counted))

    async def adopt(self, theirs: Snapshot) -> None:
        """See `ports.Stage`."""
        await self._run(BACKWARD, self._costs.outer_s, partial(self.stage.adopt, theirs))

    async def capture(self, round: int, step: float, inner_steps: int) -> ReplicaState:
        """See `ports.Stage`."""
        return await self._run(BACKWARD, self._costs.outer_s, partial(self.stage.capture, round, step, inner_steps))

    async def restore(self, theirs: ReplicaState) -> None:
        """See `ports.Stage`."""
        await self._run(BACKWARD, self._costs.outer_s, partial(self.stage.restore, theirs))

    def close(self) -> None:
        """See `ports.Stage`. Waiting and later operations get LocalError."""
        self._closed = True
        line, self._line = self._line, []
        for _, _, turn in line:
            if not turn.done():
                turn.set_exception(LocalError(CLOSED))

    def halt(self) -> None:
        """The process is gone: nothing that waits or runs has any effect, and waiters are cancelled."""
        self._halted = True
        for _, _, turn in self._line:
            turn.cancel()
        if self._work is not None:
            self._work.cancel()

    # --- the device -----------------------------------------------------------------------------------------------

    async def _run(
        self, priority: int, cost_s: float, operation: Callable[[], T], undo: Callable[[T], None] | None = None
    ) -> T:
        """Wait for the device, then run the operation. `undo` gets a result that nobody waits for any more."""
        loop = asyncio.get_running_loop()
        if self._halted:
            raise asyncio.CancelledError
        if self._closed:
            raise LocalError(CLOSED)
        turn: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._line, (priority, next(self._numbers), turn))
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()
            raise
        if self._halted:
            raise asyncio.CancelledError
        work = loop.create_task(self._perform(cost_s, operation))
        self._work = work
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if undo is not None and not work.done():
                work.add_done_callback(lambda done: _undo(done, undo))
            raise

    async def _perform(self, cost_s: float, operation: Callable[[], T]) -> T:
        factor = math.exp(self._rng.gauss(0.0, self._costs.spread)) if self._costs.spread else 1.0
        took_s = cost_s * factor * self.slowness
        try:
            await asyncio.sleep(took_s)
            self._busy_s += took_s
            return operation()
        finally:
            self._release()

    def _release(self) -> None:
        self._in_use = False
        self._next()

    def _next(self) -> None:
        """Give the free device to the first waiter that is still there."""
        while self._line and not self._in_use and not self._halted:
            _, _, turn = heapq.heappop(self._line)
            if not turn.done():
                self._in_use = True
                turn.set_result(None)


def _undo(done: "asyncio.Task[T]", undo: Callable[[T], None]) -> None:
    if not done.cancelled() and done.exception() is None:
        undo(done.result())
