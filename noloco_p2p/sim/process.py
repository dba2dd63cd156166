"""The processes of a simulated swarm: each runs a node from start to end and keeps the events that it recorded."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from noloco_p2p.core.messages import PeerId
from noloco_p2p.node.loop import Node
from noloco_p2p.ports import Stage, World
from noloco_p2p.sim.checkpoints import SimCheckpoints
from noloco_p2p.sim.device import SimDevice
from noloco_p2p.sim.directory import SimDirectory
from noloco_p2p.sim.telemetry import SimTelemetry, Trace, TraceEvent
from noloco_p2p.sim.transport import SimTransport


class SimPorts(NamedTuple):
    """The ports that stop together when their process crashes."""

    transport: SimTransport
    directory: SimDirectory
    telemetry: SimTelemetry
    checkpoints: SimCheckpoints


@dataclass(slots=True, eq=False)
class SimProcess:
    """One process of a simulated node, from start to end. A restart creates another one."""

    peer: PeerId
    place: tuple[int, int]
    """(stage, replica) with which it was started."""
    node: Node
    world: World
    ports: SimPorts
    """Those of `world`."""
    stages: list[tuple[Stage, SimDevice]] = field(default_factory=list)
    """Every stage that it has created, in order: empty until its weights exist, several if it moved."""
    task: asyncio.Task[None] | None = None
    crashed: bool = False
    ended_at_s: float | None = None

    @property
    def running(self) -> bool:
        """Whether it has neither ended nor crashed."""
        return self.task is not None and not self.task.done() and not self.crashed

    @property
    def stage(self) -> int:
        """The stage that it holds, or held at the end."""
        return self.node.state.advert.stage

    @property
    def state(self) -> str:
        """The state that it announces."""
        return self.node.state.advert.state

    @property
    def step(self) -> float:
        """Its clock, in steps."""
        return self.node.state.advert.step

    @property
    def inner_steps(self) -> int:
        """Number of inner steps that its weights have taken."""
        return self.node.state.inner_steps

    @property
    def error(self) -> BaseException | None:
        """The exception that ended it; None while it runs, or if it ended normally or was cancelled."""
        task = self.task
        return task.exception() if task and task.done() and not task.cancelled() else None

    @property
    def trace(self) -> Trace:
        """The events that this process recorded."""
        return self.ports.telemetry.own

    @property
    def device(self) -> SimDevice | None:
        """The newest of its devices; None before its weights exist."""
        return self.stages[-1][1] if self.stages else None

    @property
    def models(self) -> tuple[Stage, ...]:
        """Its stages."""
        return tuple(stage for stage, _ in self.stages)

    @property
    def model(self) -> Stage | None:
        """The newest stage; None if it never had weights."""
        return self.stages[-1][0] if self.stages else None

    @property
    def told_to_leave(self) -> bool:
        """Whether it was told to leave before it left, including while it was moving to another stage."""
        return self.node.state.leaving

    @property
    def microbatches(self) -> Counter[str]:
        """Number of microbatches by result: `done`, `dropped`, `nonfinite`, …"""
        return self.trace.totals("microbatch", "result")

    def periods(self, ended_at_s: float) -> "Iterator[StagePeriod]":
        """Its events, split where it moved to another stage. If it still runs, its last period ends at `ended_at_s`."""
        stages = [model.state.index for model in self.models] or [self.stage]
        events: list[TraceEvent] = []
        moves, state_before = 0, ""
        for event in self.trace.events:
            if event.kind == "state":
                state = str(event.get("state"))
                if (state_before, state) == ("draining", "syncing"):
                    yield StagePeriod(stages[min(moves, len(stages) - 1)], events, event.at_s)
                    events, moves = [], moves + 1
                state_before = state
            events.append(event)
        ends_s = ended_at_s if self.ended_at_s is None else self.ended_at_s
        yield StagePeriod(stages[min(moves, len(stages) - 1)], events, ends_s)


class StagePeriod(NamedTuple):
    """The time during which one process held one stage."""

    stage: int
    events: list[TraceEvent]
    """Events recorded during that time, in order."""
    ends_s: float

    @property
    def training(self) -> list[tuple[float, float]]:
        """(start, end) of each interval spent in training, virtual seconds."""
        states = [event for event in self.events if event.kind == "state"]
        ends = [*(event.at_s for event in states), self.ends_s][1:]
        return [(event.at_s, end) for event, end in zip(states, ends, strict=True) if event.get("state") == "training"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a swarm. `processes` are in the order in which they were started, including restarts."""

    processes: tuple[SimProcess, ...]
    trace: Trace
    bugs: tuple[Exception, ...]
    """Exceptions that handlers raised although they must not."""
    ended_at_s: float

    @property
    def nodes(self) -> dict[PeerId, SimProcess]:
        """The last process of each peer."""
        return {process.peer: process for process in self.processes}

    def of_stage(self, stage: int) -> list[SimProcess]:
        """The last process of each peer, of those that ended up holding this stage, sorted by peer id."""
        return sorted((one for one in self.nodes.values() if one.stage == stage), key=lambda one: one.peer)

    def periods(self) -> Iterator[StagePeriod]:
        """The periods of all processes."""
        for process in self.processes:
            yield from process.periods(self.ended_at_s)
