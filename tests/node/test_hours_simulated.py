"""Nodes that may be used only at certain hours, under virtual time. A run begins when clocks show midnight."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from elastic import config_for, manifest_for, plan_of
from lawful import check
from soak import soak

from noloco_p2p.core.guardians import holders
from noloco_p2p.core.messages import Advert, Batch, PeerId
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.core.stage_values import StepLabel, StepResult
from noloco_p2p.sim.batches import SimBatches
from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.faults import Fault, FaultySwarm
from noloco_p2p.sim.links import Link
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.recording import RecordingStage
from noloco_p2p.sim.transport import SimTransport
from noloco_p2p.sim.world import SimPlan, peer_id

LOOK_S = 6.0
"""Seconds after which a node has looked at the clock, and has finished the inner step under way."""


class ByTheClock(FaultySwarm):
    """A swarm in which some nodes have `limits.hours`."""

    def __init__(self, replicas: tuple[int, ...], hours: Mapping[PeerId, str], steps: int) -> None:
        costs = Costs(forward_s=0.2, backward_s=0.4, inner_step_s=0.1, spread=0.2)
        plan = SimPlan(manifest_for(replicas, steps=steps), replicas, seed=1, config=config_for(), costs=costs)
        super().__init__(plan, (), limit_s=3000.0)
        self.hours = hours

    def start(self, stage: int, replica: int) -> None:
        plan, hours = self.plan, self.hours.get(peer_id(stage, replica), "").split()
        limits = plan.config.limits.model_copy(update={"hours": tuple(hours)})
        self.plan = replace(plan, config=plan.config.model_copy(update={"limits": limits}))
        super().start(stage, replica)
        self.plan = plan


def steps_between(outcome: Outcome, peer: PeerId, begin: float, end: float) -> list[float]:
    return [h.at_s for h in outcome.trace.of("inner_step", peer) if begin < h.at_s < end]


@pytest.mark.parametrize("peer", ["s0r1", *soak(["s1r1"])])
def test_a_node_pauses_outside_of_its_hours_and_comes_back(peer: PeerId) -> None:
    outcome = check(ByTheClock((2, 2), {peer: "00:00-00:01 00:03-23:00"}, steps=150))
    assert steps_between(outcome, peer, 30.0, 60.0)
    assert not steps_between(outcome, peer, 60.0 + LOOK_S, 180.0)
    assert steps_between(outcome, peer, 180.0, 180.0 + 3 * LOOK_S)
    states = [(h.get("state"), h.get("reason")) for h in outcome.trace.of("state", peer)]
    assert ("paused", "until 00:03") in states
    for other in {"s0r0", "s1r0"} - {peer}:
        assert steps_between(outcome, other, 90.0, 120.0), "the others train on"


@pytest.mark.parametrize("peer", ["s1r1", *soak(["s0r1"])])
def test_the_time_of_a_pause_is_not_taken_for_that_of_an_inner_step(peer: PeerId) -> None:
    swarm = ByTheClock((2, 2), {peer: "00:00-00:01 00:05-23:00"}, steps=250)
    speeds: list[float] = []
    for at_s in (58.0, 300.0 + 2 * LOOK_S):
        swarm.at(at_s, lambda: speeds.append(swarm.process(peer).node.state.advert.steps_per_s))
    outcome = check(swarm)
    assert steps_between(outcome, peer, 300.0, 300.0 + 2 * LOOK_S)
    assert speeds[1] > speeds[0] / 2, "it trains as fast as before"


@pytest.mark.parametrize("peer", ["s0r1", *soak(["s1r1"])])
def test_a_node_that_is_started_too_early_joins_when_its_hours_begin(peer: PeerId) -> None:
    swarm = ByTheClock((2, 2), {peer: "00:02-23:00"}, steps=150)
    seen: set[PeerId] = set()
    swarm.at(100.0, lambda: seen.update(one.peer_id for one in swarm.process("s0r0").node.swarm.members.all()))
    swarm.plan = replace(swarm.plan, manifest=swarm.plan.manifest.model_copy(update={"start_replicas": 1}))
    outcome = check(swarm)
    assert seen == {"s0r0", "s0r1", "s1r0", "s1r1"} - {"s0r0", peer}
    assert not steps_between(outcome, peer, 0.0, 120.0)
    assert steps_between(outcome, peer, 120.0, 120.0 + 5 * LOOK_S)


def test_a_node_that_is_told_to_leave_before_its_hours_leaves() -> None:
    swarm = ByTheClock((2, 2), {"s1r1": "12:00-13:00"}, steps=20)
    swarm.plan = replace(swarm.plan, manifest=swarm.plan.manifest.model_copy(update={"start_replicas": 1}))
    swarm.at(10.0, lambda: swarm.drain("s1r1"))
    outcome = check(swarm)
    assert outcome.nodes["s1r1"].ended_at_s == pytest.approx(10.0, abs=2.0)


def test_resume_does_not_end_the_hours_and_hours_do_not_end_a_pause() -> None:
    swarm = ByTheClock((2, 2), {"s1r1": "00:00-00:01 00:03-23:00"}, steps=200)
    swarm.at(90.0, lambda: swarm.resume("s1r1"))
    swarm.at(120.0, lambda: swarm.pause("s1r1"))
    swarm.at(240.0, lambda: swarm.resume("s1r1"))
    outcome = check(swarm)
    assert not steps_between(outcome, "s1r1", 60.0 + LOOK_S, 240.0)
    assert steps_between(outcome, "s1r1", 240.0, 240.0 + 3 * LOOK_S)


def test_the_last_replica_of_a_stage_says_so_and_leaves_its_weights_with_guardians() -> None:
    """Its machine is switched off meanwhile, and another node continues from the weights that it had when it paused."""
    swarm = ByTheClock((2, 1), {"s1r0": "00:00-00:01"}, steps=120)
    swarm.at(90.0, lambda: swarm.crash("s1r0"))
    held: list[tuple[int, int]] = []
    swarm.at(
        100.0,
        lambda: held.extend(
            (one.round, one.step)
            for _, one in holders(1, [p.node.state.advert for p in swarm.processes if not p.crashed])
        ),
    )
    swarm.at(110.0, lambda: swarm.start(1, 1))
    outcome = check(swarm)
    paused = outcome.nodes["s1r0"]
    assert any("no other replica" in str(h.get("message")) for h in outcome.trace.of("warning", "s1r0"))
    last = max(h.get("step") for h in outcome.trace.of("inner_step", "s1r0"))  # type: ignore[type-var]
    assert [step for _, step in held] == [int(last)] * 2, "both guardians have its last weights"  # type: ignore[call-overload]
    assert paused.crashed
    assert [h.get("source") for h in outcome.trace.of("resumed", "s1r1")] == ["guardian"]


def test_two_last_replicas_that_pause_at_the_same_time_do_not_rely_on_each_other() -> None:
    """Each asked the other one when that had not paused yet. So neither said that the swarm would stand still, and the
    guardians had only the weights of the round before."""
    rounds = {"rule": "noloco", "inner_steps": 20, "deadline_s": 3.0}
    plan = replace(plan_of((2, 2), steps=40, outer=rounds), link=Link(latency_s=0.1))
    swarm = FaultySwarm(plan, tuple(Fault(20.0, "pause", (peer,), 20.0) for peer in ("s1r0", "s1r1")))
    held: list[int] = []

    def look() -> None:
        adverts = [process.node.state.advert for process in swarm.processes]
        held.extend(one.step for _, one in holders(1, adverts))

    swarm.at(35.0, look)
    outcome = check(swarm)
    warned = {one.peer for one in outcome.trace.of("warning") if "no other replica" in str(one.get("message"))}
    assert warned == {"s1r0", "s1r1"}
    taken = outcome.trace.of("inner_step", "s1r0") + outcome.trace.of("inner_step", "s1r1")
    assert held == [max(int(one.number("step")) for one in taken if one.at_s < 35.0)] * 2


def test_the_last_replica_of_a_stage_comes_back_to_a_swarm_that_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    pulled: list[float] = []
    fetch = SimTransport.fetch_snapshot

    async def noted(self: SimTransport, peer: Advert, request: SnapshotRequest, *rest: Any) -> Snapshot:
        if request.stage == 1 and request.weights is not None:
            pulled.append(asyncio.get_running_loop().time())
        return await fetch(self, peer, request, *rest)

    monkeypatch.setattr(SimTransport, "fetch_snapshot", noted)
    outcome = check(ByTheClock((2, 1, 2), {"s1r0": "00:00-00:01 00:10-23:00"}, steps=100))
    assert {process.step for process in outcome.processes} == {100.0}
    assert 1 <= len([at_s for at_s in pulled if 60.0 < at_s < 600.0]) <= 4, "guardians pull the last weights once"
    assert len(steps_between(outcome, "s0r0", 60.0 + 2 * LOOK_S, 600.0)) == 0


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """Data → how often they were read and not trained on; negative if trained on too often."""
    found: Counter[bytes] = Counter()
    next_batch, inner_step = SimBatches.next, RecordingStage.inner_step

    async def reading(self: SimBatches) -> Batch:
        batch = await next_batch(self)
        found[bytes(batch.inputs.data)] += 1
        return batch

    def stepping(self: RecordingStage, label: StepLabel) -> StepResult:
        found.subtract(bytes(batch.inputs.data) for one, batch in label.batches.items() if one in label.routes)
        return inner_step(self, label)

    monkeypatch.setattr(SimBatches, "next", reading)
    monkeypatch.setattr(RecordingStage, "inner_step", stepping)
    return found


def drops(outcome: Outcome) -> set[object]:
    """The reasons why microbatches were dropped. Stage 0 takes no step from which all of them were."""
    steps = [h for h in outcome.trace.of("inner_step") if h.peer.startswith("s0")]
    assert all(h.number("tokens") > 0 for h in steps)
    return {h.get("reason") for h in outcome.trace.of("microbatch") if h.get("result") == "dropped"}


@pytest.mark.parametrize(
    ("routing", "replicas"), [("balanced", (1, 1)), ("random", (2, 1, 2)), *soak([("balanced", (2, 1, 2))])]
)
def test_hours_may_end_everywhere_at_once_and_in_mid_step(
    routing: str, replicas: tuple[int, ...], lost: Counter[bytes]
) -> None:
    """Later stages pause before stage 0 has everything back. It trains on what it has read after the pause."""
    everybody = [peer_id(stage, i) for stage, count in enumerate(replicas) for i in range(count)]
    swarm = ByTheClock(replicas, dict.fromkeys(everybody, "00:00-00:01 00:03-23:00"), steps=60)
    swarm.plan = replace(swarm.plan, manifest=swarm.plan.manifest.model_copy(update={"routing": routing}))
    states: dict[PeerId, str] = {}
    swarm.at(60.0 + LOOK_S, lambda: states.update((p.peer, p.state) for p in swarm.processes))
    outcome = check(swarm)
    assert set(states.values()) == {"paused"}, states
    for peer in everybody:
        assert not steps_between(outcome, peer, 60.0 + LOOK_S, 180.0)
        assert steps_between(outcome, peer, 180.0, 180.0 + 3 * LOOK_S)
    assert drops(outcome) == {"paused"}
    assert not any(lost.values()), "nothing is lost or trained on twice"


def test_a_step_may_be_cut_short_again_before_anybody_has_come_back(lost: Counter[bytes]) -> None:
    hours = {"s0r0": "00:00-00:01 00:02-00:03 00:04-23:00", "s1r0": "00:00-00:01 00:06-23:00"}
    swarm = ByTheClock((1, 1), hours, steps=60)
    states: list[str] = []
    for at_s in (60.0, 120.0, 180.0, 240.0):
        swarm.at(at_s + LOOK_S, lambda: states.append(swarm.process("s0r0").state))
    outcome = check(swarm)
    assert states == ["paused", "training", "paused", "training"]
    assert drops(outcome) == {"paused"}
    assert not any(lost.values())


def test_a_node_that_is_told_to_pause_does_not_wait_for_a_stage_that_has_crashed(lost: Counter[bytes]) -> None:
    swarm = ByTheClock((1, 1), {}, steps=40)
    swarm.at(10.0, lambda: swarm.bounce("s1r0", 40.0))
    swarm.at(35.0, lambda: swarm.pause("s0r0"))
    states: list[str] = []
    swarm.at(36.0, lambda: states.append(swarm.process("s0r0").state))
    swarm.at(45.0, lambda: swarm.resume("s0r0"))
    outcome = check(swarm)
    assert states == ["paused"]
    assert drops(outcome) == {"paused"}
    assert not any(lost.values())


@pytest.mark.parametrize("peer", ["s1r1", *soak(["s0r1"])])
def test_a_node_that_has_paused_for_longer_catches_up_with_those_that_come_back_with_it(peer: PeerId) -> None:
    hours = dict.fromkeys(["s0r0", "s0r1", "s1r0", "s1r1"], "00:00-00:02 00:03-23:00")
    outcome = check(ByTheClock((2, 2), hours | {peer: "00:00-00:01 00:03-23:00"}, steps=100))
    assert [h.get("source") for h in outcome.trace.of("resumed", peer)] == ["peer"]
    assert not [h for h in outcome.trace.of("resumed") if h.peer != peer]
