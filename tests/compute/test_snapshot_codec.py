"""Which parts of a frozen round travel, and the spread that a pair estimates from them."""

from dataclasses import replace

import pytest
import torch
from stages import make_manifest, make_stages, vector_of

from noloco_p2p.compute import host_tensor
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.core.snapshots import SnapshotRequest, sampled_coordinates
from noloco_p2p.errors import Violation


def moved(peer: str, by: float) -> TorchStage:
    """Stage 0 with 2,784 parameters, each moved by a different multiple of `by`."""
    stage = make_stages(make_manifest(), peer)[0]
    with torch.no_grad():
        for theta in stage.parameters.values():
            theta.add_(by * torch.arange(theta.numel(), dtype=theta.dtype).view(theta.shape))
    return stage


def flat(stage: TorchStage) -> torch.Tensor:
    return torch.cat([theta.detach().flatten() for theta in stage.parameters.values()])


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_weights_come_in_the_requested_element_type(dtype: str) -> None:
    stage = moved("me", 0.001)
    sent = stage.encode(stage.snapshot(3, 30), SnapshotRequest(0, weights=dtype), "other")
    assert (sent.peer, sent.round, sent.step) == ("me", 3, 30)
    (weights,) = sent.tensors
    assert (weights.name, weights.dtype, weights.shape) == ("weights", dtype, (stage.state.parameters,))
    assert torch.equal(host_tensor.to_torch(weights), flat(stage).to(host_tensor.DTYPES[dtype]))


@pytest.mark.parametrize("dtype", ["int64", "float16", "complex64", "", "x" * 1000])
def test_another_element_type_is_a_violation(dtype: str) -> None:
    stage = moved("me", 0.0)
    with pytest.raises(Violation, match=r"weights travel as one of bfloat16, float32, float64, not '.{0,32}'$"):
        stage.encode(stage.snapshot(0, 0), SnapshotRequest(0, weights=dtype), "other")


def test_the_pair_compares_the_same_coordinates_also_of_another_round() -> None:
    one, other = moved("me", 0.0), moved("other", 0.01)
    gap, count = flat(one) - flat(other), one.state.parameters
    found = []
    for their_round in (4, 3):
        theirs = vector_of(other, other.snapshot(their_round, 10 * their_round))
        places = list(sampled_coordinates(0, 0, their_round, count))
        assert 1024 == len(places) < count
        expected = (0.5 * float(gap[places].square().sum()) / (2 * len(places))) ** 0.5
        found.append(one.merge(one.snapshot(4, 40), [theirs]))
        assert found[-1] == pytest.approx(expected, rel=1e-12)
        one = moved("me", 0.0)
    assert found[0] != found[1]


def test_a_vector_of_another_stage_or_with_a_sample_that_is_not_finite_is_a_violation() -> None:
    first, last = make_stages(make_manifest())
    frozen, request = last.snapshot(1, 10), SnapshotRequest(1)
    sent = last.encode(frozen, request, "other")
    with pytest.raises(Violation, match="does not fit this stage"):
        first.decode(first.snapshot(1, 10), request, sent)
    sample = host_tensor.to_torch(sent.tensors[1]).clone()
    sample[7] = torch.nan
    with pytest.raises(Violation, match="not finite in sample"):
        last.decode(frozen, request, replace(sent, tensors=(sent.tensors[0], host_tensor.from_torch("sample", sample))))


@pytest.mark.parametrize("value", [1e38, -1e38, 2e3, -2e3])
@pytest.mark.parametrize("rule", ["noloco", "diloco"])
def test_a_vector_that_is_finite_and_out_of_all_proportion_is_not_merged(rule: str, value: float) -> None:
    """If it were merged, it would spread to other replicas, and into every checkpoint."""
    stage, other = (make_stages(make_manifest(outer={"rule": rule}), peer)[0] for peer in ("me", "other"))
    mine, request = stage.snapshot(1, 10), SnapshotRequest(0)
    sent = other.encode(other.snapshot(1, 10), request, "me")
    assert stage.decode(mine, request, sent).verdict == ""
    vector = host_tensor.to_torch(sent.tensors[0]).clone()
    vector[100] = value
    changed = replace(sent, tensors=(host_tensor.from_torch("vector", vector), sent.tensors[1]))
    if rule == "noloco":
        assert stage.decode(mine, request, changed).verdict == "refused"
        return
    with pytest.raises(Violation, match="the limit is"):
        stage.decode(mine, request, changed)
