"""A running node seen from outside: the files in its directory, its /metrics, and the signals that pause and resume it.

The launcher of `noloco swarm` and the benches learn everything this way, and nothing from shared memory.
"""

import fcntl
import http.client
import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noloco_p2p.errors import NO_JSON, ConfigError, LocalError, Unreachable

HOME = Path("noloco-runs")
"""Folder of the directories of nodes without --dir: each takes the first `node-<n>` that no other process uses."""
ENDPOINTS, SUMMARY = "endpoints.json", "summary.json"
"""Files that a node writes to its directory, once it can be reached and at its end."""
KEY_LOCK = "identity.key.lock"
"""Locked by the process that runs as this node (io/dht/identity.py)."""
PAUSE, RESUME = signal.SIGUSR1, signal.SIGUSR2
METRICS_BYTES = 1 << 22
"""No more of an answer is read. The metrics of a node have 0.6 MB at most, with 1,024 stages."""
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs of nodes. It uses no proxy: that of the environment (`http_proxy`) is for the web."""


@dataclass(frozen=True, slots=True)
class NodeEndpoints:
    """Who a node is and where it can be reached."""

    peer_id: str
    run_id: str
    pid: int
    join: tuple[str, ...]
    """libp2p addresses for `--join`, best first."""
    metrics: str
    """`http://host:port/metrics`."""
    dialled: bool = True
    """Whether others can dial the node."""


@dataclass(frozen=True, slots=True)
class MetricsReading:
    """All samples of a node's metrics at one moment (`at`, seconds of the monotonic clock)."""

    at: float
    samples: tuple[tuple[str, Mapping[str, str], float], ...]

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples `noloco_<name>` that carry these labels; 0.0 if there are none."""
        return sum(self.by("", name, **labels).values())

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """The same sum, separately for each value of `label`."""
        sums: dict[str, float] = {}
        for found, has, value in self.samples:
            if found == f"noloco_{name}" and labels.items() <= has.items():
                key = has.get(label, "")
                sums[key] = sums.get(key, 0.0) + value
        return sums


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if the file is missing, cannot be read, or holds no object."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, *NO_JSON):
        return None
    return found if isinstance(found, dict) else None


def written_at(path: Path) -> float:
    """When a file was last written, Unix seconds; 0.0 if it is missing, perhaps just removed."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def texts(found: object) -> tuple[str, ...]:
    """The strings in a list from such an object; empty if the value is not a list."""
    return tuple(each for each in found if isinstance(each, str)) if isinstance(found, list) else ()


def read_endpoints(node_dir: Path) -> NodeEndpoints | None:
    """The content of a node's `endpoints.json`; None if the file is missing, incomplete or damaged."""
    found = read_json(node_dir / ENDPOINTS) or {}
    peer_id, run_id, pid, metrics = (found.get(name) for name in ("peer_id", "run_id", "pid", "metrics"))
    if not (isinstance(pid, int) and isinstance(peer_id, str) and isinstance(run_id, str) and isinstance(metrics, str)):
        return None
    return NodeEndpoints(peer_id, run_id, pid, texts(found.get("join")), metrics, found.get("dialled") is not False)


def scrape(url: str, timeout_s: float) -> MetricsReading:
    """Read a node's metrics. Raises Unreachable if no readable answer comes within `timeout_s`."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        with DIRECT.open(url, timeout=timeout_s) as reply:
            text = reply.read(METRICS_BYTES).decode()
        families = list(text_string_to_metric_families(text))
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Unreachable(f"no metrics from {url} within {timeout_s:g} s: {error}") from None
    samples = tuple((s.name, s.labels, s.value) for family in families for s in family.samples)
    return MetricsReading(time.monotonic(), samples)


# --- the processes of a directory, which is a node's or a swarm's ----------------------------------------------------


def send_signal(directory: Path, number: signal.Signals) -> list[str]:
    """Send a signal to every node running in the directory or one level below. Returns descriptions of these nodes.

    Raises ConfigError if no node is running there, LocalError if one may not be signalled.
    """
    if not directory.is_dir():
        raise ConfigError(f"there is no directory {directory}")
    signalled = []
    for node_dir in node_dirs(directory):
        if (node := running(node_dir)) is not None:
            signalled.append(f"{node_dir} (process {node.pid})")
            try:
                os.kill(node.pid, number)
            except OSError as error:
                raise LocalError(f"node {signalled[-1]}: {error.strerror}") from error
    if not signalled:
        raise ConfigError(f"no node is running in {directory}: give --dir the directory of a node or of noloco swarm")
    return signalled


def node_dirs(directory: Path) -> Iterator[Path]:
    """The directory itself if it is a node's; otherwise the directories of nodes one level below it."""
    if (directory / KEY_LOCK).exists():
        yield directory
    else:
        yield from (path.parent for path in sorted(directory.glob(f"*/{KEY_LOCK}")))


def running(node_dir: Path) -> NodeEndpoints | None:
    """The node of this directory, if it is running and has written where it can be reached.

    The process id that a killed node left behind may belong to another program by now, so the process must be the one
    that holds the lock on the node's identity.
    """
    endpoints = read_endpoints(node_dir)
    if endpoints is None or not in_use(node_dir) or not _holds_lock(endpoints.pid, node_dir / KEY_LOCK):
        return None
    return endpoints


def in_use(node_dir: Path) -> bool:
    """Whether a process is running as the node of this directory."""
    try:
        with (node_dir / KEY_LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def _holds_lock(pid: int, lock: Path) -> bool:
    """Whether the process has the lock file open."""
    try:
        return any(file.exists() and file.samefile(lock) for file in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
