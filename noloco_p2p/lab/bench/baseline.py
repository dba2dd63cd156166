"""What users would otherwise run on the same machine, compared with a swarm of as many processes.

First the swarm runs, then the baseline: the whole model in each process under plain torch.distributed
(baseline_replica.py), with gloo on CPUs, or NCCL and one GPU per process. Both start with the same weights and take the
same number of inner steps on the same microbatches. The baseline reads the streams that the swarm's stage-0 replicas
have read, and the processes that stand in for one pipeline divide its microbatches among themselves.
"""

import asyncio
import gc
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

from noloco_p2p.compute import model_family
from noloco_p2p.compute.hardware import pick_device
from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.host import cores
from noloco_p2p.io.data.threaded_batches import ThreadedBatches, make_batches
from noloco_p2p.lab.bench.baseline_replica import KINDS, WAIT
from noloco_p2p.lab.bench.node_fleet import Fleet
from noloco_p2p.lab.processes import workers
from noloco_p2p.launch.progress_line import ProgressLine
from noloco_p2p.launch.swarm_summary import summarise
from noloco_p2p.launch.yaml_entries import Key

TARGET = 1.0
STEPS = ".steps"
"""Ending of a file to which the first process of the baseline adds a byte at each step."""
DEFAULTS: Mapping[Key, object] = {("inner", "optimizer"): "adamw", ("outer", "rule"): "noloco"}
"""Default settings: the optimizer that every kind has, and outer rounds as far apart as DiLoCo's outer steps."""


@dataclass(frozen=True, slots=True)
class BaselinePlan:
    """What to measure."""

    kind: str
    """One of `KINDS`."""
    manifest: RunManifest
    local: NodeConfig
    gpus: tuple[str, ...] = ()
    """At least one per process, as CUDA_VISIBLE_DEVICES names them; empty: train on the CPU."""

    @property
    def processes(self) -> int:
        """Number of processes of the swarm, and of the baseline."""
        return self.manifest.stages * self.manifest.start_replicas

    def share(self, rank: int) -> tuple[int, range]:
        """Which stage-0 replica's stream a process reads, and which microbatches of each inner step it trains on."""
        each = self.manifest.microbatches_per_step // self.manifest.stages
        replica, part = divmod(rank, self.manifest.stages)
        return replica, range(part * each, (part + 1) * each)

    def settings(self) -> list[str]:
        """Settings for the nodes, `key=value`."""
        values = self.manifest.model_dump(mode="json") | self.local.model_dump(mode="json")
        return [f"{key}={json.dumps(value)}" for key, value in values.items()]


class RankFigures(NamedTuple):
    """The results of one process."""

    tokens: int
    seconds: float
    validation_loss: float


def make_plan(kind: str, processes: int, manifest: RunManifest, local: NodeConfig) -> BaselinePlan:
    """The plan of a run that is evaluated only at its end.

    Raises ConfigError if the run cannot be divided, shards what Muon needs whole, or is DiLoCo at every step, and
    LocalError if there are too few GPUs.
    """
    if kind == "fsdp" and manifest.inner.optimizer == "muon":
        raise ConfigError("fsdp shards the matrices that Muon needs whole: --set inner.optimizer=adamw")
    if "diloco" in kind and manifest.outer.inner_steps == 1:
        raise ConfigError("outer.inner_steps is 1, but DiLoCo needs several inner steps between its outer steps")
    for name, number in (("--replicas", processes), ("microbatches_per_step", manifest.microbatches_per_step)):
        if number % manifest.stages:
            raise ConfigError(f"{name} is {number}: it must be a multiple of stages, which is {manifest.stages}")
    gpus = visible_gpus() if pick_device(local.device).type == "cuda" else None
    if gpus is not None and len(gpus) < processes:
        raise LocalError(f"{processes} processes need a GPU each, torch sees {len(gpus)}: --set device=cpu, or fewer")
    end_only = manifest.evaluation.model_copy(update={"every_steps": None})
    changes = {"start_replicas": processes // manifest.stages, "evaluation": end_only}
    return BaselinePlan(kind, manifest.model_copy(update=changes), local, gpus or ())


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return tuple(named.split(",") if named else map(str, range(torch.cuda.device_count())))


def run(plan: BaselinePlan, line: ProgressLine) -> dict[str, Any]:
    """Measure, and return the figures. Raises LocalError if the swarm or a process of the baseline fails."""
    swarm, streams = run_swarm(plan, line)
    baseline = run_baseline(plan, streams, line)
    losses = swarm["validation_loss"], baseline["validation_loss"]
    return {
        "bench": "baseline",
        "ratio": swarm["tokens_per_s"] / baseline["tokens_per_s"],
        "target": TARGET,
        "kind": plan.kind,
        "processes": plan.processes,
        "stages": plan.manifest.stages,
        "steps": plan.manifest.steps,
        "loss_above": None if None in losses else losses[0] - losses[1],
        "swarm": swarm,
        "baseline": baseline,
        "definitions": DEFINITIONS,
    }


DEFINITIONS = {
    "ratio": "tokens/s of the swarm over those of the baseline",
    "tokens_per_s": "of all processes, from the first inner step's start to the last one's end",
    "validation_loss": "nats per token on the same held-out microbatches, after the last inner step; of a swarm the "
    "mean over its stage-0 replicas, each on fixed routes",
    "loss_above": "validation_loss of the swarm minus that of the baseline. The swarm clips gradients over each stage, "
    "the baseline over the whole model",
    "kind": "ddp: DistributedDataParallel; fsdp: fully_shard (FSDP2); diloco: an outer step every outer.inner_steps; "
    "opendiloco: the same by hivemind's averager in float16",
}


# --- the swarm --------------------------------------------------------------------------------------------------------


def run_swarm(plan: BaselinePlan, line: ProgressLine) -> tuple[dict[str, Any], list[PeerId]]:
    """Run the swarm to its end. Returns its figures and its stage-0 peers. Raises LocalError if it fails earlier."""
    shape = plan.manifest.stages, plan.manifest.start_replicas

    def ended() -> bool:
        if reading := nodes[0].read_metrics():
            line.tell("training the swarm", reading.total("inner_steps_total") / plan.manifest.steps / 2)
        return not any(node.running for node in nodes)

    with (
        tempfile.TemporaryDirectory(prefix="noloco-bench-") as scratch,
        Fleet(Path(scratch) / "run", shape, plan.settings()) as fleet,
    ):
        nodes = list(fleet.nodes.values())
        for node, gpu in zip(nodes, plan.gpus, strict=False):
            node.environment = {"CUDA_VISIBLE_DEVICES": gpu}
        fleet.start()
        fleet.wait(ended, "the end of the swarm", math.inf, every_s=1.0)
        found = summarise(nodes, plan.manifest, None, 0.0)
        if not found["completed"]:
            raise LocalError("a node of the swarm left before the run's end")
        figures = {name: found[name] for name in ("tokens_per_s", "validation_loss", "tokens")}
        return figures, [node.peer for node in fleet.of_stage(0) if node.peer is not None]


# --- the baseline -----------------------------------------------------------------------------------------------------


def run_baseline(plan: BaselinePlan, streams: list[PeerId], line: ProgressLine) -> dict[str, Any]:
    """Figures of the baseline on these streams. If a process fails, ends the others and raises LocalError."""
    threads = str(max(1, cores() // plan.processes))
    with (
        tempfile.TemporaryDirectory(prefix="noloco-bench-") as scratch,
        workers(plan.processes, OMP_NUM_THREADS=threads, GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo") as pool,
    ):
        store = Path(scratch) / "store"
        (steps := store.with_suffix(STEPS)).touch()

        def waiting() -> None:
            line.tell("training the baseline", 0.5 + steps.stat().st_size / plan.manifest.steps / 2)

        ranks = results([pool.submit(train, plan, rank, streams, store) for rank in range(plan.processes)], waiting)
    # After the last step all processes have the same weights (`opendiloco`: up to rounding to float16).
    tokens, loss = sum(rank.tokens for rank in ranks), ranks[0].validation_loss
    return {
        "tokens_per_s": tokens / max(rank.seconds for rank in ranks),
        "validation_loss": loss if math.isfinite(loss) else None,
        "tokens": tokens,
    }


def results(ranks: Sequence[Future[RankFigures]], waiting: Callable[[], object]) -> list[RankFigures]:
    """The results of all processes, in order; `waiting` is called every second.

    Raises the first failure at once, even if other processes still run.
    """
    pending = set(ranks)
    while pending:
        done, pending = wait(pending, 1.0, FIRST_COMPLETED)
        for rank in done:
            rank.result()
        waiting()
    return [rank.result() for rank in ranks]


def train(plan: BaselinePlan, rank: int, streams: Sequence[PeerId], store: Path) -> RankFigures:
    """One process of the baseline, from start to end. The processes find each other through the file `store`.

    Raises LocalError if torch raises an error, for example because another process died.
    """
    replica, _ = plan.share(rank)
    batches = make_batches(plan.manifest, plan.local, streams[replica])
    gpu = torch.device("cuda", rank) if plan.gpus else None
    backend = "nccl" if gpu else "gloo"
    distributed.init_process_group(backend, store.as_uri(), WAIT, plan.processes, rank, device_id=gpu)
    try:
        with store.with_suffix(STEPS).open("ab", buffering=0) as steps:
            return _trained(plan, rank, batches, gpu or torch.device("cpu"), steps)
    except RuntimeError as error:
        raise LocalError(f"process {rank} of the baseline has failed: {model_family.one_line(error)}") from error
    finally:
        # A model that outlives its process group ends the group's threads in a destructor that holds the GIL,
        # which they may wait for (seen with torch 2.13).
        gc.collect()
        distributed.destroy_process_group()
        batches.close()


def _trained(
    plan: BaselinePlan, rank: int, batches: ThreadedBatches, device: torch.device, steps: FileIO
) -> RankFigures:
    model, (_, mine) = KINDS[plan.kind](plan.manifest, device), plan.share(rank)
    tokens = 0
    with asyncio.Runner() as runner, closing(model):
        distributed.barrier()
        began = time.perf_counter()
        for step in range(1, plan.manifest.steps + 1):
            read = [runner.run(batches.next()) for _ in range(plan.manifest.microbatches_per_step)]
            tokens += model.inner_step(step, [read[index] for index in mine])
            steps.write(b"." if rank == 0 else b"")
        distributed.barrier()
        seconds = time.perf_counter() - began
    return RankFigures(tokens, seconds, model.held_out_loss(list(batches.validation())))
