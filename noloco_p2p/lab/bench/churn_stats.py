"""What killed and hung nodes cost, worked out from what the nodes left: their steps files and their logs. Pure.

Points in time are Unix seconds. A steps file has a line for each inner step of one replica (ARCHITECTURE.md, "Files").
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any


@dataclass(frozen=True, slots=True)
class InnerStepLine:
    """One inner step of one replica, as its steps file has it."""

    peer: str
    at: float
    inner_step: int
    step: int
    tokens: int
    ids: tuple[str, ...]
    """The microbatches that were counted in it."""


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """From `began_at` on the replica's weights are those that it took from `source`: `shard`, `peer`, …"""

    began_at: float
    source: str


def parsed(peer: str, text: str) -> InnerStepLine | None:
    """A line of a steps file; None for one that a killed node did not finish."""
    try:
        found = json.loads(text)
        served = found["microbatches"]
        tokens = sum(one["tokens"] for one in served)
        ids = tuple(one["id"] for one in served)
        return InnerStepLine(peer, found["at"], found["inner_step"], found["step"], tokens, ids)
    except (ValueError, KeyError, TypeError):
        return None


def events(log: str) -> list[dict[str, Any]]:
    """The JSON lines of a log; everything else in it is left out."""
    found = []
    for text in log.splitlines():
        if text.startswith("{"):
            try:
                found.append(json.loads(text))
            except ValueError:
                continue  # cut off by a kill
    return [one for one in found if isinstance(one, dict)]


def duplicates(lines: Iterable[InnerStepLine], sources: Sequence[WeightsSource]) -> int:
    """How often one replica counted an id that its weights contained already.

    `lines` are those of one replica in the order in which it wrote them. Weights from the replica's own checkpoint
    contain the steps before that checkpoint; weights of another replica contain none of this replica's steps.
    """
    contained: list[InnerStepLine] = []
    counted: Counter[str] = Counter()
    current, twice = -1, 0
    for line in lines:
        latest = sum(one.began_at <= line.at for one in sources) - 1
        if latest != current:
            current = latest
            own = sources[latest].source == "shard"
            contained = [old for old in contained if own and old.inner_step < line.inner_step]
            counted = Counter(one for old in contained for one in old.ids)
        contained.append(line)
        for one in line.ids:
            twice += counted[one] > 0
            counted[one] += 1
    return twice


def stalls(trained_at: Iterable[float], disturbed_at: Sequence[float], until: float) -> list[float]:
    """For each disturbance: the longest time without a trained token that began before the next one, seconds.

    Of a time that had begun before the disturbance only the part after it counts.
    """
    gaps = list(pairwise([*sorted(trained_at), until]))
    found = []
    for began, following in zip(disturbed_at, [*disturbed_at[1:], until], strict=False):
        longest = (end - max(start, began) for start, end in gaps if end > began and start < following)
        found.append(max(longest, default=0.0))
    return found


def victim(rng: Random, training: Mapping[int, Sequence[str]], *, least: int = 1) -> str | None:
    """A node to disturb, so that at least `least` others of its stage train; None when there is none to spare.

    `training`: the names of the nodes that train now, by stage.
    """
    spare = [name for _, names in sorted(training.items()) for name in sorted(names) if len(names) > least]
    return rng.choice(spare) if spare else None


def at_tokens(curve: Sequence[tuple[float, float]], tokens: float) -> float | None:
    """Loss at a number of tokens on a curve of (tokens, loss), linear in between; beyond its ends that of the end."""
    points = sorted(curve)
    if not points:
        return None
    for (left, before), (right, after) in pairwise(points):
        if left <= tokens <= right:
            return before if left == right else before + (after - before) * (tokens - left) / (right - left)
    return points[0][1] if tokens < points[0][0] else points[-1][1]


def total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of several counts, by name."""
    found: Counter[str] = Counter()
    for one in counts:
        found.update(one)
    return dict(found)
