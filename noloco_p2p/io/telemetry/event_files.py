"""The bounded files of a journal. Whatever happens to the disk costs lines, and nothing here raises.

DIR/events.jsonl is the newest; when it is full it becomes events.jsonl.1, that .2, … and what would be .8 is gone.
All together hold at most FILES × FILE_BYTES (32 MiB).
"""

import errno
import io
import logging
import logging.handlers
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME = "events.jsonl"
FILES = 8
FILE_BYTES = 4 << 20
RETRY_S = 10.0
"""After a failure (a full disk, a directory that is gone) lines are lost for this long, then it is tried again."""


class EventFiles(logging.handlers.RotatingFileHandler):
    """Appends lines, each in one `write` of the system: a process that is killed loses none that it had written.

    Used by one thread. It has no lock: at the end of the process `logging` would wait for it while a disk hangs.
    """

    def __init__(
        self,
        directory: Path,
        file_bytes: int = FILE_BYTES,
        files: int = FILES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(directory / NAME, maxBytes=file_bytes, backupCount=files - 1, encoding="ascii", delay=True)
        self._now = now
        self._retry_at = -math.inf

    def write(self, line: str) -> None:
        """Append a line, given without its end and shorter than a file; it is lost while nothing can be written."""
        self.emit(line_record(line))

    def emit(self, record: logging.LogRecord) -> None:
        """See `write`."""
        if self._now() >= self._retry_at:
            if self.stream is not None and not os.path.exists(self.baseFilename):
                self.close()  # the directory was removed, and may be there again
            super().emit(record)

    def createLock(self) -> None:  # noqa: N802
        """None, see above."""
        self.lock = None

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


class _WholeWrites(io.FileIO):
    """A file that is full within a line raises, as it does before one: what is written later needs a new line."""

    def write(self, data: Any, /) -> int:
        """See `io.RawIOBase`."""
        written = super().write(data)
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written


def line_record(line: str) -> logging.LogRecord:
    """A line as what handlers of `logging` take."""
    return logging.makeLogRecord({"msg": line})


def oldest_first(directory: Path) -> list[Path]:
    """The files of a directory, in the order in which they were written."""
    found = [directory / NAME, *(directory / f"{NAME}.{number}" for number in range(1, FILES))]
    return [path for path in reversed(found) if path.is_file()]
