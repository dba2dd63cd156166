"""`noloco bench monitoring`: slow instruments show up in its figures."""

import time

import pytest

from noloco_p2p.io.telemetry.prometheus_telemetry import PrometheusTelemetry
from noloco_p2p.lab.bench import monitoring


def test_a_slow_instrument_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "SIMULATED_STEPS", 6)
    monkeypatch.setattr(monitoring, "REPEATS", 1)
    before = monitoring.instruments_us()
    assert before["total"] == pytest.approx(before["events"] + before["waits"])
    assert before["waits"] > 0
    event = PrometheusTelemetry.event

    def slow(self: PrometheusTelemetry, kind: str, /, **fields: object) -> None:
        if kind == "microbatch":
            time.sleep(0.005)
        event(self, kind, **fields)

    monkeypatch.setattr(PrometheusTelemetry, "event", slow)
    after = monitoring.instruments_us()
    # One such event at each of two stages.
    assert after["events"] > 2 * 5000
    assert after["events"] > 2 * before["events"]
