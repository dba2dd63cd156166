"""Files that outlive a loss of power: whole under their name, or not there.

A name is on the disk only when its directory has been flushed, a new directory when the one above it has (fsync(2)).
"""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Bring a file, or the names in a directory, down to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def settle(fresh: Path, path: Path) -> None:
    """Give a written file its name once its bytes are on the disk, and bring the name there too. Raises OSError."""
    flush(fresh)
    fresh.replace(path)
    flush(path.parent)


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file, with `mode` where it is a new one. Raises OSError, and then leaves what was there."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    fresh.unlink(missing_ok=True)
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        settle(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def make_folders(path: Path) -> None:
    """Make a directory and those above it that are missing. Raises OSError."""
    missing = [one for one in (path, *path.parents) if not one.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for one in missing:
        flush(one.parent)
