"""Rules under which a replica takes from all of its stage: `diloco` and `sync` (ARCHITECTURE.md, "All replicas")."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from elastic import plan_of
from lawful import check, training
from simulated_parts import linear_stage
from soak import soak
from test_open_round import hold_up

from noloco_p2p.core.messages import PeerId
from noloco_p2p.sim.faults import Fault, FaultySwarm
from noloco_p2p.sim.laws import recording_stages
from noloco_p2p.sim.process import Outcome, SimProcess
from noloco_p2p.sim.world import SimPlan

RULES: dict[str, dict[str, Any]] = {
    "diloco": {"rule": "diloco", "inner_steps": 4, "deadline_s": 3.0},
    "dct": {"rule": "dct", "inner_steps": 4, "deadline_s": 3.0},
    "sync": {"rule": "sync", "deadline_s": 3.0},
}
each_rule = pytest.mark.parametrize("rule", RULES)


def plan(rule: str, replicas: tuple[int, ...] = (3, 3), **changes: Any) -> SimPlan:
    settings: dict[str, Any] = {"outer": RULES[rule], "steps": 24, "routing": "balanced"}
    return plan_of(replicas, **(settings | changes))


def common(process: SimProcess) -> tuple[float, ...]:
    """What replicas of a stage have in common."""
    stage = linear_stage(process)
    kinds = stage.kept | {"fast": stage.theta}
    return tuple(value for kind in stage._rule.common for value in kinds[kind])


def results(outcome: Outcome, peer: PeerId) -> list[tuple[int, str]]:
    return [(int(e.number("round")), str(e.get("result"))) for e in outcome.trace.of("outer_round", peer)]


def agree(outcome: Outcome, *without: PeerId) -> None:
    """All replicas of a stage have ended with the same values, bit for bit."""
    last = {process.peer: process for process in outcome.processes}
    for stage in {process.stage for process in outcome.processes}:
        found = {common(p) for p in last.values() if p.stage == stage and p.peer not in without and not p.told_to_leave}
        assert len(found) == 1, f"stage {stage}: {found}"


@each_rule
@pytest.mark.parametrize("routing", ["random", *soak(["balanced"])])
def test_all_are_the_same_bit_for_bit(rule: str, routing: str) -> None:
    outcome = check(FaultySwarm(plan(rule, routing=routing)))
    agree(outcome)
    for process in outcome.processes:
        found = results(outcome, process.peer)
        if routing == "balanced":
            last = 24 if rule == "sync" else 6
            assert found == [(n, "all") for n in range(1, last + 1)]
        assert not process.trace.of("resumed")


@each_rule
def test_no_second_is_idle_for_two_causes(rule: str) -> None:
    """Even if the node waits for the others' gradients between its microbatches and its inner step."""
    swarm = FaultySwarm(plan(rule, replicas=(2, 2)))
    swarm.at(1.0, lambda: swarm.slow("s0r1", 5.0))
    for process in check(swarm).processes:
        (began, ended), *_ = training(process)
        steps = process.trace.of("inner_step")
        idle_s = sum(one.number("seconds") for one in process.trace.of("idle"))
        assert idle_s + sum(one.number("busy_s") for one in steps) <= ended - began + 1e-6
        waits = {str(one.get("cause")) for one in process.trace.of("idle") if one.number("seconds") > 0}
        assert "partner" in waits or rule != "sync"


@each_rule
def test_a_newcomer_becomes_one_of_them(rule: str) -> None:
    swarm = FaultySwarm(plan(rule, steps=32))
    swarm.at(7.0, lambda: swarm.start(1, 3))
    outcome = check(swarm)
    agree(outcome)
    (loaded,) = recording_stages(outcome.nodes["s1r3"])[0].loaded
    assert loaded.kind == "restore"
    assert results(outcome, "s1r0")[-1][1] == results(outcome, "s1r3")[-1][1] == "all"


def overlapped(inner_steps: int, **changes: Any) -> SimPlan:
    """A run whose replicas train on while vectors are in transit, and tolerate 20 s without progress."""
    outer = {"rule": "diloco", "inner_steps": inner_steps, "overlap": True, "deadline_s": 40.0}
    found = plan("diloco", replicas=(2, 2), outer=outer, **changes)
    patient = found.config.limits.model_copy(update={"microbatch_deadline_s": 20.0})
    return replace(found, config=found.config.model_copy(update={"limits": patient}))


@pytest.mark.parametrize("routing", ["random", "weighted"])
def test_a_replica_that_waits_for_a_late_round_keeps_no_microbatches(routing: str) -> None:
    """The others of its stage, for whose vectors it waits, may need them for their step."""
    outcome = check(FaultySwarm(overlapped(1, routing=routing, seed=1)))
    for process in outcome.processes:
        ends = [event.at_s for event in process.trace.of("inner_step")]
        assert max(after - before for before, after in pairwise(ends)) < 5.0


def test_a_newcomer_trains_on_while_vectors_are_in_transit_even_if_its_own_does_not_count_yet() -> None:
    swarm = FaultySwarm(overlapped(4, steps=32))
    swarm.at(7.0, lambda: swarm.start(1, 2))
    check(swarm)
    idle = [e.number("seconds") for e in swarm.process("s1r2").trace.of("idle") if e.get("cause") == "partner"]
    assert len(idle) <= 1, "it waits for the last round of the run"


KINDS = ["crash", "bounce", "hang", "pause", "leave", "wipe"]
CASES = [(("diloco", "dct", "sync")[at % 3], kind) for at, kind in enumerate(KINDS)]


@pytest.mark.parametrize(
    ("rule", "kind"), [*CASES, *soak((rule, kind) for rule in RULES for kind in KINDS if (rule, kind) not in CASES)]
)
def test_replicas_come_and_go(rule: str, kind: str) -> None:
    times = {"crash": 0.0, "leave": 30.0}
    swarm = FaultySwarm(plan(rule, steps=40), (Fault(7.0, kind, ("s1r1",), times.get(kind, 2.0)),))
    outcome = check(swarm)
    agree(outcome, *(["s1r1"] if kind in ("crash", "leave") else []))


@each_rule
@pytest.mark.parametrize("stage", [1, *soak([0])])
def test_a_planted_difference_is_healed(rule: str, stage: int) -> None:
    swarm = FaultySwarm(plan(rule, steps=32))
    who = f"s{stage}r1"

    def plant() -> None:
        linear = linear_stage(swarm.process(who))
        linear.theta[0] += 0.5
        linear.base[0] += 0.5
        for values in linear.kept.values():
            values[0] += 0.5

    swarm.at(6.0, plant)
    outcome = check(swarm)
    agree(outcome)
    came = outcome.trace.of("resumed")
    assert [(e.peer, e.get("source")) for e in came] == [(who, "peer")], "only the one that differs copies, once"


@pytest.mark.parametrize("who", ["s0r1", *soak(["s1r0"])])
def test_a_difference_that_the_last_round_shows_is_healed(who: str) -> None:
    """The replica that is copied may still be waiting for the vectors of that round."""
    last = plan("diloco", routing="random", seed=1)
    swarm, before = FaultySwarm(last), FaultySwarm(last).run().trace.of("outer_round", who)[-2].at_s

    def plant() -> None:
        linear = linear_stage(swarm.process(who))
        for values in (linear.theta, linear.base, *linear.kept.values()):
            values[0] += 0.5

    swarm.at(before + 0.05, plant)
    outcome = check(swarm)
    agree(outcome)
    assert [(e.peer, e.get("source")) for e in outcome.trace.of("resumed")] == [(who, "peer")]


def test_a_node_that_copies_a_state_after_the_end_of_the_run_has_reached_its_last_step() -> None:
    """Under `sync` it takes over the clock of that state, which may be of an earlier step."""
    swarm = FaultySwarm(plan("sync", (2, 3)))

    def plant() -> None:
        node = swarm.process("s1r0").node
        node.swarm.run_ended = True
        node.swarm.first_stage_is_done = lambda: True  # type: ignore[method-assign]
        node._rounds.before_step = differs  # type: ignore[method-assign]

    async def differs() -> float:
        swarm.process("s1r0").node._rounds.ahead = ("s1r1",)
        return 0.0

    swarm.at(6.0, plant)
    outcome = check(swarm)
    assert [e.peer for e in outcome.trace.of("resumed")] == ["s1r0"]


@each_rule
def test_the_whole_swarm_is_stopped_and_goes_on(rule: str) -> None:
    peers = [f"s{stage}r{i}" for stage in range(2) for i in range(3)]
    swarm = FaultySwarm(plan(rule), tuple(Fault(8.0, "bounce", (peer,), 2.0) for peer in peers))
    agree(check(swarm))


@pytest.mark.parametrize("rule", ["diloco", "dct"])
@pytest.mark.parametrize(("overlap", "round"), [(False, 3), (True, 6), *soak([(True, 3), (False, 6)])])
def test_a_swarm_that_is_told_to_leave_during_a_round_goes_on_with_what_all_have_trained(
    rule: str, overlap: bool, round: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replica merged its own vector alone, so that they differed after the restart: all but one were replaced."""
    hold_up(monkeypatch, 2.0)
    outer = RULES[rule] | {"overlap": overlap, "deadline_s": 6.0}
    held_up, peers = plan(rule, (2, 2), outer=outer), [f"s{stage}r{i}" for stage in range(2) for i in range(2)]
    ends_s = FaultySwarm(held_up).run().trace.of("outer_round", "s1r0")[round - 1].at_s
    swarm = FaultySwarm(held_up, tuple(Fault(ends_s - 1.0, "leave", (peer,), 0.1) for peer in peers))
    outcome = check(swarm)
    agree(outcome)
    for peer in peers:
        assert [e.get("source") for e in outcome.trace.of("resumed", peer)] == ["shard"]
        assert results(outcome, peer) == [(n, "all") for n in range(1, 7)]


@pytest.mark.parametrize(
    ("rule", "replicas", "routing", "fault"),
    [
        ("sync", (4, 4), "random", "bounce"),
        ("dct", (3, 2), "weighted", None),
        *soak(
            [("sync", (2, 3), "random", None), ("sync", (4, 4), "fixed", "pause"), ("dct", (4, 4), "random", "hang")]
        ),
    ],
)
def test_where_all_wait_for_each_other_at_every_step_the_stages_go_in_step(
    rule: str, replicas: tuple[int, int], routing: str, fault: str | None
) -> None:
    """A later stage that was one microbatch behind or ahead stayed so: each of its steps waited for the first of the
    next, or for the last. After one pause of a replica `fixed` took 80 s in place of 47."""
    outer = {"rule": rule, "inner_steps": 1, "deadline_s": 3.0}
    plan = plan_of(replicas, steps=30, microbatches_per_step=4, routing=routing, outer=outer)
    outcome = check(FaultySwarm(plan, (Fault(6.0, fault, ("s1r1",), 5.0),) if fault else ()))
    tokens = Counter[tuple[str, int]]()
    for event in outcome.trace.of("inner_step"):
        tokens[event.peer[:2], int(event.number("step"))] += int(event.number("tokens"))
    for step in range(21 if fault else 1, 31):
        assert tokens["s0", step] == tokens["s1", step] > 0, f"step {step}"
