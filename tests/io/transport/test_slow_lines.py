"""Lines so slow that a message of 1 MiB would take longer than the silence after which a peer counts as gone."""

import asyncio
from dataclasses import replace

import pytest
from link_fixture import Proxy
from transport_fixture import Node, activation, echo, hang, pair, run, tensor

from noloco_p2p.config import LimitSettings
from noloco_p2p.core.line_cap import BYTES_PER_MBIT
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.io.transport import grpc_transport, slow_transfers
from noloco_p2p.io.transport.grpc_transport import GrpcTransport
from noloco_p2p.io.transport.sockets import AckedBytes
from noloco_p2p.ports import ALONE

SLOW_BYTES_PER_S = 500_000


def measured(monkeypatch: pytest.MonkeyPatch, *transports: GrpcTransport) -> None:
    """Both have measured their line. (They would also count the bytes that the relay in this process passes on.)"""
    monkeypatch.setattr(AckedBytes, "follow", lambda acked, now: None)
    for one in transports:
        one.line.up.counted(SLOW_BYTES_PER_S, 1.0, asyncio.get_running_loop().time())


def test_weights_come_over_a_line_that_carries_a_mebibyte_in_longer_than_a_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_transport, "SILENCE_S", 1.2)
    weights = (tensor("slow/a", "float32", (1 << 19,)),)

    async def give(request: SnapshotRequest) -> Snapshot:
        return Snapshot("B", 4, 40, weights)

    async def scenario() -> None:
        async with pair(Node(hang, give)) as both, Proxy(both.b.port, bytes_per_s=SLOW_BYTES_PER_S) as proxy:
            measured(monkeypatch, both.b)
            fetched = await both.a.fetch_snapshot(
                proxy.peer, SnapshotRequest(1, 4, 0.0), 60.0, tuple(one.spec for one in weights)
            )
            assert [one.data for one in fetched.tensors] == [one.data for one in weights]

    run(scenario())


def test_bodies_that_share_a_slow_line_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of 1 MiB of each would take longer than any of them may fall silent."""
    monkeypatch.setattr(slow_transfers, "RESERVE_S", 1.5)

    async def scenario() -> None:
        async with pair(Node(echo)) as both, Proxy(both.b.port, bytes_per_s=SLOW_BYTES_PER_S) as proxy:
            measured(monkeypatch, both.a, both.b)
            sent = [activation((2, 128, 1024), counter=number) for number in range(4)]
            replies = await asyncio.gather(
                *(both.a.propagate(proxy.peer, one, replace(ALONE, asked=True)) for one in sent)
            )
            assert [reply.grad.data for reply in replies] == [one.hidden.data for one in sent]

    run(scenario())


@pytest.mark.parametrize("direction", ["upload", "download"])
def test_a_line_is_not_measured_to_be_faster_than_its_cap(direction: str) -> None:
    """Other nodes send it its share by this rate (`weighted`)."""
    cap = 40

    async def scenario() -> None:
        limits = LimitSettings.model_validate({f"{direction}_mbit_per_s": cap})
        async with pair(Node(echo), limits=limits) as both:
            for number in range(2):
                await both.a.propagate(both.peer, activation((4, 128, 1024), counter=number))
            line = both.a.line.up if direction == "upload" else both.a.line.down
            assert line.bytes_per_s is not None
            assert 0.5 * cap * BYTES_PER_MBIT <= line.bytes_per_s <= cap * BYTES_PER_MBIT

    run(scenario())
