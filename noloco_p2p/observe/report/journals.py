"""Reads the journals of a run. Lines torn by a kill or a full disk are skipped.

Every text is made safe to show here: unprintable characters are replaced, and its length is limited.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

from noloco_p2p.errors import NO_JSON, ConfigError
from noloco_p2p.humanize import plain
from noloco_p2p.io.durable_files import MOUNT_POINT
from noloco_p2p.io.telemetry.journal import NAME, oldest_first
from noloco_p2p.launch import homes

LONGEST_LINE = 1 << 18
MAX_CHARACTERS = 300
LARGEST, SMALLEST = 1e60, 1e-60
"""Limits on the size of a number, beyond all that a node counts or computes: a larger one is ignored, and a smaller one
read as 0. So what a page computes from numbers stays finite, and what it takes the logarithm of does not become 0."""


@dataclass(frozen=True, slots=True)
class JournalEvent:
    """One line of a node's journal."""

    at: float
    """Unix seconds, by the clock that the process had for most of its lines."""
    kind: str
    fields: dict[str, Any]

    def number(self, name: str) -> float | None:
        """The finite number in this field; None if there is none."""
        return number(self.fields.get(name))

    def text(self, name: str) -> str:
        """The text in this field, safe to show; empty if there is none."""
        return clean(self.fields.get(name, ""))

    def tally(self, name: str) -> dict[str, float]:
        """The finite numbers of the mapping in this field, by clean names; empty if there is no mapping."""
        found = self.fields.get(name)
        if not isinstance(found, dict):
            return {}
        return {clean(key): count for key, value in found.items() if (count := number(value)) is not None}


def node_dirs(paths: Sequence[Path]) -> dict[Path, str]:
    """Directories with a journal, among those given and those one level below, and what to call each.

    Raises ConfigError if one of those given has no journal in it or one level below.
    """
    found: dict[Path, None] = {}
    for directory in paths:
        homes.require_run("", directory)
        places = (directory, *sorted(each for each in directory.iterdir() if each.name != MOUNT_POINT))
        here = [each for each in places if each.is_dir() and oldest_first(each)]
        if not here:
            advice = "name the --dir of a node, or of noloco swarm"
            raise ConfigError(f"{directory}: no journal ({NAME}) in it or one level below; {advice}")
        found.update(dict.fromkeys(each.resolve() for each in here))
    names = Counter(each.name for each in found)
    return {each: clean(each.name if names[each.name] == 1 else f"{each.parent.name}/{each.name}") for each in found}


def read_processes(directory: Path) -> list[list[JournalEvent]]:
    """The events of each process that wrote to this directory, in order."""
    processes: list[list[tuple[float, float, str, dict[str, Any]]]] = []
    for fields in _objects(oldest_first(directory)):
        at, up_s, kind = number(fields.get("time")), number(fields.get("up_s")), fields.get("event")
        if at is None or up_s is None or not isinstance(kind, str):
            continue
        if not processes or kind == "start" or processes[-1][-1][1] > up_s + 1:
            processes.append([])
        processes[-1].append((at, up_s, kind, fields))
    return [_by_one_clock(lines) for lines in processes]


def _by_one_clock(lines: list[tuple[float, float, str, dict[str, Any]]]) -> list[JournalEvent]:
    """The events of one process, dated by their uptime since the median of the start times that the lines imply.

    So a clock that was wrong at first, or jumped once, moves nothing. An event `lost` stands for first lines that have
    been rotated away, with the state that the others say first, unless it had just changed.
    """
    began_at = median_low(at - up_s for at, up_s, _, _ in lines)
    events = [JournalEvent(began_at + up_s, kind, fields) for _, up_s, kind, fields in lines]
    first = next((event for event in events if "state" in event.fields), events[0])
    lost = JournalEvent(began_at, "lost", {"state": first.text("state") if first.kind == "progress" else ""})
    return events if events[0].kind == "start" else [lost, *events]


def staged(events: Sequence[JournalEvent], stage: int | None) -> Iterator[tuple[JournalEvent, int | None]]:
    """The events of a process, each with the stage that the node held: at first that of the first event that says it,
    or if none does, `stage`."""
    places = [event.number("stage") if event.kind in ("start", "stage", "progress") else None for event in events]
    held = next((place for place in places if place is not None), stage)
    for event, place in zip(events, places, strict=True):
        held = held if place is None else place
        yield event, None if held is None else int(held)


def _objects(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        try:
            with path.open("rb") as file:
                while line := file.readline(LONGEST_LINE):
                    try:
                        found = json.loads(line)
                    except NO_JSON:
                        continue
                    if isinstance(found, dict):
                        yield found
        except OSError:
            continue  # the file has just been rotated away


def number(value: object) -> float | None:
    """The number as a float, if it is finite and at most LARGEST; otherwise None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        return None
    return float(value) if abs(value) >= SMALLEST else 0.0


def clean(value: object) -> str:
    """The value as one printable line of limited length."""
    return plain(value if isinstance(value, str) else str(value), MAX_CHARACTERS)
