"""Autograd graphs between forward and backward pass, kept or rebuilt from their input, and how many fit in memory.

The size of a graph is measured on the first one, not computed from shapes, because the tensors that autograd keeps
depend on the family, its attention kernel and autocast. It is the size of the storages that autograd saves, on every
device: a CPU has no allocator to ask, and CUDA's also counts what a pass frees again.

Shape legend: B microbatch, T sequence, D hidden size.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from noloco_p2p.compute.hardware import free_bytes, pinned_bytes
from noloco_p2p.core.messages import HostTensor
from noloco_p2p.host import free_host_bytes

LOOK_S = 1.0
"""Interval between two checks of the free memory."""
SHARE = 0.5
"""Share of the free memory for further microbatches. Other nodes of this machine see the same free memory. Since each
check goes half of the way, together they approach the total but do not exceed it."""
STEP_COPIES = 3
"""Multiples of the weights: the current microbatch's gradients and, before the first inner step, Adam's moments."""
ROUND_COPIES = 6
"""Multiples of the weights on the host, temporarily: another u and θ_f, a partner's u, captured θ and Adam moments."""


@dataclass(slots=True)
class KeptGraph:
    """A pass through the stage with its graph."""

    leaf: Tensor
    """The input on the device: B×T tokens, or B×T×D."""
    hidden: Tensor
    """B×T×D."""


@dataclass(frozen=True, slots=True)
class KeptInput:
    """The input from which a graph is rebuilt, on the host, where the caller holds it anyway."""

    inputs: HostTensor
    mask: HostTensor | None


Pass = Callable[[HostTensor, HostTensor | None], KeptGraph]
"""A pass through a stage, from its input and mask; with a graph if gradients are enabled."""


class SavedTensors:
    """Counts the memory of the tensors that autograd saves: each storage once, and no parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.nbytes = 0
        # Everything that is saved lives until counting ends, so no address is reused.
        self._seen = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def add(self, tensor: Tensor) -> Tensor:
        """Count a tensor. Returns what autograd should keep: not the tensor itself, or output and graph would keep each
        other alive.

        https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.saved_tensors_hooks
        """
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.nbytes += storage.nbytes()
        return tensor.detach()


class GraphMemory:
    """The number of microbatches for which a stage has memory. `body_bytes`: size of one's messages on the host.

    `keeps`: graphs are kept from forward to backward pass; otherwise there is only one at a time.
    """

    def __init__(
        self, device: torch.device, parameters: Sequence[nn.Parameter], body_bytes: int, *, keeps: bool
    ) -> None:
        self.graph_bytes: int | None = None
        """Size of one graph without the parameters; None before the first."""
        self.places: int | None = 1 if keeps or body_bytes else None
        """As many as there is memory for, at least 1; 1 before the first graph. None: microbatches hold no memory."""
        self._device = device
        self._parameters = parameters
        self._body_bytes = body_bytes
        self._keeps = keeps
        self._look_at = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Use around a pass that makes a graph: the size of the first graph is measured."""
        if self.graph_bytes is not None:
            yield
            return
        saved = SavedTensors(self._parameters)
        with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor):
            yield
        self.graph_bytes = saved.nbytes

    def look(self, open: int) -> None:
        """Recompute the places, at most once a second. `open` microbatches already hold memory."""
        now = time.monotonic()
        if self.graph_bytes is None or self.places is None or now < self._look_at:
            return
        self._look_at = now + LOOK_S
        weights_bytes = sum(parameter.nbytes for parameter in self._parameters)
        kept, passing = self.graph_bytes if self._keeps else 0, self.graph_bytes + STEP_COPIES * weights_bytes
        host = free_host_bytes()
        if self._device.type == "cpu":
            needs = [(kept + self._body_bytes, host, ROUND_COPIES * weights_bytes + passing)]
        else:
            rounds = ROUND_COPIES * pinned_bytes(weights_bytes)
            needs = [(kept, free_bytes(self._device), passing), (self._body_bytes, host, rounds)]
        # If the system does not report its free memory, there is room for one at a time.
        rooms = [0 if free is None else int(SHARE * (free - spare)) // each for each, free, spare in needs if each]
        self.places = max(1, open + min(rooms))


class GraphStore:
    """The open graphs by handle. `run` is always the pass through the stage. For use on the device's thread only."""

    def __init__(self, memory: GraphMemory, *, recompute: bool) -> None:
        self._memory = memory
        self._recompute = recompute
        self._open: dict[int, tuple[int, KeptGraph | KeptInput]] = {}
        """Each with the version of the weights at its forward pass."""
        self._handles = itertools.count(1)
        self._weights = 0

    def forward(self, run: Pass, inputs: HostTensor, mask: HostTensor | None) -> tuple[int, Tensor]:
        """Run the forward pass. Returns a handle to its graph, and the hidden states."""
        graph = next(self._handles)
        if self._recompute:
            with torch.no_grad():
                hidden_BTD = run(inputs, mask).hidden
            self._open[graph] = self._weights, KeptInput(inputs, mask)
        else:
            with self._memory.measured():
                kept = run(inputs, mask)
            self._open[graph], hidden_BTD = (self._weights, kept), kept.hidden
        self._memory.look(len(self._open))
        return graph, hidden_BTD

    def take(self, run: Pass, graph: int) -> KeptGraph:
        """Remove a graph, rebuilt if it was not kept, for its backward pass."""
        weights, kept = self._open.pop(graph)
        # Autograd would not notice: AdamW's kernels do not change the versions of saved tensors.
        assert weights == self._weights, "the weights changed between forward and backward"
        if isinstance(kept, KeptInput):
            with self._memory.measured():
                kept = run(kept.inputs, kept.mask)
            self._memory.look(len(self._open))
        return kept

    def discard(self, graph: int) -> None:
        """Free a graph; unknown handles are ignored."""
        self._open.pop(graph, None)

    def clear(self) -> None:
        """Free all graphs."""
        self._open.clear()

    def weights_change(self) -> None:
        """The weights are about to change: graphs made before must not be used any more."""
        self._weights += 1
