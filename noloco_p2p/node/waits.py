"""What a node waits for: every wait has a name, and is listed here while it lasts.

The node awaits a port, a lock or a condition only inside `Waits.waiting`; tests/node/test_waits.py checks this in the
source. A wait for a condition inside this node goes through `until`, and every change that may fulfil one is followed
by `pulse`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TypeVar

from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.status import Purpose, Resource, Serving, Wait, WaitTarget
from noloco_p2p.errors import PeerError

OPERATIONS_PER_DEADLINE = 10.0
"""A device operation is overdue after the time that a microbatch may go without progress, divided by this."""

R = TypeVar("R")


_Named = tuple[str, WaitTarget, float | None, Purpose | None, bool]
"""The fields of a `Wait`, without its age."""


class _OpenWait:
    """The context manager of `Waits.waiting`. A node enters hundreds per second, so this is a plain class, not a
    generator, and creates no `Wait` until asked."""

    __slots__ = ("_began", "_named", "_open")

    def __init__(self, open: "dict[_OpenWait, None]", named: _Named) -> None:
        self._open, self._named = open, named

    def __enter__(self) -> None:
        self._began = asyncio.get_running_loop().time()
        self._open[self] = None

    def __exit__(self, *_: object) -> None:
        del self._open[self]

    def at(self, now: float) -> Wait:
        """This wait as a `Wait`, with its age at `now` on the loop's clock."""
        what, whom, deadline_s, why, idle = self._named
        return Wait(what, whom, max(0.0, now - self._began), deadline_s, why, idle)


class Waits:
    """The waits of one node. Changed on its event loop only; may be read from any thread.

    `patience_s` is the time that a microbatch may go without progress; it bounds the operations of the device.
    """

    def __init__(self, patience_s: float | None = None) -> None:
        self._computing_s = None if patience_s is None else patience_s / OPERATIONS_PER_DEADLINE
        self._open: dict[_OpenWait, None] = {}
        """An ordered set."""
        self._computing: dict[object, float] = {}
        """Operations of the device that are queued or running, oldest first → since when."""
        self._calls: dict[object, tuple[PeerId, Purpose, float]] = {}
        """Calls of peers that this node is serving: (caller, on whose behalf, since when)."""
        self._conditions: dict[asyncio.Future[None], Callable[[], bool]] = {}
        """The conditions of `until`. They are evaluated here, so that a pulse wakes only tasks that may continue."""
        self._check: asyncio.Handle | None = None
        self.operations = 0
        """Number of device operations that have ended."""
        self._ended_at = 0.0
        """When the last of them ended, on the loop's clock."""

    def waiting(
        self,
        what: str,
        whom: WaitTarget,
        deadline_s: float | None = None,
        why: Purpose | None = None,
        *,
        idle: bool = False,
    ) -> AbstractContextManager[None]:
        """A context manager to put around an await; the arguments are the fields of core.status.Wait."""
        return _OpenWait(self._open, (what, whom, deadline_s, why, idle))

    @contextmanager
    def computing(self, what: str, why: Purpose | None = None) -> Iterator[None]:
        """A context manager to put around an operation of this node's device. If the operation is cancelled, it does
        not count as ended."""
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
        """How many seconds the device has had work without completing any; `now` is on the loop's clock."""
        began = next(iter(self._computing.values()), now)
        return max(0.0, now - max(began, self._ended_at))

    @contextmanager
    def serving(self, caller: PeerId, why: Purpose) -> Iterator[None]:
        """List a peer's call as being served inside the `with`."""
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
        """Wait until `condition` holds (evaluated after every pulse), at most `timeout_s`. False if the time ran out.

        `what`, `whom`, `why` and `idle` name the wait; see core.status.Wait.
        """
        if condition():
            return True
        with self.waiting(what, whom, timeout_s, why, idle=idle):
            try:
                async with asyncio.timeout(timeout_s):
                    while not condition():
                        waiter = asyncio.get_running_loop().create_future()
                        self._conditions[waiter] = condition
                        try:
                            await waiter
                        finally:
                            del self._conditions[waiter]
            except TimeoutError:
                return condition()
        return True

    def pulse(self) -> None:
        """Have all conditions evaluated in the loop's next iteration, because something has changed."""
        if self._conditions and self._check is None:
            self._check = asyncio.get_running_loop().call_soon(self._check_conditions)

    def _check_conditions(self) -> None:
        self._check = None
        for waiter, condition in tuple(self._conditions.items()):
            with suppress(Exception):  # the waiting task should get the error
                if waiter.done() or not condition():
                    continue
            waiter.set_result(None)

    def current(self, now: float) -> tuple[Wait, ...]:
        """All open waits, longest first; `now` is on the loop's clock."""
        waits = [wait.at(now) for wait in self._open.copy()]
        return tuple(sorted(waits, key=lambda wait: (-wait.since_s, wait.what, str(wait.whom), str(wait.why or ""))))

    def served(self, now: float) -> tuple[Serving, ...]:
        """The calls of peers that are being served, longest first; `now` is on the loop's clock."""
        calls = sorted(self._calls.copy().values(), key=lambda call: (call[2], call[0], str(call[1])))
        return tuple(Serving(caller, why, max(0.0, now - since)) for caller, why, since in calls)


async def to_the_end(awaitable: Awaitable[R]) -> R:
    """Await something that must not be abandoned half-way. If the waiter is cancelled meanwhile, it gets the result all
    the same, but a PeerError ends it as cancelled: otherwise it would ask another peer, and never notice."""
    task = asyncio.ensure_future(awaitable)
    while not task.done():
        with suppress(asyncio.CancelledError, PeerError):
            await asyncio.shield(task)
    if (me := asyncio.current_task()) and me.cancelling() and isinstance(task.exception(), PeerError):
        raise asyncio.CancelledError
    return task.result()
