"""Swarms with faults: what happens to which nodes and when, and what each node could have resumed from.

    swarm = FaultySwarm(plan, (Fault(5.0, "split", ("s0r0", "s1r0"), 20.0),))

`laws` checks what must hold under all faults.
"""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from noloco_p2p.config import RunManifest
from noloco_p2p.core.members import TRAINED
from noloco_p2p.core.messages import Advert, NodeDescription, PeerId, ReplicaState
from noloco_p2p.core.resume import age
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.core.timeouts import DESCRIBE_S
from noloco_p2p.ports import Stage
from noloco_p2p.sim.linear_stage import LinearStage
from noloco_p2p.sim.process import Outcome, SimProcess
from noloco_p2p.sim.recording import AvailableWeights, FrozenWeights, RecordingStage, Resumption, WeightsChoice, now_s
from noloco_p2p.sim.world import SimPlan, SimSwarm

SETTLED_S = 2 * DESCRIBE_S
"""How long messages must have got through for a node to count as reachable: a newcomer may use an answer that old."""
BARRIERS = ("hang", "mute", "cut", "one_way", "split")
"""Kinds that keep messages between some nodes from getting through."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of some nodes, undone after `for_s` seconds. The kinds are those of `FaultSettings`, and `stop`: the
    processes are suspended."""

    at_s: float
    kind: str
    peers: tuple[PeerId, ...]
    for_s: float = 0.0
    factor: float = 1.0
    """For `slow`: factor on the usual device seconds of these nodes."""

    @property
    def ends_s(self) -> float:
        """When the fault is undone."""
        return self.at_s + self.for_s

    def blocks(self, sender: PeerId, receiver: PeerId) -> bool:
        """Whether nothing gets through from one node to the other while it lasts."""
        match self.kind:
            case "hang" | "mute":
                return sender in self.peers or receiver in self.peers
            case "cut":
                return sender in self.peers and receiver in self.peers
            case "one_way":
                return sender == self.peers[0] and receiver in self.peers[1:]
            case "split":
                return (sender in self.peers) != (receiver in self.peers)
        return False

    def separates(self, one: PeerId, other: PeerId) -> bool:
        """Whether no call between two nodes succeeds while it lasts."""
        stopped = self.kind == "stop" and (one in self.peers or other in self.peers)
        return stopped or self.blocks(one, other) or self.blocks(other, one)


class FaultySwarm(SimSwarm):
    """A swarm with a list of faults. Linear stages record what they do."""

    def __init__(self, plan: SimPlan, faults: tuple[Fault, ...] = (), *, limit_s: float = 400.0) -> None:
        frozen = FrozenWeights()

        def factory(manifest: RunManifest, index: int, me: PeerId) -> Stage:
            return RecordingStage(manifest, index, me, frozen)

        super().__init__(replace(plan, stage_factory=factory) if plan.stage_factory is LinearStage else plan)
        self.begun: list[Fault] = []
        """The faults that have happened so far."""
        self._lasting: list[Fault] = []
        """Those that have not ended. When one ends, the effects of the others on the same nodes remain."""
        self.limit_s = limit_s
        """The run must have ended by then."""
        self.listed_s = 2.0 * plan.config.directory.refresh_s
        """Age at which an announcement has been read by every node that can read."""
        self.gap_s = 2.5 * plan.config.limits.microbatch_deadline_s
        """Longest acceptable time without an inner step. A microbatch may take until its deadline, and again if its
        replica falls silent; under `balanced`, replicas also wait for a silent origin for a while."""
        self.resumptions: list[Resumption] = []
        for fault in faults:
            self.at(fault.at_s, lambda fault=fault: self._begin(fault))  # type: ignore[misc]
            self.at(fault.ends_s, lambda fault=fault: self._end(fault))  # type: ignore[misc]

    def run(self, limit_s: float | None = None, *, tolerate: bool = False) -> Outcome:
        """Run the swarm to its end, by default within its own limit. Raises as `SimSwarm.run`."""
        return super().run(self.limit_s if limit_s is None else limit_s, tolerate=tolerate)

    def start(self, stage: int, replica: int) -> None:
        """As in `SimSwarm`. Also records what was available each time the node chooses weights to resume from."""
        super().start(stage, replica)
        self._split()
        process = self.processes[-1]
        transport, _, telemetry, _ = process.ports
        record, ask = telemetry.event, transport.describe
        snapshot, state = transport.fetch_snapshot, transport.fetch_state
        choice = WeightsChoice(lambda: self._available(process.peer), SETTLED_S)

        def event(kind: str, /, **fields: object) -> None:
            record(kind, **fields)
            if kind == "resumed" and not telemetry.dead:
                source, round = str(fields["source"]), int(str(fields["round"]))
                began = process.node.state.advert.fresh_round
                self.resumptions.append(Resumption(now_s(), process.peer, source, round, choice.take(), began))

        async def describe(peer: Advert) -> NodeDescription:
            """A node describes all nodes that may have weights just before it chooses whose weights to fetch."""
            if process.node.state.advert.state in ("starting", "waiting", "syncing"):
                choice.ask()
            return await ask(peer)

        async def fetch_snapshot(peer: Advert, request: SnapshotRequest, *rest: Any) -> Snapshot:
            """Without a round it is that of a guardian."""
            fetched = snapshot(peer, request, *rest)
            return await (fetched if request.round is not None else choice.fetch(fetched))

        async def fetch_state(*arguments: Any) -> ReplicaState:
            return await choice.fetch(state(*arguments))

        telemetry.event = event  # type: ignore[method-assign]
        transport.describe = describe  # type: ignore[method-assign]
        transport.fetch_snapshot = fetch_snapshot  # type: ignore[assignment,method-assign]
        transport.fetch_state = fetch_state  # type: ignore[assignment,method-assign]

    def _available(self, peer: PeerId) -> AvailableWeights:
        """The weights of its stage from which a node could continue now."""
        node, now = self.process(peer).node.state, now_s()
        index = node.index
        listed_at = now - self.listed_s
        adverts = [one.node.state.advert for one in self.processes if one.running and self._reach(peer, one.peer)]
        others = [advert for advert in adverts if advert.peer_id != peer]

        def listed(advert: Advert) -> list[int]:
            held = [holding for holding in advert.holds if holding.stage == index]
            events = self.process(advert.peer_id).trace.of("guarded") if held else []
            announced = {e.get("round") for e in events if e.get("stage") == index and e.at_s <= listed_at}
            return [holding.age for holding in held if holding.round in announced]

        def newest(stage: int) -> int:
            living = [a.outer_round for a in adverts if a.stage == stage and a.state in TRAINED]
            return max([*living, *(h.round for a in adverts for h in a.holds if h.stage == stage)], default=0)

        everybody = [one.node.state.advert for one in self.processes if one.running and one.peer != peer]
        mates = [a for a in others if a.stage == index and a.state in TRAINED]
        return AvailableWeights(
            now,
            tuple(age(one) for one in mates if self.process(one.peer_id).trace.of("state")[-1].at_s <= listed_at),
            tuple(age(a) for a in everybody if a.stage == index and a.state in TRAINED),
            tuple(held for advert in others for held in listed(advert)),
            tuple(h.age for h in self.disks[peer].held(intact=True) if h.stage == index),
            tuple(newest(stage) for stage in range(self.plan.manifest.stages) if stage != index),
            age(node.advert) if node.advert.state == "training" and not node.stood_still else None,
        )

    def _reach(self, one: PeerId, other: PeerId) -> bool:
        """Whether messages have got through between two nodes for SETTLED_S."""
        since_s = now_s() - SETTLED_S
        return not any(fault.ends_s > since_s and fault.separates(one, other) for fault in self.begun)

    # --- carrying out faults --------------------------------------------------------------------------------------

    def _begin(self, fault: Fault) -> None:
        self.begun.append(fault)
        self._lasting.append(fault)
        if fault.kind in BARRIERS:
            self.network.block(fault.blocks)
        match fault.kind:
            case "hang":
                self.registry.failing += fault.peers
            case "split":
                self._split()
            case "arrive" if not self.finished:
                for peer in fault.peers:
                    self.start(*map(int, peer.removeprefix("s").split("r")))  # such as s1r0
            case _:
                for peer in filter(self._was_started, fault.peers):
                    self._strike(peer, fault)

    def _split(self) -> None:
        """Separate the adverts of nodes as all current splits together require."""
        splits = [one for one in self._lasting if one.kind == "split"]
        groups: dict[tuple[bool, ...], dict[PeerId, None]] = {}
        for process in self.processes if splits else ():
            groups.setdefault(tuple(process.peer in one.peers for one in splits), {})[process.peer] = None
        self.registry.split(groups.values())

    def _lasts(self, peer: PeerId, kind: str) -> list[Fault]:
        """The faults of a kind that still affect a node, oldest first."""
        return [one for one in self._lasting if one.kind == kind and peer in one.peers]

    def _strike(self, peer: PeerId, fault: Fault) -> None:
        match fault.kind:
            case "crash":
                self.crash(peer)
            case "bounce":
                self.bounce(peer, fault.for_s)
            case "wipe":
                self.bounce(peer, fault.for_s)
                self.wipe(peer)
            case "pause":
                self.pause(peer)
            case "stop":
                self.stop(peer)
            case "slow":
                self.slow(peer, fault.factor * self.plan.slowness.get(peer, 1.0))
            case "leave" | "depart" if self.process(peer).running:
                self.drain(peer)

    def _end(self, fault: Fault) -> None:
        self._lasting.remove(fault)
        if fault.kind in BARRIERS:
            self.network.unblock(fault.blocks)
        match fault.kind:
            case "hang":
                for peer in fault.peers:
                    self.registry.failing.remove(peer)
            case "split":
                self._split()
            case _:
                for peer in filter(self._was_started, fault.peers):
                    self._release(peer, fault.kind)

    def _release(self, peer: PeerId, kind: str) -> None:
        process = self.process(peer)
        match kind:
            case "pause" if not self._lasts(peer, "pause"):
                self.resume(peer)
            case "stop" if not self._lasts(peer, "stop"):
                self.go_on(peer)
            case "slow":
                factor = [1.0, *(one.factor for one in self._lasts(peer, "slow"))][-1]
                self.slow(peer, factor * self.plan.slowness.get(peer, 1.0))
            case "leave" if not process.running or process.node.state.leaving:
                self._await_restart(self._return(process))

    async def _return(self, process: SimProcess) -> None:
        """Restart a node that was told to leave, once it has left. That may take longer than the fault lasts."""
        if process.task is not None:
            await asyncio.wait([process.task])
        if not (process.crashed or self.finished) and self.process(process.peer) is process:
            self.start(*process.place)

    def _was_started(self, peer: PeerId) -> bool:
        """Whether a node was ever started: not a newcomer that would have arrived after the end of the run."""
        return any(process.peer == peer for process in self.processes)

    # --- the end of the run------------------------------------------------------------------------------------------

    def _pending(self, schedule: asyncio.Task[None]) -> list[asyncio.Task[None]]:
        """As in `SimSwarm`. After the end of the run, first tell nodes to leave that came back too late, or were cut
        off from all finished nodes until those had left."""
        running = [process for process in self.processes if process.running]
        if self.finished and all(self._late(process) for process in running):
            for process in running:
                process.node.drain()
        return super()._pending(schedule)

    def _late(self, process: SimProcess) -> bool:
        if process.state in ("starting", "waiting"):
            return True
        if not self.begun:
            return False
        finished = [one for one in self.processes if one.node.finished]
        missed_s = min(one.trace.of("state")[-1].at_s for one in finished) + self.plan.config.directory.ttl_s / 2
        lasting = [fault for fault in self.begun if fault.ends_s > missed_s]
        return all(any(fault.separates(process.peer, one.peer) for fault in lasting) for one in finished)
