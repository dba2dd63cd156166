"""The charts of the page: what of a run each of them shows, and what its colours mean."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from markupsafe import Markup

from noloco_p2p.observe.plotting.axes import MOST_POINTS, PAGE_SIZE, Axes, Axis, Points, fitted, time_unit
from noloco_p2p.observe.plotting.plots import BAR_LEFT, bars
from noloco_p2p.observe.plotting.svg import IDLE_COLOURS, SERIES_COLOURS, Colour, Element, LegendKey, markup
from noloco_p2p.observe.plotting.time_bins import TimeBins
from noloco_p2p.observe.report.recorded_run import UNKNOWN, WORKS, RecordedRun

T = TypeVar("T")

BINS, COLUMNS = 150, 50
MOST_ROWS = 60
"""Nodes that have a row of their own."""
ROW, ROW_SHARE, BESIDE_ROWS = 22.0, 0.72, 46.0
"""Height of a row; the share of it that its pieces take; what is above and below all rows."""
LABEL_CHARACTERS = 11
MOST_ROW_PIECES = 3_000
"""Of all rows together; of more, those that would lie upon one another are left out."""
MOST_PIECES, ALL_POINTS = 400, 16_000
"""Of curves in one chart; a replica has one for each of its processes."""
STATE_COLOURS = {
    "training": Colour.GREEN,
    "finished": Colour.BLUE,
    "paused": Colour.PINK,
    "draining": Colour.YELLOW,
    "syncing": Colour.SKY,
    "waiting": Colour.ORANGE,
    "starting": Colour.GREY,
    "left": Colour.PALE,
    UNKNOWN: Colour.GREY,
}
"""In the order in which they are stacked."""
RESULT_COLOURS = {"partner": Colour.GREEN, "stale": Colour.SKY, "other": Colour.ORANGE, "alone": Colour.RED}

Line = tuple[str, Colour, Points]
"""(name, colour, points)."""


class Panel(NamedTuple):
    """A chart with its heading, the meaning of its colours and a sentence below."""

    title: str
    svg: Markup
    legend: Sequence[LegendKey]
    note: str


class RunCharts:
    """All charts of a run."""

    def __init__(self, run: RecordedRun) -> None:
        self._run = run
        self._span_s = max(run.ended_at - run.began_at, 1e-9)
        self._unit_s, unit = time_unit(self._span_s)
        self._time = Axis(f"{unit} since the start", 0.0, self._span_s / self._unit_s, label=lambda value: f"{value:g}")
        self._bins, self._columns = (TimeBins(run.began_at, run.ended_at, count) for count in (BINS, COLUMNS))

    def loss(self) -> Panel:
        """Loss of every replica of stage 0, and validation, by step."""
        nodes = self._run.of_stage(0)
        few = len(nodes) <= len(SERIES_COLOURS)
        keys = [LegendKey(node.name, SERIES_COLOURS[n] if few else Colour.BLUE) for n, node in enumerate(nodes)]
        lines = [(key.label, key.colour, x) for key, node in zip(keys, nodes, strict=True) for x in node.curves["loss"]]
        dots = sorted(point for node in nodes for piece in node.curves["validation"] for point in piece)
        svg = _by_step("Loss", lines, dots, from_zero=False, kind="" if few else "faint")
        legend = keys if few else [LegendKey(f"{len(nodes)} replicas", Colour.BLUE)]
        legend += [LegendKey("validation (dots)", Colour.GREY)] if dots else []
        return _panel(svg, legend, "Nats per token, by step.")

    def throughput(self) -> Panel:
        """Tokens per second of the swarm."""
        lines = [("tokens per second", Colour.GREEN, self._rates("tokens"))]
        return self._over_time("Tokens per second", lines, "The whole swarm, evaluations and waits included.")

    def time(self) -> Panel:
        """Where the time of each stage went."""
        causes = [f"waits: {cause}" for cause, _ in self._run.total("idle_s").most_common()]
        colours = {name: IDLE_COLOURS[n % len(IDLE_COLOURS)] for n, name in enumerate(causes)}
        rows = []
        for stage in self._run.stages:
            trained_s, spent = self._run.time_of(stage)
            rest = ("the rest", max(0.0, trained_s - sum(spent.values())), Colour.PALE)
            pieces = [(name, spent.get(name, 0.0), colour) for name, colour in colours.items()]
            rows.append((f"stage {stage}", [(WORKS, spent[WORKS], Colour.GREEN), *pieces, rest]))
        legend = {WORKS: Colour.GREEN, **colours, "the rest: evaluation, merging, saving": Colour.PALE}
        note = "Shares of the seconds in which the nodes of a stage were training."
        return _panel(bars("Where the time went", rows), _keys(legend), note)

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
        return _panel(axes.svg, _keys(colours), "Rounds of all nodes that ended in each time.")

    def round_seconds(self) -> Panel:
        """How long outer rounds took."""
        points = [point for node in self._run.nodes for point in node.round_seconds]
        mean, largest = self._columns.mean_and_largest(points)
        lines = [("mean", Colour.BLUE, mean), ("longest", Colour.ORANGE, largest)]
        return self._over_time("Seconds of an outer round", lines)

    def spread(self) -> list[Panel]:
        """Standard deviation between replicas, and the learning rate, by step."""
        colours = {f"stage {stage}": SERIES_COLOURS[stage % len(SERIES_COLOURS)] for stage in self._run.stages}
        lines = [
            (name, colour, piece)
            for (name, colour), stage in zip(colours.items(), self._run.stages, strict=True)
            for node in self._run.of_stage(stage)
            for piece in node.curves["spread"]
        ]
        longest = max(self._run.nodes, key=lambda node: sum(map(len, node.curves["learning_rate"])))
        rates = [("learning rate", Colour.GREY, piece) for piece in longest.curves["learning_rate"]]
        note = "Standard deviation of a weight between the replicas of a stage; it should fall with the learning rate."
        return [
            _panel(_by_step("Spread of the replicas", lines), _keys(colours), note),
            _panel(_by_step("Learning rate", rates), (), "By step, like the spread next to it."),
        ]

    def membership(self) -> Panel:
        """How many nodes were in each state."""
        nodes = self._run.nodes
        if len(nodes) > 1:
            spans = [span for node in nodes for process in node.processes for span in process.spans]
            there = [(span.began_at, span.ended_at, Counter([span.state])) for span in spans if span.state != "left"]
            note = "Nodes whose journals are here."
        else:
            lines = nodes[0].membership
            ends = [*(at for at, _ in lines[1:]), self._run.ended_at]
            there = [(at, until, counts) for (at, counts), until in zip(lines, ends, strict=False)]
            note = "As this node saw the swarm."
        found = self._bins.present(there)
        axes = self._stack("Nodes by state", found)
        colours = {name: colour for name, colour in STATE_COLOURS.items() if any(counts[name] for counts in found)}
        heights = [0.0] * len(found)
        for name, colour in colours.items():
            upper = [low + counts[name] for low, counts in zip(heights, found, strict=True)]
            axes.area(heights, upper, colour, name)
            heights = upper
        return _panel(axes.svg, _keys(colours), note)

    def lives(self) -> Panel:
        """The life of every node: a row for each, its states by colour."""
        nodes = self._run.nodes[:MOST_ROWS]
        names = [node.name[-LABEL_CHARACTERS:] for node in nodes]
        size = PAGE_SIZE[0], ROW * len(nodes) + BESIDE_ROWS
        axes = Axes("Lives of the nodes", self._time, Axis("", 0.0, len(nodes), names=names), size, BAR_LEFT)
        pieces = sum(len(process.spans) + 2 for node in nodes for process in node.processes)
        apart_s = 0.0 if pieces <= MOST_ROW_PIECES else 3 * len(nodes) * self._span_s / MOST_ROW_PIECES
        for n, node in enumerate(nodes):
            middle = len(nodes) - n - 0.5
            row = middle - ROW_SHARE / 2, middle + ROW_SHARE / 2
            spans = [span for process in node.processes for span in process.spans]
            for span in _apart(spans, lambda span: span.began_at, apart_s):
                since_s, until_s = span.began_at - self._run.began_at, span.ended_at - self._run.began_at
                name = f"{node.name}: {span.state}, {since_s:.0f} to {until_s:.0f} s"
                axes.cell((since_s / self._unit_s, until_s / self._unit_s), row, STATE_COLOURS[span.state], name)
            for process in _apart(node.processes, lambda process: process.began_at, apart_s):
                axes.stroke((process.began_at - self._run.began_at) / self._unit_s, row)
            unended = [process for process in node.processes if not process.ended]
            for process in _apart(unended, lambda process: process.ended_at, apart_s):
                last_s = process.ended_at - self._run.began_at
                axes.cross(last_s / self._unit_s, middle, f"{node.name}: its last line at {last_s:.0f} s")
        states = {span.state for node in nodes for process in node.processes for span in process.spans}
        note = "Stroke: a process started. Cross: its last line, with no end; it was killed, or still runs."
        left_out = len(self._run.nodes) - len(nodes)
        note += f" {left_out} nodes are left out." if left_out else ""
        return _panel(axes.svg, [key for key in _keys(STATE_COLOURS) if key.label in states], note)

    def bytes(self) -> Panel:
        """Bytes per second that the nodes sent and received."""
        lines = [("received", Colour.BLUE, self._rates("in")), ("sent", Colour.ORANGE, self._rates("out"))]
        return self._over_time("Bytes per second", lines, "All nodes together.")

    def _rates(self, name: str) -> Points:
        return self._bins.rates(each for node in self._run.nodes for each in node.increments[name])

    def _over_time(self, title: str, lines: Sequence[Line], note: str = "") -> Panel:
        """Lines by seconds since the start, the first on top; of a single one the title says what it is."""
        highest = max((y for _, _, points in lines for _, y in points), default=0.0)
        axes = Axes(title, self._time, Axis("", 0.0, highest * 1.05))
        for name, colour, points in reversed(lines):
            axes.line([(seconds / self._unit_s, value) for seconds, value in points], colour, name)
        legend = [LegendKey(name, colour) for name, colour, _ in lines] if len(lines) > 1 else []
        return _panel(axes.svg, legend, note)

    def _stack(self, title: str, found: Sequence[Counter[str]]) -> Axes:
        """Axes for counts upon one another."""
        return Axes(title, self._time, Axis("", 0.0, max((counts.total() for counts in found), default=0) * 1.05))


def _by_step(
    title: str, lines: Sequence[Line], dots: Points = (), *, from_zero: bool = True, kind: str = ""
) -> Element:
    """Lines, at most MOST_PIECES of them, and dots of validation."""
    lines = sorted(sorted(lines, key=lambda line: -len(line[2]))[:MOST_PIECES], key=lambda line: line[0])
    points = [*dots, *(point for _, _, some in lines for point in some)]
    x = Axis("step", 0.0, max((x for x, _ in points), default=1.0))
    axes = Axes(title, x, fitted("", [y for _, y in points], from_zero=from_zero))
    most = max(ALL_POINTS // MOST_PIECES, min(MOST_POINTS, ALL_POINTS // max(1, len(lines))))
    for name, colour, some in lines:
        axes.line(some, colour, name, most=most, kind=kind)
    axes.dots(dots, Colour.GREY, "validation")
    return axes.svg


def _panel(svg: Element, legend: Sequence[LegendKey], note: str) -> Panel:
    return Panel(svg.findtext("title", ""), Markup(markup(svg)), legend, note)


def _keys(colours: dict[str, Colour]) -> list[LegendKey]:
    return [LegendKey(name, colour) for name, colour in colours.items()]


def _apart(items: Sequence[T], at: Callable[[T], float], least_s: float) -> Iterator[T]:
    """The items that are at least `least_s` after the last one kept."""
    before = float("-inf")
    for item in items:
        if at(item) - before >= least_s:
            before = at(item)
            yield item
