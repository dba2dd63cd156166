"""gRPC connections over libp2p streams, for peers that cannot be dialled (ARCHITECTURE.md, "Reachability").

gRPC dials a local socket. Its bytes, which are encrypted, pass unchanged over a stream to the peer, or to a relay that
splices the stream with another one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import ExitStack, closing, suppress
from tempfile import TemporaryDirectory
from typing import Any

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import ConfigError, LocalError, PeerError, Unreachable
from noloco_p2p.humanize import plain
from noloco_p2p.io.dht.libp2p import Libp2pDaemon, Stream
from noloco_p2p.io.dht.reach import is_streamed, relay_of

STREAMS, RELAY_STREAMS, RELAYED_STREAMS = "noloco/grpc/1", "noloco/relay/1", "noloco/relayed/1"
RESERVE_CALL = "noloco/reserve/1"
RESERVE_TIMEOUT_S = 3.0
OPEN_TIMEOUT_S = 5.0
"""Longest wait for a relay's answer, and for gRPC to use a stream that was opened for it."""
CHUNK_BYTES = 1 << 16
"""Most bytes read at once. Together with the streams' two buffers, at most half a MiB waits here in each direction."""
IDLE_S = 240.0
"""Longest time without a byte in either direction, seconds. gRPC probes a connection with calls after 5 s, and ends one
without calls after 3 minutes."""
END_S = 10.0
"""How long the end of a stream may take what was passed on before the other end stopped, seconds."""
_TEXT_LIMIT = 200

log = logging.getLogger(__name__)


async def cancelled(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def logged(what: str, doing: Awaitable[object], said: str = "") -> str:
    """Await something that this node does again and again. Returns why it failed, which is logged unless it was `said`
    before, or ""."""
    try:
        await doing
    except (LocalError, PeerError) as error:
        if str(error) != said:
            log.warning("%s: %s", what, error)
        return str(error)
    return ""


async def say(stream: Stream, text: str) -> None:
    """Send a short text at the beginning of a stream. Raises Unreachable if the stream is broken."""
    data = text.encode()[:_TEXT_LIMIT]
    stream.writer.write(bytes([len(data)]) + data)
    try:
        await stream.writer.drain()
    except OSError as error:
        raise Unreachable("the remote end has closed the stream") from error


async def hear(stream: Stream) -> str:
    """Receive the short text at the beginning of a stream. Raises Unreachable if it does not arrive."""
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            [length] = await stream.reader.readexactly(1)
            return plain((await stream.reader.readexactly(length)).decode(errors="replace"), _TEXT_LIMIT)
    except (TimeoutError, OSError, EOFError) as error:
        raise Unreachable("the remote end of the stream does not answer") from error


async def splice(one: Stream, other: Stream, pace: Callable[[int], Awaitable[object]] | None = None) -> None:
    """Pass bytes on in both directions until either end stops or breaks, or none have come for IDLE_S; then close both.
    Awaits `pace` with the size of each part before passing it on."""
    loop, idle = asyncio.get_running_loop(), asyncio.timeout(IDLE_S)

    async def carry(source: Stream, sink: Stream) -> None:
        while data := await source.reader.read(CHUNK_BYTES):
            idle.reschedule(loop.time() + IDLE_S)
            if pace is not None:
                await pace(len(data))
            sink.writer.write(data)
            await sink.writer.drain()

    ways = [asyncio.create_task(carry(*ends)) for ends in ((one, other), (other, one))]
    try:
        with suppress(TimeoutError):
            async with idle:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancelled(ways)
        for stream in (one, other):
            stream.writer.close()
            loop.call_later(END_S, stream.writer.transport.abort)  # it may not take what is left


class Streams:
    """The streams that a node opens for gRPC. Belongs to one event loop."""

    def __init__(self, libp2p: Libp2pDaemon, run_id: str, certificate: Callable[[], str] = str) -> None:
        """`certificate`: this node's as a member, PEM; empty in an open run."""
        self.hosts: dict[str, str] = {}
        """This node's connections to its own gRPC server: `host:port` → whose stream the connection carries."""
        self._libp2p, self._run_id, self._certificate = libp2p, run_id, certificate
        self._carrying: set[asyncio.Task[None]] = set()

    async def target(self, address: str, peer: PeerId) -> str:
        """The address that gRPC dials, once, to reach a peer at one of its advertised addresses. Raises Unreachable."""
        if not is_streamed(address):
            return address
        try:
            stream = await self._opened(address, peer)
        except (LocalError, ConfigError, PeerError) as error:
            raise Unreachable(str(error)) from error
        taken: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()

        def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if taken.done():
                writer.close()
            else:
                taken.set_result(Stream(reader, writer))

        with ExitStack() as failing:
            failing.callback(stream.writer.close)
            try:
                folder = TemporaryDirectory(prefix="noloco-", dir="/tmp")
                failing.callback(folder.cleanup)
                path = f"{folder.name}/grpc"
                server = await asyncio.start_unix_server(take, path)
            except OSError as error:
                raise Unreachable(f"this node cannot create a socket in /tmp: {error.strerror}") from error
            failing.pop_all()
        task = asyncio.create_task(self._carry(server, folder, taken, stream))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)
        return f"unix:{path}"

    async def reserve(self, relay: PeerId) -> None:
        """Reserve a place with a linked relay, which then splices this node's streams for a while. Raises PeerError."""
        request = f"{self._run_id}\n{self._certificate()}".encode()
        await self._libp2p.call(relay, RESERVE_CALL, request, RESERVE_TIMEOUT_S)

    async def close(self) -> None:
        """End all streams."""
        await cancelled(self._carrying)

    async def _opened(self, address: str, peer: PeerId) -> Stream:
        relay = relay_of(address)
        if relay is None:
            return await self._libp2p.open_stream(peer, STREAMS)
        if relay == self._libp2p.peer_id:
            raise Unreachable("this node is the relay, and has no link to the peer")
        if relay not in await self._libp2p.links():
            if relay not in self._libp2p.met:
                raise Unreachable(f"the address of relay {relay} is not known")
            await self._libp2p.dial(self._libp2p.met[relay], "relay")
        await self.reserve(relay)
        stream = await self._libp2p.open_stream(relay, RELAY_STREAMS)
        with ExitStack() as failing:
            failing.callback(stream.writer.close)
            await say(stream, peer)
            if refusal := await hear(stream):
                raise Unreachable(f"relay {relay}: {refusal}")
            failing.pop_all()
        return stream

    async def _carry(
        self, server: asyncio.Server, folder: "TemporaryDirectory[str]", taken: asyncio.Future[Stream], stream: Stream
    ) -> None:
        with closing(stream.writer), suppress(TimeoutError):
            try:
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    local = await taken
            finally:
                server.close()
                folder.cleanup()  # at once, so that a node that is killed leaves nothing behind
            await splice(local, stream)
