"""The display of `noloco swarm`: one line of overall progress, and a table that fits the terminal."""

import errno
import io
import os
import signal
import socket
import sys
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from noloco_p2p.errors import Unreachable
from noloco_p2p.io.telemetry.prometheus_telemetry import PrometheusTelemetry
from noloco_p2p.launch import progress_line, swarm, swarm_display
from noloco_p2p.launch.node_probe import METRICS_BYTES, MetricsReading, scrape
from noloco_p2p.launch.settings import read
from noloco_p2p.launch.stop_signals import stop_signals
from noloco_p2p.launch.swarm import LocalSwarm
from noloco_p2p.launch.swarm_display import (
    LIVE_INTERVAL_S,
    PLAIN_INTERVAL_S,
    Display,
    Row,
    RunProgress,
    stage_rows,
)
from noloco_p2p.launch.swarm_plan import make_plan


def nodes(stages: int, replicas: int, **figures: Any) -> list[Row]:
    """Rows of training nodes, with large figures."""
    found = {"state": "finished", "inner step": 98_765, "outer round": 9_876, "loss": 12.345, "tokens/s": 98_765.0}
    found |= {"peers": 99, "step": 99_000.0, **figures}
    return [{"node": f"{s}-{r}", "stage": s, **found} for s in range(stages) for r in range(replicas)]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(swarm_display, "time", clock)
    return clock


def test_one_line_shows_the_progress_and_the_time_left(clock: Clock) -> None:
    progress = RunProgress(1000)
    assert progress.line([{"node": "0-0", "stage": 0}], 80) == "", "nothing is known yet"
    clock.now += 12
    assert (
        progress.line(nodes(1, 2, step=30.0, loss=4.0, **{"tokens/s": None})) == "step 30/1,000  3 %  loss 4.00  0:12"
    )
    clock.now += 60
    rows = nodes(2, 2, step=230.0, loss=2.41, **{"tokens/s": 3200.0})
    tail = "23 % · 6.4k tok/s · loss 2.41 · 1:12 · 3:51 left"
    assert progress.line(rows).split("  ") == ["step 230/1,000", *tail.split(" · ")]
    assert progress.line(rows, 80) == f"step 230/1,000 ━━━╌╌╌╌╌╌╌╌╌╌╌╌ {tail}"
    assert progress.line(rows, 60) == "step 230/1,000 ━━━╌╌╌╌╌╌╌╌╌╌╌╌ 23 % · loss 2.41 · 3:51 left"
    lines = {width: progress.line(rows, width) for width in range(60, 121)}
    assert all(len(line) <= width and "━╌" in line for width, line in lines.items()), "a bar at every width"


@pytest.mark.parametrize("doing", ["", "outside limits.hours: all nodes pause until 22:00"])
def test_the_time_left_leaves_out_pauses(doing: str, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """After ten hours outside the hours of all nodes, 13 minutes of training seemed to take 89 hours."""
    display = Display(1000, plain=True)

    def shown(seconds: float, step: float, doing: str = "", *states: str) -> str:
        clock.now += seconds
        rows = nodes(2, 2, step=step, state="training")
        display.show(
            [{**row, "state": state} for row, state in zip(rows, (*states, *["training"] * 4), strict=False)], [], doing
        )
        return capsys.readouterr().out.split("\n")[0]

    shown(5, 10)
    assert shown(60, 110).endswith("1:05  8:54 left")
    shown(10, 110, doing, *["paused"] * 4)
    shown(36_000, 110, doing, *["paused"] * 4)
    assert shown(30, 110).endswith("10:01:45  13:21 left"), "one that is back works"
    assert shown(30, 210, "", "paused").endswith("10:02:15  7:54 left"), "as long as any of stage 0 trains, it is work"


def test_the_time_left_is_never_negative_even_if_the_mean_step_falls(clock: Clock) -> None:
    progress = RunProgress(60)
    fast, slow = nodes(1, 2, loss=4.0, **{"tokens/s": None})
    progress.line([{**fast, "step": 3.0}])
    clock.now += 10
    assert progress.line([{**fast, "step": 3.0}, {**slow, "step": 1.0}]) == "step 2/60  3 %  loss 4.00  0:10"


def test_nodes_that_have_taken_no_step_or_have_no_loss_do_not_count(clock: Clock) -> None:
    progress = RunProgress(100)
    resumed = {"node": "0-0", "stage": 0, "step": 40.0, "inner step": 0, "loss": None}
    assert progress.line([resumed, *nodes(2, 1, step=40.0)[1:]]) == "", "the step is that of a checkpoint"
    begun = {**resumed, "inner step": 1, "step": 50.0}
    assert progress.line([resumed, begun, nodes(1, 1, step=60.0, loss=2.0, **{"tokens/s": None})[0]]) == (
        "step 55/100  55 %  loss 2.00  0:00"
    )


def test_nodes_of_a_stage_are_summed_up_by_what_is_known() -> None:
    first = {"inner step": 10, "outer round": 3, "loss": 2.0, "tokens/s": 100.0, "peers": 5}
    other = {"inner step": 13, "outer round": 4, "loss": 3.0, "tokens/s": 50.0, "peers": 2, "state": "training"}
    rows = [{"node": "1-0", "stage": 1}, {"node": "0-0", "stage": 0, "state": "training", **first}]
    rows += [{"node": "0-1", "stage": 0, **other}, {"node": "0-2", "stage": 0, "state": "waiting", "loss": None}]
    summed = {"inner step": 12, "outer round": 4, "loss": 2.5, "tokens/s": 150.0, "peers": 2}
    assert stage_rows(rows) == [
        {"node": "stage 0", "stage": 0, "state": "2 of 3 training", **summed},
        {"node": "stage 1", "stage": 1, "state": "1 of 1 starting", **dict.fromkeys(summed)},
    ]


@pytest.mark.parametrize(("width", "named"), [(70, [1, 7]), (69, [])])
def test_the_table_names_its_columns(width: int, named: list[int]) -> None:
    table = swarm_display._table(nodes(1, 1), width)
    shown = [0, 2, 3, *[4] * bool(named), 5, 6, *[7] * bool(named)]
    assert [column.header for column in table.columns] == [swarm_display.COLUMNS[n] for n in shown]
    assert [column.justify for column in table.columns] == ["left", "left", *["right"] * (len(shown) - 2)]
    assert [next(iter(column.cells)) for column in table.columns][:3] == ["0-0", "finished", "98,765"]


def test_a_terminal_shows_one_table_in_place_below_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")

    def shown() -> str:
        text = screen.getvalue()
        screen.seek(0)
        screen.truncate()
        return text

    assert Display(1000, plain=True).interval_s == PLAIN_INTERVAL_S, "lines on a terminal, too, if they are asked for"
    display = Display(1000, plain=False)
    display.show(nodes(1, 12), [], "waiting for [stage] 1")
    first = shown()
    assert "waiting for [stage] 1" in first
    assert "0-11" in first, "twelve nodes have a line each"
    display.say("[bold]resumes[/bold]")
    assert "[bold]resumes[/bold]" in shown()
    display.show(nodes(2, 7), ["stage 1 has had no replica for 3 s"])
    text = shown()
    assert "step 1,000/1,000" in text
    assert "7 of 7 finished" in text
    assert "stage 1 has had no replica for 3 s" in text
    assert "\x1b[?25h" not in text, "the cursor stays hidden"
    display.close()
    assert "\x1b[?25h" in shown()


def test_the_bar_has_no_escapes_on_a_terminal_that_lacks_its_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    screen = io.TextIOWrapper(written, encoding="ascii", errors="backslashreplace")
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    display = Display(1000, plain=False)
    display.show(nodes(1, 2, step=230.0), [])
    display.close()
    screen.flush()
    text = written.getvalue().decode()
    assert "step 230/1,000 =====" in text
    assert "- 23 % | 198k tok/s | loss " in text
    assert "\\u" not in text


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("replicas", [2, 6, 7, 200])
def test_the_display_fits_the_terminal(width: int, replicas: int, clock: Clock) -> None:
    progress, rows = RunProgress(100_000), nodes(2, replicas)
    progress.line(rows, width)
    clock.now += 36_000
    assert len(progress.line(nodes(2, replicas, step=99_500.0), width)) <= width
    shown = rows if len(rows) <= swarm_display.MAX_ROWS else stage_rows(rows)
    console = Console(width=width, height=50, record=True, file=io.StringIO())
    console.print(swarm_display._table(shown, width))
    lines = console.export_text().splitlines()
    assert len(lines) == 1 + len(shown), "no line is wrapped"
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize(
    ("width", "head"),
    [
        (46, "step 230/1,000 23 % · loss 12.35 · 3:51 left"),
        (38, "step 230/1,000 23 % · loss 12.35"),
        (22, "step 230/1,000 23 %"),
        (18, "step 230/1,000"),
    ],
)
def test_no_figure_is_cut_off_on_a_narrow_terminal(width: int, head: str, clock: Clock) -> None:
    """On 20 columns, the step of a node was `1…`; on 38, the time left was `9:3…`."""
    progress = RunProgress(1000)
    progress.line(nodes(1, 2, step=30.0), width)
    clock.now += 60
    assert progress.line(nodes(1, 2, step=230.0), width) == head
    console = Console(width=width, height=50, record=True, file=io.StringIO())
    console.print(swarm_display._table(nodes(1, 1), width))
    figures = {46: ["98,765", "12.345", "98,765"], 38: ["98,765", "12.345"]}
    assert console.export_text().splitlines()[-1].split() == ["0-0", "finished", *figures.get(width, [])]


def test_many_nodes_are_summed_up_by_stage(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*nodes(1, 9, **{"inner step": 10, "tokens/s": 100.0, "loss": 2.0}), *nodes(1, 4, state="paused")]
    rows[0] = {**rows[0], "state": "paused", "inner step": 19, "loss": 2.9}
    Display(1000, plain=True).show(rows, ["a note"])
    progress, stage, note = capsys.readouterr().out.splitlines()
    assert progress.startswith("step ")
    assert stage.startswith("stage 0  8 of 13 finished  inner step ")
    assert note == "a note"


def test_plain_output_prints_each_activity_once(capsys: pytest.CaptureFixture[str]) -> None:
    display, rows = Display(1000, plain=True), [{"node": "0-0", "stage": 0}]
    for doing in ("importing torch", "importing torch", "starting 2 nodes: 1 of 2", ""):
        display.show(rows, [], doing)
    assert capsys.readouterr().out.splitlines() == ["importing torch", "starting 2 nodes: 1 of 2", "0-0  starting"]


@pytest.mark.usefixtures("minds_signals")
@pytest.mark.parametrize("under_nohup", [False, True])
def test_an_output_that_cannot_be_written_stops_the_swarm_only_if_the_message_says_so(
    under_nohup: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under nohup, which ignores hangups, the swarm went on after `stopping`."""

    def fail(text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    if under_nohup:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    display = Display(8, plain=True)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=fail))
    with stop_signals() as heard:
        display.say("a line")
    assert heard == ([] if under_nohup else [signal.SIGHUP])
    what = "going on without it" if under_nohup else "stopping"
    said = f"error: standard output cannot be written: No space left on device; {what}\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(("term", "rewrites"), [("dumb", False), ("unknown", False), ("xterm", True), (None, True)])
def test_a_terminal_that_cannot_rewrite_lines_gets_plain_ones(
    term: str | None, rewrites: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the shell of an editor, TERM=dumb, nothing appeared until the run ended."""
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.delenv("TERM", raising=False)
    if term is not None:
        monkeypatch.setenv("TERM", term)
    assert progress_line.can_rewrite(screen) == rewrites
    display = Display(1000, plain=False)
    assert display.interval_s == (LIVE_INTERVAL_S if rewrites else PLAIN_INTERVAL_S)
    if not rewrites:
        display.show(nodes(1, 1), [])
        assert screen.getvalue().splitlines()[-1].startswith("0-0  finished")


@pytest.mark.parametrize("name", ["http_proxy", "all_proxy"])
def test_nodes_are_read_without_the_proxy_of_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The display showed nothing, and on Ctrl-C no node had time to save: none was known to have taken a step."""
    monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with closing(PrometheusTelemetry(1)) as telemetry:
        telemetry.event("inner_step", inner_step=1, step=1.0, tokens=0, loss_sum=0.0, loss_tokens=0)
        port = telemetry.serve("127.0.0.1", 0)
        assert scrape(f"http://127.0.0.1:{port}/metrics", 5.0).total("inner_steps_total") == 1


def test_an_endless_answer_is_not_read_to_its_end() -> None:
    """Another program may listen at the port of a node that has ended. The launcher took 3 GB for 3 GB of answer."""
    sent: list[int] = []

    def answer() -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
            for _ in range(64):
                connection.sendall(b"0" * METRICS_BYTES)
                sent.append(METRICS_BYTES)

    with socket.create_server(("127.0.0.1", 0)) as server:
        other = Thread(target=answer)
        other.start()
        with pytest.raises(Unreachable):
            scrape(f"http://127.0.0.1:{server.getsockname()[1]}/metrics", 5.0)
        other.join()
    assert len(sent) < 60, "the rest is at most in the buffers of the sockets"


@pytest.mark.parametrize("trains", [False, True])
def test_the_display_says_until_when_all_nodes_pause(
    trains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(swarm, "local_time", lambda: datetime(2030, 1, 1, 12, 30))
    plan = make_plan(read(None, {}, ["stages=1", "start_replicas=2", "limits.hours=22:00-07:00"]), None)
    launched = LocalSwarm(plan, tmp_path, None, Display(8, plain=True), [], None)
    launched._has_stepped, launched._display.interval_s = trains, 0.0

    def show(*states: str) -> str:
        for node, state in zip(launched._nodes, states, strict=True):
            node.readings.append(MetricsReading(1.0, (("noloco_state", {"state": state}, 1.0),)))
        launched._shown_at = 0.0
        launched._show()
        return capsys.readouterr().out

    state = "paused" if trains else "starting"
    assert show(state, state) == "outside limits.hours: all nodes pause until 22:00\n"
    if trains:
        assert "until" not in show(state, "training"), "one node still finishes its microbatches"
