"""`noloco bench stage`: what a run's stages cost on a device, and how far their results are from float32 on the CPU.

Both are measured on stages as nodes use them: host buffers in, host buffers out. `ratio` is the time of the unsplit
model in plain torch divided by the time of all stages together, for the forward and backward pass of a microbatch.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from noloco_p2p import humanize
from noloco_p2p.compute.factory import make_torch_stage
from noloco_p2p.compute.hardware import pick_device
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.compute.stage_timing import random_batch, synchronise
from noloco_p2p.config import RunManifest, WireSettings
from noloco_p2p.core.messages import Batch, Gradient, MicrobatchId
from noloco_p2p.core.snapshots import SnapshotRequest
from noloco_p2p.core.stage_values import Contribution, StepLabel
from noloco_p2p.lab.bench.baseline_replica import BaselineReplica
from noloco_p2p.lab.processes import peak_bytes
from noloco_p2p.lab.sample_stats import Stopwatch
from noloco_p2p.launch.progress_line import ProgressLine

TARGET = 0.95
WARM_UP = 3
COSTS = ("forward_s", "backward_s", "inner_step_s", "snapshot_s", "exchange_s", "merge_s")
"""The keys of each stage in the result of `costs`."""


def run(device: str, manifest: RunManifest, line: ProgressLine, repeats: int = 20) -> dict[str, Any]:
    """Measure the stages of a run, one after the other, on one device.

    Seconds are medians per microbatch (`forward_s`, `backward_s`: all stages but the last; `loss_backward_s`: the last)
    and per inner step of all stages (`step_s`). `stages_costs` has those of each single stage (see `costs`), which is
    what the simulator needs to know about a machine. Deviations are max|a − b| / max|b| against the CPU in float32.
    Raises ConfigError and LocalError as `make_torch_stage`.
    """
    chosen = pick_device(device)
    batch = random_batch(manifest)
    stages = _make_stages(manifest, str(chosen))
    loss, grads = _gradients(stages, batch)
    began = time.monotonic()
    _one_pass(stages, batch, MicrobatchId("bench", 0, 1), Stopwatch())
    if (least_s := (WARM_UP + repeats) * (time.monotonic() - began)) > 60:
        line.say(f"this takes more than {humanize.duration(least_s)}")
    wide = manifest.model_copy(update={"wire": WireSettings(), "compute_dtype": "float32"})
    expected_loss, expected = _gradients(_make_stages(wide, "cpu"), batch)
    whole = BaselineReplica(manifest, chosen)
    numbers = line.over("repeating", WARM_UP + repeats)
    took = measure(stages, batch, lambda: torch.autograd.backward(whole.loss(batch)), chosen, numbers)
    *earlier, last = every = range(manifest.stages)
    seconds = {
        "forward_s": took.median_s(*((stage, "forward_s") for stage in earlier)),
        "loss_backward_s": took.median_s((last, "loss_backward_s")),
        "backward_s": took.median_s(*((stage, "backward_s") for stage in earlier)),
        "plain_s": took.median_s("plain_s"),
        "step_s": took.median_s(*((stage, "inner_step_s") for stage in every)),
    }
    parts = seconds["forward_s"] + seconds["loss_backward_s"] + seconds["backward_s"]
    return {
        "device": torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "stages": manifest.stages,
        "parameters": sum(stage.state.parameters for stage in stages),
        "tokens": manifest.microbatch_size * manifest.sequence_length,
        **seconds,
        "loss_deviation": abs(loss - expected_loss) / abs(expected_loss),
        "gradient_deviation": max(_deviation(grads[name], grad) for name, grad in expected.items()),
        "peak_bytes": torch.cuda.max_memory_allocated(chosen) if chosen.type == "cuda" else peak_bytes(),
        "ratio": seconds["plain_s"] / parts,
        "target": TARGET,
        "stages_costs": costs(took, manifest.stages),
    }


def measure(
    stages: Sequence[TorchStage], batch: Batch, plain: Callable[[], None], device: torch.device, numbers: Iterable[int]
) -> Stopwatch:
    """Repeatedly time a microbatch in all stages and in the plain model, then each stage's step, snapshot and merge.

    Stages and plain model take turns, so that both see the machine in the same state.
    """
    watch = Stopwatch(WARM_UP, partial(synchronise, device))
    for number in (done + 1 for done in numbers):
        _one_pass(stages, batch, MicrobatchId("bench", 1, number), watch)
        with watch.timed("plain_s"):
            plain()
        for index, stage in enumerate(stages):
            with watch.timed((index, "inner_step_s")):
                stage.inner_step(StepLabel(number, number - 1, 1e-4, {}))
            with watch.timed((index, "snapshot_s")):
                mine = stage.snapshot(number, number)
            request = SnapshotRequest(index, lattice=mine.lattice)
            with watch.timed((index, "exchange_s")):
                theirs = stage.decode(mine, request, stage.encode(mine, request, mine.peer))
            with watch.timed((index, "merge_s")):
                stage.merge(mine, [theirs])
    return watch


def costs(took: Stopwatch, stages: int) -> list[dict[str, float]]:
    """Median seconds of each stage: a microbatch's forward and backward, an inner step, a snapshot, encoding it for a
    partner and decoding as much (which host threads do), a merge.

    The last stage does forward, loss and backward in one: its `forward_s` is an evaluation, `backward_s` the rest.
    """
    found = [{name: took.median_s((stage, name)) for name in COSTS} for stage in range(stages)]
    found[-1]["backward_s"] = max(0.0, took.median_s((stages - 1, "loss_backward_s")) - found[-1]["forward_s"])
    return found


def _one_pass(stages: Sequence[TorchStage], batch: Batch, identity: MicrobatchId, watch: Stopwatch) -> Contribution:
    """One microbatch through all stages and back, after an evaluation by the last stage. Returns its contribution."""
    flow, graphs, last = batch.inputs, [], len(stages) - 1
    for index, stage in enumerate(stages[:-1]):
        with watch.timed((index, "forward_s")):
            graph, flow = stage.forward(flow, None)
        graphs.append(graph)
    with watch.timed((last, "forward_s")):
        stages[-1].evaluate(flow, batch.targets, None)
    with watch.timed((last, "loss_backward_s")):
        given = end = stages[-1].loss_backward(identity, flow, batch.targets, None)
    for index in reversed(range(last)):
        assert given.grad is not None
        gradient = Gradient(identity, given.grad, end.loss_sum, end.tokens, ())
        with watch.timed((index, "backward_s")):
            given = stages[index].backward(graphs[index], identity, gradient)
    return end


def _make_stages(manifest: RunManifest, device: str) -> list[TorchStage]:
    return [make_torch_stage(manifest, i, "bench", device=device, self_test=i == 0) for i in range(manifest.stages)]


def _gradients(stages: list[TorchStage], batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the first microbatch, on the host."""
    end = _one_pass(stages, batch, MicrobatchId("bench", 0, 0), Stopwatch())
    named = (pair for stage in stages for pair in stage.parameters.items())
    grads = {name: parameter.grad.cpu().clone() for name, parameter in named if parameter.grad is not None}
    return end.loss_sum, grads


def _deviation(found: Tensor, expected: Tensor) -> float:
    scale = float(expected.abs().max())
    gap = float((found.double() - expected.double()).abs().max())
    return gap / scale if scale else gap
