"""A swarm of real `Node`s in one process with virtual time: built, disturbed on schedule, and run to its outcome.

swarm = SimSwarm(SimPlan(manifest, replicas=(2, 3), seed=1))
swarm.at(3.0, lambda: swarm.crash("s1r0"))
outcome = swarm.run()
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.core.seeds import generator
from noloco_p2p.node.loop import Node
from noloco_p2p.ports import Batches, Device, Stage, World
from noloco_p2p.sim.batches import SimBatches
from noloco_p2p.sim.checkpoints import Disk, SimCheckpoints
from noloco_p2p.sim.device import Costs, SimDevice
from noloco_p2p.sim.directory import Registry, SimDirectory
from noloco_p2p.sim.linear_stage import LinearStage
from noloco_p2p.sim.links import Geography, Link, MessageSizes
from noloco_p2p.sim.network import Network
from noloco_p2p.sim.process import Outcome, SimPorts, SimProcess
from noloco_p2p.sim.telemetry import SimTelemetry, Trace
from noloco_p2p.sim.transport import SimTransport
from noloco_p2p.sim.virtual_time import PROCESS, VirtualLoop, run

StageFactory = Callable[[RunManifest, int, PeerId], Stage]
"""Makes a synchronous stage from (manifest, stage index, peer)."""
BatchesFactory = Callable[[RunManifest, PeerId, Mapping[str, object] | None], Batches]
"""Makes the data from (manifest, peer, cursor to continue from)."""
MIDNIGHT = datetime(2026, 1, 1)
"""Wall-clock time at the start of a run."""


def peer_id(stage: int, replica: int) -> PeerId:
    """The id of a simulated node, such as `s1r0`."""
    return f"s{stage}r{replica}"


@dataclass(frozen=True, slots=True)
class SimPlan:
    """Everything that determines a simulated run."""

    manifest: RunManifest
    replicas: tuple[int, ...]
    """Initial replicas of each stage."""
    seed: int = 0
    """Seed of the world: links and device times (the run's own seed is in the manifest)."""
    config: NodeConfig = field(default_factory=NodeConfig)
    """Configuration of every node; `stage` is replaced by the node's own stage."""
    link: Link = field(default_factory=Link)
    """Used for every link if there is no `geography`."""
    geography: Geography | None = None
    """How the nodes are connected."""
    sizes: MessageSizes | None = None
    """Message sizes to account for; None: the sizes of the actual tensors."""
    costs: Costs | tuple[Costs, ...] = field(default_factory=Costs)
    """Device seconds of the operations: the same for every node, or one entry per stage."""
    slowness: Mapping[PeerId, float] = field(default_factory=dict)
    """Factor on a node's device seconds; 1.0 for nodes not named."""
    view_age_s: float = 0.0
    """Age of every view of the membership, seconds."""
    chooses_stage: bool = False
    """Nodes choose their stage themselves; the stage in their id then has no meaning."""
    save_s: float = 0.05
    """Virtual seconds that writing or reading a checkpoint takes."""
    torn_by_crash: bool = False
    """A crash during a save leaves a checkpoint that looks complete but is not; otherwise it leaves nothing."""
    gradient_audit: bool = True
    """Some data is sent twice (METHOD.md, "The same data twice")."""
    stage_factory: StageFactory = LinearStage
    batches_factory: BatchesFactory = SimBatches

    def costs_of(self, stage: int) -> Costs:
        """Device seconds of a node of this stage."""
        return self.costs[stage] if isinstance(self.costs, tuple) else self.costs


class SimSwarm:
    """Builds the nodes of a plan and runs them until they end. Can be used only once."""

    def __init__(self, plan: SimPlan) -> None:
        self.plan = plan
        self.network = Network(plan.seed, plan.geography or Geography(plan.link), plan.sizes)
        self.registry = Registry(plan.view_age_s)
        self.trace = Trace()
        self.disks: dict[PeerId, Disk] = {}
        """What each node has written; it outlives the node's processes."""
        self.processes: list[SimProcess] = []
        """In the order of their starts."""
        self._restarts: dict[asyncio.Task[None], None] = {}
        self._schedule: list[tuple[float, Callable[[], object]]] = []

    # --- schedule and faults --------------------------------------------------------------------------------------

    def at(self, at_s: float, action: Callable[[], object]) -> None:
        """Before `run`: schedule an action for a virtual time, such as `lambda: swarm.crash("s0r1")`."""
        self._schedule.append((at_s, action))

    def start(self, stage: int, replica: int) -> None:
        """Start a node, or restart it with its disk after a crash. Each process gets its own incarnation."""
        peer, plan = peer_id(stage, replica), self.plan
        incarnation = generator(plan.seed, "incarnation", peer, len(self.processes)).getrandbits(64) | 1
        config = plan.config.model_copy(update={"stage": None if plan.chooses_stage else stage})
        disk = self.disks.setdefault(peer, Disk(torn_by_crash=plan.torn_by_crash))
        ports = SimPorts(
            SimTransport(self.network, peer),
            SimDirectory(self.registry, peer, lambda adverts: self.network.exchange(peer, adverts)),
            SimTelemetry(self.trace, peer),
            SimCheckpoints(disk, config.checkpoint.keep, plan.save_s),
        )
        stages: list[tuple[Stage, SimDevice]] = []

        async def make_stage(index: int) -> tuple[Stage, Device]:
            device = SimDevice(plan.costs_of(index), generator(plan.seed, "device", peer, incarnation, len(stages)))
            device.slowness = stages[-1][1].slowness if stages else plan.slowness.get(peer, 1.0)
            stages.append((plan.stage_factory(plan.manifest, index, peer), device))
            return stages[-1]

        async def make_batches(cursor: Mapping[str, object] | None) -> Batches:
            return plan.batches_factory(plan.manifest, peer, cursor)

        def local_time() -> datetime:
            return MIDNIGHT + timedelta(seconds=asyncio.get_running_loop().time())

        secret = generator(plan.seed, "secret", peer, incarnation).getrandbits(64) if plan.gradient_audit else None
        world = World(*ports, make_stage, make_batches, secret, local_time)
        advert = Advert(peer, plan.manifest.run_id, stage, addresses=(peer,))
        node = Node(advert, plan.manifest, config, world, incarnation)
        process = SimProcess(peer, (stage, replica), node, world, ports, stages)
        context = copy_context()
        context.run(PROCESS.set, peer)
        process.task = _loop().create_task(self._run_process(process), name=peer, context=context)
        self.processes.append(process)
        self.network.news.set()

    def crash(self, peer: PeerId) -> None:
        """Kill a process at once: nothing that it still does has any effect. Its advert stays until it expires."""
        process = self.process(peer)
        if process.task is None or not process.running:
            return
        process.crashed = True
        transport, directory, telemetry, checkpoints = process.ports
        transport.dead = directory.dead = telemetry.dead = True
        checkpoints.crash()
        self.network.crash(peer)
        for _, device in process.stages:
            device.halt()
        process.task.cancel()

    def bounce(self, peer: PeerId, down_s: float) -> None:
        """Crash a node and restart it after `down_s` with its id and its disk, unless the run has ended by then."""
        if self.process(peer).running:
            self.crash(peer)
            self._await_restart(self._restart(peer, down_s))

    def wipe(self, peer: PeerId) -> None:
        """Delete a node's disk."""
        self.disks[peer].wipe()

    def pause(self, peer: PeerId) -> None:
        """Tell a node to pause."""
        if self.process(peer).running:
            self.process(peer).node.pause()

    def resume(self, peer: PeerId) -> None:
        """Tell a paused node to resume."""
        if self.process(peer).running:
            self.process(peer).node.resume()

    def stop(self, peer: PeerId) -> None:
        """Suspend a node's process, as when its machine sleeps. Messages that arrive meanwhile wait there."""
        _loop().stop_process(peer)

    def go_on(self, peer: PeerId) -> None:
        """Let a suspended process continue."""
        _loop().continue_process(peer)

    def slow(self, peer: PeerId, slowness: float) -> None:
        """Multiply a node's device seconds by this factor from the next operation on."""
        device = self.process(peer).device
        if device is not None:
            device.slowness = slowness

    def drain(self, peer: PeerId) -> None:
        """Tell a node to leave."""
        self.process(peer).node.drain()

    def process(self, peer: PeerId) -> SimProcess:
        """The newest process of a peer. Raises KeyError if there is none."""
        for process in reversed(self.processes):
            if process.peer == peer:
                return process
        raise KeyError(peer)

    @property
    def finished(self) -> bool:
        """Whether a node has reached the end of the run."""
        return any(process.node.finished for process in self.processes)

    # --- the run --------------------------------------------------------------------------------------------------

    def run(self, limit_s: float = 3600.0, *, tolerate: bool = False) -> Outcome:
        """Run until every node has ended. Raises Deadlock if that cannot happen within `limit_s` virtual seconds.

        Without `tolerate`, an error of a handler, or of a node that did not crash, ends the run and is raised.
        """
        return run(self._main(tolerate), limit_s=limit_s)

    async def _main(self, tolerate: bool) -> Outcome:
        for stage, count in enumerate(self.plan.replicas):
            for replica in range(count):
                self.start(stage, replica)
        schedule = asyncio.create_task(self._follow_schedule())
        while pending := self._pending(schedule):
            self.network.news.clear()
            news = asyncio.create_task(self.network.news.wait())
            await asyncio.wait([*pending, news], return_when="FIRST_COMPLETED")
            news.cancel()
            errors = [one.error for one in self.processes if one.error is not None and not one.crashed]
            for error in () if tolerate else (*self.network.bugs, *errors):
                raise error
            if schedule.done():
                schedule.result()
        schedule.cancel()
        return Outcome(tuple(self.processes), self.trace, tuple(self.network.bugs), asyncio.get_running_loop().time())

    def _pending(self, schedule: asyncio.Task[None]) -> list[asyncio.Task[None]]:
        """The tasks that the run waits for; empty when it is over. If all crashed, the schedule may restart them."""
        tasks = [process.task for process in self.processes if process.task and not process.task.done()]
        pending = [*tasks, *self._restarts]
        crashed = all(self.process(peer).crashed for peer in dict.fromkeys(one.peer for one in self.processes))
        return [*pending, schedule] if not schedule.done() and (pending or crashed) else pending

    def _await_restart(self, restart: Coroutine[None, None, None]) -> None:
        """Run `restart`, which starts a node again. The run does not end before it is done."""
        task = asyncio.get_running_loop().create_task(restart)
        self._restarts[task] = None
        task.add_done_callback(lambda done: self._restarts.pop(done, None))

    async def _restart(self, peer: PeerId, down_s: float) -> None:
        await asyncio.sleep(down_s)
        if not self.finished:
            self.start(*self.process(peer).place)

    async def _follow_schedule(self) -> None:
        """Run the scheduled actions in order of time. Those with equal times run in the order they were added in."""
        now = asyncio.get_running_loop().time
        for at_s, action in sorted(self._schedule, key=lambda entry: entry[0]):
            await asyncio.sleep(at_s - now())
            action()

    async def _run_process(self, process: SimProcess) -> None:
        await process.ports.transport.serve(process.node.handler)
        try:
            await process.node.run()
        finally:
            await process.ports.transport.close()
            process.ended_at_s = asyncio.get_running_loop().time()


def _loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop
