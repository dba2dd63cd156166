"""`noloco sim`: its output, its comparisons, and the command that repeats a failed run."""

import errno
import hashlib
import io
import json
import multiprocessing
import os
import re
import shlex
import threading
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner
from unsteady import Deadly, Unsteady

from noloco_p2p.cli.main import app
from noloco_p2p.core.snapshots import FrozenRound
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.lab import sim_command, sim_output
from noloco_p2p.lab.sim_command import SimOptions, SimRequest, SimRun, first_difference, run_sim
from noloco_p2p.launch import progress_line
from noloco_p2p.sim import laws
from noloco_p2p.sim.faults import FaultySwarm
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.recording import RecordingStage
from noloco_p2p.sim.scenario import Scenario

SMALL = ("replicas=[2, 2]", "run.steps=6", "run.outer.inner_steps=3", "run.microbatches_per_step=2")
WORDS = ["sim", *(word for one in SMALL for word in ("--set", one))]


def printed(capsys: pytest.CaptureFixture[str], options: SimOptions, code: int = 0) -> str:
    assert run_sim(options) == code
    return capsys.readouterr().out


def printed_json(capsys: pytest.CaptureFixture[str], options: SimOptions, code: int = 0) -> dict[str, Any]:
    (line,) = printed(capsys, replace(options, as_json=True), code).splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


# --- one run ----------------------------------------------------------------------------------------------------------


def test_what_runs_is_said_at_once_but_not_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    for as_json, expected in ((False, "simulating lan, 2 + 2 nodes, 6 steps\n"), (True, "")):
        run_sim(SimOptions(sets=SMALL, as_json=as_json))
        assert capsys.readouterr().err == expected


@pytest.mark.parametrize("trace", [True, False])
def test_a_place_that_cannot_be_written_is_refused_before_the_run(
    trace: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was simulated to its end, and then its figures were lost, too."""
    out = tmp_path / "out"
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(sim_command, "simulate", None)
    with pytest.raises(LocalError, match=f"cannot write to {tmp_path} .*Permission denied"):
        run_sim(SimOptions(sets=SMALL, trace=out if trace else None, plots=None if trace else out))


def test_a_trace_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "trace"
    sim_output.write_trace(path, ["before"])
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LocalError, match="trace cannot be written: No space left on device"):
        sim_output.write_trace(path, ["after"])
    assert [(one, one.read_text()) for one in tmp_path.iterdir()] == [(path, "before")]


def test_json_output_and_the_hash_of_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = SimOptions(sets=SMALL, seed=3, trace=tmp_path / "trace")
    found = printed_json(capsys, options)
    assert hashlib.sha256((tmp_path / "trace").read_bytes()).hexdigest() == found["trace_hash"]
    assert (found["scenario"], found["seed"], found["replicas"], found["broken"]) == ("lan", 3, [2, 2], None)
    assert found["tokens"] == found["microbatches"]["done"] * 8 * 1024
    assert [one["stage"] for one in found["stages"]] == [0, 1]
    assert sum(found["rounds"].values()) == 4 * 2
    assert found["share_of_bound"] == found["tokens_per_s"] / found["bound_tokens_per_s"]
    assert all(one["utilisation"] < one["bound_utilisation"] < 1 for one in found["stages"])
    again, other = printed_json(capsys, options), printed_json(capsys, replace(options, seed=4))
    assert other["trace_hash"] != found["trace_hash"]
    assert found.pop("machine").keys() == again.pop("machine").keys() == {"wall_s", "peak_bytes"}
    assert again == found, "equal runs differ only in their costs"


def test_the_table_shows_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    options = SimOptions(sets=SMALL, nodes=6)
    text, found = printed(capsys, options), printed_json(capsys, options)
    assert found["replicas"] == [3, 3]
    assert text.startswith("lan, 3 + 3 nodes, seed 0\n")
    assert f"{found['tokens_per_s']:,.0f}" in text
    assert f"{100 * found['stages'][1]['utilisation']:.1f} %" in text
    assert f"{found['bound_tokens_per_s']:,.0f} tokens/s allowed by links and devices; " in text
    assert f"; {100 * found['share_of_bound']:.1f} % of it reached" in text
    assert f"p95 {found['round_s']['p95']:.3g} s" in text
    assert f"trace_hash {found['trace_hash']}" in text
    assert {"activation", "gradient", "snapshot", "state"} <= {*text.split()}


def test_a_run_that_does_not_end_is_reported_with_its_state(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_sim(SimOptions(sets=(*SMALL, "limit_s=1"), seed=5)) == 1
    heard = capsys.readouterr()
    assert heard.out == "lan, 2 + 2 nodes, seed 5: the run did not reach its end\n"
    assert heard.err.splitlines()[1].startswith("seed 5: Deadlock: not ended after 1 virtual seconds")
    replay = shlex.split(heard.err.splitlines()[-1].removeprefix("  to repeat: "))
    assert replay == ["noloco", *WORDS, "--set", "limit_s=1", "--seed", "5"]
    found = printed_json(capsys, SimOptions(sets=(*SMALL, "limit_s=1"), seed=5), code=1)
    assert found["broken"].startswith("Deadlock: ")
    assert "tokens_per_s" not in found


# --- progress ---------------------------------------------------------------------------------------------------------


class Stream(io.StringIO):
    """Standard error that claims to be a terminal, or not."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("as_json", [True, False])
def test_showing_progress_does_not_change_the_run(
    terminal: bool, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = SimOptions(sets=SMALL)
    calm = printed_json(capsys, options)["trace_hash"]
    for name in ("TERMINAL_S", "FILE_S"):
        monkeypatch.setattr(progress_line, name, 0.001)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", heard := Stream(terminal=terminal))
    assert calm in printed(capsys, replace(options, as_json=as_json))
    steps = re.findall(r"step (\d) of 6, virtual time \d+\.\d s \(.*? × real\), \d+ s elapsed", heard.getvalue())
    if as_json and not terminal:
        assert heard.getvalue() == "", "JSON output stays parsable with 2>&1"
    else:
        assert steps == sorted(steps) != []
    if terminal:
        assert heard.getvalue().endswith(progress_line.CLEAR)
        assert "\n" not in heard.getvalue().removeprefix("simulating lan, 2 + 2 nodes, 6 steps\n")
    else:
        assert progress_line.CLEAR not in heard.getvalue()
    assert "progress" not in {thread.name for thread in threading.enumerate()}


def test_the_time_left_is_estimated_from_the_completed_part(monkeypatch: pytest.MonkeyPatch) -> None:
    part, now = 0.0, 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    line = progress_line.ProgressLine(lambda: ("half of it", part))
    now = 130.0
    assert line.text() == "half of it, 30 s elapsed"
    part = 0.2
    assert line.text() == "half of it, 30 s elapsed, about 2 min left"
    part = 1.0
    assert line.text() == "half of it, 30 s elapsed"


@pytest.mark.parametrize("columns", [20, 80, 500])
def test_the_line_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that wraps cannot be rewritten: every second one more stayed on the screen."""
    monkeypatch.setattr(progress_line, "TERMINAL_S", 0.001)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", heard := Stream(terminal=True))
    shown = threading.Event()

    def position() -> tuple[str, float]:
        if heard.tell():
            shown.set()
        return "words of the operation " * 4, 0.0

    with progress_line.ProgressLine(position) as line:
        assert shown.wait(60.0)
    whole, first = line.text(), heard.getvalue().split(progress_line.CLEAR)[1]
    assert len(first) == min(len(whole), columns - 1)
    assert first.removesuffix("…") == whole[: len(first.removesuffix("…"))]


# --- many seeds -------------------------------------------------------------------------------------------------------


def plant(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Make the swarm of one seed break a law."""

    def judge(swarm: FaultySwarm, outcome: Outcome) -> None:
        if swarm.plan.seed == seed:
            raise AssertionError(f"planted: it ended at {outcome.ended_at_s:.6f} s")

    monkeypatch.setattr(laws, "judge", judge)


def test_a_seed_that_breaks_a_law_is_reported_with_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, 8)
    ran = CliRunner().invoke(app, [*WORDS, "--seeds", "7:10", "--jobs", "1"])
    assert ran.exit_code == 1
    assert "3 runs, 1 of which broke a law" in ran.stdout
    _, law, replay = ran.stderr.splitlines()
    assert law.startswith("seed 8: AssertionError: planted: it ended at ")
    program, *words = shlex.split(replay.removeprefix("  to repeat: "))
    again = CliRunner().invoke(app, words)
    assert (program, again.exit_code, again.stderr) == ("noloco", 1, ran.stderr)
    found = printed_json(capsys, SimOptions(sets=SMALL, seeds="7:10"), code=1)
    assert found["runs"] == 3
    assert [one["seed"] for one in found["failed"]] == [8]
    assert 0 < found["figures"]["share_of_bound"]["mean"] < 1
    assert found["figures"]["tokens_per_s"]["runs"] == 3, "a run that broke a law still has figures"


def test_a_bug_of_a_node_is_reported_with_its_seed_and_ends_only_that_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    merge = RecordingStage.merge

    def fails(stage: RecordingStage, mine: FrozenRound, *rest: Any) -> float | None:
        if mine.round == 1 and stage.state.index == 1:
            raise KeyError("planted")
        return merge(stage, mine, *rest)

    monkeypatch.setattr(RecordingStage, "merge", fails)
    assert run_sim(SimOptions(sets=(*SMALL, "limit_s=1000"), seeds="7:9", jobs=1)) == 1
    heard = capsys.readouterr()
    assert "2 runs, 2 of which broke a law" in heard.out
    assert [line for line in heard.err.splitlines() if line.startswith("seed")] == [
        "seed 7: KeyError: 'planted'",
        "seed 8: KeyError: 'planted'",
    ]
    assert run_sim(SimOptions(sets=(*SMALL, "limit_s=1000"), seed=7)) == 1
    assert ", in fails\n" in capsys.readouterr().err, "a single run says where the bug is"


def test_several_processes_give_the_same_results_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (printed_json(capsys, SimOptions(sets=SMALL, seeds="1:3", jobs=jobs)) for jobs in (1, 2))
    assert one.pop("machine")["wall_s"] > 0
    assert two.pop("machine")["wall_s"] > 0
    assert one == two
    rates = one["figures"]["tokens_per_s"]
    assert rates["least"] < rates["mean"] < rates["most"]
    assert (rates["runs"], one["failed"]) == (2, [])


def test_a_worker_that_dies_is_reported_and_leaves_no_other_behind() -> None:
    deadly: Any = Deadly(Scenario())
    before = multiprocessing.active_children()
    with pytest.raises(LocalError, match=r"a worker process has died .*: give --jobs 1"):
        next(sim_command.simulate_all([deadly, deadly], 2))
    for child in [child for child in multiprocessing.active_children() if child not in before]:
        # The exit code is not checked, because a thread of the pool may have read it first.
        assert connection.wait([child.sentinel], 60)


# --- the same run twice -----------------------------------------------------------------------------------------------


def test_the_first_difference_between_two_traces() -> None:
    assert first_difference(["a", "b"], ["a", "b"]) is None
    assert first_difference(["a", "b", "d"], ["a", "c", "d"]) == {"event": 1, "first": "b", "second": "c"}
    assert first_difference(["a"], ["a", "b"]) == {"event": 1, "first": None, "second": "b"}
    assert first_difference(["a", "b"], ["a"]) == {"event": 1, "first": "b", "second": None}


def test_two_runs_of_one_seed_are_reported_as_equal(capsys: pytest.CaptureFixture[str]) -> None:
    options = SimOptions(sets=SMALL, check=True)
    found = printed_json(capsys, options)
    single = printed_json(capsys, replace(options, check=False))
    assert found == {
        "equal": True,
        "events": found["events"],
        "trace_hash": single["trace_hash"],
        "first_difference": None,
    }
    assert found["events"] > 500


def test_a_dependence_on_set_order_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = sim_command.simulate_apart
    runs: list[SimRun] = []

    def apart(request: SimRequest, hash_seeds: tuple[str, str]) -> list[SimRun]:
        unsteady: Any = Unsteady(request.scenario)
        runs.extend(made(unsteady, hash_seeds))
        return [replace(run, request=request) for run in runs]

    monkeypatch.setattr(sim_command, "simulate_apart", apart)
    lines = printed(capsys, SimOptions(sets=SMALL, check=True), code=1).splitlines()
    first, second = runs[0].lines, runs[1].lines
    number = next(n for n, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    assert lines == [
        f"the runs differ from event {number:,} on:",
        f"  first:  {first[number]}",
        f"  second: {second[number]}",
    ]


# --- plots ------------------------------------------------------------------------------------------------------------


def test_plots_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = printed(capsys, SimOptions(sets=SMALL, plots=tmp_path / "plots")).splitlines()
    paths = [tmp_path / "plots" / f"{name}.svg" for name in ("time", "tokens", "nodes", "rounds", "bytes")]
    assert listed[-5:] == [str(path) for path in paths]
    drawn = [path.read_text() for path in paths]
    assert all(ElementTree.fromstring(picture).tag.endswith("svg") for picture in drawn)
    assert len({*drawn}) == 5, "all plots differ"


# --- refused options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SimOptions(seeds="5:5"), "--seeds 5:5: write it as A:B"),
        (SimOptions(seeds="-1:5"), "--seeds -1:5: write it as A:B"),
        (
            SimOptions(seeds="9223372036854775807:9223372036854775809"),
            "--seeds 9223372036854775807:9223372036854775809: write it as A:B",
        ),
        (SimOptions(seeds="0:" + "1" * 5000), "--seeds 0:111"),
        (SimOptions(seeds="0:100001"), "--seeds 0:100001: write it as A:B, at most 100,000 seeds"),
        (SimOptions(seeds="1:5", seed=0), "--seed is for a single run: leave out --seeds"),
        (SimOptions(seeds="1:5", trace=Path("t")), "--trace is for a single run: leave out --seeds"),
        (SimOptions(seeds="1:5", check=True), "--check is for a single run: leave out --seeds"),
        (SimOptions(check=True, plots=Path("p")), "--check makes no plots: leave out --plots"),
        (SimOptions(trace=Path("same"), plots=Path("./same")), "--trace and --plots are both same: name two"),
        (SimOptions(trace=Path("/nowhere/t")), "/nowhere/t: there is no directory /nowhere"),
        (SimOptions(nodes=1), "--nodes: 1 node is too few for 2 stages"),
        (SimOptions(path=Path("missing.yaml")), "missing.yaml cannot be read"),
        (SimOptions(sets=("replicas=[]",)), "--set replicas: replicas must have a length of at least 1, not []"),
        (
            SimOptions(sets=("compute.spread=1000",)),
            "--set compute.spread: compute.spread must be at most 10",
        ),
        (SimOptions(sets=("run.stps=3",)), "--set run.stps: there is no key run.stps; the nearest is run.steps"),
    ],
)
def test_bad_options_are_refused_before_anything_is_simulated(
    options: SimOptions, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sim_command, "simulate", None)
    with pytest.raises(ConfigError) as error:
        run_sim(options)
    assert str(error.value).startswith(message)
    assert not capsys.readouterr().err, "nothing is said to be simulated"
