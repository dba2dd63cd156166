"""Swarms that have lost all nodes of a stage for good, under virtual time: the others continue without them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from elastic import plan_of
from lawful import check

from noloco_p2p.core.messages import PeerId
from noloco_p2p.sim.faults import Fault, FaultySwarm


def choosing(nodes: int, stages: int, steps: int = 40, **changes: object) -> FaultySwarm:
    """Nodes that choose their stages themselves."""
    plan = plan_of((nodes, *[0] * (stages - 1)), steps=steps, start_replicas=nodes // stages, **changes)  # type: ignore[arg-type]
    return FaultySwarm(replace(plan, chooses_stage=True))


def of_stage(swarm: FaultySwarm, stage: int) -> list[PeerId]:
    """The present nodes of a stage."""
    return [one.peer for one in swarm.processes if one.running and one.stage == stage]


def later(swarm: FaultySwarm, at_s: float, stage: int, do: Callable[[PeerId], None]) -> None:
    """Do something at a given time, to every node that is in the stage then."""

    def strike() -> None:
        for peer in of_stage(swarm, stage):
            do(peer)

    swarm.at(at_s, strike)


@pytest.mark.parametrize(("nodes", "stages", "lost"), [(4, 2, 0), (4, 2, 1), (6, 3, 1), (6, 3, 2)])
def test_one_of_two_replicas_takes_a_stage_that_nobody_holds_any_more(nodes: int, stages: int, lost: int) -> None:
    swarm = choosing(nodes, stages)
    later(swarm, 6.0, lost, swarm.crash)
    outcome = check(swarm)
    (moved,) = outcome.trace.of("moved")
    assert moved.get("stage") == lost
    assert swarm.resumptions[0].source == "guardian"


def test_a_stage_that_is_lost_in_the_last_rounds_of_a_run_is_taken_as_well() -> None:
    swarm = choosing(4, 2, steps=20)
    later(swarm, 9.0, 1, swarm.crash)
    assert len(check(swarm).trace.of("moved")) == 1


def test_a_node_that_leaves_before_its_first_step_in_a_stage_that_it_took_over_hands_its_weights_over() -> None:
    """It has taken them from its own memory or from the other guardian, which has died since."""

    def lost() -> FaultySwarm:
        swarm = choosing(5, 2)
        later(swarm, 6.0, 1, swarm.crash)
        return swarm

    undisturbed = lost()
    taken = check(undisturbed).trace.of("resumed")[0]
    guarded = {h.peer for h in undisturbed.trace.of("guarded") if h.get("stage") == 1 and h.at_s < taken.at_s}
    swarm = lost()
    for peer in guarded - {taken.peer}:
        swarm.at(taken.at_s, lambda peer=peer: swarm.crash(peer))  # type: ignore[misc]
    swarm.at(taken.at_s + 0.05, lambda: swarm.drain(taken.peer))
    swarm.at(taken.at_s + 10.0, lambda: swarm.start(0, 5))
    left = check(swarm).nodes[taken.peer]
    assert not [h for h in left.trace.of("inner_step") if h.at_s > taken.at_s], "it leaves before its first step"
    assert [(one.peer, one.source) for one in swarm.resumptions] == [(taken.peer, "guardian"), ("s0r5", "guardian")]
    assert [held.stage for held in swarm.disks[taken.peer].held()][-1:] == [1], "its checkpoint, too"


def test_a_node_that_is_told_to_leave_while_it_waits_for_others_says_nothing_of_waiting_and_leaves() -> None:
    swarm = FaultySwarm(plan_of((2, 0), start_replicas=2))
    for peer in ("s0r0", "s0r1"):
        swarm.at(5.0, lambda peer=peer: swarm.drain(peer))  # type: ignore[misc]
    outcome = swarm.run()
    for process in outcome.processes:
        assert process.ended_at_s == pytest.approx(5.0, abs=0.1)
        assert [event.get("message") for event in process.trace.of("info") if event.at_s >= 5.0] == []
        assert not process.trace.of("warning")


@pytest.mark.parametrize("peer", ["s0r0", "s1r1"])
def test_a_node_of_a_finished_run_that_is_started_alone_says_so_and_ends(peer: PeerId) -> None:
    plan = plan_of((2, 2))
    swarm = FaultySwarm(plan)
    outcome = check(swarm)
    again = FaultySwarm(replace(plan, replicas=(0, 0)))
    again.disks.update(swarm.disks)
    again.at(0.0, lambda: again.start(int(peer[1]), int(peer[3])))
    node = check(again).nodes[peer]
    assert node.node.finished
    assert node.ended_at_s is not None
    assert node.ended_at_s < 3 * plan.config.directory.ttl_s + 2.0
    (*_, said) = [str(event.get("message")) for event in node.trace.of("info")]
    assert said == "this node has done all 20 steps, and no other node lacks any: the run is complete"
    assert outcome.nodes[peer].step == node.step == 20


def test_a_node_of_a_finished_run_waits_as_long_as_another_one_that_has_come_lacks_the_last_step() -> None:
    """It left before the last stage came, and the other one trained its older weights again."""
    plan = plan_of((2, 1))
    swarm = FaultySwarm(plan)
    check(swarm)
    again = FaultySwarm(replace(plan, replicas=(0, 0)))
    again.disks.update(swarm.disks)
    del again.disks["s0r1"]._entries[1:]
    for peer, after in (("s0r0", 0), ("s0r1", 0), ("s1r0", 5)):
        at_s = after * plan.config.directory.ttl_s
        again.at(at_s, lambda peer=peer: again.start(int(peer[1]), int(peer[3])))  # type: ignore[misc]
    outcome = again.run()  # without the laws, which know nothing of the earlier swarm
    assert [(one.peer, one.source) for one in again.resumptions][-1] == ("s0r1", "peer")
    assert [node.step for node in outcome.nodes.values()] == [20, 20, 20]
    assert not outcome.trace.of("inner_step")


def test_a_node_without_checkpoints_that_comes_back_first_takes_the_stage_that_nobody_else_can_take() -> None:
    """All were stopped. It settled in stage 0, because the run had begun, before the one with checkpoints of that stage
    was back. Then all waited for ever for a node of the stage between."""
    plan = replace(plan_of((1, 1, 1), steps=12), chooses_stage=True)
    down = ("wipe", "s2r0", 20.0), ("bounce", "s1r0", 21.0), ("bounce", "s0r0", 30.0)
    outcome = check(FaultySwarm(plan, tuple(Fault(6.0, kind, (peer,), for_s) for kind, peer, for_s in down)))
    assert sorted(outcome.nodes[peer].stage for peer in outcome.nodes) == [0, 1, 2]
