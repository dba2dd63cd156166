"""Snapshots, the outer round and adoption on real tensors, against numpy written straight from METHOD.md."""

import dataclasses

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from stages import (
    make_batch,
    make_label,
    make_manifest,
    make_stages,
    microbatch,
    run_microbatch,
    vector_of,
    weights,
    weights_of,
)

from noloco_p2p.compute import host_tensor
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.core.messages import HostTensor
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest, sampled_coordinates
from noloco_p2p.errors import Violation

Vector = NDArray[np.float64]
ALPHA, BETA, GAMMA = 0.4, 0.6, 0.9
OUTER = {"alpha": ALPHA, "beta": BETA, "gamma": GAMMA}


def train(stages: list[TorchStage], seed: int, steps: int = 2) -> None:
    """Take some inner steps on data of this seed."""
    for step in range(steps):
        run_microbatch(stages, make_batch(100 * seed + step), microbatch(step, f"origin-{seed}-{id(stages)}"))
        for stage in stages:
            stage.inner_step(make_label(step + 1))


def values(tensor: HostTensor) -> Vector:
    return np.frombuffer(tensor.data, np.dtype(tensor.dtype))


def theta(stage: TorchStage) -> Vector:
    return np.concatenate([value.numpy().ravel() for value in weights([stage]).values()])


def slow(stage: TorchStage) -> Vector:
    """φ, which a stage does not expose."""
    return np.concatenate([phi.numpy().ravel() for phi in stage._outer.kinds["slow"].values()])


def adam(stage: TorchStage) -> list[torch.Tensor]:
    """Adam's moments, which a stage does not expose: they are read from the optimizer's own state."""
    states = stage._optimizer._optimizers[0].state.values()
    return [value.clone() for state in states for value in state.values()]


def test_outer_rounds_are_n1_and_n2() -> None:
    """Three rounds of a pair with different data and, after round 1, different φ and δ; then one round alone."""
    mine, other = (make_stages(make_manifest(outer=OUTER), peer) for peer in ("me", "other"))
    train(other, 9)
    other[0].merge(other[0].snapshot(1, 10))
    phi, delta = theta(mine[0]), np.zeros_like(theta(mine[0]))
    for round_number in (1, 2, 3, 4):
        train(mine, round_number)
        train(other, 50 + round_number)
        before, moments = theta(mine[0]), adam(mine[0])
        ours, theirs = mine[0].snapshot(round_number, 10), other[0].snapshot(round_number, 10)
        assert np.array_equal(values(ours.weights), before)
        assert np.allclose(values(ours.vector), BETA * (before - phi) + GAMMA * phi, rtol=1e-12)
        alone = round_number == 4
        their_phi, their_theta = slow(other[0]), theta(other[0])
        result = mine[0].merge(ours, [] if alone else [vector_of(other[0], theirs)])
        other[0].merge(theirs, [vector_of(mine[0], ours)])
        group = [(phi, before - phi)] + ([] if alone else [(their_phi, their_theta - their_phi)])
        mean_delta = sum(d for _, d in group) / len(group)
        mean_phi = sum(p for p, _ in group) / len(group)
        delta = ALPHA * delta + BETA * mean_delta + GAMMA * (mean_phi - phi)
        phi = phi + delta
        assert np.allclose(theta(mine[0]), phi, rtol=1e-12, atol=1e-15)
        assert all(torch.equal(a, b) for a, b in zip(adam(mine[0]), moments, strict=True))
        phi = theta(mine[0])
        if alone:
            assert result is None
        else:
            places = sampled_coordinates(0, 0, round_number, before.size)
            pair = np.stack([before, their_theta])[:, places]
            expected = np.sqrt(((pair - pair.mean(axis=0)) ** 2).sum() / pair.size)
            assert result == pytest.approx(expected, rel=1e-9)
            assert expected > 1e-3


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_what_is_trained_during_a_round_stays_and_counts_in_the_next_one(dtype: str) -> None:
    """N3, for a pair that trains on separately while its snapshots travel: equal φ stay equal bit for bit."""
    pair = [make_stages(make_manifest(dtype=dtype, outer=OUTER | {"overlap": True}), peer) for peer in ("me", "other")]
    for round_number in (1, 2, 3):
        for seed, stages in enumerate(pair):
            train(stages, 100 * round_number + seed)
        frozen = [weights([stages[0]]) for stages in pair]
        snapshots = [stages[0].snapshot(round_number, 10) for stages in pair]
        for seed, stages in enumerate(pair):
            train(stages, 100 * round_number + 50 + seed, steps=3)
        moved, moments = [weights([stages[0]]) for stages in pair], adam(pair[0][0])
        pair[0][0].merge(snapshots[0], [vector_of(pair[1][0], snapshots[1])])
        pair[1][0].merge(snapshots[1], [vector_of(pair[0][0], snapshots[0])])
        assert all(torch.equal(a, b) for a, b in zip(adam(pair[0][0]), moments, strict=True))
        phis = [{name: phi.clone() for name, phi in stages[0]._outer.kinds["slow"].items()} for stages in pair]
        assert all(torch.equal(phis[0][name], phis[1][name]) for name in phis[0])
        for stages, phi, before, after in zip(pair, phis, frozen, moved, strict=True):
            for name, theta_after in weights([stages[0]]).items():
                assert torch.equal(theta_after, phi[name] + (after[name] - before[name]))
        following = values(pair[0][0].snapshot(round_number + 1, 20).vector)
        kept = np.concatenate([(moved[0][name] - frozen[0][name]).numpy().ravel() for name in frozen[0]])
        expected = BETA * kept + GAMMA * slow(pair[0][0])
        assert np.allclose(following, expected, atol=1e-6 if dtype == "float32" else 1e-14)


def test_a_round_without_delay_is_n1_and_n2_bit_for_bit() -> None:
    """Even where φ is −0.0, whose sign adding 0.0 would change."""
    waits, overlaps = (make_stages(make_manifest(outer=OUTER | {"overlap": it})) for it in (False, True))
    for stages in (waits, overlaps):
        train(stages, 1)
        for phi in stages[0]._outer.kinds["slow"].values():
            phi.view(-1)[0] = -0.0
        with torch.no_grad():
            for theta in stages[0].parameters.values():
                theta.view(-1)[0] = -0.0
        stages[0].merge(stages[0].snapshot(1, 10))
    assert theta_bytes(waits[0]) == theta_bytes(overlaps[0])
    for stage in (waits[0], overlaps[0]):
        assert theta_bytes(stage) == b"".join(phi.numpy().tobytes() for phi in stage._outer.kinds["slow"].values())


def test_without_a_partner_gossip_moves_nothing() -> None:
    """Not even by rounding, though the replica has trained on. What it offers is θ_f, which is kept only once."""
    stages = make_stages(make_manifest(dtype="float32", outer={"rule": "gossip"}))
    train(stages, 1)
    frozen = stages[0].snapshot(1, 10)
    assert np.shares_memory(values(frozen.vector), values(frozen.weights))
    train(stages, 2)
    before = theta_bytes(stages[0])
    stages[0].merge(frozen)
    assert theta_bytes(stages[0]) == before


def theta_bytes(stage: TorchStage) -> bytes:
    return b"".join(value.numpy().tobytes() for value in weights([stage]).values())


def test_a_state_captured_during_a_round_is_that_of_a_round_still_due() -> None:
    """φ and δ are those from before the round, and θ has everything that was trained: the next Δ contains it once."""
    mine, twin = (make_stages(make_manifest(outer=OUTER | {"overlap": True})) for _ in range(2))
    train(mine, 1)
    mine[0].snapshot(1, 2)
    train(mine, 2)
    twin[0].restore(mine[0].capture(0, 4.0, 4))
    again, fresh = twin[0].snapshot(1, 4), mine[0].snapshot(1, 4)
    assert [bytes(one.data) for one in (again.vector, again.weights)] == [
        bytes(one.data) for one in (fresh.vector, fresh.weights)
    ]
    twin[0].merge(again)
    mine[0].merge(fresh)
    assert theta_bytes(twin[0]) == theta_bytes(mine[0])


def test_a_frozen_round_does_not_change() -> None:
    stages = make_stages(make_manifest())
    train(stages, 1)
    frozen = stages[0].snapshot(1, 10)
    copies = [bytes(tensor.data) for tensor in (frozen.vector, frozen.weights)]
    train(stages, 2)
    stages[0].merge(stages[0].snapshot(2, 20))
    train(stages, 3)
    stages[0].adopt(weights_of(stages[0], 3, 30))
    assert [bytes(tensor.data) for tensor in (frozen.vector, frozen.weights)] == copies
    assert (frozen.peer, frozen.round, frozen.step) == ("me", 1, 10)


def with_tensor(snapshot: Snapshot, index: int, tensor: HostTensor) -> Snapshot:
    tensors = [tensor if i == index % len(snapshot.tensors) else t for i, t in enumerate(snapshot.tensors)]
    return dataclasses.replace(snapshot, peer="liar", tensors=tuple(tensors))


def broken(snapshot: Snapshot) -> dict[str, Snapshot]:
    """Snapshots that must be refused, by a pattern of the message."""
    first, last = snapshot.tensors[0], snapshot.tensors[-1]
    poisoned = bytearray(last.data)
    poisoned[-2:] = b"\x80\x7f" if last.dtype == "bfloat16" else b"\xf0\x7f"  # infinity
    return {
        "is not finite in": with_tensor(snapshot, -1, dataclasses.replace(last, data=memoryview(poisoned))),
        "slow/x .* out of place": with_tensor(snapshot, 0, dataclasses.replace(first, name="slow/x")),
        "float32 .* out of place": with_tensor(snapshot, 0, dataclasses.replace(first, dtype="float32")),
        "bytes do not hold": with_tensor(snapshot, 0, dataclasses.replace(first, data=first.data[:-8])),
        "does not fit this stage: 0 tensors": dataclasses.replace(snapshot, tensors=()),
    }


@pytest.mark.parametrize("operation", ["decode", "adopt"])
@pytest.mark.parametrize("message", list(broken(weights_of(make_stages(make_manifest())[0]))))
def test_a_bad_snapshot_changes_nothing(message: str, operation: str) -> None:
    stages, twins = make_stages(make_manifest()), make_stages(make_manifest())
    for pair in (stages, twins):
        train(pair, 1)
    mine, stage, request = stages[0].snapshot(1, 10), stages[0], SnapshotRequest(0)
    good = weights_of(stage) if operation == "adopt" else stage.encode(mine, request, "other")
    bad = broken(good)[message]
    with pytest.raises(Violation, match=message):
        stage.adopt(bad) if operation == "adopt" else stage.decode(mine, request, bad)
    assert np.array_equal(theta(stages[0]), theta(twins[0]))
    stages[0].merge(mine)
    twins[0].merge(twins[0].snapshot(1, 10))
    assert np.array_equal(theta(stages[0]), theta(twins[0]))


def test_weights_out_of_all_proportion_are_not_adopted() -> None:
    stages = make_stages(make_manifest())
    before, sent = theta(stages[0]), weights_of(stages[0])
    wrong = host_tensor.to_torch(sent.tensors[0]).clone()
    wrong[7] = -(2.0**17)
    with pytest.raises(Violation, match=r"liar has a value of 1\.31e\+05 in weights; the limit is 1\.02e\+03"):
        stages[0].adopt(with_tensor(sent, 0, host_tensor.from_torch("weights", wrong)))
    assert np.array_equal(theta(stages[0]), before)
    with torch.no_grad():
        next(iter(stages[0].parameters.values())).view(-1)[0] = 2.0**7
    stages[0].adopt(with_tensor(sent, 0, host_tensor.from_torch("weights", wrong)))
    assert theta(stages[0])[7] == wrong[7]


def test_adopt_takes_theta_of_another_and_starts_afresh() -> None:
    mine, other = (make_stages(make_manifest(outer=OUTER)) for _ in range(2))
    train(other, 1)
    train(mine, 2)
    mine[0].merge(mine[0].snapshot(1, 10))
    adopted = torch.from_numpy(theta(other[0])).bfloat16().double().numpy()
    assert not np.array_equal(adopted, theta(other[0]))
    mine[0].adopt(weights_of(other[0], 1, 10))
    assert np.array_equal(theta(mine[0]), adopted)
    assert adam(mine[0]) == []
    snapshot = mine[0].snapshot(2, 20)
    assert np.array_equal(values(snapshot.weights), adopted)
    assert np.array_equal(values(snapshot.vector), GAMMA * adopted)
    mine[0].merge(snapshot)
    assert np.array_equal(theta(mine[0]), adopted)


def test_equal_replicas_that_pull_each_other_stay_equal() -> None:
    pair = [make_stages(make_manifest(dtype="float32", outer=OUTER), peer) for peer in ("a", "b")]
    for round_number in (1, 2, 3):
        for seed, stages in enumerate(pair):
            train(stages, 10 * round_number + seed)
        snapshots = [stages[0].snapshot(round_number, 10) for stages in pair]
        pair[0][0].merge(snapshots[0], [vector_of(pair[1][0], snapshots[1])])
        pair[1][0].merge(snapshots[1], [vector_of(pair[0][0], snapshots[0])])
        one, two = (weights([stages[0]]) for stages in pair)
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_round_zero_is_the_initial_weights_and_nothing() -> None:
    stage = make_stages(make_manifest(outer=OUTER))[0]
    snapshot = stage.snapshot(0, 0)
    assert np.array_equal(values(snapshot.weights), theta(stage))
    assert np.array_equal(values(snapshot.vector), GAMMA * theta(stage))
