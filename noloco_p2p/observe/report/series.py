"""The series of a run as a CSV file, for other programs (`noloco report --csv`)."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from noloco_p2p.launch import homes
from noloco_p2p.launch.run_files import write_whole
from noloco_p2p.observe.report.journals import JournalEvent, node_dirs, read_processes, staged


class Row(NamedTuple):
    """A `progress` or `evaluation` event of a node."""

    time: float
    """Unix seconds."""
    node: str
    stage: int | None
    step: float | None
    tokens_per_s: float | None = None
    """Mean since the previous `progress` event."""
    loss: float | None = None
    """Nats per token, mean since the previous `progress` event."""
    learning_rate: float | None = None
    grad_norm: float | None = None
    validation_loss: float | None = None
    """Nats per token."""


def write(directories: Sequence[Path], out: Path) -> int:
    """Write the series of all nodes in these directories, ordered by time. Returns the number of rows.

    Raises ConfigError if there is no journal or `out` is a file of another kind, LocalError if it cannot be written.
    """
    homes.require_page("--csv ", out, ",".join(Row._fields).encode(), "series")
    places = node_dirs(directories)
    found = [row for place, name in places.items() for one in read_processes(place) for row in _rows(name, one)]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([Row._fields, *sorted(found, key=lambda row: (row.time, row.node))])
    write_whole(out, text.getvalue().encode())
    return len(found)


def _rows(node: str, events: Sequence[JournalEvent]) -> Iterator[Row]:
    """The rows of one process of a node."""
    at, tokens = events[0].at, 0.0
    for event, stage in staged(events, None):
        step = event.number("step")
        row = Row(round(event.at, 3), node, stage, step)
        if event.kind == "progress":
            now = max(tokens, event.number("tokens") or 0.0)
            rate = round((now - tokens) / (event.at - at), 3) if event.at > at else None
            at, tokens = event.at, now
            if step is not None:
                loss, learning_rate, grad_norm = map(event.number, ("loss", "learning_rate", "grad_norm"))
                yield row._replace(tokens_per_s=rate, loss=loss, learning_rate=learning_rate, grad_norm=grad_norm)
        elif event.kind == "evaluation":
            yield row._replace(validation_loss=event.number("loss"))
