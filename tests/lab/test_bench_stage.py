"""`noloco bench stage` on a small run: its figures measure what they claim."""

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from stages import make_manifest
from typer.testing import CliRunner

from noloco_p2p.cli.bench import bench as benches
from noloco_p2p.compute import stage_timing
from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import Gradient, HostTensor, MicrobatchId
from noloco_p2p.core.snapshots import FrozenRound, SnapshotRequest
from noloco_p2p.core.stage_values import Contribution
from noloco_p2p.errors import LocalError
from noloco_p2p.lab.bench import stage as bench
from noloco_p2p.launch.progress_line import ProgressLine

PHASES = ("forward_s", "loss_backward_s", "backward_s", "step_s", "plain_s")


@dataclass(slots=True)
class Clock:
    """A clock advanced by the stages' operations."""

    now: float = 0.0


class Slow:
    """A stage whose operations only take time: 1 to 5 times `unit_s`; forward and backward combined take 3."""

    def __init__(self, clock: Clock, unit_s: float) -> None:
        self._clock = clock
        self._unit_s = unit_s

    def _takes(self, units: float) -> None:
        self._clock.now += units * self._unit_s

    def forward(self, inputs: HostTensor, mask: None) -> tuple[int, HostTensor]:
        self._takes(1)
        return 7, inputs

    def evaluate(self, inputs: HostTensor, targets: HostTensor, mask: None) -> None:
        self._takes(1)

    def backward(self, graph: int, microbatch: MicrobatchId, gradient: Gradient) -> Contribution:
        self._takes(2)
        return Contribution(gradient.grad, 0.0, 1, counted=True, finite=True)

    def loss_backward(self, microbatch: MicrobatchId, inputs: HostTensor, targets: HostTensor, mask: None) -> Any:
        self._takes(3)
        return Contribution(inputs, 0.0, 1, counted=True, finite=True)

    def inner_step(self, label: object) -> None:
        self._takes(3)

    def snapshot(self, round: int, step: int) -> FrozenRound:
        self._takes(4)
        nothing = HostTensor("vector", "float32", (0,), memoryview(b""))
        return FrozenRound("slow", round, step, nothing, nothing)

    def encode(self, frozen: FrozenRound, request: SnapshotRequest, caller: str) -> None:
        self._takes(6)

    def decode(self, mine: FrozenRound, request: SnapshotRequest, theirs: None) -> None:
        self._takes(1)

    def merge(self, mine: FrozenRound, theirs: None) -> None:
        self._takes(5)


def test_the_cpu_agrees_with_itself_and_everything_takes_time() -> None:
    manifest = make_manifest("llama", 3, dtype="float32")
    found: dict[str, Any] = bench.run("cpu", manifest, ProgressLine(), repeats=7)
    assert (found["device"], found["stages"], found["tokens"]) == ("cpu", 3, 16)
    assert all(0 < found[phase] < 60 for phase in PHASES)
    assert found["loss_deviation"] <= 1e-6
    assert found["gradient_deviation"] <= 1e-5
    assert found["peak_bytes"] > 2**20
    parts = found["forward_s"] + found["loss_backward_s"] + found["backward_s"]
    assert found["ratio"] == pytest.approx(found["plain_s"] / parts)
    each = found["stages_costs"]
    assert [tuple(one) for one in each] == [bench.COSTS] * 3
    # The last stage's backward pass is a difference of two medians, which may be 0 on a busy machine.
    assert 0 <= each[-1]["backward_s"] < 60
    assert all(0 < one[name] < 60 for one in each for name in bench.COSTS if (one, name) != (each[-1], "backward_s"))


def test_the_last_stages_backward_is_the_rest_of_its_combined_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that the operations themselves advance."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    stages: Any = [Slow(clock, 1.0), Slow(clock, 10.0)]
    batch = stage_timing.random_batch(make_manifest("llama", 2, dtype="float32"))
    took = bench.measure(stages, batch, lambda: None, torch.device("cpu"), range(2 + bench.WARM_UP))
    each = {
        "forward_s": 1.0,
        "backward_s": 2.0,
        "inner_step_s": 3.0,
        "snapshot_s": 4.0,
        "exchange_s": 7.0,
        "merge_s": 5.0,
    }
    assert bench.costs(took, 2) == [each, {name: 10 * seconds for name, seconds in each.items()}]


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(("limit_s", "expected_s"), [(1e9, 8.0), (405.0, 16.0), (0.0, 16.0)])
def test_one_microbatch_is_timed_by_the_median_of_whole_passes_that_follow_a_first_one(
    index: int, limit_s: float, expected_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass takes 4 units: 3 for both directions, and 1 until the device has finished. The first one is far slower."""
    clock, units = Clock(), iter([4.0, 1.0, 2.0, 1000.0])
    stage = Slow(clock, 100.0)

    def finish(device: torch.device) -> None:
        stage._takes(1)
        stage._unit_s = next(units)

    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(stage_timing, "make_torch_stage", lambda *_, **__: stage)
    monkeypatch.setattr(stage_timing, "synchronise", finish)
    assert stage_timing.time_stage(RunManifest(), index, "cpu", limit_s=limit_s, repeats=3) == expected_s


def test_a_lossy_codec_shows_in_the_deviation() -> None:
    manifest = make_manifest("llama", 3, dtype="float32", wire={"forward": "bfloat16", "backward": "int8"})
    found: dict[str, Any] = bench.run("cpu", manifest, ProgressLine(), repeats=1)
    assert 1e-4 < found["gradient_deviation"] < 0.2


def test_a_missing_device_is_refused() -> None:
    with pytest.raises(LocalError, match="cuda:63 not found"):
        bench.run("cuda:63", RunManifest(), ProgressLine())


def test_the_command_measures_the_run_of_a_configuration_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(device: str, manifest: RunManifest, line: object) -> dict[str, Any]:
        figures = {"stages": manifest.stages, "length": manifest.sequence_length, "device": device}
        return figures | {"stages_costs": [{"forward_s": 0.5}, {"forward_s": 0.25}]}

    monkeypatch.setattr(bench, "run", run)
    config = tmp_path / "run.yaml"
    config.write_text("stages: 3\nsequence_length: 8\n")
    words = ["stage", "--config", str(config), "--set", "stages=2", "--device", "cpu"]
    as_json = CliRunner().invoke(benches, [*words, "--json"])
    costs = [{"forward_s": 0.5}, {"forward_s": 0.25}]
    assert json.loads(as_json.stdout) == {"stages": 2, "length": 8, "device": "cpu", "stages_costs": costs}
    lines = CliRunner().invoke(benches, words).stdout.splitlines()
    assert lines[3:] == ["stages_costs 0:", "  forward_s: 0.5", "stages_costs 1:", "  forward_s: 0.25"]


def test_more_than_a_minute_is_announced_before_it_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It follows from the time of one pass through the stages."""

    def at_once(*_: object) -> None:
        raise LocalError("measured")

    monkeypatch.setattr(bench, "measure", at_once)
    for repeats, said in ((1, ""), (10**9, r"this takes more than [\d,]+ (d|h).*\n")):
        with pytest.raises(LocalError, match="measured"):
            bench.run("cpu", make_manifest("llama", 2), ProgressLine(), repeats)
        assert re.fullmatch(said, capsys.readouterr().err)
