"""Where the nodes of a simulated swarm stand: what lies between two of them, and how much things weigh."""

from dataclasses import dataclass
from typing import Protocol

from noloco_p2p.core.messages import PeerId


@dataclass(frozen=True, slots=True)
class Link:
    """What a message meets on its way from one node to another, one way."""

    latency_s: float = 0.001
    """Median time on the way, seconds."""
    spread: float = 0.0
    """Sigma of the log-normal latency; 0: constant."""
    bytes_per_s: float | None = None
    """What the tensors of all concurrent transfers on this way share; none: no limit but the access of its ends."""
    request_loss: float = 0.0
    """Chance that a call never arrives."""
    reply_loss: float = 0.0
    """Chance that an answer never arrives, though the callee has done the work."""
    loss: float = 0.0
    """Chance that a packet is lost: TCP sends it again, which costs time, see `network`."""


@dataclass(frozen=True, slots=True)
class Access:
    """How a node is connected to everybody: the tensors of all its concurrent transfers share these."""

    up_bytes_per_s: float | None = None
    """Away from the node; none: no limit."""
    down_bytes_per_s: float | None = None
    """Towards the node; none: no limit."""


class Geography(Protocol):
    """Who is connected how; asked once for each pair and each node."""

    def link(self, sender: PeerId, receiver: PeerId) -> Link:
        """What lies between two nodes, in one direction."""
        ...

    def access(self, peer: PeerId) -> Access:
        """What lies between a node and everything else."""
        ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """The Geography in which every link is the same."""

    between: Link = Link()
    each: Access = Access()

    def link(self, sender: PeerId, receiver: PeerId) -> Link:
        """See `Geography`."""
        return self.between

    def access(self, peer: PeerId) -> Access:
        """See `Geography`."""
        return self.each


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the messages of the run that is simulated would weigh, where the stages here have tiny tensors."""

    activation_bytes: int
    """Hidden states of one microbatch, targets included."""
    gradient_bytes: int
    """The gradient that answers it."""
    snapshot_bytes: tuple[int, ...]
    """Of every stage: φ and Δ."""
    state_bytes: tuple[int, ...]
    """Of every stage: a replica's whole state."""
