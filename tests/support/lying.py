"""The swarms of `varied` with one node that lies in one of many ways, and the laws that hold for the others.

    python tests/support/lying.py SEED [UNTIL]

replays one seed, or runs all seeds from SEED to UNTIL and prints those that break a law.
"""

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from liars import REFUSALS, LiarSwarm
from mixed import main
from varied import Timetable, drawn_varied_as

from noloco_p2p.core.messages import Holding
from noloco_p2p.sim import laws
from noloco_p2p.sim.faults import FaultySwarm
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.world import peer_id

Lie = Mapping[str, Callable[[Any], Any]]
SPEEDS = ("microbatches_per_s", "capacity_per_s", "steps_per_s")
REFUSED_S = 60.0
"""By how much longer an inner step may take beside a replica that does not answer, or is always busy."""


def _says(*names: str, instead: Any) -> Lie:
    return dict.fromkeys(names, lambda _: instead)


def _adds(*names: str, more: float) -> Lie:
    return dict.fromkeys(names, lambda value: value + more if isinstance(value, (int, float)) else value)


LIES: Mapping[str, Lie] = {
    "no speed": _says(*SPEEDS, instead=0.0),
    "a thousand times as fast": dict.fromkeys(SPEEDS, lambda value: 1000 * value),
    "no round": _says("outer_round", instead=0),
    "a round ahead": _adds("outer_round", more=1),
    "five rounds ahead": _adds("outer_round", "round", more=5),
    "a thousand rounds ahead": _adds("outer_round", more=1000),
    "no step": _says("step", instead=0),
    "three steps ahead": _adds("step", more=3),
    "a thousand steps ahead": _adds("step", more=1000),
    "newer weights": {
        "holds": lambda held: tuple(one._replace(round=one.round + 4, step=one.step + 16) for one in held)
    },
    "weights of other stages": {"holds": lambda held: (*held, Holding(0, 3, 12, 0), Holding(1, 3, 12, 0))[:4]},
    "losses": {"loss_sum": lambda loss: 1000 * loss},
    "tokens": {"tokens": lambda tokens: 10 * tokens},
    "first lineage": _says("fresh_round", instead=0),
    "later lineage": _adds("fresh_round", more=2),
    "partner at once": _says("partner_from_round", instead=0),
    "never a partner": _says("partner_from_round", instead=10**6),
    "a stuck device": _says("stuck_s", instead=1000.0),
    "no progress": _says("events", instead=0),
    "training": _says("state", instead="training"),
    "syncing": _says("state", instead="syncing"),
    "finished": _says("state", instead="finished"),
    "not settled": {"settled": lambda settled: not settled},
    "may move": {"stays": lambda stays: not stays},
}
"""What a liar claims: fields, and what it says instead of their values."""
SERVES_NOBODY = (*REFUSALS, "a stuck device")


class LyingTimetable(LiarSwarm, Timetable):
    """A swarm of `varied` with a liar."""

    lie: str = ""
    """One of LIES or REFUSALS."""


def drawn(seed: int) -> LyingTimetable:
    """A swarm in which the last replica of some stage lies. A stage that it alone holds would stand still if it served
    nobody: in such swarms nodes keep their stages, and an honest one always remains beside it."""
    swarm, rng = drawn_varied_as(LyingTimetable, seed), random.Random(f"lying {seed}")
    swarm.lie = rng.choice([*LIES, *REFUSALS])
    least, plan = 3 if swarm.lie in SERVES_NOBODY else 2, swarm.plan
    stages = [stage for stage, count in enumerate(plan.replicas) if count >= least]
    if stages:
        stage = rng.choice(stages)
        swarm.liars = {peer_id(stage, plan.replicas[stage] - 1)}
    if swarm.lie in SERVES_NOBODY:
        swarm.plan = replace(plan, chooses_stage=False)
    swarm.false, swarm.refuses = LIES.get(swarm.lie, {}), swarm.lie if swarm.lie in REFUSALS else ""
    return swarm


def judge(swarm: FaultySwarm, outcome: Outcome) -> None:
    """The laws that a liar cannot break for the others. Nobody fails, not even the liar, whose own work is honest."""
    assert isinstance(swarm, LyingTimetable)
    steps = float(swarm.plan.manifest.steps)
    for process in outcome.processes:
        assert process.error is None, f"{process.peer} failed: {process.error}"
        if process.peer in swarm.liars:
            continue
        if not process.crashed:
            assert process.state == "left", f"{process.peer} ended as {process.state}"
            reached = process.told_to_leave or process.step == steps
            assert reached, f"{process.peer} ended at step {process.step} of {steps}"
        laws.every_microbatch_ended_once(process)
        laws.no_id_counted_twice(process)
        laws.rounds_increase(process)
        laws.progress_counts_once(process)
    laws.every_byte_is_accounted_for(swarm)
    longest_s = swarm.gap_s + (REFUSED_S if swarm.refuses else 0.0)
    for peer, gap_s, at_s in laws.gaps(swarm, outcome):
        late = gap_s > longest_s and peer not in swarm.liars
        assert not late, f"{peer} took no inner step for {gap_s:.1f} s up to {at_s:.1f} s"


if __name__ == "__main__":
    sys.exit(main(drawn, judge, *map(int, sys.argv[1:])))
