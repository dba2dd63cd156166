"""Measures how long a stage takes for one microbatch of random values; used by `noloco doctor` and `bench stage`."""

import statistics
import time

import torch

from noloco_p2p.compute import host_tensor
from noloco_p2p.compute.activation_codec import ActivationCodec
from noloco_p2p.compute.factory import make_torch_stage
from noloco_p2p.compute.hardware import pick_device
from noloco_p2p.compute.model_family import make_config
from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import Batch, Gradient, MicrobatchId


def time_stage(manifest: RunManifest, index: int, device: str, *, limit_s: float = 2.0, repeats: int = 10) -> float:
    """Median seconds that stage `index` takes for the forward and backward pass of one microbatch of random values.

    Measures up to `repeats` times, but at least once, until `limit_s` have passed. Raises like `make_torch_stage`.
    """
    stage, batch = make_torch_stage(manifest, index, "bench", device=device, self_test=False), random_batch(manifest)
    shape_BTD = (manifest.microbatch_size, manifest.sequence_length, int(make_config(manifest.model).hidden_size))
    values_BTD = torch.randn(shape_BTD, generator=torch.Generator().manual_seed(0))
    codecs = (("hidden", manifest.wire.forward), ("grad", manifest.wire.backward))
    hidden, grad = (
        host_tensor.from_torch(name, ActivationCodec(name, codec, shape_BTD, values_BTD.dtype).encode(values_BTD))
        for name, codec in codecs
    )
    flow = batch.inputs if index == 0 else hidden
    took: list[float] = []
    give_up_at = time.perf_counter() + limit_s
    for number in range(repeats + 1):
        identity = MicrobatchId("bench", 0, number)
        began_at = time.perf_counter()
        if index == manifest.stages - 1:
            stage.loss_backward(identity, flow, batch.targets, None)
        else:
            graph, _ = stage.forward(flow, None)
            stage.backward(graph, identity, Gradient(identity, grad, 0.0, 1, ()))
        synchronise(pick_device(device))
        if number:
            took.append(time.perf_counter() - began_at)
        if took and time.perf_counter() > give_up_at:
            break
    return statistics.median(took)


def random_batch(manifest: RunManifest) -> Batch:
    """A batch of random tokens of the vocabulary, the same on every machine."""
    generator = torch.Generator().manual_seed(0)
    shape = (manifest.microbatch_size, manifest.sequence_length + 1)
    vocabulary = make_config(manifest.model).vocab_size
    tokens = torch.randint(0, vocabulary, shape, generator=generator, dtype=torch.int32)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return Batch(host_tensor.from_torch("inputs", inputs), host_tensor.from_torch("targets", targets))


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its work; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
