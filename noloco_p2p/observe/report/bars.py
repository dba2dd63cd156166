"""SVG of horizontal bars: shares of a whole, and the life of every node."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from noloco_p2p.observe.report.chart import WIDTH, canvas, element, markup
from noloco_p2p.observe.report.chart import ticks as round_numbers
from noloco_p2p.observe.report.chart import time_ticks_unit as unit_of
from noloco_p2p.observe.report.node_history import Story

T = TypeVar("T")

LEFT, RIGHT = 74.0, 10.0
ROW, GAP = 16.0, 6.0
LABEL_CHARACTERS = 11
MOST_PIECES = 3_000
"""Of all lives together; of more, those that would lie upon one another are left out."""
NARROWEST_TOLD = 34.0
"""A piece of a bar at least so wide has its share written on it."""


def shares(title: str, rows: Sequence[tuple[str, Sequence[tuple[str, float, int]]]]) -> str:
    """One bar a row, its pieces (name, amount, colour) as shares of the row's sum."""
    height = ROW + 8
    svg = canvas(title, len(rows) * (height + GAP) + GAP)
    for n, (label, pieces) in enumerate(rows):
        top, x = GAP + n * (height + GAP), LEFT
        whole = sum(amount for _, amount, _ in pieces) or 1.0
        element(svg, "text", label[:LABEL_CHARACTERS], x=LEFT - 6, y=top + height / 2 + 4, class_="tick end")
        for name, amount, colour in pieces:
            width = amount / whole * (WIDTH - LEFT - RIGHT)
            piece = element(svg, "rect", x=x, y=top, width=width, height=height, class_=f"f{colour}")
            element(piece, "title", f"{label}: {name} {amount / whole:.1%}")
            if width >= NARROWEST_TOLD:
                at = {"x": x + width / 2, "y": top + height / 2 + 4}
                element(svg, "text", f"{amount / whole:.0%}", **at, class_=f"on n{colour}")
            x += width
    return markup(svg)


def lives(title: str, stories: Sequence[Story], whole: tuple[float, float], colours: dict[str, int]) -> str:
    """One row a node, its states by colour. A cross: the process ended without a word, or has not ended."""
    began_at, ended_at = whole
    span_s = max(ended_at - began_at, 1e-9)
    bottom = GAP + len(stories) * (ROW + GAP)
    svg = canvas(title, bottom + 34)

    def across(at: float) -> float:
        return LEFT + (at - began_at) / span_s * (WIDTH - LEFT - RIGHT - 6)

    unit_s, unit = unit_of(span_s)
    for value in round_numbers(0.0, span_s / unit_s, 7):
        x = across(began_at + value * unit_s)
        element(svg, "line", x1=x, x2=x, y1=GAP, y2=bottom, class_="grid")
        element(svg, "text", f"{value:g}", x=x, y=bottom + 14, class_="tick middle")
    element(svg, "text", f"{unit} since the start", x=WIDTH - RIGHT, y=bottom + 29, class_="tick end")
    pieces = sum(len(process.spans) + 2 for story in stories for process in story.processes)
    apart_s = 0.0 if pieces <= MOST_PIECES else 3 * len(stories) * span_s / MOST_PIECES
    for n, story in enumerate(stories):
        top = GAP + n * (ROW + GAP)
        element(svg, "text", story.name[-LABEL_CHARACTERS:], x=LEFT - 6, y=top + 12, class_="tick end")
        spans = [span for process in story.processes for span in process.spans]
        for span in apart(spans, lambda span: span.began_at, apart_s):
            x = across(span.began_at)
            width = max(0.6, across(span.ended_at) - x)
            bar = element(svg, "rect", x=x, y=top, width=width, height=ROW, class_=f"f{colours[span.state]}")
            seconds = f"{span.began_at - began_at:.0f} to {span.ended_at - began_at:.0f} s"
            element(bar, "title", f"{story.name}: {span.state}, {seconds}")
        for process in apart(story.processes, lambda process: process.began_at, apart_s):
            x = across(process.began_at)
            element(svg, "line", x1=x, x2=x, y1=top - 2, y2=top + ROW + 2, class_="start")
        killed = [process for process in story.processes if not process.ended]
        for process in apart(killed, lambda process: process.ended_at, apart_s):
            x, y = across(process.ended_at), top + ROW / 2
            cross = element(svg, "path", d=f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8", class_="cross")
            element(cross, "title", f"{story.name}: its last word at {process.ended_at - began_at:.0f} s")
    return markup(svg)


def apart(items: Sequence[T], at: Callable[[T], float], least_s: float) -> Iterator[T]:
    """Those that are at least so far from the one before that is kept."""
    before = float("-inf")
    for item in items:
        if at(item) - before >= least_s:
            before = at(item)
            yield item
