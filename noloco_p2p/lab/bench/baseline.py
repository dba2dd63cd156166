"""What a swarm is measured against: one process, one thread, plain transformers and fused AdamW.

It trains the default model on the run's own data, all of it read before the clock starts.
Nothing of `compute/` is used.

Shape legend: B microbatch, T sequence, V vocabulary.
"""

import asyncio
import time
from typing import TYPE_CHECKING

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.lab.processes import workers

if TYPE_CHECKING:
    from torch import Tensor

BATCHES = 64
"""Microbatches read beforehand, used round and round."""
WARM_UP_S = 2.0
PEER = "baseline"
"""The data stream is drawn by seed and peer; any name gives one like a node's."""


def measure(microbatches: int, seconds: float) -> float:
    """Tokens/s, measured in a process of its own with one thread. Raises LocalError when that process dies."""
    with workers(1, OMP_NUM_THREADS="1") as pool:
        return pool.submit(train, RunManifest(microbatches_per_step=microbatches), seconds).result()


def train(manifest: RunManifest, seconds: float) -> float:
    """Train for `WARM_UP_S`, then for `seconds` more: tokens per second of the latter."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(manifest.seed)
    inner = manifest.inner
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(manifest.model.family, **manifest.model.config))
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=inner.peak_learning_rate,
        betas=(inner.beta1, inner.beta2),
        eps=inner.eps,
        weight_decay=inner.weight_decay,
        fused=True,
    )
    data = asyncio.run(_read(manifest))
    began, tokens, step = time.perf_counter(), 0, 0
    warm = False
    while True:
        counted = 0
        for index in range(manifest.microbatches_per_step):
            inputs_BT, targets_BT = data[(step * manifest.microbatches_per_step + index) % len(data)]
            logits_BTV = model(input_ids=inputs_BT, use_cache=False).logits
            summed = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")
            summed.backward()  # type: ignore[no-untyped-call]
            counted += targets_BT.numel()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(counted)
        torch.nn.utils.clip_grad_norm_(model.parameters(), inner.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + counted
        passed = time.perf_counter() - began
        if warm and passed >= seconds:
            return tokens / passed
        if not warm and passed >= WARM_UP_S:
            began, tokens, warm = time.perf_counter(), 0, True


async def _read(manifest: RunManifest) -> list[tuple["Tensor", "Tensor"]]:
    """The first microbatches of the run's training data: inputs and targets, both B×T int64."""
    import torch

    from noloco_p2p.io.data.threaded_batches import make_batches

    batches = make_batches(manifest, NodeConfig(), PEER)
    data = []
    for _ in range(BATCHES):
        batch = await batches.next()
        pair = [
            torch.frombuffer(bytearray(tensor.data), dtype=torch.int32).reshape(tensor.shape).long()
            for tensor in (batch.inputs, batch.targets)
        ]
        data.append((pair[0], pair[1]))
    batches.close()
    return data
