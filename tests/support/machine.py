"""How slow this machine is at the moment: bounds on what real processes need are scaled by it.

A test that fails on a machine half as fast, or beside other work, has measured the machine and not the program.
"""

import time

WORK = 4_000_000
WORK_S = 0.09
"""Additions, and the seconds that they took on a quiet core of the machine for which the tests' bounds were chosen."""


def slowness() -> float:
    """How many times longer than on that machine work takes here and now; at least 1."""
    began = time.perf_counter()
    total = 0
    for number in range(WORK):
        total += number
    return max(1.0, (time.perf_counter() - began) / WORK_S)


def at_most(seconds: float) -> float:
    """The bound for something that may take `seconds` on the machine for which the tests were written."""
    return seconds * slowness()


def in_time(took_s: float, seconds: float) -> bool:
    """It took less than `seconds`, or than what they are on this machine, which is measured only when it matters."""
    return took_s < seconds or took_s < at_most(seconds)
