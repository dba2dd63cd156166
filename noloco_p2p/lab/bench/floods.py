"""Floods with which a stranger keeps a node from its work, each in a process of its own. `flood` measures them.

The stranger knows a node's address and the run id. It connects from another loopback address than the nodes, so that
limits per host do not take it for one of them.
"""

import asyncio
import os
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import grpc.aio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_p2p.config import RunManifest
from noloco_p2p.core import messages
from noloco_p2p.core.block_format import wire_spec
from noloco_p2p.core.messages import HostTensor, PeerId, TensorSpec
from noloco_p2p.io.dht.identity import Identity
from noloco_p2p.io.dht.libp2p import Stream
from noloco_p2p.io.dht.streams import splice
from noloco_p2p.io.transport import callers, message_codec
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.connection_limit import allow_many_files
from noloco_p2p.io.transport.peer_links import Links, open_links

STRANGER = "127.0.0.2"
CONNECTIONS, STREAMS = 4096, 512
DIALLED = 64
"""Maximum number of connections being opened at the same time."""
HANDSHAKES_PER_S = 100.0
PAUSE_S = 1.0
"""Pause between two bytes of a slow sender, and before retrying what the node has ended, seconds."""
HELLO = b"\x16\x03\x01\x0f\xff\x01" + bytes(4096)
"""The beginning of a TLS handshake that never completes."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""A client's connection preface of HTTP/2, with empty settings: RFC 9113, section 3.4."""


async def attack(ready: Callable[[int], None], kind: str, address: str, peer: PeerId, run_id: str) -> None:
    """Flood until this process is killed; `ready` gets its process id once all connections are open."""
    allow_many_files()
    stranger = Stranger(address, peer, run_id)
    flood = asyncio.create_task(KINDS[kind](stranger))
    await asyncio.wait([flood, asyncio.create_task(stranger.complete.wait())], return_when=asyncio.FIRST_COMPLETED)
    ready(os.getpid())
    await flood


class Stranger:
    """An attacker that knows a node's `host:port`, its peer id and its run."""

    def __init__(self, address: str, peer: PeerId, run_id: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._peer, self._run_id = peer, run_id
        self._dialling = asyncio.Semaphore(DIALLED)
        self._dialled = 0
        self.complete = asyncio.Event()
        """Set once it has as many connections as it wants."""

    async def silent(self) -> None:
        """Open CONNECTIONS that never begin TLS, or whose first message is sent byte by byte."""

        async def stay(number: int) -> None:
            reader, writer = await self._dial()
            for byte in HELLO:
                if number % 2:
                    writer.write(bytes((byte,)))
                with suppress(TimeoutError):
                    async with asyncio.timeout(PAUSE_S):
                        await reader.read(1)
                    break
            writer.close()

        await _for_ever(CONNECTIONS, stay)

    async def handshakes(self) -> None:
        """Make HANDSHAKES_PER_S handshakes with the certificate of another run."""
        context = _context(_stranger_links("0" * 64))

        async def shake_hands() -> None:
            with suppress(OSError):
                reader, writer = await self._dial(ssl=context)
                with suppress(OSError):
                    await reader.read(1)
                writer.close()

        self.complete.set()
        tasks, began, begun = set[asyncio.Task[None]](), time.monotonic(), 0
        while True:
            while begun < HANDSHAKES_PER_S * (time.monotonic() - began):
                begun += 1
                tasks.add(task := asyncio.create_task(shake_hands()))
                task.add_done_callback(tasks.discard)
            await asyncio.sleep(1 / HANDSHAKES_PER_S)

    async def connections(self) -> None:
        """Open CONNECTIONS under an identity of its own, which an open run does not refuse, and make no call."""
        context = _context(_stranger_links(self._run_id))

        async def stay(number: int) -> None:
            reader, writer = await self._dial(ssl=context)
            writer.write(PREFACE)
            with suppress(OSError):
                while await reader.read(1 << 16):
                    pass
            writer.close()

        await _for_ever(CONNECTIONS, stay)

    async def streams(self) -> None:
        """Open STREAMS calls under such an identity, and send nothing."""
        await self._calls(lambda links, number: b"", lambda call: call.read())

    async def bodies(self) -> None:
        """Open as many calls, each with the header of an activation. If the node asks for the body, send it slowly."""
        await self._calls(self._header, _drip)

    async def _calls(self, first: Callable[[Links, int], bytes], rest: Callable[[Any], Awaitable[object]]) -> None:
        links, done = _stranger_links(self._run_id), 0

        async def call(number: int) -> None:
            nonlocal done
            done += 1
            one = method(timeout=callers.MAX_CALL_S / 2, metadata=callers.metadata())
            try:
                if message := first(links, done):
                    await one.write(message)
                await rest(one)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass
            finally:
                one.cancel()

        async with self._forwarder() as address, links.channel(address, self._peer, ()) as channel:
            method = channel.stream_stream("/noloco.v1.Node/Propagate")
            self.complete.set()
            await _for_ever(STREAMS, call)

    def _header(self, links: Links, number: int) -> bytes:
        """The first message of an activation of a default run: its header alone."""
        run, me = RunManifest(), links.me
        rows = run.microbatch_size, run.sequence_length
        hidden = wire_spec("hidden", run.wire.forward, (*rows, int(str(run.model.config["hidden_size"]))))
        specs = hidden, TensorSpec("targets", "int32", rows)
        microbatch, origin = messages.MicrobatchId(me, 1, number), messages.Origin(me, 1, 0)
        header = messages.Header(self._run_id, microbatch, origin, 1, 300.0, patient=True)
        body = [HostTensor(*spec, memoryview(bytes(spec.nbytes))) for spec in specs]
        return message_codec.announced(messages.Activation(links.labelled(header), *body))[0]

    async def _dial(self, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with self._dialling:
            ends = await asyncio.open_connection(self._host, self._port, local_addr=(STRANGER, 0), **options)
        self._dialled += 1
        if self._dialled == CONNECTIONS:
            self.complete.set()
        return ends

    @asynccontextmanager
    async def _forwarder(self) -> AsyncIterator[str]:
        """A socket that forwards to the node. gRPC dials it because it cannot choose the address that it dials from."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await splice(Stream(reader, writer), Stream(*await self._dial()))

        with tempfile.TemporaryDirectory() as home, closing(await asyncio.start_unix_server(accept, f"{home}/grpc")):
            yield f"unix:{home}/grpc"


KINDS = {
    kind.__name__: kind
    for kind in (Stranger.silent, Stranger.handshakes, Stranger.connections, Stranger.streams, Stranger.bodies)
}


async def _for_ever(count: int, do: Callable[[int], Awaitable[None]]) -> None:
    """Keep `count` of these running, and restart each one after it has ended."""

    async def repeat(number: int) -> None:
        while True:
            with suppress(OSError):
                await do(number)
            await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*map(repeat, range(count)))


def _stranger_links(run_id: str) -> Links:
    """The links of somebody with a new identity."""
    return open_links(Identity(Path(STRANGER), Ed25519PrivateKey.generate(), -1), run_id)


def _context(links: Links) -> ssl.SSLContext:
    """The TLS context of a client that presents the certificate of these links and accepts any."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(links.leaf))
        file.flush()
        context.load_cert_chain(file.name)
    return context


async def _drip(call: Any) -> None:
    reply = await call.read()
    if reply is grpc.aio.EOF or not pb.Reply.FromString(reply).HasField("grant"):
        return
    for at in range(1 << 20):
        chunk = pb.Chunk(tensor=0, offset=at, data=b"\0")
        await call.write(pb.ActivationMessage(frames=[pb.Frame(chunk=chunk)]).SerializeToString())
        await asyncio.sleep(PAUSE_S)
