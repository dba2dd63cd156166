"""The laws of simulated swarms can fail: each finds a planted fault of the kind that it guards against."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest
from elastic import plan_of
from lawful import broken

from noloco_p2p.core import resume, schedule
from noloco_p2p.core.intake import AttemptKey, Intake
from noloco_p2p.core.messages import HostTensor, MicrobatchId, PeerId, ReplicaState
from noloco_p2p.core.snapshots import FrozenRound, PartnerVector
from noloco_p2p.core.spent_ids import SpentIds
from noloco_p2p.core.stage_values import Contribution
from noloco_p2p.lab.scenario_files import load
from noloco_p2p.node.pipeline import dispatch
from noloco_p2p.node.pipeline.race import first_granted
from noloco_p2p.node.state import NodeState
from noloco_p2p.ports import Claim
from noloco_p2p.sim import linear_stage
from noloco_p2p.sim.faults import Fault, FaultySwarm
from noloco_p2p.sim.laws import gaps, weights_survive
from noloco_p2p.sim.linear_stage import LinearStage
from noloco_p2p.sim.payloads import Payload
from noloco_p2p.sim.recording import AvailableWeights, RecordingStage, Resumption, WeightsChoice, now_s
from noloco_p2p.sim.simulation import build
from noloco_p2p.sim.traffic import Traffic
from noloco_p2p.sim.virtual_time import run

Call = Callable[[Claim], Awaitable[object]]

SMALL = (
    "replicas=[2, 2]",
    "limit_s=600",
    "workload.parameters_per_stage=1_000_000",
    "run.steps=12",
    "run.outer.inner_steps=2",
    "run.outer.deadline_s=20",
    "run.microbatches_per_step=2",
    "node.directory.refresh_s=2",
    "node.directory.ttl_s=10",
    "node.limits.microbatch_deadline_s=20",
    "node.limits.linger_s=30",
    "node.limits.drain_s=8",
)
"""A swarm of 2 + 2 nodes, whose run takes half a minute of virtual time."""

WIPED = "faults=[{at_s: 16, kind: wipe, peers: [s1r0, s1r1], for_s: 3}]"
"""All of stage 1 returns without its disks, so its weights come from a guardian."""
CAME = "faults=[{at_s: 20, kind: wipe, peers: [s1r1], for_s: 1}]"
"""One of two replicas returns without its disk, so its weights come from the other."""


HUNG = "faults=[{at_s: 9, kind: hang, peers: [s1r0, s1r1], for_s: 30}, {at_s: 16, kind: depart, peers: [s0r0]}]"
"""No node of stage 1 answers, and a node of stage 0 leaves with microbatches that it cannot deliver."""
PROMPT = ("run.outer.inner_steps=4", "run.outer.deadline_s=1", "node.directory.refresh_s=0.5")
"""Rounds, and the spreading of adverts, take about a second."""


def swarm(*sets: str, seed: int = 0) -> FaultySwarm:
    return build(load(None, (*SMALL, *sets)), seed)


def planted(*sets: str, seed: int = 0) -> str | None:
    """The message of the law that the swarm breaks, if any."""
    return broken(swarm(*sets, seed=seed))


def test_without_a_planted_fault_none_of_these_swarms_breaks_a_law() -> None:
    for sets in ((), (WIPED,), (HUNG,)):
        assert planted(*sets) is None
    assert [planted(CAME, *PROMPT, seed=seed) for seed in range(5)] == [None] * 5


def test_a_round_done_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    due = schedule.due_round

    def again(step: int, m: int, done: int, steps: int) -> int | None:
        found = due(step, m, done, steps)
        return done if found == 3 else found

    monkeypatch.setattr(schedule, "due_round", again)
    assert "its rounds do not increase: [1, 2, 2" in str(planted("limit_s=100"))


OVERLAP = "run.outer.overlap=true"


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (lambda phi, theta, frozen: phi, "θ is"),
        (lambda phi, theta, frozen: phi + 2 * (theta - frozen), "θ is"),
        (lambda phi, theta, frozen: theta, "θ is"),
    ],
    ids=["lost", "counted twice", "merge without effect"],
)
def test_progress_during_an_open_round_that_is_lost_or_counted_twice_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[float, float, float], float], found: str
) -> None:
    assert planted(OVERLAP) is None
    monkeypatch.setattr(linear_stage, "carried_over", plant)
    assert found in str(planted(OVERLAP))


def test_a_round_that_is_frozen_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Δ from another moment than θ_f, so that an inner step counts in two rounds."""
    snapshot = LinearStage.snapshot

    def bent(stage: LinearStage, round: int, step: int) -> FrozenRound:
        frozen = snapshot(stage, round, step)
        late = memoryview(array("d", [value - 1e-3 for value in stage.theta]).tobytes())
        return replace(frozen, weights=replace(frozen.weights, data=late))

    monkeypatch.setattr(LinearStage, "snapshot", bent)
    assert "θ is" in str(planted(OVERLAP))


def test_fresh_weights_despite_existing_ones_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "restore_sources", lambda *_, **__: [resume.RestoreSource("fresh", "planted")])
    assert " began with fresh weights, although there were others" in str(planted(WIPED))


def test_weights_that_changed_in_transit_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = LinearStage.restore

    def bent(stage: LinearStage, theirs: ReplicaState) -> None:
        restore(stage, theirs)
        stage.theta[0] += 1e-12

    monkeypatch.setattr(LinearStage, "restore", bent)
    assert "s1r1 loaded" in str(planted(CAME))


def test_a_partners_snapshot_that_changed_in_transit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = LinearStage.decode

    def bent(stage: LinearStage, *arguments: Any, **options: Any) -> PartnerVector:
        theirs = decode(stage, *arguments, **options)
        vector = array("d", [value + 1e-12 for value in theirs.vector.data.cast("d")])
        return replace(theirs, vector=replace(theirs.vector, data=memoryview(vector.tobytes())))

    monkeypatch.setattr(LinearStage, "decode", bent)
    assert " never froze: MergedSnapshot(" in str(planted())


def test_a_microbatch_that_never_ends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = RecordingStage.forward

    def twice(stage: RecordingStage, inputs: HostTensor, mask: HostTensor | None) -> tuple[int, HostTensor]:
        stage.forwards += stage.forwards == 3
        return forward(stage, inputs, mask)

    monkeypatch.setattr(RecordingStage, "forward", twice)
    assert "s0r0 began" in str(planted())


def test_a_graph_that_is_never_freed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearStage, "discard", lambda *_: None)
    assert "graphs open" in str(planted(HUNG))


def test_an_id_that_counts_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    once = LinearStage.loss_backward

    def twice(
        stage: LinearStage, microbatch: MicrobatchId, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None
    ) -> Contribution:
        once(stage, microbatch, inputs, targets, mask)
        return once(stage, microbatch, inputs, targets, mask)

    monkeypatch.setattr(LinearStage, "loss_backward", twice)
    assert planted() is None, "the stage itself drops known ids"
    monkeypatch.setattr(SpentIds, "spend", lambda *_: True)
    assert "s1r0 counted [" in str(planted())


ANNOUNCED = "workload.hidden_size=4096"
"""Bodies are so large that two replicas are asked for a place."""


def test_a_place_that_is_never_given_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Intake._end

    def leaks(intake: Intake, key: AttemptKey) -> None:
        end(intake, key)
        intake._in_flight += next(ended) == 20

    assert planted(ANNOUNCED) is None
    ended = count()
    monkeypatch.setattr(Intake, "_end", leaks)
    assert "Deadlock" in str(planted(ANNOUNCED, "limit_s=100"))


def test_a_body_that_is_sent_to_both_that_grant_a_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def both(calls: dict[PeerId, Call], *rest: Callable[..., None]) -> object:
        greedy = {
            peer: lambda claim, call=call: call(replace(claim, take=lambda: True)) for peer, call in calls.items()
        }
        return await first_granted(greedy, *rest)

    monkeypatch.setattr(dispatch, "first_granted", both)
    assert "two replicas of a stage counted" in str(planted(ANNOUNCED))


def test_a_newcomer_that_is_a_partner_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    announce = NodeState.update

    def at_once(node: NodeState, **changes: object) -> None:
        announce(node, **(changes | ({"partner_from_round": 0} if "partner_from_round" in changes else {})))

    monkeypatch.setattr(NodeState, "update", at_once)
    found = (planted(CAME, *PROMPT, seed=seed) for seed in range(5))  # the others must draw it as their partner
    assert any("of a newcomer" in str(one) for one in found)


def test_a_stalled_swarm_is_found() -> None:
    simulation = swarm()
    simulation.gap_s = 15.0  # it stalls for 20 s to a minute, depending on the order of simultaneous events
    for peer in ("s1r0", "s1r1"):
        simulation.at(6.0, lambda peer=peer: simulation.slow(peer, 500.0))  # type: ignore[misc]
        simulation.at(140.0, lambda peer=peer: simulation.slow(peer, 1.0))  # type: ignore[misc]
    assert "took no inner step for" in str(broken(simulation))
    assert "Deadlock" in str(planted("limit_s=5"))


def test_a_moving_node_serves_a_stage_only_while_it_holds_it() -> None:
    """Stage 1 is deserted for 20 s. Later a node of stage 0 moves there, and one of stage 1 moves to stage 0."""
    swarm = FaultySwarm(plan_of((3, 1), steps=60), (Fault(5.0, "bounce", ("s1r0",), 20.0),))
    for at_s, peer, stage in ((35.0, "s0r0", 1), (40.0, "s1r0", 0)):
        swarm.at(at_s, lambda peer=peer, stage=stage: swarm.process(peer).node.state.drain("moves", next_stage=stage))  # type: ignore[misc]
    outcome = swarm.run()
    assert (outcome.nodes["s0r0"].stage, outcome.nodes["s1r0"].stage) == (1, 0), "both have moved"
    found = list(gaps(swarm, outcome))
    assert max(gap_s for _, gap_s, _ in found) < 10.0
    assert {"s0r0", "s1r0"} <= {peer for peer, _, _ in found}


def test_bytes_that_are_unaccounted_for_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    drop = Traffic.drop

    def forgotten(traffic: Traffic, payload: Payload) -> None:
        drop(traffic, payload)
        traffic._counts[payload.sender][payload.kind].lost = 0

    crash = ("faults=[{at_s: 8, kind: crash, peers: [s1r0]}]", "network.access.up_mbit_per_s=300")
    assert planted(*crash) is None
    monkeypatch.setattr(Traffic, "drop", forgotten)
    assert "are unaccounted for" in str(planted(*crash))


def went_on(
    living: tuple[int, ...], round: int, *hardly_reached: int, replaced: int | None = None, fresh_round: int = 0
) -> FaultySwarm:
    """A swarm in which a node resumed from this round and lineage, when the replicas of its stage had these ages."""
    available = AvailableWeights(1.0, living, (*living, *hardly_reached), (), (), (), replaced)
    resumed = Resumption(2.0, "me", "peer", round, available, fresh_round)
    return cast(FaultySwarm, SimpleNamespace(resumptions=[resumed]))


def test_a_replica_far_ahead_of_the_others_need_not_be_the_donor() -> None:
    """In the order of `core.resume`: 7 may be a lie if the other has 3, but not if a third node has 7 as well."""
    weights_survive(went_on((3, 7), 3))
    weights_survive(went_on((5, 9), 4))
    weights_survive(went_on((7,), 3, 3))
    for living, round in (((3, 7, 7), 3), ((3, 6), 2), ((4, 8), 0), ((4, 4), 0)):
        with pytest.raises(AssertionError, match="me resumed far behind the living replicas"):
            weights_survive(went_on(living, round))


def test_a_replica_that_differs_adopts_the_majoritys_weights_without_giving_up_newer_ones() -> None:
    weights_survive(went_on((5, 8), 4, replaced=5))
    weights_survive(went_on((10, 10), 10, replaced=24))
    with pytest.raises(AssertionError, match="me gave up newer weights"):
        weights_survive(went_on((5, 8), 4, replaced=8))


def test_it_is_the_age_of_weights_that_counts_not_their_round() -> None:
    weights_survive(went_on((12,), 12, replaced=2))
    weights_survive(went_on((30,), 50, fresh_round=20, replaced=12))
    with pytest.raises(AssertionError, match="me gave up newer weights"):
        weights_survive(went_on((12,), 50, fresh_round=45, replaced=12))
    with pytest.raises(AssertionError, match="me resumed far behind"):
        weights_survive(went_on((12,), 50, fresh_round=45))


def chosen(do: Callable[[WeightsChoice], Awaitable[object]]) -> float:
    """The time of the choice with which the node then resumed."""

    async def scenario() -> float:
        choice = WeightsChoice(lambda: AvailableWeights(now_s(), (), (), (), (), ()), settled_s=5.0)
        await do(choice)
        return choice.take().at_s

    return run(scenario())


def test_a_look_while_weights_travel_does_not_change_the_time_of_the_choice() -> None:
    async def travels_long(choice: WeightsChoice) -> None:
        choice.ask()
        fetched = asyncio.create_task(choice.fetch(asyncio.sleep(40.0)))
        await asyncio.sleep(20.0)
        choice.ask()
        await fetched

    assert chosen(travels_long) == 0.0


def test_a_node_whose_fetch_fails_chooses_again() -> None:
    async def breaks(choice: WeightsChoice) -> None:
        choice.ask()
        with pytest.raises(TimeoutError):
            await choice.fetch(asyncio.wait_for(asyncio.sleep(99.0), 2.0))

    assert chosen(breaks) == 2.0


def test_an_old_look_is_not_used_for_the_choice() -> None:
    async def dawdles(choice: WeightsChoice) -> None:
        choice.ask()
        await asyncio.sleep(9.0)

    assert chosen(dawdles) == 9.0
