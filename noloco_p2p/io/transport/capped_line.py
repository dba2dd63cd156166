"""Applies the owner's caps to what this node's transport sends and receives, and measures how fast its line is.

Messages with tensors wait for their turn and are measured. Short ones are charged to the cap, but never wait. Without a
cap nothing waits. Bytes are those of gRPC messages. Downloads are held back by not being read: HTTP/2's flow control
then stops the sender, except for what is already in transit, which is one window per call (64 KiB at first) and the
message being read. So peers are asked to keep their messages short.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any

from noloco_p2p.config import LimitSettings
from noloco_p2p.core import wire
from noloco_p2p.core.line_cap import BYTES_PER_MBIT, LineCap, LineTurn, Precedence
from noloco_p2p.core.line_rate import MIN_MESSAGE_BYTES, MeasuredLine, message_bytes
from noloco_p2p.core.messages import Header
from noloco_p2p.io.transport.frame_codec import is_filler
from noloco_p2p.io.transport.sockets import AckedBytes, UnsentLimit

Write = Callable[[bytes], Awaitable[object]]
Read = Callable[..., Awaitable[Any]]
Held = Callable[[], AbstractContextManager[object]]
Rank = tuple[Precedence, tuple[float, ...]]
"""A message's place in the order of sending: its kind, then its age as (step, index, …). Lower goes first."""
OTHER: Rank = (Precedence.OTHER, (0, 0))
FIRST_MESSAGE: Rank = (Precedence.GRADIENT, (-1, 0))
"""Rank of the first message of a call, ahead of everything: its sender soon asks whether its header has arrived."""
CALL_WINDOW_BYTES = 1 << 16
"""Most unread bytes on a call with a cap on downloads: HTTP/2's initial window."""
WINDOW_BYTES = 1 << 22
"""Most unread bytes on a call, without a cap. With a round trip of 100 ms this allows 335 Mbit/s per connection."""
BUFFERED_S = 0.001
"""A message that can be read in less time was in a buffer already, so it says nothing about the line."""


def rank_of(header: Header, precedence: Precedence, *then: float) -> Rank:
    """The rank of a message that belongs to a microbatch; `then` orders those of the same step and index."""
    return precedence, (header.origin.step, header.origin.index, *then)


class CappedDirection:
    """One direction of a capped line. Uses the running event loop."""

    def __init__(self, mbit_per_s: float) -> None:
        self.bytes_per_s = mbit_per_s * BYTES_PER_MBIT
        self._cap = LineCap(self.bytes_per_s)
        self._timer: asyncio.TimerHandle | None = None
        self.message_bytes = min(wire.PACK_BYTES, self._cap.message_bytes)
        """Longest message that keeps the line smooth."""

    async def turn(self, rank: Rank, nbytes: int) -> None:
        """Wait until `nbytes` may be transferred, and charge them."""
        its_turn = asyncio.Event()
        turn = LineTurn(*rank, nbytes, its_turn.set)
        self._cap.ask(turn)
        self._move()
        try:
            await its_turn.wait()
        except asyncio.CancelledError:
            turn.withdrawn = True
            self.charge(-nbytes if its_turn.is_set() else 0)  # its turn had come, and was charged
            raise

    def charge(self, nbytes: int) -> None:
        """Charge bytes that were transferred without waiting; a negative number returns bytes charged in excess."""
        self._cap.charge(nbytes, asyncio.get_running_loop().time())
        self._move()

    def _move(self) -> None:
        """Release the messages whose turn has come, and set a timer for the next one."""
        loop = asyncio.get_running_loop()
        while turn := self._cap.next(loop.time()):
            turn.go()
        if self._timer is not None:
            self._timer.cancel()
        free_at = self._cap.free_at()
        self._timer = None if free_at is None else loop.call_at(free_at, self._move)


class OwnersLine:
    """Both directions of a node's line, with the owner's caps and the measured rates."""

    def __init__(self, limits: LimitSettings, own: Callable[[], Collection[str]] = tuple) -> None:
        """`own`: see `AckedBytes`."""
        up, down = limits.upload_mbit_per_s, limits.download_mbit_per_s
        self._up = None if up is None else CappedDirection(up)
        self._down = None if down is None else CappedDirection(down)
        self.whole_bytes = wire.PACK_BYTES if up is None and down is None else MIN_MESSAGE_BYTES
        """Activations with more tensor bytes are announced, so that the header does not wait along with them."""

        # Without this, gRPC lets a sender have up to 128 MiB in transit on each call, read or not. This needs gRPC
        # 1.74: older versions would give a whole connection 64 KiB, a third of the speed at 200 Mbit/s and 50 ms.
        window = ("grpc.http2.lookahead_bytes", WINDOW_BYTES), ("grpc.http2.max_frame_size", wire.PACK_BYTES)
        identity_only = "grpc.compression_enabled_algorithms_bitset", 1
        self.grpc_options = ("grpc.http2.bdp_probe", 0), identity_only, *(window if down is None else ())
        """gRPC options of every connection."""
        self.measured = MeasuredLine(*(math.inf if one is None else one.bytes_per_s for one in (self._up, self._down)))
        """The line as measured on the messages that are not short."""
        self.unsent = UnsentLimit(self.measured.up)
        """Limit on what may wait unsent in each connection."""
        self._acked = AckedBytes(self.measured.up, own)

    @property
    def wanted_bytes(self) -> int:
        """Most tensor bytes that this node would like to receive in one message; 0 for any number."""
        rate = self.measured.down.bytes_per_s
        return self._down.message_bytes if self._down is not None else message_bytes(rate) if rate else 0

    def agreed(self, wanted_bytes: int) -> int:
        """Most tensor bytes in one message to a peer that wants at most `wanted_bytes`, where 0 means any number."""
        most = message_bytes(self.measured.up.bytes_per_s) if self._up is None else self._up.message_bytes
        return max(MIN_MESSAGE_BYTES, min(most, wanted_bytes or wire.PACK_BYTES))

    def sender(self, write: Write, rank: Rank = OTHER) -> Write:
        """`write`, but each message waits for its turn, unless it is short."""
        direction, rate, clock = self._up, self.measured.up, asyncio.get_running_loop().time
        self.unsent.follow(clock())

        async def send(message: bytes) -> None:
            nbytes = len(message)
            if nbytes <= MIN_MESSAGE_BYTES:
                self.charge(sent=nbytes, received=0)
                await write(message)
                return
            self._acked.follow(clock())
            began, sent = rate.began(clock()), 0
            try:
                if direction is not None:
                    await direction.turn(rank, nbytes)
                await write(message)
                sent = nbytes
            finally:
                rate.ended(began, sent, clock())

        return send

    def receiver(
        self, read: Read, rank: Rank = OTHER, *, first_at_once: bool = False, held: Held = nullcontext
    ) -> Read:
        """`read`, but each message waits for its turn; with `first_at_once`, only from the second one on. The wait is
        inside the context `held()`. A FIRST_MESSAGE is not charged before it comes: a caller may never send it."""
        direction = self._down
        if direction is None:
            return self._measured(read)

        due = 0 if first_at_once or rank == FIRST_MESSAGE else direction.message_bytes

        async def receive(*arguments: Any) -> Any:
            nonlocal due
            charged, due = due, direction.message_bytes
            if charged or rank == FIRST_MESSAGE:
                with held():
                    await direction.turn(rank, charged)
            came = 0
            try:
                message = await read(*arguments)
                came = len(message) if isinstance(message, bytes) else 0
                due = 0 if is_filler(message) else due
            finally:
                direction.charge(came - charged)
            return message

        return self._measured(receive)

    def _measured(self, read: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """`read`, but measured for each message that follows another one of the same body. The time before the first
        message, or after filler, says nothing about the line."""
        rate, clock, follows = self.measured.down, asyncio.get_running_loop().time, False

        async def receive(*arguments: Any) -> Any:
            nonlocal follows
            if not follows:
                message = await read(*arguments)
            else:
                at, nbytes = clock(), 0
                began = rate.began(at)
                try:
                    message = await read(*arguments)
                    if isinstance(message, bytes) and clock() - at >= BUFFERED_S:
                        nbytes = len(message)
                finally:
                    rate.ended(began, nbytes, clock())
            follows = isinstance(message, bytes) and len(message) > MIN_MESSAGE_BYTES and not is_filler(message)
            return message

        return receive

    @asynccontextmanager
    async def in_transit(self, rank: Rank) -> AsyncIterator[None]:
        """While a body comes: charge its turn what may be in transit or unread, and give it back at the end."""
        if self._down is not None:
            await self._down.turn(rank, CALL_WINDOW_BYTES)
        try:
            yield
        finally:
            self.charge(sent=0, received=-CALL_WINDOW_BYTES)

    def charge(self, *, sent: int, received: int) -> None:
        """Charge short messages that were sent and received without waiting, in bytes."""
        if self._up is not None:
            self._up.charge(sent)
        if self._down is not None:
            self._down.charge(received)
