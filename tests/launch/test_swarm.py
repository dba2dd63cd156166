"""`noloco swarm` with real node processes: it trains, and leaves nothing behind, however it ends."""

import errno
import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from math import exp, log
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from processes import NOLOCO, SMALL, NodeProcess, node_processes, settings, wait_until, working_below
from soak import soak
from tracked import read_back

from noloco_p2p.errors import LocalError, Unreachable
from noloco_p2p.io.storage import checkpoint_format
from noloco_p2p.launch import node_probe, node_process, run_files, swarm_end
from noloco_p2p.launch.settings import read
from noloco_p2p.launch.stop_signals import stop_signals
from noloco_p2p.launch.swarm import LocalSwarm, run_swarm
from noloco_p2p.launch.swarm_display import Display
from noloco_p2p.launch.swarm_plan import make_plan
from noloco_p2p.observe.report.page import render
from noloco_p2p.observe.report.recorded_run import read_runs as report_of

FRESH = (sys.executable, "-m", "noloco_p2p.cli.main", "swarm")
FORKED = (*NOLOCO, "swarm")
"""The same command, forked with the imports of the launcher and its nodes already in memory."""
KEYS = [
    "run_id",
    "completed",
    "stages",
    "replicas",
    "steps",
    "resumed_from_step",
    "inner_steps",
    "outer_rounds",
    "first_loss",
    "final_loss",
    "validation_loss",
    "validation_perplexity",
    "replica_std",
    "tokens",
    "tokens_per_s",
    "wall_s",
    "nodes",
    "link",
    "command",
]
NODE_KEYS = [
    "peer_id",
    "stage",
    "inner_steps",
    "outer_rounds",
    "microbatches",
    "rerouted",
    "pulled",
    "alone",
    "bytes_sent",
    "bytes_received",
    "exit_code",
]
ENDLESS = 100_000
ENDED = {"state": "finished", "inner_steps": 8, "outer_rounds": 2, "final_loss": 3.0, "tokens": 64}
"""The summary of a node that has taken all its steps."""


def size(stages: int, replicas: int, steps: int, **more: str) -> list[str]:
    """The arguments for a small swarm."""
    numbers = ["--stages", str(stages), "--replicas", str(replicas), "--steps", str(steps)]
    return [*numbers, "--no-sample", *SMALL, *settings(directory__refresh_s="0.5", limits__drain_s="5", **more)]


def wait_for_steps(swarm: NodeProcess) -> None:
    """Wait until the first node has taken an inner step."""

    def stepping() -> bool:
        found = node_probe.read_endpoints(swarm.dir / "0-0")
        try:
            return found is not None and node_probe.scrape(found.metrics, 5.0).total("inner_steps_total") > 0
        except Unreachable:
            return False

    swarm.wait_for(stepping, "the first inner step")


def the_report_agrees(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Check that the nodes' journals add up to the figures of their summaries."""
    (run,) = report_of([run_dir]).values()
    assert (run.tokens, run.tokens_per_s, run.wall_s) == (summary["tokens"], summary["tokens_per_s"], summary["wall_s"])
    assert run.last("final_loss") == pytest.approx(summary["final_loss"], rel=1e-5)
    assert run.validation_loss == pytest.approx(summary["validation_loss"], rel=1e-5)
    assert [run.last("spread", stage) for stage in (0, 1)] == pytest.approx(summary["replica_std"], rel=1e-5)
    for history, node in zip(run.nodes, summary["nodes"], strict=True):
        assert (history.peer_id, history.stage, history.inner_steps) == (
            node["peer_id"],
            node["stage"],
            node["inner_steps"],
        )
        assert sum(history.tallies["rounds"].values()) == node["outer_rounds"]
        assert history.tallies["microbatches"]["done"] == node["microbatches"]
        assert [process.ended for process in history.processes] == [True]
    assert "</html>" in render({"run": run})


def test_two_by_two_trains_and_its_figures_agree(tmp_path: Path) -> None:
    command = [*size(2, 2, 16, microbatches_per_step="3"), "--sample", "--track", "tensorboard"]
    with node_processes(tmp_path) as nodes:
        swarm = nodes.start(*command, command=FORKED, own_dir="run")
        assert swarm.end() == 0, swarm.logged() + swarm.printed()
        nodes.nothing_left()
    summary = swarm.summary()
    assert list(summary) == KEYS
    assert (summary["completed"], summary["stages"], summary["replicas"], summary["steps"]) == (True, 2, 2, 16)
    assert summary["resumed_from_step"] is None
    assert summary["outer_rounds"] == 4
    assert summary["first_loss"] == pytest.approx(log(384), abs=0.3)
    assert summary["validation_perplexity"] == pytest.approx(exp(summary["validation_loss"]))
    assert summary["validation_loss"] < summary["first_loss"]
    assert all(std > 0 for std in summary["replica_std"])
    assert len(summary["replica_std"]) == 2
    assert 0 < summary["tokens"] / summary["tokens_per_s"] < summary["wall_s"]
    assert [node["stage"] for node in summary["nodes"]] == [0, 0, 1, 1]
    for node in summary["nodes"]:
        assert list(node) == NODE_KEYS
        assert node["exit_code"] == 0
        assert node["outer_rounds"] == node["pulled"] + node["alone"]
        assert node["bytes_sent"] > 0
        assert node["bytes_received"] > 0
    first, last = summary["nodes"][:2], summary["nodes"][2:]
    tokens = sum(node["microbatches"] for node in first) * 2 * 32
    assert summary["tokens"] == tokens, "every microbatch that stage 0 began was trained"
    assert sum(node["microbatches"] for node in last) >= sum(node["microbatches"] for node in first)
    assert len({node["peer_id"] for node in summary["nodes"]}) == 4
    assert f"summary: {swarm.dir / 'summary.json'}" in swarm.printed()
    for name in ("0-0", "0-1", "1-0", "1-1"):
        assert re.search(rf"^{name}  finished  inner step", swarm.printed(), re.M)
    assert swarm.printed().splitlines().count("starting 4 nodes: 0 of 4") == 1
    assert "the model writes:\n    " in swarm.printed()
    assert f"export    noloco export --from {swarm.dir} --out {swarm.dir}/model" in swarm.printed()
    the_report_agrees(swarm.dir, summary)
    tracked = {name: points[-1] for name, points in read_back(swarm.dir / "tensorboard").items()}
    for name in ("validation_loss", "tokens_per_s"):
        assert tracked[name] == pytest.approx((16, summary[name]), rel=1e-6)
    states = {name: point for name, point in tracked.items() if name.startswith("nodes/")}
    assert states == dict.fromkeys(states, (16, 0.0)) | {"nodes/finished": (16, 4.0)}
    with node_processes(tmp_path) as nodes:
        again = nodes.start(*command, command=FORKED, own_dir="run")
        assert (again.end(), len(again.logged().splitlines())) == (2, 1)
        nodes.nothing_left()
    assert "finished run" in again.logged()
    assert again.summary() == summary


def test_a_swarm_of_one_node_trains(tmp_path: Path) -> None:
    with node_processes(tmp_path) as nodes:
        swarm = nodes.start(*size(1, 1, 8), command=FRESH, own_dir="run", fresh=True)
        assert swarm.end() == 0, swarm.logged() + swarm.printed()
        nodes.nothing_left()
    summary = swarm.summary()
    assert swarm.printed().splitlines().count("importing torch") == 1
    assert (summary["completed"], summary["inner_steps"], summary["replica_std"]) == (True, 8, [None])
    assert summary["nodes"][0]["alone"] == summary["outer_rounds"] == 2


def test_ctrl_c_ends_the_run_with_a_summary(tmp_path: Path) -> None:
    with node_processes(tmp_path) as nodes:
        swarm = nodes.start(*size(2, 1, ENDLESS), command=FORKED, own_dir="run")
        wait_for_steps(swarm)
        swarm.process.send_signal(signal.SIGINT)
        assert swarm.end() == 130, swarm.logged()
        nodes.nothing_left()
    printed = swarm.printed().splitlines()
    assert (
        printed[printed.index("leaving in order; a second signal stops at once") :].count("2 of 2 nodes have left") == 1
    )
    assert printed[-1] == f"continue with: noloco swarm --dir {swarm.dir}"
    summary = swarm.summary()
    assert summary["completed"] is False
    assert summary["tokens"] > 0
    assert [node["exit_code"] for node in summary["nodes"]] == [0, 0]


@pytest.mark.usefixtures("minds_signals")
def test_a_broken_output_pipe_counts_as_a_hangup(tmp_path: Path) -> None:
    reader = 'exec "$@" > >(until [ -e gone ]; do sleep 0.1; done)'
    with node_processes(tmp_path) as nodes:
        command = ("bash", "-c", reader, "bash", *FRESH)
        swarm = nodes.start(*size(2, 1, ENDLESS), command=command, own_dir="run", fresh=True)
        wait_for_steps(swarm)
        (tmp_path / "gone").touch()
        assert swarm.end() == 128 + signal.SIGHUP, swarm.logged()
        nodes.nothing_left()
    assert swarm.logged() == "error: standard output cannot be written: Broken pipe; stopping\n"
    assert [node["exit_code"] for node in swarm.summary()["nodes"]] == [0, 0]
    assert checkpoints_of(swarm.dir) > 0


@pytest.mark.usefixtures("minds_signals")
def test_a_hangup_does_not_count_as_a_second_signal() -> None:
    with stop_signals() as heard:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGINT, signal.SIGHUP):
            signal.raise_signal(number)
    assert heard == [signal.SIGHUP, signal.SIGINT]


@pytest.mark.usefixtures("minds_signals")
def test_a_hangup_that_nohup_ignores_ends_nothing(tmp_path: Path) -> None:
    with node_processes(tmp_path) as nodes:
        command = ("bash", "-c", 'trap "" HUP INT; exec "$@"', "bash", *FRESH)
        swarm = nodes.start(*size(1, 1, ENDLESS), command=command, own_dir="run", fresh=True)
        wait_for_steps(swarm)
        for number in (signal.SIGHUP, signal.SIGINT):
            swarm.process.send_signal(number)
        assert swarm.end() == 128 + signal.SIGINT, swarm.logged()


def test_a_node_that_dies_is_reported_and_the_others_are_stopped(tmp_path: Path) -> None:
    with node_processes(tmp_path) as nodes:
        swarm = nodes.start(*size(1, 2, ENDLESS), command=FORKED, own_dir="run")
        wait_for_steps(swarm)
        victim = node_probe.read_endpoints(swarm.dir / "0-1")
        assert victim is not None
        os.kill(victim.pid, signal.SIGKILL)
        assert swarm.end() == 1
        nodes.nothing_left()
    assert "node 0-1 was killed by signal 9" in swarm.logged()
    assert (swarm.dir / "0-1.log").read_text().splitlines()[-1] in swarm.logged(), "the end of its log"
    summary = swarm.summary()
    assert summary["completed"] is False
    assert [node["exit_code"] for node in summary["nodes"]] == [0, -9]
    assert summary["nodes"][1]["peer_id"] == victim.peer_id


def test_a_node_that_failed_is_reported_even_if_somebody_then_stops_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C while the other nodes finished their work left nothing but the exit code 130: no node, no reason."""
    ending = "ended with exit code 1"
    failed = SimpleNamespace(
        name="0-1", exit_code=1, ending=ending, log="run/0-1.log", last_lines=lambda count: ["no space left"]
    )
    launcher = SimpleNamespace(_signals=[signal.SIGINT], _failed=failed, _cut_off=False)
    assert LocalSwarm._exit_code(cast(LocalSwarm, launcher), {"completed": False}) == 130
    assert capsys.readouterr().err == (
        "error: node 0-1 ended with exit code 1; the end of run/0-1.log:\n  no space left\n"
    )


def test_a_node_that_refuses_its_settings_leads_to_exit_code_2(tmp_path: Path) -> None:
    nothing = size(1, 1, 8, data__tokenizer="no/nothing")
    with node_processes(tmp_path) as nodes:
        swarm = nodes.start(*nothing, command=FORKED, own_dir="run")
        assert swarm.end() == 2
        nodes.nothing_left()
    assert "node 0-0 ended with exit code 2" in swarm.logged()
    assert "nothing" in swarm.logged()
    assert swarm.summary()["completed"] is False


def test_a_run_whose_last_weights_are_not_saved_is_not_completed(tmp_path: Path) -> None:
    full = tmp_path / "run" / "0-0" / "checkpoints"
    full.parent.mkdir(parents=True)
    for file in (tmp_path / "run" / "swarm.lock", full.with_name("identity.key.lock"), full):
        file.touch()
    with node_processes(tmp_path) as nodes:
        swarm = nodes.start(*size(1, 1, 8, checkpoint__every_steps="4"), command=FORKED, own_dir="run")
        assert swarm.end() == 1
        assert "error: the last weights of a stage could not be saved" in swarm.logged()
        assert swarm.summary()["completed"] is False
        full.unlink()
        again = nodes.start("--no-sample", command=FORKED, own_dir="run")
        assert again.end() == 0, again.logged()
    assert again.summary()["completed"] is True
    assert checkpoints_of(tmp_path / "run") > 0


def test_a_killed_run_resumes_from_its_directory_alone(tmp_path: Path) -> None:
    run_dir, steps, paced = tmp_path / "run", 80, (*NOLOCO, "--paced", "swarm")
    with node_processes(tmp_path) as nodes:
        killed = nodes.start(*size(2, 2, steps, checkpoint__every_steps="1"), command=paced, own_dir="run")
        killed.wait_for(lambda: checkpoints_of(run_dir) >= 12, "three checkpoints of each node")
        assert killed.process.poll() is None
        for pid in working_below(tmp_path):
            with suppress(ProcessLookupError):  # a process may end because one that was killed before it has
                os.kill(pid, signal.SIGKILL)
        nodes.nothing_left()
        peers = {path.parent.name: path.read_bytes() for path in run_dir.glob("*/identity.key")}
        places = joined_at(run_dir)
        stored = [json.loads(path.read_text()) for path in run_dir.glob("*/checkpoints/*/stage-*.json")]
        refused = nodes.start(*size(2, 2, 99), command=FORKED, own_dir="run")
        assert (refused.end(), len(refused.logged().splitlines())) == (2, 1)
        assert f"--steps: steps is 99 here, {steps} in the unfinished run" in refused.logged()
        again = nodes.start(command=FORKED, own_dir="run")
        assert again.end() == 0, again.logged() + again.printed()
        nodes.nothing_left()
    found = re.search(r"^resumes from its checkpoints, near step (\d+) \(outer round (\d+)\)$", again.printed(), re.M)
    assert found is not None
    step, outer_round = int(found[1]), int(found[2])
    assert 0 < step < steps
    # A replica whose clock jumped over that round continues from the one before it, at a lower step.
    assert outer_round == min(max(one["round"] for one in stored if one["stage"] == stage) for stage in (0, 1))
    assert step in {int(one["step"]) for one in stored}
    summary = again.summary()
    assert summary["completed"]
    # One replica of each stage is enough to continue: the other may come when the run is nearly or quite at its end.
    nodes_said = [json.loads(path.read_text()) for path in run_dir.glob("*/summary.json")]
    assert len(nodes_said) == 4
    resumed = [one for one in nodes_said if one["resumed"] is not None]
    assert {one["stage"] for one in resumed} == {0, 1}
    assert summary["resumed_from_step"] == min(int(one["resumed"]["step"]) for one in resumed)
    own = [(one["outer_rounds"], one["resumed"]["round"]) for one in resumed if one["resumed"]["source"] == "shard"]
    assert all(rounds <= steps // 4 - round for rounds, round in own), "only the rounds of this launch count"
    assert summary["outer_rounds"] == max(one["outer_rounds"] for one in resumed) > 0
    assert peers == {path.parent.name: path.read_bytes() for path in run_dir.glob("*/identity.key")}
    found_again = [name for name, place in joined_at(run_dir).items() if place == places[name]]
    assert found_again, "nodes keep their ports unless another process has taken them"
    assert (run_dir / "0-0.log").read_text().count("holds stage 0 of 2") == 2, "the log is continued"


def joined_at(run_dir: Path) -> dict[str, tuple[str, ...]]:
    """The libp2p addresses of the nodes of a swarm."""
    found = {path.parent.name: node_probe.read_endpoints(path.parent) for path in run_dir.glob("*/endpoints.json")}
    return {name: endpoints.join for name, endpoints in found.items() if endpoints is not None}


def checkpoints_of(run_dir: Path) -> int:
    return len(list(run_dir.glob("*/checkpoints/*/stage-*.json")))


def test_nodes_end_with_their_launcher(tmp_path: Path) -> None:
    with node_processes(tmp_path) as nodes:
        swarm = nodes.start(*size(1, 1, ENDLESS), command=FORKED, own_dir="run")
        wait_until(lambda: node_probe.read_endpoints(swarm.dir / "0-0") is not None, "the node")
        assert len(working_below(tmp_path)) > 1
        swarm.process.send_signal(signal.SIGKILL)
        nodes.nothing_left()
    assert swarm.process.returncode == -signal.SIGKILL


# --- behind emulated lines --------------------------------------------------------------------------------------------


def relay_below(home: Path) -> int:
    """The process id of the relay started below `home`."""
    (found,) = (pid for pid in working_below(home) if b"launch.relay" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return found


def test_with_emulated_lines_all_bytes_between_nodes_pass_through_the_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.1.0.1,127.1.0.2,127.0.0.0/8")
    with node_processes(tmp_path) as nodes:
        swarm = nodes.start(*size(2, 1, 8), "--link", "50/20mbit,10ms,1ms", command=FORKED, own_dir="run")
        assert swarm.end() == 0, swarm.logged() + swarm.printed()
        nodes.nothing_left()
    summary = swarm.summary()
    lines = summary["link"]["lines"]
    assert (summary["completed"], summary["link"]["line"]) == (True, "50/20mbit,10ms,1ms")
    for node, line in zip(summary["nodes"], (lines["0-0"], lines["1-0"]), strict=True):
        assert node["microbatches"] > 0
        assert line["sent"] > node["bytes_sent"] > 0
        assert line["received"] > node["bytes_received"] > 0
    assert (lines["0-0"]["sent"], lines["0-0"]["received"]) == (lines["1-0"]["received"], lines["1-0"]["sent"])


@pytest.mark.parametrize("number", [signal.SIGKILL, *soak([signal.SIGINT])])
def test_the_relay_ends_with_its_launcher(tmp_path: Path, number: signal.Signals) -> None:
    with node_processes(tmp_path) as nodes:
        swarm = nodes.start(*size(1, 2, ENDLESS), "--link", "100mbit,5ms", command=FORKED, own_dir="run")
        wait_for_steps(swarm)
        assert relay_below(tmp_path)
        swarm.process.send_signal(number)
        assert swarm.end() == (130 if number == signal.SIGINT else -signal.SIGKILL)
        nodes.nothing_left()


def test_a_relay_that_dies_ends_the_swarm(tmp_path: Path) -> None:
    with node_processes(tmp_path) as nodes:
        swarm = nodes.start(*size(2, 1, ENDLESS), "--link", "100mbit,5ms", command=FORKED, own_dir="run")
        wait_for_steps(swarm)
        os.kill(relay_below(tmp_path), signal.SIGKILL)
        assert swarm.end() == 1
        nodes.nothing_left()
    assert "the relay of --link died" in swarm.logged()
    assert swarm.summary()["link"] == {"line": "100mbit,5ms"}


def test_a_folder_of_another_user_below_the_run_does_not_lose_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbidden(directory: Path) -> list[object]:
        raise LocalError(f"checkpoints below {directory}: Permission denied")

    for name in ("_start", "_leave"):
        monkeypatch.setattr(LocalSwarm, name, lambda swarm: None)
    monkeypatch.setattr(node_process.NodeProcess, "exit_code", 0)
    monkeypatch.setattr(checkpoint_format, "stored_checkpoints", forbidden)
    plan = make_plan(read(None, {}, ["stages=1", "start_replicas=1"]), None)
    swarm = LocalSwarm(plan, tmp_path, None, Display(8, plain=True), [], None)
    (tmp_path / "0-0").mkdir()
    (tmp_path / "0-0" / "summary.json").write_text(json.dumps(ENDED))
    assert swarm.run() == 1
    assert json.loads((tmp_path / "summary.json").read_text())["completed"] is False
    assert f"checkpoints below {tmp_path}: Permission denied" in capsys.readouterr().out


def test_a_disk_that_is_full_at_the_end_hides_neither_the_figures_nor_the_node_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> bool:
        raise LocalError("summary.json cannot be written: No space left on device")

    for name in ("_start", "_leave"):
        monkeypatch.setattr(LocalSwarm, name, lambda swarm: None)
    monkeypatch.setattr(run_files, "store_unless_less", full)
    plan = make_plan(read(None, {}, ["stages=1", "start_replicas=1"]), None)
    swarm = LocalSwarm(plan, tmp_path, None, Display(8, plain=True), [], None)
    monkeypatch.setattr(node_process.NodeProcess, "exit_code", 1)
    swarm._must_end()
    with pytest.raises(LocalError, match="No space left"):
        swarm.run()
    said = capsys.readouterr()
    assert "not completed after 0 s: 0 inner steps, 0 outer rounds" in said.out
    assert "error: node 0-0 ended with exit code 1" in said.err


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a run with one node that has taken all its steps and ended, which no launcher starts again."""
    for name in ("_start", "_leave"):
        monkeypatch.setattr(LocalSwarm, name, lambda swarm: None)
    monkeypatch.setattr(node_process.NodeProcess, "exit_code", 0)
    (tmp_path / "0-0").mkdir()
    (tmp_path / "swarm.lock").touch()
    (tmp_path / "0-0" / "summary.json").write_text(json.dumps(ENDED))
    return tmp_path


@pytest.mark.parametrize("inner_steps", [0, 8])
def test_a_run_that_has_ended_without_the_weights_of_a_stage_is_not_to_be_started_again(
    inner_steps: int, ended: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the checkpoints of a stage were deleted, each start said to `fix that, then start again with this --dir`."""
    (ended / "0-0" / "summary.json").write_text(json.dumps(ENDED | {"inner_steps": inner_steps}))
    plan = make_plan(read(None, {}, ["stages=1", "start_replicas=1"]), None)
    assert LocalSwarm(plan, ended, None, Display(8, plain=True), [], None).run() == 1
    assert ("start again with this --dir" in (said := capsys.readouterr().err)) == (inner_steps > 0)
    assert ("nobody has the weights of a stage any more" in said) == (inner_steps == 0)


@pytest.mark.parametrize("number", [signal.SIGINT, None])
def test_a_relay_that_dies_after_the_last_step_loses_only_its_counts(
    number: signal.Signals | None, ended: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A completed run ended with exit code 1, and said that no node could reach another."""

    def start(swarm: LocalSwarm) -> bool:
        assert swarm._relay is not None
        swarm._relay.start(swarm._nodes)
        assert swarm._relay._process is not None
        swarm._relay._process.kill()
        swarm._relay._process.wait()
        return True

    monkeypatch.setattr(LocalSwarm, "_start", start)
    plan = make_plan(read(None, {}, ["stages=1", "start_replicas=1", "checkpoint.every_steps=null"]), None)
    signals = [] if number is None else [int(number)]
    assert LocalSwarm(plan, ended, None, Display(8, plain=True), signals, "100mbit,5ms").run() == 130 * len(signals)
    summary = json.loads((ended / "summary.json").read_text())
    assert (summary["link"], summary["completed"]) == ({"line": "100mbit,5ms"}, number is None)
    said = capsys.readouterr()
    assert "the traffic of each line is unknown: the relay of --link 100mbit,5ms does not answer" in said.out
    assert said.err == ""


@pytest.mark.usefixtures("minds_signals")
def test_a_signal_after_a_completed_run_does_not_tell_to_continue_it(
    ended: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while the summary was written: exit code 130, and a command that then refused the finished run."""
    store = run_files.store_unless_less

    def interrupted(*given: Any) -> bool:
        signal.raise_signal(signal.SIGINT)
        return store(*given)

    monkeypatch.setattr(run_files, "store_unless_less", interrupted)
    given = read(None, {}, ["stages=1", "start_replicas=1", "checkpoint.every_steps=null"])
    assert run_swarm(given, ended, None, plain=True) == 0
    assert json.loads((ended / "summary.json").read_text())["completed"] is True
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == [f"summary: {ended}/summary.json", f"report    noloco report {ended} --out {ended}/report.html"]


def test_ctrl_c_during_the_sample_of_a_completed_run_ends_only_the_sample(
    ended: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands to try next were not printed either."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(swarm_end, "run_export", interrupted)
    monkeypatch.setattr(swarm_end, "TENSORS", "*/summary.json")
    given = read(None, {}, ["stages=1", "start_replicas=1", "checkpoint.every_steps=null"])
    assert run_swarm(given, ended, None, plain=True) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in said[-4:]] == ["no", "report", "export", "generate"]
    assert said[-4] == "no sample: interrupted"


def test_a_failure_that_cannot_be_told_does_not_lose_the_summary(ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a full disk behind standard error there was no summary.json, and the exit code was that of another error."""

    def fail(text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(node_process.NodeProcess, "exit_code", 1)
    plan = make_plan(read(None, {}, ["stages=1", "start_replicas=1"]), None)
    swarm = LocalSwarm(plan, ended, None, Display(8, plain=True), [], None)
    swarm._must_end()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=fail))
    assert swarm.run() == 1
    assert json.loads((ended / "summary.json").read_text())["completed"] is False


def test_a_malformed_link_is_refused_before_anything_is_created(tmp_path: Path) -> None:
    with node_processes(tmp_path) as nodes:
        swarm = nodes.start(*size(1, 1, 8), "--link", "fast", command=FORKED, own_dir="run")
        assert (swarm.end(), len(swarm.logged().splitlines())) == (2, 1)
    assert "200/20mbit" in swarm.logged()
    assert not swarm.dir.exists()
