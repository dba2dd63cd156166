"""The devices of this machine: which one a setting selects, what it is, and how full its memory is."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.host import cores


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device of this machine."""

    device: str
    """Its name in torch: `cpu`, `cuda:1`."""
    name: str
    """Product name; empty for a CPU."""
    free_bytes: int
    """Free bytes of its own memory; 0 for a CPU, like `total_bytes`."""
    total_bytes: int
    threads: int
    """Number of CPU threads that torch uses unless `threads` is set."""
    torch_version: str
    cuda_version: str
    """CUDA version for which torch was built; empty for a CPU build."""


def pick_device(name: str) -> torch.device:
    """The device that a setting names; `auto` is CUDA if available.

    Raises ConfigError if the name is invalid, LocalError if this machine does not have the device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: '{name}' is not one of cpu, cuda, cuda:1, …, auto")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise LocalError(f"device: {name} not found (torch sees {count} CUDA devices); set device to cpu or auto")
        return torch.device("cuda", device.index or 0)
    return device


def set_threads(threads: int | None) -> None:
    """Set the number of CPU threads for the calling thread's torch operations.

    None leaves the choice to torch, but without OMP_NUM_THREADS to at most one for each core: torch counts the cores of
    the machine, and threads that a container's CPU limit stops make all others wait.
    """
    if threads is None and "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > cores():
        threads = cores()
    if threads is not None:
        torch.set_num_threads(threads)


def device_info(device: str) -> DeviceInfo:
    """The device that a setting names. Raises like `pick_device`."""
    chosen = pick_device(device)
    name, free, total = "", 0, 0
    if chosen.type == "cuda":
        name = torch.cuda.get_device_name(chosen)
        free, total = torch.cuda.mem_get_info(chosen)
    set_threads(None)
    threads = torch.get_num_threads()
    return DeviceInfo(str(chosen), name, free, total, threads, torch.__version__, str(torch.version.cuda or ""))


def memory_meter(device: str) -> Callable[[], tuple[int, int]] | None:
    """A function, callable from any thread, that returns the device's (bytes used by all processes, total bytes).

    None for the CPU. Raises like `pick_device`.
    """
    chosen = pick_device(device)
    if chosen.type != "cuda":
        return None

    def measure() -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(chosen)
        return total - free, total

    return measure


def precision(tensor: Tensor) -> torch.dtype:
    """The dtype in which to multiply such tensors: bfloat16 for float32 on a GPU that computes in it, else their own.

    Older GPUs emulate bfloat16, more slowly than they compute in float32.
    """
    device = tensor.device
    fast = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if fast and tensor.dtype is torch.float32 else tensor.dtype


def autocast(parameter: Tensor) -> torch.autocast:
    """The context for the passes through a model with such parameters."""
    low = precision(parameter) is torch.bfloat16
    return torch.autocast(parameter.device.type, dtype=torch.bfloat16, enabled=low)


def free_bytes(device: torch.device) -> int:
    """CUDA memory that this process can get: what is free on the device, plus what its own allocator keeps unused."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def pinned_bytes(nbytes: int) -> int:
    """What torch allocates for `nbytes` of pinned memory: the next power of two."""
    return 1 << (nbytes - 1).bit_length()
