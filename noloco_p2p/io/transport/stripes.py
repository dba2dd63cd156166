"""Calls that carry parts of a body and of its reply over other connections, on the side that answers.

The caller draws the messages of a body from one stream, on all calls at once, and the answering side those of the
reply: whichever connection takes more carries more. Every call ends its part of the body with an empty message, also
one beside a question that has no body.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from noloco_p2p.core.line_rate import CONNECTIONS, MeasuredLine, stripe_bytes
from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import Violation
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.callers import Patience, Unread
from noloco_p2p.io.transport.capped_line import Read, Write
from noloco_p2p.io.transport.frame_codec import FILLERS

Ways = tuple[Write, Read]
"""Write and read the messages of a call."""
CallBeside = tuple[str, float, Callable[[Any], Ways]]
"""What a call waits for, for how long, in seconds, and how it is written and read."""
NO_MORE = b""
"""The part of a call is over."""
HEADER_S = 5.0
"""A call that carries part of a body may come so long before the header, which takes another connection."""


def to_stripe(number: int) -> bytes:
    """The first message of a call beside the one whose header, or question, had this number."""
    return pb.ActivationMessage(stripe=number).SerializeToString()


def from_stripe(raw: bytes) -> int:
    """The number that such a call begins with. Raises Violation."""
    try:
        return pb.ActivationMessage.FromString(raw).stripe
    except DecodeError:
        raise Violation("a call that carries part of a body says of which one") from None


def no_body(message: bytes) -> bool:
    """What `Stripes.expect` gets beside a question. Raises Violation."""
    raise Violation("part of a body came that nobody has asked for")


class Stripes:
    """The calls that carry parts of one body, and of its reply, beside the call that announced it."""

    def __init__(self) -> None:
        self._calls = 0
        self._take: Callable[[bytes], bool] | None = None
        self._wanted = asyncio.Event()
        """The body may come, or a reply goes without it, or all is over. Until then nothing of it is read."""
        self._over = False
        """The call beside which these are has ended."""
        self._whole = False
        """All of the body is there, or something that breaks the protocol."""
        self._bringing = 0
        """Calls that may still bring a part of the body."""
        self._turned = asyncio.Event()
        """`_whole`, `_bringing`, `_calls` or `_sent` has changed."""
        self._broken: Violation | None = None
        self._next = asyncio.Event()
        """Filler, the reply or the end: something follows the body."""
        self._filler = b""
        """It precedes the reply."""
        self._replying = asyncio.Event()
        """The reply is being sent, or none will be."""
        self._group: asyncio.TaskGroup | None = None
        """Those who send it; None also while it ends, when it takes nobody any more."""
        self._messages: Iterator[bytes] = iter(())
        """What is left of it."""
        self._sent = False
        """Nothing is left of it."""

    def expect(self, take: Callable[[bytes], bool]) -> None:
        """The body may come now: `take` gets every message of it, and says whether all of it is there."""
        self._take = take
        self._wanted.set()

    def take(self, message: bytes) -> None:
        """A message of the body has come on one of the calls. Raises Violation."""
        if self._take is not None and self._take(message):
            self._whole = True
            self._turned.set()

    async def body(self, patience: Patience) -> None:
        """Wait until all of the body is there. Raises Violation: what has come on another call is none of it.

        `patience` limits the wait only while no call brings any of it: each that does is read with patience of its own,
        which leaves out delays by this node.
        """
        while not self._whole:
            self._turned.clear()
            turned = self._turned.wait()
            await (turned if self._bringing else patience.wait(turned))
        if self._broken is not None:
            raise self._broken

    async def carry(self, write: Write, read: Read) -> bool:
        """Take what comes on a further call, and send part of the reply there; False: the call is not wanted.

        Raises Unread: gRPC cannot end it.
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
            self._turned.set()
            return False
        finally:
            self._calls -= 1
            self._turned.set()

    def fill(self, line: MeasuredLine, caller: PeerId, nbytes: int) -> None:
        """Send so much filler on every further call, unless they have not rested or the reply begins before."""
        now = asyncio.get_running_loop().time()
        if line.rested(caller, now):
            line.leaves(caller)
            line.has_left(caller, now)
            self._filler = FILLERS[nbytes]
            self._next.set()

    def message_bytes(self, size: int, most: int) -> int:
        """Most tensor bytes in one message of a reply of this size, and at most `most`."""
        return min(most, stripe_bytes(size, max(1, self._calls)))

    async def reply(self, messages: Iterable[bytes], write: Write) -> None:
        """Send a reply: its first message by `write`, the others on further calls. Raises what one of them does.

        While there are none, all go by `write`; calls that come later take what is left. The same holds once all
        have ended.
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
        self._turned.set()

    def end(self) -> None:
        """The call that announced it is over, and with it these."""
        self._over = True
        self._go_on()

    def _go_on(self) -> None:
        for event in (self._wanted, self._replying, self._next):
            event.set()


class StripedCalls:
    """Which bodies several calls may carry now, by their callers and the numbers that these gave them."""

    def __init__(self) -> None:
        self._known: dict[tuple[PeerId, int], tuple[Stripes, Callable[[Any], Ways]]] = {}
        self._waiting: dict[tuple[PeerId, int], set[asyncio.Future[None]]] = {}
        """Calls that came before the header."""

    async def of(self, caller: PeerId, raw: bytes) -> tuple[Stripes, Callable[[Any], Ways]] | None:
        """What the call is for that begins with this message, and how it is written and read; None: no header has come
        within HEADER_S. Raises Violation."""
        key = caller, from_stripe(raw)
        if key[1] and key not in self._known:
            came = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(key, set()).add(came)
            try:
                await asyncio.wait([came], timeout=HEADER_S)
            finally:
                waiting = self._waiting.get(key, set())
                waiting.discard(came)
                if not waiting:
                    self._waiting.pop(key, None)
        return self._known.get(key)

    @contextmanager
    def may_carry(self, caller: PeerId, number: int, ways: Callable[[Any], Ways]) -> Iterator[Stripes]:
        """Further calls of this caller with this number may carry a body and its reply; none with 0. Raises Violation.

        `ways` are those of the call in such a context.
        """
        stripes, key = Stripes(), (caller, number)
        if key in self._known:
            raise Violation("two bodies have the same number")
        if number:
            self._known[key] = stripes, ways
            for came in self._waiting.pop(key, ()):
                came.set_result(None)
        try:
            yield stripes
        finally:
            self._known.pop(key, None)
            stripes.end()
