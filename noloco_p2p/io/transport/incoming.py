"""The body of an activation that a peer sends, as the handler that serves it takes it in."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from noloco_p2p.core import wire
from noloco_p2p.core.messages import Activation, Header
from noloco_p2p.errors import Unreachable, Violation
from noloco_p2p.io.transport import message_codec
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.callers import Patience
from noloco_p2p.io.transport.capped_line import Read
from noloco_p2p.io.transport.frame_codec import unpacked
from noloco_p2p.io.transport.stripes import NO_MORE, Stripes

CANCEL_GRACE_S = 0.5
"""A cancelled call first looks like a finished stream; its cancellation gets this long to arrive."""


@dataclass(eq=False)
class IncomingActivation:
    """The body of one activation, on its way in: a `ports.Body`."""

    header: Header
    _first: list[wire.Frame] | None
    """The frames that came with the header."""
    _count: Callable[..., None]
    """Gets what has been received, as `bytes` events."""
    _read: Read
    """Gives the next message."""
    _ask: Callable[[], Awaitable[object]]
    """Asks for the body."""
    _patience: Patience
    received: int = 0
    complete: bool = False
    """All of it has been received."""
    stripes: Stripes | None = None
    """Other calls that may bring some of it."""
    reply_soon: Callable[[], None] = lambda: None
    """See `ports.Body`."""

    def __post_init__(self) -> None:
        self.whole = bool(self._first)
        """It came with its header, and its reply is to be one message."""

    async def __call__(self) -> Activation:
        """See `ports.Body`."""
        size = sum(spec.nbytes for spec in self.header.specs)
        stripes = self.stripes
        assembler = message_codec.assembler(self.header.specs)
        frames, self._first = self._first, None
        message: Any = grpc.aio.EOF if frames is None else None

        def take(message: bytes) -> bool:
            self.received += len(message)
            message_codec.feed(assembler, unpacked(message, pb.ActivationMessage)[1])
            return assembler.complete

        try:
            if stripes is not None:
                stripes.expect(take)
            if frames == []:
                await _unbroken(self._ask())
            message_codec.feed(assembler, frames or ())
            frames = None  # frees the bytes of the first message
            while message is not grpc.aio.EOF and not (assembler.complete if stripes is None else message == NO_MORE):
                message = await self._read()
                if message is not grpc.aio.EOF:
                    (take if stripes is None else stripes.take)(message)
            if stripes is not None and message is not grpc.aio.EOF:
                await stripes.body(self._patience)
            activation = Activation(self.header, *assembler.finish(self.header.digest))
        except Violation:
            if message is grpc.aio.EOF:
                await asyncio.sleep(CANCEL_GRACE_S)
            raise
        except grpc.aio.BaseError:
            # gRPC can neither write nor read: the call is over, or the server.
            raise Unreachable("the caller was gone before its body arrived") from None
        finally:
            assembler.discard()
        self.complete = True
        self._count(direction="in", kind="activation", bytes=size)
        return activation


async def _unbroken(write: Awaitable[object]) -> None:
    """Await a write that a cancellation does not break off, unless it takes long: gRPC ends no call after that, and the
    caller would hear nothing."""
    writing = asyncio.ensure_future(write)
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing], timeout=CANCEL_GRACE_S)
        if not writing.cancel():
            writing.exception()
        raise
