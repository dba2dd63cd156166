"""The journal of a node: what happened to it, as JSON lines in its own directory. `noloco report` reads it.

Each line has `event`, `time` (Unix seconds) and `up_s` (seconds since the journal was opened, which no change of the
clock moves). The first is `start`, the last `end`; between them come the events of WRITTEN, and `progress`: how far the
node is, and all tallies since its start. So no count is lost with a line.
A line of progress is written every second at first, then at every thousandth of the process's age: a week has about
7,400. Of any other kind a burst is written at once and then a few in a period, so that a file stays small however long
the run; the next line of progress says how many were held back.
Its files are bounded. DIR/events.jsonl is the newest; when it is full it becomes events.jsonl.1, that .2, … and what
would be .8 is gone. All together hold at most FILES × FILE_BYTES (32 MiB). Whatever happens to the disk costs lines.
"""

import json
import logging
import math
import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from noloco_p2p.io.telemetry.counters import TALLIES, RunCounters
from noloco_p2p.io.telemetry.log import BackgroundHandler, RepeatLimiter

Clock = Callable[[], float]
"""Gives seconds."""

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
"""Events that have lines, with the fields that are written."""

ON_CHANGE = {"membership": "counts", "deserted": "stages"}
"""Events that come again and again; a line is written when the keys, or the values of the first, have changed."""

SHORTEST_PERIOD_S = 1.0
PERIODS = 1_000
"""Lines of progress in the life of the process so far, at the present rate."""
BURST = 40
PER_PERIOD = 4
"""Lines of one kind that are written at once, and then in each period."""
QUEUE_LINES = 1_024
"""Lines that wait for the writing thread; further ones are lost."""
MOST_CHARACTERS = 300
"""Of a text; peers may have written it."""
MOST_MEMBERS = 256
"""Entries of a mapping that are written."""
DIGITS = 6
NAME = "events.jsonl"
FILES = 8
FILE_BYTES = 4 << 20
RETRY_S = 10.0
"""After a failure (a full disk, a directory that is gone) lines are lost for this long, then it is tried again."""


@dataclass(slots=True)
class TokenBucket:
    """How many lines of one kind may still be written."""

    left: float = BURST
    at_s: float = 0.0

    def take(self, up_s: float, period_s: float) -> bool:
        """Whether one more may, at this age of the process."""
        self.left = min(BURST, self.left + PER_PERIOD * (up_s - self.at_s) / period_s)
        self.at_s = up_s
        if self.left < 1:
            return False
        self.left -= 1
        return True


class Journal:
    """Turns events into lines and hands them to `write`. From any thread; raises only for malformed fields."""

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
        """(loss sum, tokens) by the last line of progress."""
        self._buckets: dict[str, TokenBucket] = {}
        self._held: dict[str, int] = {}
        self._shown: dict[str, object] = {}
        self._limiter = RepeatLimiter(now=now)

    def start(self, **fields: object) -> None:
        """The first line: who this is."""
        with self._counters.lock:
            self._line("start", fields, self._now())

    def note(self, kind: str, fields: Mapping[str, object]) -> None:
        """Something has happened (`ports.Telemetry.event`), and `counters` has counted it."""
        with self._counters.lock:
            if self._ended:
                return
            now = self._now()
            if kind in WRITTEN:
                self._event(kind, {name: fields.get(name) for name in WRITTEN[kind]}, now)
            if now - self._began_at >= self._next_s:
                self._progress(now)

    def end(self) -> None:
        """The last lines: progress up to now, and that the process ended in order. What comes later is left out."""
        with self._counters.lock:
            self._ended = True
            now = self._now()
            self._progress(now)
            self._line("end", {}, now)

    def _event(self, kind: str, fields: dict[str, object], now: float) -> None:
        """A line, unless it says what the one before said, or too many of its kind have come."""
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
    """The journal of a node's directory. `open` begins it; nothing of it waits for the disk or raises because of it."""

    def __init__(self, directory: Path, counters: RunCounters) -> None:
        files = EventFiles(directory)
        self._background = BackgroundHandler(lambda record: files.write(record.msg), QUEUE_LINES, "journal")
        super().__init__(lambda line: self._background.emit(logging.makeLogRecord({"msg": line})), counters)

    def open(self, **fields: object) -> None:
        """Begin: `fields` say who this is."""
        self._background.start()
        self.start(**fields)

    def close(self) -> None:
        """Write the last lines."""
        self.end()
        self._background.stop()


def period_s(up_s: float) -> float:
    """Seconds from one line of progress to the next in a process of this age."""
    return max(SHORTEST_PERIOD_S, up_s / PERIODS)


def _bounded(value: object) -> object:
    """The value, JSON-ready and bounded; null for a number that JSON does not have."""
    if isinstance(value, bool | int) or value is None:
        return value
    if isinstance(value, float):
        return _rounded(value)
    if isinstance(value, Mapping):
        found: dict[str, object] = {}
        for key, each in list(value.items())[:MOST_MEMBERS]:
            name = " ".join(map(str, key)) if isinstance(key, tuple) else str(key)
            found[name[:MOST_CHARACTERS]] = _bounded(each)
        return found
    return str(value)[:MOST_CHARACTERS]


def _rounded(value: float) -> float | None:
    """Six digits after the point, or six significant ones below 1; whole numbers exactly."""
    if not math.isfinite(value):
        return None
    if value.is_integer():
        return int(value)
    return round(value, DIGITS) if abs(value) >= 1 else float(f"{value:.{DIGITS}g}")


class EventFiles:
    """Appends lines, each in one `write` of the system: a process that is killed loses none that it had written.

    Used by one thread. Not a handler of `logging`: at the end of the process that would wait for it while a disk hangs.
    """

    def __init__(
        self, directory: Path, file_bytes: int = FILE_BYTES, files: int = FILES, now: Clock = time.monotonic
    ) -> None:
        self._paths = [directory / NAME, *(directory / f"{NAME}.{number}" for number in range(1, files))]
        """The newest first."""
        self._file_bytes = file_bytes
        self._now = now
        self._retry_at = -math.inf
        self._file = -1
        """Descriptor of the newest; -1: it is not open."""

    def write(self, line: str) -> None:
        """Append a line, given without its end and shorter than a file; it is lost while nothing can be written."""
        if self._now() < self._retry_at:
            return
        try:
            self._append(line.encode("ascii") + b"\n")
        except OSError:
            self._retry_at = self._now() + RETRY_S
            self.close()

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append(self, data: bytes) -> None:
        if self._file < 0 or not self._paths[0].exists():  # the directory was removed, and may be there again
            self._open()
        newest = os.fstat(self._file)
        if stat.S_ISREG(newest.st_mode) and newest.st_size + len(data) > self._file_bytes:
            for newer, older in reversed(list(pairwise(self._paths))):
                if newer.exists():
                    newer.replace(older)
            self._open()
        self._put(data)

    def _open(self) -> None:
        self.close()
        # Open for reading too: for the last byte, and because a pipe that is opened to write only waits for a reader.
        self._file = os.open(self._paths[0], os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._file).st_size
        if size > 0 and os.pread(self._file, 1, size - 1) != b"\n":
            self._put(b"\n")  # the process was killed, or the disk was full, within the last line

    def _put(self, data: bytes) -> None:
        if os.write(self._file, data) < len(data):
            raise OSError("the disk became full within the data")


def oldest_first(directory: Path) -> list[Path]:
    """The files of a directory, in the order in which they were written."""
    found = [directory / NAME, *(directory / f"{NAME}.{number}" for number in range(1, FILES))]
    return [path for path in reversed(found) if path.is_file()]
