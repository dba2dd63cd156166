"""Models emulated internet lines: when each byte of each connection moves on. No sockets and no clock in here.

    source → inbox → sender's line up → in transit (latency) → receiver's line down → destination

Every node has a line up and a line down, which its connections share in fair turns. The latency between two nodes, one
way, is `latency_s`. This is what `Access` and `Link` mean in `sim/links.py`. As in TCP, a connection starts slowly, and
does so again after an idle period. The bytes that it has in transit and waiting for the receiver's line are limited to
its share of that line times the latency plus BUFFER_S. So a sender that is faster than its path is held back, and no
queue grows without bound. Nothing is lost. Acknowledgements are delayed by the latency, but take no time on the lines.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from noloco_p2p.sim.links import FIRST_WINDOW_BYTES, MIN_TIMER_S, MSS_BYTES

BUFFER_S = 0.05
"""Size of the buffer before a line, in seconds of that line; its connections share it."""
MIN_BUFFER_PIECES = 4
"""A connection's share of a buffer holds at least this many pieces."""
PIECE_S, LARGEST_PIECE_BYTES = 0.002, 1 << 16
"""How long a line serves one connection before it is another one's turn, and the most bytes that it then takes."""


@dataclass(slots=True, eq=False)
class Lane:
    """The pieces of one connection that wait at one line."""

    flow: "OneWay"
    pieces: deque[memoryview]
    """An empty piece marks the end of the stream."""
    nbytes: int = 0
    tag: float = 0.0
    """Virtual time of the line at which its last turn ends."""
    queued: bool = False

    def put(self, piece: memoryview) -> None:
        """Append a piece."""
        self.pieces.append(piece)
        self.nbytes += len(piece)

    def take(self, most: int) -> memoryview:
        """Remove the first piece, or up to `most` bytes of it, and return it."""
        piece = self.pieces.popleft()
        if len(piece) > most:
            self.pieces.appendleft(piece[most:])
            piece = piece[:most]
        self.nbytes -= len(piece)
        return piece


class Line:
    """One direction of a node's line. It carries one piece after the other at its rate, in fair turns.

    Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): the connection that has had least goes first, and
    being idle earns no credit. So a short message on its own connection does not wait behind the bulk on others.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.piece_bytes = min(max(int(bytes_per_s * PIECE_S), MSS_BYTES), LARGEST_PIECE_BYTES)
        self.carried_bytes = 0
        self.busy = False
        self._virtual = 0.0
        self._turns: list[tuple[float, bool, int, Lane]] = []
        self._numbers = itertools.count()

    def share_bytes(self, seconds: float) -> float:
        """Bytes that each connection now using the line may send in `seconds`: at least MIN_BUFFER_PIECES pieces."""
        share = self.bytes_per_s * seconds / max(1, len(self._turns) + self.busy)
        return max(share, MIN_BUFFER_PIECES * self.piece_bytes)

    def queue(self, lane: Lane) -> None:
        """Queue a lane for a turn. Among equals, a lane that was idle goes first."""
        if not lane.queued:
            lane.queued = True
            busy = lane.tag >= self._virtual
            heapq.heappush(self._turns, (max(self._virtual, lane.tag), busy, next(self._numbers), lane))

    def next(self) -> Lane | None:
        """The lane whose turn it is; None if none is queued."""
        if not self._turns:
            return None
        self._virtual, _, _, lane = heapq.heappop(self._turns)
        lane.queued = False
        return lane

    def charge(self, lane: Lane, nbytes: int) -> None:
        """Charge `nbytes` to the lane that `next` returned last."""
        lane.tag = self._virtual + nbytes


class OneWay:
    """One direction of a connection, over the line up of its sender and the line down of its receiver."""

    def __init__(
        self, lines: tuple[Line, Line], deliver: Callable[[memoryview], None], hold: Callable[[bool], None]
    ) -> None:
        """`lines`: up and down. `deliver` receives what arrives, and at the end an empty piece. `hold(True)` asks the
        source to stop sending, `hold(False)` to continue."""
        self.up, self.down = lines
        self.deliver, self._hold = deliver, hold
        self.inbox, self.outbox = Lane(self, deque()), Lane(self, deque())
        self.under_way_bytes = 0
        """Bytes taken by the line up but not yet delivered."""
        self.window_bytes, self.unacknowledged_bytes = float(FIRST_WINDOW_BYTES), 0
        self.used_bytes = 0
        """The most bytes that were unacknowledged since the window was last in use or reduced."""
        self.in_use_at = self.sent_at = -math.inf
        self.latency_s = 0.0
        """Latency of the current burst."""
        self.arrives_at = 0.0
        """When the newest piece reaches the line down."""
        self.stalled = False
        """The destination accepts no more data at the moment."""
        self.over = False
        """The connection is gone: nothing more is delivered."""
        self._held = False

    def sent(self, nbytes: int, timer_s: float, now: float) -> None:
        """Account for bytes that the line up begins to send.

        A window of which at most half is used shrinks once per `timer_s`: congestion window validation, RFC 2861;
        `tcp_cwnd_validate` in Linux.
        """
        self.sent_at = now
        self.under_way_bytes += nbytes
        self.unacknowledged_bytes += nbytes
        self.used_bytes = max(self.used_bytes, self.unacknowledged_bytes)
        if self.window_bytes < 2 * self.used_bytes:
            self.in_use_at, self.used_bytes = now, self.unacknowledged_bytes
        elif now - self.in_use_at >= timer_s:
            self.window_bytes = max((self.window_bytes + self.used_bytes) / 2, float(FIRST_WINDOW_BYTES))
            self.in_use_at, self.used_bytes = now, 0

    def acknowledged(self, nbytes: int, most: float) -> None:
        """Slow start: a window in use doubles every round trip, up to `most`, where it no longer limits anything."""
        if self.window_bytes < 2 * self.unacknowledged_bytes:
            self.window_bytes = min(self.window_bytes + nbytes, most)
        self.unacknowledged_bytes -= nbytes

    def room_bytes(self, latency_s: float) -> int:
        """How many bytes the line up may take now; less than 0: nothing, not even the end of the stream."""
        if self.over or not self.inbox.pieces:
            return -1
        room = min(
            self.window_bytes - self.unacknowledged_bytes,
            self.down.share_bytes(latency_s + BUFFER_S) - self.under_way_bytes,
        )
        # Send no small piece if a larger one may be sent soon.
        return -1 if room < MSS_BYTES and self.unacknowledged_bytes else min(self.up.piece_bytes, int(room))

    def end(self) -> None:
        """The connection is gone: what it has in transit is dropped."""
        self.over = True
        for lane in (self.inbox, self.outbox):
            lane.pieces.clear()

    def hold_back(self) -> None:
        """Stop the source when the inbox is full, and let it continue when the inbox is half empty."""
        limit = self.up.share_bytes(BUFFER_S)
        full = self.inbox.nbytes >= (limit / 2 if self._held else limit)
        if full != self._held and not self.over:
            self._held = full
            self._hold(full)


Event = tuple[float, int, Callable[..., None], tuple[Any, ...]]
"""(time, number that keeps the order, what to call with that time and the arguments, the arguments)."""


class LineModel:
    """All connections. `now` must never go back. Call `advance` at `next_at` or soon after: events keep their times."""

    def __init__(self, latency_s: float, spread: float, rng: random.Random) -> None:
        """`spread`: sigma of the log-normal latency, which is drawn for each burst of a connection."""
        self.latency_s = latency_s
        self._spread = spread
        self._timer_s = 2 * latency_s + MIN_TIMER_S
        self._rng = rng
        self._events: list[Event] = []
        self._numbers = itertools.count()

    @property
    def next_at(self) -> float | None:
        """Time of the next event; None if there is none."""
        return self._events[0][0] if self._events else None

    def advance(self, now: float) -> None:
        """Run all events that are due, each with its own time."""
        while self._events and self._events[0][0] <= now:
            at, _, action, arguments = heapq.heappop(self._events)
            action(at, *arguments)

    def send(self, flow: OneWay, data: bytes, now: float) -> None:
        """The source has sent data; empty data: it has finished sending."""
        if flow.over:
            return
        if not flow.inbox.pieces:
            timers = (now - flow.sent_at) // self._timer_s
            if not flow.unacknowledged_bytes and 0 < timers < math.inf:
                # The same RFC: half the window for each timer in which nothing was sent.
                flow.window_bytes = max(flow.window_bytes / 2 ** min(timers, 64.0), float(FIRST_WINDOW_BYTES))
            flow.latency_s = self.latency_s * math.exp(self._rng.gauss(0.0, self._spread))
        flow.inbox.put(memoryview(data))
        flow.hold_back()
        self._resume(flow, now)

    def stall(self, flow: OneWay, stalled: bool, now: float) -> None:
        """The destination stops accepting data, or accepts data again."""
        flow.stalled = stalled
        if flow.outbox.pieces and not stalled:
            flow.down.queue(flow.outbox)
            self._serve(flow.down, now)

    # --- what happens when ----------------------------------------------------------------------------------------

    def _at(self, at: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), action, arguments))

    def _resume(self, flow: OneWay, now: float) -> None:
        if not flow.inbox.queued and flow.room_bytes(self.latency_s) >= 0:
            flow.up.queue(flow.inbox)
            self._serve(flow.up, now)

    def _serve(self, line: Line, now: float) -> None:
        """Start the next piece, unless the line is busy or no lane has one."""
        while not line.busy and (lane := line.next()) is not None:
            flow = lane.flow
            if lane is flow.inbox:
                most = flow.room_bytes(self.latency_s)
            else:
                most = -1 if flow.stalled or not lane.pieces else line.piece_bytes
            if most < 0:
                continue
            piece = lane.take(most)
            line.charge(lane, len(piece))
            line.busy = True
            self._at(now + len(piece) / line.bytes_per_s, self._served, line, lane, piece)
            if lane is flow.inbox:
                flow.sent(len(piece), self._timer_s, now)
                flow.hold_back()

    def _served(self, now: float, line: Line, lane: Lane, piece: memoryview) -> None:
        flow = lane.flow
        line.busy = False
        line.carried_bytes += len(piece)
        if lane is flow.inbox:
            flow.arrives_at = max(now + flow.latency_s, flow.arrives_at)
            self._at(flow.arrives_at, self._arrived, flow, piece)
            self._resume(flow, now)
        else:
            flow.under_way_bytes -= len(piece)
            self._at(now + self.latency_s, self._acknowledged, flow, len(piece))
            if not flow.over:
                flow.deliver(piece)
            if lane.pieces and not flow.stalled:
                line.queue(lane)
            self._resume(flow, now)
        self._serve(line, now)

    def _arrived(self, now: float, flow: OneWay, piece: memoryview) -> None:
        if not flow.over:
            flow.outbox.put(piece)
            if not flow.stalled:
                flow.down.queue(flow.outbox)
        self._serve(flow.down, now)

    def _acknowledged(self, now: float, flow: OneWay, nbytes: int) -> None:
        slower = min(flow.up.bytes_per_s, flow.down.bytes_per_s)
        most = max(FIRST_WINDOW_BYTES, slower * (2 * self.latency_s + BUFFER_S)) + 2 * LARGEST_PIECE_BYTES
        flow.acknowledged(nbytes, most)
        self._resume(flow, now)
