"""Elastic swarms under virtual time, one at a time: joining, restarting, splitting, pausing, leaving, moving."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import pstdev

import pytest
from elastic import COSTS, plan_of
from lawful import check, training
from mixed import drawn as drawn_mixed
from sim_transport_fixture import lose_next_reply
from simulated_parts import linear_stage, rounds, tear
from slow_line import SlowLine
from soak import soak

from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import Checkpoint, Gradient, Header, Holding, PeerId
from noloco_p2p.errors import Busy
from noloco_p2p.node.pipeline.serve import MicrobatchServer
from noloco_p2p.node.restore import WeightRestorer
from noloco_p2p.ports import Body
from noloco_p2p.sim.batches import SimBatches
from noloco_p2p.sim.checkpoints import SimCheckpoints
from noloco_p2p.sim.faults import Fault, FaultySwarm
from noloco_p2p.sim.laws import recording_stages
from noloco_p2p.sim.links import Link, MessageSizes
from noloco_p2p.sim.process import Outcome, SimProcess
from noloco_p2p.sim.recording import now_s
from noloco_p2p.sim.world import SimPlan, peer_id


def weights(process: SimProcess) -> tuple[object, ...]:
    """Everything that a replica has learned."""
    stage = linear_stage(process)
    return stage.inner_steps, *stage.theta, *stage.kept["slow"], *stage.kept["momentum"]


def times(outcome: Outcome, kind: str, peer: PeerId) -> list[float]:
    """When a node recorded events of a kind."""
    return [h.at_s for h in outcome.trace.of(kind, peer)]


# --- joining ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", [{"rule": "gossip"}, {"rule": "noloco", "inner_steps": 4}])
@pytest.mark.parametrize("peer", ["s1r3", *soak(["s0r2"])])
def test_nobody_merges_the_initial_weights_of_a_node_that_still_copies_a_state(
    peer: PeerId, outer: Mapping[str, object]
) -> None:
    """Early in a run, they are of a recent round. One node is a newcomer, the other moves from another stage."""
    plan = plan_of((3, 3), steps=30, outer={"deadline_s": 3.0, **outer})
    sizes = MessageSizes(1000, 1000, (1000, 1000), (1000, 1000), (20_000_000, 20_000_000))
    swarm = FaultySwarm(replace(plan, sizes=sizes, link=Link(latency_s=0.005, bytes_per_s=4e6)))
    if peer == "s1r3":
        swarm.at(3.0, lambda: swarm.start(1, 3))
    else:
        swarm.at(3.0, lambda: swarm.process(peer).node.state.drain("moving to stage 1", next_stage=1))
    outcome = check(swarm)
    (came,) = outcome.trace.of("resumed", peer)
    assert came.at_s > 8.0
    rounds = [h for process in outcome.of_stage(1) for h in process.trace.of("outer_round") if h.peer != peer]
    assert not [h for h in rounds if h.get("partner") == peer and h.at_s < came.at_s]
    assert [h for h in rounds if h.get("partner") == peer and h.at_s > came.at_s]
    asked = f"no snapshot from {peer}: "
    assert not [h for h in outcome.trace.of("warning") if str(h.get("message")).startswith(asked)]


def test_nobody_merges_the_initial_weights_of_a_node_that_is_back_at_its_stage_and_looks_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others have not read yet that it had moved away, and its disk is slow."""
    plan = replace(plan_of((2, 2), steps=16, outer={"rule": "gossip", "deadline_s": 3.0}), view_age_s=2.0)
    swarm, held, peer = FaultySwarm(plan), SimCheckpoints.held, "s1r1"

    async def slowly(self: SimCheckpoints) -> list[Holding]:
        await asyncio.sleep(4.0 if now_s() > 1.0 else 0.0)
        return await held(self)

    monkeypatch.setattr(SimCheckpoints, "held", slowly)
    swarm.at(1.5, lambda: swarm.process(peer).node.state.drain("moving to stage 1", next_stage=1))
    outcome = check(swarm)
    came = min(one.at_s for one in outcome.trace.of("resumed", peer))
    assert came > 5.0
    merged = [one for stage in recording_stages(outcome.nodes["s1r0"]) for one in stage.merged if one.partner == peer]
    assert not [one for one in merged if 2.0 < one.at_s < came]


def test_a_newcomer_whose_transfer_takes_long_begins_at_the_others_clock() -> None:
    """What they had answered was too old by then, and under `balanced` all waited for each step since the copy."""
    outer = {"rule": "noloco", "inner_steps": 10, "deadline_s": 3.0}
    plan = plan_of((2, 2), steps=50, routing="balanced", outer=outer)
    sizes = MessageSizes(1000, 1000, (1000, 1000), (1000, 1000), (60_000_000, 60_000_000))
    swarm = FaultySwarm(replace(plan, sizes=sizes, link=Link(latency_s=0.005, bytes_per_s=4e6)))
    swarm.at(3.0, lambda: swarm.start(0, 2))
    outcome = check(swarm)
    [came] = outcome.trace.of("resumed", "s0r2")
    assert came.at_s > 3.0 + 2 * plan.config.directory.ttl_s
    steps = [one.number("step") for one in outcome.trace.of("inner_step", "s0r0") if one.at_s < came.at_s]
    assert came.number("step") > steps[-1] - 8.0 > 0.0
    assert max(b - a for a, b in pairwise(times(outcome, "inner_step", "s0r0"))) < 5.0


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_newcomer_serves_at_once_and_is_a_partner_after_its_first_whole_interval(stage: int) -> None:
    swarm = FaultySwarm(plan_of((2, 2, 2), steps=32))
    swarm.at(6.6, lambda: swarm.start(stage, 2))
    outcome = check(swarm)
    newcomer = outcome.nodes[f"s{stage}r2"]
    (came,) = [one for one in swarm.resumptions if one.peer == newcomer.peer]
    (loaded,) = recording_stages(newcomer)[0].loaded
    assert (came.source, loaded.kind) == ("peer", "restore")
    assert came.at_s < 8.0
    served = [h.at_s for h in newcomer.trace.of("microbatch") if h.get("result") == "done"]
    assert served[0] < came.at_s + 2.1, "three inner steps"
    first = training(newcomer)[0][0]
    merged = [
        m
        for process in outcome.processes
        for s in recording_stages(process)
        for m in s.merged
        if m.partner == newcomer.peer
    ]
    assert min(m.round for m in merged) >= came.round + 2
    donor = outcome.nodes[loaded.origin]
    before = [h for h in donor.trace.of("inner_step") if h.at_s < first]
    own = newcomer.trace.of("inner_step")
    assert 0 <= len(before) - (int(str(own[0].get("inner_step"))) - 1) <= 1


def test_a_node_that_leaves_before_it_has_a_stage_does_not_say_that_it_holds_one() -> None:
    swarm = FaultySwarm(replace(plan_of((3, 1), start_replicas=1, steps=8), chooses_stage=True))
    swarm.at(0.0, lambda: swarm.drain("s0r0"))
    outcome = check(swarm)
    said = {peer: [h.get("message") for h in one.trace.of("info")] for peer, one in outcome.nodes.items()}
    assert not said.pop("s0r0")
    assert all("holds stage 0 of 2" in messages or "holds stage 1 of 2" in messages for messages in said.values())


# --- restarting -------------------------------------------------------------------------------------------------------


def chain(stages: int, every_steps: int = 1) -> SimPlan:
    """One replica per stage: nothing is left to chance."""
    plan = plan_of((1,) * stages, every_steps=every_steps, routing="balanced", steps=20)
    limits = plan.config.limits.model_copy(update={"max_in_flight": 1})
    return replace(plan, config=plan.config.model_copy(update={"limits": limits}))


def killed(plan: SimPlan, at_s: float, peers: Sequence[PeerId], down_s: float = 1.0) -> FaultySwarm:
    return FaultySwarm(plan, tuple(Fault(at_s, "bounce", (peer,), down_s) for peer in peers))


@pytest.mark.parametrize("stages", [1, 2])
def test_nodes_that_are_restarted_one_after_another_all_go_on_from_the_newest_round(stages: int) -> None:
    """The first of them had left long before the others died, so its checkpoint is old. No advert is left."""
    plan = plan_of((2,) * stages, steps=120 // stages, outer={"rule": "gossip", "deadline_s": 3.0})
    first, *others = [peer_id(stage, replica) for replica in (0, 1) for stage in range(stages)]
    dead = [Fault(20.0, "bounce", (peer,), 20.0 + 0.5 * number) for number, peer in enumerate(others, 1)]
    swarm = FaultySwarm(plan, (Fault(5.0, "leave", (first,), 35.0), *dead))
    outcome = check(swarm)
    newest = min(rounds(process)[-1] for process in outcome.processes if process.crashed)
    back = {one.peer: one.round for one in swarm.resumptions}
    assert back.keys() == {first, *others}
    assert min(back.values()) >= newest - 1, f"{back}, and round {newest} existed"


def test_a_node_that_is_restarted_alone_goes_on_soon() -> None:
    """The other one stays away."""
    dead = Fault(10.0, "bounce", ("s0r0",), 20.0), Fault(10.0, "crash", ("s0r1",))
    swarm = FaultySwarm(plan_of((2,), steps=60, outer={"rule": "gossip", "deadline_s": 3.0}), dead)
    check(swarm)
    [came] = swarm.resumptions
    assert (came.source, came.at_s < 30.0 + swarm.plan.config.directory.ttl_s / 2) == ("shard", True)


@pytest.mark.parametrize(("stages", "every_steps"), [(1, 8), (2, 1), (3, 8), *soak([(1, 1), (2, 8), (3, 1)])])
def test_a_chain_that_was_stopped_ends_with_the_weights_of_one_that_was_not(stages: int, every_steps: int) -> None:
    plan = chain(stages, every_steps=every_steps)
    undisturbed = check(FaultySwarm(plan))
    peers = [process.peer for process in undisturbed.processes]
    for part in (0.5, 0.65, 0.8):
        swarm = killed(plan, part * undisturbed.ended_at_s, peers)
        outcome = check(swarm)
        assert [one.source for one in swarm.resumptions] == ["shard"] * stages
        assert len({one.round for one in swarm.resumptions}) == 1
        for peer in peers:
            assert weights(outcome.nodes[peer]) == weights(undisturbed.nodes[peer]), f"{peer}, killed at {part}"


@pytest.mark.parametrize("down_s", [3.0, 6.0])
def test_an_origin_that_was_given_up_may_go_on_from_an_earlier_step(down_s: float) -> None:
    """Its next microbatches are of steps of which it has already sent some."""
    plan = chain(2)
    before = 0.7 * check(FaultySwarm(plan)).ended_at_s
    swarm = killed(plan, before, ["s0r0"], down_s)
    check(swarm)
    [came] = swarm.resumptions
    assert (came.source, came.round) == ("shard", 3)


@pytest.mark.parametrize("rule", ["noloco", "gossip"])
def test_nobody_merges_the_initial_weights_of_a_node_that_still_loads_its_own(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of((2, 2), outer={"rule": rule, "inner_steps": 4, "deadline_s": 3.0})
    swarm = killed(plan, 4.5, ["s0r0", "s0r1", "s1r0", "s1r1"])
    load = SimCheckpoints.load

    async def loading(self: SimCheckpoints, held: Holding) -> Checkpoint | None:
        await asyncio.sleep(6.0 if self._disk is swarm.disks["s1r1"] else 0.0)
        return await load(self, held)

    monkeypatch.setattr(SimCheckpoints, "load", loading)
    outcome = check(swarm)
    [came] = outcome.trace.of("resumed", "s1r1")
    merged = [one.at_s for stage in recording_stages(outcome.nodes["s1r0"]) for one in stage.merged]
    assert any(h.at_s < came.at_s for h in outcome.nodes["s1r0"].trace.of("outer_round")), "they trained on meanwhile"
    assert min(merged) > came.at_s


def test_nobody_merges_the_initial_weights_of_a_node_whose_data_take_long_to_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has lost its disk, and comes back before the other one has read that it no longer trains."""
    plan = replace(plan_of((2, 1), outer={"rule": "gossip", "deadline_s": 3.0}), view_age_s=2.0)
    swarm, opened = FaultySwarm(plan), WeightRestorer.open_data
    swarm.at(4.0, lambda: swarm.bounce("s0r1", 0.1))
    swarm.at(4.05, lambda: swarm.wipe("s0r1"))

    async def slowly(self: WeightRestorer, checkpoint: Checkpoint | None = None) -> None:
        await asyncio.sleep(6.0 if now_s() > 4.0 else 0.0)
        await opened(self, checkpoint)

    monkeypatch.setattr(WeightRestorer, "open_data", slowly)
    outcome = check(swarm)
    [came] = outcome.trace.of("resumed", "s0r1")
    assert came.at_s > 10.0
    merged = [one.at_s for stage in recording_stages(outcome.nodes["s0r0"]) for one in stage.merged]
    assert not [at_s for at_s in merged if 4.0 < at_s < came.at_s]


def test_a_crash_during_a_checkpoint_goes_on_from_the_one_before() -> None:
    plan = replace(chain(3), torn_by_crash=True)
    undisturbed = check(FaultySwarm(plan))
    written = undisturbed.trace.of("checkpoint", "s1r0")[2]
    swarm = killed(plan, written.at_s - 0.02, ["s0r0", "s1r0", "s2r0"])
    outcome = check(swarm)
    assert {(one.peer, one.source, one.round) for one in swarm.resumptions} == {
        (f"s{stage}r0", "shard", 2) for stage in range(3)
    }
    for peer, process in undisturbed.nodes.items():
        assert weights(outcome.nodes[peer]) == weights(process)


def test_a_node_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before_and_no_longer_lists_it() -> None:
    plan = chain(3)
    trace = check(FaultySwarm(plan)).trace
    killed_s = max(trace.of("checkpoint", f"s{stage}r0")[2].at_s for stage in range(3)) + 0.1
    swarm = killed(plan, killed_s, ["s0r0", "s1r0", "s2r0"])
    swarm.at(killed_s + 0.1, lambda: tear(swarm.disks["s1r0"]))
    listed: list[list[int]] = []
    for i in range(1, 30):
        at_s = killed_s + 1.0 + 0.1 * i
        swarm.at(at_s, lambda: listed.append([h.round for h in swarm.process("s1r0").node.state.advert.holds]))
    check(swarm)
    assert [1, 2, 3] in listed
    assert [1, 2] in listed
    assert [one.round for one in swarm.resumptions if (one.peer, one.source) == ("s1r0", "shard")] == [2]


def test_what_a_checkpoint_has_counted_is_not_counted_again_when_its_reply_was_lost() -> None:
    """A microbatch is counted and saved, but its reply is lost. After a crash, the same one arrives again."""
    plan = plan_of((1, 1), steps=12)
    undisturbed = check(FaultySwarm(plan))
    third, saved = times(undisturbed, "inner_step", "s1r0")[2], times(undisturbed, "checkpoint", "s1r0")[0]
    swarm = FaultySwarm(plan, (Fault(saved + 0.15, "bounce", ("s1r0",), 0.5),))
    swarm.at(third + 0.01, lambda: lose_next_reply(swarm.network, "s0r0", "s1r0"))
    outcome = check(swarm)
    assert [(one.peer, one.source, one.round) for one in swarm.resumptions] == [("s1r0", "shard", 1)]
    before, after = (linear_stage(process) for process in outcome.processes if process.peer == "s1r0")
    assert len(after.dropped) == 1
    assert after.dropped[0] in {one.microbatch for one in before.counted}
    assert after.dropped[0] in {one.microbatch for one in linear_stage(outcome.nodes["s0r0"]).counted}


@pytest.mark.parametrize("for_s", [1.0, *soak([8.0])])
@pytest.mark.parametrize("replicas", [(2, 1, 2), (2, 2, 2)])
def test_a_stage_whose_replicas_died_with_their_disks_goes_on_from_its_guardian(
    replicas: tuple[int, ...], for_s: float
) -> None:
    lost = tuple(f"s1r{i}" for i in range(replicas[1]))
    swarm = FaultySwarm(plan_of(replicas, steps=32), tuple(Fault(9.0, "wipe", (peer,), for_s) for peer in lost))
    outcome = check(swarm)
    first = swarm.resumptions[0]
    assert first.source == "guardian"
    before = max(number for process in outcome.processes if process.crashed for number in rounds(process))
    assert first.round >= before - 1
    events = [h.get("stages") for h in outcome.trace.of("deserted", "s0r0")]
    if for_s > 5.0:
        assert isinstance(events[0], dict)
        assert (list(events[0]), events[-1]) == ([1], {})
    assert sum(process.microbatches["dropped"] for process in outcome.of_stage(0)) == 0, (
        "microbatches that wait for a stage are kept"
    )


def test_a_node_without_checkpoints_copies_a_replica_though_all_others_train_again_before_it_looks() -> None:
    """All stop. When stage 0 is back, the others of stage 1 read this a quarter of a second before this node does."""
    back_s = {peer_id(stage, i): 15.6 - 3.35 * stage for stage, count in enumerate((3, 4)) for i in range(count)}
    bounced = [Fault(6.0, "bounce", (peer,), for_s) for peer, for_s in back_s.items() if peer != "s1r3"]
    swarm = FaultySwarm(plan_of((3, 4), steps=20), (*bounced, Fault(6.0, "wipe", ("s1r3",), 12.0)))
    check(swarm)
    sources = {one.peer: one.source for one in swarm.resumptions}
    assert sources == dict.fromkeys(back_s, "shard") | {"s1r3": "peer"}


@pytest.mark.parametrize(
    ("stage_0", "killed_s", "torn", "source", "position"),
    [(1, 17.0, 0, "guardian", 40), (2, 25.0, 0, "peer", 82), (2, 25.0, 1, "peer", 42)],
)
def test_a_node_reads_on_in_the_data_where_its_newest_checkpoint_was_whatever_weights_it_takes(
    stage_0: int, killed_s: float, torn: int, source: str, position: int
) -> None:
    """It has checkpoints of steps 20 and 40. Newer weights exist elsewhere, or its newest checkpoint is damaged."""
    opened: list[tuple[PeerId, object]] = []

    def batches(manifest: RunManifest, peer: PeerId, cursor: Mapping[str, object] | None) -> SimBatches:
        opened.append((peer, cursor))
        return SimBatches(manifest, peer, unequal=True, cursor=cursor)

    plan = replace(plan_of((stage_0, 2), steps=70, every_steps=20), batches_factory=batches)
    down_s = 1.0 if source == "guardian" else 6.0
    swarm = FaultySwarm(plan, (Fault(killed_s, "bounce", ("s0r0",), down_s),))
    for _ in range(torn):
        swarm.at(killed_s + 0.1, lambda: tear(swarm.disks["s0r0"]))
    check(swarm)
    assert [(one.peer, one.source) for one in swarm.resumptions] == [("s0r0", source)]
    assert opened[stage_0:] == [("s0r0", {"position": position})]


# --- two halves -------------------------------------------------------------------------------------------------------


def spread(swarm: FaultySwarm) -> float:
    """Standard deviation of stage 1's first weight over its four replicas."""
    return pstdev(linear_stage(swarm.process(f"s1r{i}")).theta[0] for i in range(4))


def test_two_halves_of_a_split_swarm_merge_again_when_the_link_heals() -> None:
    halves = ("s0r0", "s0r1", "s1r0", "s1r1"), ("s0r2", "s0r3", "s1r2", "s1r3")
    swarm = FaultySwarm(plan_of((4, 4), steps=90), (Fault(5.0, "split", halves[0], 20.0),))
    seen: list[float] = []

    swarm.at(24.9, lambda: seen.append(spread(swarm)))
    outcome = check(swarm)
    crossing = [
        merge.at_s
        for process in outcome.processes
        for merge in recording_stages(process)[0].merged
        if (process.peer in halves[0]) != (merge.partner in halves[0])
    ]
    assert not [at_s for at_s in crossing if 9.0 < at_s < 25.0]
    assert len([at_s for at_s in crossing if at_s > 25.0]) > 8
    assert spread(swarm) < 0.3 * seen[0]
    steps = [process.inner_steps for process in outcome.of_stage(0)]
    assert max(steps) - min(steps) < 20, "both halves trained on"


def test_a_node_that_was_cut_off_when_the_run_ended_ends_too() -> None:
    swarm = FaultySwarm(plan_of((2, 2), steps=12), (Fault(6.0, "split", ("s0r0",), 8.0),))
    outcome = check(swarm)
    assert outcome.nodes["s0r1"].ended_at_s is not None
    assert outcome.nodes["s0r1"].ended_at_s < 14.0
    assert outcome.nodes["s0r0"].step == 12.0
    assert outcome.ended_at_s < 40.0


def test_a_node_that_was_cut_off_until_everybody_had_gone_ends_too() -> None:
    """It had taken no step, so its own clock said nothing. The only node of stage 0 was killed before it could hear
    that it had finished; it waited for ever for another, although the other replica of its stage had finished."""
    plan, since_s = plan_of((1, 2), steps=30), 0.6
    quiet = check(FaultySwarm(plan, (Fault(since_s, "split", ("s1r1",), 30.0),))).trace.of("state", "s0r0")
    over_s = next(event.at_s for event in quiet if event.get("state") == "finished") - since_s
    faults = (
        Fault(since_s, "split", ("s1r1",), over_s + 0.2),
        Fault(since_s, "cut", ("s1r0", "s1r1"), over_s + 2.97),
        Fault(since_s + over_s + 0.1, "crash", ("s0r0",)),
    )
    outcome = check(FaultySwarm(plan, faults))
    assert [e.get("reason") for e in outcome.trace.of("state", "s1r1")][-2:] == ["the run has ended", "leave"]
    assert outcome.nodes["s1r1"].ended_at_s == outcome.ended_at_s < 60.0


def test_nodes_that_come_back_after_the_end_learn_of_it_from_one_that_leaves_again() -> None:
    """All nodes of stage 1 came back when only the advert of stage 0 was left. One read it, finished and left, all of
    this between two announcements, so that it left at step 0; the others waited for stage 0 for ever."""
    assert check(drawn_mixed(1445)).ended_at_s < 60.0


# --- hanging ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", ["s1r1", "s2r1"])
def test_a_hung_replica_costs_a_deadline_that_was_learnt_and_nobody_else_is_blamed(peer: PeerId) -> None:
    """A microbatch may take 30 s here, but such calls have taken about a second."""
    plan = plan_of((2, 2, 2), steps=50)
    limits = plan.config.limits.model_copy(update={"microbatch_deadline_s": 30.0})
    plan = replace(plan, config=plan.config.model_copy(update={"limits": limits}))
    swarm = FaultySwarm(plan, (Fault(13.0, "hang", (peer,), 9.0),))
    outcome = check(swarm)
    for process in outcome.of_stage(0):
        steps = [at_s for at_s in times(outcome, "inner_step", process.peer) if at_s > 10.0]
        assert max(after - before for before, after in pairwise(steps)) < 9.0, "two calls in a row, not the whole hang"
        assert process.microbatches["dropped"] == 0
    events = [h for h in outcome.trace.of("reroute") if h.get("reason") == "unreachable" and h.peer != peer]
    assert {h.get("peer") for h in events} == {peer}


def test_a_replica_that_failed_is_asked_again_though_another_one_stays_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is closed until it has a snapshot that others cannot freeze yet, and answers Busy until then."""
    propagate, busy = MicrobatchServer.propagate, (6.0, 26.0)

    async def closed(server: MicrobatchServer, caller: PeerId, header: Header, body: Body) -> Gradient:
        if server._node.me == "s1r1" and busy[0] < now_s() < busy[1]:
            raise Busy("in an outer round")
        return await propagate(server, caller, header, body)

    monkeypatch.setattr(MicrobatchServer, "propagate", closed)
    plan = plan_of((1, 2), steps=60)
    limits = plan.config.limits.model_copy(update={"microbatch_deadline_s": 60.0})
    plan = replace(plan, config=plan.config.model_copy(update={"limits": limits}))
    outcome = check(FaultySwarm(plan, (Fault(6.0, "hang", ("s1r0",), 3.0),)))
    steps = times(outcome, "inner_step", "s0r0")
    assert max(after - before for before, after in pairwise(steps)) < 8.0


# --- pausing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", ["s0r1", "s1r1"])
def test_a_long_pause_ends_with_the_weights_of_now_a_short_one_with_its_own(peer: PeerId) -> None:
    for for_s, pulls in ((12.0, 1), (0.5, 0)):
        swarm = FaultySwarm(plan_of((2, 2), steps=40), (Fault(6.0, "pause", (peer,), for_s),))
        outcome = check(swarm)
        assert [one.source for one in swarm.resumptions] == ["peer"] * pulls
        process = outcome.nodes[peer]
        (paused,) = [h.at_s for h in process.trace.of("state") if h.get("state") == "paused"]
        assert paused < 8.0
        assert not [at_s for at_s in times(outcome, "inner_step", peer) if paused < at_s < 6.0 + for_s]
        assert [at_s for at_s in times(outcome, "inner_step", peer) if at_s > 6.0 + for_s]


@pytest.mark.parametrize("kind", ["pause", "stop"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_replica_that_was_away_goes_on_with_what_the_other_one_left_to_a_guardian(kind: str, stage: int) -> None:
    away, other = f"s{stage}r1", f"s{stage}r0"
    plan = plan_of((2, 2), steps=60, outer={"rule": "gossip", "deadline_s": 3.0})
    swarm = FaultySwarm(plan, (Fault(6.0, kind, (away,), 24.0),))
    swarm.at(16.0, lambda: swarm.drain(other))
    outcome = check(swarm)
    left = rounds(outcome.nodes[other])[-1] + 1
    (came,) = [one for one in swarm.resumptions if one.peer == away]
    assert (came.source, came.round) == ("guardian", left)
    before = [number for number in rounds(outcome.nodes[away]) if number < left]
    assert left - max(before) > 5, "it would have lost these rounds"
    assert came.at_s > 30.0


def test_it_then_takes_the_others_clock_too() -> None:
    """What the guardian has is some steps old, and under `balanced` this node would take each of them, empty."""
    crash = Fault(26.0, "crash", ("s1r0",))
    swarm = FaultySwarm(plan_of((2, 2), steps=60, routing="balanced"), (Fault(6.0, "pause", ("s1r1",), 24.0), crash))
    outcome = check(swarm)
    [came] = outcome.trace.of("resumed", "s1r1")
    assert came.get("source") == "guardian"
    before = [step for step in outcome.trace.of("inner_step", "s0r0") if step.at_s < came.at_s]
    assert came.number("step") >= before[-1].number("step") - 1.0


def test_a_node_that_is_told_to_leave_while_it_begins_a_pause_leaves() -> None:
    """A last replica freezes its weights for its guardians first."""
    pause, peer = Fault(6.0, "pause", ("s1r0",), 4.0), "s1r0"
    undisturbed = check(FaultySwarm(plan_of((2, 1), steps=20), (pause,)))
    (alone,) = [h.at_s for h in undisturbed.trace.of("warning", peer) if "no other replica" in str(h.get("message"))]
    swarm = FaultySwarm(plan_of((2, 1), steps=20), (pause,))
    swarm.at(alone + COSTS.outer_s / 4, lambda: swarm.drain(peer))
    swarm.at(15.0, lambda: swarm.start(1, 1))
    outcome = check(swarm)
    assert [h.get("state") for h in outcome.trace.of("state", peer) if h.at_s > alone] == ["draining", "left"]
    assert outcome.trace.of("checkpoint", peer)[-1].at_s > alone


@pytest.mark.parametrize("peer", ["s0r1", "s1r1"])
def test_a_node_whose_pause_ends_after_the_run_leaves_soon(peer: PeerId) -> None:
    """By its own clock it has fifty steps to go, for which nobody would serve its microbatches, and its weights are not
    those of the last step."""
    swarm = FaultySwarm(plan_of((2, 2), steps=60), (Fault(6.0, "pause", (peer,), 94.0),), limit_s=2000.0)
    outcome = check(swarm)
    others = [process.ended_at_s for process in outcome.processes if process.peer != peer]
    assert max(at_s for at_s in others if at_s is not None) < 80.0
    limits = swarm.plan.config.limits
    assert outcome.ended_at_s < 100.0 + 2 * limits.linger_s + limits.microbatch_deadline_s
    assert max(held.step for held in swarm.disks[peer].held()) <= 12 < 60 == outcome.nodes[peer].step


def test_nodes_that_missed_the_end_leave_soon_even_if_they_can_still_serve_each_other() -> None:
    """One paused and one was cut off, and nobody is left of the last stage."""
    faults = Fault(6.0, "pause", ("s0r1",), 94.0), Fault(6.0, "split", ("s1r1",), 93.0)
    swarm = FaultySwarm(plan_of((2, 2, 2), steps=60), faults, limit_s=2000.0)
    outcome = check(swarm)
    missed = {"s0r1", "s1r1"}
    others = [process.ended_at_s for process in outcome.processes if process.peer not in missed]
    assert max(at_s for at_s in others if at_s is not None) < 95.0
    limits = swarm.plan.config.limits
    assert outcome.ended_at_s < 100.0 + 2 * limits.linger_s + limits.microbatch_deadline_s


def test_under_balanced_nobody_waits_for_an_origin_that_pauses() -> None:
    swarm = FaultySwarm(plan_of((2, 2), steps=40, routing="balanced"), (Fault(6.0, "pause", ("s0r1",), 12.0),))
    steps = [at_s for at_s in times(check(swarm), "inner_step", "s0r0") if 5.0 < at_s < 18.0]
    assert max(after - before for before, after in pairwise(steps)) < 3.0


@pytest.mark.parametrize("down_s", [2.0, *soak([4.0])])
def test_under_balanced_nobody_waits_for_the_steps_that_a_replica_lost_when_it_restarted(down_s: float) -> None:
    """It is less than an outer interval behind, or more. The others took 24 inner steps in 20 s, or none in 15 s."""
    outer = {"rule": "noloco", "inner_steps": 20}
    plan = plan_of((2, 2), steps=100, every_steps=20, routing="balanced", outer=outer)
    killed_s = times(check(FaultySwarm(plan)), "inner_step", "s0r1")[37]
    swarm = killed(plan, killed_s, ["s0r1"], down_s)
    outcome = check(swarm)
    [(source, came_s)] = [(one.source, one.at_s) for one in swarm.resumptions]
    assert source == "shard"
    assert sum(came_s < at_s < came_s + 20.0 for at_s in times(outcome, "inner_step", "s0r0")) > 35


@pytest.mark.parametrize(
    ("source", "inner_steps", "opens_s"), [("shard", 20, 10.0), ("shard", 20, 15.0), ("peer", 4, 8.0)]
)
def test_under_balanced_nobody_waits_for_the_steps_that_others_took_while_a_replica_opened_its_data(
    source: str, inner_steps: int, opens_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its checkpoint, or copies a state because that is too old. What the others had said of their clocks may be
    too old by then."""
    outer = {"rule": "noloco", "inner_steps": inner_steps}
    swarm = FaultySwarm(plan_of((2, 2), steps=100, every_steps=20, routing="balanced", outer=outer))
    swarm.at(18.0, lambda: swarm.bounce("s0r1", 0.5))
    opened = WeightRestorer.open_data

    async def slowly(self: WeightRestorer, checkpoint: Checkpoint | None = None) -> None:
        await asyncio.sleep(opens_s if now_s() > 18.0 and self._node.index == 0 and not self._node.batches else 0.0)
        await opened(self, checkpoint)

    monkeypatch.setattr(WeightRestorer, "open_data", slowly)
    outcome = check(swarm)
    assert [one.source for one in swarm.resumptions] == [source]
    came_s = next(at_s for at_s in times(outcome, "inner_step", "s0r1") if at_s > 18.0)
    assert came_s > 18.0 + opens_s
    assert sum(came_s < at_s < came_s + 10.0 for at_s in times(outcome, "inner_step", "s0r0")) > 15


@pytest.mark.parametrize("stage", [0, 1])
def test_under_balanced_nobody_waits_for_a_newcomer_that_fetches_its_weights(stage: int) -> None:
    donor, newcomer = f"s{stage}r0", f"s{stage}r1"
    slow = SlowLine(pair=(donor, newcomer), pair_bytes_per_s=6.0)
    begun = plan_of((1, 2) if stage == 0 else (2, 1), steps=40, routing="balanced")
    swarm = FaultySwarm(replace(begun, geography=slow), (Fault(8.0, "arrive", (newcomer,)),))
    outcome = check(swarm)
    came_s = swarm.resumptions[0].at_s
    assert came_s > 20.0
    steps = [at_s for at_s in times(outcome, "inner_step", "s0r0") if 7.0 < at_s < came_s]
    assert max(after - before for before, after in pairwise(steps)) < 5.0
    # An origin that did not show up is not waited for in each step: otherwise there would be ten steps, not twenty.
    assert len(steps) > (15 if stage == 0 else 6)


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_a_last_replica_leaves_when_its_guardian_has_its_weights() -> None:
    swarm = FaultySwarm(plan_of((2, 1), steps=40))
    swarm.at(7.3, lambda: swarm.drain("s1r0"))
    swarm.at(16.0, lambda: swarm.wipe("s1r0"))
    swarm.at(16.0, lambda: swarm.start(1, 0))
    outcome = check(swarm)
    left, again = (process for process in outcome.processes if process.peer == "s1r0")
    assert left.ended_at_s is not None
    guarded = [h for h in outcome.trace.of("guarded") if h.get("stage") == 1 and h.at_s < left.ended_at_s]
    assert guarded[-1].at_s > 7.3
    assert left.ended_at_s < 7.3 + 4.0
    assert guarded[-1].get("round") == rounds(left)[-1] + 1
    (loaded,) = recording_stages(again)[0].loaded
    assert (loaded.kind, loaded.origin) == ("adopt", "s1r0")
    assert loaded.theta == pytest.approx(linear_stage(left).theta, rel=1e-12)
    results = [process.microbatches for process in outcome.of_stage(0)]
    assert sum(counts["dropped"] for counts in results) == 0, "no microbatch is lost by a clean leave"


def test_replicas_that_all_leave_together_hand_their_weights_over_however_many_they_are() -> None:
    """A stage of three has no guardians, and each of them waited for one until its time was up."""
    swarm = FaultySwarm(plan_of((2, 3), steps=40))
    replicas = "s1r0", "s1r1", "s1r2"
    for peer in replicas:
        swarm.at(7.3, lambda peer=peer: swarm.drain(peer))  # type: ignore[misc]
    swarm.at(20.0, lambda: swarm.start(1, 3))
    outcome = check(swarm)
    left = [outcome.nodes[peer] for peer in replicas]
    assert max(process.ended_at_s or 99.0 for process in left) < 7.3 + 4.0
    newest = max(rounds(process)[-1] for process in left)
    assert [(one.source, one.round) for one in swarm.resumptions] == [("guardian", newest + 1)]


def test_a_last_replica_hands_its_weights_over_while_it_writes_its_checkpoint() -> None:
    """A slow disk takes longer for it than a node may take to leave."""
    swarm = FaultySwarm(replace(plan_of((2, 1), steps=40, every_steps=20), save_s=10.0))
    swarm.at(7.3, lambda: swarm.drain("s1r0"))
    swarm.at(19.0, lambda: swarm.start(1, 1))
    outcome = check(swarm)
    left = outcome.nodes["s1r0"]
    assert len(left.trace.of("checkpoint")) == 1
    assert [(one.peer, one.source, one.round) for one in swarm.resumptions] == [
        ("s1r1", "guardian", rounds(left)[-1] + 1)
    ]


def test_a_node_that_restarts_while_another_stage_s_last_replica_leaves_goes_on_from_its_newest_checkpoint() -> None:
    """Of the other stage's weights, only old ones are guarded until it has handed the last ones over."""
    bounce, cut = Fault(9.0, "bounce", ("s1r0",), 1.0), Fault(8.9, "cut", ("s0r0", "s2r0"), 4.0)
    swarm = FaultySwarm(plan_of((1, 1, 1), steps=40, outer={"rule": "gossip", "deadline_s": 3.0}), (bounce, cut))
    swarm.at(9.0, lambda: swarm.drain("s0r0"))
    swarm.at(20.0, lambda: swarm.start(0, 1))
    outcome = check(swarm)
    newest = [number for process in outcome.processes if process.crashed for number in rounds(process)][-1]
    (came, *_) = swarm.resumptions
    (left,) = [h.at_s for h in outcome.trace.of("state", "s0r0") if h.get("state") == "left"]
    assert came.at_s < left
    assert (came.peer, came.source) == ("s1r0", "shard")
    assert came.round >= newest - 1


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("also", ["crash", "drain"])
def test_a_last_replica_and_its_guardians_notice_that_the_other_one_has_just_gone(also: str, stage: int) -> None:
    """The other replica answered shortly before, and its advert still says that it trains."""
    swarm = FaultySwarm(replace(plan_of((3, 2) if stage else (2, 3), steps=40), view_age_s=0.5))
    gone, last = f"s{stage}r0", f"s{stage}r1"
    swarm.at(6.0, lambda: getattr(swarm, also)(gone))
    swarm.at(6.0, lambda: swarm.drain(last))
    swarm.at(20.0, lambda: swarm.start(stage, 2))
    done = rounds(check(swarm).nodes[last])
    assert [(one.source, one.round) for one in swarm.resumptions] == [("guardian", done[-1] + 1)]


@pytest.mark.parametrize(
    "outer", [{"rule": "diloco", "inner_steps": 2}, {"rule": "noloco", "overlap": False}, {"rule": "sync"}]
)
def test_a_node_that_is_told_to_leave_while_it_waits_for_a_round_hands_its_weights_over(
    outer: Mapping[str, object],
) -> None:
    """The other replica may take longer for the round than a node may take to leave."""
    waits = {"inner_steps": 1, "deadline_s": 60.0, "partner_wait_s": 60.0, "allow_unstable": True}
    slow, peer = Fault(6.0, "slow", ("s1r1",), 30.0, 400.0), "s1r0"
    swarm = FaultySwarm(plan_of((2, 2), steps=40, every_steps=20, outer={**waits, **outer}), (slow,))
    swarm.at(12.0, lambda: swarm.drain(peer))
    outcome = check(swarm)
    assert times(outcome, "outer_round", peer)[-2] < slow.at_s + 1.0, "it has waited for the round"
    assert not [h for h in outcome.trace.of("warning", peer) if "unfinished" in str(h.get("message"))]
    (saved,) = outcome.trace.of("checkpoint", peer)
    assert saved.at_s > 12.0


def test_a_node_that_is_told_to_leave_while_its_data_are_opened_leaves() -> None:
    """The data are opened last, at a position from a checkpoint, which has to be read first."""
    plan, peer = replace(plan_of((1, 2), steps=70, every_steps=20), save_s=1.0), "s0r0"
    undisturbed = killed(plan, 17.0, [peer])
    check(undisturbed)
    (came,) = undisturbed.resumptions
    assert came.source == "guardian"
    swarm = killed(plan, 17.0, [peer])
    swarm.at(came.at_s + 0.5, lambda: swarm.drain(peer))
    swarm.at(came.at_s + 10.0, lambda: swarm.start(0, 1))
    left = check(swarm).nodes[peer]
    assert [h.get("state") for h in left.trace.of("state") if h.at_s > came.at_s] == ["draining", "left"]


def test_a_node_that_is_the_only_stage_leaves_in_time_however_long_its_device_takes_for_a_step() -> None:
    """It waited until the device had been through all microbatches of the step."""
    swarm = FaultySwarm(replace(plan_of((2,), steps=4, microbatches_per_step=30), slowness={"s0r0": 10.0}))
    swarm.at(4.0, lambda: swarm.drain("s0r0"))
    left = check(swarm).nodes["s0r0"]
    assert left.state == "left"
    assert left.ended_at_s == pytest.approx(4.0 + swarm.plan.config.limits.drain_s, abs=0.1)


def test_a_node_that_is_told_to_leave_before_its_data_are_opened_later_reads_on_where_it_was() -> None:
    """It takes weights from a guardian. The checkpoint that it writes when it leaves then has no position."""
    opened: list[tuple[PeerId, object]] = []

    def batches(manifest: RunManifest, peer: PeerId, cursor: Mapping[str, object] | None) -> SimBatches:
        opened.append((peer, cursor))
        return SimBatches(manifest, peer, unequal=True, cursor=cursor)

    plan, peer = replace(plan_of((1, 2), steps=70, every_steps=20), batches_factory=batches), "s0r0"
    undisturbed = killed(plan, 17.0, [peer])
    check(undisturbed)
    (came,) = undisturbed.resumptions
    assert came.source == "guardian"
    opened.clear()
    swarm = killed(plan, 17.0, [peer])
    swarm.at(came.at_s - 0.01, lambda: swarm.drain(peer))
    swarm.at(came.at_s + 10.0, lambda: swarm.start(0, 1))
    swarm.at(came.at_s + 20.0, lambda: swarm.start(0, 0))
    outcome = check(swarm)
    assert [h.at_s for h in outcome.trace.of("checkpoint", peer) if came.at_s < h.at_s < came.at_s + 20.0]
    assert [cursor for who, cursor in opened if who == peer] == [None, {"position": 40}]


def test_nobody_waits_for_a_guardian_that_leaves_too() -> None:
    swarm = FaultySwarm(plan_of((2, 1), steps=40))
    for peer in ("s0r0", "s0r1", "s1r0"):
        swarm.at(7.3, lambda peer=peer: swarm.drain(peer))  # type: ignore[misc]
    outcome = check(swarm)
    assert max(process.ended_at_s or 99.0 for process in outcome.processes) < 7.3 + 3.0


def test_a_node_that_has_left_ignores_being_told_to_leave() -> None:
    outcome = check(FaultySwarm(plan_of((2, 2), steps=8)))
    ends = sorted((process.ended_at_s or 0.0, process.peer) for process in outcome.processes)
    swarm = FaultySwarm(plan_of((2, 2), steps=8))
    swarm.at((ends[0][0] + ends[-1][0]) / 2, lambda: swarm.drain(ends[0][1]))
    assert check(swarm).nodes[ends[0][1]].state == "left"
