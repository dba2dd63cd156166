"""A swarm on this machine for its owner: a live table or plain lines while it runs, and `summary.json` at its end."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

from noloco_p2p import humanize
from noloco_p2p.config import RunManifest
from noloco_p2p.launch.node_probe import MetricsReading
from noloco_p2p.launch.node_process import NodeProcess

LIVE_INTERVAL_S, PLAIN_INTERVAL_S = 1.0, 10.0
GONE = frozenset({"left"})
COLUMNS = ("node", "stage", "state", "inner step", "outer round", "loss", "tokens/s", "peers")
FORMATS = {"loss": ".3f", "tokens/s": ",.0f"}
COPIED = ("inner_steps", "outer_rounds", "microbatches", "rerouted", "pulled", "alone", "bytes_sent", "bytes_received")
"""Figures of a node that are copied as it wrote them."""
OVERFLOW_NATS = 700.0

Row = Mapping[str, Any]
"""One node's line: column → value; None or left out: not known yet."""


def row(node: NodeProcess) -> Row:
    """A node's line, from its last readings: loss in nats per token, and the other nodes that it sees."""
    if not node.readings:
        return {"node": node.name, "stage": node.stage}
    old, new = node.readings[0], node.readings[-1]
    inner_steps = int(new.total("inner_steps_total"))
    rate = None
    if new.at > old.at and inner_steps:
        rate = (new.total("tokens_total") - old.total("tokens_total")) / (new.at - old.at)
    seen = sum(count for state, count in new.by("state", "peers").items() if state not in GONE)
    return {
        "node": node.name,
        "stage": node.stage,
        "state": next((state for state, on in new.by("state", "state").items() if on), None),
        "inner step": inner_steps,
        "outer round": int(new.total("outer_rounds_total")),
        "loss": new.total("loss") if inner_steps else None,
        "tokens/s": rate,
        "peers": max(0, int(seen) - 1),
    }


def last_row(node: NodeProcess) -> Row:
    """A node's line once it has ended, from the summary that it wrote, or else from its last readings."""
    summary = node.summary
    if summary is None:
        return row(node)
    loss = row(node).get("loss") if summary["final_loss"] is None else summary["final_loss"]
    counts = {"inner step": summary["inner_steps"], "outer round": summary["outer_rounds"]}
    return {"node": node.name, "stage": node.stage, "state": summary["state"], **counts, "loss": loss}


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

    def show(self, rows: Sequence[Row], notes: Sequence[str]) -> None:
        """The nodes as they are now, and lines about the whole swarm."""
        if self._live is None:
            print("\n".join([*map(_plain_line, rows), *notes]), flush=True)
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


def _cells(row: Row) -> list[str]:
    values = [(row.get(column), FORMATS.get(column, "")) for column in COLUMNS]
    return [humanize.DASH if value is None else format(value, spec) for value, spec in values]


def _plain_line(row: Row) -> str:
    node, _, state, *cells = _cells(row)
    if row.get("inner step") is None:
        return f"{node}  starting"
    return "  ".join([node, state, *(f"{column} {cell}" for column, cell in zip(COLUMNS[3:], cells, strict=True))])


def _table(title: str, rows: Sequence[Row], notes: Sequence[str]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption="\n".join(notes) or None, caption_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("node", "state") else "right")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def summarise(
    nodes: Sequence[NodeProcess], manifest: RunManifest, resumed_from_step: int | None, wall_s: float
) -> dict[str, Any]:
    """The swarm's summary. It counts what was done since the nodes were started, not what a resumed run did before.

    Losses are means over stage-0 replicas, `replica_std` means over the replicas of each stage; `inner_steps` is the
    mean over stage 0, rounded; `outer_rounds` is the largest number that any replica did. What no node wrote is null;
    one replica has no std.
    """
    found = [(node, node.summary or {}) for node in nodes]
    stages = [[s for node, s in found if node.stage == stage] for stage in range(manifest.stages)]
    first = stages[0]
    validation_loss, inner_steps = _mean(first, "validation_loss"), _mean(first, "inner_steps")
    tokens = sum(s.get("tokens") or 0 for s in first)
    seconds = _training_s(first)
    return {
        "run_id": next((node.endpoints.run_id for node in nodes if node.endpoints is not None), None),
        "completed": all(s.get("state") == "finished" and node.exit_code == 0 for node, s in found),
        "stages": manifest.stages,
        "replicas": manifest.start_replicas,
        "steps": manifest.steps,
        "resumed_from_step": resumed_from_step,
        "inner_steps": None if inner_steps is None else round(inner_steps),
        "outer_rounds": max((s.get("outer_rounds") or 0 for _, s in found), default=0),
        "first_loss": _mean(first, "first_loss"),
        "final_loss": _mean(first, "final_loss"),
        "validation_loss": validation_loss,
        "validation_perplexity": perplexity(validation_loss),
        "replica_std": [_mean(mine, "replica_std") for mine in stages],
        "tokens": tokens,
        "tokens_per_s": tokens / seconds if seconds else None,
        "wall_s": wall_s,
        "nodes": [_of_node(node, s) for node, s in found],
    }


def perplexity(loss: float | None) -> float | None:
    """exp of a loss in nats per token; None without one, or where it would not be a number of JSON."""
    return None if loss is None or not loss < OVERFLOW_NATS else exp(loss)


def summary_lines(summary: dict[str, Any], path: Path | None) -> list[str]:
    """The summary for a person; `path`: where it was written."""
    loss, rate = summary["validation_loss"], summary["tokens_per_s"]
    found = [
        f"{'completed' if summary['completed'] else 'not completed'}: {summary['inner_steps'] or 0} inner steps, "
        f"{summary['outer_rounds']} outer rounds, {summary['tokens']:,} tokens in {summary['wall_s']:.0f} s"
    ]
    if loss is not None:
        found.append(f"validation loss {loss:.4f} nats per token, perplexity {summary['validation_perplexity']:.3f}")
    if rate is not None:
        found.append(f"{rate:,.0f} tokens/s while training")
    return [*found, "the summary of before stays: it has more" if path is None else f"summary: {path}"]


def _known(summaries: Iterable[Mapping[str, Any]], figure: str) -> list[float]:
    return [float(s[figure]) for s in summaries if s.get(figure) is not None]


def _mean(summaries: Iterable[Mapping[str, Any]], figure: str) -> float | None:
    known = _known(summaries, figure)
    return fmean(known) if known else None


def _training_s(first: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds from the first inner step's start to the last one's end, less the mean time spent in evaluations."""
    began, ended = _known(first, "first_step_at"), _known(first, "last_step_at")
    return max(ended) - min(began) - (_mean(first, "evaluation_s") or 0.0) if began and ended else None


def _of_node(node: NodeProcess, found: Mapping[str, Any]) -> dict[str, Any]:
    peer_id = found.get("peer_id") or (node.endpoints.peer_id if node.endpoints is not None else None)
    figures = {name: found.get(name) for name in COPIED}
    return {"peer_id": peer_id, "stage": node.stage, **figures, "exit_code": node.exit_code}
