"""Files to which a line at a time is appended, by processes that may be killed."""

import os
from pathlib import Path


def append_line(path: Path, line: str) -> None:
    """Append an ASCII line, given without its newline, to a file. Raises OSError; the file may then end in the middle
    of the line, which the next one does not continue.
    """
    data = line.encode("ascii") + b"\n"
    # Open for reading, too: to look at the last byte, and because opening a pipe for writing only waits for a reader.
    with open(path, "a+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n":
            data = b"\n" + data  # the process was killed, or the disk was full, in the middle of the last line
        if file.write(data) < len(data):
            raise OSError("the disk is full")
