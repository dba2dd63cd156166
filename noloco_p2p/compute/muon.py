"""Muon (METHOD.md, M1): Nesterov's momentum, made orthogonal, for matrices.

torch's own (`torch.optim.Muon`, from 2.9 on) always iterates in bfloat16. A CPU without instructions for it needs 20 to
75 times as long for that as for float32.
"""

from collections.abc import Iterable, Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
COEFFICIENTS = 3.4445, -4.7750, 2.0315
STEPS, EPS = 5, 1e-7
RATIO = 0.2
"""The root mean square of an update at a learning rate of 1: what updates of AdamW have in practice (2502.16982)."""


class Muon(torch.optim.Optimizer):
    """Moves matrices by their `.grad`; the momentum is in their state as `momentum_buffer`."""

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        """`lr` may be changed in the parameter group before a step."""
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # gradients are there before
        """One update of every matrix that has a gradient, in place."""
        with torch.no_grad():
            for group in self.param_groups:
                for matrix in group["params"]:
                    if matrix.grad is not None:
                        self._update(matrix, matrix.grad, group)

    def _update(self, matrix: nn.Parameter, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
        direction = orthogonal(gradient.lerp(momentum, MOMENTUM), precision(matrix))
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.add_(direction, alpha=-RATIO * sqrt(max(matrix.shape)) * group["lr"])


def precision(tensor: Tensor) -> torch.dtype:
    """The dtype of the iteration: bfloat16 on a GPU that computes in it, else the tensor's own."""
    device = tensor.device
    fast = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if fast and tensor.dtype is torch.float32 else tensor.dtype


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix (rows × columns, not changed) with singular values near 1, by the Newton–Schulz iteration in `dtype`.

    Source: K. Jordan, Muon (2024).
    """
    tall = matrix.size(0) > matrix.size(1)
    wide = (matrix.T if tall else matrix).to(dtype)
    wide = wide / wide.norm().clamp(min=EPS)
    first, third, fifth = COEFFICIENTS
    for _ in range(STEPS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), wide, beta=first)
    return wide.T if tall else wide
