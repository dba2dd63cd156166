"""The charts of the page: what of a run each of them shows, and what its colours mean."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from noloco_p2p.observe.report import bars, humanize, series
from noloco_p2p.observe.report.chart import MOST_POINTS, Chart, time_ticks_unit
from noloco_p2p.observe.report.node_history import UNKNOWN, Curve, Span
from noloco_p2p.observe.report.run import Run

BINS, COLUMNS = 150, 50
MOST_ROWS = 60
"""Nodes that have a row of their own."""
MOST_PIECES, ALL_POINTS = 400, 16_000
"""Of curves in one chart; a replica has one for each of its lives."""
MOST_CURVES = 6
"""Replicas that have a colour of their own; of more, all have the same."""

BLUE, RED, GREEN, PINK, ORANGE, SKY, YELLOW, GREY, PALE = range(9)
STATE_COLOURS = {
    "training": GREEN,
    "finished": BLUE,
    "paused": PINK,
    "draining": YELLOW,
    "syncing": SKY,
    "waiting": ORANGE,
    "starting": GREY,
    "left": PALE,
    UNKNOWN: GREY,
}
"""In the order in which they are stacked."""
RESULT_COLOURS = {"partner": GREEN, "stale": SKY, "other": ORANGE, "alone": RED}
IDLE_COLOURS = (ORANGE, SKY, PINK, BLUE, YELLOW, RED)


@dataclass(frozen=True, slots=True)
class Drawing:
    """A chart with its heading and the meaning of its colours."""

    title: str
    svg: str
    legend: Sequence[tuple[int, str]] = ()
    note: str = ""


class Drawings:
    """All charts of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._whole = run.began_at, run.ended_at
        self._span_s = max(run.ended_at - run.began_at, 1e-9)
        self._unit_s, self._unit = time_ticks_unit(self._span_s)

    def loss(self) -> Drawing:
        """Loss of every replica of stage 0, and validation, by step."""
        stories = self._run.of_stage(0)
        pieces = _longest([(n, piece) for n, story in enumerate(stories) for piece in story.loss])
        dots = sorted(point for story in stories for piece in story.validation for point in piece)
        chart = self._by_step("Loss by step", [p for _, p in pieces] + [dots], humanize.short, from_zero=False)
        own = len(stories) <= MOST_CURVES
        for n, piece in pieces:
            chart.curve(piece, _of(n) if own else BLUE, stories[n].name, most=_share(pieces), faint=not own)
        chart.dots(dots, GREY, "validation")
        names = (
            [(_of(n), story.name) for n, story in enumerate(stories)] if own else [(BLUE, f"{len(stories)} replicas")]
        )
        legend = [*names, *([(GREY, "validation (dots)")] if dots else [])]
        return Drawing("Loss", chart.markup(), legend, "Nats per token, by step.")

    def throughput(self) -> Drawing:
        """Tokens per second of the swarm."""
        gains = [gain for story in self._run.stories for gain in story.token_gains]
        curve = series.rates(gains, *self._whole, BINS)
        chart = self._by_time("Tokens per second", [curve])
        chart.curve(self._timed(curve), GREEN, "tokens per second")
        return Drawing("Tokens per second", chart.markup(), (), "The whole swarm, evaluations and waits included.")

    def time(self) -> Drawing:
        """Where the time of each stage went."""
        causes = sorted(self._run.total("idle_s"), key=lambda cause: -self._run.total("idle_s")[cause])
        colours = {cause: IDLE_COLOURS[n % len(IDLE_COLOURS)] for n, cause in enumerate(causes)}
        rows = []
        for stage in self._run.stages:
            stories, idle = self._run.of_stage(stage), self._run.total("idle_s", stage)
            worked = sum(story.device_s for story in stories)
            rest = sum(story.trained_s for story in stories) - worked - sum(idle.values())
            waited = [(f"waits: {cause}", float(idle[cause]), colours[cause]) for cause in causes]
            pieces = [("device works", worked, GREEN), *waited, ("the rest", max(0.0, rest), PALE)]
            rows.append((f"stage {stage}", pieces))
        names = [(colours[cause], f"waits: {cause}") for cause in causes]
        return Drawing(
            "Where the time went",
            bars.shares("Where the time of each stage went", rows),
            [(GREEN, "device works"), *names, (PALE, "the rest: evaluation, merging, saving")],
            "Shares of the seconds in which the nodes of a stage were training.",
        )

    def rounds(self) -> Drawing:
        """Outer rounds by result, over time."""
        events = [event for story in self._run.stories for event in story.round_gains]
        found = series.columns(events, *self._whole, COLUMNS)
        chart = self._stack_chart("Outer rounds by result", found)
        names = sorted(self._run.total("rounds"), key=[*RESULT_COLOURS, *self._run.total("rounds")].index)
        for n, counts in enumerate(found):
            for name, low, high in _stacked(counts, names):
                chart.column((n, COLUMNS), low, high, RESULT_COLOURS.get(name, GREY), f"{name}: {high - low:.0f}")
        legend = [(RESULT_COLOURS.get(name, GREY), name) for name in names]
        return Drawing("Outer rounds by result", chart.markup(), legend, "Rounds of all nodes that ended in each time.")

    def round_seconds(self) -> Drawing:
        """How long outer rounds took."""
        began_at = self._run.began_at
        points = [(r.at - began_at, r.seconds) for story in self._run.stories for r in story.rounds]
        mean, largest = series.extremes(points, self._span_s, COLUMNS)
        chart = self._by_time("Seconds of an outer round", [mean, largest])
        chart.curve(self._timed(largest), ORANGE, "longest")
        chart.curve(self._timed(mean), BLUE, "mean")
        return Drawing("Seconds of an outer round", chart.markup(), [(BLUE, "mean"), (ORANGE, "longest")])

    def spread(self) -> list[Drawing]:
        """Standard deviation between replicas, and below it the learning rate, by step."""
        stages = self._run.stages
        found = _longest([(stage, piece) for stage in stages for s in self._run.of_stage(stage) for piece in s.spread])
        longest = max(self._run.stories, key=lambda story: sum(map(len, story.rate)))
        chart = self._by_step("Spread of the replicas", [piece for _, piece in found], humanize.short)
        for stage, piece in found:
            chart.curve(piece, _of(stage), f"stage {stage}", most=_share(found))
        below = self._by_step("Learning rate", longest.rate, humanize.short)
        for _, piece in _longest([(0, piece) for piece in longest.rate]):
            below.curve(piece, GREY, "learning rate")
        note = "Standard deviation of a weight between the replicas of a stage; it should fall with the learning rate."
        return [
            Drawing("Spread of the replicas", chart.markup(), [(_of(s), f"stage {s}") for s in stages], note),
            Drawing("Learning rate", below.markup(), (), "By step, as the spread beside it."),
        ]

    def membership(self) -> Drawing:
        """How many nodes were in each state."""
        stories = self._run.stories
        if len(stories) > 1:
            spans = [span for story in stories for process in story.processes for span in process.spans]
            found, note = series.standing(_present(spans), *self._whole, BINS), "Nodes whose journals are here."
        else:
            found = series.standing_as_told(stories[0].membership, *self._whole, BINS)
            note = "As this node saw the swarm."
        chart = self._stack_chart("Nodes by state", found)
        names = [state for state in STATE_COLOURS if any(counts[state] for counts in found)]
        heights = [0.0] * len(found)
        for name in names:
            upper = [low + counts[name] for low, counts in zip(heights, found, strict=True)]
            chart.area(heights, upper, STATE_COLOURS[name], name)
            heights = upper
        return Drawing("Nodes by state", chart.markup(), [(STATE_COLOURS[name], name) for name in names], note)

    def lives(self) -> Drawing:
        """The life of every node."""
        stories = self._run.stories[:MOST_ROWS]
        states = {span.state for story in stories for process in story.processes for span in process.spans}
        legend = [(colour, state) for state, colour in STATE_COLOURS.items() if state in states]
        svg = bars.lives("The life of every node", stories, self._whole, STATE_COLOURS)
        note = "A stroke: a process began. A cross: its last word, without an end; it was killed, or still runs."
        left_out = len(self._run.stories) - len(stories)
        return Drawing(
            "Lives of the nodes", svg, legend, note + (f" {left_out} nodes are left out." if left_out else "")
        )

    def bytes(self) -> Drawing:
        """Bytes per second that the nodes sent and received."""
        ways = {
            way: series.rates([g for story in self._run.stories for g in story.byte_gains[way]], *self._whole, BINS)
            for way in ("in", "out")
        }
        chart = self._by_time("Bytes per second", list(ways.values()))
        chart.curve(self._timed(ways["out"]), ORANGE, "sent")
        chart.curve(self._timed(ways["in"]), BLUE, "received")
        return Drawing(
            "Bytes per second", chart.markup(), [(BLUE, "received"), (ORANGE, "sent")], "All nodes together."
        )

    def _timed(self, curve: Curve) -> Curve:
        return [(seconds / self._unit_s, value) for seconds, value in curve]

    def _by_time(self, title: str, curves: Iterable[Curve]) -> Chart:
        highest = max((y for curve in curves for _, y in curve), default=0.0)
        return self._over_time(title, highest * 1.05)

    def _stack_chart(self, title: str, found: Sequence[Counter[str]]) -> Chart:
        return self._over_time(title, max((sum(counts.values()) for counts in found), default=0) * 1.05)

    def _over_time(self, title: str, highest: float) -> Chart:
        across = 0.0, self._span_s / self._unit_s
        return Chart(title, across, (0.0, highest), _plain, humanize.short, f"{self._unit} since the start")

    def _by_step(
        self, title: str, curves: Sequence[Curve], told: Callable[[float], str], *, from_zero: bool = True
    ) -> Chart:
        values = [y for curve in curves for _, y in curve]
        low, high = min(values, default=0.0), max(values, default=1.0)
        margin = (high - low) * 0.05
        return Chart(
            title,
            (0.0, max((x for curve in curves for x, _ in curve), default=1.0)),
            (0.0 if from_zero else low - margin, high + margin),
            humanize.short,
            told,
            "step",
        )


def _of(n: int) -> int:
    """The colour of the n-th replica or stage."""
    return (BLUE, ORANGE, GREEN, PINK, SKY, RED)[n % MOST_CURVES]


def _longest(pieces: list[tuple[int, Curve]]) -> list[tuple[int, Curve]]:
    """Pieces of curves, at most MOST_PIECES of them."""
    return sorted(sorted(pieces, key=lambda one: -len(one[1]))[:MOST_PIECES], key=lambda one: one[0])


def _share(pieces: Sequence[object]) -> int:
    """Points for each of so many pieces."""
    return max(ALL_POINTS // MOST_PIECES, min(MOST_POINTS, ALL_POINTS // max(1, len(pieces))))


def _stacked(counts: Counter[str], names: Sequence[str]) -> Iterable[tuple[str, float, float]]:
    low = 0.0
    for name in names:
        if counts[name]:
            yield name, low, low + counts[name]
            low += counts[name]


def _present(spans: Iterable[Span]) -> Iterable[Span]:
    return (span for span in spans if span.state != "left")


def _plain(value: float) -> str:
    return f"{value:g}"
