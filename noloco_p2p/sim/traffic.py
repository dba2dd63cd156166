"""The tensors under way in a simulated network: how long their bytes take to leave, and what became of all bytes.

Bytes flow: a payload that is dropped half-way has cost half its bytes. Where nothing limits it, it leaves at once.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from noloco_p2p.core.messages import MicrobatchId, PeerId
from noloco_p2p.sim.bandwidth import Bandwidth, Flow, Segment
from noloco_p2p.sim.links import Geography, Link, ceiling_bytes_per_s

SAME_S = 1e-9
"""Times that differ by less are the same: sums of latencies are not exact."""

KINDS = ("activation", "gradient", "snapshot", "weights", "state")
"""What travels."""
QUEUED = ("activation", "gradient")
"""Sent one after the other to the same peer: side by side all would be late, this way only the last one is as late."""


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
    """The tensors of one message, from their sender to their receiver."""

    sender: PeerId
    receiver: PeerId
    kind: str
    nbytes: int
    microbatch: MicrobatchId | None = None
    """Of a gradient: what it answers."""
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


class Traffic:
    """All payloads under way, and the counts of all bytes that ever were."""

    def __init__(
        self,
        geography: Geography,
        link_of: Callable[[PeerId, PeerId], Link],
        is_cut: Callable[[PeerId, PeerId], bool],
    ) -> None:
        self._geography, self._link_of, self._is_cut = geography, link_of, is_cut
        self._bandwidth = Bandwidth()
        self._access: dict[PeerId, tuple[Segment | None, Segment | None]] = {}
        self._link_segments: dict[tuple[PeerId, PeerId], Segment | None] = {}
        self._open: dict[Payload, None] = {}
        self._queues: dict[tuple[PeerId, PeerId], dict[Payload, None]] = {}
        """Activations and gradients from one node to another: the first is on its way, the others wait for it."""
        self._counts: dict[PeerId, dict[str, ByteCounts]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def byte_counts(self) -> dict[PeerId, dict[str, ByteCounts]]:
        """What became of the bytes of every node that had any, by kind, now or at the end of the run."""
        found = {
            peer: {kind: replace(counts) for kind, counts in kinds.items()}
            for peer, kinds in sorted(self._counts.items())
        }
        for payload in self._open:
            moved = payload.moved_bytes(self._now())
            found[payload.sender][payload.kind].add(ByteCounts(sent=moved, in_flight=moved))
        return found

    # --- payloads -------------------------------------------------------------------------------------------------

    def depart(self, payload: Payload) -> None:
        """Begin to send, or to wait for its turn; `gone_at` is set at once where nothing limits it."""
        sender, receiver = payload.sender, payload.receiver
        for peer in (sender, receiver):
            if peer not in self._counts:
                self._counts[peer] = {kind: ByteCounts() for kind in KINDS}
        payload.sent_at = self._now()
        self._open[payload] = None
        path = self._path(sender, receiver) if payload.nbytes else ()
        if not path:
            payload.gone_at = payload.sent_at
            return
        payload.flow = Flow(payload.nbytes, lambda: self._has_left(payload))
        if self._is_cut(sender, receiver):
            payload.stalled_at = payload.sent_at
        if payload.kind in QUEUED:
            queue = self._queues.setdefault((sender, receiver), {})
            payload.held = bool(queue)
            queue[payload] = None
        self._move(payload)

    async def whole(self, payload: Payload, latency_s: float = 0.0) -> None:
        """Until its last byte has left, and had `latency_s` to arrive; for ever when it is dropped before that."""
        loop = asyncio.get_running_loop()
        left_s = 0.0 if payload.gone_at is None else payload.gone_at + latency_s - loop.time()
        if payload.gone_at is not None and left_s <= SAME_S:
            return
        arrived: asyncio.Future[None] = loop.create_future()
        if payload.gone_at is not None:
            loop.call_later(left_s, _wake, arrived)
        elif latency_s:
            payload.on_gone = lambda: loop.call_later(latency_s, _wake, arrived)
        else:
            payload.on_gone = lambda: _wake(arrived)
        await arrived

    def take(self, payload: Payload) -> None:
        """Its receiver has it and wants it."""
        payload.over = True
        if payload in self._open:
            del self._open[payload]
            self._counts[payload.sender][payload.kind].sent += payload.nbytes
            self._counts[payload.receiver][payload.kind].received += payload.nbytes

    def drop(self, payload: Payload) -> None:
        """Send no more of it, and count what has left as lost; nothing happens to one that was taken or dropped."""
        payload.over = True
        if payload not in self._open:
            return
        moved = payload.moved_bytes(self._now())
        del self._open[payload]
        self._counts[payload.sender][payload.kind].add(ByteCounts(sent=moved, lost=moved))
        if payload.flow is not None:
            self._bandwidth.stop(payload.flow)
        payload.flow = payload.on_gone = None
        self._unqueue(payload)

    def replied_bytes(self, sender: PeerId, receiver: PeerId, microbatch: MicrobatchId) -> int | None:
        """How much of a gradient has left that is being sent, or waits for its turn; None: there is none such."""
        for payload in self._queues.get((sender, receiver), ()):
            if payload.microbatch == microbatch:
                return payload.moved_bytes(self._now())
        return None

    # --- when the network changes ---------------------------------------------------------------------------------

    def review(self) -> None:
        """After a change of what is cut: payloads that cannot get through stall, the others go on where they were.

        TCP would go on a while later, at its next retransmission.
        """
        for payload in list(self._open):
            if payload.flow is None:
                continue
            cut = self._is_cut(payload.sender, payload.receiver)
            if cut and payload.stalled_at is None:
                payload.stalled_at = self._now()
                self._bandwidth.stop(payload.flow)
            elif not cut and payload.stalled_at is not None:
                payload.stalled_at = None
                self._move(payload)

    def relink(self, sender: PeerId, receiver: PeerId) -> None:
        """After a change of a link: what is under way between the two goes on at its new rate."""
        self._link_segments.pop((sender, receiver), None)
        for payload in list(self._open):
            if payload.flow is None or (payload.sender, payload.receiver) != (sender, receiver):
                continue
            if payload.stalled_at is not None or payload.held:
                continue
            self._bandwidth.stop(payload.flow)
            self._move(payload)

    def crash(self, peer: PeerId) -> None:
        """A node is gone: what it has not sent, and what it has not taken, is lost; calls `on_lost` of those."""
        for payload in list(self._open):
            if payload.receiver == peer or (payload.sender == peer and payload.gone_at is None):
                self.drop(payload)
                if payload.on_lost is not None:
                    payload.on_lost()
                payload.on_lost = None

    # --- inside ---------------------------------------------------------------------------------------------------

    def _unqueue(self, payload: Payload) -> None:
        """It no longer takes a place in its queue: the next one is on its way."""
        queue = self._queues.get((payload.sender, payload.receiver), {})
        if payload in queue:
            del queue[payload]
            for first in queue:
                first.held = False
                self._move(first)
                break

    def _move(self, payload: Payload) -> None:
        """Set it in motion, unless it moves, or is held back or stopped."""
        if payload.flow is None or payload.flow.path or payload.held or payload.stalled_at is not None:
            return
        path = self._path(payload.sender, payload.receiver)
        if path:
            self._bandwidth.start(payload.flow, path)
        else:
            self._has_left(payload)

    def _has_left(self, payload: Payload) -> None:
        payload.gone_at, payload.flow = self._now(), None
        self._unqueue(payload)
        if payload.on_gone is not None:
            payload.on_gone()
            payload.on_gone = payload.on_lost = None

    def _path(self, sender: PeerId, receiver: PeerId) -> tuple[Segment, ...]:
        """What limits a payload between the two: the sender's access, the link, the receiver's access."""
        segments = (self._access_of(sender)[0], self._link_segment(sender, receiver), self._access_of(receiver)[1])
        return tuple([segment for segment in segments if segment is not None])

    def _access_of(self, peer: PeerId) -> tuple[Segment | None, Segment | None]:
        if peer not in self._access:
            access = self._geography.access(peer)
            up, down = access.up_bytes_per_s, access.down_bytes_per_s
            self._access[peer] = (Segment(up) if up else None, Segment(down) if down else None)
        return self._access[peer]

    def _link_segment(self, sender: PeerId, receiver: PeerId) -> Segment | None:
        """All that goes one way between two nodes shares one connection, and so its ceiling."""
        pair = (sender, receiver)
        if pair not in self._link_segments:
            link = self._link_of(sender, receiver)
            round_trip_s = link.latency_s + self._link_of(receiver, sender).latency_s
            speed = min(link.bytes_per_s or math.inf, ceiling_bytes_per_s(link.loss, round_trip_s))
            self._link_segments[pair] = Segment(speed) if speed < math.inf else None
        return self._link_segments[pair]

    def _now(self) -> float:
        """Virtual time; that of the end when the run is over."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop.time()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
