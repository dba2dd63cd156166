"""Renders the page: charts and tables, in the frame of page.html, which escapes all text."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from noloco_p2p import __version__, humanize
from noloco_p2p.launch import homes
from noloco_p2p.launch.run_files import write_whole
from noloco_p2p.launch.settings import single_values
from noloco_p2p.observe.plotting.axes import Points
from noloco_p2p.observe.plotting.svg import DARK, LIGHT, SERIES_COLOURS, stylesheet
from noloco_p2p.observe.report.charts import NATS, ChartLine, Panel, RunCharts, by_step, over_time, panel
from noloco_p2p.observe.report.journals import clean
from noloco_p2p.observe.report.node_history import TRAINED, WORKS, NodeHistory
from noloco_p2p.observe.report.recorded_run import RecordedRun, read_runs
from noloco_p2p.observe.report.run_facts import facts, headline, standing
from noloco_p2p.observe.web_page import script_source

TEMPLATE = "page.html"
MARK = b": report of a run</title>"
"""Text near the beginning of every page, by which a file is recognised as one."""
MAX_NODES = 300
"""Upper limit on the rows of the table of nodes."""
MAX_ROWS = 40
"""Upper limit on the rows of any other table."""
MAX_SETTINGS = 100
"""Upper limit on the rows of the table of settings in which runs differ."""
MAX_CONFIGURATION = 100_000
"""Upper limit on the characters of the manifest that are shown."""

SPREAD = "Standard deviation of a weight between the replicas of a stage; it should fall with the learning rate."

Cells = tuple[str, ...]
PageTable = tuple[str, Cells, Sequence[Cells]]
"""(heading, names of the columns, rows)."""


def make(directories: Sequence[Path], out: Path) -> int:
    """Write the page about the run in these directories, or comparing several, atomically. Returns its size in bytes.

    Raises ConfigError if there is no journal, LocalError if the page cannot be written.
    """
    homes.require_page("--out ", out, MARK, "page")
    page = render(read_runs(directories)).encode()
    write_whole(out, page)
    return len(page)


def render(runs: Mapping[str, RecordedRun]) -> str:
    """The whole page as HTML that is also well-formed XML."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    frame = resources.files("noloco_p2p.observe.report").joinpath(TEMPLATE).read_text("utf-8")
    return environment.from_string(frame).render(
        **_one_run(*runs.values()) if len(runs) == 1 else _several(runs),
        version=__version__,
        light=LIGHT,
        dark=DARK,
        chart_style=Markup(stylesheet()),
        script_source=Markup(script_source(frame.encode())),
    )


def _one_run(run: RecordedRun) -> dict[str, Any]:
    nodes = run.nodes[:MAX_NODES]
    return {
        "name": next((node.run_name for node in run.nodes if node.run_name), "run"),
        "sections": _sections(run),
        "run": {
            "ids": sorted({node.run_id for node in run.nodes if node.run_id}),
            "standing": standing(run),
            "period": f"{humanize.clock(run.began_at)} to {humanize.clock(run.ended_at)} UTC",
            "headline": headline(run),
            "facts": facts(run),
            "incidents": [(humanize.clock(each.at), each.node, each.kind, each.text) for each in run.incidents()],
            "nodes": [[cell(node) for cell in NODE_COLUMNS.values()] for node in nodes],
            "peer_ids": [node.peer_id for node in nodes],
            "node_head": list(NODE_COLUMNS),
            "nodes_left_out": len(run.nodes) - len(nodes),
            "configuration": json.dumps(run.manifest, indent=2)[:MAX_CONFIGURATION] if run.manifest else "",
        },
    }


def _sections(run: RecordedRun) -> list[tuple[str, list[Panel], list[PageTable]]]:
    """(heading, charts, tables) of each section."""
    charts = RunCharts(run)
    panels = {
        "Training": [
            charts.loss(),
            charts.throughput(),
            charts.by_stage("Gradient norm", "grad_norm", "Of each node, before clipping, by step."),
            charts.learning_rate(),
        ],
        "Nodes": [charts.lives(), charts.membership()],
        "Time": [charts.time()],
        "Outer rounds": [
            charts.rounds(),
            charts.round_seconds(),
            charts.by_stage("Spread of the replicas", "spread", SPREAD),
        ],
        "Network": [charts.bytes()],
    }
    times = [
        (f"stage {stage}: {what}", humanize.duration(seconds), _share(seconds, trained_s))
        for stage, (trained_s, spent) in run.times().items()
        for what, seconds in spent.items()
    ]
    rounds = run.total("rounds")
    by_result = [(name, humanize.count(n), _share(n, rounds.total())) for name, n in rounds.most_common()]
    spread = [(f"stage {n}", humanize.figure(std)) for n in run.stages if (std := run.last("spread", n)) is not None]
    tables: dict[str, list[PageTable]] = {
        "Time": [
            ("Time spent while training, all nodes", ("what", "time", "share"), times),
            ("Phases (calls overlap)", ("phase", "time"), _counts(run.total("phase_s"), humanize.duration)),
        ],
        "Outer rounds": [
            ("Outer rounds by result", ("result", "rounds", "share"), by_result),
            ("Spread after the last round", ("stage", "standard deviation"), spread),
        ],
        "Network": [
            ("Bytes by kind", ("direction and kind", "bytes"), _counts(run.total("bytes"), humanize.size_text)),
            ("Microbatches re-routed, by reason", ("what", "count"), _counts(run.total("rerouted"))),
            ("Distrusted data, by result", ("result", "count"), _counts(run.total("distrusted"))),
            ("Microbatches by result", ("what", "count"), _counts(run.total("microbatches"))),
            ("Microbatches dropped, by reason", ("what", "count"), _counts(run.total("dropped"))),
        ],
    }
    return [
        (title, some, [(name, head, rows[:MAX_ROWS]) for name, head, rows in tables.get(title, ()) if rows])
        for title, some in panels.items()
    ]


def _counts(found: Counter[str], written: Callable[[float], str] = humanize.count) -> list[Cells]:
    return [(name, written(number)) for name, number in found.most_common()]


def _share(part: float, whole: float) -> str:
    return humanize.percent(part / whole if whole else None)


def _several(runs: Mapping[str, RecordedRun]) -> dict[str, Any]:
    """Several runs compared: curves in common charts, figures side by side, and the settings in which they differ."""
    charts = [RunCharts(run) for run in runs.values()]
    span_s = max(run.ended_at - run.training_at for run in runs.values())

    def lines(found: list[Points]) -> list[ChartLine]:
        colours = itertools.cycle(SERIES_COLOURS)
        return [
            ChartLine(name, colour, points, name) for name, colour, points in zip(runs, colours, found, strict=False)
        ]

    panels = [
        panel(by_step(title, lines([one.mean(curve) for one in charts]), from_zero=False), {}, NATS)
        for title, curve in (("Loss", "loss"), ("Validation loss", "validation"))
    ]
    tokens = over_time("Tokens per second", lines([one.rates("tokens") for one in charts]), span_s)
    headlines = [{"": standing(run), **headline(run)} for run in runs.values()]
    tables = [("Figures", ("", *runs), [(name, *(each[name] for each in headlines)) for name in headlines[0]])]
    settings = [
        {clean(".".join(key)): clean(value) for key, value in single_values(run.manifest)} for run in runs.values()
    ]
    names = sorted({name for one in settings for name in one})
    different = [(name, *(one.get(name, "") for one in settings)) for name in names]
    different = [row for row in different if len(set(row[1:])) > 1][:MAX_SETTINGS]
    if different:
        tables.append(("Settings that differ", ("", *runs), different))
    sections = [("Training", [*panels, panel(tokens, {}, "")], []), ("Runs", [], tables)]
    return {"name": f"{len(runs)} runs", "sections": sections, "run": None}


NODE_COLUMNS: dict[str, Callable[[NodeHistory], str]] = {
    "node": lambda node: node.name,
    "peer": lambda node: humanize.short_id(node.peer_id),
    "stage": lambda node: humanize.DASH if node.stage is None else str(node.stage),
    "starts": lambda node: str(len(node.processes)),
    "at the end": lambda node: node.processes[-1].spans[-1].state if node.processes[-1].ended else "no end recorded",
    "inner steps": lambda node: humanize.count(node.inner_steps),
    "rounds": lambda node: humanize.count(node.tallies["rounds"].total()),
    "final loss": lambda node: humanize.loss(node.last("final_loss")),
    "device": lambda node: _share(node.seconds(WORKS), node.seconds(TRAINED)),
    "sent": lambda node: humanize.size_text(node.total("out")),
    "received": lambda node: humanize.size_text(node.total("in")),
    "re-routed": lambda node: humanize.count(node.tallies["rerouted"].total()),
    "checkpoints": lambda node: humanize.count(node.checkpoints),
}
"""The columns of the table of nodes: the heading, and the text for a node."""
