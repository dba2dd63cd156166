"""How full the device's memory is."""

from collections.abc import Callable

import torch

from noloco_p2p.compute.factory import pick_device


def meter(device: str) -> Callable[[], tuple[int, int]] | None:
    """Tells bytes used, by whomever, and in total, from any thread. None where the CPU is the device.

    Raises LocalError for a device that this machine does not have.
    """
    chosen = pick_device(device)
    if chosen.type != "cuda":
        return None

    def measure() -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(chosen)
        return total - free, total

    return measure
