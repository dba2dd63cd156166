"""The life of every node as SVG: a row for each, its states by colour."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from noloco_p2p.observe.plotting.axes import PAGE_SIZE, RIGHT
from noloco_p2p.observe.plotting.palette import Colour
from noloco_p2p.observe.plotting.plots import BAR_GAP, BAR_LEFT
from noloco_p2p.observe.plotting.scales import Axis, time_unit
from noloco_p2p.observe.plotting.svg import Element, canvas, cross, element
from noloco_p2p.observe.report.node_history import NodeHistory

T = TypeVar("T")

ROW, BELOW = 16.0, 34.0
LABEL_CHARACTERS = 11
MOST_PIECES = 3_000
"""Of all rows together; of more, those that would lie upon one another are left out."""


def lives(
    title: str, nodes: Sequence[NodeHistory], whole: tuple[float, float], colours: Mapping[str, Colour]
) -> Element:
    """The nodes from `whole[0]` to `whole[1]`, Unix seconds.

    A stroke: a process began. A cross: its last line, without an end; it was killed, or still runs.
    """
    began_at, ended_at = whole
    unit_s, unit = time_unit(ended_at - began_at)
    time = Axis(f"{unit} since the start", 0.0, max(ended_at - began_at, 1e-9) / unit_s)
    bottom = BAR_GAP + len(nodes) * (ROW + BAR_GAP)
    svg = canvas(title, PAGE_SIZE[0], bottom + BELOW)

    def across(at: float) -> float:
        return BAR_LEFT + time.position((at - began_at) / unit_s) * (PAGE_SIZE[0] - BAR_LEFT - RIGHT - 6)

    for value in time.ticks(7):
        x = across(began_at + value * unit_s)
        element(svg, "line", x1=x, x2=x, y1=BAR_GAP, y2=bottom, class_="grid")
        element(svg, "text", f"{value:g}", x=x, y=bottom + 14, class_="tick middle")
    element(svg, "text", time.title, x=PAGE_SIZE[0] - RIGHT, y=bottom + 29, class_="tick end")
    pieces = sum(len(process.spans) + 2 for node in nodes for process in node.processes)
    apart_s = 0.0 if pieces <= MOST_PIECES else 3 * len(nodes) * (ended_at - began_at) / MOST_PIECES
    for n, node in enumerate(nodes):
        top = BAR_GAP + n * (ROW + BAR_GAP)
        element(svg, "text", node.name[-LABEL_CHARACTERS:], x=BAR_LEFT - 6, y=top + 12, class_="tick end")
        spans = [span for process in node.processes for span in process.spans]
        for span in _apart(spans, lambda span: span.began_at, apart_s):
            x = across(span.began_at)
            width = max(0.6, across(span.ended_at) - x)
            bar = element(svg, "rect", x=x, y=top, width=width, height=ROW, class_=f"f{colours[span.state]}")
            seconds = f"{span.began_at - began_at:.0f} to {span.ended_at - began_at:.0f} s"
            element(bar, "title", f"{node.name}: {span.state}, {seconds}")
        for process in _apart(node.processes, lambda process: process.began_at, apart_s):
            x = across(process.began_at)
            element(svg, "line", x1=x, x2=x, y1=top - 2, y2=top + ROW + 2, class_="start")
        unended = [process for process in node.processes if not process.ended]
        for process in _apart(unended, lambda process: process.ended_at, apart_s):
            mark = element(svg, "path", d=cross(across(process.ended_at), top + ROW / 2), class_="cross")
            element(mark, "title", f"{node.name}: its last line at {process.ended_at - began_at:.0f} s")
    return svg


def _apart(items: Sequence[T], at: Callable[[T], float], least_s: float) -> Iterator[T]:
    """Those that are at least so far from the one before that is kept."""
    before = float("-inf")
    for item in items:
        if at(item) - before >= least_s:
            before = at(item)
            yield item
