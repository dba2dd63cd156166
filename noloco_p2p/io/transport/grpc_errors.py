"""Translates the errors and cancellations of gRPC to ours. This is the only place that does so for calls to peers."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio
from google.protobuf.message import DecodeError

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import Busy, Declined, PeerError, Unreachable, Violation
from noloco_p2p.humanize import plain
from noloco_p2p.io.transport import message_codec

CAUGHT = grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError, asyncio.InvalidStateError, DecodeError
"""What a call to a peer raises."""


@contextmanager
def translated_errors(peer: PeerId, what: str, seconds: float, give_up_at: float) -> Iterator[None]:
    """Raises our errors for gRPC's inside the context, which waits for `what` from the peer until `give_up_at`."""
    try:
        yield
    except CAUGHT as error:
        if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling():
            raise
        # From Python 3.12 on the traceback leads to the frames that handle the error, and such a cycle would keep the
        # call and its connection alive.
        error.__traceback__ = None
        raise _translated(error, peer, what, seconds, give_up_at) from None


def _translated(error: BaseException, peer: PeerId, what: str, seconds: float, give_up_at: float) -> PeerError:
    """Our error for one of CAUGHT."""
    if isinstance(error, asyncio.CancelledError):
        # gRPC cancelled the call, but nobody cancelled this task: the connection was closed during the call.
        return Unreachable(f"the call to {peer} ended while it was waiting for a {what}")
    if isinstance(error, DecodeError):
        return Violation(f"the {what} from {peer} cannot be read")
    if not isinstance(error, grpc.aio.AioRpcError):
        return Unreachable(f"the connection to {peer} was closed before the {what} arrived")
    code, details = error.code(), plain(error.details() or "", message_codec.MESSAGE_CHARACTERS)
    if code is grpc.StatusCode.INTERNAL and asyncio.get_running_loop().time() >= give_up_at - 0.01:
        # The deadline made a pending write fail, and gRPC reports that failure instead.
        code = grpc.StatusCode.DEADLINE_EXCEEDED
    match code:
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unreachable(f"no {what} from {peer} within {seconds:g} s")
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in details or "metadata size exceeds" in details:
            return Violation(f"{peer}: {details}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Busy(f"{peer} has too many calls in flight")
        case grpc.StatusCode.ABORTED:
            return Declined(f"{peer}: {details}")
        case grpc.StatusCode.UNKNOWN | grpc.StatusCode.UNIMPLEMENTED:
            return Declined(f"{peer} failed to serve the call: {details}")
        case _:
            return Unreachable(f"{peer} was lost while waiting for a {what}: {details}")
