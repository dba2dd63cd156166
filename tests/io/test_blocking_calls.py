"""Threads for calls that may block for ever."""

import asyncio
import subprocess
import sys
import threading

import pytest

from noloco_p2p.io.blocking_calls import BlockingCalls

HANGS = """
import asyncio, socket, threading
socket.getaddrinfo = lambda *_, **__: threading.Event().wait()
from noloco_p2p.io.dht import reach
reach.LOOKUP_S = 0.1
asyncio.run(reach.Reach([]).addresses(["slow.example"]))
"""
TOP_HANGS = """
import socket, threading
socket.getaddrinfo = lambda *_, **__: threading.Event().wait()
from noloco_p2p.errors import Unreachable
from noloco_p2p.observe import survey, top
survey.TIMEOUT_S = 0.1
try:
    top.run_top((), "http://slow.example:9", once=False, as_json=False, interval_s=1.0)
except Unreachable as error:
    assert "no answer" in str(error)
"""


@pytest.mark.parametrize("program", [HANGS, TOP_HANGS])
def test_a_name_server_that_does_not_answer_keeps_no_command_from_ending(program: str) -> None:
    """noloco top waited for it at its end, also after Ctrl-C."""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60.0)


@pytest.mark.parametrize("most", [1, 2])
def test_calls_run_in_their_order_and_only_so_many_at_once(most: int) -> None:
    begun, at_once, may_go_on, running = list[int](), list[int](), threading.Semaphore(0), set[int]()

    def call(number: int) -> int:
        running.add(number)
        at_once.append(len(running))
        begun.append(number)
        may_go_on.acquire()
        running.remove(number)
        if number == 3:
            raise ValueError("three")
        return number

    async def scenario() -> None:
        calls, loop = BlockingCalls("test", most), asyncio.get_running_loop()
        asked = [loop.run_in_executor(calls, call, number) for number in range(6)]
        asked[4].cancel()
        await asyncio.sleep(0)  # the cancellation is passed on by a callback
        may_go_on.release(6)
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [results[n] for n in (0, 1, 2, 5)] == [0, 1, 2, 5]
        assert str(results[3]) == "three"
        assert sorted(begun) == [0, 1, 2, 3, 5], "what was cancelled before it began does not run"
        assert most > 1 or begun == sorted(begun)
        assert max(at_once) <= most

    asyncio.run(scenario())
