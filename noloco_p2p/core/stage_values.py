"""What a node and its stage tell each other (`ports.Stage`).

Shape legend: B microbatch size, T sequence length, D hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from noloco_p2p.core.lattice_format import LatticeFormat, LatticeRequest
from noloco_p2p.core.messages import Batch, HostTensor, MicrobatchId, PeerId, TensorSpec
from noloco_p2p.core.snapshots import answer_specs

TensorSpecs = tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class StageState:
    """What is fixed of a stage once it is made."""

    index: int
    parameters: int
    """Count of parameters that this stage holds."""
    hidden: TensorSpec
    gradient: TensorSpec
    """The hidden states that enter or leave it and their gradients, as they travel (`core.block_format`)."""
    snapshot: TensorSpecs
    """What travels of its frozen rounds to a partner, in order."""
    replica: TensorSpecs
    """The tensors of its whole state, in order (ReplicaState)."""
    weights: TensorSpecs
    """Of every stage of the run: θ_f as its guardians hold it, and as it is taken over from them."""
    lattice: LatticeFormat | None = None
    """How vectors travel in a codec that has bounds."""

    def answer(self, asked: LatticeRequest | None) -> TensorSpecs:
        """What travels to a partner that asks so, in order (`core.snapshots`)."""
        return answer_specs(self.snapshot, self.lattice, asked)


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one backward pass gave."""

    grad: HostTensor | None
    """For the stage before, as it travels; None at stage 0."""
    loss_sum: float
    tokens: int
    counted: bool
    """The parameter gradients and tokens were added; False: the id had been spent here and they were dropped."""
    finite: bool
    """False: loss or gradient was not finite; it counts as a microbatch of zero tokens, and `grad` is zero."""
    clip: float = 1.0
    """What the gradient that came back was multiplied by (`core.guard`)."""


@dataclass(frozen=True, slots=True)
class StepLabel:
    """What the node tells the stage about the inner step that it closes."""

    inner_step: int
    """Number of this optimizer step, from 1."""
    step: int
    """Floor of the clock when the step was opened."""
    learning_rate: float
    routes: Mapping[MicrobatchId, tuple[PeerId | None, PeerId | None]]
    """For the audit: who sent each microbatch, and who served it next."""
    batches: Mapping[MicrobatchId, Batch] = field(default_factory=dict)
    """For the audit at stage 0: the data of each microbatch (a later stage leaves it empty)."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an inner step did. With `tokens` 0 it left θ and the optimizer untouched."""

    tokens: int
    loss_sum: float
    microbatches: int
    grad_norm: float
    """L2 norm over this stage before clipping; 0.0 without tokens."""
    busy_s: float
    """Seconds that the device worked since the previous inner step."""
