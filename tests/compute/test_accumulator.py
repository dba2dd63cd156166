"""Gradients of the microbatches of one inner step: what they add up to, and by how much they are clipped."""

import pytest
import torch
from stages import microbatch
from torch import Tensor, nn

from noloco_p2p.compute.accumulator import AccumulatedMicrobatch, GradientAccumulator, total_norm


def add(sums: GradientAccumulator, counter: int, *grads: float | None) -> None:
    values = [None if grad is None else torch.tensor([grad]) for grad in grads]
    sums.add(AccumulatedMicrobatch(microbatch(counter), 2, 1.0), values)


def grads(parameters: list[nn.Parameter]) -> list[float]:
    return [float(one.grad) for one in parameters if isinstance(one.grad, Tensor)]


def test_a_parameter_that_no_gradient_reaches_gets_none_of_the_step_before() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    sums = GradientAccumulator(parameters)
    for step in range(2):
        add(sums, 3 * step, 1.0, 2.0, None)
        assert grads(parameters) == [1.0, 2.0, 0.0]
        add(sums, 3 * step + 1, None, 4.0, 8.0)
        add(sums, 3 * step + 2)
        assert grads(parameters) == [1.0, 6.0, 8.0]
        assert (sums.tokens, len(sums.added)) == (6, 3)
        sums.close_step()
        add(sums, 100 + step, 16.0, 16.0, 16.0)
        sums.close_step()


@pytest.mark.parametrize(("clip_norm", "after"), [(2.5, 1.0), (5.0, 2.0), (5.1, 2.0), (9.0, 2.0), (100.0, 2.0)])
def test_gradients_are_clipped_and_never_stretched(clip_norm: float, after: float) -> None:
    parameters = [nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2)]
    sums = GradientAccumulator(parameters)
    sums.add(AccumulatedMicrobatch(microbatch(1), 2, 1.0), [torch.tensor([one], dtype=torch.float64) for one in (6, 8)])
    assert sums.average_and_clip(clip_norm) == 5.0
    assert grads(parameters) == pytest.approx([1.5 * after, 2.0 * after], rel=1e-6)


def test_the_norm_of_nothing_is_zero() -> None:
    assert total_norm([]) == 0.0
