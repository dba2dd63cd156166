"""The body of an activation that a peer sends, received when the node's handler asks for it."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from noloco_p2p.core import wire
from noloco_p2p.core.messages import Activation, Header
from noloco_p2p.errors import Unreachable, Violation
from noloco_p2p.io.transport import message_codec
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.capped_line import Read
from noloco_p2p.io.transport.frame_codec import unpacked
from noloco_p2p.io.transport.slow_transfers import Patience
from noloco_p2p.io.transport.stripes import NO_MORE, Stripes

CANCEL_GRACE_S = 0.5
"""How long a stream that ended too early may wait for its cancellation, seconds: a cancelled call first looks like a
finished stream."""


@dataclass(eq=False)
class IncomingActivation:
    """The body of one incoming activation: implements `ports.Body`."""

    header: Header
    _first: list[wire.Frame] | None
    """The frames that came with the header."""
    _count: Callable[..., None]
    """Records a `bytes` event for what has been received."""
    _read: Read
    """Returns the next message."""
    _ask: Callable[[], Awaitable[object]]
    """Asks the caller for the body."""
    _patience: Patience
    _in_transit: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    """Entered before the body is asked for, and left once it is here."""
    received: int = 0
    complete: bool = False
    """The whole body has been received."""
    stripes: Stripes | None = None
    """Further calls that may carry parts of it."""
    reply_soon: Callable[[], None] = lambda: None
    """See `ports.Body`."""

    def __post_init__(self) -> None:
        self.whole = bool(self._first)
        """The body came in one message with its header, and the reply must also be one message."""

    async def __call__(self) -> Activation:
        """See `ports.Body`."""
        size = sum(spec.nbytes for spec in self.header.specs)
        stripes = self.stripes
        assembler = message_codec.assembler(self.header.specs)
        frames, self._first = self._first, None
        message: Any = grpc.aio.EOF if frames is None else None
        coming = AsyncExitStack()

        def take(message: bytes) -> bool:
            self.received += len(message)
            message_codec.feed(assembler, unpacked(message, pb.ActivationMessage)[1])
            return assembler.complete

        try:
            if stripes is not None:
                stripes.expect(take)
            if frames == []:
                await coming.enter_async_context(self._in_transit())
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
            # gRPC can neither write nor read: the call has ended, or the server has stopped.
            raise Unreachable("the caller disconnected before its body arrived") from None
        finally:
            assembler.discard()
            await coming.aclose()
        self.complete = True
        self._count(direction="in", kind="activation", bytes=size)
        return activation


async def _unbroken(write: Awaitable[object]) -> None:
    """Await a write, and let it finish even if this task is cancelled, unless that takes longer than CANCEL_GRACE_S.
    gRPC cannot end a call on which a write was broken off, so its caller would receive nothing."""
    writing = asyncio.ensure_future(write)
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing], timeout=CANCEL_GRACE_S)
        if not writing.cancel():
            writing.exception()
        raise
