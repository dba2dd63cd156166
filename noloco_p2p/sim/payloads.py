"""The messages between simulated nodes, and their byte counts."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from noloco_p2p.core.line_rate import LineRate
from noloco_p2p.core.messages import MicrobatchId, PeerId
from noloco_p2p.sim.bandwidth import Flow

KINDS = ("activation", "gradient", "snapshot", "weights", "state", "filler", "control")
"""Kinds of messages."""


@dataclass(slots=True)
class ByteCounts:
    """What happened to one node's bytes of one kind. Over all nodes, sent = received + lost + in flight."""

    sent: int = 0
    """Bytes that left the node."""
    received: int = 0
    """Bytes of payloads that the node received and accepted."""
    lost: int = 0
    """Bytes that left the node for nothing: the payload was never completed, or its receiver no longer wanted it."""
    in_flight: int = 0
    """Bytes that left the node in payloads that have neither been accepted nor dropped yet."""

    def add(self, other: "ByteCounts") -> None:
        """Add other counts to these."""
        self.sent += other.sent
        self.received += other.received
        self.lost += other.lost
        self.in_flight += other.in_flight


def totals(bytes_of: Mapping[PeerId, Mapping[str, ByteCounts]]) -> dict[str, ByteCounts]:
    """The counts of all nodes together, by kind."""
    found: dict[str, ByteCounts] = {}
    for of_node in bytes_of.values():
        for kind, counts in of_node.items():
            found.setdefault(kind, ByteCounts()).add(counts)
    return found


@dataclass(slots=True, eq=False)
class Payload:
    """The tensors of one message, or a message without tensors."""

    sender: PeerId
    receiver: PeerId
    kind: str
    nbytes: int
    microbatch: MicrobatchId | None = None
    """For a gradient: the microbatch that it answers."""
    connections: int = 1
    """Number of connections that it uses at once."""
    sent_at: float | None = None
    """When it was sent; None: the receiver has not asked for it yet."""
    over: bool = False
    """Whether it has been accepted or dropped."""
    gone_at: float | None = None
    """When its last byte left."""
    held: bool = False
    """Whether it waits for other payloads from the same sender."""
    stalled_at: float | None = None
    """Since when it has been stalled, because nothing gets through."""
    flow: Flow | None = None
    """None if nothing limits its speed, or once it has ended."""
    on_gone: Callable[[], object] | None = None
    """Called when its last byte leaves, unless that happens immediately."""
    on_lost: Callable[[], None] | None = None
    """Called when a crash ends it."""
    on_dropped: Callable[[], object] | None = None
    """Called when it is dropped for any reason."""
    measured: tuple[tuple[LineRate, float], ...] = ()
    """While it moves: the line directions that measure it, each with the start time that it returned."""
    moved_before: float = 0.0
    """Bytes that had left by then."""

    def heard_at(self, now: float) -> float:
        """When its receiver last received bytes of it, ignoring the latency."""
        if self.gone_at is not None:
            return self.gone_at
        return now if self.stalled_at is None else self.stalled_at

    def moved_bytes(self, now: float) -> int:
        """Bytes that have left."""
        if self.sent_at is None:
            return 0
        return self.nbytes if self.flow is None else math.floor(self.flow.moved(now))
