"""Two transports on loopback, and a handler that answers as a test tells it; for the transport tests."""

import asyncio
import gc
import hashlib
import random
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from machine import at_most

from noloco_p2p.config import LimitSettings, ListenSettings
from noloco_p2p.core.line_rate import CONNECTIONS, ROUND_TRIPS
from noloco_p2p.core.messages import (
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
    Progress,
    ReplicaState,
    TensorSpec,
)
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.errors import Declined
from noloco_p2p.io.dht.identity import Identity
from noloco_p2p.io.security import certificates
from noloco_p2p.io.security.certificates import Role, RunTrust
from noloco_p2p.io.security.credentials import Credentials
from noloco_p2p.io.transport import message_codec
from noloco_p2p.io.transport.callers import Callers
from noloco_p2p.io.transport.grpc_transport import GrpcTransport
from noloco_p2p.io.transport.peer_links import Links, Options
from noloco_p2p.ports import Body

RUN, OTHER_RUN = "a1" * 32, "a2" * 32
MAX_BODY_BYTES = 1 << 27
SMALL = (2, 8, 16)
LARGE = (4, 256, 8192)
"""32 MiB in float32: more than flow control lets a sender have under way."""

SOON_S = 3.0
"""Far more than anything here takes on a quiet machine, far less than any deadline."""

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in a fresh event loop, with a time limit."""
    asyncio.run(asyncio.wait_for(coroutine, 120))


async def soon(awaited: Awaitable[T]) -> T:
    """The result, which must come within SOON_S, scaled by how slow this machine is."""
    task = asyncio.ensure_future(awaited)
    await asyncio.wait([task], timeout=SOON_S)
    if not task.done():
        await asyncio.wait_for(task, at_most(SOON_S) - SOON_S)
    return await task


Buffers = list["weakref.ref[Any]"]
"""Weak references to all buffers allocated for received tensors."""


def watched_buffers(monkeypatch: pytest.MonkeyPatch) -> Buffers:
    """A list to which every buffer allocated for received tensors is added from now on."""
    made: Buffers = []

    def allocate(length: int) -> memoryview:
        block = numpy.empty(length, numpy.uint8)
        made.append(weakref.ref(block))
        return block.data

    monkeypatch.setattr(message_codec, "allocate", allocate)
    return made


def alive(made: Buffers) -> int:
    """How many of these buffers still hold memory."""
    gc.collect()
    return sum(ref() is not None for ref in made)


@dataclass
class Events:
    """Telemetry that records its events."""

    seen: list[tuple[str, dict[str, object]]] = field(default_factory=list)

    def event(self, kind: str, /, **fields: object) -> None:
        self.seen.append((kind, fields))

    def span(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


def hold_nothing(callers: Callers) -> bool:
    """Whether no caller holds anything of a node."""
    return not callers._held and not callers._patience


async def all_have_ended(server: GrpcTransport) -> None:
    """Wait until all calls have ended, which is after their callers have the reply."""
    while not hold_nothing(server._servicer.callers):  # noqa: ASYNC110
        await asyncio.sleep(0)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged, without what gRPC still logs for the event loop of an earlier test."""
    closed = "Event loop is closed"
    return [one.getMessage() for one in caplog.records if not one.exc_info or str(one.exc_info[1]) != closed]


def tensor(name: str, dtype: str, shape: tuple[int, ...], seed: int = 0) -> HostTensor:
    data = random.Random(seed).randbytes(TensorSpec(name, dtype, shape).nbytes)
    return HostTensor(name, dtype, shape, memoryview(data))


def activation(
    shape: tuple[int, int, int] = SMALL,
    *,
    dtype: str = "float32",
    counter: int = 1,
    time_left_s: float = 20.0,
    mask: bool = False,
    run_id: str = RUN,
) -> Activation:
    origin, avoid = Origin("A", 5, 1), ("C", "D")
    header = Header(run_id, MicrobatchId("A", (1 << 64) - 1, counter), origin, 1, time_left_s, avoid=avoid)
    return Activation(
        header,
        tensor("hidden", dtype, shape, seed=counter),
        tensor("targets", "int32", shape[:2], seed=counter + 1),
        tensor("mask", "uint8", shape[:2], seed=counter + 2) if mask else None,
    )


def gradient_of(header: Header, hidden: TensorSpec, seed: int = 99) -> Gradient:
    return Gradient(
        header.microbatch, tensor("grad", hidden.dtype, hidden.shape, seed), -1.5, 16, ("B", "C"), finite=False
    )


@dataclass
class Node:
    """A handler that appends each call to `calls`, and how it ended to `ends`."""

    serve: Callable[[Header, Body], Awaitable[Gradient]]
    snapshot: Callable[[SnapshotRequest], Awaitable[Snapshot]] | None = None
    lend: Callable[[PeerId, int | None], AbstractAsyncContextManager[ReplicaState]] | None = None
    calls: list[tuple[PeerId, Header]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def propagate(self, caller: PeerId, header: Header, body: Body) -> Gradient:
        self.calls.append((caller, header))
        self.entered.set()
        try:
            gradient = await self.serve(header, body)
        except BaseException as error:
            self.ends.append(type(error).__name__)
            raise
        else:
            self.ends.append("answered")
            return gradient
        finally:
            self.ended.set()

    async def evaluate(self, caller: PeerId, header: Header, body: Body) -> LossSum:
        gradient = await self.propagate(caller, header, body)
        return LossSum(gradient.loss_sum, gradient.tokens)

    async def fetch_snapshot(self, caller: PeerId, request: SnapshotRequest) -> Snapshot:
        if self.snapshot is None:
            raise Declined("no snapshots here")
        return await self.snapshot(request)

    def lend_state(self, caller: PeerId, number: int | None) -> AbstractAsyncContextManager[ReplicaState]:
        if self.lend is None:
            raise Declined("no state here")
        return self.lend(caller, number)

    def progress(self, caller: PeerId, microbatches: Sequence[MicrobatchId]) -> list[Progress | None]:
        in_hand = {header.microbatch for _, header in self.calls[len(self.ends) :]}
        return [Progress(7, 0.5) if one in in_hand else None for one in microbatches]

    def describe(self, caller: PeerId) -> NodeDescription:
        return NodeDescription("B", RUN, 1, "training", 7.5, 3, "0.1", 2)


async def echo(header: Header, body: Body) -> Gradient:
    """Answers with the hidden states as the gradient."""
    hidden = (await body()).hidden
    return Gradient(header.microbatch, HostTensor("grad", hidden.dtype, hidden.shape, hidden.data), 2.25, 7, ("B",))


async def hang(header: Header, body: Body) -> Gradient:
    """Never answers, never reads the body."""
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


NAMES: dict[PeerId, str] = {}


def identity(name: str) -> Identity:
    """The key of the peer that tests call by this name; always the same."""
    key = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())
    found = Identity(Path(name), key, -1)
    NAMES[found.peer_id] = name
    return found


class NamedLinks(Links):
    """Links between peers with short names in place of ids. Microbatches have no labels."""

    def __init__(self, name: str, run_id: str = RUN) -> None:
        mine = identity(name)
        trust = RunTrust.of_open_run(run_id)
        super().__init__(Credentials(trust, mine, certificates.own_chain(mine.key, trust)))
        self.me = name

    def channel(self, address: str, peer: PeerId, options: Options = (), role: Role = "member") -> Any:
        return super().channel(address, identity(peer).peer_id, options, role)

    def caller(self, context: Any, *, observers: bool) -> PeerId:
        return NAMES[super().caller(context, observers=observers)]

    def labelled(self, header: Header) -> Header:
        return header

    def check_label(self, header: Header, caller: PeerId) -> None:
        pass


def bare(peer: Advert, name: str = "raw", options: Options = ()) -> Any:
    """A channel to the peer under this name, for raw calls."""
    return NamedLinks(name).channel(peer.addresses[0], peer.peer_id, options)


def transport(
    me: PeerId, events: Events | None = None, *, run_id: str = RUN, port: int = 0, limits: LimitSettings | None = None
) -> GrpcTransport:
    listen = ListenSettings(grpc_port=port)
    return GrpcTransport(NamedLinks(me, run_id), listen, events or Events(), MAX_BODY_BYTES, limits)


def advert(*addresses: str, peer_id: PeerId = "B") -> Advert:
    return Advert(peer_id, RUN, 1, addresses)


@asynccontextmanager
async def pair(
    node: Node, mine: Events | None = None, theirs: Events | None = None, *, limits: LimitSettings | None = None
) -> AsyncIterator["Pair"]:
    """Transport A, and transport B, which serves `node` and is known to be near; both with these limits, and both
    closed at the end."""
    a, b = transport("A", mine, limits=limits), transport("B", theirs, limits=limits)
    a.line.answered("B", 0.0)
    await b.serve(node)
    try:
        yield Pair(a, b, advert(f"127.0.0.1:{b.port}"))
    finally:
        await a.close()
        await b.close()


@dataclass
class Pair:
    """The two transports of `pair`."""

    a: GrpcTransport
    b: GrpcTransport
    peer: Advert


def is_far(both: Pair) -> None:
    """Make A believe that B is far away over a fast line, so that it uses as many connections as allowed. B takes its
    line for fast as well: on a busy machine it would measure a slow one, and tell A."""
    line, now, much = both.a.line, asyncio.get_running_loop().time(), 1 << 30
    for rate in (line.up, line.down, both.b.line.up, both.b.line.down):
        rate.ended(rate.began(now - 1.0), 50e6, now)
    for _ in range(ROUND_TRIPS):
        line.answered("B", 0.2)
    assert line.connections("B", much) == line.connections("B", much, comes=True) == CONNECTIONS
