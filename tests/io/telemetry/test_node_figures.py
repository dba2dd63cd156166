"""Rates and a node's current figures: right for a steady stream, for sparse lumps, and for a stream that has ended."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_p2p import host
from noloco_p2p.core.status import NodeFigures
from noloco_p2p.io.telemetry import node_figures
from noloco_p2p.io.telemetry.counters import RateMeter, RunCounters
from noloco_p2p.launch import run_files


def stream(rate: RateMeter, gap_s: float, amount: float, until: float) -> float:
    """Add an amount every `gap_s` seconds up to the time `until`; returns the time of the last."""
    now = 0.0
    while now + gap_s <= until:
        now += gap_s
        rate.add(now, amount)
    return now


@settings(max_examples=60)
@given(st.floats(0.01, 100.0), st.floats(0.0, 1.0))
def test_a_steady_stream_has_its_rate_at_any_moment(gap_s: float, phase: float) -> None:
    """Whether amounts come a hundred times a second or every 100 s, just after an amount as well as just before."""
    rate = RateMeter()
    last = stream(rate, gap_s, 7.0, 30 * max(gap_s, 1.0))
    assert rate.per_s(last + phase * gap_s) == pytest.approx(7.0 / gap_s, rel=0.3 if gap_s > 3 else 0.15)


def test_a_fluctuating_stream_has_its_mean_over_ten_seconds() -> None:
    rate = RateMeter()
    found = []
    for second in range(60):
        for part in range(10):
            rate.add(second + part / 10, 4.0 if second % 2 else 0.0)
        found.append(rate.per_s(second + 0.95))
    assert all(18.0 < each < 22.5 for each in found[20:]), found[20:]


def test_a_rate_follows_a_change_within_about_ten_seconds() -> None:
    rate = RateMeter()
    last = stream(rate, 0.1, 1.0, 100.0)
    for step in range(1, 121):
        rate.add(last + step / 10, 5.0)
    assert rate.per_s(last + 12.0) == pytest.approx(50.0, rel=0.05)


@pytest.mark.parametrize("gap_s", [0.01, 1.0, 20.0])
def test_the_rate_of_a_stopped_stream_decays_to_zero(gap_s: float) -> None:
    rate = RateMeter()
    last = stream(rate, gap_s, 3.0, 50 * gap_s)
    found = [rate.per_s(last + seconds) for seconds in (0.0, 6.0, 12.0, 61.0, 1000.0)]
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(3.0 / gap_s, rel=0.1)
    assert found[-2:] == ([0.0, 0.0] if gap_s < 20 else [found[-2], 0.0])


def test_there_is_no_rate_before_the_second_amount() -> None:
    rate = RateMeter()
    assert rate.per_s(5.0) == 0.0
    rate.add(6.0, 100.0)
    assert rate.per_s(7.0) == 0.0
    rate.add(8.0, 100.0)
    assert rate.per_s(8.0) == 50.0
    assert rate.per_s(13.0) == 20.0


def test_marks_are_bounded() -> None:
    rate = RateMeter()
    stream(rate, 0.01, 1.0, 100.0)
    assert len(rate._marks) <= 11


def test_a_pause_does_not_count_in_the_rate_of_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """For ten seconds after an hour's pause, a node that trained on 100 tokens per second showed less than one."""
    counters, now = RunCounters(1), 1_000.0
    monkeypatch.setattr("noloco_p2p.io.telemetry.counters.time.monotonic", lambda: now)
    for pause_s in (0.0, 3_600.0):
        counters.count("state", {"state": "paused"})
        now += pause_s
        counters.count("state", {"state": "training"})
        for step in range(20):
            counters.count("inner_step", {"step": step, "tokens": 25, "loss_sum": 50.0, "loss_tokens": 25})
            now += 0.25
        assert node_figures.status_figures(counters, None).tokens_per_s == pytest.approx(100.0, rel=0.1)


def test_figures_that_are_not_finite_are_none(tmp_path: Path) -> None:
    counters = RunCounters(2)
    assert node_figures.status_figures(counters, None).loss is None
    step = {"step": 1.0, "tokens": 2, "busy_s": 0.5, "loss_sum": 6.0, "loss_tokens": 2}
    counters.count("inner_step", {**step, "learning_rate": 0.5, "grad_norm": math.nan})
    alone = {"result": "alone", "bytes": 0}
    counters.count("outer_round", alone)
    found = node_figures.status_figures(counters, tmp_path)
    assert (found.loss, found.grad_norm, found.learning_rate) == (3.0, None, 0.5)
    assert found.rounds == {"alone": 1}
    assert found.loop_silent_s == 0.0
    assert (found.disk_free_bytes or 0) > 0
    counters.count("outer_round", alone)
    assert found.rounds == {"alone": 1}, "the figures are a copy, though the counters go on"
    counters.beat_at = counters.began_at - 40.0
    for kind in ("gradient", "state"):
        counters.count("bytes", {"direction": "in", "kind": kind, "bytes": 8})
    found = node_figures.status_figures(counters, None)
    assert (found.bytes_in, found.bytes_out) == (16, 0)
    assert found.loop_silent_s - found.up_s == pytest.approx(40.0)
    assert isinstance(found, NodeFigures)


def test_a_summary_is_written_even_if_its_figures_are_not_finite(tmp_path: Path) -> None:
    counters = RunCounters(1)
    counters.count("evaluation", {"step": 1, "loss": math.nan, "tokens": 16})
    counters.count("replica_std", {"value": math.inf})
    run_files.write_json(tmp_path / "summary.json", node_figures.run_totals(counters))
    found = json.loads((tmp_path / "summary.json").read_bytes())
    assert (found["validation_loss"], found["replica_std"], found["evaluations"]) == (None, None, 1)


def test_memory_and_disk_of_the_machine_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = node_figures.rss_bytes()
    held = b"x" * 30_000_000
    assert 10_000_000 < before < node_figures.rss_bytes() - len(held) // 2 < host.memory_bytes()
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    whole = host.memory_bytes()
    limit.write_text("max\n")
    assert host.memory_bytes() == whole
    limit.write_text("1000000\n")
    assert host.memory_bytes() == 1_000_000
    assert node_figures.disk_free_bytes(tmp_path / "nowhere") is None


def test_losses_and_spread_of_the_stage_that_a_node_has_left_are_not_those_of_its_new_stage() -> None:
    counters = RunCounters(2)
    counters.count("stage", {"stage": 0})
    counters.count("inner_step", {"step": 1, "tokens": 8, "loss_sum": 16.0, "loss_tokens": 8})
    counters.count("evaluation", {"step": 1, "loss": 3.0, "tokens": 16})
    counters.count("replica_std", {"value": 0.5})
    found = node_figures.status_figures(counters, None)
    assert (found.loss, found.validation_loss, found.replica_std) == (2.0, 3.0, 0.5)
    counters.count("stage", {"stage": 1})
    counters.count("inner_step", {"step": 2, "tokens": 8, "loss_sum": 0.0, "loss_tokens": 0})
    found = node_figures.status_figures(counters, None)
    assert (found.loss, found.validation_loss, found.replica_std) == (None, None, None)
    totals = node_figures.run_totals(counters)
    assert (totals["validation_loss"], totals["replica_std"]) == (None, None)
