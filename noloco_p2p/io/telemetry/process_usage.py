"""What this process has of its machine: memory and disk, in bytes."""

import contextlib
import os
import resource
import shutil
import sys
from pathlib import Path

STATM, CGROUP_MEMORY = Path("/proc/self/statm"), Path("/sys/fs/cgroup/memory.max")


def rss_bytes() -> int:
    """This process's memory that is in RAM; where the system does not tell, the most that it ever was."""
    try:
        return int(STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_bytes() -> int:
    """RAM of this machine, or of the container that this process is in where that is less."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no such file, or `max`
        return min(whole, int(CGROUP_MEMORY.read_bytes()))
    return whole


def disk_free_bytes(path: Path) -> int | None:
    """Free space of the file system of `path`; None when there is no such path."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None
