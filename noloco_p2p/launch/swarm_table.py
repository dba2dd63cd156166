"""What `noloco swarm` shows while it runs: a live table at a terminal, plain lines elsewhere."""

import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from noloco_p2p import humanize
from noloco_p2p.launch.node_probe import MetricsReading

RATE_READINGS = 8
"""Tokens per second are averaged over this many readings."""
LIVE_INTERVAL_S, PLAIN_INTERVAL_S = 1.0, 10.0
GONE = frozenset({"left"})
COLUMNS = {
    "node": "",
    "stage": "",
    "state": "",
    "inner step": "",
    "outer round": "",
    "loss": ".3f",
    "tokens/s": ",.0f",
    "peers": "",
}
"""Heading → format of the value, in the order of `TableRow`."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One node's line. None: not known yet."""

    name: str
    stage: int
    state: str | None = None
    """Of `core.members.STATES`."""
    inner_step: int | None = None
    outer_round: int | None = None
    loss: float | None = None
    """Nats per token of the last inner step."""
    tokens_per_s: float | None = None
    """Tokens that this node trained on or served."""
    peers: int | None = None
    """Other nodes of the swarm that it sees."""

    def cells(self) -> list[str]:
        """As text, in the order of COLUMNS."""
        values = zip(astuple(self), COLUMNS.values(), strict=True)
        return [humanize.DASH if value is None else format(value, spec) for value, spec in values]


class ReadingHistory:
    """A node's last few readings, and the row they make."""

    def __init__(self, name: str, stage: int) -> None:
        self._name = name
        self._stage = stage
        self._readings: deque[MetricsReading] = deque(maxlen=RATE_READINGS)

    def add(self, reading: MetricsReading | None) -> None:
        """Take a reading; None (a node that gave none) changes nothing."""
        if reading is not None:
            self._readings.append(reading)

    def last_row(self, summary: Mapping[str, Any] | None) -> TableRow:
        """The node's line once it has ended, from the summary that it wrote; None: it wrote none."""
        if summary is None:
            return self.row()
        loss = self._readings[-1].total("loss") if self._readings else None
        loss = loss if summary["final_loss"] is None else summary["final_loss"]
        state, inner_steps, outer_rounds = (summary[name] for name in ("state", "inner_steps", "outer_rounds"))
        return TableRow(self._name, self._stage, state, inner_steps, outer_rounds, loss)

    def row(self) -> TableRow:
        """The node's line, from the last readings."""
        if not self._readings:
            return TableRow(self._name, self._stage)
        old, new = self._readings[0], self._readings[-1]
        inner_steps = int(new.total("inner_steps_total"))
        rate = None
        if new.at > old.at and inner_steps:
            rate = (new.total("tokens_total") - old.total("tokens_total")) / (new.at - old.at)
        seen = sum(count for state, count in new.by("state", "peers").items() if state not in GONE)
        return TableRow(
            self._name,
            self._stage,
            next((state for state, on in new.by("state", "state").items() if on), None),
            inner_steps,
            int(new.total("outer_rounds_total")),
            new.total("loss") if inner_steps else None,
            rate,
            max(0, int(seen) - 1),
        )


def deserted(readings: Iterable[MetricsReading | None]) -> list[str]:
    """A line for each stage that some node reports to be served by nobody."""
    longest: dict[str, float] = {}
    for reading in readings:
        for stage, seconds in ({} if reading is None else reading.by("stage", "stage_deserted_seconds")).items():
            longest[stage] = max(seconds, longest.get(stage, 0.0))
    return [f"stage {stage} has had no replica for {s:.0f} s" for stage, s in sorted(longest.items()) if s > 0]


class Display:
    """Where the launcher shows the swarm: a table drawn in place at a terminal, else lines on standard output."""

    def __init__(self, title: str, plain: bool) -> None:
        """`plain`: lines in any case."""
        from rich.live import Live

        live = not plain and sys.stdout.isatty()
        self._title = title
        self._live = Live(auto_refresh=False, redirect_stderr=False) if live else None
        self.interval_s = LIVE_INTERVAL_S if live else PLAIN_INTERVAL_S
        """Seconds between two readings of the nodes."""

    def show(self, rows: Sequence[TableRow], notes: Sequence[str]) -> None:
        """The nodes as they are now, and lines about the whole swarm."""
        if self._live is None:
            lines = [*map(_plain_line, rows), *notes]
            print("\n".join(lines), flush=True)
        else:
            self._live.start()  # once it runs, this does nothing
            self._live.update(_table(self._title, rows, notes), refresh=True)

    def say(self, line: str) -> None:
        """One line that stays; above the table where there is one."""
        if self._live is None:
            print(line, flush=True)
        else:
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was; the last table stays."""
        if self._live is not None:
            self._live.stop()


def _plain_line(row: TableRow) -> str:
    node, _, state, *cells = row.cells()
    if row.inner_step is None:
        return f"{node}  starting"
    return "  ".join([node, state, *(f"{column} {cell}" for column, cell in zip([*COLUMNS][3:], cells, strict=True))])


def _table(title: str, rows: Sequence[TableRow], notes: Sequence[str]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption="\n".join(notes) or None, caption_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("node", "state") else "right")
    for row in rows:
        table.add_row(*row.cells())
    return table
