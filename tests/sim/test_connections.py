"""Messages without tensors cost bytes and time, and wait for the data in the sockets; connections start slowly."""

import asyncio
from dataclasses import replace

import pytest
from barriers import barrier
from sim_transport_fixture import CALLEE, ID, LATENCY_S, SNAPSHOT_SPECS, Serving, activation, gradient, now, play

from noloco_p2p.core import wire
from noloco_p2p.core.line_rate import CONNECTIONS, UNSENT_S
from noloco_p2p.core.messages import (
    Activation,
    Advert,
    Gradient,
    Header,
    Holding,
    HostTensor,
    MicrobatchId,
    Origin,
    Progress,
)
from noloco_p2p.core.snapshots import SnapshotRequest
from noloco_p2p.errors import Busy
from noloco_p2p.io.dht.adverts import AdvertRecord, encode
from noloco_p2p.io.dht.identity import SIGNATURE_BYTES
from noloco_p2p.io.transport import message_codec
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.ports import Body
from noloco_p2p.sim.directory import COPIES, Registry, SimDirectory
from noloco_p2p.sim.links import FIRST_WINDOW_BYTES, MEASURED, Access, ControlSizes, Geography, Link, MessageSizes
from noloco_p2p.sim.network import Network
from noloco_p2p.sim.payloads import ByteCounts, Payload
from noloco_p2p.sim.transport import SimTransport
from noloco_p2p.sim.virtual_time import run

MIB = 1 << 20
SIZES = MessageSizes(1000, 400, (300, 600), (150, 300), (900, 1800))
CONTROL = ControlSizes(request=10, answer=5, header=40, word=3, question=4, report=2, advert=100)
RATE = 100.0


async def with_body(body: Body) -> Gradient:
    await body()
    return gradient()


async def busy(body: Body) -> Gradient:
    raise Busy("full")


def controlled(network: Network) -> tuple[ByteCounts, ByteCounts]:
    """The control bytes of the caller and the callee."""
    return network.traffic.byte_counts()["a"]["control"], network.traffic.byte_counts()["b"]["control"]


def test_simulated_messages_have_the_sizes_of_real_ones() -> None:
    """Ids have the length of real ones, and numbers the length that they have after a day."""
    peer, run_id = "12D3KooW" + "x" * 44, "f" * 64
    microbatch = MicrobatchId(peer, 2**63 + 1, 1_000_000)
    hidden = HostTensor("hidden", "bfloat16", (8, 1024, 1024), memoryview(bytes(16 * MIB)))
    targets = HostTensor("targets", "int32", (8, 1024), memoryview(bytes(32 * 1024)))
    header = Header(run_id, microbatch, Origin(peer, 50_000, 31), 3, 123.4)
    first = next(message_codec.to_activation(Activation(header, hidden, targets), head_alone=True))
    question = pb.ProgressRequest(microbatches=[pb.MicrobatchId(**microbatch._asdict())])
    report = message_codec.to_progress([Progress(wire.REPLYING + 5_000_000, 1.5)])
    advert = Advert(peer, run_id, 1, ("203.0.113.17:29500",), "203.0.113.17:29502", "", "training", 1234.5, 60)
    advert = replace(
        advert,
        microbatches_per_s=1.234567,
        capacity_per_s=1.234567,
        steps_per_s=0.0123456,
        holds=(Holding(1, 60, 1200),) * 2,
    )
    libp2p = f"/ip4/203.0.113.17/tcp/29501/p2p/{peer}"
    payload = encode(AdvertRecord(advert, 1_700_000_000.123456, (libp2p,)))
    key_and_expiry = len(peer) + 20
    assert len(first) == pytest.approx(MEASURED.header, rel=0.2)
    assert question.ByteSize() == pytest.approx(MEASURED.question, rel=0.2)
    assert report.ByteSize() == pytest.approx(MEASURED.report, rel=0.5)
    refusal = message_codec.to_refusal(Busy("s1r0 is busy: the line is full"))
    assert pb.Reply(refusal=refusal).ByteSize() < MEASURED.answer
    assert SIGNATURE_BYTES + len(payload) + key_and_expiry == pytest.approx(MEASURED.advert, rel=0.2)


def use_sizes(network: Network, sizes: MessageSizes) -> None:
    network.sizes, network.control = sizes, sizes.control


def test_a_call_costs_the_bytes_of_its_messages() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        use_sizes(network, replace(SIZES, control=CONTROL))
        await transport.describe(CALLEE)
        assert now() == pytest.approx(2 * LATENCY_S + (10 + 5) / RATE)
        assert controlled(network) == (ByteCounts(sent=10, received=5), ByteCounts(sent=5, received=10))
        began = now()
        await transport.progress(CALLEE, [ID, ID, ID], 9.0)
        assert now() - began == pytest.approx(2 * LATENCY_S + (10 + 3 * 4 + 5 + 3 * 2) / RATE)
        use_sizes(network, replace(SIZES, control=CONTROL, activation_bytes=4 * wire.PACK_BYTES))
        with pytest.raises(Busy):
            await transport.propagate(CALLEE, activation())
        assert network.traffic.byte_counts()["a"]["activation"] == ByteCounts()
        assert network.traffic.byte_counts()["a"]["control"].sent == 10 + 22 + 50

    play(script, busy, Link(LATENCY_S, bytes_per_s=RATE), longest_s=9.0)


def test_the_lost_part_of_a_message_is_counted() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        use_sizes(network, replace(SIZES, control=replace(CONTROL, request=100)))
        asyncio.get_running_loop().call_later(0.25, network.block, barrier("hang", "b"))
        call = asyncio.create_task(transport.describe(CALLEE))
        await asyncio.sleep(0.2)
        assert controlled(network)[0] == ByteCounts(sent=20, in_flight=20)
        await asyncio.sleep(0.2)
        assert controlled(network)[0] == ByteCounts(sent=25, lost=25), "the rest is swallowed and lost"
        call.cancel()

    play(script, with_body, Link(LATENCY_S, bytes_per_s=RATE))


FAST = 4.0 * MIB


@pytest.mark.parametrize(("waiting", "ahead_s"), [(40 * MIB, 0.1 + UNSENT_S), (MIB // 2, 1 / 8)])
def test_on_a_connection_with_bodies_a_message_waits_for_the_data_in_the_sockets(waiting: int, ahead_s: float) -> None:
    """It waits for all of a small body, or for what gRPC and the kernel hold of a large one."""

    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        network.traffic._paths.connection("a", "b")._reached = FAST
        network.traffic._paths.connection("a", "b")._used_at = now()
        network.traffic.depart(Payload("a", "b", "activation", waiting))
        control = replace(CONTROL, request=30_000)
        use_sizes(network, replace(SIZES, control=control, activation_bytes=8, gradient_bytes=0))
        began = now()
        await network.traffic.deliver("a", "b", 30_000)
        line_s = 30_000 / (FAST if waiting < MIB else FAST / 2)
        assert now() - began == pytest.approx(ahead_s + line_s, rel=0.01)

    play(script, with_body, Link(LATENCY_S, bytes_per_s=FAST))


def test_a_request_on_its_own_connection_only_shares_the_line() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        use_sizes(network, replace(SIZES, control=replace(CONTROL, request=30_000, answer=0)))
        network.traffic.depart(Payload("a", "b", "activation", 40 * MIB))
        await asyncio.sleep(3.0)
        began = now()
        await transport.describe(CALLEE)
        assert now() - began == pytest.approx(2 * LATENCY_S + 30_000 / (FAST / 2))

    play(script, with_body, Link(LATENCY_S, bytes_per_s=FAST))


def test_a_message_waiting_for_a_body_is_sent_when_the_body_is_dropped() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        body = Payload("a", "b", "activation", 40 * MIB)
        network.traffic.depart(body)
        asyncio.get_running_loop().call_later(0.05, network.traffic.drop, body)
        await network.traffic.deliver("a", "b", 10)
        assert now() < 1.0

    play(script, with_body, Link(LATENCY_S, bytes_per_s=FAST))


ROUND_TRIP_S = 2 * LATENCY_S


def windows(rest_s: float, *, slow_start_after_idle: bool = True) -> list[float]:
    """Segments that a connection sends in each of its first six round trips, after a body and an idle period."""
    sent: list[float] = []

    async def main() -> None:
        link = Link(LATENCY_S, slow_start_after_idle=slow_start_after_idle)
        network = Network(1, Geography(link, Access(FAST, None)))
        first = Payload("a", "b", "activation", 8 * MIB)
        network.traffic.depart(first)
        await network.traffic.whole(first)
        await asyncio.sleep(rest_s)
        second = Payload("a", "b", "activation", 40 * MIB)
        network.traffic.depart(second)
        before = 0
        for _ in range(6):
            await asyncio.sleep(ROUND_TRIP_S)
            moved = second.moved_bytes(now())
            sent.append((moved - before) / 1460)
            before = moved

    run(main())
    return sent


def test_an_idle_connection_starts_with_ten_segments_and_doubles() -> None:
    full = FAST * ROUND_TRIP_S / 1460
    assert windows(60.0) == pytest.approx([10, 20, 40, 80, 160, 320], rel=1e-3)
    assert windows(0.2) == pytest.approx([full] * 6, rel=1e-3), "idle for less than its timer"


def test_without_slow_start_after_idle_a_connection_keeps_its_speed() -> None:
    full = FAST * ROUND_TRIP_S / 1460
    assert windows(60.0, slow_start_after_idle=False) == pytest.approx([full] * 6, rel=1e-3)


def test_an_idle_window_is_halved_for_each_timeout() -> None:
    timer_s = ROUND_TRIP_S + 0.2
    once, twice, often = windows(1.5 * timer_s), windows(2.5 * timer_s), windows(9.5 * timer_s)
    full = FAST * ROUND_TRIP_S / 1460
    assert once[1] == pytest.approx(2 * once[0], rel=1e-3)
    assert twice[0] == pytest.approx(once[0] / 2, rel=1e-3)
    assert once[0] == pytest.approx(full / 2, rel=1e-3), "half of the window that it had reached"
    assert often[0] == pytest.approx(10, rel=1e-3)


def test_a_starting_connection_leaves_its_unused_share_to_others() -> None:
    async def main() -> None:
        network = Network(1, Geography(Link(LATENCY_S), Access(FAST, None)))
        old = Payload("a", "b", "snapshot", 400 * MIB)
        network.traffic.depart(old)
        await asyncio.sleep(10.0)
        at = old.moved_bytes(now())
        new = Payload("a", "c", "activation", 400 * MIB)
        network.traffic.depart(new)
        await asyncio.sleep(ROUND_TRIP_S)
        assert new.moved_bytes(now()) == pytest.approx(FIRST_WINDOW_BYTES, abs=1)
        assert old.moved_bytes(now()) - at == pytest.approx(FAST * ROUND_TRIP_S - FIRST_WINDOW_BYTES, abs=2)
        await asyncio.sleep(20 * ROUND_TRIP_S)
        halves = [one.flow.rate for one in (old, new) if one.flow is not None]
        assert halves == pytest.approx([FAST / 2] * 2)

    run(main())


def test_reading_the_directory_uses_the_nodes_own_lines() -> None:
    async def main() -> None:
        network = Network(1, Geography(Link(LATENCY_S), Access(1000.0, 2000.0)), replace(SIZES, control=CONTROL))
        directory = SimDirectory(Registry(), "a", lambda adverts: network.exchange("a", adverts))
        await directory.announce(Advert("a", "run", 1, ()), 30.0)
        assert now() == pytest.approx(0.002 + COPIES * 100 / 1000)
        await directory.peers()
        assert now() == pytest.approx(2 * (0.002 + COPIES * 100 / 1000))
        assert network.traffic.byte_counts()["a"]["control"] == ByteCounts(sent=1000, received=1000)

    run(main())


@pytest.mark.parametrize("connections", [1, 3, CONNECTIONS])
def test_a_body_has_one_window_per_connection_in_flight(connections: int) -> None:
    """Per round trip; a second body in parallel has its own windows, and both together have at most all connections."""

    async def main() -> None:
        link = Link(LATENCY_S, window_bytes=float(MIB), slow_start_after_idle=False)
        network = Network(1, Geography(link, Access(100 * FAST, None)))
        body = Payload("a", "b", "activation", 400 * MIB, connections=connections)
        network.traffic.depart(body)
        await asyncio.sleep(10 * ROUND_TRIP_S)
        alone = body.moved_bytes(now())
        assert alone == pytest.approx(10 * connections * MIB, rel=1e-3)
        snapshot = Payload("a", "b", "snapshot", 40 * MIB)
        network.traffic.depart(snapshot)
        await asyncio.sleep(10 * ROUND_TRIP_S)
        both = body.moved_bytes(now()) - alone, snapshot.moved_bytes(now())
        assert both == pytest.approx((10 * min(connections, CONNECTIONS - 1) * MIB, 10 * MIB), rel=1e-3)

    run(main())


def test_bodies_gradients_and_weights_of_distant_peers_use_all_connections() -> None:
    """Before large weights are fetched from a peer, its round trip is measured if it is not known."""
    sizes = MessageSizes(8 * MIB, 8 * MIB, (300, 8 * MIB), (150, 300), (900, 1800))
    used: list[int] = []
    apart_from_bodies: list[bool] = []

    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        network.sizes = sizes
        depart = network.traffic.depart

        def noted(payload: Payload) -> None:
            used.append(payload.connections)
            depart(payload)

        def noted_post(message: Payload, *, apart: bool) -> None:
            apart_from_bodies.append(apart)
            post(message, apart=apart)

        network.traffic.depart = noted  # type: ignore[method-assign]
        network.traffic.post, post = noted_post, network.traffic.post  # type: ignore[method-assign]
        await transport.propagate(CALLEE, activation())
        for weights in ("float64", None):
            assert transport.line.round_trip_s(CALLEE.peer_id) is None
            await transport.fetch_snapshot(CALLEE, SnapshotRequest(1, 4, weights=weights), 60.0, SNAPSHOT_SPECS)
        await transport.propagate(CALLEE, activation())

    play(script, with_body, Link(LATENCY_S, bytes_per_s=4 * FAST, slow_start_after_idle=False), longest_s=60.0)
    assert used == [1, 1, 1, CONNECTIONS, CONNECTIONS, CONNECTIONS]
    assert apart_from_bodies[:3] == [False, False, True], "header, grant, answer"
    assert apart_from_bodies[-3:] == [True] * 3
