"""`noloco bench baseline`: each kind computes what it claims, and the comparison is fair.

The references are plain transformers in one process on concatenated microbatches, with the formulas written out.
"""

import json
import math
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from datetime import timedelta
from itertools import product
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from processes import SMALL, wait_until, working_below
from stages import make_batch, make_manifest, make_stages
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from typer.testing import CliRunner
from warm_start import SharedServer

from noloco_p2p.cli.bench import bench as benches
from noloco_p2p.compute.host_tensor import to_torch
from noloco_p2p.config import InnerSettings, NodeConfig, OuterSettings, RunManifest
from noloco_p2p.core.messages import Batch
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.lab.bench import baseline, baseline_replica, node_fleet
from noloco_p2p.lab.bench.baseline_replica import KINDS
from noloco_p2p.lab.processes import workers
from noloco_p2p.launch import settings

RANKS, STEPS, PEAK, CLIP = 2, 4, 1e-2, 0.5
MANIFEST = make_manifest(
    steps=STEPS,
    inner={"peak_learning_rate": PEAK, "clip_norm": CLIP, "weight_decay": 0.1},
    outer={"rule": "noloco", "inner_steps": 3},  # DiLoCo averages after steps 3 and 4, the last step
)
Weights = dict[str, "np.ndarray[Any, np.dtype[np.float64]]"]


def microbatches(step: int, rank: int) -> list[Batch]:
    """Two microbatches with different numbers of tokens, which differ between processes."""
    return [make_batch(100 * step + 10 * rank + k, ignored=1 + 2 * k + 3 * rank, padded=1) for k in range(2)]


HELD_OUT = microbatches(0, 0)


def train_all_kinds(store: Path, rank: int) -> dict[str, tuple[Weights, float]]:
    """The work of one process; returns the final weights and the held-out loss by kind."""
    distributed.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=RANKS)
    found, sharded = {}, {}
    for kind, make in KINDS.items():
        model = make(MANIFEST, torch.device("cpu"))
        for step in range(1, STEPS + 1):
            model.inner_step(step, microbatches(step, rank))
        named = {name.removeprefix("module."): one.detach() for name, one in model.model.named_parameters()}
        whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in named.items()}
        found[kind] = {name: one.numpy() for name, one in whole.items()}, model.held_out_loss(HELD_OUT)
        model.close()
        sharded[kind] = sum(isinstance(one, DTensor) for one in named.values()) / len(named)
    assert sharded == dict.fromkeys(KINDS, 0) | {"fsdp": 1}
    distributed.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def ranks() -> Iterator[ProcessPoolExecutor]:
    """A pool of both processes."""
    with workers(RANKS, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo") as pool:
        yield pool


@pytest.fixture(scope="module")
def trained(
    ranks: ProcessPoolExecutor, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, tuple[Weights, float]]]:
    """The results of both processes."""
    store = tmp_path_factory.mktemp("rendezvous") / "store"
    return [found.result() for found in [ranks.submit(train_all_kinds, store, rank) for rank in range(RANKS)]]


class Plain:
    """A plain transformers model with the initial weights of our stages, trained by AdamW."""

    def __init__(self) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model("llama", **MANIFEST.model.config)
        self.model = AutoModelForCausalLM.from_config(config).double()
        with torch.no_grad():
            for stage in make_stages(MANIFEST):
                for name, theta in stage.parameters.items():
                    self.theta[name].copy_(theta)
        self._adam = torch.optim.AdamW(
            self.model.parameters(), PEAK, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False
        )

    @property
    def theta(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    def loss(self, batches: list[Batch]) -> Tensor:
        """The mean loss over the targets of all microbatches, concatenated."""
        inputs, targets, masks = (
            torch.cat([to_torch(getattr(batch, name)) for batch in batches]) for name in ("inputs", "targets", "mask")
        )
        logits = self.model(input_ids=inputs.long(), attention_mask=masks.bool(), use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten().long(), ignore_index=-100)

    def step(self, step: int, batches: list[Batch]) -> None:
        """AdamW with the mean gradient, clipped over the whole model, at a cosine rate without warm-up."""
        self.model.zero_grad()
        self.loss(batches).backward()  # type: ignore[no-untyped-call]
        grads = [p.grad for p in self.model.parameters()]
        norm = math.sqrt(sum(float((grad**2).sum()) for grad in grads))
        assert norm > CLIP, "the gradient must be clipped"
        for grad in grads:
            grad *= CLIP / (norm + 1e-6)
        for group in self._adam.param_groups:
            group["lr"] = PEAK * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / STEPS)))
        self._adam.step()


def distance(found: Weights, expected: dict[str, Tensor]) -> float:
    """The largest difference between two corresponding weights."""
    assert found.keys() == expected.keys()
    return max(float(np.abs(found[name] - theta.detach().numpy()).max()) for name, theta in expected.items())


@pytest.mark.soak
def test_ddp_and_fsdp_equal_one_process_on_the_concatenated_batch(
    trained: list[dict[str, tuple[Weights, float]]],
) -> None:
    plain = Plain()
    for step in range(1, STEPS + 1):
        plain.step(step, [one for rank in range(RANKS) for one in microbatches(step, rank)])
    for kind, rank in product(("ddp", "fsdp"), range(RANKS)):
        weights, loss = trained[rank][kind]
        assert distance(weights, plain.theta) < 1e-9
        assert loss == pytest.approx(float(plain.loss(HELD_OUT).detach()), abs=1e-9)


def after_diloco() -> list[Plain]:
    """The final replicas of DiLoCo. Nesterov: v ← 0.9·v + g, φ ← φ − 0.7·(g + 0.9·v); g is the mean of φ − θ."""
    replicas = [Plain() for _ in range(RANKS)]
    slow = [{name: theta.detach().clone() for name, theta in replica.theta.items()} for replica in replicas]
    momentum = [{name: torch.zeros_like(theta) for name, theta in phi.items()} for phi in slow]
    for step in range(1, STEPS + 1):
        for rank, replica in enumerate(replicas):
            replica.step(step, microbatches(step, rank))
        if step not in (3, 4):
            continue
        with torch.no_grad():
            for name in slow[0]:
                g = sum(phi[name] - replica.theta[name] for phi, replica in zip(slow, replicas, strict=True)) / RANKS
                for rank, replica in enumerate(replicas):
                    momentum[rank][name] = 0.9 * momentum[rank][name] + g
                    slow[rank][name] -= 0.7 * (g + 0.9 * momentum[rank][name])
                    replica.theta[name].copy_(slow[rank][name])
    return replicas


@pytest.mark.soak
def test_diloco_follows_its_two_formulas(trained: list[dict[str, tuple[Weights, float]]]) -> None:
    replicas = after_diloco()
    expected = float(replicas[0].loss(HELD_OUT).detach())
    for rank, replica in enumerate(replicas):
        weights, loss = trained[rank]["diloco"]
        assert distance(weights, replica.theta) < 1e-9
        assert loss == pytest.approx(expected, abs=1e-9)
        weights, loss = trained[rank]["opendiloco"]
        assert distance(weights, replica.theta) < 1e-4, "pseudo-gradients travel in float16"
        assert loss == pytest.approx(expected, abs=1e-4)
    assert distance(trained[0]["ddp"][0], replicas[0].theta) > 1e-2, "the kinds differ by more than the tolerances"


def descendants(pid: int) -> list[int]:
    """The ids of all children of a process, and of their descendants."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def hold_hivemind(store: Path) -> tuple[int, list[int]]:
    """The id of this process, which keeps the model open, and those of its descendants."""
    distributed.init_process_group("gloo", init_method=store.as_uri(), rank=0, world_size=1)
    kept.append(KINDS["opendiloco"](MANIFEST, torch.device("cpu")))
    return os.getpid(), descendants(os.getpid())


kept: list[Any] = []


def average_alone(store: Path) -> str:
    """The error message of a process whose group never gets its second member."""
    distributed.init_process_group("gloo", init_method=store.as_uri(), rank=0, world_size=1)
    with (
        mock.patch.object(baseline_replica, "WAIT", timedelta(seconds=3)),
        mock.patch.object(distributed, "get_world_size", return_value=2),
    ):
        model: Any = KINDS["opendiloco"](MANIFEST, torch.device("cpu"))
        try:
            model._average(torch.arange(float(model._slow.numel())))
        except LocalError as error:
            return str(error)
        finally:
            model.close()
            distributed.destroy_process_group()
    return ""


@pytest.mark.soak
def test_a_process_alone_reports_that_the_others_are_missing(ranks: ProcessPoolExecutor, tmp_path: Path) -> None:
    message = ranks.submit(average_alone, tmp_path / "store").result()
    assert message.startswith("hivemind did not average over all processes within 0:00:03: ")


@pytest.mark.soak
def test_processes_started_by_hivemind_end_with_a_killed_worker(tmp_path: Path) -> None:
    started = list[int]()

    def lose_it() -> None:
        with workers(1, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo") as pool:
            worker, found = pool.submit(hold_hivemind, tmp_path / "store").result()
            started.extend(found)
            os.kill(worker, signal.SIGKILL)
            pool.submit(os.getpid).result()

    with pytest.raises(LocalError, match="a worker process has died"):
        lose_it()
    assert len(started) >= 3, "at least a DHT, its libp2p daemon and an averager"
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started), "the end of hivemind's processes")


# --- the bench --------------------------------------------------------------------------------------------------------

CPU = NodeConfig(device="cpu")
ADAMW = InnerSettings(optimizer="adamw")
MANIFEST_OF_ONE = RunManifest(stages=1, inner=ADAMW)


@pytest.mark.parametrize(("stages", "replicas"), [(1, 3), (2, 2), (4, 1)])
def test_every_microbatch_of_the_swarm_is_assigned_to_one_process(stages: int, replicas: int) -> None:
    plan = baseline.make_plan(
        "ddp", stages * replicas, RunManifest(stages=stages, microbatches_per_step=4, inner=ADAMW), CPU
    )
    shares = [plan.share(rank) for rank in range(plan.processes)]
    dealt = [(stream, index) for stream, mine in shares for index in mine]
    assert sorted(dealt) == list(product(range(replicas), range(4)))


@pytest.mark.parametrize(
    ("processes", "fields", "message"),
    [(3, {}, "--replicas is 3"), (4, {"microbatches_per_step": 3}, "microbatches_per_step is 3")],
)
def test_microbatches_that_cannot_be_distributed_evenly_are_refused(
    processes: int, fields: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"{message}: it must be a multiple of stages, which is 2"):
        baseline.make_plan("ddp", processes, RunManifest(inner=ADAMW, **fields), CPU)  # type: ignore[arg-type]


def test_the_command_needs_no_settings_and_applies_given_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = list[baseline.BaselinePlan]()

    def run(plan: baseline.BaselinePlan, line: object) -> dict[str, Any]:
        plans.append(plan)
        return {}

    monkeypatch.setattr(baseline, "run", run)
    monkeypatch.setattr(
        baseline, "pick_device", lambda name: torch.device("cpu")
    )  # otherwise each process needs its own GPU
    for sets in ([], ["--set", "outer.rule=averaged", "--set", "outer.beta=0.5"]):
        found = CliRunner().invoke(benches, ["baseline", "--kind", "diloco", *sets, "--json"], catch_exceptions=False)
        assert found.exit_code == 0
    outers = OuterSettings(rule="noloco"), OuterSettings(rule="averaged", beta=0.5)
    assert [plan.manifest.outer for plan in plans] == list(outers)
    assert [plan.manifest.inner for plan in plans] == [ADAMW] * 2


def test_diloco_at_every_step_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^outer\.inner_steps is 1, but DiLoCo needs several inner steps"):
        baseline.make_plan("diloco", 4, RunManifest(inner=ADAMW), CPU)


def test_muon_is_refused_where_matrices_are_sharded() -> None:
    line = r"^fsdp shards the matrices that Muon needs whole: --set inner.optimizer=adamw$"
    with pytest.raises(ConfigError, match=line):
        baseline.make_plan("fsdp", 4, RunManifest(), CPU)
    assert baseline.make_plan("ddp", 4, RunManifest(), CPU).manifest.inner.optimizer == "muon"


def test_too_few_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "pick_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    assert baseline.make_plan("ddp", 2, RunManifest(inner=ADAMW), NodeConfig()).gpus == ("5", "3")
    with pytest.raises(LocalError, match="4 processes need a GPU each, torch sees 2"):
        baseline.make_plan("ddp", 4, RunManifest(inner=ADAMW), NodeConfig())


def test_the_nodes_get_every_setting() -> None:
    local = NodeConfig(device="cpu", data_files=("a b", "c"), limits={"hours": ["22:00-07:00"]})  # type: ignore[arg-type]
    plan = baseline.make_plan("ddp", 4, make_manifest("gpt2", 2, steps=7), local)
    assert (plan.manifest.start_replicas, plan.manifest.evaluation.every_steps) == (2, None)
    given = settings.read(None, {}, plan.settings())
    assert (given.manifest(), given.node()) == (plan.manifest, local)


def test_the_first_failure_ends_the_bench() -> None:
    """The other process would wait for the failed one for ten minutes."""
    waits, fails = Future[baseline.RankFigures](), Future[baseline.RankFigures]()
    fails.set_exception(LocalError("no such file"))
    with pytest.raises(LocalError, match="no such file"):
        baseline.results([waits, fails], lambda: None)


def test_the_first_process_shows_how_many_steps_it_has_taken(tmp_path: Path) -> None:
    plan = baseline.make_plan("ddp", 1, RunManifest(stages=1, steps=3, inner=ADAMW), CPU)
    baseline.train(plan, 0, ["P"], tmp_path / "store")
    assert (tmp_path / "store.steps").stat().st_size == 3


def test_errors_of_torch_are_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process of which all peers are lost."""

    def lost(*_: object) -> None:
        raise RuntimeError("reset\nby peer")

    plan = baseline.make_plan("ddp", 1, MANIFEST_OF_ONE, CPU)
    monkeypatch.setattr(baseline, "_trained", lost)
    with pytest.raises(LocalError, match=r"^process 0 of the baseline has failed: reset by peer$"):
        baseline.train(plan, 0, ["P"], tmp_path / "store")
    assert not distributed.is_initialized()


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_swarm_of_one_replica_without_rounds_and_clip_is_ddp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """With the same weights, streams, schedule and held-out data nothing is left in which they could differ."""
    server = SharedServer()
    monkeypatch.setattr(node_fleet, "ForkServerProcess", lambda: server)
    resource_tracker.ensure_running()  # multiprocessing starts it once, and it runs as long as pytest does
    monkeypatch.chdir(tmp_path)
    sets = [*SMALL, *(w for one in ("outer.pairing=none", "inner.clip_norm=1e9", "device=cpu") for w in ("--set", one))]
    words = ["baseline", "--kind", "ddp", "--replicas", "2", "--steps", "5", *sets, "--json"]
    words += ["--set", f"inner.optimizer={optimizer}"]
    found = json.loads(CliRunner().invoke(benches, words, catch_exceptions=False).stdout)
    swarm, ddp = found["swarm"], found["baseline"]
    assert swarm["tokens"] == ddp["tokens"] == 5 * 2 * 2 * 32
    assert abs(found["loss_above"]) < 1e-5
    assert found["ratio"] == pytest.approx(swarm["tokens_per_s"] / ddp["tokens_per_s"])
    assert working_below(tmp_path) == []
