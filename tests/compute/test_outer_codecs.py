"""Stages pull each other's vectors in each codec: what they request, what is refused, and that a pair's mean stays."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from stages import make_batch, make_label, make_manifest, make_stages, microbatch, run_microbatch
from torch import Tensor

from noloco_p2p.compute import host_tensor, lattice_pull, partner_guard, snapshot_codec
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.core.lattice_format import BOUND_ZERO, CHUNK, LATTICE_BITS, MIN_BOUND, PLAIN, LatticeRequest, OuterCodec
from noloco_p2p.core.messages import HostTensor
from noloco_p2p.core.snapshots import FrozenRound, PartnerVector, SnapshotRequest
from noloco_p2p.errors import Declined, Violation

CODECS = get_args(OuterCodec)
LATTICES = sorted(LATTICE_BITS)
STEP_SHARE = {"int8": 2**-7, "int4": 2**-3}
"""The step of the lattice, relative to the bound."""


def make_replica(peer: str, codec: str, *, seed: int, dtype: str = "float32") -> TorchStage:
    """A replica of the first of two stages, after a few steps on its own data."""
    stages = make_stages(make_manifest(dtype=dtype, outer={"rule": "noloco", "codec": codec}), peer)
    for step in range(3):
        run_microbatch(stages, make_batch(100 * seed + step), microbatch(step, f"origin-{seed}"))
        for stage in stages:
            stage.inner_step(make_label(step + 1, 1e-3))
    return stages[0]


def pull(mine: TorchStage, frozen: FrozenRound, other: TorchStage, others: FrozenRound) -> tuple[PartnerVector, int]:
    """Request until nothing is missing. Returns the vector, and how often something was missing."""
    request, found, asked = SnapshotRequest(0, others.round, lattice=frozen.lattice), None, 0
    while True:
        answer = other.encode(others, request, frozen.peer)
        assert tuple(tensor.spec for tensor in answer.tensors) == mine.state.answer(request.lattice)
        found = mine.decode(frozen, request, answer, found)
        asked += 1
        if found.missing is None:
            return found, asked
        assert (found.apart, found.verdict) == ((), ""), "the guard judges only a whole vector"
        request = replace(request, lattice=found.missing)


def move(stage: TorchStage, seed: int) -> None:
    """Move θ a little, as inner steps would."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for theta in stage.parameters.values():
            theta.add_(torch.randn(theta.shape, generator=random, dtype=theta.dtype), alpha=1e-3)


def values(tensor: HostTensor) -> Tensor:
    return host_tensor.to_torch(tensor).double()


@pytest.mark.parametrize("codec", CODECS)
def test_a_pair_pulls_and_merges_round_after_round(codec: str) -> None:
    pair = [make_replica(peer, codec, seed=seed) for seed, peer in enumerate(("a", "b"))]
    for stage in pair:
        stage.snapshot(0, 0)
    for round in (1, 2, 3):
        for seed, stage in enumerate(pair):
            move(stage, 10 * round + seed)
        frozen = [stage.snapshot(round, 10 * round) for stage in pair]
        found = [pull(pair[i], frozen[i], pair[1 - i], frozen[1 - i])[0] for i in (0, 1)]
        error = (values(found[0].vector) - values(frozen[1].vector)).abs().max()
        distance = (values(frozen[0].vector) - values(frozen[1].vector)).abs().max()
        if codec == "full":
            assert error == 0
        elif codec == "bfloat16":
            assert 0 < error <= 2**-7 * values(frozen[1].vector).abs().max()
        else:
            bounds = [2.0 ** (max(one.bounds[at] for one in frozen) - 127) for at in range(len(frozen[0].bounds))]
            assert 0 < error < STEP_SHARE[codec] * 16 * max(bounds)
        if codec != "full":
            moved = [values(one.vector) - values(mine.vector) for one, mine in zip(found, frozen, strict=True)]
            assert float((moved[0] + moved[1]).abs().max()) < 1e-6 * float(distance) + 1e-7
        for stage, mine, theirs in zip(pair, frozen, found, strict=True):
            result = stage.merge(mine, [theirs])
            assert result is not None
    after = [stage.snapshot(4, 40) for stage in pair]
    assert all(one.bounds != b"" for one in after) == (codec in LATTICES)
    if codec in LATTICES:  # no replica has trained since, so they are much closer than at first
        assert sum(after[0].bounds) < sum(pair[0].snapshot(0, 0).bounds) + 1
    # With other weights it is like a new replica: the distances to others that it has seen mean nothing any more.
    assert after[0].radii
    assert bool(after[0].limits) == (codec in LATTICES)
    new, other_weights = make_replica("a", codec, seed=2), SnapshotRequest(0, weights="bfloat16")
    for stage in (pair[0], new):
        stage.adopt(pair[1].encode(after[1], other_weights, "a"))
    assert pair[0].snapshot(5, 50) == new.snapshot(5, 50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_vector_that_came_as_bfloat16_is_added_up_part_by_part_to_the_same_bits(dtype: torch.dtype) -> None:
    u, sent = torch.randn(2, 2 * partner_guard.CHUNK + 5, generator=torch.Generator().manual_seed(1), dtype=dtype)
    mine, whole = host_tensor.from_torch("vector", u), host_tensor.from_torch("vector", sent)
    assert snapshot_codec._own_plus_difference(mine, whole) is whole, "nothing was rounded"
    sent = sent.bfloat16()
    theirs = host_tensor.from_torch("vector", sent)
    found = host_tensor.to_torch(snapshot_codec._own_plus_difference(mine, theirs))
    assert torch.equal(found, u + (sent.to(dtype) - u.bfloat16().to(dtype)))


@pytest.mark.parametrize("codec", LATTICES)
def test_what_the_guard_has_clipped_or_taken_as_it_is_tells_less_about_how_far_others_are(codec: str) -> None:
    mine, other = (make_replica(peer, codec, seed=seed) for seed, peer in enumerate(("a", "b")))
    frozen = mine.snapshot(1, 10)
    found, _ = pull(mine, frozen, other, other.snapshot(1, 10))
    clipped = replace(found, distances=None, verdict="clipped")
    for one in (replace(found, apart=(), sizes=(), verdict="outlier"), clipped, found, found):
        assert mine.snapshot(2, 20).limits == ()
        mine.merge(frozen, [one])
    after = mine.snapshot(2, 20)
    assert len(after.limits) == len(after.radii) == len(found.apart) == len(found.sizes) > 0


@pytest.mark.parametrize("codec", LATTICES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_chunks_requested_again_bring_no_sample(monkeypatch: pytest.MonkeyPatch, codec: str, dtype: str) -> None:
    monkeypatch.setattr(lattice_pull, "SAFETY", 1e-3)
    mine, other = (make_replica(peer, codec, seed=seed, dtype=dtype) for seed, peer in enumerate(("a", "b")))
    frozen, others = mine.snapshot(1, 10), other.snapshot(1, 10)
    found, asked = pull(mine, frozen, other, others)
    assert asked == lattice_pull.WIDENINGS + 2
    assert torch.equal(values(found.vector), values(others.vector))
    assert found.distances is not None
    assert float(values(found.distances).max()) > 0
    assert found.sample.data == other.encode(others, SnapshotRequest(0, lattice=frozen.lattice), "a").tensors[1].data


@pytest.mark.parametrize("codec", LATTICES)
def test_what_the_first_answer_brought_is_kept_when_the_rest_is_requested_again(codec: str) -> None:
    """Of five chunks, the last has too small a bound."""
    mine, other = (make_replica(peer, codec, seed=seed) for seed, peer in enumerate(("a", "b")))
    frozen, others = mine.snapshot(1, 10), other.snapshot(1, 10)
    frozen = replace(frozen, bounds=bytes([BOUND_ZERO - 6] * 4 + [MIN_BOUND]))
    request = SnapshotRequest(0, lattice=frozen.lattice)
    first = mine.decode(frozen, request, other.encode(others, request, "a"))
    assert first.missing is not None
    assert first.missing.chunks == (4,)
    known, whole = 4 * CHUNK, values(pull(mine, frozen, other, others)[0].vector)
    assert torch.equal(whole[:known], values(first.vector)[:known])
    assert torch.equal(whole[known:], values(others.vector)[known:])
    assert not torch.equal(whole[:known], values(frozen.vector)[:known])


@pytest.mark.parametrize("codec", CODECS)
def test_a_request_in_another_codec_is_a_violation(codec: str) -> None:
    stage = make_replica("a", codec, seed=1)
    frozen = stage.snapshot(1, 10)
    wrong = LatticeRequest(b"\x7f") if codec not in LATTICES else None
    with pytest.raises(Violation, match="vectors travel with"):
        stage.encode(frozen, SnapshotRequest(0, lattice=wrong), "b")
    if codec in LATTICES:
        for bad in (LatticeRequest(frozen.bounds + b"\x7f"), LatticeRequest(b"\x01" * len(frozen.bounds))):
            with pytest.raises(Violation, match=r"are requested, with|is invalid"):
                stage.encode(frozen, SnapshotRequest(0, lattice=bad), "b")


@pytest.mark.parametrize("codec", LATTICES)
def test_an_answer_that_does_not_match_the_request_is_a_violation(codec: str) -> None:
    mine, other = (make_replica(peer, codec, seed=seed) for seed, peer in enumerate(("a", "b")))
    frozen, request = mine.snapshot(1, 10), SnapshotRequest(0, lattice=mine.snapshot(1, 10).lattice)
    answer = other.encode(other.snapshot(1, 10), request, "a")
    codes, sample = answer.tensors
    for tensors in ((codes,), (sample, codes), (replace(codes, name="vector"), sample)):
        with pytest.raises(Violation, match="does not fit this stage"):
            mine.decode(frozen, request, replace(answer, tensors=tensors))
    bounds_at = 4 * len(frozen.bounds)
    wrong = bytearray(codes.data)
    wrong[bounds_at] = 0
    spoilt = replace(codes, data=memoryview(wrong))
    with pytest.raises(Violation, match="bounds that do not match the request"):
        mine.decode(frozen, request, replace(answer, tensors=(spoilt, sample)))


@pytest.mark.parametrize("codec", LATTICES)
def test_a_vector_that_is_not_finite_is_declined(codec: str) -> None:
    mine, other = (make_replica(peer, codec, seed=seed) for seed, peer in enumerate(("a", "b")))
    with torch.no_grad():
        next(iter(other.parameters.values())).view(-1)[0] = torch.nan
    spoilt = other.snapshot(1, 10)
    assert PLAIN in spoilt.bounds
    with pytest.raises(Declined, match="not finite"):
        other.encode(spoilt, SnapshotRequest(0, lattice=mine.snapshot(1, 10).lattice), "a")
