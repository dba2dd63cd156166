"""How fast a node's line is and how far its peers are, measured on what it sends and receives anyway.

Pure: the transport says when something begins and ends to move, in seconds of its own clock. A rate is what the line
can do, not how much it is used: the time in which nothing moves says nothing, and what moves side by side shares the
time. Bounded memory (ARCHITECTURE.md, "The speed of a line").
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from statistics import median

from noloco_p2p.core.messages import PeerId

PARTS = 128
"""The last ones in a direction, from which its rate is taken."""
UP_SHARE, DOWN_SHARE = 0.75, 1.0
"""The rate is that which this share of them, by bytes, does not exceed. Any may have been slowed down by its connection
or by the other end, so that the faster ones tell of this line. What comes in depends on the lines of others so much
that only the fastest does."""
SMALL_BYTES = 1 << 16
SMALL_S = 0.02
"""A body of so many bytes, or one that takes so long to send, goes at once, however near its peer is: to ask first
costs both ends work."""
STALE_S = 60.0
"""A rate that was measured longer ago is measured again."""
ASKED_S = 2.0
LEAST_ASKED = 2
"""Places are asked for bodies that the line takes so long to send, and for so many at least: one that is on its way,
and one that follows."""
ROUND_TRIPS = 16
"""The last round trips to a peer, of which the shortest counts: the others waited for something."""
UNSENT_BYTES, MORE_UNSENT_BYTES = 1 << 17, 1 << 20
FAST_BYTES_PER_S = 100e6
"""So much may wait unsent in the socket of a connection: little, for it goes before all that is written later. On a
line this fast more of it is gone in 10 ms, and its sender is not woken for every 128 KiB."""
CONNECTIONS = 2
FAR_S, FAR_BYTES = 0.01, 1 << 16
"""A body goes over so many connections at once to a peer that is so far away, where so much of it would be under way:
what one has under way begins with 15 KB after a rest, and ends with what its buffers hold."""
LEAST_STRIPE_BYTES, STRIPES = 1 << 16, 16
"""It is cut into so many messages at least, if these are not too small: so both end at about the same time."""
PEERS = 256
"""Peers whose round trips are remembered."""


class LineRate:
    """One direction of a line."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._moving = 0
        self._shared_s = 0.0
        """Seconds that one part had for itself that moves since the beginning: with n at once, 1/n of the time."""
        self._as_of = 0.0
        self._parts: deque[tuple[float, float]] = deque(maxlen=PARTS)
        """(bytes per second, bytes) of each."""
        self.measured_at: float | None = None
        """When the last of them ended."""
        self.sizes: dict[str, int] = {}
        """Bytes of the largest body of each kind."""

    def carries(self, kind: str, nbytes: int) -> None:
        """A whole body of this kind has so many bytes."""
        self.sizes[kind] = max(nbytes, self.sizes.get(kind, 0))

    def began(self, now: float) -> float:
        """A body, or a message of one, begins to move; `ended` gets what this returns."""
        self._advance(now)
        self._moving += 1
        return self._shared_s

    def ended(self, began: float, nbytes: float, now: float) -> None:
        """It moves no more: so many bytes have."""
        self._advance(now)
        self._moving -= 1
        seconds = self._shared_s - began
        if nbytes > 0 and seconds > 0:
            self._parts.append((nbytes / seconds, nbytes))
            self.measured_at = now

    @property
    def bytes_per_s(self) -> float | None:
        """What it can do; None: nothing has been measured."""
        return _quantile(self._parts, self._share) if self._parts else None

    def seconds(self, kinds: Iterable[str]) -> float:
        """What one body of each of these kinds takes; 0 where nothing has been measured."""
        rate = self.bytes_per_s
        return sum(self.sizes.get(kind, 0) for kind in kinds) / rate if rate else 0.0

    def _advance(self, now: float) -> None:
        if self._moving:
            self._shared_s += max(0.0, now - self._as_of) / self._moving
        self._as_of = now


class MeasuredLine:
    """Both directions, and the peers at the other end."""

    def __init__(self) -> None:
        self.up = LineRate(UP_SHARE)
        self.down = LineRate(DOWN_SHARE)
        self._round_trips: OrderedDict[PeerId, deque[float]] = OrderedDict()

    def answered(self, peer: PeerId, seconds: float) -> None:
        """A short question to a peer was answered after `seconds`."""
        self._round_trips.setdefault(peer, deque(maxlen=ROUND_TRIPS)).append(seconds)
        self._round_trips.move_to_end(peer)
        if len(self._round_trips) > PEERS:
            self._round_trips.popitem(last=False)

    def round_trip_s(self, peer: PeerId) -> float | None:
        """What a short question and its answer take when nothing holds them up; None: never measured."""
        last = self._round_trips.get(peer)
        return min(last) if last else None

    @property
    def typical_round_trip_s(self) -> float | None:
        """The median of these over the peers; None: there are none."""
        return median(map(min, self._round_trips.values())) if self._round_trips else None

    def worth_asking(self, peer: PeerId, nbytes: int, now: float) -> bool:
        """Whether a body takes longer to send than a round trip to its peer, so that it pays to ask for a place first.

        Also while the rate is not known: what is sent after a grant is measured. A round trip that is not counts as 0.
        """
        if nbytes <= SMALL_BYTES:
            return False
        rate, at = self.up.bytes_per_s, self.up.measured_at
        if rate is None or at is None or now - at > STALE_S:
            return True
        return nbytes / rate > max(SMALL_S, self.round_trip_s(peer) or 0.0)

    def needs_more(self, peer: PeerId) -> bool:
        """Whether one connection to a peer may have less under way than the line would carry."""
        rate, round_trip_s = self.up.bytes_per_s, self.round_trip_s(peer)
        return bool(rate and round_trip_s and round_trip_s >= FAR_S and rate * round_trip_s > FAR_BYTES)

    def asks_for(self, asked: int) -> bool:
        """Whether to ask for one more place while `asked` activations have been asked for, or are leaving."""
        body_s = self.up.seconds(("activation",))
        return asked < LEAST_ASKED or asked * body_s < ASKED_S

    def microbatch_s(self, *, first: bool, last: bool) -> float:
        """Seconds of the busier direction that a microbatch takes, at the first stage, the last one, or in between.

        0 where nothing has been measured.
        """
        sent = [kind for kind, is_sent in (("activation", not last), ("gradient", not first)) if is_sent]
        received = [kind for kind, comes in (("activation", not first), ("gradient", not last)) if comes]
        return max(self.up.seconds(sent), self.down.seconds(received))


def unsent_bytes(bytes_per_s: float | None) -> int:
    """How much may wait in the socket of a connection over which so much goes; None: nobody knows."""
    return MORE_UNSENT_BYTES if bytes_per_s is not None and bytes_per_s >= FAST_BYTES_PER_S else UNSENT_BYTES


def stripe_bytes(nbytes: int) -> int:
    """The most in one message of a body that goes over several connections."""
    return max(LEAST_STRIPE_BYTES, nbytes // STRIPES)


def _quantile(parts: Iterable[tuple[float, float]], share: float) -> float:
    """The rate at which `share` of the bytes moved, or slower."""
    ordered = sorted(parts)
    left = share * sum(nbytes for _, nbytes in ordered)
    for rate, nbytes in ordered:
        left -= nbytes
        if left <= 0:
            return rate
    return ordered[-1][0]
