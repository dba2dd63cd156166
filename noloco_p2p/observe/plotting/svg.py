"""SVG elements, the colours of charts, and a chart as a file of its own.

Colours are classes of the style sheet, so that a chart follows the reader's light or dark scheme. The style sheet has
no CSS variables: many viewers of SVG files do not know them. Text goes through the element tree, which escapes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

Element = ElementTree.Element
LineStyle = Literal["line", "dashed", "points", "steps", "filled"]

BLUE, RED, GREEN, PINK, ORANGE, SKY, YELLOW, GREY, PALE = range(9)
"""Colours: `sN` strokes, `fN` fills and `bN` backgrounds, `nN` writes on it."""
SERIES_COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED)
"""Those of replicas, stages and curves, which have none of their own."""
IDLE_COLOURS = (ORANGE, SKY, PINK, BLUE, YELLOW, RED)
"""Those of what a device waits for, beside GREEN while it works."""


@dataclass(frozen=True, slots=True)
class Palette:
    """The colours of a scheme, by what they are for."""

    paper: str
    card: str
    ink: str
    soft: str
    rule: str
    grid: str
    series: tuple[str, ...]
    """In the order of the colours' numbers."""
    white_text: frozenset[int]
    """The colours on which text is white; on the others it is black."""


LIGHT = Palette(
    paper="#ffffff",
    card="#f6f7f9",
    ink="#1b1f24",
    soft="#59636e",
    rule="#d5dae0",
    grid="#e3e6ea",
    series=("#0072b2", "#d55e00", "#009e73", "#b5679a", "#e69f00", "#56b4e9", "#d9c800", "#6b7480", "#c9ced4"),
    white_text=frozenset({BLUE, RED, GREEN, PINK, GREY}),
)
DARK = Palette(
    paper="#14171a",
    card="#1d2125",
    ink="#e8eaed",
    soft="#a2abb5",
    rule="#3a4149",
    grid="#2c3238",
    series=("#4aa3df", "#f0803c", "#2bbf94", "#d490bb", "#f0b429", "#8fd0f7", "#f0e442", "#8a949f", "#4a525b"),
    white_text=frozenset({PALE}),
)
MARGIN, TITLE = 14.0, 40.0
"""Around a chart in a file of its own, and above it with its title."""
CHARACTER = 6.4
"""Width of a letter of a legend, about."""
SHAPES = """
.tick, .on, .key { font-size: 11.5px; } .title { font-size: 15px; font-weight: 600; }
.end { text-anchor: end; } .middle, .on { text-anchor: middle; }
.line { fill: none; stroke-width: 1.6; stroke-linejoin: round; } .faint { stroke-width: 1; opacity: .35; }
.dashed { stroke-dasharray: 5 3; } .error { stroke-width: 1; fill: none; }
.start { stroke-width: 1.2; } .cross { stroke-width: 2; fill: none; } path.halo { stroke-width: 4; fill: none; }
"""


def stylesheet() -> str:
    """The rules for charts, for both schemes."""
    return f"{SHAPES}{_colours(LIGHT)}@media (prefers-color-scheme: dark) {{\n{_colours(DARK)}}}\n"


def _colours(palette: Palette) -> str:
    rules = [
        f".paper {{ fill: {palette.paper}; }} .halo {{ stroke: {palette.paper}; }} .title {{ fill: {palette.ink}; }}",
        f".tick, .key {{ fill: {palette.soft}; }} .axis {{ stroke: {palette.soft}; }}",
        f".grid {{ stroke: {palette.grid}; }} .start, .cross {{ stroke: {palette.ink}; }}",
    ]
    for n, colour in enumerate(palette.series):
        text = "#ffffff" if n in palette.white_text else "#111111"
        rules.append(
            f".s{n} {{ stroke: {colour}; }} .f{n} {{ fill: {colour}; }} .b{n} {{ background: {colour}; }}"
            f" .n{n} {{ fill: {text}; }}"
        )
    return "\n".join(rules) + "\n"


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
class Key:
    """One entry of a legend."""

    label: str
    colour: int
    style: LineStyle = "filled"


def document(title: str, parts: Sequence[Element], keys: Sequence[Key] = ()) -> str:
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


def _legend(svg: Element, keys: Sequence[Key], top: float, right: float) -> float:
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


def _swatch(svg: Element, key: Key, x: float, middle: float) -> None:
    if key.style == "filled":
        element(svg, "rect", x=x + 8, y=middle - 6, width=12, height=12, class_=f"f{key.colour}")
    elif key.style == "points":
        element(svg, "circle", cx=x + 13, cy=middle, r=3, class_=f"f{key.colour}")
    else:
        dashed = " dashed" if key.style == "dashed" else ""
        element(svg, "path", d=f"M{decimal(x)} {decimal(middle)}h22", class_=f"line s{key.colour}{dashed}")
