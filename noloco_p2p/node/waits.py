"""What a node waits for: every wait has a name, and is listed here while it lasts.

The node awaits a port, a lock or a condition only inside `Waits.waiting`; tests/node/test_waits.py reads its source.
A wait for something inside this node goes through `until`, and every change that may end one is followed by `pulse`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.status import Purpose, Resource, Serving, Wait, WaitTarget

OPERATIONS_PER_DEADLINE = 10.0
"""An operation that takes longer than this part of the time that a microbatch may go without progress is overdue."""

R = TypeVar("R")


_Named = tuple[str, WaitTarget, float | None, Purpose | None, bool]
"""The fields of a `Wait`, without its age."""


class _OpenWait:
    """The `with` of `Waits.waiting`. A node opens hundreds a second, so this is no generator and makes no `Wait`."""

    __slots__ = ("_began", "_named", "_open")

    def __init__(self, open: "dict[_OpenWait, None]", named: _Named) -> None:
        self._open, self._named = open, named

    def __enter__(self) -> None:
        self._began = asyncio.get_running_loop().time()
        self._open[self] = None

    def __exit__(self, *_: object) -> None:
        del self._open[self]

    def at(self, now: float) -> Wait:
        """The wait as it is `now`, on the loop's clock."""
        what, whom, deadline_s, why, idle = self._named
        return Wait(what, whom, max(0.0, now - self._began), deadline_s, why, idle)


class Waits:
    """The waits of one node. Changed by its event loop only, read from any thread.

    An operation of the device is late after a part of `patience_s`, the time that a microbatch may go without progress.
    """

    def __init__(self, patience_s: float | None = None) -> None:
        self._computing_s = None if patience_s is None else patience_s / OPERATIONS_PER_DEADLINE
        self._open: dict[_OpenWait, None] = {}
        """An ordered set."""
        self._computing: dict[object, float] = {}
        """Operations that the device was asked for and has not ended, oldest first: since when."""
        self._calls: dict[object, tuple[PeerId, Purpose, float]] = {}
        """Calls of peers that this node has in hand: (caller, on whose behalf, since when)."""
        self._conditions: dict[asyncio.Future[bool], Callable[[], bool]] = {}
        """What `until` waits for. They are evaluated here, so that a pulse wakes nobody in vain."""
        self._check: asyncio.Handle | None = None
        self.operations = 0
        """Operations of the device that have ended."""
        self._ended_at = 0.0
        """When the last one did."""

    def waiting(
        self,
        what: str,
        whom: WaitTarget,
        deadline_s: float | None = None,
        why: Purpose | None = None,
        *,
        idle: bool = False,
    ) -> AbstractContextManager[None]:
        """A `with` around an await; the arguments are those of core.status.Wait."""
        return _OpenWait(self._open, (what, whom, deadline_s, why, idle))

    @contextmanager
    def computing(self, what: str, why: Purpose | None = None) -> Iterator[None]:
        """A `with` around an operation of this node's device. One that is given up says nothing about the device."""
        key, now, given_up = object(), asyncio.get_running_loop().time, False
        self._computing[key] = now()
        try:
            with self.waiting(what, Resource.DEVICE, self._computing_s, why):
                yield
        except asyncio.CancelledError:
            given_up = True
            raise
        finally:
            del self._computing[key]
            if not given_up:
                self.operations += 1
                self._ended_at = now()

    def stuck_s(self, now: float) -> float:
        """For how long the device has ended nothing although it has work; `now` is on the loop's clock."""
        began = next(iter(self._computing.values()), now)
        return max(0.0, now - max(began, self._ended_at))

    @contextmanager
    def serving(self, caller: PeerId, why: Purpose) -> Iterator[None]:
        """Inside, a call of a peer is in hand."""
        key = object()
        self._calls[key] = caller, why, asyncio.get_running_loop().time()
        try:
            yield
        finally:
            del self._calls[key]

    async def until(
        self,
        condition: Callable[[], bool],
        what: str,
        whom: WaitTarget,
        timeout_s: float | None = None,
        *,
        why: Purpose | None = None,
        idle: bool = False,
    ) -> bool:
        """Wait until `condition` holds (evaluated after every pulse), at most `timeout_s`. False: the time was up.

        `what`, `whom`, `why` and `idle` name the wait, see core.status.Wait.
        """
        if condition():
            return True
        loop = asyncio.get_running_loop()
        ends_at = None if timeout_s is None else loop.time() + timeout_s
        with self.waiting(what, whom, timeout_s, why, idle=idle):
            while not condition():
                waiter = loop.create_future()
                timer = None if ends_at is None else loop.call_at(ends_at, _time_is_up, waiter)
                self._conditions[waiter] = condition
                try:
                    if not await waiter:
                        return condition()
                finally:
                    del self._conditions[waiter]
                    if timer is not None:
                        timer.cancel()
        return True

    def pulse(self) -> None:
        """Something changed that somebody may wait for: all conditions are evaluated in the loop's next turn."""
        if self._conditions and self._check is None:
            self._check = asyncio.get_running_loop().call_soon(self._check_conditions)

    def _check_conditions(self) -> None:
        self._check = None
        for waiter, condition in tuple(self._conditions.items()):
            if not waiter.done() and _may_hold(condition):
                waiter.set_result(True)

    def current(self, now: float) -> tuple[Wait, ...]:
        """All open waits, longest first; `now` is on the loop's clock."""
        waits = [wait.at(now) for wait in self._open.copy()]
        return tuple(sorted(waits, key=lambda wait: (-wait.since_s, wait.what, str(wait.whom), str(wait.why or ""))))

    def served(self, now: float) -> tuple[Serving, ...]:
        """The calls of peers in hand, longest first; `now` is on the loop's clock."""
        calls = sorted(self._calls.copy().values(), key=lambda call: (call[2], call[0], str(call[1])))
        return tuple(Serving(caller, why, max(0.0, now - since)) for caller, why, since in calls)


async def to_the_end(awaitable: Awaitable[R]) -> R:
    """Await something that must not be abandoned half-way: a cancellation of the waiter is dropped."""
    task = asyncio.ensure_future(awaitable)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
    return task.result()


def _may_hold(condition: Callable[[], bool]) -> bool:
    """True also where it raises: it does so again in the task that waits, and there it belongs."""
    try:
        return condition()
    except Exception:  # noqa: BLE001 - see above
        return True


def _time_is_up(waiter: "asyncio.Future[bool]") -> None:
    if not waiter.done():
        waiter.set_result(False)
