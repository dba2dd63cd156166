"""Sends random and mutated messages to all that strangers can reach: gRPC, HTTP pages, libp2p calls, DHT records.

gRPC and HTTP use loopback. The handlers of libp2p calls and the validator of records are called directly, without the
daemon.
"""

import asyncio
import gc
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import grpc.aio
import uvloop

from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.core.snapshots import Snapshot
from noloco_p2p.errors import PeerError
from noloco_p2p.io.dht import adverts, join_handshake
from noloco_p2p.io.dht.identity import Identity
from noloco_p2p.io.dht.reach import Reach
from noloco_p2p.io.security import admission
from noloco_p2p.io.telemetry.node_figures import rss_bytes
from noloco_p2p.io.telemetry.prometheus_telemetry import PrometheusTelemetry
from noloco_p2p.io.transport import callers, message_codec
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.peer_links import open_links
from noloco_p2p.lab.bench.transport import FAR, MIB, NEAR, PEER, RUN, SMALL, BenchPeer, identity, make_transport
from noloco_p2p.launch.progress_line import ProgressLine

METHODS = ("Propagate", "Evaluate", "Stripe", "FetchSnapshot", "FetchState", "Progress", "Describe", "Warm")
REQUESTS = [b"GET /status?name[]=a HTTP/1.1\r\nHost: node\r\nAccept: text/plain\r\n\r\n", b"HEAD /sd HTTP/1.0\r\n\r\n"]
CALLS = [b"", b"127.0.0.1:1", b'{"invitation":"2","role":"member"}']
MESSAGES = [
    *message_codec.to_activation(SMALL, head_alone=False),
    *message_codec.to_activation(SMALL, head_alone=True),
    *(m.SerializeToString() for m in (pb.SnapshotRequest(stage=1, round=1), pb.StateRequest(), pb.DescribeRequest())),
    pb.ProgressRequest(microbatches=[pb.MicrobatchId(peer="a", counter=1)]).SerializeToString(),
]
AT_ONCE, CALL_S, TICK_S, KEY = 32, 0.5, 0.001, b"the hash of stage 0"


def mutated(rng: random.Random, data: bytes) -> bytes:
    """The message with some bytes or parts changed, or truncated; sometimes an entirely different one."""
    made = bytearray(data if rng.random() < 0.9 else rng.randbytes(rng.randrange(512)))
    for _ in range(rng.choice((0, 1, 1, 2, 8))):
        at, length = rng.randrange(len(made) + 1), rng.choice((1, 1, 4, 64))
        made[at : at + rng.choice((0, length))] = rng.choice((rng.randbytes(length), b"\xff" * length, made[:length]))
    return bytes(made if rng.random() < 0.9 else made[: rng.randrange(len(made) + 1)])


class Target:
    """A node as strangers see it, and how many of their messages ended how. `crashes` are answers that reveal a bug."""

    def __init__(self, home: Path, seed: int) -> None:
        self.identity, self.reach = Identity.open(home / "identity.key"), Reach(["127.0.0.1"])
        self.ends, self._rng = Counter[str](sent=0, crashes=0), random.Random(seed)
        self._answers: list[Callable[[PeerId, bytes], Awaitable[bytes]]] = []
        self._validator = adverts.AdvertValidator(self.identity, RUN, {KEY: 0}, adverts.dht_time)
        advert = Advert(self.identity.peer_id, RUN, 0, ("127.0.0.1:1",), state="training")
        self._payload = adverts.encode(adverts.AdvertRecord(advert, adverts.dht_time(), ("/ip4/127.0.0.1/tcp/1",)))

    async def serve(self, name: str, answer: Callable[[PeerId, bytes], Awaitable[bytes]]) -> None:
        """See `Libp2pDaemon.serve`."""
        self._answers.append(answer)

    async def rpc(self, channel: Any) -> None:
        """Call any method with up to two messages."""
        sent = [mutated(self._rng, self._rng.choice(MESSAGES)) for _ in range(self._rng.choice((0, 1, 1, 2)))]
        method = channel.stream_stream(f"/noloco.v1.Node/{self._rng.choice(METHODS)}")
        try:
            async for _ in method(iter(sent), timeout=CALL_S, metadata=callers.metadata()):
                self.ends["answers"] += 1
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            self.ends["CANCELLED"] += 1  # by the node: gRPC raises this for no other reason
        except grpc.aio.AioRpcError as error:
            self.ends[error.code().name] += 1
            self.ends["crashes"] += error.code() is grpc.StatusCode.UNKNOWN  # gRPC's code for an exception

    async def browse(self, port: int) -> None:
        """Request a page."""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(10 * CALL_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(mutated(self._rng, self._rng.choice(REQUESTS)))
                writer.write_eof()
                answer = await reader.read(16)
                writer.close()
                self.ends["crashes"] += b" 500 " in answer

    async def inside(self) -> None:
        """Make a libp2p call, and validate a record, about half of the time with a right signature. Raises on a bug."""
        from hivemind.dht.validation import DHTRecord

        with suppress(PeerError):
            await self._rng.choice(self._answers)(PEER, mutated(self._rng, self._rng.choice(CALLS)))
        until, subkey = adverts.dht_time() + 60.0, adverts.packed_text(self.identity.peer_id)
        value = adverts.packed_bytes(mutated(self._rng, self._payload)[:4096])
        value = self._validator.sign_value(DHTRecord(KEY, subkey, value, until))
        change = mutated if self._rng.random() < 0.5 else lambda _, data: data
        self._validator.validate(DHTRecord(KEY, change(self._rng, subkey), change(self._rng, value), until))

    async def meet(self, messages: int, ports: tuple[int, int]) -> None:
        """Send this many messages, a quarter of each kind."""

        async def send() -> None:
            while self.ends["sent"] < messages:
                self.ends["sent"] += 4
                await self.rpc(channel)
                await self.browse(ports[1])
                await self.inside()

        async with open_links(identity(NEAR), RUN).channel(f"127.0.0.1:{ports[0]}", PEER, ()) as channel:
            await asyncio.gather(*(send() for _ in range(AT_ONCE)))


async def measure(home: Path, messages: int, seed: int, line: ProgressLine) -> dict[str, float | int]:
    """See `run`."""
    target, telemetry, transport = Target(home, seed), PrometheusTelemetry(2), make_transport(FAR, MIB)
    libp2p: Any = target
    await join_handshake.serve_manifest(libp2p, b"{}")
    await join_handshake.serve_dial_back(libp2p, lambda address, peer: asyncio.sleep(0, "nobody"))
    await admission.serve(libp2p, None)
    async with AsyncExitStack() as closing:
        closing.push_async_callback(transport.close)
        await transport.serve(BenchPeer(Snapshot(PEER, 1, 1, ())))
        closing.callback(telemetry.close)
        ports = transport.port, telemetry.serve("127.0.0.1", 0)
        await target.meet(AT_ONCE, ports)
        gc.collect()
        gc.freeze()  # as a node does (`bootstrap.check_model`)
        meeting, stall_s, before = asyncio.create_task(target.meet(messages, ports)), 0.0, rss_bytes()
        closing.push_async_callback(asyncio.wait, [meeting])
        closing.callback(meeting.cancel)
        while not meeting.done():
            began = time.thread_time()
            await asyncio.sleep(TICK_S)
            stall_s = max(stall_s, time.thread_time() - began)
            line.tell("sending", target.ends["sent"] / messages)
        meeting.result()
    return {"stall_ms": 1e3 * stall_s, "grown_mib": (rss_bytes() - before) / MIB, **target.ends}


def run(line: ProgressLine, messages: int = 10_000, seed: int = 0) -> dict[str, float | int]:
    """Measure, and return how the messages ended. `stall_ms`: most CPU time between two ticks of the event loop."""
    with tempfile.TemporaryDirectory() as folder:
        figures: dict[str, float | int] = uvloop.run(measure(Path(folder), messages, seed, line))
        return figures
