"""The calls of one node to another as generated code would make them, without the transport's own code."""

from typing import Any

from google.protobuf.message_factory import GetMessageClass

from noloco_p2p.io.transport import noloco_pb2 as pb


class NodeStub:
    """The methods of the service `Node` in proto/noloco.proto, over a channel of gRPC."""

    def __init__(self, channel: Any) -> None:
        service = pb.DESCRIPTOR.services_by_name["Node"]
        for method in service.methods:
            kinds = ("stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming))
            call = getattr(channel, "_".join(kinds))(
                f"/{service.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the service Node has no method {name}")
