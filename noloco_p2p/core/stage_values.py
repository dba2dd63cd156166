"""Plain values that a node and its stage exchange (`ports.Stage`).

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
    """What never changes about a stage once it is made."""

    index: int
    parameters: int
    """Number of parameters that this stage holds."""
    hidden: TensorSpec
    gradient: TensorSpec
    """The hidden states that enter or leave the stage, and their gradients, as they travel (`core.block_format`)."""
    snapshot: TensorSpecs
    """The tensors of a frozen round that travel to a partner, in order."""
    replica: TensorSpecs
    """The tensors of the complete state (ReplicaState), in order."""
    weights: TensorSpecs
    """One for each stage of the run: θ_f as its guardians hold it, and as it is taken over from them."""
    lattice: LatticeFormat | None = None
    """How vectors travel, in a codec that has bounds."""

    def answer(self, asked: LatticeRequest | None) -> TensorSpecs:
        """The tensors that travel to a partner with this request, in order (`core.snapshots`)."""
        return answer_specs(self.snapshot, self.lattice, asked)


@dataclass(frozen=True, slots=True)
class Contribution:
    """The result of one backward pass."""

    grad: HostTensor | None
    """For the previous stage, as it travels; None at stage 0."""
    loss_sum: float
    tokens: int
    counted: bool
    """True if the parameter gradients and tokens were added; False if they were dropped, because the id was spent."""
    finite: bool
    """False if the loss or a gradient was not finite; the microbatch then has zero tokens, and `grad` is zero."""
    clip: float = 1.0
    """Factor by which the returned gradient was clipped (`core.guard`)."""


@dataclass(frozen=True, slots=True)
class StepLabel:
    """What the stage needs to know about the inner step that it is about to take."""

    inner_step: int
    """Number of this optimizer step, from 1."""
    step: int
    """Floor of the clock when the step began."""
    learning_rate: float
    routes: Mapping[MicrobatchId, tuple[PeerId | None, PeerId | None]]
    """For the audit: the peer that sent each microbatch, and the peer that served it next."""
    batches: Mapping[MicrobatchId, Batch] = field(default_factory=dict)
    """For the audit at stage 0: the data of each microbatch. Empty at later stages."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of an inner step. If `tokens` is 0, it left θ and the optimizer unchanged."""

    tokens: int
    loss_sum: float
    microbatches: int
    grad_norm: float
    """L2 norm of the gradient of this stage before clipping; 0.0 without tokens."""
    busy_s: float
    """Seconds of device work since the previous inner step."""
