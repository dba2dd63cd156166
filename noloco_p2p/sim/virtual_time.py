"""Virtual time: unmodified asyncio on a clock that jumps to the next timer instead of waiting for it.

Nothing with threads, sockets or processes of its own can live in this loop; everything else of asyncio can. The same
program gives the same order of events every time: the clock starts at 0, and tasks hash by their number, so that even
the sets inside asyncio (TaskGroup, `asyncio.wait`) are walked in an order that does not depend on addresses.
"""

import asyncio
import gc
import inspect
import itertools
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from noloco_p2p.errors import NolocoError

COLLECT_EVERY = 1_000_000
"""Objects made, less those freed, from one collection of cyclic garbage to the next."""
LIVELOCK_TURNS = 200_000
"""Turns of the loop in a row at one and the same virtual time after which it is taken to spin."""

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class Deadlock(NolocoError):
    """The simulated program cannot end: nothing will ever wake it, it spins, or its virtual time is used up."""


class _NumberedTask(asyncio.Task[Any]):
    def __init__(self, coro: Coroutine[Any, Any, Any], *, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class _Selector:
    """Stands where asyncio waits for sockets: waits for nothing, moves the clock."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        self._loop.pass_time(timeout)
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop under virtual time; `limit_s` is the virtual time at which an endless program is ended."""

    def __init__(self, limit_s: float | None = None) -> None:
        super().__init__()
        self._selector = _Selector(self)
        self._clock_resolution = 1e-9
        self._now_s = 0.0
        self._limit_s = limit_s
        self._turns = 0
        self._numbers = itertools.count()
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_s

    def pass_time(self, timeout: float | None) -> None:
        """One turn of the loop: on by `timeout` seconds, the time to the next timer; None when there is no timer."""
        if timeout is None:
            self._give_up("deadlock: nothing is ready and no timer is set")
        if timeout > 0:
            if self._limit_s is not None and self._now_s + timeout > self._limit_s:
                self._give_up(f"not ended after {self._limit_s:g} virtual seconds")
            self._now_s += timeout
            self._turns = 0
        self._turns += 1
        if self._turns > LIVELOCK_TURNS:
            self._give_up(f"spinning: {LIVELOCK_TURNS} turns of the loop without a step of the clock")

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Arguments], T], *args: *Arguments
    ) -> asyncio.Future[T]:
        """Refused: a thread would answer at no defined virtual time. Raises RuntimeError."""
        raise RuntimeError("virtual time has no threads")

    def _give_up(self, why: str) -> NoReturn:
        self._limit_s, self._turns = None, 0
        waiting = sorted(_where(task) for task in asyncio.all_tasks(self))
        raise Deadlock(f"{why} (virtual time {self._now_s:.6g} s); {len(waiting)} tasks wait:\n" + "\n".join(waiting))

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return _NumberedTask(coro, number=next(self._numbers), loop=loop, **options)

    def _process_events(self, event_list: list[Any]) -> None:
        """No sockets, no events."""

    def _write_to_self(self) -> None:
        """Nobody sleeps in `select`, so nobody has to be woken."""


def _where(task: asyncio.Task[Any]) -> str:
    """The name of a task and the innermost line of its own code at which it waits, with the way there."""
    places = []
    awaited: object = task.get_coro()
    while inspect.iscoroutine(awaited):
        if awaited.cr_frame is not None:
            file = awaited.cr_code.co_filename.rsplit("/", 1)[-1]
            places.append(f"{awaited.cr_code.co_qualname} ({file}:{awaited.cr_frame.f_lineno})")
        awaited = awaited.cr_await
    return f"  {task.get_name()}: " + " > ".join(places)


def run(main: Coroutine[Any, Any, T], *, limit_s: float | None = None) -> T:
    """Run a coroutine to its end in a fresh virtual loop, like `asyncio.run`.

    Raises Deadlock, which lists what every task waits for, when it cannot end or takes more than `limit_s` virtual
    seconds. Tasks that are left over are cancelled.
    """
    found: list[T] = []

    async def keep() -> None:
        # The runner takes the `repr` of its task for the signal module: its result must be short.
        found.append(await main)

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(limit_s)) as runner, _rare_collections():
        runner.run(keep())
    return found[0]


@contextmanager
def _rare_collections() -> Iterator[None]:
    """A swarm is a million objects that live on: looking through them for garbage cost half of the time."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
