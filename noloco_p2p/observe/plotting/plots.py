"""Plots and bars as values, each drawn to a self-contained SVG file."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from noloco_p2p import humanize
from noloco_p2p.observe.plotting import svg as drawing
from noloco_p2p.observe.plotting.axes import PAGE_SIZE, RIGHT, Axes, Points, Scale, fitted
from noloco_p2p.observe.plotting.labels import label_width
from noloco_p2p.observe.plotting.svg import CHARACTER, SERIES_COLOURS, Colour, Element, LineStyle, element

WIDTH, HEIGHT = 640.0, 330.0
BAR_LEFT, BAR_HEIGHT, BAR_GAP = 74.0, 24.0, 6.0
NARROWEST_LABELLED = 34.0
"""A piece of a bar that is at least this wide shows its share as text."""
KIND_COLOURS = [Colour[name] for name in ["BLUE", "ORANGE", "GREEN", "PINK", "SKY", "RED", "YELLOW", "GREY"]]
"""Colours of the pieces of bars, which only their colours tell apart."""
MAX_MARKED, MAX_DOTS = 40, 5_000
"""Upper limits on the points of a line that gets a dot at each, and on the dots of a set of points."""

BarPiece = tuple[str, float, Colour]
"""(name, amount, colour)."""
BarRow = tuple[str, Sequence[BarPiece]]
"""(label, pieces)."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line or a set of points of a plot."""

    label: str
    points: Points
    style: LineStyle = "line"


@dataclass(frozen=True, slots=True)
class Plot:
    """Curves over two axes."""

    name: str
    """File name without its extension, unique in a directory."""
    title: str
    axes: tuple[str, str]
    """Titles of x and y with units."""
    curves: Sequence[Curve]
    scales: tuple[Scale, Scale] = ("linear", "linear")
    from_zero: bool = False
    """The y axis starts at 0 instead of the lowest value."""


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars of equal width, each divided into shares."""

    name: str
    """File name without its extension, unique in a directory."""
    title: str
    rows: Sequence[BarRow]


Chart = Plot | Bars


def save(chart: Chart, directory: Path) -> Path:
    """Write a chart to `NAME.svg`. Equal charts yield equal files. Raises OSError."""
    path = directory / f"{chart.name}.svg"
    path.write_text(svg(chart), "utf-8")
    return path


def svg(chart: Chart) -> str:
    """The text of an SVG file with the chart, its title and its legend."""
    if isinstance(chart, Bars):
        legend = {name: colour for _, pieces in chart.rows for name, _, colour in pieces}
        left = CHARACTER * max((len(label) for label, _ in chart.rows), default=0) + 10
        return drawing.document(chart.title, bars(chart.title, chart.rows, width=WIDTH, left=left), legend)
    axes = _axes(chart)
    for curve, colour in zip(chart.curves, itertools.cycle(SERIES_COLOURS), strict=False):
        _draw(axes, curve, colour)
    axes.write_labels()
    return drawing.document(chart.title, axes.svg, {})


def _axes(plot: Plot) -> Axes:
    """Axes that fit the curves, with room for their labels beside them."""
    x = fitted(plot.axes[0], [x for curve in plot.curves for x, _ in curve.points], plot.scales[0])
    heights = [y for curve in plot.curves for _, y in curve.points]
    y = fitted(plot.axes[1], heights, plot.scales[1], from_zero=plot.from_zero)
    labels = [curve.label for curve in plot.curves]
    return Axes(plot.title, x, y, (WIDTH + label_width(labels), HEIGHT), labels=labels)


def _draw(axes: Axes, curve: Curve, colour: Colour) -> None:
    points = [point for point in curve.points if axes.holds(*point)]
    if curve.style != "points":
        kind = "dashed" if curve.style == "dashed" else ""
        line = steps(points) if curve.style == "steps" else points
        axes.line(line, colour, curve.label, kind=kind, label=curve.label)
    if curve.style == "points" or (curve.style == "line" and len(points) <= MAX_MARKED):
        axes.dots(points, colour, curve.label, most=MAX_DOTS, label=curve.label)


def bars(title: str, rows: Sequence[BarRow], *, width: float = PAGE_SIZE[0], left: float = BAR_LEFT) -> Element:
    """One bar per row, all equally wide; each piece shows its share of the row's sum."""
    svg = drawing.canvas(title, width, len(rows) * (BAR_HEIGHT + BAR_GAP) + BAR_GAP)
    for n, (label, pieces) in enumerate(rows):
        top, x = BAR_GAP + n * (BAR_HEIGHT + BAR_GAP), left
        middle = top + BAR_HEIGHT / 2 + 4
        whole = sum(amount for _, amount, _ in pieces) or 1.0
        element(svg, "text", label[: int(left / CHARACTER)], x=left - 6, y=middle, class_="tick end")
        for name, amount, colour in pieces:
            share = amount / whole
            extent = share * (width - left - RIGHT)
            piece = element(svg, "rect", x=x, y=top, width=extent, height=BAR_HEIGHT, class_=f"f{colour}")
            element(piece, "title", f"{label}: {name} {humanize.percent(share)}")
            if extent >= NARROWEST_LABELLED:
                element(svg, "text", f"{share:.0%}", x=x + extent / 2, y=middle, class_=f"on n{colour}")
            x += extent
    return svg


def steps(points: Points) -> Points:
    """The corners of a step curve, on which each value holds until the next point."""
    corners = [(after[0], before[1]) for before, after in itertools.pairwise(points)]
    return [corner for both in itertools.zip_longest(points, corners) for corner in both if corner is not None]
