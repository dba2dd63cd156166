"""One process of a simulated swarm: a node from its start to its end, and what it runs on."""

import asyncio
from dataclasses import dataclass, field

from noloco_p2p.core.messages import PeerId
from noloco_p2p.node.loop import Node
from noloco_p2p.ports import World
from noloco_p2p.sim.checkpoints import SimCheckpoints
from noloco_p2p.sim.directory import SimDirectory
from noloco_p2p.sim.stage import TimedStage
from noloco_p2p.sim.telemetry import SimTelemetry, Trace
from noloco_p2p.sim.transport import SimTransport


@dataclass(slots=True)
class Life:
    """One process: a node from its start to its end."""

    peer: PeerId
    place: tuple[int, int]
    """(stage, replica) that it was started with."""
    node: Node
    world: World
    ports: tuple[SimTransport, SimDirectory, SimTelemetry, SimCheckpoints]
    """Those of `world`, that fall silent together."""
    stages: list[TimedStage] = field(default_factory=list)
    """Every stage that it has made, in order; more than one when it moved."""
    task: asyncio.Task[None] | None = None
    crashed: bool = False
    ended_at_s: float | None = None

    @property
    def stage(self) -> TimedStage | None:
        """The newest of its stages; None before its weights are made."""
        return self.stages[-1] if self.stages else None

    @property
    def trace(self) -> Trace:
        """What this process has told so far."""
        return self.ports[2].own

    @property
    def running(self) -> bool:
        """It has neither ended nor crashed."""
        return self.task is not None and not self.task.done() and not self.crashed
