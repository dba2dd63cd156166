"""The swarm builder: real nodes under virtual time, scheduled faults, reproducible runs."""

import gc
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from barriers import barrier
from simulated_parts import linear_stage, rounds, tear
from soak import soak

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import Advert, HostTensor, MicrobatchId, PeerId
from noloco_p2p.core.stage_values import Contribution
from noloco_p2p.errors import LocalError
from noloco_p2p.sim.batches import SimBatches
from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.directory import Registry
from noloco_p2p.sim.faults import Fault, FaultySwarm
from noloco_p2p.sim.linear_stage import LinearStage
from noloco_p2p.sim.links import Link
from noloco_p2p.sim.process import Outcome, SimProcess
from noloco_p2p.sim.virtual_time import Deadlock
from noloco_p2p.sim.world import SimPlan, SimSwarm

STEPS = 12


def _plan(replicas: tuple[int, ...] = (2, 2), **changes: object) -> SimPlan:
    manifest = RunManifest.model_validate(
        {
            "stages": len(replicas),
            "start_replicas": min(replicas),
            "steps": STEPS,
            "sequence_length": 4,
            "microbatch_size": 1,
            "outer": {"rule": "noloco", "inner_steps": 4, "deadline_s": 2.0},
            "evaluation": {"every_steps": None, "microbatches": 2},
            **changes,
        }
    )
    config = NodeConfig.model_validate(
        {
            "checkpoint": {"every_steps": 2},
            "directory": {"ttl_s": 10.0, "refresh_s": 0.5},
            "limits": {"microbatch_deadline_s": 6.0, "patience_floor_s": 1.0, "linger_s": 10.0, "drain_s": 5.0},
        }
    )
    return SimPlan(
        manifest,
        replicas,
        config=config,
        link=Link(latency_s=0.002, spread=0.3),
        costs=Costs(spread=0.2),
        batches_factory=partial(SimBatches, unequal=True),
    )


def _counted(outcome: Outcome, stage: int) -> Counter[MicrobatchId]:
    """How often each microbatch id was counted at a stage."""
    return Counter(one.microbatch for node in outcome.of_stage(stage) for one in linear_stage(node).counted)


@pytest.mark.parametrize("routing", ["random", "weighted", "balanced", "fixed"])
def test_a_swarm_trains_to_the_end_and_counts_every_microbatch_once_per_stage(routing: str) -> None:
    plan = replace(_plan((2, 3, 1), routing=routing), slowness={"s1r2": 2.0})
    outcome = SimSwarm(plan).run(limit_s=120.0)
    assert [node.peer for node in outcome.processes] == ["s0r0", "s0r1", "s1r0", "s1r1", "s1r2", "s2r0"]
    first = _counted(outcome, 0)
    assert set(first.values()) == {1}
    assert len(first) == 2 * sum(node.inner_steps for node in outcome.of_stage(0))
    assert _counted(outcome, 1) == _counted(outcome, 2) == first
    for node in outcome.processes:
        assert (node.state, node.step, node.error, node.crashed) == ("left", STEPS, None, False)
        assert len(linear_stage(node).open_graphs) == 0
        assert node.microbatches["done"] == len(linear_stage(node).counted)
        numbers = rounds(node)
        assert numbers == sorted(set(numbers))
        assert numbers[-1] == 3
    assert outcome.ended_at_s == max(node.ended_at_s or 0.0 for node in outcome.processes)


def hash_with_faults(seed: int) -> str:
    """The trace hash of a swarm with a slow node, lost replies and a crash."""
    plan = replace(_plan((2, 3)), seed=seed, slowness={"s0r1": 2.0}, link=Link(0.002, 0.3, reply_loss=0.02))
    swarm = SimSwarm(plan)
    swarm.at(1.5, lambda: swarm.crash("s1r1"))
    return swarm.run(limit_s=600.0).trace.trace_hash


def test_a_run_depends_on_its_seed_and_not_on_the_hash_seed() -> None:
    hashes = {
        subprocess.run(
            [sys.executable, "-c", "from test_world import hash_with_faults; print(hash_with_faults(7))"],
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=os.path.dirname(__file__),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    }
    assert hashes == {hash_with_faults(7)}
    assert hash_with_faults(7) != hash_with_faults(8)


@pytest.mark.parametrize("at_s", [1.1, 1.2, 1.31, 1.42])
def test_a_crashed_node_falls_silent_and_the_others_continue(at_s: float) -> None:
    swarm = SimSwarm(_plan((2, 3), steps=24))
    at_crash: list[tuple[int, int]] = []

    def crash() -> None:
        swarm.crash("s1r1")
        stage = linear_stage(swarm.process("s1r1"))
        at_crash.append((stage.inner_steps, len(stage.counted)))

    swarm.at(at_s, crash)
    outcome = swarm.run(limit_s=600.0)
    crashed = outcome.nodes["s1r1"]
    assert crashed.crashed
    assert crashed.ended_at_s == pytest.approx(at_s)
    assert crashed.trace.of("state")[-1].get("state") == "training"
    assert [(linear_stage(crashed).inner_steps, len(linear_stage(crashed).counted))] == at_crash
    assert [node.step for node in outcome.processes if not node.crashed] == [24] * 4
    assert set(_counted(outcome, 0).values()) == {1}
    assert set(_counted(outcome, 0)) <= set(_counted(outcome, 1))
    messages = {str(h.get("message")) for h in outcome.trace.of("reroute")}
    assert messages & {"s1r1 broke the connection", "s1r1 refused the connection"}


def test_a_crashed_node_restarts_as_a_new_process_with_the_same_id() -> None:
    swarm = SimSwarm(_plan((2, 2), steps=40))
    swarm.at(1.2, lambda: swarm.crash("s0r1"))
    swarm.at(1.7, lambda: swarm.start(0, 1))
    outcome = swarm.run(limit_s=600.0)
    before, after = (process for process in outcome.processes if process.peer == "s0r1")
    assert (before.crashed, after.crashed) == (True, False)
    assert after.step == 40
    ids = [{one.microbatch.incarnation for one in linear_stage(process).counted} for process in (before, after)]
    assert len(ids[0]) == len(ids[1]) == 1
    assert not ids[0] & ids[1]


def test_a_drained_node_leaves_and_a_silenced_one_comes_back() -> None:
    swarm = SimSwarm(_plan((2, 3)))
    swarm.at(1.0, lambda: swarm.drain("s1r0"))
    swarm.at(1.0, lambda: swarm.network.block(barrier("hang", "s1r1")))
    swarm.at(3.0, lambda: swarm.network.unblock(barrier("hang", "s1r1")))
    outcome = swarm.run(limit_s=600.0)
    drained, held = outcome.nodes["s1r0"], outcome.nodes["s1r1"]
    assert drained.state == "left"
    assert drained.ended_at_s is not None
    assert 1.0 < drained.ended_at_s < 8.0
    assert held.step == STEPS


def test_a_node_can_become_slow() -> None:
    def steps(slowness: float) -> int:
        swarm = SimSwarm(_plan((2, 2), steps=40))
        swarm.at(0.6, lambda: swarm.slow("s0r1", slowness))
        return swarm.run(limit_s=600.0).nodes["s0r1"].inner_steps

    assert steps(8.0) < 0.85 * steps(1.0)


def test_nodes_without_a_given_stage_spread_evenly() -> None:
    outcome = SimSwarm(replace(_plan((4, 0), start_replicas=2), chooses_stage=True)).run(limit_s=600.0)
    assert Counter(node.stage for node in outcome.processes) == {0: 2, 1: 2}
    assert {node.step for node in outcome.processes} == {STEPS}


class _Failing(LinearStage):
    """A last stage that fails at its third microbatch."""

    def loss_backward(
        self, microbatch: MicrobatchId, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None
    ) -> Contribution:
        """Work normally for two microbatches."""
        if len(self.counted) == 2:
            raise LocalError("planted: the device is on fire")
        return super().loss_backward(microbatch, inputs, targets, mask)


def test_the_error_of_a_node_is_raised_unless_it_is_tolerated() -> None:
    def factory(manifest: RunManifest, index: int, me: PeerId) -> LinearStage:
        return _Failing(manifest, index, me) if me == "s1r0" else LinearStage(manifest, index, me)

    plan = replace(_plan((2, 2)), stage_factory=factory)
    with pytest.raises(LocalError, match="on fire"):
        SimSwarm(plan).run(limit_s=600.0)
    outcome = SimSwarm(plan).run(limit_s=600.0, tolerate=True)
    assert isinstance(outcome.nodes["s1r0"].error, LocalError)
    assert outcome.nodes["s0r0"].step == STEPS


def test_an_endless_run_and_a_wrong_schedule_are_errors() -> None:
    with pytest.raises(Deadlock, match="not ended after 20 virtual seconds"):
        SimSwarm(replace(_plan(), replicas=(2, 0))).run(limit_s=20.0)
    swarm = SimSwarm(_plan())
    swarm.at(0.5, lambda: swarm.crash("s9r9"))
    with pytest.raises(KeyError, match="s9r9"):
        swarm.run(limit_s=20.0)


@pytest.mark.parametrize("peer", ["s0r0", *soak(["s1r0"])])
def test_a_cancelled_node_ends_at_once_whatever_it_is_doing(peer: PeerId) -> None:
    """Even in the middle of an inner step: if a cancellation is swallowed, the node cannot be stopped."""
    for turn in range(24):
        swarm = SimSwarm(_plan((2, 2), steps=20))
        at_s, ended = 1.5 + 0.005 * turn, list[bool]()

        def stop(swarm: SimSwarm = swarm) -> None:
            task = swarm.process(peer).task
            assert task is not None
            task.cancel()

        def look(swarm: SimSwarm = swarm, ended: list[bool] = ended) -> None:
            task = swarm.process(peer).task
            ended.append(task is not None and task.done())

        swarm.at(at_s, stop)
        swarm.at(at_s + 0.3, look)
        outcome = swarm.run(limit_s=120, tolerate=True)
        assert ended == [True], f"cancelled at {at_s:.3f} s, it still ran 0.3 s later"
        assert [one.step for one in outcome.processes if one.peer != peer] == [20] * 3, "the others continue"


# --- faults that a node comes back from -------------------------------------------------------------------------------


def _resumed(node: SimProcess) -> list[tuple[object, object]]:
    """(source, round) of each time that the node resumed."""
    return [(h.get("source"), h.get("round")) for h in node.trace.of("resumed")]


def test_a_bounced_node_returns_with_or_without_its_disk() -> None:
    swarm = SimSwarm(_plan((2, 2), steps=60))
    swarm.at(2.0, lambda: swarm.bounce("s1r0", 0.5))
    swarm.at(2.0, lambda: swarm.bounce("s1r0", 0.5))
    swarm.at(3.5, lambda: swarm.bounce("s0r1", 0.5))
    swarm.at(3.6, lambda: swarm.wipe("s0r1"))
    outcome = swarm.run(limit_s=600.0)
    assert [process.peer for process in outcome.processes[4:]] == ["s1r0", "s0r1"]
    assert [process.crashed for process in outcome.processes[4:]] == [False, False]
    assert {node.step for node in outcome.nodes.values()} == {60}
    assert [_resumed(process)[0][0] in ("shard", "peer") for process in outcome.processes[4:]] == [True, True]
    assert _resumed(outcome.processes[5])[0][0] == "peer"


@pytest.mark.parametrize("torn", [False, True])
def test_after_all_nodes_are_killed_the_run_continues_from_their_disks(torn: bool) -> None:
    swarm = SimSwarm(_plan((2, 2), steps=60))
    peers = ("s0r0", "s0r1", "s1r0", "s1r1")
    before: dict[PeerId, list[int]] = {}

    def kill_all() -> None:
        for peer in peers:
            before[peer] = [held.round for held in swarm.disks[peer].held()]
            swarm.bounce(peer, 1.0)
            if torn:
                tear(swarm.disks[peer])

    swarm.at(4.0, kill_all)
    outcome = swarm.run(limit_s=600.0)
    assert all(len(rounds) >= 2 for rounds in before.values())
    again = outcome.processes[4:]
    assert sorted(process.peer for process in again) == list(peers)
    assert {process.step for process in again} == {60}
    for process in again:
        assert _resumed(process)[0] == ("shard", before[process.peer][-2 if torn else -1])


def test_scheduled_starts_happen_even_after_all_nodes_have_crashed() -> None:
    swarm = SimSwarm(_plan((1, 1), steps=40))
    for stage in range(2):
        swarm.at(2.0, partial(swarm.crash, f"s{stage}r0"))
        swarm.at(9.0, partial(swarm.start, stage, 0))
    swarm.at(1000.0, lambda: swarm.crash("s0r0"))
    outcome = swarm.run(limit_s=900.0)
    assert [(process.crashed, process.step) for process in outcome.processes[2:]] == [(False, 40)] * 2


def test_a_node_pauses_and_resumes_on_schedule() -> None:
    swarm = SimSwarm(_plan((2, 2), steps=60))
    swarm.at(2.0, lambda: swarm.pause("s1r0"))
    swarm.at(4.0, lambda: swarm.resume("s1r0"))
    outcome = swarm.run(limit_s=600.0)
    states = [(str(h.get("state")), h.at_s) for h in outcome.nodes["s1r0"].trace.of("state")]
    paused = next(index for index, (state, _) in enumerate(states) if state == "paused")
    assert states[paused][1] == pytest.approx(2.0, abs=0.5)
    assert states[paused + 1][0] == "training"
    assert states[paused + 1][1] == pytest.approx(4.0, abs=1.0)
    assert {node.step for node in outcome.processes} == {60}


def test_a_split_swarm_continues_in_both_halves_and_reunites() -> None:
    halves = ("s0r0", "s1r0"), ("s0r1", "s1r1")
    swarm = FaultySwarm(_plan((2, 2), steps=300), (Fault(2.0, "split", halves[0], 18.0),))
    seen: list[dict[PeerId, float]] = []
    swarm.at(
        7.0, lambda: seen.append({a.peer_id: 7.0 - a.announced_at for a in swarm.registry.view(now=7.0, reader="s0r0")})
    )
    outcome = swarm.run(limit_s=600.0)
    assert {node.step for node in outcome.processes} == {300}
    assert [peer for peer, age_s in seen[0].items() if age_s < 5.0] == list(halves[0])
    other_half = {peer: set(halves[peer in halves[0]]) for half in halves for peer in half}

    def pulled(since_s: float, until_s: float) -> set[bool]:
        rounds = [h for h in outcome.trace.of("outer_round") if since_s < h.at_s < until_s and h.get("partner")]
        return {h.get("partner") in other_half[h.peer] for h in rounds}

    assert True in pulled(0.0, 2.0)
    assert pulled(5.0, 20.0) <= {False}
    assert True in pulled(21.0, 600.0)
    done = [h for h in outcome.trace.of("inner_step") if 8.0 < h.at_s < 20.0]
    assert {h.peer for h in done} == {*halves[0], *halves[1]}


def test_adverts_do_not_leave_their_group_until_the_split_is_healed() -> None:
    def view(reader: PeerId, now: float) -> dict[PeerId, float]:
        return {advert.peer_id: advert.step for advert in registry.view(now=now, reader=reader)}

    def publish(step: float, now: float) -> None:
        for peer in "abc":
            registry.publish(Advert(peer, "run", 0, (), step=step), 10.0, now=now)

    for view_age_s in (0.0, 1.0):
        registry = Registry(view_age_s)
        publish(1.0, 0.0)
        registry.split([{"a"}, {"b"}])
        publish(2.0, 1.0)
        publish(3.0, 2.0)
        assert view("a", 4.0) == {"a": 3.0, "b": 1.0, "c": 3.0}
        assert view("b", 4.0) == {"a": 1.0, "b": 3.0, "c": 3.0}
        assert view("c", 4.0) == {"a": 3.0, "b": 3.0, "c": 3.0}
        assert view("a", 10.5 + view_age_s) == {"a": 3.0, "c": 3.0}, "earlier adverts have expired"
        registry.split(())
        assert view("b", 4.0) == {"a": 3.0, "b": 3.0, "c": 3.0}
        publish(4.0, 5.0)
        assert view("b", 7.0) == {"a": 4.0, "b": 4.0, "c": 4.0}


def test_a_run_with_all_faults_depends_only_on_its_seed() -> None:
    def hash_of_run(seed: int) -> str:
        plan = replace(_plan((2, 2, 2), steps=60), seed=seed, torn_by_crash=True)
        swarm = FaultySwarm(plan, (Fault(2.0, "split", ("s0r0", "s1r0", "s2r0"), 2.0),))
        swarm.at(1.5, lambda: swarm.bounce("s1r0", 0.7))
        swarm.at(5.0, lambda: swarm.pause("s2r1"))
        swarm.at(6.0, lambda: swarm.resume("s2r1"))
        swarm.at(6.5, lambda: swarm.bounce("s0r1", 0.3))
        swarm.at(6.6, lambda: swarm.wipe("s0r1"))
        return swarm.run(limit_s=900.0).trace.trace_hash

    assert hash_of_run(3) == hash_of_run(3) != hash_of_run(4)


@pytest.mark.parametrize("overlap", [False, True])
def test_finished_calls_leave_no_reference_cycles(overlap: bool) -> None:
    """Tensors of real stages would take up gigabytes before the collector finds the cycles that hold them."""
    swarm = SimSwarm(_plan(outer={"rule": "noloco", "inner_steps": 2, "deadline_s": 2.0, "overlap": overlap}))
    held: list[int] = []

    def begin() -> None:
        gc.collect()
        gc.disable()

    def look() -> None:
        held.append(gc.collect())

    swarm.at(1.0, begin)
    for at_s in (1.5, 2.0):
        swarm.at(at_s, look)
    try:
        swarm.run()
    finally:
        gc.enable()
    assert held == [0, 0]
