"""The messages under way in a simulated network: how long their bytes take to leave, and what became of all bytes.

Bytes flow: a payload that is dropped half-way has cost half its bytes. Where nothing limits it, it leaves at once.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from noloco_p2p.core.messages import MicrobatchId, PeerId
from noloco_p2p.sim import bandwidth
from noloco_p2p.sim.bandwidth import Flow
from noloco_p2p.sim.connections import Ways
from noloco_p2p.sim.line_meters import MeasuredLines
from noloco_p2p.sim.links import Geography, Link
from noloco_p2p.sim.payloads import KINDS, ByteCounts, Payload

SAME_S = 1e-9
"""Times that differ by less are the same: sums of latencies are not exact."""
SHORT_S = 5e-4
"""Messages without tensors that take less on their lines take nothing of other's bandwidth: a run has many of them."""

QUEUED = ("activation", "gradient")
"""Sent one after the other to the same peer: side by side all would be late, this way only the last one is as late."""


class Traffic:
    """All payloads under way, and the counts of all bytes that ever were."""

    def __init__(
        self,
        geography: Geography,
        link_of: Callable[[PeerId, PeerId], Link],
        is_cut: Callable[[PeerId, PeerId], bool],
    ) -> None:
        self._is_cut = is_cut
        self._ways = Ways(geography, link_of)
        self._open: dict[Payload, None] = {}
        self._queues: dict[tuple[PeerId, PeerId], dict[Payload, None]] = {}
        """Activations and gradients from one node to another: the first is on its way, the others wait for it."""
        self._counts: dict[PeerId, dict[str, ByteCounts]] = {}
        self.lines = MeasuredLines()
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
        now = self._open_up(payload)
        if not (payload.nbytes and self._ways.path(sender, receiver)):
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

    def post(self, message: Payload, *, apart: bool) -> None:
        """Send a message without tensors, and call its `on_gone`, maybe at once.

        It shares the lines with everything else. On the connection for bodies it also waits for those that are in the
        sockets; not so on a connection `apart`.
        """
        if not message.nbytes:
            self._is_gone(message)
            return
        sender, receiver = message.sender, message.receiver
        self._open_up(message)
        message.flow = Flow(message.nbytes, lambda: self._has_left(message))
        if apart or not self._ways.connection(sender, receiver).after_handed(lambda: self._move(message)):
            self._move(message)

    async def deliver(self, sender: PeerId, receiver: PeerId, nbytes: int, latency_s: float = 0.0) -> None:
        """Takes the time of a message without tensors; one to itself is what a node exchanges with everybody."""
        gone = asyncio.get_running_loop().create_future()
        message = Payload(sender, receiver, "control", nbytes, on_gone=lambda: _wake(gone))
        try:
            self.post(message, apart=sender == receiver)
            await gone
            await asyncio.sleep(latency_s)
            self.take(message)
        finally:
            self.drop(message)

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
        self._halt(payload)
        payload.flow = payload.on_gone = None
        self._unqueue(payload)
        if payload.on_dropped is not None:
            payload.on_dropped()

    def replied_bytes(self, sender: PeerId, receiver: PeerId, microbatch: MicrobatchId) -> int | None:
        """How much of a gradient has left that is being sent, or waits for its turn; None: there is none such."""
        for payload in self._queues.get((sender, receiver), ()):
            if payload.microbatch == microbatch:
                return payload.moved_bytes(self._now())
        return None

    # --- when the network changes ---------------------------------------------------------------------------------

    def review(self) -> None:
        """After a change of what is cut: payloads that cannot get through stall, the others go on where they were.

        TCP would go on a while later, at its next retransmission. Messages without tensors are swallowed.
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

    def relink(self, sender: PeerId, receiver: PeerId) -> None:
        """After a change of a link: what is under way between the two, both ways, goes on over new connections."""
        moving = [one for one in self._open if {one.sender, one.receiver} == {sender, receiver} and one.moves]
        for payload in moving:
            self._halt(payload)
        for pair in ((sender, receiver), (receiver, sender)):
            self._ways.forget(*pair)
        for payload in moving:
            self._move(payload)

    def crash(self, peer: PeerId) -> None:
        """A node is gone: what it has not sent, and what it has not taken, is lost; calls `on_lost` of those.

        A message without tensors still comes to where it was, to find nobody there.
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
        """It no longer takes a place in its queue: the next one is on its way."""
        queue = self._queues.get((payload.sender, payload.receiver), {})
        if payload in queue:
            del queue[payload]
            for first in queue:
                first.held = False
                self._move(first)
                break

    def _open_up(self, payload: Payload) -> float:
        """Begin its account; now."""
        for peer in (payload.sender, payload.receiver):
            if peer not in self._counts:
                self._counts[peer] = {kind: ByteCounts() for kind in KINDS}
        payload.sent_at = now = self._now()
        self._open[payload] = None
        return now

    def _move(self, payload: Payload) -> None:
        """Set it in motion, unless it moves, or is held back or stopped."""
        sender, receiver = payload.sender, payload.receiver
        if payload.flow is None or payload.flow.path or payload.held or payload.stalled_at is not None:
            return
        body = payload.kind != "control"
        if body:
            self._ways.connection(sender, receiver).wake(payload.connections)
        path = self._ways.path(sender, receiver)
        if not path or (not body and payload.nbytes < SHORT_S * min([part.bytes_per_s for part in path])):
            self._has_left(payload)
        elif body:
            self._ways.connection(sender, receiver).start(payload.flow, path, payload.connections)
            self.lines.moves(payload.transfer, payload.flow.moved(self._now()), self._now())
        else:
            bandwidth.start(payload.flow, path)

    def _halt(self, payload: Payload) -> None:
        """Stop it, for good or until `_move`."""
        if payload.flow is None:
            return
        if payload.kind == "control":
            bandwidth.stop(payload.flow)
        else:
            self._ways.connection(payload.sender, payload.receiver).stop(payload.flow)
            self.lines.stopped(payload.transfer, payload.flow.moved(self._now()), self._now())

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
        """Virtual time; that of the end when the run is over."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop.time()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
