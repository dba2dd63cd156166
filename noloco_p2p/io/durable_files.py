"""Files that survive a power loss: either complete under their name, or absent.

A file's name is on disk only after its directory has been flushed, and a new directory only after its parent has been
(fsync(2)).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from noloco_p2p.errors import LocalError

MOUNT_POINT = "lost+found"
"""A folder at the top of every ext file system that only root may read: a volume with only this and hidden files is
empty."""


def flush(path: Path) -> None:
    """Flush a file, or the names in a directory, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def settle(fresh: Path, path: Path) -> None:
    """Rename a written file to its final name once its bytes are on disk, and flush the name too. Raises OSError."""
    flush(fresh)
    fresh.replace(path)
    flush(path.parent)


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Create or replace a file; the result has `mode`, less the umask. If this raises (OSError), an existing file is
    left as it was."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    fresh.unlink(missing_ok=True)
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        settle(fresh, path)
    except BaseException:  # also if the user interrupts it
        fresh.unlink(missing_ok=True)
        raise


def make_folders(path: Path) -> None:
    """Create a directory durably, along with any missing parents. Raises OSError."""
    missing = [one for one in (path, *path.parents) if not one.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for one in missing:
        flush(one.parent)


# --- errors as the package's own --------------------------------------------------------------------------------------


@contextmanager
def writing(place: object) -> Iterator[None]:
    """Inside the `with`, turn an OSError into a LocalError that names the place that cannot be written."""
    try:
        yield
    except OSError as error:
        raise LocalError(f"{place} cannot be written: {error.strerror or error}") from error


def read_if_there(path: Path) -> bytes | None:
    """The content of a file; None if it does not exist. Raises LocalError if it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LocalError(f"{path} cannot be read: {error.strerror or error}") from error
