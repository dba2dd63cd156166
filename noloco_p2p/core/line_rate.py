"""How fast a node's line is and how far away its peers are, measured on what it sends and receives anyway.

Pure: the transport reports when each transfer begins and ends, in seconds on its own clock. A rate is what the line
can do, not how much it is used: idle time does not count, and concurrent transfers share the time. Memory is bounded
(ARCHITECTURE.md, "The speed of a line").
"""

import math
from collections import deque
from collections.abc import Iterable
from enum import Enum
from statistics import median

from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.recent import Recent
from noloco_p2p.core.wire import PACK_BYTES

PARTS = 128
"""How many of the last transfers in a direction its rate is derived from."""
UP_SHARE, DOWN_SHARE = 0.75, 1.0
"""The rate of a direction is this quantile of the transfers' rates, weighted by bytes. The connection or the other end
may have slowed down any of them, so the faster ones show what this line can do. Downloads depend so much on the lines
of others that only the fastest one shows it."""
MIN_DOWN_S = 0.25
"""Downloads are measured over at least this long: a message may have waited in a buffer for most of the time that it
took to arrive, and a single one would then seem much too fast."""
SMALL_BYTES = 1 << 16
SMALL_S = 0.02
"""A body of at most SMALL_BYTES, or one that takes at most SMALL_S to send, is sent without asking, however near its
peer is: asking first costs both ends work."""
STALE_S = 60.0
"""A rate older than this is measured again."""
ASKED_S = 2.0
MIN_ASKED = 2
"""A node asks for places for as many bodies as its line sends in ASKED_S, and for at least MIN_ASKED: one that is
being sent, and one to follow it."""
ROUND_TRIPS = 16
"""The shortest of this many recent round trips to a peer counts: the others were delayed by something."""
UNSENT_BYTES, MORE_UNSENT_BYTES = 1 << 17, 1 << 20
FAST_BYTES_PER_S = 100e6
"""How much may wait unsent in the socket of a connection. It is little, because it is sent before everything that is
written later. On a line of at least FAST_BYTES_PER_S even the larger amount is sent in 10 ms, and the sender need not
be woken for every 128 KiB."""
UNSENT_S = 0.025
"""On a line that takes longer than this for UNSENT_BYTES, only what it sends in UNSENT_S may wait, because a body may
use sixteen connections."""
MESSAGE_S, MIN_MESSAGE_BYTES, UNMEASURED_BYTES = 0.1, 1 << 14, 1 << 16
"""A message has what the line sends in MESSAGE_S, but at least MIN_MESSAGE_BYTES, an HTTP/2 frame; on a line that has
not been measured UNMEASURED_BYTES. A receiver sees nothing of a message before all of it is there, and gives up a
transfer of which it has seen nothing for 5 s: on a line of 5 Mbit/s that carries several bodies, 1 MiB took longer."""
CONNECTIONS = 16
FAR_S, FAR_BYTES, PART_BYTES = 0.01, 1 << 14, 3 << 16
"""If its peer is at least FAR_S away, a body uses one more connection for each FAR_BYTES that the line carries in a
round trip, but at most one more for each PART_BYTES of the body, and at most CONNECTIONS in all. A single connection
has 15 KB in flight after a rest, twice as much after each round trip, and never more than its buffers hold. Twice as
many connections reach full speed a round trip earlier. With a larger FAR_BYTES, losses of 1 % would leave a body only
one connection: they keep each at 18 KB, so with fewer connections the line seems slower, and then it needs still fewer.
PART_BYTES is a little less than what one connection carries in its first four flights, 225 KB."""
MIN_STRIPE_BYTES, STRIPES = 1 << 16, 4 * CONNECTIONS
"""Such a body is divided into the same number of messages for each connection, so that all end at about the same time:
STRIPES in all, or fewer of at least MIN_STRIPE_BYTES. There are not more, because messages cost CPU: 33.5 MB and an
equally large reply took both ends 184 ms in 64 messages each way, and 204 ms in 128."""
RESTED_S = 0.5
"""If nothing has been sent for RESTED_S, connections to a peer are slow: TCP halves their windows each time that its
retransmission timer, a round trip plus 0.2 s, would have expired."""
FILLER_BYTES = (1 << 17, 1 << 14)
"""How much filler makes a connection fast again: the larger amount is sent in four round trips, twice as much in each
as in the one before, the smaller amount in one."""
PEERS = 256
"""How many peers' round trips are remembered, and how many peers to which bodies were sent."""


class LineRate:
    """The measured rate of one direction of a line."""

    def __init__(self, share: float, least_s: float = 0.0, most: float = math.inf) -> None:
        """`share`: the quantile that counts; transfers shorter than `least_s` are combined into one part; `most`: the
        owner's cap, bytes per second."""
        self._share, self._least_s, self._most = share, least_s, most
        self._pending = (0.0, 0.0)
        """Bytes and seconds of the transfers since the last part."""
        self._moving = 0
        self._shared_s = 0.0
        """Line time that a transfer running since the start would have had: with n at once, 1/n of the time."""
        self._as_of = 0.0
        self._parts: deque[tuple[float, float]] = deque(maxlen=PARTS)
        """(bytes per second, bytes) of each part."""
        self._rate: float | None = None
        """The quantile of the parts, computed on demand."""
        self._from_system = False
        """Whether the parts are the system's own counts."""
        self.measured_at: float | None = None
        """When the last part ended."""
        self.sizes: dict[str, int] = {}
        """Size of the largest body of each kind."""

    def carries(self, kind: str, nbytes: int) -> None:
        """Record the size of a complete body of this kind."""
        self.sizes[kind] = max(nbytes, self.sizes.get(kind, 0))

    def began(self, now: float) -> float:
        """A body, or a message of one, begins to move. Pass the result to `ended`."""
        self._advance(now)
        self._moving += 1
        return self._shared_s

    def ended(self, began: float, nbytes: float, now: float) -> None:
        """The transfer for which `began` was returned has ended, after this many bytes."""
        self._advance(now)
        self._moving -= 1
        seconds = self._shared_s - began
        if nbytes > 0 and seconds > 0 and not self._from_system:
            self._pending = (self._pending[0] + nbytes, self._pending[1] + seconds)
            if self._pending[1] >= self._least_s:
                self._append(*self._pending, now)

    def counted(self, nbytes: int, seconds: float, now: float) -> None:
        """The system counted this many bytes in this many seconds. From the first call on, only its counts matter."""
        if not self._from_system:
            self._parts.clear()
            self._from_system = True
        self._append(nbytes, seconds, now)

    @property
    def bytes_per_s(self) -> float | None:
        """The rate of this direction; None if nothing has been measured."""
        if self._rate is None and self._parts:
            self._rate = min(self._most, _quantile(self._parts, self._share))
        return self._rate

    def seconds(self, kinds: Iterable[str]) -> float:
        """Seconds that one body of each of these kinds takes in all; 0 if nothing has been measured."""
        rate = self.bytes_per_s
        return sum(self.sizes.get(kind, 0) for kind in kinds) / rate if rate else 0.0

    def _append(self, nbytes: float, seconds: float, now: float) -> None:
        self._parts.append((nbytes / seconds, nbytes))
        self._pending, self.measured_at, self._rate = (0.0, 0.0), now, None

    def _advance(self, now: float) -> None:
        if self._moving:
            self._shared_s += max(0.0, now - self._as_of) / self._moving
        self._as_of = now


class Sending(Enum):
    """How an activation is sent to a peer."""

    WHOLE = "one message"
    AT_ONCE = "over several connections at once; it waits in line at the peer if need be"
    ASKED = "the header first, because the body takes longer to send than half a round trip"


class MeasuredLine:
    """Both directions of a line, and how far away the peers at its other end are."""

    def __init__(self, most_up: float = math.inf, most_down: float = math.inf) -> None:
        """`most_up`, `most_down`: the owner's caps, bytes per second."""
        self.up = LineRate(UP_SHARE, most=most_up)
        self.down = LineRate(DOWN_SHARE, MIN_DOWN_S, most_down)
        self._round_trips = Recent[PeerId, deque[float]](PEERS)
        self._lines = Recent[PeerId, float](PEERS)
        """Rates of peers' own lines, as far as they limit what is sent to them."""
        self._leaving = Recent[PeerId, tuple[int, float]](PEERS)
        """For each peer: how many bodies are being sent to it, and when the last one had been sent."""

    def answered(self, peer: PeerId, seconds: float) -> None:
        """A short request to a peer was answered after `seconds`."""
        self._round_trips[peer] = last = self._round_trips.get(peer, deque(maxlen=ROUND_TRIPS))
        last.append(seconds)

    def round_trip_s(self, peer: PeerId) -> float | None:
        """Seconds that a short request and its answer take if nothing delays them; None if never measured."""
        last = self._round_trips.get(peer)
        return min(last) if last else None

    @property
    def typical_round_trip_s(self) -> float | None:
        """The median round trip over the peers; None if none has been measured."""
        return median(map(min, self._round_trips.values())) if self._round_trips else None

    def sending(self, peer: PeerId, nbytes: int, now: float, *, fits: bool) -> Sending:
        """The best way to send a body to a peer; `fits`: whether one message can hold it."""
        if not fits or self._worth_asking(peer, nbytes, now):
            return Sending.ASKED
        return Sending.AT_ONCE if self.connections(peer, nbytes) > 1 else Sending.WHOLE

    def _worth_asking(self, peer: PeerId, nbytes: int, now: float) -> bool:
        """Whether it pays to ask for a place first: a body takes longer to send than half a round trip to its peer.

        True also while the rate is unknown, because what is sent after a grant is measured. An unknown round trip
        counts as 0.
        """
        if nbytes <= SMALL_BYTES:
            return False
        rate, at = self.up.bytes_per_s, self.up.measured_at
        if rate is None or at is None or now - at > STALE_S:
            return True
        return nbytes / min(rate, self._lines.get(peer, rate)) > max(SMALL_S, (self.round_trip_s(peer) or 0.0) / 2)

    def granted(self, peer: PeerId, nbytes: int, wanted_bytes: int) -> int:
        """`connections` of a body for which a peer wants messages of at most `wanted_bytes`. Unless that is 0, it shows
        how fast the peer's own line is, or an eighth as fast if that is capped: each connection may have a window in
        transit beyond the cap."""
        if wanted_bytes:
            self._lines[peer] = wanted_bytes / MESSAGE_S if wanted_bytes < PACK_BYTES else math.inf
        return self.connections(peer, nbytes)

    def connections(self, peer: PeerId, nbytes: int, *, comes: bool = False) -> int:
        """Over how many connections to send a body to a peer: one may have less in flight than the lines would carry.

        A line that has not been measured counts as fast. `comes`: the body comes from the peer.
        """
        rate, round_trip_s = (self.down if comes else self.up).bytes_per_s or math.inf, self.round_trip_s(peer) or 0.0
        rate = rate if comes else min(rate, self._lines.get(peer, math.inf))
        if round_trip_s < FAR_S:
            return 1
        return int(min(CONNECTIONS, 1 + rate * round_trip_s // FAR_BYTES, 1 + nbytes // PART_BYTES))

    def leaves(self, peer: PeerId) -> None:
        """A body begins to be sent to a peer; `has_left` must follow."""
        bodies, left_at = self._leaving.get(peer, (0, -math.inf))
        self._leaving[peer] = bodies + 1, left_at

    def has_left(self, peer: PeerId, now: float) -> None:
        """A body has been sent to a peer, or never will be."""
        bodies, _ = self._leaving.get(peer, (0, 0.0))
        self._leaving[peer] = max(0, bodies - 1), now

    def rested(self, peer: PeerId, now: float) -> bool:
        """Whether the connections to a peer have become slow, because nothing has been sent to it for RESTED_S."""
        bodies, left_at = self._leaving.get(peer, (0, -math.inf))
        return not bodies and now - left_at > RESTED_S

    def filler_bytes(self, peer: PeerId, nbytes: int, *, comes: bool = False, peers: int = 1) -> int:
        """How much filler is worth sending on each connection before a body to a peer, if they have rested.

        0 if the body uses one connection. Otherwise all filler together takes at most a third of a round trip, or half
        of the body's time if that is longer, but at most a round trip: it saves a few round trips, but delays whatever
        else uses the line. `comes`: the body comes from the peer. `peers`: how many peers get filler, because the body
        may go to any of them.
        """
        rate, connections = (self.down if comes else self.up).bytes_per_s, self.connections(peer, nbytes, comes=comes)
        if connections == 1:
            return 0
        round_trip_s, body_s = self.round_trip_s(peer) or 0.0, nbytes / rate if rate else 0.0
        longest_s = max(round_trip_s / 3, min(round_trip_s, body_s / 2))
        return next((n for n in FILLER_BYTES if not rate or peers * connections * n / rate <= longest_s), 0)

    def asks_for(self, asked: int) -> bool:
        """Whether to ask for another place while `asked` activations have asked for theirs or are being sent."""
        return asked < MIN_ASKED or asked * self.up.seconds(("activation",)) < ASKED_S

    def microbatch_s(self, *, first: bool, last: bool) -> float:
        """Seconds for which a microbatch occupies the busier direction: at the first stage, the last, or in between.

        0 if nothing has been measured.
        """
        sent = [kind for kind, is_sent in (("activation", not last), ("gradient", not first)) if is_sent]
        received = [kind for kind, comes in (("activation", not first), ("gradient", not last)) if comes]
        return max(self.up.seconds(sent), self.down.seconds(received))


def unsent_bytes(bytes_per_s: float | None) -> int:
    """How much may wait unsent in the socket of a connection on a line of this rate; None: the rate is unknown."""
    most = UNSENT_BYTES if bytes_per_s is None else int(bytes_per_s * UNSENT_S)
    return MORE_UNSENT_BYTES if most >= FAST_BYTES_PER_S * UNSENT_S else max(MIN_MESSAGE_BYTES, min(UNSENT_BYTES, most))


def message_bytes(bytes_per_s: float | None) -> int:
    """The most tensor bytes in one message over a line of this rate; None: the rate is unknown."""
    most = UNMEASURED_BYTES if bytes_per_s is None else int(bytes_per_s * MESSAGE_S)
    return max(MIN_MESSAGE_BYTES, min(PACK_BYTES, most))


def stripe_bytes(nbytes: int, connections: int) -> int:
    """The size of a message of a body that uses several connections, so that each gets the same number of messages."""
    each = max(1, min(STRIPES // connections, nbytes // (connections * MIN_STRIPE_BYTES)))
    return -(-nbytes // (connections * each))


def _quantile(parts: Iterable[tuple[float, float]], share: float) -> float:
    """The rate at which `share` of the bytes moved, or slower."""
    fastest_first = sorted(parts, reverse=True)
    faster = (1 - share) * sum([nbytes for _, nbytes in fastest_first])
    for rate, nbytes in fastest_first:
        faster -= nbytes
        if faster < 0:
            return rate
    return fastest_first[-1][0]
