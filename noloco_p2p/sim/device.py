"""The Device port with virtual time: a cost for each operation, no thread."""

import asyncio
import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from noloco_p2p.errors import LocalError
from noloco_p2p.ports import DEVICE_CLOSED, Operation

T = TypeVar("T")


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

    def of(self, operation: Operation) -> float:
        """The cost of one operation."""
        match operation:
            case Operation.FORWARD | Operation.EVALUATE:
                return self.forward_s
            case Operation.BACKWARD:
                return self.backward_s
            case Operation.LOSS_BACKWARD:
                return self.forward_s + self.backward_s
            case Operation.INNER_STEP:
                return self.inner_step_s
            case Operation.OUTER:
                return self.outer_s


class SimDevice:
    """The Device port. `slowness` multiplies every cost from the next operation on; 1.0 is normal.

    An operation takes effect at its end.
    """

    def __init__(self, costs: Costs, rng: random.Random) -> None:
        self.slowness = 1.0
        self._costs = costs
        self._rng = rng
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._in_use = False
        self._began_at = 0.0
        self._halted = False
        self._closed = False
        self._work: tuple[asyncio.TimerHandle, asyncio.Future[Any]] | None = None
        """The timer at which the newest operation ends, and the future that its caller awaits."""
        self._busy_s = 0.0

    async def call(self, operation: Operation, work: Callable[[], T], *, lost: Callable[[T], None] | None = None) -> T:
        """See `ports.Device`."""
        loop = asyncio.get_running_loop()
        if self._halted:
            raise asyncio.CancelledError
        if self._closed:
            raise LocalError(DEVICE_CLOSED)
        turn: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._waiting, (operation.priority, next(self._numbers), turn))
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()
            raise
        if self._halted:
            raise asyncio.CancelledError
        done: asyncio.Future[T] = loop.create_future()
        factor = math.exp(self._rng.gauss(0.0, self._costs.spread)) if self._costs.spread else 1.0
        cost_s = self._costs.of(operation) * factor * self.slowness
        self._began_at = loop.time()
        self._work = loop.call_later(cost_s, self._perform, cost_s, work, done, lost), done
        try:
            return await done
        except asyncio.CancelledError:
            if lost is not None and done.done() and not done.cancelled() and done.exception() is None:
                lost(done.result())
            raise

    async def on_host(self, work: Callable[[], T]) -> T:
        """See `ports.Device`. Takes no time."""
        return work()

    def post(self, work: Callable[[], object]) -> None:
        """See `ports.Device`. Takes no time."""
        work()

    def take_busy_s(self) -> float:
        """See `ports.Device`."""
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def running_s(self) -> float:
        """See `ports.Device`."""
        return asyncio.get_running_loop().time() - self._began_at if self._in_use else 0.0

    def close(self, *, hung: bool = False) -> None:
        """See `ports.Device`."""
        self._closed = True
        waiting, self._waiting = [turn for _, _, turn in self._waiting], []
        if hung and self._work is not None:
            timer, done = self._work
            timer.cancel()
            waiting.append(done)
        for call in waiting:
            if not call.done():
                call.set_exception(LocalError(DEVICE_CLOSED))

    def halt(self) -> None:
        """The process dies: operations that wait or run have no effect, and their callers are cancelled."""
        self._halted = True
        for _, _, turn in self._waiting:
            turn.cancel()
        for end in self._work or ():
            end.cancel()

    def _perform(
        self, took_s: float, work: Callable[[], T], done: "asyncio.Future[T]", lost: Callable[[T], None] | None
    ) -> None:
        """End an operation. If `done` was cancelled, nobody waits for its result any more."""
        self._busy_s += took_s
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised in the task that awaits the call
            if not done.cancelled():
                done.set_exception(error)
        else:
            if not done.cancelled():
                done.set_result(result)
            elif lost is not None:
                lost(result)
        finally:
            self._release()

    def _release(self) -> None:
        self._in_use = False
        self._next()

    def _next(self) -> None:
        """If the device is free, give it to the first caller that still waits."""
        while self._waiting and not self._in_use and not self._halted:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._in_use = True
                turn.set_result(None)
