"""The progress of a slow operation: a line on standard error, written by a thread that only reads."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from noloco_p2p import humanize

TERMINAL_S, FILE_S = 1.0, 30.0
"""Seconds from one line to the next: rewritten on a terminal, one below the other elsewhere."""
CLEAR = "\r\x1b[K"
"""To the beginning of the line, which is emptied."""

Position = tuple[str, float]
"""Progress in words, and as a share of the whole."""


class ProgressLine:
    """A context in which the line is shown; nothing is shown for what ends before the first one is due."""

    def __init__(self, position: Callable[[], Position], *, terminal_only: bool = False) -> None:
        self._position = position
        self._terminal = sys.stderr.isatty()
        self._hidden = terminal_only and not self._terminal
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="progress", daemon=True)
        self._began_at = time.monotonic()

    def __enter__(self) -> Self:
        """Begin to show it."""
        if not self._hidden:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop showing it."""
        self._ended.set()
        if not self._hidden:
            self._thread.join()
            self.clear()

    def clear(self) -> None:
        """Make room for something else on standard error."""
        if self._terminal and not self._hidden:
            print(CLEAR, end="", file=sys.stderr, flush=True)

    def text(self) -> str:
        """The current line: progress, the time gone, and an estimate of the time left."""
        words, share = self._position()
        gone_s = time.monotonic() - self._began_at
        line = f"{words}, {humanize.duration(round(gone_s))} gone"
        left_s = round(gone_s / share - gone_s) if share else 0
        return f"{line}, about {humanize.duration(left_s)} left" if left_s > 0 else line

    def _repeat(self) -> None:
        while not self._ended.wait(TERMINAL_S if self._terminal else FILE_S):
            head, tail = (CLEAR, "") if self._terminal else ("", "\n")
            print(f"{head}{self.text()}", end=tail, file=sys.stderr, flush=True)


@contextmanager
def counted(title: str, total: int) -> Iterator[Callable[[], None]]:
    """The line for something of `total` parts; call what it yields after each."""
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1

    with ProgressLine(lambda: (f"{title}, {done:,} of {total:,}", done / max(1, total))):
        yield advance
