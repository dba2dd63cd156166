"""Real stages and data in the simulator: equal to the reference to 1e-9, with a summary that matches the run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import TOLERANCE, float64_llama, loss_sum, replay, whole_model
from safetensors import safe_open
from safetensors.torch import load_file

from noloco_p2p.compute.factory import make_torch_stage
from noloco_p2p.compute.host_tensor import to_torch
from noloco_p2p.config import RunManifest
from noloco_p2p.io.data.samples import SampleStream
from noloco_p2p.lab.experiments.real_swarm import corpus, train
from noloco_p2p.lab.experiments.training import BYTE_VOCABULARY, TrainingPlan, small_manifest
from noloco_p2p.sim.links import Link
from noloco_p2p.sim.world import peer_id

STAGES, REPLICAS, STEPS, M = 2, 3, 6, 2
PEERS = {peer_id(stage, replica): stage for stage in range(STAGES) for replica in range(REPLICAS)}


def manifest(**changes: object) -> RunManifest:
    small: dict[str, Any] = {
        "steps": STEPS,
        "sequence_length": 8,
        "microbatch_size": 2,
        "microbatches_per_step": 2,
        "inner": {"peak_learning_rate": 1e-2},
        "outer": {"rule": "noloco", "inner_steps": M},
        "routing": "balanced",
        "wire": {"forward": "float64", "backward": "float64"},
        "compute_dtype": "float64",
        "evaluation": {"microbatches": 2},
    }
    return small_manifest(16, 2, **(small | changes))


def swarm(audit: Path | None = None, **changes: object) -> TrainingPlan:
    """Two stages of three replicas over links that cost nothing. `changes` apply to the manifest."""
    link, audit_dir = Link(latency_s=0.0), None if audit is None else str(audit)
    return TrainingPlan(manifest(**changes), (REPLICAS,) * STAGES, seed=5, link=link, audit_dir=audit_dir)


def run_manifest(training: TrainingPlan) -> RunManifest:
    """The manifest as the nodes have it."""
    fields = {"seed": training.seed, "stages": len(training.replicas), "start_replicas": min(training.replicas)}
    return RunManifest.model_validate(training.manifest.model_dump() | fields)


def partners(audit: Path) -> list[tuple[int, str, str]]:
    """(round, partner or "", the partner's round or "") for every round of every replica."""
    found = []
    for path in sorted(audit.glob("round-*.safetensors")):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        found.append((int(metadata["round"]), metadata["partner_id"], metadata["partner_round"]))
    return found


def std_on_disk(audit: Path, round: int, stage: int) -> float:
    """The spread of METHOD.md, "Measures", of the θ that the replicas wrote before the merge, element by element."""
    peers = [peer for peer, at in PEERS.items() if at == stage]
    found = [load_file(audit / f"round-{round:06}-{peer}.safetensors") for peer in peers]
    fast = [[tensor.flatten() for name, tensor in sorted(one.items()) if name.startswith("fast/")] for one in found]
    return float(torch.stack([torch.cat(tensors) for tensors in fast]).var(0, correction=0).mean().sqrt())


def loss_of_the_mean(audit: Path, run: RunManifest) -> float:
    """Held-out loss of the whole model with the mean weights after the last round."""
    weights: dict[str, torch.Tensor] = {}
    for peer in PEERS:
        for name, tensor in load_file(audit / f"round-{STEPS // M:06}-{peer}.safetensors").items():
            if name.startswith("slow_after/"):
                parameter = name.removeprefix("slow_after/")
                weights[parameter] = weights.get(parameter, 0.0) + tensor / REPLICAS
    model, total, tokens = whole_model(run.model_dump()), 0.0, 0
    for batch in SampleStream(corpus("bytes", BYTE_VOCABULARY), run, "").validation():
        named = {"inputs": to_torch(batch.inputs).long(), "targets": to_torch(batch.targets).long()}
        total, tokens = total + float(loss_sum(model, weights, named).detach()), tokens + named["targets"].numel()
    return total / tokens


def test_a_swarm_over_ideal_links_equals_the_reference(tmp_path: Path) -> None:
    training = swarm(tmp_path)
    with float64_llama():
        trained = train(training)
        expected = loss_of_the_mean(tmp_path, run_manifest(training))
    report = replay(tmp_path, run_manifest(training).model_dump(), PEERS)
    assert report.deviations.keys() >= {"slow", "fast", "momentum", "adam_mean", "adam_square", "loss"}
    assert max(report.deviations.values()) <= TOLERANCE
    assert trained.merged_loss == pytest.approx(expected, rel=1e-12)
    assert trained.rounds == {"alone": 6, "partner": 12}
    for spread in trained.spreads:
        assert spread.std == pytest.approx(std_on_disk(tmp_path, spread.round, spread.stage), rel=1e-12)
        assert spread.step == spread.round * M
    assert [(spread.round, spread.stage) for spread in trained.spreads] == [(r, s) for r in (1, 2, 3) for s in (0, 1)]


def test_the_summary_adds_up_and_is_reproducible() -> None:
    trained = train(swarm())
    assert trained.tokens == STEPS * REPLICAS * 2 * 2 * 8
    hidden = 16 * 8
    assert trained.bytes_per_token["activation"] == hidden + 4
    assert trained.bytes_per_token["gradient"] == hidden
    run = run_manifest(swarm())
    size = sum(
        spec.nbytes
        for stage in range(STAGES)
        for spec in make_torch_stage(run, stage, "x", self_test=False).state.snapshot
    )
    assert trained.bytes["snapshot"] == 6 * size
    assert set(trained.load.values()) == {STEPS * 2}
    assert trained.uneven == (1.0, 1.0)
    assert train(swarm()) == trained
    json.dumps(trained.figures("validation_loss", "bytes", "load"), allow_nan=False)


def test_one_replica_with_the_streams_of_three_reads_the_same_data(tmp_path: Path) -> None:
    apart, whole = tmp_path / "apart", tmp_path / "whole"
    three = replace(swarm(apart), replicas=(REPLICAS,), link=Link())
    train(three)
    more = three.manifest.model_copy(update={"microbatches_per_step": 2 * REPLICAS})
    one = train(replace(three, manifest=more, replicas=(1,), streams=tuple(range(REPLICAS)), audit_dir=str(whole)))

    def read(audit: Path, step: int) -> list[list[int]]:
        files = [load_file(path) for path in audit.glob(f"batches-*-{step:06}.safetensors")]
        return sorted(tensor.flatten().tolist() for file in files for tensor in file.values())

    for step in range(1, STEPS + 1):
        assert read(apart, step) == read(whole, step)
    assert one.merged_loss == one.validation_loss
    assert one.spreads == ()


def test_partners_are_lost_and_stale_at_the_configured_rates(tmp_path: Path) -> None:
    lost, stale = tmp_path / "lost", tmp_path / "stale"
    trained = train(replace(swarm(lost), lost_partner=0.5))
    alone = [partner for _, partner, _ in partners(lost) if not partner]
    assert 0 < trained.rounds["lost"] < 12
    assert len(alone) == trained.rounds["lost"] + trained.rounds["alone"]
    assert trained.rounds["lost"] + trained.rounds["partner"] == 12
    train(replace(swarm(stale), stale_rounds=2))
    late = [(round, int(theirs)) for round, partner, theirs in partners(stale) if partner]
    assert len(late) == 12
    assert all(theirs == max(0, round - 2) for round, theirs in late)


def test_a_slow_replica_serves_less_and_makes_its_stage_wait() -> None:
    slow = replace(swarm(routing="random"), slowness={"s1r0": 6.0}, link=Link())
    trained = train(slow)
    assert trained.load["s1r0"] < min(trained.load["s1r1"], trained.load["s1r2"])
    later = [trained.load[peer_id(1, replica)] for replica in range(REPLICAS)]
    assert trained.uneven[1] == pytest.approx(max(later) * REPLICAS / sum(later))
    assert trained.waiting[0] == 0.0
    assert trained.waiting[1] > 0.0


def test_without_outer_rounds_the_spread_is_measured_every_m_steps_and_grows() -> None:
    trained = train(swarm(outer={"rule": "noloco", "inner_steps": M, "pairing": "none"}))
    for stage in range(STAGES):
        found = [spread for spread in trained.spreads if spread.stage == stage]
        assert [(spread.round, spread.step) for spread in found] == [(1, 2), (2, 4), (3, 6)]
        assert 0 < found[0].std < found[-1].std
    assert trained.rounds == {}
    assert trained.bytes["snapshot"] == 0
