"""The devices of this machine: which one a setting asks for, what it is, and how full its memory is."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from noloco_p2p.errors import LocalError


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device of this machine."""

    device: str
    """Its name in torch: `cpu`, `cuda:1`."""
    name: str
    """What its maker calls it; empty for a CPU."""
    free_bytes: int
    """Of its own memory; 0 for a CPU, as `total_bytes`."""
    total_bytes: int
    threads: int
    """CPU threads of torch's own choice."""
    torch_version: str
    cuda_version: str
    """That torch was built for; empty for a CPU build."""


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is any. Raises LocalError for a device that this machine does not have."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise LocalError(f"device: {name} is not here (torch sees {count} CUDA devices); set device to cpu or auto")
        return torch.device("cuda", device.index or 0)
    return device


def set_threads(threads: int | None) -> None:
    """CPU threads of the calling thread's torch operations; None leaves torch's choice."""
    if threads is not None:
        torch.set_num_threads(threads)


def device_info(device: str) -> DeviceInfo:
    """The device that a setting asks for. Raises LocalError when this machine does not have it."""
    chosen = pick_device(device)
    name, free, total = "", 0, 0
    if chosen.type == "cuda":
        name = torch.cuda.get_device_name(chosen)
        free, total = torch.cuda.mem_get_info(chosen)
    threads = torch.get_num_threads()
    return DeviceInfo(str(chosen), name, free, total, threads, torch.__version__, str(torch.version.cuda or ""))


def memory_meter(device: str) -> Callable[[], tuple[int, int]] | None:
    """Measures (bytes used, by any process, and bytes in total), from any thread. None where the CPU is the device.

    Raises LocalError for a device that this machine does not have.
    """
    chosen = pick_device(device)
    if chosen.type != "cuda":
        return None

    def measure() -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(chosen)
        return total - free, total

    return measure


def free_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that this process can have: what is free there, and what its allocator keeps unused."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept
