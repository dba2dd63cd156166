"""One outer round of one replica: freeze, pull a peer's snapshot over real gRPC, merge. Seconds and bytes.

Two processes on loopback: the far one keeps its snapshot, as a replica does, the near one does the round. The bytes are
counted on the connection itself, in one more pull through a forwarder that counts. The least possible is what the
method moves, φ and Δ of every parameter once; one vector u would do in half of that (method.md §3).
"""

import asyncio
import statistics
import subprocess
import sys
import time
from contextlib import AbstractAsyncContextManager
from typing import Any

import torch
import uvloop

from noloco_p2p.compute.slow_weights import SlowWeights
from noloco_p2p.config import ListenSettings, OuterSettings
from noloco_p2p.core.messages import (
    Advert,
    Description,
    Gradient,
    Header,
    LossSum,
    PeerId,
    ReplicaState,
    Snapshot,
    TensorSpec,
)
from noloco_p2p.errors import Declined, LocalError
from noloco_p2p.io.transport.grpc_transport import GrpcTransport, tune_allocator
from noloco_p2p.lab.bench.transport import PEER, RUN
from noloco_p2p.launch.observer import NullTelemetry
from noloco_p2p.ports import Body

SHAPES = {"1M": (16, 256), "50M": (12, 2048)}
"""A stage as so many square matrices of this side."""
TARGET = 1.01
"""Largest ratio of the bytes on the connection to those of φ and Δ."""
ROUNDS = 5
WAIT_S = 120.0
NEAR = "near"


def slow_weights(size: str, seed: int) -> SlowWeights:
    """φ = θ of a stage of this size, then θ moved a little, so that Δ is not zero."""
    count, side = SHAPES[size]
    generator = torch.Generator().manual_seed(seed)
    fast = {f"layers.{n}.weight": torch.randn(side, side, generator=generator) for n in range(count)}
    weights = SlowWeights(fast, OuterSettings())
    for theta in fast.values():
        theta.add_(0.01)
    return weights


class Far:
    """The far replica: its snapshot of round 1, nothing else."""

    def __init__(self, size: str) -> None:
        self._snapshot = Snapshot(PEER, 1, 10, slow_weights(size, 1).snapshot())

    async def propagate(self, caller: PeerId, header: Header, body: Body) -> Gradient:
        """Not measured."""
        raise Declined("not measured")

    async def evaluate(self, caller: PeerId, header: Header, body: Body) -> LossSum:
        """Not measured."""
        raise Declined("not measured")

    async def fetch_snapshot(self, caller: PeerId, stage: int, round: int | None, wait_s: float) -> Snapshot:
        """The same at every call."""
        return self._snapshot

    def lend_state(self, caller: PeerId, number: int | None) -> AbstractAsyncContextManager[ReplicaState]:
        """Not measured."""
        raise Declined("not measured")

    def describe(self, caller: PeerId) -> Description:
        """Who this is."""
        return Description(PEER, RUN, 1, "training", 10.0, 1, "")


async def serve(size: str) -> None:
    """The far process: prints its port, serves until its standard input ends."""
    transport = GrpcTransport(PEER, RUN, ListenSettings(), NullTelemetry(), 1 << 20)
    await transport.serve(Far(size))
    print(transport.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()


class Counter:
    """A TCP forwarder to `port` that counts the bytes of both directions."""

    def __init__(self, port: int) -> None:
        self.bytes = 0
        self._port = port
        self._pumps: list[asyncio.Task[None]] = []

    async def open(self) -> tuple[asyncio.Server, int]:
        """The listening server and its port."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return server, int(server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """End all forwarding."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._pumps += [
            asyncio.create_task(self._pump(reader, far_writer)),
            asyncio.create_task(self._pump(far_reader, writer)),
        ]

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 18):
                self.bytes += len(data)
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()


async def rounds(size: str, port: int) -> dict[str, Any]:
    """Medians of ROUNDS outer rounds after one to warm up, then the bytes of one pull."""
    mine = GrpcTransport(NEAR, RUN, ListenSettings(), NullTelemetry(), 1 << 20)
    weights = slow_weights(size, 2)
    far = Advert(PEER, RUN, 1, (f"127.0.0.1:{port}",))
    seconds: dict[str, list[float]] = {"freeze": [], "pull": [], "merge": [], "round": []}
    for _ in range(ROUNDS + 1):
        moments = [time.perf_counter()]
        frozen = Snapshot(NEAR, 1, 10, weights.snapshot())
        moments.append(time.perf_counter())
        theirs = await mine.fetch_snapshot(far, 1, 1, 0.0, WAIT_S, weights.specs)
        moments.append(time.perf_counter())
        weights.merge(frozen, theirs)
        moments.append(time.perf_counter())
        for name, began, ended in zip(("freeze", "pull", "merge"), moments, moments[1:], strict=False):
            seconds[name].append(ended - began)
        seconds["round"].append(moments[-1] - moments[0])
    await mine.close()
    moved = await bytes_of_a_pull(port, weights.specs)
    least = sum(spec.nbytes for spec in weights.specs)
    medians = {f"{name}_s": statistics.median(taken[1:]) for name, taken in seconds.items()}
    return {
        "parameters": sum(phi.numel() for phi in weights.slow.values()),
        **medians,
        "bytes": moved,
        "least_bytes": least,
        "ratio": moved / least,
        "ratio_to_one_vector": 2 * moved / least,
        "pull_mib_per_s": least / 2**20 / medians["pull_s"],
    }


async def bytes_of_a_pull(port: int, specs: tuple[TensorSpec, ...]) -> int:
    """Bytes on the connection, both ways and with its set-up, of one pull."""
    counter = Counter(port)
    server, counting_port = await counter.open()
    counted = GrpcTransport(NEAR, RUN, ListenSettings(), NullTelemetry(), 1 << 20)
    await counted.fetch_snapshot(Advert(PEER, RUN, 1, (f"127.0.0.1:{counting_port}",)), 1, 1, 0.0, WAIT_S, specs)
    await counted.close()
    server.close()
    await counter.close()
    return counter.bytes


def measure(size: str) -> dict[str, Any]:
    """One size, with a far process of its own."""
    far = subprocess.Popen(
        [sys.executable, "-m", "noloco_p2p.lab.bench.outer", size],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert far.stdout is not None, "it is a pipe"
        line = far.stdout.readline().strip()
        if not line:
            raise LocalError("the far process of the bench has failed")
        figures: dict[str, Any] = uvloop.run(rounds(size, int(line)))
        return figures
    finally:
        far.kill()
        far.communicate()


def run() -> dict[str, Any]:
    """The figures of both sizes; `ratio` is the larger one of bytes over least possible. Raises LocalError."""
    tune_allocator()
    torch.set_num_threads(1)
    stages = {size: measure(size) for size in SHAPES}
    return {"bench": "outer", "ratio": max(s["ratio"] for s in stages.values()), "target": TARGET, "stages": stages}


if __name__ == "__main__":
    tune_allocator()
    uvloop.run(serve(sys.argv[1]))
