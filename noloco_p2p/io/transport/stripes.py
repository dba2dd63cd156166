"""Calls that carry parts of an activation and of its reply over other connections, on the side that answers.

The caller draws the messages of a body from one stream, on all calls at once, and the answering side those of the
reply: whichever connection takes more carries more. Every call ends its part of the body with an empty message.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator

import grpc.aio
from google.protobuf.message import DecodeError

from noloco_p2p.core.line_rate import CONNECTIONS
from noloco_p2p.errors import Violation
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.capped_line import Read, Write

NO_MORE = b""
"""The part of a call is over."""


def to_stripe(number: int) -> bytes:
    """The first message of a call that carries part of the body whose header had this number."""
    return pb.ActivationMessage(stripe=number).SerializeToString()


def from_stripe(raw: bytes) -> int:
    """The number that such a call begins with. Raises Violation."""
    try:
        return pb.ActivationMessage.FromString(raw).stripe
    except DecodeError:
        raise Violation("a call that carries part of a body says of which one") from None


class Stripes:
    """The calls that carry parts of one activation, and of its reply, beside the call that announced it."""

    def __init__(self) -> None:
        self._writes: list[Write] = []
        """Of those that there are now."""
        self._take: Callable[[bytes], bool] | None = None
        self._whole = asyncio.Event()
        """All of the body is there, or something that breaks the protocol."""
        self._broken: Violation | None = None
        self._over = asyncio.Event()

    def expect(self, take: Callable[[bytes], bool]) -> None:
        """The body may come now: `take` gets every message of it, and says whether all of it is there."""
        self._take = take

    def take(self, message: bytes) -> None:
        """A message of the body has come on one of the calls. Raises Violation."""
        assert self._take is not None
        if self._take(message):
            self._whole.set()

    async def body(self) -> None:
        """Wait until all of the body is there. Raises Violation: what has come on another call is none of it."""
        await self._whole.wait()
        if self._broken is not None:
            raise self._broken

    async def carry(self, write: Write, read: Read) -> bool:
        """Take what comes on a further call, and keep that for the reply until it is sent; False: it is not wanted."""
        if self._take is None or len(self._writes) + 1 >= CONNECTIONS:
            return False
        self._writes.append(write)
        try:
            while (message := await read()) is not grpc.aio.EOF and message != NO_MORE:
                self.take(message)
            await self._over.wait()
            return True
        except Violation as error:
            self._broken = error
            self._whole.set()
            return False
        finally:
            self._writes.remove(write)

    async def reply(self, messages: Iterable[bytes], write: Write) -> None:
        """Send a reply: its first message by `write`, the others on all calls. Raises what one of them does."""
        stream = iter(messages)
        await write(next(stream))
        tasks = [asyncio.create_task(_carry(stream, one)) for one in (write, *self._writes)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def end(self) -> None:
        """The call that announced it is over, and with it these."""
        self._over.set()


async def _carry(messages: Iterator[bytes], write: Write) -> None:
    for message in messages:
        await write(message)
