"""Real torch stages in one process, chained by hand; shared by the tests of `compute`."""

from typing import Any

import torch
from torch import Tensor

from noloco_p2p.compute import host_tensor
from noloco_p2p.compute.factory import make_torch_stage
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.config import ModelSettings, RunManifest
from noloco_p2p.core.messages import Batch, Gradient, MicrobatchId
from noloco_p2p.core.snapshots import FrozenRound, PartnerVector, Snapshot, SnapshotRequest
from noloco_p2p.core.stage_values import Contribution, StepLabel

SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 61,
        "max_position_embeddings": 16,
    },
    "gpt2": {
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "vocab_size": 61,
        "n_positions": 16,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": False,
    },
    "opt": {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "ffn_dim": 48,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 16,
        "vocab_size": 61,
        "max_position_embeddings": 16,
        "dropout": 0.0,
        "tie_word_embeddings": False,
    },
    "qwen3": {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 61,
        "max_position_embeddings": 16,
    },
}
"""A small model of each family."""


def make_manifest(family: str = "llama", stages: int = 2, *, dtype: str = "float64", **fields: Any) -> RunManifest:
    """A run with small microbatches of 2 × 8 tokens, and with `noloco` and AdamW unless `fields` say otherwise."""
    model = ModelSettings(family=family, config=SIZES[family])
    wire = {"forward": dtype, "backward": dtype}
    values = {"microbatch_size": 2, "sequence_length": 8, "wire": wire, "compute_dtype": dtype, **fields}
    values["inner"] = {"optimizer": "adamw"} | dict(fields.get("inner", {}))
    values["outer"] = {"rule": "noloco"} | dict(fields.get("outer", {}))
    return RunManifest(model=model, stages=stages, **values)


def make_stages(manifest: RunManifest, peer_id: str = "me", **options: Any) -> list[TorchStage]:
    """All stages of a run, without the self-test, which has its own tests."""
    return [make_torch_stage(manifest, index, peer_id, self_test=False, **options) for index in range(manifest.stages)]


def make_batch(seed: int, *, ignored: int = 3, padded: int = 0) -> Batch:
    """Random tokens, the last `ignored` targets of the first sample ignored, `padded` tokens of the second masked."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 61, (2, 9), generator=generator, dtype=torch.int32)
    targets = tokens[:, 1:].clone()
    targets[0, 8 - ignored :] = -100
    mask = torch.ones((2, 8), dtype=torch.uint8)
    mask[1, 8 - padded :] = 0
    return Batch(
        host_tensor.from_torch("inputs", tokens[:, :-1].contiguous()),
        host_tensor.from_torch("targets", targets),
        host_tensor.from_torch("mask", mask) if padded else None,
    )


def microbatch(counter: int, peer: str = "origin") -> MicrobatchId:
    """A microbatch id."""
    return MicrobatchId(peer, 7, counter)


def as_gradient(contribution: Contribution, identity: MicrobatchId) -> Gradient:
    """The reply that a stage sends for the result of its backward pass."""
    assert contribution.grad is not None
    return Gradient(
        identity, contribution.grad, contribution.loss_sum, contribution.tokens, ("next",), contribution.finite
    )


def run_microbatch(stages: list[TorchStage], batch: Batch, identity: MicrobatchId) -> list[Contribution]:
    """Take one microbatch through all stages and back. Returns each stage's contribution, from first to last."""
    graphs, flow = [], batch.inputs
    for stage in stages[:-1]:
        graph, flow = stage.forward(flow, batch.mask)
        graphs.append(graph)
    contributions = [stages[-1].loss_backward(identity, flow, batch.targets, batch.mask)]
    for stage, graph in zip(reversed(stages[:-1]), reversed(graphs), strict=True):
        contributions.append(stage.backward(graph, identity, as_gradient(contributions[-1], identity)))
    return contributions[::-1]


def gradients(stages: list[TorchStage]) -> dict[str, Tensor]:
    """The gradients that the stages have accumulated, by global name."""
    return {
        name: parameter.grad.clone()
        for stage in stages
        for name, parameter in stage.parameters.items()
        if parameter.grad is not None
    }


def weights(stages: list[TorchStage]) -> dict[str, Tensor]:
    """A copy of θ of all stages, by global name."""
    return {name: theta.detach().clone() for stage in stages for name, theta in stage.parameters.items()}


def make_label(inner_step: int = 1, learning_rate: float = 1e-2) -> StepLabel:
    """The label of an inner step without routes."""
    return StepLabel(inner_step, inner_step - 1, learning_rate, {})


def vector_of(stage: TorchStage, frozen: FrozenRound) -> PartnerVector:
    """A stage's frozen round as its partner decodes it."""
    request = SnapshotRequest(stage.state.index, lattice=frozen.lattice)
    return stage.decode(frozen, request, stage.encode(frozen, request, "partner"))


def weights_of(stage: TorchStage, round: int = 0, step: int = 0) -> Snapshot:
    """What guardians get from the stage as it is now."""
    dtype = stage.state.weights[stage.state.index].dtype
    return stage.encode(stage.snapshot(round, step), SnapshotRequest(stage.state.index, weights=dtype), "guardian")
