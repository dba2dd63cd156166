"""What an inner step accumulates: parameter gradients, tokens and loss of the counted microbatches, and spent ids.

Whether a microbatch counts is decided here, in the same operation that adds it (ARCHITECTURE.md, "Exactly once"). A
retry may bring a microbatch to a replica that has already added it, because its sender cannot know whether the reply or
the call was lost. So the id is spent together with the addition, on the device's thread, where no other call can
intervene.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from noloco_p2p.compute import host_tensor
from noloco_p2p.core.messages import MicrobatchId
from noloco_p2p.core.spent_ids import SpentIds


@dataclass(frozen=True, slots=True)
class AccumulatedMicrobatch:
    """A microbatch that counted in the current inner step."""

    microbatch: MicrobatchId
    tokens: int
    loss_sum: float
    clip: float = 1.0
    """Factor by which the returned gradient was clipped."""


class GradientAccumulator:
    """Accumulates gradients of the summed loss in the parameters' `.grad`, which stays allocated."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._grads = [torch.zeros_like(parameter) for parameter in parameters]
        self._holds = False
        self._tokens_of_all: int | None = None
        self._spent = SpentIds()
        self.added: list[AccumulatedMicrobatch] = []
        """In the order of addition."""
        for parameter, grad in zip(parameters, self._grads, strict=True):
            parameter.grad = grad

    def is_spent(self, microbatch: MicrobatchId) -> bool:
        """Whether the microbatch has already been added, in this step or an earlier one."""
        return microbatch in self._spent

    def add(self, added: AccumulatedMicrobatch, grads: Sequence[Tensor | None]) -> None:
        """Spend the id and add its gradients: one per parameter (None where it does not reach), or none at all."""
        self._spent.spend(added.microbatch)
        self.added.append(added)
        if not grads:
            return
        reached = [mine for mine, new in zip(self._grads, grads, strict=True) if new is not None]
        values = [new for new in grads if new is not None]
        if self._holds:
            torch._foreach_add_(reached, values)
            return
        if len(reached) < len(self._grads):
            torch._foreach_zero_(self._grads)
        torch._foreach_copy_(reached, values)
        self._holds = True

    @property
    def tokens(self) -> int:
        """Number of targets that counted in this step."""
        return sum(added.tokens for added in self.added)

    @property
    def divisor(self) -> int:
        """By how many tokens to divide: this replica's, or those of all replicas once `replace` has been called."""
        return self.tokens if self._tokens_of_all is None else self._tokens_of_all

    def flat(self) -> Tensor:
        """The summed gradients of the step as one vector on the host, followed by their number of tokens.

        In float32 the number is exact up to 2^24.
        """
        parts = [grad.flatten() if self._holds else torch.zeros_like(grad).flatten() for grad in self._grads]
        return host_tensor.to_host(torch.cat([*parts, parts[0].new_tensor([self.tokens])]))

    def replace(self, grads: Iterable[Tensor], tokens: int) -> None:
        """Replace the step's gradients by the sum over all replicas, which has this many tokens."""
        for mine, total in zip(self._grads, grads, strict=True):
            mine.copy_(total)
        self._holds, self._tokens_of_all = True, tokens

    def average_and_clip(self, clip_norm: float) -> float:
        """Divide by `divisor`, then clip over the stage: times min(1, clip_norm / (norm + 1e-6)).

        METHOD.md, "Inner step".
        Returns the L2 norm before clipping. It is finite: each microbatch's norm is, and that of the mean is no larger.
        """
        torch._foreach_div_(self._grads, float(self.divisor))
        norm = total_norm(self._grads)
        factor = clip_norm / (norm + 1e-6)
        if factor < 1:
            torch._foreach_mul_(self._grads, factor)
        return norm

    def close_step(self) -> None:
        """Forget the gradients and microbatches of the step; their ids stay spent."""
        self._forget()
        self._spent.end_step()

    def spent(self) -> tuple[MicrobatchId, ...]:
        """Ids spent in earlier steps, oldest first."""
        return self._spent.ended()

    def restart(self, spent: Iterable[MicrobatchId]) -> None:
        """Forget the current step with its ids, and remember those in `spent` instead (`SpentIds.refill`)."""
        self._forget()
        self._spent.refill(spent)

    def _forget(self) -> None:
        self._holds, self._tokens_of_all = False, None
        self.added = []


def total_norm(tensors: list[Tensor]) -> float:
    """L2 norm over all tensors. It is not finite if any value is not, or if the squares overflow."""
    if not tensors:
        return 0.0
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors))))
