"""Tensors share the bandwidth of a simulated network, stall and get lost with its faults, and every byte is counted."""

import asyncio
import random
from dataclasses import replace
from statistics import mean

import pytest
from barriers import barrier
from sim_transport_fixture import CALLEE, ID, LATENCY_S, SNAPSHOT_SPECS, Serving, activation, gradient, now, play

from noloco_p2p.core import wire
from noloco_p2p.core.line_rate import CONNECTIONS, FILLER_BYTES, Sending
from noloco_p2p.core.messages import Advert, Gradient, PeerId, Progress, TensorSpec
from noloco_p2p.core.snapshots import SnapshotRequest
from noloco_p2p.errors import Busy, PeerError, Unreachable
from noloco_p2p.ports import Body, Claim
from noloco_p2p.sim.links import Access, ControlSizes, Geography, Link, MessageSizes, ceiling_bytes_per_s, resend_s
from noloco_p2p.sim.network import Barrier, Network
from noloco_p2p.sim.payloads import KINDS, ByteCounts
from noloco_p2p.sim.transport import SimTransport
from noloco_p2p.sim.virtual_time import run

SIZES = MessageSizes(
    activation_bytes=1000,
    gradient_bytes=400,
    snapshot_bytes=(300, 600),
    weights_bytes=(150, 250),
    state_bytes=(900, 1800),
)
STATE_SPECS = (TensorSpec("slow/w", "float64", (1, 1, 1)),)


async def with_body(body: Body) -> Gradient:
    await body()
    return gradient()


WIDE = Geography(Link(0.0), Access(1000.0, 2000.0))
"""1,000 bytes/s up and 2,000 down, without latency."""


def swarm(network: Network, answers: dict[PeerId, Serving]) -> dict[PeerId, SimTransport]:
    """Nodes that serve on the network."""
    transports = {peer: SimTransport(network, peer) for peer in answers}
    for peer, serving in answers.items():
        network.serve(peer, serving)
    return transports


def to(peer: PeerId) -> Advert:
    return replace(CALLEE, peer_id=peer)


def totals(network: Network) -> ByteCounts:
    """The sum over all nodes and kinds."""
    return sum_of([account for kinds in network.traffic.byte_counts().values() for account in kinds.values()])


def sum_of(accounts: list[ByteCounts]) -> ByteCounts:
    total = ByteCounts()
    for account in accounts:
        total.add(account)
    return total


def test_transfers_have_the_sizes_of_the_simulated_run() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        network.sizes = SIZES
        await transport.propagate(CALLEE, activation(9.0))
        assert now() == pytest.approx(2 * LATENCY_S + 1000 / 200 + 400 / 200)
        await transport.evaluate(CALLEE, activation(9.0))
        await transport.fetch_snapshot(CALLEE, SnapshotRequest(1, 4), 60.0, SNAPSHOT_SPECS)
        await transport.fetch_snapshot(CALLEE, SnapshotRequest(1, 4, weights="float64"), 60.0, SNAPSHOT_SPECS)
        await transport.fetch_state(CALLEE, 60.0, STATE_SPECS)
        assert now() == pytest.approx(10 * LATENCY_S + (2 * 1000 + 400 + 600 + 250 + 1800) / 200)
        caller, callee = network.traffic.byte_counts()["a"], network.traffic.byte_counts()["b"]
        assert {kind: (caller[kind].sent, callee[kind].received) for kind in KINDS} == {
            "activation": (2000, 2000),
            "gradient": (0, 0),
            "snapshot": (0, 0),
            "weights": (0, 0),
            "state": (0, 0),
            "filler": (0, 0),
            "control": (0, 0),
        }
        assert [callee[kind].sent for kind in KINDS] == [0, 400, 600, 250, 1800, 0, 0]
        assert [caller[kind].received for kind in KINDS] == [0, 400, 600, 250, 1800, 0, 0]
        assert totals(network) == ByteCounts(sent=5050, received=5050)

    play(script, with_body, Link(LATENCY_S, bytes_per_s=200.0), longest_s=9.0)


def after_a_rest_s(nbytes: float, bytes_per_s: float, round_trip_s: float = 2 * LATENCY_S) -> float:
    """How long a transfer over an idle connection takes: ten segments in the first round trip, doubling in each."""
    window, seconds = 10 * 1460.0, 0.0
    while window / round_trip_s < bytes_per_s and window < nbytes:
        nbytes, window, seconds = nbytes - window, 2 * window, seconds + round_trip_s
    return seconds + nbytes / min(bytes_per_s, window / round_trip_s)


LARGE = replace(SIZES, activation_bytes=4 * wire.PACK_BYTES, gradient_bytes=2 * wire.PACK_BYTES)
"""Each is larger than one message, and takes 4 s or 2 s over the links of the tests below."""


def test_a_large_body_is_sent_after_the_grant() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        network.sizes = LARGE
        assert transport.sending(activation(), CALLEE) is Sending.ASKED
        await transport.propagate(CALLEE, activation())
        expected = 4 * LATENCY_S + sum(after_a_rest_s(part * wire.PACK_BYTES, wire.PACK_BYTES) for part in (4, 2))
        assert now() == pytest.approx(expected), "header, grant, body, gradient"
        assert expected > 4 * LATENCY_S + 4.0 + 2.0 + 1.0

    play(script, with_body, Link(LATENCY_S, bytes_per_s=wire.PACK_BYTES), longest_s=9.0)


@pytest.mark.parametrize("asked", [False, True])
def test_a_one_message_body_to_a_distant_peer_is_sent_at_once_over_several_connections(asked: bool) -> None:
    nbytes, bytes_per_s = 1 << 19, 1e7
    rest = Link(0.2, bytes_per_s=bytes_per_s)

    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        network.sizes = replace(SIZES, activation_bytes=nbytes)
        await transport.describe(CALLEE)
        transport.line.up.ended(transport.line.up.began(now() - 1.0), bytes_per_s, now())
        assert transport.line.connections(CALLEE.peer_id, nbytes) == 3
        assert transport.sending(activation(), CALLEE) is Sending.AT_ONCE
        began = now()
        await transport.propagate(CALLEE, activation(), Claim(lambda: True, lambda: None, asked=asked))
        seconds = 2 * 0.2 + after_a_rest_s(nbytes / 3, bytes_per_s / 3, 0.4) + 400 / bytes_per_s
        assert now() - began == pytest.approx(seconds + 2 * 0.2 * asked, rel=5e-3), "the grant costs a round trip"

    play(script, with_body, rest, longest_s=9.0)


@pytest.mark.parametrize("refuses", [True, False])
def test_a_large_body_that_is_refused_or_claimed_elsewhere_costs_nothing(refuses: bool) -> None:
    async def answer(body: Body) -> Gradient:
        if refuses:
            raise Busy("full")
        return await with_body(body)

    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        network.sizes = LARGE
        with pytest.raises(Busy if refuses else Unreachable):
            await transport.propagate(CALLEE, activation(), Claim(lambda: False, lambda: None))
        assert totals(network) == ByteCounts()

    play(script, answer, Link(LATENCY_S, bytes_per_s=wire.PACK_BYTES))


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("back", [False, True])
def test_filler_spares_a_body_and_its_reply_the_slow_start(there: bool, back: bool) -> None:
    seconds: list[float] = []
    fills: list[bool] = []

    async def answer(body: Body) -> Gradient:
        await body()
        if fills[-1]:
            body.reply_soon()
        await asyncio.sleep(1.0)
        return gradient()

    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        size = 32 * wire.PACK_BYTES
        network.sizes = replace(SIZES, activation_bytes=size, gradient_bytes=size)
        await transport.describe(CALLEE)
        for before, after in ((False, False), (False, False), (there, back)):
            fills.append(after)
            await asyncio.sleep(20.0)
            if before:
                transport.warm([CALLEE], 0)
                transport.warm([CALLEE], 0)
            await asyncio.sleep(1.0)
            began = now()
            await transport.propagate(CALLEE, activation())
            seconds.append(now() - began)
        filler = (there + back) * CONNECTIONS * FILLER_BYTES[0]
        kinds = [network.traffic.byte_counts()[peer]["filler"] for peer in "ab"]
        assert sum_of(kinds) == ByteCounts(sent=filler, received=filler), (
            "filler is sent once in each direction, and none is lost"
        )

    play(script, answer, Link(0.1, bytes_per_s=50e6), longest_s=60.0)
    assert seconds[0] == pytest.approx(seconds[1])
    assert seconds[1] - seconds[2] >= 1.9 * 0.2 * (there + back) - 1e-9, "it saves two round trips in each direction"


def test_bodies_to_one_peer_are_sent_in_turn() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        network.sizes = replace(LARGE, gradient_bytes=0)
        ends: list[float] = []

        async def send(number: int) -> None:
            await transport.evaluate(CALLEE, activation(9.0, number))
            ends.append(now())

        await asyncio.gather(*(send(number) for number in range(3)))
        first = 4 * LATENCY_S + after_a_rest_s(4 * wire.PACK_BYTES, wire.PACK_BYTES)
        assert ends == pytest.approx([first + 4.0 * number for number in range(3)])

    play(script, with_body, Link(LATENCY_S, bytes_per_s=wire.PACK_BYTES), longest_s=60.0)


def test_a_gradient_that_waits_for_its_turn_reports_progress() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        network.sizes = replace(LARGE, activation_bytes=8)
        other = asyncio.create_task(transport.propagate(CALLEE, activation(9.0, 1)))
        await asyncio.sleep(0.5)
        mine = asyncio.create_task(transport.propagate(CALLEE, activation(9.0, 1)))
        await asyncio.sleep(0.5)
        (one,) = await transport.progress(CALLEE, [ID], 1.0)
        assert one is not None
        assert one.events > wire.REPLYING
        await other
        assert await transport.progress(CALLEE, [ID], 1.0) == [Progress(wire.REPLYING + wire.PACK_BYTES // 5, 0.0)]
        await mine
        assert await transport.progress(CALLEE, [ID], 1.0) == [None]

    play(script, with_body, Link(LATENCY_S, bytes_per_s=wire.PACK_BYTES), longest_s=9.0)


def test_calls_of_one_node_share_its_line_up_and_a_cancelled_one_frees_its_share() -> None:
    ends: dict[str, float] = {}

    async def main() -> None:
        network = Network(1, WIDE, SIZES)
        nodes = swarm(network, {peer: Serving(with_body) for peer in "abcd"})

        async def call(callee: str) -> None:
            await nodes["a"].propagate(to(callee), activation(60.0))
            ends[callee] = now()

        calls = [asyncio.create_task(call(callee)) for callee in "bcd"]
        await asyncio.sleep(1.5)
        assert totals(network) == ByteCounts(sent=1500, in_flight=1500)
        calls[2].cancel()
        await asyncio.wait(calls)
        assert network.traffic.byte_counts()["a"]["activation"] == ByteCounts(sent=2500, lost=500)
        assert totals(network) == ByteCounts(sent=3300, received=2800, lost=500)

    run(main())
    # 500 bytes of each are sent in 1.5 s, the rest of two in another second; then two nodes answer with 400 bytes each.
    assert ends == {"b": pytest.approx(2.9), "c": pytest.approx(2.9)}


def test_a_refused_body_costs_the_bytes_sent_until_the_refusal_arrived() -> None:
    async def busy(body: Body) -> Gradient:
        raise Busy("full")

    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        with pytest.raises(Busy):
            await transport.propagate(CALLEE, activation())
        assert network.traffic.byte_counts()["a"]["activation"] == ByteCounts(sent=20, lost=20)

    play(script, busy, Link(LATENCY_S, bytes_per_s=100.0))


@pytest.mark.parametrize(
    "fault",
    [barrier("hang", "b"), barrier("cut", "b", "a"), barrier("one_way", "a", "b"), barrier("split", "a", "c")],
)
def test_tensors_to_an_unreachable_peer_stall_and_leave_the_line_to_others(fault: Barrier) -> None:
    async def main() -> None:
        network = Network(1, WIDE, replace(SIZES, gradient_bytes=0))
        nodes = swarm(network, {peer: Serving(with_body) for peer in "abc"})
        loop = asyncio.get_running_loop()
        loop.call_later(1.0, network.block, fault)
        loop.call_later(4.0, network.unblock, fault)

        async def call(callee: str) -> float:
            await nodes["a"].propagate(to(callee), activation(60.0))
            return now()

        # Both have 500 bytes after a second; then one has the line to itself, and later the other.
        assert await asyncio.gather(call("b"), call("c")) == pytest.approx([4.5, 1.5])

    run(main())


def test_a_crash_loses_bytes_in_flight_and_frees_the_line_at_once() -> None:
    async def main() -> None:
        network = Network(1, WIDE, SIZES)
        nodes = swarm(network, {peer: Serving(with_body) for peer in "abc"})
        asyncio.get_running_loop().call_later(1.0, network.crash, "b")

        async def call(callee: str) -> float:
            await nodes["a"].propagate(to(callee), activation(60.0))
            return now()

        broken, end = await asyncio.gather(call("b"), call("c"), return_exceptions=True)
        assert isinstance(broken, Unreachable)
        assert end == pytest.approx(1.5 + 0.4)
        assert network.traffic.byte_counts()["a"]["activation"] == ByteCounts(sent=1500, lost=500)

    run(main())


def test_an_answer_whose_sender_crashes_in_the_middle_is_unreachable() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        asyncio.get_running_loop().call_later(LATENCY_S + 0.24 + 0.08, network.crash, "b")
        with pytest.raises(Unreachable, match="broke"):
            await transport.propagate(CALLEE, activation())
        assert now() == pytest.approx(LATENCY_S + 0.32)
        assert network.traffic.byte_counts()["b"]["gradient"] == ByteCounts(sent=8, lost=8)

    play(script, with_body, Link(LATENCY_S, bytes_per_s=100.0), longest_s=60.0)


CONTROL = ControlSizes(request=9, answer=7, header=20, word=3, question=5, report=2, advert=40)


@pytest.mark.parametrize("seed", range(6))
def test_every_byte_sent_is_received_lost_or_in_flight(seed: int) -> None:
    rng, wanted = random.Random(seed), ByteCounts()
    geography = Geography(Link(0.05, 0.5, rng.choice([None, 600.0]), 0.05, 0.05), Access(1000.0, 2000.0))
    limits = {"up": 1000.0, "down": 2000.0}

    async def main() -> None:
        network = Network(seed, geography, replace(SIZES, control=CONTROL) if seed % 2 else SIZES)
        names = list("abcdef")
        nodes = swarm(network, {peer: Serving(with_body) for peer in names})

        async def calls(peer: PeerId) -> None:
            for _ in range(25):
                await asyncio.sleep(rng.expovariate(1.0))
                callee = rng.choice([name for name in names if name != peer])
                try:
                    async with asyncio.timeout(rng.choice([1.0, 60.0])):
                        if rng.random() < 0.7:
                            await nodes[peer].propagate(to(callee), activation(8.0))
                            wanted.received += 1400
                        else:
                            await nodes[peer].fetch_snapshot(
                                to(callee), SnapshotRequest(1, 4, 0.1), 9.0, SNAPSHOT_SPECS
                            )
                            wanted.received += 600
                except (PeerError, TimeoutError):
                    pass

        async def faults() -> None:
            while True:
                await asyncio.sleep(rng.expovariate(1.0))
                one, other = rng.sample(names, 2)
                fault = barrier("hang", one) if rng.random() < 0.3 else barrier("cut", one, other)
                network.block(fault)
                await asyncio.sleep(rng.uniform(0, 2))
                network.unblock(fault)
                if rng.random() < 0.2:
                    network.crash(one)
                    network.serve(one, Serving(with_body))

        async def audit() -> None:
            while True:
                await asyncio.sleep(0.37)
                total = totals(network)
                assert total.sent == total.received + total.lost + total.in_flight
                for kinds in network.traffic.byte_counts().values():
                    mine = sum_of(list(kinds.values()))
                    assert mine.sent <= limits["up"] * now() + 1
                    assert mine.received <= limits["down"] * now() + 1

        others = [asyncio.create_task(faults()), asyncio.create_task(audit())]
        await asyncio.gather(*(calls(peer) for peer in names))
        others[0].cancel()
        await asyncio.sleep(30.0)
        assert not others[1].done() or others[1].result() is None
        others[1].cancel()
        total = totals(network)
        assert total.in_flight == 0
        assert total.lost > 0
        assert wanted.received <= total.received < total.sent
        assert network.bugs == []

    run(main())


def test_byte_counts_can_be_read_after_the_end() -> None:
    network = Network(1, WIDE, SIZES)

    async def main() -> None:
        nodes = swarm(network, {peer: Serving(with_body) for peer in "ab"})
        call = asyncio.create_task(nodes["a"].propagate(to("b"), activation(60.0)))
        await asyncio.sleep(0.25)
        assert not call.done()
        network.block(barrier("hang", "b"))
        await asyncio.sleep(1.0)

    run(main())
    assert totals(network).sent == 250


def test_packet_loss_limits_the_rate_and_delays_some_messages() -> None:
    assert ceiling_bytes_per_s(0.01, 0.1) == pytest.approx(1.2247 * 1460 / (0.1 * 0.1), rel=1e-4)
    assert ceiling_bytes_per_s(0.0, 0.1) == float("inf")
    rng = random.Random(1)
    late = [resend_s(0.1, 0.05, rng) for _ in range(20_000)]
    assert sum(1 for s in late if s > 0) / 20_000 == pytest.approx(0.1, abs=0.01)
    assert {round(s, 6) for s in late} >= {0.0, 0.25, 0.75, 1.75}
    assert mean(late) == pytest.approx(0.9 * sum(0.1**k * 0.25 * (2**k - 1) for k in range(1, 12)), rel=0.1)


def test_a_lossy_link_has_the_limited_rate_and_delays_messages() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        network.sizes = replace(SIZES, activation_bytes=1_000_000, gradient_bytes=0)
        await transport.propagate(CALLEE, activation(60.0))
        ceiling = ceiling_bytes_per_s(0.0004, 2 * LATENCY_S)
        assert now() == pytest.approx(2 * LATENCY_S + after_a_rest_s(1_000_000, ceiling))

    play(script, with_body, Link(LATENCY_S, loss=0.0004))

    async def latencies() -> list[float]:
        network = Network(1, Geography(Link(LATENCY_S, loss=0.3)))
        return [network.latency_s("a", "b") for _ in range(400)]

    took = run(latencies())
    assert sum(s > LATENCY_S for s in took) / 400 == pytest.approx(0.3, abs=0.07)
    assert min(s for s in took if s > LATENCY_S) == pytest.approx(LATENCY_S + 2 * LATENCY_S + 0.2)
