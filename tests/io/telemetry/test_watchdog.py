"""The watchdog: one line when a node becomes unhealthy, one when it has recovered."""

import logging
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from processes import wait_until

from noloco_p2p.core.messages import Advert
from noloco_p2p.core.status import NodeFigures, Status, Wait
from noloco_p2p.io.telemetry import prometheus_telemetry
from noloco_p2p.io.telemetry.prometheus_telemetry import PrometheusTelemetry, Watchdog

WELL = Status(Advert("12D3me", "run", 0, ("h:1",), state="training"), "tiny", 2, 100, 7)


def test_each_problem_is_reported_once_however_long_it_lasts() -> None:
    said: list[tuple[str, bool]] = []
    status = WELL
    dog = Watchdog(lambda: status, lambda line, well: said.append((line, well)))
    dog.look()
    assert said == []
    for since_s in (12.0, 13.0, 14.0):
        status = replace(WELL, waits=(Wait("gradient", "12D3other", since_s, 10.0),))
        dog.look()
    assert said == [("overdue: waited 12 s (at most 10 s) for gradient from 12D3other", False)]
    status = replace(WELL, waits=(Wait("snapshot", "12D3other", 12.0, 10.0),))
    dog.look()
    assert said[1:] == [("overdue: waited 12 s (at most 10 s) for snapshot from 12D3other", False)]
    status = WELL
    dog.look()
    dog.look()
    assert said[2:] == [("the problem is over", True)]


def test_the_watchdog_checks_periodically_and_ends_when_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_telemetry, "WATCHDOG_PERIOD_S", 0.001)
    silent = replace(WELL, figures=NodeFigures(loop_silent_s=60.0))
    heard = threading.Event()
    dog = Watchdog(lambda: silent, lambda line, well: heard.set())
    dog.start()
    assert heard.wait(10.0)
    dog.close()
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}


def test_a_check_that_hangs_does_not_keep_the_node_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does while the disk of the node's directory hangs."""
    monkeypatch.setattr(prometheus_telemetry, "WATCHDOG_PERIOD_S", 0.001)
    asked, answers = threading.Event(), threading.Event()

    def hangs() -> Status:
        asked.set()
        answers.wait(60)
        return WELL

    dog = Watchdog(hangs, lambda line, well: None)
    dog.start()
    assert asked.wait(10.0)
    closing = threading.Thread(target=dog.close)
    closing.start()
    closing.join(10.0)
    blocked = closing.is_alive()
    answers.set()
    closing.join()
    dog.join()
    assert not blocked


def test_the_log_has_a_line_for_the_problem_and_one_for_its_end(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    telemetry = PrometheusTelemetry(2)
    ill = threading.Event()
    stuck = replace(WELL, waits=(Wait("gradient", "12D3other", 12.0, 10.0),))
    with caplog.at_level(logging.INFO, "noloco_p2p"):
        telemetry.watch(lambda: stuck if ill.is_set() else WELL, tmp_path)
        try:
            ill.set()
            wait_until(lambda: len(caplog.records) == 1, "the watchdog's line", 10.0)
            ill.clear()
            wait_until(lambda: len(caplog.records) == 2, "its line when that is over", 10.0)
        finally:
            telemetry.close()
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, "watchdog: overdue: waited 12 s (at most 10 s) for gradient from 12D3other"),
        (logging.INFO, "watchdog: the problem is over"),
    ]
