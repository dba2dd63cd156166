"""What a node's instruments cost: its metrics, log and journal.

The events of a simulated run are replayed to the real instruments and timed. A real swarm shows how much CPU time a
microbatch takes in all.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from noloco_p2p.config import OuterSettings, RunManifest
from noloco_p2p.core.status import ForMicrobatch
from noloco_p2p.host import cores
from noloco_p2p.io.telemetry.journal import FileJournal
from noloco_p2p.io.telemetry.prometheus_telemetry import PrometheusTelemetry
from noloco_p2p.lab.bench import pipeline
from noloco_p2p.node.waits import Waits
from noloco_p2p.sim.telemetry import TraceEvent
from noloco_p2p.sim.world import SimPlan, SimSwarm

TARGET = 0.01
SIMULATED_STEPS = 100
WAITS = 12
"""Maximum number of named waits of a microbatch on its way through two stages and back."""
BYTES_EVENTS = 4
"""Number of `bytes` events per microbatch between two real nodes: its activation and its gradient, out and in. The
simulator has none."""
REPEATS = 5


def run(seconds: float) -> dict[str, Any]:
    """Measure, and return the figures. Raises LocalError if the swarm fails."""
    instruments = instruments_us()
    with pipeline.steady_swarm(pipeline.MICROBATCHES) as fleet:
        begin = pipeline.sample_nodes(fleet)
        time.sleep(seconds)
        tokens_per_s = float(pipeline.figures(begin, pipeline.sample_nodes(fleet))["tokens_per_s"])
    tokens_per_microbatch = _manifest().sequence_length * _manifest().microbatch_size
    core_us = cores() * 1e6 * tokens_per_microbatch / tokens_per_s
    return {
        "bench": "monitoring",
        "ratio": instruments["total"] / core_us,
        "target": TARGET,
        "instruments_us": instruments,
        "microbatch_core_us": core_us,
        "tokens_per_s": tokens_per_s,
        "definitions": DEFINITIONS,
    }


DEFINITIONS = {
    "ratio": "instruments_us.total over microbatch_core_us: the share of the swarm's cores that the instruments take",
    "instruments_us": "microseconds of one microbatch through two stages, outer rounds and membership included: events "
    "given to metrics, totals, log and journal, and naming of waits; the best of five repeats",
    "microbatch_core_us": "microseconds of all cores for one microbatch in a real 2 × 2 swarm",
    "tokens_per_s": "of that swarm",
}


def _manifest() -> RunManifest:
    outer = OuterSettings(rule="noloco", deadline_s=5.0)
    return RunManifest(steps=SIMULATED_STEPS, microbatches_per_step=pipeline.MICROBATCHES, outer=outer)


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
