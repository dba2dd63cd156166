"""An outer round for which no replica waits, and events while it is open (ARCHITECTURE.md, "An outer round").

Pulls are delayed so that every round is open for about four of six inner steps, and the event falls in between.
"""

import asyncio
from collections.abc import Callable

import pytest
from elastic import plan_of
from lawful import check
from simulated_parts import linear_stage

from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.core.stage_values import TensorSpecs
from noloco_p2p.node.outer_round import OuterRounds
from noloco_p2p.sim.faults import Fault, FaultySwarm
from noloco_p2p.sim.laws import recording_stages
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.telemetry import TraceEvent
from noloco_p2p.sim.transport import SimTransport
from noloco_p2p.sim.world import SimPlan

M, PULL_S = 6, 2.2
WHO = "s1r0"


@pytest.fixture(autouse=True)
def held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    hold_up(monkeypatch, PULL_S)


def hold_up(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Make every pull of a snapshot take this much longer."""
    right = SimTransport.fetch_snapshot

    async def late(
        transport: SimTransport, peer: Advert, request: SnapshotRequest, deadline_s: float, expected: TensorSpecs
    ) -> Snapshot:
        await asyncio.sleep(seconds)
        return await right(transport, peer, request, deadline_s, expected)

    monkeypatch.setattr(SimTransport, "fetch_snapshot", late)


def plan(replicas: tuple[int, ...] = (2, 2), *, steps: int = 24, overlap: bool = True) -> SimPlan:
    outer = {"rule": "noloco", "inner_steps": M, "deadline_s": 3.0, "overlap": overlap}
    return plan_of(replicas, steps=steps, outer=outer, seed=2)


def rounds(outcome: Outcome, peer: PeerId = WHO) -> list[TraceEvent]:
    return outcome.trace.of("outer_round", peer)


def frozen_at(event: TraceEvent) -> float:
    return event.at_s - event.number("seconds")


@pytest.fixture(scope="module")
def undisturbed() -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        hold_up(patch, PULL_S)
        return check(FaultySwarm(plan()))


@pytest.fixture
def mid(undisturbed: Outcome) -> float:
    """The time when round 2 of WHO has been open for a while."""
    return frozen_at(rounds(undisturbed)[1]) + 0.7


def disturbed(mid: float, *faults: Fault, at: Callable[[FaultySwarm], None] | None = None) -> Outcome:
    """The same swarm, with faults in the middle of round 2."""
    swarm = FaultySwarm(plan(), faults)
    if at is not None:
        swarm.at(mid, lambda: at(swarm))
    return check(swarm)


def test_nobody_waits_but_for_the_last_round(undisturbed: Outcome) -> None:
    for process in undisturbed.processes:
        own = rounds(undisturbed, process.peer)
        assert [(e.number("round"), e.get("result")) for e in own] == [(n, "partner") for n in (1, 2, 3, 4)]
        assert [e.number("trained") > 1 for e in own[:3]] == [True] * 3, "each was open for some inner steps"
        assert own[3].get("trained") is None
        waited = [e for e in process.trace.of("idle") if e.get("cause") == "partner"]
        assert [e.at_s >= frozen_at(own[3]) for e in waited] == [True]
    with_waits = check(FaultySwarm(plan(overlap=False)))
    assert undisturbed.ended_at_s < with_waits.ended_at_s - 2.5 * PULL_S


def test_a_checkpoint_and_a_captured_state_have_merged_rounds_only(undisturbed: Outcome, mid: float) -> None:
    merged = {e.number("round"): e.at_s for e in rounds(undisturbed)}
    saved = {e.number("round"): e.at_s for e in undisturbed.trace.of("checkpoint", WHO)}
    assert {1, 2, 4} <= saved.keys() <= merged.keys()
    assert all(at_s > merged[round] for round, at_s in saved.items())
    outcome = disturbed(mid, at=lambda swarm: swarm.start(1, 2))
    newcomer = outcome.nodes["s1r2"]
    (loaded,) = recording_stages(newcomer)[0].loaded
    assert (loaded.kind, loaded.round) == ("restore", 1)
    first = rounds(outcome, "s1r2")[0]
    assert first.number("round") >= 2, "the open round is due again, at its first boundary"


def test_a_pause_forgets_the_round_and_it_is_done_afterwards(mid: float) -> None:
    outcome = disturbed(mid, Fault(mid, "pause", (WHO,), 1.0))
    resumed = [e.at_s for e in outcome.trace.of("state", WHO) if e.get("state") == "training"][1]
    second = rounds(outcome)[1]
    assert (second.number("round"), frozen_at(second) > resumed) == (2, True)


def test_a_node_that_leaves_merges_alone_and_saves_that(mid: float) -> None:
    outcome = disturbed(mid, Fault(mid, "leave", (WHO,), 30.0))
    assert [(e.number("round"), e.get("result"), e.get("reason")) for e in rounds(outcome)][1:2] == [
        (2, "alone", "leaving")
    ]
    assert outcome.trace.of("checkpoint", WHO)[-1].number("round") >= 2


@pytest.mark.parametrize("overlap", [True, False])
def test_a_node_that_leaves_begins_no_round(overlap: bool) -> None:
    due_s = frozen_at(rounds(check(FaultySwarm(plan(overlap=overlap))), "s0r0")[1])
    outcome = check(FaultySwarm(plan(overlap=overlap), (Fault(due_s - 0.1, "leave", ("s0r0",), 60.0),)))
    assert outcome.trace.of("inner_step", "s0r0")[-1].at_s > due_s - 0.1
    assert [event.number("round") for event in rounds(outcome, "s0r0")] == [1]


@pytest.mark.parametrize("rule", ["noloco", "gossip", "diloco"])
def test_nodes_that_leave_in_the_last_step_do_the_last_round_when_they_come_back(rule: str) -> None:
    """Those of stage 0 ended without it, because they had no step left to take."""
    outer = {"rule": rule, "inner_steps": M, "deadline_s": 3.0}
    whole = plan_of((2, 2), steps=12, outer=outer, routing="balanced", seed=2)
    peers = ["s0r0", "s0r1", "s1r0", "s1r1"]
    ends = [event.at_s for event in FaultySwarm(whole).run().trace.of("inner_step", "s0r0")]
    outcome = check(FaultySwarm(whole, tuple(Fault(ends[-1] - 0.01, "leave", (peer,), 0.1) for peer in peers)))
    for peer in peers:
        assert [e.get("source") for e in outcome.trace.of("resumed", peer)] == ["shard"]
        assert [e.number("round") for e in rounds(outcome, peer)] == [1, 2]
        assert outcome.trace.of("checkpoint", peer)[-1].number("round") == 2


def test_a_crash_takes_the_round_with_it(mid: float) -> None:
    outcome = disturbed(mid, Fault(mid, "bounce", (WHO,), 0.5))
    (came,) = outcome.trace.of("resumed", WHO)
    assert (came.get("source"), came.number("round")) == ("shard", 1)
    assert [e.number("round") for e in rounds(outcome)][:2] == [1, 2]


def test_a_move_forgets_the_round(mid: float) -> None:
    def move(swarm: FaultySwarm) -> None:
        swarm.process(WHO).node.state.drain("moving to stage 0", next_stage=0)

    outcome = disturbed(mid, at=move)
    process = outcome.nodes[WHO]
    moved = [e.at_s for e in process.trace.of("state") if e.get("state") == "syncing"][1]
    assert [e.number("round") for e in rounds(outcome) if e.at_s < moved] == [1]
    assert [stage.state.index for stage in recording_stages(process)] == [1, 0]


def test_a_partner_that_dies_costs_its_vectors_only(mid: float) -> None:
    outcome = disturbed(mid, Fault(mid, "crash", ("s1r1",)))
    second = rounds(outcome)[1]
    assert (second.number("round"), second.get("result")) == (2, "alone")
    assert second.number("trained") > 0


def test_a_partner_that_is_late_is_waited_for_by_the_pull_only() -> None:
    """It sends its snapshot of the round, or an older one: in both cases there is no wait before the last round."""
    swarm = FaultySwarm(plan((2, 2)))
    swarm.at(1.0, lambda: swarm.slow("s1r1", 2.5))
    outcome = check(swarm)
    last = rounds(outcome)[-1]
    idle = [e for e in outcome.trace.of("idle", WHO) if e.get("cause") == "partner"]
    assert all(e.at_s >= frozen_at(last) for e in idle)
    assert {e.get("result") for e in rounds(outcome)} <= {"partner", "stale", "alone"}


def test_a_round_that_is_open_when_the_next_is_due_ends_late_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """So does one that is open at the last round, which is waited for; later stages wait until stage 0 has ended."""
    hold_up(monkeypatch, 7.0)
    outcome = check(FaultySwarm(plan(steps=18)))
    for process in outcome.processes:
        found = [(e.number("round"), e.get("result"), e.get("reason")) for e in rounds(outcome, process.peer)]
        assert found[0] == (1, "alone", "late")
        if process.stage == 0:
            assert found[1:] == [(2, "alone", "late"), (3, "partner", "matched")]


@pytest.mark.parametrize("max_stale_rounds", [0, 2])
@pytest.mark.parametrize("rule", ["diloco", "dct"])
def test_the_vectors_of_all_are_waited_for_at_the_next_round_and_merged_once(
    monkeypatch: pytest.MonkeyPatch, rule: str, max_stale_rounds: int
) -> None:
    hold_up(monkeypatch, 7.0)
    outer = {"rule": rule, "inner_steps": M, "overlap": True, "max_stale_rounds": max_stale_rounds}
    swarm = FaultySwarm(plan_of((3, 3), steps=24, outer=outer, routing="balanced"))
    swarm.gap_s += 10.0
    outcome = check(swarm)
    for process in outcome.processes:
        own = rounds(outcome, process.peer)
        assert [(e.number("round"), e.get("result")) for e in own] == [(n, "all") for n in (1, 2, 3, 4)]
    assert len({tuple(linear_stage(process).theta) for process in outcome.processes}) == 2, "one of each stage"


def test_the_end_of_the_run_completes_what_is_open() -> None:
    """Round 2 is due at step 12, the last round at step 13: there round 2 ends, and round 3 is waited for."""
    outcome = check(FaultySwarm(plan(steps=13)))
    for process in outcome.processes:
        found = [(e.number("round"), e.get("reason")) for e in rounds(outcome, process.peer)]
        assert found[0::2] == [(1, "matched"), (3, "matched")]
        assert found[1] == (2, "late") or process.stage > 0


def test_a_replica_without_a_partner_merges_at_once() -> None:
    outcome = check(FaultySwarm(plan((1, 3))))
    assert all((e.get("result"), e.get("trained")) == ("alone", None) for e in rounds(outcome, "s0r0"))
    odd = [e for peer in ("s1r0", "s1r1", "s1r2") for e in rounds(outcome, peer) if e.get("reason") == "odd"]
    assert odd
    assert all(e.get("trained") is None for e in odd)


def test_a_bug_in_a_pull_ends_the_node_before_the_next_border(monkeypatch: pytest.MonkeyPatch) -> None:
    async def bug(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(OuterRounds, "_pull", bug)
    outcome = FaultySwarm(plan((2,))).run(tolerate=True)
    for process in outcome.processes:
        assert str(process.error) == "planted"
        assert process.step < M + 2


def test_a_node_that_ends_while_it_waits_for_its_partner_leaves_no_pull_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """After it is told to leave, it has `limits.drain_s`, and its pull takes longer. The partner's pull continues."""
    hold_up(monkeypatch, 60.0)
    swarm, pulls = FaultySwarm(plan((1, 2), steps=M + 1, overlap=False)), list[int]()

    def look() -> None:
        pulls.append(sum(task.get_name().startswith("outer round") for task in asyncio.all_tasks()))

    def leave() -> None:
        look()
        swarm.process(WHO).node.drain()

    swarm.at(M * 1.5, leave)
    swarm.at(45.0, look)
    swarm.run(tolerate=True)
    assert not swarm.process(WHO).running
    assert pulls == [2, 1]
