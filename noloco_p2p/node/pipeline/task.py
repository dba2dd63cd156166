"""What a stage gets of a microbatch, and what comes of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from noloco_p2p.core.messages import Activation, Gradient, HostTensor, MicrobatchId, Origin, PeerId
from noloco_p2p.core.stage_values import Contribution


@dataclass(frozen=True, slots=True)
class StageInput:
    """What a stage is given of a microbatch. Shapes as in `Activation`; at stage 0 `inputs` are B×T tokens."""

    microbatch: MicrobatchId
    origin: Origin
    inputs: HostTensor
    targets: HostTensor
    mask: HostTensor | None
    label: bytes = b""
    avoid: tuple[PeerId, ...] = ()
    reply_soon: Callable[[], None] = lambda: None
    """Called when its gradient will be ready within a few round trips."""

    @classmethod
    def of(cls, sent: Activation, reply_soon: Callable[[], None] = lambda: None) -> "StageInput":
        """At a later stage: of what the one before has sent."""
        header, tensors = sent.header, (sent.hidden, sent.targets, sent.mask)
        return cls(header.microbatch, header.origin, *tensors, header.label, header.avoid, reply_soon)


class StageResult(NamedTuple):
    """What came of a microbatch at this stage and after it."""

    contribution: Contribution
    next_hop: PeerId | None = None
    """The replica of the next stage that served it."""
    reply: Gradient | None = None
    """What that replica answered."""

    @property
    def finite(self) -> bool:
        """Everything was finite, here and later."""
        return self.contribution.finite and (self.reply is None or self.reply.finite)
