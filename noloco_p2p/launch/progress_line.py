"""Shows the progress of a slow operation as a line on standard error, from a thread that only reads its position."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self, TextIO

from noloco_p2p import humanize

TERMINAL_S, FILE_S = 1.0, 30.0
"""Seconds between two lines: on a terminal, where the line is rewritten, and elsewhere, where lines are appended."""
CLEAR = "\r\x1b[K"
"""Moves to the beginning of the line and clears it."""

Position = tuple[str, float]
"""(progress in words, progress as a share of the whole; 0 while it is unknown)."""


def can_rewrite(stream: TextIO) -> bool:
    """Whether the stream is a terminal on which lines can be replaced: in the shell of an editor they often cannot."""
    from rich.console import Console

    return stream.isatty() and not Console(file=stream).is_dumb_terminal


class ProgressLine:
    """Inside the `with`, the line is shown. What ends before the first line is due shows nothing.

    `least_s`: how long it takes at least, if that is known; the time left until the position has a share.
    """

    def __init__(
        self,
        position: Callable[[], Position] = lambda: ("running", 0.0),
        *,
        terminal_only: bool = False,
        least_s: float = 0.0,
    ) -> None:
        self._position, self._least_s = position, least_s
        self._terminal = can_rewrite(sys.stderr)
        self._hidden = terminal_only and not self._terminal
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="progress", daemon=True)
        self._began_at = time.monotonic()

    def __enter__(self) -> Self:
        """Start showing the line."""
        if not self._hidden:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop showing the line."""
        self._ended.set()
        if not self._hidden:
            self._thread.join()
            self.clear()

    def clear(self) -> None:
        """Clear the line, to make room for something else on standard error."""
        if self._terminal and not self._hidden:
            print(CLEAR, end="", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Print a line on standard error, above this one."""
        self.clear()
        print(text, file=sys.stderr, flush=True)

    def tell(self, words: str, share: float) -> None:
        """Show this position from now on."""
        self._position = lambda: (words, share)

    def over(self, words: str, total: int) -> Iterator[int]:
        """The numbers from 0 to total - 1: each shows how many there were before it."""
        for done in range(total):
            self.tell(words, done / total)
            yield done

    def text(self) -> str:
        """The current line: progress, the elapsed time, and an estimate of the time left."""
        words, share = self._position()
        elapsed_s = time.monotonic() - self._began_at
        line = f"{words}, {humanize.duration(round(elapsed_s))} elapsed"
        left_s = round((elapsed_s / share if share else self._least_s) - elapsed_s)
        sure = "about" if share else "at least"
        return f"{line}, {sure} {humanize.duration(left_s)} left" if left_s > 0 else line

    def _repeat(self) -> None:
        while not self._ended.wait(TERMINAL_S if self._terminal else FILE_S):
            text = f"{CLEAR}{self._fitting()}" if self._terminal else f"{self.text()}\n"
            print(text, end="", file=sys.stderr, flush=True)

    def _fitting(self) -> str:
        """The line as far as it fits the terminal: one that wraps could not be rewritten."""
        from rich.console import Console

        return humanize.plain(self.text(), Console(file=sys.stderr).width - 1)


@contextmanager
def counted(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Show the progress of something with `total` parts; call what it yields after each of them."""
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1

    with ProgressLine(lambda: (f"{title}, {done:,} of {total:,}", done / max(1, total))):
        yield advance
