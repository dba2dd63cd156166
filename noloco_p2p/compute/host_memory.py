"""The host's free memory, and how much a run needs. Does not import torch: a launcher checks this before it starts."""

from pathlib import Path

from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import ITEM_BYTES
from noloco_p2p.errors import LocalError
from noloco_p2p.humanize import plural, size_text

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
"""On Linux; the latter is the control group (version 2) of this process's container."""
SURE_COPIES = 4
"""Minimum multiples of the weights on the host, on any device: frozen rounds, a partner's vector, a checkpoint."""
PROCESS_BYTES = 2**27
"""Minimum memory of a node's process and its libp2p daemon, without the weights."""


def microbatch_bytes(manifest: RunManifest, hidden: int, vocabulary: int | None) -> int:
    """Minimum size of one microbatch on a stage's device: hidden states, at the last stage also the logits of all
    tokens, and the gradients of both. `vocabulary`: None at other stages."""
    rows = manifest.microbatch_size * manifest.sequence_length
    return 2 * rows * (hidden + (vocabulary or 0)) * ITEM_BYTES[manifest.compute_dtype]


def check_swarm_fits(manifest: RunManifest, parameters: int) -> None:
    """Raises LocalError if all nodes of a run with this many parameters together cannot fit this machine."""
    free = free_host_bytes()
    nodes = manifest.stages * manifest.start_replicas
    weights = SURE_COPIES * parameters * manifest.start_replicas * ITEM_BYTES[manifest.compute_dtype]
    needed = weights + nodes * PROCESS_BYTES
    if free is not None and needed > free:
        raise LocalError(
            f"{plural(nodes, 'node')} {'needs' if nodes == 1 else 'need'} at least {size_text(needed)}, but this "
            f"machine has {size_text(free)} of free memory: use fewer nodes or a smaller model"
        )


def free_host_bytes() -> int | None:
    """Bytes that this process can get without swapping, on the machine or in its container; None if unknown."""
    return min((each for each in (_available(), _left_in_container()) if each is not None), default=None)


def _available() -> int | None:
    try:
        lines = dict(line.split(":") for line in MEMINFO.read_text(encoding="ascii").splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None


def _left_in_container() -> int | None:
    """Bytes left below the limit of the control group. Cached files are evicted first, so they count as free."""
    try:
        limit, used = (int((CGROUP / name).read_bytes()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        return max(0, limit - used + int(stat["inactive_file"]))
    except (OSError, ValueError, KeyError):  # no such files, or no limit (`max`)
        return None
