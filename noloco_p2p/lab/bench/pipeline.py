"""Tokens per second of a 2 × 2 swarm, compared with one process that trains the same model alone.

The swarm's nodes are real processes with default settings except for SETTINGS. Their metrics count its tokens between
two moments well inside training, including outer rounds but neither start-up nor evaluation. The single process has one
thread, the unsplit model of transformers and fused AdamW, as in `noloco bench baseline`.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from noloco_p2p.config import InnerSettings, NodeConfig, RunManifest
from noloco_p2p.errors import LocalError, Unreachable
from noloco_p2p.host import cores
from noloco_p2p.lab.bench.node_fleet import Fleet
from noloco_p2p.lab.processes import workers
from noloco_p2p.launch import cpu_seconds as cpu
from noloco_p2p.launch import node_probe

TARGET = 0.80
SHAPE = (2, 2)
MICROBATCHES = 4
"""Default number of microbatches per stage-0 replica and inner step."""
STEADY_STEPS = 30
"""Inner steps that every stage-0 replica takes before the measurement starts."""
START_S = 180.0
SETTINGS = ("steps=1000000", "evaluation.every_steps=null", "inner.optimizer=adamw", "outer.rule=noloco")
"""An endless run with the single process's optimizer, and few outer rounds."""
BASELINE_S = 10.0
WARM_UP_S = 2.0
BATCHES = 64
"""Number of microbatches that the baseline reads in advance and uses again and again."""
METRICS_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class NodeSample:
    """One node at one moment."""

    endpoints: node_probe.NodeEndpoints
    metrics: node_probe.MetricsReading
    cpu: cpu.CpuSeconds
    machine: float | None
    """CPU seconds of the whole machine."""


Samples = Mapping[str, NodeSample]
"""All nodes by name."""


def run(microbatches: int, seconds: float) -> dict[str, Any]:
    """Measure, and return the figures. Raises LocalError if the swarm or the baseline fails."""
    before = baseline(microbatches, BASELINE_S)
    with steady_swarm(microbatches) as fleet:
        begin = sample_nodes(fleet)
        time.sleep(seconds)
        swarm = figures(begin, sample_nodes(fleet))
    after = baseline(microbatches, BASELINE_S)
    alone = (before + after) / 2
    return {
        "bench": "pipeline",
        "ratio": swarm["tokens_per_s"] / (2 * alone),
        "target": TARGET,
        "microbatches": microbatches,
        "baseline_tokens_per_s": {"before": before, "after": after, "mean": alone},
        "swarm": swarm,
        "definitions": DEFINITIONS,
    }


DEFINITIONS = {
    "ratio": "tokens/s of the swarm over 2 × tokens/s of one process with one thread",
    "core_shares": "of all core-seconds of the measurement: compute = CPU of the device threads, loop = CPU of the "
    "event loops, wire = CPU of gRPC's and all other threads and of the libp2p daemons, others = all other processes "
    "(more than 0.05: the measurement was disturbed), idle = the rest",
    "device_busy": "wall seconds in which a device worked, waits for a core included, over the measurement; mean",
    "idle_by_cause": "wall seconds in which a node's device waited, by cause, over the measurement; mean",
}


@contextmanager
def steady_swarm(microbatches: int) -> Iterator[Fleet]:
    """A swarm that trains in its steady state, without evaluations. Raises LocalError if it does not get there."""
    settings = (f"microbatches_per_step={microbatches}", *SETTINGS)

    def steady() -> bool:
        readings = [node.read_metrics() for node in fleet.of_stage(0)]
        return all(one is not None and one.total("inner_steps_total") >= STEADY_STEPS for one in readings)

    with (
        tempfile.TemporaryDirectory(prefix="noloco-bench-") as scratch,
        Fleet(Path(scratch) / "run", SHAPE, settings) as fleet,
    ):
        fleet.start()
        fleet.wait(steady, f"{STEADY_STEPS} inner steps of the swarm", START_S, every_s=0.5)
        yield fleet


def sample_nodes(fleet: Fleet) -> dict[str, NodeSample]:
    """A sample of all nodes of a swarm that trains, by name. Raises LocalError if one does not answer."""
    samples = {}
    for name, node in fleet.nodes.items():
        assert node.endpoints is not None, "a swarm that trains can be reached"
        try:
            metrics = node_probe.scrape(node.endpoints.metrics, METRICS_TIMEOUT_S)
        except Unreachable as error:
            raise LocalError(f"node {name}: {error}") from error
        samples[name] = NodeSample(node.endpoints, metrics, cpu.read(node.endpoints.pid), cpu.machine())
    return samples


def growth(begin: Samples, end: Samples, names: Iterable[str], metric: str, **labels: str) -> float:
    """By how much a counter of these nodes grew between two samples, summed over the nodes."""
    return sum(end[one].metrics.total(metric, **labels) - begin[one].metrics.total(metric, **labels) for one in names)


def figures(begin: Samples, end: Samples) -> dict[str, Any]:
    """What the swarm did between two samples; see DEFINITIONS. Tokens and steps are those of stage 0."""
    windows = {name: end[name].metrics.at - begin[name].metrics.at for name in begin}

    def per_s(names: Collection[str], metric: str, **labels: str) -> float:
        """A counter's increase per second, the mean over these nodes."""
        return fmean(growth(begin, end, [name], metric, **labels) / windows[name] for name in names)

    first = [name for name in begin if name.startswith("0-")]
    causes = dict.fromkeys(one for node in end.values() for one in node.metrics.by("cause", "idle_seconds_total"))
    return {
        "tokens_per_s": len(first) * per_s(first, "tokens_total"),
        "seconds": min(windows.values()),
        "inner_steps_per_s": per_s(first, "inner_steps_total"),
        "outer_rounds_per_s": per_s(first, "outer_rounds_total"),
        "core_shares": _core_shares(begin, end, max(windows.values())),
        "device_busy": per_s(begin, "device_seconds_total"),
        "idle_by_cause": {cause: per_s(begin, "idle_seconds_total", cause=cause) for cause in causes},
    }


def _core_shares(begin: Samples, end: Samples, seconds: float) -> dict[str, float]:
    """The nodes' CPU seconds as shares of all core-seconds."""
    whole = cores() * seconds
    shares = {"compute": 0.0, "wire": 0.0, "loop": 0.0}
    for name, old in begin.items():
        new = end[name]
        for kind, spent in cpu.split(new.endpoints.pid, old.cpu, new.cpu).items():
            shares[kind] += spent / whole
    began, ended = (next(iter(samples.values())).machine for samples in (begin, end))
    if began is not None and ended is not None:
        shares["others"] = max(0.0, (ended - began) / whole - sum(shares.values()))
    return {**shares, "idle": 1.0 - sum(shares.values())}


# --- the single process -----------------------------------------------------------------------------------------------


def baseline(microbatches: int, seconds: float) -> float:
    """Tokens/s, measured in a separate process with one thread. Raises LocalError if that process dies."""
    manifest = RunManifest(microbatches_per_step=microbatches, inner=InnerSettings(optimizer="adamw"))
    with workers(1, OMP_NUM_THREADS="1") as pool:
        return pool.submit(train_alone, manifest, seconds).result()


def train_alone(manifest: RunManifest, seconds: float) -> float:
    """Train for `WARM_UP_S`, then for `seconds`. Returns the tokens per second of the latter."""
    import torch

    from noloco_p2p.io.data.threaded_batches import make_batches
    from noloco_p2p.lab.bench.baseline_replica import BaselineReplica

    torch.set_num_threads(1)
    # The data stream depends on the seed and the peer; any name yields one like a node's.
    with closing(make_batches(manifest, NodeConfig(), "baseline")) as batches, asyncio.Runner() as runner:
        data = itertools.cycle([runner.run(batches.next()) for _ in range(BATCHES)])
    model, steps = BaselineReplica(manifest, torch.device("cpu")), itertools.count(1)
    for limit_s in (WARM_UP_S, seconds):
        began, tokens, passed = time.perf_counter(), 0, 0.0
        while passed < limit_s:
            tokens += model.inner_step(next(steps), [*itertools.islice(data, manifest.microbatches_per_step)])
            passed = time.perf_counter() - began
    return tokens / passed
