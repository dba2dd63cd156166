"""How fast tensors travel from one node to another, compared with the least that the machine needs for it.

Two processes on loopback. The real transport carries an activation and its gradient, and a snapshot, with digests
checked, into torch tensors. The bytes of an activation also travel both ways over a bare TCP connection; these three
take turns, so that they see the machine in the same state. Figures are MiB per second of tensor bytes.
"""

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import torch
import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_p2p.compute.host_tensor import from_torch, to_torch
from noloco_p2p.config import ListenSettings
from noloco_p2p.core import messages
from noloco_p2p.core.messages import Advert, Gradient, MicrobatchId, PeerId, Progress, ReplicaState, TensorSpec
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.errors import Declined
from noloco_p2p.io.dht.identity import Identity
from noloco_p2p.io.transport.allocator import tune_allocator
from noloco_p2p.io.transport.grpc_transport import GrpcTransport
from noloco_p2p.io.transport.peer_links import open_links
from noloco_p2p.lab.processes import peer_process
from noloco_p2p.lab.sample_stats import Stopwatch
from noloco_p2p.launch.bootstrap import NullTelemetry
from noloco_p2p.launch.progress_line import ProgressLine
from noloco_p2p.ports import Body

MIB = 1 << 20
TENSOR_BYTES = 64 * MIB
SNAPSHOT_BYTES = 4 * TENSOR_BYTES
TARGET = 0.26
"""Lowest share of the bare TCP rate, from node to node with digests checked: 0.4, times 0.65 for TLS."""
RUN = "be" * 32
WAIT_S = 60.0
"""Longest time for any single step, seconds."""
FAR, NEAR = "far", "near"
"""The names of the two nodes."""


def identity(name: str) -> Identity:
    """An identity whose key depends only on the name."""
    seed = hashlib.sha256(name.encode()).digest()
    return Identity(Path(name), Ed25519PrivateKey.from_private_bytes(seed), -1)


PEER, MINE = identity(FAR).peer_id, identity(NEAR).peer_id
"""The two nodes' peer ids."""


def activation(shape_BTD: tuple[int, int, int]) -> messages.Activation:
    """An activation of ones."""
    header = messages.Header(RUN, messages.MicrobatchId(MINE, 1, 1), messages.Origin(MINE, 1, 0), 1, WAIT_S)
    targets = from_torch("targets", torch.zeros(shape_BTD[:2], dtype=torch.int32))
    return messages.Activation(header, from_torch("hidden", torch.ones(shape_BTD)), targets)


LARGE = activation((8, 16, TENSOR_BYTES // 512))
SMALL = activation((2, 8, 64))
SNAPSHOT_SPECS = (TensorSpec("vector", "float32", (SNAPSHOT_BYTES // 4,)),)
MOVED_BYTES = {"propagate": 2 * TENSOR_BYTES, "snapshot": SNAPSHOT_BYTES, "tcp": 2 * TENSOR_BYTES}
"""Tensor bytes of one transfer of each kind; in both directions for `propagate` and `tcp`."""


class BenchPeer:
    """The far node: puts what arrives into torch tensors and sends it back; weights are the same in every call."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    async def propagate(self, caller: PeerId, header: messages.Header, body: Body) -> Gradient:
        """Returns the hidden state itself."""
        return Gradient(header.microbatch, from_torch("grad", to_torch((await body()).hidden)), 0.0, 1, (PEER,))

    async def evaluate(self, caller: PeerId, header: messages.Header, body: Body) -> messages.LossSum:
        """Not measured."""
        raise Declined("not measured")

    async def fetch_snapshot(self, caller: PeerId, request: SnapshotRequest) -> Snapshot:
        """Returns the snapshot at once."""
        return self._snapshot

    @asynccontextmanager
    async def lend_state(self, caller: PeerId, number: int | None) -> AsyncIterator[ReplicaState]:
        """Not measured."""
        raise Declined("not measured")
        yield

    def progress(self, caller: PeerId, microbatches: Sequence[MicrobatchId]) -> list[Progress | None]:
        """Not used."""
        return [None for _ in microbatches]

    def describe(self, caller: PeerId) -> messages.NodeDescription:
        """Describes a node that trains."""
        return messages.NodeDescription(PEER, RUN, 1, "training", 0.0, 0, "")


def make_transport(name: str, largest_bytes: int = MIB) -> GrpcTransport:
    """The transport of the node with this name in the bench's run."""
    return GrpcTransport(open_links(identity(name), RUN), ListenSettings(), NullTelemetry(), largest_bytes)


async def serve(ready: Callable[[tuple[Advert, int]], None]) -> None:
    """The far process: reports its addresses (gRPC, port of bare TCP) and serves until it is killed."""
    transport = make_transport(FAR, 2 * TENSOR_BYTES)
    vectors = [from_torch(spec.name, torch.ones(spec.shape)) for spec in SNAPSHOT_SPECS]
    await transport.serve(BenchPeer(Snapshot(PEER, 1, 1, tuple(vectors))))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        ready((Advert(PEER, RUN, 1, (f"127.0.0.1:{transport.port}",)), listener.getsockname()[1]))
        await echo(listener, TENSOR_BYTES)
        await asyncio.Event().wait()


async def measure(places: tuple[Advert, int], rounds: int, calls: int, line: ProgressLine) -> dict[str, float]:
    """All rates and latencies, measured against a far process at these addresses (gRPC, port of bare TCP)."""
    mine = make_transport(NEAR, 2 * TENSOR_BYTES)
    far, port = places
    view = tensor_bytes(TENSOR_BYTES)
    watch, small = Stopwatch(), Stopwatch(calls // 10)
    transfers: dict[str, Callable[[], Awaitable[Gradient | Snapshot]]] = {
        "propagate": lambda: mine.propagate(far, LARGE),
        "snapshot": lambda: mine.fetch_snapshot(far, SnapshotRequest(1, 1), WAIT_S, SNAPSHOT_SPECS),
    }
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as connection:
        connection.setblocking(False)
        for _ in line.over("moving tensors", rounds + 1):
            for kind, transfer in transfers.items():
                with watch.timed(kind):
                    reply = await transfer()
                    for tensor in (reply.grad,) if isinstance(reply, Gradient) else reply.tensors:
                        to_torch(tensor)
            with watch.timed("tcp"):
                await asyncio.get_running_loop().sock_sendall(connection, view)
                if not await receive(connection, view):
                    raise ConnectionError("the far process ended the bare connection")
    for _ in range(calls + calls // 10):
        with small.timed("propagate"):
            await mine.propagate(far, SMALL)
    await mine.close()
    rates = {f"{kind}_mib_per_s": moved / MIB / watch.median_s(kind) for kind, moved in MOVED_BYTES.items()}
    latency_ms = sorted(1e3 * seconds for seconds in small.counted("propagate"))
    return rates | {"p50_ms": latency_ms[calls // 2], "p99_ms": latency_ms[calls * 99 // 100]}


def run(line: ProgressLine, rounds: int = 8, calls: int = 1000) -> dict[str, float]:
    """Measure. Returns MiB/s of tensor bytes, milliseconds, and `ratio` (the slower of propagate and snapshot, over
    bare TCP) with `target`.

    Raises LocalError if the far process does not start.
    """
    tune_allocator()
    with peer_process(serve) as places:
        figures = uvloop.run(asyncio.wait_for(measure(places, rounds, calls, line), 4 * WAIT_S))
    slower = min(figures["propagate_mib_per_s"], figures["snapshot_mib_per_s"])
    return {**figures, "ratio": slower / figures["tcp_mib_per_s"], "target": TARGET}


# --- bare links: the least that moving a tensor between two processes can cost ---------------------------------------


async def receive(connection: socket.socket, into: memoryview) -> bool:
    """Fill the buffer from the connection. Returns False if it is closed before."""
    loop = asyncio.get_running_loop()
    filled = 0
    while filled < len(into):
        got = await loop.sock_recv_into(connection, into[filled:])
        if got == 0:
            return False
        filled += got
    return True


def tensor_bytes(size: int) -> memoryview:
    """The `size` bytes of a float32 tensor."""
    return torch.ones(size // 4).view(torch.uint8).numpy().data


async def echo(listener: socket.socket, size: int) -> None:
    """Receive `size` bytes into a torch tensor and send them back, until the only client closes its connection."""
    loop = asyncio.get_running_loop()
    view = tensor_bytes(size)
    connection, _ = await loop.sock_accept(listener)
    with connection:
        connection.setblocking(False)
        while await receive(connection, view):
            await loop.sock_sendall(connection, view)
