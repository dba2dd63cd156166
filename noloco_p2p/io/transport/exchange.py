"""How the messages of one call are written and read."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import grpc.aio

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import Busy, Unreachable, Violation
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.capped_line import Read, Write
from noloco_p2p.io.transport.frame_codec import unpacked
from noloco_p2p.ports import Claim

T = TypeVar("T")


def to_grant(message_bytes: int) -> bytes:
    """The body may come, if possible in messages of at most so many tensor bytes; 0: of any size."""
    return pb.Reply(grant=pb.Grant(message_bytes=message_bytes)).SerializeToString()


LONGEST_GRANT_BYTES = len(to_grant(2**32 - 1))


def from_grant(raw: bytes) -> int | None:
    """What `to_grant` was given; None: the reply is no grant. Raises Violation: broken bytes."""
    reply = unpacked(raw, pb.Reply)[0] if len(raw) <= LONGEST_GRANT_BYTES else pb.Reply()
    return reply.grant.message_bytes if reply.HasField("grant") else None


async def send_when_granted(
    call: Any,
    sent: tuple[bytes, Callable[[int], Iterator[bytes]]],
    turn: AbstractAsyncContextManager[None],
    claim: Claim,
    feed: Callable[[bytes], T | None],
    ways: tuple[Write, Read],
) -> T:
    """The header, and in its `turn` the body once the peer has granted it a place, while the reply is read.

    `sent` is the header, and what gives the messages of the body, as long as the peer would like them (0: of any size).
    `ways` write and read the messages of `call`.
    When the reply is whole, or a refusal, what was still to send is not sent. A peer that replies early does not read
    on before its reply is out, so flow control bounds what is sent in vain.
    """

    header, body = sent
    write, read = ways

    async def write_body(message_bytes: int) -> None:
        async with turn:
            for message in body(message_bytes):
                await write(message)
        claim.left()

    writing: asyncio.Task[None] | None = None
    try:
        await write(header)
        result = None
        while result is None:
            message = _some(await read())
            if writing is None and (message_bytes := from_grant(message)) is not None:
                if not claim.take():
                    raise Busy("another replica has granted a place first")
                writing = asyncio.create_task(write_body(message_bytes))
            else:
                result = feed(message)
        return result
    finally:
        call.cancel()
        if writing is not None:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)


async def next_message(call: Any, what: str, peer: PeerId, seconds: float) -> bytes:
    """The next message of a stream. Raises Unreachable after `seconds`, Violation at the end of the stream."""
    try:
        async with asyncio.timeout(seconds):
            message: bytes = _some(await call.read())
            return message
    except TimeoutError:
        raise Unreachable(f"nothing more of a {what} came from {peer} for {seconds:g} s") from None


def _some(message: T) -> T:
    """The message, unless the stream is over. Raises Violation: the caller is still waiting for the rest."""
    if message is grpc.aio.EOF:
        raise Violation("the reply ended early")
    return message
