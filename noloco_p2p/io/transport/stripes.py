"""Stripes: calls that carry parts of a body and of its reply over further connections. This is the answering side.

The caller draws the messages of a body from one stream for all calls in parallel, and the answering side does the same
with those of the reply, so a faster connection carries more. Every stripe ends its part of the body with an empty
message, even if the request has no body.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakValueDictionary

import grpc.aio
from google.protobuf.message import DecodeError

from noloco_p2p.core.line_rate import CONNECTIONS, MeasuredLine, stripe_bytes
from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import Violation
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.capped_line import Read, Write
from noloco_p2p.io.transport.frame_codec import FILLERS
from noloco_p2p.io.transport.slow_transfers import Patience, Unread

Duplex = tuple[Write, Read]
"""Functions that write and read the messages of a call."""
StripeCall = tuple[str, float, Callable[[Any], Duplex]]
"""What a stripe waits for (for error messages), for how many seconds, and a function that returns its `Duplex`."""
NO_MORE = b""
"""The message that ends a stripe's part of the body."""
HEADER_S = 5.0
"""How long a stripe may arrive before the header that it belongs to, which takes another connection, seconds."""


def to_stripe(number: int) -> bytes:
    """The first message of a stripe of the call whose header or request had this number."""
    return pb.ActivationMessage(stripe=number).SerializeToString()


def from_stripe(raw: bytes) -> int:
    """The number in the first message of a stripe. Raises Violation."""
    with suppress(DecodeError):
        if len(raw) <= len(to_stripe(2**64 - 1)):
            return pb.ActivationMessage.FromString(raw).stripe
    raise Violation("the first message of a stripe must have the number of a body")


def no_body(message: bytes) -> bool:
    """The argument of `Stripes.expect` for a request without a body. Raises Violation."""
    raise Violation("part of a body arrived that was not requested")


class Stripes:
    """The stripes of one call: they carry parts of its body and of its reply."""

    def __init__(self) -> None:
        self._calls = 0
        self._take: Callable[[bytes], bool] | None = None
        self._wanted = asyncio.Event()
        """The body is requested, a reply is sent without it, or the call has ended. Until then the body is not read."""
        self._over = False
        """The call that the stripes belong to has ended."""
        self._whole = False
        """The body is complete, or a stripe broke the protocol."""
        self._bringing = 0
        """Stripes that may still bring a part of the body."""
        self._turned = asyncio.Event()
        """`_whole`, `_bringing` or `_calls` has changed."""
        self._broken: Violation | None = None
        self._next = asyncio.Event()
        """Something follows the body: filler, the reply or the end."""
        self._filler = b""
        """The message of filler before the reply; empty if there is none."""
        self._replying = asyncio.Event()
        """The reply is being sent, or there will be none."""
        self._group: asyncio.TaskGroup | None = None
        """The tasks that send the reply; None when it accepts no more of them."""
        self._messages: Iterator[bytes] = iter(())
        """The rest of the reply."""
        self._sent = False
        """All of the reply has been sent."""

    def expect(self, take: Callable[[bytes], bool]) -> None:
        """Start reading the body: `take` receives every message of it, and returns whether the body is complete."""
        self._take = take
        self._wanted.set()

    def take(self, message: bytes) -> None:
        """Take in a message of the body from one of the calls. Raises Violation."""
        if self._take is not None and self._take(message):
            self._whole = True
            self._turned.set()

    async def body(self, patience: Patience) -> None:
        """Wait until the body is complete. Raises Violation if a stripe brought something that does not belong to it.

        `patience` limits the wait only while no stripe brings any of it. Each stripe that does is read with its own
        patience, which does not count delays by this node.
        """
        while not self._whole:
            self._turned.clear()
            turned = self._turned.wait()
            await (turned if self._bringing else patience.wait(turned))
        if self._broken is not None:
            raise self._broken

    async def carry(self, write: Write, read: Read) -> bool:
        """Serve a stripe: receive part of the body, and send part of the reply. Returns False if it is not wanted.

        Raises Unread if gRPC cannot end the call.
        """
        if self._calls >= CONNECTIONS:
            return False
        self._calls += 1
        broken_off = False

        async def noted(message: bytes) -> None:
            nonlocal broken_off
            try:
                await write(message)
            except (asyncio.CancelledError, Unread):
                broken_off = True
                raise

        try:
            await self._wanted.wait()
            if self._over:
                return False
            self._bringing += 1
            self._turned.set()
            try:
                while (message := await read()) is not grpc.aio.EOF and message != NO_MORE:
                    self.take(message)
            finally:
                self._bringing -= 1
                self._turned.set()
            await self._next.wait()
            if self._filler and not self._replying.is_set():
                await write(self._filler)
            await self._replying.wait()
            if self._group is not None:
                await asyncio.wait([self._group.create_task(self._send(noted))])
                if broken_off:
                    raise Unread("the reply has ended while part of it was being written")
            return True
        except Violation as error:
            self._broken, self._whole = error, True
            return False
        finally:
            self._calls -= 1
            self._turned.set()

    def fill(self, line: MeasuredLine, caller: PeerId, nbytes: int) -> None:
        """Send `nbytes` of filler on every stripe, unless the connections have not rested or the reply begins first."""
        now = asyncio.get_running_loop().time()
        if line.rested(caller, now):
            line.leaves(caller)
            line.has_left(caller, now)
            self._filler = FILLERS[nbytes]
            self._next.set()

    def message_bytes(self, size: int, most: int) -> int:
        """The most tensor bytes in one message of a reply of `size` bytes; never more than `most`."""
        return min(most, stripe_bytes(size, max(1, self._calls)))

    async def reply(self, messages: Iterable[bytes], write: Write) -> None:
        """Send a reply: its first message with `write`, the others on the stripes. Raises the first error of any of
        them.

        While there are no stripes, or once all have ended, every message goes out with `write`; stripes that arrive
        later take over what is left.
        """
        self._messages = iter(messages)
        del messages  # A traceback would keep them.
        try:
            await write(next(self._messages))
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._go_on()
                try:
                    while self._calls and not self._sent:
                        self._turned.clear()
                        await self._turned.wait()
                    await self._send(write)
                finally:
                    self._group = None
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._messages = iter(())

    async def _send(self, write: Write) -> None:
        try:
            for message in self._messages:
                await write(message)
        finally:
            self._group = None
        self._sent = True

    def end(self) -> None:
        """End the stripes, because the call that they belong to has ended."""
        self._over = True
        self._go_on()

    def _go_on(self) -> None:
        for event in (self._wanted, self._replying, self._next):
            event.set()


class StripedCalls:
    """The bodies that may be striped at the moment, by their caller and the number that the caller gave them."""

    def __init__(self) -> None:
        self._known: dict[tuple[PeerId, int], tuple[Stripes, Callable[[Any], Duplex]]] = {}
        self._waiting = WeakValueDictionary[tuple[PeerId, int], asyncio.Event]()
        """Set when the header arrives for which stripes are waiting."""

    async def of(self, caller: PeerId, raw: bytes) -> tuple[Stripes, Callable[[Any], Duplex]] | None:
        """The `Stripes` that a call beginning with message `raw` belongs to, and a function that returns the call's
        `Duplex`; None if no header arrives within HEADER_S. Raises Violation."""
        key = caller, from_stripe(raw)
        if key[1] and key not in self._known:
            came = self._waiting.setdefault(key, asyncio.Event())
            with suppress(TimeoutError):
                async with asyncio.timeout(HEADER_S):
                    await came.wait()
        return self._known.get(key)

    @contextmanager
    def may_carry(self, caller: PeerId, number: int, duplex_of: Callable[[Any], Duplex]) -> Iterator[Stripes]:
        """Within the context, stripes of this caller with this number may carry a body and its reply; with 0, none may.

        `duplex_of` returns the `Duplex` of a stripe, given its gRPC context. Raises Violation.
        """
        stripes, key = Stripes(), (caller, number)
        if key in self._known:
            raise Violation("two bodies have the same number")
        if number:
            self._known[key] = stripes, duplex_of
            if (came := self._waiting.pop(key, None)) is not None:
                came.set()
        try:
            yield stripes
        finally:
            self._known.pop(key, None)
            stripes.end()
