"""Snapshots, the outer round and adoption on real tensors, against numpy written straight from METHOD.md."""

import dataclasses

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from stages import make_batch, make_label, make_manifest, make_stages, microbatch, run_microbatch, weights

from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.core.messages import HostTensor, Snapshot
from noloco_p2p.errors import Violation

Vector = NDArray[np.float64]
ALPHA, BETA, GAMMA = 0.4, 0.6, 0.9
OUTER = {"alpha": ALPHA, "beta": BETA, "gamma": GAMMA}


def train(stages: list[TorchStage], seed: int, steps: int = 2) -> None:
    """Some inner steps on data of its own."""
    for step in range(steps):
        run_microbatch(stages, make_batch(100 * seed + step), microbatch(step, f"origin-{seed}-{id(stages)}"))
        for stage in stages:
            stage.inner_step(make_label(step + 1))


def flat(snapshot: Snapshot, kind: str) -> Vector:
    """All φ or Δ of a snapshot, one after another."""
    parts = [np.frombuffer(t.data, np.float64) for t in snapshot.tensors if t.name.startswith(kind + "/")]
    return np.concatenate(parts)


def theta(stage: TorchStage) -> Vector:
    return np.concatenate([value.numpy().ravel() for value in weights([stage]).values()])


def adam(stage: TorchStage) -> list[torch.Tensor]:
    """Adam's moments, which a stage keeps to itself: read through the optimizer's own state."""
    return [value.clone() for state in stage._adam._optimizer.state.values() for value in state.values()]


def test_outer_rounds_are_n1_and_n2() -> None:
    """Three rounds of a pair with different data and, after round 1, different φ and δ; then one alone."""
    mine, other = (make_stages(make_manifest(outer=OUTER), peer) for peer in ("me", "other"))
    train(other, 9)
    other[0].merge(other[0].snapshot(1, 10), None)
    phi, delta = theta(mine[0]), np.zeros_like(theta(mine[0]))
    for round_number in (1, 2, 3, 4):
        train(mine, round_number)
        train(other, 50 + round_number)
        before, moments = theta(mine[0]), adam(mine[0])
        ours, theirs = mine[0].snapshot(round_number, 10), other[0].snapshot(round_number, 10)
        assert np.array_equal(flat(ours, "slow"), phi)
        assert np.array_equal(flat(ours, "delta"), before - phi)
        alone = round_number == 4
        result = mine[0].merge(ours, None if alone else theirs)
        other[0].merge(theirs, ours)
        group = [(phi, before - phi)] + ([] if alone else [(flat(theirs, "slow"), flat(theirs, "delta"))])
        mean_delta = sum(d for _, d in group) / len(group)
        mean_phi = sum(p for p, _ in group) / len(group)
        delta = ALPHA * delta + BETA * mean_delta + GAMMA * (mean_phi - phi)
        phi = phi + delta
        assert np.allclose(theta(mine[0]), phi, rtol=1e-12, atol=1e-15)
        assert all(torch.equal(a, b) for a, b in zip(adam(mine[0]), moments, strict=True))
        phi = theta(mine[0])
        if alone:
            assert result.replica_std is None
        else:
            pair = np.stack([before, flat(theirs, "slow") + flat(theirs, "delta")])
            expected = np.sqrt(((pair - pair.mean(axis=0)) ** 2).sum() / pair.size)
            assert result.replica_std == pytest.approx(expected, rel=1e-9)
            assert expected > 1e-3


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_what_is_trained_during_a_round_stays_and_counts_in_the_next_one(dtype: str) -> None:
    """N3. A pair that trains on, apart, while its snapshots travel: equal φ stay equal bit for bit."""
    pair = [make_stages(make_manifest(dtype=dtype, outer=OUTER | {"overlap": True}), peer) for peer in ("me", "other")]
    for round_number in (1, 2, 3):
        for seed, stages in enumerate(pair):
            train(stages, 100 * round_number + seed)
        frozen = [weights([stages[0]]) for stages in pair]
        snapshots = [stages[0].snapshot(round_number, 10) for stages in pair]
        for seed, stages in enumerate(pair):
            train(stages, 100 * round_number + 50 + seed, steps=3)
        moved, moments = [weights([stages[0]]) for stages in pair], adam(pair[0][0])
        pair[0][0].merge(snapshots[0], snapshots[1])
        pair[1][0].merge(snapshots[1], snapshots[0])
        assert all(torch.equal(a, b) for a, b in zip(adam(pair[0][0]), moments, strict=True))
        slow = [{name: phi.clone() for name, phi in stages[0]._slow.slow.items()} for stages in pair]
        assert all(torch.equal(slow[0][name], slow[1][name]) for name in slow[0])
        for stages, phi, before, after in zip(pair, slow, frozen, moved, strict=True):
            for name, theta_after in weights([stages[0]]).items():
                assert torch.equal(theta_after, phi[name] + (after[name] - before[name]))
        following = pair[0][0].snapshot(round_number + 1, 20)
        kept = np.concatenate([(moved[0][name] - frozen[0][name]).numpy().ravel() for name in frozen[0]])
        wide = np.float64 if dtype == "float64" else np.float32
        delta = np.concatenate([np.frombuffer(t.data, wide) for t in following.tensors if t.name.startswith("delta/")])
        assert np.allclose(delta, kept, atol=1e-6 if dtype == "float32" else 1e-14)


def test_a_round_without_delay_is_n1_and_n2_bit_for_bit() -> None:
    """Also where φ is −0.0, which an addition of 0.0 would turn round."""
    waits, overlaps = (make_stages(make_manifest(outer=OUTER | {"overlap": it})) for it in (False, True))
    for stages in (waits, overlaps):
        train(stages, 1)
        for phi in stages[0]._slow.slow.values():
            phi.view(-1)[0] = -0.0
        with torch.no_grad():
            for theta in stages[0].parameters.values():
                theta.view(-1)[0] = -0.0
        stages[0].merge(stages[0].snapshot(1, 10), None)
    assert theta_bytes(waits[0]) == theta_bytes(overlaps[0])
    for stage in (waits[0], overlaps[0]):
        assert theta_bytes(stage) == b"".join(phi.numpy().tobytes() for phi in stage._slow.slow.values())


def theta_bytes(stage: TorchStage) -> bytes:
    return b"".join(value.numpy().tobytes() for value in weights([stage]).values())


@pytest.mark.parametrize("how", ["adopt", "restore"])
def test_other_weights_end_the_open_round(how: str) -> None:
    stages = make_stages(make_manifest(outer=OUTER | {"overlap": True}))
    train(stages, 1)
    state, mine = stages[0].capture(1, 2.0, 2), stages[0].snapshot(1, 2)
    assert stages[0]._slow.frozen
    stages[0].adopt(mine) if how == "adopt" else stages[0].restore(state)
    assert not stages[0]._slow.frozen


def test_a_state_captured_during_a_round_is_that_of_a_round_still_due() -> None:
    """φ and δ are those before the round, θ has all that was trained: the next Δ has it, once."""
    mine, twin = (make_stages(make_manifest(outer=OUTER | {"overlap": True})) for _ in range(2))
    train(mine, 1)
    mine[0].snapshot(1, 2)
    train(mine, 2)
    twin[0].restore(mine[0].capture(0, 4.0, 4))
    again, fresh = twin[0].snapshot(1, 4), mine[0].snapshot(1, 4)
    assert [bytes(tensor.data) for tensor in again.tensors] == [bytes(tensor.data) for tensor in fresh.tensors]
    twin[0].merge(again, None)
    mine[0].merge(fresh, None)
    assert theta_bytes(twin[0]) == theta_bytes(mine[0])


def test_a_snapshot_is_frozen() -> None:
    stages = make_stages(make_manifest())
    train(stages, 1)
    frozen = stages[0].snapshot(1, 10)
    copies = [bytes(tensor.data) for tensor in frozen.tensors]
    train(stages, 2)
    stages[0].merge(stages[0].snapshot(2, 20), None)
    train(stages, 3)
    stages[0].adopt(stages[0].snapshot(3, 30))
    assert [bytes(tensor.data) for tensor in frozen.tensors] == copies
    assert tuple(tensor.spec for tensor in frozen.tensors) == stages[0].state.snapshot
    assert (frozen.peer, frozen.round, frozen.step) == ("me", 1, 10)


def with_tensor(snapshot: Snapshot, index: int, tensor: HostTensor) -> Snapshot:
    tensors = [tensor if i == index % len(snapshot.tensors) else t for i, t in enumerate(snapshot.tensors)]
    return dataclasses.replace(snapshot, peer="liar", tensors=tuple(tensors))


def broken(snapshot: Snapshot) -> dict[str, Snapshot]:
    """Snapshots that must be refused, by what the message says."""
    first, last = snapshot.tensors[0], snapshot.tensors[-1]
    poisoned = np.frombuffer(last.data, np.float64).copy()
    poisoned[-1] = np.inf
    return {
        "is not finite in": with_tensor(snapshot, -1, dataclasses.replace(last, data=poisoned.view(np.uint8).data)),
        "slow/x .* out of place": with_tensor(snapshot, 0, dataclasses.replace(first, name="slow/x")),
        "float32 .* out of place": with_tensor(snapshot, 0, dataclasses.replace(first, dtype="float32")),
        "bytes do not hold": with_tensor(snapshot, 0, dataclasses.replace(first, data=first.data[:-8])),
        "does not fit this stage: 1 tensors": dataclasses.replace(snapshot, tensors=snapshot.tensors[:1]),
    }


@pytest.mark.parametrize("operation", ["merge", "adopt"])
@pytest.mark.parametrize("message", list(broken(make_stages(make_manifest())[0].snapshot(0, 0))))
def test_a_bad_snapshot_changes_nothing(message: str, operation: str) -> None:
    stages, twins = make_stages(make_manifest()), make_stages(make_manifest())
    for pair in (stages, twins):
        train(pair, 1)
    mine = stages[0].snapshot(1, 10)
    bad = broken(mine)[message]
    with pytest.raises(Violation, match=message):
        stages[0].merge(mine, bad) if operation == "merge" else stages[0].adopt(bad)
    assert np.array_equal(theta(stages[0]), theta(twins[0]))
    stages[0].merge(mine, None)
    twins[0].merge(twins[0].snapshot(1, 10), None)
    assert np.array_equal(theta(stages[0]), theta(twins[0]))


def test_adopt_takes_theta_of_another_and_starts_afresh() -> None:
    mine, other = (make_stages(make_manifest(outer=OUTER)) for _ in range(2))
    train(other, 1)
    train(mine, 2)
    mine[0].merge(mine[0].snapshot(1, 10), None)
    theirs = other[0].snapshot(1, 10)
    adopted = flat(theirs, "slow") + flat(theirs, "delta")
    mine[0].adopt(theirs)
    assert np.array_equal(theta(mine[0]), adopted)
    assert adam(mine[0]) == []
    snapshot = mine[0].snapshot(2, 20)
    assert np.array_equal(flat(snapshot, "slow"), adopted)
    assert not flat(snapshot, "delta").any()
    mine[0].merge(snapshot, None)
    assert np.array_equal(theta(mine[0]), adopted)


def test_equal_replicas_that_pull_each_other_stay_equal() -> None:
    pair = [make_stages(make_manifest(dtype="float32", outer=OUTER), peer) for peer in ("a", "b")]
    for round_number in (1, 2, 3):
        for seed, stages in enumerate(pair):
            train(stages, 10 * round_number + seed)
        snapshots = [stages[0].snapshot(round_number, 10) for stages in pair]
        pair[0][0].merge(snapshots[0], snapshots[1])
        pair[1][0].merge(snapshots[1], snapshots[0])
        one, two = (weights([stages[0]]) for stages in pair)
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_round_zero_is_the_initial_weights_and_nothing() -> None:
    stage = make_stages(make_manifest())[0]
    snapshot = stage.snapshot(0, 0)
    assert np.array_equal(flat(snapshot, "slow"), theta(stage))
    assert not flat(snapshot, "delta").any()
