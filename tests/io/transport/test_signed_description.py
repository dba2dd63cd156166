"""What a node says of itself is believed only with its own signature, made for this very question."""

from dataclasses import replace
from pathlib import Path

import pytest
from transport_fixture import RUN

from noloco_p2p.core.messages import NodeDescription
from noloco_p2p.errors import Declined, Violation
from noloco_p2p.io.dht.identity import Identity
from noloco_p2p.io.transport import message_codec
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.peer_links import OpenLinks
from noloco_p2p.io.transport.signed_description import checked, question, signature

Pair = tuple[OpenLinks, OpenLinks]


@pytest.fixture
def two(tmp_path: Path) -> Pair:
    one, other = Identity.open(tmp_path / "a.key"), Identity.open(tmp_path / "b.key")
    return OpenLinks(one.peer_id, RUN, one.sign), OpenLinks(other.peer_id, RUN, other.sign)


def answered(request: pb.DescribeRequest, said: NodeDescription, by: OpenLinks) -> pb.DescribeReply:
    told = pb.Description(
        stage=said.stage, state=said.state, step=said.step, outer_round=said.outer_round, version=said.version
    )
    signed = signature(request, said, by)
    return pb.DescribeReply(peer_id=said.peer_id, run_id=said.run_id, description=told, signature=signed)


def test_an_answer_counts_once_for_the_question_and_from_its_signer_only(two: Pair) -> None:
    me, peer = two
    said = NodeDescription(peer.me, RUN, 1, "training", 7.1, 3, "0.1")
    request = question()
    reply = answered(request, said, peer)
    assert checked(reply, request, peer.me, me) == said
    with pytest.raises(Violation, match="did not sign"):
        checked(reply, question(), peer.me, me)
    with pytest.raises(Violation, match="another node"):
        checked(reply, request, me.me, me)
    with pytest.raises(Violation, match="another node"):
        checked(reply, request, peer.me, OpenLinks(me.me, "run-2"))
    with pytest.raises(Violation, match="did not sign"):
        checked(answered(request, said, me), request, peer.me, me)
    for changed in (replace(said, stage=2), replace(said, step=8.1), replace(said, state="finished")):
        forged = answered(request, changed, peer)
        forged.signature = reply.signature
        with pytest.raises(Violation, match="did not sign"):
            checked(forged, request, peer.me, me)


def test_a_clock_that_is_no_number_and_a_refusal_are_no_answer(two: Pair) -> None:
    me, peer = two
    request = question()
    for step, round in ((float("nan"), 1), (float("inf"), 1), (1.0, 2**63)):
        reply = answered(request, NodeDescription(peer.me, RUN, 1, "training", step, round, "0.1"), peer)
        with pytest.raises(Violation, match="makes no sense"):
            checked(reply, request, peer.me, me)
    refused = pb.DescribeReply(peer_id=peer.me, run_id=RUN)
    refused.refusal.CopyFrom(message_codec.to_refusal(Declined("not now")))
    with pytest.raises(Declined):
        checked(refused, request, peer.me, me)


@pytest.mark.parametrize("length", [1, 31, 33, 1 << 20])
def test_a_nonce_has_one_length(two: Pair, length: int) -> None:
    said = NodeDescription(two[0].me, RUN, 1, "training", 1.0, 1, "0.1")
    with pytest.raises(Violation, match="32 bytes"):
        signature(pb.DescribeRequest(nonce=bytes(length)), said, two[0])
    assert signature(pb.DescribeRequest(), said, two[0]) == b""
