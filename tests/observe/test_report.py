"""`noloco report`: the page of a recorded run shows the run's figures, and survives whatever is in the files."""

import base64
import csv
import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from journal_lines import BEGAN_AT, line

from noloco_p2p.cli import main as command
from noloco_p2p.config import EvaluationSettings, OuterSettings, RunManifest
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.io.telemetry.counters import RunCounters
from noloco_p2p.io.telemetry.journal import NAME, EventFiles, Journal
from noloco_p2p.io.telemetry.prometheus_telemetry import PrometheusTelemetry
from noloco_p2p.launch import run_files
from noloco_p2p.launch.node_probe import KEY_LOCK
from noloco_p2p.observe.plotting.svg import SERIES_COLOURS, Colour
from noloco_p2p.observe.plotting.time_bins import Increment, TimeBins
from noloco_p2p.observe.report import series
from noloco_p2p.observe.report.journals import read_processes
from noloco_p2p.observe.report.node_history import TRAINED, StateSpan
from noloco_p2p.observe.report.page import make
from noloco_p2p.observe.report.page import render as render_all
from noloco_p2p.observe.report.recorded_run import RecordedRun, read_runs
from noloco_p2p.sim.process import SimProcess
from noloco_p2p.sim.world import SimPlan, SimSwarm

HOSTILE = "</title></svg><script>alert(1)</script><img src=x onerror=alert(1)>&amp;\x00\x1b[31m\u202e\"'"


class RecordedClock:
    """A clock set by a recorded trace."""

    def __init__(self, start: float) -> None:
        self.start = start
        self.at_s = 0.0

    def __call__(self) -> float:
        return self.start + self.at_s


def read_run(paths: Sequence[Path]) -> RecordedRun:
    """The only run of these paths."""
    (run,) = read_runs(paths).values()
    return run


def render(run: RecordedRun) -> str:
    """The page of one run."""
    return render_all({"run": run})


def record(process: SimProcess, directory: Path, manifest: RunManifest, started_at_s: float) -> dict[str, Any]:
    """Write the journal of a simulated process as its telemetry would have; returns the telemetry's own totals."""
    directory.mkdir(exist_ok=True)
    (directory / "manifest.json").write_bytes(manifest.canonical_json())
    files, clock, wall = EventFiles(directory), RecordedClock(0.0), RecordedClock(BEGAN_AT)
    clock.at_s = wall.at_s = started_at_s
    telemetry = PrometheusTelemetry(manifest.stages)
    journal = Journal(files.write, telemetry.counters, clock, wall)
    journal.start(peer_id=process.peer, run_id=manifest.run_id, name=manifest.name, version="1.0", stage=process.stage)
    telemetry.record(journal)
    for event in process.trace.events:
        clock.at_s = wall.at_s = event.at_s
        telemetry.event(event.kind, **dict(event.fields))
    if not process.crashed:
        journal.end()
    return telemetry.totals()


@dataclass(frozen=True)
class Recorded:
    """A run directory, and what its nodes counted themselves; `s1r1` was killed, `s0r1` killed and restarted."""

    directory: Path
    manifest: RunManifest
    totals: Mapping[str, list[dict[str, Any]]]
    """The telemetry's totals of every process, by peer."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    directory = tmp_path_factory.mktemp("report") / "run"
    directory.mkdir()
    manifest = RunManifest(
        name="recorded",
        stages=2,
        start_replicas=3,
        steps=60,
        sequence_length=4,
        microbatch_size=1,
        microbatches_per_step=3,
        outer=OuterSettings(rule="noloco", inner_steps=4, deadline_s=2.0),
        evaluation=EvaluationSettings(every_steps=20, microbatches=2),
    )
    swarm = SimSwarm(SimPlan(manifest, replicas=(3, 3), seed=1))
    swarm.at(4.0, lambda: swarm.crash("s1r1"))
    swarm.at(5.0, lambda: swarm.bounce("s0r1", 2.0))
    outcome = swarm.run(tolerate=True)
    totals: dict[str, list[dict[str, Any]]] = {}
    for process in outcome.processes:
        started_at_s = process.trace.events[0].at_s
        place = directory / f"{process.stage}-{process.peer[-1]}"
        totals.setdefault(process.peer, []).append(record(process, place, manifest, started_at_s))
    return Recorded(directory, manifest, totals)


@pytest.fixture(scope="module")
def run(recorded: Recorded) -> RecordedRun:
    return read_run([recorded.directory])


class Outline(HTMLParser):
    """The tags and attributes of a page: whatever a browser might fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


def parsed(page: str) -> ElementTree.Element:
    """The page parsed as XML, so every element must be closed and every text escaped."""
    return ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))


def texts(page: str) -> list[str]:
    return [text.strip() for text in parsed(page).itertext() if text.strip()]


def after(page: str, label: str) -> str:
    """The text that follows a label."""
    found = texts(page)
    return found[found.index(label) + 1]


def cells(page: str) -> set[tuple[str, str]]:
    """The first two cells of every row of every table."""
    rows = [["".join(cell.itertext()) for cell in row.findall("td")] for row in parsed(page).findall(".//tr")]
    return {(row[0], row[1]) for row in rows if len(row) > 1}


def mean(found: list[Any]) -> float:
    known = [value for value in found if value is not None]
    return float(sum(known) / len(known))


# === the page =========================================================================================================


def test_the_page_is_well_formed_and_self_contained(run: RecordedRun) -> None:
    page = render(run)
    outline = Outline()
    outline.feed(page)
    assert len(parsed(page).findall(".//svg")) == 11
    assert outline.tags.count("script") == 1
    script = page.partition("<script>")[2].partition("</script>")[0]
    assert f"script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in page
    assert {"link", "img", "iframe", "object", "base"}.isdisjoint(outline.tags)
    assert {name for name, _ in outline.attributes}.isdisjoint(
        {"src", "href", "srcset", "style", "onload", "xlink:href"}
    )
    assert not re.search(r"(https?:)?//|url\(|@import|innerHTML|eval\(", page)
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


def test_the_script_gets_the_values_behind_the_coordinates(run: RecordedRun) -> None:
    charts = {svg.get("aria-label"): svg for svg in parsed(render(run)).findall(".//svg") if svg.get("data-y")}
    assert set(charts) == {
        "Loss",
        "Tokens per second",
        "Gradient norm",
        "Learning rate",
        "Seconds per outer round",
        "Spread of the replicas",
        "Bytes per second",
    }
    left, right, first, last = map(float, charts["Loss"].get("data-x", "").split())
    bottom, top, low, high = map(float, charts["Loss"].get("data-y", "").split())
    (history,) = [node for node in run.nodes if node.name == "0-0"]
    (path,) = [one for one in charts["Loss"].findall(".//path[@data-v]") if one.findtext("title") == "0-0"]
    values = [float(value) for value in path.get("data-v", "").split()]
    places = [tuple(map(float, place.split())) for place in path.get("d", "")[1:].split("L")]
    assert values == pytest.approx([loss for piece in history.curves["loss", 0] for _, loss in piece], rel=1e-3)
    for (step, loss), (x, y) in zip(history.curves["loss", 0][0], places, strict=True):
        assert x == pytest.approx(left + (step - first) / (last - first) * (right - left), abs=0.06)
        assert y == pytest.approx(bottom - (loss - low) / (high - low) * (bottom - top), abs=0.06)
    ticks = charts["Loss"].findall(".//g[@class='scale']")
    assert [group.get("display") for group in ticks] == [None, "none"], "the logarithmic scale is hidden at first"
    assert charts["Tokens per second"].get("data-log") is None, "no logarithmic scale, because the value may be 0"


def test_every_chart_has_an_accessible_name(run: RecordedRun) -> None:
    for svg in parsed(render(run)).findall(".//svg"):
        assert svg.get("role") == "img"
        assert svg.get("aria-label") == svg.findtext("title") != ""


def test_the_figures_equal_those_that_the_nodes_counted(recorded: Recorded) -> None:
    """Exactly, for nodes that were not killed."""
    places = [recorded.directory / name for name in ("0-0", "0-2", "1-0", "1-2")]
    run = read_run(places)
    page, first = render(run), [recorded.totals[peer][0] for peer in ("s0r0", "s0r2")]
    later = [recorded.totals[peer][0] for peer in ("s1r0", "s1r2")]
    assert after(page, "tokens") == f"{sum(totals['tokens'] for totals in first):,}"
    assert after(page, "final loss") == f"{mean([totals['final_loss'] for totals in first]):.4f}"
    assert after(page, "validation loss") == f"{mean([totals['validation_loss'] for totals in first]):.4f}"
    assert after(page, "steps") == "60 of 60"
    assert after(page, "nodes") == "4 in 2 stages"
    for total, tally in (("results", "rounds"), ("microbatch_results", "microbatches"), ("reroutes", "rerouted")):
        counted = sum((Counter(each[total]) for each in [*first, *later]), Counter())
        assert run.total(tally) == counted, tally
        assert {(name, f"{n:,}") for name, n in counted.items()} <= cells(page)
    assert sum(run.total("rounds").values()) > 40
    assert [history.inner_steps for history in run.nodes] == [totals["inner_steps"] for totals in [*first, *later]]
    assert run.total("idle_s")["partner"] == pytest.approx(
        sum(totals["idle_s"]["partner"] for totals in [*first, *later]), rel=1e-4
    )
    assert run.last("spread", 1) == pytest.approx(mean([totals["replica_std"] for totals in later]), rel=1e-5)


def test_a_kill_loses_at_most_the_counts_of_a_second(recorded: Recorded, run: RecordedRun) -> None:
    totals = recorded.totals["s0r1"]
    (history,) = [history for history in run.nodes if history.peer_id == "s0r1"]
    a_second = totals[0]["tokens"] / (history.processes[0].ended_at - run.training_at)
    lost = sum(process["tokens"] for process in totals) - history.total("tokens")
    assert 0 <= lost <= 2 * a_second


def test_figures_that_only_the_launcher_knows_come_from_its_summary(recorded: Recorded, tmp_path: Path) -> None:
    for place in recorded.directory.iterdir():
        if place.name != "0-1":
            (tmp_path / place.name).symlink_to(place)
    summary = {"nodes": [], "tokens_per_s": 4321.25, "wall_s": 83.0, "resumed_from_step": None}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    page = render(read_run([tmp_path]))
    assert (after(page, "tokens/s"), after(page, "wall time")) == ("4,321", "1 min 23 s")


def test_kills_and_restarts_are_shown_in_the_life_of_a_node(run: RecordedRun) -> None:
    histories = {history.peer_id: history for history in run.nodes}
    assert [process.ended for process in histories["s0r1"].processes] == [False, True]
    assert [process.ended for process in histories["s1r1"].processes] == [False]
    assert histories["s1r1"].processes[-1].ended_at - BEGAN_AT == pytest.approx(4.0, abs=1.1)
    down_s = histories["s0r1"].processes[1].began_at - histories["s0r1"].processes[0].ended_at
    assert 1.9 < down_s < 3.1
    (svg,) = [svg for svg in parsed(render(run)).findall(".//svg") if svg.get("aria-label") == "Lives of the nodes"]
    assert len(svg.findall(".//path[@class='cross']")) == 2
    assert len(svg.findall(".//line[@class='start']")) == 1, "starts before the training are not on the axis"
    assert svg.findall(f".//rect[@class='f{Colour.SLATE}']/title")[0].text == "0-0: finished, " + _span(
        histories["s0r0"].processes[0].spans, run.training_at
    )


def _span(spans: tuple[StateSpan, ...], training_at: float) -> str:
    (finished,) = [span for span in spans if span.state == "finished"]
    return f"{finished.began_at - training_at:.0f} to {finished.ended_at - training_at:.0f} s"


def test_the_page_shows_the_state_of_the_run(recorded: Recorded, tmp_path: Path) -> None:
    page = render(read_run([recorded.directory]))
    assert re.fullmatch(r"Completed, in .*\.", after(page, "recorded"))
    ended = line("state", 4.0, state="finished") + line("end", 5.0)
    for name, stage, more in (("0-0", 0, ended), ("1-0", 1, b"")):
        place = tmp_path / name
        place.mkdir()
        (place / NAME).write_bytes(
            line("start", 0.0, name="mine", stage=stage) + line("progress", 3.0, stage=stage, step=59.7) + more
        )
        (place / "manifest.json").write_text('{"steps": 60}')
    assert after(render(read_run([tmp_path])), "mine") == "Interrupted at step 59 of 60.", "its 60th step is not done"
    with (tmp_path / "1-0" / KEY_LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert after(render(read_run([tmp_path])), "mine") == "Running since 2027-01-15 08:00:00 UTC."
    with (tmp_path / "1-0" / NAME).open("ab") as journal:
        journal.write(ended)
    assert after(render(read_run([tmp_path])), "mine") == "Completed, in 5 s."


def test_the_csv_series_match_the_run(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the points of the charts, and tokens that add up to those of the run."""
    out = tmp_path / "series.csv"
    monkeypatch.setattr(sys, "argv", ["noloco", "report", str(recorded.directory), "--csv", str(out)])
    with pytest.raises(SystemExit) as end:
        command.main()
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert (end.value.code, capsys.readouterr().out) == (0, f"{out}: {len(rows):,} rows\n")
    assert [float(row["time"]) for row in rows] == sorted(float(row["time"]) for row in rows)
    assert {row["node"] for row in rows} == {f"{stage}-{replica}" for stage in range(2) for replica in range(3)}
    (first,) = [node for node in read_run([recorded.directory]).nodes if node.name == "0-0"]
    mine = [row for row in rows if row["node"] == "0-0"]
    for column, curve in (("loss", "loss"), ("learning_rate", "learning_rate"), ("validation_loss", "validation")):
        points = [(float(row["step"]), float(row[column])) for row in mine if row[column]]
        assert points == [
            point for piece in first.curves[curve, None if curve == "learning_rate" else 0] for point in piece
        ]
    assert len(points) >= 3
    progress = [(float(row["time"]), float(row["tokens_per_s"])) for row in mine if row["tokens_per_s"]]
    tokens = sum(rate * (at - before) for (before, _), (at, rate) in itertools.pairwise(progress))
    assert tokens == pytest.approx(first.total("tokens"), rel=0.1), "except for the tokens before the first row"
    out.write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not a series of noloco"):
        series.write([recorded.directory], out)


# === files as they are found ==========================================================================================


@pytest.fixture
def node(tmp_path: Path) -> Path:
    directory = tmp_path / "node"
    directory.mkdir()
    return directory


def test_hostile_contents_of_files_are_shown_as_text(node: Path) -> None:
    (node / NAME).write_bytes(
        line("start", 0.0, peer_id=HOSTILE, run_id=HOSTILE, name=HOSTILE, version=HOSTILE, stage=0)
        + line("state", 1.0, state=HOSTILE)
        + line("warning", 2.0, message=HOSTILE)
        + line("membership", 2.0, counts={f"0 {HOSTILE}": 1})
        + line("progress", 3.0, stage=0, step=1, tokens=10, loss=2.0, bytes={HOSTILE: 3}, rounds={HOSTILE: 3})
        + line("outer_round", 3.0, result=HOSTILE, seconds=1.0)
    )
    (node / "manifest.json").write_text(json.dumps({"name": HOSTILE, "steps": HOSTILE}))
    page = render(read_run([node]))
    outline = Outline()
    outline.feed(page)
    assert (outline.tags.count("script"), outline.tags.count("img")) == (1, 0)
    assert not {"\x00", "\x1b", "\u202e"} & set(page)
    assert any("<script>alert(1)</script>" in text for text in texts(page))


@pytest.mark.parametrize(
    "torn",
    [
        b'{"time":1,"event":"prog',
        b"\x00\x00\xff\xfe\n",
        b"[" * 100_000 + b"\n",
        b"null\n",
        b'{"time":1e999,"event":"progress","up_s":1}\n',
        b'{"event":"progress"}\n',
        b'{"time":NaN,"event":"state","up_s":2,"state":"training"}\n',
        line("progress", 2.0, tokens="many", step=[], loss={}, bytes=7, rounds={"alone": "x"}, stage=1e400, state=3),
        line("outer_round", 2.0) + line("deserted", 2.0) + line("membership", 2.0, counts=[]) + line("evaluation", 2.0),
        b'{"time":1' + b"0" * 400 + b',"event":"progress","up_s":1}\n',
    ],
)
def test_a_torn_or_invalid_line_is_skipped(node: Path, torn: bytes) -> None:
    good = line("start", 0.0, stage=0) + line("progress", 1.0, stage=0, step=1, tokens=10)
    (node / NAME).write_bytes(good + torn + b"\n" + line("progress", 3.0, stage=0, step=3, tokens=30))
    assert read_run([node]).tokens == 30
    parsed(render(read_run([node])))


@pytest.mark.parametrize("number", [1.7e308, -1.7e308, 9e59, -9e59, 5e-324, 1e-310])
@pytest.mark.parametrize("field", ["time", "up_s", "tokens", "loss", "learning_rate", "grad_norm", "wall_s"])
def test_an_impossible_number_does_not_keep_the_rest_off_the_page(node: Path, field: str, number: float) -> None:
    lines = [json.loads(line("start", 0.0, stage=0)), json.loads(line("state", 1.0, state="training"))]
    for s in range(1, 5):
        figures = {"tokens": 10 * s, "loss": 2.0, "learning_rate": 1e-3, "grad_norm": 1.0}
        lines.append(json.loads(line("progress", float(s), stage=0, step=s, **figures)))
    for each in lines[2:4]:
        each[field] = number
    (node / NAME).write_text("".join(json.dumps(each) + "\n" for each in lines))
    (node / "summary.json").write_text(json.dumps({"nodes": 1, "wall_s": number, "tokens_per_s": number}))
    parsed(render(read_run([node])))
    series.write([node], node / "series.csv")


def test_a_last_line_torn_by_a_kill_does_not_affect_the_others(node: Path) -> None:
    whole = line("start", 0.0, stage=0) + line("progress", 1.0, stage=0, step=1, tokens=10)
    second = line("progress", 2.0, stage=0, step=2, tokens=20)
    for cut in range(0, len(second), 7):
        (node / NAME).write_bytes(whole + second[:cut])
        assert read_run([node]).tokens == 10


def test_rotated_files_are_read_in_order_even_if_older_ones_are_lost(node: Path) -> None:
    (node / f"{NAME}.2").write_bytes(line("progress", 100.0, stage=0, step=1, tokens=1_000))
    (node / f"{NAME}.1").write_bytes(line("progress", 200.0, stage=0, step=2, tokens=2_000))
    (node / NAME).write_bytes(line("progress", 300.0, stage=0, step=3, tokens=3_000) + line("end", 301.0))
    run = read_run([node])
    (history,) = run.nodes
    assert run.tokens == 3_000
    assert [gain.amount for gain in history.increments["tokens"]] == [1_000, 1_000, 1_000]
    assert [process.ended for process in history.processes] == [True]


def test_a_run_whose_first_lines_were_rotated_away_keeps_its_name_start_and_rates(tmp_path: Path) -> None:
    for name, start in (("node-1", True), ("node-2", False)):
        place = tmp_path / name
        place.mkdir()
        (place / "manifest.json").write_text('{"name": "mine", "steps": 60}')
        (place / "endpoints.json").write_text(json.dumps({"peer_id": f"peer of {name}", "run_id": "abcdef"}))
        first = line("start", 0.0, peer_id=f"peer of {name}", run_id="abcdef", name="mine", stage=0)
        lost = first + line("state", 0.0, state="training")
        kept = [
            line("progress", 100.0 * n, stage=0, tokens=1000 * n, device_s=50.0 * n, state="training") for n in (3, 4)
        ]
        (place / NAME).write_bytes((lost if start else b"") + b"".join(kept) + line("end", 400.0))
    run = read_run([tmp_path])
    whole, without = run.nodes
    assert (without.run_name, without.run_id, without.peer_id) == ("mine", "abcdef", "peer of node-2")
    assert without.processes == whole.processes
    assert without.times[0][TRAINED] == whole.times[0][TRAINED] == 400.0
    assert without.increments == whole.increments
    assert (run.wall_s, run.tokens_per_s) == (400.0, 20.0)
    assert "run abcdef" in texts(render(run))


def test_clock_jumps_do_not_move_the_start_or_the_end(node: Path) -> None:
    lines = [json.loads(line("progress", float(s), stage=0, step=s, tokens=s)) for s in range(1, 21)]
    for s in (0, 1, 2):
        lines[s]["time"] -= 1e9  # before the machine's clock was synchronised
    lines[9]["time"] += 7_200.0
    (node / NAME).write_text("".join(json.dumps(each) + "\n" for each in lines))
    run = read_run([node])
    assert (run.began_at, run.ended_at) == (BEGAN_AT, BEGAN_AT + 20)


def test_a_clock_set_back_between_two_starts_leads_to_no_negative_time(node: Path) -> None:
    def process(clock_s: float, first: int) -> bytes:
        said = {"stage": 0, "state": "training", "final_loss": 9.0 - first / 10}
        steps = [line("progress", float(s), step=first + s, tokens=s, **said) for s in range(1, 11)]
        begun = line("start", 0.0, stage=0), line("state", 0.5, state="training")
        lines = [json.loads(each) for each in (*begun, *steps, line("end", 10.0))]
        return b"".join(json.dumps({**each, "time": each["time"] + clock_s}).encode() + b"\n" for each in lines)

    (node / NAME).write_bytes(process(7_200.0, 0) + process(0.0, 10))
    run = read_run([node])
    assert (run.began_at, run.ended_at) == (BEGAN_AT, BEGAN_AT + 7_210)
    assert run.training_at == BEGAN_AT + 0.5
    assert (run.wall_s, after(render(run), "steps")) == (7_210, "20")
    assert run.last("final_loss") == 8.0, "that of the process that was started last"


def test_the_speed_of_a_resumed_run_counts_only_training_time(node: Path) -> None:
    trained = [line("progress", float(s), stage=0, state="training", step=s, tokens=20 * s) for s in range(1, 12)]
    begun = line("start", 0.0, stage=0), line("state", 1.0, state="training")
    first = [*begun, *trained, line("end", 11.0)]
    later = [json.loads(each) for each in first]
    night = [json.dumps({**each, "time": each["time"] + 36_000.0}).encode() + b"\n" for each in later]
    (node / NAME).write_bytes(b"".join([*first, *night]))
    run = read_run([node])
    assert run.tokens == 440
    assert run.tokens_per_s == pytest.approx(22.0)


def test_a_restart_is_recognised_even_if_its_first_line_is_lost(node: Path) -> None:
    (node / NAME).write_bytes(
        line("start", 0.0, stage=0)
        + line("progress", 50.0, stage=0, step=5, tokens=50)
        + line("progress", 2.0, stage=0, step=6, tokens=7)
    )
    assert len(read_processes(node)) == 2
    assert read_run([node]).tokens == 57


def test_the_report_of_one_node_shows_its_view_of_the_swarm(recorded: Recorded) -> None:
    page = render(read_run([recorded.directory / "0-0"]))
    assert "As this node saw the swarm." in texts(page)


def test_several_runs_are_compared_on_one_page(recorded: Recorded, node: Path) -> None:
    began = line("start", 0.0, run_id="another" * 9, name=HOSTILE, stage=0)
    (node / NAME).write_bytes(began + line("progress", 3.0, stage=0, step=2, tokens=10, loss=2.0))
    manifest = recorded.manifest.model_dump() | {"steps": 77, "name": HOSTILE}
    (node / "manifest.json").write_text(json.dumps(manifest))
    runs = read_runs([recorded.directory, node])
    page = render_all(runs)
    assert [len(run.nodes) for run in runs.values()] == [6, 1]
    assert "2 runs" in texts(page)
    assert ("steps", "60") in cells(page), "a setting that differs is shown"
    different = parsed(page).findall(".//table")[-1].findall(".//tr")[1:]
    names = ["".join(row[0].itertext()) for row in different]
    assert names == sorted(names)
    whole = max(run.ended_at - run.training_at for run in runs.values())
    (tokens,) = [svg for svg in parsed(page).findall(".//svg") if svg.get("aria-label") == "Tokens per second"]
    assert float(tokens.get("data-x", "").split()[3]) == pytest.approx(whole)
    assert "seed" not in texts(page), "a setting that is equal is not shown"
    assert ("validation loss", f"{runs[next(iter(runs))].validation_loss:.4f}") in cells(page)
    (loss, *_) = parsed(page).findall(".//svg")
    assert [path.findtext("title") for path in loss.findall(".//*[@data-v]")] == list(runs)
    outline = Outline()
    outline.feed(page)
    assert (outline.tags.count("script"), outline.tags.count("img")) == (1, 0)


def test_a_directory_may_have_any_name(node: Path) -> None:
    strange = node.rename(node.with_name("caf\udce9 \x01"))
    (strange / NAME).write_bytes(line("start", 0.0, stage=0) + line("progress", 3.0, stage=0, step=2, tokens=10))
    parsed(render_all(read_runs([strange])))
    assert series.write([strange], node.with_name("series.csv")) == 1
    assert "caf   " in node.with_name("series.csv").read_text("utf-8")


def test_the_folder_of_a_volume_that_only_root_may_read_is_none_of_the_run(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory of a swarm may be a volume of its own: `lost+found/events.jsonl.7: Permission denied`."""
    volume, stat = node.parent, Path.stat
    (volume / "lost+found").mkdir()
    (node / NAME).write_bytes(line("start", 0.0, stage=0) + line("progress", 3.0, stage=0, step=2, tokens=10))

    def of_another_user(path: Path, **how: Any) -> Any:
        if path.parent.name == "lost+found":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **how)

    monkeypatch.setattr(Path, "stat", of_another_user)
    page, rows = volume / "page.html", volume / "rows.csv"
    assert make([volume], page) == page.stat().st_size
    assert series.write([volume], rows) == len(rows.read_text().splitlines()) - 1 > 0


def test_each_directory_of_a_swarm_is_a_separate_run(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (node / "a", node / "b"):
        (place / "0-0").mkdir(parents=True)
        (place / "swarm.json").touch()
        (place / "0-0" / NAME).write_bytes(line("start", 0.0, run_id="same", stage=0))
    assert list(read_runs([node / "a", node / "b"])) == ["a", "b"]
    monkeypatch.chdir(node / "a")
    assert list(read_runs([Path(), node / "b"])) == ["a", "b"], "the current directory has a name, too"
    assert len(read_runs([node / "a" / "0-0", node / "b" / "0-0"])) == 1, "nodes of one run on two machines"


def test_the_page_names_hardware_command_software_model_and_data(node: Path) -> None:
    machine, command = "Linux x86_64, 2 cores, 24 GiB of memory", "noloco-node --config tiny"
    began = line("start", 0.0, run_id="r", stage=0, version="1.2", machine=machine, command=command)
    (node / NAME).write_bytes(began + line("progress", 1.0, stage=0, step=1, grad_norm=0.5))
    (node / "manifest.json").write_bytes(RunManifest().canonical_json())
    page = render(read_run([node]))
    assert after(page, "hardware") == f"1 node on {machine}"
    assert after(page, "command") == command
    assert after(page, "software") == "noloco_p2p 1.2"
    assert after(page, "model") == "llama, hidden size 128, layers 4, vocabulary 384"
    assert after(page, "data") == "the source text of Python's standard library, tokenizer bytes"


def test_the_recorded_command_contains_no_invitation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["/x/y.py", "--join", "/ip4/1.2.3.4/tcp/1/p2p/12D3/invite/3Secret9", "--set", "a=b c"]
    )
    written = run_files.command("noloco-node")
    assert written == "noloco-node --join /ip4/1.2.3.4/tcp/1/p2p/12D3/invite/… --set 'a=b c'"


@pytest.mark.parametrize("journal", [None, b"", b"not a line\n"])
def test_without_a_journal_one_line_says_what_to_do(
    node: Path, journal: bytes | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if journal is not None:
        (node / NAME).write_bytes(journal)
    monkeypatch.setattr(sys, "argv", ["noloco", "report", str(node), "--out", str(node / "report.html")])
    with pytest.raises(SystemExit) as end:
        command.main()
    message = capsys.readouterr().err
    assert end.value.code == 2
    assert message.count("\n") == 1
    assert str(node) in message
    assert not (node / "report.html").exists()


def test_only_a_page_is_replaced_by_a_page(recorded: Recorded, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not a page of noloco: name another file"):
        make([recorded.directory], out)
    assert out.read_text() == "mine"
    out.unlink()
    sizes = [make([recorded.directory], out) for _ in range(2)]
    assert sizes == [out.stat().st_size] * 2


def test_the_page_names_the_run_and_shows_what_there_is(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first node has lost the first line of its journal."""
    lives = {
        "0-0": line("replica_std", 2.0, step=1, value=0.25) + line("progress", 3.0, stage=0, step=1),
        "0-1": line("start", 0.0, stage=0, run_id="abc", name="mine") + line("progress", 3.0, stage=0, step=2),
        "1-0": line("start", 0.0, stage=1, run_id="abc", name="mine") + line("progress", 3.0, stage=1, step=2),
    }
    (node / "swarm.json").touch()
    for name, lines in lives.items():
        (node / name).mkdir()
        (node / name / NAME).write_bytes(lines)
    page = render(read_run([node]))
    assert "There is no manifest.json next to the journals." in texts(page)
    (node / "1-0" / "manifest.json").write_text('{"steps": 60, "name": "mine"}')
    monkeypatch.setattr("noloco_p2p.observe.report.page.MAX_NODES", 2)
    page = render(read_run([node]))
    assert parsed(page).findtext(".//h1") == "mine"
    assert [text for text in texts(page) if "abc" in text] == ["run abc"]
    assert '{\n  "steps": 60,\n  "name": "mine"\n}' in texts(page)
    assert "There is no manifest.json next to the journals." not in texts(page)
    assert [row[0] for row in _rows(page)] == ["node", "0-0", "0-1"]
    assert "Nodes not shown: 1." in texts(page)
    assert ("stage 0", "0.25") in cells(page)
    assert not {row for row in cells(page) if row[0] == "stage 1"}, "its spread is unknown"
    assert "Distrusted data, by result" not in texts(page), "an empty table is left out"


def test_a_page_that_cannot_be_written_is_an_error(recorded: Recorded, tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot be written"):
        make([recorded.directory], tmp_path / "nowhere" / "report.html")
    with pytest.raises(ConfigError, match="no such directory"):
        make([tmp_path / "nowhere"], tmp_path / "report.html")


def test_a_long_run_of_many_nodes_stays_a_small_page(tmp_path: Path) -> None:
    """Every node of stage 0 keeps dying, and every node of stage 1 keeps changing its state."""
    for n in range(12):
        place = tmp_path / f"{n % 2}-{n}"
        place.mkdir()
        lines = []
        for s in range(500):
            if s % 10 == 0:
                lines.append(line("start", s * 60.0, stage=n % 2, peer_id=f"12D3KooW{n:044}"))
            state = ("training", "paused")[s % 2]
            lines.append(line("progress", s * 60.0, stage=n % 2, step=s, state=state, tokens=s, loss=9 / (s + n + 1)))
            lines.append(line("replica_std", s * 60.0, step=s, value=1 / (s + 1)))
            lines.append(line("warning", s * 60.0, message="&" * 300))
        (place / NAME).write_bytes(b"".join(lines))
    assert make([tmp_path], tmp_path / "report.html") < 800_000


# === what a journal says ==============================================================================================


@pytest.fixture
def eventful(node: Path) -> RecordedRun:
    """A node of stage 0 that trains for ten seconds, and then moves to stage 1, where it trains for five more."""
    counted = {"device_s": 4.0, "bytes": {"in snapshot": 10, "out activation": 30, "out gradient": 5}}
    in_all = {"device_s": 6.0, "bytes": {"in snapshot": 70, "out activation": 50, "out gradient": 5}}
    events = [
        line("start", 0.0, stage=0, peer_id="P"),
        line("state", 0.5, state="waiting"),
        line("state", 1.0, state="training"),
        line("membership", 1.0, counts={"0 training": 2, "1 training": 1, "1 odd": 1}),
        line("progress", 2.0, stage=0, state="training", tokens=50),
        line("outer_round", 3.0, result="partner", seconds=0.25),
        line("outer_round", 4.0, result="alone", seconds=0.75),
        line("checkpoint", 4.0, round=1, step=3),
        line("warning", 5.0, message="a disk is slow"),
        line("stuck", 6.0, message="no step for 30 s", well=False),
        line("stuck", 7.0, message="a step was taken", well=True),
        line("deserted", 8.0, stages={"1": 3.0, "2": 1.0}),
        line("deserted", 9.0, stages={}),
        line("progress", 10.0, stage=0, state="training", step=8, tokens=400, final_loss=3.0, **counted),
        line("state", 11.0, state="syncing"),
        line("moved", 11.0, stage=1, reason="stage 1 limits the swarm"),
        line("stage", 11.0, stage=1),
        line("progress", 12.0, stage=1, state="training", step=9, tokens=900, final_loss=2.0, **in_all),
        line("state", 17.0, state="paused"),
        line("end", 18.0),
    ]
    (node / NAME).write_bytes(b"".join(events))
    return read_run([node])


def test_the_page_lists_what_went_wrong_newest_first(eventful: RecordedRun) -> None:
    assert [(each.at - BEGAN_AT, each.kind, each.text) for each in eventful.incidents()] == [
        (11.0, "moved", "to stage 1: stage 1 limits the swarm"),
        (9.0, "stage without replica", "every stage has a replica again"),
        (8.0, "stage without replica", "no replica serves stage 1, 2"),
        (7.0, "recovered", "a step was taken"),
        (6.0, "stuck", "no step for 30 s"),
        (5.0, "warning", "a disk is slow"),
    ]
    page = parsed(render(eventful))
    shown = [" ".join("".join(item.itertext()).split()) for item in page.findall(".//ul[@class='card notes']/li")]
    assert shown[0] == "2027-01-15 08:00:11 UTC node moved: to stage 1: stage 1 limits the swarm"
    assert len(shown) == 6


def test_the_table_of_nodes_shows_what_each_did(eventful: RecordedRun) -> None:
    head, row = parsed(render(eventful)).findall(".//table")[-1].findall(".//tr")
    found = dict(zip(("".join(c.itertext()) for c in head), ("".join(c.itertext()) for c in row), strict=True))
    assert (found["stage"], found["at the end"], found["checkpoints"]) == ("1", "paused", "1")
    assert found["device"] == "40.0 %", "6 of the 15 seconds for which it trained, at either stage"
    assert (found["sent"], found["received"]) == ("55 B", "70 B")
    assert found["final loss"] == "3.0000", "that of stage 0"
    assert eventful.tokens == 400, "later stages train on the same tokens"
    assert eventful.times() == {0: (10.0, {"device works": 4.0}), 1: (5.0, {"device works": 2.0})}


def test_checkpoints_that_got_no_line_in_the_journal_are_counted(node: Path) -> None:
    journal = Journal(EventFiles(node).write, RunCounters(1), RecordedClock(0.0), RecordedClock(BEGAN_AT))
    journal.start(stage=0)
    for round in range(100):
        journal.note("checkpoint", {"round": round, "step": 10 * round, "seconds": 0.1, "bytes": 1_000})
    journal.end()
    (history,) = read_run([node]).nodes
    assert history.checkpoints == 100


def test_charts_over_time_show_rounds_and_members(eventful: RecordedRun) -> None:
    (history,) = eventful.nodes
    assert [(at - BEGAN_AT, seconds) for at, seconds in history.round_seconds] == [(3.0, 0.25), (4.0, 0.75)]
    assert [counts for _, _, counts in history.membership] == [Counter(training=3, unknown=1)]
    gains = [(new.began_at - BEGAN_AT, new.ended_at - BEGAN_AT, new.amount) for new in history.increments["tokens"]]
    assert gains == [(0.0, 2.0, 50), (2.0, 10.0, 350)]
    assert eventful.training_at == BEGAN_AT + 1
    charts = {svg.get("aria-label"): svg for svg in parsed(render(eventful)).findall(".//svg")}
    seconds = [one.get("data-v") for one in charts["Seconds per outer round"].findall(".//*[@data-v]")]
    assert "0.25 0.75" in seconds
    assert {one.findtext("title") for one in charts["Nodes by state"].findall(".//path")} == {"training", "unknown"}


def test_what_a_node_did_before_it_moved_counts_at_the_stage_that_it_held(node: Path) -> None:
    """For 100 s the first node is the only one of stage 0. Then it moves to stage 1, and the second takes its place."""

    def life(stage: int, *, since: float, spread: float, grad_norm: float) -> list[bytes]:
        did = {"state": "training", "stage": stage, "tokens": 2_000, "grad_norm": grad_norm, "step": 10}
        did |= {"device_s": 10.0, "idle_s": {"gradients": 20.0}}
        first = [line("start", 0.0, stage=stage), line("state", since, state="training")]
        lines = [*first, line("replica_std", 90.0, step=9, value=spread), line("progress", 100.0, **did)]
        lines += [line("state", 100.0, state="syncing"), line("stage", 100.0, stage=1 - stage)]
        lines += [line("state", 100.0, state="training")]
        again = {**did, "stage": 1 - stage, "tokens": 4_000, "grad_norm": 2 * grad_norm, "step": 20}
        again |= {"device_s": 70.0, "idle_s": {"gradients": 20.0, "microbatches": 5.0 + stage}}
        return [*lines, line("progress", 200.0, **again), line("end", 200.0)]

    (node / "swarm.json").touch()
    lives = {"a": life(0, since=0, spread=0.5, grad_norm=1), "b": life(1, since=50, spread=0.25, grad_norm=3)}
    for name, lines in lives.items():
        (node / name).mkdir()
        (node / name / NAME).write_bytes(b"".join(lines))
    run = read_run([node])
    assert (run.tokens, run.tokens_per_s) == (4_000, 20.0)
    assert run.times() == {
        0: (200.0, {"device works": 70.0, "waits: gradients": 20.0, "waits: microbatches": 6.0}),
        1: (150.0, {"device works": 70.0, "waits: gradients": 20.0, "waits: microbatches": 5.0}),
    }
    assert {row for row in cells(render(run)) if row[1] in ("0.5", "0.25")} == set(), "both have left that stage"
    curves = {
        node.name: [node.curves[curve, stage] for curve in ("spread", "grad_norm") for stage in (0, 1)]
        for node in run.nodes
    }
    assert curves == {
        "a": [[[(9.0, 0.5)]], [[]], [[(10.0, 1.0)]], [[(20.0, 2.0)]]],
        "b": [[[]], [[(9.0, 0.25)]], [[(20.0, 6.0)]], [[(10.0, 3.0)]]],
    }
    (svg,) = [one for one in parsed(render(run)).findall(".//svg") if one.get("aria-label") == "Spread of the replicas"]
    drawn = {one.findtext("title"): one.get("class") for one in svg.findall(".//*[@data-v]")}
    assert drawn == {"a": f"f{SERIES_COLOURS[0]}", "b": f"f{SERIES_COLOURS[1]}"}


def test_a_node_that_was_down_saw_no_swarm_meanwhile(node: Path) -> None:
    saw = [line("start", 0.0, stage=0), line("membership", 0.0, counts={"0 training": 3}), line("end", 100.0)]
    later = [
        json.dumps({**json.loads(each), "time": BEGAN_AT + at}).encode() + b"\n"
        for each, at in zip(saw, (900.0, 900.0, 1000.0), strict=True)
    ]
    (node / NAME).write_bytes(b"".join([*saw, *later]))
    (history,) = read_run([node]).nodes
    assert [(since - BEGAN_AT, until - BEGAN_AT) for since, until, _ in history.membership] == [(0, 100), (900, 1000)]


def test_the_series_have_the_stage_and_the_mean_rate(eventful: RecordedRun, node: Path) -> None:
    assert series.write([node], node / "series.csv") == 2
    with (node / "series.csv").open(newline="") as file:
        rows = [(row["stage"], row["step"], row["tokens_per_s"]) for row in csv.DictReader(file)]
    assert rows == [("0", "8.0", "43.75"), ("1", "9.0", "250.0")], "350 tokens in 8 s, 500 in 2 s"


def test_the_figures_of_a_stage_are_those_of_all_its_nodes(node: Path) -> None:
    """One of the nodes never got a stage, and another one lost the first line of its journal."""
    lives = {"1-0": (1, 5.0, 4.0), "0-1": (0, 0.0, 2.0), "0-0": (0, 3.0, 6.0), "lost": (None, 2.0, 0.0)}
    for name, (stage, from_s, device_s) in lives.items():
        (node / name).mkdir()
        more = {} if stage is None else {"stage": stage}
        did = [line("state", from_s, state="training") if stage is not None else line("warning", from_s, message="!")]
        idle = {"partner": device_s / 2}
        did.append(line("progress", from_s + 8.0, step=8, tokens=80, device_s=device_s, idle_s=idle, **more))
        (node / name / NAME).write_bytes(
            line("start", 0.0, peer_id=f"P{name}", **more) * (name != "0-0") + b"".join(did)
        )
    (node / "0-0" / "endpoints.json").write_text('{"peer_id": "P0-0"}')
    run = read_run([node])
    assert [(one.name, one.peer_id) for one in run.nodes] == [
        (name, f"P{name}") for name in ("0-0", "0-1", "1-0", "lost")
    ]
    assert run.stages == [0, 1]
    assert run.times()[0] == (16.0, {"device works": 8.0, "waits: partner": 4.0})
    assert (run.began_at, run.ended_at, run.training_at) == (BEGAN_AT, BEGAN_AT + 13, BEGAN_AT)
    assert run.tokens_per_s == pytest.approx(160 / 11), "from 0 to 8 s, and from 3 to 11 s"
    assert ("lost", "–") in {(row[0], row[2]) for row in _rows(render(run))}


def _rows(page: str) -> list[list[str]]:
    """The cells of the table of nodes."""
    return [["".join(cell.itertext()) for cell in row] for row in parsed(page).findall(".//table")[-1].findall(".//tr")]


def test_a_run_killed_before_its_first_tokens_has_a_page(node: Path) -> None:
    (node / NAME).write_bytes(line("start", 0.0, stage=0, name="mine") + line("state", 2.0, state="training"))
    run = read_run([node])
    assert (run.tokens, run.tokens_per_s) == (0, None)
    page = render(run)
    assert (after(page, "mine"), after(page, "tokens/s")) == ("Interrupted at step 0.", "–")


@pytest.mark.parametrize(("resumed", "again"), [(None, b""), (40, b""), (None, line("start", 9.0, stage=0))])
def test_a_summary_of_only_a_part_of_the_run_is_not_used(resumed: int | None, again: bytes, node: Path) -> None:
    for name in ("0-0", "0-1"):
        (node / name).mkdir()
        events = line("start", 0.0, stage=0) + line("progress", 5.0, stage=0, step=5)
        (node / name / NAME).write_bytes(events + (again if name == "0-1" else b""))
    summary = {"nodes": [], "wall_s": 3.0, "tokens_per_s": 7.0, "resumed_from_step": resumed}
    (node / "summary.json").write_text(json.dumps(summary))
    whole = resumed is None and not again
    assert read_run([node]).summary == (summary if whole else {})
    assert (read_run([node]).wall_s == 3.0) == whole


def test_each_of_several_runs_has_its_own_summary(node: Path) -> None:
    for number, name in enumerate("ab"):
        place = node / name / "0-0"
        place.mkdir(parents=True)
        (place.parent / "swarm.json").touch()
        (place / NAME).write_bytes(line("start", 0.0, stage=0))
        (place.parent / "summary.json").write_text(json.dumps({"nodes": [], "wall_s": 100.0 + number}))
    assert {name: run.wall_s for name, run in read_runs([node / "a", node / "b"]).items()} == {"a": 100.0, "b": 101.0}


# === curves ===========================================================================================================


def test_rates_add_up_to_all_increments() -> None:
    increments = [Increment(0.0, 3.3, 10.0), Increment(3.3, 9.9, 5.0), Increment(9.9, 9.9, 1.0)]
    rates = TimeBins(0.0, 10.0, 7).rates(increments)
    assert sum(rate for _, rate in rates) * 10.0 / 7 == pytest.approx(16.0)
    assert rates[0][1] == pytest.approx(10.0 / 3.3)


def test_nodes_are_counted_at_the_middle_of_each_time_bin() -> None:
    spans = [(0.0, 5.0, {"training": 1.0}), (5.0, 10.0, {"finished": 1.0}), (0.0, 2.4, {"training": 1.0})]
    found = TimeBins(0.0, 10.0, 10).present(spans)
    assert [counts["training"] for counts in found] == [2, 2, 1, 1, 1, 0, 0, 0, 0, 0]
    assert [sum(counts.values()) for counts in found] == [2, 2, 1, 1, 1, 1, 1, 1, 1, 1]


def test_the_series_date_the_first_rate_from_the_start_and_ignore_counts_that_fall(node: Path) -> None:
    (node / NAME).write_bytes(
        line("start", 0.0, stage=0)
        + line("state", 4.0, state="training")
        + line("moved", 5.0, stage=1, reason="")
        + b"".join(line("progress", 8.0 + n, step=n, tokens=tokens) for n, tokens in enumerate((80, 20, 100)))
    )
    series.write([node], node / "series.csv")
    with (node / "series.csv").open(newline="") as file:
        rows = [(row["stage"], row["tokens_per_s"]) for row in csv.DictReader(file)]
    assert rows == [("0", "10.0"), ("0", "0.0"), ("0", "20.0")]


def test_a_clock_set_back_in_the_middle_of_a_process_dates_it_by_one_of_its_two_clocks(node: Path) -> None:
    """With as many lines before as after, all of it was dated half an hour off from both."""
    lines = [json.loads(each) for each in (line("start", 0.0, stage=0), line("progress", 5.0, step=5, tokens=50))]
    lines[1]["time"] -= 3600.0
    (node / NAME).write_text("".join(json.dumps(each) + "\n" for each in lines))
    run = read_run([node])
    assert run.began_at in (BEGAN_AT, BEGAN_AT - 3600.0)
    assert run.wall_s == 5.0
