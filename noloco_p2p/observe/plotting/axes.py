"""Axes as values, which map numbers to positions and have round ticks; and two axes with their contents, as SVG."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from noloco_p2p import humanize
from noloco_p2p.observe.plotting.labels import LineEnd, draw_labels, label_width
from noloco_p2p.observe.plotting.svg import Colour, canvas, decimal, element

Scale = Literal["linear", "log", "log2"]
"""On `linear`, equal distances are equal differences. On `log` and `log2` they are equal factors, with ticks at powers
of ten or of two."""

MAX_LOG_TICKS = 11

tick_label = partial(humanize.compact, digits=4)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a chart. On a logarithmic axis both ends are above 0. A linear axis of length 0 is extended."""

    title: str
    low: float
    high: float
    scale: Scale = "linear"
    label: Callable[[float], str] = tick_label
    """Makes the label of the number at a tick."""
    names: Sequence[str] = ()
    """Names of rows, shown in place of numbers; each row takes one unit, from `high` downwards."""

    def position(self, value: float) -> float:
        """The position of a value: 0 at `low`, 1 at `high`."""
        if self.scale != "linear":
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self._end - self.low)

    def value(self, position: float) -> float:
        """The value at a position."""
        if self.scale != "linear":
            return self.low * math.exp(position * math.log(self.high / self.low))
        return self.low + position * (self._end - self.low)

    @property
    def _end(self) -> float:
        return self.high if self.high > self.low else self.low + max(1.0, abs(self.low))

    def holds(self, value: float) -> bool:
        """Whether a value can be shown between the ends."""
        return showable(value, self.scale) and -1e-9 <= self.position(value) <= 1 + 1e-9

    def ticks(self, about: int) -> list[float]:
        """About this many round numbers between the ends; a logarithmic axis chooses their number itself."""
        if self.scale == "linear":
            return ticks(self.low, self._end, about)
        return _log_ticks(self.low, self.high, 2 if self.scale == "log2" else 10)

    def labelled(self, about: int) -> list[tuple[float, str]]:
        """The ticks and their labels; if there are rows, the middle and the name of each."""
        if self.names:
            return [(self.high - n - 0.5, name) for n, name in enumerate(self.names)]
        return [(value, self.label(value)) for value in self.ticks(about)]


def fitted(title: str, values: Iterable[float], scale: Scale = "linear", *, from_zero: bool = False) -> Axis:
    """An axis for these values, with a margin of a twentieth at the ends. Values that it cannot show are ignored."""
    shown = [value for value in values if showable(value, scale)] or [1.0]
    low, high = min(shown), max(shown)
    if scale == "linear":
        margin = (high - low or abs(high) or 1.0) * 0.05
        return Axis(title, 0.0 if from_zero else low - margin, high + margin)
    factor = (high / low) ** 0.05 if high > low else 2.0
    return Axis(title, low / factor, high * factor, scale, humanize.figure if scale == "log2" else tick_label)


def showable(value: float, scale: Scale) -> bool:
    """Whether a value has a position on an axis of this scale: it is finite, and on a logarithmic one positive."""
    return math.isfinite(value) and (scale == "linear" or value > 0)


def ticks(low: float, high: float, about: int) -> list[float]:
    """About this many round numbers from `low` to `high`, spaced by 1, 2 or 5 times a power of ten."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    rough = span / about
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def time_unit(span_s: float) -> tuple[float, str]:
    """(length in seconds, name) of the unit in which to show a time span of this length."""
    units = ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "minutes"))
    return next(((unit_s, name) for unit_s, name in units if span_s >= 2 * unit_s), (1.0, "seconds"))


def _log_ticks(low: float, high: float, base: int) -> list[float]:
    """Powers of the base; if there are too few, multiples of them too (base 10); if still too few, equal steps."""
    powers = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    found: list[float] = []
    for multiples in ((1,), (1, 2, 5), (1, 2, 3, 4, 5, 7)) if base == 10 else ((1,),):
        every = [multiple * float(base) ** power for power in powers for multiple in multiples]
        found = [value for value in every if low <= value <= high]
        if len(found) > 2:
            return found[:: math.ceil(len(found) / MAX_LOG_TICKS)]
    return found if base == 2 and found else ticks(low, high, 4)


# --- drawn ------------------------------------------------------------------------------------------------------------

Points = Sequence[tuple[float, float]]
"""(x, y), in the order in which a line joins them."""

PAGE_SIZE = 440.0, 220.0
"""Size of a chart in a page: about as wide as a phone, or half a desktop page. The page scales it."""
LEFT, RIGHT, TOP, BOTTOM = 52.0, 10.0, 10.0, 36.0
"""Margins around the area between the axes."""
LABELS_SHARE = 0.3
"""Upper limit on the share of the width that the labels of lines take; of longer ones only the end is shown."""
Y_TITLE = 16.0
"""Height of the y axis title, which is above the axis."""
MAX_POINTS = 800
"""Upper limit on the points of one line."""


class Axes:
    """An SVG with two axes and what is drawn between them. Names are shown as tooltips."""

    def __init__(
        self,
        title: str,
        x: Axis,
        y: Axis,
        size: tuple[float, float] = PAGE_SIZE,
        left: float = LEFT,
        labels: Sequence[str] = (),
    ) -> None:
        """`labels`: of the lines, which get room to the right of the axes."""
        self.svg = canvas(title, *size)
        self._x, self._y = x, y
        self._left, self._right = left, size[0] - RIGHT - label_width(labels, LABELS_SHARE * size[0])
        self._ends: list[LineEnd] = []
        self._top, self._bottom = TOP + (Y_TITLE if y.title else 0.0), size[1] - BOTTOM
        self._measured = False
        self._draw_y_axis(self._y)
        self._draw_x_axis()

    def measure(self, log: Axis | None = None) -> None:
        """Store the range of both axes, and the values of all lines and dots drawn from now on, for a page's script.

        `log`: the y axis to which the reader may switch; its ticks are drawn but hidden.
        """
        self._measured = True
        self.svg.attrib |= {
            "data-unit": self._x.title,
            "data-x": f"{self._left} {self._right} {self._x.low} {self._x.value(1.0)}",
            "data-y": f"{self._bottom} {self._top} {self._y.low} {self._y.value(1.0)}",
        }
        if log is not None:
            self.svg.set("data-log", f"{log.low} {log.high}")
            self._draw_y_axis(log, hidden=True)

    def holds(self, x: float, y: float) -> bool:
        """Whether a point is within both axes."""
        return self._x.holds(x) and self._y.holds(y)

    def line(
        self, points: Points, colour: Colour, name: str, *, most: int = MAX_POINTS, kind: str = "", label: str = ""
    ) -> None:
        """A line through at most `most` of the points; a single point is a dot. `kind`: an additional class."""
        thinned = thin(points, most)
        if len(thinned) == 1:
            self.dots(thinned, colour, name, label=label)
        elif thinned:
            about = self._about(thinned, colour, label)
            self._named(name, "path", d=self._path(thinned), class_=f"line s{colour} {kind}".strip(), **about)

    def dots(self, points: Points, colour: Colour, name: str, *, most: int = MAX_POINTS // 4, label: str = "") -> None:
        """A dot at each of at most `most` of the points."""
        for x, y in thin(points, most):
            place, about = {"cx": self._across(x), "cy": self._up(y)}, self._about([(x, y)], colour, label)
            self._named(name, "circle", **place, r=2.4, class_=f"f{colour}", **about)

    def write_labels(self) -> None:
        """Write the labels of the lines and dots beside them."""
        draw_labels(self.svg, self._ends, self._right, self._top, self._bottom)

    def area(self, lower: Sequence[float], upper: Sequence[float], colour: Colour, name: str) -> None:
        """The area between two step curves, each value of which covers an equal share of the width."""
        edges = [self._x.value(n / len(upper)) for n in range(len(upper) + 1)]
        top, bottom = ([(x, y) for n, y in enumerate(ys) for x in edges[n : n + 2]] for ys in (upper, lower))
        self._named(name, "path", d=self._path([*top, *reversed(bottom)]) + "Z", class_=f"f{colour}")

    def cell(self, x: tuple[float, float], y: tuple[float, float], colour: Colour, name: str) -> None:
        """A rectangle between two values on each axis."""
        left, top = self._across(x[0]), self._up(y[1])
        size = {"width": max(0.6, self._across(x[1]) - left), "height": self._up(y[0]) - top}
        self._named(name, "rect", x=left, y=top, **size, class_=f"f{colour}")

    def cross(self, x: float, y: float, name: str) -> None:
        """A cross at a point."""
        path = f"M{self._across(x) - 4:.1f} {self._up(y) - 4:.1f}l8 8m0 -8l-8 8"
        self._named(name, "path", d=path, class_="cross")

    def stroke(self, x: float, y: tuple[float, float]) -> None:
        """A vertical stroke from slightly below one y to slightly above another."""
        low, high = map(self._up, y)
        element(self.svg, "line", x1=self._across(x), x2=self._across(x), y1=high - 2, y2=low + 2, class_="start")

    def _draw_y_axis(self, axis: Axis, *, hidden: bool = False) -> None:
        ticks = element(self.svg, "g", class_="scale", **({"display": "none"} if hidden else {}))
        for value, label in axis.labelled(5):
            y = self._bottom - axis.position(value) * (self._bottom - self._top)
            if not axis.names:
                element(ticks, "line", x1=self._left, x2=self._right, y1=y, y2=y, class_="grid")
            element(ticks, "text", label, x=self._left - 5, y=y + 4, class_="tick end")
        if axis.title:
            element(ticks, "text", axis.title, x=0.0, y=self._top - 12, class_="tick")

    def _draw_x_axis(self) -> None:
        bottom = self._bottom
        for value, label in self._x.labelled(7):
            x = self._across(value)
            element(self.svg, "line", x1=x, x2=x, y1=bottom, y2=bottom + 4, class_="axis")
            element(self.svg, "text", label, x=x, y=bottom + 16, class_="tick middle")
        element(self.svg, "line", x1=self._left, x2=self._right, y1=bottom, y2=bottom, class_="axis")
        element(self.svg, "text", self._x.title, x=self._right, y=bottom + 32, class_="tick end")

    def _named(self, name: str, tag: str, **attributes: object) -> None:
        element(element(self.svg, tag, "", **attributes), "title", name)

    def _about(self, points: Points, colour: Colour, label: str) -> dict[str, str]:
        """The values and the label of what is drawn, for a page's script."""
        if label:
            self._ends.append(LineEnd(label, colour, self._across(points[-1][0]), self._up(points[-1][1])))
        if not self._measured:
            return {}
        return {"data_v": " ".join(f"{y:.4g}" for _, y in points), "data_l": label}

    def _across(self, x: float) -> float:
        return self._left + self._x.position(x) * (self._right - self._left)

    def _up(self, y: float) -> float:
        return self._bottom - self._y.position(y) * (self._bottom - self._top)

    def _path(self, points: Points) -> str:
        return "M" + "L".join(f"{decimal(self._across(x))} {decimal(self._up(y))}" for x, y in points)


def thin(points: Points, most: int) -> Points:
    """At most `most` of the points, in order: the lowest and the highest of each section, so that no spike is lost."""
    if len(points) <= most:
        return points
    pieces = max(1, most // 2)
    kept: list[tuple[float, float]] = []
    for piece in range(pieces):
        some = points[piece * len(points) // pieces : (piece + 1) * len(points) // pieces]
        low = min(range(len(some)), key=lambda n: some[n][1])
        high = max(range(len(some)), key=lambda n: some[n][1])
        kept += [some[n] for n in sorted({low, high})]
    return kept
