"""Waiting inside a node: which waiters are woken, when, and what happens if a condition raises."""

import asyncio
from functools import partial

import pytest

from noloco_p2p.core.status import Resource
from noloco_p2p.errors import LocalError, NolocoError, Violation
from noloco_p2p.node.waits import Waits, to_the_end
from noloco_p2p.sim.virtual_time import run


def test_a_pulse_wakes_waiters_whose_condition_holds_and_many_pulses_check_once() -> None:
    async def main() -> None:
        waits, state, looks = Waits(), {"a": False, "b": False}, dict.fromkeys("ab", 0)

        def condition(name: str) -> bool:
            looks[name] += 1
            return state[name]

        tasks = {n: asyncio.create_task(waits.until(partial(condition, n), n, Resource.OWNER)) for n in "ab"}
        await asyncio.sleep(1.0)
        before = dict(looks)
        state["a"] = True
        for _ in range(5):
            waits.pulse()
        await asyncio.sleep(0.1)
        assert tasks["a"].done()
        assert tasks["a"].result()
        assert not tasks["b"].done()
        assert looks["b"] == before["b"] + 1, "five pulses at one moment cause one evaluation"
        assert [wait.what for wait in waits.current(asyncio.get_running_loop().time())] == ["b"]
        tasks["b"].cancel()
        await asyncio.gather(tasks["b"], return_exceptions=True)
        assert waits.current(asyncio.get_running_loop().time()) == ()
        assert not waits._conditions, "a condition for which nobody waits any more is not kept"

    run(main())


def test_a_condition_that_holds_for_a_moment_only_is_missed_not_believed() -> None:
    async def main() -> None:
        waits, state = Waits(), {"is": False}
        wait = asyncio.create_task(waits.until(lambda: state["is"], "it", Resource.OWNER, 5.0))
        await asyncio.sleep(1.0)
        state["is"] = True
        waits.pulse()
        loop = asyncio.get_running_loop()
        # After the evaluation, but before the waiter runs.
        loop.call_soon(state.update, {"is": False})
        assert not await wait
        assert loop.time() == pytest.approx(5.0)

    run(main())


def test_what_a_condition_raises_reaches_its_own_waiter_only() -> None:
    async def main() -> None:
        waits, broken = Waits(), {"is": False}

        def condition() -> bool:
            if broken["is"]:
                raise LocalError("broken")
            return False

        wait = asyncio.create_task(waits.until(condition, "it", Resource.OWNER))
        other = asyncio.create_task(waits.until(lambda: broken["is"], "other", Resource.OWNER))
        await asyncio.sleep(1.0)
        broken["is"] = True
        waits.pulse()
        assert await other
        with pytest.raises(LocalError, match="broken"):
            await wait

    run(main())


def test_the_time_is_up_without_a_pulse() -> None:
    async def main() -> None:
        waits = Waits()
        assert await waits.until(lambda: True, "what is there", Resource.OWNER)
        assert not await waits.until(lambda: False, "nothing", Resource.OWNER, 2.5)
        assert asyncio.get_running_loop().time() == pytest.approx(2.5)
        assert await waits.until(lambda: asyncio.get_running_loop().time() > 3.0, "a late hour", Resource.OWNER, 1.0)

    run(main())


def test_the_time_may_be_up_just_as_the_condition_holds() -> None:
    async def main() -> None:
        waits, loop = Waits(), asyncio.get_running_loop()
        loop.call_at(2.5, waits.pulse)
        ends = [waits.until(lambda: loop.time() >= 2.5, "it", Resource.OWNER, longest_s) for longest_s in (2.5, None)]
        assert await asyncio.wait_for(asyncio.gather(*ends), 5.0) == [True, True]

    run(main())


@pytest.mark.parametrize(
    ("error", "raised"),
    [(None, None), (Violation("a gradient"), asyncio.CancelledError), (LocalError("no memory"), LocalError)],
)
@pytest.mark.parametrize("at_s", [1.0, 2.0, 3.0])
def test_a_waiter_that_is_cancelled_waits_to_the_end_and_does_not_try_again(
    error: NolocoError | None, raised: type[BaseException] | None, at_s: float
) -> None:
    """`at_s`: when it is cancelled; the work ends after two seconds, and then that has no effect."""

    async def main() -> None:
        work = asyncio.get_running_loop().create_future()
        waiter = asyncio.create_task(to_the_end(work))
        asyncio.get_running_loop().call_later(2.0, lambda: work.set_exception(error) if error else work.set_result(7))
        asyncio.get_running_loop().call_later(at_s, waiter.cancel)
        await asyncio.wait([waiter])
        assert asyncio.get_running_loop().time() == 2.0
        found = asyncio.CancelledError() if waiter.cancelled() else waiter.exception()
        assert found is error if at_s > 2.0 or raised is None else isinstance(found, raised)

    run(main())
