"""Rule `dct` on real tensors, against a numpy version in float64 after METHOD.md; what travels; what is refused."""

from collections.abc import Mapping
from dataclasses import replace
from math import cos, pi, prod, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from soak import soak
from stages import make_batch, make_label, make_manifest, make_stages, microbatch, run_microbatch, vector_of

from noloco_p2p.compute import host_tensor
from noloco_p2p.compute.dct_tiles import DctTiles, SparseVector, basis
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.config import OuterSettings
from noloco_p2p.core.messages import HostTensor, TensorSpec
from noloco_p2p.core.snapshots import FrozenRound, Snapshot, SnapshotRequest, partner_bytes
from noloco_p2p.core.tiles import kept_of, tiling
from noloco_p2p.errors import Violation

Matrix = NDArray[np.float64]
ALPHA, BETA = 0.95, 0.7
OUTER = {"rule": "dct", "inner_steps": 2}
SHAPES = [(128, 192), (96, 40), (67, 50), (64,), (61,), (), (3, 4, 10)]


def sides(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """The sides of a parameter's matrix, and of its tiles: the largest divisors up to 64."""
    height, width = prod(shape[:-1]), prod(shape[-1:])
    rows, columns = ([n for n in range(1, 65) if side % n == 0][-1] for side in (height, width))
    return height, width, rows, columns


def wave(size: int) -> Matrix:
    """The orthonormal DCT-II in its textbook form: row k is c_k·cos(π·k·(2n + 1) / 2·size)."""
    c = [sqrt(1 / size)] + [sqrt(2 / size)] * (size - 1)
    return np.array([[c[k] * cos(pi * k * (2 * n + 1) / (2 * size)) for n in range(size)] for k in range(size)])


def transformed(value: Matrix, *, back: bool = False) -> Matrix:
    """Coefficients of the values, or with `back` the values again, each tile in its place in the matrix."""
    height, width, rows, columns = sides(value.shape)
    matrix, found = value.reshape(height, width), np.empty((height, width))
    left, right = (wave(n).T if back else wave(n) for n in (rows, columns))
    for top in range(0, height, rows):
        for at in range(0, width, columns):
            found[top : top + rows, at : at + columns] = left @ matrix[top : top + rows, at : at + columns] @ right.T
    return found.reshape(value.shape)


def largest(coefficients: Matrix) -> Matrix:
    """The coefficients of largest magnitude in each tile: 32 of 64 × 64."""
    height, width, rows, columns = sides(coefficients.shape)
    matrix, found = coefficients.reshape(height, width), np.zeros((height, width))
    kept = int(np.ceil(32 * rows * columns / 4096))
    for top in range(0, height, rows):
        for at in range(0, width, columns):
            tile = matrix[top : top + rows, at : at + columns]
            for place in np.argsort(-abs(tile).ravel(), kind="stable")[:kept]:
                row, column = divmod(place, columns)
                found[top + row, at + column] = tile[row, column]
    return found.reshape(coefficients.shape)


def in_place(coefficients: torch.Tensor) -> Matrix:
    """Our coefficients, stored tile after tile, arranged as in the reference."""
    height, width, rows, columns = sides(tuple(coefficients.shape))
    tiles = coefficients.double().numpy().reshape(height // rows, width // columns, rows, columns)
    return tiles.transpose(0, 2, 1, 3).reshape(coefficients.shape)


class Reference:
    """One replica under the rule: φ, and m in the weights' own space."""

    def __init__(self, theta: Mapping[str, Matrix]) -> None:
        self.phi = dict(theta)
        self.m = {name: np.zeros_like(value) for name, value in theta.items()}

    def offer(self, theta: Mapping[str, Matrix]) -> dict[str, Matrix]:
        """m ← λm + g, and q."""
        self.m = {name: ALPHA * self.m[name] + (self.phi[name] - theta[name]) for name in theta}
        return {name: largest(transformed(m)) for name, m in self.m.items()}

    def merge(self, mine: Mapping[str, Matrix], every: list[dict[str, Matrix]]) -> None:
        """m ← m − IDCT(q) + IDCT(Q), φ ← φ − lr·IDCT(Q)."""
        for name, q in mine.items():
            shared = transformed(np.mean([one[name] for one in every], axis=0), back=True)
            self.m[name] = self.m[name] - transformed(q, back=True) + shared
            self.phi[name] = self.phi[name] - BETA * shared


def random(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def train(stages: list[TorchStage], seed: int, steps: int = 2) -> None:
    for step in range(steps):
        run_microbatch(stages, make_batch(100 * seed + step), microbatch(step, f"origin-{seed}-{id(stages)}"))
        for stage in stages:
            stage.inner_step(make_label(step + 1))


def theta_of(stage: TorchStage) -> dict[str, Matrix]:
    return {name: theta.detach().double().numpy().copy() for name, theta in stage.parameters.items()}


def state_of(stage: TorchStage, kind: str) -> dict[str, torch.Tensor]:
    tensors = stage.capture(0, 0.0, 0).tensors
    found = {tensor.name: host_tensor.to_torch(tensor) for tensor in tensors}
    return {name.removeprefix(f"{kind}/"): value for name, value in found.items() if name.startswith(f"{kind}/")}


def bits(values: Mapping[str, torch.Tensor]) -> bytes:
    return b"".join(value.numpy().tobytes() for value in values.values())


def round_of(replicas: list[list[TorchStage]], number: int) -> list[FrozenRound]:
    """All replicas freeze a round, and merge what all have frozen, encoded and decoded as if it had travelled."""
    frozen = [stages[0].snapshot(number, 2 * number) for stages in replicas]
    theirs = [vector_of(stages[0], one) for stages, one in zip(replicas, frozen, strict=True)]
    for at, stages in enumerate(replicas):
        stages[0].merge(frozen[at], theirs[:at] + theirs[at + 1 :])
    return frozen


def make_replicas(dtype: str, peers: str = "abc") -> list[list[TorchStage]]:
    return [make_stages(make_manifest(dtype=dtype, outer=OUTER), peer) for peer in peers]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_transform_is_the_formula_and_orthonormal(shape: tuple[int, ...]) -> None:
    value, dct = random(shape), DctTiles()
    found = dct.forward(value)
    assert np.allclose(in_place(found), transformed(value.numpy()), rtol=0, atol=1e-12)
    assert torch.allclose(dct.inverse(found), value, rtol=0, atol=1e-13)
    assert np.array_equal(in_place(dct.largest(found)), largest(in_place(found)))


def test_of_equal_coefficients_those_in_front_are_kept() -> None:
    equal = torch.ones(64, 128).mul_(torch.tensor([1.0, -1.0]).repeat(64))
    kept = DctTiles().largest(equal).view(2, 4096)
    assert torch.equal(kept != 0, (torch.arange(4096) < 32).expand(2, 4096))


def test_waves_are_the_same_wherever_cos_is_a_little_different() -> None:
    """No wave is so close to the midpoint of two float32 numbers that the last bits of float64 would decide."""
    for size in range(1, 65):
        exact = basis(size, torch.float64)
        for nudge in (1 - 2**-51, 1 + 2**-51):
            assert torch.equal((exact * nudge).float(), basis(size, torch.float32)), size


@pytest.mark.parametrize("dtype", ["float32", *soak(["float64"])])
def test_rounds_are_the_formulas_and_slow_weights_are_equal_bit_for_bit(dtype: str) -> None:
    """Three replicas, each with its own data; four rounds."""
    replicas = make_replicas(dtype)
    references = [Reference(theta_of(stages[0])) for stages in replicas]
    near: dict[str, Any] = {"rtol": 0, "atol": 1e-12 if dtype == "float64" else 1e-5}
    for number in range(1, 5):
        for seed, stages in enumerate(replicas):
            train(stages, 10 * number + seed)
        offers = [one.offer(theta_of(stages[0])) for one, stages in zip(references, replicas, strict=True)]
        frozen = round_of(replicas, number)
        assert len({one.view.digest for one in frozen if one.view}) == 1
        assert len({bits(state_of(stages[0], "slow")) for stages in replicas}) == 1
        assert len({bits(state_of(stages[0], "momentum")) for stages in replicas}) == 3
        for reference, offer, stages in zip(references, offers, replicas, strict=True):
            reference.merge(offer, offers)
            after, momentum = theta_of(stages[0]), state_of(stages[0], "momentum")
            for name, phi in reference.phi.items():
                assert np.allclose(after[name], phi, **near), name
                assert np.allclose(in_place(momentum[name]), -transformed(reference.m[name]), **near), name
    assert all(np.abs(phi - reference.m[name]).max() > 1e-3 for name, phi in references[0].phi.items())


def test_if_all_coefficients_travel_it_is_heavy_ball_momentum_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noloco_p2p.core.tiles.KEPT", 4096)
    replicas = make_replicas("float64")
    phi, momentum = theta_of(replicas[0][0]), dict.fromkeys(theta_of(replicas[0][0]), np.zeros(()))
    for number in range(1, 4):
        for seed, stages in enumerate(replicas):
            train(stages, 10 * number + seed)
        thetas = [theta_of(stages[0]) for stages in replicas]
        round_of(replicas, number)
        for name in phi:
            momentum[name] = ALPHA * momentum[name] + sum(theta[name] for theta in thetas) / 3 - phi[name]
            phi[name] = phi[name] + BETA * momentum[name]
            assert np.allclose(theta_of(replicas[0][0])[name], phi[name], rtol=0, atol=1e-12)


def test_a_replica_that_does_not_count_merges_what_the_others_do_and_stays_equal() -> None:
    replicas = make_replicas("float32")
    for seed, stages in enumerate(replicas):
        train(stages, seed)
    frozen = [stages[0].snapshot(1, 2) for stages in replicas]
    theirs = [vector_of(stages[0], one) for stages, one in zip(replicas, frozen, strict=True)]
    replicas[0][0].merge(frozen[0], theirs[1:2])
    replicas[1][0].merge(frozen[1], theirs[:1])
    replicas[2][0].merge(frozen[2], theirs[:2], counted=False)
    assert len({bits(state_of(stages[0], "slow")) for stages in replicas}) == 1


def test_a_replica_goes_on_from_its_captured_state() -> None:
    replicas, twin = make_replicas("float32"), make_stages(make_manifest(dtype="float32", outer=OUTER), "c")
    for number in range(1, 4):
        for seed, stages in enumerate(replicas):
            train(stages, 10 * number + seed)
        if number == 2:
            for stage, other in zip(twin, replicas[2], strict=True):
                stage.restore(other.capture(1, 4.0, 4))
            replicas[2] = twin
        round_of(replicas, number)
    assert len({bits(state_of(stages[0], "slow")) for stages in replicas}) == 1


@pytest.mark.parametrize(("shapes", "least"), [([(384, 64), (256, 64), (64, 256), (64,)], 16), ([(4096, 4096)], 64)])
def test_a_vector_weighs_16_times_less_than_all_of_delta_or_better(shapes: list[tuple[int, ...]], least: int) -> None:
    """Including the sample of θ, which travels with either. 64 × 64: 192 bytes of 16,384."""
    count = sum(map(prod, shapes))
    whole = partner_bytes("full", count, count, "float32")
    assert whole / partner_bytes("full", count, count, "float32", SparseVector(shapes).kept) >= least
    assert SparseVector([(64, 64)]).kept * (4 + 2) == 192
    assert kept_of(4096) == 32


def test_what_travels_decodes_to_what_was_frozen() -> None:
    stage = make_replicas("float32", "a")[0]
    train(stage, 1)
    frozen = stage[0].snapshot(1, 2)
    sent = stage[0].encode(frozen, SnapshotRequest(0), "b")
    assert tuple(tensor.spec for tensor in sent.tensors) == stage[0].state.snapshot
    kept = sum(tiling(theta.shape).kept_of_all for theta in stage[0].parameters.values())
    assert sent.tensors[0].shape == sent.tensors[1].shape == (kept,)
    assert bytes(vector_of(stage[0], frozen).vector.data) == bytes(frozen.vector.data)


def with_first(sent: Snapshot, at: int, *values: float) -> Snapshot:
    """The snapshot with other values at the front of a tensor. The first tile has 61 × 32 values; 16 of them travel."""
    tensors = list(sent.tensors)
    changed = host_tensor.to_torch(tensors[at]).clone()
    changed[: len(values)] = torch.tensor(values, dtype=changed.dtype)
    tensors[at] = host_tensor.from_torch(tensors[at].name, changed)
    return replace(sent, tensors=tuple(tensors))


@pytest.mark.parametrize(
    ("at", "values", "said"),
    [
        (1, (-1,), "places that do not ascend within a tile"),
        (1, (*range(1937, 1953),), "places that do not ascend within a tile"),
        (1, (0, 0), "places that do not ascend within a tile"),
        (1, (9, 5), "places that do not ascend within a tile"),
        (0, (np.nan,), "not finite in vector"),
        (0, (np.inf,), "not finite in vector"),
    ],
)
def test_an_invalid_sparse_vector_is_refused(at: int, values: tuple[float, ...], said: str) -> None:
    stage = make_replicas("float32", "a")[0][0]
    frozen = stage.snapshot(1, 2)
    sent = with_first(stage.encode(frozen, SnapshotRequest(0), "b"), at, *values)
    with pytest.raises(Violation, match=said):
        stage.decode(frozen, SnapshotRequest(0), sent)


def test_another_length_or_type_is_refused() -> None:
    stage = make_replicas("float32", "a")[0][0]
    frozen = stage.snapshot(1, 2)
    sent = stage.encode(frozen, SnapshotRequest(0), "b")
    vector, places, sample = sent.tensors
    short = HostTensor(*TensorSpec("places", "int16", (places.shape[0] - 1,)), places.data[:-2])
    wide = host_tensor.from_torch("places", host_tensor.to_torch(places).int())
    for tensors in ((vector, short, sample), (vector, wide, sample), (vector, sample), (places, vector, sample)):
        with pytest.raises(Violation, match="does not fit this stage"):
            stage.decode(frozen, SnapshotRequest(0), replace(sent, tensors=tensors))


@pytest.mark.parametrize("codec", ["bfloat16", "int8", "int4"])
def test_values_and_places_have_no_other_codec(codec: str) -> None:
    with pytest.raises(ValidationError, match="codec"):
        OuterSettings(rule="dct", codec=codec)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="beta 0 is not a valid outer learning rate"):
        make_manifest(outer=OUTER | {"beta": 0.0})
