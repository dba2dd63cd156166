"""SVG elements, and a chart as a file of its own. Text goes through the element tree, which escapes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

from noloco_p2p.observe.plotting.palette import Colour, stylesheet

Element = ElementTree.Element
LineStyle = Literal["line", "dashed", "points", "steps", "filled"]

MARGIN, TITLE = 14.0, 40.0
"""Around a chart in a file of its own, and above it with its title."""
CHARACTER = 6.4
"""Width of a letter of a legend, about."""


def element(parent: Element | None, tag: str, text: str = "", **attributes: object) -> Element:
    """An element below `parent`; `class_` is written as `class`, and `_` in names as `-`."""
    named = {name.rstrip("_").replace("_", "-"): decimal(value) for name, value in attributes.items()}
    made = Element(tag, named) if parent is None else ElementTree.SubElement(parent, tag, named)
    if text:
        made.text = text
    return made


def cross(x: float, y: float) -> str:
    """The path of a cross around a point."""
    return f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"


def decimal(value: object) -> str:
    """A float with one digit behind the point at most, anything else as it is."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def canvas(title: str, width: float, height: float) -> Element:
    """An SVG that scales with the page and is read out to those who cannot see it."""
    svg = element(None, "svg", viewBox=_box(width, height), role="img", aria_label=title)
    element(svg, "title", title)
    return svg


def _box(width: float, height: float) -> str:
    return f"0 0 {decimal(width)} {decimal(height)}"


def markup(svg: Element) -> str:
    """The SVG as text, for a page of HTML or for a file."""
    return ElementTree.tostring(svg, encoding="unicode", short_empty_elements=True)


@dataclass(frozen=True, slots=True)
class LegendKey:
    """One entry of a legend."""

    label: str
    colour: Colour
    style: LineStyle = "filled"


def document(title: str, parts: Sequence[Element], keys: Sequence[LegendKey] = ()) -> str:
    """A file of its own: a title, charts side by side, a legend below. It brings its style sheet and background."""
    sizes = [tuple(map(float, str(part.get("viewBox")).split()[2:])) for part in parts]
    width, chart_height = sum(size[0] for size in sizes) + 2 * MARGIN, max(size[1] for size in sizes)
    svg = canvas(title, width, 0.0)
    svg.attrib |= {"xmlns": "http://www.w3.org/2000/svg", "font-family": "system-ui, sans-serif"}
    element(svg, "style", stylesheet())
    element(svg, "rect", width="100%", height="100%", class_="paper")
    element(svg, "text", title, x=MARGIN, y=MARGIN + 12, class_="title")
    left = MARGIN
    for part, (part_width, part_height) in zip(parts, sizes, strict=True):
        place = {"x": left, "y": TITLE, "width": part_width, "height": part_height}
        part.attrib |= {name: decimal(value) for name, value in place.items()} | {"overflow": "visible"}
        svg.append(part)
        left += part_width
    height = _legend(svg, keys, TITLE + chart_height + 8, width - MARGIN) + MARGIN
    svg.attrib |= {"width": decimal(width), "height": decimal(height), "viewBox": _box(width, height)}
    return markup(svg) + "\n"


def _legend(svg: Element, keys: Sequence[LegendKey], top: float, right: float) -> float:
    """Entries from left to right, in as many rows as they need; returns where the last row ends."""
    x, y = MARGIN, top
    for key in keys:
        # The text's width is a guess: fonts differ from reader to reader.
        width = 28 + CHARACTER * len(key.label) + 14
        if x + width > right and x > MARGIN:
            x, y = MARGIN, y + 18
        _swatch(svg, key, x, y + 8)
        element(svg, "text", key.label, x=x + 28, y=y + 12, class_="key")
        x += width
    return y + 18 if keys else top - 8


def _swatch(svg: Element, key: LegendKey, x: float, middle: float) -> None:
    if key.style == "filled":
        element(svg, "rect", x=x + 8, y=middle - 6, width=12, height=12, class_=f"f{key.colour}")
    elif key.style == "points":
        element(svg, "circle", cx=x + 13, cy=middle, r=3, class_=f"f{key.colour}")
    else:
        dashed = " dashed" if key.style == "dashed" else ""
        element(svg, "path", d=f"M{decimal(x)} {decimal(middle)}h22", class_=f"line s{key.colour}{dashed}")
