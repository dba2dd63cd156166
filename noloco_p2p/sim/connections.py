"""The paths between nodes: lines, what waits in a connection's sockets, and slow start after an idle period."""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from functools import cache

from noloco_p2p.core import wire
from noloco_p2p.core.line_rate import CONNECTIONS, unsent_bytes
from noloco_p2p.core.messages import PeerId
from noloco_p2p.sim import bandwidth
from noloco_p2p.sim.bandwidth import Flow, Segment
from noloco_p2p.sim.links import FIRST_WINDOW_BYTES, MIN_TIMER_S, Geography, connection_bytes_per_s

MIN_HANDED_BYTES, HANDED_BYTES = 32 << 10, 128 << 10
QUICK_WRITE_S, SLOW_WRITE_S = 0.1, 1.0
"""The amount that gRPC hands to the kernel at once starts at HANDED_BYTES. It grows while writes are quick, up to one
message, and shrinks while they are slow (`Chttp2WriteSizePolicy`)."""


class Connection:
    """The connections for bodies from one node to another. A body uses all of them or one.

    In its first round trip each connection sends `FIRST_WINDOW_BYTES`, and twice as much in each following one, until
    something else limits it. From then on it gets any share that becomes free at once; real TCP would take some round
    trips to find it. While it sends nothing, its window is halved each time its retransmission timer would have expired
    (RFC 2861, `tcp_cwnd_restart` of Linux).
    """

    def __init__(
        self, ceilings: tuple[float, float], fastest: float, round_trip_s: float, forgets: bool = True
    ) -> None:
        """`ceilings`: highest bytes per second of one connection and of all together; `fastest`: of the whole path.

        Without `forgets`, the connections keep their speed when idle, and their slow start was before the simulation.
        """
        self._each, self._ceiling = ceilings
        self.segment = Segment(self._ceiling)
        """The part of the path that only these connections limit."""
        self._fastest = fastest
        self._used = 1
        """Number of connections that the newest body uses or used."""
        self._round_trip_s, self._forgets = round_trip_s, forgets
        self._moving: dict[Flow, float] = {}
        """Each moving body, with the bytes that had left when it was started."""
        self._moved = 0.0
        """Bytes that left of bodies that no longer move."""
        self._used_at = -math.inf
        self._reached = 0.0
        """Bytes per second of the last body when it ended."""
        self._growth: asyncio.TimerHandle | None = None
        self._waiting: deque[tuple[float, Callable[[], object]]] = deque()
        """Waiting messages: (value of `_moved_by` from which on to send it, what sends it)."""
        self._next: asyncio.TimerHandle | None = None

    def wake(self, connections: int) -> None:
        """Prepare for a body that starts now on this many connections."""
        self._used = connections
        timer_s = self._round_trip_s + MIN_TIMER_S
        rested = (asyncio.get_running_loop().time() - self._used_at) / timer_s
        if self._moving or rested < 1 or not self._round_trip_s or not self._forgets:
            return
        least = connections * FIRST_WINDOW_BYTES / self._round_trip_s
        window = max(least, self._reached / 2 ** int(min(rested, 64)))
        bandwidth.resize(self.segment, window if window < self._fastest else self._ceiling)

    def start(self, flow: Flow, path: tuple[Segment, ...], connections: int) -> None:
        """Start a body on this many connections."""
        loop = asyncio.get_running_loop()
        if self.segment.bytes_per_s < self._ceiling and self._growth is None:
            self._growth = loop.call_later(self._round_trip_s, self._grow)
        self._moving[flow] = flow.moved(loop.time())
        own = connections * self._each
        bandwidth.start(flow, path + ((Segment(own),) if own < self._ceiling else ()))

    def stop(self, flow: Flow) -> None:
        """Stop a body, or note that it has left."""
        if flow in self._moving:
            before = self._moving.pop(flow)
            now = self._used_at = asyncio.get_running_loop().time()
            self._moved += flow.moved(now) - before
            bandwidth.stop(flow)
            self._reached = flow.reached
            self._release()

    def after_handed(self, send: Callable[[], object]) -> bool:
        """Call `send` once the body bytes that gRPC and the kernel hold now have left.

        If there are none, returns False and does not call `send`.
        """
        if not self._moving:
            return False
        now = asyncio.get_running_loop().time()
        left, rate = sum([flow.nbytes - flow.moved(now) for flow in self._moving]), self._rate / self._used
        quick, slow = min(wire.CHUNK_BYTES, QUICK_WRITE_S * rate), min(HANDED_BYTES, SLOW_WRITE_S * rate)
        ahead = max(MIN_HANDED_BYTES, quick, slow) + min(unsent_bytes(rate), self._round_trip_s * rate)
        self._waiting.append((self._moved_by(now) + min(left, self._used * ahead), send))
        self._release()
        return True

    @property
    def _rate(self) -> float:
        return sum([flow.rate for flow in self._moving])

    def _moved_by(self, now: float) -> float:
        """Body bytes that have left in total."""
        return self._moved + sum([flow.moved(now) - before for flow, before in self._moving.items()])

    def _release(self) -> None:
        """Send the messages whose preceding body bytes have left or no longer move. Set a timer for the next one."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        loop = asyncio.get_running_loop()
        while self._waiting:
            left = self._waiting[0][0] - self._moved_by(loop.time())
            if self._moving and left >= 1:
                wait_s = left / self._rate
                if self._growth is not None:
                    wait_s = min(wait_s, max(self._round_trip_s, wait_s / 16))
                self._next = loop.call_later(wait_s, self._release)
                return
            self._waiting.popleft()[1]()

    def _grow(self) -> None:
        """Double the window after a round trip."""
        self._growth = None
        if not self._moving:
            return
        if not any(flow.bottleneck is self.segment for flow in self._moving):
            self.segment.bytes_per_s = self._ceiling
            return
        wider = 2 * self.segment.bytes_per_s
        if wider < self._fastest:
            self._growth = asyncio.get_running_loop().call_later(self._round_trip_s, self._grow)
        bandwidth.resize(self.segment, wider if wider < self._fastest else self._ceiling)


class Paths:
    """The paths between all nodes. Each is created once."""

    def __init__(self, geography: Geography) -> None:
        self._geography = geography
        self.connection: Callable[[PeerId, PeerId], Connection] = cache(self._connection)
        """The connections for bodies from one node to another."""
        self._access_of: Callable[[PeerId], tuple[Segment | None, Segment | None]] = cache(self._access)

    def path(self, sender: PeerId, receiver: PeerId) -> tuple[Segment, ...]:
        """What limits bytes between the two nodes now: the sender's access, their connection, the receiver's access.

        Bytes from a node to itself stand for those that it exchanges with all nodes; they use only its own line.
        """
        own = None if sender == receiver else self.connection(sender, receiver).segment
        middle = own if own is not None and own.bytes_per_s < math.inf else None
        segments = (self._access_of(sender)[0], middle, self._access_of(receiver)[1])
        return tuple([segment for segment in segments if segment is not None])

    def _connection(self, sender: PeerId, receiver: PeerId) -> Connection:
        link = self._geography.link(sender, receiver)
        round_trip_s = link.latency_s + self._geography.link(receiver, sender).latency_s
        each = connection_bytes_per_s(link, round_trip_s)
        ceiling = min(link.bytes_per_s or math.inf, CONNECTIONS * each)
        ends = (self._access_of(sender)[0], self._access_of(receiver)[1])
        fastest = min([ceiling, *(end.bytes_per_s for end in ends if end is not None)])
        return Connection((each, ceiling), fastest, round_trip_s, link.slow_start_after_idle)

    def _access(self, peer: PeerId) -> tuple[Segment | None, Segment | None]:
        access = self._geography.access(peer)
        up, down = access.up_bytes_per_s, access.down_bytes_per_s
        return (Segment(up) if up else None, Segment(down) if down else None)
