"""How the nodes of a simulated swarm are connected: links, access lines, regions, and what lost packets cost.

Two formulas of TCP's say what losses cost. Inside a transfer they cost speed: at most `ceiling_bytes_per_s`. At its
end, and for a message of one packet, nothing comes after the lost packet that would reveal the loss, so its sender
waits for the retransmission timer: `resend_s`. Reno's ceiling is a low one; CUBIC and BBR get more. All rates are of
what TCP carries: headers of its packets are not counted.
"""

import math
import random
from dataclasses import dataclass, replace
from typing import Protocol

from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.seeds import generator

MSS_BYTES = 1460
"""TCP's maximum segment size: an Ethernet frame's payload less the headers of IPv4 and TCP."""
RENO = math.sqrt(3 / 2)
"""1.22, of periodic losses with every segment acknowledged: Mathis, Semke, Mahdavi and Ott, "The macroscopic behavior
of the TCP congestion avoidance algorithm", ACM CCR 27(3), 1997."""
LEAST_TIMER_S = 0.2
"""What the timer adds to a round trip: Linux, TCP_RTO_MIN. (RFC 6298 would have it wait a second.)"""
LONGEST_TIMER_S = 120.0
"""Linux, TCP_RTO_MAX."""
FIRST_WINDOW_BYTES = 10 * MSS_BYTES
"""What a connection sends in its first round trip, and in the first one after a while in which it sent nothing: RFC
6928, and `tcp_slow_start_after_idle` of Linux. It doubles with each round trip."""


def ceiling_bytes_per_s(loss: float, round_trip_s: float) -> float:
    """What one connection reaches at most: 1.22·segment / (round trip·√loss)."""
    if loss <= 0 or round_trip_s <= 0:
        return math.inf
    return RENO * MSS_BYTES / (round_trip_s * math.sqrt(loss))


def connection_bytes_per_s(link: "Link", round_trip_s: float) -> float:
    """What one connection over this link reaches at most: its window in each round trip, and what losses leave it."""
    ceiling = ceiling_bytes_per_s(link.loss, round_trip_s)
    return min(ceiling, link.window_bytes / round_trip_s) if link.window_bytes and round_trip_s > 0 else ceiling


def resend_s(loss: float, round_trip_s: float, rng: random.Random) -> float:
    """How much later a message's last packet arrives: 0 unless it is lost, else the timers, each twice the one before.

    Each sending is lost with chance `loss`, which must be below 1. RFC 6298, section 5.5.
    """
    late_s, timer_s = 0.0, round_trip_s + LEAST_TIMER_S
    while rng.random() < loss:
        late_s += timer_s
        timer_s = min(2 * timer_s, LONGEST_TIMER_S)
    return late_s


@dataclass(frozen=True, slots=True)
class Link:
    """The path of a message from one node to another, one way."""

    latency_s: float = 0.001
    """Median time one way, seconds."""
    spread: float = 0.0
    """Sigma of the log-normal latency; 0: constant."""
    bytes_per_s: float | None = None
    """What the tensors of all concurrent transfers on this link share; none: no limit but the access of its ends."""
    request_loss: float = 0.0
    """Chance that a call never arrives."""
    reply_loss: float = 0.0
    """Chance that an answer never arrives, though the callee has done the work."""
    loss: float = 0.0
    """Chance that a packet is lost: TCP sends it again, which costs time."""
    slow_start_after_idle: bool = True
    """A connection that has rested starts slowly again, as Linux has it by default."""
    window_bytes: float | None = None
    """Most that one connection has under way; none: no limit."""


@dataclass(frozen=True, slots=True)
class Access:
    """How a node is connected to all others: the tensors of all its concurrent transfers share these."""

    up_bytes_per_s: float | None = None
    """Away from the node; none: no limit."""
    down_bytes_per_s: float | None = None
    """Towards the node; none: no limit."""


@dataclass(frozen=True, slots=True)
class ControlSizes:
    """What the messages without tensors weigh, bytes. Those of zero bytes cost nothing, and wait for nothing."""

    request: int = 0
    """What makes a call: HTTP/2's and gRPC's frames, the caller's peer id, run id and protocol version."""
    answer: int = 0
    """The same of what comes back, be it a refusal, a description or what goes before a gradient."""
    header: int = 0
    """Of an activation."""
    word: int = 0
    """A grant, or that a call has been cancelled."""
    question: int = 0
    """How far one microbatch is."""
    report: int = 0
    """The answer to one such question."""
    advert: int = 0
    """One node's, as it lies in the DHT."""


MEASURED = ControlSizes(request=110, answer=180, header=310, word=20, question=75, report=20, advert=600)
"""The messages of proto/noloco.proto with ids as long as real ones, and what gRPC 1.85 added on a connection in use."""


@dataclass(frozen=True, slots=True)
class MessageSizes:
    """What the messages of the run that is simulated would weigh, where the stages here have tiny tensors."""

    activation_bytes: int
    """Hidden states of one microbatch, targets included."""
    gradient_bytes: int
    """The gradient that answers it."""
    snapshot_bytes: tuple[int, ...]
    """Of every stage: u and the sample that go to a partner."""
    weights_bytes: tuple[int, ...]
    """Of every stage: θ_f as guardians hold it."""
    state_bytes: tuple[int, ...]
    """Of every stage: a replica's whole state."""
    control: ControlSizes = ControlSizes()

    def of(self, kind: str, stage: int) -> int:
        """Bytes of a message of one of the kinds of `traffic.KINDS`; of one stage, where stages differ."""
        match kind:
            case "snapshot":
                return self.snapshot_bytes[stage]
            case "weights":
                return self.weights_bytes[stage]
            case "state":
                return self.state_bytes[stage]
        return self.activation_bytes if kind == "activation" else self.gradient_bytes


class Geography(Protocol):
    """Which nodes are connected how; asked once for each pair and each node."""

    def link(self, sender: PeerId, receiver: PeerId) -> Link:
        """The link between two nodes, in one direction."""

    def access(self, peer: PeerId) -> Access:
        """The line between a node and everything else."""


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
class Regions:
    """The Geography of nodes in regions, in turn: replica 7 of a stage is in region 7 modulo their count.

    So every stage has nodes in each region, and the replicas of one number share one.
    """

    names: tuple[str, ...]
    round_trip_ms: tuple[tuple[float, ...], ...]
    """Median round trip between a node of the row's region and one of the column's, milliseconds; half of it each way.

    The diagonal is the round trip within a region.
    """
    bytes_per_s: tuple[tuple[float | None, ...], ...] | None = None
    """What one node can send to one other, from the row's region to the column's; none: no limit but their access."""
    spread: float = 0.0
    """Sigma of the log-normal latency of every link; 0: constant."""
    loss: float = 0.0
    """Chance that a packet is lost, on every link."""
    slow_start_after_idle: bool = True
    """See `Link`."""
    window_bytes: float | None = None
    """See `Link`."""
    each: Access = Access()
    """Of every node."""

    def link(self, sender: PeerId, receiver: PeerId) -> Link:
        """See `Geography`."""
        row, column = self._index(sender), self._index(receiver)
        speed = self.bytes_per_s[row][column] if self.bytes_per_s else None
        latency_s, slow = self.round_trip_ms[row][column] / 2000.0, self.slow_start_after_idle
        window = self.window_bytes
        return Link(latency_s, self.spread, speed, loss=self.loss, slow_start_after_idle=slow, window_bytes=window)

    def access(self, peer: PeerId) -> Access:
        """See `Geography`."""
        return self.each

    def _index(self, peer: PeerId) -> int:
        return int(peer.rpartition("r")[2]) % len(self.names)


@dataclass(frozen=True, slots=True)
class VariedAccess:
    """The Geography whose nodes differ in their access: each draws one log-normal factor for both directions.

    With one factor a fast line is fast both ways, and every line is as asymmetric as the median one.
    """

    within: Geography
    """Where the links come from, and the access of the directions that have no median."""
    median: Access
    spread: float
    """Sigma of the log-normal factor."""
    seed: int
    """A node's factor is a function of this and its id."""

    def link(self, sender: PeerId, receiver: PeerId) -> Link:
        """See `Geography`."""
        return self.within.link(sender, receiver)

    def access(self, peer: PeerId) -> Access:
        """See `Geography`."""
        factor = math.exp(generator(self.seed, "access", peer).gauss(0.0, self.spread))
        up, down, plain = self.median.up_bytes_per_s, self.median.down_bytes_per_s, self.within.access(peer)
        return Access(
            plain.up_bytes_per_s if up is None else up * factor,
            plain.down_bytes_per_s if down is None else down * factor,
        )


@dataclass(frozen=True, slots=True)
class CappedAccess:
    """The Geography whose nodes use no more of their access than their owners allow."""

    within: Geography
    most: Access

    def link(self, sender: PeerId, receiver: PeerId) -> Link:
        """See `Geography`."""
        return self.within.link(sender, receiver)

    def access(self, peer: PeerId) -> Access:
        """See `Geography`."""
        plain, most = self.within.access(peer), self.most
        return Access(
            _least(plain.up_bytes_per_s, most.up_bytes_per_s), _least(plain.down_bytes_per_s, most.down_bytes_per_s)
        )


@dataclass(frozen=True, slots=True)
class LossyCalls:
    """The Geography in which whole calls and answers vanish, each with this chance."""

    within: Geography
    chance: float

    def link(self, sender: PeerId, receiver: PeerId) -> Link:
        """See `Geography`."""
        return replace(self.within.link(sender, receiver), request_loss=self.chance, reply_loss=self.chance)

    def access(self, peer: PeerId) -> Access:
        """See `Geography`."""
        return self.within.access(peer)


def _least(*limits: float | None) -> float | None:
    """The least of the limits that there are."""
    return min((limit for limit in limits if limit is not None), default=None)
