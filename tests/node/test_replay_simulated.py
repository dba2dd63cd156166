"""Real nodes with real torch stages compute the algorithm of the reference, to 1e-9."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import reference
import torch
from audit_writer import MODELS
from outer_reference import decoded
from reference import TOLERANCE, Report, float64_llama, replay, require_variety
from soak import soak
from torch import Tensor

from noloco_p2p.compute import lattice_pull, muon, snapshot_codec
from noloco_p2p.compute.accumulator import AccumulatedMicrobatch, GradientAccumulator
from noloco_p2p.compute.activation_codec import ActivationCodec
from noloco_p2p.compute.factory import make_torch_stage
from noloco_p2p.compute.lattice_codec import LatticeCodec, PairDither
from noloco_p2p.compute.lattice_pull import LatticePull
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.config import (
    AuditSettings,
    EvaluationSettings,
    InnerSettings,
    ModelSettings,
    OuterSettings,
    RunManifest,
    WireSettings,
)
from noloco_p2p.core import guard, outer_rules, outer_update
from noloco_p2p.core.block_format import WireCodec
from noloco_p2p.core.lattice_format import OuterCodec
from noloco_p2p.core.messages import Advert, Gradient, MicrobatchId, PeerId
from noloco_p2p.core.outer_rules import Gossip, RuleName
from noloco_p2p.core.snapshots import FrozenRound, Snapshot, SnapshotRequest
from noloco_p2p.core.stage_values import Contribution
from noloco_p2p.ports import Stage
from noloco_p2p.sim.batches import SimBatches
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.transport import SimTransport
from noloco_p2p.sim.world import SimPlan, SimSwarm, StageFactory, peer_id

STAGES, REPLICAS = 2, 3
EXACT = WireSettings(forward="float64", backward="float64")
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
PEERS = {peer_id(stage, replica): stage for stage in range(STAGES) for replica in range(REPLICAS)}


ADAMW = {"optimizer": "adamw", "peak_learning_rate": 1e-2}


def lockstep(
    family: str, wire: WireSettings = EXACT, *, inner: Mapping[str, Any] = MappingProxyType({}), **outer: Any
) -> RunManifest:
    """Three outer rounds of three steps, all members present before the first step, gradients clipped now and then."""
    return RunManifest(
        seed=5,
        start_replicas=REPLICAS,
        stages=STAGES,
        model=ModelSettings(family=family, config=MODELS[family] | (NO_DROPOUT if family == "gpt2" else {})),
        sequence_length=8,
        microbatch_size=2,
        microbatches_per_step=3,
        steps=9,
        inner=InnerSettings.model_validate({**ADAMW, "clip_norm": 0.76 if family == "gpt2" else 0.7, **inner}),
        outer=OuterSettings.model_validate({"rule": "noloco", "inner_steps": 3, "partner_wait_s": 60.0} | outer),
        routing="balanced",
        wire=wire,
        compute_dtype="float64",
        evaluation=EvaluationSettings(every_steps=None, microbatches=1),
    )


def audited(audit: Path) -> StageFactory:
    def make(manifest: RunManifest, index: int, peer: PeerId) -> Stage:
        return make_torch_stage(manifest, index, peer, audit=AuditSettings(dir=str(audit)), self_test=False)

    return make


def simulate(manifest: RunManifest, audit: Path, factory: StageFactory | None = None) -> Outcome:
    with float64_llama():
        plan = SimPlan(
            manifest,
            (REPLICAS,) * STAGES,
            seed=2,
            batches_factory=partial(SimBatches, unequal=True),
            stage_factory=factory or audited(audit),
        )
        return SimSwarm(plan).run()


def replayed(manifest: RunManifest, audit: Path) -> Report:
    return replay(audit, manifest.model_dump(), PEERS)


def hold_up(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Make each replica's pulls take longer, by `seconds` times its number."""
    right = SimTransport.fetch_snapshot

    async def late(transport: SimTransport, peer: Advert, *asked: Any) -> Snapshot:
        await asyncio.sleep(seconds * int(peer.peer_id[-1]))
        return await right(transport, peer, *asked)

    patch.setattr(SimTransport, "fetch_snapshot", late)


@pytest.mark.parametrize(
    ("family", "overlap"), [("gpt2", False), ("llama", True), *soak([("gpt2", True), ("llama", False)])]
)
def test_a_simulated_run_computes_the_algorithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, overlap: bool
) -> None:
    manifest = lockstep(family, overlap=overlap)
    hold_up(monkeypatch, 0.15)
    outcome = simulate(manifest, tmp_path)
    assert all(one.inner_steps == manifest.steps for one in outcome.processes)
    report = replayed(manifest, tmp_path)
    require_variety(report)
    assert report.delays == ({0, 1, 2, 3} if overlap else {0})
    assert report.deviations.keys() >= {"slow", "fast", "momentum_after", "adam_mean", "adam_square", "loss"}
    assert max(report.deviations.values()) <= TOLERANCE


def test_what_was_clipped_is_on_record_and_computes_the_algorithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is clipped, even usual values: vectors to about 0.01 of the own one, gradients to half the median."""
    for name, value in {"UNKNOWN": 0.01, "REFUSED": 1e9, "LARGEST_NORM": 0.5, "NORMS_KEPT": 8}.items():
        monkeypatch.setattr(guard, name, value)
    outcome = simulate(lockstep("llama", rule="averaged"), tmp_path)
    counted = Counter(event.get("result") for event in outcome.trace.of("distrusted"))
    assert counted.keys() == {"clipped", "gradient"}
    report = replayed(lockstep("llama", rule="averaged"), tmp_path)
    assert report.deviations.keys() >= {"slow", "partner_vector", "momentum_after", "adam_mean", "loss"}
    assert max(report.deviations.values()) <= TOLERANCE
    steps = tmp_path / f"steps-{peer_id(0, 0)}.jsonl"
    steps.write_text(steps.read_text().replace('"clip": 0.', '"clip": 0.9'))
    with pytest.raises(AssertionError, match="deviates by"):
        replayed(lockstep("llama", rule="averaged"), tmp_path)


@pytest.mark.parametrize(("rule", "codec"), [("averaged", "int4"), *soak([("gossip", "int4"), ("noloco", "int8")])])
def test_single_values_that_were_limited_are_on_record_and_compute_the_algorithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: RuleName, codec: OuterCodec
) -> None:
    """From the second round on, even usual values are further away than the limits; groups are clipped as well."""
    for name, value in {"FEWEST": 1, "LIMIT": 0.3, "RADIUS": 0.9}.items():
        monkeypatch.setattr(guard, name, value)
    manifest = lockstep("llama", rule=rule, codec=codec)
    outcome = simulate(manifest, tmp_path)
    assert {event.get("result") for event in outcome.trace.of("distrusted")} >= {"clipped"}
    report = replayed(manifest, tmp_path)
    assert max(report.deviations.values()) <= TOLERANCE

    def narrower(mine: Any, theirs: Any, used: Any, outer: Any, factors: Any, limits: Mapping[str, float]) -> Any:
        return decoded(mine, theirs, used, outer, factors, {name: limit / 2 for name, limit in limits.items()})

    monkeypatch.setattr(reference, "decoded", narrower)
    with pytest.raises(AssertionError, match="has a difference above its limit"):
        replayed(manifest, tmp_path)


MUON = {"optimizer": "muon", "weight_decay": 0.1}


@pytest.mark.parametrize("family", ["llama", *soak(["gpt2"])])
def test_a_run_with_muon_computes_the_algorithm(tmp_path: Path, family: str) -> None:
    simulate(lockstep(family, inner=MUON), tmp_path)
    report = replayed(lockstep(family, inner=MUON), tmp_path)
    require_variety(report)
    assert report.deviations.keys() >= {"slow", "fast", "momentum_after", "adam_mean", "adam_square", "loss"}
    assert max(report.deviations.values()) <= TOLERANCE
    for other in ({"weight_decay": 0.0}, {"adamw_factor": 1.0}):
        with pytest.raises(AssertionError, match="deviates by"):
            replayed(lockstep(family, inner=MUON | other), tmp_path)


@pytest.mark.parametrize(
    ("name", "other"),
    [("COEFFICIENTS", (3.4445, -4.7750, 2.03)), *soak([("MOMENTUM", 0.9), ("RATIO", 0.21), ("STEPS", 4)])],
)
def test_another_muon_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, other: object) -> None:
    monkeypatch.setattr(muon, name, other)
    simulate(lockstep("llama", inner=MUON), tmp_path)
    with pytest.raises(AssertionError, match=r"inner step [123], .* loss: deviates by"):
        replayed(lockstep("llama", inner=MUON), tmp_path)


@pytest.mark.parametrize(("rule", "codec"), [("diloco", "bfloat16"), ("dct", "full"), ("sync", "full")])
def test_a_rule_that_takes_from_all_computes_the_algorithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: RuleName, codec: OuterCodec
) -> None:
    outer = OuterSettings(rule=rule, codec=codec, partner_wait_s=60.0, inner_steps=1 if rule == "sync" else 3)
    manifest = lockstep("llama").model_copy(update={"outer": outer})
    hold_up(monkeypatch, 0.15)
    outcome = simulate(manifest, tmp_path)
    assert {event.get("result") for event in outcome.trace.of("outer_round")} == {"all"}
    report = replayed(manifest, tmp_path)
    kinds = {"slow", "fast", "momentum_after", "adam_mean", "loss"} if rule != "sync" else {"loss"}
    assert report.deviations.keys() >= kinds
    assert max(report.deviations.values()) <= TOLERANCE
    lines = [(tmp_path / f"steps-{peer_id(0, replica)}.jsonl").read_text() for replica in range(REPLICAS)]
    assert len(set(lines)) == REPLICAS, "each replica has its own microbatches"
    other = manifest.model_copy(
        update={"outer": manifest.outer.model_copy(update={"rule": "dct" if rule == "dct" else "diloco", "beta": 0.6})}
    )
    with pytest.raises(AssertionError):
        replayed(other, tmp_path)


@pytest.mark.parametrize(
    ("family", "forward", "backward"),
    [("gpt2", "int4", "int4"), ("llama", "bfloat16", "float32"), *soak([("llama", "int8", "int8")])],
)
def test_a_run_with_a_narrow_wire_computes_the_algorithm(
    tmp_path: Path, family: str, forward: WireCodec, backward: WireCodec
) -> None:
    manifest = lockstep(family, WireSettings(forward=forward, backward=backward))
    simulate(manifest, tmp_path)
    report = replayed(manifest, tmp_path)
    require_variety(report)
    assert max(report.deviations.values()) <= TOLERANCE
    with pytest.raises(AssertionError, match="deviates by"):
        replayed(lockstep(family), tmp_path)


@pytest.mark.parametrize("codec", ["int4", *soak(["bfloat16", "int8"])])
def test_a_run_with_narrow_outer_rounds_computes_the_algorithm(tmp_path: Path, codec: OuterCodec) -> None:
    """N1 with the partner's vector as decoded: from two rounded vectors, or on the lattice within a step."""
    manifest = lockstep("llama", codec=codec)
    simulate(manifest, tmp_path)
    report = replayed(manifest, tmp_path)
    require_variety(report)
    assert max(report.deviations.values()) <= TOLERANCE
    with pytest.raises(AssertionError, match="deviates by"):
        replayed(lockstep("llama"), tmp_path)


@pytest.mark.parametrize(
    ("rule", "codec"), [("averaged", "full"), ("gossip", "int4"), *soak([("averaged", "int4"), ("gossip", "full")])]
)
def test_a_run_under_another_rule_computes_it(tmp_path: Path, rule: str, codec: OuterCodec) -> None:
    manifest = lockstep("llama", rule=rule, codec=codec)
    simulate(manifest, tmp_path)
    report = replayed(manifest, tmp_path)
    require_variety(report)
    assert report.deviations.keys() >= {"frozen", "fast", "partner_vector", "adam_mean", "adam_square", "loss"}
    assert max(report.deviations.values()) <= TOLERANCE


@pytest.mark.parametrize("codec", ["int4", *soak(["full"])])
def test_a_round_of_gossip_lasts_until_the_vector_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: OuterCodec
) -> None:
    """The merged difference is that of the two when the pull began, however many rounds have fallen due since then."""
    manifest = lockstep("llama", rule="gossip", codec=codec, inner_steps=1)
    narrow(monkeypatch, 0.05)  # in a lattice codec, chunks are requested again, rounds later
    hold_up(monkeypatch, 0.3)
    outcome = simulate(manifest, tmp_path)
    report = replayed(manifest, tmp_path)
    assert max(report.deviations.values()) <= TOLERANCE
    assert {0, 1} < report.delays
    assert max(report.delays) >= 2
    rounds = outcome.trace.of("outer_round")
    assert {str(event.get("reason")) for event in rounds} == {"matched", "odd"}
    assert any(event.get("asked_again") for event in rounds) == (codec == "int4")


def narrow(patch: pytest.MonkeyPatch, safety: float) -> None:
    """Make bounds too small, so that chunks arrive wrong."""
    patch.setattr(lattice_pull, "SAFETY", safety)


@pytest.mark.parametrize("codec", ["int4", *soak(["int8"])])
def test_chunks_that_come_wrong_are_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: OuterCodec
) -> None:
    manifest = lockstep("llama", codec=codec)
    narrow(monkeypatch, 0.05)
    outcome = simulate(manifest, tmp_path)
    with_partner = [event for event in outcome.trace.of("outer_round") if event.get("result") == "partner"]
    assert with_partner
    assert all(event.number("asked_again") > 0 for event in with_partner)
    assert max(replayed(manifest, tmp_path).deviations.values()) <= TOLERANCE


def test_a_peer_that_has_let_go_of_its_round_is_not_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repeated chunks are of another round: half of one vector and half of another would be merged."""
    narrow(monkeypatch, 0.05)
    right = SimTransport.fetch_snapshot

    async def moved_on(transport: SimTransport, peer: Advert, request: SnapshotRequest, *rest: Any) -> Snapshot:
        answer = await right(transport, peer, request, *rest)
        return replace(answer, round=answer.round + 1) if request.lattice and request.lattice.some else answer

    monkeypatch.setattr(SimTransport, "fetch_snapshot", moved_on)
    rounds = simulate(lockstep("llama", codec="int4"), tmp_path).trace.of("outer_round")
    assert {(event.get("result"), event.get("reason")) for event in rounds} <= {("alone", "declined"), ("alone", "odd")}
    assert ("alone", "declined") in {(event.get("result"), event.get("reason")) for event in rounds}


def no_digest(patch: pytest.MonkeyPatch) -> None:
    """Values that are too far away arrive wrong, and are merged."""
    narrow(patch, 0.05)
    right = LatticeCodec._gap
    patch.setattr(LatticeCodec, "_gap", lambda self, *a: right(self, *a).clamp(min=1 - self._levels))
    patch.setattr(LatticeCodec, "_digest_of", lambda self, rows_CK: torch.zeros(len(rows_CK), dtype=torch.int32))


def not_asked_again(patch: pytest.MonkeyPatch) -> None:
    """If a chunk arrived wrong, the replica's own values are merged in its place."""
    right = LatticePull.take
    narrow(patch, 0.05)

    def take(self: LatticePull, answer: Tensor, dither: PairDither) -> None:
        right(self, answer, dither)
        self.missing = None

    patch.setattr(LatticePull, "take", take)


def rounded_alone(patch: pytest.MonkeyPatch) -> None:
    """The partner's rounded vector is merged with the replica's own, which was not rounded."""
    patch.setattr(snapshot_codec, "_own_plus_difference", lambda own, sent: snapshot_codec._as_type(sent, own.dtype))


@pytest.mark.parametrize(
    ("codec", "plant"),
    [
        ("int4", not_asked_again),
        ("bfloat16", rounded_alone),
        *soak([("int4", no_digest), *product(["int8"], [no_digest, not_asked_again])]),
    ],
)
def test_a_wrong_decoding_that_is_merged_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: OuterCodec, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    manifest = lockstep("llama", codec=codec)
    plant(monkeypatch)
    simulate(manifest, tmp_path)
    monkeypatch.undo()
    with pytest.raises(AssertionError, match="deviates by"):
        replayed(manifest, tmp_path)


def sign_of_beta(patch: pytest.MonkeyPatch) -> None:
    right = outer_update.round_vector
    patch.setattr(outer_update, "round_vector", lambda *a, beta, gamma: right(*a, beta=-beta, gamma=gamma))


def gamma_0(patch: pytest.MonkeyPatch) -> None:
    step, vector = outer_update.outer_step, outer_update.round_vector
    patch.setattr(outer_update, "outer_step", lambda *a, gamma, **k: step(*a, gamma=0.0, **k))
    patch.setattr(outer_update, "round_vector", lambda *a, gamma, **k: vector(*a, gamma=0.0, **k))


def gradient_from_another_path(patch: pytest.MonkeyPatch) -> None:
    """One reply is applied to the microbatch after the one to which it belongs."""
    right, seen = TorchStage.backward, dict[str, Gradient]()

    def backward(self: TorchStage, graph: int, microbatch: MicrobatchId, gradient: Gradient) -> Contribution:
        wrong = replace(gradient, grad=seen[microbatch.peer].grad) if microbatch.counter == 4 else gradient
        seen[microbatch.peer] = gradient
        return right(self, graph, microbatch, wrong)

    patch.setattr(TorchStage, "backward", backward)


def lost(patch: pytest.MonkeyPatch) -> None:
    """One microbatch of one replica is recorded, but its gradients are not added."""
    right = GradientAccumulator.add

    def add(self: GradientAccumulator, added: AccumulatedMicrobatch, grads: Sequence[Tensor | None]) -> None:
        unlucky = added.microbatch[0::2] == (peer_id(0, 1), 4)
        right(self, added, [None if one is None else 0 * one for one in grads] if unlucky else grads)

    patch.setattr(GradientAccumulator, "add", add)


def counted_twice(patch: pytest.MonkeyPatch) -> None:
    """The gradients of one microbatch of one replica are added twice."""
    right = GradientAccumulator.add

    def add(self: GradientAccumulator, added: AccumulatedMicrobatch, grads: Sequence[Tensor | None]) -> None:
        unlucky = added.microbatch[0::2] == (peer_id(0, 1), 4)
        right(self, added, [None if one is None else 2 * one for one in grads] if unlucky else grads)

    patch.setattr(GradientAccumulator, "add", add)


def clip_over_the_whole_model(patch: pytest.MonkeyPatch) -> None:
    """The norm includes that of the other stage (there are two, of about the same size)."""
    right = GradientAccumulator.average_and_clip
    patch.setattr(GradientAccumulator, "average_and_clip", lambda self, clip_norm: right(self, clip_norm / 2**0.5))


def decoded_without_the_mean(patch: pytest.MonkeyPatch) -> None:
    right = ActivationCodec.decode
    patch.setattr(ActivationCodec, "decode", lambda self, wire: right(self, wire) - right(self, wire).mean((0, 1)))


def adam_reset(patch: pytest.MonkeyPatch) -> None:
    right = TorchStage.merge

    def merge(self: TorchStage, mine: FrozenRound, *rest: Any) -> float | None:
        result = right(self, mine, *rest)
        self._optimizer.reset()
        return result

    patch.setattr(TorchStage, "merge", merge)


def division_by_microbatches(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GradientAccumulator, "divisor", property(lambda self: 12 * len(self.added)))


def progress_lost(patch: pytest.MonkeyPatch) -> None:
    """Progress made while a round was open is thrown away."""
    patch.setattr(outer_update, "carried_over", lambda phi_after, theta, frozen: phi_after)


def progress_counted_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(outer_update, "carried_over", lambda phi_after, theta, frozen: phi_after + 2 * (theta - frozen))


def away_from_the_partner(patch: pytest.MonkeyPatch) -> None:
    """The two replicas of a pair are mistaken for each other."""
    right = Gossip.merge
    patch.setattr(Gossip, "merge", lambda self, own, members, mine, lag: right(self, own, members[::-1], mine, lag))


def first_of_the_pair(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(outer_rules, "mean", lambda values: values[0] * 1)


@pytest.mark.parametrize(
    ("rule", "plant"),
    [
        ("gossip", away_from_the_partner),
        ("averaged", first_of_the_pair),
        *soak(("gossip", plant) for plant in (progress_lost, adam_reset)),
    ],
)
def test_a_fault_planted_under_another_rule_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    manifest = lockstep("llama", rule=rule)
    hold_up(monkeypatch, 0.15)
    plant(monkeypatch)
    simulate(manifest, tmp_path)
    monkeypatch.undo()
    with pytest.raises(AssertionError, match="deviates by"):
        replayed(manifest, tmp_path)


@pytest.mark.parametrize(
    "plant",
    [
        sign_of_beta,
        gradient_from_another_path,
        counted_twice,
        decoded_without_the_mean,
        progress_lost,
        *soak(
            [
                gamma_0,
                lost,
                clip_over_the_whole_model,
                adam_reset,
                division_by_microbatches,
                progress_counted_twice,
            ]
        ),
    ],
)
def test_a_fault_planted_in_the_node_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    manifest = lockstep("llama")
    plant(monkeypatch)
    simulate(manifest, tmp_path)
    monkeypatch.undo()
    with pytest.raises(AssertionError, match="deviates by"):
        replayed(manifest, tmp_path)
