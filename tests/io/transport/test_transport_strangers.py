"""How much of a node's transport strangers can occupy (calls, places, copies of weights), and for how long."""

import asyncio
import gc
import math
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from machine import at_most
from node_stub import NodeStub
from soak import soak
from transport_fixture import (
    LARGE,
    RUN,
    SOON_S,
    Node,
    Pair,
    activation,
    advert,
    alive,
    all_have_ended,
    bare,
    echo,
    hang,
    hold_nothing,
    logged,
    pair,
    run,
    soon,
    tensor,
    watched_buffers,
)

from noloco_p2p.config import LimitSettings
from noloco_p2p.core import wire
from noloco_p2p.core.line_cap import BYTES_PER_MBIT
from noloco_p2p.core.line_rate import MIN_STRIPE_BYTES
from noloco_p2p.core.messages import Gradient, Header, HostTensor, PeerId, ReplicaState, TensorSpec
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.errors import Busy, Declined, Unreachable, Violation
from noloco_p2p.io.transport import callers, frame_codec, message_codec, slow_transfers, weights_codec
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.callers import (
    ACTIVATIONS,
    CALLS,
    DRAINS,
    LATE,
    LATE_PER_S,
    LET_GO_S,
    TRANSFERS,
    Caller,
    Callers,
    Share,
)
from noloco_p2p.io.transport.capped_line import WINDOW_BYTES, OwnersLine
from noloco_p2p.io.transport.incoming import IncomingActivation
from noloco_p2p.io.transport.reply_reader import GradientReader
from noloco_p2p.io.transport.servicer import GrpcServicer
from noloco_p2p.io.transport.slow_transfers import MIN_BYTES_PER_S, RESERVE_S, RESTART, Patience, Silent, Unread
from noloco_p2p.io.transport.stripes import NO_MORE, StripedCalls, Stripes, to_stripe
from noloco_p2p.ports import Body
from noloco_p2p.sim import virtual_time

MIDDLE = (3, 333, 777)
"""3 MiB: a few messages."""
ME = callers.metadata()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes lose patience after a second, scaled by the slowness of this machine, and well before `soon` does."""
    patience_s = min(at_most(1.0), SOON_S / 2)
    monkeypatch.setattr(slow_transfers, "RESERVE_S", patience_s)
    monkeypatch.setattr(slow_transfers, "STATE_RESERVE_S", patience_s)


@asynccontextmanager
async def server(node: Node) -> AsyncIterator[tuple[Pair, NodeStub]]:
    """A server with `node`, a regular client transport, and a bare stub."""
    async with pair(node) as both, bare(both.peer) as channel:
        yield both, NodeStub(channel)


def announced(stripe: int = 0) -> tuple[pb.ActivationMessage, list[pb.ActivationMessage]]:
    head, body = message_codec.announced(activation(MIDDLE), stripe)
    return pb.ActivationMessage.FromString(head), list(map(pb.ActivationMessage.FromString, body(MIN_STRIPE_BYTES)))


async def nothing(call: Any, first: list[pb.ActivationMessage]) -> None:
    """Nothing follows the header."""


async def drips(call: Any, body: list[pb.ActivationMessage]) -> None:
    """Send one byte now and then."""
    chunk = body[0].frames[0].chunk
    for at in range(10_000):
        one = pb.Chunk(tensor=0, offset=at, data=chunk.data[at : at + 1])
        await call.write(pb.ActivationMessage(frames=[pb.Frame(chunk=one)]))
        await asyncio.sleep(0.05)


async def claims_the_end(call: Any, body: list[pb.ActivationMessage]) -> None:
    """Claim that this call has ended its part of a striped body, though no other call brings the rest."""
    await call.write(pb.ActivationMessage())


@pytest.mark.parametrize(("brings", "stripe"), [(nothing, 0), (drips, 0), (nothing, 7), (claims_the_end, 7)])
def test_a_place_is_held_only_while_bytes_arrive(
    brings: Callable[[Any, list[pb.ActivationMessage]], Coroutine[Any, Any, None]], stripe: int, hasty: None
) -> None:
    """Hole 2: eight calls that send a header and no body."""

    async def scenario() -> None:
        node = Node(echo)
        async with server(node) as (_, stub):
            calls = [stub.Propagate(timeout=60.0, metadata=ME) for _ in range(8)]
            bringing = list[asyncio.Task[None]]()
            for number, call in enumerate(calls):
                head, body = announced(stripe)
                head.header.microbatch.counter = number
                head.header.stripe = stripe and stripe + number
                await call.write(head)
                assert (await soon(call.read())).HasField("grant")
                bringing.append(asyncio.create_task(brings(call, body)))
            for call in calls:
                # A caller that is just writing notices that its write fails.
                expected = "Failed" if await soon(call.code()) is grpc.StatusCode.INTERNAL else "next to no data"
                assert expected in await call.details() or brings is drips
            assert node.ends == ["Silent"] * 8
            for task in bringing:
                task.cancel()
            await asyncio.gather(*bringing, return_exceptions=True)

    run(scenario())


def test_a_callers_time_limit_is_capped() -> None:
    async def scenario() -> None:
        node = Node(echo)
        async with pair(node) as both:
            await both.a.propagate(both.peer, activation(time_left_s=1e300))
            await both.a.propagate(both.peer, activation())
        (_, header), (_, usual) = node.calls
        assert (header.time_left_s, usual.time_left_s) == (600.0, 20.0)
        assert header.avoid == usual.avoid == ("C", "D")

    run(scenario())


def test_512_anonymous_calls_end_and_others_are_served_meanwhile(hasty: None) -> None:
    """Hole 11: calls without run id and deadline; their refusals do not wait for ever to be read."""

    async def scenario() -> None:
        async with server(Node(echo)) as (both, stub):
            calls = [stub.Propagate() for _ in range(512)]
            await soon(asyncio.gather(*(call.read() for call in calls)))
            sent = activation(LARGE)
            assert (await soon(both.a.propagate(both.peer, sent))).grad.data == sent.hidden.data
            codes = await soon(asyncio.gather(*(call.code() for call in calls)))
            assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert hold_nothing(both.b._servicer.callers)

    run(scenario())


@pytest.mark.parametrize("method", ["Propagate", "Evaluate", "Stripe"])
def test_a_silent_call_ends(method: str, hasty: None) -> None:
    async def scenario() -> None:
        async with server(Node(echo)) as (both, stub):
            call = getattr(stub, method)(timeout=60.0, metadata=ME)
            assert await soon(call.code()) in (grpc.StatusCode.OK, grpc.StatusCode.ABORTED)
        # The caller receives its status slightly before the server's side of the call has ended.
        assert hold_nothing(both.b._servicer.callers)

    run(scenario())


def test_one_caller_or_host_cannot_occupy_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noloco_p2p.io.transport.service.CALLS", Share("calls", 3, 5))

    async def scenario() -> None:
        node = Node(hang)

        async def entered(count: int) -> None:
            while len(node.calls) < count:
                node.entered.clear()
                await node.entered.wait()

        async with server(node) as (both, _), bare(both.peer, "X") as x, bare(both.peer, "Y") as y:
            head, _ = announced()

            async def held(channel: Any) -> Any:
                call = NodeStub(channel).Propagate(timeout=60.0, metadata=ME)
                with suppress(grpc.aio.AioRpcError):  # the call may be refused before the write
                    await call.write(head)
                return call

            calls = [await held(x) for _ in range(3)]
            await soon(entered(3))
            assert await soon((await held(x)).code()) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await both.a.describe(both.peer)).peer_id == "B", "others are served"
            calls += [await held(y) for _ in range(2)]
            await soon(entered(5))
            with pytest.raises(Busy):
                await soon(both.a.describe(both.peer))
            for call in calls:
                call.cancel()

    run(scenario())


def test_a_peer_that_does_not_read_loses_the_copy_of_the_weights(hasty: None) -> None:
    """Hole 15."""
    weights = tensor("slow/w", "float32", (1 << 24,))
    free = asyncio.Event()

    @asynccontextmanager
    async def lend(caller: PeerId, number: int | None) -> AsyncIterator[ReplicaState]:
        try:
            yield ReplicaState("B", 1, 3, 30.0, 30, 30, (weights,), 7)
        finally:
            free.set()

    async def scenario() -> None:
        async with server(Node(echo, lend=lend)) as (both, stub):
            call = stub.FetchState(pb.StateRequest(), timeout=60.0, metadata=ME)
            assert (await soon(call.read())).HasField("header")
            await soon(free.wait())
            state = await soon(both.a.fetch_state(advert(*both.peer.addresses), 20.0, (weights.spec,)))
            assert state.tensors[0].data == weights.data, "another peer gets the weights"
            call.cancel()

    run(scenario())


@pytest.mark.parametrize(
    ("method", "window", "stripe"),
    [
        ("FetchState", 5, 0),
        ("FetchState", 65_535, 7),
        ("FetchSnapshot", 5, 7),
        ("Propagate", 65_535, 0),
        *soak([("FetchState", 5, 7), ("FetchState", 65_535, 0), ("FetchSnapshot", 5, 0), ("FetchSnapshot", 65_535, 0)]),
        *soak([("FetchSnapshot", 65_535, 7), ("Propagate", 5, 0), ("Propagate", 5, 7), ("Propagate", 65_535, 7)]),
    ],
)
def test_a_caller_that_does_not_read_pins_no_memory_and_counts_until_its_call_is_over(
    method: str,
    window: int,
    stripe: int,
    hasty: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Hole 15: gRPC keeps one message and cannot end the call. With the small window it cannot write anything."""
    made, head = watched_buffers(monkeypatch), announced(stripe)[0]

    def fresh(name: str) -> HostTensor:
        return HostTensor(name, "float32", MIDDLE, message_codec.allocate(4 * math.prod(MIDDLE)))

    @asynccontextmanager
    async def lend(caller: PeerId, number: int | None) -> AsyncIterator[ReplicaState]:
        yield ReplicaState("B", 1, 3, 30.0, 30, 30, (fresh("slow/w"),), 7)

    async def freeze(request: SnapshotRequest) -> Snapshot:
        return Snapshot("B", 4, 40, (fresh("slow/w"),))

    async def serve(header: Header, body: Body) -> Gradient:
        return Gradient(header.microbatch, fresh("grad"), 2.25, 7, ("B",))

    async def scenario() -> None:
        options = ("grpc.http2.lookahead_bytes", window), ("grpc.http2.bdp_probe", 0)
        async with pair(Node(serve, freeze, lend)) as both, bare(both.peer, options=options) as channel:
            stub, served = NodeStub(channel), both.b._servicer.callers
            if method == "Propagate":
                call = stub.Propagate(timeout=60.0, metadata=ME)
                await call.write(head)
            else:
                request = pb.StateRequest() if method == "FetchState" else pb.SnapshotRequest(stage=1, round=4)
                request.stripe = stripe
                call = getattr(stub, method)(request, timeout=60.0, metadata=ME)
            while not made or alive(made):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            share = ACTIVATIONS if method == "Propagate" else TRANSFERS
            assert served._held[share.what, "127.0.0.1"] == 1, "the call still counts, so their number is limited"
            assert not both.b._servicer._replies, "a progress request is answered with a lost microbatch"
            call.cancel()
            await all_have_ended(both.b)

    run(scenario())
    assert not logged(caplog)


async def refuse(header: Header, body: Body) -> Gradient:
    raise Busy("no place")


@pytest.mark.parametrize(("serve", "end", "places"), [(echo, "Unread", 1), (refuse, "Busy", 0)])
def test_a_caller_that_does_not_read_its_grant_or_refusal_loses_its_connection(
    serve: Callable[[Header, Body], Coroutine[Any, Any, Gradient]],
    end: str,
    places: int,
    hasty: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call keeps a place that it was granted until it is over."""
    monkeypatch.setattr(callers, "LET_GO_S", 0.1)

    async def scenario() -> None:
        node, options = Node(serve), (("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0))
        async with pair(node) as both, bare(both.peer, options=options) as channel:
            call = NodeStub(channel).Propagate(timeout=60.0, metadata=ME)
            await call.write(announced()[0])
            await soon(node.ended.wait())
            assert node.ends == [end]
            async with asyncio.timeout(at_most(SOON_S)):
                while not both.b.unread:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert both.b._servicer.callers._held[ACTIVATIONS.what, "127.0.0.1"] == places
            call.cancel()
            await all_have_ended(both.b)

    run(scenario())


def test_many_unread_gradients_are_kept_no_longer_than_one(hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sent in turn, and each used to be waited for anew: 160 of them for 53 minutes."""
    made, count = watched_buffers(monkeypatch), 10

    async def serve(header: Header, body: Body) -> Gradient:
        data = message_codec.allocate(4 * math.prod(MIDDLE))
        return Gradient(header.microbatch, HostTensor("grad", "float32", MIDDLE, data), 2.25, 7, ("B",))

    async def scenario() -> None:
        options = ("grpc.http2.lookahead_bytes", 65_535), ("grpc.http2.bdp_probe", 0)
        async with pair(Node(serve)) as both, bare(both.peer, options=options) as channel:
            calls = [NodeStub(channel).Propagate(timeout=60.0, metadata=ME) for _ in range(count)]
            for number, call in enumerate(calls):
                head, _ = announced()
                head.header.microbatch.counter = number
                await call.write(head)
            while len(made) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

            async def let_go() -> float:
                now = asyncio.get_running_loop().time
                began = now()
                while alive(made):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                return now() - began

            waited = await asyncio.wait_for(let_go(), count * slow_transfers.RESERVE_S)
            assert waited < count / 2 * slow_transfers.RESERVE_S
            for call in calls:
                call.cancel()

    run(scenario())


def test_a_caller_that_loses_a_stripe_and_reads_nothing_more_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC can end its call only when the caller reads, and kept the call and its reply until then."""
    monkeypatch.setattr(callers, "LET_GO_S", 0.1)
    joined = asyncio.Event()
    send = Stripes._send

    async def joins(self: Stripes, write: Any) -> None:
        if self._calls:
            joined.set()
        await send(self, write)

    monkeypatch.setattr(Stripes, "_send", joins)

    async def serve(header: Header, body: Body) -> Gradient:
        return Gradient(header.microbatch, tensor("grad", "float32", MIDDLE), 2.25, 7, ("B",))

    async def scenario() -> None:
        narrow = ("grpc.http2.lookahead_bytes", 3 * MIN_STRIPE_BYTES), ("grpc.http2.bdp_probe", 0)
        async with pair(Node(serve)) as both, bare(both.peer, options=narrow) as channel:
            call = NodeStub(channel).Propagate(timeout=60.0, metadata=ME)
            await call.write(announced(7)[0])
            await soon(call.read())
            async with bare(both.peer, options=narrow) as other:
                stripe = other.stream_stream("/noloco.v1.Node/Stripe")(timeout=60.0, metadata=ME)
                await stripe.write(to_stripe(7))
                await stripe.write(NO_MORE)
                await soon(joined.wait())
            while not both.b.unread:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert not hold_nothing(both.b._servicer.callers), "the call still counts, so their number is limited"
            call.cancel()
            await all_have_ended(both.b)

    run(scenario())


def test_unread_data_is_bounded_per_call() -> None:
    """gRPC's windows grew with the traffic: a stranger occupied 8 GiB with 64 calls."""
    mib, count, sent = 1 << 20, 32, [0]

    async def scenario() -> None:
        async with server(Node(hang)) as (_, stub):
            calls = [stub.Propagate(timeout=60.0, metadata=ME) for _ in range(count)]

            async def push(number: int, call: Any) -> None:
                head, _ = announced()
                head.header.microbatch.counter = number
                await call.write(head)
                while sent[0] < 2 * count * WINDOW_BYTES // mib:
                    await call.write(pb.ActivationMessage(frames=[pb.Frame(chunk=pb.Chunk(data=bytes(mib)))]))
                    sent[0] += 1

            pushing, before = [asyncio.create_task(push(*one)) for one in enumerate(calls)], -1
            while sent[0] > before:
                before = sent[0]
                await asyncio.sleep(SOON_S / 3)
            assert sent[0] <= count * (WINDOW_BYTES // mib + 1)
            for call in calls:
                call.cancel()
            await asyncio.gather(*pushing, return_exceptions=True)

    run(scenario())


def test_compressed_messages_are_refused() -> None:
    """4 KB would become 4 MiB, and take 13 times the CPU time of a refusal."""

    async def scenario() -> None:
        async with server(Node(echo)) as (both, stub):
            call = stub.Describe(pb.DescribeRequest(), timeout=60.0, metadata=ME, compression=grpc.Compression.Gzip)
            assert await soon(call.code()) is grpc.StatusCode.UNIMPLEMENTED
            assert (await both.a.describe(both.peer)).peer_id == "B"

    run(scenario())


ASKING = {
    "FetchSnapshot": pb.SnapshotRequest(stage=1),
    "FetchState": pb.StateRequest(),
    "Progress": pb.ProgressRequest(microbatches=[pb.MicrobatchId(peer="A")]),
    "Describe": pb.DescribeRequest(),
}
"""Methods with a single request, and a request for each."""


def streamed(channel: Any, method: str, **options: Any) -> Any:
    """A call of any method, written and read message by message."""
    return channel.stream_stream(f"/noloco.v1.Node/{method}")(**options)


@pytest.mark.parametrize("method", [*ASKING, "Warm"])
def test_a_call_without_a_request_counts_against_its_caller_and_is_ended(method: str, hasty: None) -> None:
    """gRPC waited for the request indefinitely, before anything counted the call."""

    async def scenario() -> None:
        async with pair(Node(echo)) as both, bare(both.peer) as channel:
            served = both.b._servicer.callers
            call = streamed(channel, method, metadata=ME)
            await call.wait_for_connection()
            while not served._held[CALLS.what, "127.0.0.1"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert await soon(call.code()) is grpc.StatusCode.UNAVAILABLE
            await all_have_ended(both.b)

    run(scenario())


@pytest.mark.parametrize("method", ASKING)
def test_an_unread_answer_keeps_its_place_but_not_its_request(
    method: str, hasty: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A request of megabytes was kept for an hour, whether refused or answered, in some cases without a place."""
    asked, kind = list["weakref.ref[Any]"](), type(ASKING[method])

    class Request:
        """A request whose lifetime can be observed."""

        def __init__(self, raw: bytes) -> None:
            self._request = kind.FromString(raw)
            asked.append(weakref.ref(self))

        FromString = classmethod(lambda cls, raw: cls(raw))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._request, name)

    monkeypatch.setattr(pb, kind.DESCRIPTOR.name, Request)

    async def scenario() -> None:
        options = ("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0)
        async with pair(Node(echo)) as both, bare(both.peer, options=options) as channel:
            served = both.b._servicer.callers
            call = streamed(channel, method, timeout=60.0, metadata=ME)
            await call.write(ASKING[method].SerializeToString())
            while not asked or asked[0]() is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(2 * slow_transfers.RESERVE_S)
            assert served._held[CALLS.what, "127.0.0.1"] == 1
            call.cancel()
            await all_have_ended(both.b)

    run(scenario())
    assert not logged(caplog)


def test_a_silent_parallel_call_does_not_hold_up_a_transfer(hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hole 15: the weights would wait for ever for that call to read them."""
    weights, here, plain = tensor("slow/w", "float32", (1 << 20,)), asyncio.Event(), StripedCalls.of

    async def of(self: StripedCalls, caller: PeerId, raw: bytes) -> Any:
        here.set()
        return await plain(self, caller, raw)

    monkeypatch.setattr(StripedCalls, "of", of)

    @asynccontextmanager
    async def lend(caller: PeerId, number: int | None) -> AsyncIterator[ReplicaState]:
        yield ReplicaState("B", 1, 3, 30.0, 30, 30, (weights,), 7)

    async def scenario() -> None:
        async with server(Node(echo, lend=lend)) as (_, stub):
            silent = stub.Stripe(timeout=60.0, metadata=ME)
            await silent.write(pb.ActivationMessage(stripe=7))
            await soon(here.wait())
            call, came = stub.FetchState(pb.StateRequest(stripe=7), timeout=60.0, metadata=ME), 0
            while (message := await soon(call.read())) is not grpc.aio.EOF:
                came += sum(len(frame.chunk.data) for frame in message.frames)
            assert came == weights.data.nbytes
            silent.cancel()

    run(scenario())


@pytest.mark.parametrize("method", ["fetch_state", "fetch_snapshot"])
def test_a_donor_that_sends_too_slowly_is_given_up_long_before_the_deadline(
    method: str, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hole 15: each byte arrives before the silence is too long, and the newcomer would wait for 1,800 s, for a
    replica's state or for the weights that a guardian has."""
    state = ReplicaState("B", 1, 3, 30.0, 30, 30, (tensor("slow/w", "float32", (1 << 20,)),), 7)
    snapshot, expected = Snapshot("B", 3, 30, state.tensors), tuple(one.spec for one in state.tensors)
    messages = weights_codec.to_state(state, 0, 0) if method == "fetch_state" else weights_codec.to_snapshot(snapshot)
    gone, calls = asyncio.Event(), list[object]()

    async def dripping(self: Any, said: Caller, context: Any, held: ExitStack) -> None:
        calls.append(await slow_transfers.read_request(context))
        try:
            head, *body = messages
            await context.write(head)
            for at in range(100_000):
                chunk = pb.Chunk(tensor=0, offset=at, data=body[0][at : at + 1])
                await context.write(pb.StateMessage(frames=[pb.Frame(chunk=chunk)]).SerializeToString())
                await asyncio.sleep(0.05)
        finally:
            gone.set()

    monkeypatch.setattr(GrpcServicer, method, dripping)

    async def scenario() -> None:
        async with pair(Node(hang)) as both:
            wanted = () if method == "fetch_state" else (SnapshotRequest(1, weights="float32"),)
            with pytest.raises(Unreachable, match="next to no data"):
                await soon(getattr(both.a, method)(both.peer, *wanted, 1800.0, expected))
            await soon(gone.wait())
        assert len(calls) == 1

    run(scenario())


# --- patience, in virtual time ---------------------------------------------------------------------------------------


async def after(seconds: float, nbytes: int) -> bytes:
    await asyncio.sleep(seconds)
    return bytes(nbytes)


async def take_for_ever(patience: Patience) -> None:
    while True:
        await patience.wait(after(1.0, int(MIN_BYTES_PER_S / 2)))


def test_patience_lasts_only_while_enough_bytes_arrive() -> None:
    async def scenario() -> None:
        now = asyncio.get_running_loop().time
        fast, slow = Patience(), Patience()
        for _ in range(100):
            await fast.wait(after(10.0, int(10 * MIN_BYTES_PER_S)))
        began = now()
        with pytest.raises(Unreachable):
            await take_for_ever(slow)
        assert RESERVE_S < now() - began <= 2 * RESERVE_S
        began = now()
        with pytest.raises(Unreachable):
            await Patience().wait(after(1000.0, 1 << 20))
        assert now() - began == pytest.approx(RESERVE_S)

    virtual_time.run(scenario(), limit_s=10_000)


def test_a_body_may_wait_for_earlier_bodies_of_its_own_caller_only() -> None:
    async def scenario() -> None:
        here, now = Callers(), asyncio.get_running_loop().time
        honest, silent = Caller("h", "A"), Caller("h", "X")
        with here.sending(honest) as first, here.sending(honest) as second, here.sending(silent) as other:
            assert first is second is not other
            behind = asyncio.create_task(second.wait(after(60.0, 1 << 20)))
            stranger = asyncio.create_task(other.wait(after(60.0, 1 << 20)))
            for _ in range(6):
                await first.wait(after(10.0, 1 << 20))
            assert len(await behind) == 1 << 20
            with pytest.raises(Unreachable):
                await stranger
        assert hold_nothing(here)
        assert now() == pytest.approx(60.0)

    virtual_time.run(scenario(), limit_s=10_000)


def test_a_caller_that_has_been_silent_is_served_again_while_an_earlier_activation_is_still_here() -> None:
    """All of its later bodies used to fail at once, for as long as it had any activation here."""

    async def scenario() -> None:
        here, caller, now = Callers(), Caller("h", "A"), asyncio.get_running_loop().time
        with here.sending(caller) as patience:
            lost = [asyncio.create_task(patience.wait(after(2 * RESERVE_S, 0))) for _ in range(3)]
            await asyncio.wait(lost)
            assert now() == pytest.approx(RESERVE_S)
            with pytest.raises(Unreachable):
                await patience.wait(after(RESERVE_S, 0))
            assert now() == pytest.approx((1 + RESTART) * RESERVE_S), "one that stays silent holds a place for a second"
            await patience.wait(after(RESTART * RESERVE_S / 2, 1 << 20))
            await patience.wait(after(RESERVE_S / 2, 0))
            assert [type(one.exception()) for one in lost] == [Silent] * 3
        assert not here._held

    virtual_time.run(scenario(), limit_s=100)


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_call_that_ends_late_leaves_its_caller_time_to_send_the_next_body(cancelled: bool) -> None:
    """The next body failed if it did not begin within what an abandoned one had left over: a hundredth of a second."""
    late_s = RESERVE_S - 0.01

    async def broken() -> bytes:
        await asyncio.sleep(late_s)
        raise grpc.aio.InternalError("the connection is broken")

    async def scenario() -> None:
        patience = Patience()
        abandoned = asyncio.create_task(patience.wait(after(RESERVE_S, 0) if cancelled else broken()))
        await asyncio.sleep(late_s)
        if cancelled:
            abandoned.cancel()
        await asyncio.gather(abandoned, return_exceptions=True)
        await patience.wait(after(RESTART * RESERVE_S / 2, 1 << 20))
        late = asyncio.create_task(patience.wait(after(late_s, 0)))
        assert not await late, "one that comes with nothing is not abandoned"
        with pytest.raises(Silent):
            await patience.wait(after(RESTART * RESERVE_S / 2, 0))

    virtual_time.run(scenario(), limit_s=100)


def test_delays_by_this_node_do_not_count() -> None:
    async def scenario() -> None:
        patience, now = Patience(), asyncio.get_running_loop().time
        for _ in range(10):
            await patience.wait(after(1.0, 0))
            await asyncio.sleep(10 * RESERVE_S)
        assert now() == pytest.approx(10 + 100 * RESERVE_S)
        with pytest.raises(Unreachable):
            await patience.wait(after(RESERVE_S, 0))

    virtual_time.run(scenario(), limit_s=10_000)


def test_delays_by_this_nodes_cap_do_not_count_against_a_striped_body() -> None:
    """The line is full of traffic with precedence: gradients, and bodies of older microbatches."""

    async def scenario() -> None:
        sent, line, full_s = activation(), OwnersLine(LimitSettings(download_mbit_per_s=1.0)), 2 * RESERVE_S
        head, body = message_codec.announced(sent, 1)
        header = message_codec.from_header(pb.ActivationMessage.FromString(head), RUN, 1 << 20)
        parts, patience = [*body(wire.PACK_BYTES)], Patience()

        async def part() -> bytes:
            return parts.pop() if parts else NO_MORE

        async def end() -> bytes:
            return NO_MORE

        async def granted(*message: bytes) -> None:
            pass

        line.charge(sent=0, received=int(full_s * BYTES_PER_MBIT))
        incoming = IncomingActivation(header, [], lambda *_, **__: None, end, granted, patience)
        incoming.stripes = parallel = Stripes()
        carrying = asyncio.create_task(parallel.carry(granted, line.receiver(patience.reading(part))))
        assert (await incoming()).hidden.data == sent.hidden.data
        assert asyncio.get_running_loop().time() > RESERVE_S
        parallel.end()
        assert await carrying

    virtual_time.run(scenario(), limit_s=1000)


def test_a_caller_has_time_to_end_a_broken_off_call() -> None:
    """One call whose rest is no longer wanted does not take the other calls on its connection with it."""

    async def broken_off(held: ExitStack) -> None:
        raise Unread("the reply has ended")

    async def scenario() -> None:
        here = Callers()
        for seconds, unread in (LET_GO_S - 1, {}), (LET_GO_S + 1, {"10.0.0.1:5": 2}):
            calls = [asyncio.create_task(here.until_over("10.0.0.1:5", broken_off)) for _ in range(2)]
            await asyncio.sleep(seconds)
            assert here.unread == unread
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            assert not here.unread

    virtual_time.run(scenario(), limit_s=100)


async def lost(*_: object) -> None:
    raise grpc.aio.InternalError("the connection is broken")


async def hung(*_: object) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(("abort", "seconds"), [(lost, 0.0), (hung, LET_GO_S)])
def test_a_call_that_grpc_cannot_end_costs_its_caller_the_connection(abort: Any, seconds: float) -> None:
    async def scenario() -> None:
        here, context = Callers(), SimpleNamespace(abort=abort, peer=lambda: "ipv4:10.0.0.1:5")
        ending = asyncio.create_task(here.give_up(context, Unreachable("revoked")))
        await asyncio.sleep(seconds + LET_GO_S / 2)
        assert here.unread == {"10.0.0.1:5": 1}
        await ending
        assert not here.unread

    virtual_time.run(scenario(), limit_s=100)


def test_a_lost_connection_is_not_reported_as_a_bug() -> None:
    tried: list[str] = []

    async def write(*_: object) -> None:
        tried.append("write")
        await lost()

    async def scenario() -> None:
        await callers.refuse(write, pb.Reply, Busy("no place"))
        async with GrpcServicer._refusing(cast(GrpcServicer, None), pb.SnapshotMessage, Patience(), None):
            await write()

    run(scenario())
    assert tried == ["write", "write"], "each once: the error ends the attempt, and goes no further"


@pytest.mark.parametrize(("seconds", "wanted"), [(callers.MAX_CALL_S, "9" * 9), (callers.MAX_CALL_S + 1, "9" * 10)])
def test_a_call_with_a_deadline_far_away_is_refused_and_an_endless_wish_is_ignored(seconds: float, wanted: str) -> None:
    sent = (("noloco-protocol", wire.PROTOCOL), ("noloco-message-bytes", wanted))
    context = SimpleNamespace(invocation_metadata=lambda: sent, time_remaining=lambda: seconds)
    fine = seconds <= callers.MAX_CALL_S
    with nullcontext() if fine else pytest.raises(Violation, match="deadline of at most 3600 s"):
        callers.check_admissible(context)
    assert callers.wanted_bytes(context) == (int(wanted) if fine else 0)


def test_late_refusals_are_sent_one_by_one_per_host_and_others_at_once() -> None:
    late, usual = Busy("who are you?", late=True), Busy("no place")

    async def scenario() -> None:
        here, now, began = Callers(), asyncio.get_running_loop().time, asyncio.get_running_loop().time()
        given = dict[str, float]()

        async def refuse(name: str, host: str, refusal: Exception) -> None:
            await here.delay(Caller(host, name), refusal)
            given[name] = now() - began

        strangers = [refuse(f"X{at}", "h", late) for at in range(40)]
        await asyncio.gather(*strangers, refuse("A", "h", usual), refuse("Y", "i", late))
        assert given["A"] == 0
        assert given["Y"] == pytest.approx(1 / LATE_PER_S)
        assert [given[f"X{at}"] for at in range(40)] == pytest.approx([(1 + at) / LATE_PER_S for at in range(40)])
        assert hold_nothing(here)
        assert not here._late

    virtual_time.run(scenario(), limit_s=10_000)


def test_those_that_no_longer_wait_for_a_late_refusal_delay_nobody() -> None:
    """All peers behind one relay count as one host, and any of them could call and hang up without end."""

    async def scenario() -> None:
        here, late, clock = Callers(), Busy("who are you?", late=True), asyncio.get_running_loop().time
        first = asyncio.create_task(here.delay(Caller("h", "A"), late))
        for at in range(100):
            gone = asyncio.create_task(here.delay(Caller("h", f"X{at}"), late))
            await asyncio.sleep(0)
            gone.cancel()
        await here.delay(Caller("h", "B"), late)
        assert first.done()
        assert clock() == pytest.approx(2 / LATE_PER_S)

    virtual_time.run(scenario(), limit_s=10_000)


def test_late_refusals_beyond_the_limit_are_sent_at_once() -> None:
    async def scenario() -> None:
        here, stranger, late = Callers(), Caller("h", "X"), Busy("who are you?", late=True)
        waiting = [asyncio.create_task(here.delay(stranger, late)) for _ in range(LATE.of_caller)]
        await asyncio.sleep(0)
        began = asyncio.get_running_loop().time()
        await here.delay(stranger, late)
        assert asyncio.get_running_loop().time() == began
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert hold_nothing(here)
        del task, waiting  # Their errors refer to the lock.
        gc.collect()
        assert not here._late

    virtual_time.run(scenario(), limit_s=10_000)


def test_refused_calls_are_read_for_a_while_and_only_so_many_at_a_time() -> None:
    """Their callers may never end them."""

    async def scenario() -> None:
        here, stranger, clock = Callers(), Caller("h", "X"), asyncio.get_running_loop().time
        silent = SimpleNamespace(read=asyncio.Event().wait)
        reading = [asyncio.create_task(here.drain(stranger, silent)) for _ in range(DRAINS.of_caller)]
        await asyncio.sleep(0)
        began = clock()
        await here.drain(stranger, silent)
        assert clock() == began
        await asyncio.gather(*reading)
        assert clock() - began == pytest.approx(slow_transfers.RESERVE_S)
        assert hold_nothing(here)

    virtual_time.run(scenario(), limit_s=100)


def test_a_caller_at_its_limit_of_activations_gets_a_late_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "ACTIVATIONS", Share("activations", 1, 5))
    refusals, delay = list[Exception](), Callers.delay

    async def observed(here: Callers, caller: Caller, refusal: Exception) -> None:
        refusals.append(refusal)
        await delay(here, caller, refusal)

    monkeypatch.setattr(Callers, "delay", observed)

    async def scenario() -> None:
        node = Node(hang)
        async with server(node) as (_, stub):
            head, _ = announced()
            served = stub.Propagate(timeout=60.0, metadata=ME)
            await served.write(head)
            await soon(node.entered.wait())
            refused = stub.Propagate(timeout=60.0, metadata=ME)
            assert (await soon(refused.read())).refusal.kind == pb.Refusal.KIND_BUSY
            [refusal] = refusals
            assert isinstance(refusal, Busy)
            assert refusal.late
            served.cancel()
            refused.cancel()

    run(scenario())


@pytest.mark.parametrize("stripe", [0, 7])
def test_a_delayed_refusal_keeps_nothing_of_the_body(stripe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """160 one-message bodies of 4 MiB were kept for 28 s, and so was everything that parallel calls had brought."""
    bodies = list["weakref.ref[IncomingActivation]"]()

    class Watched(IncomingActivation):
        def __post_init__(self) -> None:
            super().__post_init__()
            bodies.append(weakref.ref(self))

    monkeypatch.setattr("noloco_p2p.io.transport.servicer.IncomingActivation", Watched)
    monkeypatch.setattr(callers, "LATE_PER_S", 1 / 60)

    async def refuse(header: Header, body: Body) -> Gradient:
        raise Busy("who are you?", late=True)

    async def scenario() -> None:
        async with server(Node(refuse)) as (both, stub):
            served, head = both.b._servicer, announced(stripe)[0]
            call, parallel = (method(timeout=60.0, metadata=ME) for method in (stub.Propagate, stub.Stripe))
            if stripe:
                await parallel.write(pb.ActivationMessage(stripe=stripe))
            else:
                head.frames.append(pb.Frame(chunk=pb.Chunk(data=bytes(1 << 20))))
            await call.write(head)
            while not served.callers._held[callers.LATE.what, "127.0.0.1"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            gc.collect()
            assert [body() for body in bodies] == [None]
            assert not served._striped._known
            call.cancel()
            parallel.cancel()

    run(scenario())


@pytest.mark.parametrize(
    ("peer", "host", "streamed"),
    [
        ("ipv4:10.1.2.3:4102", "10.1.2.3", "p2p/B"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:4102", "2001:db8:1:2::/64", "2001:db8:1:2::/64"),
        ("ipv6:%5B::1%5D:4102", "::/64", "relay/B"),
        ("ipv6:[fe80::1%25eth0]:4102", "fe80::/64", "fe80::/64"),
    ],
)
def test_a_host_is_an_address_a_network_or_the_opener_of_the_stream(peer: str, host: str, streamed: str) -> None:
    class Context:
        def peer(self) -> str:
            return peer

        def auth_context(self) -> dict[str, list[bytes]]:
            return {"peer_dns": [b"A"]}

    assert Caller.of(Context(), {}) == (host, "A")
    assert Caller.of(Context(), {"10.1.2.3:4102": "p2p/B", "[::1]:4102": "relay/B"}).host == streamed


def test_a_caller_through_a_relay_gets_at_most_a_quarter_of_the_relays_calls() -> None:
    held = Callers()
    with ExitStack() as leaving:

        def most(caller: Caller) -> int:
            for count in range(CALLS.of_host + 1):
                try:
                    leaving.enter_context(held.holding(CALLS, caller))
                except Busy:
                    return count
            raise AssertionError("no bound")

        assert [most(Caller("relay/R", name)) for name in "ABCDE"] == [CALLS.of_host // 4] * 4 + [0]
        assert most(Caller("10.0.0.1", "R")) == CALLS.of_caller, "the relay's own calls have a separate share"
    assert hold_nothing(held)


# --- lengths and counts, before anything is parsed or kept -----------------------------------------------------------

LONG = "A" * (3 << 20)


FAULTS = {
    "long microbatch": pb.ActivationHeader(microbatch=pb.MicrobatchId(peer=LONG)),
    "long origin": pb.ActivationHeader(origin=pb.Origin(peer=LONG)),
    "odd microbatch": pb.ActivationHeader(microbatch=pb.MicrobatchId(peer="12D3\x1b[2J")),
    "odd origin": pb.ActivationHeader(origin=pb.Origin(peer="é")),
    "far step": pb.ActivationHeader(origin=pb.Origin(step=1 << 60)),
    "many tensors": pb.ActivationHeader(specs=[pb.TensorSpec(name="hidden", dtype="float32", shape=MIDDLE)] * 200),
    "many avoided": pb.ActivationHeader(avoid=["B"] * 9),
    "odd avoided": pb.ActivationHeader(avoid=[LONG]),
}
"""Description of the fault → header."""


@pytest.mark.parametrize("fault", [*FAULTS, "nobody"])
def test_impossible_names_and_counts_are_refused_on_the_header(fault: str) -> None:
    """Hole 13: a name of 3 MiB would be kept with the spent ids, and no checkpoint could be read any more."""

    async def scenario() -> None:
        node = Node(echo)
        async with server(node) as (_, stub):
            head, _ = announced()
            if fault == "nobody":
                head.header.microbatch.ClearField("peer")
            else:
                head.header.MergeFrom(FAULTS[fault])
            call = stub.Propagate(timeout=60.0, metadata=ME)
            await call.write(head)
            assert (await soon(call.read())).refusal.kind == pb.Refusal.KIND_VIOLATION
            call.cancel()
        assert node.calls == []

    run(scenario())


@pytest.mark.parametrize(("ids", "code"), [(2_000_000, "INVALID_ARGUMENT"), (callers.MAX_CALLS + 1, None)])
def test_a_question_with_too_many_ids_is_refused_and_a_long_one_is_not_even_parsed(ids: int, code: str | None) -> None:
    """To parse two million empty ids, which fit into 4 MiB, took 71 ms, in which the node did nothing else."""

    async def scenario() -> None:
        node = Node(hang)
        async with pair(node) as both, bare(both.peer) as channel:
            ask = channel.unary_unary("/noloco.v1.Node/Progress", response_deserializer=pb.ProgressReply.FromString)
            call = ask(b"\x0a\x00" * ids, timeout=30.0, metadata=ME)
            if code is None:
                assert (await call).refusal.kind == pb.Refusal.KIND_VIOLATION
            else:
                with pytest.raises(grpc.aio.AioRpcError, match="the request cannot be read") as caught:
                    await call
                assert caught.value.code().name == code
        assert node.calls == []

    run(scenario())


@pytest.mark.parametrize(("method", "item"), [("FetchSnapshot", b"\x30\x00"), ("FetchState", b"\x0a\x00")])
def test_a_request_of_millions_of_items_is_not_even_parsed(method: str, item: bytes) -> None:
    """To read four million numbers of chunks took 112 ms, in which the node did nothing else."""

    async def scenario() -> None:
        node = Node(hang)
        async with pair(node) as both, bare(both.peer) as channel:
            call = channel.unary_stream(f"/noloco.v1.Node/{method}")(item * 600_000, timeout=30.0, metadata=ME)
            with pytest.raises(grpc.aio.AioRpcError, match="the request cannot be read"):
                await call.read()
        assert node.calls == []

    run(scenario())


def test_a_request_for_many_chunks_of_a_large_stage_is_read() -> None:
    numbers, requests = tuple(range(200_000)), list[SnapshotRequest]()

    async def decline(request: SnapshotRequest) -> Snapshot:
        requests.append(request)
        raise Declined("it has been read")

    async def scenario() -> None:
        async with server(Node(hang, decline)) as (_, stub):
            request = pb.SnapshotRequest(stage=1, round=4, bounds=bytes(len(numbers)), chunks=numbers)
            call = stub.FetchSnapshot(request, timeout=30.0, metadata=ME)
            assert (await call.read()).refusal.message == "it has been read"

    run(scenario())
    [request] = requests
    assert request.lattice is not None
    assert request.lattice.some == numbers


def test_an_overlong_name_or_version_is_refused() -> None:
    async def scenario() -> None:
        node = Node(hang)
        async with server(node) as (_, stub):
            long = (("noloco-protocol", "5" * 4000),)
            reply = await stub.Describe(pb.DescribeRequest(), timeout=5.0, metadata=long)
            assert len(reply.refusal.message) < 250
            asked = pb.ProgressRequest(microbatches=[pb.MicrobatchId(peer="A" * 129)])
            assert (await stub.Progress(asked, timeout=5.0, metadata=ME)).refusal.kind == pb.Refusal.KIND_VIOLATION
        assert node.calls == []

    run(scenario())


@pytest.mark.parametrize(
    "changes",
    [
        {"served": ["A" * 129]},
        {"served": ["B"] * 1025},
        {"loss_sum": float("nan")},
        {"loss_sum": float("-inf")},
        {"loss_sum": 1e9},
        {"tokens": 17},
        {"tokens": 1 << 63},
    ],
)
def test_a_reply_with_impossible_names_or_losses_is_a_violation(changes: dict[str, Any]) -> None:
    sent = activation()
    spec = message_codec.to_spec(sent.reply_spec)
    head = pb.GradientHeader(microbatch=pb.MicrobatchId(**sent.header.microbatch._asdict()), spec=spec, **changes)
    with pytest.raises(Violation):
        GradientReader(sent).feed(pb.Reply(gradient=head).SerializeToString())
    if "served" not in changes:
        with pytest.raises(Violation):
            message_codec.from_loss(pb.Reply(loss=pb.LossSum(**changes)).SerializeToString(), sent.targets.spec)


@pytest.mark.parametrize("kind", [pb.ActivationMessage, pb.Reply, pb.SnapshotMessage, pb.StateMessage])
@pytest.mark.parametrize("inner", [b"\x0a\x00", b"\x12\x00", None])
def test_a_message_full_of_tiny_frames_is_refused_early(
    kind: type[Any], inner: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hole 12: a million empty frames in 4 MiB blocked the event loop for 10 s; now it looks at a few thousand."""
    tag = bytes([frame_codec.frames_field(kind) << 3 | 2]) if inner is not None else b"\x0a"
    one = tag + bytes([len(inner or b"")]) + (inner or b"")
    looked, read = list[int](), frame_codec._read_size

    def counted(raw: bytes, at: int, within: int) -> tuple[int, int]:
        looked.append(at)
        return read(raw, at, within)

    monkeypatch.setattr(frame_codec, "_read_size", counted)
    with pytest.raises(Violation, match="frames, or"):
        frame_codec.unpacked(one * ((4 << 20) // len(one)), kind)
    assert len(looked) <= 2 * (wire.MAX_FRAMES + 2)
    most = wire.MAX_FRAMES if inner else frame_codec.MAX_HEADS
    with pytest.raises(Violation, match="frames, or"):
        frame_codec.unpacked(one * (most + 1), kind)


def test_many_empty_tensors_still_travel() -> None:
    specs = [HostTensor(f"t{n}", "float32", (0,), memoryview(b"")) for n in range(3 * wire.MAX_FRAMES)]
    groups = list(wire.group_frames(wire.frames(specs, [0] * len(specs))))
    assert [len(group) for group in groups] == [wire.MAX_FRAMES] * 3
    for group in groups:
        assert frame_codec.unpacked(frame_codec.packed(pb.StateMessage(), group), pb.StateMessage)[1] == group


def test_no_more_tensors_are_parsed_than_the_stage_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = (TensorSpec("vector", "float32", (4,)),)
    many = [message_codec.to_spec(expected[0])] * 50_000
    looked, original = list[object](), message_codec.from_spec

    def counted(spec: pb.TensorSpec) -> TensorSpec:
        looked.append(spec)
        return original(spec)

    monkeypatch.setattr(message_codec, "from_spec", counted)
    with pytest.raises(Violation, match="expected"):
        message_codec.from_specs(many, expected, "snapshot")
    assert len(looked) == 2


# --- texts of peers --------------------------------------------------------------------------------------------------

EVIL = "\x1b]0;mine\x07\x1b[2J\nerror: all is lost\u202e" + "x" * 5000


def test_a_peers_texts_are_made_safe_for_a_terminal() -> None:
    """Hole 17: refusals, descriptions, and the messages that gRPC passes on from it."""
    refusal = pb.Refusal(kind=pb.Refusal.KIND_BUSY, message=EVIL)
    described = pb.Description(state=EVIL, version=EVIL)
    said = message_codec.from_description(pb.DescribeReply(peer_id=EVIL, run_id=EVIL, description=described))
    shown = [str(message_codec.to_error(refusal)), said.state, said.version, said.peer_id, said.run_id]

    async def refuse(header: Any, body: Any) -> Any:
        raise Declined(EVIL)

    async def fail(header: Any, body: Any) -> Any:
        raise ValueError(EVIL)

    async def scenario() -> None:
        for serve in (refuse, fail):
            async with pair(Node(serve)) as both:
                with pytest.raises(Declined) as caught:
                    await both.a.propagate(both.peer, activation())
                shown.append(str(caught.value))

    run(scenario())
    assert all(text and text.isprintable() and len(text) < 700 for text in shown)
