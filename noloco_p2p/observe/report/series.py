"""Curves made small and counts laid out over time. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence

from noloco_p2p.observe.report.node_history import Curve, Gain, Span


def thin(curve: Curve, most: int) -> Curve:
    """At most `most` points, in order: of each piece the lowest and the highest, so that no spike is lost."""
    if len(curve) <= most:
        return curve
    pieces = max(1, most // 2)
    kept: Curve = []
    for piece in range(pieces):
        some = curve[piece * len(curve) // pieces : (piece + 1) * len(curve) // pieces]
        low = min(range(len(some)), key=lambda n: some[n][1])
        high = max(range(len(some)), key=lambda n: some[n][1])
        kept += [some[n] for n in sorted({low, high})]
    return kept


def rates(gains: Iterable[Gain], began_at: float, ended_at: float, bins: int) -> Curve:
    """(seconds since the beginning, amount per second) of each of so many equal times; a gain is spread evenly."""
    width = max(ended_at - began_at, 1e-9) / bins
    sums = [0.0] * bins
    for gain in gains:
        low, high = (gain.began_at - began_at) / width, (gain.ended_at - began_at) / width
        first, last = (min(max(int(edge), 0), bins - 1) for edge in (low, high))
        for n in range(first, last + 1):
            share = (min(high, n + 1) - max(low, n)) / (high - low) if high > low else 1.0
            sums[n] += gain.amount * max(0.0, share)
    return [((n + 0.5) * width, total / width) for n, total in enumerate(sums)]


def columns(
    events: Iterable[tuple[float, str, float]], began_at: float, ended_at: float, bins: int
) -> list[Counter[str]]:
    """How many of each name there were in each of so many equal times; `events`: (when, name, how many)."""
    width = max(ended_at - began_at, 1e-9) / bins
    found: list[Counter[str]] = [Counter() for _ in range(bins)]
    for at, name, count in events:
        found[min(max(int((at - began_at) / width), 0), bins - 1)][name] += int(count)
    return found


def standing(spans: Iterable[Span], began_at: float, ended_at: float, bins: int) -> list[Counter[str]]:
    """How many nodes were in each state in the middle of each of so many equal times."""
    width = max(ended_at - began_at, 1e-9) / bins
    found: list[Counter[str]] = [Counter() for _ in range(bins)]
    for span in spans:
        first = max(0, round((span.began_at - began_at) / width))
        last = min(bins, round((span.ended_at - began_at) / width))
        for n in range(first, last):
            found[n][span.state] += 1
    return found


def standing_as_told(
    lines: Sequence[tuple[float, dict[str, float]]], began_at: float, ended_at: float, bins: int
) -> list[Counter[str]]:
    """The same from what one node told of its membership: each line holds until the next."""
    ends = [*(at for at, _ in lines[1:]), ended_at]
    width = max(ended_at - began_at, 1e-9) / bins
    found: list[Counter[str]] = [Counter() for _ in range(bins)]
    for (at, counts), until in zip(lines, ends, strict=False):
        first, last = max(0, round((at - began_at) / width)), min(bins, round((until - began_at) / width))
        for n in range(first, last):
            found[n] = Counter({state: int(count) for state, count in counts.items()})
    return found


def extremes(points: Sequence[tuple[float, float]], span_s: float, bins: int) -> tuple[Curve, Curve]:
    """Mean and largest of the values in each of so many equal times of `span_s`; empty times are left out."""
    width = max(span_s, 1e-9) / bins
    found: dict[int, list[float]] = {}
    for x, value in points:
        found.setdefault(min(int(x / width), bins - 1), []).append(value)
    middles = [((n + 0.5) * width, found[n]) for n in sorted(found)]
    return [(x, sum(v) / len(v)) for x, v in middles], [(x, max(v)) for x, v in middles]
