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

import errno
import io
import json
import logging
import logging.handlers
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        self._background = BackgroundHandler(EventFiles(directory), QUEUE_LINES, "journal")
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


class EventFiles(logging.handlers.RotatingFileHandler):
    """Appends lines, each in one `write` of the system: a process that is killed loses none that it had written.

    Used by one thread. It has no lock: at the end of the process `logging` would wait for it while a disk hangs.
    """

    def __init__(
        self, directory: Path, file_bytes: int = FILE_BYTES, files: int = FILES, now: Clock = time.monotonic
    ) -> None:
        super().__init__(directory / NAME, maxBytes=file_bytes, backupCount=files - 1, encoding="ascii", delay=True)
        self._now = now
        self._retry_at = -math.inf

    def write(self, line: str) -> None:
        """Append a line, given without its end and shorter than a file; it is lost while nothing can be written."""
        self.emit(logging.makeLogRecord({"msg": line}))

    def emit(self, record: logging.LogRecord) -> None:
        """See `write`."""
        if self._now() >= self._retry_at:
            if self.stream is not None and not os.path.exists(self.baseFilename):
                self.close()  # the directory was removed, and may be there again
            super().emit(record)

    def shouldRollover(self, record: logging.LogRecord) -> bool:  # noqa: N802
        """Never for what is no regular file, which has no position that Python 3.13 could ask for."""
        return os.path.isfile(self.baseFilename) and bool(super().shouldRollover(record))

    def createLock(self) -> None:  # noqa: N802
        """One that is no lock, see above."""
        self.lock = _NoLock()  # type: ignore[assignment]

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Write nothing for a while; what is opened then may end within a line, see `_open`."""
        self._retry_at = self._now() + RETRY_S
        self.close()

    def _open(self) -> io.TextIOWrapper:
        # Open for reading too: for the last byte, and because a pipe that is opened to write only waits for a reader.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        file = _WholeWrites(os.open(self.baseFilename, flags, 0o666), "w")
        try:
            size = os.fstat(file.fileno()).st_size
            if size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n":
                file.write(b"\n")  # the process was killed, or the disk was full, within the last line
        except OSError:
            file.close()
            raise
        return io.TextIOWrapper(file, encoding="ascii", write_through=True)


class _NoLock(nullcontext[None]):
    """False: `logging` does not take it. From Python 3.13 on it enters it all the same."""

    def __bool__(self) -> bool:
        return False


class _WholeWrites(io.FileIO):
    """A file that is full within a line raises, as it does before one: what is written later needs a new line."""

    def write(self, data: Any, /) -> int:
        """See `io.RawIOBase`."""
        written = super().write(data)
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written


def oldest_first(directory: Path) -> list[Path]:
    """The files of a directory, in the order in which they were written."""
    found = [directory / NAME, *(directory / f"{NAME}.{number}" for number in range(1, FILES))]
    return [path for path in reversed(found) if path.is_file()]
