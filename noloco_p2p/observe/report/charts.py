"""The charts of the page: what of a run each of them shows, and what its colours mean."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup

from noloco_p2p.observe.plotting.axes import MOST_POINTS, Axes, Points
from noloco_p2p.observe.plotting.palette import IDLE_COLOURS, SERIES_COLOURS, Colour
from noloco_p2p.observe.plotting.plots import bars
from noloco_p2p.observe.plotting.scales import Axis, fitted, time_unit
from noloco_p2p.observe.plotting.svg import Element, LegendKey, markup
from noloco_p2p.observe.plotting.time_bins import TimeBins
from noloco_p2p.observe.report.lives import lives
from noloco_p2p.observe.report.node_history import UNKNOWN
from noloco_p2p.observe.report.recorded_run import RecordedRun

BINS, COLUMNS = 150, 50
MOST_ROWS = 60
"""Nodes that have a row of their own."""
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
    legend: Sequence[LegendKey] = ()
    note: str = ""


class RunCharts:
    """All charts of a run."""

    def __init__(self, run: RecordedRun) -> None:
        self._run = run
        self._whole = run.began_at, run.ended_at
        self._span_s = max(run.ended_at - run.began_at, 1e-9)
        self._bins = TimeBins(*self._whole, BINS)
        self._columns = TimeBins(*self._whole, COLUMNS)

    def loss(self) -> Panel:
        """Loss of every replica of stage 0, and validation, by step."""
        nodes = self._run.of_stage(0)
        few = len(nodes) <= len(SERIES_COLOURS)
        keys = [LegendKey(node.name, SERIES_COLOURS[n] if few else Colour.BLUE) for n, node in enumerate(nodes)]
        lines = [(key.label, key.colour, piece) for key, node in zip(keys, nodes, strict=True) for piece in node.loss]
        dots = sorted(point for node in nodes for piece in node.validation for point in piece)
        axes = self._by_step("Loss", lines, dots, from_zero=False, kind="" if few else "faint")
        legend = keys if few else [LegendKey(f"{len(nodes)} replicas", Colour.BLUE)]
        legend += [LegendKey("validation (dots)", Colour.GREY)] if dots else []
        return _panel(axes.svg, legend, "Nats per token, by step.")

    def throughput(self) -> Panel:
        """Tokens per second of the swarm."""
        rates = self._bins.rates(each for node in self._run.nodes for each in node.token_increments)
        svg = self._over_time("Tokens per second", [("tokens per second", Colour.GREEN, rates)])
        return _panel(svg, (), "The whole swarm, evaluations and waits included.")

    def time(self) -> Panel:
        """Where the time of each stage went."""
        causes = [cause for cause, _ in self._run.total("idle_s").most_common()]
        colours = {cause: IDLE_COLOURS[n % len(IDLE_COLOURS)] for n, cause in enumerate(causes)}
        rows = []
        for stage in self._run.stages:
            nodes, idle = self._run.of_stage(stage), self._run.total("idle_s", stage)
            worked = sum(node.device_s for node in nodes)
            rest = sum(node.trained_s for node in nodes) - worked - sum(idle.values())
            waits = [(f"waits: {cause}", float(idle[cause]), colours[cause]) for cause in causes]
            pieces = [("device works", worked, Colour.GREEN), *waits, ("the rest", max(0.0, rest), Colour.PALE)]
            rows.append((f"stage {stage}", pieces))
        legend = [LegendKey("device works", Colour.GREEN)]
        legend += [LegendKey(f"waits: {cause}", colour) for cause, colour in colours.items()]
        legend.append(LegendKey("the rest: evaluation, merging, saving", Colour.PALE))
        note = "Shares of the seconds in which the nodes of a stage were training."
        return _panel(bars("Where the time went", rows), legend, note)

    def rounds(self) -> Panel:
        """Outer rounds by result, over time."""
        found = self._columns.counts(event for node in self._run.nodes for event in node.new_rounds)
        axes = self._stack_axes("Outer rounds by result", found)
        names = sorted(self._run.total("rounds"), key=[*RESULT_COLOURS, *self._run.total("rounds")].index)
        for n, counts in enumerate(found):
            low = 0.0
            for name in (name for name in names if counts[name]):
                high = low + counts[name]
                axes.column((n, COLUMNS), low, high, RESULT_COLOURS.get(name, Colour.GREY), f"{name}: {counts[name]}")
                low = high
        legend = [LegendKey(name, RESULT_COLOURS.get(name, Colour.GREY)) for name in names]
        return _panel(axes.svg, legend, "Rounds of all nodes that ended in each time.")

    def round_seconds(self) -> Panel:
        """How long outer rounds took."""
        points = [point for node in self._run.nodes for point in node.round_seconds]
        mean, largest = self._columns.mean_and_largest(points)
        lines = [("mean", Colour.BLUE, mean), ("longest", Colour.ORANGE, largest)]
        return _panel(self._over_time("Seconds of an outer round", lines), _keys(lines))

    def spread(self) -> list[Panel]:
        """Standard deviation between replicas, and the learning rate, by step."""
        keys = [LegendKey(f"stage {stage}", SERIES_COLOURS[stage % len(SERIES_COLOURS)]) for stage in self._run.stages]
        lines = [
            (key.label, key.colour, piece)
            for key, stage in zip(keys, self._run.stages, strict=True)
            for node in self._run.of_stage(stage)
            for piece in node.spread
        ]
        longest = max(self._run.nodes, key=lambda node: sum(map(len, node.rate)))
        rates = [("learning rate", Colour.GREY, piece) for piece in longest.rate]
        note = "Standard deviation of a weight between the replicas of a stage; it should fall with the learning rate."
        return [
            _panel(self._by_step("Spread of the replicas", lines).svg, keys, note),
            _panel(self._by_step("Learning rate", rates).svg, (), "By step, as the spread beside it."),
        ]

    def membership(self) -> Panel:
        """How many nodes were in each state."""
        nodes = self._run.nodes
        if len(nodes) > 1:
            spans = [span for node in nodes for process in node.processes for span in process.spans]
            there = [(span.began_at, span.ended_at, {span.state: 1.0}) for span in spans if span.state != "left"]
            note = "Nodes whose journals are here."
        else:
            lines = nodes[0].membership
            ends = [*(at for at, _ in lines[1:]), self._run.ended_at]
            there = [(at, until, counts) for (at, counts), until in zip(lines, ends, strict=False)]
            note = "As this node saw the swarm."
        found = self._bins.present(there)
        axes = self._stack_axes("Nodes by state", found)
        names = [state for state in STATE_COLOURS if any(counts[state] for counts in found)]
        heights = [0.0] * len(found)
        for name in names:
            upper = [low + counts[name] for low, counts in zip(heights, found, strict=True)]
            axes.area(heights, upper, STATE_COLOURS[name], name)
            heights = upper
        return _panel(axes.svg, [LegendKey(name, STATE_COLOURS[name]) for name in names], note)

    def lives(self) -> Panel:
        """The life of every node."""
        nodes = self._run.nodes[:MOST_ROWS]
        states = {span.state for node in nodes for process in node.processes for span in process.spans}
        legend = [LegendKey(state, colour) for state, colour in STATE_COLOURS.items() if state in states]
        svg = lives("Lives of the nodes", nodes, self._whole, STATE_COLOURS)
        note = "A stroke: a process began. A cross: its last line, without an end; it was killed, or still runs."
        left_out = len(self._run.nodes) - len(nodes)
        note += f" {left_out} nodes are left out." if left_out else ""
        return _panel(svg, legend, note)

    def bytes(self) -> Panel:
        """Bytes per second that the nodes sent and received."""
        lines = [
            (name, colour, self._bins.rates(each for node in self._run.nodes for each in node.byte_increments[way]))
            for name, colour, way in (("received", Colour.BLUE, "in"), ("sent", Colour.ORANGE, "out"))
        ]
        return _panel(self._over_time("Bytes per second", lines), _keys(lines), "All nodes together.")

    def _over_time(self, title: str, lines: Sequence[Line]) -> Element:
        """Lines by seconds since the start, the first on top."""
        unit_s, _ = time_unit(self._span_s)
        axes = self._time_axes(title, max((y for _, _, points in lines for _, y in points), default=0.0))
        for name, colour, points in reversed(lines):
            axes.line([(seconds / unit_s, value) for seconds, value in points], colour, name)
        return axes.svg

    def _stack_axes(self, title: str, found: Sequence[Counter[str]]) -> Axes:
        return self._time_axes(title, max((sum(counts.values()) for counts in found), default=0))

    def _time_axes(self, title: str, highest: float) -> Axes:
        unit_s, unit = time_unit(self._span_s)
        x = Axis(f"{unit} since the start", 0.0, self._span_s / unit_s, label=lambda value: f"{value:g}")
        return Axes(title, x, Axis("", 0.0, highest * 1.05))

    def _by_step(
        self, title: str, lines: Sequence[Line], dots: Points = (), *, from_zero: bool = True, kind: str = ""
    ) -> Axes:
        """Lines, at most MOST_PIECES of them, and dots of validation."""
        lines = sorted(sorted(lines, key=lambda line: -len(line[2]))[:MOST_PIECES], key=lambda line: line[0])
        points = [*dots, *(point for _, _, some in lines for point in some)]
        x = Axis("step", 0.0, max((x for x, _ in points), default=1.0))
        axes = Axes(title, x, fitted("", [y for _, y in points], from_zero=from_zero))
        most = max(ALL_POINTS // MOST_PIECES, min(MOST_POINTS, ALL_POINTS // max(1, len(lines))))
        for name, colour, some in lines:
            axes.line(some, colour, name, most=most, kind=kind)
        axes.dots(dots, Colour.GREY, "validation")
        return axes


def _panel(svg: Element, legend: Iterable[LegendKey] = (), note: str = "") -> Panel:
    return Panel(svg.findtext("title", ""), Markup(markup(svg)), list(legend), note)


def _keys(lines: Sequence[Line]) -> list[LegendKey]:
    return [LegendKey(name, colour) for name, colour, _ in lines]
