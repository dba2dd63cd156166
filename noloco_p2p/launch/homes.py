"""Tells from its files what a directory is, so that no command writes into a directory of another kind.

No marker is written: the files themselves show what a directory is, whichever version made it.
"""

import errno
import os
import re
import shutil
from enum import Enum
from pathlib import Path

from noloco_p2p import humanize
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.io.durable_files import MOUNT_POINT
from noloco_p2p.launch import node_probe

HEAD_BYTES = 4096
"""How much of a file is searched for its mark."""
NODE_NAME = re.compile(r"\d+-\d+")
"""Name of a node's directory inside the directory of its swarm: stage and replica."""


class Home(Enum):
    """A kind of directory: its description, and patterns of files, any of which identifies it. The first match wins."""

    SWARM = "the directory of a swarm", ("swarm.json", "swarm.lock")
    NODE = "the directory of a node", ("identity.key", "identity.key.lock")
    MODEL = "an exported model", ("noloco.json",)
    EXPERIMENT = "the results of an experiment", ("results.json",)
    LINKS = "a page of noloco bench links", ("report.md",)
    TASKS = "the directory of noloco tasks", ("train.jsonl",)
    TRACKED = "a tracked run", ("tensorboard", "wandb")
    PLOTS = "a directory of plots", ("*.svg",)
    FILE = "a file", ()
    EMPTY = "empty", ()
    OTHER = "a directory of other files", ()

    def __init__(self, description: str, marks: tuple[str, ...]) -> None:
        self.description = description
        self.marks = marks


def kind_of(directory: Path) -> Home:
    """The kind of a directory; one that does not exist is empty. Raises ConfigError if it cannot be read."""
    try:
        # A path below a file, or a link to nothing, does not exist, but cannot be created either: the nearest decides.
        nearest = next(it for it in (directory, *directory.absolute().parents) if it.exists() or it.is_symlink())
        if not nearest.is_dir():
            return Home.FILE
        if nearest is not directory:
            return Home.EMPTY
        names = {path.name for path in directory.iterdir() if path.name[0] != "."} - {MOUNT_POINT}
        found = (kind for kind in Home if any(any(directory.glob(mark)) for mark in kind.marks))
        return next(found, Home.OTHER if names else Home.EMPTY)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be read: {error.strerror}") from error


def require(named: str, directory: Path, *wanted: Home, advice: str = "name another directory") -> Home:
    """The kind of a directory, which must be one of `wanted`; the first of these is the kind that the command is for.

    Raises ConfigError, in one line. `named`: how the command line names the directory, such as `--dir `.
    """
    kind = kind_of(directory)
    if kind in wanted:
        return kind
    own = wanted[0].description
    if kind is Home.OTHER:
        holds = "is not empty" if wanted[0] is Home.EMPTY else f"holds files that are not {_of(own)}"
        raise ConfigError(f"{named}{directory} {holds}: {advice}")
    if kind is Home.EMPTY and not directory.exists():
        raise ConfigError(f"{named}{directory}: there is no such directory")
    wrong = "" if wanted[0] is Home.EMPTY else f", not {_of(own) if _of(kind.description) != kind.description else own}"
    raise ConfigError(f"{named}{directory} is {kind.description}{wrong}: {advice}")


def require_run(named: str, directory: Path) -> None:
    """Raise ConfigError unless a run can be read from the directory: it is a swarm's or a node's, or may hold such."""
    empty = (Home.EMPTY,) if directory.is_dir() else ()
    require(named, directory, Home.SWARM, Home.NODE, Home.OTHER, *empty, advice="name that of a node or swarm")


def require_own(directory: Path, *wanted: Home) -> None:
    """As `require`, for the --dir that a run is going to write to.

    It may not be inside the directory of a node, nor of a swarm, unless it belongs to one of its nodes and the swarm
    has not ended.
    """
    kind, around = require("--dir ", directory, *wanted, Home.EMPTY), directory.absolute().parent
    outer, named = kind_of(around), wanted[0] is Home.NODE and NODE_NAME.fullmatch(directory.name) is not None
    if outer is Home.NODE or (outer is Home.SWARM and kind is not Home.NODE and not named):
        raise ConfigError(f"--dir {directory} is inside {outer.description}: name another directory")
    if outer is Home.SWARM:
        refuse_finished("--dir ", around)


def refuse_finished(named: str, run_dir: Path) -> None:
    """Raise ConfigError if the swarm of this directory has completed its run."""
    if (node_probe.read_json(run_dir / node_probe.SUMMARY) or {}).get("completed"):
        raise ConfigError(f"{named}{run_dir} holds a finished run; name another --dir")


def require_file(named: str, path: Path) -> None:
    """Refuse to write a file in place of a directory, device or pipe. Raises ConfigError, OSError."""
    if path == Path("-") or (path.exists() and not path.is_file()):
        raise ConfigError(f"{named}{path} is not a regular file: name another one")


def require_page(named: str, path: Path, mark: bytes, what: str) -> None:
    """Refuse to write a file in place of one of another kind: those of its own kind have `mark` near the beginning.

    Raises ConfigError.
    """
    try:
        require_file(named, path)
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{named}{path} cannot be written: {error.strerror}") from error
    if head and mark not in head:
        raise ConfigError(f"{named}{path} exists and is not a {what} of noloco: name another file")


def _of(words: str) -> str:
    """Shorten `the directory of a node` to `of a node`; leave other words as they are."""
    return words.removeprefix("the directory ")


def refuse_existing(out: Path, size_bytes: int = 0) -> None:
    """Raise ConfigError unless `out` is empty, and LocalError if a model of `size_bytes` cannot be written there."""
    require("--out ", out, Home.EMPTY, advice="name a directory that does not exist yet")
    check_room(out, size_bytes, "the model")


def check_room(directory: Path, size_bytes: int, what: str) -> None:
    """Check that a directory, which may not exist yet, can be written to, and that `size_bytes`, for `what`, fit.

    Raises LocalError.
    """
    nearest = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        reason = os.strerror(errno.EACCES if nearest.is_dir() else errno.ENOTDIR)
        raise LocalError(f"cannot write to {nearest} ({reason}): name another directory")
    if (free := shutil.disk_usage(nearest).free) <= size_bytes:
        room, needed = humanize.size_text(free), humanize.size_text(size_bytes)
        reason = f"has {room} free, {what} needs {needed}" if size_bytes else "is full"
        raise LocalError(f"{nearest} {reason}: free some space or name another directory")
