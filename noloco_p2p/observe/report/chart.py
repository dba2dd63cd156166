"""SVG of a chart with two axes: curves, dots, stacked areas and columns. Colours are classes of the page.

A chart is made for a width of 440, about that of a phone and half that of a desktop page; the page scales it.
Text goes through the element tree, which escapes it.
"""

import math
from collections.abc import Callable, Sequence
from xml.etree import ElementTree

from noloco_p2p.observe.report.node_history import Curve
from noloco_p2p.observe.report.series import thin

WIDTH, HEIGHT = 440.0, 220.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 10.0, 10.0, 36.0
MOST_POINTS = 800
"""Of one curve."""

Element = ElementTree.Element


def element(parent: Element | None, tag: str, text: str = "", **attributes: object) -> Element:
    """An element below `parent`; `class_` is written as `class`, and `_` in names as `-`."""
    named = {name.rstrip("_").replace("_", "-"): _written(value) for name, value in attributes.items()}
    made = Element(tag, named) if parent is None else ElementTree.SubElement(parent, tag, named)
    if text:
        made.text = text
    return made


def canvas(title: str, height: float = HEIGHT) -> Element:
    """An SVG that scales with the page and is told to who cannot see it."""
    box = f"0 0 {_written(WIDTH)} {_written(height)}"
    svg = element(None, "svg", viewBox=box, role="img", aria_label=title)
    element(svg, "title", title)
    return svg


def markup(svg: Element) -> str:
    """The SVG as text, for a page of HTML."""
    return ElementTree.tostring(svg, encoding="unicode", short_empty_elements=True)


class Chart:
    """A chart from (0 or `low`) to the ends of its axes. `x_told` and `y_told` say how numbers are written."""

    def __init__(
        self,
        title: str,
        x_range: tuple[float, float],
        y_range: tuple[float, float],
        x_told: Callable[[float], str],
        y_told: Callable[[float], str],
        x_title: str,
    ) -> None:
        self._svg = canvas(title)
        self._x = _widened(x_range)
        self._y = _widened(y_range)
        self._axes(x_told, y_told, x_title)

    def curve(self, curve: Curve, colour: int, name: str, *, most: int = MOST_POINTS, faint: bool = False) -> None:
        """A line through at most so many points; a single one is a dot."""
        points = thin(curve, most)
        if len(points) == 1:
            self.dots(points, colour, name)
        elif points:
            path = "M" + "L".join(self._at(x, y) for x, y in points)
            drawn = element(self._svg, "path", d=path, class_=f"line s{colour}{' faint' if faint else ''}")
            element(drawn, "title", name)

    def dots(self, points: Curve, colour: int, name: str) -> None:
        """A dot for each point."""
        for x, y in thin(points, MOST_POINTS // 4):
            drawn = element(self._svg, "circle", cx=self._across(x), cy=self._up(y), r=2.4, class_=f"f{colour}")
            element(drawn, "title", name)

    def area(self, lower: Sequence[float], upper: Sequence[float], colour: int, name: str) -> None:
        """What lies between two values at equal times over the whole width, as steps."""
        width = (self._x[1] - self._x[0]) / len(upper)
        edges = [self._x[0] + n * width for n in range(len(upper) + 1)]
        there = [self._at(x, y) for n, y in enumerate(upper) for x in (edges[n], edges[n + 1])]
        back = [self._at(x, y) for n, y in reversed(list(enumerate(lower))) for x in (edges[n + 1], edges[n])]
        drawn = element(self._svg, "path", d="M" + "L".join([*there, *back]) + "Z", class_=f"f{colour}")
        element(drawn, "title", name)

    def column(self, place: tuple[int, int], lower: float, upper: float, colour: int, name: str) -> None:
        """A piece of one of the columns over the whole width; `place`: (which, of how many)."""
        which, count = place
        width = (WIDTH - LEFT - RIGHT) / count
        top = self._up(upper)
        drawn = element(
            self._svg,
            "rect",
            x=LEFT + which * width,
            y=top,
            width=max(0.5, width - 1),
            height=max(0.0, self._up(lower) - top),
            class_=f"f{colour}",
        )
        element(drawn, "title", name)

    def markup(self) -> str:
        """The chart as SVG."""
        return markup(self._svg)

    def _axes(self, x_told: Callable[[float], str], y_told: Callable[[float], str], x_title: str) -> None:
        for value in ticks(*self._y, 5):
            y = self._up(value)
            element(self._svg, "line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid")
            element(self._svg, "text", y_told(value), x=LEFT - 5, y=y + 4, class_="tick end")
        for value in ticks(*self._x, 7):
            x = self._across(value)
            element(self._svg, "line", x1=x, x2=x, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM + 4, class_="axis")
            element(self._svg, "text", x_told(value), x=x, y=HEIGHT - BOTTOM + 16, class_="tick middle")
        bottom = HEIGHT - BOTTOM
        element(self._svg, "line", x1=LEFT, x2=WIDTH - RIGHT, y1=bottom, y2=bottom, class_="axis")
        element(self._svg, "text", x_title, x=WIDTH - RIGHT, y=HEIGHT - 4, class_="tick end")

    def _across(self, x: float) -> float:
        low, high = self._x
        return LEFT + (x - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def _up(self, y: float) -> float:
        low, high = self._y
        return HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def _at(self, x: float, y: float) -> str:
        return f"{_written(self._across(x))} {_written(self._up(y))}"


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from `low` to `high`, about so many, equally far apart (1, 2 or 5 times a power of ten)."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    rough = span / about
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def time_ticks_unit(span_s: float) -> tuple[float, str]:
    """(seconds, name) of the unit in which a time of this length is told."""
    for seconds, name in ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "minutes")):
        if span_s >= 2 * seconds:
            return seconds, name
    return 1.0, "seconds"


def _widened(given: tuple[float, float]) -> tuple[float, float]:
    low, high = given
    return (low, high) if high > low else (low, low + max(1.0, abs(low)))


def _written(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
