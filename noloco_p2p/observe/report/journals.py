"""The journals of a run, read back. What was torn by a kill or a full disk is passed over.

Every text is made harmless here: what cannot be printed is replaced, and its length is bounded.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from noloco_p2p.errors import ConfigError
from noloco_p2p.io.telemetry.event_files import NAME, oldest_first

LONGEST_LINE = 1 << 18
MOST_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Line:
    """One event of a node."""

    at: float
    """Unix seconds, by the clock that this process had most of the time."""
    event: str
    fields: dict[str, Any]

    def number(self, name: str) -> float | None:
        """A finite number, None where there is none."""
        return number(self.fields.get(name))

    def text(self, name: str) -> str:
        """A text that can be shown; empty where there is none."""
        return clean(self.fields.get(name, ""))

    def tally(self, name: str) -> dict[str, float]:
        """A mapping to numbers."""
        return tally(self.fields.get(name))


@dataclass(slots=True)
class Life:
    """What one process wrote, in order."""

    lines: list[Line] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """It came to its end in order; else it was killed, or goes on."""
        return self.lines[-1].event == "end"


def node_dirs(asked: Sequence[Path]) -> list[Path]:
    """Directories with a journal: those asked for, or one level below. Raises ConfigError for one without any."""
    found: dict[Path, None] = {}
    for directory in asked:
        if not directory.is_dir():
            raise ConfigError(f"{directory} is no directory; name that of a node, or of noloco swarm")
        here = [each for each in (directory, *sorted(directory.iterdir())) if each.is_dir() and oldest_first(each)]
        if not here:
            raise ConfigError(
                f"{directory}: no journal ({NAME}) in it or one level below; "
                "name the --dir of a node, or of noloco swarm"
            )
        found.update(dict.fromkeys(here))
    return list(found)


def read_lives(directory: Path) -> list[Life]:
    """The processes that wrote here, in order."""
    lives: list[list[tuple[float, float, str, dict[str, Any]]]] = []
    for fields in _lines(oldest_first(directory)):
        at, up_s, event = number(fields.get("time")), number(fields.get("up_s")), fields.get("event")
        if at is None or up_s is None or not isinstance(event, str):
            continue
        if not lives or event == "start" or lives[-1][-1][1] > up_s + 1:
            lives.append([])
        lives[-1].append((at, up_s, event, fields))
    return [_life(lines) for lines in lives]


def _life(lines: list[tuple[float, float, str, dict[str, Any]]]) -> Life:
    """The clock that counts is that of most lines: one that was wrong at first, or jumped once, moves nothing."""
    began_at = median(at - up_s for at, up_s, _, _ in lines)
    return Life([Line(began_at + up_s, event, fields) for _, up_s, event, fields in lines])


def _lines(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        try:
            with path.open("rb") as file:
                while line := file.readline(LONGEST_LINE):
                    found = _object(line)
                    if found is not None:
                        yield found
        except OSError:
            continue  # it was turned over just now


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def number(value: object) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def tally(value: object) -> dict[str, float]:
    """The finite numbers of a mapping, by clean names."""
    if not isinstance(value, dict):
        return {}
    return {clean(name): found for name, each in value.items() if (found := number(each)) is not None}


def clean(value: object) -> str:
    """A text of one line, bounded, without what cannot be seen."""
    text = (value if isinstance(value, str) else str(value))[:MOST_CHARACTERS]
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
