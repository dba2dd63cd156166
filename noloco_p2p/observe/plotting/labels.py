"""Names of lines, beside their right ends, moved apart as far as needed. The script of the report's page moves them
along when it redraws the lines."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from noloco_p2p.observe.plotting.svg import CHARACTER, Colour, Element, decimal, element

GAP, LEADER = 13.0, 14.0
"""Least distance between the middles of two labels, and length of the stroke from the axes' right edge to a label."""
NEAR = 10.0
"""Lines of one name that end within this distance of the rightmost end share a label at the middle of their ends."""


class LineEnd(NamedTuple):
    """Where a line ends, and what it is called."""

    label: str
    colour: Colour
    x: float
    y: float


def label_width(labels: Sequence[str], most: float = math.inf) -> float:
    """The width that labels take to the right of the axes, at most `most`; 0 without any."""
    return min(LEADER + CHARACTER * max(map(len, labels)), most) if labels else 0.0


def draw_labels(svg: Element, ends: Sequence[LineEnd], right: float, top: float, bottom: float) -> None:
    """Write each name once, to the right of `right`, with a thin stroke to its line."""
    found = []
    for label in dict.fromkeys(end.label for end in ends):
        own = [end for end in ends if end.label == label]
        x = max(end.x for end in own)
        near = [end.y for end in own if end.x >= x - NEAR]
        found.append(LineEnd(label, own[0].colour, x, fmean(near)))
    for end, y in zip(found, spread([end.y for end in found], GAP, top, bottom), strict=True):
        group = element(svg, "g", class_="label", data_l=end.label)
        path = f"M{decimal(end.x)} {decimal(end.y)}L{decimal(right + LEADER - 3)} {decimal(y)}"
        element(group, "path", d=path, class_=f"leader s{end.colour}")
        room = int((float(svg.get("viewBox", "").split()[2]) - right - LEADER) / CHARACTER)
        element(group, "text", end.label[-room:], x=right + LEADER, y=y + 4, class_="key")


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The positions nearest to those wanted (by least squares) in the same order, at least `gap` apart, and from `low`
    to `high`; closer together if they would not fit."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    gap = min(gap, (high - low) / max(1, len(order) - 1))
    groups: list[list[float]] = []  # neighbours that touch each other: where each wants its first one to be
    for place, index in enumerate(order):
        groups.append([wanted[index] - place * gap])
        while len(groups) > 1 and fmean(groups[-2]) > fmean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    firsts = [fmean(group) for group in groups for _ in group]
    highest = high - (len(order) - 1) * gap
    found = {index: min(max(firsts[place], low), highest) + place * gap for place, index in enumerate(order)}
    return [found[index] for index in range(len(wanted))]
