"""The gRPC transport on loopback: data arrives bit for bit, and every failure is one error, raised soon."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from transport_fixture import (
    LARGE,
    RUN,
    SMALL,
    SOON_S,
    Events,
    Node,
    activation,
    echo,
    gradient_of,
    hang,
    pair,
    run,
    soon,
    tensor,
)

from noloco_p2p.core import wire
from noloco_p2p.core.line_rate import RESTED_S, MeasuredLine
from noloco_p2p.core.messages import (
    Activation,
    Gradient,
    Header,
    LossSum,
    NodeDescription,
    PeerId,
    Progress,
    TensorSpec,
)
from noloco_p2p.errors import Busy, Declined, PeerError, Violation
from noloco_p2p.io.transport import message_codec
from noloco_p2p.io.transport.channels import Turns
from noloco_p2p.io.transport.reply_reader import GradientReader
from noloco_p2p.ports import Body, Claim
from noloco_p2p.sim import virtual_time


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets one more element with every message of an activation that the sender produces."""
    original, seen = message_codec.announced, list[int]()

    def counted(sent: Activation, stripe: int, filler_bytes: int) -> tuple[bytes, Callable[[int], Iterator[bytes]]]:
        header, body = original(sent, stripe, filler_bytes)
        seen.append(0)

        def counted_body(message_bytes: int) -> Iterator[bytes]:
            for index, message in enumerate(body(message_bytes), start=1):
                seen.append(index)
                yield message

        return header, counted_body

    monkeypatch.setattr(message_codec, "announced", counted)
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("shape", [SMALL, (4, 128, 512), (3, 333, 777)])
def test_propagate_returns_the_same_bits(dtype: str, shape: tuple[int, int, int]) -> None:
    async def scenario() -> None:
        sent = activation(shape, dtype=dtype, mask=True)
        received: list[Activation] = []

        async def serve(header: Header, body: Body) -> Gradient:
            received.append(await body())
            return gradient_of(header, received[0].hidden.spec)

        node = Node(serve)
        async with pair(node) as both:
            gradient = await both.a.propagate(both.peer, sent)
        assert gradient == gradient_of(sent.header, sent.hidden.spec)
        assert received[0].tensors == sent.tensors
        caller, header = node.calls[0]
        assert caller == "A"
        assert header.specs == tuple(t.spec for t in sent.tensors)
        assert sent.header.time_left_s - 5 < header.time_left_s <= sent.header.time_left_s
        assert replace(header, specs=(), digest=0, time_left_s=20.0) == sent.header

    run(scenario())


@pytest.mark.parametrize("width", [16, 1 << 15])
def test_a_gradient_uses_the_codec_of_its_own_direction(width: int) -> None:
    """The codes travel in one message, and the decoded values may need several."""
    codes, values = tensor("hidden", "uint8", (99,), 1), TensorSpec("grad", "float32", (2, 8, width))

    async def scenario() -> None:
        sent = replace(activation(), hidden=codes, reply=values)
        replies = [values, sent.hidden.spec, values._replace(dtype="uint8"), values._replace(shape=(2, 8, width - 1))]

        async def serve(header: Header, body: Body) -> Gradient:
            assert (await body()).hidden == codes
            return gradient_of(header, replies.pop(0))

        async with pair(Node(serve)) as both:
            assert await both.a.propagate(both.peer, sent) == gradient_of(sent.header, values)
            for _ in range(3):
                with pytest.raises(Violation, match="the gradient is TensorSpec"):
                    await both.a.propagate(both.peer, sent)

    run(scenario())


def test_the_digest_covers_the_activation_and_nothing_else() -> None:
    async def scenario() -> None:
        node = Node(echo)
        async with pair(node) as both:
            for sent in (activation(counter=1), activation(counter=1), activation(counter=2)):
                await both.a.propagate(both.peer, sent)
        first, again, other = (header.digest for _, header in node.calls)
        assert first == again != other

    run(scenario())


def test_evaluate_and_describe() -> None:
    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            for shape in (SMALL, (3, 333, 777)):
                assert await both.a.evaluate(both.peer, activation(shape)) == LossSum(2.25, 7)
            assert await both.a.describe(both.peer) == NodeDescription("B", RUN, 1, "training", 7.5, 3, "0.1", 2)

    run(scenario())


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy"])
def test_the_webs_proxy_is_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind such a proxy the nodes of one machine took each other for unreachable. `grpc_proxy` is used: see relay."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            assert await both.a.evaluate(both.peer, activation(SMALL)) == LossSum(2.25, 7)

    run(scenario())


def test_bytes_are_counted_once_per_message_at_both_ends() -> None:
    async def scenario() -> None:
        mine, theirs, sent = Events(), Events(), activation(mask=True)
        async with pair(Node(echo), mine, theirs) as both:
            await both.a.propagate(both.peer, sent)
            await both.a.describe(both.peer)
        size, grad = sum(t.data.nbytes for t in sent.tensors), sent.hidden.data.nbytes
        assert mine.seen[2][1]["kind"] == "control"
        assert [("bytes", {"direction": "out", "kind": "activation", "bytes": size})] == mine.seen[:1]
        assert [("bytes", {"direction": "in", "kind": "gradient", "bytes": grad})] == mine.seen[1:2]
        assert [("bytes", {"direction": "in", "kind": "activation", "bytes": size})] == theirs.seen[:1]
        assert [("bytes", {"direction": "out", "kind": "gradient", "bytes": grad})] == theirs.seen[1:2]

    run(scenario())


@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize("error", [Busy("full"), Declined("not my stage"), Violation("not finite"), Busy("x" * 9999)])
def test_a_refusal_reaches_the_sender_before_the_body_is_complete(
    error: PeerError, shape: tuple[int, int, int], drawn: list[int]
) -> None:
    async def refuse(header: Header, body: Body) -> Gradient:
        raise error

    async def scenario() -> None:
        async with pair(Node(refuse)) as both:
            with pytest.raises(type(error)) as caught:
                await both.a.propagate(both.peer, activation(shape))
        assert str(caught.value) == str(error)[:500]
        if isinstance(caught.value, Violation):
            assert caught.value.ours
        assert len(drawn) < 24, "the sender did not stop"

    run(scenario())


def test_a_stored_reply_may_precede_the_body(drawn: list[int]) -> None:
    sent = activation(LARGE)

    async def serve(header: Header, body: Body) -> Gradient:
        return gradient_of(header, header.specs[0])

    async def scenario() -> None:
        async with pair(Node(serve)) as both:
            for _ in range(3):
                drawn.clear()
                gradient = await both.a.propagate(both.peer, sent)
                assert gradient == gradient_of(sent.header, sent.hidden.spec)
                assert len(drawn) < 24, "the sender did not stop"

    run(scenario())


def test_only_the_header_of_a_large_activation_is_sent_before_the_grant(drawn: list[int]) -> None:
    async def scenario() -> None:
        node = Node(hang)
        async with pair(node) as both:
            flight = asyncio.create_task(both.a.propagate(both.peer, activation(LARGE)))
            await soon(node.entered.wait())
            assert await both.a.progress(both.peer, [activation().header.microbatch], SOON_S) == [Progress(7, 0.5)]
            assert len(drawn) == 1
            flight.cancel()
            await soon(node.ended.wait())
            assert len(drawn) == 1


def test_a_body_claimed_for_another_peer_is_not_sent(drawn: list[int]) -> None:
    async def scenario() -> None:
        node = Node(echo)
        async with pair(node) as both:
            with pytest.raises(Busy, match="another replica granted a place first"):
                await both.a.propagate(both.peer, activation(LARGE), Claim(lambda: False, lambda: None))
            await soon(node.ended.wait())
            assert len(drawn) == 1
            assert node.ends == ["CancelledError"]

    run(scenario())


def test_a_microbatch_reports_progress_until_its_reply_has_been_sent() -> None:
    async def scenario() -> None:
        node, mine = Node(echo), activation(LARGE)
        async with pair(node) as both:
            seen: list[Progress | None] = []
            flight = asyncio.create_task(both.a.propagate(both.peer, mine))
            while not flight.done():
                seen += await both.a.progress(both.peer, [mine.header.microbatch], SOON_S)
            await flight
            assert await both.a.progress(both.peer, [mine.header.microbatch], SOON_S) == [None]
            known = [report.events for report in seen if report is not None]
            assert known == sorted(known)
            assert known[-1] >= wire.REPLYING

    run(scenario())


def test_announced_bodies_to_a_peer_and_their_replies_are_sent_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even those that would fit in one message: sent in parallel over a slow line, all of them would arrive late."""
    taken: list[tuple[Turns, PeerId]] = []
    moving: list[tuple[Turns, PeerId]] = []
    original = Turns.of

    @asynccontextmanager
    async def watched(turns: Turns, peer: PeerId, begins: Callable[[], object] = lambda: None) -> AsyncIterator[None]:
        async with original(turns, peer, begins):
            assert (turns, peer) not in moving
            moving.append((turns, peer))
            taken.append((turns, peer))
            try:
                yield
            finally:  # a caller that has the whole reply may end its call before the last write returns
                moving.remove((turns, peer))

    monkeypatch.setattr(Turns, "of", watched)

    asked = Claim(lambda: True, lambda: None)

    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            sent = [activation((4, 64, 512), counter=number) for number in range(4)]
            assert all(message_codec.fits_one_message(one) for one in sent)
            await asyncio.gather(*(both.a.propagate(both.peer, one, asked) for one in sent))
            await both.a.evaluate(both.peer, activation((4, 64, 512), counter=9), asked)

    run(scenario())
    assert sorted(Counter(taken).values()) == [4, 5], "a loss has no body, so it waits for none"


@pytest.mark.parametrize("waits", [True, False])
def test_a_body_that_fails_in_its_turn_has_left(waits: bool) -> None:
    async def scenario() -> None:
        line, begun, clock = MeasuredLine(math.inf, math.inf), list[float](), asyncio.get_running_loop().time
        turn = Turns(line).of if waits else Turns(line).at_once

        async def fail() -> None:
            async with turn("B", lambda: begun.append(clock())):
                await asyncio.sleep(2 * RESTED_S)
                assert begun == [clock() - 2 * RESTED_S]
                assert not line.rested("B", clock())
                raise ConnectionError

        with pytest.raises(ConnectionError):
            await fail()
        assert not line.rested("B", clock())
        assert line.rested("B", clock() + 2 * RESTED_S)

    virtual_time.run(scenario(), limit_s=10.0)


def test_an_incomplete_reply_or_another_nodes_description_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            monkeypatch.setattr(GradientReader, "feed", lambda reader, raw: None)
            with pytest.raises(Violation, match="the gradient from B is incomplete"):
                await both.a.propagate(both.peer, activation())
            for name, other in (("run_id", "ef" * 32), ("me", "C")):
                monkeypatch.setattr(both.b._servicer.links, name, other)
                with pytest.raises(Violation, match="another node or run answers for B"):
                    await both.a.describe(both.peer)
                monkeypatch.undo()

    run(scenario())
