"""The simulated device, the stage without torch, the registry, the batches and the trace."""

import asyncio
import math
import random
from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest

from noloco_p2p.config import InnerSettings, OuterSettings, RunManifest
from noloco_p2p.core.messages import Advert, Gradient, HostTensor, LossSum, MicrobatchId
from noloco_p2p.core.snapshots import SnapshotRequest
from noloco_p2p.core.stage_values import StepLabel
from noloco_p2p.errors import LocalError, Unreachable, Violation
from noloco_p2p.node.device_stage import DeviceStage
from noloco_p2p.sim import directory
from noloco_p2p.sim.batches import IGNORED, SimBatches
from noloco_p2p.sim.device import Costs, SimDevice
from noloco_p2p.sim.directory import Registry, SimDirectory
from noloco_p2p.sim.linear_stage import LinearStage
from noloco_p2p.sim.telemetry import SimTelemetry, Trace
from noloco_p2p.sim.virtual_time import run

REQUEST = SnapshotRequest(0)
MANIFEST = RunManifest(stages=2, sequence_length=3, microbatch_size=2, outer=OuterSettings(rule="noloco"))
COSTS = Costs(forward_s=1.0, backward_s=2.0, inner_step_s=4.0, outer_s=8.0)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _id(counter: int) -> MicrobatchId:
    return MicrobatchId("a", 1, counter)


def _batch(position: int = 0) -> tuple[HostTensor, HostTensor]:
    async def read() -> tuple[HostTensor, HostTensor]:
        batches = SimBatches(MANIFEST, "a", unequal=True, cursor={"position": position})
        batch = await batches.next()
        return batch.inputs, batch.targets

    return run(read())


def _label(number: int, rate: float = 0.1) -> StepLabel:
    return StepLabel(number, number - 1, rate, {})


def _device(index: int = 0) -> tuple[DeviceStage, LinearStage, SimDevice]:
    stage, device = LinearStage(MANIFEST, index, "a"), SimDevice(COSTS, random.Random(0))
    return DeviceStage(stage, device), stage, device


# --- the device -------------------------------------------------------------------------------------------------------


def test_operations_run_one_at_a_time_backward_before_forward_before_evaluation() -> None:
    inputs, targets = _batch()

    async def main() -> list[tuple[str, float]]:
        stage, _, device = _device()
        graph, hidden = await stage.forward(inputs, None)
        gradient = Gradient(_id(0), HostTensor("grad", "float64", hidden.shape, hidden.data), 1.0, 5, ())
        ended: list[tuple[str, float]] = []

        async def note(what: str, work: object) -> None:
            await work  # type: ignore[misc]
            ended.append((what, _now()))

        async with asyncio.TaskGroup() as group:
            group.create_task(note("forward 1", stage.forward(inputs, None)))
            await asyncio.sleep(0.5)
            group.create_task(note("evaluate", stage.evaluate(inputs, targets, None)))
            group.create_task(note("forward 2", stage.forward(inputs, None)))
            group.create_task(note("backward", stage.backward(graph, _id(0), gradient)))
        device.slowness = 3.0
        result = await stage.inner_step(_label(1))
        assert result.busy_s == pytest.approx(1 + 1 + 2 + 1 + 1 + 12)
        assert (await stage.inner_step(_label(2))).busy_s == pytest.approx(12)
        return ended

    assert run(main()) == [("forward 1", 2.0), ("backward", 4.0), ("forward 2", 5.0), ("evaluate", 6.0)]


def test_an_operation_cancelled_before_its_start_does_not_run_and_a_started_one_runs_to_its_end() -> None:
    inputs, _ = _batch()

    async def main() -> None:
        stage, model, _ = _device()
        first, second, third = (asyncio.create_task(stage.forward(inputs, None)) for _ in range(3))
        await asyncio.sleep(0.5)
        first.cancel()
        second.cancel()
        graph, _ = await third
        assert _now() == 2.0
        assert len(model.open_graphs) == 1
        assert model.most_graphs <= 2
        stage.discard(graph)
        stage.discard(graph)
        assert len(model.open_graphs) == 0

    run(main())


class _ObservedStage(LinearStage):
    """Calls back at the end of each forward pass."""

    on_forward: Callable[[], object] | None = None

    def forward(self, inputs: HostTensor, mask: HostTensor | None) -> tuple[int, HostTensor]:
        """Call back, then run the pass."""
        if self.on_forward is not None:
            self.on_forward()
        return super().forward(inputs, mask)


def test_an_operation_cancelled_as_its_turn_comes_passes_the_device_on() -> None:
    inputs, _ = _batch()

    async def main() -> None:
        model = _ObservedStage(MANIFEST, 0, "a")
        stage = DeviceStage(model, SimDevice(COSTS, random.Random(0)))
        first, second, third = (asyncio.create_task(stage.forward(inputs, None)) for _ in range(3))
        model.on_forward = lambda: asyncio.get_running_loop().call_soon(second.cancel)
        await first
        await third
        assert second.cancelled()
        assert _now() == 2.0

    run(main())


def test_the_graph_of_a_pass_cancelled_as_it_ends_is_freed() -> None:
    inputs, _ = _batch()

    async def main() -> None:
        model = _ObservedStage(MANIFEST, 0, "a")
        stage = DeviceStage(model, SimDevice(COSTS, random.Random(0)))
        forward = asyncio.create_task(stage.forward(inputs, None))
        model.on_forward = lambda: asyncio.get_running_loop().call_soon(forward.cancel)
        await asyncio.wait([forward])
        assert forward.cancelled()
        await asyncio.sleep(1.0)
        assert (model.most_graphs, len(model.open_graphs)) == (1, 0)

    run(main())


def test_a_halted_device_has_no_effect_and_cancels_its_waiters() -> None:
    inputs, _ = _batch()

    async def main() -> None:
        stage, model, device = _device()
        waiters = [asyncio.create_task(stage.forward(inputs, None)) for _ in range(3)]
        await asyncio.sleep(0.5)
        device.halt()
        await asyncio.gather(*waiters, return_exceptions=True)
        assert all(waiter.cancelled() for waiter in waiters)
        with pytest.raises(asyncio.CancelledError):
            await stage.forward(inputs, None)
        await asyncio.sleep(10)
        assert model.most_graphs == 0

    run(main())


def test_errors_of_the_stage_reach_the_caller() -> None:
    inputs, targets = _batch()

    async def main() -> None:
        stage, _, _ = _device(1)
        with pytest.raises(Violation, match="hidden states"):
            await stage.loss_backward(_id(1), inputs, targets, None)
        assert _now() == 3.0

    run(main())


# --- the stage without torch ------------------------------------------------------------------------------------------


def _loss(first: LinearStage, last: LinearStage, inputs: HostTensor, targets: HostTensor) -> LossSum:
    hidden = first.evaluate(inputs, targets, None)
    assert isinstance(hidden, HostTensor)
    loss = last.evaluate(hidden, targets, None)
    assert isinstance(loss, LossSum)
    return loss


@pytest.mark.parametrize("clip_norm", [1e-3, 1e9], ids=["clipped", "free"])
def test_gradients_of_the_linear_stage_are_those_of_its_loss(clip_norm: float) -> None:
    inputs, targets = _batch()
    manifest = MANIFEST.model_copy(update={"inner": InnerSettings(clip_norm=clip_norm)})
    first, last = LinearStage(manifest, 0, "a"), LinearStage(manifest, 1, "b")
    graph, hidden = first.forward(inputs, None)
    done = last.loss_backward(_id(1), hidden, targets, None)
    assert done.grad is not None
    assert done.tokens == sum(t != IGNORED for t in targets.data.cast("i")) < 6
    first.backward(graph, _id(1), Gradient(_id(1), done.grad, done.loss_sum, done.tokens, ("b",)))
    before = [list(first.theta), list(last.theta)]
    slopes = []
    for stage in (first, last):
        for i in range(2):
            kept, losses = stage.theta[i], []
            for shift in (1e-6, -1e-6):
                stage.theta[i] = kept + shift
                losses.append(_loss(first, last, inputs, targets).loss_sum)
            stage.theta[i] = kept
            slopes.append((losses[0] - losses[1]) / 2e-6 / done.tokens)
    rate = 1e-3
    for stage in (first, last):
        result = stage.inner_step(_label(1, rate))
        assert (result.tokens, result.microbatches) == (done.tokens, 1)
        assert result.loss_sum == done.loss_sum
    moved = [
        a - b for old, stage in zip(before, (first, last), strict=True) for a, b in zip(old, stage.theta, strict=True)
    ]
    for norm_of in (0, 2):
        norm = (slopes[norm_of] ** 2 + slopes[norm_of + 1] ** 2) ** 0.5
        scale = rate * min(1.0, clip_norm / (norm + 1e-6))
        assert moved[norm_of : norm_of + 2] == pytest.approx(
            [scale * s for s in slopes[norm_of : norm_of + 2]], rel=1e-4
        )


def test_a_spent_id_is_dropped_and_a_changed_version_is_an_error() -> None:
    inputs, targets = _batch()
    first, last = LinearStage(MANIFEST, 0, "a"), LinearStage(MANIFEST, 1, "b")
    graph, hidden = first.forward(inputs, None)
    one, again = (last.loss_backward(_id(1), hidden, targets, None) for _ in range(2))
    assert (one.counted, again.counted) == (True, False)
    assert one.grad == again.grad
    assert [c.microbatch for c in last.counted] == last.dropped == [_id(1)]
    assert last.inner_step(_label(1)).tokens == one.tokens
    first.inner_step(_label(1))
    assert one.grad is not None
    with pytest.raises(AssertionError, match="forward with weights 0, backward with 1"):
        first.backward(graph, _id(1), Gradient(_id(1), one.grad, one.loss_sum, one.tokens, ()))


def test_non_finite_values_are_refused_or_contribute_nothing() -> None:
    inputs, targets = _batch()
    first, last = LinearStage(MANIFEST, 0, "a"), LinearStage(MANIFEST, 1, "b")
    graph, hidden = first.forward(inputs, None)
    spoilt = HostTensor("grad", "float64", hidden.shape, memoryview(array("d", [float("nan")] * 6).tobytes()))
    done = first.backward(graph, _id(1), Gradient(_id(1), spoilt, 1.0, 5, ()))
    assert (done.finite, done.tokens, done.counted, done.loss_sum) == (False, 0, True, 0.0)
    before = list(first.theta)
    assert first.inner_step(_label(1)).tokens == 0
    assert first.theta == before
    with pytest.raises(Violation, match="not finite"):
        last.loss_backward(_id(2), HostTensor("hidden", *spoilt.spec[1:], spoilt.data), targets, None)
    snapshot = first.snapshot(1, 1)
    sent = first.encode(snapshot, REQUEST, "b")
    bad = HostTensor(*first.state.snapshot[0], memoryview(array("d", [0.0, float("inf")]).tobytes()))
    with pytest.raises(Violation, match="not finite"):
        first.decode(snapshot, REQUEST, replace(sent, tensors=(bad, *sent.tensors[1:])))
    with pytest.raises(Violation, match="does not have this stage's tensors"):
        first.decode(snapshot, REQUEST, replace(sent, tensors=sent.tensors[:1]))
    assert first.theta == before


def test_outer_rounds_pull_two_replicas_together_and_adoption_copies() -> None:
    one, other = LinearStage(MANIFEST, 0, "a"), LinearStage(MANIFEST, 0, "b")
    one.theta, other.theta = [1.0, 2.0], [3.0, 6.0]
    slow = list(one.kept["slow"])
    mine, theirs = one.snapshot(1, 10), other.snapshot(1, 10)
    sent = [
        stage.decode(frozen, REQUEST, stage.encode(frozen, REQUEST, "c"))
        for stage, frozen in ((one, mine), (other, theirs))
    ]
    assert one.merge(mine, sent[1:]) == pytest.approx((0.5 * (4 + 16) / 4) ** 0.5)
    assert other.merge(theirs, sent[:1]) is not None
    assert (
        one.theta
        == one.kept["slow"]
        == other.theta
        == pytest.approx([p + 0.7 * (m - p) for p, m in zip(slow, [2.0, 4.0], strict=True)])
    )
    late = LinearStage(MANIFEST, 0, "c")
    late.adopt(other.encode(theirs, SnapshotRequest(0, weights="float64"), "c"))
    assert late.theta == late.kept["slow"] == [3.0, 6.0]
    assert late.kept["momentum"] == [0.0, 0.0]
    assert one.merge(one.snapshot(2, 20)) is None


def _learn(stages: list[LinearStage], first: int, last: int) -> None:
    """Take inner steps `first` to `last` with one microbatch each, and merge after every second step."""
    for step in range(first, last + 1):
        _count(stages, step)
        for stage in stages:
            stage.inner_step(_label(step))
            if step % 2 == 0:
                stage.merge(stage.snapshot(step // 2, step))


def _count(stages: list[LinearStage], counter: int) -> bool:
    inputs, targets = _batch(counter)
    graph, hidden = stages[0].forward(inputs, None)
    end = stages[1].loss_backward(_id(counter), hidden, targets, None)
    assert end.grad is not None
    gradient = Gradient(_id(counter), end.grad, end.loss_sum, end.tokens, ())
    return stages[0].backward(graph, _id(counter), gradient).counted


def _weights(stage: LinearStage) -> tuple[list[float], ...]:
    return stage.theta, stage.kept["slow"], stage.kept["momentum"]


def test_a_restored_stage_continues_like_the_captured_one() -> None:
    mine, twin = ([LinearStage(MANIFEST, index, name) for index in (0, 1)] for name in "ab")
    _learn(mine, 1, 3)
    _count(mine, 50)
    states = [stage.capture(1, 3.5, 3) for stage in mine]
    assert states[0].spent == (_id(1), _id(2), _id(3))
    assert tuple(tensor.spec for tensor in states[0].tensors) == mine[0].state.replica
    assert (states[0].peer, states[0].stage, states[0].round, states[0].step, states[0].inner_steps) == (
        *("a", 0, 1, 3.5, 3),
    )
    _learn(twin, 60, 60)
    _count(twin, 61)
    kept, _ = twin[0].forward(_batch()[0], None)
    for stage, state in zip(twin, states, strict=True):
        stage.restore(state)
        assert stage.capture(1, 3.5, 3).tensors == state.tensors
        assert stage.inner_steps == 3
    assert len(twin[0].open_graphs) == 0
    assert [one.microbatch for one in twin[0].counted] == [_id(60)]
    assert not _count(twin, 2)
    with pytest.raises(KeyError):
        twin[0].backward(kept, _id(7), Gradient(_id(7), HostTensor(*twin[0].state.hidden, memoryview(b"")), 0.0, 0, ()))
    _count(mine, 51)
    for stage in mine:
        stage.restore(states[stage.state.index])
    for stages in (mine, twin):
        _learn(stages, 4, 7)
    assert [_weights(stage) for stage in mine] == [_weights(stage) for stage in twin]
    assert states[0].tensors != mine[0].capture(3, 7.0, 7).tensors


def test_a_stage_refuses_a_state_of_another_shape() -> None:
    stage, other = (LinearStage(MANIFEST, index, "a") for index in (0, 1))
    state, before = stage.capture(0, 0.0, 0), list(stage.theta)
    bad = {math.nan: "not finite", -1.0: "mean square below zero"}
    for value, message in bad.items():
        last = replace(state.tensors[-1], data=memoryview(array("d", [value]).tobytes()))
        with pytest.raises(Violation, match=message):
            stage.restore(replace(state, tensors=(*state.tensors[:-1], last)))
    with pytest.raises(Violation, match="is of stage 1, not 0"):
        stage.restore(other.capture(0, 0.0, 0))
    with pytest.raises(Violation, match="does not have this stage's tensors"):
        stage.restore(replace(state, tensors=state.tensors[:-1]))
    assert stage.theta == before
    assert stage.version == 0
    assert stage.state.weights == (stage.snapshot(0, 0).weights.spec,) * 2


def test_a_closed_device_ends_its_operation_and_refuses_further_ones() -> None:
    async def main() -> None:
        stage, model, _ = _device()
        state = await stage.capture(0, 0.0, 0)
        assert _now() == COSTS.outer_s
        model.theta = [7.0, 7.0]
        in_hand = asyncio.create_task(stage.restore(state))
        waiting = asyncio.create_task(stage.snapshot(0, 0))
        await asyncio.sleep(1.0)
        stage.close()
        with pytest.raises(LocalError, match="closed"):
            await waiting
        await in_hand
        assert model.theta != [7.0, 7.0]
        with pytest.raises(LocalError, match="closed"):
            await stage.capture(0, 0.0, 0)

    run(main())


# --- registry, batches, trace -----------------------------------------------------------------------------------------


async def _at_once(adverts: int) -> None:
    """Exchange adverts over lines without a limit."""


def test_the_registry_shows_delayed_views_and_drops_expired_adverts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "DELAY_S", 0.0)

    async def main() -> None:
        registry = Registry(view_age_s=10.0)
        one, other = (SimDirectory(registry, peer, _at_once) for peer in "ab")
        await other.announce(Advert("b", "run", 0, (), step=1.0), 30.0)
        await asyncio.sleep(5.0)
        await one.announce(Advert("a", "run", 0, (), step=1.0), 30.0)
        await one.announce(Advert("a", "run", 0, (), step=2.0), 30.0)
        assert await one.peers() == []
        await asyncio.sleep(5.0)
        assert [(a.peer_id, _now() - a.announced_at) for a in await one.peers()] == [("b", 10.0)]
        await asyncio.sleep(5.0)
        assert [(a.peer_id, a.step, _now() - a.announced_at) for a in await other.peers()] == [
            ("a", 2.0, 10.0),
            ("b", 1.0, 15.0),
        ]
        await one.withdraw(7.0)
        await asyncio.sleep(26.0)
        assert [(a.peer_id, a.state) for a in await one.peers()] == [("a", "left")]
        registry.failing.append("a")
        with pytest.raises(Unreachable):
            await one.peers()
        assert len(await other.peers()) == 1

    run(main())


def test_a_dead_node_announces_nothing() -> None:
    async def main() -> None:
        registry = Registry()
        port = SimDirectory(registry, "a", _at_once)
        await port.announce(Advert("a", "run", 0, (), state="training"), 30.0)
        port.dead = True
        await port.withdraw(7.0)
        with pytest.raises(Unreachable):
            await port.announce(Advert("a", "run", 0, ()), 30.0)
        assert [a.state for a in registry.view(now=1.0)] == ["training"]

    run(main())


def test_batches_depend_on_seed_and_peer_and_resume_at_their_cursor() -> None:
    async def read(me: str, count: int, cursor: dict[str, object] | None = None) -> list[bytes]:
        batches = SimBatches(MANIFEST, me, unequal=True, cursor=cursor)
        read = [bytes((await batches.next()).inputs.data) for _ in range(count)]
        assert batches.cursor == {"position": count + (2 if cursor else 0)}
        return read

    first = run(read("a", 4))
    assert first == run(read("a", 4))
    assert run(read("a", 2, {"position": 2})) == first[2:]
    assert not set(first) & set(run(read("b", 4)))
    held_out = [list(SimBatches(MANIFEST, me).validation()) for me in ("a", "b")]
    assert held_out[0] == held_out[1]
    assert len(held_out[0]) == MANIFEST.evaluation.microbatches
    sample = held_out[0][0]
    assert sample.inputs.data.cast("i")[1] == sample.targets.data.cast("i")[0]
    counts = {sum(t != IGNORED for t in _batch(i)[1].data.cast("i")) for i in range(8)}
    assert len(counts) > 2
    assert min(counts) >= 1


def test_the_trace_has_virtual_times_and_a_reproducible_hash() -> None:
    async def main(fields: dict[str, object]) -> Trace:
        trace = Trace()
        telemetry = SimTelemetry(trace, "a")
        with telemetry.span("forward"):
            await asyncio.sleep(1.5)
        telemetry.event("microbatch", **fields)
        SimTelemetry(trace, "b").event("microbatch", result="done")
        telemetry.dead = True
        telemetry.event("microbatch", result="done")
        assert len(telemetry.own.events) == 2
        return trace

    letters, backwards = "abcdefghijkl", "lkjihgfedcba"
    one = run(main({"result": "done", "peers": set(letters), "error": Violation("planned")}))
    same = run(main({"error": Violation("planned"), "peers": set(backwards), "result": "done"}))
    other = run(main({"result": "dropped"}))
    assert one.lines() == same.lines()
    assert one.trace_hash == same.trace_hash != other.trace_hash
    assert one.lines()[0] == "1.5 a span name='forward' seconds=1.5"
    assert f"peers={{{', '.join(map(repr, letters))}}}" in one.lines()[1]
    assert one.totals("microbatch", "result") == {"done": 2}
    assert one.totals("microbatch", "result", "b") == {"done": 1}
