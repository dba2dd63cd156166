"""The input and the result of one stage's work on a microbatch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from noloco_p2p.core.messages import Activation, Gradient, HostTensor, MicrobatchId, Origin, PeerId
from noloco_p2p.core.stage_values import Contribution


@dataclass(frozen=True, slots=True)
class StageInput:
    """What a stage receives of a microbatch. Shapes as in `Activation`; at stage 0 `inputs` are B×T tokens."""

    microbatch: MicrobatchId
    origin: Origin
    inputs: HostTensor
    targets: HostTensor
    mask: HostTensor | None
    label: bytes = b""
    avoid: tuple[PeerId, ...] = ()
    reply_soon: Callable[[], None] = lambda: None
    """Called once the gradient will be ready within a few round trips."""

    @classmethod
    def of(cls, sent: Activation, reply_soon: Callable[[], None] = lambda: None) -> "StageInput":
        """The input of a later stage, from the activation that the stage before has sent."""
        header, tensors = sent.header, (sent.hidden, sent.targets, sent.mask)
        return cls(header.microbatch, header.origin, *tensors, header.label, header.avoid, reply_soon)


class StageResult(NamedTuple):
    """The outcome of a microbatch at this stage and the later ones."""

    contribution: Contribution
    next_hop: PeerId | None = None
    """The replica of the next stage that served it; None at the last stage."""
    reply: Gradient | None = None
    """That replica's reply."""

    @property
    def finite(self) -> bool:
        """Whether loss and gradients were finite, here and at the later stages."""
        return self.contribution.finite and (self.reply is None or self.reply.finite)
