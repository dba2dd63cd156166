"""Local time on a machine that changes its time zone."""

import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from noloco_p2p.launch.local_time import local_time


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    yield monkeypatch
    monkeypatch.undo()
    time.tzset()


def test_a_process_notices_a_change_of_the_time_zone(zone: pytest.MonkeyPatch) -> None:
    zone.setenv("TZ", "UTC0")
    before = local_time()
    zone.setenv("TZ", "JST-9")
    assert timedelta(hours=9) <= local_time() - before < timedelta(hours=10)
