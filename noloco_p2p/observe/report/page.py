"""The page: charts, tables and the frame of page.html around them. Everything is escaped there."""

import contextlib
import json
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from noloco_p2p import __version__
from noloco_p2p.errors import LocalError
from noloco_p2p.observe.report import humanize
from noloco_p2p.observe.report.charts import Drawing, Drawings
from noloco_p2p.observe.report.journals import number
from noloco_p2p.observe.report.node_history import Story
from noloco_p2p.observe.report.run import Run, read

TEMPLATE = "page.html"
MOST_RUNS = 5
MOST_NODES = 300
"""Rows of the table of nodes."""


class Shown(NamedTuple):
    """A chart as the frame takes it."""

    title: str
    svg: Markup
    legend: list[tuple[int, str]]
    note: str


class Table(NamedTuple):
    """A table: all cells are texts."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


MOST_ROWS = 40
"""Of any other table."""
MOST_CONFIGURATION = 100_000
"""Characters of the manifest."""


class Section(NamedTuple):
    """A heading with what belongs below it."""

    title: str
    drawings: list[Shown]
    tables: list[Table]


def make(directories: Sequence[Path], out: Path) -> int:
    """Write the page of the run in these directories, all at once; returns its bytes.

    Raises ConfigError when there is no journal, LocalError when it cannot be written.
    """
    page = render(read(directories)).encode()
    fresh = out.with_name(f".{out.name}.{os.getpid()}.new")
    try:
        fresh.write_bytes(page)
        fresh.replace(out)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise LocalError(f"{out} cannot be written: {error.strerror or error}") from error
    return len(page)


def render(run: Run) -> str:
    """The whole page as one text of HTML, well-formed as XML too."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(
        resources.files("noloco_p2p.observe.report").joinpath(TEMPLATE).read_text("utf-8")
    )
    stories = run.stories[:MOST_NODES]
    return template.render(
        name=run.name,
        run_ids=run.run_ids[:MOST_RUNS],
        runs=len(run.run_ids),
        period=f"{humanize.clock(run.began_at)} to {humanize.clock(run.ended_at)} UTC",
        headline=_headline(run),
        sections=_sections(run),
        notes=[(humanize.clock(note.at), note.node, note.kind, note.text) for note in run.notes()],
        nodes=[(story.peer_id, _node(story)) for story in stories],
        node_head=NODE_HEAD,
        nodes_left_out=len(run.stories) - len(stories),
        configuration=json.dumps(run.manifest, indent=2)[:MOST_CONFIGURATION] if run.manifest else "",
        version=__version__,
    )


def _headline(run: Run) -> list[tuple[str, str]]:
    steps = number(run.manifest.get("steps"))
    done = f"{run.step:,.0f}" + (f" of {steps:,.0f}" if steps is not None else "")
    rate = run.tokens_per_s
    return [
        ("nodes", f"{len(run.stories)} in {len(run.stages)} stages"),
        ("steps", done),
        ("tokens", humanize.count(run.tokens)),
        ("tokens/s", humanize.DASH if rate is None else humanize.figure(rate)),
        ("final loss", humanize.loss(run.final_loss)),
        ("validation loss", humanize.loss(run.validation_loss)),
        ("validation perplexity", humanize.figure(run.validation_perplexity)),
        ("wall time", humanize.duration(run.wall_s)),
    ]


def _sections(run: Run) -> list[Section]:
    drawings = Drawings(run)
    counts = [
        _counts("Re-routes by reason", run.total("rerouted")),
        _counts("Microbatches by result", run.total("microbatches")),
        _counts("Microbatches dropped, by reason", run.total("dropped")),
    ]
    return [
        _section("Training", [drawings.loss(), drawings.throughput()]),
        _section("Nodes", [drawings.lives(), drawings.membership()]),
        _section("Time", [drawings.time()], _times(run), _phases(run)),
        _section(
            "Outer rounds",
            [drawings.rounds(), drawings.round_seconds(), *drawings.spread()],
            _results(run),
            _spread(run),
        ),
        _section("Network", [drawings.bytes()], _bytes(run), *counts),
    ]


def _section(title: str, drawn: list[Drawing], *tables: Table) -> Section:
    shown = [Shown(each.title, Markup(each.svg), list(each.legend), each.note) for each in drawn]
    return Section(title, shown, [table._replace(rows=table.rows[:MOST_ROWS]) for table in tables if table.rows])


def _times(run: Run) -> Table:
    rows = []
    for stage in run.stages:
        stories = run.of_stage(stage)
        trained, worked = sum(s.trained_s for s in stories), sum(s.device_s for s in stories)
        rows.append((f"stage {stage}: device works", humanize.duration(worked), humanize.share(worked, trained)))
        for cause, seconds in run.total("idle_s", stage).most_common():
            label = f"stage {stage}: waits, {cause}"
            rows.append((label, humanize.duration(seconds), humanize.share(seconds, trained)))
    return Table("Seconds while training, of all nodes", ("what", "time", "share"), rows)


def _phases(run: Run) -> Table:
    found = run.total("phase_s").most_common()
    return Table("Phases (calls overlap)", ("phase", "time"), [(name, humanize.duration(s)) for name, s in found])


def _results(run: Run) -> Table:
    found = run.total("rounds")
    whole = sum(found.values())
    rows = [(name, humanize.count(n), humanize.share(n, whole)) for name, n in found.most_common()]
    return Table("Outer rounds by result", ("result", "rounds", "share"), rows)


def _spread(run: Run) -> Table:
    rows = [(f"stage {s}", humanize.figure(std)) for s in run.stages if (std := run.replica_std(s)) is not None]
    return Table("Spread after the last round", ("stage", "standard deviation"), rows)


def _bytes(run: Run) -> Table:
    found = run.total("bytes").most_common()
    return Table("Bytes by kind", ("direction and kind", "bytes"), [(name, humanize.size(n)) for name, n in found])


def _counts(title: str, found: Any) -> Table:
    return Table(title, ("what", "count"), [(name, humanize.count(n)) for name, n in found.most_common()])


NODE_HEAD = (
    "node", "peer", "stage", "starts", "at the end", "inner steps", "rounds", "final loss", "device",
    "sent", "received", "re-routes", "checkpoints",
)  # fmt: skip


def _node(story: Story) -> tuple[str, ...]:
    last = story.processes[-1]
    sent, received = (sum(gain.amount for gain in story.byte_gains[way]) for way in ("out", "in"))
    return (
        story.name,
        humanize.peer(story.peer_id),
        humanize.DASH if story.stage is None else str(story.stage),
        str(len(story.processes)),
        last.spans[-1].state if last.ended else "no last word",
        humanize.count(story.inner_steps),
        humanize.count(sum(story.tallies["rounds"].values())),
        humanize.loss(story.final_loss),
        humanize.share(story.device_s, story.trained_s),
        humanize.size(sent),
        humanize.size(received),
        humanize.count(sum(story.tallies["rerouted"].values())),
        humanize.count(story.checkpoints),
    )
