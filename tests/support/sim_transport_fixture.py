"""Two nodes of a simulated network, one of which answers as a test tells it; for tests of its transport."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

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
from noloco_p2p.errors import PeerError
from noloco_p2p.ports import Body
from noloco_p2p.sim.links import Geography, Link
from noloco_p2p.sim.network import Network
from noloco_p2p.sim.transport import SimTransport
from noloco_p2p.sim.virtual_time import run

LATENCY_S = 0.1
ID = MicrobatchId("a", 7, 1)
CALLEE = Advert("b", "run", 1, ("b",))
SNAPSHOT_SPECS = tuple(TensorSpec(name, "float64", (1, 1, 1)) for name in ("vector", "sample"))


def now() -> float:
    return asyncio.get_running_loop().time()


def floats(name: str, *values: float) -> HostTensor:
    return HostTensor(name, "float64", (1, len(values), 1), memoryview(array("d", values).tobytes()))


def activation(time_left_s: float = 5.0, counter: int = 1) -> Activation:
    targets = HostTensor("targets", "int32", (1, 2), memoryview(array("i", [1, 2]).tobytes()))
    header = Header("run", ID._replace(counter=counter), Origin("a", 3, 0), 1, time_left_s)
    return Activation(header, floats("hidden", 1.0, 2.0), targets)


def gradient() -> Gradient:
    return Gradient(ID, floats("grad", 3.0, 4.0), 1.5, 2, ("b",))


class Serving:
    """A handler that answers as it is told, and records what happened when."""

    def __init__(self, answer: Callable[[Body], Awaitable[Gradient]]) -> None:
        self.answer = answer
        self.log: list[tuple[str, float]] = []
        self.headers: list[Header] = []

    async def propagate(self, caller: str, header: Header, body: Body) -> Gradient:
        """Answer as told; logs the header's arrival, a cancellation, and the end."""
        self.headers.append(header)
        self.log.append((f"header from {caller}", now()))
        try:
            gradient = await self.answer(body)
        except asyncio.CancelledError:
            self.log.append(("cancelled", now()))
            raise
        self.log.append(("done", now()))
        return gradient

    async def evaluate(self, caller: str, header: Header, body: Body) -> LossSum:
        """The loss is the sum of the hidden states."""
        return LossSum(sum((await body()).hidden.data.cast("d")), 2)

    async def fetch_snapshot(self, caller: str, request: SnapshotRequest) -> Snapshot:
        """Answers after the whole wait, with one parameter."""
        await asyncio.sleep(request.wait_s)
        whose = "b" if request.stage == 1 else "c"
        return Snapshot(whose, request.round or 0, 3, (floats("vector", 1.0), floats("sample", 2.0)))

    @asynccontextmanager
    async def lend_state(self, caller: str, number: int | None) -> AsyncIterator[ReplicaState]:
        """Eight bytes of a state; logs how the loan ends."""
        assert number is None
        try:
            yield ReplicaState("b", 1, 4, 40.5, 44, 43, (floats("slow/w", 1.0),), 7, (ID,))
        except asyncio.CancelledError:
            self.log.append(("loan cancelled", now()))
            raise
        self.log.append(("loan over", now()))

    def progress(self, caller: str, microbatches: Sequence[MicrobatchId]) -> list[Progress | None]:
        """Reports progress from a microbatch's header until its end."""
        at_work = sum(what.startswith("header") for what, _ in self.log) > sum(
            what in ("done", "cancelled") for what, _ in self.log
        )
        return [Progress(7, 0.5) if at_work else None for _ in microbatches]

    def describe(self, caller: str) -> NodeDescription:
        """The description of node `b`."""
        return NodeDescription("b", "run", 1, "training", 2.5, 1, "0")


async def at_once(body: Body) -> Gradient:
    return gradient()


async def never(body: Body) -> Gradient:
    await asyncio.Event().wait()
    raise AssertionError("nobody wakes this")


def after(seconds: float) -> Callable[[Body], Awaitable[Gradient]]:
    async def answer(body: Body) -> Gradient:
        await asyncio.sleep(seconds)
        return gradient()

    return answer


Script = Callable[[Network, SimTransport, Serving], Awaitable[None]]


def play(
    script: Script,
    answer: Callable[[Body], Awaitable[Gradient]] = at_once,
    link: Link | None = None,
    longest_s: float = 5.0,
) -> Serving:
    """Two nodes: `a` plays the script, `b` serves with `answer`; `longest_s` bounds a call with an activation."""
    serving = Serving(answer)

    async def main() -> None:
        network = Network(1, Geography(link or Link(latency_s=LATENCY_S)))
        await SimTransport(network, "b").serve(serving)
        await script(network, SimTransport(network, "a"), serving)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("noloco_p2p.sim.transport.LONGEST_CALL_S", longest_s)
        run(main(), limit_s=100.0)
    return serving


async def fails(transport: SimTransport, error: type[PeerError], match: str, after_s: float) -> PeerError:
    began = now()
    with pytest.raises(error, match=match) as caught:
        await transport.propagate(CALLEE, activation())
    assert now() - began == pytest.approx(after_s)
    return caught.value


def lose_next_reply(network: Network, caller: PeerId, callee: PeerId) -> None:
    """Lose the next answer from `callee` to `caller`, after the work is done."""
    before = network.reply_lost

    def lost(mine: PeerId, theirs: PeerId) -> bool:
        if (mine, theirs) != (caller, callee):
            return before(mine, theirs)
        network.reply_lost = before  # type: ignore[method-assign]
        return True

    network.reply_lost = lost  # type: ignore[assignment]
