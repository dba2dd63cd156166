"""The step clock of a swarm advances by one with every inner step, however old the adverts that carry it are."""

from collections import Counter

import pytest
from short_runs import manifest_for
from soak import soak

from noloco_p2p.config import OuterSettings
from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.links import Link
from noloco_p2p.sim.world import SimPlan, SimSwarm

CASES = [(0.1, 1), *soak([(0.1, 2), (0.1, 3), (0.012, 1), (0.012, 2), (0.012, 3)])]


@pytest.mark.parametrize(("microbatch_s", "seed"), CASES)
def test_a_run_takes_as_many_inner_steps_as_it_has_steps(microbatch_s: float, seed: int) -> None:
    """Here a round follows every step, and adverts come every half second, in which fast nodes take ten steps."""
    replicas, steps = (2, 2), 200
    outer = OuterSettings(rule="gossip", inner_steps=1)
    manifest = manifest_for(replicas, steps=steps, microbatches_per_step=4, outer=outer, routing="random", seed=seed)
    costs = Costs(forward_s=microbatch_s / 3, backward_s=2 * microbatch_s / 3, spread=0.4)
    plan = SimPlan(manifest, replicas, seed=seed, link=Link(latency_s=0.002, spread=0.2), costs=costs)
    trace = SimSwarm(plan).run(limit_s=4 * steps * 4 * microbatch_s).trace
    taken = Counter(event.peer for event in trace.of("inner_step"))
    assert 0.96 * steps < min(taken.values())
    assert max(taken.values()) < 1.04 * steps
    rounds = trace.totals("outer_round", "result")
    assert rounds["partner"] > 0.9 * rounds.total(), "and partners meet in the same round"
