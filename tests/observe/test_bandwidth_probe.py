"""The probe of links: round trips, and the bandwidth measured with a snapshot, complete or cut off."""

import pytest
from link_fixture import Proxy
from transport_fixture import NamedLinks, Node, advert, echo, hang, pair, run, tensor

from noloco_p2p.core.messages import HostTensor
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.errors import Declined, Unreachable
from noloco_p2p.observe import bandwidth_probe
from noloco_p2p.observe.bandwidth_probe import LinkProbe

BYTES = 4 << 20
SNAPSHOT = Snapshot("B", 4, 40, (tensor("slow/a", "uint8", (BYTES,)),))
BIG = Snapshot(
    "B", 4, 40, tuple(HostTensor(f"slow/{i}", "uint8", (BYTES,), memoryview(bytes(BYTES))) for i in range(8))
)


async def give(request: SnapshotRequest) -> Snapshot:
    assert (request.round, request.wait_s, request.weights) == (None, 0.0, "float32"), (
        "the probe asks for the newest weights, without waiting"
    )
    return SNAPSHOT


async def give_big(request: SnapshotRequest) -> Snapshot:
    return BIG


def test_a_complete_snapshot_is_measured_by_its_bytes_and_time() -> None:
    async def scenario() -> None:
        async with pair(Node(echo, give)) as both:
            probe = LinkProbe(NamedLinks("A"))
            try:
                assert 0 < await probe.round_trip_s(both.peer, 5) < bandwidth_probe.ANSWER_S
                found = await probe.transfer(both.peer, 20.0)
            finally:
                await probe.close()
        assert found.whole
        assert BYTES < found.bytes < 1.01 * BYTES
        assert found.bytes_per_s == pytest.approx(found.bytes / found.seconds)

    run(scenario())


def test_a_link_that_falls_silent_is_measured_by_the_bytes_before() -> None:
    async def scenario() -> None:
        async with pair(Node(hang, give_big)) as both, Proxy(both.b.port, (BYTES, "swallow")) as link:
            probe = LinkProbe(NamedLinks("A"))
            try:
                found = await probe.transfer(link.peer, 1.0)
            finally:
                await probe.close()
        assert not found.whole
        assert 0 < found.bytes <= BYTES + (64 << 10)

    run(scenario())


def test_a_peer_without_a_snapshot_and_an_absent_peer_are_reported() -> None:
    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            probe = LinkProbe(NamedLinks("A"))
            try:
                with pytest.raises(Declined, match="no snapshots here"):
                    await probe.transfer(both.peer, 1.0)
                with pytest.raises(Unreachable, match="nothing accepts connections"):
                    await probe.round_trip_s(advert("127.0.0.1:1"), 3)
            finally:
                await probe.close()

    run(scenario())
