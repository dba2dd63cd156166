"""How large the stages of a run are, and whether one fits this machine, before anything is allocated."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from noloco_p2p.compute import model_family
from noloco_p2p.compute.host_tensor import DTYPES
from noloco_p2p.compute.model import meta_stage_module
from noloco_p2p.config import RunManifest
from noloco_p2p.errors import LocalError

DEVICE_COPIES = 5
"""Times the weights on the device: θ, accumulated gradients, those of the present microbatch, Adam's two moments."""
HOST_COPIES = 11
"""Times the weights on the host: φ, δ, (φ, Δ) of two rounds, a partner's (φ, Δ), θ and Adam's moments captured."""


@dataclass(frozen=True, slots=True)
class StageSize:
    """What one stage holds. Activations come on top; they depend on the microbatches in flight."""

    index: int
    layers: int
    parameters: int
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The whole model of a run and its stages."""

    family: str
    parameters: int
    stages: tuple[StageSize, ...]


def describe(manifest: RunManifest) -> ModelSize:
    """Parameters and bytes of each stage and in total, without allocating weights. Raises ConfigError."""
    config = model_family.checked_config(manifest)
    dtype = DTYPES[manifest.compute_dtype]
    ranges = model_family.layer_ranges(config.num_hidden_layers, manifest.stages)
    sizes = []
    for index, parameters in enumerate(meta_stage_module(config, 0, manifest.stages, dtype=dtype).counts):
        weights_bytes = parameters * dtype.itemsize
        copies = (DEVICE_COPIES * weights_bytes, HOST_COPIES * weights_bytes)
        sizes.append(StageSize(index, len(ranges[index]), parameters, *copies))
    return ModelSize(manifest.model.family, sum(size.parameters for size in sizes), tuple(sizes))


def check_fits(manifest: RunManifest, index: int, device: torch.device) -> StageSize:
    """The size of a stage that fits this machine's free memory. Raises LocalError when it does not, ConfigError."""
    size = describe(manifest).stages[index]
    on_host = size.host_bytes if device.type == "cuda" else size.host_bytes + size.device_bytes
    _compare(index, on_host, _free_host_bytes(), "free memory")
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what an earlier stage of this process has left
        _compare(index, size.device_bytes, torch.cuda.mem_get_info(device)[0], f"free memory on {device}")
    return size


def _compare(index: int, needed_bytes: int, free_bytes: int | None, what: str) -> None:
    if free_bytes is not None and needed_bytes > free_bytes:
        raise LocalError(
            f"stage {index} needs {needed_bytes / 2**30:.1f} GiB for weights, optimizer and snapshots, but this "
            f"machine has {free_bytes / 2**30:.1f} GiB of {what}: use more stages or a larger machine"
        )


def _free_host_bytes() -> int | None:
    """Memory that can be had without swapping, or None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
