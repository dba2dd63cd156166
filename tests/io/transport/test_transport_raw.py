"""How the server treats callers that break the protocol: bare stubs, truncated streams, wrong bytes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from node_stub import NodeStub
from transport_fixture import (
    LARGE,
    OTHER_RUN,
    RUN,
    Buffers,
    Node,
    activation,
    alive,
    bare,
    echo,
    gradient_of,
    hang,
    logged,
    pair,
    run,
    soon,
    watched_buffers,
)

from noloco_p2p.core import wire
from noloco_p2p.core.messages import Activation, Gradient, Header
from noloco_p2p.errors import Busy, Violation
from noloco_p2p.io.transport import callers, message_codec
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.reply_reader import GradientReader
from noloco_p2p.ports import Body

MIDDLE = (3, 333, 777)
"""3 MiB: a few chunks."""


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> Buffers:
    return watched_buffers(monkeypatch)


@dataclass
class Bodies:
    """A handler that reads the body, and records how that ended."""

    error: str = ""

    async def serve(self, header: Header, body: Body) -> Gradient:
        try:
            return await echo(header, body)
        except BaseException as error:
            self.error = f"{type(error).__name__}: {error}"
            raise


@asynccontextmanager
async def raw_call(node: Node, seconds: float | None = 10.0) -> AsyncIterator[Any]:
    """A bare Propagate call to a server with `node`."""
    async with pair(node) as both, bare(both.peer) as channel:
        call = NodeStub(channel).Propagate(timeout=seconds, metadata=callers.metadata())
        try:
            yield call
        finally:
            call.cancel()


def messages(sent: Activation) -> list[pb.ActivationMessage]:
    alone = not message_codec.fits_one_message(sent)
    return [pb.ActivationMessage.FromString(raw) for raw in message_codec.to_activation(sent, head_alone=alone)]


async def refused(call: Any, sent: list[pb.ActivationMessage]) -> str:
    """Send these messages and the end of the stream; returns the text of the Violation that comes back."""
    for message in sent:
        await call.write(message)
    await call.done_writing()
    reply = await soon(call.read())
    if reply.HasField("grant"):
        reply = await soon(call.read())
    assert reply.refusal.kind == pb.Refusal.KIND_VIOLATION
    return str(reply.refusal.message)


def flip_a_byte(sent: list[pb.ActivationMessage]) -> None:
    chunk = sent[1].frames[0].chunk
    chunk.data = chunk.data[:100] + bytes([chunk.data[100] ^ 1]) + chunk.data[101:]


def repeat_a_chunk(sent: list[pb.ActivationMessage]) -> None:
    sent[3] = sent[2]


def truncate(sent: list[pb.ActivationMessage]) -> None:
    del sent[2:]


def drop_the_ends(sent: list[pb.ActivationMessage]) -> None:
    for message in sent:
        kept = [frame for frame in message.frames if frame.HasField("chunk")]
        del message.frames[:]
        message.frames.extend(kept)


def overrun(sent: list[pb.ActivationMessage]) -> None:
    sent[3].frames[0].chunk.data += b"x"


def wrong_total(sent: list[pb.ActivationMessage]) -> None:
    sent[0].header.digest ^= 1


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (flip_a_byte, "do not match the digest that was sent"),
        (repeat_a_chunk, "at byte 1048576 arrived twice"),
        (truncate, "truncated: 2 of 2 tensors"),
        (drop_the_ends, "truncated: 2 of 2 tensors"),
        (overrun, "extends to byte 3104893 of 3104892"),
        (wrong_total, "declared for them"),
    ],
)
def test_a_broken_body_is_a_violation_for_both_sides_and_frees_its_buffers(
    fault: Callable[[list[pb.ActivationMessage]], None], text: str, buffers: Buffers
) -> None:
    async def scenario() -> None:
        bodies = Bodies()
        sent = messages(activation(MIDDLE))
        fault(sent)
        async with raw_call(Node(bodies.serve)) as call:
            assert text in await refused(call, sent)
            assert bodies.error.startswith("Violation: ")
            assert text in bodies.error
            assert buffers
            assert alive(buffers) == 0

    run(scenario())


def test_a_caller_that_leaves_in_the_middle_of_a_body_is_a_cancellation_not_a_violation(
    buffers: Buffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        bodies = Bodies()
        node = Node(bodies.serve)
        allocated, allocate = asyncio.Event(), message_codec.allocate

        def noted(length: int) -> memoryview:
            allocated.set()
            return allocate(length)

        monkeypatch.setattr(message_codec, "allocate", noted)
        async with raw_call(node) as call:
            for message in messages(activation(LARGE))[:3]:
                await call.write(message)
            await soon(allocated.wait())
            assert alive(buffers) == 1
            call.cancel()
            await soon(node.ended.wait())
            assert node.ends == ["CancelledError"]
            assert bodies.error.startswith("CancelledError")
            assert alive(buffers) == 0

    run(scenario())


def specs(*kinds: tuple[str, str, tuple[int, ...]]) -> list[pb.TensorSpec]:
    return [pb.TensorSpec(name=name, dtype=dtype, shape=shape) for name, dtype, shape in kinds]


HIDDEN, TARGETS = ("hidden", "float32", (2, 8, 16)), ("targets", "int32", (2, 8))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"run_id": OTHER_RUN}, f"run {OTHER_RUN!r}, this node works on {RUN!r}"),
        ({"time_left_s": 0.0}, "makes no sense"),
        ({"time_left_s": float("nan")}, "makes no sense"),
        ({"stage": 0}, "makes no sense"),
        ({"filler_bytes": 1 << 20}, "1048576 bytes of filler"),
        ({"specs": specs()}, "an activation is hidden"),
        ({"specs": specs(HIDDEN)}, "an activation is hidden"),
        ({"specs": specs(TARGETS, HIDDEN)}, "an activation is hidden"),
        ({"specs": specs(("hidden", "int32", (2, 8, 16)), TARGETS)}, "an activation is hidden"),
        ({"specs": specs(("hidden", "float32", (2, 8)), TARGETS)}, "an activation is hidden"),
        ({"specs": specs(("hidden", "uint8", (2, 8, 16)), TARGETS)}, "an activation is hidden"),
        ({"specs": specs(("hidden", "uint8", (99,)))}, "an activation is hidden"),
        ({"specs": specs(("hidden", "uint8", (99,)), ("targets", "int32", (16,)))}, "an activation is hidden"),
        ({"specs": specs(HIDDEN, ("targets", "int32", (2, 9)))}, "an activation is hidden"),
        ({"specs": specs(HIDDEN, TARGETS, ("mask", "int32", (2, 8)))}, "an activation is hidden"),
        ({"specs": specs(HIDDEN, TARGETS, ("mask", "uint8", (2, 8)), TARGETS)}, "an activation is hidden"),
        ({"specs": specs(("hidden", "quint4", (2, 8, 16)), TARGETS)}, "unknown element type 'quint4'"),
        ({"specs": specs(("hidden", "float32", (1 << 62, 8, 16)), TARGETS)}, "at most 134217728 are allowed"),
    ],
)
def test_an_invalid_header_never_reaches_the_handler(changes: dict[str, Any], text: str) -> None:
    async def scenario() -> None:
        node = Node(hang)
        (sent,) = messages(activation())
        del sent.frames[:]
        if "specs" in changes:
            del sent.header.specs[:]
        sent.header.MergeFrom(pb.ActivationHeader(**changes))
        for name, value in changes.items():
            if name != "specs":
                setattr(sent.header, name, value)
        async with raw_call(node) as call:
            assert text in await refused(call, [sent])
        assert node.calls == []

    run(scenario())


def test_a_call_without_header_deadline_or_the_right_protocol_is_refused() -> None:
    async def scenario() -> None:
        node = Node(hang)
        (sent,) = messages(activation())
        async with raw_call(node) as call:
            assert "carries no header" in await refused(call, [])
        async with raw_call(node) as call:
            assert "carries no header" in await refused(call, [pb.ActivationMessage(frames=sent.frames)])
        async with raw_call(node, seconds=None) as call:
            assert "needs a deadline" in await refused(call, [sent])
        async with pair(node) as both, bare(both.peer) as channel:
            odd = (("noloco-protocol", "99"),)
            reply = await NodeStub(channel).Describe(pb.DescribeRequest(), timeout=5, metadata=odd)
            assert f"protocol '99', this node speaks {wire.PROTOCOL!r}" in reply.refusal.message
            assert (reply.peer_id, reply.run_id) == ("B", RUN)
        assert node.calls == []

    run(scenario())


@pytest.mark.parametrize("method", ["FetchSnapshot", "FetchState", "Progress", "Describe"])
def test_a_request_that_cannot_be_parsed_is_refused_without_a_log_line(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC would log a traceback for each, so anybody could fill a disk."""

    async def scenario() -> None:
        async with pair(Node(hang)) as both, bare(both.peer) as channel:
            calling = channel.unary_stream(f"/noloco.v1.Node/{method}")(
                b"\x0a\xff", timeout=5, metadata=callers.metadata()
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await calling.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(scenario())
    assert not logged(caplog)


def test_a_one_message_activation_follows_the_same_protocol() -> None:
    async def scenario() -> None:
        sent = activation(mask=True)
        async with raw_call(Node(echo)) as call:
            await call.write(messages(sent)[0])
            reply = await call.read()
            assert await call.read() is grpc.aio.EOF
        gradient = GradientReader(sent).feed(reply.SerializeToString())
        assert gradient is not None
        assert gradient.grad.data == sent.hidden.data

    run(scenario())


@pytest.mark.parametrize("refuses", [True, False])
def test_an_early_reply_does_not_fail_the_writes_of_a_caller_that_has_not_seen_it(refuses: bool) -> None:
    """When a write fails, gRPC drops whatever the caller has not yet read."""

    async def serve(header: Header, body: Body) -> Gradient:
        if refuses:
            raise Busy("full")
        return gradient_of(header, header.specs[0])

    async def scenario() -> None:
        async with raw_call(Node(serve)) as call:
            sent = messages(activation(LARGE))
            await call.write(sent[0])
            reply = await soon(call.read())
            assert reply.HasField("refusal") == refuses
            while not refuses and not reply.frames[-1].HasField("end"):
                reply = await soon(call.read())
            for message in sent[1:]:
                await soon(call.write(message))
            await call.done_writing()
            assert await soon(call.read()) is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK

    run(scenario())


def test_a_body_read_twice_is_truncated_the_second_time() -> None:
    seen: list[Violation] = []

    async def twice(header: Header, body: Body) -> Gradient:
        gradient = await echo(header, body)
        try:
            await body()
        except Violation as error:
            seen.append(error)
        return gradient

    async def scenario() -> None:
        async with raw_call(Node(twice)) as call:
            await call.write(messages(activation())[0])
            assert (await soon(call.read())).HasField("gradient")
        assert "truncated" in str(seen[0])

    run(scenario())
