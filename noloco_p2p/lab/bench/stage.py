"""`noloco bench stage`: what the stages of a run cost on a device, and how far they are from the CPU in float32.

Both figures are taken on the stages as nodes use them: host buffers in, host buffers out. `ratio` is the time of the
unsplit model in plain torch over the time of all stages together, a microbatch's forward and backward each.
"""

import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from noloco_p2p.compute import host_tensor, model_family
from noloco_p2p.compute.factory import make_torch_stage
from noloco_p2p.compute.hardware import pick_device
from noloco_p2p.compute.model import make_stage_module
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.compute.stage_timing import random_batch, synchronise
from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import Batch, Gradient, MicrobatchId
from noloco_p2p.ports import Contribution, StepLabel

TARGET = 0.95
WARM_UP = 3
COSTS = ("forward_s", "backward_s", "inner_step_s", "snapshot_s", "merge_s")
"""What `costs` has of each stage."""

T = TypeVar("T")


class Timed(Protocol):
    """Runs an operation of a stage and notes its seconds under a name."""

    def __call__(self, index: int, name: str, operation: Callable[[], T]) -> T:
        """The operation's result."""
        ...


def run(device: str = "auto", *, manifest: RunManifest | None = None, repeats: int = 20) -> dict[str, Any]:
    """Measure the stages of `manifest` (default: the default run) in turn on one device.

    Seconds are medians per microbatch (`forward_s`, `backward_s`: all stages but the last; `loss_backward_s`: the last)
    and per inner step of all stages (`step_s`). `stages_costs` has those of each stage alone, see `costs`: what the
    simulator needs to know about a machine. Deviations are max|a − b| / max|b| against the CPU in float32.
    Raises ConfigError and LocalError as `make_torch_stage`.
    """
    manifest = manifest or RunManifest()
    chosen = pick_device(device)
    batch = random_batch(manifest)
    stages = _make_stages(manifest, str(chosen))
    loss, grads = _gradients(stages, batch)
    wide = manifest.model_copy(update={"wire_dtype": "float32", "compute_dtype": "float32"})
    expected_loss, expected = _gradients(_make_stages(wide, "cpu"), batch)
    seconds = _measure(stages, batch, _plain(manifest, chosen, batch), repeats, chosen)
    parts = seconds["forward_s"] + seconds["loss_backward_s"] + seconds["backward_s"]
    stages_costs = costs(stages, batch, chosen, repeats)
    return {
        "device": torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "stages": manifest.stages,
        "parameters": sum(stage.state.parameters for stage in stages),
        "tokens": manifest.microbatch_size * manifest.sequence_length,
        **seconds,
        "loss_deviation": abs(loss - expected_loss) / abs(expected_loss),
        "gradient_deviation": max(_deviation(grads[name], grad) for name, grad in expected.items()),
        "peak_bytes": _peak_bytes(chosen),
        "ratio": seconds["plain_s"] / parts,
        "target": TARGET,
        "stages_costs": stages_costs,
    }


def costs(stages: list[TorchStage], batch: Batch, device: torch.device, repeats: int) -> list[dict[str, float]]:
    """Median seconds of each stage: a microbatch's forward and backward, an inner step, a snapshot, a merge.

    The last stage does forward, loss and backward in one: its `forward_s` is an evaluation, `backward_s` the rest.
    """
    took: list[dict[str, list[float]]] = [{} for _ in stages]

    def timed(index: int, name: str, operation: Callable[[], T]) -> T:
        began_at = time.perf_counter()
        result = operation()
        synchronise(device)
        if number > WARM_UP:
            took[index].setdefault(name, []).append(time.perf_counter() - began_at)
        return result

    for number in range(1, WARM_UP + repeats + 1):
        _one_pass(stages, batch, MicrobatchId("bench", 1, number), timed, evaluated=True)
        for index, stage in enumerate(stages):
            label = StepLabel(number, number - 1, 1e-4, {})
            timed(index, "inner_step_s", partial(stage.inner_step, label))
            mine = timed(index, "snapshot_s", partial(stage.snapshot, number, number))
            timed(index, "merge_s", partial(stage.merge, mine, mine))
    medians = [{name: statistics.median(values) for name, values in one.items()} for one in took]
    for one in medians:
        if "loss_backward_s" in one:
            one["backward_s"] = max(0.0, one.pop("loss_backward_s") - one["forward_s"])
    return [{name: one[name] for name in COSTS} for one in medians]


def _one_pass(
    stages: list[TorchStage], batch: Batch, identity: MicrobatchId, timed: Timed, *, evaluated: bool = False
) -> Contribution:
    """One microbatch through all stages and back, each operation timed; the contribution of the last stage.

    `evaluated`: the last stage also evaluates the microbatch, before.
    """
    flow, graphs, last = batch.inputs, [], len(stages) - 1
    for index, stage in enumerate(stages[:-1]):
        graph, flow = timed(index, "forward_s", partial(stage.forward, flow, None))
        graphs.append(graph)
    if evaluated:
        timed(last, "forward_s", partial(stages[-1].evaluate, flow, batch.targets, None))
    given = end = timed(last, "loss_backward_s", partial(stages[-1].loss_backward, identity, flow, batch.targets, None))
    for index in reversed(range(last)):
        assert given.grad is not None
        gradient = Gradient(identity, given.grad, end.loss_sum, end.tokens, ())
        given = timed(index, "backward_s", partial(stages[index].backward, graphs[index], identity, gradient))
    return end


def _make_stages(manifest: RunManifest, device: str) -> list[TorchStage]:
    indices = range(manifest.stages)
    return [make_torch_stage(manifest, i, "bench", device=device, self_test=i == 0) for i in indices]


def _gradients(stages: list[TorchStage], batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the first microbatch, on the host."""
    end = _one_pass(stages, batch, MicrobatchId("bench", 0, 0), lambda index, name, operation: operation())
    named = (pair for stage in stages for pair in stage.parameters.items())
    grads = {name: parameter.grad.cpu().clone() for name, parameter in named if parameter.grad is not None}
    return end.loss_sum, grads


def _plain(manifest: RunManifest, device: torch.device, batch: Batch) -> Callable[[], float]:
    """Forward and backward of the unsplit model in plain torch; gives its seconds."""
    dtype = host_tensor.DTYPES[manifest.compute_dtype]
    whole = make_stage_module(model_family.make_config(manifest.model), 0, 1, seed=manifest.seed, dtype=dtype)
    whole.causal.to(device)
    inputs_BT, targets_BT = (host_tensor.to_torch(t).long().to(device) for t in (batch.inputs, batch.targets))
    mixed = device.type == "cuda" and dtype == torch.float32

    def once() -> float:
        began_at = time.perf_counter()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=mixed):
            logits_BTV = whole(inputs_BT, None)
        wide = logits_BTV if dtype == torch.float64 else logits_BTV.float()
        loss = torch.nn.functional.cross_entropy(wide.flatten(0, 1), targets_BT.flatten(), reduction="sum")
        torch.autograd.backward(loss)
        synchronise(device)
        return time.perf_counter() - began_at

    return once


def _measure(
    stages: list[TorchStage], batch: Batch, plain: Callable[[], float], repeats: int, device: torch.device
) -> dict[str, float]:
    """Medians of seconds, by phase; stages and plain model in turn, so that both see the same machine."""
    found: list[dict[str, float]] = []

    def timed(index: int, name: str, operation: Callable[[], T]) -> T:
        began_at = time.perf_counter()
        result = operation()
        found[-1][name] += time.perf_counter() - began_at
        return result

    for number in range(1, WARM_UP + repeats + 1):
        found.append({"forward_s": 0.0, "loss_backward_s": 0.0, "backward_s": 0.0})
        _one_pass(stages, batch, MicrobatchId("bench", 0, number), timed)
        found[-1]["plain_s"] = plain()
        began_at = time.perf_counter()
        for stage in stages:
            stage.inner_step(StepLabel(number, number - 1, 1e-4, {}))
        synchronise(device)
        found[-1]["step_s"] = time.perf_counter() - began_at
    return {name: statistics.median(one[name] for one in found[WARM_UP:]) for name in found[0]}


def _deviation(found: Tensor, expected: Tensor) -> float:
    scale = float(expected.abs().max())
    gap = float((found.double() - expected.double()).abs().max())
    return gap / scale if scale else gap


def _peak_bytes(device: torch.device) -> int:
    """Most memory held at once: of the device, or of this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
