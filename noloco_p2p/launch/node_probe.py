"""A running node seen from outside: the files in its directory, and its /metrics.

For the launcher of `noloco swarm` and for the benches, which learn everything this way and never from shared memory.
"""

import http.client
import json
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noloco_p2p.errors import Unreachable

HOME = Path("noloco-runs")
"""Where a node without --dir has its directory: the first `node-<n>` there that no other process uses."""
ENDPOINTS, SUMMARY = "endpoints.json", "summary.json"
"""Written by a node into its directory once it can be reached, and at its end."""


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


@dataclass(frozen=True, slots=True)
class MetricsReading:
    """All samples of a node's metrics at one moment (`at`, seconds of the monotonic clock)."""

    at: float
    samples: tuple[tuple[str, Mapping[str, str], float], ...]

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples `noloco_<name>` that carry these labels; 0.0 when there is none."""
        return sum(self.by("", name, **labels).values())

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """The same sum, apart for each value of `label`."""
        sums: dict[str, float] = {}
        for found, has, value in self.samples:
            if found == f"noloco_{name}" and labels.items() <= has.items():
                key = has.get(label, "")
                sums[key] = sums.get(key, 0.0) + value
        return sums


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file that is written at one stroke; None when it is not there, not readable or no object."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def read_endpoints(node_dir: Path) -> NodeEndpoints | None:
    """What a node says of itself in `endpoints.json`; None until it is reachable."""
    found = read_json(node_dir / ENDPOINTS)
    if found is None:
        return None
    return NodeEndpoints(found["peer_id"], found["run_id"], found["pid"], tuple(found["join"]), found["metrics"])


def scrape(url: str, timeout_s: float) -> MetricsReading:
    """Read a node's metrics. Raises Unreachable when nothing that can be read comes within `timeout_s`."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as reply:
            text = reply.read().decode()
        families = list(text_string_to_metric_families(text))
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Unreachable(f"no metrics from {url} within {timeout_s:g} s: {error}") from None
    samples = tuple((s.name, s.labels, s.value) for family in families for s in family.samples)
    return MetricsReading(time.monotonic(), samples)
