"""A node that is missing in a reading of the directory is not gone: its advert counts until it expires."""

from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest
from short_runs import LIMITS, manifest_for
from simulated_parts import linear_stage

from noloco_p2p.config import NodeConfig
from noloco_p2p.core.messages import Advert, MicrobatchId, PeerId
from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.directory import Registry
from noloco_p2p.sim.links import Link
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.world import SimPlan, SimSwarm

REPLICAS = (3, 3)


class PartialRegistry(Registry):
    """While `hidden` is set, its first node does not see its second node in readings."""

    hidden: tuple[PeerId, PeerId] | None = None

    def view(self, *, now: float, reader: PeerId | None = None) -> list[Advert]:
        whole = super().view(now=now, reader=reader)
        return [a for a in whole if (reader, a.peer_id) != self.hidden]


def steps_of(outcome: Outcome, stage: int) -> Counter[tuple[MicrobatchId, int]]:
    """The inner step in which a stage counted each microbatch."""
    return Counter((one.microbatch, one.inner_step) for n in outcome.of_stage(stage) for one in linear_stage(n).counted)


def run_with(hidden: Sequence[tuple[PeerId, PeerId]]) -> Outcome:
    manifest = manifest_for(REPLICAS, steps=12, routing="balanced")
    plan = SimPlan(
        manifest,
        REPLICAS,
        seed=3,
        config=NodeConfig(limits=LIMITS, directory={"refresh_s": 0.2, "ttl_s": 30.0}),  # type: ignore[arg-type]
        link=Link(latency_s=0.005, spread=0.5),
        costs=Costs(forward_s=0.05, backward_s=0.1, inner_step_s=0.02, outer_s=0.02, spread=0.4),
    )
    swarm = SimSwarm(plan)
    swarm.registry = registry = PartialRegistry()
    for number, pair in enumerate(hidden):
        swarm.at(2.0 + 2.0 * number, partial(setattr, registry, "hidden", pair))
        swarm.at(3.0 + 2.0 * number, partial(setattr, registry, "hidden", None))
    return swarm.run()


@pytest.mark.parametrize("hidden", [[("s1r0", "s0r1"), ("s1r2", "s0r0")], [("s0r0", "s1r1"), ("s1r1", "s0r2")]])
def test_partial_readings_move_no_microbatch_to_another_step(hidden: Sequence[tuple[PeerId, PeerId]]) -> None:
    """Under `balanced` a microbatch counts in the same inner step at every stage."""
    outcome = run_with(hidden)
    assert all(one.inner_steps == 12 for one in outcome.processes)
    assert steps_of(outcome, 0) == steps_of(outcome, 1)
