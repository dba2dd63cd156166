"""The Transport port over gRPC: what a node calls at its peers, and the server that answers theirs (`io/serving`).

An activation goes out as one streamed call whose reply is its gradient. Nothing waits for a yes: the tensors follow
the header at once, and the sending ends with the reply, early or not.
"""

import asyncio
import ctypes
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio

from noloco_p2p.config import ListenSettings
from noloco_p2p.core.messages import Activation, Advert, Description, Gradient, LossSum, PeerId, Snapshot, TensorSpec
from noloco_p2p.errors import Busy, Declined, LocalError, PeerError, Unreachable, Violation
from noloco_p2p.io import noloco_pb2 as pb
from noloco_p2p.io import protobuf, serving
from noloco_p2p.io.channels import OPTIONS as CHANNEL_OPTIONS
from noloco_p2p.io.channels import Channels, Link, connect
from noloco_p2p.io.noloco_pb2_grpc import NodeStub
from noloco_p2p.ports import Handler, Telemetry

DESCRIBE_S = 5.0
"""Longest wait for a peer's description of itself."""

T = TypeVar("T")


def tune_allocator() -> None:
    """Keeps freed message buffers in the process instead of giving them back to the system page by page.

    Doubles the transfer rate (every message would be mapped and page-faulted anew). For the entry point of a process;
    does nothing where the C library is not glibc.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        mmap_threshold, trim_threshold = -3, -1
        libc.mallopt(mmap_threshold, 256 << 20)
        libc.mallopt(trim_threshold, (2 << 30) - 1)


class GrpcTransport:
    """Calls to peers and calls from them, for one node of one run. Belongs to the event loop that first uses it."""

    def __init__(
        self, me: PeerId, run_id: str, listen: ListenSettings, telemetry: Telemetry, max_body_bytes: int
    ) -> None:
        """`max_body_bytes` bounds the tensors of one activation that a peer may send."""
        self.port = 0
        """TCP port of the server, once it listens."""
        self._listen = listen
        self._telemetry = telemetry
        self._metadata = serving.metadata(me, run_id)
        self._servicer = serving.Servicer(me, run_id, telemetry, max_body_bytes)
        self._channels = Channels()
        self._server: Any = None
        self._closed = False

    async def listen(self) -> None:
        """Bind and answer; calls are declined until `serve` names a handler. Raises LocalError: the port is in use."""
        if self._server is not None:
            return
        server = grpc.aio.server(options=serving.OPTIONS, maximum_concurrent_rpcs=serving.MAX_CALLS)
        server.add_generic_rpc_handlers((self._servicer.methods(),))
        host, port = self._listen.host, self._listen.grpc_port
        try:
            self.port = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError:
            raise LocalError(
                f"cannot listen on {host} port {port}: it is in use, or {host} is no address of this machine;"
                " set listen.grpc_port to another port (0 picks a free one)"
            ) from None
        self._server = server
        await server.start()

    async def serve(self, handler: Handler) -> None:
        """Start to answer calls with `handler`. Raises LocalError when the port is in use."""
        self._servicer.handler = handler
        await self.listen()

    async def close(self) -> None:
        """Refuse new calls, cancel those in flight in both directions, free everything."""
        self._closed = True
        await self._channels.close()
        if self._server is not None:
            await self._server.stop(grace=None)

    async def propagate(self, peer: Advert, activation: Activation) -> Gradient:
        """Send an activation, wait for its gradient. Raises Busy, Declined, Violation, Unreachable."""
        reader = protobuf.GradientReader(activation)
        gradient = await self._exchange(peer, "Propagate", "gradient", activation, reader.feed)
        self._count("in", "gradient", gradient.grad.data.nbytes)
        return gradient

    async def evaluate(self, peer: Advert, activation: Activation) -> LossSum:
        """Send a held-out activation, wait for its loss. Raises as propagate."""
        return await self._exchange(peer, "Evaluate", "loss", activation, protobuf.LossReader().feed)

    async def fetch_snapshot(
        self, peer: Advert, round: int | None, wait_s: float, deadline_s: float, expected: tuple[TensorSpec, ...]
    ) -> Snapshot:
        """Fetch a peer's snapshot. Raises Violation unless it is exactly `expected`, else as propagate."""
        request = pb.SnapshotRequest(round=round, wait_s=wait_s)
        reader = protobuf.SnapshotReader(peer.peer_id, expected)
        what = "snapshot"
        async with self._calling(peer, what, wait_s + deadline_s) as (link, seconds):
            call = link.fetch_snapshot(request, timeout=seconds, metadata=self._metadata)
            try:
                snapshot = reader.feed(_some(await call.read()))
                async with asyncio.timeout(deadline_s):
                    while snapshot is None:
                        snapshot = reader.feed(_some(await call.read()))
            except TimeoutError:
                raise Unreachable(f"no whole {what} from {peer.peer_id} within {deadline_s:g} s") from None
            finally:
                call.cancel()
        self._count("in", "snapshot", sum(tensor.data.nbytes for tensor in snapshot.tensors))
        return snapshot

    async def describe(self, peer: Advert) -> Description:
        """Ask a peer who it is and how far it has come, within 5 s. Raises as propagate."""
        async with self._calling(peer, "description", DESCRIBE_S) as (link, seconds):
            reply = await link.describe(pb.DescribeRequest(), timeout=seconds, metadata=self._metadata)
        self._count("in", "control", reply.ByteSize())
        return protobuf.from_description(reply)

    async def _exchange(
        self, peer: Advert, method: str, what: str, activation: Activation, feed: Callable[[bytes], T | None]
    ) -> T:
        """Send an activation; `feed` gets the messages of the reply until it returns the whole."""
        size = sum(tensor.data.nbytes for tensor in activation.tensors)
        async with self._calling(peer, what, activation.header.time_left_s) as (link, seconds):
            messages = protobuf.to_activation(activation, seconds)
            if protobuf.fits_one_message(activation):
                call = link.whole[method](next(messages), timeout=seconds, metadata=self._metadata)
                self._count("out", "activation", size)
                result = feed(await call)
                if result is None:
                    raise Violation(f"the {what} from {peer.peer_id} is not whole")
                return result
            call = link.streamed[method](timeout=seconds, metadata=self._metadata)
            self._count("out", "activation", size)
            return await _stream(call, messages, feed)

    @asynccontextmanager
    async def _calling(self, peer: Advert, what: str, seconds: float) -> AsyncIterator[tuple[Link, float]]:
        """A connection, and the seconds left once it stands; errors of gRPC become ours here and only here."""
        if self._closed:
            raise Unreachable("this node's transport is closed")
        if seconds <= 0:
            raise Unreachable(f"no time is left to wait for a {what} from {peer.peer_id}")
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + seconds
        async with self._channels.link(peer, seconds) as link:
            with _mapped(peer.peer_id, what, seconds, give_up_at):
                yield link, max(0.001, give_up_at - clock())

    def _count(self, direction: str, kind: str, size: int) -> None:
        self._telemetry.event("bytes", direction=direction, kind=kind, bytes=size)


async def _stream(call: Any, messages: Iterator[bytes], feed: Callable[[bytes], T | None]) -> T:
    """Writes while it reads; when the reply is whole, or a refusal, the call ends and with it what was still to send.

    A peer that replies early does not read on before its reply is out, so flow control bounds what is sent in vain.
    """

    async def write() -> None:
        for message in messages:
            await call.write(message)

    writing = asyncio.create_task(write())
    try:
        result = None
        while result is None:
            result = feed(_some(await call.read()))
        return result
    finally:
        call.cancel()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


def _some(message: T) -> T:
    """The message, unless the stream is over. Raises Violation: the caller is still waiting for the rest."""
    if message is grpc.aio.EOF:
        raise Violation("the reply ended early")
    return message


@contextmanager
def _mapped(peer: PeerId, what: str, seconds: float, give_up_at: float) -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INTERNAL and asyncio.get_running_loop().time() >= give_up_at - 0.01:
            # The deadline made a pending write fail, and gRPC tells of that instead.
            raise Unreachable(f"no {what} from {peer} within {seconds:g} s") from None
        raise _translated(error, peer, what, seconds) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # gRPC cancelled the call, not somebody this task: the connection was closed under it.
        raise Unreachable(f"the call to {peer} was ended while it waited for a {what}") from None
    except (asyncio.InvalidStateError, grpc.aio.UsageError):
        raise Unreachable(f"the connection to {peer} was closed before the {what} came") from None


def _translated(error: grpc.aio.AioRpcError, peer: PeerId, what: str, seconds: float) -> PeerError:
    """What a status of gRPC means to the caller."""
    code, details = error.code(), (error.details() or "")[: protobuf.MESSAGE_CHARACTERS]
    match code:
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unreachable(f"no {what} from {peer} within {seconds:g} s")
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in details:
            return Violation(f"{peer}: {details}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Busy(f"{peer} has too many calls in flight")
        case grpc.StatusCode.UNKNOWN | grpc.StatusCode.UNIMPLEMENTED:
            return Declined(f"{peer} failed to serve the call: {details}")
        case _:
            return Unreachable(f"{peer} was lost while waiting for a {what}: {details}")


async def probe(address: str, peer_id: PeerId, run_id: str, timeout_s: float) -> str | None:
    """Whether the node `peer_id` of run `run_id` answers at `address` (`host:port`): None, or the reason in words."""
    channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    try:
        async with asyncio.timeout(timeout_s):
            reason = await connect(channel, timeout_s)
            if reason is not None:
                return reason
            call = NodeStub(channel).Describe(
                pb.DescribeRequest(), timeout=timeout_s, metadata=serving.metadata("", run_id)
            )
            give_up_at = asyncio.get_running_loop().time() + timeout_s
            with _mapped(peer_id, "description", timeout_s, give_up_at):
                reply = await call
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except PeerError as error:
        return str(error)
    finally:
        await channel.close()
    if reply.peer_id != peer_id:
        return f"another node answers there: {reply.peer_id[:64]!r}"
    if reply.run_id != run_id:
        return f"the node there works on run {reply.run_id[:64]!r}"
    return None
