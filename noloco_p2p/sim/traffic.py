"""The messages in flight in a simulated network: how long their bytes take to leave, and what happened to all bytes.

Payloads flow: one that is dropped half-way has cost half of its bytes. Where nothing limits a payload, it leaves at
once.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from noloco_p2p.core.line_rate import MeasuredLine
from noloco_p2p.core.messages import MicrobatchId, PeerId
from noloco_p2p.sim import bandwidth
from noloco_p2p.sim.bandwidth import Flow
from noloco_p2p.sim.connections import Paths
from noloco_p2p.sim.links import Geography
from noloco_p2p.sim.payloads import KINDS, ByteCounts, Payload

SAME_S = 1e-9
"""Times with a smaller difference are equal: sums of latencies are not exact."""
SHORT_S = 5e-4
"""Messages without tensors that take less time than this use no bandwidth, because a run has many of them."""

QUEUED = ("activation", "gradient")
"""Kinds of which one payload at a time is sent to a peer. In parallel, all would be as late as the last one is now."""


class Traffic:
    """All payloads in flight, and the counts of all bytes so far."""

    def __init__(self, geography: Geography, is_cut: Callable[[PeerId, PeerId], bool]) -> None:
        self._is_cut = is_cut
        self._paths = Paths(geography)
        self._open: dict[Payload, None] = {}
        self._queues: dict[tuple[PeerId, PeerId], dict[Payload, None]] = {}
        """Activations and gradients by (sender, receiver). The first is being sent, the others wait."""
        self._counts: dict[PeerId, dict[str, ByteCounts]] = {}
        self.lines: dict[PeerId, MeasuredLine] = {}
        """The line of the newest process of each peer. Both ends measure a payload while its bytes move."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def byte_counts(self) -> dict[PeerId, dict[str, ByteCounts]]:
        """What has happened to the bytes of every node that had any, by kind (`payloads.KINDS`)."""
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
        """Start sending a payload, or queue it. If nothing limits it, its `gone_at` is set at once."""
        sender, receiver = payload.sender, payload.receiver
        now = self._open_up(payload)
        if not (payload.nbytes and self._paths.path(sender, receiver)):
            payload.gone_at = now
            return
        payload.flow = Flow(payload.nbytes, lambda: self._has_left(payload))
        if self._is_cut(sender, receiver):
            payload.stalled_at = payload.sent_at
        if payload.kind in QUEUED:
            queue = self._queues.setdefault((sender, receiver), {})
            payload.held = bool(queue)
            queue[payload] = None
        self._move(payload)

    def fill(self, sender: PeerId, receiver: PeerId, connections: int, each: int) -> None:
        """Send `each` bytes of filler on each of `connections` connections, if these have been idle for long enough."""
        line = self.lines.get(sender)
        if line is not None and line.rested(receiver, self._now()) and not self._is_cut(sender, receiver):
            filler = Payload(sender, receiver, "filler", connections * each, connections=connections)
            filler.on_gone = lambda: self.take(filler)
            self.depart(filler)

    def post(self, message: Payload, *, apart: bool) -> None:
        """Send a message without tensors and call its `on_gone`, possibly at once.

        It shares the lines with everything else. On the connection for bodies it also waits for the bytes that are
        already in the sockets; on a separate connection (`apart`) it does not.
        """
        if not message.nbytes:
            self._is_gone(message)
            return
        sender, receiver = message.sender, message.receiver
        self._open_up(message)
        message.flow = Flow(message.nbytes, lambda: self._has_left(message))
        if apart or not self._paths.connection(sender, receiver).after_handed(lambda: self._move(message)):
            self._move(message)

    async def deliver(
        self, sender: PeerId, receiver: PeerId, nbytes: int, latency_s: float = 0.0, *, apart: bool = False
    ) -> None:
        """Wait as long as a message without tensors takes. One from a node to itself uses only the node's own line."""
        gone = asyncio.get_running_loop().create_future()
        message = Payload(sender, receiver, "control", nbytes, on_gone=lambda: _wake(gone))
        try:
            self.post(message, apart=apart or sender == receiver)
            await gone
            await asyncio.sleep(latency_s)
            self.take(message)
        finally:
            self.drop(message)

    async def whole(self, payload: Payload, latency_s: float = 0.0) -> None:
        """Wait until a payload's last byte has left, and `latency_s` longer. Waits forever if it is dropped before."""
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
        """Note that the receiver has accepted the payload, and forget its callbacks: they keep large tensors alive."""
        payload.over = True
        payload.on_gone = payload.on_lost = payload.on_dropped = None
        if payload in self._open:
            del self._open[payload]
            self._counts[payload.sender][payload.kind].sent += payload.nbytes
            self._counts[payload.receiver][payload.kind].received += payload.nbytes

    def drop(self, payload: Payload) -> None:
        """Unless a payload was accepted or dropped, stop sending it and count the bytes that have left as lost."""
        payload.over = True
        if payload not in self._open:
            return
        moved = payload.moved_bytes(self._now())
        del self._open[payload]
        self._counts[payload.sender][payload.kind].add(ByteCounts(sent=moved, lost=moved))
        self._halt(payload)
        payload.flow = payload.on_gone = None
        self._unqueue(payload)
        if payload.on_dropped is not None:
            payload.on_dropped()

    def replied_bytes(self, sender: PeerId, receiver: PeerId, microbatch: MicrobatchId) -> int | None:
        """Bytes that have left of a microbatch's gradient; None if no such gradient is being sent or queued."""
        for payload in self._queues.get((sender, receiver), ()):
            if payload.microbatch == microbatch:
                return payload.moved_bytes(self._now())
        return None

    # --- when the network changes ---------------------------------------------------------------------------------

    def review(self) -> None:
        """After the set of cut pairs has changed, stall payloads that cannot get through, and continue the others where
        they were.

        TCP would continue later, at its next retransmission. Messages without tensors are lost if they have not left
        yet.
        """
        for payload in list(self._open):
            if payload.flow is None or payload.sender == payload.receiver:
                continue
            cut = self._is_cut(payload.sender, payload.receiver)
            if cut and payload.kind == "control":
                self.drop(payload)
            elif cut and payload.stalled_at is None:
                payload.stalled_at = self._now()
                self._halt(payload)
            elif not cut and payload.stalled_at is not None:
                payload.stalled_at = None
                self._move(payload)

    def crash(self, peer: PeerId) -> None:
        """Drop everything that a crashed node has not sent or not accepted, and call `on_lost` of these payloads.

        A message without tensors to the crashed node still arrives, and finds that nobody serves there.
        """
        for payload in list(self._open):
            unsent = payload.sender == peer and payload.gone_at is None
            if unsent or (payload.receiver == peer and payload.kind != "control"):
                self.drop(payload)
                if payload.on_lost is not None:
                    payload.on_lost()
                payload.on_lost = None

    # --- inside ---------------------------------------------------------------------------------------------------

    def _unqueue(self, payload: Payload) -> None:
        """Remove a payload from its queue and start the next one."""
        queue = self._queues.get((payload.sender, payload.receiver), {})
        if payload in queue:
            del queue[payload]
            for first in queue:
                first.held = False
                self._move(first)
                break

    def _open_up(self, payload: Payload) -> float:
        """Start accounting for a payload. Returns the current time."""
        for peer in (payload.sender, payload.receiver):
            if peer not in self._counts:
                self._counts[peer] = {kind: ByteCounts() for kind in KINDS}
        payload.sent_at = now = self._now()
        self._open[payload] = None
        return now

    def _move(self, payload: Payload) -> None:
        """Start a payload, unless it is moving, queued or stalled."""
        sender, receiver = payload.sender, payload.receiver
        if payload.flow is None or payload.flow.path or payload.held or payload.stalled_at is not None:
            return
        body = payload.kind != "control"
        if body:
            self._paths.connection(sender, receiver).wake(payload.connections)
        path = self._paths.path(sender, receiver)
        if not path or (not body and payload.nbytes < SHORT_S * min([part.bytes_per_s for part in path])):
            self._has_left(payload)
        elif body:
            self._paths.connection(sender, receiver).start(payload.flow, path, payload.connections)
            self._measure(payload, payload.flow)
        else:
            bandwidth.start(payload.flow, path)

    def _measure(self, payload: Payload, flow: Flow) -> None:
        """Begin to measure a payload, which moves now."""
        now, sender, receiver = self._now(), self.lines.get(payload.sender), self.lines.get(payload.receiver)
        rates = ([sender.up] if sender else []) + ([receiver.down] if receiver else [])
        if sender:
            sender.leaves(payload.receiver)
        for rate in rates:
            rate.carries(payload.kind, payload.nbytes)
        payload.moved_before, payload.measured = flow.moved(now), tuple([(rate, rate.began(now)) for rate in rates])

    def _halt(self, payload: Payload) -> None:
        """Stop a payload, for good or until the next `_move`."""
        if payload.flow is None:
            return
        if payload.kind == "control":
            bandwidth.stop(payload.flow)
        else:
            self._paths.connection(payload.sender, payload.receiver).stop(payload.flow)
            now, line = self._now(), self.lines.get(payload.sender)
            if payload.measured and line is not None:
                line.has_left(payload.receiver, now)
            for rate, began in payload.measured:
                rate.ended(began, payload.flow.moved(now) - payload.moved_before, now)
            payload.measured = ()

    def _has_left(self, payload: Payload) -> None:
        self._halt(payload)
        payload.gone_at, payload.flow = self._now(), None
        self._unqueue(payload)
        self._is_gone(payload)

    def _is_gone(self, payload: Payload) -> None:
        if payload.on_gone is not None:
            payload.on_gone()
            payload.on_gone = payload.on_lost = None

    def _now(self) -> float:
        """Virtual time; after the run, the time at which it ended."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop.time()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
