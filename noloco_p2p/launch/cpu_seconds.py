"""Measures where the CPU time of node processes goes, thread by thread, from Linux's /proc."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from noloco_p2p.errors import LocalError
from noloco_p2p.host import cores

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """CPU seconds of a process since its start."""

    threads: dict[int, float]
    """By thread id; the one whose id is the process id runs the event loop."""
    children: float
    """CPU seconds of the live processes that it started (the libp2p daemon)."""


def read(pid: int) -> CpuSeconds:
    """CPU seconds of a process. Raises LocalError if it has ended."""
    threads = {}
    try:
        for task in (PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                threads[int(task.name)] = _fields(task / "stat")[1]
    except OSError as error:
        raise LocalError(f"process {pid} has ended") from error
    children = 0.0
    for stat in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parent, seconds = _fields(stat)
            children += seconds if parent == pid else 0.0
    return CpuSeconds(threads, children)


def _fields(stat: Path) -> tuple[int, float]:
    """(parent process, CPU seconds): fields 4, 14 and 15 of proc(5). The name in field 2 may contain spaces."""
    fields = stat.read_text(errors="replace").rpartition(")")[2].split()
    return int(fields[1]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine() -> float | None:
    """CPU seconds of everything on this machine since its start; None if /proc shows other cores than ours."""
    lines = [line.split() for line in (PROC / "stat").read_text().splitlines() if line.startswith("cpu")]
    if len(lines) - 1 != cores():
        return None
    user, nice, system, _, _, irq, softirq, steal = (int(field) for field in lines[0][1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def split(pid: int, before: CpuSeconds, after: CpuSeconds) -> dict[str, float]:
    """CPU seconds between two readings: `compute`, `loop` and `wire`.

    `loop` is the main thread (event loop: messages, digests, routing); `compute` is the busiest other thread, which is
    the device's; `wire` is the rest: gRPC's own threads, the libp2p daemon, and the little that data and metrics take.
    """
    spent = {task: seconds - before.threads.get(task, 0.0) for task, seconds in after.threads.items()}
    loop = spent.pop(pid, 0.0)
    compute = max(spent.values(), default=0.0)
    wire = sum(spent.values()) - compute + after.children - before.children
    return {"compute": compute, "loop": loop, "wire": wire}
