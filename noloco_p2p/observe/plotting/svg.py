"""SVG elements, their colours, and a chart as a self-contained file. All text passes through the element tree, which
escapes it.

The style sheet follows the reader's light or dark scheme. It uses no CSS variables, because many viewers of SVG files
do not support them.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from string import Template
from typing import Literal
from xml.etree import ElementTree

Element = ElementTree.Element
LineStyle = Literal["line", "dashed", "points", "steps"]

MARGIN, TITLE = 14.0, 40.0
"""Margin around a chart in its own file, and height of its title."""
CHARACTER = 6.4
"""Approximate width of a character in a legend."""

Colour = IntEnum("Colour", "BLUE RED GREEN PINK ORANGE SKY YELLOW GREY PALE INK SLATE", start=0)
"""Colours of the style sheet. Each has four classes, with N its number: `sN` is the stroke, `fN` the fill, `bN` the
background, and `nN` text upon it."""
Legend = Mapping[str, Colour]
"""What each colour means: by name, in the order in which they are shown."""
SERIES_COLOURS = (Colour.BLUE, Colour.SLATE, Colour.SKY, Colour.GREY)
"""Colours of replicas, stages and curves, given to them in this order: an accent and its tint, and two greys, because
labels beside the lines tell them apart."""
IDLE_COLOURS = (Colour.ORANGE, Colour.SKY, Colour.PINK, Colour.GREEN, Colour.YELLOW, Colour.RED)
"""Colours of the things that a device waits for; while it works, it has the accent, BLUE."""

Scheme = dict[str, str]
"""Colours by use: `paper`, `card`, `ink`, `soft`, `rule`, `grid`. Those of Colour are in _LIGHT_SERIES and
_DARK_SERIES, by number."""
LIGHT: Scheme = {"paper": "#ffffff", "card": "#f6f7f9", "ink": "#1b1f24", "soft": "#59636e"}
LIGHT |= {"rule": "#d5dae0", "grid": "#e3e6ea"}
DARK: Scheme = {"paper": "#14171a", "card": "#1d2125", "ink": "#e8eaed", "soft": "#a2abb5"}
DARK |= {"rule": "#3a4149", "grid": "#2c3238"}
_LIGHT_SERIES = ["#0072b2", "#d55e00", "#009e73", "#b5679a", "#e69f00", "#56b4e9", "#d9c800", "#6b7480"]
_LIGHT_SERIES += ["#c9ced4", "#1b1f24", "#444d56"]
_DARK_SERIES = ["#4aa3df", "#f0803c", "#2bbf94", "#d490bb", "#f0b429", "#8fd0f7", "#f0e442", "#8a949f"]
_DARK_SERIES += ["#4a525b", "#e8eaed", "#b4bcc5"]
_BRIGHT = 137.0
"""Text is black on colours at least this bright, and white on others."""

_SHAPES = """
.tick, .on, .key { font-size: 11.5px; } .title { font-size: 15px; font-weight: 600; }
.end { text-anchor: end; } .middle, .on { text-anchor: middle; }
.line { fill: none; stroke-width: 1.6; stroke-linejoin: round; } .faint { stroke-width: 1; opacity: .35; }
.strong { stroke-width: 2.2; } .dashed { stroke-dasharray: 5 3; }
.start { stroke-width: 1.2; } .cross { stroke-width: 2; fill: none; }
.leader { stroke-width: .8; opacity: .7; fill: none; }
"""
_SCHEME = """
.paper { fill: $paper; } .title { fill: $ink; } .start, .cross { stroke: $ink; }
.tick, .key { fill: $soft; } .axis { stroke: $soft; } .grid { stroke: $grid; }
"""
_COLOUR = ".s$n { stroke: $colour; } .f$n { fill: $colour; } .b$n { background: $colour; } .n$n { fill: $text; }\n"


def stylesheet() -> str:
    """The style rules for charts, in both schemes."""
    light, dark = _rules(LIGHT, _LIGHT_SERIES), _rules(DARK, _DARK_SERIES)
    return f"{_SHAPES}{light}@media (prefers-color-scheme: dark) {{{dark}}}\n"


def _rules(scheme: Scheme, series: Sequence[str]) -> str:
    rules = [Template(_SCHEME).substitute(scheme)]
    for n, colour in enumerate(series):
        red, green, blue = bytes.fromhex(colour[1:])
        text = "#111111" if 0.299 * red + 0.587 * green + 0.114 * blue >= _BRIGHT else "#ffffff"
        rules.append(Template(_COLOUR).substitute(n=n, colour=colour, text=text))
    return "".join(rules)


# --- elements ---------------------------------------------------------------------------------------------------------


def element(parent: Element | None, tag: str, text: str = "", **attributes: object) -> Element:
    """A new element, inside `parent` if there is one. `class_` is written as `class`, and `_` in names as `-`."""
    named = {name.rstrip("_").replace("_", "-"): decimal(value) for name, value in attributes.items()}
    made = Element(tag, named) if parent is None else ElementTree.SubElement(parent, tag, named)
    if text:
        made.text = text
    return made


def decimal(value: object) -> str:
    """A float with at most one decimal; anything else unchanged."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def canvas(title: str, width: float, height: float) -> Element:
    """An SVG that scales with the page and is accessible to screen readers."""
    svg = element(None, "svg", viewBox=_box(width, height), role="img", aria_label=title)
    element(svg, "title", title)
    return svg


def _box(width: float, height: float) -> str:
    return f"0 0 {decimal(width)} {decimal(height)}"


def markup(svg: Element) -> str:
    """The SVG as text, for an HTML page or a file."""
    return ElementTree.tostring(svg, encoding="unicode", short_empty_elements=True)


def document(title: str, chart: Element, legend: Legend) -> str:
    """A self-contained file: a title, the chart, a legend below it, style sheet and background."""
    chart_width, chart_height = map(float, str(chart.get("viewBox")).split()[2:])
    width = chart_width + 2 * MARGIN
    svg = canvas(title, width, 0.0)
    svg.attrib |= {"xmlns": "http://www.w3.org/2000/svg", "font-family": "system-ui, sans-serif"}
    element(svg, "style", stylesheet())
    element(svg, "rect", width="100%", height="100%", class_="paper")
    element(svg, "text", title, x=MARGIN, y=MARGIN + 12, class_="title")
    place = {"x": MARGIN, "y": TITLE, "width": chart_width, "height": chart_height}
    chart.attrib |= {name: decimal(value) for name, value in place.items()} | {"overflow": "visible"}
    svg.append(chart)
    height = _draw_legend(svg, legend, TITLE + chart_height + 8, width - MARGIN) + MARGIN
    svg.attrib |= {"width": decimal(width), "height": decimal(height), "viewBox": _box(width, height)}
    return markup(svg) + "\n"


def _draw_legend(svg: Element, legend: Legend, top: float, right: float) -> float:
    """Entries from left to right, in as many rows as needed. Returns the bottom of the last row."""
    x, y = MARGIN, top
    for label, colour in legend.items():
        # The text width is a guess, because fonts differ between readers.
        width = 28 + CHARACTER * len(label) + 14
        if x + width > right and x > MARGIN:
            x, y = MARGIN, y + 18
        element(svg, "rect", x=x + 8, y=y + 2, width=12, height=12, class_=f"f{colour}")
        element(svg, "text", label, x=x + 28, y=y + 12, class_="key")
        x += width
    return y + 18 if legend else top - 8
