"""The same data through two replicas of stage 1, in simulated swarms (`node/pipeline/gradient_audit`)."""

import asyncio
from collections import Counter
from copy import copy
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from short_runs import manifest_for
from simulated_parts import linear_stage

from noloco_p2p.config import RunManifest
from noloco_p2p.core import gradient_pairs, members
from noloco_p2p.core.intake import AttemptKey
from noloco_p2p.core.messages import MAX_AVOIDED, Advert, Batch, Gradient, HostTensor, MicrobatchId, PeerId
from noloco_p2p.core.routing import StepView
from noloco_p2p.core.stage_values import Contribution
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.pipeline.gradient_audit import GradientAudit, Twins
from noloco_p2p.node.pipeline.serve import MicrobatchServer
from noloco_p2p.node.pipeline.task import StageResult
from noloco_p2p.sim import virtual_time
from noloco_p2p.sim.linear_stage import LinearStage, _flat
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.world import SimPlan, SimSwarm

STEPS, PER_STEP = 40, 4


class LyingStage(LinearStage):
    """A last stage that counts the right gradients and replies with the opposite."""

    def loss_backward(
        self, microbatch: MicrobatchId, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None
    ) -> Contribution:
        done = super().loss_backward(microbatch, inputs, targets, mask)
        assert done.grad is not None
        return replace(done, grad=_flat(done.grad.spec, [-value for value in done.grad.data.cast("d")]))


def make(liars: tuple[PeerId, ...], manifest: RunManifest, index: int, me: PeerId) -> LinearStage:
    return (LyingStage if me in liars else LinearStage)(manifest, index, me)


@cache
def run(
    liars: tuple[PeerId, ...] = (), replicas: tuple[int, ...] = (2, 5), routing: str = "random", audit: bool = True
) -> Outcome:
    """A run in which one in four microbatches is sent twice, so that it can be short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_pairs, "EARLY", 1 / 4)
        manifest = manifest_for(replicas, STEPS, microbatches_per_step=PER_STEP, routing=routing)
        return SimSwarm(
            SimPlan(manifest, replicas, seed=3, gradient_audit=audit, stage_factory=partial(make, liars))
        ).run()


def set_aside(outcome: Outcome) -> dict[PeerId, set[object]]:
    """Origin → the replicas that it has set aside."""
    found = {origin: outcome.trace.of("distrusted", origin) for origin in ("s0r0", "s0r1")}
    return {origin: {one.get("peer") for one in events} for origin, events in found.items() if events}


@pytest.mark.parametrize("routing", ["random", "balanced"])
def test_a_replica_that_replies_with_the_opposite_is_set_aside_by_each_origin(routing: str) -> None:
    outcome = run(("s1r2",), routing=routing)
    assert set_aside(outcome) == {"s0r0": {"s1r2"}, "s0r1": {"s1r2"}}
    for origin in ("s0r0", "s0r1"):
        node = outcome.nodes[origin].node
        [trouble] = node.state.status(outcome.ended_at_s).troubles
        assert (trouble.name, "s1r2" in trouble.message) == ("gradients", True)
        assert node.swarm.members.distrusted(outcome.ended_at_s).keys() == {"s1r2"}


def test_it_gets_no_microbatches_any_more() -> None:
    outcome = run(("s1r2",))
    last = max(event.at_s for event in outcome.trace.of("distrusted"))
    served = {peer: [e for e in outcome.trace.of("microbatch", peer) if e.at_s > last + 1] for peer in outcome.nodes}
    assert not served["s1r2"]
    assert all(served[f"s1r{other}"] for other in (0, 1, 3, 4))


def test_the_evidence_names_both_and_how_they_differ() -> None:
    answers = run(("s1r2",)).trace.of("gradient_pair", "s0r0")
    pairs = list(zip(answers[::2], answers[1::2], strict=True))
    outliers = [pair for pair in pairs if pair[0].get("outlier")]
    assert 4 <= len(outliers) < len(pairs)
    assert all(one.get("peer") != other.get("peer") for one, other in pairs), "two routes"
    for one, other in outliers:
        assert abs(one.number("microbatch") - other.number("microbatch")) == 1
        assert "s1r2" in (one.get("peer"), other.get("peer"))
        assert one.number("cosine") == other.number("cosine") < -0.9
        assert min(one.number("norm"), other.number("norm")) > 0


@pytest.mark.parametrize("replicas", [(2, 5), (2, 2, 5)])
def test_nobody_honest_is_set_aside(replicas: tuple[int, ...]) -> None:
    outcome = run(replicas=replicas)
    assert set_aside(outcome) == {}
    assert bool(outcome.trace.of("gradient_pair")) == (replicas[1] > 3)


@pytest.mark.parametrize(("routing", "following", "repeats"), [("random", 4, 1), ("random", 3, 0), ("fixed", 4, 0)])
def test_data_are_repeated_only_where_a_comparison_shows_who_is_wrong(
    monkeypatch: pytest.MonkeyPatch, routing: str, following: int, repeats: int
) -> None:
    monkeypatch.setattr(gradient_pairs, "EARLY", 1.0)
    node = run().nodes["s0r0"].node
    state, next_ones = copy(node.state), tuple(f"s1r{number}" for number in range(following))
    state.manifest = manifest_for((2, 5, 5), STEPS, routing=routing)
    swarm = Membership(state)
    swarm.members.update([Advert(peer, state.run_id, 1, ()) for peer in (*next_ones, "further")], now=0.0)
    swarm.view = StepView("s0r0", following=next_ones)
    for peer in ("s1r1", "further"):
        swarm.members.distrust(peer, now=0.0)
    audit = GradientAudit(state, swarm, secret=1)
    nothing = HostTensor("nothing", "float32", (0,), memoryview(b""))
    microbatch = MicrobatchId("s0r0", 1, 0)

    async def main() -> int:
        assert audit.avoided() == ("further",), "this node itself chooses among those of the next stage"
        twins = audit.twins(microbatch, Batch(nothing, nothing))
        if twins is None:
            return 0
        for peer in ("s1r0", "s1r2"):
            done = Contribution(None, 0.0, 0, True, finite=peer == "s1r0")
            reply = Gradient(microbatch, nothing, 0.0, 0, ("own name", "further", "made up"), True)
            await audit.ended(twins, microbatch, StageResult(done, peer, reply))
        assert [one.route for one in twins.replies] == [("s1r0", "further")], "as many as there are stages"
        return len(twins.replies)

    assert virtual_time.run(main()) == repeats, "one that was not finite is not compared"


def test_only_those_whose_gradients_differ_are_reported_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica set aside for something else was accused as well."""
    state = copy(run().nodes["s0r0"].node.state)
    state.hold(cast(Any, SimpleNamespace(state=state.stage.state, compare=_differ)))
    state.telemetry = cast(Any, SimpleNamespace(event=lambda *_, **__: None))  # not the trace of the cached run
    said: list[str | None] = []
    monkeypatch.setattr(state, "trouble", lambda name, message: said.append(message))
    found = iter([(True, "s1r2"), (True, None), (True, "s1r1"), (True, "s1r4")])
    monkeypatch.setattr(gradient_pairs.GradientPairs, "observe", lambda *_: next(found))
    swarm, nothing = Membership(state), HostTensor("nothing", "float32", (0,), memoryview(b""))

    async def main() -> None:
        swarm.members.distrust("not finite", now=state.now(), for_s=60.0)
        audit = GradientAudit(state, swarm, secret=1)
        for wait_s in (0.0, 0.0, 10.0, members.DISTRUSTED_S - 5.0):
            await asyncio.sleep(wait_s)
            twins = Twins(Batch(nothing, nothing))
            for number in range(2):
                microbatch, done = MicrobatchId("s0r0", 1, number), Contribution(None, 0.0, 0, True, finite=True)
                reply = Gradient(microbatch, nothing, 0.0, 0, (f"s1r{number}",), True)
                await audit.ended(twins, microbatch, StageResult(done, f"s1r{number}", reply))

    virtual_time.run(main())
    ending = "differ from those of all others for the same data: set aside"
    assert said == [f"gradients of {names} {ending}" for names in ("s1r2", "s1r1, s1r2", "s1r1, s1r4")]


async def _differ(one: Gradient, other: Gradient) -> gradient_pairs.GradientLikeness:
    return gradient_pairs.GradientLikeness((1.0, 1.0), -1.0)


def test_no_more_replicas_are_to_be_avoided_than_a_message_may_name() -> None:
    """Peers refuse a microbatch that names more."""
    state = run().nodes["s0r0"].node.state
    swarm, names = Membership(state), [f"s2r{number}" for number in range(MAX_AVOIDED + 3)]
    swarm.members.update([Advert(peer, state.run_id, 2, ()) for peer in names], now=0.0)
    for peer in names:
        swarm.members.distrust(peer, now=0.0)

    async def main() -> tuple[PeerId, ...]:
        return GradientAudit(state, swarm, secret=1).avoided()

    assert virtual_time.run(main()) == tuple(names[3:]), "those found last"


def test_without_a_secret_everything_goes_out_once() -> None:
    assert run().trace.of("gradient_pair")
    assert not run(audit=False).trace.of("gradient_pair")


def test_a_liar_further_on_is_found_and_left_out_for_the_origins_that_know_it() -> None:
    """The replicas before it no longer choose it for microbatches of this origin, and are not blamed for it."""
    outcome = run(("s2r0",), (1, 5, 5))
    assert set_aside(outcome) == {"s0r0": {"s2r0"}}
    [found] = outcome.trace.of("distrusted")
    after = found.at_s + 1
    served = {peer: [e for e in outcome.trace.of("microbatch", peer) if e.at_s > after] for peer in outcome.nodes}
    assert not served["s2r0"]
    assert all(served[f"s2r{other}"] for other in range(1, 5))


def test_a_replica_to_be_left_out_serves_if_there_is_no_other() -> None:
    """It is the last replica of its stage, and an origin still distrusts it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientAudit, "avoided", lambda audit: ("s2r0",))
        manifest = manifest_for((1, 1, 1), 4, microbatches_per_step=PER_STEP)
        outcome = SimSwarm(SimPlan(manifest, (1, 1, 1), seed=3)).run()
    assert outcome.nodes["s0r0"].microbatches == {"done": 4 * PER_STEP}


def test_a_replica_that_gives_itself_another_name_is_called_by_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    right = MicrobatchServer._reply

    def reply(server: MicrobatchServer, key: AttemptKey, result: StageResult) -> Gradient:
        done = right(server, key, result)
        return replace(done, served=("s2r1",)) if server._node.me == "s2r0" else done

    monkeypatch.setattr(MicrobatchServer, "_reply", reply)
    assert set_aside(run.__wrapped__(("s2r0",), (1, 5, 5))) == {"s0r0": {"s2r0"}}


def test_both_are_ordinary_microbatches_that_count() -> None:
    outcome = run()
    origins = [outcome.nodes[peer] for peer in ("s0r0", "s0r1")]
    for origin in origins:
        assert origin.microbatches == {"done": PER_STEP * origin.inner_steps}
    begun = Counter(one.microbatch for origin in origins for one in linear_stage(origin).counted)
    served = Counter(one.microbatch for node in outcome.of_stage(1) for one in linear_stage(node).counted)
    assert set(begun.values()) == {1}
    assert begun == served


def test_a_run_is_a_function_of_its_seed() -> None:
    assert run.__wrapped__().trace.trace_hash == run().trace.trace_hash


def test_a_node_that_has_moved_since_no_longer_reports_who_was_set_aside_an_hour_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Before the changes, because this run is cached for other tests.
    set_aside_at = run(("s1r2",)).trace.of("distrusted", "s0r0")[0].at_s
    monkeypatch.setattr(gradient_pairs, "EARLY", 1 / 4)
    monkeypatch.setattr(members, "DISTRUSTED_S", 2.0)
    manifest = manifest_for((2, 5), STEPS, microbatches_per_step=PER_STEP)
    swarm = SimSwarm(SimPlan(manifest, (2, 5), seed=3, stage_factory=partial(make, ("s1r2",))))
    found: list[str] = []

    def move() -> None:
        node = swarm.process("s0r0").node
        found.extend(trouble.name for trouble in node.state.troubles(0.0))
        node.state.drain("moves", next_stage=1)

    swarm.at(set_aside_at + 0.01, move)
    outcome = swarm.run()
    assert found == ["gradients"]
    assert outcome.nodes["s0r0"].stage == 1, "it moved"
    assert not outcome.nodes["s0r0"].node.state.troubles(outcome.ended_at_s)
