"""What monitoring costs: the instruments of a node, and the programs that read them.

Readers: one swarm trains continuously, alternately with and without the requests of Prometheus and `noloco top`.
Instruments: the events of a simulated run are replayed to the real ones, including the journal, and timed.
"""

import asyncio
import statistics
import tempfile
import threading
import time
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from noloco_p2p.config import OuterSettings, RunManifest
from noloco_p2p.core.status import ForMicrobatch
from noloco_p2p.io.telemetry.journal import FileJournal
from noloco_p2p.io.telemetry.prometheus_telemetry import PrometheusTelemetry
from noloco_p2p.lab.bench import pipeline
from noloco_p2p.lab.bench.node_fleet import Fleet
from noloco_p2p.lab.sample_stats import mean_and_std
from noloco_p2p.launch import cpu_seconds
from noloco_p2p.launch.node_probe import DIRECT
from noloco_p2p.node.waits import Waits
from noloco_p2p.sim.telemetry import TraceEvent
from noloco_p2p.sim.world import SimPlan, SimSwarm

TARGET = 0.01
READ_EVERY_S = {"/metrics": 5.0, "/sd": 5.0, "/status": 2.0}
"""Intervals as those of Prometheus (docker/prometheus/prometheus.yml) and `noloco top`."""
TIMEOUT_S = 5.0
SIMULATED_STEPS = 100
WAITS = 12
"""Maximum number of named waits of a microbatch on its way through two stages and back."""
BYTES_EVENTS = 4
"""Number of `bytes` events per microbatch between two real nodes: its activation and its gradient, out and in. The
simulator has none."""
REPEATS = 5


def run(pairs: int, window_s: float) -> dict[str, Any]:
    """Measure, and return the figures. Raises LocalError if the swarm fails."""
    instruments = instruments_us()
    with pipeline.steady_swarm(pipeline.MICROBATCHES) as fleet:
        unread, read = [], []
        for _ in range(pairs):
            unread.append(_window(fleet, window_s, read=False))
            read.append(_window(fleet, window_s, read=True))
    costs = [1.0 - with_ / without for with_, without in zip(read, unread, strict=True)]
    tokens_per_microbatch = _manifest().sequence_length * _manifest().microbatch_size
    core_us = cpu_seconds.cores() * 1e6 * tokens_per_microbatch / statistics.fmean(unread)
    return {
        "bench": "monitoring",
        "ratio": instruments["total"] / core_us,
        "target": TARGET,
        "instruments_us": instruments,
        "microbatch_core_us": core_us,
        "readers_cost": mean_and_std(costs),
        "tokens_per_s": {"unread": unread, "read": read},
        "definitions": DEFINITIONS,
    }


DEFINITIONS = {
    "ratio": "instruments_us.total over microbatch_core_us: the share of the swarm's cores that the instruments take",
    "instruments_us": "microseconds of one microbatch through two stages, outer rounds and membership included: events "
    "given to metrics, totals, log and journal, and naming of waits; the best of five repeats",
    "microbatch_core_us": "microseconds of all cores for one microbatch in the swarm of this measurement",
    "readers_cost": "1 - tokens/s while /metrics and /sd of all nodes are read every 5 s and /status every 2 s, over "
    "tokens/s of the window before, without readers",
}


def _manifest() -> RunManifest:
    outer = OuterSettings(rule="noloco", deadline_s=5.0)
    return RunManifest(steps=SIMULATED_STEPS, microbatches_per_step=pipeline.MICROBATCHES, outer=outer)


# --- the readers ------------------------------------------------------------------------------------------------------


def _window(fleet: Fleet, seconds: float, *, read: bool) -> float:
    """Tokens per second of the swarm in a window, with or without readers."""
    begin = pipeline.sample_nodes(fleet)
    ended = threading.Event()
    pages = [sample.endpoints.metrics.removesuffix("/metrics") for sample in begin.values()]
    readers = [
        threading.Thread(target=_read, args=([page + path for page in pages], every_s, ended), daemon=True)
        for path, every_s in (READ_EVERY_S if read else {}).items()
    ]
    for reader in readers:
        reader.start()
    time.sleep(seconds)
    ended.set()
    for reader in readers:
        reader.join()
    return float(pipeline.figures(begin, pipeline.sample_nodes(fleet))["tokens_per_s"])


def _read(urls: list[str], every_s: float, ended: threading.Event) -> None:
    while not ended.is_set():
        for url in urls:
            # As Prometheus and `noloco top`: a page that fails is read again at the next turn.
            with suppress(OSError, HTTPException), DIRECT.open(url, timeout=TIMEOUT_S) as answer:
                answer.read()
        ended.wait(every_s)


# --- the instruments --------------------------------------------------------------------------------------------------


def instruments_us() -> dict[str, float]:
    """Microseconds of the instruments for one microbatch through two stages: by kind, and in total."""
    outcome = SimSwarm(SimPlan(_manifest(), (2, 2))).run()
    recorded = outcome.trace.events
    done = sum(node.microbatches["done"] for node in outcome.of_stage(0))
    events = min(_replay_events(recorded, done) for _ in range(REPEATS)) / done
    waits = min(_name_waits(done * WAITS) for _ in range(REPEATS)) / done
    return {"events": 1e6 * events, "waits": 1e6 * waits, "total": 1e6 * (events + waits)}


def _replay_events(events: list[TraceEvent], microbatches: int) -> float:
    """Seconds that the instruments of one node take for all events of a run."""
    telemetry = PrometheusTelemetry(stages=2)
    moved = {"direction": "out", "kind": "activation", "bytes": 1 << 18}
    replayed = [(h.kind, dict(h.fields)) for h in events] + [("bytes", moved)] * (BYTES_EVENTS * microbatches)
    with tempfile.TemporaryDirectory(prefix="noloco-bench-") as scratch:
        journal = FileJournal(Path(scratch), telemetry.counters)
        journal.open(peer_id="bench", run_id="bench", name="bench", version="", stage=0)
        telemetry.record(journal)
        began = time.perf_counter()
        for kind, fields in replayed:
            if kind == "span":
                with telemetry.span(str(fields["name"])):
                    pass
            else:
                telemetry.event(kind, **fields)
        took_s = time.perf_counter() - began
        journal.close()
    return took_s


def _name_waits(count: int) -> float:
    """Seconds that naming this many waits takes."""

    async def wait() -> float:
        waits = Waits()
        began = time.perf_counter()
        for _ in range(count):
            with waits.waiting("gradient", "bench", 2.0, ForMicrobatch("bench", 1)):
                pass
        return time.perf_counter() - began

    return asyncio.run(wait())
