"""Hooks for the whole suite."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says nothing: the machine does other things meanwhile.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# No test, and no process that one starts, asks the hub for anything: where it cannot be reached it is tried for 47 s.
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_collection_finish() -> None:
    """Exempt the 570,000 objects that collection imported from garbage collection, which took 12 % of a simulation."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def minds_signals() -> Iterator[None]:
    """For a test of signals. The suite may ignore some, and then so would what a test starts: hangups under nohup, and
    Ctrl-C in the background of a script."""
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGHUP, hangup)
    signal.signal(signal.SIGINT, interrupt)
