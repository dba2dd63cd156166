"""What `noloco swarm` shows while it runs: a live table at a terminal, plain lines elsewhere."""

import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from noloco_p2p.launch.node_probe import MetricsReading

if TYPE_CHECKING:
    from rich.table import Table

RATE_READINGS = 8
"""Tokens per second are taken over so many readings."""
LIVE_INTERVAL_S, PLAIN_INTERVAL_S = 1.0, 10.0
GONE = frozenset({"left"})
COLUMNS = ("node", "stage", "state", "inner step", "outer round", "loss", "tokens/s", "peers")


@dataclass(frozen=True, slots=True)
class NodeRow:
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

    def cells(self) -> tuple[str, ...]:
        """As text, in the order of COLUMNS."""
        loss = "–" if self.loss is None else f"{self.loss:.3f}"
        rate = "–" if self.tokens_per_s is None else f"{self.tokens_per_s:,.0f}"
        counts = ["–" if n is None else str(n) for n in (self.inner_step, self.outer_round, self.peers)]
        return self.name, str(self.stage), self.state or "–", counts[0], counts[1], loss, rate, counts[2]


class ReadingHistory:
    """A node's last few readings, and the row they make."""

    def __init__(self, name: str, stage: int) -> None:
        self._name = name
        self._stage = stage
        self._readings: deque[MetricsReading] = deque(maxlen=RATE_READINGS)
        self._ended: Mapping[str, Any] | None = None

    def add(self, reading: MetricsReading | None) -> None:
        """Take a reading; None (a node that gave none) leaves the last one standing."""
        if reading is not None:
            self._readings.append(reading)

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """Take the summary that the node wrote at its end; None when it wrote none."""
        self._ended = summary

    def row(self) -> NodeRow:
        """The node's line: of its summary once it has ended, of the last readings before."""
        ended = self._ended
        if ended is not None:
            loss = self._readings[-1].total("loss") if self._readings else None
            loss = loss if ended["final_loss"] is None else ended["final_loss"]
            return NodeRow(self._name, self._stage, ended["state"], ended["inner_steps"], ended["outer_rounds"], loss)
        if not self._readings:
            return NodeRow(self._name, self._stage)
        old, new = self._readings[0], self._readings[-1]
        inner_steps = int(new.total("inner_steps_total"))
        rate = None
        if new.at > old.at and inner_steps:
            rate = (new.total("tokens_total") - old.total("tokens_total")) / (new.at - old.at)
        seen = sum(count for state, count in new.by("state", "peers").items() if state not in GONE)
        return NodeRow(
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
    """A line for each stage that some node says nobody serves."""
    longest: dict[str, float] = {}
    for reading in readings:
        for stage, seconds in ({} if reading is None else reading.by("stage", "stage_deserted_seconds")).items():
            longest[stage] = max(seconds, longest.get(stage, 0.0))
    return [f"stage {stage} has no replica since {s:.0f} s" for stage, s in sorted(longest.items()) if s > 0]


class Display(Protocol):
    """Where the launcher shows how the swarm is."""

    interval_s: float
    """Seconds between two readings of the nodes."""

    def show(self, rows: Sequence[NodeRow], notes: Sequence[str]) -> None:
        """The nodes as they are now, and lines about the whole swarm."""
        ...

    def say(self, line: str) -> None:
        """One line that stays."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


class PlainDisplay:
    """Lines on standard output: all nodes, every ten seconds."""

    interval_s = PLAIN_INTERVAL_S

    def show(self, rows: Sequence[NodeRow], notes: Sequence[str]) -> None:
        """One line for each node, then the notes."""
        for row in rows:
            node, _, state, *cells = row.cells()
            if row.inner_step is None:
                print(f"{node}  starting", flush=True)
                continue
            told = "  ".join(f"{column} {cell}" for column, cell in zip(COLUMNS[3:], cells, strict=True))
            print(f"{node}  {state}  {told}", flush=True)
        for note in notes:
            print(note, flush=True)

    def say(self, line: str) -> None:
        """Printed as it is."""
        print(line, flush=True)

    def close(self) -> None:
        """Nothing to put right."""


class LiveDisplay:
    """A table that is drawn anew in place."""

    interval_s = LIVE_INTERVAL_S

    def __init__(self, title: str) -> None:
        from rich.live import Live

        self._title = title
        self._live = Live(auto_refresh=False, redirect_stderr=False)
        self._shown = False

    def show(self, rows: Sequence[NodeRow], notes: Sequence[str]) -> None:
        """Draw the table, the notes below it."""
        if not self._shown:
            self._live.start()
            self._shown = True
        self._live.update(self._table(rows, notes), refresh=True)

    def say(self, line: str) -> None:
        """Printed above the table."""
        self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """The last table stays on the screen."""
        if self._shown:
            self._live.stop()
            self._shown = False

    def _table(self, rows: Sequence[NodeRow], notes: Sequence[str]) -> "Table":
        from rich.table import Table

        caption = "\n".join(notes) or None
        table = Table(title=self._title, title_justify="left", caption=caption, caption_justify="left")
        for column in COLUMNS:
            table.add_column(column, justify="left" if column in ("node", "state") else "right")
        for row in rows:
            table.add_row(*row.cells())
        return table


def make_display(title: str, plain: bool) -> Display:
    """A live table when standard output is a terminal and `plain` is not asked for."""
    return PlainDisplay() if plain or not sys.stdout.isatty() else LiveDisplay(title)
