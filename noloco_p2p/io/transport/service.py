"""The gRPC server: binds the port, and maps each call of proto/noloco.proto to the method that answers it."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from noloco_p2p.config import ListenSettings
from noloco_p2p.core.messages import Header, PeerId
from noloco_p2p.errors import Busy, LocalError, Unreachable, Violation
from noloco_p2p.io.dht.reach import joined
from noloco_p2p.io.transport import message_codec
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.callers import CALLS, MAX_CALLS, Caller, connection_of
from noloco_p2p.io.transport.channels import KEEPALIVE, KEEPALIVE_MS
from noloco_p2p.io.transport.connection_limit import room
from noloco_p2p.io.transport.peer_links import Links
from noloco_p2p.io.transport.servicer import GrpcServicer, ReplyParts
from noloco_p2p.io.transport.slow_transfers import Patience, read_request
from noloco_p2p.ports import Body, Handler

Answer = Callable[[Caller, Any, ExitStack], Awaitable[None]]
"""Answers a call, given its caller and context; the stack releases what the call holds of this node."""
Method = Callable[[Caller, Any, Any], Awaitable[Message]]
"""Makes the reply to a single request, from its caller, the request and the context."""
LONGEST_QUESTION = 160 * MAX_CALLS
"""Most bytes of a Progress or Describe request: the ids of as many microbatches as a node serves."""
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),
    *KEEPALIVE,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    # Calls may be silent for minutes, so never close a connection for too many pings.
    ("grpc.http2.max_ping_strikes", 0),
    # With a shorter limit, clients that never finish their handshake would only reconnect more often. Peers close
    # connections that have been idle for two minutes.
    ("grpc.server_handshake_timeout_ms", 30_000),
    ("grpc.max_connection_idle_ms", 180_000),
)
"""Options of the server."""


def methods(servicer: GrpcServicer) -> Any:
    """The service's method handlers, for a gRPC server. Messages with tensor bytes are passed as raw bytes.

    All methods are streams: for a unary one gRPC itself would wait indefinitely for a request that never comes, or for
    a caller that does not read the response.
    """
    serve, asked = partial(partial, servicer.serve_activation), partial(partial, _asked)
    answers: dict[str, Answer] = {
        "Propagate": serve(_propagate),
        "Evaluate": serve(_evaluate),
        "Stripe": servicer.stripe,
        "FetchSnapshot": servicer.fetch_snapshot,
        "FetchState": servicer.fetch_state,
        "Warm": asked(servicer.warm, pb.Filler),
        "Progress": asked(servicer.progress, pb.ProgressRequest),
        "Describe": asked(servicer.describe, pb.DescribeRequest),
    }
    handlers = {
        name: grpc.stream_stream_rpc_method_handler(_bounded(servicer, answer)) for name, answer in answers.items()
    }
    return grpc.method_handlers_generic_handler("noloco.v1.Node", handlers)


def bound(
    servicer: GrpcServicer, links: Links, listen: ListenSettings, options: tuple[tuple[str, int], ...]
) -> tuple[Any, int]:
    """A gRPC server that is bound but not started, and its port. Raises LocalError if the port is in use."""
    bounds = ("grpc.max_allowed_incoming_connections", room() * 3 // 2), *options
    server = grpc.aio.server(options=(*OPTIONS, *bounds), maximum_concurrent_rpcs=MAX_CALLS)
    server.add_generic_rpc_handlers((methods(servicer),))
    host, port = listen.host, listen.grpc_port
    try:
        return server, links.add_port(server, joined(host, port))
    except RuntimeError:
        raise LocalError(
            f"cannot listen on {host} port {port}: it is in use, or {host} is not an address of this machine;"
            " set listen.grpc_port to another port (0 picks a free one)"
        ) from None


def _bounded(servicer: GrpcServicer, method: Answer) -> Callable[[Any, Any], Awaitable[None]]:
    """Wraps a method: passes it the caller, limits how many calls one caller may have in progress, and ends a call
    whose caller no longer belongs to the run."""

    async def answer(_: Any, context: Any) -> None:
        async def unless_cut(held: ExitStack) -> None:
            try:
                async with servicer.links.called(context):
                    await method(caller, context, held)
            except Unreachable as error:
                await servicer.callers.give_up(context, error.with_traceback(None))

        try:
            caller = Caller.of(context, servicer.links.own())
            with servicer.callers.holding(CALLS, caller):
                await servicer.callers.until_over(connection_of(context), unless_cut)
        except asyncio.CancelledError as error:
            # Through its frames, the task would keep what was to be sent until the next garbage collection.
            raise error.with_traceback(None) from None
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request cannot be read")
        except Busy as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except Violation as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))

    return answer


async def _asked(method: Method, kind: type[Message], caller: Caller, context: Any, held: ExitStack) -> None:
    """Answer one request message with one reply message."""
    reply = await method(caller, kind.FromString(await read_request(context, LONGEST_QUESTION)), context)
    with suppress(grpc.aio.InternalError):  # The caller has disconnected.
        await Patience().writing(context.write)(reply.SerializeToString())


async def _propagate(handler: Handler, caller: PeerId, header: Header, body: Body) -> ReplyParts:
    gradient = await handler.propagate(caller, header, body)
    return partial(message_codec.to_gradient, gradient), "gradient", gradient.grad.data.nbytes


async def _evaluate(handler: Handler, caller: PeerId, header: Header, body: Body) -> ReplyParts:
    reply = message_codec.to_loss(await handler.evaluate(caller, header, body))
    return lambda _: [reply], "control", len(reply)
