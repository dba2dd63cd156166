"""Returns the memory of library code that only start-up needs."""

import ctypes
import mmap
import re
from pathlib import Path

MAPPINGS = Path("/proc/self/smaps")
CODE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r-xp \S+ \S+ \S+ +/")


def give_back_unused_code() -> None:
    """Unmap the resident code of all libraries: importing torch runs 50 MiB of it that training does not need.

    Code that runs again is mapped again from the system's page cache. Does nothing where there is no `MAPPINGS`.
    """
    libc, found = ctypes.CDLL(None), None
    for line in MAPPINGS.read_text("utf-8", "replace").splitlines() if MAPPINGS.exists() else ():
        found = CODE.match(line) or found
        if found is not None and line.startswith("Anonymous:"):
            start, end = (int(place, 16) for place in found.groups())
            if line.split()[1] == "0":  # otherwise the process has changed it, and the file does not have the change
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
            found = None
