"""What a directory is, told by the files in it: no command writes into one that is something else.

Nothing is written to mark a directory: whatever version made it, its files say what it is.
"""

import re
from enum import Enum
from pathlib import Path

from noloco_p2p.errors import ConfigError
from noloco_p2p.launch import node_probe

MOUNT_POINT = "lost+found"
"""Every file system has it: a volume with nothing else than this and hidden files is empty."""
HEAD_BYTES = 4096
NODE_NAME = re.compile(r"\d+-\d+")
"""Of a node inside the directory of its swarm: stage and replica."""


class Home(Enum):
    """What a directory is: in words, and files of which one is enough to tell. The first that fits counts."""

    SWARM = "the directory of a swarm", ("swarm.json", "swarm.lock")
    NODE = "the directory of a node", ("identity.key", "identity.key.lock")
    MODEL = "an exported model", ("noloco.json",)
    EXPERIMENT = "the results of an experiment", ("results.json",)
    LINKS = "a page of noloco bench links", ("report.md",)
    TASKS = "a directory of noloco tasks", ("train.jsonl",)
    TRACKED = "a tracked run", ("tensorboard", "wandb")
    PLOTS = "a directory of plots", ("*.svg",)
    FILE = "a file", ()
    EMPTY = "empty", ()
    OTHER = "a directory of other files", ()

    def __init__(self, words: str, marks: tuple[str, ...]) -> None:
        self.words = words
        self.marks = marks


def kind_of(directory: Path) -> Home:
    """What it is; one that does not exist is empty. Raises ConfigError when it cannot be read."""
    try:
        if directory.is_dir():
            names = {path.name for path in directory.iterdir() if path.name[0] != "."} - {MOUNT_POINT}
        else:
            names = set()
            # Below a file there is nothing, either; so the nearest thing that exists decides.
            nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
            if not nearest.is_dir():
                return Home.FILE
        found = (kind for kind in Home if any(any(directory.glob(mark)) for mark in kind.marks))
        return next(found, Home.OTHER if names else Home.EMPTY)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be read: {error.strerror}") from error


def require(named: str, directory: Path, *wanted: Home, advice: str = "name another directory") -> Home:
    """What the directory is, one of `wanted`, whose first is the command's own kind. Raises ConfigError, in one line.

    `named`: how the command line names it, such as `--dir `.
    """
    kind = kind_of(directory)
    if kind in wanted:
        return kind
    own = wanted[0].words
    if kind is Home.OTHER:
        holds = "is not empty" if wanted[0] is Home.EMPTY else f"holds files that are not {_of(own)}"
        raise ConfigError(f"{named}{directory} {holds}: {advice}")
    if kind is Home.EMPTY and not directory.exists():
        raise ConfigError(f"{named}{directory}: there is no such directory")
    wrong = "" if wanted[0] is Home.EMPTY else f", not {_of(own) if _of(kind.words) != kind.words else own}"
    raise ConfigError(f"{named}{directory} is {kind.words}{wrong}: {advice}")


def require_run(named: str, directory: Path) -> None:
    """A directory of a run to read: of a swarm, of a node, or one that may have such below it. Raises ConfigError."""
    empty = (Home.EMPTY,) if directory.is_dir() else ()
    require(named, directory, Home.SWARM, Home.NODE, Home.OTHER, *empty, advice="name that of a node or of a swarm")


def require_own(directory: Path, *wanted: Home) -> None:
    """As `require`, for the --dir of a run that is to write there.

    It may not be inside the directory of a swarm, unless it is that of one of its nodes and the swarm has not ended.
    """
    kind = require("--dir ", directory, *wanted, Home.EMPTY)
    around = directory.absolute().parent
    if kind_of(around) is Home.SWARM:
        if kind is not Home.NODE and (wanted[0] is not Home.NODE or NODE_NAME.fullmatch(directory.name) is None):
            raise ConfigError(f"--dir {directory} is inside the directory of a swarm: name another directory")
        refuse_finished("--dir ", around)


def refuse_finished(named: str, run_dir: Path) -> None:
    """Raises ConfigError when this swarm has done all its steps."""
    if (node_probe.read_json(run_dir / node_probe.SUMMARY) or {}).get("completed"):
        raise ConfigError(f"{named}{run_dir} holds a finished run; name another --dir")


def require_file(named: str, path: Path) -> None:
    """A file that is to be written may replace no directory, device or pipe. Raises ConfigError, OSError."""
    if path == Path("-") or (path.exists() and not path.is_file()):
        raise ConfigError(f"{named}{path} is no regular file: name another one")


def require_page(named: str, path: Path, mark: bytes, what: str) -> None:
    """A file that is to be written may replace one of its own kind, which has `mark` near its beginning, and no other.

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
        raise ConfigError(f"{named}{path} is there and is no {what} of noloco: name another file")


def _of(words: str) -> str:
    """`the directory of a node` as `of a node`; others as they are."""
    return words.removeprefix("the directory ")
