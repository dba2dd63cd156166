"""Vectors that take longer than an outer interval to send, and partners that leave while theirs are in transit.

An inner step takes about 0.36 s and m is 6. The case determines the size of a vector; the line has 1,000 bytes/s.
"""

from dataclasses import replace

import pytest
from elastic import plan_of
from lawful import check
from simulated_parts import rounds
from slow_line import SlowLine

from noloco_p2p.config import RunManifest
from noloco_p2p.sim.faults import FaultySwarm
from noloco_p2p.sim.links import Geography, Link, MessageSizes
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.telemetry import TraceEvent
from noloco_p2p.sim.world import SimPlan

M, STEPS = 6, 60


def plan(transfer_s: float, *, deadline_s: float = 100.0, max_stale_rounds: int = 2, steps: int = STEPS) -> SimPlan:
    outer = {"rule": "noloco", "inner_steps": M, "deadline_s": deadline_s, "max_stale_rounds": max_stale_rounds}
    sizes = MessageSizes(0, 0, (int(1000 * transfer_s),) * 2, (8,) * 2, (8,) * 2)
    return replace(
        plan_of((2, 2), steps=steps, outer=outer), sizes=sizes, geography=Geography(Link(0.01, bytes_per_s=1000.0))
    )


def lost(swarm: FaultySwarm) -> int:
    return sum(counts["snapshot"].lost for counts in swarm.network.traffic.byte_counts().values())


def results(outcome: Outcome, peer: str) -> list[str]:
    return [str(event.get("result")) for event in outcome.trace.of("outer_round", peer)]


def interval_s(outcome: Outcome) -> float:
    ends = [event.at_s for event in outcome.trace.of("inner_step", "s0r0")]
    return M * (ends[-1] - ends[0]) / (len(ends) - 1)


@pytest.fixture(scope="module")
def quick() -> Outcome:
    return check(FaultySwarm(plan(0.0)))


@pytest.mark.parametrize("intervals", [1.5, 2.5])
def test_a_pull_that_takes_longer_than_an_interval_serves_a_later_round(quick: Outcome, intervals: float) -> None:
    """Rounds end alone until it arrives; then one merges it, a round or two old. Nothing that was sent is wasted."""
    swarm = FaultySwarm(plan(intervals * interval_s(quick)))
    outcome = check(swarm)
    assert lost(swarm) == 0
    for process in outcome.processes:
        found = results(outcome, process.peer)
        assert found[0] == "alone"
        assert found.count("stale") >= 2
        events = outcome.trace.of("outer_round", process.peer)
        assert {e.get("reason") for e in events if e.get("result") == "alone"} <= {"late", "too old"}
        assert all(_trained(e) > 0 for e in events[:-1])


@pytest.mark.parametrize("intervals", [1.5, 4.5])
def test_a_round_of_gossip_lasts_as_long_as_its_pull(quick: Outcome, intervals: float) -> None:
    """Rounds that fall due meanwhile are only frozen for others. Each round done merges, and nothing sent is wasted."""
    slow = plan(intervals * interval_s(quick))
    fields = slow.manifest.model_dump() | {"outer": {"rule": "gossip", "inner_steps": M, "deadline_s": 100.0}}
    swarm = FaultySwarm(replace(slow, manifest=RunManifest.model_validate(fields)))
    outcome = check(swarm)
    assert lost(swarm) == 0
    for process in outcome.processes:
        assert set(results(outcome, process.peer)) <= {"partner", "stale"}
        assert 2 <= len(rounds(process)) <= 1 + STEPS / M / (intervals - 0.5)
        assert any(_trained(e) > M for e in outcome.trace.of("outer_round", process.peer)[:-1])


def test_a_pull_that_would_come_too_old_is_given_up(quick: Outcome) -> None:
    swarm = FaultySwarm(plan(2.5 * interval_s(quick), max_stale_rounds=1))
    outcome = check(swarm)
    assert lost(swarm) > 0
    assert "stale" not in results(outcome, "s0r0")[:-1]


def test_the_deadline_ends_a_pull_and_nothing_else_does(quick: Outcome) -> None:
    part = interval_s(quick) / 10
    enough, short = (FaultySwarm(plan(n * part, deadline_s=1.2 * 5 * part)) for n in (5, 15))
    assert set(results(check(enough), "s1r0")) <= {"partner", "stale"}
    assert lost(enough) == 0
    assert set(results(check(short), "s1r0")) == {"alone"}
    assert lost(short) > 0


def test_a_node_that_has_finished_stays_until_its_last_vector_has_arrived() -> None:
    """One replica's line is slow. If it did not stay, it would leave 12 s (`linger_s`) after its end."""
    slow = SlowLine(Link(0.01, bytes_per_s=1000.0), pair=("s1r0", "s1r1"), pair_bytes_per_s=50.0)
    swarm = FaultySwarm(replace(plan(1.0, steps=M), geography=slow))
    outcome = check(swarm)
    (last,) = outcome.trace.of("outer_round", "s1r1")
    assert last.get("result") in ("partner", "stale")
    assert last.number("seconds") > 20.0
    ended = {process.peer: process.ended_at_s for process in outcome.processes}
    assert last.at_s <= (ended["s1r0"] or 0.0) < last.at_s + 5.0
    assert lost(swarm) == 0


def _trained(event: TraceEvent) -> float:
    return event.number("trained")
