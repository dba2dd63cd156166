"""The owner's caps over real connections: all bytes that a relay in between sees, including gRPC's own."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from link_fixture import Passage, Proxy
from machine import in_time
from soak import soak
from transport_fixture import LARGE, Node, activation, echo, hang, pair, run, soon, tensor, transport

from noloco_p2p.config import LimitSettings
from noloco_p2p.core.lattice_format import BOUND_ZERO, LatticeRequest
from noloco_p2p.core.line_cap import BYTES_PER_MBIT, CAPPED_MESSAGE_S, SHARE
from noloco_p2p.core.line_rate import MIN_MESSAGE_BYTES
from noloco_p2p.core.messages import Gradient, Header, MicrobatchId
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.errors import Declined
from noloco_p2p.io.transport import capped_line
from noloco_p2p.io.transport.capped_line import OwnersLine
from noloco_p2p.ports import ALONE, Body
from noloco_p2p.sim import virtual_time

EXCESS_S = 0.5
"""The largest excess over a cap in any period, in seconds at the cap: 5 % of 10 s."""
WINDOW_BYTES = 1 << 16
"""The initial flow-control window of HTTP/2 for each call."""


def excess_s(passed: list[Passage], bytes_per_s: float) -> float:
    """The most by which the bytes of any period exceed the cap, in seconds at the cap."""
    owed = most = 0.0
    last = passed[0][0]
    for at, nbytes in passed:
        owed = max(0.0, owed - (at - last) * bytes_per_s) + nbytes
        last, most = at, max(most, owed)
    return most / bytes_per_s


@pytest.mark.parametrize(
    ("direction", "mbit_per_s"), [("upload", 400), ("download", 80), *soak([("upload", 80), ("download", 400)])]
)
def test_a_cap_holds_in_every_period_and_is_used(direction: str, mbit_per_s: int) -> None:
    """The caller's line and the server's both have the cap, and each sends and receives the same bytes."""

    async def scenario() -> None:
        limits = LimitSettings.model_validate({f"{direction}_mbit_per_s": mbit_per_s})
        shape = LARGE if mbit_per_s == 400 else (4, 128, 2048)
        async with pair(Node(echo), limits=limits) as both, Proxy(both.b.port) as proxy:
            clock = asyncio.get_running_loop().time
            sent, began = [activation(shape, counter=number) for number in range(4)], clock()
            replies = await asyncio.gather(*(both.a.propagate(proxy.peer, one) for one in sent))
            took_s = clock() - began
        assert [reply.grad.data == one.hidden.data for reply, one in zip(replies, sent, strict=True)] == [True] * 4
        rate, size = mbit_per_s * BYTES_PER_MBIT, 4 * sent[0].hidden.data.nbytes
        for passed in proxy.passed:
            assert sum(nbytes for _, nbytes in passed) >= size
            assert excess_s(passed, rate) <= EXCESS_S
        assert size / rate - EXCESS_S <= took_s
        assert in_time(took_s, 3 * size / rate + EXCESS_S), "the two directions overlap"

    run(scenario())


@pytest.mark.parametrize(("many", "names"), [("callers", "ABCDEFGIJKLMNOPQ"), ("callees", "ABCD")])
def test_many_peers_without_a_cap_keep_to_the_cap_of_their_receiver(many: str, names: str) -> None:
    """They send messages of the size that it asks for. Of replies that come at the same time, the first message and one
    window of each go uncounted."""
    mbit_per_s, sent = 5, activation((4, 32, 512))
    here, all_here = list[Header](), asyncio.Event()

    async def together(header: Header, body: Body) -> Gradient:
        gradient = await echo(header, body)
        here.append(header)
        if len(here) == len(names):
            all_here.set()
        await all_here.wait()
        return gradient

    async def scenario() -> None:
        async with AsyncExitStack() as closing:
            hub, others = (
                transport("H", limits=LimitSettings(download_mbit_per_s=mbit_per_s)),
                list(map(transport, names)),
            )
            for one in (hub, *others):
                closing.push_async_callback(one.close)
                await one.serve(Node(together))
            pairs = [(one, hub) if many == "callers" else (hub, one) for one in others]
            proxies = [await closing.enter_async_context(Proxy(callee.port)) for _, callee in pairs]
            called = "H" * len(names) if many == "callers" else names
            peers = [replace(proxy.peer, peer_id=name) for proxy, name in zip(proxies, called, strict=True)]
            sends = [replace(sent, header=replace(sent.header, microbatch=MicrobatchId(name, 1, 1))) for name in names]
            await asyncio.gather(
                *(
                    caller.propagate(peer, one, replace(ALONE, asked=True))
                    for (caller, _), peer, one in zip(pairs, peers, sends, strict=True)
                )
            )
        passed, rate = (
            sorted(one for proxy in proxies for one in proxy.passed[many == "callees"]),
            mbit_per_s * BYTES_PER_MBIT,
        )
        assert sum(nbytes for _, nbytes in passed) >= len(names) * sent.hidden.data.nbytes
        uncounted_s = 0.0 if many == "callers" else len(names) * (WINDOW_BYTES / rate + CAPPED_MESSAGE_S)
        assert excess_s(passed, rate) <= uncounted_s + EXCESS_S

    run(scenario())


def test_far_peers_keep_to_the_cap_of_their_receiver() -> None:
    """They would send each body over sixteen connections, with a window on each, if the cap did not say how slow its
    line is."""
    mbit_per_s, sent = 20, activation((4, 128, 1024))

    async def scenario() -> None:
        async with AsyncExitStack() as closing:
            hub, others = transport("H", limits=LimitSettings(download_mbit_per_s=mbit_per_s)), [*map(transport, "ABC")]
            for one in (hub, *others):
                closing.push_async_callback(one.close)
                await one.serve(Node(echo))
                one.line.answered("H", 0.1)
            proxies = [await closing.enter_async_context(Proxy(hub.port)) for _ in others]
            await asyncio.gather(
                *(
                    one.propagate(
                        replace(proxy.peer, peer_id="H"),
                        replace(sent, header=replace(sent.header, microbatch=MicrobatchId(name, 1, 1))),
                        replace(ALONE, asked=True),
                    )
                    for name, one, proxy in zip("ABC", others, proxies, strict=True)
                )
            )
        passed = sorted(one for proxy in proxies for one in proxy.passed[0])
        assert sum(nbytes for _, nbytes in passed) >= 3 * sent.hidden.data.nbytes
        assert excess_s(passed, mbit_per_s * BYTES_PER_MBIT) <= EXCESS_S

    run(scenario())


def test_weights_get_their_share_of_a_line_full_of_bodies() -> None:
    """A gradient that would fill B's line on its own, and a snapshot in parallel."""
    weights = (tensor("slow/a", "float32", (1 << 18,)), tensor("delta/a", "float32", (1 << 18,)))

    async def give(request: SnapshotRequest) -> Snapshot:
        return Snapshot("B", 4, 40, weights)

    async def scenario() -> None:
        limits = LimitSettings(upload_mbit_per_s=160)
        size, rate = sum(one.data.nbytes for one in weights), 160 * BYTES_PER_MBIT
        async with pair(Node(echo, give), limits=limits) as both:
            clock = asyncio.get_running_loop().time
            bodies = [asyncio.create_task(both.a.propagate(both.peer, activation(LARGE, counter=n))) for n in range(2)]
            await asyncio.sleep(2.0)
            began = clock()
            specs = tuple(one.spec for one in weights)
            fetched = await both.a.fetch_snapshot(both.peer, SnapshotRequest(1, 4, 0.0), 20.0, specs)
            took_s = clock() - began
            assert not all(body.done() for body in bodies)
            assert [one.data for one in fetched.tensors] == [one.data for one in weights]
            assert took_s <= size / (SHARE * rate) + 1.0
            for body in bodies:
                body.cancel()
            await asyncio.gather(*bodies, return_exceptions=True)

    run(scenario())


def test_progress_requests_pass_a_full_line_and_see_progress() -> None:
    async def scenario() -> None:
        async with pair(Node(echo), limits=LimitSettings(upload_mbit_per_s=20)) as both:
            sent = activation((4, 128, 1024))
            call = asyncio.create_task(both.a.propagate(both.peer, sent))
            seen: list[int] = []
            clock = asyncio.get_running_loop().time
            while not call.done():
                began = clock()
                [report] = await both.a.progress(both.peer, [sent.header.microbatch], 5.0)
                assert in_time(clock() - began, 1.0)
                seen += [report.events] if report else []
                await asyncio.sleep(0.05)
            assert (await call).grad.data == sent.hidden.data
        assert seen == sorted(seen)
        assert len(set(seen)) > 5, "each message of a reply counts as progress"

    run(scenario())


def test_a_transfer_cancelled_while_it_waits_for_the_line_leaves_it_to_others() -> None:
    async def scenario() -> None:
        async with pair(Node(echo), limits=LimitSettings(upload_mbit_per_s=40)) as both:
            lost = [asyncio.create_task(both.a.propagate(both.peer, activation(LARGE, counter=n))) for n in range(3)]
            await asyncio.sleep(0.5)
            for one in lost:
                one.cancel()
            await asyncio.gather(*lost, return_exceptions=True)
            sent = activation((4, 128, 512), counter=9)
            async with asyncio.timeout(5.0):
                assert (await both.a.propagate(both.peer, sent)).grad.data == sent.hidden.data

    run(scenario())


def test_a_small_activation_is_charged_when_it_is_sent_even_if_the_call_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[int] = []
    monkeypatch.setattr(OwnersLine, "charge", lambda line, *, sent, received: charged.append(sent))

    async def scenario() -> None:
        node, sent = Node(hang), activation()
        async with pair(node, limits=LimitSettings(upload_mbit_per_s=40)) as both:
            call = asyncio.create_task(both.a.propagate(both.peer, sent))
            await soon(node.entered.wait())
            call.cancel()
            await asyncio.wait([call])
        assert sum(charged) > sent.hidden.data.nbytes

    run(scenario())


def test_a_request_for_some_chunks_is_charged_to_both_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request grows with the model: a byte for each chunk of a vector."""
    charged: list[tuple[int, int]] = []
    monkeypatch.setattr(OwnersLine, "charge", lambda line, *, sent, received: charged.append((sent, received)))
    asked = SnapshotRequest(1, 4, lattice=LatticeRequest(bytes([BOUND_ZERO]) * 9000))

    async def scenario() -> None:
        async with pair(Node(echo), limits=LimitSettings(upload_mbit_per_s=40)) as both:
            with pytest.raises(Declined):
                await both.a.fetch_snapshot(both.peer, asked, 5.0, ())

    run(scenario())
    assert [sum(way) >= asked.nbytes for way in zip(*charged, strict=True)] == [True, True]


def test_without_a_cap_nothing_waits_and_the_line_is_measured() -> None:
    async def scenario() -> None:
        line, taken = OwnersLine(LimitSettings()), list[int]()

        async def write(message: bytes) -> None:
            taken.append(len(message))
            await asyncio.sleep(0.1 if len(message) > MIN_MESSAGE_BYTES else 0.0)

        async def read() -> bytes:
            await asyncio.sleep(0.05)
            return bytes(200_000)

        send, receive = line.sender(write), line.receiver(read)
        await send(bytes(MIN_MESSAGE_BYTES))
        assert line.measured.up.bytes_per_s is None, "short messages are not measured"
        await asyncio.gather(send(bytes(100_000)), send(bytes(100_000)))
        assert line.measured.up.bytes_per_s == pytest.approx(2e6, rel=0.3), "two messages in parallel"
        await receive()
        assert line.measured.down.bytes_per_s is None, "the time before the first message was no transfer"
        for _ in range(6):
            await receive()
        assert line.measured.down.bytes_per_s == pytest.approx(4e6, rel=0.3)
        assert taken == [MIN_MESSAGE_BYTES, 100_000, 100_000]
        assert dict(line.grpc_options)["grpc.http2.lookahead_bytes"] == capped_line.WINDOW_BYTES

    virtual_time.run(scenario(), limit_s=100.0)
