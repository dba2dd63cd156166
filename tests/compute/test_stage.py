"""The synchronous stage: what counts, what is refused, the inner step, and that nothing non-finite stays behind."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from stages import (
    as_gradient,
    gradients,
    make_batch,
    make_label,
    make_manifest,
    make_stages,
    microbatch,
    run_microbatch,
    weights,
)
from torch import Tensor, nn

from noloco_p2p.compute import host_tensor
from noloco_p2p.compute.accumulator import AccumulatedMicrobatch, GradientAccumulator
from noloco_p2p.compute.activation_codec import ActivationCodec
from noloco_p2p.core.guard import LARGEST_NORM
from noloco_p2p.core.messages import Gradient, HostTensor, LossSum
from noloco_p2p.core.spent_ids import SPENT_IDS, SPENT_STEPS
from noloco_p2p.errors import Violation


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether both have the same tensors, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def hidden(values: Tensor) -> HostTensor:
    return host_tensor.from_torch("hidden", values)


def test_state_says_what_travels() -> None:
    first, last = make_stages(make_manifest(dtype="float32", wire={"forward": "bfloat16", "backward": "bfloat16"}))
    assert first.state.hidden == ("hidden", "bfloat16", (2, 8, 32)) == last.state.hidden
    assert [spec.name for spec in first.state.snapshot] == ["vector", "sample"]
    assert {spec.dtype for spec in first.state.snapshot} == {"float32"}
    _, sent = first.forward(make_batch(1).inputs, None)
    assert sent.spec == first.state.hidden
    given = last.loss_backward(microbatch(1), sent, make_batch(1).targets, None)
    assert given.grad is not None
    assert given.grad.spec == ("grad", "bfloat16", (2, 8, 32))


def test_read_only_buffers_are_taken() -> None:
    stages, batch = make_stages(make_manifest()), make_batch(1)
    inputs = HostTensor("inputs", "int32", (2, 8), memoryview(bytes(batch.inputs.data)))
    assert bytes(stages[0].forward(inputs, None)[1].data) == bytes(stages[0].forward(batch.inputs, None)[1].data)


BAD_HIDDEN = [
    (hidden(torch.zeros(2, 8, 31, dtype=torch.float64)), r"got float64 \[2, 8, 31\], not float64 \[2, 8, 32\]"),
    (hidden(torch.zeros(2, 8, 32, dtype=torch.float32)), "got float32"),
    (hidden(torch.full((2, 8, 32), torch.nan, dtype=torch.float64)), "not finite"),
    (hidden(torch.full((2, 8, 32), -torch.inf, dtype=torch.float64)), "not finite"),
    (HostTensor("hidden", "float64", (2, 8, 32), memoryview(bytes(8))), "8 bytes do not hold"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_HIDDEN)
def test_bad_hidden_states_are_violations_and_leave_no_trace(bad: HostTensor, message: str) -> None:
    middle, last = make_stages(make_manifest(stages=3))[1:]
    targets = make_batch(1).targets
    with pytest.raises(Violation, match=message):
        middle.forward(bad, None)
    with pytest.raises(Violation, match=message):
        last.loss_backward(microbatch(1), bad, targets, None)
    with pytest.raises(Violation, match=message):
        last.evaluate(bad, targets, None)
    good = last.loss_backward(microbatch(1), hidden(torch.ones(2, 8, 32, dtype=torch.float64)), targets, None)
    assert good.counted


@pytest.mark.parametrize("value", [61, -1])
def test_ids_outside_the_vocabulary_are_violations(value: int) -> None:
    stage = make_stages(make_manifest(stages=1))[0]
    bad = torch.full((2, 8), value, dtype=torch.int32)
    batch = make_batch(1)
    with pytest.raises(Violation, match="ids outside the vocabulary of 61"):
        stage.loss_backward(microbatch(1), host_tensor.from_torch("inputs", bad), batch.targets, None)
    with pytest.raises(Violation, match="ids outside the vocabulary of 61"):
        stage.loss_backward(microbatch(1), batch.inputs, host_tensor.from_torch("targets", bad), None)


def test_a_repeated_id_is_answered_but_not_added() -> None:
    stages, batch = make_stages(make_manifest()), make_batch(1)
    first = run_microbatch(stages, batch, microbatch(1))
    before = gradients(stages)
    again = run_microbatch(stages, batch, microbatch(1))
    assert [one.counted for one in first] == [True, True]
    assert [one.counted for one in again] == [False, False]
    assert [one.finite for one in again] == [True, True]
    assert first[1].grad is not None
    assert again[1].grad is not None
    assert bytes(first[1].grad.data) == bytes(again[1].grad.data)
    assert same(gradients(stages), before)
    result = stages[0].inner_step(make_label())
    assert (result.tokens, result.microbatches) == (13, 1)
    assert not run_microbatch(stages, batch, microbatch(1))[0].counted


def test_spent_ids_are_kept_for_eight_steps_and_at_least_4096() -> None:
    sums = GradientAccumulator([nn.Parameter(torch.zeros(1))])
    for step in range(20):
        for index in range(1000):
            sums.add(AccumulatedMicrobatch(microbatch(step * 1000 + index), 1, 1.0), (torch.ones(1),))
        sums.close_step()
    kept = {one.counter for one in sums.spent()}
    assert [step * 1000 in kept for step in range(20)] == [False] * 13 + [True] * 7
    assert sums.is_spent(microbatch(0)), "it may have been counted"
    assert not sums.is_spent(microbatch(20_000))
    sums = GradientAccumulator([nn.Parameter(torch.zeros(1))])
    for number in range(SPENT_IDS + 1):
        sums.add(AccumulatedMicrobatch(microbatch(number), 1, 1.0), (torch.ones(1),))
        for _ in range(SPENT_STEPS):
            sums.close_step()
    assert next(one.counter for one in sums.spent()) == 1


def zero_gradient(stage: Any, tokens: int, value: float) -> Gradient:
    grad = host_tensor.from_torch("grad", torch.full(stage.state.hidden.shape, value, dtype=torch.float64))
    return Gradient(microbatch(2), grad, 1.0 if tokens else 0.0, tokens, ("next",), finite=tokens > 0)


@pytest.mark.parametrize(
    ("tokens", "value", "loss_sum"),
    [(5, math.nan, 1.0), (5, math.inf, 1.0), (0, 0.0, 0.0), (5, 1e308, 1.0), (5, 0.1, math.nan), (5, 0.1, -math.inf)],
)
def test_a_gradient_or_loss_that_is_not_finite_leaves_no_trace(tokens: int, value: float, loss_sum: float) -> None:
    stages = make_stages(make_manifest(stages=3))
    run_microbatch(stages, make_batch(1), microbatch(1))
    before = gradients(stages)
    _, flow = stages[0].forward(make_batch(2).inputs, None)
    graph, _ = stages[1].forward(flow, None)
    reply = replace(zero_gradient(stages[1], tokens, value), loss_sum=loss_sum)
    given = stages[1].backward(graph, microbatch(2), reply)
    assert (given.finite, given.tokens, given.loss_sum, given.counted) == (False, 0, 0.0, True)
    assert not stages[1]._graphs._open
    assert given.grad is not None
    assert not host_tensor.to_torch(given.grad).any()
    assert same(gradients(stages), before)
    result = stages[1].inner_step(make_label())
    assert (result.tokens, result.microbatches) == (13, 2)


def test_a_parameter_gradient_that_alone_is_not_finite_leaves_no_trace() -> None:
    """At stage 0 no outgoing gradient would reveal it."""
    stages = make_stages(make_manifest())
    run_microbatch(stages, make_batch(1), microbatch(1))
    before = gradients(stages[:1])
    graph, _ = stages[0].forward(make_batch(2).inputs, None)
    given = stages[0].backward(graph, microbatch(2), zero_gradient(stages[0], 5, 1e307))
    assert not given.finite
    assert same(gradients(stages[:1]), before)


def test_a_loss_that_is_not_finite_leaves_no_trace() -> None:
    stages = make_stages(make_manifest())
    run_microbatch(stages, make_batch(1), microbatch(1))
    before = gradients(stages)
    with torch.no_grad():
        stages[1].parameters["lm_head.weight"].fill_(torch.nan)
    given = run_microbatch(stages, make_batch(2), microbatch(2))
    assert [one.finite for one in given] == [False, False]
    assert [one.tokens for one in given] == [0, 0]
    assert same(gradients(stages), before)


def test_a_gradient_of_another_shape_is_a_violation() -> None:
    stages = make_stages(make_manifest())
    graph, flow = stages[0].forward(make_batch(1).inputs, None)
    wrong = Gradient(microbatch(1), hidden(torch.zeros(2, 8, 31, dtype=torch.float64)), 1.0, 1, ())
    with pytest.raises(Violation, match="grad: got"):
        stages[0].check(wrong)
    for tokens in (17, -1):
        with pytest.raises(Violation, match=f"claims {tokens} tokens"):
            stages[0].check(zero_gradient(stages[0], tokens, 0.0))
    right = as_gradient(stages[1].loss_backward(microbatch(1), flow, make_batch(1).targets, None), microbatch(1))
    stages[0].check(right)
    assert stages[0].backward(graph, microbatch(1), right).counted


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_codes_travel_in_both_directions_and_autograd_goes_straight_through(codec: str) -> None:
    """The first stage accumulates what its part of the model yields for the decoded gradient."""
    stages, batch = make_stages(make_manifest(wire={"forward": codec, "backward": codec})), make_batch(1, padded=2)
    graph, flow = stages[0].forward(batch.inputs, batch.mask)
    assert flow.spec == stages[0].state.hidden == stages[1].state.hidden
    assert flow.dtype == "uint8"
    again = stages[0].forward(batch.inputs, batch.mask)[1]
    assert bytes(again.data) == bytes(flow.data)
    given = stages[1].loss_backward(microbatch(1), flow, batch.targets, batch.mask)
    assert given.grad is not None
    assert given.grad.spec == stages[0].state.gradient == stages[1].state.gradient
    assert stages[0].backward(graph, microbatch(1), as_gradient(given, microbatch(1))).counted
    found = gradients(stages[:1])
    exact = make_stages(make_manifest())
    graph, flow = exact[0].forward(batch.inputs, batch.mask)
    grad_BTD = ActivationCodec("grad", codec, (2, 8, 32), torch.float64).decode(host_tensor.to_torch(given.grad))
    grad = host_tensor.from_torch("grad", grad_BTD)
    exact[0].backward(graph, microbatch(1), Gradient(microbatch(1), grad, 1.0, given.tokens, ()))
    assert same(found, gradients(exact[:1]))


def test_scales_that_are_not_finite_are_a_violation() -> None:
    stages, batch = make_stages(make_manifest(wire={"forward": "int8", "backward": "int4"})), make_batch(1)
    graph, flow = stages[0].forward(batch.inputs, None)
    bad = HostTensor(*flow.spec, memoryview(b"\xff" * flow.data.nbytes))
    with pytest.raises(Violation, match="hidden: means or scales that are not finite"):
        stages[1].loss_backward(microbatch(1), bad, batch.targets, None)
    done = stages[1].loss_backward(microbatch(1), flow, batch.targets, None)
    assert done.counted
    spec = stages[0].state.gradient
    wrong = HostTensor(*spec, memoryview(b"\xff" * spec.nbytes))
    with pytest.raises(Violation, match="grad: means or scales that are not finite"):
        stages[0].check(Gradient(microbatch(1), wrong, 1.0, 1, ()))
    right = as_gradient(done, microbatch(1))
    stages[0].check(right)
    assert stages[0].backward(graph, microbatch(1), right).counted


def test_non_finite_values_leave_no_trace_in_the_integer_codecs_either() -> None:
    stages, batch = make_stages(make_manifest(stages=3, wire={"forward": "int4", "backward": "int4"})), make_batch(1)
    run_microbatch(stages, batch, microbatch(1))
    before = gradients(stages)
    graph, flow = stages[0].forward(batch.inputs, None)
    middle, _ = stages[1].forward(flow, None)
    spec = stages[1].state.gradient
    zeros = HostTensor(*spec, memoryview(bytes(spec.nbytes)))
    given = stages[1].backward(middle, microbatch(2), Gradient(microbatch(2), zeros, 0.0, 0, ("next",), finite=False))
    assert (given.finite, given.tokens, given.counted) == (False, 0, True)
    assert not stages[0].backward(graph, microbatch(2), as_gradient(given, microbatch(2))).finite
    assert same(gradients(stages), before)


def test_discard_frees_and_ignores_unknown_handles() -> None:
    stage = make_stages(make_manifest())[0]
    graph, _ = stage.forward(make_batch(1).inputs, None)
    stage.discard(graph)
    stage.discard(graph)
    with pytest.raises(KeyError):
        stage.backward(graph, microbatch(1), zero_gradient(stage, 1, 1.0))


def test_evaluate_leaves_no_trace_and_gives_the_training_loss() -> None:
    stages, batch = make_stages(make_manifest(stages=3)), make_batch(1, padded=2)
    expected = run_microbatch(stages, batch, microbatch(1))[2]
    before = gradients(stages)
    flow: HostTensor | LossSum = batch.inputs
    for stage in stages:
        assert isinstance(flow, HostTensor)
        flow = stage.evaluate(flow, batch.targets, batch.mask)
    assert isinstance(flow, LossSum)
    assert flow.loss_sum == pytest.approx(expected.loss_sum, rel=1e-14)
    assert flow.tokens == expected.tokens
    assert same(gradients(stages), before)


def test_a_mask_hides_tokens() -> None:
    stages = make_stages(make_manifest())
    batch = make_batch(1, padded=3)
    assert bytes(stages[0].forward(batch.inputs, batch.mask)[1].data) != bytes(
        stages[0].forward(batch.inputs, None)[1].data
    )


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("clip_norm", [0.05, 1e6])
def test_inner_steps_are_adamw_on_the_token_mean(clip_norm: float, index: int) -> None:
    """Against torch's own clip and AdamW on a clone of the parameters, with microbatches of unequal token counts."""
    stages = make_stages(make_manifest(inner={"clip_norm": clip_norm, "weight_decay": 0.1, "beta2": 0.9}))
    mine = {name: nn.Parameter(theta.detach().clone()) for name, theta in stages[index].parameters.items()}
    adamw = torch.optim.AdamW(mine.values(), betas=(0.9, 0.9), eps=1e-8, weight_decay=0.1, foreach=False)
    for step in range(1, 4):
        batches = [make_batch(10 * step, ignored=0), make_batch(10 * step + 1, ignored=7)]
        loss_sums = [run_microbatch(stages, b, microbatch(2 * step + i))[0].loss_sum for i, b in enumerate(batches)]
        for name, summed in gradients([stages[index]]).items():
            mine[name].grad = summed / 25
        norm = float(nn.utils.clip_grad_norm_(list(mine.values()), clip_norm))
        adamw.param_groups[0]["lr"] = 0.01 * step
        adamw.step()
        result = [stage.inner_step(make_label(step, 0.01 * step)) for stage in stages][index]
        assert (result.tokens, result.microbatches) == (25, 2)
        assert result.loss_sum == pytest.approx(sum(loss_sums))
        assert result.grad_norm == pytest.approx(norm, rel=1e-12)
        assert (norm > clip_norm) == (clip_norm < 1)
        for name, theta in stages[index].parameters.items():
            assert torch.allclose(theta, mine[name], rtol=1e-11, atol=1e-14), name


def test_a_step_without_tokens_changes_nothing() -> None:
    stages = make_stages(make_manifest())
    run_microbatch(stages, make_batch(1), microbatch(1))
    for stage in stages:
        stage.inner_step(make_label())
    before = weights(stages)
    for stage in stages:
        result = stage.inner_step(make_label(2))
        assert (result.tokens, result.loss_sum, result.microbatches, result.grad_norm) == (0, 0.0, 0, 0.0)
    assert same(weights(stages), before)


def test_the_accumulators_start_again_after_a_step() -> None:
    stages = make_stages(make_manifest())
    run_microbatch(stages, make_batch(1), microbatch(1))
    once = gradients(stages)
    for stage in stages:
        stage.inner_step(make_label(1, learning_rate=0.0))
    run_microbatch(stages, make_batch(1), microbatch(2))
    assert same(gradients(stages), once)


def test_one_stage_that_is_first_and_last() -> None:
    stage = make_stages(make_manifest(stages=1, dtype="float32"))[0]
    losses = []
    for step in range(1, 31):
        given = stage.loss_backward(microbatch(step), make_batch(1).inputs, make_batch(1).targets, None)
        assert given.grad is None
        losses.append(stage.inner_step(make_label(step)).loss_sum / given.tokens)
    assert losses[0] > 4
    assert losses[-1] < 0.5


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_stage_tells_whether_it_computes_well_and_nothing_of_it_is_kept(index: int, dtype: str) -> None:
    stage = make_stages(make_manifest(dtype=dtype))[index]
    before = stage.capture(0, 0.0, 0)
    assert stage.is_sound()
    assert stage.capture(0, 0.0, 0) == before
    theta = next(iter(stage.parameters.values()))
    for value in (torch.nan, torch.inf, 1e30 if dtype == "float32" else 1e200):
        with torch.no_grad():
            kept = theta.flatten()[3].clone()
            theta.view(-1)[3] = value
        assert not stage.is_sound()
        with torch.no_grad():
            theta.view(-1)[3] = kept
    assert stage.is_sound()


@pytest.mark.parametrize("value", [3e38, -3e38])
def test_hidden_states_that_are_finite_and_overflow_are_no_fault_of_the_stage(value: float) -> None:
    stage = make_stages(make_manifest(dtype="float32"))[1]
    hidden = host_tensor.from_torch("hidden", torch.full(stage.state.hidden.shape, value))
    batch = make_batch(1)
    assert not stage.loss_backward(microbatch(1), hidden, batch.targets, None).finite
    assert stage.is_sound()


def test_a_gradient_that_is_far_longer_than_usual_is_clipped_and_noted() -> None:
    first, last = make_stages(make_manifest())
    for counter in range(20):
        graph, hidden = first.forward(make_batch(1).inputs, None)
        reply = as_gradient(last.loss_backward(microbatch(counter), hidden, make_batch(1).targets, None), microbatch(0))
        usual = first.backward(graph, microbatch(counter), reply)
    assert usual.clip == 1.0
    sums = gradients([first])
    graph, _ = first.forward(make_batch(1).inputs, None)
    far = replace(reply, grad=host_tensor.from_torch("grad", 1000 * host_tensor.to_torch(reply.grad)))
    assert first.backward(graph, microbatch(20), far).clip == pytest.approx(LARGEST_NORM / 1000)
    for name, total in gradients([first]).items():
        assert torch.allclose(total, sums[name] * (1 + LARGEST_NORM / 20), rtol=1e-5, atol=1e-6)
    graph, _ = first.forward(make_batch(1).inputs, None)
    of_one_token = first.backward(graph, microbatch(21), replace(far, tokens=1)).clip
    assert of_one_token == pytest.approx(LARGEST_NORM / 1000 / math.sqrt(reply.tokens)), "a sum grows with its root"
