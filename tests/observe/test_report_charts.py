"""The charts of `noloco report`: what is drawn where, computed by hand for invented journals."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from journal_lines import line

from noloco_p2p.io.telemetry.journal import NAME
from noloco_p2p.observe.plotting.axes import LEFT, MAX_POINTS, PAGE_SIZE, RIGHT, TOP
from noloco_p2p.observe.plotting.labels import label_width
from noloco_p2p.observe.plotting.plots import BAR_LEFT
from noloco_p2p.observe.plotting.svg import SERIES_COLOURS, Colour
from noloco_p2p.observe.report import charts, recorded_run
from noloco_p2p.observe.report.charts import BINS, MAX_ROWS, NATS, ChartLine, Panel, RunCharts

BOTTOM = PAGE_SIZE[1] - 36.0
"""The y of 0 in a chart of the page."""
Box = tuple[float, float, float, float]


def charts_of(home: Path, **journals: Sequence[bytes]) -> RunCharts:
    """The charts of a run with these nodes; `_` in a name stands for `-`."""
    for name, lines in journals.items():
        (home / name.replace("_", "-")).mkdir()
        (home / name.replace("_", "-") / NAME).write_bytes(b"".join(lines))
    (run,) = recorded_run.read_runs([home]).values()
    return RunCharts(run)


def drawn(panel: Panel) -> ElementTree.Element:
    return ElementTree.fromstring(str(panel.svg))


def boxes(panel: Panel) -> dict[str, list[Box]]:
    """By name: x, y, width and height of the rectangles."""
    found: dict[str, list[Box]] = {}
    for one in drawn(panel).findall(".//rect"):
        x, y, width, height = (float(one.get(side, "")) for side in ("x", "y", "width", "height"))
        found.setdefault(one.findtext("title", ""), []).append((x, y, width, height))
    return found


def legend(panel: Panel) -> list[tuple[str, Colour]]:
    return list(panel.legend.items())


def labels(panel: Panel) -> list[tuple[str, Colour]]:
    """What stands beside the lines, and the colour of the stroke to each."""
    found = [(one.findtext("text", ""), one.find("path")) for one in drawn(panel).findall(".//g[@class='label']")]
    return [(text, Colour(int(path.get("class", "").split("s")[-1]))) for text, path in found if path is not None]


def about(*box: float) -> object:
    return pytest.approx(box, abs=0.11)


def across(share: float, left: float = LEFT) -> float:
    """The x of a share of the time axis."""
    return left + share * (PAGE_SIZE[0] - RIGHT - left)


# --- by step ----------------------------------------------------------------------------------------------------------


def losses(replica: int, steps: int = 2) -> list[bytes]:
    """A node of stage 0 that loses half a nat per step, and evaluates once."""
    did = [line("progress", 10.0 * s, stage=0, step=s, loss=5.0 + replica - s / 2) for s in range(1, steps + 1)]
    return [line("start", 0.0, stage=0), *did, line("evaluation", 99.0, step=2, loss=4.0 + replica)]


def test_every_replica_has_a_curve_and_the_validation_is_their_mean(tmp_path: Path) -> None:
    panel = charts_of(tmp_path, n0_0=losses(0), n0_1=losses(1)).loss()
    assert (panel.title, panel.note) == ("Loss", NATS)
    assert labels(panel) == [("n0-0", SERIES_COLOURS[0]), ("n0-1", SERIES_COLOURS[1]), ("validation", Colour.INK)]
    assert legend(panel) == []
    lines = {one.findtext("title"): one for one in drawn(panel).findall(".//path[@data-v]")}
    assert {name: one.get("data-v") for name, one in lines.items()} == {"n0-0": "4.5 4", "n0-1": "5.5 5"}
    assert lines["n0-1"].get("class") == f"line s{SERIES_COLOURS[1]}"
    single, marked = drawn(panel).findall(".//circle[@data-v='4.5']")
    assert (single.attrib.pop("data-l"), marked.attrib.pop("data-l")) == ("validation", "")
    assert single.attrib == marked.attrib, "one point is a dot"
    assert single.get("class") == f"f{Colour.INK}"


@pytest.mark.parametrize(("every", "loss"), [(5, 3.0), ("a line", 3.0), (50, 3.5)])
def test_the_validation_loss_is_that_of_the_newest_evaluations(every: object, loss: float, tmp_path: Path) -> None:
    paused, ended = losses(0), [*losses(1), line("evaluation", 150.0, step=8, loss=3.0)]
    charts_of(tmp_path, n0_0=paused, n0_1=ended)
    (run,) = recorded_run.read_runs([tmp_path]).values()
    assert replace(run, manifest={"steps": 60, "evaluation": {"every_steps": every}}).validation_loss == loss


@pytest.mark.parametrize(("replicas", "few"), [(len(SERIES_COLOURS), True), (len(SERIES_COLOURS) + 1, False)])
def test_many_replicas_share_a_colour(replicas: int, few: bool, tmp_path: Path) -> None:
    panel = charts_of(tmp_path, **{f"n{replica}": losses(replica) for replica in range(replicas)}).loss()
    keys = [(f"n{replica}", SERIES_COLOURS[replica]) for replica in range(replicas)] if few else []
    assert labels(panel) == [*(keys or [(f"{replicas} replicas", Colour.BLUE)]), ("validation", Colour.INK)]
    kind = "" if few else " faint"
    classes = [one.get("class") for one in drawn(panel).findall(".//path[@data-v]")]
    assert classes == [f"line s{SERIES_COLOURS[r] if few else Colour.BLUE}{kind}" for r in range(replicas)]


def test_a_node_that_has_moved_away_keeps_the_curve_of_its_time_at_stage_0(tmp_path: Path) -> None:
    moved = [*losses(0), line("stage", 100.0, stage=1), line("progress", 110.0, stage=1, step=3, final_loss=4.0)]
    found = charts_of(tmp_path, a=moved, b=losses(1))
    assert [text for text, _ in labels(found.loss())] == ["a", "b", "validation"]
    assert found.mean("loss") == [(1.0, 5.0), (2.0, 4.5)]
    assert found.mean("validation") == [(2.0, 4.5)]


def test_the_mean_of_a_long_curve_has_a_bounded_number_of_points(tmp_path: Path) -> None:
    found = charts_of(tmp_path, a=losses(0, BINS), b=losses(1, BINS))
    assert found.mean("loss") == [(s, 5.5 - s / 2) for s in range(1, BINS + 1)]
    (tmp_path / "long").mkdir()
    found = charts_of(tmp_path / "long", a=losses(0, 4 * BINS), b=losses(1, 4 * BINS))
    points = found.mean("loss")
    assert len(points) == BINS
    assert points[0] == pytest.approx((2.0, 5.5 - (1 + 2 + 3) / 3 / 2)), "steps 1 to 3 are in the first bin"


def test_curves_have_axes_that_fit(tmp_path: Path) -> None:
    assert charts.by_step("none", []).get("data-log") is None
    curve = [
        ChartLine("a", Colour.BLUE, [(0.0, 1.0), (40.0, 3.0)]),
        ChartLine("b", Colour.RED, [(0.0, 2.0), (80.0, 1.0), (90.0, 1.5)]),
    ]
    svg = charts.by_step("some", curve)
    assert svg.get("data-x", "").split()[2:] == ["0.0", "90.0"]
    assert [float(end) for end in svg.get("data-y", "").split()[2:]] == pytest.approx([0.0, 3.1])
    assert [float(end) for end in svg.get("data-log", "").split()] == pytest.approx([3**-0.05, 3**1.05])
    low = [float(end) for end in charts.by_step("some", curve, from_zero=False).get("data-y", "").split()[2:]]
    assert low == pytest.approx([0.9, 3.1])
    reaches_0 = charts.by_step("some", [*curve, ChartLine("c", Colour.SKY, [(0.0, 0.0)])])
    assert reaches_0.get("data-log") is None, "0 has no logarithm"


def test_of_very_many_pieces_the_longest_are_drawn_with_a_bounded_number_of_points() -> None:
    short = [ChartLine(f"s{n:03}", Colour.BLUE, [(1.0, float(n)), (2.0, 1.0)]) for n in range(charts.MAX_PIECES)]
    long = ChartLine("a", Colour.RED, [(float(s), 1.0 + s % 7) for s in range(1, 1001)])
    paths = [*charts.by_step("many", [*short, long]).iter("path")]
    assert len(paths) == charts.MAX_PIECES
    assert len(paths[0].get("data-v", "").split()) <= charts.ALL_POINTS // charts.MAX_PIECES
    (alone,) = charts.by_step("one", [long]).iter("path")
    assert MAX_POINTS / 2 < len(alone.get("data-v", "").split()) <= MAX_POINTS


# --- over time --------------------------------------------------------------------------------------------------------


def test_shares_of_the_time_add_up_to_that_of_training(tmp_path: Path) -> None:
    counted = {"device_s": 4.0, "idle_s": {"partner": 2.0, "gradients": 1.0}}
    did = [line("state", 2.0, state="training"), line("progress", 12.0, stage=0, step=1, **counted)]
    panel = charts_of(tmp_path, a=[line("start", 0.0, stage=0), *did]).time()
    wide = PAGE_SIZE[0] - RIGHT - BAR_LEFT
    assert {name: found[0][2] for name, found in boxes(panel).items()} == {
        "stage 0: device works 40.0 %": pytest.approx(0.4 * wide, abs=0.11),
        "stage 0: waits: partner 20.0 %": pytest.approx(0.2 * wide, abs=0.11),
        "stage 0: waits: gradients 10.0 %": pytest.approx(0.1 * wide, abs=0.11),
        "stage 0: the rest 30.0 %": pytest.approx(0.3 * wide, abs=0.11),
    }
    assert [label for label, _ in legend(panel)][1:3] == ["waits: partner", "waits: gradients"], "longest first"


def test_rounds_are_stacked_where_they_ended(tmp_path: Path) -> None:
    """600 s, so a column is 12 s wide: two rounds end in the fourth, and four more in the last."""
    did = [
        line("state", 0.0, state="training"),
        line("progress", 40.0, stage=0, step=1, rounds={"alone": 1, "partner": 1}),
        line("progress", 600.0, stage=0, step=9, rounds={"alone": 1, "partner": 4, "odd": 1}),
    ]
    panel = charts_of(tmp_path, a=[line("start", 0.0, stage=0), *did]).rounds()
    found, one = boxes(panel), (BOTTOM - TOP) / (4 * 1.05)
    column = across(1 / 50) - LEFT
    assert found["partner: 1"] == [about(LEFT + 3.05 * column, BOTTOM - one, 0.9 * column, one)]
    assert found["alone: 1"] == [about(LEFT + 3.05 * column, BOTTOM - 2 * one, 0.9 * column, one)]
    assert found["partner: 3"] == [about(LEFT + 49.05 * column, BOTTOM - 3 * one, 0.9 * column, 3 * one)]
    assert found["odd: 1"] == [about(LEFT + 49.05 * column, BOTTOM - 4 * one, 0.9 * column, one)]
    assert legend(panel) == [("partner", Colour.BLUE), ("alone", Colour.RED), ("odd", Colour.GREY)]


def test_the_life_of_each_node_is_a_row_in_minutes_since_training_began(tmp_path: Path) -> None:
    """From minute 1 to minute 11. The second node waited before, was killed in minute 6, and came back in minute 9."""
    first = [line("start", 0.0, stage=0), line("state", 60.0, state="training"), line("state", 360.0, state="paused")]
    early = [line("start", 0.0, stage=0), line("state", 30.0, state="waiting"), line("progress", 420.0, stage=0)]
    again = [line("start", 0.0, stage=0), line("progress", 60.0, stage=0, state="training")]
    late = [one.replace(b"18000000", b"18000006") for one in again]
    panel = charts_of(tmp_path, a=[*first, line("end", 660.0)], b=[*early, *late]).lives()
    tall, minute = 22.0, across(0.1, BAR_LEFT) - BAR_LEFT
    assert "Training began 1 min after the first node started." in panel.note
    assert "not shown" not in panel.note
    (box,) = boxes(panel)["a: training, 0 to 300 s"]
    assert box == about(BAR_LEFT, TOP + 0.14 * tall, 5 * minute, 0.72 * tall)
    assert boxes(panel)["a: paused, 300 to 600 s"] == [
        about(BAR_LEFT + 5 * minute, TOP + 0.14 * tall, 5 * minute, 0.72 * tall)
    ]
    assert boxes(panel)["b: waiting, 0 to 360 s"] == [about(BAR_LEFT, TOP + 1.14 * tall, 6 * minute, 0.72 * tall)]
    assert set(boxes(panel)) == {
        "a: training, 0 to 300 s",
        "a: paused, 300 to 600 s",
        "b: waiting, 0 to 360 s",
        "b: starting, 540 to 600 s",
        "b: training, 600 to 600 s",
    }, "not what was over before"
    svg = drawn(panel)
    assert float(svg.get("viewBox", "").split()[3]) == 2 * tall + 46
    (stroke,) = svg.findall(".//line[@class='start']")
    assert float(stroke.get("x1", "")) == pytest.approx(BAR_LEFT + 9 * minute, abs=0.11), "b starts again"
    crosses = {one.findtext("title"): one.get("d", "") for one in svg.findall(".//path[@class='cross']")}
    assert list(crosses) == ["b: last line at 360 s", "b: last line at 600 s"]
    place = crosses["b: last line at 360 s"].removeprefix("M").partition("l")[0].split()
    assert [float(end) + 4 for end in place] == about(BAR_LEFT + 6 * minute, TOP + 1.5 * tall)
    assert [label for label, _ in legend(panel)] == ["training", "paused", "waiting", "starting"]


def test_names_are_short_and_rows_few(tmp_path: Path) -> None:
    lives = {f"a_long_name_{n:03}": [line("start", 0.0, stage=0), line("end", 9.0)] for n in range(MAX_ROWS + 2)}
    panel = charts_of(tmp_path, **lives).lives()
    names = [one.text for one in drawn(panel).findall(".//text[@class='tick end']")]
    assert [name for name in names if name and name.endswith("000")] == ["ng-name-000"]
    assert panel.note.endswith(" Nodes not shown: 2.")
    assert "Training began" not in panel.note


def test_nodes_are_stacked_by_state_until_they_leave(tmp_path: Path) -> None:
    """Two nodes train for the first half of the time; then one is paused, and the other one leaves."""
    did = [line("start", 0.0, stage=0), line("state", 0.0, state="training")]
    paused = [*did, line("state", 75.0, state="paused"), line("end", 150.0)]
    panel = charts_of(tmp_path, a=paused, b=[*did, line("state", 75.0, state="left"), line("end", 150.0)]).membership()
    assert legend(panel) == [("training", Colour.BLUE), ("paused", Colour.PINK)]
    areas = {one.findtext("title"): one.get("d", "") for one in drawn(panel).findall(".//path")}
    one, half = (BOTTOM - TOP) / (2 * 1.05), across(0.5)

    def heights(name: str) -> list[tuple[float, float]]:
        """The upper edge's corners at the two ends and around the middle, in nodes."""
        corners = [tuple(map(float, place.split())) for place in areas[name].strip("MZ").split("L")]
        upper = corners[: len(corners) // 2]
        return [
            ((BOTTOM - y) / one, x)
            for x, y in (upper[0], upper[len(upper) // 2 - 1], upper[len(upper) // 2], upper[-1])
        ]

    assert heights("training") == [about(2, LEFT), about(2, half), about(0, half), about(0, across(1.0))]
    assert heights("paused") == [about(2, LEFT), about(2, half), about(1, half), about(1, across(1.0))]


def test_lines_over_time_are_in_the_unit_that_suits_them() -> None:
    points = [(0.0, 10.0), (300.0, 20.0)], [(0.0, 40.0), (600.0, 0.0)]
    svg = charts.over_time("t", [ChartLine("a", Colour.BLUE, points[0]), ChartLine("b", Colour.RED, points[1])], 600.0)
    assert svg.get("data-unit") == "minutes since training began"
    assert svg.get("data-x", "").split()[2:] == ["0.0", "10.0"]
    assert [float(end) for end in svg.get("data-y", "").split()[2:]] == [0.0, 42.0]
    below, top = svg.iter("path")
    assert (below.findtext("title"), top.findtext("title")) == ("b", "a"), "the first is on top"
    assert top.get("d") == f"M{across(0):.0f} {BOTTOM - 10 / 42 * (BOTTOM - TOP):.1f}L{across(0.5):.0f} " + (
        f"{BOTTOM - 20 / 42 * (BOTTOM - TOP):.1f}"
    )


def test_only_several_lines_need_labels(tmp_path: Path) -> None:
    found = charts_of(tmp_path, a=losses(0))
    assert labels(found.throughput()) == []
    assert sorted(labels(found.bytes())) == [("received", Colour.BLUE), ("sent", Colour.SLATE)]


def test_lines_of_a_stage_share_a_label_in_the_middle_of_those_that_reach_its_end() -> None:
    ends = [(100.0, 1.0), (100.0, 3.0), (50.0, 9.0)]
    lines = [ChartLine(f"n{n}", Colour.BLUE, [(0.0, 0.0), end], "stage 0") for n, end in enumerate(ends)]
    (group,) = charts.by_step("some", lines).findall(".//g[@class='label']")
    x, y = map(float, group.findall("path")[0].get("d", "")[1:].partition("L")[0].split())
    assert x == PAGE_SIZE[0] - RIGHT - label_width(["stage 0"])
    assert y == pytest.approx(BOTTOM - 2.0 / (9.0 * 1.05) * (BOTTOM - TOP), abs=0.5)


def test_of_a_long_label_the_end_is_shown() -> None:
    lines = [ChartLine(name, Colour.BLUE, [(0.0, 0.0), (1.0, 1.0)], name) for name in ("x" * 300 + "-1", "b")]
    svg = charts.by_step("some", lines)
    texts = [group.findtext("text", "") for group in svg.findall(".//g[@class='label']")]
    assert texts[0] == "b"
    assert texts[1].endswith("xx-1")
    assert 10 < len(texts[1]) < 25
    assert float(svg.get("data-x", "").split()[1]) > PAGE_SIZE[0] / 2


def test_the_learning_rate_is_that_of_the_node_that_recorded_it_most_often(tmp_path: Path) -> None:
    lives = {
        name: [line("start", 0.0, stage=0), *(line("progress", s, stage=0, step=s, learning_rate=rate) for s in steps)]
        for name, rate, steps in (("a", 0.1, (1.0,)), ("b", 0.2, (1.0, 2.0, 3.0)), ("c", 0.3, (1.0, 2.0)))
    }
    (path,) = drawn(charts_of(tmp_path, **lives).learning_rate()).findall(".//path[@data-v]")
    assert path.get("data-v") == "0.2 0.2 0.2"
