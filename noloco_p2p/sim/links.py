"""How the nodes of a simulated swarm are connected: links, access lines, regions, and what packet loss costs.

Two formulas for TCP describe what losses cost. During a transfer they limit the rate to `ceiling_bytes_per_s`. At the
end of a transfer, and for a message of one packet, no later packet reveals the loss, so the sender waits for its
retransmission timer: `resend_s`. The ceiling is Reno's, which is low; CUBIC and BBR reach more. All rates refer to TCP
payload; packet headers are not counted.
"""

import math
import random
from dataclasses import dataclass, replace

from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.seeds import generator

MSS_BYTES = 1460
"""TCP's maximum segment size: an Ethernet frame's payload minus the IPv4 and TCP headers."""
RENO = math.sqrt(3 / 2)
"""1.22, for periodic losses with every segment acknowledged: Mathis, Semke, Mahdavi and Ott, "The macroscopic behavior
of the TCP congestion avoidance algorithm", ACM CCR 27(3), 1997."""
MIN_TIMER_S = 0.2
"""What the retransmission timer adds to a round trip: TCP_RTO_MIN of Linux. (RFC 6298 asks for one second.)"""
LONGEST_TIMER_S = 120.0
"""Longest retransmission timer: TCP_RTO_MAX of Linux."""
FIRST_WINDOW_BYTES = 10 * MSS_BYTES
"""What a connection sends in its first round trip, and in the first one after an idle period (RFC 6928, and
`tcp_slow_start_after_idle` of Linux). It doubles with each round trip."""


def ceiling_bytes_per_s(loss: float, round_trip_s: float) -> float:
    """Highest rate of one connection under losses: 1.22·segment / (round trip·√loss)."""
    if loss <= 0 or round_trip_s <= 0:
        return math.inf
    return RENO * MSS_BYTES / (round_trip_s * math.sqrt(loss))


def connection_bytes_per_s(link: "Link", round_trip_s: float) -> float:
    """Highest rate of one connection over this link: one window per round trip, and no more than losses allow."""
    ceiling = ceiling_bytes_per_s(link.loss, round_trip_s)
    return min(ceiling, link.window_bytes / round_trip_s) if link.window_bytes and round_trip_s > 0 else ceiling


def resend_s(loss: float, round_trip_s: float, rng: random.Random) -> float:
    """Delay of a message's last packet in seconds: 0 if it is not lost, otherwise the sum of the timers that expire.

    Each transmission is lost with probability `loss`, which must be below 1. Each timer is twice the previous one (RFC
    6298, section 5.5).
    """
    late_s, timer_s = 0.0, round_trip_s + MIN_TIMER_S
    while rng.random() < loss:
        late_s += timer_s
        timer_s = min(2 * timer_s, LONGEST_TIMER_S)
    return late_s


def resent_after_s(waited_s: float) -> float:
    """Seconds until TCP next retransmits a message that was first sent `waited_s` ago and met a cut. With each further
    retransmission the time since the first attempt doubles."""
    return max(MIN_TIMER_S, waited_s)


@dataclass(frozen=True, slots=True)
class Link:
    """The path of a message from one node to another, in one direction."""

    latency_s: float = 0.001
    """Median one-way latency, seconds."""
    spread: float = 0.0
    """Sigma of the log-normal latency; 0: constant."""
    bytes_per_s: float | None = None
    """Bandwidth shared by the tensors of all concurrent transfers on this link; None: only access lines limit it."""
    request_loss: float = 0.0
    """Probability that a call never arrives."""
    reply_loss: float = 0.0
    """Probability that an answer never arrives although the callee has done the work."""
    loss: float = 0.0
    """Probability that a packet is lost. TCP sends it again, which takes time."""
    slow_start_after_idle: bool = True
    """A connection starts slowly again after an idle period, as on Linux by default."""
    window_bytes: float | None = None
    """Upper limit on the bytes that one connection has in flight; None: no limit."""


@dataclass(frozen=True, slots=True)
class Access:
    """A node's access line. The tensors of all its concurrent transfers share it."""

    up_bytes_per_s: float | None = None
    """Upload; None: no limit."""
    down_bytes_per_s: float | None = None
    """Download; None: no limit."""


@dataclass(frozen=True, slots=True)
class ControlSizes:
    """Sizes of messages without tensors, bytes. Messages of zero bytes cost nothing and wait for nothing."""

    request: int = 0
    """Every call: HTTP/2 and gRPC framing, and the protocol version."""
    answer: int = 0
    """Every answer: a refusal, a description, or what precedes a gradient."""
    header: int = 0
    """Header of an activation."""
    word: int = 0
    """A grant, or the cancellation of a call."""
    question: int = 0
    """A request for the progress of one microbatch."""
    report: int = 0
    """The reply to such a request."""
    advert: int = 0
    """One node's advert as stored in the DHT."""


MEASURED = ControlSizes(request=110, answer=180, header=310, word=20, question=75, report=20, advert=600)
"""The messages of proto/noloco.proto with ids of realistic length, plus what gRPC 1.85 added on a connection in use."""


@dataclass(frozen=True, slots=True)
class MessageSizes:
    """Message sizes in the run being simulated, whose tensors are larger than those of the simulator's stages."""

    activation_bytes: int
    """Hidden states and targets of one microbatch."""
    gradient_bytes: int
    """The gradient sent in reply."""
    snapshot_bytes: tuple[int, ...]
    """For each stage: u and the sample that go to a partner."""
    weights_bytes: tuple[int, ...]
    """For each stage: θ_f as guardians hold it."""
    state_bytes: tuple[int, ...]
    """For each stage: a replica's full state."""
    control: ControlSizes = ControlSizes()

    def of(self, kind: str, stage: int) -> int:
        """Bytes of a message with tensors, by kind (`payloads.KINDS`), and by stage where stages differ."""
        found: int | tuple[int, ...] = getattr(self, f"{kind}_bytes")
        return found[stage] if isinstance(found, tuple) else found


@dataclass(frozen=True, slots=True)
class Regions:
    """Regions of the world. Replica i of a stage is in region i modulo the number of regions."""

    round_trip_ms: tuple[tuple[float, ...], ...]
    """Median round trip between a node of the row's region and one of the column's, milliseconds; half of it is the
    latency of each direction.

    The diagonal is the round trip within a region.
    """
    bytes_per_s: tuple[tuple[float | None, ...], ...] | None = None
    """Bandwidth from one node in the row's region to one in the column's; None: only their access lines limit it."""

    def between(self, sender: PeerId, receiver: PeerId) -> tuple[float, float | None]:
        """(latency in seconds, bytes per second) from one node to another."""
        row, column = (int(peer.rpartition("r")[2]) % len(self.round_trip_ms) for peer in (sender, receiver))
        return self.round_trip_ms[row][column] / 2000.0, self.bytes_per_s[row][column] if self.bytes_per_s else None


@dataclass(frozen=True, slots=True)
class Geography:
    """How the nodes are connected."""

    between: Link = Link()
    """Every link. Regions, if there are any, override its latency and bandwidth."""
    each: Access = Access()
    """Every node's access line, or the median of all if they differ."""
    regions: Regions | None = None
    access_spread: float = 0.0
    """Sigma of the log-normal factor on a node's access line, the same in both directions; 0: constant."""
    seed: int = 0
    """A node's factor is a function of this seed and its id."""
    cap: Access = Access()
    """The limit that owners set on what their nodes use."""

    def link(self, sender: PeerId, receiver: PeerId) -> Link:
        """The link between two nodes, in one direction."""
        if self.regions is None:
            return self.between
        latency_s, bytes_per_s = self.regions.between(sender, receiver)
        return replace(self.between, latency_s=latency_s, bytes_per_s=bytes_per_s)

    def access(self, peer: PeerId) -> Access:
        """A node's access line: its own bandwidth, within `cap`."""
        drawn = generator(self.seed, "access", peer).gauss(0.0, self.access_spread) if self.access_spread else 0.0

        def line(bytes_per_s: float | None, cap: float | None) -> float | None:
            own = None if bytes_per_s is None else bytes_per_s * math.exp(drawn)
            return min((limit for limit in (own, cap) if limit is not None), default=None)

        each, cap = self.each, self.cap
        return Access(line(each.up_bytes_per_s, cap.up_bytes_per_s), line(each.down_bytes_per_s, cap.down_bytes_per_s))
