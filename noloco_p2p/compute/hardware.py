"""What the device of a node is, for those who ask before it is used."""

from dataclasses import dataclass

import torch

from noloco_p2p.compute.factory import pick_device


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device that is here."""

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


def hardware(device: str) -> DeviceInfo:
    """The device that a setting asks for. Raises LocalError when it is not here."""
    chosen = pick_device(device)
    name, free, total = "", 0, 0
    if chosen.type == "cuda":
        name = torch.cuda.get_device_name(chosen)
        free, total = torch.cuda.mem_get_info(chosen)
    threads = torch.get_num_threads()
    return DeviceInfo(str(chosen), name, free, total, threads, torch.__version__, str(torch.version.cuda or ""))
