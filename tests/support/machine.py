"""Measures how slow this machine is at the moment, to scale the time limits on real processes.

A test that fails on a machine half as fast, or next to other work, has measured the machine and not the program.
"""

import time

WORK = 4_000_000
WORK_S = 0.09
"""A number of additions, and the seconds that they took on a quiet core of the machine for which limits were chosen."""


def slowness() -> float:
    """How many times slower than that machine this one is right now; at least 1."""
    began = time.perf_counter()
    total = 0
    for number in range(WORK):
        total += number
    return max(1.0, (time.perf_counter() - began) / WORK_S)


def at_most(seconds: float) -> float:
    """The time limit for something that may take `seconds` on the machine for which the tests were written."""
    return seconds * slowness()


def in_time(took_s: float, seconds: float) -> bool:
    """Whether it took less than `seconds`, if need be scaled to this machine, which is measured only then."""
    return took_s < seconds or took_s < at_most(seconds)
