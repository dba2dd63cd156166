"""The service of proto/noloco.proto: which method answers which call."""

from functools import partial
from typing import Any

import grpc

from noloco_p2p.core.messages import Header, PeerId
from noloco_p2p.io.transport import message_codec
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.servicer import GrpcServicer, ReplyParts
from noloco_p2p.ports import Body, Handler


def methods(servicer: GrpcServicer) -> Any:
    """The service, for a gRPC server. Messages with tensor bytes are taken and given as they travel."""
    # gRPC looks through `partial` to see that the function is a coroutine's; through a method it would not.
    serve_activation = partial(partial, GrpcServicer.serve_activation, servicer)
    return grpc.method_handlers_generic_handler(
        "noloco.v1.Node",
        {
            "Propagate": grpc.stream_stream_rpc_method_handler(serve_activation(_propagate)),
            "Evaluate": grpc.stream_stream_rpc_method_handler(serve_activation(_evaluate)),
            "Stripe": grpc.stream_stream_rpc_method_handler(servicer.stripe),
            "FetchSnapshot": grpc.unary_stream_rpc_method_handler(
                servicer.fetch_snapshot, request_deserializer=pb.SnapshotRequest.FromString
            ),
            "FetchState": grpc.unary_stream_rpc_method_handler(
                servicer.fetch_state, request_deserializer=pb.StateRequest.FromString
            ),
            "Progress": grpc.unary_unary_rpc_method_handler(
                servicer.progress,
                request_deserializer=pb.ProgressRequest.FromString,
                response_serializer=pb.ProgressReply.SerializeToString,
            ),
            "Describe": grpc.unary_unary_rpc_method_handler(
                servicer.describe,
                request_deserializer=pb.DescribeRequest.FromString,
                response_serializer=pb.DescribeReply.SerializeToString,
            ),
        },
    )


async def _propagate(handler: Handler, caller: PeerId, header: Header, body: Body) -> ReplyParts:
    gradient = await handler.propagate(caller, header, body)
    return partial(message_codec.to_gradient, gradient), "gradient", gradient.grad.data.nbytes


async def _evaluate(handler: Handler, caller: PeerId, header: Header, body: Body) -> ReplyParts:
    reply = message_codec.to_loss(await handler.evaluate(caller, header, body))
    return lambda _: [reply], "control", len(reply)
