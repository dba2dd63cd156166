"""The colours of charts, and the style sheet that follows the reader's light or dark scheme.

It has no CSS variables: many viewers of SVG files do not know them.
"""

from collections.abc import Sequence
from enum import IntEnum
from string import Template

Colour = IntEnum("Colour", "BLUE RED GREEN PINK ORANGE SKY YELLOW GREY PALE", start=0)
"""What is drawn in one: `sN` strokes, `fN` fills, `bN` is a background, and `nN` is text upon it."""
SERIES_COLOURS = (Colour.BLUE, Colour.ORANGE, Colour.GREEN, Colour.PINK, Colour.SKY, Colour.RED)
"""Those of replicas, stages and curves, which have none of their own."""
IDLE_COLOURS = (Colour.ORANGE, Colour.SKY, Colour.PINK, Colour.BLUE, Colour.YELLOW, Colour.RED)
"""Those of what a device waits for, beside GREEN while it works."""

Scheme = dict[str, str]
"""Colours by what they are for; those of Colour by their number."""
LIGHT: Scheme = {"paper": "#ffffff", "card": "#f6f7f9", "ink": "#1b1f24", "soft": "#59636e"}
LIGHT |= {"rule": "#d5dae0", "grid": "#e3e6ea"}
DARK: Scheme = {"paper": "#14171a", "card": "#1d2125", "ink": "#e8eaed", "soft": "#a2abb5"}
DARK |= {"rule": "#3a4149", "grid": "#2c3238"}
_LIGHT_SERIES = ("#0072b2", "#d55e00", "#009e73", "#b5679a", "#e69f00", "#56b4e9", "#d9c800", "#6b7480", "#c9ced4")
_DARK_SERIES = ("#4aa3df", "#f0803c", "#2bbf94", "#d490bb", "#f0b429", "#8fd0f7", "#f0e442", "#8a949f", "#4a525b")
_BRIGHT = 137.0
"""Text is black on colours at least as bright, white on the others."""

_SHAPES = """
.tick, .on, .key { font-size: 11.5px; } .title { font-size: 15px; font-weight: 600; }
.end { text-anchor: end; } .middle, .on { text-anchor: middle; }
.line { fill: none; stroke-width: 1.6; stroke-linejoin: round; } .faint { stroke-width: 1; opacity: .35; }
.dashed { stroke-dasharray: 5 3; } .error { stroke-width: 1; fill: none; }
.start { stroke-width: 1.2; } .cross { stroke-width: 2; fill: none; } path.halo { stroke-width: 4; fill: none; }
"""
_SCHEME = """
.paper { fill: $paper; } .halo { stroke: $paper; } .title { fill: $ink; } .start, .cross { stroke: $ink; }
.tick, .key { fill: $soft; } .axis { stroke: $soft; } .grid { stroke: $grid; }
"""
_COLOUR = ".s$n { stroke: $colour; } .f$n { fill: $colour; } .b$n { background: $colour; } .n$n { fill: $text; }\n"


def stylesheet() -> str:
    """The rules for charts, for both schemes."""
    light, dark = _rules(LIGHT, _LIGHT_SERIES), _rules(DARK, _DARK_SERIES)
    return f"{_SHAPES}{light}@media (prefers-color-scheme: dark) {{{dark}}}\n"


def _rules(scheme: Scheme, series: Sequence[str]) -> str:
    rules = [Template(_SCHEME).substitute(scheme)]
    for n, colour in enumerate(series):
        red, green, blue = bytes.fromhex(colour[1:])
        text = "#111111" if 0.299 * red + 0.587 * green + 0.114 * blue >= _BRIGHT else "#ffffff"
        rules.append(Template(_COLOUR).substitute(n=n, colour=colour, text=text))
    return "".join(rules)
