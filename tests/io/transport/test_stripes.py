"""A body and its reply over several connections at once: whole whichever carries what, and over when one is lost."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from transport_fixture import (
    LARGE,
    Buffers,
    Events,
    Node,
    Pair,
    activation,
    alive,
    bare,
    echo,
    hang,
    pair,
    run,
    soon,
    watched_buffers,
)

from noloco_p2p.core.line_rate import (
    CONNECTIONS,
    FAR_BYTES,
    FAR_S,
    LEAST_STRIPE_BYTES,
    PART_BYTES,
    STRIPES,
    MeasuredLine,
    stripe_bytes,
)
from noloco_p2p.core.messages import Gradient, Header
from noloco_p2p.errors import Busy, Unreachable
from noloco_p2p.io.transport import callers, message_codec
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.channels import CHANNELS_PER_PEER, CONTROL_SLOT, PeerChannel
from noloco_p2p.io.transport.noloco_pb2_grpc import NodeStub
from noloco_p2p.io.transport.stripes import NO_MORE, Stripes
from noloco_p2p.ports import Body

MIDDLE = (3, 333, 777)
LONG = 1 << 30


def is_far(both: Pair) -> None:
    """What A knows of B: a fast line, and a long way."""
    rate, now = both.a.line.up, asyncio.get_running_loop().time()
    rate.ended(rate.began(now - 1.0), 50e6, now)
    both.a.line.answered("B", 0.2)
    assert both.a.line.connections("B", LONG) == CONNECTIONS


class Carried:
    """How many messages the calls on each connection have carried, by method; and what may happen to one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: dict[str, int] = {}
        self.received: dict[str, int] = {}
        self.before_write: Callable[[str, Any], Awaitable[None]] | None = None
        self.channels: dict[str, PeerChannel] = {}
        plain = PeerChannel.send_stream

        def counted(channel: PeerChannel, method: str, **options: Any) -> Any:
            call = plain(channel, method, **options)
            self.channels[method] = channel
            write, read = call.write, call.read

            async def counted_write(message: bytes) -> None:
                if self.before_write is not None:
                    await self.before_write(method, call)
                await write(message)
                self.sent[method] = self.sent.get(method, 0) + 1

            async def counted_read() -> Any:
                message = await read()
                self.received[method] = self.received.get(method, 0) + (message is not grpc.aio.EOF)
                return message

            call.write, call.read = counted_write, counted_read
            return call

        monkeypatch.setattr(PeerChannel, "send_stream", counted)


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> Carried:
    return Carried(monkeypatch)


def test_as_many_are_used_as_the_bytes_under_way_need() -> None:
    line = MeasuredLine()
    assert line.connections("B", LONG) == 1
    line.up.ended(line.up.began(0.0), 1e9, 1.0)
    assert line.connections("B", LONG) == 1, "nobody knows how far it is"
    line.answered("B", FAR_S / 2)
    assert line.connections("B", LONG) == 1, "it is near"
    line.answered("C", FAR_S)
    assert line.connections("C", LONG) == CONNECTIONS
    assert [line.connections("C", n * PART_BYTES - 1) for n in (1, 3, 99)] == [1, 3, CONNECTIONS]
    slow = MeasuredLine()
    slow.up.ended(slow.up.began(0.0), FAR_BYTES, 1.0)
    for round_trip_s, connections in ((0.9, 1), (2.1, 3), (100.0, CONNECTIONS)):
        slow.answered(str(round_trip_s), round_trip_s)
        assert slow.connections(str(round_trip_s), LONG) == connections
    assert stripe_bytes(1 << 20) == LEAST_STRIPE_BYTES
    assert stripe_bytes(1 << 26) == (1 << 26) // STRIPES


def test_a_way_over_a_link_or_a_relay_has_few_connections() -> None:
    most = [PeerChannel(way, None).at_most(CONNECTIONS) for way in ("host:1", "p2p", "relay/R")]
    assert most == [CONNECTIONS, CHANNELS_PER_PEER, CHANNELS_PER_PEER]


@pytest.mark.parametrize("limits", [None, "capped"])
def test_a_far_body_and_its_gradient_go_over_all_connections(carried: Carried, limits: str | None) -> None:
    from noloco_p2p.config import LimitSettings

    caps = LimitSettings(upload_mbit_per_s=2000, download_mbit_per_s=2000) if limits else None

    async def scenario() -> None:
        events = Events()
        async with pair(Node(echo), theirs=events, limits=caps) as both:
            await both.a.propagate(both.peer, activation(LARGE))
            assert "Stripe" not in carried.sent, "it is near"
            is_far(both)
            sent = [activation(LARGE, counter=n) for n in range(3)]
            got = await asyncio.gather(*(both.a.propagate(both.peer, one) for one in sent))
            assert [one.grad.data for one in got] == [one.hidden.data for one in sent]
            assert carried.channels["Stripe"] is not carried.channels["Propagate"]
            for count in (carried.sent, carried.received):
                assert count["Stripe"] > 2 * 3
            assert {slot for _, slot in both.a._channels._kept} >= set(
                range(CONTROL_SLOT + 1, CONTROL_SLOT + CONNECTIONS)
            )
            loss = await both.a.evaluate(both.peer, activation(LARGE))
            assert loss.tokens == 7
        whole = sum(one.data.nbytes for one in sent[0].tensors)
        received = [f["bytes"] for kind, f in events.seen if kind == "bytes" and f["direction"] == "in"]
        assert received == 5 * [whole]

    run(scenario())


def test_a_connection_that_is_lost_ends_the_attempt_and_leaves_nothing(
    carried: Carried, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers: Buffers = watched_buffers(monkeypatch)

    async def lose(method: str, call: Any) -> None:
        if method == "Stripe" and carried.sent.get("Stripe", 0) == 2:
            call.cancel()

    async def scenario() -> None:
        node = Node(echo)
        async with pair(node) as both:
            await both.a.propagate(both.peer, activation(LARGE))
            is_far(both)
            carried.before_write = lose
            with pytest.raises(Unreachable):
                await soon(both.a.propagate(both.peer, activation(LARGE)))
            carried.before_write = None
            while len(node.ends) < 2:
                await soon(node.ended.wait())
                await asyncio.sleep(0)
            assert node.ends == ["answered", "CancelledError"]
            assert alive(buffers) == 0
            sent = activation(LARGE, counter=2)
            got = await both.a.propagate(both.peer, sent)
            assert got.grad.data == sent.hidden.data

    run(scenario())


def test_a_caller_that_gives_up_leaves_nothing(carried: Carried, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers: Buffers = watched_buffers(monkeypatch)
    reached = asyncio.Event()

    async def stop(method: str, call: Any) -> None:
        if carried.sent.get("Stripe", 0) == 2:
            reached.set()
            await asyncio.Event().wait()

    async def scenario() -> None:
        node = Node(echo)
        async with pair(node) as both:
            await both.a.describe(both.peer)
            is_far(both)
            carried.before_write = stop
            calling = asyncio.create_task(both.a.propagate(both.peer, activation(LARGE)))
            await soon(reached.wait())
            calling.cancel()
            await asyncio.wait([calling])
            await soon(node.ended.wait())
            assert node.ends == ["CancelledError"]
            assert alive(buffers) == 0

    run(scenario())


def test_a_refusal_comes_through_while_two_are_ready(carried: Carried) -> None:
    async def full(header: Header, body: Body) -> Gradient:
        await body()
        raise Busy("full")

    async def scenario() -> None:
        async with pair(Node(full)) as both:
            is_far(both)
            with pytest.raises(Busy, match="full"):
                await soon(both.a.propagate(both.peer, activation(LARGE)))
        assert carried.sent["Stripe"] > 2

    run(scenario())


def test_where_there_is_no_other_connection_the_first_carries_all(carried: Carried) -> None:
    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            is_far(both)
            plain = both.a._channels.acquire

            @asynccontextmanager
            async def one_only(*given: Any, part: int = 0, **options: Any) -> AsyncIterator[Any]:
                if part:
                    raise Unreachable("one connection is all that this way has")
                async with plain(*given, **options) as channel:
                    yield channel

            both.a._channels.acquire = one_only  # type: ignore[method-assign]
            sent = activation(LARGE)
            got = await soon(both.a.propagate(both.peer, sent))
            assert got.grad.data == sent.hidden.data
        assert "Stripe" not in carried.sent

    run(scenario())


@asynccontextmanager
async def raw_stub(node: Node) -> AsyncIterator[Callable[[str], Any]]:
    """Makes bare calls to a server with `node`, each on its own."""
    async with pair(node) as both, bare(both.peer) as channel:
        calls = []

        def start(method: str) -> Any:
            calls.append(getattr(NodeStub(channel), method)(timeout=10.0, metadata=callers.metadata()))
            return calls[-1]

        try:
            yield start
        finally:
            for call in calls:
                call.cancel()


def messages(stripe: int) -> list[pb.ActivationMessage]:
    head, body = message_codec.announced(activation(MIDDLE), stripe)
    return [pb.ActivationMessage.FromString(raw) for raw in (head, *body(LEAST_STRIPE_BYTES))]


END = pb.ActivationMessage()


async def granted(start: Callable[[str], Any], first: pb.ActivationMessage) -> Any:
    call = start("Propagate")
    await call.write(first)
    assert (await soon(call.read())).HasField("grant")
    return call


async def beside(start: Callable[[str], Any], number: int) -> Any:
    call = start("Stripe")
    await call.write(pb.ActivationMessage(stripe=number))
    return call


def test_parts_may_come_in_any_order_and_late_calls_carry_nothing() -> None:
    async def scenario() -> None:
        async with raw_stub(Node(echo)) as start:
            head, *body = messages(7)
            main, other = await granted(start, head), await beside(start, 7)
            for one in reversed(body[1:]):
                await other.write(one)
            for _ in range(CONNECTIONS - 2):
                await (await beside(start, 7)).write(END)
            late = await beside(start, 7)
            await late.write(body[0])
            assert await soon(late.code()) is grpc.StatusCode.UNAVAILABLE, "so many calls are all that may carry it"
            await other.write(END)
            await main.write(body[0])
            await main.write(END)
            assert (await soon(main.read())).HasField("gradient")

    run(scenario())


@pytest.mark.parametrize("number", [0, 9])
def test_a_part_that_nobody_expects_fails(number: int) -> None:
    async def scenario() -> None:
        async with raw_stub(Node(hang)) as start:
            call = await beside(start, number)
            await call.write(messages(9)[1])
            assert await soon(call.code()) is grpc.StatusCode.UNAVAILABLE

    run(scenario())


def test_what_breaks_the_protocol_on_the_other_call_is_a_violation() -> None:
    async def scenario() -> None:
        async with raw_stub(Node(echo)) as start:
            head, *body = messages(7)
            main = await granted(start, head)
            other = await beside(start, 7)
            await main.write(body[0])
            await main.write(END)
            await other.write(body[0])
            assert "came twice" in (await soon(main.read())).refusal.message

    run(scenario())


def test_numbers_of_one_caller_differ() -> None:
    async def scenario() -> None:
        async with raw_stub(Node(echo)) as start:
            await granted(start, messages(7)[0])
            second = start("Propagate")
            await second.write(messages(7)[0])
            assert "two activations have the same number" in (await soon(second.read())).refusal.message

    run(scenario())


def test_a_reply_whose_other_call_is_lost_fails_at_once() -> None:
    async def scenario() -> None:
        stripes, gone = Stripes(), asyncio.Event()
        stripes.expect(lambda message: True)

        async def broken(message: bytes) -> None:
            raise grpc.aio.InternalError("lost")

        async def stuck(message: bytes) -> None:
            if message != b"head":
                await gone.wait()

        async def no_more() -> bytes:
            return NO_MORE

        carrying = asyncio.create_task(stripes.carry(broken, no_more))
        await asyncio.sleep(0)
        with pytest.raises(grpc.aio.InternalError):
            await soon(stripes.reply([b"head", b"1", b"2"], stuck))
        stripes.end()
        assert await carrying
        assert not await Stripes().carry(broken, no_more), "nobody has been granted a place"

    run(scenario())
