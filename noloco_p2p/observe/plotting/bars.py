"""Horizontal bars as SVG: amounts that make up a whole."""

from collections.abc import Sequence

from noloco_p2p import humanize
from noloco_p2p.observe.plotting.axes import PAGE_SIZE, RIGHT
from noloco_p2p.observe.plotting.palette import Colour
from noloco_p2p.observe.plotting.svg import CHARACTER, Element, canvas, element

LEFT = 74.0
BAR_HEIGHT, GAP = 24.0, 6.0
NARROWEST_LABELLED = 34.0
"""A piece of a bar at least as wide has its share written on it."""

Piece = tuple[str, float, Colour]
"""(name, amount, colour)."""
Row = tuple[str, Sequence[Piece]]
"""(label, pieces)."""


def bars(title: str, rows: Sequence[Row], *, width: float = PAGE_SIZE[0], left: float = LEFT) -> Element:
    """One bar a row as wide as the others, its pieces as shares of the row's sum."""
    svg = canvas(title, width, len(rows) * (BAR_HEIGHT + GAP) + GAP)
    for n, (label, pieces) in enumerate(rows):
        top, x = GAP + n * (BAR_HEIGHT + GAP), left
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
