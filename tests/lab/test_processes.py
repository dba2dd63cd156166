"""Worker processes of measurements: whatever happens to the command, none outlives it."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from processes import wait_until

from noloco_p2p.errors import LocalError
from noloco_p2p.lab.processes import peer_process, workers

COMMAND = """
import os, time
from noloco_p2p.cli.exits import ended_by_signals
from noloco_p2p.lab.processes import workers
with ended_by_signals(), workers(1) as pool:
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 1000)
    time.sleep(1000)
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_workers_end_when_the_command_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", COMMAND], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        worker = int(command.stdout.readline())
        assert alive(worker)
        command.kill()
    wait_until(lambda: not alive(worker), "the end of the worker", 30.0)


@pytest.mark.usefixtures("minds_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_command_and_its_workers_and_leaves_no_semaphore(number: int) -> None:
    with subprocess.Popen([sys.executable, "-c", COMMAND], stdout=-1, stderr=-1, text=True) as command:
        assert command.stdout is not None
        worker = int(command.stdout.readline())
        command.send_signal(number)
        assert command.communicate() == ("", "")
        assert command.returncode == 128 + number
    wait_until(lambda: not alive(worker), "the end of the worker", 30.0)


def test_a_pool_that_was_left_with_an_error_has_ended_with_its_thread() -> None:
    """Python's own end races with a thread that is still closing its pipes, and prints a traceback."""
    before, during = set(threading.enumerate()), set[threading.Thread]()

    def command() -> None:
        with workers(1) as pool:
            pool.submit(time.sleep, 1000)
            during.update(threading.enumerate())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        command()
    assert during > before
    assert set(threading.enumerate()) <= before


@pytest.mark.usefixtures("minds_signals")
def test_an_interrupt_of_the_group_ends_no_worker_however_early_it_comes() -> None:
    with workers(2) as pool:
        tasks = [pool.submit(os.getpid) for _ in range(2)]
        started = sorted(pool._processes)
        for worker in started:
            os.kill(worker, signal.SIGINT)
        assert len(started) == 2
        assert {task.result() for task in tasks} <= {*started}


def test_an_ignored_hangup_stays_ignored() -> None:
    hangup = COMMAND.replace("time.sleep(1000)\n", "os.kill(os.getpid(), 1)\n    os._exit(7)\n")
    ignoring = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN){hangup}"
    assert subprocess.run([sys.executable, "-c", ignoring], capture_output=True, check=False).returncode == 7


def test_workers_get_their_environment_and_it_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with workers(1, OMP_NUM_THREADS="3", NOLOCO_LAB_TEST="x") as pool:
        assert pool.submit(os.getenv, "OMP_NUM_THREADS").result() == "3"
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "NOLOCO_LAB_TEST" not in os.environ


def test_a_worker_that_dies_is_an_error_with_advice() -> None:
    with pytest.raises(LocalError, match="give --jobs 1"), workers(1) as pool:
        pool.submit(os._exit, 3).result()


async def serves(ready: Callable[[int], None], number: int) -> None:
    ready(os.getpid() if number else 0)
    await asyncio.Event().wait()


async def fails(ready: Callable[[int], None]) -> None:
    os._exit(1)


def test_a_peer_process_reports_its_ports_and_ends_with_the_block() -> None:
    with peer_process(serves, 1) as pid:
        assert alive(pid)
    assert not alive(pid)
    with pytest.raises(LocalError, match="second process"), peer_process(fails):
        pass
