"""The caller's side of an RPC with tensors: writes and reads the messages of the call and of its stripes, the calls
that carry parts of it over further connections."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Generic, TypeVar

import grpc.aio

from noloco_p2p.errors import Busy, Unreachable, Violation
from noloco_p2p.io.dht.streams import cancelled
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.capped_line import Read, Write
from noloco_p2p.io.transport.frame_codec import is_filler, unpacked
from noloco_p2p.io.transport.stripes import NO_MORE, Duplex
from noloco_p2p.ports import Claim

T = TypeVar("T")
Announced = tuple[bytes, Callable[[int], tuple[int, Iterator[bytes]]]]
"""A header, and a function: the tensor bytes wanted per message (0: any number) → (connections to use, messages)."""


def to_grant(message_bytes: int) -> bytes:
    """The message that asks for a body, preferably with at most `message_bytes` tensor bytes per message; 0 for any."""
    return pb.Reply(grant=pb.Grant(message_bytes=message_bytes)).SerializeToString()


LONGEST_GRANT_BYTES = len(to_grant(2**32 - 1))


def from_grant(raw: bytes) -> int | None:
    """The argument of `to_grant`, or None if the reply is not a grant. Raises Violation if it is malformed."""
    reply = unpacked(raw, pb.Reply)[0] if len(raw) <= LONGEST_GRANT_BYTES else pb.Reply()
    return reply.grant.message_bytes if reply.HasField("grant") else None


class Collected(Generic[T]):
    """Collects a reply that arrives over one call and its stripes."""

    def __init__(
        self,
        feed: Callable[[bytes], T | None],
        stripes: Sequence[AbstractAsyncContextManager[Duplex]],
        replying: Callable[[], None] = lambda: None,
    ) -> None:
        """`feed` receives the messages until it returns the complete reply; `stripes` open further calls that each
        carry some of them. `replying` is called after the first message, unless that is a refusal."""
        self._feed, self._stripes = feed, stripes
        self._reply: T | None = None
        self._begun = asyncio.Event()
        """The first message of the reply has arrived."""
        self._answered = asyncio.Event()
        """Something has arrived over the first call: a grant, or the first message."""
        self._replying = replying
        self._write: Any = None
        """Writes to the first call, if there is anything to write before the reply."""
        self._unopened = 0
        """Stripes whose connection could not be opened."""

    def take(self, message: bytes) -> None:
        """Take in a message. Raises Violation if it is the end of the stream, before the reply is complete."""
        self._answered.set()
        self._reply = self._feed(_some(message))
        if not self._begun.is_set():
            self._begun.set()
            self._replying()

    async def whole(self, read: Read) -> T:
        """Receive the reply and return it once it is complete; `read` reads from the first call."""
        tasks: list[asyncio.Task[None]] = []
        try:
            if self._stripes and self._reply is None:
                tasks = [asyncio.create_task(one) for one in (self._receive(read), *map(self._stripe, self._stripes))]
            else:
                await self._receive(read)
            left = set(tasks)
            while left and self._reply is None:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                if self._reply is None:
                    for task in filter(done.__contains__, tasks):
                        task.result()  # The first call goes first: its error says why the stripes ended.
        finally:
            await cancelled(tasks)
        if self._reply is None:
            raise Violation("the reply ended early")
        return self._reply

    async def _carry(self, write: Write) -> None:
        """Write to a stripe, or to the first call if none could be opened, what precedes the reply: here nothing."""

    async def _stripe(self, stripe: AbstractAsyncContextManager[Duplex]) -> None:
        """Carry a part over a further connection, or nothing if it cannot be opened. If it is lost later, all ends."""
        opened = False
        try:
            async with stripe as (write, read):
                opened = True
                await self._carry(write)
                await write(NO_MORE)
                await self._receive_stripe(read)
        except Unreachable:
            self._unopened += 1
            if opened:
                # A refusal of the body ends this call too, but only the first call carries the reason.
                await self._answered.wait()
                raise
            if self._unopened == len(self._stripes):
                await self._carry(self._write)

    async def _receive_stripe(self, read: Read) -> None:
        """Receive from a stripe: possibly filler, then a part of the reply after its first message."""
        try:
            message = await read()
            if is_filler(message):
                message = await read()
        except Unreachable:
            # If there will be no reply, the peer does not want this call, and only the first one carries the reason.
            await self._begun.wait()
            raise
        await self._begun.wait()
        if message is not grpc.aio.EOF:
            self.take(message)
            await self._receive(read)

    async def _receive(self, read: Read) -> None:
        """Receive from one call until the reply is complete or the call's stream ends."""
        while self._reply is None and (message := await read()) is not grpc.aio.EOF:
            self.take(message)


class Fetched(Collected[T]):
    """The reply to a request without a body, within time limits."""

    def __init__(self, feed: Callable[[bytes], T | None], what: str) -> None:
        """`feed`: see `Collected`. `what` is for error messages, such as "snapshot came from <peer>"."""
        super().__init__(feed, ())
        self._what = what
        self._silence = asyncio.timeout(None)
        self._silence_s = 0.0
        self._held = 0
        """How many calls are not read at the moment, because they wait for their turn on this node's own line."""

    def take(self, message: bytes) -> None:
        """See `Collected`. A message on any call restarts the limit on silence."""
        self._listen()
        super().take(message)

    @contextmanager
    def held(self) -> Iterator[None]:
        """While a call waits for its turn on this node's own line, the peer does not count as silent."""
        self._held += 1
        self._listen()
        try:
            yield
        finally:
            self._held -= 1
            self._listen()

    def _listen(self) -> None:
        """Restart the limit on silence, or suspend it while a call is held."""
        if not self._silence.expired():
            until = asyncio.get_running_loop().time() + self._silence_s
            self._silence.reschedule(None if self._held else until)

    async def within(
        self,
        call: Any,
        stripes: Sequence[AbstractAsyncContextManager[Duplex]],
        reads: tuple[Read, Read],
        limits_s: tuple[float, float, float | None],
    ) -> tuple[T, float]:
        """Receive the reply over `call`, and end the call. Returns it, and the seconds from its first message on.

        `stripes`: see `Collected`. `reads` read the first message and the others. Raises Unreachable if one of
        `limits_s` is exceeded: for the first message, for each further one unless it is `held`, and for all further
        ones together.
        """
        self._stripes, (first_s, self._silence_s, rest_s) = stripes, limits_s
        clock, limit = asyncio.get_running_loop().time, asyncio.timeout(None)
        try:
            async with limit, self._silence:
                self._silence.reschedule(clock() + first_s)
                self.take(await reads[0]())
                began = clock()
                limit.reschedule(None if rest_s is None else began + rest_s)
                return await self.whole(reads[1]), clock() - began
        except TimeoutError:
            if not self._silence.expired():
                raise Unreachable(f"not all of the {self._what} within {rest_s:g} s") from None
            seconds = self._silence_s if self._begun.is_set() else first_s
            raise Unreachable(f"no more of the {self._what} for {seconds:g} s") from None
        finally:
            call.cancel()


class SentActivation(Collected[T]):
    """Sends an activation, whose body follows at once or when the peer grants it a place, and receives the reply.

    If there are stripes, they carry the whole body and reply, so that nothing delays headers and grants. Once the reply
    is complete, or is a refusal, the rest of the body is not sent. A peer that replies early does not read on before
    its reply is out, so flow control limits how much is sent for nothing.
    """

    def __init__(
        self,
        sent: Announced,
        turn: AbstractAsyncContextManager[None],
        claim: Claim,
        feed: Callable[[bytes], T | None],
        stripes: Sequence[AbstractAsyncContextManager[Duplex]],
        at_once: bool,
    ) -> None:
        """The body is sent in its `turn`, or `at_once`; `feed` receives the reply. `stripes` open further calls that
        each carry a part of both."""
        super().__init__(feed, stripes, claim.replying)
        self._header, self._body = sent
        self._turn, self._claim = turn, claim
        self._at_once = at_once
        """The body is sent without waiting for its grant, and the grant has not arrived yet."""
        self._messages: Iterator[bytes] = iter(())
        """The rest of the body."""
        self._writing = 0
        """How many calls are writing a message of the body."""
        self._may_go = asyncio.Event()
        """It is the body's turn, or a reply came instead of the grant."""
        self._sent = asyncio.Event()
        """All of the body has been written."""

    async def exchange(self, call: Any, duplex: Duplex) -> T:
        """Send the activation over `call`, receive the reply, and end the call."""
        write, read = self._write, _ = duplex
        sending: list[asyncio.Task[None]] = []
        try:
            await write(self._header)
            if (message_bytes := 0 if self._at_once else await self._granted(read)) is not None:
                connections, self._messages = self._body(message_bytes)
                self._stripes = self._stripes[:connections]
                sending.append(asyncio.create_task(self._send(write)))
            return await self.whole(read)
        finally:
            call.cancel()
            await cancelled(sending)

    async def _granted(self, read: Read) -> int | None:
        """The grant's `message_bytes`, or None if a reply came first. Raises Busy if another replica was faster."""
        message = _some(await read())
        if (message_bytes := from_grant(message)) is None:
            self._may_go.set()
            self.take(message)
            return None
        self._answered.set()
        if not self._claim.take():
            raise Busy("another replica granted a place first")
        return message_bytes

    def take(self, message: bytes) -> None:
        """See `Collected`. Ignores the grant of a body that was sent without waiting for it."""
        if self._at_once and from_grant(message) is not None:
            self._at_once = False
            self._answered.set()
        else:
            super().take(message)

    async def _send(self, write: Write) -> None:
        async with self._turn:
            self._may_go.set()
            if not self._stripes:
                await self._carry(write)
            await self._sent.wait()
        self._claim.left()
        if self._stripes:
            await write(NO_MORE)

    async def _carry(self, write: Write) -> None:
        """Write messages of the body that no other call has written, until none is left."""
        await self._may_go.wait()
        for message in self._messages:
            self._writing += 1
            await write(message)
            self._writing -= 1
        if not self._writing:
            self._sent.set()


def _some(message: T) -> T:
    """The message. Raises Violation if it is the end of the stream."""
    if message is grpc.aio.EOF:
        raise Violation("the reply ended early")
    return message
