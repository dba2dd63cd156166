"""The journal of a node: what happened to it, as JSON lines in its own directory. `noloco report` reads it.

Each line has `event`, `time` (Unix seconds) and `up_s` (seconds since the journal was opened, which no change of the
clock moves). First `start`, at the end `end`; between them what is in WRITTEN, and `progress`: where the node stands,
and everything in COUNTED since the start. So no count is lost with a line.
A line of progress is written every second at first, then at every thousandth of the process's age: a week has about
7,400. Of any other kind a burst is written at once and then a few in a period, so that a file stays small however long
the run; how many were held back stands in the next line of progress.
"""

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from noloco_p2p.io.telemetry.event_files import EventFiles, Writer
from noloco_p2p.io.telemetry.log import Limiter
from noloco_p2p.io.telemetry.totals import FINAL_STEPS

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
    "warning": ("message",),
    "stuck": ("message", "well"),
}
"""Events that have lines, with the fields that are written."""

COUNTED: Mapping[str, tuple[tuple[str, tuple[str, ...], str | None], ...]] = {
    "microbatch": (("microbatches", ("result",), None), ("dropped", ("reason",), None)),
    "reroute": (("rerouted", ("reason",), None),),
    "busy": (("busy", ("direction",), None),),
    "outer_round": (("rounds", ("result",), None),),
    "idle": (("idle_s", ("cause",), "seconds"),),
    "bytes": (("bytes", ("direction", "kind"), "bytes"),),
    "span": (("phase_s", ("name",), "seconds"),),
}
"""Events that are counted: name of the tally, fields that make its label, field that is added (none: one)."""

ON_CHANGE = {"membership": "counts", "deserted": "stages"}
"""Events that are told again and again; a line is written when the keys, or the values of the first, have changed."""

SHORTEST_PERIOD_S = 1.0
PERIODS = 1_000
"""Lines of progress in the life of the process so far, at the present rate."""
BURST = 40
PER_PERIOD = 4
"""Lines of one kind that are written at once, and then in each period."""
QUIET_S = 5.0
"""Seconds between two lines of one text of a warning."""
MOST_LABELS = 24
"""Labels of a tally; further ones are counted as `other`."""
MOST_CHARACTERS = 300
"""Of a text; peers may have written it."""
MOST_MEMBERS = 256
"""Entries of a mapping that are written."""
DIGITS = 6


@dataclass(slots=True)
class Allowance:
    """How many lines of one kind may still be written."""

    left: float = BURST
    at_s: float = 0.0

    def take(self, up_s: float, period_s: float) -> bool:
        """One more, at this age of the process?"""
        self.left = min(BURST, self.left + PER_PERIOD * (up_s - self.at_s) / period_s)
        self.at_s = up_s
        if self.left < 1:
            return False
        self.left -= 1
        return True


class Journal:
    """Turns events into lines and hands them to `write`. From any thread; raises only for malformed fields."""

    def __init__(
        self,
        write: Callable[[bytes], None],
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._write = write
        self._now = now
        self._wall = wall
        self._lock = threading.Lock()
        self._ended = False
        self._began_at = now()
        self._next_s = SHORTEST_PERIOD_S
        self._last: dict[str, object] = {}
        """Newest value of what is not counted, under its name in `progress`."""
        self._tallies: dict[str, dict[str, float]] = {}
        self._inner_steps = self._tokens = 0
        self._device_s = 0.0
        self._interval = [0.0, 0.0]
        """(loss sum, tokens) since the last line of progress."""
        self._recent: deque[tuple[float, float]] = deque(maxlen=FINAL_STEPS)
        self._allowed: dict[str, Allowance] = {}
        self._held: dict[str, float] = {}
        self._shown: dict[str, object] = {}
        self._limiter = Limiter(QUIET_S, now)

    def start(self, **fields: object) -> None:
        """The first line: who this is."""
        with self._lock:
            self._line("start", fields, self._now())

    def note(self, kind: str, fields: Mapping[str, object]) -> None:
        """Something happened (`ports.Telemetry.event`)."""
        with self._lock:
            if self._ended:
                return
            now = self._now()
            for tally, labels, amount in COUNTED.get(kind, ()):
                self._count(tally, labels, amount, fields)
            if kind == "inner_step":
                self._inner_step(fields)
            names = WRITTEN.get(kind)
            if names is not None:
                if kind in ("state", "stage"):
                    self._last[kind] = fields[kind]
                self._happened(kind, {name: fields.get(name) for name in names}, now)
            if now - self._began_at >= self._next_s:
                self._progress(now)

    def end(self) -> None:
        """The last lines: progress up to now, and that the process ended in order. What comes later is left out."""
        with self._lock:
            self._ended = True
            now = self._now()
            self._progress(now)
            self._line("end", {}, now)

    def _count(self, tally: str, labels: tuple[str, ...], amount: str | None, fields: Mapping[str, object]) -> None:
        if not all(label in fields for label in labels):
            return
        found = self._tallies.setdefault(tally, {})
        label = " ".join(str(fields[each])[:40] for each in labels)
        if label not in found and len(found) >= MOST_LABELS:
            label = "other"
        found[label] = found.get(label, 0) + (1 if amount is None else _number(fields[amount]))

    def _inner_step(self, fields: Mapping[str, object]) -> None:
        self._inner_steps += 1
        self._tokens += int(_number(fields["tokens"]))
        self._device_s += _number(fields["busy_s"])
        self._last |= {name: fields[name] for name in ("step", "learning_rate", "grad_norm")}
        loss, tokens = _number(fields["loss_sum"]), _number(fields["loss_tokens"])
        if tokens and math.isfinite(loss):
            self._interval[0] += loss
            self._interval[1] += tokens
            self._recent.append((loss, tokens))

    def _happened(self, kind: str, fields: Mapping[str, object], now: float) -> None:
        what = fields.get(ON_CHANGE.get(kind, ""))
        if isinstance(what, Mapping):
            shown = dict(what) if kind == "membership" else set(what)
            if shown == self._shown.get(kind, set()):
                return
        up_s = now - self._began_at
        repeated = kind == "warning" and self._limiter.admit(str(fields["message"])) is None
        if repeated or not self._allowed.setdefault(kind, Allowance()).take(up_s, period_s(up_s)):
            self._held[kind] = self._held.get(kind, 0) + 1
            return
        if isinstance(what, Mapping):
            self._shown[kind] = shown
        self._line(kind, fields if "step" in fields else {**fields, "step": self._last.get("step")}, now)

    def _progress(self, now: float) -> None:
        up_s = now - self._began_at
        self._next_s = up_s + period_s(up_s)
        loss, tokens = self._interval
        recent = sum(count for _, count in self._recent)
        told: dict[str, object] = {
            **self._last,
            "inner_steps": self._inner_steps,
            "tokens": self._tokens,
            "loss": loss / tokens if tokens else None,
            "final_loss": sum(each for each, _ in self._recent) / recent if recent else None,
            "device_s": self._device_s,
            **self._tallies,
            "held": self._held,
        }
        self._interval = [0.0, 0.0]
        self._line("progress", told, now)

    def _line(self, kind: str, fields: Mapping[str, object], now: float) -> None:
        head = {"time": round(self._wall(), 3), "event": kind, "up_s": round(now - self._began_at, 3)}
        told = {name: _told(value) for name, value in fields.items() if value is not None}
        self._write(json.dumps({**head, **told}, separators=(",", ":"), allow_nan=False).encode() + b"\n")


class FileJournal(Journal):
    """The journal of a node's directory. `open` begins it; nothing of it waits for the disk."""

    def __init__(self, directory: Path) -> None:
        self._writer = Writer(EventFiles(directory).write)
        super().__init__(self._writer.put)

    def open(self, **fields: object) -> None:
        """Begin: `fields` tell who this is."""
        self._writer.start()
        self.start(**fields)

    def close(self) -> None:
        """Write the last lines."""
        self.end()
        self._writer.stop()


def period_s(up_s: float) -> float:
    """Seconds from one line of progress to the next in a process of this age."""
    return max(SHORTEST_PERIOD_S, up_s / PERIODS)


def _told(value: object) -> object:
    """JSON-ready and bounded; null for a number that JSON has not."""
    if isinstance(value, bool | int) or value is None:
        return value
    if isinstance(value, float):
        return _rounded(value)
    if isinstance(value, Mapping):
        found: dict[str, object] = {}
        for key, each in list(value.items())[:MOST_MEMBERS]:
            name = " ".join(map(str, key)) if isinstance(key, tuple) else str(key)
            found[name[:MOST_CHARACTERS]] = _told(each)
        return found
    return str(value)[:MOST_CHARACTERS]


def _rounded(value: float) -> float | None:
    """Six digits after the point, or six that count where it is small; whole numbers are told exactly."""
    if not math.isfinite(value):
        return None
    if value.is_integer():
        return int(value)
    return round(value, DIGITS) if abs(value) >= 1 else float(f"{value:.{DIGITS}g}")


def _number(value: object) -> float:
    if isinstance(value, int | float):
        return float(value)
    raise TypeError(f"{value!r} is not a number")
