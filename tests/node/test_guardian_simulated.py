"""Guardians in swarms of real nodes under virtual time: a stage's weights are not lost with its last replica."""

import asyncio
from functools import partial
from math import ceil

import pytest
from barriers import barrier
from soak import soak

from noloco_p2p.config import (
    DirectorySettings,
    EvaluationSettings,
    LimitSettings,
    NodeConfig,
    OuterSettings,
    RunManifest,
)
from noloco_p2p.core.guardians import GUARDIANS, holders
from noloco_p2p.core.messages import Advert
from noloco_p2p.node.guardian import EVERY_STEPS
from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.telemetry import Trace
from noloco_p2p.sim.world import SimPlan, SimSwarm

SOON_S = 0.5
"""Seconds within which a guardian has what its ward has: a few of the inner steps below."""
INNER_STEPS = 4
BEHIND = 1 + ceil(EVERY_STEPS / INNER_STEPS)
"""Rounds that a ward may do before a guardian asks again."""
LIMITS = LimitSettings(microbatch_deadline_s=4.0, patience_floor_s=0.6, linger_s=10.0, drain_s=5.0)
CONFIG = NodeConfig(limits=LIMITS, directory=DirectorySettings(refresh_s=1.0, ttl_s=3.0))


def plan_for(replicas: tuple[int, ...], steps: int, pairing: str = "matched") -> SimPlan:
    outer = {"rule": "noloco", "inner_steps": INNER_STEPS, "deadline_s": 2.0, "pairing": pairing}
    manifest = RunManifest(
        stages=len(replicas),
        start_replicas=1,
        steps=steps,
        sequence_length=4,
        microbatch_size=1,
        microbatches_per_step=3,
        outer=OuterSettings.model_validate(outer),
        evaluation=EvaluationSettings(every_steps=None, microbatches=2),
    )
    return SimPlan(manifest, replicas, seed=1, config=CONFIG, costs=Costs(spread=0.3))


def rounds_of(trace: Trace, *peers: str) -> list[tuple[float, int]]:
    """(time, round) of the outer rounds that these peers did."""
    found = [(h.at_s, h.get("round")) for peer in peers for h in trace.of("outer_round", peer)]
    return [(at_s, round) for at_s, round in found if isinstance(round, int)]


def guarded(trace: Trace, stage: int) -> list[tuple[float, str, int]]:
    """(time, guardian, round) of the pulls of a stage's weights."""
    found = [(h.at_s, h.peer, h.get("round")) for h in trace.of("guarded") if h.get("stage") == stage]
    return [(at_s, peer, round) for at_s, peer, round in found if isinstance(round, int)]


def living(swarm: SimSwarm) -> list[Advert]:
    """The present adverts of all running nodes."""
    processes = {process.peer: process for process in swarm.processes}
    return [one.node.state.advert for one in processes.values() if not one.crashed and one.ended_at_s is None]


def resumed(outcome: Outcome, peer: str) -> list[tuple[object, object]]:
    return [(h.get("source"), h.get("round")) for h in outcome.trace.of("resumed", peer)]


@pytest.mark.parametrize("replicas", [(1, 2, 1), (2, 2, 2), *soak([((1, 1, 1),), ((2, 1),)])])
def test_guardians_are_never_many_rounds_behind_their_wards(replicas: tuple[int, ...]) -> None:
    swarm = SimSwarm(plan_for(replicas, steps=60))
    outcome = swarm.run(limit_s=100)
    for stage, count in enumerate(replicas):
        wards = [f"s{stage}r{i}" for i in range(count)]
        pulled = guarded(outcome.trace, stage)
        for at_s, round in rounds_of(outcome.trace, *wards):
            best = max((r for when, _, r in pulled if when <= at_s + SOON_S), default=0)
            assert best >= round - BEHIND, f"round {round} of stage {stage} at {at_s:.3f} s, but {best} is held"
        per_guardian = {peer: max(r for _, p, r in pulled if p == peer) for _, peer, _ in pulled}
        assert set(per_guardian) & set(wards) == set()
        assert len(per_guardian) >= min(GUARDIANS, sum(replicas) - count), "one guardian may die with its ward"
        assert max(per_guardian.values()) >= 15 - BEHIND, "of 15 rounds"
        newest = [r for _, p, r in pulled if p == pulled[0][1]]
        assert newest == sorted(set(newest)), "a guardian pulls a round once"


@pytest.mark.parametrize(("replicas", "pairing", "stages"), [
    ((3, 3), "matched", []),
    ((2, 2), "none", []),
    ((2,), "matched", []),
    ((3, 2), "matched", [1]),
])  # fmt: skip
def test_only_few_replicas_are_guarded_and_only_where_there_are_rounds(
    replicas: tuple[int, ...], pairing: str, stages: list[int]
) -> None:
    swarm = SimSwarm(plan_for(replicas, steps=40, pairing=pairing))
    outcome = swarm.run(limit_s=100)
    everybody_is_seen_at_s = 2.0
    ends_at_s = min(h.at_s for h in outcome.trace.of("state") if h.get("state") == "finished")
    times = {stage: [at_s for at_s, _, _ in guarded(outcome.trace, stage)] for stage in range(len(replicas))}
    found = {s for s, pulled in times.items() if any(everybody_is_seen_at_s < at_s < ends_at_s for at_s in pulled)}
    assert sorted(found) == stages


def test_without_outer_rounds_a_last_replica_that_leaves_waits_for_no_guardian() -> None:
    swarm = SimSwarm(plan_for((2, 1), steps=60, pairing="none"))
    swarm.at(3.0, lambda: swarm.drain("s1r0"))
    swarm.at(6.0, lambda: swarm.start(1, 1))
    assert swarm.run(limit_s=200, tolerate=True).nodes["s1r0"].ended_at_s == pytest.approx(3.0, abs=1.5)


def test_both_last_replicas_die_at_once_and_their_stage_goes_on_from_a_guardian() -> None:
    swarm = SimSwarm(plan_for((2, 2, 2), steps=60))
    seen: list[tuple[int, list[int]]] = []

    def look() -> None:
        done = max(round for _, round in rounds_of(swarm.trace, "s1r0", "s1r1"))
        seen.append((done, [held.round for _, held in holders(1, living(swarm))]))

    for peer in ("s1r0", "s1r1"):
        swarm.at(5.0, lambda peer=peer: swarm.crash(peer))  # type: ignore[misc]
    for at_s in (5.5, 30.0):
        swarm.at(at_s, look)
    swarm.at(31.0, lambda: swarm.start(1, 5))
    outcome = swarm.run(limit_s=200)
    (done, held), (_, later) = seen
    assert len(held) >= GUARDIANS
    assert done - held[0] <= BEHIND
    assert later == held, "no guardian forgets what no other node has"
    assert resumed(outcome, "s1r5") == [("guardian", held[0])]
    survivors = [one for one in outcome.processes if not one.crashed]
    assert {one.step for one in survivors} == {60.0}


def test_a_guardian_that_dies_is_replaced() -> None:
    swarm = SimSwarm(plan_for((3, 1), steps=150))
    before: list[str] = []

    def strike() -> None:
        before.extend(advert.peer_id for advert, _ in holders(1, living(swarm)))
        swarm.crash(before[0])

    swarm.at(5.0, strike)
    outcome = swarm.run(limit_s=100)
    assert len(before) == GUARDIANS
    after = {peer for at_s, peer, _ in guarded(outcome.trace, 1) if at_s > 5.0}
    assert after == {"s0r0", "s0r1", "s0r2"} - {before[0]}


@pytest.mark.parametrize("how", ["crash", "drain"])
def test_what_is_left_of_a_lost_stage_outlives_its_guardians(how: str) -> None:
    """They go one after the other, and there is a third node that could have guarded it."""
    swarm = SimSwarm(plan_for((3, 1), steps=60))
    held: list[str] = []

    def lose() -> None:
        swarm.crash("s1r0")
        held.extend(advert.peer_id for advert, _ in holders(1, living(swarm)))

    swarm.at(5.0, lose)
    for number in range(GUARDIANS):
        swarm.at(15.0 + 10.0 * number, lambda number=number: getattr(swarm, how)(held[number]))  # type: ignore[misc]
    swarm.at(40.0, lambda: swarm.start(1, 5))
    outcome = swarm.run(limit_s=200)
    assert len(held) == GUARDIANS
    ((source, round),) = resumed(outcome, "s1r5")
    assert source == "guardian"
    assert isinstance(round, int)
    assert round > 0


@pytest.mark.parametrize("after_s", [0.0, 0.005])
def test_a_guardian_that_moves_to_the_lost_stage_and_is_told_to_leave_first_hands_its_weights_over(
    after_s: float,
) -> None:
    """The other guardian has died, and the third node could not reach this one before it moved."""
    swarm = SimSwarm(plan_for((3, 1), steps=60))
    held: list[str] = []
    moved: list[float] = []

    def lose() -> None:
        swarm.crash("s1r0")
        held.extend(advert.peer_id for advert, _ in holders(1, living(swarm)))
        held.extend({"s0r0", "s0r1", "s0r2"} - set(held))
        swarm.network.block(barrier("cut", held[0], held[2]))

    def move() -> None:
        mover = swarm.process(held[0])
        record, node = mover.ports.telemetry.event, mover.node.state

        def event(kind: str, /, **fields: object) -> None:
            record(kind, **fields)
            if fields.get("reason") == "moves to stage 1":
                moved.append(node.now())
                swarm.network.unblock(barrier("cut", held[0], held[2]))
                asyncio.get_running_loop().call_later(after_s, swarm.drain, mover.peer)

        mover.ports.telemetry.event = event  # type: ignore[method-assign]
        node.drain("moving to stage 1", next_stage=1)

    swarm.at(5.0, lose)
    swarm.at(5.5, lambda: swarm.crash(held[1]))
    swarm.at(6.0, move)
    swarm.at(30.0, lambda: swarm.start(1, 5))
    outcome = swarm.run(limit_s=200)
    assert not [peer for at_s, peer, _ in guarded(outcome.trace, 1) if 5.0 < at_s < moved[0]]
    assert resumed(outcome, "s1r5")[0][0] == "guardian"


def test_a_guardian_that_leaves_waits_until_another_one_has_what_only_it_holds() -> None:
    """The other guardian of the lost stage has died, and the node that could guard it has only just come."""

    def lost() -> SimSwarm:
        swarm = SimSwarm(plan_for((2, 1), steps=60))
        for peer in ("s1r0", "s0r1"):
            swarm.at(5.0, lambda peer=peer: swarm.crash(peer))  # type: ignore[misc]
        swarm.at(9.0, lambda: swarm.start(0, 2))
        swarm.at(30.0, lambda: swarm.start(1, 5))
        return swarm

    came = next(h.at_s for h in lost().run(limit_s=200).trace.of("state", "s0r2") if h.get("state") == "training")
    swarm = lost()
    swarm.at(came + 0.05, lambda: swarm.drain("s0r0"))
    assert resumed(swarm.run(limit_s=200), "s1r5")[0][0] == "guardian"


def test_a_leaving_last_replica_goes_when_its_final_snapshot_is_guarded() -> None:
    swarm = SimSwarm(plan_for((2, 1, 2), steps=60))
    swarm.at(5.0, lambda: swarm.drain("s1r0"))
    swarm.at(20.0, lambda: swarm.start(1, 5))
    outcome = swarm.run(limit_s=200)
    left = next(one for one in outcome.processes if one.peer == "s1r0")
    done = max(round for _, round in rounds_of(left.trace, "s1r0"))
    pulled = [(at_s, round) for at_s, _, round in guarded(outcome.trace, 1) if at_s > 5.0]
    assert left.ended_at_s is not None
    assert (done + 1) in [round for at_s, round in pulled if at_s < left.ended_at_s]
    assert left.ended_at_s < 5.0 + 3.0, "it does not wait until its time is up"
    assert resumed(outcome, "s1r5") == [("guardian", done + 1)]


def test_a_stage_with_three_replicas_again_is_forgotten() -> None:
    swarm = SimSwarm(plan_for((2, 2), steps=120))
    seen: list[list[int]] = []
    swarm.at(4.0, lambda: seen.append([held.round for _, held in holders(1, living(swarm))]))
    swarm.at(4.0, lambda: swarm.start(1, 5))
    swarm.at(12.0, lambda: seen.append([held.round for _, held in holders(1, living(swarm))]))
    outcome = swarm.run(limit_s=100)
    assert len(seen[0]) == GUARDIANS
    assert seen[1] == []
    told = {h.peer: h.get("rounds") for h in outcome.trace.of("guards") if h.at_s < 12.0 and h.peer.startswith("s0")}
    assert told == {"s0r0": {}, "s0r1": {}}, "the metrics forget it, too"


def test_a_hung_ward_holds_nobody_up() -> None:
    plan = plan_for((2, 2), steps=60)
    for pulled_at_s, _, _ in guarded(SimSwarm(plan).run(limit_s=200).trace, 1):
        if not 5.0 < pulled_at_s < 10.0:
            continue
        swarm = SimSwarm(plan)
        swarm.at(pulled_at_s - 0.005, partial(swarm.network.block, barrier("hang", "s1r0")))
        swarm.at(14.0, partial(swarm.network.unblock, barrier("hang", "s1r0")))
        outcome = swarm.run(limit_s=200)
        warnings = [(h.at_s, h.peer, str(h.get("message"))) for h in outcome.trace.of("warning")]
        if failures := [(at_s, peer) for at_s, peer, message in warnings if "from s1r0 to guard" in message]:
            break  # that pull was from s1r0, not from the other replica
    done = max(round for at_s, round in rounds_of(outcome.trace, "s1r1") if at_s < 14.0)
    pulled = [round for at_s, _, round in guarded(outcome.trace, 1) if 5.0 < at_s < 14.0]
    assert done - max(pulled) <= BEHIND, "the other replica provides its snapshots"
    (failed_at_s, guardian), *_ = failures
    after = [at_s for at_s, peer, _ in guarded(outcome.trace, 1) if peer == guardian and at_s > failed_at_s]
    assert after[0] - failed_at_s < 0.1, "asked at once after the first one failed"
    assert {one.step for one in outcome.processes} == {60.0}
