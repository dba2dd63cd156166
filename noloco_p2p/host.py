"""The cores and the memory that this process may use: those of the machine, or fewer in a container."""

import contextlib
import os
from pathlib import Path

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
"""On Linux; the latter is the control group (version 2) of this process's container."""


def cores() -> int:
    """Cores that this process may use; in a container, as many as its share of CPU time comes to."""
    allowed = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no such file, or no limit (`max`)
        share, period = map(int, (CGROUP / "cpu.max").read_bytes().split())
        return max(1, min(allowed, share // period))
    return allowed


def memory_bytes() -> int:
    """RAM of this machine, bytes, or the memory limit of this process's container if that is less."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):
        return min(whole, int((CGROUP / "memory.max").read_bytes()))
    return whole


def free_host_bytes() -> int | None:
    """Bytes that this process can get without swapping, on the machine or in its container; None if unknown."""
    return min((each for each in (_available(), _left_in_container()) if each is not None), default=None)


def _available() -> int | None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":") for line in MEMINFO.read_text(encoding="ascii").splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return None


def _left_in_container() -> int | None:
    """Bytes left below the limit of the control group. Cached files are evicted first, so they count as free."""
    with contextlib.suppress(OSError, ValueError, KeyError):  # no such files, or no limit (`max`)
        limit, used = (int((CGROUP / name).read_bytes()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        return max(0, limit - used + int(stat["inactive_file"]))
    return None
