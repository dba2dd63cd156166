"""The Muon optimizer for matrices: orthogonalized Nesterov momentum (METHOD.md, M1).

torch's own (`torch.optim.Muon`, from 2.9 on) always iterates in bfloat16, for which a CPU without bfloat16 instructions
needs 20 to 75 times as long as for float32.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from noloco_p2p.compute.hardware import precision

MOMENTUM = 0.95
COEFFICIENTS = 3.4445, -4.7750, 2.0315
STEPS, EPS = 5, 1e-7
BATCH_BYTES = 1 << 28
"""Size of a batch of matrices of one shape that a GPU orthogonalizes together: one by one, it mostly waits for kernel
launches."""
RATIO = 0.2
"""The root mean square of an update at a learning rate of 1: that of AdamW's updates in practice (2502.16982)."""
WIDE = 2
"""From this ratio of its sides on, a matrix is orthogonalized through its Gram matrix."""


class Muon(torch.optim.Optimizer):
    """Updates matrices by their `.grad`; the momentum is in their state as `momentum_buffer`."""

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        """`lr` may be changed in the parameter group before a step."""
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # gradients are computed before
        """One update of every matrix, in place."""
        with torch.no_grad():
            for group in self.param_groups:
                for batch in _batches(group["params"]):
                    self._update(batch, group)

    def _update(self, batch: Sequence[nn.Parameter], group: Mapping[str, Any]) -> None:
        """Update matrices of one shape."""
        nesterov = []
        for matrix in batch:
            state, gradient = self.state[matrix], matrix.grad
            assert gradient is not None
            if not state:
                state["momentum_buffer"] = torch.zeros_like(matrix)
            nesterov.append(gradient.lerp(state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM), MOMENTUM))
        directions = orthogonal(torch.stack(nesterov), precision(batch[0]))
        del nesterov
        for matrix, direction in zip(batch, directions, strict=True):
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
            matrix.add_(direction, alpha=-RATIO * sqrt(max(matrix.shape)) * group["lr"])


def _batches(matrices: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Groups of matrices of one shape: up to BATCH_BYTES on a GPU, one at a time on a CPU."""
    by_shape: dict[torch.Size, list[nn.Parameter]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    for alike in by_shape.values():
        count = 1 if alike[0].device.type == "cpu" else max(1, BATCH_BYTES // alike[0].nbytes)
        for at in range(0, len(alike), count):
            yield alike[at : at + count]


def orthogonal(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrices (batch × rows × columns, not changed) with singular values near 1, by the Newton–Schulz iteration
    in `dtype`.

    Sources: K. Jordan, Muon (2024); for wide matrices Dao AI Lab, Gram Newton-Schulz (2026), except in bfloat16, for
    whose rounding errors it is too sensitive.
    """
    tall = matrices.size(1) > matrices.size(2)
    wide = (matrices.mT if tall else matrices).to(dtype)
    wide = wide / torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True).clamp(min=EPS)
    first, third, fifth = COEFFICIENTS
    if wide.size(2) >= WIDE * wide.size(1) and dtype is not torch.bfloat16:
        wide = _polynomial(wide @ wide.mT) @ wide
    else:
        for _ in range(STEPS):
            gram = wide @ wide.mT
            wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth), wide, beta=first)
    return wide.mT if tall else wide


def _polynomial(gram: Tensor) -> Tensor:
    """The product of all steps of the iteration. Each is a polynomial of the Gram matrix at that step and commutes with
    it, so that only matrices of the smaller side are multiplied."""
    product = step = _step(gram)
    for _ in range(STEPS - 1):
        gram = step @ gram @ step
        step = _step(gram)
        product = step @ product
    return product


def _step(gram: Tensor) -> Tensor:
    first, third, fifth = COEFFICIENTS
    step = torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth)
    step.diagonal(dim1=1, dim2=2).add_(first)
    return step
