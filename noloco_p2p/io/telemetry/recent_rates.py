"""A node's figures of now, for its `Status`: totals since its start, and rates over about the last ten seconds."""

import math
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from noloco_p2p.core.status import NodeFigures
from noloco_p2p.io.telemetry import process_usage
from noloco_p2p.io.telemetry.totals import Totals

WINDOW_S = 10.0
"""What a rate is over, unless its amounts come in lumps further apart."""
MARK_S = 1.0
"""Seconds from one mark of a rate to the next."""
SILENT_GAPS = 3.0
"""A rate is 0 once nothing came for so many times as long as from one lump to the next, and for WINDOW_S."""


class Rate:
    """An amount per second, from lump to lump: an inner step of 30 s does not make it jump between 0 and thousands."""

    def __init__(self) -> None:
        self._total = 0.0
        self._last_at = -math.inf
        self._marks: deque[tuple[float, float]] = deque(maxlen=1 + round(WINDOW_S / MARK_S))
        """(when, total by then), MARK_S apart or more."""

    def add(self, now: float, amount: float) -> None:
        """That much more has come."""
        self._total += amount
        self._last_at = now
        if not self._marks or now - self._marks[-1][0] >= MARK_S:
            self._marks.append((now, self._total))

    def per_s(self, now: float) -> float:
        """Over the last ten seconds, or since the last lump but one when that was before them."""
        earlier = [mark for mark in self._marks if mark[0] < self._last_at]
        if not earlier:
            return 0.0
        old = [mark for mark in earlier if mark[0] <= now - WINDOW_S]
        began, total = old[-1] if old else earlier[0]
        span, silent = self._last_at - began, now - self._last_at
        if silent > max(WINDOW_S, SILENT_GAPS * span):
            return 0.0
        return (self._total - total) / (span if silent <= span else now - began)


@dataclass(slots=True)
class Recent:
    """What of the last moments is not in the totals. Points in time are of the monotonic clock."""

    began_at: float = field(default_factory=time.monotonic)
    beat_at: float | None = None
    """When the event loop came to its heartbeat last; None before the first."""
    tokens: Rate = field(default_factory=Rate)
    bytes: Rate = field(default_factory=Rate)
    learning_rate: float | None = None
    grad_norm: float | None = None


def figures(totals: Totals, recent: Recent, directory: Path | None) -> NodeFigures:
    """All of them, now; `directory` is the node's, for the disk."""
    now = time.monotonic()
    loss_sum, loss_tokens = totals.last_losses[-1] if totals.last_losses else (math.nan, 1.0)
    return NodeFigures(
        up_s=now - recent.began_at,
        tokens=totals.tokens,
        tokens_per_s=recent.tokens.per_s(now),
        loss=_finite(loss_sum / loss_tokens),
        validation_loss=_finite(totals.validation_loss),
        learning_rate=_finite(recent.learning_rate),
        grad_norm=_finite(recent.grad_norm),
        replica_std=_finite(totals.replica_std),
        rounds=dict(totals.outer_rounds),
        microbatches=dict(totals.microbatches),
        rerouted=dict(totals.reroutes),
        idle_s=dict(totals.idle_s),
        device_s=totals.device_s,
        bytes_in=totals.bytes["in"],
        bytes_out=totals.bytes["out"],
        bytes_per_s=recent.bytes.per_s(now),
        loop_silent_s=0.0 if recent.beat_at is None else now - recent.beat_at,
        rss_bytes=process_usage.rss_bytes(),
        disk_free_bytes=None if directory is None else process_usage.disk_free_bytes(directory),
        unix_time_s=time.time(),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
