"""Graphs between forward and backward: kept, or made again from their input; and for how many there is memory.

What a graph holds is measured on the first one, not computed from shapes: which tensors autograd keeps depends on the
family, its attention kernel and autocast. Counted are the storages that it saves, alike on every device: a CPU has no
allocator that could be asked, and CUDA's also counts what a pass frees again.

Shape legend: B microbatch, T sequence, D hidden size.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from noloco_p2p.compute.hardware import free_bytes
from noloco_p2p.compute.host_memory import free_host_bytes
from noloco_p2p.core.messages import HostTensor

LOOK_S = 1.0
"""Between two looks at the memory that is free."""
SHARE = 0.5
"""Of what is free, for further microbatches. Other nodes of this machine look at the same memory, and each look goes
half of the way: together they come near to what there is and not beyond it."""
STEP_COPIES = 3
"""Times the weights: the present microbatch's gradients and, before the first inner step, Adam's moments."""
ROUND_COPIES = 6
"""Times the weights, on the host: another u and θ_f, a partner's u, θ and Adam's moments captured. They come and go."""


@dataclass(slots=True)
class KeptGraph:
    """A pass through the stage with its graph."""

    leaf: Tensor
    """The input on the device: B×T tokens, or B×T×D."""
    hidden: Tensor
    """B×T×D."""


@dataclass(frozen=True, slots=True)
class KeptInput:
    """What a graph is made again from. On the host, where the caller holds it anyway."""

    inputs: HostTensor
    mask: HostTensor | None


Pass = Callable[[HostTensor, HostTensor | None], KeptGraph]
"""Through a stage, from its input and mask; with a graph where gradients are enabled."""


class SavedTensors:
    """Counts the memory of the tensors that autograd saves, each storage once, those of the parameters not."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.nbytes = 0
        # All that is saved lives until the count is over: addresses are not used again.
        self._seen = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def add(self, tensor: Tensor) -> Tensor:
        """Count a tensor; returns what is to be kept: not itself, or output and graph would hold each other.

        https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.saved_tensors_hooks
        """
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.nbytes += storage.nbytes()
        return tensor.detach()


class GraphMemory:
    """For how many microbatches a stage has memory. `body_bytes`: of one, in messages, on the host.

    `keeps`: their graphs are kept from forward to backward; otherwise there is one at a time.
    """

    def __init__(
        self, device: torch.device, parameters: Sequence[nn.Parameter], body_bytes: int, *, keeps: bool
    ) -> None:
        self.graph_bytes: int | None = None
        """What one graph holds beside the parameters; None before the first."""
        self.places: int | None = 1 if keeps or body_bytes else None
        """As many as there is memory for, 1 at least and before the first graph. None: nothing of them is held."""
        self._device = device
        self._parameters = parameters
        self._body_bytes = body_bytes
        self._keeps = keeps
        self._look_at = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around a pass that makes a graph: what the first one saves is counted."""
        if self.graph_bytes is not None:
            yield
            return
        saved = SavedTensors(self._parameters)
        with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor):
            yield
        self.graph_bytes = saved.nbytes

    def look(self, open: int) -> None:
        """Count the places anew, at most once a second; `open` microbatches hold memory already."""
        now = time.monotonic()
        if self.graph_bytes is None or self.places is None or now < self._look_at:
            return
        self._look_at = now + LOOK_S
        weights_bytes = sum(parameter.nbytes for parameter in self._parameters)
        kept, passing = self.graph_bytes if self._keeps else 0, self.graph_bytes + STEP_COPIES * weights_bytes
        host, rounds = free_host_bytes(), ROUND_COPIES * weights_bytes
        if self._device.type == "cpu":
            needs = [(kept + self._body_bytes, host, rounds + passing)]
        else:
            needs = [(kept, free_bytes(self._device), passing), (self._body_bytes, host, rounds)]
        # Of a system that does not say what is free nothing is known: one after the other.
        rooms = [0 if free is None else int(SHARE * (free - spare)) // each for each, free, spare in needs if each]
        self.places = max(1, open + min(rooms))


class GraphStore:
    """The graphs that are open, by handle. `run` is always the pass through the stage. Used on the device's thread."""

    def __init__(self, memory: GraphMemory, *, recompute: bool) -> None:
        self._memory = memory
        self._recompute = recompute
        self._open: dict[int, tuple[int, KeptGraph | KeptInput]] = {}
        """With the number of the weights of the forward pass."""
        self._handles = itertools.count(1)
        self._weights = 0

    def forward(self, run: Pass, inputs: HostTensor, mask: HostTensor | None) -> tuple[int, Tensor]:
        """A handle, and the hidden states."""
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
        """The graph, for its backward pass; it is not kept any longer."""
        weights, kept = self._open.pop(graph)
        # Autograd would not notice it: AdamW's kernels leave the versions of what was saved as they are.
        assert weights == self._weights, "the weights changed between forward and backward"
        if isinstance(kept, KeptGraph):
            return kept
        with self._memory.measured():
            again = run(kept.inputs, kept.mask)
        self._memory.look(len(self._open))
        return again

    def discard(self, graph: int) -> None:
        """Free a graph; unknown handles are ignored."""
        self._open.pop(graph, None)

    def clear(self) -> None:
        """Free all of them."""
        self._open.clear()

    def weights_change(self) -> None:
        """A graph of before must not be used from here on."""
        self._weights += 1
