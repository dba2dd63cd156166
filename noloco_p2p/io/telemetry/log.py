"""Log lines for people or for machines, written by a thread of their own: a full pipe costs lines, never time."""

import contextlib
import json
import logging
import logging.handlers
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

QUEUE_LINES = 4_096
"""Lines that wait for the writing thread; further ones are dropped and counted."""

STOP_S = 2.0
"""Longest wait for an output that takes nothing any more, at each step of the end."""


LEVELS = {logging.DEBUG: "DEBUG", logging.INFO: "INFO", logging.WARNING: "WARNING", logging.ERROR: "ERROR"}
"""Their plain names: hivemind renames some of logging's when it is imported."""


class _Dropping(logging.handlers.QueueHandler):
    """Puts records into a bounded queue, or drops them."""

    dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        record.levelname = LEVELS.get(record.levelno, record.levelname)
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


class JsonLines(logging.Formatter):
    """One JSON object a line: time (Unix seconds), level, message, and the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_text:
            line["traceback"] = record.exc_text
        line.update(getattr(record, "fields", {}))
        return json.dumps(line, default=str)


def human_lines() -> logging.Formatter:
    """`12:00:00 INFO message`, local time."""
    return logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")


def start(stream: TextIO, *, json_lines: bool = False, level: int = logging.INFO) -> Callable[[], None]:
    """Send the root logger's records to `stream` and nowhere else. Returns what writes out the rest and ends it."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if json_lines else human_lines())
    lines: queue.Queue[logging.LogRecord | None] = queue.Queue(QUEUE_LINES)
    entrance = _Dropping(lines)
    root = logging.getLogger()
    before, level_before = root.handlers[:], root.level
    root.handlers[:] = [entrance]
    root.setLevel(level)

    def write() -> None:
        for record in iter(lines.get, None):
            handler.handle(record)

    writer = threading.Thread(target=write, name="log", daemon=True)
    writer.start()

    def stop() -> None:
        root.handlers[:] = before
        root.setLevel(level_before)
        with contextlib.suppress(queue.Full):
            if entrance.dropped:
                text = f"{entrance.dropped} log lines were dropped: the output was too slow"
                lines.put(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None), timeout=STOP_S)
            lines.put(None, timeout=STOP_S)
            writer.join(timeout=STOP_S)

    return stop


class Limiter:
    """Lets one line of a kind through in `interval_s`, and says how many it held back since."""

    def __init__(self, interval_s: float, now: Callable[[], float] = time.monotonic) -> None:
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
        if len(self._seen) >= 256:
            self._seen.clear()
        self._seen[key] = (now, 0)
        return held
