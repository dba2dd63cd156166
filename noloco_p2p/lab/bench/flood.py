"""What a stranger that floods one node (`floods`) costs a swarm, compared with a process that uses as much CPU time.

One 2 × 2 swarm, an open run on loopback, trains all the time. Each window with a flood is followed by one in which a
harmless process uses as much CPU time as the attacker did, because here the attacker shares the swarm's cores, which a
real one would not.
"""

import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from noloco_p2p.io.telemetry.scrape_targets import METRICS_PATH
from noloco_p2p.lab.bench import floods, pipeline
from noloco_p2p.lab.bench.node_fleet import Fleet
from noloco_p2p.lab.processes import peer_process
from noloco_p2p.launch import cpu_seconds as cpu
from noloco_p2p.launch.node_probe import DIRECT, NodeEndpoints

TARGET = 0.95
VICTIM = "1-0"
"""The flooded node: one of a later stage, which serves the calls that anybody can make."""
SETTLE_S = 10.0
"""Seconds from the beginning of a flood to the measurement, and from its end to the next measurement."""
TICK_S = 0.01
PAGE_S = 5.0


def run(kinds: Sequence[str], pairs: int, seconds: float) -> dict[str, Any]:
    """Measure, and return the figures: for each kind `pairs` windows of `seconds` with the flood, each followed by one
    without. Raises LocalError if the swarm fails."""
    with pipeline.steady_swarm(pipeline.MICROBATCHES) as fleet:
        found = {kind: _compare(fleet, kind, pairs, seconds) for kind in kinds}
    worst = min(one["ratio"] for one in found.values())
    return {"bench": "flood", "ratio": worst, "target": TARGET, **found, "definitions": DEFINITIONS}


DEFINITIONS = {
    "ratio": "tokens_per_s, flooded over quiet: the median over the pairs; the smallest of all kinds",
    "quiet": "a process uses as much CPU time as the attacker did, and touches nothing",
    "tokens_per_s": "of the swarm",
    "busy_per_s": "Busy answers that the nodes of stage 0 got",
    "attacker_cores": "CPU seconds of the attacker per second",
    "victim_cores": "the same of the flooded node, with its libp2p daemon",
    "victim_mib": "resident memory of the flooded node at the end of the window",
    "victim_files": "its open files at the same time",
}


def _compare(fleet: Fleet, kind: str, pairs: int, seconds: float) -> dict[str, Any]:
    victim = fleet.nodes[VICTIM].endpoints
    assert victim is not None, "a steady swarm can be reached"
    with DIRECT.open(victim.metrics.removesuffix(METRICS_PATH) + "/status", timeout=PAGE_S) as page:
        [address, *_] = json.load(page)["addresses"]
    flooded, quiet = list[dict[str, float]](), list[dict[str, float]]()
    for _ in range(pairs):
        with peer_process(floods.attack, kind, address, victim.peer_id, victim.run_id) as pid:
            flooded.append(_window(fleet, victim, seconds, pid))
        with peer_process(_take, flooded[-1]["attacker_cores"]) as pid:
            quiet.append(_window(fleet, victim, seconds, pid))
    ratios = [one["tokens_per_s"] / other["tokens_per_s"] for one, other in zip(flooded, quiet, strict=True)]
    figures = {name: {"flooded": [w[name] for w in flooded], "quiet": [w[name] for w in quiet]} for name in quiet[0]}
    return {"ratio": statistics.median(ratios), "ratios": ratios, **figures}


def _window(fleet: Fleet, victim: NodeEndpoints, seconds: float, attacker: int) -> dict[str, float]:
    time.sleep(SETTLE_S)
    begin, began, spent = pipeline.sample_nodes(fleet), time.monotonic(), (_cpu_s(victim.pid), _cpu_s(attacker))
    time.sleep(seconds)
    end, window_s = pipeline.sample_nodes(fleet), time.monotonic() - began
    took = [_cpu_s(pid) - before for pid, before in zip((victim.pid, attacker), spent, strict=True)]
    first = [name for name in begin if name.startswith("0-")]
    status = Path(f"/proc/{victim.pid}/status").read_text()
    return {
        "tokens_per_s": float(pipeline.figures(begin, end)["tokens_per_s"]),
        "busy_per_s": pipeline.growth(begin, end, first, "busy_replies_total", direction="out") / window_s,
        "attacker_cores": took[1] / window_s,
        "victim_cores": took[0] / window_s,
        "victim_mib": int(status.partition("VmRSS:")[2].split()[0]) / 1024,
        "victim_files": len(os.listdir(f"/proc/{victim.pid}/fd")),
    }


def _cpu_s(pid: int) -> float:
    found = cpu.read(pid)
    return sum(found.threads.values()) + found.children


async def _take(ready: Callable[[int], None], cores: float) -> None:
    """Use this share of a core (at most 1) until this process is killed; `ready` gets its process id."""
    ready(os.getpid())
    began_at, began_s = time.monotonic(), time.thread_time()
    while True:
        while time.thread_time() - began_s < min(1.0, cores) * (time.monotonic() - began_at):
            pass
        await asyncio.sleep(TICK_S)
