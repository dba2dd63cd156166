"""A node's description of itself, signed by its identity for whoever asks: an answer that only it can give, and only
now (ARCHITECTURE.md, "What a stranger can do")."""

import json
import secrets
from dataclasses import astuple

from noloco_p2p.core.messages import NodeDescription, PeerId
from noloco_p2p.errors import Violation
from noloco_p2p.io.transport import message_codec
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.peer_links import Links

NONCE_BYTES = 32


def question() -> pb.DescribeRequest:
    """Asks with a fresh nonce."""
    return pb.DescribeRequest(nonce=secrets.token_bytes(NONCE_BYTES))


def signature(request: pb.DescribeRequest, said: NodeDescription, links: Links) -> bytes:
    """What goes with the answer; nothing when no nonce was sent. Raises Violation for a nonce of another length."""
    if len(request.nonce) not in (0, NONCE_BYTES):
        raise Violation(f"a nonce has {NONCE_BYTES} bytes")
    return links.sign(_signed(request.nonce, said)) if request.nonce else b""


def checked(reply: pb.DescribeReply, request: pb.DescribeRequest, peer_id: PeerId, links: Links) -> NodeDescription:
    """What a peer answered. Raises what its refusal means, Violation unless the peer has signed it for `request`."""
    said = message_codec.from_description(reply)
    if (said.peer_id, said.run_id) != (peer_id, links.run_id):
        raise Violation(f"another node or run answers for {peer_id}")
    if not links.verify(peer_id, _signed(request.nonce, said), reply.signature):
        raise Violation(f"{peer_id} did not sign its description")
    return said


def _signed(nonce: bytes, said: NodeDescription) -> bytes:
    return b"noloco description 1\x00" + json.dumps([nonce.hex(), *astuple(said)]).encode()
