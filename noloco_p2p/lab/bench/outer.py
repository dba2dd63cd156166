"""Seconds and bytes of one replica's outer round: freeze, pull a peer's snapshot over real gRPC, merge.

Two processes on loopback: the far one serves its snapshot, like a replica; the near one does the round. The bytes are
counted on the connection itself, in an additional pull through a counting forwarder. The minimum is u of every
parameter, once (METHOD.md, "Outer round").
"""

import asyncio
from collections.abc import Callable
from typing import Any

import torch
import uvloop

from noloco_p2p.compute import host_tensor
from noloco_p2p.compute.outer_state import OuterState
from noloco_p2p.config import OuterSettings
from noloco_p2p.core.messages import Advert, TensorSpec
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.io.dht.libp2p import Stream
from noloco_p2p.io.dht.streams import splice
from noloco_p2p.io.transport.allocator import tune_allocator
from noloco_p2p.lab.bench.transport import FAR, NEAR, PEER, RUN, BenchPeer, make_transport
from noloco_p2p.lab.processes import peer_process
from noloco_p2p.lab.sample_stats import Stopwatch
from noloco_p2p.launch.progress_line import ProgressLine

SHAPES = {"1M": (16, 256), "50M": (12, 2048)}
"""A stage as a number of square matrices, and their side length."""
TARGET = 1.01
"""Largest ratio of the bytes on the connection to those of u."""
ROUNDS = 5
WAIT_S = 120.0
REQUEST = SnapshotRequest(1, 1)


def replica(size: str, seed: int) -> OuterState:
    """The weights of a stage of this size, with θ moved a little away from φ, so that Δ is not zero."""
    count, side = SHAPES[size]
    generator = torch.Generator().manual_seed(seed)
    fast = {f"layers.{n}.weight": torch.randn(side, side, generator=generator) for n in range(count)}
    weights = OuterState(fast, OuterSettings(rule="noloco"))
    for theta in fast.values():
        theta.add_(0.01)
    return weights


async def serve(ready: Callable[[int], None], size: str) -> None:
    """The far process: serves its snapshot of round 1 and reports its port."""
    transport = make_transport(FAR)
    vector = host_tensor.from_torch("vector", replica(size, 1).freeze()[0])
    await transport.serve(BenchPeer(Snapshot(PEER, 1, 10, (vector,))))
    ready(transport.port)
    await asyncio.Event().wait()


async def rounds(size: str, port: int, line: ProgressLine) -> dict[str, Any]:
    """Medians of ROUNDS outer rounds after one warm-up round, then the bytes of one pull."""
    mine = make_transport(NEAR)
    weights = replica(size, 2)
    # Only u is transferred, because the sample sent with it is negligible.
    spec = TensorSpec("vector", "float32", (weights.count,))
    far = Advert(PEER, RUN, 1, (f"127.0.0.1:{port}",))
    watch = Stopwatch()
    for number in range(ROUNDS + 1):
        line.tell(f"stage of {size} parameters", (number / (ROUNDS + 1) + [*SHAPES].index(size)) / len(SHAPES))
        with watch.timed("round"):
            with watch.timed("freeze"):
                vector, frozen = weights.freeze()
            with watch.timed("pull"):
                theirs = await mine.fetch_snapshot(far, REQUEST, WAIT_S, (spec,))
            with watch.timed("merge"):
                weights.merge([vector, host_tensor.to_torch(theirs.tensors[0])], 0, frozen, 0.0)
    await mine.close()
    moved = await bytes_of_a_pull(port, spec)
    medians = {f"{name}_s": watch.median_s(name) for name in ("freeze", "pull", "merge", "round")}
    return {
        "parameters": weights.count,
        **medians,
        "bytes": moved,
        "least_bytes": spec.nbytes,
        "ratio": moved / spec.nbytes,
        "pull_mib_per_s": spec.nbytes / 2**20 / medians["pull_s"],
    }


async def bytes_of_a_pull(port: int, spec: TensorSpec) -> int:
    """Bytes on the connection for one pull, in both directions and including its set-up, counted by a forwarder."""
    moved, ended = 0, asyncio.Event()

    async def count(nbytes: int) -> None:
        nonlocal moved
        moved += nbytes

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await splice(Stream(reader, writer), Stream(*await asyncio.open_connection("127.0.0.1", port)), count)
        ended.set()

    async with await asyncio.start_server(forward, "127.0.0.1", 0) as server:
        near = make_transport(NEAR)
        counted = Advert(PEER, RUN, 1, (f"127.0.0.1:{server.sockets[0].getsockname()[1]}",))
        await near.fetch_snapshot(counted, REQUEST, WAIT_S, (spec,))
        await near.close()
        await asyncio.wait_for(ended.wait(), WAIT_S)
    return moved


def run(line: ProgressLine) -> dict[str, Any]:
    """Measure both sizes, and return the figures; `ratio`: the larger of bytes over the minimum. Raises LocalError."""
    tune_allocator()
    torch.set_num_threads(1)
    stages = {}
    for size in SHAPES:
        with peer_process(serve, size) as port:
            stages[size] = uvloop.run(rounds(size, port, line))
    return {"bench": "outer", "ratio": max(s["ratio"] for s in stages.values()), "target": TARGET, "stages": stages}
