"""`noloco swarm` with real node processes: it trains, ends, and leaves nothing behind, however it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Any

import pytest

from noloco_p2p.errors import Unreachable
from noloco_p2p.launch import node_probe
from noloco_p2p.observe.report.page import render
from noloco_p2p.observe.report.recorded_run import read_run as report_of

SMALL = {
    "model.config": "{hidden_size: 32, num_hidden_layers: 2, intermediate_size: 64, num_attention_heads: 2, "
    "vocab_size: 384, max_position_embeddings: 32, tie_word_embeddings: false}",
    "sequence_length": "32",
    "microbatch_size": "2",
    "outer.inner_steps": "4",
    "evaluation.microbatches": "2",
    "directory.refresh_s": "0.5",
    "limits.drain_s": "5",
}
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
LONGEST_S = 180.0
ENDING_S = 30.0
"""What a process and the libp2p daemon of a killed one need to go."""


def arguments(run_dir: Path, stages: int, replicas: int, steps: int, **more: str) -> list[str]:
    command = [sys.executable, "-m", "noloco_p2p.cli.main", "swarm", "--dir", str(run_dir)]
    command += ["--stages", str(stages), "--replicas", str(replicas), "--steps", str(steps)]
    for key, value in {**SMALL, **more}.items():
        command += ["--set", f"{key}={value}"]
    return command


def wait_until(holds: Callable[[], bool], seconds: float, what: str) -> None:
    give_up_at = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < give_up_at, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)


def processes_of(run_dir: Path) -> list[int]:
    """Processes of this run: its nodes and their libp2p daemons name its directory on their command lines."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(run_dir).encode() in command:
                found.append(int(entry.name))
    return found


@dataclass
class Launched:
    """A swarm that runs."""

    process: "subprocess.Popen[str]"
    run_dir: Path

    def wait_for_steps(self) -> None:
        """Until the first node has taken an inner step."""

        def stepping() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            found = node_probe.read_endpoints(self.run_dir / "0-0")
            try:
                return found is not None and node_probe.scrape(found.metrics, 5.0).total("inner_steps_total") > 0
            except Unreachable:
                return False

        wait_until(stepping, LONGEST_S, "the first inner step")

    def end(self) -> tuple[int, str, str]:
        """Exit code, standard output and error, once it has ended; nothing of it is left."""
        out, err = self.process.communicate(timeout=LONGEST_S)
        wait_until(lambda: not processes_of(self.run_dir), ENDING_S, f"the end of {processes_of(self.run_dir)}")
        return self.process.returncode, out, err

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return found


@contextmanager
def launched(command: list[str], run_dir: Path) -> Iterator[Launched]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield Launched(process, run_dir)
    finally:
        process.kill()
        process.wait()
        for pid in processes_of(run_dir):
            os.kill(pid, signal.SIGKILL)


def the_report_agrees(run_dir: Path, summary: dict[str, Any]) -> None:
    """What the nodes wrote into their journals comes to the same figures as their summaries."""
    run = report_of([run_dir])
    assert (run.tokens, run.tokens_per_s, run.wall_s) == (summary["tokens"], summary["tokens_per_s"], summary["wall_s"])
    assert run.final_loss == pytest.approx(summary["final_loss"], rel=1e-5)
    assert run.validation_loss == pytest.approx(summary["validation_loss"], rel=1e-5)
    assert [run.replica_std(stage) for stage in (0, 1)] == pytest.approx(summary["replica_std"], rel=1e-5)
    for history, node in zip(run.nodes, summary["nodes"], strict=True):
        assert (history.peer_id, history.stage, history.inner_steps) == (
            node["peer_id"],
            node["stage"],
            node["inner_steps"],
        )
        assert sum(history.tallies["rounds"].values()) == node["outer_rounds"]
        assert history.tallies["microbatches"]["done"] == node["microbatches"]
        assert [process.ended for process in history.processes] == [True]
    assert "</html>" in render(run)


def test_two_by_two_trains_and_tells_the_truth(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = arguments(run_dir, 2, 2, 16, microbatches_per_step="3")
    with launched(command, run_dir) as swarm:
        code, out, err = swarm.end()
    assert code == 0, err + out
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
    assert summary["tokens"] == tokens, "every microbatch that stage 0 began was trained on"
    assert sum(node["microbatches"] for node in last) >= sum(node["microbatches"] for node in first)
    assert len({node["peer_id"] for node in summary["nodes"]}) == 4
    assert f"summary: {run_dir / 'summary.json'}" in out
    for name in ("0-0", "0-1", "1-0", "1-1"):
        assert re.search(rf"^{name}  finished  inner step", out, re.M)
    the_report_agrees(run_dir, summary)
    with launched(command, run_dir) as again:
        code, _, err = again.end()
    assert (code, len(err.splitlines())) == (2, 1)
    assert "finished run" in err
    assert again.summary() == summary


def test_one_node_is_a_swarm(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with launched(arguments(run_dir, 1, 1, 8), run_dir) as swarm:
        code, out, err = swarm.end()
    assert code == 0, err + out
    summary = swarm.summary()
    assert (summary["completed"], summary["inner_steps"], summary["replica_std"]) == (True, 8, [None])
    assert summary["nodes"][0]["alone"] == summary["outer_rounds"] == 2


def test_ctrl_c_ends_it_with_a_summary(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with launched(arguments(run_dir, 2, 1, ENDLESS), run_dir) as swarm:
        swarm.wait_for_steps()
        swarm.process.send_signal(signal.SIGINT)
        code, _, err = swarm.end()
    assert code == 130, err
    summary = swarm.summary()
    assert summary["completed"] is False
    assert summary["tokens"] > 0
    assert [node["exit_code"] for node in summary["nodes"]] == [0, 0]


def test_a_node_that_dies_is_shown_and_the_others_are_stopped(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with launched(arguments(run_dir, 1, 2, ENDLESS), run_dir) as swarm:
        swarm.wait_for_steps()
        victim = node_probe.read_endpoints(run_dir / "0-1")
        assert victim is not None
        os.kill(victim.pid, signal.SIGKILL)
        code, _, err = swarm.end()
    assert code == 1
    assert "node 0-1 was ended by signal 9" in err
    assert (run_dir / "0-1.log").read_text().splitlines()[-1] in err, "the end of its log"
    summary = swarm.summary()
    assert summary["completed"] is False
    assert [node["exit_code"] for node in summary["nodes"]] == [0, -9]
    assert summary["nodes"][1]["peer_id"] == victim.peer_id


def test_a_node_that_refuses_its_settings_gives_exit_code_2(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    more = {"data.kind": "text", "data_files": f"[{tmp_path}/*.nothing]"}
    with launched(arguments(run_dir, 1, 1, 8, **more), run_dir) as swarm:
        code, _, err = swarm.end()
    assert code == 2
    assert "node 0-0 ended with exit code 2" in err
    assert "nothing" in err
    assert swarm.summary()["completed"] is False


def test_a_killed_run_is_resumed_with_nothing_but_its_directory(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    steps = 160
    more = {"checkpoint.every_rounds": "1"}
    with launched(arguments(run_dir, 2, 2, steps, **more), run_dir) as swarm:
        wait_until(lambda: checkpoints_of(run_dir) >= 12, LONGEST_S, "three checkpoints of each node")
        assert swarm.process.poll() is None
        for pid in processes_of(run_dir):
            os.kill(pid, signal.SIGKILL)
        swarm.process.kill()
        swarm.end()
    peers = {path.parent.name: path.read_bytes() for path in run_dir.glob("*/identity.key")}
    with launched(arguments(run_dir, 2, 2, 99), run_dir) as refused:
        code, _, err = refused.end()
    assert (code, len(err.splitlines())) == (2, 1)
    assert "--steps: steps is 99 here, 160 in the unfinished run" in err
    command = [sys.executable, "-m", "noloco_p2p.cli.main", "swarm", "--dir", str(run_dir)]
    with launched(command, run_dir) as again:
        code, out, err = again.end()
    assert code == 0, err + out
    found = re.search(r"^resumes at step (\d+) \(outer round (\d+)\)$", out, re.M)
    assert found is not None
    step, outer_round = int(found[1]), int(found[2])
    assert 0 < step < steps
    assert outer_round == step // 4
    summary = again.summary()
    assert (summary["completed"], summary["resumed_from_step"]) == (True, step)
    assert 0 < summary["outer_rounds"] <= steps // 4 - outer_round + 1, "only what this launch did"
    assert peers == {path.parent.name: path.read_bytes() for path in run_dir.glob("*/identity.key")}
    assert (run_dir / "0-0.log").read_text().count("holds stage 0 of 2") == 2, "the log is carried on"


def checkpoints_of(run_dir: Path) -> int:
    return len(list(run_dir.glob("*/checkpoints/*/stage-*.json")))


def test_nodes_end_with_their_launcher(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with launched(arguments(run_dir, 1, 1, ENDLESS), run_dir) as swarm:
        wait_until(lambda: node_probe.read_endpoints(run_dir / "0-0") is not None, LONGEST_S, "the node")
        assert processes_of(run_dir)
        swarm.process.kill()
        swarm.end()
    assert swarm.process.returncode == -signal.SIGKILL
