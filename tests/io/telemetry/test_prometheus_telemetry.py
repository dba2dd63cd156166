"""Telemetry: every event counted right, bounded series, conventional names, never raising, never blocking."""

import asyncio
import io
import json
import logging
import math
import re
import socket
import threading
import time
import urllib.request
from typing import Any

import pytest
from machine import in_time
from prometheus_client.parser import text_string_to_metric_families

from noloco_p2p.core.members import STATES
from noloco_p2p.errors import LocalError
from noloco_p2p.io.telemetry import counters, log, node_figures
from noloco_p2p.io.telemetry.counters import EVENTS, RunCounters
from noloco_p2p.io.telemetry.journal import Journal
from noloco_p2p.io.telemetry.prometheus_telemetry import PrometheusTelemetry
from noloco_p2p.ports import Telemetry


@pytest.fixture
def telemetry() -> PrometheusTelemetry:
    return PrometheusTelemetry(stages=2, steps=1000)


def inner_step(telemetry: Telemetry, number: int, loss_sum: float, tokens: int = 100) -> None:
    telemetry.event(
        "inner_step",
        inner_step=number,
        step=number + 0.5,
        tokens=tokens,
        loss_sum=loss_sum,
        loss_tokens=tokens,
        learning_rate=1e-3,
        grad_norm=0.5,
        busy_s=0.25,
    )


def everything(telemetry: Telemetry) -> None:
    """One event of each kind that a node emits."""
    telemetry.event("state", state="training", reason="all are here")
    inner_step(telemetry, 1, 550.0)
    telemetry.event("microbatch", result="done")
    telemetry.event("microbatch", result="violation", peer="P", message="not finite")
    telemetry.event("reroute", reason="unreachable", peer="P", message="gone")
    telemetry.event("busy", direction="in")
    for result, partner in (("partner", "Q"), ("alone", None)):
        telemetry.event("outer_round", round=1, result=result, partner=partner, reason="odd", seconds=0.5, bytes=4096)
    telemetry.event("evaluation", step=10, loss=1.5, tokens=64)
    telemetry.event("membership", counts={(0, "training"): 2, (1, "waiting"): 1}, joined=3, departed=1)
    telemetry.event("membership", counts={(0, "training"): 2, (1, "waiting"): 1})
    telemetry.event("replica_std", value=0.01)
    telemetry.event("idle", cause="partner", seconds=0.5)
    telemetry.event("idle", cause="partner", seconds=0.25)
    telemetry.event("bytes", direction="out", kind="activation", bytes=1000)
    telemetry.event("bytes", direction="in", kind="gradient", bytes=300)
    telemetry.event("gauge", name="in_flight", value=3)
    telemetry.event("gauge", name="waiting", value=1)
    telemetry.event("gauge", name="parameters", value=321)
    telemetry.event("lag", seconds=0.02)
    telemetry.event("warning", message="the directory is slow")
    telemetry.event("info", message="holds stage 0 of 2")
    telemetry.event("microbatch", result="dropped", reason="drained", message="it leaves")
    telemetry.event("deserted", stages={1: 42.0})
    telemetry.event("checkpoint", round=3, step=30.0, seconds=0.5, bytes=2000)
    telemetry.event("guarded", stage=1, round=4, bytes=3000)
    telemetry.event("guards", rounds={1: 4})
    telemetry.event("resumed", source="peer", round=3, step=30.5, peer="Q")
    telemetry.event("moved", stage=1, reason="it holds the swarm back")
    with telemetry.span("forward"):
        pass
    with telemetry.span("unheard of"):
        pass


def scraped(telemetry: PrometheusTelemetry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    port = telemetry.serve("127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    finally:
        telemetry.close()
    families = list(text_string_to_metric_families(text))
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_every_event_reaches_its_metric(telemetry: PrometheusTelemetry) -> None:
    everything(telemetry)
    telemetry.identify(peer_id="12D3", run_id="ab", stage="0", version="0.1.0")
    found = scraped(telemetry)
    node = (("peer_id", "12D3"), ("run_id", "ab"), ("stage", "0"), ("version", "0.1.0"))
    expected: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {
        ("noloco_node_info", node): 1,
        ("noloco_inner_steps_total", ()): 1,
        ("noloco_outer_rounds_total", (("result", "partner"),)): 1,
        ("noloco_outer_rounds_total", (("result", "alone"),)): 1,
        ("noloco_outer_rounds_total", (("result", "stale"),)): 0,
        ("noloco_microbatches_total", (("result", "done"),)): 1,
        ("noloco_microbatches_total", (("result", "violation"),)): 1,
        ("noloco_rerouted_total", (("reason", "unreachable"),)): 1,
        ("noloco_busy_replies_total", (("direction", "in"),)): 1,
        ("noloco_loss", ()): 5.5,
        ("noloco_validation_loss", ()): 1.5,
        ("noloco_learning_rate", ()): 1e-3,
        ("noloco_grad_norm", ()): 0.5,
        ("noloco_step", ()): 1.5,
        ("noloco_tokens_total", ()): 100,
        ("noloco_device_seconds_total", ()): 0.25,
        ("noloco_phase_seconds_count", (("phase", "forward"),)): 1,
        ("noloco_phase_seconds_count", (("phase", "other"),)): 1,
        ("noloco_bytes_total", (("direction", "out"), ("kind", "activation"))): 1000,
        ("noloco_bytes_total", (("direction", "in"), ("kind", "gradient"))): 300,
        ("noloco_in_flight", ()): 3,
        ("noloco_waiting", ()): 1,
        ("noloco_parameters", ()): 321,
        ("noloco_outer_rounds_alone", ()): 1,
        ("noloco_pulled_bytes_total", ()): 8192,
        ("noloco_peers", (("stage", "0"), ("state", "training"))): 2,
        ("noloco_peers", (("stage", "1"), ("state", "training"))): 0,
        ("noloco_peers", (("stage", "1"), ("state", "waiting"))): 1,
        ("noloco_peers_joined_total", ()): 3,
        ("noloco_peers_departed_total", ()): 1,
        ("noloco_replica_std", ()): 0.01,
        ("noloco_idle_seconds_total", (("cause", "partner"),)): 0.75,
        ("noloco_event_loop_lag_seconds", ()): 0.02,
        ("noloco_state", (("state", "training"),)): 1,
        ("noloco_state", (("state", "paused"),)): 0,
        ("noloco_dropped_total", (("reason", "drained"),)): 1,
        ("noloco_stage_deserted_seconds", (("stage", "0"),)): 0,
        ("noloco_guarded_round", (("stage", "1"),)): 4,
        ("noloco_checkpoint_round", ()): 3,
        ("noloco_checkpoint_duration_seconds", ()): 0.5,
        ("noloco_checkpoint_size_bytes", ()): 2000,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert 42 <= found["noloco_stage_deserted_seconds", (("stage", "1"),)] < 60
    assert abs(found["noloco_checkpoint_timestamp_seconds", ()] - time.time()) < 60


def test_a_rate_that_has_not_been_measured_does_not_hide_the_others(telemetry: PrometheusTelemetry) -> None:
    telemetry.event("line", up_bytes_per_s=None, down_bytes_per_s=3e6, round_trip_s=0.02)
    figures = node_figures.status_figures(telemetry.counters, None)
    assert (figures.upload_bytes_per_s, figures.download_bytes_per_s, figures.round_trip_s) == (None, 3e6, 0.02)


def test_consecutive_rounds_without_a_partner_are_counted(telemetry: PrometheusTelemetry) -> None:
    in_a_row = []
    for result in ("alone", "alone", "stale", "alone"):
        telemetry.event("outer_round", round=1, result=result, partner=None, reason="odd", seconds=0.5, bytes=0)
        in_a_row.append(telemetry.registry.get_sample_value("noloco_outer_rounds_alone"))
    assert in_a_row == [1, 2, 0, 1]


def test_a_deserted_stage_is_logged_once_and_again_when_it_is_back(
    telemetry: PrometheusTelemetry, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry.event("state", state="training", reason="every stage has enough nodes")
    caplog.set_level(logging.INFO)
    for seconds in (3.0, 4.0, 5.0):
        telemetry.event("deserted", stages={1: seconds, 7: seconds})
    assert [r.message for r in caplog.records] == ["stage 1 has had no replica for 3 s: the run waits for one"]
    telemetry.event("deserted", stages={})
    telemetry.event("deserted", stages={})
    assert [r.message for r in caplog.records][1:] == ["stage 1 has a replica again, after 5 s"]
    found = scraped(telemetry)
    assert [found["noloco_stage_deserted_seconds", (("stage", s),)] for s in "01"] == [0, 0]
    assert ("noloco_stage_deserted_seconds", (("stage", "7"),)) not in found, "the run has no such stage"


def test_a_node_that_leaves_does_not_say_that_a_deserted_stage_has_a_replica_again(
    telemetry: PrometheusTelemetry, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry.event("state", state="training", reason="every stage has enough nodes")
    telemetry.event("deserted", stages={1: 3.0})
    telemetry.event("state", state="draining", reason="told to leave")
    caplog.set_level(logging.INFO)
    caplog.clear()
    telemetry.event("deserted", stages={})
    assert not caplog.records


def test_an_empty_message_leaves_no_colon_in_the_log(
    telemetry: PrometheusTelemetry, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry.event("microbatch", result="dropped", reason="cancelled", message="")
    assert [r.message for r in caplog.records] == ["microbatch dropped (cancelled)"]


def test_a_ward_that_a_guardian_has_dropped_leaves_the_metrics(telemetry: PrometheusTelemetry) -> None:
    telemetry.event("guards", rounds={1: 4})
    assert scraped(telemetry)["noloco_guarded_round", (("stage", "1"),)] == 4
    telemetry.event("guards", rounds={})
    assert ("noloco_guarded_round", (("stage", "1"),)) not in scraped(telemetry)


def test_checkpoints_and_guarding_are_logged_once(
    telemetry: PrometheusTelemetry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for number in (1, 2, 3):
        telemetry.event("checkpoint", round=number, step=10.0 * number, seconds=0.25, bytes=2000)
        telemetry.event("guarded", stage=1, round=number, bytes=3000)
    assert [r.message for r in caplog.records] == [
        "checkpoint of outer round 1: 0.25 s, 2,000 bytes",
        "guards stage 1: holds its outer round 1, 3,000 bytes",
    ]
    assert telemetry.totals()["checkpoints"] == 3


def test_a_node_logs_the_progress_of_the_run_every_ten_seconds(
    telemetry: PrometheusTelemetry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at stages that see no loss. Outer rounds are logged as seldom, each kind of result separately."""
    caplog.set_level(logging.INFO)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(telemetry._log, "_often", log.RepeatLimiter(log.PROGRESS_S, lambda: now))
    for number in range(25):
        fields = {"loss_sum": 2.41 * 2600, "loss_tokens": 2600 if number < 20 else 0}
        telemetry.event("inner_step", step=230.2 + number, tokens=2600, **fields)
        result = "alone" if number == 5 else "partner"
        telemetry.event("outer_round", round=number, result=result, reason="its turn", seconds=0.5, bytes=8)
        now += 1.0
    assert [r.message for r in caplog.records] == [
        "step 230/1,000  loss 2.41",
        "outer round 0: partner (its turn), 0.50 s, 8 bytes",
        "outer round 5: alone (its turn), 0.50 s, 8 bytes",
        "step 240/1,000  2.6k tok/s  loss 2.41",
        "outer round 10: partner (its turn), 0.50 s, 8 bytes",
        "step 250/1,000  2.6k tok/s",
        "outer round 20: partner (its turn), 0.50 s, 8 bytes",
    ]


def test_metric_names_follow_the_conventions(telemetry: PrometheusTelemetry) -> None:
    """Prometheus: a namespace, base units, `_total` for counters only, a help text."""
    everything(telemetry)
    for metric in telemetry.registry.collect():
        assert re.fullmatch(r"(noloco|process)_[a-z_]*[a-z]", metric.name)
        assert metric.documentation.endswith(".")
        assert not re.search(r"_(ms|us|kb|mb|minutes|millis\w*)(_|$)", metric.name)
        sample_names = {sample.name for sample in metric.samples if not sample.name.endswith("_created")}
        if metric.type == "counter":
            assert sample_names == {metric.name + "_total"}
        else:
            assert not metric.name.endswith("_total")


def test_totals_for_the_summary(telemetry: PrometheusTelemetry) -> None:
    everything(telemetry)
    for number in range(2, 13):
        inner_step(telemetry, number, 100.0 * number)
    inner_step(telemetry, 13, 0.0, tokens=0)
    telemetry.event("outer_round", round=2, result="other", partner="R", reason="busy", seconds=1.0, bytes=1)
    totals: dict[str, Any] = json.loads(json.dumps(telemetry.totals()))
    assert totals["inner_steps"] == 13
    assert totals["tokens"] == 1200
    assert totals["first_loss"] == 5.5
    assert totals["final_loss"] == pytest.approx(sum(range(3, 13)) / 10)
    assert totals["validation_loss"] == 1.5
    assert totals["results"] == {"partner": 1, "alone": 1, "other": 1}
    assert totals["outer_rounds"] == 3
    assert (totals["pulled"], totals["alone"]) == (2, 1)
    assert totals["microbatch_results"] == {"done": 1, "violation": 1, "dropped": 1}
    assert totals["microbatches"] == 1
    assert totals["dropped"] == {"drained": 1}
    assert totals["resumed"] == {"source": "peer", "round": 3, "step": 30.5, "peer": "Q"}
    assert (totals["checkpoints"], totals["moves"]) == (1, 1)
    assert totals["rerouted"] == 1
    assert (totals["bytes_sent"], totals["bytes_received"]) == (1000, 300)
    assert totals["idle_s"] == {"partner": 0.75}
    assert totals["device_s"] == pytest.approx(13 * 0.25)
    assert totals["step"] == 13.5
    assert totals["replica_std"] == 0.01
    assert totals["state"] == "training"
    assert 0 <= totals["last_step_at"] - totals["training_at"] < 60
    assert "first_step_at" not in totals, "it was the time when training began"
    telemetry.event("lag", seconds=0.01)
    assert telemetry.totals()["largest_lag_s"] == 0.02


def test_setting_the_clock_back_does_not_shorten_the_training_time(
    telemetry: PrometheusTelemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    telemetry.event("state", state="joining", reason="begin")
    assert telemetry.totals()["training_at"] is None
    telemetry.event("state", state="training", reason="begin")
    began_at, wall = telemetry.totals()["training_at"], time.time
    monkeypatch.setattr(time, "time", lambda: wall() - 7_200.0)
    inner_step(telemetry, 1, 100.0)
    totals = telemetry.totals()
    assert 0 <= totals["last_step_at"] - totals["training_at"] < 60
    assert abs(totals["training_at"] - wall()) < 60
    telemetry.event("state", state="training", reason="again")
    assert telemetry.totals()["training_at"] == began_at


def test_the_summary_of_a_node_says_when_it_trained(
    telemetry: PrometheusTelemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without pauses, up to now if it still trains."""
    now = 100.0
    monkeypatch.setattr(RunCounters, "wall_time", lambda counters: now)
    assert telemetry.totals()["training"] == []
    for state, began_at in (("syncing", 101.0), ("training", 102.0), ("paused", 110.0), ("training", 120.0)):
        now = began_at
        telemetry.event("state", state=state, reason="")
    now = 125.0
    assert telemetry.totals()["training"] == [(102.0, 110.0), (120.0, 125.0)]
    telemetry.event("state", state="draining", reason="")
    now = 130.0
    totals = telemetry.totals()
    assert (totals["training"], totals["training_at"]) == ([(102.0, 110.0), (120.0, 125.0)], 102.0)


def test_the_earliest_of_very_many_pauses_count_as_training(
    telemetry: PrometheusTelemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(RunCounters, "wall_time", lambda counters: now)
    for number in range(counters.MOST_TURNS):
        for state in ("training", "paused"):
            telemetry.event("state", state=state, reason="")
            now += 1.0
        if number == 1:
            assert telemetry.totals()["training"] == [(0.0, 1.0), (2.0, 3.0)]
    spans = telemetry.totals()["training"]
    assert len(spans) == counters.MOST_TURNS // 2
    assert (spans[0][0], spans[-1][1]) == (0.0, now - 1.0)
    assert all(until - began_at == 1.0 for began_at, until in spans[1:])


def test_labels_that_peers_choose_are_counted_separately_up_to_a_limit(telemetry: PrometheusTelemetry) -> None:
    reasons = [f"{number:02} {'x' * counters.LABEL_CHARACTERS}" for number in range(60)]
    for reason in [*reasons[:30], reasons[0], "busy"]:
        telemetry.event("microbatch", result="dropped", reason=reason)
    began_at = telemetry.counters.created_at["dropped", ("other",)]
    for reason in reasons[30:]:
        telemetry.event("microbatch", result="dropped", reason=reason)
    separate = counters.MAX_LABELS - len(counters.KNOWN["dropped"])
    dropped = dict.fromkeys([reason[: counters.LABEL_CHARACTERS] for reason in reasons[:separate]], 1)
    assert telemetry.totals()["dropped"] == dropped | {next(iter(dropped)): 2, "busy": 1, "other": 60 - separate}
    assert telemetry.registry.get_sample_value("noloco_dropped_created", {"reason": "other"}) == began_at


def test_metrics_summary_status_and_journal_agree(telemetry: PrometheusTelemetry) -> None:
    lines: list[str] = []
    journal = Journal(lines.append, telemetry.counters)
    telemetry.record(journal)
    everything(telemetry)
    everything(telemetry)
    telemetry.event("inner_step", step=9.0, tokens=7, busy_s="malformed", loss_sum=1.0, loss_tokens=1.0)
    journal.end()
    metrics, totals, status = (
        scraped(telemetry),
        telemetry.totals(),
        node_figures.status_figures(telemetry.counters, None),
    )
    (progress,) = [line for line in map(json.loads, lines) if line["event"] == "progress"]
    assert [json.loads(line)["event"] for line in lines].count("checkpoint") == 2
    assert progress["phase_s"].keys() == {"forward", "other"}

    def metric(name: str) -> dict[str, float]:
        """The series of a metric by their label, without those at 0."""
        return {" ".join(v for _, v in labels): n for (each, labels), n in metrics.items() if each == name and n}

    assert metric("noloco_outer_rounds_total") == totals["results"] == status.rounds == progress["rounds"]
    ended = totals["microbatch_results"]
    assert metric("noloco_microbatches_total") == ended == status.microbatches == progress["microbatches"]
    assert metric("noloco_rerouted_total") == totals["reroutes"] == status.rerouted == progress["rerouted"]
    assert metric("noloco_dropped_total") == totals["dropped"] == progress["dropped"] == {"drained": 2}
    assert metric("noloco_busy_replies_total") == totals["busy_replies"] == progress["busy"] == {"in": 2}
    assert metric("noloco_idle_seconds_total") == totals["idle_s"] == status.idle_s == progress["idle_s"]
    assert metric("noloco_tokens_total") == {"": totals["tokens"]} == {"": status.tokens} == {"": progress["tokens"]}
    assert metric("noloco_inner_steps_total") == {"": totals["inner_steps"]} == {"": progress["inner_steps"]} == {"": 2}
    assert metric("noloco_device_seconds_total") == {"": status.device_s} == {"": progress["device_s"]} == {"": 0.5}
    assert metric("noloco_bytes_total") == progress["bytes"] == {"out activation": 2000, "in gradient": 600}
    assert (totals["bytes_sent"], totals["bytes_received"]) == (status.bytes_out, status.bytes_in) == (2000, 600)
    assert metrics["noloco_loss", ()] == totals["final_loss"] == status.loss == progress["loss"] == 5.5


def test_totals_before_the_first_event(telemetry: PrometheusTelemetry) -> None:
    totals = telemetry.totals()
    assert (totals["first_loss"], totals["final_loss"], totals["inner_steps"]) == (None, None, 0)


def test_a_non_finite_loss_does_not_spoil_the_figures(telemetry: PrometheusTelemetry) -> None:
    inner_step(telemetry, 1, 300.0)
    inner_step(telemetry, 2, float("nan"))
    assert telemetry.totals()["final_loss"] == 3.0
    assert scraped(telemetry)["noloco_loss", ()] == 3.0


def test_series_are_bounded(telemetry: PrometheusTelemetry) -> None:
    """Values that strangers can choose (stages of adverts, kinds, reasons) create a bounded number of series."""
    for i in range(500):
        telemetry.event("membership", counts={(i, f"state{i}"): 1, (i, "training"): 1})
        telemetry.event("reroute", reason=f"reason {i}")
        telemetry.event("microbatch", result="dropped", reason=f"reason {i}")
        telemetry.event("guards", rounds=dict.fromkeys(range(i), 1))
        telemetry.event("deserted", stages={i: 1.0})
        telemetry.event("bytes", direction="in", kind=f"kind {i}", bytes=1)
    found = scraped(telemetry)
    assert sum(name == "noloco_peers" for name, _ in found) == 2 * len(STATES)
    for name in ("noloco_stage_deserted_seconds", "noloco_guarded_round"):
        assert sum(sample == name for sample, _ in found) == 2
    for name in ("noloco_rerouted_total", "noloco_bytes_total", "noloco_dropped_total"):
        values = [value for (sample, _), value in found.items() if sample == name]
        assert len(values) <= 26
        assert sum(values) == 500, "no event is lost: the rest is counted as other"


class Hostile:
    """A value whose conversion to text raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def test_telemetry_never_raises_into_its_caller(
    telemetry: PrometheusTelemetry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for kind in (*EVENTS, *log.LINES, "warning", "deserted", "unheard of"):
        telemetry.event(kind)
        if kind != "unheard of":
            telemetry.event(kind, **dict.fromkeys(("state", "result", "message", "value", "counts", "name"), Hostile()))
    everything(telemetry)
    assert telemetry.totals()["inner_steps"] == 1
    assert "event inner_step failed" in caplog.text


def test_a_port_in_use_is_named(telemetry: PrometheusTelemetry) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LocalError, match=f"port {port} cannot be opened.*metrics_port"):
            telemetry.serve("127.0.0.1", port)
    telemetry.close()


def test_a_scrape_is_answered_while_the_loop_is_stuck(telemetry: PrometheusTelemetry) -> None:
    async def blocks_the_loop() -> float:
        return scraped(telemetry)["noloco_inner_steps_total", ()]

    assert asyncio.run(blocks_the_loop()) == 0


@pytest.fixture
def lines() -> io.StringIO:
    return io.StringIO()


def test_log_lines_are_readable(telemetry: PrometheusTelemetry, lines: io.StringIO) -> None:
    stop = log.start(lines)
    everything(telemetry)
    for _ in range(20):
        telemetry.event("reroute", reason="unreachable", peer="P", message="gone")
    stop()
    text = lines.getvalue()
    for part in (
        "INFO    training: all are here",
        "outer round 1: partner of Q (odd), 0.50 s, 4,096 bytes",
        "INFO    step 1/1,000  loss 5.50\n",
        "WARNING microbatch violation, P: not finite",
        "validation at step 10: 1.5000 nats per token over 64 tokens",
        "WARNING the directory is slow",
        "holds stage 0 of 2",
        "WARNING microbatch dropped (drained): it leaves",
        "WARNING stage 1 has had no replica for 42 s: the run waits for one",
        "checkpoint of outer round 3: 0.50 s, 2,000 bytes",
        "continuing from step 30.5 (outer round 3), weights from: peer of Q",
        "moving to stage 1: it holds the swarm back",
    ):
        assert part in text
    assert text.count("re-routed") == 1, "repeated trouble is logged only now and then"


def test_log_lines_can_be_json(
    telemetry: PrometheusTelemetry, lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(logging._levelToName, logging.WARNING, "WARN")  # as hivemind does when it is imported
    stop = log.start(lines, json_lines=True)
    everything(telemetry)
    telemetry.event("info", message="two\nlines")
    stop()
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    kinds = {"state", "microbatch", "reroute", "outer_round", "evaluation", "warning", "info"}
    kinds |= {"inner_step", "deserted", "checkpoint", "guarded", "resumed", "moved"}
    assert {line["event"] for line in found} == kinds
    by_kind = {line["event"]: line for line in found}
    assert by_kind["info"]["message"] == "two\nlines"
    assert by_kind["outer_round"] | {"round": 1, "result": "alone", "level": "info"} == by_kind["outer_round"]
    assert by_kind["reroute"]["peer"] == "P"
    assert by_kind["reroute"]["level"] == "warning"


def test_the_root_logger_is_as_before_afterwards(lines: io.StringIO) -> None:
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    log.start(lines)()
    assert (root.handlers, root.level) == before


def test_suppressed_lines_are_counted() -> None:
    now = [0.0]
    limiter = log.RepeatLimiter(5.0, lambda: now[0])
    assert [limiter.admit("a") for _ in range(4)] == [0, None, None, None]
    assert limiter.admit("b") == 0
    now[0] = 5.0
    assert limiter.admit("a") == 3


class Stuck(io.StringIO):
    """An output that blocks writes until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def write(self, text: str) -> int:
        self.gate.wait(0.5)
        return super().write(text)


def test_a_stuck_log_output_does_not_block_events(
    telemetry: PrometheusTelemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "STOP_S", 0.05)
    output = Stuck()
    stop = log.start(output)
    began = time.perf_counter()
    for i in range(log.QUEUE_LINES + 20):
        telemetry.event("info", message=f"line {i}")
    stop()
    assert in_time(time.perf_counter() - began, 5), "each of the 20 lines beyond the limit would wait for half a second"
    output.gate.set()


def test_the_last_line_of_the_log_says_how_many_were_dropped(
    telemetry: PrometheusTelemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "QUEUE_LINES", 4)
    output = Stuck()
    stop = log.start(output)
    for i in range(20):
        telemetry.event("info", message=f"line {i}")
    output.gate.set()
    stop()
    *written, last = output.getvalue().splitlines()
    assert last.endswith(f" {20 - len(written)} log lines were dropped: the output was too slow")


def test_a_disk_that_hangs_during_a_status_request_does_not_block_events(
    telemetry: PrometheusTelemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the file system hangs during a request for /status, the event loop goes on."""
    asked, answers = threading.Event(), threading.Event()

    def hangs() -> int:
        asked.set()
        answers.wait(60)
        return 0

    monkeypatch.setattr(node_figures, "rss_bytes", hangs)
    reader = threading.Thread(target=node_figures.status_figures, args=(telemetry.counters, None))
    reader.start()
    assert asked.wait(10)
    event = threading.Thread(target=telemetry.event, args=("lag",), kwargs={"seconds": 0.0})
    event.start()
    event.join(10)
    blocked = event.is_alive()
    answers.set()
    reader.join()
    assert not blocked


def test_events_of_the_hot_path_are_cheap(telemetry: PrometheusTelemetry) -> None:
    """Usually a few µs; the bound only catches something that has become ten times as expensive."""
    began = time.perf_counter()
    for _ in range(2000):
        telemetry.event("microbatch", result="done")
        telemetry.event("bytes", direction="in", kind="activation", bytes=1)
        telemetry.event("gauge", name="in_flight", value=1)
    assert in_time((time.perf_counter() - began) / 6000, 100e-6)


def test_figures_that_are_not_finite_are_null_in_json_lines(telemetry: PrometheusTelemetry, lines: io.StringIO) -> None:
    stop = log.start(lines, json_lines=True)
    for loss in (math.nan, math.inf, -math.inf):
        telemetry.event("evaluation", step=3.0, loss=loss, tokens=8)
    stop()
    found = [json.loads(line, parse_constant=pytest.fail) for line in lines.getvalue().splitlines()]
    assert [line["loss"] for line in found] == [None] * 3


@pytest.mark.parametrize("json_lines", [False, True])
def test_peers_cannot_inject_lines_or_control_characters_into_the_log(json_lines: bool) -> None:
    lines = io.StringIO()
    stop = log.start(lines, json_lines=json_lines)
    logging.getLogger("noloco_p2p").warning("the peer says %s", "\x1b[2J\x1b]0;mine\x07")
    stop()
    [line] = lines.getvalue().splitlines()
    assert line.isprintable()
    assert "the peer says" in line
