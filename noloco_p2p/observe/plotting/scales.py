"""Axes as values: where a number lies on one, and at which round numbers it has ticks. Pure."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from noloco_p2p import humanize

Scale = Literal["linear", "log", "log2"]
"""Equal distances are equal differences; or equal factors, with ticks at powers of ten or of two."""

MOST_LOG_TICKS = 11


def tick_label(value: float) -> str:
    """A number at an axis."""
    return humanize.compact(value, 4)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a chart. On a logarithmic one both ends are above 0. One of no length reaches to the next number."""

    title: str
    low: float
    high: float
    scale: Scale = "linear"
    label: Callable[[float], str] = tick_label
    """How the number at a tick is written."""

    def position(self, value: float) -> float:
        """Where a value lies: 0 at `low`, 1 at `high`."""
        if self.scale != "linear":
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self._end - self.low)

    def value(self, position: float) -> float:
        """The value at a position."""
        if self.scale != "linear":
            return self.low * math.exp(position * math.log(self.high / self.low))
        return self.low + position * (self._end - self.low)

    @property
    def _end(self) -> float:
        return self.high if self.high > self.low else self.low + max(1.0, abs(self.low))

    def holds(self, value: float) -> bool:
        """It lies between the ends."""
        return showable(value, self.scale) and -1e-9 <= self.position(value) <= 1 + 1e-9

    def ticks(self, about: int) -> list[float]:
        """Round numbers between the ends, about as many as asked for."""
        if self.scale == "linear":
            return ticks(self.low, self._end, about)
        return _log_ticks(self.low, self.high, 2 if self.scale == "log2" else 10)


def fitted(title: str, values: Iterable[float], scale: Scale = "linear", *, from_zero: bool = False) -> Axis:
    """The axis that these values need, with a margin of a twentieth. What it cannot show is left out."""
    shown = [value for value in values if showable(value, scale)] or [1.0]
    low, high = min(shown), max(shown)
    if scale == "linear":
        margin = (high - low or abs(high) or 1.0) * 0.05
        return Axis(title, 0.0 if from_zero else low - margin, high + margin)
    factor = (high / low) ** 0.05 if high > low else 2.0
    label = humanize.figure if scale == "log2" else tick_label
    return Axis(title, low / factor, high * factor, scale, label)


def showable(value: float, scale: Scale) -> bool:
    """It has a place on an axis of this kind: no logarithm of 0."""
    return math.isfinite(value) and (scale == "linear" or value > 0)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from `low` to `high`, about as many as asked for: 1, 2 or 5 times a power of ten apart."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    rough = span / about
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def _log_ticks(low: float, high: float, base: int) -> list[float]:
    """Powers of the base, and multiples of them where there are too few; equal steps over less than a power."""
    powers = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    found: list[float] = []
    for multiples in ((1,), (1, 2, 5), (1, 2, 3, 4, 5, 7)) if base == 10 else ((1,),):
        every = [multiple * float(base) ** power for power in powers for multiple in multiples]
        found = [value for value in every if low <= value <= high]
        if len(found) > 2:
            return found[:: math.ceil(len(found) / MOST_LOG_TICKS)]
    return found if base == 2 and found else ticks(low, high, 4)


def time_unit(span_s: float) -> tuple[float, str]:
    """(seconds, name) of the unit for a time of this length."""
    for seconds, name in ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "minutes")):
        if span_s >= 2 * seconds:
            return seconds, name
    return 1.0, "seconds"
