"""The swarms of `mixed`, with further settings drawn from the seed, and nodes that may be used only at certain hours.

    python tests/support/varied.py SEED [UNTIL]

replays one seed, or runs all seeds from SEED to UNTIL and prints those that break a law.
"""

import random
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from mixed import drawn_as, main, nodes_of

from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import PeerId
from noloco_p2p.sim import laws
from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.faults import FaultySwarm
from noloco_p2p.sim.recording import AvailableWeights, now_s
from noloco_p2p.sim.world import peer_id

HOURS = (
    "00:00-00:01 00:02-23:00",
    "00:01-23:00",
    "00:00-00:01 00:03-00:04 00:05-23:00",
    "00:00-00:02 00:03-23:00",
)
"""When a node may be used; a run begins at midnight."""
PAUSED_S = 130.0
"""Longest pause for such a node, seconds, and a little more."""


class Timetable(FaultySwarm):
    """A swarm in which some nodes have `limits.hours`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.hours: Mapping[PeerId, str] = {}

    def start(self, stage: int, replica: int) -> None:
        """The node starts with its own hours."""
        plan, spans = self.plan, tuple(self.hours.get(peer_id(stage, replica), "").split())
        limits = plan.config.limits.model_copy(update={"hours": spans})
        self.plan = replace(plan, config=plan.config.model_copy(update={"limits": limits}))
        super().start(stage, replica)
        self.plan = plan

    def _available(self, peer: PeerId) -> AvailableWeights:
        """Nothing for a node that has not chosen a stage yet because its hours have not begun."""
        if self.process(peer).node.state.chosen_stage is None:
            return AvailableWeights(now_s(), (), (), (), (), ())
        return super()._available(peer)


Hours = TypeVar("Hours", bound=Timetable)


def drawn(seed: int) -> Timetable:
    """See `drawn_varied_as`."""
    return drawn_varied_as(Timetable, seed)


def drawn_varied_as(kind: type[Hours], seed: int) -> Hours:
    """A swarm of `mixed` with other settings. If its steps take longer with them, it may take longer."""
    swarm, rng = drawn_as(kind, seed), random.Random(f"varied {seed}")
    plan, costs = swarm.plan, swarm.plan.costs
    assert isinstance(costs, Costs)
    run = plan.manifest.model_dump()
    usual, outer = plan.manifest.microbatches_per_step, run["outer"]
    if rng.random() < 0.2:
        run["microbatches_per_step"] = rng.choice([8, 12])
    if outer["rule"] in ("noloco", "averaged", "gossip"):
        outer |= _some(
            rng,
            pairing=["random", "random", "none", "matched"],
            codec=["full", "bfloat16", "int8", "int4"],
            max_stale_rounds=[0, 1, 2, 16],
            overlap=[True, False],
        )
    if outer["rule"] != "sync":
        outer |= _some(rng, inner_steps=[1, 2, 5, 8], partner_wait_s=[0.0, 0.5, 2.0, None])
    floors, drains = [0.5, 2.0], [2.0, 10.0]
    limits = _some(rng, max_in_flight=[1, 2, 3], patience_floor_s=floors, drain_s=drains, evaluations=[1])
    by, timetable = rng.choice([0.1, 1.0, 1.0, 4.0, 8.0]), rng.random() < 0.4
    manifest = RunManifest.model_validate(run)
    costs = replace(costs, forward_s=by * costs.forward_s, backward_s=by * costs.backward_s)
    # As by default, far above what a microbatch takes: otherwise replicas seem to make no progress while they compute.
    slowest = max([1.0, *plan.slowness.values()])
    longest_s = 3.0 * manifest.stages * slowest * (costs.forward_s + costs.backward_s)
    limits["microbatch_deadline_s"] = max(plan.config.limits.microbatch_deadline_s, longest_s)
    swarm.plan = replace(
        plan,
        manifest=manifest,
        config=plan.config.model_copy(update={"limits": plan.config.limits.model_copy(update=limits)}),
        costs=costs,
    )
    slower = max(1.0, by) * manifest.microbatches_per_step / usual * (3.0 if limits.get("max_in_flight") == 1 else 1.5)
    swarm.gap_s *= slower
    swarm.limit_s *= slower
    if timetable:
        swarm.gap_s += PAUSED_S
        swarm.limit_s += 5 * PAUSED_S * max(1.0, by)
        swarm.hours = {peer: rng.choice(HOURS) for peer in nodes_of(plan.replicas) if rng.random() < 0.3}
    return swarm


def _some(rng: random.Random, **choices: list[Any]) -> dict[str, Any]:
    """Some of these settings, each with one of its values."""
    return {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.4}


if __name__ == "__main__":
    sys.exit(main(drawn, laws.judge, *map(int, sys.argv[1:])))
