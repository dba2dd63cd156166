"""`noloco pause` and `noloco resume`: signals to the nodes of a directory, which is a node's or a swarm's."""

import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.launch import node_probe

KEY_LOCK = "identity.key.lock"
"""Locked by the process that runs as this node (io/identity.py)."""
PROC = Path("/proc")
PAUSE, RESUME = signal.SIGUSR1, signal.SIGUSR2


def send_signal(directory: Path, number: signal.Signals) -> list[str]:
    """Send a signal to every node that runs in the directory or just below it; returns their descriptions.

    Raises ConfigError when no node runs there, LocalError when one may not be sent a signal.
    """
    if not directory.is_dir():
        raise ConfigError(f"there is no directory {directory}")
    signalled = []
    for node_dir in node_dirs(directory):
        pid = running_pid(node_dir)
        if pid is not None:
            signalled.append(f"{node_dir} (process {pid})")
            try:
                os.kill(pid, number)
            except OSError as error:
                raise LocalError(f"node {signalled[-1]}: {error.strerror}") from error
    if not signalled:
        raise ConfigError(f"no node runs in {directory}: --dir is the directory of a node, or that of noloco swarm")
    return signalled


def node_dirs(directory: Path) -> Iterator[Path]:
    """The directory itself when it is a node's, else those of nodes just below it."""
    if (directory / KEY_LOCK).exists():
        yield directory
    else:
        yield from (path.parent for path in sorted(directory.glob(f"*/{KEY_LOCK}")))


def running_pid(node_dir: Path) -> int | None:
    """The process that runs as the node of this directory and has written where it can be reached; None without one.

    What a killed node left behind may name a process that belongs to another program by now: the process must be
    the one that holds the node's identity.
    """
    endpoints = node_probe.read_endpoints(node_dir)
    if endpoints is None or not in_use(node_dir) or not _holds_lock(endpoints.pid, node_dir / KEY_LOCK):
        return None
    return endpoints.pid


def in_use(node_dir: Path) -> bool:
    """Whether a process runs as the node of this directory."""
    try:
        with (node_dir / KEY_LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _holds_lock(pid: int, lock: Path) -> bool:
    """Whether the process has the lock file open; on a system without /proc, whether its name is that of a node."""
    if PROC.is_dir():
        try:
            return any(file.exists() and file.samefile(lock) for file in (PROC / str(pid) / "fd").iterdir())
        except OSError:
            return False
    command = ["ps", "-o", "args=", "-p", str(pid)]
    return "noloco" in subprocess.run(command, capture_output=True, text=True, check=False).stdout
