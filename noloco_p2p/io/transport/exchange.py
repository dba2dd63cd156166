"""How the messages of one call are written and read, and of those that carry a part of it over other connections."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Generic, TypeVar

import grpc.aio

from noloco_p2p.errors import Busy, Unreachable, Violation
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.capped_line import Read, Write
from noloco_p2p.io.transport.frame_codec import is_filler, unpacked
from noloco_p2p.io.transport.stripes import NO_MORE, Ways
from noloco_p2p.ports import Claim

T = TypeVar("T")
Announced = tuple[bytes, Callable[[int], Iterator[bytes]]]
"""A header, and what gives the messages of the body, as long as the peer would like them (0: of any size)."""


def to_grant(message_bytes: int) -> bytes:
    """The body may come, if possible in messages of at most so many tensor bytes; 0: of any size."""
    return pb.Reply(grant=pb.Grant(message_bytes=message_bytes)).SerializeToString()


LONGEST_GRANT_BYTES = len(to_grant(2**32 - 1))


def from_grant(raw: bytes) -> int | None:
    """What `to_grant` was given; None: the reply is no grant. Raises Violation: broken bytes."""
    reply = unpacked(raw, pb.Reply)[0] if len(raw) <= LONGEST_GRANT_BYTES else pb.Reply()
    return reply.grant.message_bytes if reply.HasField("grant") else None


class Collected(Generic[T]):
    """A reply, as it comes over one call and over those beside it."""

    def __init__(
        self,
        feed: Callable[[bytes], T | None],
        stripes: Sequence[AbstractAsyncContextManager[Ways]],
        replying: Callable[[], None] = lambda: None,
    ) -> None:
        """`feed` gets the messages until it returns the whole; `stripes` open calls that each carry some of them.

        `replying` is called after the first one, unless that is a refusal.
        """
        self._feed, self._stripes = feed, stripes
        self._reply: T | None = None
        self._begun = asyncio.Event()
        """The first message has come."""
        self._answered = asyncio.Event()
        """Something has come over the first call: a grant, or that message."""
        self._replying = replying
        self._unopened = 0
        """Connections that there are not."""

    def take(self, message: bytes) -> None:
        """A message has come. Raises Violation: it is the end, and the caller is still waiting for the rest."""
        self._answered.set()
        self._reply = self._feed(_some(message))
        if not self._begun.is_set():
            self._begun.set()
            self._replying()

    async def whole(self, read: Read) -> T:
        """The reply, once all of it has come; what comes over the first call is given by `read`."""
        tasks: list[asyncio.Task[None]] = []
        try:
            if self._stripes and self._reply is None:
                tasks = [asyncio.create_task(one) for one in (self._receive(read), *map(self._beside, self._stripes))]
            else:
                await self._receive(read)
            left = set(tasks)
            while left and self._reply is None:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                if self._reply is None:
                    for task in filter(done.__contains__, tasks):
                        task.result()  # First that of the first call, which says why the others end.
        finally:
            await _cancelled(tasks)
        if self._reply is None:
            raise Violation("the reply ended early")
        return self._reply

    async def _carry(self, write: Write) -> None:
        """Write to a call beside the first what goes before the reply: here nothing."""

    async def _carry_alone(self) -> None:
        """Write the same to the first call, because there is no other connection."""

    async def _beside(self, stripe: AbstractAsyncContextManager[Ways]) -> None:
        """What another connection carries; nothing, when there is none. One that is lost later ends all."""
        opened = False
        try:
            async with stripe as (write, read):
                opened = True
                await self._carry(write)
                await write(NO_MORE)
                await self._receive_beside(read)
        except Unreachable:
            self._unopened += 1
            if opened:
                # Where the body is refused, so is this call, but only the first one says why.
                await self._answered.wait()
                raise
            if self._unopened == len(self._stripes):
                await self._carry_alone()

    async def _receive_beside(self, read: Read) -> None:
        """What comes over a further call: filler, perhaps, and a part of the reply after its first message."""
        try:
            message = await read()
            if is_filler(message):
                message = await read()
        except Unreachable:
            # Only the first call knows why there may be no reply: this one is not wanted then.
            await self._begun.wait()
            raise
        await self._begun.wait()
        if message is not grpc.aio.EOF:
            self.take(message)
            await self._receive(read)

    async def _receive(self, read: Read) -> None:
        """What comes over one call, until the reply is whole, or nothing more comes here."""
        while self._reply is None and (message := await read()) is not grpc.aio.EOF:
            self.take(message)


class Fetched(Collected[T]):
    """The answer to a question without a body, which may take so long and no longer."""

    def __init__(self, feed: Callable[[bytes], T | None], what: str) -> None:
        """`feed`: see `Collected`. `what` comes, from whom: for messages."""
        super().__init__(feed, ())
        self._what = what
        self._silence = asyncio.timeout(None)
        self._silence_s = 0.0
        self._held = 0
        """Calls that are not read, because they wait for their turn on this node's own line."""

    def take(self, message: bytes) -> None:
        """A message has come; it ends the silence on all calls."""
        self._listen()
        super().take(message)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A call waits for its turn on this node's own line. Until it ends, the peer does not count as silent."""
        self._held += 1
        self._listen()
        try:
            yield
        finally:
            self._held -= 1
            self._listen()

    def _listen(self) -> None:
        if not self._silence.expired():
            until = asyncio.get_running_loop().time() + self._silence_s
            self._silence.reschedule(None if self._held else until)

    async def within(
        self,
        call: Any,
        beside: Sequence[AbstractAsyncContextManager[Ways]],
        reads: tuple[Read, Read],
        limits_s: tuple[float, float, float | None],
    ) -> tuple[T, float]:
        """The answer over `call`, which ends then, and how long it took from its first message on, in seconds.

        `beside`: the `stripes` of `Collected`. `reads` give that message, and the others. Raises Unreachable when one
        takes longer than `limits_s`: the first message, each further one unless it is `held`, and all of these.
        """
        self._stripes, (first_s, self._silence_s, rest_s) = beside, limits_s
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
    """An activation whose body follows when its peer has granted it a place, or at once, and the reply.

    Calls beside it carry all of the body and of the reply, if there are any: then nothing delays headers and grants.
    When the reply is whole, or a refusal, what was still to send is not sent. A peer that replies early does not read
    on before its reply is out, so flow control bounds what is sent in vain.
    """

    def __init__(
        self,
        sent: Announced,
        turn: AbstractAsyncContextManager[None],
        claim: Claim,
        feed: Callable[[bytes], T | None],
        stripes: Sequence[AbstractAsyncContextManager[Ways]],
        at_once: bool,
    ) -> None:
        """The body leaves in its `turn`, or `at_once`; `feed` gets the reply. `stripes` open calls that each carry a
        part of both."""
        super().__init__(feed, stripes, claim.replying)
        self._header, self._body = sent
        self._turn, self._claim = turn, claim
        self._at_once = at_once
        """The body leaves before its grant, which has not come yet."""
        self._messages: Iterator[bytes] = iter(())
        """What is left of the body."""
        self._write: Write | None = None
        self._writing = 0
        self._may_go = asyncio.Event()
        """It is its turn."""
        self._sent = asyncio.Event()
        """All of the body is written."""

    async def exchange(self, call: Any, ways: Ways) -> T:
        """Sends it over `call`, which ends then; the reply."""
        write, read = self._write, _ = ways
        sending: list[asyncio.Task[None]] = []
        try:
            await write(self._header)
            if (message_bytes := 0 if self._at_once else await self._granted(read)) is not None:
                self._messages = self._body(message_bytes)
                sending.append(asyncio.create_task(self._send(write)))
            return await self.whole(read)
        finally:
            call.cancel()
            await _cancelled(sending)

    async def _granted(self, read: Read) -> int | None:
        """What the grant says; None: a reply came instead. Raises Busy: the body has gone to another replica."""
        message = _some(await read())
        if (message_bytes := from_grant(message)) is None:
            self._may_go.set()
            self.take(message)
            return None
        self._answered.set()
        if not self._claim.take():
            raise Busy("another replica has granted a place first")
        return message_bytes

    def take(self, message: bytes) -> None:
        """See `Collected`. The grant of a body that left at once is of no use any more."""
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
        """Write what nobody has written, until nothing is left."""
        await self._may_go.wait()
        for message in self._messages:
            self._writing += 1
            await write(message)
            self._writing -= 1
        if not self._writing:
            self._sent.set()

    async def _carry_alone(self) -> None:
        assert self._write is not None
        await self._carry(self._write)


async def _cancelled(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _some(message: T) -> T:
    """The message, unless the stream is over. Raises Violation: the caller is still waiting for the rest."""
    if message is grpc.aio.EOF:
        raise Violation("the reply ended early")
    return message
