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
from noloco_p2p.core.trials import SHARE
from noloco_p2p.errors import Busy, PeerError, Unreachable, Violation
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

    def __init__(self, routing: str, replicas: str) -> None:
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
        self.serves_s = 0.01
        self.useless: set[PeerId] = set()
        """Replicas whose replies cannot be used. Each takes ten times as long as the others."""
        self.asked: list[PeerId] = []
        self.sent = 0
        self.swarm.members.update([Advert(p, manifest.run_id, 1, (), state="training") for p in replicas], now=0.0)
        self.swarm.fix_view()

    async def forward(self, *_: object) -> tuple[int, HostTensor]:
        return 1, NOTHING

    def check(self, gradient: Gradient) -> None:
        if gradient.served[0] in self.useless:
            raise Violation("grad: means or scales that are not finite")

    async def backward(self, graph: int, microbatch: MicrobatchId, gradient: Gradient) -> Contribution:
        return Contribution(None, 3.0, 5, True, True)

    def sending(self, *_: object) -> Sending:
        return Sending.WHOLE

    async def propagate(self, peer: Advert, activation: Activation, claim: Claim) -> Gradient:
        self.asked.append(peer.peer_id)
        await asyncio.sleep(self.serves_s * (10 if peer.peer_id in self.useless else 1))
        if self.answers.get(peer.peer_id):
            raise self.answers[peer.peer_id].pop(0)
        return Gradient(activation.header.microbatch, NOTHING, 3.0, 5, (peer.peer_id,), True)

    async def evaluate(self, peer: Advert, activation: Activation, claim: Claim) -> LossSum:
        raise NotImplementedError

    async def progress(self, peer: Advert, asked: list[MicrobatchId], longest_s: float) -> list[Progress | None]:
        return [None for _ in asked]

    async def server(self, step: int = 0) -> PeerId | None:
        """Send the first microbatch of a step. Returns the replica that served it."""
        self.sent += 1
        task = StageInput(MicrobatchId("me", 1, self.sent), Origin("me", step, 0), NOTHING, NOTHING, None)
        return (await self.dispatcher.train(task)).next_hop


def at(scenario: Callable[[Place], Awaitable[None]], routing: str, replicas: str = "AB") -> None:
    async def main() -> None:
        await scenario(Place(routing, replicas))

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


def test_a_replica_whose_replies_cannot_be_used_is_on_trial() -> None:
    """Its calls counted as served: it cost 14 % of the time for ever."""

    async def scenario(place: Place) -> None:
        place.serves_s, place.useless, began = 1.0, {"A"}, place.node.now()
        for step in range(4000):
            assert await place.server(step) != "A"
        lost = 10.0 * place.asked.count("A") / (place.node.now() - began)
        assert 0 < lost < 2 * SHARE, f"{lost:.3f} of the time"

    at(scenario, "random", "ABCD")
