"""A microbatch on its way from stage 0 to a replica of the next stage, whatever the replicas answer."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.line_rate import MeasuredLine, Sending
from noloco_p2p.core.messages import (
    Activation,
    Advert,
    Gradient,
    HostTensor,
    LossSum,
    MicrobatchId,
    Origin,
    PeerId,
    Progress,
    TensorSpec,
)
from noloco_p2p.core.stage_values import Contribution
from noloco_p2p.errors import Busy, PeerError, Unreachable
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.pipeline.dispatch import Dispatcher
from noloco_p2p.node.pipeline.task import StageInput
from noloco_p2p.node.state import NodeState
from noloco_p2p.ports import Claim
from noloco_p2p.sim import virtual_time

NOTHING = HostTensor("hidden", "float32", (0,), memoryview(b""))
SPEC = TensorSpec("hidden", "float32", (0,))


class Place:
    """A node of stage 0 of 2, the replicas of the next stage, and what each of them answers."""

    def __init__(self, routing: str) -> None:
        manifest = RunManifest(stages=2, routing=routing)  # type: ignore[arg-type]
        me = Advert("me", manifest.run_id, 0, (), state="training")
        telemetry = SimpleNamespace(event=lambda *_, **__: None, span=lambda _: nullcontext())
        self.node = NodeState(me, manifest, NodeConfig(), cast(Any, telemetry))
        self.state = SimpleNamespace(hidden=SPEC, gradient=SPEC)
        self.node.hold(cast(Any, self))
        self.swarm = Membership(self.node)
        self.line = MeasuredLine()
        self.dispatcher = Dispatcher(self.node, self.swarm, cast(Any, self))
        self.answers: dict[PeerId, list[PeerError]] = {}
        """What the next calls of a replica are answered; after that it serves."""
        self.sent = 0
        self.swarm.members.update([Advert(p, manifest.run_id, 1, (), state="training") for p in "AB"], now=0.0)
        self.swarm.fix_view()

    async def forward(self, *_: object) -> tuple[int, HostTensor]:
        return 1, NOTHING

    async def backward(self, graph: int, microbatch: MicrobatchId, gradient: Gradient) -> Contribution:
        return Contribution(None, 3.0, 5, True, True)

    def sending(self, *_: object) -> Sending:
        return Sending.WHOLE

    async def propagate(self, peer: Advert, activation: Activation, claim: Claim) -> Gradient:
        await asyncio.sleep(0.01)
        if self.answers.get(peer.peer_id):
            raise self.answers[peer.peer_id].pop(0)
        return Gradient(activation.header.microbatch, NOTHING, 3.0, 5, (peer.peer_id,), True)

    async def evaluate(self, peer: Advert, activation: Activation, claim: Claim) -> LossSum:
        raise NotImplementedError

    async def progress(self, peer: Advert, asked: list[MicrobatchId], longest_s: float) -> list[Progress | None]:
        return [None for _ in asked]

    async def server(self) -> PeerId | None:
        """Send the first microbatch of a step. Returns the replica that served it."""
        self.sent += 1
        task = StageInput(MicrobatchId("me", 1, self.sent), Origin("me", 0, 0), NOTHING, NOTHING, None)
        return (await self.dispatcher.train(task)).next_hop


def at(scenario: Callable[[Place], Awaitable[None]], routing: str) -> None:
    async def main() -> None:
        await scenario(Place(routing))

    virtual_time.run(main(), limit_s=10_000)


def test_a_replica_that_was_busy_long_ago_is_waited_for_again() -> None:
    async def scenario(place: Place) -> None:
        named = await place.server()
        assert named is not None
        place.answers[named] = [Busy("full"), Unreachable("the line is cut")]
        assert await place.server() != named
        await asyncio.sleep(600.0)
        place.answers[named] = [Busy("full")]
        assert await place.server() == named
        place.answers[named] = [Busy("full")] * 100
        began = place.node.now()
        for _ in range(10):
            assert await place.server() != named
        longest_s = place.node.config.limits.patience_floor_s
        assert longest_s < place.node.now() - began < 2 * longest_s, "it is not waited for at each microbatch"

    at(scenario, "balanced")
