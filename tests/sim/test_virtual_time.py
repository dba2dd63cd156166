"""Virtual time: unmodified asyncio without waiting, in a reproducible order; deadlocks are errors."""

import asyncio
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Coroutine
from contextvars import copy_context
from typing import Any

import pytest
from machine import in_time

from noloco_p2p.sim.virtual_time import PROCESS, Deadlock, VirtualLoop, run


def _now() -> float:
    return asyncio.get_running_loop().time()


def test_a_day_passes_at_once_and_timers_keep_their_order() -> None:
    seen: list[tuple[float, str]] = []

    async def note(after_s: float, what: str) -> None:
        await asyncio.sleep(after_s)
        seen.append((_now(), what))

    async def main() -> float:
        async with asyncio.TaskGroup() as group:
            for after_s, what in ((86400.0, "day"), (3600.0, "hour"), (0.5, "half"), (0.0, "now")):
                group.create_task(note(after_s, what))
        return _now()

    began = time.perf_counter()
    assert run(main()) == 86400.0
    assert in_time(time.perf_counter() - began, 1.0)
    assert seen == [(0.0, "now"), (0.5, "half"), (3600.0, "hour"), (86400.0, "day")]


def test_timeouts_queues_events_and_shields_work() -> None:
    async def main() -> list[object]:
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=1)
        got: list[object] = []

        async def produce() -> None:
            for i in range(3):
                await queue.put(i)
                await asyncio.sleep(2.0)

        producer = asyncio.create_task(produce())
        got.extend([(await queue.get(), _now()) for _ in range(3)])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7.5):
                await asyncio.Event().wait()
        got.append(_now())
        inner = asyncio.create_task(asyncio.sleep(1.0, "kept"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(inner), 0.25)
        got.append(await inner)
        got.append(_now())
        await producer
        return got

    assert run(main()) == [(0, 0.0), (1, 2.0), (2, 4.0), 11.5, "kept", 12.5]


def test_an_error_in_a_task_group_cancels_the_others() -> None:
    ended: list[int] = []

    async def wait(i: int) -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.append(i)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for i in range(40):
                group.create_task(wait(i))
            await asyncio.sleep(1)
            raise ValueError("planned")

    with pytest.raises(ExceptionGroup, match="unhandled errors"):
        run(main())
    assert ended == list(range(40))


async def _stuck(event: asyncio.Event) -> None:
    await event.wait()


def test_a_deadlock_is_an_error_that_lists_the_waiting_tasks() -> None:
    cleaned: list[bool] = []

    async def main() -> None:
        event = asyncio.Event()
        other = asyncio.create_task(_stuck(event), name="other")
        try:
            await _stuck(event)
        finally:
            cleaned.append(True)
            await other

    with pytest.raises(Deadlock, match="nothing is ready and no timer") as caught:
        run(main())
    assert "2 tasks wait" in str(caught.value)
    assert "other: _stuck (test_virtual_time.py:" in str(caught.value)
    assert cleaned == [True]


@pytest.mark.parametrize(
    ("pause_s", "message"), [(1.0, "not ended after 50 virtual seconds"), (0.0, "spinning")], ids=["ticks", "spins"]
)
def test_a_program_that_never_ends_is_ended(pause_s: float, message: str) -> None:
    async def main() -> None:
        for _ in itertools.count():
            await asyncio.sleep(pause_s)

    with pytest.raises(Deadlock, match=message):
        run(main(), limit_s=50.0)


def test_threads_are_refused() -> None:
    async def main() -> Any:
        return await asyncio.to_thread(time.monotonic)

    with pytest.raises(RuntimeError, match="threads are not supported"):
        run(main())


def test_results_and_errors_are_passed_through() -> None:
    async def value() -> int:
        return 7

    async def error() -> int:
        raise KeyError("planned")

    programs: list[Coroutine[Any, Any, int]] = [value(), error()]
    assert run(programs[0]) == 7
    with pytest.raises(KeyError, match="planned"):
        run(programs[1])


ORDER_PROGRAM = """
import asyncio
from noloco_p2p.sim.virtual_time import run

async def wait(name, seen):
    try:
        await asyncio.sleep(100)
    finally:
        seen.append(name)

async def main():
    seen = []
    tasks = [asyncio.create_task(wait(f"peer-{i}", seen)) for i in range(60)]
    await asyncio.sleep(1)
    done, pending = await asyncio.wait(tasks, timeout=1)
    for task in pending:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return seen

print(run(main()))
"""


def test_errors_of_tasks_cancelled_at_the_end_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fails_when_it_is_cancelled() -> None:
        try:
            await asyncio.sleep(1000.0)
        finally:
            raise ValueError("of no interest")

    async def main() -> None:
        tasks = [asyncio.create_task(fails_when_it_is_cancelled())]
        await asyncio.sleep(1.0)
        raise KeyboardInterrupt(f"while {len(tasks)} task waits")

    with pytest.raises(KeyboardInterrupt):
        run(main())
    assert caplog.records == []


def test_even_sets_of_asyncio_have_a_reproducible_order() -> None:
    printed = {
        subprocess.run(
            [sys.executable, "-c", ORDER_PROGRAM],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert printed == {f"{[f'peer-{i}' for i in range(60)]}\n"}


def test_the_tasks_of_a_stopped_process_pause_while_the_clock_and_others_go_on() -> None:
    seen: list[tuple[str, float]] = []

    async def tick(who: str) -> None:
        for _ in range(3):
            await asyncio.sleep(1.0)
            seen.append((who, _now()))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        context = copy_context()
        context.run(PROCESS.set, "a")
        ticking = [loop.create_task(tick("a"), context=context), loop.create_task(tick("b"))]
        await asyncio.sleep(1.5)
        loop.stop_process("a")
        await asyncio.sleep(4.0)
        loop.continue_process("a")
        await asyncio.gather(*ticking)

    run(main())
    assert seen == [("a", 1.0), ("b", 1.0), ("b", 2.0), ("b", 3.0), ("a", 5.5), ("a", 6.5)]


def test_callbacks_have_the_order_that_the_loops_of_asyncio_give_them() -> None:
    """Also timers of the same time, of which many are cancelled."""

    class Plain(asyncio.BaseEventLoop):
        """asyncio's own queues, and a clock that jumps to the next timer."""

        now_s = 0.0

        def __init__(self) -> None:
            super().__init__()
            self._selector = self

        def time(self) -> float:
            return self.now_s

        def select(self, timeout: float) -> list[object]:
            self.now_s += timeout
            return []

        def _process_events(self, events: list[object]) -> None: ...

    async def program() -> list[tuple[float, int]]:
        loop, rng, seen = asyncio.get_running_loop(), random.Random(3), list[tuple[float, int]]()
        timers: list[asyncio.TimerHandle] = []

        def note(number: int) -> None:
            seen.append((loop.time(), number))
            if number < 6000:
                for more in range(rng.randrange(4)):
                    timers.append(loop.call_later(rng.randrange(4) / 10, note, 3 * number + more))
                loop.call_soon(seen.append, (loop.time(), -number))
            for timer in rng.sample(timers, min(len(timers), rng.randrange(4))):
                timer.cancel()

        for number in range(1, 300):
            timers.append(loop.call_at(rng.randrange(9) / 10, note, number))
        await asyncio.sleep(100.0)
        return seen

    with asyncio.Runner(loop_factory=Plain) as runner:
        expected = runner.run(program())
    assert run(program()) == expected
    assert len(expected) > 1000


def test_an_error_in_a_callback_ends_the_program() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, [].pop)
        await asyncio.sleep(2.0)

    with pytest.raises(IndexError, match="pop from empty list"):
        run(main())
