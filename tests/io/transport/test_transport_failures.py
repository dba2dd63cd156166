"""Failures of the gRPC transport: each is one error, is raised soon, and leaves nothing behind."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import cycle
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc
from machine import at_most
from transport_fixture import (
    LARGE,
    OTHER_RUN,
    RUN,
    SMALL,
    SOON_S,
    Buffers,
    NamedLinks,
    Node,
    activation,
    advert,
    alive,
    echo,
    gradient_of,
    hang,
    logged,
    pair,
    run,
    soon,
    tensor,
    transport,
    watched_buffers,
)

from noloco_p2p.core.messages import Gradient, Header
from noloco_p2p.errors import Busy, Declined, LocalError, PeerError, Unreachable, Violation
from noloco_p2p.io.transport import channels, grpc_transport, message_codec, peer_links, service
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.channels import PeerChannel
from noloco_p2p.io.transport.exchange import SentActivation, to_grant
from noloco_p2p.io.transport.frame_codec import unpacked
from noloco_p2p.io.transport.grpc_errors import translated_errors
from noloco_p2p.io.transport.incoming import IncomingActivation
from noloco_p2p.io.transport.probe import probe
from noloco_p2p.io.transport.servicer import GrpcServicer
from noloco_p2p.io.transport.slow_transfers import Patience
from noloco_p2p.ports import ALONE, Body


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> Buffers:
    return watched_buffers(monkeypatch)


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_an_expired_deadline_is_unreachable_and_cancels_the_handler(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        node = Node(hang)
        async with pair(node) as both:
            await both.a.describe(both.peer)
            monkeypatch.setattr(grpc_transport, "LONGEST_CALL_S", 0.3)
            with pytest.raises(Unreachable, match=r"no gradient from B within 0\.3 s"):
                await both.a.propagate(both.peer, activation(shape))
            await soon(node.ended.wait())
            assert node.ends == ["CancelledError"]
            with pytest.raises(Unreachable, match="no time is left"):
                await both.a.progress(both.peer, [], 0.0)

    run(scenario())


@pytest.mark.parametrize("shape", [SMALL, (3, 333, 777)])
def test_a_cancelled_caller_cancels_the_handler_and_frees_its_buffers(
    shape: tuple[int, int, int], buffers: Buffers
) -> None:
    received = asyncio.Event()

    async def read_then_hang(header: Header, body: Body) -> Gradient:
        kept = await body()
        received.set()
        await asyncio.get_running_loop().create_future()
        return gradient_of(header, kept.hidden.spec)

    async def scenario() -> None:
        node = Node(read_then_hang)
        async with pair(node) as both:
            calling = asyncio.create_task(both.a.propagate(both.peer, activation(shape)))
            await soon(received.wait())
            assert alive(buffers) == len(buffers) == 2
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            await soon(node.ended.wait())
            assert node.ends == ["CancelledError"]
            while alive(buffers):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert await both.a.describe(both.peer), "the connection stays open"

    run(scenario())


@pytest.mark.parametrize("end", ["cancelled", "lost"])
def test_a_gradient_that_breaks_off_is_freed_at_once(
    end: str, monkeypatch: pytest.MonkeyPatch, without_collection: None
) -> None:
    """The error of the call, and a cancelled task, refer to all frames until the next garbage collection."""
    made = watched_buffers(monkeypatch)

    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            sending = asyncio.create_task(both.a.propagate(both.peer, activation(LARGE)))
            while len(made) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0)
            if end == "cancelled":
                sending.cancel()
            else:
                await both.b.close()
            await asyncio.wait([sending])
            assert sending.cancelled() or isinstance(sending.exception(), Unreachable)
            assert made[2]() is None

    run(scenario())


def test_a_peer_that_stops_is_unreachable_at_once() -> None:
    async def scenario() -> None:
        for shape in (SMALL, LARGE):
            node = Node(hang)
            async with pair(node) as both:
                calling = asyncio.create_task(both.a.propagate(both.peer, activation(shape)))
                await soon(node.entered.wait())
                await both.b.close()
                with pytest.raises(Unreachable):
                    await soon(calling)
                assert node.ends == ["CancelledError"]
                with pytest.raises(Unreachable, match="B cannot be reached: 127"):
                    await soon(both.a.propagate(both.peer, activation(shape)))

    run(scenario())


def test_a_peer_that_comes_back_is_reached_at_once() -> None:
    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            await both.a.propagate(both.peer, activation())
            await both.b.close()
            with pytest.raises(Unreachable):
                await both.a.propagate(both.peer, activation())
            again = transport("B", port=both.b.port)
            await again.serve(Node(echo))
            try:
                await soon(both.a.propagate(both.peer, activation()))
            finally:
                await again.close()

    run(scenario())


def test_a_peer_that_moved_is_reached_at_its_new_address_at_once() -> None:
    async def scenario() -> None:
        async with pair(Node(echo)) as both, pair(Node(echo)) as moved:
            await both.a.propagate(both.peer, activation())
            await both.b.close()
            sent = activation()
            assert (await soon(both.a.propagate(moved.peer, sent))).grad.data == sent.hidden.data

    run(scenario())


def test_a_peer_that_moved_is_reached_while_its_old_address_is_still_dialled() -> None:
    """The call to the new address used to wait for the old one, and then failed with it."""

    async def once(connection: AbstractAsyncContextManager[object]) -> None:
        async with connection:
            pass

    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            with socket.create_server(("127.0.0.1", 0)) as silent:
                acquire = partial(both.a._channels.acquire, seconds=60.0, control=True)
                old = replace(both.peer, addresses=(f"127.0.0.1:{silent.getsockname()[1]}",))
                dialling = asyncio.create_task(once(acquire(old)))
                await asyncio.sleep(0)
                await soon(once(acquire(both.peer)))
                assert not dialling.done()
                dialling.cancel()

    run(scenario())


def test_of_two_connections_opened_at_once_in_a_slot_one_stays_open() -> None:
    """To the addresses in two adverts of a peer that moves."""

    async def scenario() -> None:
        async with pair(Node(echo)) as both, pair(Node(echo)) as moved:
            pool = both.a._channels
            opening = (pool._opened(("B", channels.CONTROL_SLOT), one.peer, 60.0) for one in (both, moved))
            await soon(asyncio.gather(*opening))
            assert {*pool._kept.values()} == pool._open
            assert len(pool._open) == 1

    run(scenario())


def test_a_connection_that_another_call_has_closed_before_its_use_is_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two calls to a peer that moves, by its two adverts, are connected in the same iteration of the event loop."""
    connect, came = channels.connect, 0

    async def scenario() -> None:
        both_open = asyncio.Event()

        async def at_the_same_time(channel: Any, seconds: float) -> str | None:
            nonlocal came
            reason = await connect(channel, seconds)
            came += 1
            if came == 2:
                both_open.set()
            await both_open.wait()
            return reason

        monkeypatch.setattr(channels, "connect", at_the_same_time)
        async with pair(Node(echo)) as both, pair(Node(echo)) as moved:
            calls = (both.a.describe(one.peer) for one in (both, moved))
            assert [said.peer_id for said in await soon(asyncio.gather(*calls))] == ["B", "B"]
            assert came == 3
            assert len(both.a._channels._open) == 1

    run(scenario())


def test_a_connection_for_no_new_calls_is_closed_after_its_last_call() -> None:
    async def scenario() -> None:
        async with pair(Node(echo)) as both, pair(Node(echo)) as moved:
            pool = both.a._channels
            acquire = partial(pool.acquire, seconds=SOON_S, control=True)
            async with acquire(both.peer) as old:
                async with acquire(both.peer) as same:
                    assert same is old
                async with acquire(moved.peer) as new:
                    pass
                assert pool._open == {old, new}
            assert pool._open == {new}, "the peer has moved"
            async with acquire(moved.peer) as new:
                with pytest.raises(Unreachable):
                    async with acquire(moved.peer):
                        raise Unreachable("silent")
                assert pool._open == {new}
            assert not pool._open, "it has failed"
            assert not pool._kept
            assert not pool._awaited
            assert not both.a._links._calls

    run(scenario())


def test_the_next_address_is_tried_when_one_does_not_answer() -> None:
    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))
                dead = f"127.0.0.1:{taken.getsockname()[1]}"
                await both.a.propagate(advert(dead, *both.peer.addresses), activation())
                with pytest.raises(Unreachable, match=dead):
                    await both.a.propagate(advert(dead, peer_id="C"), activation())
                with pytest.raises(Unreachable, match="announces no address"):
                    await both.a.propagate(advert(peer_id="D"), activation())

    run(scenario())


def test_an_address_that_accepts_and_says_nothing_is_given_up() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with NamedLinks("A").channel(f"127.0.0.1:{silent.getsockname()[1]}", "B") as channel:
                assert await soon(channels.connect(channel, 0.1)) == "no answer within 0.1 s"

    run(scenario())


@pytest.mark.parametrize("at_home", [False, True])
def test_an_address_in_the_local_network_is_briefly_tried_first(monkeypatch: pytest.MonkeyPatch, at_home: bool) -> None:
    dialled: list[str] = []
    plain = peer_links.target

    async def target(links: Any, address: str, peer: str) -> str:
        dialled.append(address)
        return await plain(links, address, peer)

    monkeypatch.setattr(channels, "target", target)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{taken.getsockname()[1]}"

        async def scenario() -> None:
            async with pair(Node(echo)) as both:
                [there] = both.peer.addresses
                near, other = (there, dead) if at_home else (dead, there)
                monkeypatch.setattr(channels, "is_private", near.__eq__)
                peer = advert(other, near)
                await both.a.propagate(peer, activation())
                assert dialled == ([near] if at_home else [near, other])
                dialled.clear()
                await both.a.describe(peer)
                assert dialled == ([near] if at_home else [other]), "the failure of the local address is remembered"

        run(scenario())


def test_a_newly_opened_connection_is_not_closed_to_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_CHANNELS", 1)
    connect = channels.connect

    async def scenario() -> None:
        both_open = asyncio.Barrier(2)

        async def at_the_same_time(channel: Any, seconds: float) -> str | None:
            reason = await connect(channel, seconds)
            await both_open.wait()
            return reason

        monkeypatch.setattr(channels, "connect", at_the_same_time)
        async with pair(Node(echo)) as both:
            sent = activation()
            described, got = await soon(asyncio.gather(both.a.describe(both.peer), both.a.propagate(both.peer, sent)))
            assert described.peer_id == "B"
            assert got.grad.data == sent.hidden.data

    run(scenario())


def status(code: str, details: str = "why") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(grpc.StatusCode[code], grpc.aio.Metadata(), grpc.aio.Metadata(), details)


@pytest.mark.parametrize(
    ("error", "left_s", "kind", "text"),
    [
        (status("INTERNAL"), 1.0, Unreachable, "B was lost while waiting for a gradient: why"),
        (status("INTERNAL"), 0.0, Unreachable, "no gradient from B within 5 s"),
        (status("DEADLINE_EXCEEDED"), 0.0, Unreachable, "no gradient from B within 5 s"),
        (status("UNAVAILABLE", "a\n" + 600 * "b"), 0.0, Unreachable, "waiting for a gradient: a b{497}…$"),
        (status("ABORTED"), 1.0, Declined, "^B: why$"),
        (status("UNKNOWN"), 1.0, Declined, "B failed to serve the call: why"),
        (status("UNIMPLEMENTED"), 1.0, Declined, "B failed to serve the call: why"),
        (status("RESOURCE_EXHAUSTED"), 1.0, Busy, "B has too many calls in flight"),
        (status("RESOURCE_EXHAUSTED", "message larger than max"), 1.0, Violation, "B: message larger than max"),
        (
            status("RESOURCE_EXHAUSTED", "metadata size exceeds"),
            1.0,
            Violation,
            "B: metadata size exceeds",
        ),
        (asyncio.CancelledError(), 1.0, Unreachable, "ended while it was waiting for a gradient"),
        (asyncio.InvalidStateError(), 1.0, Unreachable, "closed before the gradient arrived"),
        (grpc.aio.UsageError(), 1.0, Unreachable, "closed before the gradient arrived"),
    ],
)
def test_each_end_of_a_call_has_its_own_error(
    error: BaseException, left_s: float, kind: type[PeerError], text: str
) -> None:
    async def call() -> None:
        with translated_errors("B", "gradient", 5.0, asyncio.get_running_loop().time() + left_s):
            raise error

    with pytest.raises(kind, match=text):
        run(call())


def test_another_run_is_refused() -> None:
    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            stranger = transport("S", run_id=OTHER_RUN)
            try:
                with pytest.raises(Unreachable, match="not the expected node of this run"):
                    await stranger.propagate(both.peer, activation())
                with pytest.raises(Violation, match=f"run {OTHER_RUN!r}, this node works on {RUN!r}"):
                    await both.a.propagate(both.peer, activation(run_id=OTHER_RUN))
            finally:
                await stranger.close()

    run(scenario())


def test_a_port_in_use_is_named() -> None:
    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            second = transport("C", port=both.b.port)
            with pytest.raises(LocalError, match=rf"port {both.b.port}: it is in use.*grpc_port"):
                await second.serve(Node(echo))
            await second.close()

    run(scenario())


def test_calls_in_flight_do_not_mix() -> None:
    async def scenario() -> None:
        node = Node(echo)
        shapes = [SMALL, (3, 333, 777), (4, 128, 512)] * 5
        sent = [activation(shape, counter=i) for i, shape in enumerate(shapes)]
        async with pair(node) as both:
            gradients = await asyncio.gather(*(both.a.propagate(both.peer, one) for one in sent))
        for one, gradient in zip(sent, gradients, strict=True):
            assert gradient.microbatch == one.header.microbatch
            assert gradient.grad.data == one.hidden.data

    run(scenario())


@pytest.mark.parametrize("shape", [SMALL, (3, 333, 777)])
@pytest.mark.parametrize(
    "fault",
    [
        lambda g: replace(g, grad=tensor("grad", "float32", (2, 8, 17))),
        lambda g: replace(g, grad=replace(g.grad, dtype="int32")),
        lambda g: replace(g, microbatch=g.microbatch._replace(counter=77)),
        lambda g: replace(g, grad=replace(g.grad, data=g.grad.data[:-1])),
    ],
)
def test_a_wrong_gradient_is_the_peers_violation(
    fault: Callable[[Gradient], Gradient], shape: tuple[int, int, int]
) -> None:
    async def serve(header: Header, body: Body) -> Gradient:
        return fault(await echo(header, body))

    async def scenario() -> None:
        async with pair(Node(serve)) as both:
            with pytest.raises(Violation) as caught:
                await both.a.propagate(both.peer, activation(shape))
            assert not caught.value.ours

    run(scenario())


@pytest.mark.parametrize("reply", [b"\xff\xff", None])
@pytest.mark.parametrize("method", ["describe", "progress", "propagate", "evaluate"])
def test_a_reply_that_cannot_be_read_or_none_at_all_is_the_peers_violation(
    method: str, reply: bytes | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was an error of this node's own, and ended the node."""

    async def answer(*arguments: Any) -> None:
        if reply is not None:
            await arguments[-2].write(reply)

    async def scenario() -> None:
        monkeypatch.setattr(service, "_asked", answer)
        monkeypatch.setattr(GrpcServicer, "serve_activation", answer)
        async with pair(Node(hang)) as both:
            sent = activation()
            asked = {"describe": (), "progress": ([sent.header.microbatch], 10.0)}.get(method, (sent,))
            with pytest.raises(Violation) as caught:
                await getattr(both.a, method)(both.peer, *asked)
            assert not caught.value.ours

    run(scenario())
    assert not logged(caplog)


def test_a_bug_in_the_handler_reaches_the_caller_as_declined() -> None:
    async def serve(header: Header, body: Body) -> Gradient:
        raise KeyError("a bug")

    async def scenario() -> None:
        async with pair(Node(serve)) as both:
            with pytest.raises(Declined, match="failed to serve"):
                await both.a.propagate(both.peer, activation())

    run(scenario())


def test_close_ends_calls_in_both_directions_and_leaves_no_task() -> None:
    async def scenario() -> None:
        before = asyncio.all_tasks()
        node = Node(hang)
        async with pair(node) as both:
            calls = [asyncio.create_task(both.a.propagate(both.peer, activation(s))) for s in (SMALL, LARGE, SMALL)]
            await soon(node.entered.wait())
            await both.a.close()
            for call in calls:
                with pytest.raises(Unreachable):
                    await soon(call)
            with pytest.raises(Unreachable, match="is closed"):
                await both.a.describe(both.peer)
        left = asyncio.all_tasks() - before
        assert not left or not (await asyncio.wait(left, timeout=at_most(SOON_S)))[1]
        assert set(node.ends) == {"CancelledError"}

    run(scenario())


def test_close_ends_a_call_that_is_being_sent_at_any_moment() -> None:
    async def scenario() -> None:
        for turns_of_the_loop in range(16):
            async with pair(Node(echo)) as both:
                await both.a.propagate(both.peer, activation(SMALL))
                call = asyncio.create_task(both.a.propagate(both.peer, activation(LARGE)))
                for _ in range(turns_of_the_loop):
                    await asyncio.sleep(0)
                await both.a.close()
                with pytest.raises(Unreachable):
                    await soon(call)

    run(scenario())


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def test_texts_of_a_peer_that_are_not_utf_8_leave_the_log_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each was logged as an error, with its bytes and a traceback: hundreds per answer."""
    said = {
        ":status": "200",
        "content-type": "application/grpc",
        "grpc-status": "14",
        "grpc-message": "%FFa",
        "x": "\xff",
    }
    fields = ((name.encode(), text.encode("latin-1")) for name, text in said.items())
    trailers = b"".join(b"\0%c%b%c%b" % (len(name), name, len(text), text) for name, text in fields)
    paths = tmp_path / "chain", tmp_path / "key"
    for path, pem in zip(paths, reversed(NamedLinks("B").leaf), strict=True):
        path.write_bytes(pem)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*paths)
    tls.set_alpn_protocols(["h2"])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(EOFError, OSError):
            await reader.readuntil(b"SM\r\n\r\n")
            writer.write(frame(4, 0, 0))
            while head := await reader.readexactly(9):
                await reader.readexactly(int.from_bytes(head[:3], "big"))
                if head[3] == 1:
                    writer.write(frame(1, 5, int.from_bytes(head[5:], "big"), trailers))
        ended.set()

    async def scenario() -> None:
        server, a = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls), transport("A")
        try:
            with pytest.raises(Unreachable, match=r"waiting for a description: ÿa$"):
                await a.describe(advert(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        finally:
            await a.close()
            server.close()
            await soon(ended.wait())

    ended = asyncio.Event()
    run(scenario())
    assert not logged(caplog)


def test_an_address_that_closes_each_connection_at_once_is_dialled_once() -> None:
    """It was dialled for five seconds, hundreds of times a second: each handshake took both ends a millisecond."""
    states = cycle((grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING))
    dials = list[grpc.ChannelConnectivity]()

    def state(try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        found = next(states)
        dials.extend([found] if found is grpc.ChannelConnectivity.IDLE else [])
        assert len(dials) < 5
        return found

    async def changed(_: object) -> None:
        await asyncio.sleep(0)

    async def scenario() -> None:
        channel = SimpleNamespace(get_state=state, wait_for_state_change=changed)
        assert "nothing accepts connections there" in (await channels.connect(channel, 5.0) or "")

    run(scenario())


@pytest.mark.parametrize("on_stripe", [False, True])
def test_a_peer_that_ends_a_call_while_this_node_writes_does_not_keep_the_connection(
    on_stripe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC did not end a call after a failed write: with an unread answer it kept its memory and a socket for ever."""
    plain = PeerChannel.send_stream

    def insistent(channel: PeerChannel, *arguments: Any, **options: Any) -> Any:
        call = plain(channel, *arguments, **options)
        write = call.write

        async def until_it_fails(message: bytes) -> None:
            while True:
                await write(message)

        call.write = until_it_fails
        return call

    async def answer(*arguments: Any) -> None:
        for _ in range(2):
            await arguments[-2].write(to_grant(0))

    async def scenario() -> None:
        monkeypatch.setattr(PeerChannel, "send_stream", insistent)
        monkeypatch.setattr(GrpcServicer, "serve_activation", answer)
        monkeypatch.setattr(GrpcServicer, "stripe", answer)
        before = asyncio.all_tasks()
        async with pair(Node(hang)) as both:
            stripe = both.a._stripe(both.peer, 7, 1, "gradient", 10.0, attrgetter("write", "read"))
            with pytest.raises(Unreachable, match="Internal error"):
                await (stripe.__aenter__() if on_stripe else both.a.propagate(both.peer, activation(LARGE)))
        left = asyncio.all_tasks() - before
        assert not left or not (await asyncio.wait(left, timeout=at_most(SOON_S)))[1]

    run(scenario())


def test_a_connection_closed_as_soon_as_it_is_open_is_unreachable_and_its_key_is_not_shown() -> None:
    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            closing: list[asyncio.Task[None]] = []
            both.a._channels._on_open = lambda: closing.append(asyncio.create_task(both.a.close()))
            with pytest.raises(Unreachable, match=r"this node's transport is closed$"):
                await soon(both.a.describe(both.peer))
            await closing[0]

    run(scenario())


def test_a_probe_returns_which_peer_answers() -> None:
    async def scenario() -> None:
        starting = transport("B")
        await starting.listen()
        address = f"127.0.0.1:{starting.port}"
        try:
            with pytest.raises(Declined, match="starting"):
                await starting.describe(advert(address))
            mine = NamedLinks("A")
            refused = "nothing accepts connections there, or it is not the expected node of this run"
            assert await probe(address, "B", mine, 2.0) is None
            assert await probe(address, "C", mine, 2.0) == refused
            assert await probe(address, "B", NamedLinks("A", OTHER_RUN), 2.0) == refused
        finally:
            await starting.close()
        assert await probe(address, "B", mine, 2.0) == refused
        with socket.create_server(("127.0.0.1", 0)) as silent:
            assert "no answer within 0.3 s" in str(
                await probe(f"127.0.0.1:{silent.getsockname()[1]}", "B", mine, timeout_s=0.3)
            )

    run(scenario())


class Over:
    """A call that is over, as gRPC has already noticed."""

    def __init__(self, write: Exception | None, read: Exception | None = None) -> None:
        self._write, self._read = write, read

    async def write(self, message: bytes) -> None:
        if self._write:
            raise self._write

    async def read(self) -> Any:
        assert self._read is not None, "nothing arrives"
        raise self._read


BROKEN = cygrpc.ExecuteBatchError("Failed to execute a batch")
STOPPED = cygrpc.UsageError("Server already stopped.")


@pytest.mark.parametrize("over", [Over(BROKEN), Over(STOPPED), Over(None, BROKEN), Over(None, STOPPED)])
def test_a_caller_that_leaves_before_its_body_has_arrived_is_unreachable(over: Over) -> None:
    """As when another replica was faster, or this node leaves: gRPC can neither write to a finished call nor read."""
    sent = activation((3, 333, 777))
    header = replace(sent.header, specs=tuple(t.spec for t in sent.tensors))

    async def scenario() -> None:
        ask = partial(over.write, b"")
        await IncomingActivation(header, [], lambda *count: None, over.read, ask, Patience())()

    with pytest.raises(Unreachable, match="the caller disconnected"):
        asyncio.run(scenario())


def test_a_body_requested_as_the_node_stops_is_unreachable() -> None:
    """A handler may read in its own task, which ends a moment later."""

    async def scenario() -> None:
        stopped, reading = asyncio.Event(), list[asyncio.Task[Gradient]]()

        async def read(header: Header, body: Body) -> Gradient:
            await stopped.wait()
            return await echo(header, body)

        async def serve(header: Header, body: Body) -> Gradient:
            reading.append(asyncio.create_task(read(header, body)))
            return await asyncio.shield(reading[0])

        node = Node(serve)
        async with pair(node) as both:
            call = asyncio.create_task(both.a.propagate(both.peer, activation(LARGE)))
            await soon(node.entered.wait())
            await both.b.close()
            stopped.set()
            with pytest.raises(Unreachable):
                await reading[0]
            with pytest.raises(Unreachable):
                await call

    run(scenario())


@pytest.mark.parametrize("turns", [*range(1, 9), 1000])
def test_a_refusal_during_the_request_for_a_body_reaches_the_caller(
    turns: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As by a replica that closes its intake. gRPC cannot end a call on which a write was broken off."""

    async def close(header: Header, body: Body) -> Gradient:
        reading = asyncio.create_task(body())
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        raise Busy("in an outer round")

    async def scenario() -> None:
        async with pair(Node(close)) as both:
            with pytest.raises(Busy, match="in an outer round"):
                await soon(both.a.propagate(both.peer, activation(LARGE)))

    run(scenario())
    assert not logged(caplog)


@pytest.mark.parametrize(
    ("error", "is_logged"),
    [
        (cygrpc.ExecuteBatchError('Failed "execute_batch": (SendStatusFromServerOperation,)'), False),
        (cygrpc.ExecuteBatchError("Failed grpc_call_start_batch: TOO_MANY_OPERATIONS"), True),
        (asyncio.CancelledError(), False),
    ],
)
def test_a_caller_that_leaves_before_its_call_ends_is_not_logged_as_an_error(
    error: BaseException, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The messages are gRPC's; the first was seen after a process had been stopped for a while, and the last if a call
    was cancelled just as it began."""

    async def scenario() -> None:
        async with pair(Node(echo)):
            try:
                raise error
            except type(error):
                logging.getLogger("grpc._cython.cygrpc").exception("ExecuteBatchError raised in core")

    run(scenario())
    assert bool(logged(caplog)) is is_logged


def test_a_caller_cancelled_while_its_header_waits_leaves_no_call() -> None:
    class Full:
        """A call whose connection accepts no data."""

        over = False

        async def write(self, message: bytes) -> None:
            await asyncio.get_running_loop().create_future()

        async def read(self) -> bytes:
            raise AssertionError("nothing arrives")

        def cancel(self) -> None:
            self.over = True

    async def scenario() -> None:
        call = Full()
        sent = b"header", lambda message_bytes: (1, iter([b"body"]))
        sending = asyncio.create_task(
            SentActivation(sent, nullcontext(), ALONE, lambda reply: reply, (), False).exchange(
                call, (call.write, call.read)
            )
        )
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.wait([sending])
        assert call.over

    run(scenario())


def test_a_cancelled_body_frees_its_buffers_even_if_the_exception_is_kept(buffers: Buffers) -> None:
    class Stalled:
        """A call whose next message never arrives."""

        async def read(self) -> Any:
            return await asyncio.get_running_loop().create_future()

    async def ask() -> None:
        raise AssertionError("it has begun to come")

    async def scenario() -> None:
        sent = activation((3, 333, 777))
        header = replace(sent.header, specs=tuple(t.spec for t in sent.tensors))
        _, frames = unpacked(list(message_codec.to_activation(sent, head_alone=True))[1], pb.ActivationMessage)
        stalled = Stalled()
        incoming = IncomingActivation(header, frames, lambda *count: None, stalled.read, ask, Patience())
        reading = asyncio.create_task(incoming())
        await asyncio.sleep(0)
        assert alive(buffers) == 1
        reading.cancel()
        with pytest.raises(asyncio.CancelledError) as kept:
            await reading
        assert alive(buffers) == 0
        assert kept.tb is not None

    run(scenario())
