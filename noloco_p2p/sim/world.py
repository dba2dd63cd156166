"""A swarm of real `Node`s in one process under virtual time: builds it, hurts it on schedule, tells what became of it.

swarm = Swarm(SwarmPlan(manifest, replicas=(2, 3), seed=1))
swarm.at(3.0, lambda: swarm.crash("s1r0"))
outcome = swarm.run()
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.core.seeds import generator
from noloco_p2p.node import Node
from noloco_p2p.ports import Batches, Stage, World
from noloco_p2p.sim.batches import SimBatches
from noloco_p2p.sim.directory import Registry, SimDirectory
from noloco_p2p.sim.loop import run
from noloco_p2p.sim.model import ModelStage
from noloco_p2p.sim.network import Link, Network
from noloco_p2p.sim.stage import Costs, SyncStage, TimedStage
from noloco_p2p.sim.telemetry import SimTelemetry, Trace
from noloco_p2p.sim.transport import SimTransport

StageFactory = Callable[[RunManifest, int, PeerId], SyncStage]
"""Makes the synchronous stage of (manifest, stage index, peer)."""


def peer_id(stage: int, replica: int) -> PeerId:
    """The id of a simulated node, such as `s1r0`."""
    return f"s{stage}r{replica}"


@dataclass(frozen=True, slots=True)
class SwarmPlan:
    """What is simulated. Everything follows from it."""

    manifest: RunManifest
    replicas: tuple[int, ...]
    """Replicas of each stage that are there from the beginning."""
    seed: int = 0
    """Seed of the world: links and device times (the run's own seed stands in the manifest)."""
    config: NodeConfig = field(default_factory=NodeConfig)
    """Of every node; its `stage` is set to the node's own."""
    link: Link = field(default_factory=Link)
    """Every link that is not replaced."""
    costs: Costs = field(default_factory=Costs)
    """Device seconds of every node."""
    slowness: Mapping[PeerId, float] = field(default_factory=dict)
    """Factor on a node's device seconds, 1.0 where it is not named."""
    view_age_s: float = 0.0
    """How old every view of the membership is."""
    unequal_batches: bool = False
    """Microbatches have different numbers of tokens."""
    chooses_stage: bool = False
    """Nodes are not told their stage; the one in their id means nothing then."""
    stage_factory: StageFactory = ModelStage


@dataclass(slots=True)
class Life:
    """One process: a node from its start to its end."""

    peer: PeerId
    node: Node
    transport: SimTransport
    directory: SimDirectory
    telemetry: SimTelemetry
    stage: TimedStage | None = None
    """Once its weights are made."""
    task: asyncio.Task[None] | None = None
    crashed: bool = False
    ended_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class NodeOutcome:
    """What became of one process."""

    peer: PeerId
    stage: int
    state: str
    step: float
    inner_steps: int
    crashed: bool
    error: BaseException | None
    ended_at_s: float | None
    model: SyncStage | None
    """The synchronous stage; None when it never made its weights."""
    trace: Trace
    """What this process told."""

    @property
    def rounds(self) -> list[tuple[int, str]]:
        """(number, result) of its outer rounds, in order."""
        return [(int(str(h.get("round"))), str(h.get("result"))) for h in self.trace.of("outer_round")]

    @property
    def microbatches(self) -> Counter[str]:
        """How many there were, by result: `done`, `dropped`, `repeat`, …"""
        return self.trace.totals("microbatch", "result")

    @property
    def model_stage(self) -> ModelStage:
        """The stage of the default factory. Raises TypeError for another one."""
        if not isinstance(self.model, ModelStage):
            raise TypeError(f"{self.peer} has a {type(self.model).__name__}")
        return self.model


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the swarm. `lives` has every process in the order of their starts, restarts included."""

    lives: tuple[NodeOutcome, ...]
    trace: Trace
    bugs: tuple[Exception, ...]
    """What handlers raised that they may not raise."""
    ended_at_s: float

    @property
    def nodes(self) -> dict[PeerId, NodeOutcome]:
        """The last life of each peer."""
        return {life.peer: life for life in self.lives}

    def of_stage(self, stage: int) -> list[NodeOutcome]:
        """The last lives of the peers that held a stage, sorted by peer id."""
        return sorted((one for one in self.nodes.values() if one.stage == stage), key=lambda one: one.peer)


class Swarm:
    """Builds the nodes of a plan and runs them to their end. Used once."""

    def __init__(self, plan: SwarmPlan) -> None:
        self.plan = plan
        self.network = Network(plan.seed, plan.link)
        self.registry = Registry(plan.view_age_s)
        self.trace = Trace()
        self._lives: list[Life] = []
        self._schedule: list[tuple[float, Callable[[], object]]] = []

    # --- what happens when ----------------------------------------------------------------------------------------

    def at(self, at_s: float, action: Callable[[], object]) -> None:
        """Before `run`: do something at a virtual time, such as `lambda: swarm.crash("s0r1")`."""
        self._schedule.append((at_s, action))

    def start(self, stage: int, replica: int) -> None:
        """Start a node, also again after its crash; its process has an incarnation of its own."""
        peer, plan = peer_id(stage, replica), self.plan
        incarnation = generator(plan.seed, "incarnation", peer, len(self._lives)).getrandbits(64) | 1
        config = plan.config.model_copy(update={"stage": None if plan.chooses_stage else stage})
        transport, directory = SimTransport(self.network, peer), SimDirectory(self.registry, peer)
        telemetry = SimTelemetry(self.trace, peer)

        async def make_stage(index: int) -> Stage:
            made = plan.stage_factory(plan.manifest, index, peer)
            life.stage = TimedStage(made, plan.costs, generator(plan.seed, "device", peer, incarnation))
            life.stage.slowness = plan.slowness.get(peer, 1.0)
            return life.stage

        async def make_batches() -> Batches:
            return SimBatches(plan.manifest, peer, unequal=plan.unequal_batches)

        world = World(transport, directory, telemetry, make_stage, make_batches)
        advert = Advert(peer, plan.manifest.run_id, stage, addresses=(peer,))
        life = Life(peer, Node(advert, plan.manifest, config, world, incarnation), transport, directory, telemetry)
        life.task = asyncio.get_running_loop().create_task(self._live(life), name=peer)
        self._lives.append(life)

    def crash(self, peer: PeerId) -> None:
        """A process is gone at once: nothing it still does has any effect, its advert stays until it expires."""
        life = self.life(peer)
        if life.task is None or life.task.done():
            return
        life.crashed = life.transport.dead = life.directory.dead = life.telemetry.dead = True
        self.network.crash(peer)
        if life.stage is not None:
            life.stage.halt()
        life.task.cancel()

    def slow(self, peer: PeerId, slowness: float) -> None:
        """From its next device operation on, a node needs this many times the plain seconds."""
        stage = self.life(peer).stage
        if stage is not None:
            stage.slowness = slowness

    def drain(self, peer: PeerId) -> None:
        """Tell a node to leave."""
        self.life(peer).node.drain()

    def life(self, peer: PeerId) -> Life:
        """The newest process of a peer. Raises KeyError when there is none."""
        for life in reversed(self._lives):
            if life.peer == peer:
                return life
        raise KeyError(peer)

    # --- the run --------------------------------------------------------------------------------------------------

    def run(self, limit_s: float = 3600.0, *, tolerate: bool = False) -> Outcome:
        """Run until every node has ended. Raises Deadlock when that takes more than `limit_s` virtual seconds.

        Unless told to `tolerate` them, the first error of a node that did not crash, or of a handler, is raised.
        """
        outcome = run(self._main(), limit_s=limit_s)
        errors = [one.error for one in outcome.lives if one.error is not None and not one.crashed]
        if not tolerate:
            for error in (*outcome.bugs, *errors):
                raise error
        return outcome

    async def _main(self) -> Outcome:
        for stage, count in enumerate(self.plan.replicas):
            for replica in range(count):
                self.start(stage, replica)
        schedule = asyncio.create_task(self._follow_schedule())
        while running := [life.task for life in self._lives if life.task and not life.task.done()]:
            await asyncio.wait(running if schedule.done() else [*running, schedule], return_when="FIRST_COMPLETED")
            if schedule.done():
                schedule.result()
        schedule.cancel()
        lives = tuple(self._outcome(life) for life in self._lives)
        return Outcome(lives, self.trace, tuple(self.network.bugs), asyncio.get_running_loop().time())

    async def _follow_schedule(self) -> None:
        """Actions of the same time in the order in which they were given."""
        now = asyncio.get_running_loop().time
        for at_s, action in sorted(self._schedule, key=lambda entry: entry[0]):
            await asyncio.sleep(at_s - now())
            action()

    async def _live(self, life: Life) -> None:
        await life.transport.serve(life.node)
        try:
            await life.node.run()
        finally:
            await life.transport.close()
            life.ended_at_s = asyncio.get_running_loop().time()

    def _outcome(self, life: Life) -> NodeOutcome:
        seat, task = life.node.seat, life.task
        return NodeOutcome(
            peer=life.peer,
            stage=seat.advert.stage,
            state=seat.advert.state,
            step=seat.advert.step,
            inner_steps=seat.inner_steps,
            crashed=life.crashed,
            error=task.exception() if task and not task.cancelled() else None,
            ended_at_s=life.ended_at_s,
            model=life.stage.stage if life.stage else None,
            trace=life.telemetry.own,
        )
