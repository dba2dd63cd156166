"""Nodes that move to another stage while they train, under virtual time."""

from dataclasses import replace

import pytest
from elastic import plan_of

from noloco_p2p.sim.faults import FaultySwarm
from noloco_p2p.sim.laws import check


def lopsided(steps: int = 60) -> FaultySwarm:
    """Seven nodes choose 4 + 3; two of the three crash for good."""
    plan = plan_of((7, 0), steps=steps, start_replicas=1)
    swarm = FaultySwarm(replace(plan, chooses_stage=True))

    def crash_two() -> None:
        places = [(swarm.process(f"s0r{i}").node.state.index, f"s0r{i}") for i in range(7)]
        few = min((0, 1), key=lambda stage: sum(index == stage for index, _ in places))
        for _, peer in [place for place in places if place[0] == few][:2]:
            swarm.crash(peer)

    swarm.at(4.0, crash_two)
    return swarm


def test_a_swarm_of_4_and_1_becomes_one_of_3_and_2_and_stays_so() -> None:
    outcome = check(lopsided())
    alive = [process for process in outcome.processes if not process.crashed]
    assert sorted(sum(process.stage == stage for process in alive) for stage in (0, 1)) == [2, 3]
    moved = outcome.trace.of("moved")
    assert len(moved) == 1
    mover = outcome.nodes[moved[0].peer]
    assert len(mover.models) == 2
    assert mover.step == 60


@pytest.mark.parametrize("after_s", [0.02, 0.2, 0.5, 1.0, 1.5])
def test_a_mover_that_is_killed_on_its_way_is_replaced(after_s: float) -> None:
    moved = check(lopsided()).trace.of("moved")[0]
    swarm = lopsided()
    swarm.at(moved.at_s + after_s, lambda: swarm.crash(moved.peer))
    outcome = check(swarm)
    alive = [process for process in outcome.processes if not process.crashed]
    assert sorted(sum(process.stage == stage for process in alive) for stage in (0, 1)) in ([2, 2], [1, 3])
    assert {process.step for process in alive} == {60.0}
