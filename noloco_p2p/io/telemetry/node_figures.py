"""A node's figures: the current ones for its `Status`, and those of its whole run for its `summary.json`."""

import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

from noloco_p2p.core.status import NodeFigures
from noloco_p2p.io.telemetry.counters import RunCounters

LAST_MEASURED = ("validation_loss", "validation_step", "replica_std")
STATM = Path("/proc/self/statm")


def run_totals(counters: RunCounters) -> dict[str, Any]:
    """Figures of the run so far, JSON-ready, under the names of `summary.json`. Losses are in nats per token."""
    with counters.lock:
        attributes = ("state", "largest_lag_s", "resumed", "first_loss", "final_loss", "last_step_at")
        totals = ("inner_steps", "tokens", "evaluations", "outer_rounds", "checkpoints", "moves", "rerouted")
        rounds, microbatches = counters.by_label("outer_rounds"), counters.by_label("microbatches")
        moved_bytes = counters.by_label("bytes", 1)
        turns = [*counters.training_turns, counters.wall_time()]  # it may still train
        return {
            **{name: getattr(counters, name) for name in attributes},
            **{name: counters.total(name) for name in totals},
            **{name: counters.by_label(name) for name in ("dropped", "busy_replies")},
            "step": counters.latest.get("step", 0.0),
            "training_at": next(iter(counters.training_turns), None),
            "training": list(zip(turns[::2], turns[1::2], strict=False)),
            **{name: _finite(counters.latest.get(name)) for name in LAST_MEASURED},
            "results": rounds,
            "alone": rounds.get("alone", 0),
            "pulled": sum(rounds.values()) - rounds.get("alone", 0),
            "microbatches": microbatches.get("done", 0),
            "microbatch_results": microbatches,
            "reroutes": counters.by_label("rerouted"),
            "idle_s": counters.by_label("idle_seconds"),
            "device_s": float(counters.total("device_seconds")),
            "bytes": moved_bytes,
            "bytes_sent": moved_bytes.get("out", 0),
            "bytes_received": moved_bytes.get("in", 0),
        }


def status_figures(counters: RunCounters, directory: Path | None) -> NodeFigures:
    """All figures as of now; `directory` is the node's, for its free disk space."""
    # Read before taking the lock, which the event loop needs for every event: a disk can hang.
    memory_used, disk_free = rss_bytes(), None if directory is None else disk_free_bytes(directory)
    now = time.monotonic()
    with counters.lock:
        names = ("loss", "validation_loss", "learning_rate", "grad_norm", "replica_std")
        last: dict[str, Any] = {name: _finite(counters.latest.get(name)) for name in names}
        moved_bytes = counters.by_label("bytes", 1)
        return NodeFigures(
            **last,
            up_s=now - counters.began_at,
            tokens=counters.total("tokens"),
            tokens_per_s=counters.rates["tokens"].per_s(now),
            rounds=counters.by_label("outer_rounds"),
            microbatches=counters.by_label("microbatches"),
            rerouted=counters.by_label("rerouted"),
            distrusted=counters.by_label("distrusted"),
            idle_s=counters.by_label("idle_seconds"),
            device_s=float(counters.total("device_seconds")),
            bytes_in=moved_bytes.get("in", 0),
            bytes_out=moved_bytes.get("out", 0),
            bytes_per_s=counters.rates["bytes"].per_s(now),
            upload_bytes_per_s=_finite(counters.latest.get("upload_bytes_per_second")),
            download_bytes_per_s=_finite(counters.latest.get("download_bytes_per_second")),
            round_trip_s=_finite(counters.latest.get("round_trip_seconds")),
            loop_silent_s=0.0 if counters.beat_at is None else now - counters.beat_at,
            rss_bytes=memory_used,
            disk_free_bytes=disk_free,
            unix_time_s=time.time(),
        )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def rss_bytes() -> int:
    """Memory of this process that is in RAM, bytes."""
    return int(STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def disk_free_bytes(path: Path) -> int | None:
    """Free space on the file system of `path`, bytes; None if there is no such path."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None
