"""Sums, counts and means per bin of a span of time. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from noloco_p2p.observe.plotting.axes import Points


class Increment(NamedTuple):
    """An addition to a count between two moments."""

    began_at: float
    ended_at: float
    amount: float


class TimeBins:
    """A span of time in `count` equal bins. Events outside the span count in the first or the last bin."""

    def __init__(self, began_at: float, ended_at: float, count: int) -> None:
        self._began_at = began_at
        self._width_s = max(ended_at - began_at, 1e-9) / count
        self._count = count

    def rates(self, increments: Iterable[Increment]) -> Points:
        """(seconds since the start, amount per second) for each bin. An increment is spread evenly over its time."""
        sums = [0.0] * self._count
        for each in increments:
            low, high = self._place(each.began_at), self._place(each.ended_at)
            for n in range(self._bin(low), self._bin(high) + 1):
                share = (min(high, n + 1) - max(low, n)) / (high - low) if high > low else 1.0
                sums[n] += each.amount * max(0.0, share)
        return [((n + 0.5) * self._width_s, total / self._width_s) for n, total in enumerate(sums)]

    def counts(self, events: Iterable[tuple[float, str, float]]) -> list[Counter[str]]:
        """The sum of the counts of each name in each bin. `events`: (time, name, count)."""
        found: list[Counter[str]] = [Counter() for _ in range(self._count)]
        for at, name, count in events:
            found[self._bin(self._place(at))][name] += int(count)
        return found

    def present(self, intervals: Iterable[tuple[float, float, Mapping[str, float]]]) -> list[Counter[str]]:
        """The number of each name at the middle of each bin. `intervals`: (from, to, number by name)."""
        found: list[Counter[str]] = [Counter() for _ in range(self._count)]
        for began_at, ended_at, counts in intervals:
            first, last = round(self._place(began_at)), round(self._place(ended_at))
            for n in range(max(0, first), min(self._count, last)):
                found[n].update({name: int(count) for name, count in counts.items()})
        return found

    def mean_and_largest(self, points: Sequence[tuple[float, float]]) -> tuple[Points, Points]:
        """(means, largest values) of the values in each bin, by seconds since the start; empty bins are left out."""
        found: dict[int, list[float]] = {}
        for at, value in points:
            found.setdefault(self._bin(self._place(at)), []).append(value)
        middles = [((n + 0.5) * self._width_s, found[n]) for n in sorted(found)]
        return [(x, sum(values) / len(values)) for x, values in middles], [(x, max(values)) for x, values in middles]

    def _place(self, at: float) -> float:
        return (at - self._began_at) / self._width_s

    def _bin(self, place: float) -> int:
        return min(max(int(place), 0), self._count - 1)
