"""What the log says of a node's events, and how its lines get out, for people or for machines.

They are written by a thread of their own: a full pipe costs lines, never time. An event of which nobody says or counts
anything is logged at debug level.
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

from noloco_p2p.humanize import plain, progress
from noloco_p2p.io.telemetry.counters import EVENTS, Fields, RunCounters

QUEUE_LINES = 4_096
"""Lines that wait for the writing thread; further ones are dropped and counted."""
STOP_S = 2.0
"""Longest wait for an output that takes nothing any more, at each step of the end."""
PROGRESS_S = 10.0
"""Seconds between two lines of progress, and between two about outer rounds with the same result: the next has one."""
QUIET_S = 5.0
"""Seconds between two lines about the same trouble."""
MOST_KEYS = 256
"""Texts that a limiter remembers."""
LEVELS = {logging.DEBUG: "DEBUG", logging.INFO: "INFO", logging.WARNING: "WARNING", logging.ERROR: "ERROR"}
"""Their plain names: hivemind renames some of logging's when it is imported."""
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
"""Kind of event → its line. `from_peer` is made here, all else are fields of the event."""

logger = logging.getLogger("noloco_p2p")


class BackgroundHandler(logging.handlers.QueueHandler):
    """Hands records to another handler in a thread of its own; what comes while too many wait is dropped.

    Not a `QueueListener`: its `stop` waits without a limit, and fails when the queue is full.
    """

    def __init__(self, target: logging.Handler, most_waiting: int, name: str) -> None:
        self._waiting: queue.Queue[logging.LogRecord | None] = queue.Queue(most_waiting)
        super().__init__(self._waiting)
        self.dropped = 0
        self._target = target
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        """See `QueueHandler`."""
        record.levelname = LEVELS.get(record.levelno, record.levelname)
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def stop(self, *last: logging.LogRecord) -> None:
        """Write what waits, and `last`; gives up when nothing is taken for STOP_S."""
        with contextlib.suppress(queue.Full):
            for record in (*last, None):
                self._waiting.put(record, timeout=STOP_S)
            self._thread.join(STOP_S)

    def _run(self) -> None:
        for record in iter(self._waiting.get, None):
            self._target.handle(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (Unix seconds), level, message, and the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end. The message holds the traceback: `QueueHandler` has put it there."""
        line: dict[str, Any] = {"time": round(record.created, 3), "level": record.levelname.lower()}
        return json.dumps({**line, "message": record.getMessage(), **getattr(record, "fields", {})}, default=str)


class PlainFormatter(logging.Formatter):
    """Lines for a terminal: what peers have said is in them."""

    def format(self, record: logging.LogRecord) -> str:
        """The lines, more than one where the message holds a traceback."""
        return "\n".join(map(plain, super().format(record).split("\n")))


def start(stream: TextIO, *, json_lines: bool = False, level: int = logging.INFO) -> Callable[[], None]:
    """Send the root logger's records to `stream` and nowhere else. Returns what writes out the rest and ends it."""
    output = logging.StreamHandler(stream)
    lines = PlainFormatter("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
    output.setFormatter(JsonFormatter() if json_lines else lines)
    background = BackgroundHandler(output, QUEUE_LINES, "log")
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
    """Lets one line with the same key through in `interval_s`, and says how many it has held back since."""

    def __init__(self, interval_s: float = QUIET_S, now: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._now = now
        self._seen: dict[str, tuple[float, int]] = {}

    def admit(self, key: str) -> int | None:
        """None: hold it back; else the number held back since the last line with this key."""
        now = self._now()
        last, held = self._seen.get(key, (float("-inf"), 0))
        if now - last < self._interval_s:
            self._seen[key] = (last, held + 1)
            return None
        if len(self._seen) >= MOST_KEYS:
            self._seen.clear()
        self._seen[key] = (now, 0)
        return held


class EventLog:
    """Writes the lines of events that `counters` has counted already; whoever calls it holds their lock."""

    def __init__(self, counters: RunCounters, steps: int) -> None:
        """`steps` of the run; 0: not known, and no line says how far it is."""
        self._counters = counters
        self._steps = steps
        self._limiter = RepeatLimiter()
        self._often = RepeatLimiter(PROGRESS_S)
        self._deserted: dict[int, float] = {}
        """Stages that are known to be without a replica, and since when."""
        self._guarded: set[int] = set()
        """Stages whose snapshot has been held before."""

    def write(self, kind: str, fields: Fields) -> None:
        """Say what happened. Raises for malformed fields."""
        match kind:
            case "warning":
                self._warn(str(fields["message"]), "", kind, fields)
            case "reroute":
                self._trouble(f"microbatch re-routed: {fields['reason']}", kind, fields)
            case "microbatch" if fields["result"] not in ("done", "repeat"):
                dropped = f" ({fields.get('reason', 'other')})" if fields["result"] == "dropped" else ""
                self._trouble(f"microbatch {fields['result']}{dropped}", kind, fields)
            case "deserted":
                self._deserted_stages()
            case "inner_step" if self._steps and self._often.admit(kind) is not None:
                rate, tokens = self._counters.rates["tokens"].per_s(time.monotonic()), fields["loss_tokens"]
                found = progress(fields["step"], self._steps, rate, fields["loss_sum"] / tokens if tokens else None)
                _log(logging.INFO, "  ".join(filter(None, found)), kind, {**fields, "tokens_per_s": rate})
            case _ if kind in LINES:
                text = LINES[kind].format_map({**fields, "from_peer": _from_peer(fields)})
                _log(self._level(kind, fields), text, kind, fields)
            case _ if kind not in EVENTS:
                logger.debug("%s %s", kind, fields)

    def _level(self, kind: str, fields: Fields) -> int:
        """INFO, but DEBUG for what goes on as it began: the first checkpoint says that the node writes them."""
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
        """A line when a stage loses its last replica or has one again, none in between."""
        before, self._deserted = self._deserted, self._counters.deserted_since
        now = time.monotonic()
        for stage in self._deserted.keys() - before.keys():
            seconds = now - self._deserted[stage]
            text = f"stage {stage} has had no replica for {seconds:.0f} s: the run waits for one"
            _log(logging.WARNING, text, "deserted", {"stage": stage, "seconds": seconds})
        # Else this node has stopped to look: it leaves, or pauses.
        back = before.keys() - self._deserted.keys() if self._counters.state == "training" else ()
        for stage in back:
            text = f"stage {stage} has a replica again, after {now - before[stage]:.0f} s"
            _log(logging.INFO, text, "deserted", {"stage": stage, "seconds": 0.0})

    def _trouble(self, text: str, kind: str, fields: Fields) -> None:
        peer = f", {fields['peer']}" if "peer" in fields else ""
        reason = f": {fields['message']}" if fields.get("message") else ""
        self._warn(text, peer + reason, kind, fields)

    def _warn(self, text: str, details: str, kind: str, fields: Fields) -> None:
        """A warning, at most one with this text in QUIET_S, whatever its details."""
        held = self._limiter.admit(text)
        if held is not None:
            more = f" (and {held} more)" if held else ""
            _log(logging.WARNING, text + details + more, kind, fields)


def _from_peer(fields: Fields) -> str:
    peer = fields.get("partner") or fields.get("peer")
    return f" of {peer}" if peer else ""


def _log(level: int, text: str, kind: str, fields: Fields) -> None:
    """`fields` go into JSON lines beside the message, which they may not replace."""
    named = {name: value for name, value in fields.items() if name != "message"}
    logger.log(level, "%s", text, extra={"fields": {"event": kind, **named}})
