"""How the messages of one call are written and read, and of those that carry a part of it over other connections."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

import grpc.aio

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import Busy, Unreachable, Violation
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.capped_line import Read, Write
from noloco_p2p.io.transport.frame_codec import unpacked
from noloco_p2p.io.transport.stripes import NO_MORE
from noloco_p2p.ports import Claim

T = TypeVar("T")
Ways = tuple[Write, Read]
"""Write and read the messages of a call."""
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


class AnnouncedActivation(Generic[T]):
    """An activation whose body follows when its peer has granted it a place, and the reply.

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
    ) -> None:
        """The body leaves in its `turn`; `feed` gets the reply. `stripes` open calls that each carry a part of both."""
        self._header, self._body = sent
        self._turn, self._claim, self._feed, self._stripes = turn, claim, feed, stripes
        self._messages: Iterator[bytes] = iter(())
        """What is left of the body."""
        self._reply: T | None = None
        self._replies = asyncio.Event()
        """The first message of the reply has come."""
        self._writing = 0
        self._sent = asyncio.Event()
        """All of the body is written."""

    async def exchange(self, call: Any, ways: Ways) -> T:
        """Sends it over `call`, which ends then; the reply."""
        write, read = ways
        tasks: list[asyncio.Task[None]] = []

        def start(part: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            tasks.append(asyncio.create_task(part))
            return tasks[-1]

        try:
            await write(self._header)
            message = _some(await read())
            if (message_bytes := from_grant(message)) is not None:
                if not self._claim.take():
                    raise Busy("another replica has granted a place first")
                self._messages = self._body(message_bytes)
                start(self._send(write))
            else:
                self._take(message)
            if not self._stripes or not tasks:
                await self._receive(read)
            else:
                beside = {start(self._carry_beside(stripe)) for stripe in self._stripes}
                await self._until_whole({start(self._receive(read)), *beside})
            if self._reply is None:
                raise Violation("the reply ended early")
            return self._reply
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_whole(self, reading: set[asyncio.Task[None]]) -> None:
        while reading and self._reply is None:
            done, reading = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _send(self, write: Write) -> None:
        async with self._turn:
            await self._carry(write)
            await self._sent.wait()
        self._claim.left()
        if self._stripes:
            await write(NO_MORE)

    async def _carry(self, write: Write) -> None:
        """Write what nobody has written, until nothing is left."""
        for message in self._messages:
            self._writing += 1
            await write(message)
            self._writing -= 1
        if not self._writing:
            self._sent.set()

    async def _carry_beside(self, stripe: AbstractAsyncContextManager[Ways]) -> None:
        """What another connection carries; nothing, when there is none. One that is lost later ends all."""
        opened = False
        try:
            async with stripe as (write, read):
                opened = True
                await self._carry(write)
                await write(NO_MORE)
                await self._replies.wait()
                await self._receive(read)
        except Unreachable:
            if opened:
                raise

    async def _receive(self, read: Read) -> None:
        """What comes over one call, until the reply is whole, or nothing more comes here."""
        while self._reply is None and (message := await read()) is not grpc.aio.EOF:
            self._take(message)

    def _take(self, message: bytes) -> None:
        self._reply = self._feed(message)
        self._replies.set()


async def next_message(call: Any, what: str, peer: PeerId, seconds: float) -> bytes:
    """The next message of a stream. Raises Unreachable after `seconds`, Violation at the end of the stream."""
    try:
        async with asyncio.timeout(seconds):
            message: bytes = _some(await call.read())
            return message
    except TimeoutError:
        raise Unreachable(f"no more of the {what} came from {peer} for {seconds:g} s") from None


def _some(message: T) -> T:
    """The message, unless the stream is over. Raises Violation: the caller is still waiting for the rest."""
    if message is grpc.aio.EOF:
        raise Violation("the reply ended early")
    return message
