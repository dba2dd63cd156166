"""Hooks for the whole suite."""

import fcntl
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_start
from hypothesis import HealthCheck, settings

# The time of an example is meaningless, because the machine may be busy with other work.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# No test, and no process that a test starts, uses the hub: without a connection it would be retried for 47 s.
os.environ["HF_HUB_OFFLINE"] = "1"
# The workers of pytest use all cores already. (torch reads this when it is imported.)
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Import once what all workers and all nodes import, and fork them from there."""
    directory = tempfile.TemporaryDirectory(prefix="forks-")
    config.add_cleanup(directory.cleanup)
    warm_start.lend(Path(directory.name) / "socket")
    for spec in specs:
        spec.python = f"{sys.executable} {Path(warm_start.__file__).with_name('forked_worker.py')}"


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Let two workers collect at a time. After a fresh installation they compile everything that they import, and the
    others find it compiled, instead of doing the same at the same time. Imports leave hardly any garbage, and searching
    for it takes a tenth of the time."""
    gc.disable()
    worker = getattr(session.config, "workerinput", {"workerid": "gw0"})["workerid"]
    place = ("conftest.py", "test_house.py")[int(worker[2:]) % 2]  # any two files
    with Path(__file__).with_name(place).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            return (yield)
        finally:
            gc.enable()


def pytest_collection_finish() -> None:
    """Exempt the 570,000 objects imported by collection from garbage collection, which took 12 % of a simulation."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def minds_signals() -> Iterator[None]:
    """Restore the default handlers for a test of signals. Otherwise the test's processes would inherit ignored signals:
    hangups under nohup, Ctrl-C in the background of a script."""
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGHUP, hangup)
    signal.signal(signal.SIGINT, interrupt)


@pytest.fixture
def without_collection() -> Iterator[None]:
    """Only what nothing refers to is freed, as in a large process between two garbage collections."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
