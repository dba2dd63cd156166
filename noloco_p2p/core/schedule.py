"""The step clock, and what follows it: the learning rate and the outer rounds.

METHOD.md, "Inner step"; ARCHITECTURE.md, "The step clock". A clock is a number of steps, from 0 to the run's `steps`;
learning rate and rounds follow its floor.
"""

import math
import statistics
from collections.abc import Iterable

READING_S = 0.5
"""Shortest time between two readings of the membership."""
ADVERTS_PER_S = 200
"""Maximum number of adverts read per second, on average: each has a signature to check, and there may be thousands."""
FURTHEST_BEHIND = 2.0
"""Steps by which a clock may still lag after an inner step: a slow node catches up with the others at once."""
SLOWEST = 0.125
"""The least by which an inner step advances the clock: otherwise one of two replicas of stage 0 could stop the other by
saying that it is far behind."""
READINGS = 4.0
"""An advert is rarely older than the time that this many readings take: its sender announces after a reading."""


def learning_rate(t: int, steps: int, peak: float, warmup_steps: int, final_fraction: float) -> float:
    """Learning rate of step t, counted from 1: linear to `peak`, then a cosine to `final_fraction`·peak at `steps`.

    The warm-up is at most a tenth of `steps`, so that short runs have a schedule too. After `steps` the rate stays low.
    """
    warmup = min(warmup_steps, steps // 10)
    if t <= warmup:
        return peak * t / warmup
    progress = min(1.0, (t - warmup) / (steps - warmup))
    return peak * (final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress)))


def due_round(step_floor: int, m: int, last_round: int, steps: int) -> int | None:
    """The number of the outer round that is due, or None.

    A round is due when step // m exceeds the last round done: a clock that jumps over several makes one due, and a
    clock that does not move makes none. At `steps` the last round is ⌈steps / m⌉, so that the last step is always an
    outer round.
    """
    number = -(-steps // m) if step_floor >= steps else step_floor // m
    return number if number > last_round else None


def advance(step: float, median: float | None, steps: int, pull: bool) -> float:
    """The clock after an inner step: step + 1 + max(¼·behind, behind − 2) with behind = median − step − ½, at least
    SLOWEST ahead, never above `steps`.

    Without `pull` (where the stages go in step), or without clocks of stage 0, it is step + 1.
    """
    behind = median - step - 0.5 if pull and median is not None else 0.0
    return min(float(steps), max(step + SLOWEST, step + 1.0 + max(0.25 * behind, behind - FURTHEST_BEHIND)))


def clock_median(samples: Iterable[float]) -> float | None:
    """The median of the stage-0 clocks (the caller's own counts as step + ½); None without samples."""
    values = sorted(samples)
    return statistics.median(values) if values else None


def project(step: float, age_s: float, steps_per_s: float, most: float) -> float:
    """A clock seen `age_s` ago, projected to now at the speed that its owner announces, at most `most` steps ahead.

    Speed and age are a stranger's claims: negative numbers and NaN do not move the clock.
    """
    if not (age_s > 0 and steps_per_s > 0):
        return step
    return step + min(age_s * steps_per_s, most)


def most_projected(m: int, members: int, steps_per_s: float) -> float:
    """The most steps by which to project a clock: two outer intervals, or what this node takes in READINGS readings.

    With less, clocks whose steps are fast would seem to lag, and hold each other back.
    """
    return max(2.0 * m, READINGS * max(READING_S, members / ADVERTS_PER_S) * steps_per_s)


def furthest(step: float, age_s: float, steps_per_s: float, m: int) -> float:
    """The furthest that a clock seen `age_s` ago can have come: two outer intervals ahead (at least eight steps), plus
    that time at twice this node's own speed. A claim beyond this is not a clock of this run."""
    return step + 2.0 * max(m, 4) + 2.0 * max(0.0, age_s) * steps_per_s


def smooth_rate(rate: float, took_s: float) -> float:
    """Steps per second: one over a moving average of the durations of about ten inner steps. At first `rate` is 0.

    It is not the average of their rates: noise makes that larger, and a clock projected with it runs ahead.
    """
    return 1 / (0.9 / rate + 0.1 * took_s if rate else took_s)
