"""Losses and gradients that are not finite, in simulated swarms: they are skipped and counted; which nodes stop."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from math import inf, isfinite, nan

import pytest
from short_runs import manifest_for
from simulated_parts import linear_stage
from soak import soak

from noloco_p2p.config import (
    DirectorySettings,
    LimitSettings,
    NodeConfig,
    RunManifest,
)
from noloco_p2p.core.messages import Gradient, HostTensor, MicrobatchId, PeerId
from noloco_p2p.core.stage_values import Contribution
from noloco_p2p.errors import LocalError, Violation
from noloco_p2p.node.pipeline.finite_watch import LONGEST_STREAK
from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.linear_stage import LinearStage
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.world import SimPlan, SimSwarm

STEPS = 30
Turns = Callable[[int], bool]


class BadStage(LinearStage):
    """Microbatches for which `bad` holds have a non-finite loss and gradients; outputs for which `loud` holds overflow.

    Both are called with the number of the microbatch at this stage, from 1.
    """

    def __init__(self, manifest: RunManifest, index: int, me: PeerId, bad: Turns, loud: Turns) -> None:
        super().__init__(manifest, index, me)
        self._bad, self._loud, self._turn = bad, loud, 0

    def is_sound(self) -> bool:
        return not (self._bad(self._turn + 1) or self._loud(self._handles + 1)) and super().is_sound()

    def forward(self, inputs: HostTensor, mask: HostTensor | None) -> tuple[int, HostTensor]:
        graph, hidden = super().forward(inputs, mask)
        if self._loud(graph):
            hidden = self._hidden("hidden", [1e200] * (hidden.data.nbytes // 8))
        return graph, hidden

    def _contribute(
        self, microbatch: MicrobatchId, inputs: list[float], grads: list[float], tokens: int, loss_sum: float
    ) -> Contribution:
        self._turn += 1
        if self._bad(self._turn):
            grads, loss_sum = [nan, *grads[1:]], inf
        return super()._contribute(microbatch, inputs, grads, tokens, loss_sum)


class WellStage(BadStage):
    """Its weights and its device are healthy, whatever it sends."""

    def is_sound(self) -> bool:
        return LinearStage.is_sound(self)


class GradlessStage(LinearStage):
    """A bug of the last stage: its contributions lack the gradient for the stage before."""

    def loss_backward(
        self, microbatch: MicrobatchId, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None
    ) -> Contribution:
        return replace(super().loss_backward(microbatch, inputs, targets, mask), grad=None)


class CodedStage(LinearStage):
    """A stage that receives gradients in a block codec, where a scale that is not finite breaks the protocol."""

    def check(self, gradient: Gradient) -> None:
        if not all(map(isfinite, gradient.grad.data.cast("d"))):
            raise Violation("grad: means or scales that are not finite")


class SenselessStage(CodedStage):
    """Its replies are not gradients."""

    def loss_backward(
        self, microbatch: MicrobatchId, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None
    ) -> Contribution:
        done = super().loss_backward(microbatch, inputs, targets, mask)
        return replace(done, grad=self._hidden("grad", [nan] * len(self._values(inputs))))


def never(_: int) -> bool:
    return False


def always(_: int) -> bool:
    return True


def make_gradless(manifest: RunManifest, index: int, me: PeerId) -> LinearStage:
    return (GradlessStage if me == "s1r0" else LinearStage)(manifest, index, me)


def make(
    bad: dict[PeerId, Turns], loud: dict[PeerId, Turns], manifest: RunManifest, index: int, me: PeerId
) -> LinearStage:
    return BadStage(manifest, index, me, bad.get(me, never), loud.get(me, never))


def make_well(
    bad: dict[PeerId, Turns], loud: dict[PeerId, Turns], manifest: RunManifest, index: int, me: PeerId
) -> LinearStage:
    return WellStage(manifest, index, me, bad.get(me, never), loud.get(me, never))


def run(
    replicas: tuple[int, ...],
    bad: dict[PeerId, Turns] | None = None,
    *,
    loud: dict[PeerId, Turns] | None = None,
    routing: str = "random",
    slowness: dict[PeerId, float] | None = None,
    given_up: tuple[PeerId, ...] = (),
    stage_factory: Callable[[RunManifest, int, PeerId], LinearStage] | None = None,
) -> Outcome:
    """The outcome of a swarm in which some device is broken; those `given_up` are told to leave after a minute."""
    manifest = manifest_for(replicas, STEPS, microbatches_per_step=4, routing=routing)
    limits = LimitSettings(microbatch_deadline_s=4.0, patience_floor_s=0.6, linger_s=5.0, drain_s=5.0)
    plan = SimPlan(
        manifest,
        replicas,
        seed=4,
        config=NodeConfig(directory=DirectorySettings(refresh_s=0.5), limits=limits),
        slowness=slowness or {},
        stage_factory=stage_factory or partial(make, bad or {}, loud or {}),
    )
    swarm = SimSwarm(plan)
    for peer in given_up:
        swarm.at(60.0, partial(swarm.drain, peer))
    return swarm.run(limit_s=3600, tolerate=True)


def stopped(outcome: Outcome) -> dict[PeerId, str]:
    """The nodes that ended with an error → its message. It is always a LocalError."""
    assert not outcome.bugs
    errors = {peer: node.error for peer, node in outcome.nodes.items() if node.error is not None}
    assert all(isinstance(error, LocalError) for error in errors.values()), errors
    return {peer: str(error) for peer, error in errors.items()}


def check_the_others_finished(outcome: Outcome, *broken: PeerId) -> None:
    for peer, node in outcome.nodes.items():
        if peer not in broken:
            assert (node.state, node.step) == ("left", STEPS), peer
            assert all(map(isfinite, linear_stage(node).theta)), peer


@pytest.mark.parametrize("peer", ["s0r0", "s1r0", "s2r1"])
def test_one_is_skipped_and_counted_and_the_step_goes_on(peer: PeerId) -> None:
    outcome = run((2, 2, 2), {peer: lambda turn: turn == 7})
    assert stopped(outcome) == {}
    check_the_others_finished(outcome)
    assert outcome.nodes[peer].microbatches["nonfinite"] == 1
    (skipped,) = [one for one in linear_stage(outcome.nodes[peer]).counted if one.tokens == 0]
    assert sum(node.microbatches["nonfinite"] for node in outcome.of_stage(0)) == 1, "its origin learns of it"
    for stage in range(3):
        by_stage = [one for node in outcome.of_stage(stage) for one in linear_stage(node).counted]
        without = [one for one in by_stage if one.microbatch == skipped.microbatch]
        assert [one.tokens > 0 for one in without] == [stage > int(peer[1])], "the stages before it add nothing either"
        assert min(one.tokens for one in by_stage if one.microbatch != skipped.microbatch) > 0


@pytest.mark.parametrize(
    ("peer", "routing"),
    [
        ("s0r1", "random"),
        ("s1r1", "balanced"),
        ("s2r1", "random"),
        *soak([("s0r1", "balanced"), ("s1r1", "random"), ("s2r1", "balanced")]),
    ],
)
def test_a_broken_device_stops_its_own_node_and_no_other(peer: PeerId, routing: str) -> None:
    outcome = run((2, 2, 2), {peer: always}, routing=routing)
    reasons = stopped(outcome)
    assert list(reasons) == [peer]
    assert reasons[peer].startswith(f"{LONGEST_STREAK} microbatches in a row had a loss or gradient that is not finite")
    assert "a new run with a lower inner.peak_learning_rate" in reasons[peer], "no run goes on with another rate"
    ends = {one: outcome.trace.of("state", one)[-2].get("reason") for one in outcome.nodes}
    assert ends == dict.fromkeys(outcome.nodes, "the run has ended") | {peer: "it cannot continue"}
    assert LONGEST_STREAK <= outcome.nodes[peer].microbatches["nonfinite"] < LONGEST_STREAK + 4, "those in flight end"
    check_the_others_finished(outcome, peer)


def test_a_node_that_fails_does_not_go_on_with_a_replica_whose_gradient_broke_the_protocol() -> None:
    swarm = SimSwarm(
        SimPlan(
            manifest_for((1, 1), STEPS),
            (1, 1),
            seed=4,
            costs=Costs(backward_s=2.0),
            stage_factory=lambda *place: (SenselessStage if place[1] else CodedStage)(*place),
        )
    )
    swarm.at(20.0, lambda: swarm.process("s0r0").node.state.fail(LocalError("no memory")))
    swarm.at(60.0, lambda: swarm.drain("s1r0"))
    assert stopped(swarm.run(limit_s=100.0, tolerate=True)) == {"s0r0": "no memory"}


def test_one_origin_that_sends_what_overflows_stops_itself_and_no_later_stage() -> None:
    outcome = run((2, 2), loud={"s0r1": always})
    assert list(stopped(outcome)) == ["s0r1"]
    check_the_others_finished(outcome, "s0r1")
    assert sum(node.microbatches["nonfinite"] for node in outcome.of_stage(1)) >= LONGEST_STREAK


def test_ten_in_a_row_of_one_origin_do_not_stop_a_later_stage_that_knows_another() -> None:
    outcome = run((2, 1), loud={"s0r1": lambda turn: turn > 60}, slowness={"s0r0": 300.0})
    results = [one.get("result") for one in outcome.nodes["s1r0"].trace.of("microbatch")]
    in_a_row = [len(list(group)) for result, group in groupby(results) if result == "nonfinite"]
    assert max(in_a_row) >= LONGEST_STREAK, "the other origin was too slow to come in between"
    assert list(stopped(outcome)) == ["s0r1"]
    check_the_others_finished(outcome, "s0r1")


def test_a_middle_stage_does_not_answer_for_what_broke_below_it() -> None:
    # The run waits until a node holds the last stage again.
    outcome = run((2, 1, 2), {"s2r0": always, "s2r1": always}, given_up=("s0r0", "s0r1", "s1r0"))
    assert outcome.nodes["s1r0"].microbatches["nonfinite"] > LONGEST_STREAK
    assert outcome.nodes["s1r0"].microbatches["done"] == 0
    assert stopped(outcome).keys() >= {"s2r0", "s2r1"}
    assert "s1r0" not in stopped(outcome)


def test_a_node_alone_stops_with_the_reason() -> None:
    outcome = run((1,), {"s0r0": always})
    assert list(stopped(outcome)) == ["s0r0"]
    assert outcome.nodes["s0r0"].inner_steps == LONGEST_STREAK // 4
    assert linear_stage(outcome.nodes["s0r0"]).version == LONGEST_STREAK // 4


def for_a_while(turn: int) -> bool:
    return turn <= 4 * LONGEST_STREAK


@pytest.mark.parametrize(
    ("bad", "loud", "blamed"),
    [
        ({}, {"s0r0": for_a_while, "s0r1": for_a_while}, "s1"),
        ({"s1r0": for_a_while, "s1r1": for_a_while}, {}, "s0"),
    ],
    ids=["hidden states that overflow, from two origins", "replies of two replicas that are not finite"],
)
def test_a_node_that_computes_well_is_not_stopped_by_what_others_send(
    bad: dict[PeerId, Turns], loud: dict[PeerId, Turns], blamed: str
) -> None:
    outcome = run((2, 2), stage_factory=partial(make_well, bad, loud))
    assert stopped(outcome) == {}
    check_the_others_finished(outcome)
    for peer, node in outcome.nodes.items():
        found = [one.get("result") for one in node.trace.of("distrusted")]
        assert set(found) <= {"not_finite"}
        assert bool(found) >= peer.startswith(blamed), "it is counted"


@pytest.mark.parametrize("routing", ["random", "balanced"])
def test_a_replica_whose_replies_are_never_finite_gets_few_microbatches(routing: str) -> None:
    outcome = run((2, 3), routing=routing, stage_factory=partial(make_well, {"s1r1": always}, {}))
    assert stopped(outcome) == {}
    check_the_others_finished(outcome)
    for origin in outcome.of_stage(0):
        lost = origin.microbatches["nonfinite"]
        assert LONGEST_STREAK <= lost < LONGEST_STREAK + 4, "those in flight when it is set aside end"


def test_nine_in_a_row_stop_nobody() -> None:
    outcome = run((1,), {"s0r0": lambda turn: turn % LONGEST_STREAK != 0})
    assert stopped(outcome) == {}
    assert outcome.nodes["s0r0"].step == STEPS


def test_a_bug_of_a_stage_ends_its_node_and_gives_its_place_back() -> None:
    outcome = run((2, 2), stage_factory=make_gradless)
    assert isinstance(outcome.nodes["s1r0"].error, AssertionError)
    assert not outcome.bugs, "its callers get Declined"
    check_the_others_finished(outcome, "s1r0")


@pytest.mark.parametrize("replicas", [(2, 3), (2, 2, 3)])
def test_a_gradient_that_breaks_the_protocol_costs_another_call_and_not_the_microbatch(
    replicas: tuple[int, ...],
) -> None:
    senseless = f"s{len(replicas) - 1}r1"

    def make_coded(manifest: RunManifest, index: int, me: PeerId) -> LinearStage:
        return (SenselessStage if me == senseless else CodedStage)(manifest, index, me)

    outcome = run(replicas, stage_factory=make_coded)
    assert stopped(outcome) == {}
    check_the_others_finished(outcome)
    reroutes = outcome.trace.of("reroute")
    assert {event.get("peer") for event in reroutes} == {senseless}
    for caller in {event.peer for event in reroutes}:
        failed_at_s = [event.at_s for event in reroutes if event.peer == caller]
        assert max(later - at_s for at_s, later in pairwise(failed_at_s)) > 2.0, "it is set aside for longer each time"
    for origin in outcome.of_stage(0):
        assert origin.microbatches["dropped"] == 0
        assert origin.microbatches["done"] == 4 * origin.inner_steps
    assert not any(node.microbatches["violation"] for node in outcome.nodes.values()), "no caller is blamed"
