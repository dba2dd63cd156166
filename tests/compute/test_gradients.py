"""Gradients of a pipelined microbatch equal single-process autograd for every parameter.

The reference is the unsplit model as plain transformers builds it, in float64, with the stages' weights loaded into it.
"""

import pytest
import torch
from soak import soak
from stages import gradients, make_batch, make_manifest, make_stages, microbatch, run_microbatch, weights
from torch import Tensor
from transformers import AutoModelForCausalLM

from noloco_p2p.compute import host_tensor, model_family
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import Batch

TOLERANCE = 1e-12


def reference(manifest: RunManifest, theta: dict[str, Tensor], batches: list[Batch]) -> tuple[float, dict[str, Tensor]]:
    """The summed loss and its gradient for every parameter of the unsplit model."""
    config = model_family.make_config(manifest.model)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    model.load_state_dict(theta, strict=True)
    loss_sum = 0.0
    for batch in batches:
        mask = None if batch.mask is None else host_tensor.to_torch(batch.mask)
        logits = model(input_ids=host_tensor.to_torch(batch.inputs).long(), attention_mask=mask, use_cache=False).logits
        targets = host_tensor.to_torch(batch.targets).long()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        torch.autograd.backward(loss)
        loss_sum += float(loss.detach())
    return loss_sum, {name: parameter.grad for name, parameter in model.named_parameters()}


def deviations(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """max|a − b| / max|b| for each parameter."""
    assert sorted(found) == sorted(expected)
    return {name: float((found[name] - grad).abs().max() / grad.abs().max()) for name, grad in expected.items()}


def pipelined(stages: list[TorchStage], batches: list[Batch]) -> float:
    """The loss summed over the microbatches."""
    return sum(run_microbatch(stages, batch, microbatch(i))[0].loss_sum for i, batch in enumerate(batches))


@pytest.mark.parametrize("count", [3, *soak([2, 4])])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "qwen3"])
def test_pipeline_equals_single_process(name: str, count: int) -> None:
    manifest = make_manifest(name, count)
    stages = make_stages(manifest)
    batches = [make_batch(1), make_batch(2, ignored=0), make_batch(3, padded=2)]
    loss_sum, expected = reference(manifest, weights(stages), batches)
    assert pipelined(stages, batches) == pytest.approx(loss_sum, rel=TOLERANCE)
    worst = deviations(gradients(stages), expected)
    assert max(worst.values()) <= TOLERANCE, {k: v for k, v in worst.items() if not v <= TOLERANCE}


def test_one_stage_is_the_whole_model() -> None:
    manifest = make_manifest("llama", 1)
    stages, batches = make_stages(manifest), [make_batch(1)]
    loss_sum, expected = reference(manifest, weights(stages), batches)
    contribution = run_microbatch(stages, batches[0], microbatch(0))[0]
    assert contribution.grad is None
    assert contribution.loss_sum == pytest.approx(loss_sum, rel=TOLERANCE)
    assert max(deviations(gradients(stages), expected).values()) <= TOLERANCE


def test_embedding_gets_its_gradient() -> None:
    stages = make_stages(make_manifest("llama", 2))
    run_microbatch(stages, make_batch(1, ignored=0), microbatch(0))
    embedding = gradients(stages)["model.embed_tokens.weight"]
    used = sorted(set(host_tensor.to_torch(make_batch(1, ignored=0).inputs).flatten().tolist()))
    assert embedding[used].abs().sum(dim=1).min() > 0
