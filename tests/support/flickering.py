"""The swarms of `varied`, where most faults that pass come back again and again.

    python tests/support/flickering.py SEED [UNTIL]

replays one seed, or runs all seeds from SEED to UNTIL and prints those that break a law.
"""

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from elastic import UNDONE
from mixed import main
from varied import Timetable, drawn_varied_as

from noloco_p2p.sim import laws
from noloco_p2p.sim.faults import Fault
from noloco_p2p.sim.world import SimPlan

REPEATED = {*UNDONE, "bounce"} - {"slow"}
MOST_TIMES = 40


class Flickering(Timetable):
    """A swarm in which three of five faults of the kinds REPEATED happen up to MOST_TIMES."""

    def __init__(self, plan: SimPlan, faults: tuple[Fault, ...] = (), **options: Any) -> None:
        rng = random.Random(f"flickering {plan.seed}")
        again = [one for fault in faults for one in _repeated(fault, rng)]
        super().__init__(plan, tuple(sorted(again, key=lambda fault: fault.at_s)), **options)
        self.limit_s += sum(fault.for_s for fault in again)


def _repeated(fault: Fault, rng: random.Random) -> Iterator[Fault]:
    if fault.kind not in REPEATED or rng.random() < 0.4:
        yield fault
        return
    for_s, pause_s, at_s = rng.choice([0.1, 0.3, 1.0]) * fault.for_s, rng.choice([0.05, 0.3, 1.0, 3.0]), fault.at_s
    for _ in range(rng.randint(3, MOST_TIMES)):
        one = replace(fault, at_s=at_s, for_s=for_s * rng.uniform(0.5, 1.5))
        yield one
        at_s = one.ends_s + pause_s * rng.uniform(0.5, 1.5)


def drawn(seed: int) -> Flickering:
    """A swarm of `varied` with repeated faults."""
    return drawn_varied_as(Flickering, seed)


if __name__ == "__main__":
    sys.exit(main(drawn, laws.judge, *map(int, sys.argv[1:])))
