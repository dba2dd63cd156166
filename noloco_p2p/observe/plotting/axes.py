"""Two axes as SVG, and what is drawn between them: lines, dots, areas, columns and cells."""

from collections.abc import Sequence

from noloco_p2p.observe.plotting.palette import Colour
from noloco_p2p.observe.plotting.scales import Axis
from noloco_p2p.observe.plotting.svg import canvas, cross, decimal, element

Points = Sequence[tuple[float, float]]
"""(x, y), in the order in which they are joined."""

PAGE_SIZE = 440.0, 220.0
"""Of a chart in a page: about the width of a phone, half that of a desktop page. The page scales it."""
LEFT, RIGHT, TOP, BOTTOM = 52.0, 10.0, 10.0, 36.0
Y_TITLE = 16.0
"""Height of the y axis' title, where it has one: it stands above the axis."""
MOST_POINTS = 800
"""Of one line."""


class Axes:
    """An SVG with two axes. Colours are numbers of the style sheet, names are shown when one points at a thing."""

    def __init__(self, title: str, x: Axis | None, y: Axis, size: tuple[float, float] = PAGE_SIZE) -> None:
        self.svg = canvas(title, *size)
        self._x, self._y = x or Axis("", 0.0, 1.0), y
        self._left, self._right = LEFT, size[0] - RIGHT
        self._top, self._bottom = TOP + (Y_TITLE if y.title else 0.0), size[1] - BOTTOM
        self._cells = False
        """There are coloured cells below what is drawn next, which gets a border."""
        self._draw_y_axis(at_left=x is not None)
        if x is not None:
            self._draw_x_axis()

    def holds(self, x: float, y: float) -> bool:
        """A point within both axes."""
        return self._x.holds(x) and self._y.holds(y)

    def line(self, points: Points, colour: Colour, name: str, *, most: int = MOST_POINTS, kind: str = "") -> None:
        """A line through at most `most` of the points; a single one is a dot. `kind`: a further class."""
        thinned = thin(points, most)
        if len(thinned) == 1:
            self.dots(thinned, colour, name)
        elif thinned:
            path = "M" + "L".join(self._at(x, y) for x, y in thinned)
            if self._cells:
                element(self.svg, "path", d=path, class_="halo")
            self._named(name, "path", d=path, class_=f"line s{colour} {kind}".strip())

    def dots(self, points: Points, colour: Colour, name: str, *, most: int = MOST_POINTS // 4) -> None:
        """A dot for each point, at most `most`."""
        rim = " halo" if self._cells else ""
        for x, y in thin(points, most):
            self._named(name, "circle", cx=self._across(x), cy=self._up(y), r=2.4, class_=f"f{colour}{rim}")

    def error_bars(self, points: Points, errors: Sequence[float], colour: Colour) -> None:
        """From below each point to above it, or to the lower end of an axis that cannot show so little."""
        for (x, y), error in zip(points, errors, strict=True):
            if not self.holds(x, y):
                continue
            across = self._across(x)
            low, high = (self._up(end) if self._y.holds(end) else self._bottom for end in (y - error, y + error))
            path = f"M{across - 3:.1f} {low:.1f}h6m-3 0V{high:.1f}m-3 0h6"
            element(self.svg, "path", d=path, class_=f"error s{colour}")

    def area(self, lower: Sequence[float], upper: Sequence[float], colour: Colour, name: str) -> None:
        """What lies between two values at equal times over the whole width, as steps."""
        width = (self._x.high - self._x.low) / len(upper)
        edges = [self._x.low + n * width for n in range(len(upper) + 1)]
        there = [self._at(x, y) for n, y in enumerate(upper) for x in (edges[n], edges[n + 1])]
        back = [self._at(x, y) for n, y in reversed(list(enumerate(lower))) for x in (edges[n + 1], edges[n])]
        self._named(name, "path", d="M" + "L".join([*there, *back]) + "Z", class_=f"f{colour}")

    def column(self, place: tuple[int, int], lower: float, upper: float, colour: Colour, name: str) -> None:
        """A piece of one of the columns over the whole width; `place`: (which, of how many)."""
        which, count = place
        width = (self._right - self._left) / count
        top = self._up(upper)
        corner = {"x": self._left + which * width, "y": top}
        size = {"width": max(0.5, width - 1), "height": max(0.0, self._up(lower) - top)}
        self._named(name, "rect", **corner, **size, class_=f"f{colour}")

    def cell(self, x: tuple[float, float], y: tuple[float, float], fill: str, name: str = "") -> None:
        """A rectangle from one value to another on both axes; `fill`: a colour of SVG."""
        self._cells = True
        left, right = self._across(x[0]), self._across(x[1])
        bottom, top = self._up(y[0]), self._up(y[1])
        # A little too wide, so that no seam shows between neighbours.
        place = {"x": left, "y": top, "width": right - left + 0.4, "height": bottom - top + 0.4}
        self._named(name, "rect", **place, fill=fill, shape_rendering="crispEdges")

    def cross(self, x: float, y: float) -> None:
        """A cross at a point, with a border that shows it on any ground."""
        path = cross(self._across(x), self._up(y))
        for kind in ("halo", "cross"):
            element(self.svg, "path", d=path, class_=kind)

    def _draw_y_axis(self, *, at_left: bool) -> None:
        for value in self._y.ticks(5):
            y = self._up(value)
            element(self.svg, "line", x1=self._left, x2=self._right, y1=y, y2=y, class_="grid")
            element(self.svg, "text", self._y.label(value), x=self._left - 5, y=y + 4, class_="tick end")
        if self._y.title:
            place, kind = (0.0, "tick") if at_left else (self._right, "tick end")
            element(self.svg, "text", self._y.title, x=place, y=self._top - 12, class_=kind)

    def _draw_x_axis(self) -> None:
        bottom = self._bottom
        for value in self._x.ticks(7):
            x = self._across(value)
            element(self.svg, "line", x1=x, x2=x, y1=bottom, y2=bottom + 4, class_="axis")
            element(self.svg, "text", self._x.label(value), x=x, y=bottom + 16, class_="tick middle")
        element(self.svg, "line", x1=self._left, x2=self._right, y1=bottom, y2=bottom, class_="axis")
        element(self.svg, "text", self._x.title, x=self._right, y=bottom + 32, class_="tick end")

    def _named(self, name: str, tag: str, **attributes: object) -> None:
        drawn = element(self.svg, tag, "", **attributes)
        if name:
            element(drawn, "title", name)

    def _across(self, x: float) -> float:
        return self._left + self._x.position(x) * (self._right - self._left)

    def _up(self, y: float) -> float:
        return self._bottom - self._y.position(y) * (self._bottom - self._top)

    def _at(self, x: float, y: float) -> str:
        return f"{decimal(self._across(x))} {decimal(self._up(y))}"


def thin(points: Points, most: int) -> Points:
    """At most `most` points, in order: of each piece the lowest and the highest, so that no spike is lost."""
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
