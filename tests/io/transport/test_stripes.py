"""A body and its reply over several connections at once: complete in any distribution, failed if one is lost."""

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from link_fixture import Proxy
from node_stub import NodeStub
from soak import soak
from state_fixture import LONG, LONG_SPECS, NUMBER, Donor
from transport_fixture import (
    LARGE,
    RUN,
    Buffers,
    Events,
    Node,
    Pair,
    activation,
    advert,
    alive,
    all_have_ended,
    bare,
    echo,
    hang,
    identity,
    is_far,
    logged,
    pair,
    run,
    soon,
    tensor,
    transport,
    watched_buffers,
)

from noloco_p2p.config import LimitSettings
from noloco_p2p.core import wire
from noloco_p2p.core.line_rate import (
    CONNECTIONS,
    FAR_BYTES,
    FAR_S,
    FILLER_BYTES,
    MESSAGE_S,
    MIN_STRIPE_BYTES,
    PART_BYTES,
    STRIPES,
    MeasuredLine,
    Sending,
    stripe_bytes,
)
from noloco_p2p.core.messages import Gradient, Header, HostTensor
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.core.wire import PACK_BYTES
from noloco_p2p.errors import Busy, Unreachable, Violation
from noloco_p2p.io.transport import callers, capped_line, grpc_transport, message_codec, stripes
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.capped_line import OwnersLine
from noloco_p2p.io.transport.channels import CHANNELS_PER_PEER, CONTROL_SLOT, PeerChannel
from noloco_p2p.io.transport.exchange import Collected, Fetched, SentActivation, to_grant
from noloco_p2p.io.transport.filler import Warming
from noloco_p2p.io.transport.frame_codec import FILLERS, packed, unpacked
from noloco_p2p.io.transport.incoming import CANCEL_GRACE_S, IncomingActivation
from noloco_p2p.io.transport.reply_reader import GradientReader
from noloco_p2p.io.transport.slow_transfers import RESERVE_S, Patience, Silent, Unread
from noloco_p2p.io.transport.stripes import NO_MORE, StripedCalls, Stripes
from noloco_p2p.ports import ALONE, Body, Claim
from noloco_p2p.sim import virtual_time

MIDDLE = (3, 333, 777)
MUCH = 1 << 30
AT_ONCE = (2, 64, 1600)
"""800 KiB: fits in one message, and is sent over five connections."""
LARGE_BYTES = 4 * LARGE[0] * LARGE[1] * LARGE[2]


class Carried:
    """Counts the messages of the calls on each connection, by method, and can interfere with one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: dict[str, int] = {}
        self.received: dict[str, int] = {}
        self.before_write: Callable[[str, Any], Awaitable[None]] | None = None
        self.after_read: Callable[[Any], Awaitable[None]] | None = None
        self.seen: Callable[[Any], Awaitable[None]] | None = None
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
                if self.seen is not None:
                    await self.seen(message)
                self.received[method] = self.received.get(method, 0) + (message is not grpc.aio.EOF)
                if self.after_read is not None:
                    await self.after_read(call)
                return message

            call.write, call.read = counted_write, counted_read
            return call

        monkeypatch.setattr(PeerChannel, "send_stream", counted)


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> Carried:
    return Carried(monkeypatch)


def test_a_body_uses_as_many_connections_as_its_bytes_in_flight_need() -> None:
    line = MeasuredLine()
    assert line.connections("B", MUCH) == 1
    line.up.ended(line.up.began(0.0), 1e9, 1.0)
    assert line.connections("B", MUCH) == 1, "its round trip is not known"
    line.answered("B", FAR_S / 2)
    assert line.connections("B", MUCH) == 1, "the peer is near"
    line.answered("C", FAR_S)
    assert line.connections("C", MUCH) == CONNECTIONS
    assert [line.connections("C", n * PART_BYTES - 1) for n in (1, 3, 99)] == [1, 3, CONNECTIONS]
    fresh = MeasuredLine()
    fresh.answered("D", FAR_S)
    assert fresh.connections("D", MUCH) == CONNECTIONS, "an unmeasured line counts as fast"
    slow = MeasuredLine()
    slow.up.ended(slow.up.began(0.0), FAR_BYTES, 1.0)
    for round_trip_s, connections in ((0.9, 1), (2.1, 3), (100.0, CONNECTIONS)):
        slow.answered(str(round_trip_s), round_trip_s)
        assert slow.connections(str(round_trip_s), MUCH) == connections
    wanted = int(FAR_BYTES * MESSAGE_S)
    fresh.answered("E", 2.1)
    for wanted_bytes, connections in ((0, CONNECTIONS), (wanted, 3), (PACK_BYTES, CONNECTIONS)):
        assert fresh.granted("E", MUCH, wanted_bytes) == connections, "no more than its peer's line needs"


@pytest.mark.parametrize("connections", [1, 2, 5, CONNECTIONS])
def test_messages_divide_evenly_between_the_connections(connections: int) -> None:
    for size in (1, MIN_STRIPE_BYTES, connections * PART_BYTES - 1, 1 << 26):
        longest = stripe_bytes(size, connections)
        messages = -(-size // longest)
        assert messages <= STRIPES
        assert longest >= MIN_STRIPE_BYTES or messages <= connections
        assert size < connections * connections or messages % connections == 0


def test_the_first_message_of_a_stripe_is_not_parsed_if_it_is_long() -> None:
    """One of 4 MiB with two million empty frames took 66 ms and 80 MiB, and anybody could send it."""
    assert [stripes.from_stripe(stripes.to_stripe(number)) for number in (1, 2**64 - 1)] == [1, 2**64 - 1]
    for raw in (b"\xff", packed(pb.ActivationMessage(stripe=1), [wire.End(0, 0, 0)] * 2)):
        with pytest.raises(Violation, match="the number of a body"):
            stripes.from_stripe(raw)


def test_a_link_or_a_relay_has_few_connections() -> None:
    ways = "host:1", "p2p", f"relay/{identity('R').peer_id}"
    most = [PeerChannel(way, None, None).at_most(CONNECTIONS) for way in ways]
    assert most == [CONNECTIONS, CHANNELS_PER_PEER, CHANNELS_PER_PEER]


@pytest.mark.parametrize("limits", [None, *soak(["capped"])])
def test_a_body_to_a_distant_peer_and_its_gradient_use_all_connections(carried: Carried, limits: str | None) -> None:
    caps = LimitSettings(upload_mbit_per_s=2000, download_mbit_per_s=2000) if limits else None

    async def scenario() -> None:
        events = Events()
        async with pair(Node(echo), theirs=events, limits=caps) as both:
            await both.a.propagate(both.peer, activation(LARGE))
            assert "Stripe" not in carried.sent, "the peer is near"
            is_far(both)
            before = carried.sent["Propagate"], carried.received["Propagate"]
            sent = [activation(LARGE, counter=n) for n in range(3)]
            got = await asyncio.gather(*(both.a.propagate(both.peer, one) for one in sent))
            assert [one.grad.data for one in got] == [one.hidden.data for one in sent]
            after = carried.sent["Propagate"], carried.received["Propagate"]
            assert [b - a for a, b in zip(before, after, strict=True)] == [6, 6], (
                "sent: header, end; received: grant, head"
            )
            assert carried.channels["Propagate"] is both.a._channels._kept["B", CONTROL_SLOT]
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


def test_a_one_message_body_to_a_distant_peer_uses_several_connections_before_the_grant(carried: Carried) -> None:
    sent, left, may_read = activation(AT_ONCE), asyncio.Event(), asyncio.Event()
    gone, replying = asyncio.Event(), asyncio.Event()

    async def serve(header: Header, body: Body) -> Gradient:
        await left.wait()
        assert body.received == 0, "the body is not read before the grant"
        may_read.set()
        return await echo(header, body)

    async def leaves(method: str, call: Any) -> None:
        if method == "Stripe" and carried.sent.get("Stripe", 0) >= 6:
            left.set()

    async def scenario() -> None:
        node = Node(serve)
        async with pair(node) as both:
            assert both.a.sending(sent, both.peer) is Sending.ASKED, "the round trip has not been measured"
            is_far(both)
            assert both.a.sending(sent, both.peer) is Sending.AT_ONCE
            assert both.a.sending(activation(), both.peer) is Sending.WHOLE
            assert both.a.sending(activation(LARGE), both.peer) is Sending.ASKED
            carried.before_write = leaves
            claim = Claim(lambda: True, gone.set, replying.set, asked=False)
            got = await soon(both.a.propagate(both.peer, sent, claim))
            assert gone.is_set()
            assert replying.is_set()
            assert may_read.is_set()
            assert got.grad.data == sent.hidden.data
            assert carried.received["Propagate"] == 2, "the grant, which comes too late to matter, and the head"
            assert len({slot for _, slot in both.a._channels._kept if slot > CONTROL_SLOT}) == 5
            loss = await soon(both.a.evaluate(both.peer, activation(AT_ONCE, counter=2)))
            assert loss.tokens == 7
            assert not both.a.line.rested("B", asyncio.get_running_loop().time())

    run(scenario())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.2 is no address of this machine")
def test_the_connections_of_a_body_may_come_from_several_addresses(carried: Carried) -> None:
    """Behind a router with two lines, or via two relays: the certificate identifies the caller, not the address."""

    async def scenario() -> None:
        async with pair(Node(echo)) as both, Proxy(both.b.port, hosts=("127.0.0.1", "127.0.0.2")) as proxy:
            is_far(both)
            sent = activation(LARGE)
            assert (await soon(both.a.propagate(proxy.peer, sent))).grad.data == sent.hidden.data
            assert len(proxy.wires) > 2
            await both.a.close()

    run(scenario())


def test_bodies_sent_at_once_do_not_wait_for_each_other(carried: Carried) -> None:
    """The body that the peer wants first may come after one for which it has no place."""
    may_read = {1: asyncio.Event(), 2: asyncio.Event()}

    async def serve(header: Header, body: Body) -> Gradient:
        await may_read[header.microbatch.counter].wait()
        return await echo(header, body)

    async def scenario() -> None:
        node = Node(serve)
        async with pair(node) as both:
            is_far(both)
            first, second = (activation(AT_ONCE, counter=n) for n in (1, 2))
            flights = [asyncio.create_task(both.a.propagate(both.peer, one)) for one in (first, second)]
            may_read[2].set()
            assert (await soon(flights[1])).grad.data == second.hidden.data
            assert not flights[0].done()
            may_read[1].set()
            assert (await soon(flights[0])).grad.data == first.hidden.data

    run(scenario())


@pytest.mark.parametrize("shape", [AT_ONCE, LARGE])
def test_a_reply_may_come_without_the_body_being_read(carried: Carried, shape: tuple[int, int, int]) -> None:
    """As if the microbatch is the same as that of another call, which has sent the body."""

    async def kept(header: Header, body: Body) -> Gradient:
        return Gradient(header.microbatch, replace(sent.hidden, name="grad"), 1.0, 7, ("B",))

    sent = activation(shape)

    async def scenario() -> None:
        async with pair(Node(kept)) as both:
            is_far(both)
            for _ in range(3):
                assert (await soon(both.a.propagate(both.peer, sent))).grad.data == sent.hidden.data

    run(scenario())


@pytest.mark.parametrize("read", [False, True])
def test_the_refusal_of_a_body_sent_at_once_has_its_reason(carried: Carried, read: bool) -> None:
    async def full(header: Header, body: Body) -> Gradient:
        if read:
            await body()
        raise Busy("full")

    async def scenario() -> None:
        async with pair(Node(full)) as both:
            is_far(both)
            for n in range(10):
                with pytest.raises(Busy, match="full"):
                    await soon(both.a.propagate(both.peer, activation(AT_ONCE, counter=n)))
            await soon(all_have_ended(both.b))

    run(scenario())


def test_the_reason_of_a_refusal_comes_only_from_the_first_call() -> None:
    """However late the reason comes: the parallel calls are refused as well, without it."""

    class Refused(AbstractAsyncContextManager[Any]):
        async def __aenter__(self) -> Any:
            async def write(message: bytes) -> None:
                raise Unreachable("this node does not expect this part of a body")

            return write, None

        async def __aexit__(self, *error: object) -> None:
            return None

    async def scenario() -> None:
        reader = GradientReader(activation(AT_ONCE))
        head, body = message_codec.announced(activation(AT_ONCE), 1)
        going = SentActivation(
            (head, lambda _: (1, body(1 << 16))), nullcontext(), ALONE, reader.feed, [Refused()], at_once=True
        )

        async def read() -> bytes:
            for _ in range(10):
                await asyncio.sleep(0)
            return pb.Reply(refusal=message_codec.to_refusal(Busy("full"))).SerializeToString()

        async def write(message: bytes) -> None:
            assert message == head

        with pytest.raises(Busy, match="full"):
            await soon(going.exchange(SimpleNamespace(cancel=lambda: None), (write, read)))

    run(scenario())


class Scripted(AbstractAsyncContextManager[Any]):
    """A call that reads these messages; an error is raised, and an event awaited. Notes what is written to it."""

    def __init__(self, *script: object, write: Callable[[bytes], Awaitable[object]] | None = None) -> None:
        self.script, self.slow, self.written = list(script), write, list[bytes]()

    async def write(self, message: bytes) -> None:
        if self.slow is not None:
            await self.slow(message)
        self.written.append(message)

    async def read(self) -> Any:
        while self.script:
            match self.script.pop(0):
                case asyncio.Event() as event:
                    await event.wait()
                case Exception() as error:
                    raise error
                case message:
                    return message
        return grpc.aio.EOF

    def cancel(self) -> None:
        """It has no other end."""

    async def __aenter__(self) -> Any:
        return self.write, self.read

    async def __aexit__(self, *error: object) -> None:
        return None


def exchanged(first: Scripted, *stripes: Scripted, claim: Claim = ALONE, at_once: bool = True) -> Awaitable[Gradient]:
    sent = activation(AT_ONCE)
    head, body = message_codec.announced(sent, 1)
    going = SentActivation(
        (head, lambda _: (len(stripes), body(1 << 16))),
        nullcontext(),
        claim,
        GradientReader(sent).feed,
        stripes,
        at_once,
    )
    return soon(going.exchange(first, (first.write, first.read)))


LOST = Unreachable("its connection was lost")
FULL = pb.Reply(refusal=message_codec.to_refusal(Busy("full"))).SerializeToString()


def replies() -> list[bytes]:
    sent = activation(AT_ONCE)
    gradient = Gradient(sent.header.microbatch, replace(sent.hidden, name="grad"), 1.0, 7, ("B",))
    return list(message_codec.to_gradient(gradient, 1 << 18))


def test_the_reason_of_a_refusal_after_the_grant_comes_only_from_the_first_call() -> None:
    async def scenario() -> None:
        refused = asyncio.Event()
        asyncio.get_running_loop().call_later(0.01, refused.set)
        with pytest.raises(Busy, match="full"):
            await exchanged(Scripted(to_grant(0), refused, FULL), Scripted(LOST))

    run(scenario())


def test_a_connection_lost_while_it_carries_a_granted_body_ends_the_call() -> None:
    async def scenario() -> None:
        async def lost(message: bytes) -> None:
            raise LOST

        with pytest.raises(Unreachable, match="was lost"):
            await exchanged(Scripted(to_grant(0), asyncio.Event()), Scripted(write=lost))

    run(scenario())


def test_a_second_grant_of_a_body_sent_at_once_is_a_violation() -> None:
    async def scenario() -> None:
        with pytest.raises(Violation):
            await exchanged(Scripted(to_grant(0), to_grant(0), asyncio.Event()), Scripted(asyncio.Event()))

    run(scenario())


def test_a_part_of_a_reply_may_overtake_its_first_message() -> None:
    async def scenario() -> None:
        head, *rest = replies()
        late, begun = asyncio.Event(), list[bool]()
        asyncio.get_running_loop().call_later(0.01, late.set)
        claim = replace(ALONE, replying=lambda: begun.append(late.is_set()))
        assert rest
        got = await exchanged(Scripted(to_grant(0), late, head, asyncio.Event()), Scripted(*rest), claim=claim)
        assert got.grad.data == activation(AT_ONCE).hidden.data
        assert begun == [True]

    run(scenario())


def test_other_connections_carry_a_reply_that_comes_instead_of_the_grant() -> None:
    async def scenario() -> None:
        head, *rest = replies()
        got = await exchanged(Scripted(head, asyncio.Event()), Scripted(*rest), at_once=False)
        assert got.grad.data == activation(AT_ONCE).hidden.data

    run(scenario())


def test_a_body_has_left_once_all_calls_have_sent_their_part() -> None:
    async def scenario() -> None:
        last_has_ended, gone, left = asyncio.Event(), asyncio.Event(), list[bool]()

        async def wait(message: bytes) -> None:
            await last_has_ended.wait()

        async def end(message: bytes) -> None:
            if message == NO_MORE:
                last_has_ended.set()

        def leave() -> None:
            left.append(slow.written != [])
            gone.set()

        first = Scripted(to_grant(0), gone, *replies())
        slow, last = Scripted(asyncio.Event(), write=wait), Scripted(asyncio.Event(), write=end)
        await exchanged(first, slow, last, claim=replace(ALONE, left=leave), at_once=False)
        assert left == [True]
        assert len(last.written) > 1

    run(scenario())


@pytest.mark.parametrize("limits", ["capped", *soak([None])])
def test_filler_precedes_the_reply_on_each_idle_connection(carried: Carried, limits: str | None) -> None:
    caps = LimitSettings(upload_mbit_per_s=2000, download_mbit_per_s=2000) if limits else None
    filler, filled, may_reply = [0], asyncio.Event(), asyncio.Event()

    async def see(message: Any) -> None:
        filler[0] += message == FILLERS[FILLER_BYTES[0]]
        if filler[0] == CONNECTIONS:
            filled.set()

    async def serve(header: Header, body: Body) -> Gradient:
        hidden = (await body()).hidden
        body.reply_soon()
        await may_reply.wait()
        return Gradient(header.microbatch, HostTensor("grad", hidden.dtype, hidden.shape, hidden.data), 1.0, 7, ())

    async def scenario() -> None:
        carried.seen = see
        async with pair(Node(serve), limits=caps) as both:
            may_reply.set()
            await both.a.propagate(both.peer, activation(LARGE))
            is_far(both)
            rate = both.a.line.down.bytes_per_s
            may_reply.clear()
            await soon(all_have_ended(both.b))
            both.b.line._leaving.clear()
            sent = activation(LARGE, counter=1)
            flight = asyncio.create_task(both.a.propagate(both.peer, sent))
            await soon(filled.wait())
            assert rate == both.a.line.down.bytes_per_s, (
                "the filler and the wait after it do not count towards the rate"
            )
            may_reply.set()
            assert (await flight).grad.data == sent.hidden.data
            both.b.line.leaves("A")
            await both.a.propagate(both.peer, activation(LARGE, counter=2))
            assert filler == [CONNECTIONS], "other bodies are being sent, so the connections are not idle"

    run(scenario())


@pytest.mark.parametrize("reached", [True, False])
def test_filler_for_a_peer_that_is_lost_leaves_nothing(reached: bool) -> None:
    @asynccontextmanager
    async def calling(*_: object, control: bool = False, part: int = 0) -> AsyncIterator[tuple[PeerChannel, float]]:
        if part or not reached:
            raise Unreachable("lost")
        yield PeerChannel("host:1", None, None), 1.0

    async def scenario() -> None:
        line, clock = OwnersLine(LimitSettings()), asyncio.get_running_loop().time
        line.measured.up.ended(line.measured.up.began(clock() - 1.0), 50e6, clock())
        line.measured.answered("B", 0.2)
        warming = Warming(line, calling, lambda peer: asyncio.sleep(0))
        warming.warm([advert("host:1")], MUCH)
        [sending] = warming._under_way.values()
        await sending
        await asyncio.sleep(1.0)
        assert not warming._under_way
        assert line.measured.rested("B", clock())

    virtual_time.run(scenario(), limit_s=10)


def test_repeated_filler_is_a_violation() -> None:
    async def filler() -> bytes:
        return FILLERS[FILLER_BYTES[0]]

    async def scenario() -> None:
        collected = Collected(GradientReader(activation(LARGE)).feed, [])
        collected._begun.set()
        with pytest.raises(Violation):
            await soon(collected._receive_stripe(filler))

    run(scenario())


def test_only_idle_connections_to_a_distant_peer_get_filler_before_a_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    plain = PeerChannel.send_whole

    async def counted(channel: PeerChannel, method: str, message: bytes, **options: Any) -> Any:
        reply = await plain(channel, method, message, **options)
        if method == "Warm":
            taken.append(len(pb.Filler.FromString(message).data))
        return reply

    monkeypatch.setattr(PeerChannel, "send_whole", counted)

    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            under_way = both.a._warming._under_way
            both.a.warm([both.peer], PART_BYTES - 1)
            assert not under_way, "a body that uses one connection needs no filler"
            both.a.warm([both.peer], LARGE_BYTES)
            await asyncio.gather(*under_way.values())
            assert both.a.line.round_trip_s("B") is not None, "the round trip is measured because it was not known"
            assert not taken, "the peer is near"
            is_far(both)
            for _ in range(3):
                both.a.warm([both.peer], LARGE_BYTES)
            await asyncio.gather(*under_way.values())
            assert taken == CONNECTIONS * [FILLER_BYTES[0]]
            both.a.warm([both.peer], LARGE_BYTES)
            assert not under_way, "the connections have just been used"
            both.a.line._leaving.clear()
            both.a.warm([both.peer], LARGE_BYTES)
            assert under_way
        assert not under_way, "nothing outlives the transport"

    run(scenario())


def test_a_lost_connection_ends_the_attempt_and_leaves_nothing(
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


def test_a_striped_reply_that_is_broken_off_ends_the_other_calls_without_a_logged_error(
    carried: Carried, caplog: pytest.LogCaptureFixture
) -> None:
    """As when the caller is killed: gRPC cannot send the status of a call whose first write was broken off."""

    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            await both.a.describe(both.peer)
            is_far(both)
            parts = both.b._servicer._counted

            def broken_off(*arguments: Any) -> Iterator[bytes]:
                yield from itertools.islice(parts(*arguments), 6)
                raise Unreachable("the caller is gone")

            both.b._servicer._counted = broken_off  # type: ignore[assignment,method-assign]
            with pytest.raises(Unreachable):
                await soon(both.a.propagate(both.peer, activation(LARGE)))
            assert carried.sent.get("Stripe", 0) > 0
            await all_have_ended(both.b)

    run(scenario())
    assert not logged(caplog)


def test_a_cancelled_sender_leaves_nothing(carried: Carried, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_refusal_arrives_while_other_connections_carry_the_body(carried: Carried) -> None:
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


def test_without_other_connections_the_first_carries_the_whole_body(
    carried: Carried, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            is_far(both)
            monkeypatch.setattr(both.a.line, "connections", lambda *_, **__: 3)
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


def snapshot_of(tensors: tuple[HostTensor, ...]) -> tuple[Node, Callable[[Pair], Coroutine[Any, Any, Any]], Any]:
    """A node that serves the snapshot, how to fetch it, and the expected result."""
    snapshot, specs = Snapshot("B", 4, 40, tensors), tuple(one.spec for one in tensors)

    async def shelf(request: SnapshotRequest) -> Snapshot:
        return snapshot

    def fetch(both: Pair) -> Coroutine[Any, Any, Snapshot]:
        return both.a.fetch_snapshot(both.peer, SnapshotRequest(1, 4, 0.0), 20.0, specs)

    return Node(hang, shelf), fetch, snapshot


def state_of(donor: Donor) -> tuple[Node, Callable[[Pair], Coroutine[Any, Any, Any]], Any]:
    """The same for a state."""
    return Node(hang, lend=donor.lend), lambda both: both.a.fetch_state(both.peer, 20.0, LONG_SPECS), LONG


@pytest.mark.parametrize(
    ("what", "limits"), [("snapshot", None), ("state", "capped"), *soak([("snapshot", "capped"), ("state", None)])]
)
def test_weights_from_a_distant_peer_use_all_connections(carried: Carried, what: str, limits: str | None) -> None:
    caps = LimitSettings(upload_mbit_per_s=2000, download_mbit_per_s=2000) if limits else None

    async def scenario() -> None:
        events = Events()
        node, fetch, whole = snapshot_of(LONG.tensors) if what == "snapshot" else state_of(Donor(LONG))
        async with pair(node, theirs=events, limits=caps) as both:
            assert await fetch(both) == whole
            assert "Stripe" not in carried.sent, "the peer is near"
            is_far(both)
            assert await soon(fetch(both)) == whole
            assert carried.sent["Stripe"] == 2 * (CONNECTIONS - 1), "the number, and the end without a body"
            assert carried.received["Stripe"] > CONNECTIONS
            sent = [f["bytes"] for kind, f in events.seen if kind == "bytes" and f["direction"] == "out"]
            assert sent == 2 * [sum(spec.nbytes for spec in LONG_SPECS)]

    run(scenario())


def gradient_of() -> tuple[Node, Callable[[Pair], Coroutine[Any, Any, Any]], Any]:
    """The same for the reply to an activation."""
    sent = activation(LARGE)
    return Node(echo), lambda both: both.a.propagate(both.peer, sent), sent.hidden.data


@pytest.mark.parametrize("what", ["snapshot", "state", "gradient"])
def test_sent_bytes_count_even_if_the_caller_ends_the_call(
    carried: Carried, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A caller ends its call as soon as it has everything; here the last write does not return before that."""
    plain, given = capped_line.OwnersLine.sender, 0
    size = LARGE_BYTES if what == "gradient" else sum(spec.nbytes for spec in LONG_SPECS)

    def sender(line: capped_line.OwnersLine, write: capped_line.Write, *rank: Any) -> capped_line.Write:
        send = plain(line, write, *rank)

        async def stuck(message: bytes) -> None:
            nonlocal given
            await send(message)
            given += len(message)
            if given >= size:
                await asyncio.Event().wait()

        return stuck

    async def scenario() -> None:
        events = Events()
        kinds = {"snapshot": partial(snapshot_of, LONG.tensors), "state": partial(state_of, Donor(LONG))}
        node, fetch, whole = kinds.get(what, gradient_of)()
        async with pair(node, theirs=events) as both:
            is_far(both)
            line = both.b._servicer._line
            monkeypatch.setattr(line, "sender", partial(sender, line))
            got = await soon(fetch(both))
            assert (got.grad.data if what == "gradient" else got) == whole
            await soon(all_have_ended(both.b))
            sent = [f["bytes"] for kind, f in events.seen if kind == "bytes" and f["direction"] == "out"]
            assert sent == [size]

    run(scenario())


def test_a_reply_counts_even_if_a_connection_is_lost_as_it_completes() -> None:
    last = asyncio.Event()

    async def write(message: bytes) -> None:
        assert message == NO_MORE

    async def lost() -> bytes:
        await last.wait()
        raise Unreachable("the connection was lost")

    class ParallelCall(AbstractAsyncContextManager[Any]):
        async def __aenter__(self) -> Any:
            return write, lost

        async def __aexit__(self, *error: object) -> None:
            return None

    async def scenario() -> None:
        messages = [b"first"]

        async def read() -> bytes:
            if not messages:
                await last.wait()
            return messages.pop() if messages else b"last"

        collected = Collected(lambda message: "whole" if message == b"last" else None, [ParallelCall()])
        collecting = asyncio.create_task(collected.whole(read))
        for _ in range(10):
            await asyncio.sleep(0)
        last.set()
        assert await soon(collecting) == "whole"

    run(scenario())


def test_a_state_transfer_resumes_after_one_of_its_connections_is_lost(
    carried: Carried, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part received in order is kept; what the other connections brought beyond it is sent again."""
    monkeypatch.setattr(grpc_transport, "RESUME_PAUSE_S", 0.05)
    lost: list[bool] = []

    async def scenario() -> None:
        donor = Donor(LONG, LONG)
        node, fetch, whole = state_of(donor)

        async def lose(call: Any) -> None:
            if carried.received["Stripe"] == 6 and not lost:
                lost.append(True)
                call.cancel()

        async with pair(node) as both:
            is_far(both)
            carried.after_read = lose
            assert await soon(fetch(both)) == whole
        assert lost
        assert donor.asked == [None, NUMBER]

    run(scenario())


def test_a_snapshot_that_loses_one_of_its_connections_leaves_nothing(
    carried: Carried, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = watched_buffers(monkeypatch)

    async def lose(call: Any) -> None:
        call.cancel()

    async def scenario() -> None:
        node, fetch, _ = snapshot_of(LONG.tensors)
        async with pair(node) as both:
            is_far(both)
            carried.after_read = lose
            with pytest.raises(Unreachable):
                await soon(fetch(both))
            assert alive(buffers) == 0

    run(scenario())


def test_the_round_trip_is_measured_before_a_large_transfer_from_a_peer() -> None:
    async def scenario() -> None:
        for shape, asked in (((16,), False), ((PART_BYTES,), True)):
            node, fetch, whole = snapshot_of((tensor("vector", "uint8", shape),))
            async with pair(node) as both:
                both.a.line._round_trips.clear()
                assert await fetch(both) == whole
                assert (both.a.line.round_trip_s("B") is not None) == asked

    run(scenario())


@asynccontextmanager
async def raw_stub(node: Node) -> AsyncIterator[Callable[[str], Any]]:
    """Starts independent bare calls to a server with `node`."""
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
    return [pb.ActivationMessage.FromString(raw) for raw in (head, *body(MIN_STRIPE_BYTES))]


END = pb.ActivationMessage()


async def granted(start: Callable[[str], Any], first: pb.ActivationMessage) -> Any:
    call = start("Propagate")
    await call.write(first)
    assert (await soon(call.read())).HasField("grant")
    return call


async def parallel_call(start: Callable[[str], Any], number: int) -> Any:
    call = start("Stripe")
    await call.write(pb.ActivationMessage(stripe=number))
    return call


def test_parts_may_come_before_the_header() -> None:
    async def scenario() -> None:
        async with raw_stub(Node(echo)) as start:
            head, *body = messages(7)
            early = [await parallel_call(start, 7) for _ in range(3)]
            for call in early:
                await call.write(body.pop())
                await call.write(END)
            await asyncio.sleep(0.05)
            main = await granted(start, head)
            for one in (*body, END):
                await main.write(one)
            assert (await soon(main.read())).HasField("gradient")

    run(scenario())


def test_calls_wait_for_their_header_and_end_with_its_call() -> None:
    async def scenario() -> None:
        known, clock = StripedCalls(), asyncio.get_running_loop().time
        waiting = [asyncio.create_task(known.of("A", stripes.to_stripe(number))) for number in (7, 7, 8)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        with known.may_carry("A", 7, lambda context: context) as body:
            assert await waiting[1] is not None
            assert clock() == 0.0
            carrying = asyncio.create_task(body.carry(nowhere, nowhere))
            await asyncio.sleep(0)
        assert not await carrying
        assert await waiting[2] is None
        assert clock() == stripes.HEADER_S
        assert not known._waiting
        assert not known._known
        assert await known.of("A", stripes.to_stripe(0)) is None

    virtual_time.run(scenario(), limit_s=100)


def test_parts_may_come_in_any_order_and_late_calls_carry_nothing() -> None:
    async def scenario() -> None:
        async with raw_stub(Node(echo)) as start:
            head, *body = messages(7)
            main, other = await granted(start, head), await parallel_call(start, 7)
            for one in reversed(body[1:]):
                await other.write(one)
            for _ in range(CONNECTIONS - 1):
                await (await parallel_call(start, 7)).write(END)
            late = await parallel_call(start, 7)
            await late.write(body[0])
            assert await soon(late.code()) is grpc.StatusCode.UNAVAILABLE, "more calls than may carry one body"
            await other.write(END)
            await main.write(body[0])
            await main.write(END)
            assert (await soon(main.read())).HasField("gradient")

    run(scenario())


@pytest.mark.parametrize("first", [{}, {"stripe": 9}, {"header": pb.ActivationHeader(stripe=9, run_id=RUN)}])
def test_an_unexpected_part_is_refused(first: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stripes, "HEADER_S", 0.05)

    async def scenario() -> None:
        async with raw_stub(Node(hang)) as start:
            call = start("Stripe")
            await call.write(pb.ActivationMessage(**first))
            await call.write(messages(9)[1])
            assert await soon(call.code()) is grpc.StatusCode.UNAVAILABLE

    run(scenario())


def test_a_protocol_error_on_a_parallel_call_is_a_violation() -> None:
    async def scenario() -> None:
        async with raw_stub(Node(echo)) as start:
            head, *body = messages(7)
            main = await granted(start, head)
            other = await parallel_call(start, 7)
            await main.write(body[0])
            await main.write(END)
            await other.write(body[0])
            assert "arrived twice" in (await soon(main.read())).refusal.message

    run(scenario())


def test_a_body_parallel_to_a_fetch_is_refused() -> None:
    async def scenario() -> None:
        node, _, snapshot = snapshot_of((tensor("vector", "uint8", (1 << 24,)),))
        async with pair(node) as both, bare(both.peer) as channel:
            stub, known = NodeStub(channel), {"timeout": 10.0, "metadata": callers.metadata()}
            main = stub.FetchSnapshot(pb.SnapshotRequest(stage=1, stripe=7), **known)
            assert (await soon(main.read())).HasField("header")
            other = stub.Stripe(**known)
            await other.write(pb.ActivationMessage(stripe=7))
            for message in messages(7)[1:3]:
                await other.write(message)
            assert await soon(other.code()) is grpc.StatusCode.UNAVAILABLE
            came = 0
            while (message := await soon(main.read())) is not grpc.aio.EOF:
                came += sum(len(frame.chunk.data) for frame in message.frames)
            assert came == snapshot.nbytes

    run(scenario())


def test_two_bodies_of_one_caller_may_not_have_the_same_number() -> None:
    async def scenario() -> None:
        async with raw_stub(Node(echo)) as start:
            await granted(start, messages(7)[0])
            second = start("Propagate")
            await second.write(messages(7)[0])
            assert "two bodies have the same number" in (await soon(second.read())).refusal.message

    run(scenario())


def test_a_restarted_node_is_served_though_its_earlier_call_has_not_ended_yet() -> None:
    """As if the machine had lost its network before its process was restarted."""

    async def scenario() -> None:
        node = Node(hang)
        async with pair(node) as both:
            is_far(both)
            earlier = asyncio.create_task(both.a.propagate(both.peer, activation(LARGE)))
            await soon(node.entered.wait())
            node.serve = echo
            restarted = replace(both, a=transport("A"))
            is_far(restarted)
            try:
                sent = activation(LARGE, counter=2)
                assert (await soon(restarted.a.propagate(both.peer, sent))).grad.data == sent.hidden.data
            finally:
                await restarted.a.close()
                earlier.cancel()
                await asyncio.wait([earlier])

    run(scenario())


async def nowhere(*_: object) -> None:
    raise AssertionError("nothing is sent or read here")


def test_a_reply_whose_parallel_call_is_lost_fails_at_once() -> None:
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

        async def body() -> bytes:
            return b"body"

        carrying = asyncio.create_task(stripes.carry(broken, no_more))
        await asyncio.sleep(0)
        with pytest.raises(grpc.aio.InternalError):
            await soon(stripes.reply([b"head", b"1", b"2"], stuck))
        stripes.end()
        assert await carrying
        refused = Stripes()
        carrying = asyncio.create_task(refused.carry(broken, body))
        await asyncio.sleep(0)
        refused.end()
        assert not await carrying, "no place has been granted"

    run(scenario())


@pytest.mark.parametrize("begins", [0.0, 0.5])
def test_a_body_is_waited_for_without_limit_only_while_a_call_brings_it(begins: float) -> None:
    """`begins`: how much of the patience has passed when the call begins."""

    async def scenario() -> None:
        stripes, clock = Stripes(), asyncio.get_running_loop().time
        stripes.expect(lambda message: False)

        async def late() -> bytes:
            await asyncio.sleep(2 * RESERVE_S)
            return NO_MORE

        async def carry() -> bool:
            await asyncio.sleep(begins * RESERVE_S)
            return await stripes.carry(nowhere, late)

        carrying = asyncio.create_task(carry())
        await asyncio.sleep(0)
        began = clock()
        with pytest.raises(Silent):
            await stripes.body(Patience())
        assert clock() - began == pytest.approx(3 * RESERVE_S)
        stripes.end()
        assert await carrying

    virtual_time.run(scenario(), limit_s=100)


@pytest.mark.parametrize(("messages", "seconds"), [([], 7), ([b"header"], 3)])
def test_the_limit_on_silence_is_named_by_its_own_length(messages: list[bytes], seconds: int) -> None:
    async def scenario() -> None:
        call, never = Scripted(*messages, asyncio.Event()), Fetched[str](lambda message: None, "state came from B")
        with pytest.raises(Unreachable, match=f"^no more of the state came from B for {seconds} s$"):
            await never.within(call, (), (call.read, call.read), (7.0, 3.0, None))
        assert asyncio.get_running_loop().time() == seconds

    virtual_time.run(scenario(), limit_s=100)


@asynccontextmanager
async def noted(log: list[str]) -> AsyncIterator[None]:
    log.append("begins")
    try:
        yield
    finally:
        log.append("ends")


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("striped", [False, True])
def test_a_body_counts_as_in_transit_until_it_is_here_or_its_call_ends(striped: bool, broken: bool) -> None:
    async def scenario() -> None:
        sent, log, clock = activation(AT_ONCE), list[str](), asyncio.get_running_loop().time
        head, body = message_codec.announced(sent)
        header = message_codec.from_header(unpacked(head, pb.ActivationMessage)[0], RUN, MUCH)
        parts = list(body(1 << 18))
        came = parts[:-1] if broken else parts
        first = Scripted(*came, *([NO_MORE] if striped and not broken else []))

        async def ask() -> None:
            assert log == ["begins"]

        coming = IncomingActivation(header, [], lambda **_: None, first.read, ask, Patience(), partial(noted, log))
        coming.stripes = Stripes() if striped else None
        if broken:
            with pytest.raises(Violation):
                await coming()
            assert clock() == pytest.approx(CANCEL_GRACE_S), "it may have been cancelled"
        else:
            assert (await coming()).hidden.data == sent.hidden.data
        assert coming.complete != broken
        assert coming.received == sum(map(len, came))
        assert log == ["begins", "ends"]

    virtual_time.run(scenario(), limit_s=100)


def test_the_messages_of_a_reply_get_shorter_with_more_calls_and_are_never_longer_than_wanted() -> None:
    async def scenario() -> None:
        stripes = Stripes()
        assert stripes.message_bytes(LARGE_BYTES, 1000) == 1000
        alone = stripes.message_bytes(8 * MIN_STRIPE_BYTES, MUCH)
        carrying = [asyncio.create_task(stripes.carry(nowhere, nowhere)) for _ in range(CONNECTIONS)]
        await asyncio.sleep(0)
        assert stripes.message_bytes(8 * MIN_STRIPE_BYTES, MUCH) < alone
        stripes.end()
        assert await asyncio.gather(*carrying) == [False] * CONNECTIONS

    run(scenario())


def test_of_two_replies_that_soon_follow_only_the_first_sends_filler() -> None:
    async def scenario() -> None:
        line, replies = MeasuredLine(), [Stripes(), Stripes()]
        for one in replies:
            one.fill(line, "A", FILLER_BYTES[0])
        assert [bool(one._filler) for one in replies] == [True, False], "the connections are warm then"

    run(scenario())


def test_a_reply_goes_over_the_first_call_if_the_others_are_cancelled_as_it_begins() -> None:
    async def scenario() -> None:
        stripes, sent = Stripes(), list[bytes]()
        stripes.expect(lambda message: True)

        async def ended() -> bytes:
            return NO_MORE

        async def write(message: bytes) -> None:
            sent.append(message)

        carrying = [asyncio.create_task(stripes.carry(nowhere, ended)) for _ in range(2)]
        await asyncio.sleep(0)
        replying = asyncio.create_task(stripes.reply([b"head", b"1", b"2"], write))
        for one in carrying:
            one.cancel()
        await soon(replying)
        assert sent == [b"head", b"1", b"2"]

    run(scenario())


def test_a_reply_goes_over_the_first_call_once_all_others_have_ended() -> None:
    async def scenario() -> None:
        stripes, sent = Stripes(), list[bytes]()
        stripes.expect(lambda message: True)

        async def silent() -> bytes:
            await asyncio.sleep(1.0)
            raise Silent("no end of the body")

        async def write(message: bytes) -> None:
            sent.append(message)

        carrying = [asyncio.create_task(stripes.carry(nowhere, silent)) for _ in range(2)]
        await asyncio.sleep(0)
        await stripes.reply([b"head", b"1", b"2"], write)
        assert sent == [b"head", b"1", b"2"]
        for one in carrying:
            with pytest.raises(Silent):
                await one

    virtual_time.run(scenario(), limit_s=100)


@pytest.mark.parametrize("lost", [True, False])
def test_a_call_that_arrives_as_a_reply_ends_carries_nothing(lost: bool) -> None:
    """At whichever turn of the event loop the call arrives."""

    async def story(turns: int) -> None:
        stripes, sent = Stripes(), list[bytes]()

        async def ended() -> bytes:
            return NO_MORE

        async def late() -> bytes:
            for _ in range(turns):
                await asyncio.sleep(0)
            return NO_MORE

        async def write(message: bytes) -> None:
            await asyncio.sleep(0)
            if lost and message != b"header":
                raise ConnectionError("lost")
            sent.append(message)

        first = asyncio.create_task(stripes.carry(write, ended))
        await asyncio.sleep(0)
        reply = asyncio.create_task(stripes.reply([b"header", b"one", b"two"], write))
        results = await asyncio.gather(first, reply, stripes.carry(write, late), return_exceptions=True)
        stripes.end()
        for one in results[0], results[2]:
            assert one is True or (lost and isinstance(one, Unread)), "its write was broken off"
        assert isinstance(results[1], ConnectionError) if lost else sent == [b"header", b"one", b"two"]

    for turns in range(16):
        run(story(turns))


def test_calls_without_stripes_do_not_exclude_each_other_and_accept_none() -> None:
    async def story() -> None:
        striped, duplex_of = StripedCalls(), lambda call: call
        with striped.may_carry("A", 0, duplex_of), striped.may_carry("A", 0, duplex_of):
            assert await striped.of("A", stripes.to_stripe(0)) is None

    run(story())


def test_a_reply_whose_connection_is_lost_is_freed_before_the_call_ends(
    monkeypatch: pytest.MonkeyPatch, without_collection: None
) -> None:
    """gRPC may take ten seconds to end the call, and the errors refer to each other until the next collection."""
    made, freed, give_up = watched_buffers(monkeypatch), list[bool](), callers.Callers.give_up

    async def is_lost(carrying: Stripes, messages: Any, write: Any) -> None:
        raise grpc.aio.InternalError("gRPC cannot write")

    async def noted(served: callers.Callers, context: Any, error: Any) -> None:
        freed.append(made[0]() is None)
        await give_up(served, context, error)

    monkeypatch.setattr(Stripes, "reply", is_lost)
    monkeypatch.setattr(callers.Callers, "give_up", noted)

    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            is_far(both)
            with pytest.raises(Unreachable):
                await both.a.propagate(both.peer, activation(LARGE))

    run(scenario())
    assert freed == [True]
