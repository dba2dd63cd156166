"""Charts as SVG files: well-formed, equal for equal figures, and complete."""

import itertools
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.observe.plotting.axes import Axis, Scale, fitted, thin, ticks
from noloco_p2p.observe.plotting.labels import GAP, spread
from noloco_p2p.observe.plotting.plots import Bars, Chart, Curve, Plot, steps, svg
from noloco_p2p.observe.plotting.svg import CHARACTER, SERIES_COLOURS, Colour

NAME = "{http://www.w3.org/2000/svg}"
CURVE = Curve("a < b", [(1, 1), (2, 2), (4, 3)])
PLOT = Plot("plot", "Plot & title", ("x", "y"), [CURVE], ("log2", "log"))


def drawn(chart: Chart, tag: str, kind: str = "") -> list[ElementTree.Element]:
    """The elements with this tag and class."""
    found = ElementTree.fromstring(svg(chart)).iter(NAME + tag)
    return [each for each in found if kind in each.get("class", "").split() or not kind]


def test_a_chart_is_self_contained_and_follows_the_readers_colour_scheme() -> None:
    text = svg(PLOT)
    assert text == svg(PLOT)
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"url\(|@import|href|var\(", text)
    assert text.count("//") == 1, "only the namespace"
    root = ElementTree.fromstring(text)
    assert root.get("aria-label") == root.findtext(NAME + "title") == PLOT.title
    assert {*PLOT.axes, CURVE.label} <= {*root.itertext()}


def test_a_curve_has_its_line_and_its_points() -> None:
    assert len(drawn(PLOT, "circle")) == 3
    assert len(drawn(PLOT, "path", "line")) == 1
    dashed = Plot("d", "D", ("x", "y"), [Curve("d", [(1, 1), (2, math.nan)], "dashed")])
    assert len(drawn(dashed, "circle")) == 1, "NaN is left out, and a single point is a dot"


def test_several_curves_have_their_names_beside_them_and_no_legend() -> None:
    ends = [3.0, 3.1, 9.0]
    plot = Plot("p", "P", ("x", "y"), [Curve(f"curve {end}", [(0, 5.0), (1, end)]) for end in ends])
    labels = [group.find(NAME + "text") for group in drawn(plot, "g", "label")]
    assert [label.text for label in labels if label is not None] == [f"curve {end}" for end in ends]
    above = [float(label.get("y", "")) for label in labels if label is not None]
    assert above[2] < above[1] < above[0]
    assert above[0] - above[1] >= GAP - 0.1
    colours = [each.get("class", "").split()[1] for each in drawn(plot, "path", "line")]
    leaders = [each.get("class", "").split()[1] for each in drawn(plot, "path", "leader")]
    assert colours == leaders == [f"s{colour}" for colour in SERIES_COLOURS[:3]]
    left = [float(label.get("x", "")) for label in labels if label is not None]
    wide = float(ElementTree.fromstring(svg(plot)).get("width", ""))
    assert max(left) + CHARACTER * len("curve 3.0") < wide


@given(st.lists(st.floats(-50, 250), max_size=30), st.floats(1, 20))
def test_labels_are_apart_in_order_and_within_the_chart(wanted: list[float], gap: float) -> None:
    found = spread(wanted, gap, 0.0, 200.0)
    order = sorted(range(len(wanted)), key=lambda n: (wanted[n], found[n]))
    least = min(gap, 200.0 / max(1, len(wanted) - 1))
    assert all(found[after] - found[before] >= least - 1e-6 for before, after in itertools.pairwise(order))
    assert all(-1e-6 <= place <= 200 + 1e-6 for place in found)


def test_labels_move_no_further_than_they_must() -> None:
    assert spread([150.0, 20.0], 13.0, 0.0, 200.0) == [150.0, 20.0]
    assert spread([50.0, 50.0, 120.0], 10.0, 0.0, 200.0) == [45.0, 55.0, 120.0]
    assert spread([199.0, 199.0], 10.0, 0.0, 200.0) == [190.0, 200.0]
    assert spread([], 10.0, 0.0, 200.0) == []


def test_all_of_many_points_are_drawn() -> None:
    many = Curve("many", [(n, n % 7) for n in range(1_000)], "points")
    assert len(drawn(Plot("m", "M", ("x", "y"), [many]), "circle")) == 1_000


def test_bars_are_divided_into_shares_and_have_one_legend() -> None:
    chart = Bars(
        "bars",
        "Bars",
        [("one", [("a", 1.0, Colour.BLUE), ("b", 3.0, Colour.RED)]), ("none", [("a", 0.0, Colour.BLUE)])],
    )
    assert [each.text for each in drawn(chart, "text", "on")] == ["25%", "75%"]
    assert [each.text for each in drawn(chart, "text", "key")] == ["a", "b"]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 10.0, [0, 2, 4, 6, 8, 10]),
        (0.0, 0.0, [0.0]),
        (2.1, 3.9, [2.5, 3.0, 3.5]),
        (-1.0, 1.0, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, 5) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("low", "high", "scale", "expected"),
    [
        (0.9, 1100.0, "log", [1, 10, 100, 1000]),
        (0.9, 12.0, "log", [1, 2, 5, 10]),
        (3.1, 3.9, "log", [3.2, 3.4, 3.6, 3.8]),
        (1.9, 8.5, "log2", [2, 4, 8]),
    ],
)
def test_logarithmic_ticks_are_round_numbers(low: float, high: float, scale: Scale, expected: list[float]) -> None:
    assert Axis("", low, high, scale).ticks(5) == pytest.approx(expected)


@pytest.mark.parametrize("scale", ["linear", "log", "log2"])
@pytest.mark.parametrize("values", [[1.0, 5.0], [3.0], [0.0], [], [math.inf, 2.0, math.nan]])
def test_an_axis_covers_its_values(values: list[float], scale: Scale) -> None:
    axis = fitted("", values, scale)
    assert axis.low < axis.high
    assert all(axis.holds(value) for value in values if math.isfinite(value) and (value > 0 or scale == "linear"))
    assert axis.position(axis.value(0.3)) == pytest.approx(0.3)
    assert axis.ticks(5)


def test_steps_hold_until_the_next_point() -> None:
    assert steps([(0, 1), (2, 5), (3, 4)]) == [(0, 1), (2, 1), (2, 5), (3, 5), (3, 4)]


def test_thinning_keeps_both_ends_of_every_spike() -> None:
    curve = [(float(n), 0.0) for n in range(10_000)]
    curve[1_234], curve[7_777] = (1_234.0, 50.0), (7_777.0, -50.0)
    thinned = [*thin(curve, 400)]
    assert len(thinned) <= 400
    assert thinned == sorted(thinned)
    assert (1_234.0, 50.0) in thinned
    assert (7_777.0, -50.0) in thinned
