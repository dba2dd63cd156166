"""Stages on a GPU. The rest of the suite also uses a GPU if there is one (`device: auto`)."""

import pytest
import torch
from stages import make_batch, make_label, make_manifest, make_stages, microbatch, run_microbatch, vector_of

from noloco_p2p.compute.lattice_codec import LatticeCodec, PairDither
from noloco_p2p.compute.lattice_pull import LatticePull, ReplicaDistances
from noloco_p2p.compute.muon import orthogonal
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.core.lattice_format import CHUNK, LatticeRequest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = "cpu", "cuda"


def move(stage: TorchStage, seed: int) -> None:
    """Move θ by values that are the same on every device."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for theta in stage.parameters.values():
            theta.add_((torch.randn(theta.shape, generator=draw) * 1e-2).to(theta.device))


@pytest.mark.parametrize("rule", ["noloco", "averaged", "gossip", "diloco", "dct"])
def test_rounds_are_the_same_bit_for_bit_as_on_the_host(rule: str) -> None:
    """For a pair that trains on while its snapshots travel."""
    manifest = make_manifest(dtype="float32", outer={"rule": rule})
    pairs = [[make_stages(manifest, peer, device=device)[0] for peer in ("me", "other")] for device in DEVICES]
    for round in (1, 2, 3):
        rounds = []
        for pair in pairs:
            for at, stage in enumerate(pair):
                move(stage, 100 * round + at)
            frozen = [stage.snapshot(round, 10) for stage in pair]
            for at, stage in enumerate(pair):
                move(stage, 100 * round + 50 + at)
            for stage, mine, other, theirs in zip(pair, frozen, pair[::-1], frozen[::-1], strict=True):
                stage.merge(mine, [vector_of(other, theirs)])
            rounds.append(frozen)
        for on_host, on_gpu in zip(*rounds, strict=True):
            assert on_host == on_gpu
    for one, other in zip(*pairs, strict=True):
        assert one.capture(3, 10.0, 30).tensors == other.capture(3, 10.0, 30).tensors


@pytest.mark.parametrize("rule", ["sync", "noloco"])
def test_a_replica_moves_from_one_device_to_the_other(rule: str) -> None:
    """Trained on the GPU, captured, restored on the host, and back: not a single bit changes."""
    manifest = make_manifest(dtype="float32", outer={"rule": rule}, inner={"optimizer": "muon"})
    trained, on_host, again = (make_stages(manifest, device=device) for device in ("cuda", "cpu", "cuda"))
    run_microbatch(trained, make_batch(1), microbatch(1))
    for one, two, three in zip(trained, on_host, again, strict=True):
        mine = one.snapshot(1, 1)
        one.merge(mine, [vector_of(one, mine)])
        one.inner_step(make_label())
        state = one.capture(1, 1.0, 1)
        two.restore(state)
        three.restore(two.capture(1, 1.0, 1))
        assert three.capture(1, 1.0, 1).tensors == state.tensors


@pytest.mark.parametrize("bits", [4, 8])
def test_lattice_codes_are_the_same_on_both(bits: int) -> None:
    """One replica of a pair encodes on the GPU, the other on the host; the latter has to request some chunks again."""
    size, draw = 3 * CHUNK + 1001, torch.Generator().manual_seed(bits)
    theirs = torch.randn(size, generator=draw)
    mine = theirs + torch.randn(size, generator=draw) * 1e-3 * torch.linspace(1, 40, size)
    distances, dither = ReplicaDistances(bits), PairDither(1, 2, ("a", "b"), size)
    distances.observe(torch.full((4,), 1e-2, dtype=torch.float64))
    bounds = distances.bounds(mine)
    assert torch.equal(distances.bounds(mine.cuda()), bounds)
    pulled = []
    for device in DEVICES:
        codec = LatticeCodec(bits, size, torch.float32, device)
        distance_C, rounds = torch.zeros(4, dtype=torch.float64), 0
        pull = LatticePull(codec, mine, LatticeRequest(bytes(bounds.tolist())), mine.clone(), distance_C)
        while pull.missing is not None:
            answers = [
                LatticeCodec(bits, size, torch.float32, other).encode(theirs, bounds, pull.missing, dither)
                for other in DEVICES
            ]
            assert torch.equal(*answers)
            pull.take(answers[0], dither)
            rounds += 1
        pulled.append((pull.vector, distance_C, rounds))
    (one, apart, rounds), (other, also_apart, again) = pulled
    assert torch.equal(one, other)
    assert torch.equal(apart, also_apart)
    assert rounds == again > 1


def test_matrices_of_one_shape_are_made_orthogonal_together() -> None:
    matrices = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(1)).cuda()
    directions = orthogonal(matrices, torch.float32)
    for matrix, direction in zip(matrices, directions, strict=True):
        assert torch.allclose(orthogonal(matrix[None], torch.float32)[0], direction, atol=1e-5)
        assert torch.allclose(orthogonal(matrix[None].cpu(), torch.float32)[0], direction.cpu(), atol=1e-3)
