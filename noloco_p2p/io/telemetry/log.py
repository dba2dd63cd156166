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
QUIET_S = 5.0
"""Seconds between two lines about the same trouble."""
MOST_KEYS = 256
"""Texts that a limiter remembers."""
LEVELS = {logging.DEBUG: "DEBUG", logging.INFO: "INFO", logging.WARNING: "WARNING", logging.ERROR: "ERROR"}
"""Their plain names: hivemind renames some of logging's when it is imported."""


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
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        return json.dumps(line | getattr(record, "fields", {}), default=str)


def start(stream: TextIO, *, json_lines: bool = False, level: int = logging.INFO) -> Callable[[], None]:
    """Send the root logger's records to `stream` and nowhere else. Returns what writes out the rest and ends it."""
    output = logging.StreamHandler(stream)
    plain = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
    output.setFormatter(JsonFormatter() if json_lines else plain)
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
