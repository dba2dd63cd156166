"""Virtual time: asyncio on an event loop whose clock jumps to the next timer instead of waiting for it.

Threads, sockets and processes do not work in this loop; everything else in asyncio does. The same program always gives
the same order of events: the clock starts at 0, and tasks hash by their number, so even the sets inside asyncio
(TaskGroup, `asyncio.wait`) are iterated in an order that does not depend on memory addresses.

The tasks of one simulated process can be suspended, as by SIGSTOP, while the clock and all other processes go on.
"""

import asyncio
import gc
import heapq
import inspect
import itertools
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any, NoReturn, TypeVar

from noloco_p2p.errors import NolocoError

COLLECT_EVERY = 1_000_000
"""Garbage collection threshold: objects allocated minus objects freed between two collections."""
RESOLUTION_S = 1e-9
"""Timers that expire within it are called in the same iteration."""
LIVELOCK_TURNS = 200_000
"""Iterations of the loop without progress in virtual time after which the program counts as spinning."""

PROCESS: ContextVar[str | None] = ContextVar("process", default=None)
"""The simulated process that tasks created in this context belong to."""

T = TypeVar("T")


class Deadlock(NolocoError):
    """The simulated program cannot end: nothing will ever wake it, it spins, or it has used up its virtual time."""


class _NumberedTask(asyncio.Task[Any]):
    def __init__(self, coro: Coroutine[Any, Any, Any], *, number: int, **options: Any) -> None:
        self._number = number
        self.process = (options.get("context") or copy_context()).get(PROCESS)
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class _Handle(float):
    """A callback, as the number that says when to call it: comparing two handles then costs next to nothing."""

    __slots__ = ("call", "context", "timed_by")
    call: tuple[Any, ...]
    """What to call and its arguments; empty once it has been cancelled."""
    context: Context
    timed_by: "VirtualLoop | None"
    """The loop, until its time has come."""
    when = float.__float__

    def cancel(self) -> None:
        """See `asyncio.Handle`."""
        if self.timed_by is not None and self.call:
            self.timed_by.cancelled += 1
        self.call = ()

    def cancelled(self) -> bool:
        """See `asyncio.Handle`."""
        return not self.call


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop with virtual time. `limit_s`: the virtual time after which the program is aborted.

    It calls callbacks in the order in which asyncio's loops do, for half of the cost. An error in one ends the program.
    """

    _ready: deque[_Handle]
    _scheduled: list[_Handle]
    get_debug = bool
    """Always False. Asked for every future and every task, so a builtin, which takes a fifth of the time."""

    def __init__(self, limit_s: float | None = None) -> None:
        super().__init__()
        self._stopped: dict[str, list[_Handle]] = {}
        """For each suspended process, the handles of its tasks that are ready to run."""
        self.cancelled = 0
        """Number of timers that were cancelled and not yet removed; as in asyncio, those that expired count on."""
        self._now_s, self._turns, self._limit_s = 0.0, 0, limit_s
        numbers = itertools.count()
        self.set_task_factory(lambda loop, coro, **more: _NumberedTask(coro, number=next(numbers), loop=loop, **more))

    def time(self) -> float:
        """Virtual seconds since the loop was created."""
        return self._now_s

    def stop_process(self, process: str) -> None:
        """Suspend the tasks of a process from the next iteration of the loop until `continue_process`."""
        self._stopped.setdefault(process, [])

    def continue_process(self, process: str) -> None:
        """Let the tasks of a process continue. Those whose timers expired meanwhile run in the order of expiry."""
        self._ready.extend(self._stopped.pop(process, ()))

    def call_soon(self, *call: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        """See asyncio."""
        handle = _Handle()
        handle.call, handle.timed_by, handle.context = call, None, copy_context() if context is None else context
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(self, when: float, *call: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        """See asyncio."""
        handle = _Handle(when)
        handle.call, handle.timed_by, handle.context = call, self, copy_context() if context is None else context
        heapq.heappush(self._scheduled, handle)
        return handle

    def call_later(self, delay: float, *call: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        """See asyncio."""
        return self.call_at(self._now_s + delay, *call, context=context)

    def run_in_executor(self, *_: Any) -> NoReturn:  # type: ignore[override]
        """Not supported: a thread would finish at an undefined virtual time. Raises RuntimeError."""
        raise RuntimeError("threads are not supported under virtual time")

    def _run_once(self) -> None:
        """One iteration: advance the clock to the next timer unless something is ready; then call what is ready."""
        ready, scheduled = self._ready, self._scheduled
        if len(scheduled) > 100 and self.cancelled / len(scheduled) > 0.5:
            scheduled[:] = [handle for handle in scheduled if handle.call]
            heapq.heapify(scheduled)
            self.cancelled = 0
        while scheduled and not scheduled[0].call:
            heapq.heappop(scheduled)
            self.cancelled -= 1
        if not ready and not scheduled:
            self._give_up("deadlock: nothing is ready and no timer is set")
        wait_s = 0.0 if ready else scheduled[0] - self._now_s
        if self._stopped:
            self._put_aside()
        if wait_s > 0:
            if self._limit_s is not None and self._now_s + wait_s > self._limit_s:
                self._give_up(f"not ended after {self._limit_s:g} virtual seconds")
            self._now_s, self._turns = self._now_s + wait_s, 0
        self._turns += 1
        if self._turns > LIVELOCK_TURNS:
            self._give_up(f"spinning: the clock stood still for {LIVELOCK_TURNS:,} iterations of the event loop")
        due_s = self._now_s + RESOLUTION_S
        while scheduled and scheduled[0] < due_s:
            ready.append(heapq.heappop(scheduled))
            ready[-1].timed_by = None
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle.call:
                handle.context.run(*handle.call)

    def _put_aside(self) -> None:
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            task = getattr(handle.call[0], "__self__", None) if handle.call else None
            process = task.process if isinstance(task, _NumberedTask) else None
            self._stopped.get(process or "", self._ready).append(handle)

    def _give_up(self, why: str) -> NoReturn:
        self._limit_s, self._turns = None, 0
        waiting = sorted(_where(task) for task in asyncio.all_tasks(self))
        raise Deadlock(f"{why} (virtual time {self._now_s:.6g} s); {len(waiting)} tasks wait:\n" + "\n".join(waiting))


def _where(task: asyncio.Task[Any]) -> str:
    """A task's name, and its chain of coroutines down to the line at which it waits."""
    places = []
    awaited: object = task.get_coro()
    while inspect.iscoroutine(awaited):
        if awaited.cr_frame is not None:
            file = awaited.cr_code.co_filename.rsplit("/", 1)[-1]
            places.append(f"{awaited.cr_code.co_qualname} ({file}:{awaited.cr_frame.f_lineno})")
        awaited = awaited.cr_await
    return f"  {task.get_name()}: " + " > ".join(places)


def run(main: Coroutine[Any, Any, T], *, limit_s: float | None = None) -> T:
    """Run a coroutine in a new virtual loop, like `asyncio.run`.

    Raises Deadlock, which lists what every task waits for, if the coroutine cannot end or takes more than `limit_s`
    virtual seconds. Remaining tasks are cancelled.
    """
    found: list[T] = []

    async def keep() -> None:
        # The runner takes the `repr` of its task for the signal module, so its result must be short.
        found.append(await main)

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(limit_s)) as runner, _rare_collections():
        try:
            runner.run(keep())
        except BaseException:
            # This exception says why the run ended. Thousands of tasks that are cancelled now need not log errors too.
            runner.get_loop().set_exception_handler(lambda loop, context: None)
            raise
    return found[0]


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage rarely: scanning the million long-lived objects of a swarm took half of the run time."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
