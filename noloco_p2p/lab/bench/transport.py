"""How fast tensors go from one node to another, beside the least that the machine needs for it.

Two processes on loopback. The real transport carries 64 MiB tensors both as an activation with its gradient and as a
snapshot, and the whole state of a replica, digests checked, landing in torch tensors; the bytes of an activation go
over a bare asyncio TCP connection and over gloo's send and receive, in turn, so that all see the same machine. Figures
are MiB per second of tensor bytes.
"""

import asyncio
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import torch
import uvloop

from noloco_p2p.config import ListenSettings
from noloco_p2p.core.messages import (
    REPLICA_KINDS,
    Activation,
    Advert,
    Gradient,
    Header,
    HostTensor,
    LossSum,
    MicrobatchId,
    NodeDescription,
    Origin,
    PeerId,
    ReplicaState,
    Snapshot,
    TensorSpec,
)
from noloco_p2p.errors import Declined
from noloco_p2p.io.transport.grpc_transport import GrpcTransport, tune_allocator
from noloco_p2p.lab.bench import bare_links
from noloco_p2p.lab.processes import peer_process
from noloco_p2p.launch.observer import NullTelemetry
from noloco_p2p.ports import Body

MIB = 1 << 20
TENSOR_BYTES = 64 * MIB
SNAPSHOT_TENSORS = 4
TARGET = 0.4
"""Least share of the bare TCP rate, node to node with digests checked."""
STATE_PARAMETERS = 6
STATE_TENSOR_BYTES = 16 * MIB
"""A state of six parameters and all that belongs to them: 503 MB."""
STATE_TARGET = 0.5
"""Least rate of a state's transfer, as a share of the transport's own faster one."""
RUN = "bench"
PEER = "server"
"""The far node's peer id."""
WAIT_S = 60.0
"""Longest time for any one step."""


def landed(tensor: HostTensor) -> torch.Tensor:
    """The received bytes as a torch tensor, without a copy."""
    return torch.frombuffer(tensor.data, dtype=torch.float32).view(tensor.shape)


def host(name: str, values: torch.Tensor) -> HostTensor:
    """A float32 or int32 tensor to send, without a copy."""
    data = values.reshape(-1).view(torch.uint8).numpy().data
    return HostTensor(name, str(values.dtype).removeprefix("torch."), tuple(values.shape), data)


def activation(shape_BTD: tuple[int, int, int]) -> Activation:
    """An activation of ones."""
    header = Header(RUN, MicrobatchId("client", 1, 1), Origin("client", 1, 0), 1, WAIT_S)
    targets = host("targets", torch.zeros(shape_BTD[:2], dtype=torch.int32))
    return Activation(header, host("hidden", torch.ones(shape_BTD)), targets)


LARGE = activation((8, 16, TENSOR_BYTES // 512))
SMALL = activation((2, 8, 64))
SNAPSHOT_SPECS = tuple(TensorSpec(f"slow/{i}", "float32", (TENSOR_BYTES // 4,)) for i in range(SNAPSHOT_TENSORS))
STATE_SPECS = tuple(
    TensorSpec(f"{kind}/{i}", "float32", (STATE_TENSOR_BYTES // 4,))
    for kind in REPLICA_KINDS
    for i in range(STATE_PARAMETERS)
)


class BenchPeer:
    """The far node: what comes lands in torch and goes back; it gives the same weights at every call."""

    def __init__(self, snapshot: Snapshot, state: ReplicaState | None = None) -> None:
        self._snapshot = snapshot
        self._state = state

    async def propagate(self, caller: PeerId, header: Header, body: Body) -> Gradient:
        """The hidden state itself."""
        hidden = landed((await body()).hidden)
        return Gradient(header.microbatch, host("grad", hidden), 0.0, 1, (PEER,))

    async def evaluate(self, caller: PeerId, header: Header, body: Body) -> LossSum:
        """Not measured."""
        raise Declined("not measured")

    async def fetch_snapshot(self, caller: PeerId, stage: int, round: int | None, wait_s: float) -> Snapshot:
        """The snapshot, at once."""
        return self._snapshot

    @asynccontextmanager
    async def lend_state(self, caller: PeerId, number: int | None) -> AsyncIterator[ReplicaState]:
        """The whole state."""
        if self._state is None:
            raise Declined("not measured")
        yield self._state

    def describe(self, caller: PeerId) -> NodeDescription:
        """A node that trains."""
        return NodeDescription(PEER, RUN, 1, "training", 0.0, 0, "")


def make_transport(me: PeerId, largest_bytes: int = 1 << 20) -> GrpcTransport:
    """A transport of the bench's run."""
    return GrpcTransport(me, RUN, ListenSettings(), NullTelemetry(), largest_bytes)


async def serve(ready: Callable[[tuple[int, int]], None]) -> None:
    """The far process: tells its two ports (gRPC, bare TCP) and serves until it is killed."""
    snapshot = Snapshot(PEER, 1, 1, tuple(host(spec.name, torch.ones(spec.shape)) for spec in SNAPSHOT_SPECS))
    tensors = tuple(host(spec.name, torch.ones(spec.shape)) for spec in STATE_SPECS)
    transport = make_transport(PEER, 2 * TENSOR_BYTES)
    await transport.serve(BenchPeer(snapshot, ReplicaState(PEER, 1, 1, 10.0, 10, 10, tensors, number=1)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        ready((transport.port, listener.getsockname()[1]))
        await bare_links.echo(listener, TENSOR_BYTES)
        await asyncio.Event().wait()


async def measure(ports: tuple[int, int], rounds: int, calls: int) -> dict[str, float]:
    """All figures but gloo's, against a far process that listens at these ports (gRPC, bare TCP)."""
    mine = make_transport("client", 2 * TENSOR_BYTES)
    far = Advert(PEER, RUN, 1, (f"127.0.0.1:{ports[0]}",))
    _, view = bare_links.tensor_and_bytes(TENSOR_BYTES)
    propagate_s, snapshot_s, state_s, tcp_s = [], [], [], []
    with socket.create_connection(("127.0.0.1", ports[1]), WAIT_S) as connection:
        connection.setblocking(False)
        for _ in range(rounds + 1):
            began = time.perf_counter()
            landed((await mine.propagate(far, LARGE)).grad)
            propagate_s.append(time.perf_counter() - began)
            began = time.perf_counter()
            snapshot = await mine.fetch_snapshot(far, 1, 1, 0.0, WAIT_S, SNAPSHOT_SPECS)
            weights = [landed(tensor) for tensor in snapshot.tensors]
            snapshot_s.append(time.perf_counter() - began)
            del snapshot, weights
            state_s.append(await state_seconds(mine, far))
            tcp_s.append(await bare_links.tcp_seconds(connection, view))
    latency_ms = await small_calls_ms(mine, far, calls)
    await mine.close()
    return {
        "propagate_mib_per_s": 2 * TENSOR_BYTES / MIB / statistics.median(propagate_s[1:]),
        "snapshot_mib_per_s": SNAPSHOT_TENSORS * TENSOR_BYTES / MIB / statistics.median(snapshot_s[1:]),
        "state_mib_per_s": sum(spec.nbytes for spec in STATE_SPECS) / MIB / statistics.median(state_s[1:]),
        "tcp_mib_per_s": 2 * TENSOR_BYTES / MIB / statistics.median(tcp_s[1:]),
        "p50_ms": latency_ms[len(latency_ms) // 2],
        "p99_ms": latency_ms[len(latency_ms) * 99 // 100],
    }


async def state_seconds(mine: GrpcTransport, far: Advert) -> float:
    """Time of one transfer of a whole state, until it is in torch tensors."""
    began = time.perf_counter()
    state = await mine.fetch_state(far, WAIT_S, STATE_SPECS)
    weights = [landed(tensor) for tensor in state.tensors]
    taken = time.perf_counter() - began
    del state, weights
    return taken


async def small_calls_ms(mine: GrpcTransport, far: Advert, calls: int) -> list[float]:
    """Milliseconds of each of `calls` propagates of a 4 KiB activation, sorted."""
    taken = []
    for _ in range(calls + calls // 10):
        began = time.perf_counter()
        await mine.propagate(far, SMALL)
        taken.append(1e3 * (time.perf_counter() - began))
    return sorted(taken[calls // 10 :])


def run(rounds: int = 8, calls: int = 1000) -> dict[str, float | None]:
    """All figures: MiB/s of tensor bytes, milliseconds, and `ratio` (the slower of ours over bare TCP) to `target`.

    `state_ratio` is the state's rate over the faster one of propagate's and the snapshot's, to `state_target`.

    Takes about twenty seconds. Raises LocalError when the far process does not start.
    """
    gloo = bare_links.gloo_mib_per_s(TENSOR_BYTES, rounds + 1)
    tune_allocator()
    with peer_process(serve) as ports:
        figures = uvloop.run(asyncio.wait_for(measure(ports, rounds, calls), 4 * WAIT_S))
    ours = sorted((figures["propagate_mib_per_s"], figures["snapshot_mib_per_s"]))
    return {
        **figures,
        "gloo_mib_per_s": gloo,
        "ratio": ours[0] / figures["tcp_mib_per_s"],
        "target": TARGET,
        "state_ratio": figures["state_mib_per_s"] / ours[-1],
        "state_target": STATE_TARGET,
    }
