"""Shows a running swarm on this machine to its owner: a progress bar above a live table, or plain lines."""

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import compress
from statistics import fmean
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from noloco_p2p import humanize
from noloco_p2p.launch.node_probe import MetricsReading
from noloco_p2p.launch.node_process import NodeProcess
from noloco_p2p.launch.progress_line import can_rewrite

LIVE_INTERVAL_S, PLAIN_INTERVAL_S = 1.0, 10.0
COLUMNS = ("node", "stage", "state", "inner step", "outer round", "loss", "tokens/s", "peers")
FORMATS = {"inner step": ",", "outer round": ",", "loss": ".3f", "tokens/s": ",.0f"}
MAX_ROWS = 12
"""With more nodes than this, each line shows a stage instead of a node."""
STAGE_FIGURES: Mapping[str, Callable[[list[float]], float]] = {
    "inner step": lambda known: round(fmean(known)),
    "outer round": max,
    "loss": fmean,
    "tokens/s": sum,
    "peers": min,
}
"""How the line of a stage combines the figures of its nodes."""
IN_ASCII = str.maketrans("━╌·", "=-|")
"""What a terminal that lacks these characters shows: their escapes would be wider than the line."""
MIN_BAR, MAX_BAR = 5, 40
"""Smallest and largest width of the progress bar, characters."""
FROM_WIDTH = {"stage": 1 << 30, "outer round": 70, "peers": 70, "tokens/s": 46, "loss": 36, "inner step": 26}
"""Width of the terminal from which a column is shown, so that no figure is cut off; the others always are, but never
the stage, with which the name of a node begins."""

Row = Mapping[str, Any]
"""One node's line: column → value; None or missing if it is not known yet."""


def row(node: NodeProcess) -> Row:
    """A node's line, from its last readings; the loss is in nats per token, and peers are the other nodes it sees.

    A node is silent if two readings in a row have failed: a single answer may be late on a busy machine.
    """
    if not node.readings:
        return {"node": node.name, "stage": node.stage}
    old, new = node.readings[0], node.readings[-1]
    inner_steps, rate = int(new.total("inner_steps_total")), None
    state = "silent" if node.missed > 1 else next((state for state, on in new.by("state", "state").items() if on), None)
    if state == "training" and new.at > old.at and inner_steps:
        rate = (new.total("tokens_total") - old.total("tokens_total")) / (new.at - old.at)
    seen = sum(count for state, count in new.by("state", "peers").items() if state != "left")
    return {
        "node": node.name,
        "stage": node.stage,
        "state": state,
        "inner step": inner_steps,
        "outer round": int(new.total("outer_rounds_total")),
        "loss": new.total("loss") or None,
        "tokens/s": rate,
        "step": new.total("step"),
        "peers": max(0, int(seen) - 1),
    }


def current_row(node: NodeProcess) -> Row:
    """A node's line now. Once the node has ended, it is made from its summary, because its last readings may be old."""
    summary = node.summary
    if summary is None:
        return row(node)
    counts = {"inner step": summary["inner_steps"], "outer round": summary["outer_rounds"], "step": summary.get("step")}
    return {"node": node.name, "stage": node.stage, "state": summary["state"], **counts, "loss": summary["final_loss"]}


def warnings(readings: Iterable[MetricsReading | None]) -> list[str]:
    """A line for each stage that has no replica according to any of the nodes, and for each kind of trouble."""
    longest: dict[str, float] = {}
    troubled: Counter[str] = Counter()
    for reading in filter(None, readings):
        troubled.update(reading.by("name", "trouble").keys())
        for stage, seconds in reading.by("stage", "stage_deserted_seconds").items():
            longest[stage] = max(seconds, longest.get(stage, 0.0))
    lines = [f"stage {stage} has had no replica for {s:.0f} s" for stage, s in sorted(longest.items()) if s > 0]
    return lines + [f"trouble ({t}) at {humanize.plural(n, 'node')}: see the logs" for t, n in sorted(troubled.items())]


def complain(*lines: str) -> None:
    """Write lines to standard error, if it can be written. The launcher goes on in any case, to its summary."""
    with suppress(OSError):
        print(*lines, sep="\n", file=sys.stderr)


@contextmanager
def _hanging_up() -> Iterator[None]:
    """Treat it as a hangup if standard output can no longer be written (a closed terminal, `| head`, a full disk)."""
    try:
        yield
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        does = "going on without it" if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else "stopping"  # nohup
        complain(f"error: standard output cannot be written: {error.strerror or error}; {does}")
        signal.raise_signal(signal.SIGHUP)


class Display:
    """Shows the swarm: as a table drawn in place on a terminal, otherwise as lines on standard output."""

    def __init__(self, steps: int, plain: bool) -> None:
        """`steps` of the run; `plain`: lines even on a terminal."""
        live = not plain and can_rewrite(sys.stdout)
        self._live = Live(auto_refresh=False, redirect_stderr=False) if live else None
        self._progress = RunProgress(steps)
        self._doing = ""
        self.interval_s = LIVE_INTERVAL_S if live else PLAIN_INTERVAL_S
        """Seconds between two readings of the nodes."""

    @_hanging_up()
    def show(self, rows: Sequence[Row], notes: Sequence[str], doing: str = "") -> None:
        """Show the nodes as they are now, and lines about the whole swarm.

        `doing`: what the swarm does while it does not train.
        """
        shown = rows if len(rows) <= MAX_ROWS else stage_rows(rows)
        width = 0 if self._live is None else self._live.console.width
        progress = self._progress.line(rows, width)
        if self._live is not None:
            head = doing or progress
            if self._live.console.options.ascii_only:
                head = head.translate(IN_ASCII)
            above = [Text(head, no_wrap=True, overflow="ellipsis")] if head else []
            self._live.start()  # does nothing if it is already running
            self._live.update(Group(*above, _table(shown, width), *map(Text, notes)), refresh=True)
        elif not doing:
            lines = [progress, *map(_plain_line, shown), *notes]
            print("\n".join(filter(None, lines)), flush=True)
        elif doing != self._doing:
            print(doing, flush=True)
        self._doing = doing

    @_hanging_up()
    def say(self, line: str) -> None:
        """Print a line that stays; if there is a table, above it."""
        if self._live is None:
            print(line, flush=True)
        else:
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)

    @_hanging_up()
    def close(self) -> None:
        """Leave the terminal as it was; the last table stays."""
        if self._live is not None:
            self._live.stop()


class RunProgress:
    """How far a swarm has come, from the lines of its nodes."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._began_at = time.monotonic()
        self._first: tuple[float, float, float] | None = None
        """Time, moved forward by pauses, and mean step of the first reading with a step; time of the last reading."""

    def line(self, rows: Sequence[Row], width: int = 0) -> str:
        """One line: steps, share, tokens/s, loss, time so far, time left; if `width` is given, with a bar.

        What does not fit is left out. Empty before the first step.
        """
        first = [row for row in rows if row["stage"] == 0 and row.get("inner step")]
        steps = [row["step"] for row in first if row.get("step")]
        if not steps:
            return ""
        now, step = time.monotonic(), min(fmean(steps), self._steps)
        at, began, seen_at = self._first or (now, step, now)
        if all(row.get("state") == "paused" for row in first):
            at += now - seen_at
        self._first, done, spent_s = (at, began, now), step - began, now - at
        rate = sum(row.get("tokens/s") or 0.0 for row in first)
        losses = [row["loss"] for row in first if row.get("loss")]
        so_far = humanize.stopwatch(now - self._began_at)
        left_s = spent_s / done * (self._steps - step) if done > 0 else 0.0
        head, speed, loss = humanize.progress(step, self._steps, rate, fmean(losses) if losses else None)
        left = f"{humanize.stopwatch(left_s)} left" if left_s else ""
        share = f"{100 * step / self._steps:.0f} %"
        parts = list(filter(None, (share, speed, loss, so_far, left)))
        if not width:
            return "  ".join([head, *parts])
        for least, bar in ((so_far, MIN_BAR + 2), (speed, MIN_BAR + 2), (left, 0), (loss, 0), (share, 0)):
            if least in parts and len(head) + len(" · ".join(parts)) + 1 + bar > width:
                parts.remove(least)
        tail = " · ".join(parts)
        cells = min(MAX_BAR, width - len(head) - len(tail) - 3)
        full = round(cells * step / self._steps)
        return f"{head} {'━' * full}{'╌' * (cells - full)} {tail}" if cells >= MIN_BAR else f"{head} {tail}".rstrip()


def stage_rows(rows: Sequence[Row]) -> list[Row]:
    """A line for each stage: how many of its nodes are in the most common state, and its STAGE_FIGURES."""
    found: list[Row] = []
    for stage in sorted({row["stage"] for row in rows}):
        mine = [row for row in rows if row["stage"] == stage]
        state, number = Counter(row.get("state") or "starting" for row in mine).most_common(1)[0]
        line: dict[str, Any] = {"node": f"stage {stage}", "stage": stage, "state": f"{number} of {len(mine)} {state}"}
        for column, of in STAGE_FIGURES.items():
            known = [row[column] for row in mine if row.get(column) is not None]
            line[column] = of(known) if known else None
        found.append(line)
    return found


def _cells(row: Row) -> list[str]:
    values = [(row.get(column), FORMATS.get(column, "")) for column in COLUMNS]
    return [humanize.DASH if value is None else format(value, spec) for value, spec in values]


def _plain_line(row: Row) -> str:
    node, _, state, *cells = _cells(row)
    if row.get("inner step") is None:
        return f"{node}  starting"
    return "  ".join([node, state, *(f"{column} {cell}" for column, cell in zip(COLUMNS[3:], cells, strict=True))])


def _table(rows: Sequence[Row], width: int) -> Table:
    """The table, on a narrow terminal with fewer columns."""
    shown = [FROM_WIDTH.get(column, 0) <= width for column in COLUMNS]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column in compress(COLUMNS, shown):
        table.add_column(column, justify="left" if column in ("node", "state") else "right")
    for row in rows:
        table.add_row(*compress(_cells(row), shown))
    return table
