"""How the nodes of a simulated swarm are connected: links, access lines, regions, and what lost packets cost.

Two formulas of TCP's say what losses cost. Inside a transfer they cost speed: at most `ceiling_bytes_per_s`. At its
end, and for a message of one packet, nothing comes after the lost packet that would reveal the loss, so its sender
waits for the retransmission timer: `resend_s`. Reno's ceiling is a low one; CUBIC and BBR get more. All rates are of
what TCP carries: headers of its packets are not counted.
"""

import math
import random
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class Regions:
    """Places in the world. Replica 7 of a stage is in region 7 modulo their number: every stage has nodes in each."""

    round_trip_ms: tuple[tuple[float, ...], ...]
    """Median round trip between a node of the row's region and one of the column's, milliseconds; half of it each way.

    The diagonal is the round trip within a region.
    """
    bytes_per_s: tuple[tuple[float | None, ...], ...] | None = None
    """What one node can send to one other, from the row's region to the column's; none: only their access limits it."""

    def between(self, sender: PeerId, receiver: PeerId) -> tuple[float, float | None]:
        """(latency in seconds, bytes per second) from one node to another."""
        row, column = (int(peer.rpartition("r")[2]) % len(self.round_trip_ms) for peer in (sender, receiver))
        return self.round_trip_ms[row][column] / 2000.0, self.bytes_per_s[row][column] if self.bytes_per_s else None


@dataclass(frozen=True, slots=True)
class Geography:
    """How the nodes are connected. With one `access_spread` for both directions a fast line is fast both ways."""

    between: Link = Link()
    """Every link. With regions, its latency and bandwidth are theirs."""
    each: Access = Access()
    """Every node's; its median if they differ."""
    regions: Regions | None = None
    access_spread: float = 0.0
    """Sigma of the log-normal factor on a node's access; 0: constant."""
    seed: int = 0
    """A node's factor is a function of this and its id."""
    cap: Access = Access()
    """The most that a node's owner lets it use."""

    def link(self, sender: PeerId, receiver: PeerId) -> Link:
        """The link between two nodes, in one direction."""
        if self.regions is None:
            return self.between
        latency_s, bytes_per_s = self.regions.between(sender, receiver)
        return replace(self.between, latency_s=latency_s, bytes_per_s=bytes_per_s)

    def access(self, peer: PeerId) -> Access:
        """The line between a node and everything else."""
        drawn = generator(self.seed, "access", peer).gauss(0.0, self.access_spread) if self.access_spread else 0.0

        def line(bytes_per_s: float | None, cap: float | None) -> float | None:
            own = None if bytes_per_s is None else bytes_per_s * math.exp(drawn)
            return min((limit for limit in (own, cap) if limit is not None), default=None)

        each, cap = self.each, self.cap
        return Access(line(each.up_bytes_per_s, cap.up_bytes_per_s), line(each.down_bytes_per_s, cap.down_bytes_per_s))
