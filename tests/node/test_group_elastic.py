"""Swarms with faults drawn from a seed, under rules that take from all replicas of a stage."""

from dataclasses import replace

import pytest
from elastic import drawn, plan_of
from lawful import broken, check
from soak import soak

from noloco_p2p.config import OuterSettings
from noloco_p2p.core.outer_rules import RuleName
from noloco_p2p.sim.faults import Fault, FaultySwarm
from noloco_p2p.sim.transport import RESUMES_S


@pytest.mark.parametrize(("rule", "inner_steps"), [("diloco", 4), ("dct", 4), ("sync", 1)])
@pytest.mark.parametrize("seed", [0, *soak(range(1, 40))])
def test_the_laws_hold_whatever_is_done_to_a_swarm(rule: RuleName, inner_steps: int, seed: int) -> None:
    plan, faults = drawn(seed)
    outer = OuterSettings(rule=rule, inner_steps=inner_steps, deadline_s=3.0)
    plan = replace(plan, manifest=plan.manifest.model_copy(update={"outer": outer}))
    swarm = FaultySwarm(plan, faults)
    if plan.link.reply_loss:  # a replica that differs copies a state; a lost transfer is given up only after a silence
        swarm.gap_s += RESUMES_S
    assert broken(swarm) is None


def test_replicas_that_add_up_gradients_write_checkpoints() -> None:
    plan = plan_of((2, 2), every_steps=4, steps=12, outer={"rule": "sync", "inner_steps": 1, "deadline_s": 3.0})
    outcome = check(FaultySwarm(plan))
    for peer in outcome.nodes:
        assert [event.number("round") for event in outcome.trace.of("checkpoint", peer)] == [4, 8, 12], peer


@pytest.mark.parametrize("later_s", [4.0, 5.0])
def test_a_newcomer_does_not_get_the_copy_that_was_made_for_another_one_a_round_ago(later_s: float) -> None:
    """With that copy it could not take part in the rounds since, would differ from the others, and would copy again."""
    swarm = FaultySwarm(plan_of((2, 2), steps=32, outer={"rule": "diloco", "inner_steps": 4, "deadline_s": 3.0}))
    swarm.at(6.6, lambda: swarm.start(0, 2))
    swarm.at(6.6 + later_s, lambda: swarm.start(0, 3))
    outcome = check(swarm)
    assert [one.peer for one in swarm.resumptions] == ["s0r2", "s0r3"]
    assert not outcome.trace.of("warning", "s0r3")


def test_a_node_that_has_come_as_far_takes_a_state_beyond_the_last_step_that_others_announced() -> None:
    """No node has announced anything new since the first inner steps, and here none waits for a partner's round."""
    outer = {"rule": "diloco", "inner_steps": 4, "deadline_s": 3.0, "overlap": False, "partner_wait_s": 0.0}
    swarm = FaultySwarm(plan_of((3,), steps=12, microbatches_per_step=1, routing="weighted", outer=outer))
    outcome = check(swarm)
    said = [str(event.get("message")) for event in outcome.trace.of("warning")]
    assert [message for message in said if "copying" in message]
    assert not [message for message in said if "has not reached" in message]


def test_an_origin_that_came_back_from_an_earlier_step_need_not_wait_for_a_round_that_waits_for_it() -> None:
    """One replica of stage 1 waits in its round for the other, whose step needs the origin's next microbatches. But
    the origin first has to take the steps before it again, for which the policy names both replicas."""
    outer = {"rule": "diloco", "inner_steps": 8, "deadline_s": 60.0, "overlap": False}
    plan = plan_of((1, 2), every_steps=8, routing="balanced", outer=outer)
    late = check(FaultySwarm(plan)).trace.of("inner_step", "s0r0")[13].at_s
    cut = Fault(late + 0.01, "cut", ("s0r0", "s1r0"), 3.0)
    first, second = (
        check(FaultySwarm(plan, (cut,))).trace.of("inner_step", peer)[15].at_s for peer in ("s1r1", "s1r0")
    )
    assert first + 0.1 < second
    swarm = FaultySwarm(plan, (cut, Fault(first + 0.01, "bounce", ("s0r0",), 1.0)))
    outcome = check(swarm)
    assert [(one.peer, one.round) for one in swarm.resumptions] == [("s0r0", 1)]
    rounds = [event for peer in ("s1r0", "s1r1") for event in outcome.trace.of("outer_round", peer)]
    assert {event.get("result") for event in rounds} == {"all"}
