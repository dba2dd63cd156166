"""The charts of the page: what each shows of a run, and what its colours mean."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple, TypeVar

from markupsafe import Markup

from noloco_p2p import humanize
from noloco_p2p.observe.plotting.axes import MAX_POINTS, PAGE_SIZE, Axes, Axis, Points, fitted, time_unit
from noloco_p2p.observe.plotting.plots import BAR_LEFT, bars
from noloco_p2p.observe.plotting.svg import IDLE_COLOURS, SERIES_COLOURS, Colour, Element, Legend, markup
from noloco_p2p.observe.plotting.time_bins import TimeBins
from noloco_p2p.observe.report.node_history import UNKNOWN, WORKS
from noloco_p2p.observe.report.recorded_run import RecordedRun

T = TypeVar("T")

BINS, COLUMNS = 150, 50
"""Bins of time in a chart of lines or areas, and in a chart of columns."""
MAX_ROWS = 60
"""Upper limit on the nodes that have a row of their own."""
ROW, ROW_SHARE, ROWS_MARGIN = 22.0, 0.72, 46.0
"""Height of a row; the share of it that its pieces take; the height above and below all rows."""
LABEL_CHARACTERS = 11
MAX_ROW_PIECES = 3_000
"""Upper limit on the pieces of all rows together; if there are more, those that would overlap are left out."""
MAX_PIECES, ALL_POINTS = 400, 16_000
"""Upper limits on the lines of a chart and on their points together; a replica has a line for each of its processes."""
STATE_COLOURS = {
    "training": Colour.BLUE,
    "finished": Colour.SLATE,
    "paused": Colour.PINK,
    "draining": Colour.YELLOW,
    "syncing": Colour.SKY,
    "waiting": Colour.ORANGE,
    "starting": Colour.GREY,
    "left": Colour.PALE,
    UNKNOWN: Colour.GREY,
}
"""Colours of states, in the order in which they are stacked."""
RESULT_COLOURS = {"partner": Colour.BLUE, "stale": Colour.SKY, "other": Colour.ORANGE, "alone": Colour.RED}

NATS = "Nats per token, by step."


class ChartLine(NamedTuple):
    """A line of a chart."""

    name: str
    colour: Colour
    points: Points
    label: str = ""
    """What stands beside it; lines with the same label share it."""


class Panel(NamedTuple):
    """A chart with its heading, the meaning of colours that have no label, and a note below it."""

    title: str
    svg: Markup
    legend: Legend
    note: str


class RunCharts:
    """The charts of one run, each made by a method."""

    def __init__(self, run: RecordedRun) -> None:
        self._run = run
        self._began_at = run.training_at
        self._span_s = max(run.ended_at - self._began_at, 1e-9)
        self._unit_s, self._time = _time_axis(self._span_s)
        self._bins, self._columns = (TimeBins(self._began_at, run.ended_at, count) for count in (BINS, COLUMNS))

    def loss(self) -> Panel:
        """The loss of every node while it was at stage 0, and the mean validation loss, by step."""
        nodes = [node for node in self._run.nodes if any(node.curves["loss", 0])]
        few = len(nodes) <= len(SERIES_COLOURS)
        lines = [
            ChartLine(node.name, colour, piece, node.name if few else f"{len(nodes)} replicas")
            for node, colour in zip(nodes, itertools.cycle(SERIES_COLOURS if few else [Colour.BLUE]), strict=False)
            for piece in node.curves["loss", 0]
        ]
        if validation := self.mean("validation"):
            lines.append(ChartLine("validation", Colour.INK, validation, "validation"))
        return panel(by_step("Loss", lines, from_zero=False, kind="" if few else "faint"), {}, NATS)

    def mean(self, curve: str) -> Points:
        """A curve by step: the mean over the nodes while they were at stage 0, at no more than BINS points."""
        points = [point for node in self._run.nodes for piece in node.curves[curve, 0] for point in piece]
        steps = sorted({step for step, _ in points})
        if len(steps) > BINS:
            return TimeBins(0.0, steps[-1], BINS).mean_and_largest(points)[0]
        return [(step, fmean([value for at, value in points if at == step])) for step in steps]

    def throughput(self) -> Panel:
        """Tokens per second of the swarm."""
        lines = [ChartLine("tokens per second", Colour.BLUE, self.rates("tokens"))]
        svg = over_time("Tokens per second", lines, self._span_s)
        return panel(svg, {}, "The whole swarm, evaluations and waits included.")

    def time(self) -> Panel:
        """How each stage spent the time while its nodes were training."""
        causes = [f"waits: {cause}" for cause, _ in self._run.total("idle_s").most_common()]
        colours = {name: IDLE_COLOURS[n % len(IDLE_COLOURS)] for n, name in enumerate(causes)}
        rows = []
        for stage, (trained_s, spent) in self._run.times().items():
            rest = ("the rest", max(0.0, trained_s - sum(spent.values())), Colour.PALE)
            pieces = [(name, spent.get(name, 0.0), colour) for name, colour in colours.items()]
            rows.append((f"stage {stage}", [(WORKS, spent[WORKS], Colour.BLUE), *pieces, rest]))
        legend = {WORKS: Colour.BLUE, **colours, "the rest: evaluation, merging, saving": Colour.PALE}
        note = "Shares of the time for which the nodes of a stage were training."
        return panel(bars("Where the time went", rows), legend, note)

    def rounds(self) -> Panel:
        """Outer rounds by result, over time."""
        results = [*RESULT_COLOURS, *(name for name in self._run.total("rounds") if name not in RESULT_COLOURS)]
        names = [name for name in results if self._run.total("rounds")[name]]
        found = self._columns.counts(
            (new.ended_at, name, new.amount)
            for node in self._run.nodes
            for name in names
            for new in node.increments[f"rounds {name}"]
        )
        axes, width = self._stack("Outer rounds by result", found), self._time.high / COLUMNS
        colours = {name: RESULT_COLOURS.get(name, Colour.GREY) for name in names}
        for n, counts in enumerate(found):
            low = 0
            for name in (name for name in names if counts[name]):
                place = ((n + 0.05) * width, (n + 0.95) * width), (low, low + counts[name])
                axes.cell(*place, colours[name], f"{name}: {counts[name]}")
                low += counts[name]
        return panel(axes.svg, colours, "Rounds of all nodes that ended in each interval.")

    def round_seconds(self) -> Panel:
        """How long outer rounds took: mean and longest, over time."""
        points = [point for node in self._run.nodes for point in node.round_seconds]
        mean, largest = self._columns.mean_and_largest(points)
        lines = [ChartLine("mean", Colour.BLUE, mean, "mean"), ChartLine("longest", Colour.SLATE, largest, "longest")]
        return panel(over_time("Seconds per outer round", lines, self._span_s), {}, "")

    def by_stage(self, title: str, curve: str, note: str) -> Panel:
        """A curve of every node by step, in the colour of the stage that it held."""
        lines = [
            ChartLine(node.name, SERIES_COLOURS[stage % len(SERIES_COLOURS)], piece, f"stage {stage}")
            for node in self._run.nodes
            for (name, stage), pieces in node.curves.items()
            if name == curve and stage is not None
            for piece in pieces
        ]
        return panel(by_step(title, lines), {}, note)

    def learning_rate(self) -> Panel:
        """The learning rate by step, of the node that recorded it most often."""
        longest = max(self._run.nodes, key=lambda node: sum(map(len, node.curves["learning_rate", None])))
        rates = [ChartLine("learning rate", Colour.BLUE, piece) for piece in longest.curves["learning_rate", None]]
        return panel(by_step("Learning rate", rates), {}, "By step.")

    def membership(self) -> Panel:
        """How many nodes were in each state, over time."""
        nodes = self._run.nodes
        if len(nodes) > 1:
            spans = [span for node in nodes for process in node.processes for span in process.spans]
            there = [(span.began_at, span.ended_at, Counter([span.state])) for span in spans if span.state != "left"]
            note = "Nodes whose journals were read."
        else:
            there = nodes[0].membership
            note = "As this node saw the swarm."
        found = self._bins.present(there)
        axes = self._stack("Nodes by state", found)
        colours = {name: colour for name, colour in STATE_COLOURS.items() if any(counts[name] for counts in found)}
        heights = [0.0] * len(found)
        for name, colour in colours.items():
            upper = [low + counts[name] for low, counts in zip(heights, found, strict=True)]
            axes.area(heights, upper, colour, name)
            heights = upper
        return panel(axes.svg, colours, note)

    def lives(self) -> Panel:
        """The life of every node: a row for each, with its states by colour."""
        nodes = self._run.nodes[:MAX_ROWS]
        names = [node.name[-LABEL_CHARACTERS:] for node in nodes]
        size = PAGE_SIZE[0], ROW * len(nodes) + ROWS_MARGIN
        axes = Axes("Lives of the nodes", self._time, Axis("", 0.0, len(nodes), names=names), size, BAR_LEFT)
        pieces = sum(len(process.spans) + 2 for node in nodes for process in node.processes)
        apart_s = 0.0 if pieces <= MAX_ROW_PIECES else 3 * len(nodes) * self._span_s / MAX_ROW_PIECES
        for n, node in enumerate(nodes):
            middle = len(nodes) - n - 0.5
            row = middle - ROW_SHARE / 2, middle + ROW_SHARE / 2
            shown = [span for one in node.processes for span in one.spans if span.ended_at > self._began_at]
            for span in _apart(shown, lambda span: span.began_at, apart_s):
                since_s, until_s = max(span.began_at - self._began_at, 0.0), span.ended_at - self._began_at
                name = f"{node.name}: {span.state}, {since_s:.0f} to {until_s:.0f} s"
                axes.cell((since_s / self._unit_s, until_s / self._unit_s), row, STATE_COLOURS[span.state], name)
            later = [process for process in node.processes if process.began_at >= self._began_at]
            for process in _apart(later, lambda process: process.began_at, apart_s):
                axes.stroke((process.began_at - self._began_at) / self._unit_s, row)
            unended = [one for one in node.processes if not one.ended and one.ended_at >= self._began_at]
            for process in _apart(unended, lambda process: process.ended_at, apart_s):
                last_s = process.ended_at - self._began_at
                axes.cross(last_s / self._unit_s, middle, f"{node.name}: last line at {last_s:.0f} s")
        spans = [span for node in nodes for process in node.processes for span in process.spans]
        states = {span.state for span in spans if span.ended_at > self._began_at}
        note = "Stroke: a process started. Cross: its last line, without an end; it was killed, or is still running."
        before_s = self._began_at - self._run.began_at
        note += f" Training began {humanize.duration(before_s)} after the first node started." if before_s else ""
        left_out = len(self._run.nodes) - len(nodes)
        note += f" Nodes not shown: {left_out}." if left_out else ""
        return panel(axes.svg, {name: colour for name, colour in STATE_COLOURS.items() if name in states}, note)

    def bytes(self) -> Panel:
        """Bytes per second that the nodes sent and received."""
        ways = (("received", "in", Colour.BLUE), ("sent", "out", Colour.SLATE))
        lines = [ChartLine(name, colour, self.rates(way), name) for name, way, colour in ways]
        return panel(over_time("Bytes per second", lines, self._span_s), {}, "All nodes together.")

    def rates(self, name: str) -> Points:
        """(seconds since training began, growth per second) of a count in `NodeHistory.increments`, over all nodes."""
        return self._bins.rates(each for node in self._run.nodes for each in node.increments[name])

    def _stack(self, title: str, found: Sequence[Counter[str]]) -> Axes:
        """Axes for stacked counts."""
        return Axes(title, self._time, Axis("", 0.0, max((counts.total() for counts in found), default=0) * 1.05))


def over_time(title: str, lines: Sequence[ChartLine], span_s: float) -> Element:
    """Lines over the time since training began, the first on top. Their x values are seconds."""
    unit_s, time = _time_axis(span_s)
    highest = max((y for line in lines for _, y in line.points), default=0.0)
    axes = Axes(title, time, Axis("", 0.0, highest * 1.05), labels=[line.label for line in lines if line.label])
    axes.measure()
    for line in reversed(lines):
        points = [(seconds / unit_s, value) for seconds, value in line.points]
        axes.line(points, line.colour, line.name, label=line.label)
    axes.write_labels()
    return axes.svg


def _time_axis(span_s: float) -> tuple[float, Axis]:
    """(length of the axis's unit in seconds, the axis)."""
    unit_s, unit = time_unit(span_s)
    return unit_s, Axis(f"{unit} since training began", 0.0, span_s / unit_s, label=lambda value: f"{value:g}")


def by_step(title: str, lines: Sequence[ChartLine], *, from_zero: bool = True, kind: str = "") -> Element:
    """The longest MAX_PIECES of the lines, by step. Those in INK are bold and have dots; others have class `kind`."""
    lines = sorted(sorted(lines, key=lambda line: -len(line.points))[:MAX_PIECES], key=lambda line: line.name)
    points = [point for line in lines for point in line.points]
    x = Axis("step", 0.0, max((x for x, _ in points), default=1.0))
    values = [y for _, y in points]
    labels = [line.label for line in lines if line.label]
    axes = Axes(title, x, fitted("", values, from_zero=from_zero), labels=labels)
    axes.measure(fitted("", values, "log") if values and min(values) > 0 else None)
    most = max(ALL_POINTS // MAX_PIECES, min(MAX_POINTS, ALL_POINTS // max(1, len(lines))))
    for line in lines:
        how = "strong" if line.colour is Colour.INK else kind
        axes.line(line.points, line.colour, line.name, most=most, kind=how, label=line.label)
    for line in (line for line in lines if line.colour is Colour.INK):
        axes.dots(line.points, line.colour, line.name)
    axes.write_labels()
    return axes.svg


def panel(svg: Element, legend: Legend, note: str) -> Panel:
    """The panel of a drawn chart; its heading is the title in the SVG."""
    return Panel(svg.findtext("title", ""), Markup(markup(svg)), legend, note)


def _apart(items: Sequence[T], at: Callable[[T], float], least_s: float) -> Iterator[T]:
    """The first item, and each one at least `least_s` after the last one kept."""
    before = float("-inf")
    for item in items:
        if at(item) - before >= least_s:
            before = at(item)
            yield item
