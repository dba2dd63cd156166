"""A replica's full state: what is captured, that a restored replica continues bit for bit, and what is refused."""

import asyncio
import dataclasses
import functools
import gc
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from soak import soak
from stages import SIZES, make_batch, make_label, make_manifest, make_stages, microbatch, run_microbatch, weights_of

from noloco_p2p.compute.device import DeviceThread
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import HostTensor, ReplicaState
from noloco_p2p.core.snapshots import SnapshotRequest
from noloco_p2p.core.spent_ids import SPENT_IDS, SPENT_STEPS, SpentIds
from noloco_p2p.errors import LocalError, Violation
from noloco_p2p.node.device_stage import DeviceStage
from noloco_p2p.ports import Operation

OUTER = {"alpha": 0.4, "beta": 0.6, "gamma": 0.9}

DTYPES = ["float32", "float64"]


def manifest_of(dtype: str = "float64", seed: int = 1, optimizer: str = "adamw") -> RunManifest:
    inner = {"weight_decay": 0.1, "optimizer": optimizer}
    return make_manifest(dtype=dtype, outer=OUTER, seed=seed, inner=inner)


def train(stages: list[TorchStage], first: int, last: int) -> None:
    """Inner steps `first` to `last`, of two microbatches each; at every third a merge with an old own snapshot."""
    for step in range(first, last + 1):
        for i in (0, 1):
            run_microbatch(stages, make_batch(2 * step + i), microbatch(2 * step + i))
        for stage in stages:
            stage.inner_step(make_label(step, 0.01 / step))
            if step % 3 == 0:
                stage.merge(stage.snapshot(step // 3, step))


def captured(stages: list[TorchStage], inner_steps: int) -> list[ReplicaState]:
    return [stage.capture(inner_steps // 3, inner_steps + 0.5, inner_steps) for stage in stages]


def contents(state: ReplicaState) -> dict[str, object]:
    """Everything in a state, in a form that can be compared bit for bit."""
    tensors = {tensor.name: bytes(tensor.data) for tensor in state.tensors}
    return {**{f.name: getattr(state, f.name) for f in dataclasses.fields(state)}, "tensors": tensors}


def total(states: list[ReplicaState], kind: str) -> float:
    """Sum of the absolute values of one kind of tensors."""
    named = [tensor for state in states for tensor in state.tensors if tensor.name.startswith(f"{kind}/")]
    return float(sum(np.abs(np.frombuffer(tensor.data, tensor.dtype)).sum() for tensor in named))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("optimizer", "steps"), [("adamw", 2), ("adamw", 6), ("muon", 4), *soak([("adamw", 0), ("adamw", 4), ("muon", 0)])]
)
def test_a_restored_replica_goes_on_bit_for_bit(dtype: str, optimizer: str, steps: int) -> None:
    """From the start, from before and after the first merge, and from the second, with a microbatch in flight."""
    mine, twin = (make_stages(manifest_of(dtype, seed, optimizer)) for seed in (1, 2))
    train(mine, 1, steps)
    states = captured(mine, steps)
    if steps > 3:
        assert all(total(states, kind) > 0 for kind in manifest_of().state_kinds)
    assert [state.adam_steps for state in states] == [steps, steps]
    train(twin, 20, 23)
    run_microbatch(twin, make_batch(99), microbatch(99))
    assert contents(captured(twin, steps)[0])["tensors"] != contents(states[0])["tensors"]
    for stage, state in zip(twin, states, strict=True):
        stage.restore(state)
    assert list(map(contents, captured(twin, steps))) == list(map(contents, states))
    assert [stage.snapshot(0, 0).inner_steps for stage in twin] == [steps, steps]
    for stages in (mine, twin):
        train(stages, steps + 1, steps + 5)
    after = captured(mine, steps + 5)
    assert list(map(contents, captured(twin, steps + 5))) == list(map(contents, after))
    assert contents(after[0])["tensors"] != contents(states[0])["tensors"]


def test_steps_without_tokens_are_not_steps_of_adam() -> None:
    stages = make_stages(manifest_of())
    train(stages, 1, 1)
    for stage in stages:
        stage.inner_step(make_label(2))
    assert [state.adam_steps for state in captured(stages, 2)] == [1, 1]


def test_a_captured_state_is_frozen_and_says_what_it_is() -> None:
    stages = make_stages(manifest_of())
    train(stages, 1, 4)
    state = stages[0].capture(1, 4.5, 4)
    before = contents(state)
    stages[0].adopt(weights_of(stages[0], 1, 4))
    train(stages, 5, 7)
    stages[0].restore(stages[0].capture(2, 7.5, 7))
    train(stages, 8, 8)
    assert contents(state) == before
    assert tuple(tensor.spec for tensor in state.tensors) == stages[0].state.replica
    assert (state.peer, state.stage, state.round, state.step, state.inner_steps, state.number) == (
        *("me", 0, 1, 4.5, 4, 0),
    )


def test_a_restored_replica_shares_nothing_with_the_state() -> None:
    """The state may be lent to others, or have writable buffers that are reused."""
    mine, twin = make_stages(manifest_of()), make_stages(manifest_of())
    train(mine, 1, 4)
    state = mine[0].capture(1, 4.5, 4)
    buffers = [bytearray(tensor.data) for tensor in state.tensors]
    own = [dataclasses.replace(t, data=memoryview(b)) for t, b in zip(state.tensors, buffers, strict=True)]
    twin[0].restore(dataclasses.replace(state, tensors=tuple(own)))
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    assert contents(twin[0].capture(1, 4.5, 4)) == contents(state)


def test_the_current_step_is_not_captured_and_its_microbatches_count_again() -> None:
    """An id that is captured is spent for the restored replica; an id of the current step is not."""
    mine, twin = make_stages(manifest_of()), make_stages(manifest_of())
    train(mine, 1, 2)
    run_microbatch(mine, make_batch(6), microbatch(6))
    states = captured(mine, 2)
    assert states[0].spent == tuple(microbatch(number) for number in (2, 3, 4, 5))
    for stage, state in zip(twin, states, strict=True):
        stage.restore(state)
    assert [c.counted for c in run_microbatch(twin, make_batch(5), microbatch(5))] == [False, False]
    assert [c.counted for c in run_microbatch(twin, make_batch(6), microbatch(6))] == [True, True]


@pytest.mark.parametrize("again", ["restore", "adopt"])
def test_with_other_weights_the_current_step_and_its_graphs_are_forgotten(again: str) -> None:
    stages = make_stages(manifest_of())
    train(stages, 1, 1)
    state, snapshot = stages[0].capture(0, 1.0, 1), weights_of(stages[0], 0, 1)
    graph, _ = stages[0].forward(make_batch(9).inputs, None)
    run_microbatch(stages, make_batch(8), microbatch(8))
    stages[0].restore(state) if again == "restore" else stages[0].adopt(snapshot)
    with pytest.raises(KeyError):
        stages[0]._graphs.take(stages[0]._pass, graph)
    result = stages[0].inner_step(make_label(2))
    assert (result.tokens, result.microbatches) == (0, 0)
    assert run_microbatch(stages, make_batch(8), microbatch(8))[0].counted


def poisoned(tensor: HostTensor, value: float) -> HostTensor:
    values = np.frombuffer(tensor.data, np.float64).copy()
    values[-1] = value
    return dataclasses.replace(tensor, data=values.view(np.uint8).data)


def broken(state: ReplicaState) -> dict[str, ReplicaState]:
    """States that must be refused, by a pattern of the message."""
    tensors, parameters = state.tensors, len(state.tensors) // len(manifest_of().state_kinds)
    cases = {
        f"is not finite in {kind}/": _with(state, parameters * (i + 1) - 1, lambda t: poisoned(t, np.nan))
        for i, kind in enumerate(manifest_of().state_kinds)
    }
    return {
        **cases,
        "is below zero in adam_square/": _with(state, -1, lambda t: poisoned(t, -1e-9)),
        **{
            f"has a value of 1e.38 in {kind}/": _with(state, parameters * (i + 1) - 1, lambda t: poisoned(t, 1e38))
            for i, kind in enumerate(("fast", "slow", "momentum"))
        },
        "has means in adam_mean/": _with(state, parameters * 4 - 1, lambda t: poisoned(t, 1.0)),
        "fast/x .* out of place": _with(state, 0, lambda t: dataclasses.replace(t, name="fast/x")),
        "float32 .* out of place": _with(state, 3, lambda t: dataclasses.replace(t, dtype="float32")),
        "bytes do not hold": _with(state, -1, lambda t: dataclasses.replace(t, data=t.data[:-8])),
        "does not fit this stage: 1 tensors": dataclasses.replace(state, tensors=tensors[:1]),
        "it is of stage 1": dataclasses.replace(state, stage=1),
        "after -1 optimizer steps": dataclasses.replace(state, adam_steps=-1),
    }


def _with(state: ReplicaState, index: int, change: Callable[[HostTensor], HostTensor]) -> ReplicaState:
    index %= len(state.tensors)
    tensors = (*state.tensors[:index], change(state.tensors[index]), *state.tensors[index + 1 :])
    return dataclasses.replace(state, tensors=tensors)


def test_a_state_of_the_other_optimizer_is_refused() -> None:
    """Under Muon, matrices have no mean squares: a missing or superfluous tensor is a violation."""
    adamw, muon = (make_stages(manifest_of(optimizer=optimizer))[0] for optimizer in ("adamw", "muon"))
    for mine, theirs in ((adamw, muon), (muon, adamw)):
        with pytest.raises(Violation, match=r"does not fit this stage: adam_square/.* is out of place"):
            mine.restore(theirs.capture(0, 0.0, 0))
    state = muon.capture(0, 0.0, 0)
    with pytest.raises(
        Violation, match=r"is below zero in adam_square/model\.layers\.1\.post_attention_layernorm\.weight"
    ):
        muon.restore(_with(state, -1, lambda t: poisoned(t, -1e-9)))


@functools.cache
def trained_beside_another() -> tuple[list[TorchStage], ReplicaState]:
    """Stages with a microbatch in flight, and another replica's state of the first. No test may change either."""
    stages, other = make_stages(manifest_of()), make_stages(manifest_of())
    train(stages, 1, 4)
    train(other, 11, 12)
    run_microbatch(stages, make_batch(99), microbatch(99))
    return stages, other[0].capture(0, 2.5, 2)


@pytest.mark.parametrize("message", list(broken(make_stages(make_manifest())[0].capture(0, 0.0, 0))))
def test_a_bad_state_changes_nothing(message: str) -> None:
    stages, theirs = trained_beside_another()
    before, tokens = contents(stages[0].capture(1, 4.5, 4)), stages[0]._sums.tokens
    with pytest.raises(Violation, match=message):
        stages[0].restore(broken(theirs)[message])
    assert contents(stages[0].capture(1, 4.5, 4)) == before
    assert stages[0]._sums.tokens == tokens > 0


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("family", sorted(SIZES))
def test_every_stage_knows_the_weights_of_every_other(family: str, stages: int) -> None:
    made = make_stages(make_manifest(family, stages, dtype="float32"))
    expected = tuple(weights_of(stage).tensors[0].spec for stage in made)
    assert {stage.state.weights for stage in made} == {expected}
    assert [stage.state.parameters * 2 for stage in made] == [spec.nbytes for spec in expected]
    for stage in made:
        frozen = stage.snapshot(0, 0)
        sent = stage.encode(frozen, SnapshotRequest(stage.state.index), "other")
        assert tuple(tensor.spec for tensor in sent.tensors) == stage.state.snapshot
        assert (
            stage.state.parameters * 4
            < sent.nbytes
            <= max(4.1 * stage.state.parameters, 4096 + 4.0 * stage.state.parameters)
        )


def test_restored_ids_are_forgotten_by_the_same_rules() -> None:
    spent = SpentIds()
    spent.refill(microbatch(number) for number in range(SPENT_IDS))
    assert spent.ended() == tuple(microbatch(number) for number in range(SPENT_IDS))
    spent.spend(microbatch(SPENT_IDS))
    assert len(spent.ended()) == SPENT_IDS
    for _ in range(SPENT_STEPS - 2):
        spent.end_step()
    assert microbatch(0) in spent
    spent.end_step()
    assert spent.ended()[0] == microbatch(1)
    assert len(spent.ended()) == SPENT_IDS
    spent.refill([microbatch(7)])
    assert spent.ended() == (microbatch(7),)
    assert microbatch(8) not in spent


def test_a_closed_stage_frees_its_memory_without_the_cycle_collector() -> None:
    """Weights, gradients and graphs of a stage that a node leaves must be gone before it makes the next one."""

    async def run() -> None:
        stages, device = make_stages(manifest_of()), DeviceThread("test")
        train(stages, 1, 2)
        stages[0].forward(make_batch(1).inputs, None)
        watched = [weakref.ref(parameter) for parameter in stages[0].parameters.values()]
        wrapped = DeviceStage(stages[0], device)
        state = await wrapped.capture(0, 2.0, 2)
        await wrapped.restore(state)
        assert contents(await wrapped.capture(0, 2.0, 2)) == contents(state)
        gc.disable()
        try:
            stages.clear()
            end = threading.Event()
            in_hand = asyncio.create_task(device.call(Operation.BACKWARD, lambda: end.wait(10)))
            waiting = asyncio.create_task(wrapped.forward(make_batch(1).inputs, None))
            await asyncio.sleep(0)
            wrapped.close()
            wrapped.close()
            end.set()
            await asyncio.wait([waiting, in_hand])
            device._thread.join()
            assert isinstance(waiting.exception(), LocalError)
            del waiting
            assert all(one() is None for one in watched)
        finally:
            gc.enable()
        wrapped.discard(1)
        with pytest.raises(LocalError, match="the device has been closed"):
            await wrapped.restore(state)

    asyncio.run(asyncio.wait_for(run(), 20))
