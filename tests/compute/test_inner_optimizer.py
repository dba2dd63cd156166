"""Muon updates the matrices of the layers, as published, and AdamW the rest."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference import newton_schulz
from stages import make_manifest, make_stages
from torch import nn

from noloco_p2p.compute import muon
from noloco_p2p.compute.hardware import autocast, precision
from noloco_p2p.compute.inner_optimizer import InnerOptimizer
from noloco_p2p.compute.model import StageModule, make_stage_module, meta_stage_module
from noloco_p2p.compute.model_family import checked_config
from noloco_p2p.compute.muon import Muon, orthogonal
from noloco_p2p.config import InnerSettings, RunManifest

RATE = 0.01
MATRICES = {
    "llama": [
        *(f"self_attn.{one}_proj.weight" for one in "qkvo"),
        *(f"mlp.{one}_proj.weight" for one in ("gate", "up", "down")),
    ],
    "gpt2": ["attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"],
    "opt": [
        *(f"self_attn.{one}.weight" for one in ("q_proj", "k_proj", "v_proj", "out_proj")),
        "fc1.weight",
        "fc2.weight",
    ],
    "qwen3": [
        *(f"self_attn.{one}_proj.weight" for one in "qkvo"),
        *(f"mlp.{one}_proj.weight" for one in ("gate", "up", "down")),
    ],
}
"""The matrices of a layer, by family."""
LAYERS = {"llama": "model.layers", "gpt2": "transformer.h", "opt": "model.decoder.layers", "qwen3": "model.layers"}


def by_muon(family: str = "llama", stages: int = 2, **inner: Any) -> RunManifest:
    return make_manifest(family, stages, inner={"optimizer": "muon", **inner})


def module(manifest: RunManifest, index: int) -> StageModule:
    return meta_stage_module(checked_config(manifest), index, manifest.stages, dtype=torch.float64)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("family", sorted(MATRICES))
def test_matrices_are_those_of_the_layers_at_every_stage(family: str, stages: int) -> None:
    """Neither embeddings nor positions, nor OPT's projections next to its layers, nor the head."""
    manifest = by_muon(family, stages)
    found = [module(manifest, index).layer_matrices() for index in range(stages)]
    expected = {f"{LAYERS[family]}.{layer}.{name}" for layer in range(4) for name in MATRICES[family]}
    assert frozenset().union(*found) == expected
    assert sum(map(len, found)) == len(expected)


def test_an_embedding_within_a_layer_is_no_matrix() -> None:
    part = module(by_muon(), 0)
    before = part.layer_matrices()
    part.causal.model.layers[0].own = nn.Embedding(3, 4)
    part = replace(part, parameters=dict(part.causal.named_parameters()))
    assert "model.layers.0.own.weight" in part.parameters
    assert part.layer_matrices() == before


def give(optimizer: InnerOptimizer, part: StageModule, seed: int, rate: float = RATE) -> dict[str, torch.Tensor]:
    """One step on random gradients, which are returned."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in part.parameters.values():
        parameter.grad = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    optimizer.step(rate)
    return {name: one.grad.clone() for name, one in part.parameters.items() if one.grad is not None}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_update_is_that_of_the_published_iteration_in_float64(family: str) -> None:
    parts = [
        make_stage_module(checked_config(by_muon(family)), 0, 2, seed=1, dtype=torch.float64) for _ in ("muon", "adamw")
    ]
    matrices = parts[0].layer_matrices()
    optimizers = [
        InnerOptimizer(part.parameters, settings, chosen)
        for part, settings, chosen in zip(
            parts,
            (
                InnerSettings(optimizer="muon", weight_decay=0.1, adamw_factor=2),
                InnerSettings(optimizer="adamw", weight_decay=0.1),
            ),
            (matrices, ()),
            strict=True,
        )
    ]
    mine, plain = (part.parameters for part in parts)
    momentum = {name: torch.zeros_like(mine[name], requires_grad=False) for name in matrices}
    for step in (1, 2, 3):
        before = {name: theta.detach().clone() for name, theta in mine.items()}
        gradient = give(optimizers[0], parts[0], step)
        give(optimizers[1], parts[1], step, 2 * RATE)
        for name in sorted(matrices):
            momentum[name] += 0.05 * (gradient[name] - momentum[name])
            exact = newton_schulz(gradient[name] + 0.95 * (momentum[name] - gradient[name]))
            factor = 0.2 * math.sqrt(max(exact.shape)) * RATE
            found = ((1 - RATE * 0.1) * before[name] - mine[name].detach()) / factor
            assert float((found - exact).norm() / exact.norm()) < 1e-9, name
            assert not torch.allclose(mine[name], plain[name], rtol=1e-3)
            # This is why both optimizers can have similar learning rates.
            assert float((factor * found).square().mean().sqrt()) == pytest.approx(0.2 * RATE, rel=0.2)
        assert all(torch.equal(mine[name], plain[name]) for name in mine.keys() - matrices)
    means, squares = (optimizers[0].moments()[kind] for kind in ("adam_mean", "adam_square"))
    assert list(means) == list(mine)
    assert squares.keys() == mine.keys() - matrices
    for name in matrices:
        assert torch.allclose(means[name], momentum[name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("columns", [40, 48, 96])
def test_the_iteration_brings_singular_values_near_one_and_commutes_with_transposition(columns: int) -> None:
    """Wide matrices are orthogonalized by a polynomial of their Gram matrix, except in bfloat16."""
    matrices = torch.randn(2, 24, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for dtype, error in ((torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.03)):
        directions = orthogonal(matrices, dtype).double()
        assert torch.equal(orthogonal(matrices.mT, dtype).double(), directions.mT)
        for matrix, direction in zip(matrices, directions, strict=True):
            values, exact = torch.linalg.svdvals(direction), newton_schulz(matrix)
            assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
            assert float((direction - exact).norm() / exact.norm()) < error


@pytest.mark.parametrize("columns", [24, 96])
def test_rounding_does_not_spoil_directions_with_tiny_singular_values(columns: int) -> None:
    """A gradient over few tokens has a low rank, and the iteration amplifies the rest of it together with its error."""
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(24, 3, generator=generator) @ torch.randn(3, columns, generator=generator)
    matrix += 1e-5 * torch.randn(24, columns, generator=generator)
    direction, exact = orthogonal(matrix[None], torch.float32)[0], newton_schulz(matrix.double()).float()
    assert float((direction - exact).norm() / exact.norm()) < 1e-3


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has its own Muon from 2.9 on")
def test_in_bfloat16_it_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, over three steps of a tall and a wide matrix."""
    monkeypatch.setattr(muon, "precision", lambda tensor: torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    shapes = (24, 40), (40, 24)
    mine, theirs = ([nn.Parameter(torch.full(shape, 0.5)) for shape in shapes] for _ in range(2))
    ours = Muon(mine, lr=RATE, weight_decay=0.1)
    torchs = torch.optim.Muon(theirs, lr=RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for one, other in zip(mine, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        ours.step()
        torchs.step()  # type: ignore[no-untyped-call]
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def test_passes_and_the_iteration_run_in_bfloat16_only_where_that_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """And never in float64, in which runs are replayed to 1e-9."""
    passes: list[bool] = []
    monkeypatch.setattr(torch, "autocast", lambda device, *, dtype, enabled: passes.append(enabled))

    def low(tensor: Any) -> bool:
        autocast(tensor)
        assert precision(tensor) is (torch.bfloat16 if passes[-1] else tensor.dtype)
        return passes[-1]

    for dtype in (torch.float64, torch.float32):
        assert not low(torch.zeros(2, 2, dtype=dtype)), "a CPU may have no instructions for bfloat16"
    for capability, expected in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
        assert low(on_gpu) is expected
        on_gpu.dtype = torch.float64
        assert not low(on_gpu)


def test_muon_has_no_mean_squares_to_send() -> None:
    stage = make_stages(by_muon())[0]
    named = [tensor.name for tensor in stage.capture(0, 0.0, 0).tensors]
    assert [spec.name for spec in stage.state.replica] == named
    squares = {name.removeprefix("adam_square/") for name in named if name.startswith("adam_square/")}
    assert squares == stage.parameters.keys() - stage._optimizer.matrices
    assert sum(name.startswith("adam_mean/") for name in named) == len(stage.parameters)
