"""A node's journal: what happened to it, as JSON lines in its own directory. `noloco report` reads it.

Each line has `event`, `time` (Unix seconds) and `up_s` (seconds since the journal was opened, unaffected by changes of
the clock). The first is `start`, the last `end`. Between them are the events of WRITTEN, and `progress` lines: how far
the node is, and all tallies since its start. So a lost line loses no count.

A progress line is written every second at first, and later whenever the process's age has grown by a thousandth, which
is about 7,400 lines in a week. Events of any other kind are written in a burst at first and then only a few per period,
so that the files stay small however long the run is; the next progress line says how many were held back.

The files are bounded. DIR/events.jsonl is the newest. When it is full it becomes events.jsonl.1, that becomes .2, and
so on; the one that would become .8 is deleted. Together they have at most FILES × FILE_BYTES (32 MiB). Trouble with the
disk costs lines, and nothing else.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from noloco_p2p.io.telemetry.counters import TALLIES, RunCounters
from noloco_p2p.io.telemetry.log import BackgroundHandler, RepeatLimiter
from noloco_p2p.line_files import append_line

Clock = Callable[[], float]
"""Returns seconds."""

WRITTEN: Mapping[str, tuple[str, ...]] = {
    "stage": ("stage",),
    "state": ("state", "reason"),
    "outer_round": ("round", "result", "reason", "partner", "seconds", "bytes"),
    "replica_std": ("value",),
    "evaluation": ("step", "loss", "tokens"),
    "checkpoint": ("round", "step", "seconds", "bytes"),
    "resumed": ("source", "round", "step", "peer"),
    "moved": ("stage", "reason"),
    "membership": ("counts",),
    "deserted": ("stages",),
    "distrusted": ("result", "peer"),
    "gradient_pair": ("microbatch", "peer", "route", "norm", "cosine", "outlier"),
    "warning": ("message",),
    "stuck": ("message", "well"),
}
"""Kinds of events that get lines → the fields that are written."""

ON_CHANGE = {"membership": "counts", "deserted": "stages"}
"""Recurring kinds of events → the field whose change makes a line: of its keys, or for `membership` of all of it."""

SHORTEST_PERIOD_S = 1.0
PERIODS = 1_000
"""The time between progress lines is the process's age divided by this, but at least SHORTEST_PERIOD_S."""
BURST = 40
PER_PERIOD = 4
"""Lines of one kind that may be written at once, and after that in each period."""
QUEUE_LINES = 1_024
"""Most lines that wait for the writing thread; any beyond that are lost."""
MAX_CHARACTERS = 300
"""Most characters of a text, which a peer may have written."""
MAX_MEMBERS = 256
"""Most entries of a mapping that are written."""
DIGITS = 6
NAME = "events.jsonl"
FILES = 8
FILE_BYTES = 4 << 20
RETRY_S = 10.0
"""How long lines are lost after a failure (a full disk, a removed directory) before the next attempt, seconds."""


@dataclass(slots=True)
class TokenBucket:
    """Limits the lines of one kind: how many may still be written."""

    left: float = BURST
    at_s: float = 0.0

    def take(self, up_s: float, period_s: float) -> bool:
        """Whether one more line may be written when the process is `up_s` old; if so, it is counted."""
        self.left = min(BURST, self.left + PER_PERIOD * (up_s - self.at_s) / period_s)
        self.at_s = up_s
        if self.left < 1:
            return False
        self.left -= 1
        return True


class Journal:
    """Turns events into lines and passes them to `write`, from any thread. Raises only for malformed fields."""

    def __init__(
        self, write: Callable[[str], None], counters: RunCounters, now: Clock = time.monotonic, wall: Clock = time.time
    ) -> None:
        self._write = write
        self._counters = counters
        self._now = now
        self._wall = wall
        self._ended = False
        self._began_at = now()
        self._next_s = SHORTEST_PERIOD_S
        self._losses = (0.0, 0.0)
        """(loss sum, tokens) at the last progress line."""
        self._buckets: dict[str, TokenBucket] = {}
        self._held: dict[str, int] = {}
        self._shown: dict[str, object] = {}
        self._limiter = RepeatLimiter(now=now)

    def start(self, **fields: object) -> None:
        """Write the first line, whose `fields` say which node this is."""
        with self._counters.lock:
            self._line("start", fields, self._now())

    def note(self, kind: str, fields: Mapping[str, object]) -> None:
        """Note an event (`ports.Telemetry.event`) that `counters` has already counted."""
        with self._counters.lock:
            if self._ended:
                return
            now = self._now()
            if kind in WRITTEN:
                self._event(kind, {name: fields.get(name) for name in WRITTEN[kind]}, now)
            if now - self._began_at >= self._next_s:
                self._progress(now)

    def end(self) -> None:
        """Write the last lines: progress so far, and that the process ended cleanly. Later events are ignored."""
        with self._counters.lock:
            self._ended = True
            now = self._now()
            self._progress(now)
            self._line("end", {}, now)

    def _event(self, kind: str, fields: dict[str, object], now: float) -> None:
        """Write a line, unless it repeats the one before, or there have been too many of its kind."""
        state = fields.get(ON_CHANGE.get(kind, ""))
        if isinstance(state, Mapping):
            shown = dict(state) if kind == "membership" else set(state)
            if shown == self._shown.get(kind, set()):
                return
        up_s = now - self._began_at
        repeated = kind == "warning" and self._limiter.admit(str(fields["message"])) is None
        if repeated or not self._buckets.setdefault(kind, TokenBucket()).take(up_s, period_s(up_s)):
            self._held[kind] = self._held.get(kind, 0) + 1
            return
        if isinstance(state, Mapping):
            self._shown[kind] = shown
        fields.setdefault("step", self._counters.latest.get("step"))
        self._line(kind, fields, now)

    def _progress(self, now: float) -> None:
        counters, up_s = self._counters, now - self._began_at
        self._next_s = up_s + period_s(up_s)
        loss_sum, tokens = counters.loss_sum - self._losses[0], counters.loss_tokens - self._losses[1]
        self._losses = (counters.loss_sum, counters.loss_tokens)
        fields: dict[str, object] = {"stage": counters.stage, "state": counters.state or None}
        fields |= {name: counters.latest.get(name) for name in ("step", "learning_rate", "grad_norm")}
        fields |= {
            "inner_steps": counters.total("inner_steps"),
            "tokens": counters.total("tokens"),
            "loss": loss_sum / tokens if tokens else None,
            "final_loss": counters.final_loss,
            "device_s": counters.total("device_seconds"),
        }
        fields |= {tally.journal: counters.by_label(tally.name) or None for tally in TALLIES if tally.journal}
        self._line("progress", fields | {"held": self._held}, now)

    def _line(self, kind: str, fields: Mapping[str, object], now: float) -> None:
        head = {"time": round(self._wall(), 3), "event": kind, "up_s": round(now - self._began_at, 3)}
        found = {name: _bounded(value) for name, value in fields.items() if value is not None}
        self._write(json.dumps({**head, **found}, separators=(",", ":"), allow_nan=False))


class FileJournal(Journal):
    """The journal in a node's directory, begun by `open`. It never waits for the disk or raises because of it."""

    def __init__(self, directory: Path, counters: RunCounters) -> None:
        files = EventFiles(directory)
        self._background = BackgroundHandler(lambda record: files.write(record.msg), QUEUE_LINES, "journal")
        super().__init__(lambda line: self._background.emit(logging.makeLogRecord({"msg": line})), counters)

    def open(self, **fields: object) -> None:
        """Begin the journal; `fields` say which node this is."""
        self._background.start()
        self.start(**fields)

    def close(self) -> None:
        """Write the last lines, and stop the writing thread."""
        self.end()
        self._background.stop()


def period_s(up_s: float) -> float:
    """Seconds from one progress line to the next in a process that is `up_s` old."""
    return max(SHORTEST_PERIOD_S, up_s / PERIODS)


def _bounded(value: object) -> object:
    """The value, JSON-ready and bounded; None for a number that JSON cannot represent."""
    if isinstance(value, bool | int) or value is None:
        return value
    if isinstance(value, float):
        return _rounded(value)
    if isinstance(value, Mapping):
        found: dict[str, object] = {}
        for key, each in list(value.items())[:MAX_MEMBERS]:
            name = " ".join(map(str, key)) if isinstance(key, tuple) else str(key)
            found[name[:MAX_CHARACTERS]] = _bounded(each)
        return found
    return str(value)[:MAX_CHARACTERS]


def _rounded(value: float) -> float | None:
    """The value rounded to six decimals, or to six significant digits below 1; whole numbers exactly."""
    if not math.isfinite(value):
        return None
    if value.is_integer():
        return int(value)
    return round(value, DIGITS) if abs(value) >= 1 else float(f"{value:.{DIGITS}g}")


class EventFiles:
    """Appends lines, each with one `write` system call, so that a process that is killed loses none it had written.

    The file is opened for each line, because it may have been removed, along with its directory.
    """

    def __init__(self, directory: Path, file_bytes: int = FILE_BYTES, now: Clock = time.monotonic) -> None:
        self._paths = _newest_first(directory)
        self._file_bytes = file_bytes
        self._now = now
        self._retry_at = -math.inf

    def write(self, line: str) -> None:
        """Append a line (without its newline, and shorter than a file). It is lost if nothing can be written."""
        newest = self._paths[0]
        if self._now() < self._retry_at:
            return
        try:
            if newest.is_file() and newest.stat().st_size + len(line) >= self._file_bytes:
                for path, older in reversed([*pairwise(self._paths)]):
                    if path.exists():
                        path.replace(older)
            append_line(newest, line)
        except OSError:
            self._retry_at = self._now() + RETRY_S


def _newest_first(directory: Path) -> list[Path]:
    """The paths of the journal files in a directory, whether they exist or not."""
    return [directory / NAME, *(directory / f"{NAME}.{number}" for number in range(1, FILES))]


def oldest_first(directory: Path) -> list[Path]:
    """The journal files in a directory, oldest first."""
    return [path for path in reversed(_newest_first(directory)) if path.is_file()]
