"""The log: turns a node's events into lines, as text or as JSON, and writes them.

A separate thread writes the lines, so a full pipe costs lines but never delays the node. Events that have no line and
are not counted are logged at debug level.
"""

import contextlib
import json
import logging
import logging.handlers
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from noloco_p2p.core.recent import Recent
from noloco_p2p.humanize import plain, progress
from noloco_p2p.io.telemetry.counters import EVENTS, Fields, RunCounters

QUEUE_LINES = 4_096
"""Most lines that wait for the writing thread; any beyond that are dropped and counted."""
STOP_S = 2.0
"""Longest wait at each step of stopping for an output that accepts nothing any more, seconds."""
PROGRESS_S = 10.0
"""Seconds between two lines of progress, and between two lines about outer rounds with the same result."""
QUIET_S = 5.0
"""Shortest time between two lines about the same trouble, seconds."""
MAX_KEYS = 256
"""How many keys a limiter remembers."""
LEVELS = {logging.DEBUG: "DEBUG", logging.INFO: "INFO", logging.WARNING: "WARNING", logging.ERROR: "ERROR"}
"""Plain names of levels, because importing hivemind renames some of logging's."""
LINES = {
    "state": "{state}: {reason}",
    "outer_round": "outer round {round}: {result}{from_peer} ({reason}), {seconds:.2f} s, {bytes:,} bytes",
    "evaluation": "validation at step {step}: {loss:.4f} nats per token over {tokens} tokens",
    "checkpoint": "checkpoint of outer round {round}: {seconds:.2f} s, {bytes:,} bytes",
    "guarded": "guards stage {stage}: holds its outer round {round}, {bytes:,} bytes",
    "resumed": "continuing from step {step:g} (outer round {round}), weights from: {source}{from_peer}",
    "moved": "moving to stage {stage}: {reason}",
    "stuck": "watchdog: {message}",
    "info": "{message}",
}
"""Kind of event → its line. `from_peer` is made here; everything else is a field of the event."""

logger = logging.getLogger("noloco_p2p")


class BackgroundHandler(logging.handlers.QueueHandler):
    """Passes records to a function in a separate thread; drops records while too many are waiting.

    It does not use `QueueListener`, whose `stop` waits without a limit, and fails if the queue is full.
    """

    def __init__(self, write: Callable[[logging.LogRecord], object], most_waiting: int, name: str) -> None:
        self._waiting: queue.Queue[logging.LogRecord | None] = queue.Queue(most_waiting)
        super().__init__(self._waiting)
        self.dropped = 0
        self._write = write
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the writing thread."""
        self._thread.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        """See `QueueHandler`."""
        record.levelname = LEVELS.get(record.levelno, record.levelname)
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def stop(self, *last: logging.LogRecord) -> None:
        """Write the waiting records, then `last`; gives up if the output accepts nothing for STOP_S."""
        with contextlib.suppress(queue.Full):
            for record in (*last, None):
                self._waiting.put(record, timeout=STOP_S)
            self._thread.join(STOP_S)

    def _run(self) -> None:
        for record in iter(self._waiting.get, None):
            self._write(record)


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line: time (Unix seconds), level, message, and the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line without its newline. The message includes the traceback, if any: `QueueHandler` has added it."""
        line: dict[str, Any] = {"time": round(record.created, 3), "level": record.levelname.lower()}
        text = json.dumps({**line, "message": record.getMessage(), **getattr(record, "fields", {})}, default=str)
        return json.dumps(json.loads(text, parse_constant=lambda constant: None))  # JSON has no NaN


class PlainFormatter(logging.Formatter):
    """Formats lines for a terminal, and makes texts from peers in them printable."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, or several if the message includes a traceback."""
        return "\n".join(map(plain, super().format(record).split("\n")))


def start(stream: TextIO, *, json_lines: bool = False, level: int = logging.INFO) -> Callable[[], None]:
    """Send the root logger's records to `stream` only. Returns a function that writes the rest and stops."""
    output = logging.StreamHandler(stream)
    lines = PlainFormatter("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
    output.setFormatter(JsonFormatter() if json_lines else lines)
    background = BackgroundHandler(output.handle, QUEUE_LINES, "log")
    root = logging.getLogger()
    before, level_before = root.handlers[:], root.level
    root.handlers[:] = [background]
    root.setLevel(level)
    background.start()

    def stop() -> None:
        root.handlers[:] = before
        root.setLevel(level_before)
        text = f"{background.dropped} log lines were dropped: the output was too slow"
        last = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)
        background.stop(*[last] if background.dropped else [])

    return stop


class RepeatLimiter:
    """Lets one line per key through within `interval_s`, and counts the lines that it holds back."""

    def __init__(self, interval_s: float = QUIET_S, now: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._now = now
        self._seen = Recent[str, tuple[float, int]](MAX_KEYS)

    def admit(self, key: str) -> int | None:
        """None to hold a line back, otherwise the number of lines held back since the last one with this key."""
        now = self._now()
        last, held = self._seen.get(key, (float("-inf"), 0))
        if now - last < self._interval_s:
            self._seen[key] = (last, held + 1)
            return None
        self._seen[key] = (now, 0)
        return held


class EventLog:
    """Logs events that `counters` has already counted. Callers must hold the lock of `counters`."""

    def __init__(self, counters: RunCounters, steps: int) -> None:
        """`steps` is the length of the run; if 0, it is not known, and there are no lines of progress."""
        self._counters = counters
        self._steps = steps
        self._limiter = RepeatLimiter()
        self._often = RepeatLimiter(PROGRESS_S)
        self._deserted: dict[int, float] = {}
        """Stage without a replica → since when (monotonic clock), as last logged."""
        self._guarded: set[int] = set()
        """Stages whose guarding has been logged."""

    def write(self, kind: str, fields: Fields) -> None:
        """Log an event. Raises for malformed fields."""
        match kind:
            case "warning":
                self._warn(str(fields["message"]), "", kind, fields)
            case "reroute":
                self._trouble(f"microbatch re-routed: {fields['reason']}", kind, fields)
            case "microbatch" if fields["result"] != "done":
                dropped = f" ({fields.get('reason', 'other')})" if fields["result"] == "dropped" else ""
                self._trouble(f"microbatch {fields['result']}{dropped}", kind, fields)
            case "deserted":
                self._deserted_stages()
            case "inner_step" if self._steps and self._often.admit(kind) is not None:
                rate, tokens = self._counters.rates["tokens"].per_s(time.monotonic()), fields["loss_tokens"]
                found = progress(fields["step"], self._steps, rate, fields["loss_sum"] / tokens if tokens else None)
                _log(logging.INFO, "  ".join(filter(None, found)), kind, {**fields, "tokens_per_s": rate})
            case _ if kind in LINES:
                peer = fields.get("partner") or fields.get("peer")
                text = LINES[kind].format_map({**fields, "from_peer": f" of {peer}" if peer else ""})
                _log(self._level(kind, fields), text, kind, fields)
            case _ if kind not in EVENTS:
                logger.debug("%s %s", kind, fields)

    def _level(self, kind: str, fields: Fields) -> int:
        """INFO for news and DEBUG for repetition: for example, only the first checkpoint is logged at INFO."""
        match kind:
            case "outer_round" if self._often.admit(f"{kind} {fields['result']}") is None:
                return logging.DEBUG
            case "checkpoint" if self._counters.total("checkpoints") > 1:
                return logging.DEBUG
            case "guarded" if fields["stage"] in self._guarded:
                return logging.DEBUG
            case "guarded":
                self._guarded.add(fields["stage"])
            case "stuck" if not fields["well"]:
                return logging.WARNING
        return logging.INFO

    def _deserted_stages(self) -> None:
        """Log one line when a stage loses its last replica, and one when it has a replica again."""
        before, self._deserted = self._deserted, self._counters.deserted_since
        now = time.monotonic()
        for stage in self._deserted.keys() - before.keys():
            seconds = now - self._deserted[stage]
            text = f"stage {stage} has had no replica for {seconds:,.0f} s: the run waits for one"
            _log(logging.WARNING, text, "deserted", {"stage": stage, "seconds": seconds})
        # In other states this node does not look any more, because it is leaving or pausing.
        back = before.keys() - self._deserted.keys() if self._counters.state == "training" else ()
        for stage in back:
            text = f"stage {stage} has a replica again, after {now - before[stage]:.0f} s"
            _log(logging.INFO, text, "deserted", {"stage": stage, "seconds": 0.0})

    def _trouble(self, text: str, kind: str, fields: Fields) -> None:
        peer = f", {fields['peer']}" if "peer" in fields else ""
        reason = f": {fields['message']}" if fields.get("message") else ""
        self._warn(text, peer + reason, kind, fields)

    def _warn(self, text: str, details: str, kind: str, fields: Fields) -> None:
        """Log a warning, but at most one with this text within QUIET_S, regardless of its details."""
        held = self._limiter.admit(text)
        if held is not None:
            more = f" (and {held} more)" if held else ""
            _log(logging.WARNING, text + details + more, kind, fields)


def _log(level: int, text: str, kind: str, fields: Fields) -> None:
    """Log a line. JSON lines also get the `fields`, except one called `message`, which would replace the text."""
    named = {name: value for name, value in fields.items() if name != "message"}
    logger.log(level, "%s", text, extra={"fields": {"event": kind, **named}})
