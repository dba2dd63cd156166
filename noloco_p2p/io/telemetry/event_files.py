"""Bounded files of lines, and the thread that writes them: a full or slow disk costs lines, never time.

DIR/events.jsonl is the newest; when it is full it becomes events.jsonl.1, that .2, … and what would be .8 is gone.
All together hold at most FILES × FILE_BYTES (32 MiB).
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

NAME = "events.jsonl"
FILES = 8
FILE_BYTES = 4 << 20
RETRY_S = 10.0
"""After a failure (a full disk, a directory that is gone) lines are lost for so long, then it is tried again."""
QUEUE_LINES = 1_024
"""Lines that wait for the writing thread; further ones are lost."""
STOP_S = 2.0
"""Longest wait for a disk that takes nothing any more, at the end."""


class EventFiles:
    """Appends lines, and turns the files over. Used by one thread; nothing here raises."""

    def __init__(
        self,
        directory: Path,
        file_bytes: int = FILE_BYTES,
        files: int = FILES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = directory / NAME
        self._file_bytes = file_bytes
        self._files = files
        self._now = now
        self._file = -1
        self._size = 0
        self._torn = False
        """The last line of the file has no end: a process was killed, or the disk was full, within it."""
        self._retry_at = float("-inf")

    def write(self, line: bytes) -> None:
        """Append a line, which ends in a newline and is shorter than a file; it is lost while nothing can be written.

        One `write` of the system for each line: a process that is killed loses none that it had written.
        """
        if self._now() < self._retry_at:
            return
        try:
            if self._file < 0 or os.fstat(self._file).st_nlink == 0:
                self._open()
            if self._size + len(line) + 1 > self._file_bytes:
                self._turn_over()
            if self._torn:
                line = b"\n" + line
            written = os.write(self._file, line)
            self._size += written
            self._torn = written < len(line)
        except OSError:
            self._torn = True
            self._retry_at = self._now() + RETRY_S
            self.close()

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        self.close()
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._size = os.fstat(self._file).st_size
        self._torn = self._size > 0 and os.pread(self._file, 1, self._size - 1) != b"\n"

    def _turn_over(self) -> None:
        for number in range(self._files - 1, 0, -1):
            newer = _numbered(self._path, number - 1)
            if newer.exists():
                newer.replace(_numbered(self._path, number))
        self._open()


class Writer:
    """Hands lines to `write` in a thread of its own."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._lines: queue.Queue[bytes | None] = queue.Queue(QUEUE_LINES)
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def put(self, line: bytes) -> None:
        """A line to write; lost when too many wait."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            return

    def stop(self) -> None:
        """Write what waits, for at most 2 × STOP_S."""
        try:
            self._lines.put(None, timeout=STOP_S)
        except queue.Full:
            return
        self._thread.join(STOP_S)

    def _run(self) -> None:
        for line in iter(self._lines.get, None):
            self._write(line)


def oldest_first(directory: Path) -> list[Path]:
    """The files of a directory, in the order in which they were written."""
    found = [_numbered(directory / NAME, number) for number in range(FILES)]
    return [path for path in reversed(found) if path.is_file()]


def _numbered(path: Path, number: int) -> Path:
    return path if number == 0 else path.with_name(f"{path.name}.{number}")
