"""Nodes that move to another stage while they train, under virtual time."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from elastic import COSTS, config_for, manifest_for, plan_of
from lawful import check
from soak import soak

from noloco_p2p.core.exchanges import PROBES
from noloco_p2p.core.messages import Activation, Advert, Holding, HostTensor, LossSum
from noloco_p2p.core.snapshots import SnapshotRequest
from noloco_p2p.core.timeouts import TRANSFER_DEADLINE_S
from noloco_p2p.errors import Declined, LocalError, Unreachable
from noloco_p2p.node.rebalance import Rebalancer
from noloco_p2p.ports import Claim
from noloco_p2p.sim.checkpoints import SimCheckpoints
from noloco_p2p.sim.faults import FaultySwarm
from noloco_p2p.sim.linear_stage import LinearStage
from noloco_p2p.sim.links import MEASURED, Link, MessageSizes
from noloco_p2p.sim.transport import SimTransport
from noloco_p2p.sim.world import SimPlan, SimSwarm

SLOW = replace(COSTS, forward_s=0.1, backward_s=0.2)


def lopsided(steps: int = 60) -> FaultySwarm:
    """Seven nodes split into stages of 4 and 3; two of the three crash for good."""
    plan = plan_of((7, 0), steps=steps, start_replicas=1)
    swarm = FaultySwarm(replace(plan, chooses_stage=True))

    def crash_two() -> None:
        places = [(swarm.process(f"s0r{i}").node.state.index, f"s0r{i}") for i in range(7)]
        few = min((0, 1), key=lambda stage: sum(index == stage for index, _ in places))
        for _, peer in [place for place in places if place[0] == few][:2]:
            swarm.crash(peer)

    swarm.at(4.0, crash_two)
    return swarm


def test_a_swarm_of_4_and_1_becomes_one_of_3_and_2_and_stays_so() -> None:
    outcome = check(lopsided())
    alive = [process for process in outcome.processes if not process.crashed]
    assert sorted(sum(process.stage == stage for process in alive) for stage in (0, 1)) == [2, 3]
    moved = outcome.trace.of("moved")
    assert len(moved) == 1
    mover = outcome.nodes[moved[0].peer]
    assert len(mover.models) == 2
    assert mover.step == 60


@pytest.mark.parametrize("after_s", [0.5, *soak([0.02, 0.2, 1.0, 1.5])])
def test_a_mover_that_is_killed_on_its_way_is_replaced(after_s: float) -> None:
    moved = check(lopsided()).trace.of("moved")[0]
    swarm = lopsided()
    swarm.at(moved.at_s + after_s, lambda: swarm.crash(moved.peer))
    outcome = check(swarm)
    alive = [process for process in outcome.processes if not process.crashed]
    assert sorted(sum(process.stage == stage for process in alive) for stage in (0, 1)) in ([2, 2], [1, 3])
    assert {process.step for process in alive} == {60.0}


@pytest.fixture
def out_of_order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The nodes that have evaluated hidden states not made by the stage before."""
    found: list[str] = []
    outputs: defaultdict[int, set[bytes]] = defaultdict(set)
    evaluate = LinearStage.evaluate

    def noted(
        self: LinearStage, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None
    ) -> HostTensor | LossSum:
        output, index = evaluate(self, inputs, targets, mask), self.state.index
        if index and bytes(inputs.data) not in outputs[index - 1]:
            found.append(self._me)
        if isinstance(output, HostTensor):
            outputs[index].add(bytes(output.data))
        return output

    monkeypatch.setattr(LinearStage, "evaluate", noted)
    return found


EVALUATED = {"every_steps": 2, "microbatches": 4}


def test_a_held_out_body_that_comes_after_its_receiver_has_moved_is_declined(out_of_order: list[str]) -> None:
    small = (8, 8, 8)
    sizes = MessageSizes(2 << 20, 2 << 20, small, small, small, MEASURED)
    manifest = manifest_for((1, 2, 2), steps=4, evaluation=EVALUATED)
    swarm = SimSwarm(SimPlan(manifest, (1, 2, 2), link=Link(0.01, bytes_per_s=2e6), sizes=sizes))

    def move() -> None:
        now, node = asyncio.get_running_loop().time(), swarm.process("s1r0").node
        evaluates = "loss" in {wait.what for wait in swarm.process("s0r0").node.status(now).waits}
        receives = "activation" in {wait.what for wait in node.status(now).waits}
        if evaluates and receives and node.state.index == 1 and not node.state.draining:
            node.state.drain("moves", next_stage=2)

    for tenth in range(300):
        swarm.at(tenth / 10, move)
    outcome = swarm.run(limit_s=1000)
    assert outcome.nodes["s1r0"].stage == 2, "it moved"
    assert not out_of_order
    assert len(outcome.trace.of("evaluation")) == 2


def test_a_node_that_has_moved_offers_no_held_out_microbatch_again(
    out_of_order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would offer the microbatch to the stage after its new one."""
    replicas = (1, 2, 2, 1)
    manifest = manifest_for(replicas, steps=4, evaluation=EVALUATED)
    swarm = SimSwarm(SimPlan(manifest, replicas, config=config_for()))
    failed: list[str] = []
    evaluate = SimTransport.evaluate

    async def fails_once(self: SimTransport, peer: Advert, activation: Activation, claim: Claim) -> LossSum:
        if (self._me, failed) == ("s2r0", []):
            failed.append(peer.peer_id)
            swarm.process("s2r0").node.state.drain("moves", next_stage=1)
            await asyncio.sleep(2.0)
            raise Unreachable("the line is cut")
        return await evaluate(self, peer, activation, claim)

    monkeypatch.setattr(SimTransport, "evaluate", fails_once)
    outcome = swarm.run(limit_s=1000)
    assert (failed, outcome.nodes["s2r0"].stage) == (["s3r0"], 1), "it moved"
    assert not out_of_order
    assert len(outcome.trace.of("evaluation")) == 2


def test_a_caller_that_waits_for_a_round_of_a_node_that_moves_gets_none_of_its_earlier_stage() -> None:
    """The codec of its new stage would not fit it."""
    swarm, heard = FaultySwarm(plan_of((2, 3), steps=40)), list[str]()
    mover, asking = "s1r1", list[asyncio.Task[None]]()

    async def ask() -> None:
        try:
            found = await swarm.process(mover).node.handler.fetch_snapshot(
                "s1r0", SnapshotRequest(1, 1000, wait_s=20.0)
            )
            heard.append(f"round {found.round}")
        except Declined as error:
            heard.append(str(error))

    swarm.at(6.0, lambda: asking.append(asyncio.create_task(ask())))
    swarm.at(6.5, lambda: swarm.process(mover).node.state.drain("moves", next_stage=0))
    outcome = check(swarm)
    assert outcome.nodes[mover].stage == 0, "it moved"
    assert heard == ["this replica has no snapshot yet"]


def test_another_one_moves_while_one_that_has_announced_a_move_is_paused() -> None:
    moved = check(lopsided()).trace.of("moved")[0]
    swarm, paused_s, resumed_s = lopsided(), moved.at_s - 1.0, moved.at_s + 20.0
    announced: list[int | None] = []
    swarm.at(paused_s, lambda: announced.append(swarm.process(moved.peer).node.state.advert.moving_to))
    swarm.at(paused_s, lambda: swarm.pause(moved.peer))
    swarm.at(resumed_s, lambda: swarm.resume(moved.peer))
    outcome = check(swarm)
    assert announced == [moved.get("stage")]
    assert [h.peer != moved.peer for h in outcome.trace.of("moved") if h.at_s < resumed_s] == [True]


@pytest.mark.parametrize("later_s", [0.0, 0.01])
def test_a_mover_that_is_told_to_leave_does_not_move(later_s: float) -> None:
    """It first waits until its checkpoint is written."""
    plan, peer = replace(plan_of((2, 2), steps=40), save_s=2.0), "s1r1"
    saved = check(FaultySwarm(plan)).trace.of("checkpoint", peer)[0]
    swarm, at_s = FaultySwarm(plan), saved.at_s - 1.0
    swarm.at(at_s, lambda: swarm.process(peer).node.state.drain("moving to stage 0", next_stage=0))
    swarm.at(at_s + later_s, lambda: swarm.drain(peer))
    outcome = swarm.run()
    left = outcome.nodes[peer]
    assert [h.get("state") for h in left.trace.of("state") if h.at_s >= at_s] == ["draining", "left"]
    assert not left.trace.of("warning")
    assert {h.stage for h in swarm.disks[peer].held()} == {1}
    assert [h.number("step") for h in left.trace.of("checkpoint")][-1] == left.step


def test_a_mover_that_is_told_to_leave_is_not_expected_at_the_end_of_the_run() -> None:
    plan, peer = plan_of((2, 2), steps=40), "s1r1"
    swarm = FaultySwarm(plan)
    swarm.at(6.0, lambda: swarm.process(peer).node.state.drain("moving to stage 0", next_stage=0))
    swarm.at(6.0, lambda: swarm.drain(peer))
    assert check(swarm).nodes[peer].told_to_leave


def test_a_mover_that_is_told_to_leave_before_it_has_weights_saves_none() -> None:
    """Its weights of the new stage are initial ones, which must not pass for those of the run's present step."""
    plan, peer, at_s = plan_of((2, 2), steps=40), "s1r1", 5.5

    def moving() -> FaultySwarm:
        swarm = FaultySwarm(plan)
        swarm.at(at_s, lambda: swarm.process(peer).node.state.drain("moving to stage 0", next_stage=0))
        return swarm

    came = check(moving()).trace.of("state", peer)
    (syncing,) = [h.at_s for h in came if h.at_s > at_s and h.get("state") == "syncing"]
    swarm = moving()
    swarm.at(syncing + COSTS.outer_s, lambda: swarm.drain(peer))
    outcome = check(swarm)
    assert outcome.nodes[peer].ended_at_s == pytest.approx(syncing, abs=1.0)
    assert {h.stage for h in swarm.disks[peer].held()} == {1}


@pytest.mark.parametrize("before_s", [1.5, *soak([2.5])])
def test_a_node_does_not_leave_its_stage_to_replicas_that_have_just_died(before_s: float) -> None:
    """They answered when it last asked for the clocks of stage 0, and their adverts have not expired."""

    def uneven() -> FaultySwarm:
        plan = replace(plan_of((8, 0), steps=40, start_replicas=1), costs=(COSTS, SLOW), chooses_stage=True)
        return FaultySwarm(plan)

    outcome = check(uneven())
    moved = outcome.trace.of("moved")[0]
    stages = {process.peer: next(process.periods(60.0)).stage for process in outcome.processes}
    mates = [peer for peer, stage in stages.items() if peer != moved.peer and stage == stages[moved.peer]]
    swarm = uneven()
    for peer in mates:
        swarm.at(moved.at_s - before_s, lambda peer=peer: swarm.bounce(peer, 20.0))  # type: ignore[misc]
    after = [one.peer for one in check(swarm).trace.of("moved") if one.at_s < moved.at_s + 10.0]
    assert moved.peer not in after


def moving(swarm: FaultySwarm, peer: str, *moves: tuple[float, int]) -> FaultySwarm:
    """Make the node move to these stages at these times."""
    for at_s, stage in moves:
        swarm.at(at_s, lambda stage=stage: swarm.process(peer).node.state.drain("moves", next_stage=stage))  # type: ignore[misc]
    return swarm


def test_a_node_that_comes_back_to_stage_0_reads_on_where_it_was() -> None:
    """Otherwise it would train on the same data again."""
    swarm, peer = moving(FaultySwarm(plan_of((3, 3), steps=40)), "s0r0", (8.0, 1), (16.0, 0)), "s0r0"
    read: list[int] = []

    def look() -> None:
        batches = swarm.process(peer).node.state.batches
        assert batches is not None, "it holds stage 0"
        read.append(int(str(batches.cursor["position"])))

    swarm.at(7.99, look)
    swarm.at(17.0, look)
    check(swarm)
    assert read[0] - 8 <= read[1] <= read[0] + 8, "an outer interval reads 8 microbatches"


def test_a_node_that_comes_back_to_a_lost_stage_has_its_own_checkpoint() -> None:
    """A stage with this many replicas has no guardians. Once, after a crash of all others, it used initial weights."""
    swarm, peer = moving(FaultySwarm(plan_of((3, 4), steps=40)), "s1r0", (8.0, 0), (12.0, 1)), "s1r0"
    for other in ("s1r1", "s1r2", "s1r3"):
        swarm.at(11.0, lambda other=other: swarm.crash(other))  # type: ignore[misc]
    check(swarm)
    assert [one.source for one in swarm.resumptions if one.peer == peer] == ["peer", "shard"]


def test_the_clock_of_a_node_that_comes_back_to_its_checkpoint_does_not_go_back() -> None:
    swarm, peer = moving(FaultySwarm(plan_of((3, 3), steps=40)), "s0r0", (8.0, 1), (9.0, 0)), "s0r0"
    outcome = check(swarm)
    assert [one.source for one in swarm.resumptions] == ["peer", "shard"]
    clock = [event.number("step") for event in outcome.trace.of("inner_step", peer)]
    assert clock == sorted(clock)


def test_a_mover_whose_disk_cannot_be_read_goes_on_without_its_checkpoints() -> None:
    """So does one whose disk cannot be written."""
    swarm, peer = moving(FaultySwarm(plan_of((3, 3), steps=40)), "s0r0", (8.0, 1)), "s0r0"

    async def held() -> list[Holding]:
        raise LocalError("stale file handle")

    swarm.at(7.0, lambda: setattr(swarm.process(peer).ports.checkpoints, "held", held))
    outcome = check(swarm)
    assert outcome.nodes[peer].stage == 1
    assert "stale file handle" in str([event.get("message") for event in outcome.trace.of("warning", peer)])


def test_a_node_that_starts_with_a_disk_that_cannot_be_read_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would go on from older weights than those of its own checkpoints."""

    async def held(self: SimCheckpoints) -> list[Holding]:
        raise LocalError("stale file handle")

    monkeypatch.setattr(SimCheckpoints, "held", held)
    with pytest.raises(LocalError, match="stale file handle"):
        SimSwarm(plan_of((2, 2), steps=8)).run(limit_s=1000)


# --- one decision after another ---------------------------------------------------------------------------------------


class Decisions:
    """A node of stage 0 with three mates and one replica of stage 1, all equally fast: the node is the one to move. It
    reads the membership every ten seconds."""

    def __init__(self) -> None:
        self.others = {
            peer: Advert(peer, "run", stage, (), state="training", microbatches_per_s=10.0)
            for peer, stage in (("b", 0), ("c", 0), ("d", 0), ("e", 1))
        }
        self.silent: set[str] = set()
        self.stale: set[str] = set()
        """Peers whose last answer is from before the last reading."""
        self.elsewhere: set[str] = set()
        """Peers that answer that they hold another stage than they announced."""
        self.paused: set[str] = set()
        """Peers that answer that they pause, although they announced that they train."""
        self.doubted: set[str] = set()
        self.asked: list[list[str]] = []
        self.since: list[float] = []
        self.moves: list[int] = []
        self._now = 0.0
        node: Any = SimpleNamespace(
            advert=Advert("a", "run", 0, (), state="training", microbatches_per_s=10.0),
            manifest=SimpleNamespace(steps=1000, stages=2, outer=SimpleNamespace(inner_steps=10)),
            index=0,
            draining=False,
            pausing=False,
            rng=random.Random(1),
            now=lambda: self._now,
            event=lambda *_, **__: None,
            publish=self._publish,
            drain=lambda _, next_stage: self.moves.append(next_stage),
        )
        self.node = node
        inquiry = SimpleNamespace(
            is_silent=self.silent.__contains__,
            ask=lambda adverts, _: self.asked.append([one.peer_id for one in adverts]),
            answering=self._answering,
            unknown=self._unknown,
        )
        members = SimpleNamespace(all=lambda: list(self.others.values()), doubted=lambda: self.doubted)
        swarm: Any = SimpleNamespace(members=members, inquiry=inquiry)
        self._rebalancer = Rebalancer(node, swarm)

    def _publish(self, moving_to: int | None) -> None:
        self.node.advert = replace(self.node.advert, moving_to=moving_to)

    def _unknown(self, adverts: Sequence[Advert], since: float) -> list[Advert]:
        self.since.append(since)
        return [one for one in adverts if one.peer_id in self.stale]

    def _answering(self, adverts: Sequence[Advert], states: Set[str]) -> list[Advert]:
        here = [one for one in adverts if one.peer_id not in self.silent | self.elsewhere]
        return [a for a in here if ("paused" if a.peer_id in self.paused else self.others[a.peer_id].state) in states]

    def change(self, peer: str, **fields: Any) -> None:
        self.others[peer] = replace(self.others[peer], **fields)

    def reading(self) -> tuple[int | None, list[int]]:
        """Read the membership and decide: the move that is announced, and the moves that were begun."""
        self._now += 10.0
        self._rebalancer.consider()
        return self.node.advert.moving_to, self.moves


def test_a_move_begins_two_readings_after_it_was_announced() -> None:
    decisions = Decisions()
    assert [(at, list(moves)) for at, moves in (decisions.reading() for _ in range(3))] == [(1, []), (1, []), (1, [1])]
    assert decisions.asked == [["b", "c", "d"]] * 3
    assert decisions.since == [20.0], "answers to what was asked at the reading before count"


def test_a_move_that_was_withdrawn_is_announced_for_two_readings_again() -> None:
    decisions = Decisions()
    assert [decisions.reading()[0] for _ in range(2)] == [1, 1]
    decisions.change("e", microbatches_per_s=100.0)
    decisions.asked.clear()
    assert [decisions.reading() for _ in range(4)] == [(None, [])] * 4
    assert not decisions.asked, "a node that stays need not know whether its mates live"
    decisions.change("e", microbatches_per_s=10.0)
    assert [decisions.reading() for _ in range(2)] == [(1, [])] * 2
    assert decisions.reading() == (1, [1])


def test_no_move_begins_before_the_mates_have_answered_since_the_last_reading() -> None:
    decisions = Decisions()
    for wrong in (decisions.stale, decisions.elsewhere, decisions.paused):
        wrong.add("c")
        assert [decisions.reading() for _ in range(5)] == [(1, [])] * 5
        wrong.clear()
    assert decisions.reading() == (1, [1])


def test_no_move_begins_while_the_owner_waits_for_the_device() -> None:
    """A move takes minutes of it, and the pause begins only after that."""
    decisions = Decisions()
    assert [decisions.reading() for _ in range(2)] == [(1, [])] * 2
    decisions.node.pausing = True
    assert [decisions.reading() for _ in range(3)] == [(1, [])] * 3
    decisions.node.pausing = False
    moves = [list(decisions.reading()[1]) for _ in range(2)]
    assert moves == [[], [1]], "what the mates answered before the pause is out of date"


def test_of_many_mates_the_same_few_must_answer_at_each_reading() -> None:
    decisions = Decisions()
    for number in range(20):
        decisions.others[f"m{number}"] = replace(decisions.others["b"], peer_id=f"m{number}")
    while not decisions.moves:
        decisions.reading()
    assert {len(asked) for asked in decisions.asked} == {PROBES}
    assert len({*map(tuple, decisions.asked)}) == 1


def test_others_must_answer_if_some_of_those_that_must_fall_silent() -> None:
    decisions = Decisions()
    for number in range(20):
        decisions.others[f"m{number}"] = replace(decisions.others["b"], peer_id=f"m{number}")
    decisions.reading()
    decisions.silent.update(decisions.asked[0][1:])
    assert decisions.reading() == (1, [])
    assert decisions.reading() == (1, [1])
    assert len(decisions.asked[-1]) == PROBES
    assert decisions.silent.isdisjoint(decisions.asked[-1])


@pytest.mark.parametrize(("silent", "announced"), [("b", 1), ("bc", None)])
def test_silent_mates_do_not_count(silent: str, announced: int | None) -> None:
    decisions = Decisions()
    decisions.silent.update(silent)
    assert decisions.reading() == (announced, [])
    assert decisions.asked == ([["c", "d"]] if announced else [])


def test_silent_replicas_of_another_stage_count() -> None:
    decisions = Decisions()
    decisions.node.manifest.stages = 3
    for peer in "fg":
        decisions.others[peer] = replace(decisions.others["e"], peer_id=peer, stage=2)
        decisions.silent.add(peer)
    assert decisions.reading() == (1, [])


def test_a_paused_mate_is_not_asked() -> None:
    decisions = Decisions()
    decisions.change("d", state="paused")
    assert decisions.reading() == (1, [])
    assert decisions.asked == [["b", "c"]]


def test_a_mate_that_pauses_once_it_has_been_asked_holds_up_no_move() -> None:
    decisions = Decisions()
    decisions.reading()
    decisions.change("d", state="paused")
    assert [decisions.reading()[0] for _ in range(2)] == [1, 1]
    assert decisions.moves == [1]


UNMEASURED: dict[str, Any] = {"microbatches_per_s": 0.0}


@pytest.mark.parametrize(
    "change", [{"moving_to": 1}, {"state": "syncing"}, {"state": "draining"}, {"state": "starting"}, UNMEASURED]
)
def test_a_node_that_holds_up_moves_for_longer_than_a_transfer_takes_does_not_count(change: dict[str, Any]) -> None:
    """It hangs or lies: one such node was enough for nobody to move any more."""
    decisions = Decisions()
    decisions.others["0"] = replace(decisions.others["b"], peer_id="0", **change)
    announced = [decisions.reading()[0] for _ in range(int(TRANSFER_DEADLINE_S / 10) + 1)]
    assert announced == [None] * int(TRANSFER_DEADLINE_S / 10) + [1]


def test_a_node_that_holds_up_moves_now_and_then_counts() -> None:
    decisions = Decisions()
    for _ in range(2):
        decisions.change("b", state="syncing")
        assert {decisions.reading()[0] for _ in range(int(TRANSFER_DEADLINE_S / 10))} == {None}
        decisions.change("b", state="training")
        assert decisions.reading()[0] == 1


def test_a_node_that_was_paused_does_not_know_how_long_others_have_held_up_moves() -> None:
    decisions = Decisions()
    decisions.change("b", state="syncing")
    for state in ("training", "paused", "training"):
        decisions.node.advert = replace(decisions.node.advert, state=state)
        assert {decisions.reading()[0] for _ in range(int(TRANSFER_DEADLINE_S / 10))} == {None}
    assert decisions.reading()[0] == 1


@pytest.mark.parametrize(("say", "moves"), [("bcd", True), ("bc", False)])
def test_a_stage_counts_for_nothing_if_most_of_the_stage_before_have_long_said_that_it_does_not_serve_them(
    say: str, moves: bool
) -> None:
    decisions = Decisions()
    decisions.change("e", microbatches_per_s=100.0)
    for peer in say:
        decisions.change(peer, unserved=True)
    announced = [decisions.reading()[0] for _ in range(int(TRANSFER_DEADLINE_S / 10) + 1)]
    assert announced == [None] * int(TRANSFER_DEADLINE_S / 10) + [1 if moves else None]
    decisions.others["f"] = replace(decisions.others["e"], peer_id="f", microbatches_per_s=30.0)
    assert decisions.reading() == (None, []), "one that has just come to that stage counts"


def test_what_doubted_nodes_say_of_the_next_stage_does_not_count() -> None:
    decisions = Decisions()
    decisions.change("e", microbatches_per_s=100.0)
    for number in range(5):
        decisions.others[f"z{number}"] = replace(decisions.others["b"], peer_id=f"z{number}", unserved=True)
        decisions.doubted.add(f"z{number}")
    assert {decisions.reading()[0] for _ in range(int(TRANSFER_DEADLINE_S / 10) + 1)} == {None}


@pytest.mark.parametrize("lower", ["", "0"])
def test_a_swarm_that_stands_still_from_its_beginning_does_not_wait_for_speeds_for_ever(lower: str) -> None:
    """The device of the only replica of stage 1 hangs: no microbatch comes back, so nobody has measured a speed. Still,
    nodes move one at a time."""
    decisions = Decisions()
    decisions.node.advert = replace(decisions.node.advert, **UNMEASURED)
    if lower:
        decisions.others[lower] = replace(decisions.others.pop("b"), peer_id=lower)
    for peer in decisions.others:
        decisions.change(peer, **UNMEASURED)
    announced = [decisions.reading()[0] for _ in range(int(TRANSFER_DEADLINE_S / 10) + 1)]
    assert announced == [None] * int(TRANSFER_DEADLINE_S / 10) + [None if lower else 1]


def test_a_move_that_the_mates_never_answer_is_withdrawn_before_others_take_it_for_a_lie() -> None:
    decisions = Decisions()
    decisions.stale.add("c")
    announced = [decisions.reading()[0] for _ in range(int(TRANSFER_DEADLINE_S / 10) + 3)]
    assert announced.count(None) == 1
    assert announced[-1] == 1, "it may be announced again"
    assert decisions.moves == []


@pytest.mark.parametrize(
    ("change", "announced"),
    [({"stays": True}, None), ({"state": "paused"}, None), ({"step": 961.0}, None), ({"step": 960.0}, 1)],
)
def test_a_node_that_stays_or_does_not_train_or_is_near_the_end_announces_nothing(
    change: dict[str, Any], announced: int | None
) -> None:
    decisions = Decisions()
    decisions.node.advert = replace(decisions.node.advert, **change)
    assert decisions.reading() == (announced, [])
    decisions = Decisions()
    decisions.node.draining = True
    assert decisions.reading() == (None, [])
