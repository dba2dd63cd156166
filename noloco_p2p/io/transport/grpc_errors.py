"""Translates the errors and cancellations of gRPC to ours. This is the only place that does so for calls to peers."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import Busy, Declined, PeerError, Unreachable, Violation
from noloco_p2p.humanize import plain
from noloco_p2p.io.transport import message_codec


@contextmanager
def translated_errors(peer: PeerId, what: str, seconds: float, give_up_at: float) -> Iterator[None]:
    """Raises our errors for gRPC's inside the context, which waits for `what` from the peer until `give_up_at`."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INTERNAL and asyncio.get_running_loop().time() >= give_up_at - 0.01:
            # The deadline made a pending write fail, and gRPC reports that failure instead.
            raise Unreachable(f"no {what} from {peer} within {seconds:g} s") from None
        raise _translated(error, peer, what, seconds) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # gRPC cancelled the call, but nobody cancelled this task: the connection was closed during the call.
        raise Unreachable(f"the call to {peer} ended while it was waiting for a {what}") from None
    except DecodeError:
        raise Violation(f"the {what} from {peer} cannot be read") from None
    except (asyncio.InvalidStateError, grpc.aio.UsageError):
        raise Unreachable(f"the connection to {peer} was closed before the {what} arrived") from None


def _translated(error: grpc.aio.AioRpcError, peer: PeerId, what: str, seconds: float) -> PeerError:
    """Our error for a gRPC status."""
    code, details = error.code(), plain(error.details() or "", message_codec.MESSAGE_CHARACTERS)
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
