"""What travels between simulated nodes, and the account of a node's bytes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from noloco_p2p.core.messages import MicrobatchId, PeerId
from noloco_p2p.sim.bandwidth import Flow
from noloco_p2p.sim.line_meters import Transfer

KINDS = ("activation", "gradient", "snapshot", "weights", "state", "control")
"""What travels."""


@dataclass(slots=True)
class ByteCounts:
    """What became of one node's bytes of one kind. Over all nodes, sent = received + lost + in flight."""

    sent: int = 0
    """Left the node."""
    received: int = 0
    """Came to the node, in payloads that it took."""
    lost: int = 0
    """Left the node for nothing: their payload was never whole, or its receiver did not want it any more."""
    in_flight: int = 0
    """Left the node, and it is not known yet what becomes of them."""

    def add(self, other: "ByteCounts") -> None:
        """Add another one's."""
        self.sent += other.sent
        self.received += other.received
        self.lost += other.lost
        self.in_flight += other.in_flight


@dataclass(slots=True, eq=False)
class Payload:
    """The tensors of one message, or a message without any, from its sender to its receiver."""

    sender: PeerId
    receiver: PeerId
    kind: str
    nbytes: int
    microbatch: MicrobatchId | None = None
    """Of a gradient: what it answers."""
    connections: int = 1
    """It travels over so many at once."""
    sent_at: float | None = None
    """When it began to leave; None: nobody has asked for it."""
    over: bool = False
    """It was taken, or will never be."""
    gone_at: float | None = None
    """When its last byte left."""
    held: bool = False
    """Others of its sender go first."""
    stalled_at: float | None = None
    """Since when it is stopped, because nothing gets through."""
    flow: Flow | None = None
    """None: nothing limits it, or it is over."""
    on_gone: Callable[[], object] | None = None
    """Called when its last byte leaves, unless it left at once."""
    on_lost: Callable[[], None] | None = None
    """Called when a crash ends it."""
    on_dropped: Callable[[], object] | None = None
    """Called when it is dropped, for whatever reason."""
    transfer: Transfer = field(init=False)
    """As the lines of both ends see it."""

    def __post_init__(self) -> None:
        """It has not moved yet."""
        self.transfer = Transfer(self.sender, self.receiver, self.kind, self.nbytes)

    @property
    def moves(self) -> bool:
        """Its bytes leave now."""
        return self.flow is not None and bool(self.flow.path)

    def heard_at(self, now: float) -> float:
        """When its receiver last got something of it, were there no latency."""
        if self.gone_at is not None:
            return self.gone_at
        return now if self.stalled_at is None else self.stalled_at

    def moved_bytes(self, now: float) -> int:
        """How much of it has left."""
        if self.sent_at is None:
            return 0
        return self.nbytes if self.flow is None else math.floor(self.flow.moved(now))
