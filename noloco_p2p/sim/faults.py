"""Swarms to which things are done: single faults with their times, and what there was when a node took weights up.

    swarm = HurtSwarm(plan, (Fault(5.0, "split", ("s0r0", "s1r0"), 20.0),))

What must hold whatever is done stands in `laws`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from noloco_p2p.config import RunManifest
from noloco_p2p.core.members import TRAINED
from noloco_p2p.core.messages import Advert, Description, PeerId
from noloco_p2p.sim.ledger import Ledger, TakeUp, There, Watched, now_s
from noloco_p2p.sim.stage import SyncStage
from noloco_p2p.sim.toy_stage import ModelStage
from noloco_p2p.sim.transport import DESCRIBE_S
from noloco_p2p.sim.world import Life, Swarm, SwarmPlan

SETTLED_S = 2 * DESCRIBE_S
"""A newcomer decides on answers that are as old as the longest wait for another answer."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is done to some nodes, undone after `for_s` seconds. The kinds are those of `FaultSettings`."""

    at_s: float
    kind: str
    peers: tuple[PeerId, ...]
    for_s: float = 0.0
    factor: float = 1.0
    """Of `slow`: on the device seconds that these nodes usually need."""

    @property
    def ends_s(self) -> float:
        """When it is undone."""
        return self.at_s + self.for_s

    def __str__(self) -> str:
        return f"{self.kind} {' '.join(self.peers)} for {self.for_s:.2f} s"

    def parts(self, one: PeerId, other: PeerId) -> bool:
        """While it lasts, nothing gets through between the two."""
        match self.kind:
            case "hang" | "mute":
                return one in self.peers or other in self.peers
            case "cut":
                return one in self.peers and other in self.peers
            case "one_way":
                return self.peers[0] in (one, other) and one in self.peers and other in self.peers
            case "split":
                return (one in self.peers) != (other in self.peers)
        return False


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long things may take in a sound swarm, as its nodes' own settings say."""

    limit_s: float
    """By then the run has ended."""
    listed_s: float
    """What has been announced for so long has been read by everybody who can read."""
    round_s: float
    """Longest outer round: its partner hangs, and the transfer ends by its deadline."""
    gap_s: float
    """Longest time without an inner step: a microbatch lives out its deadline, once more after the replica that it
    went to has fallen silent, and under `balanced` an origin is waited for that has been silent for a while."""

    @staticmethod
    def of(plan: SwarmPlan, limit_s: float) -> "Bounds":
        """Those of a plan."""
        return Bounds(
            limit_s,
            2.0 * plan.config.directory.refresh_s,
            plan.manifest.outer.deadline_s + 1.0,
            2.5 * plan.config.limits.microbatch_deadline_s,
        )


class FaultySwarm(Swarm):
    """A swarm with a list of faults, whose stages, where they are model stages, write down what they do."""

    def __init__(self, plan: SwarmPlan, faults: tuple[Fault, ...] = (), *, limit_s: float = 400.0) -> None:
        self.ledger = Ledger()

        def factory(manifest: RunManifest, index: int, me: PeerId) -> SyncStage:
            return Watched(manifest, index, me, self.ledger)

        super().__init__(replace(plan, stage_factory=factory) if plan.stage_factory is ModelStage else plan)
        self.faults = faults
        """All that will be done, if the run lasts."""
        self.begun: list[Fault] = []
        """What has been done to it so far."""
        self.bounds = Bounds.of(plan, limit_s)
        self.taken_up: list[TakeUp] = []
        self.done: list[tuple[float, str]] = []
        """What was done to the swarm, and when."""
        for fault in faults:
            self.at(fault.at_s, lambda fault=fault: self._begin(fault))  # type: ignore[misc]
            self.at(fault.ends_s, lambda fault=fault: self._end(fault))  # type: ignore[misc]

    def start(self, stage: int, replica: int) -> None:
        """As ever; each time that the node takes weights up, it is written down what there was when it chose them."""
        super().start(stage, replica)
        life = self._lives[-1]
        transport, _, telemetry, _ = life.ports
        tell, ask = telemetry.event, transport.describe
        before: list[There] = []

        def event(kind: str, /, **fields: object) -> None:
            tell(kind, **fields)
            if kind == "resumed" and not telemetry.dead:
                there = before.pop() if before else self._there(life.peer)
                source, round = str(fields["source"]), int(str(fields["round"]))
                self.taken_up.append(TakeUp(now_s(), life.peer, life.node.state.index, source, round, there))
                before.clear()

        async def describe(peer: Advert) -> Description:
            """Asked of everybody who may have weights, just before a node chooses; then they are on their way."""
            if not before or before[-1].at_s < now_s():
                before[:] = [self._there(life.peer)]
            return await ask(peer)

        telemetry.event = event  # type: ignore[method-assign]
        transport.describe = describe  # type: ignore[method-assign]

    def _there(self, peer: PeerId) -> There:
        """What weights a node of its stage could go on from now."""
        index, now = self.life(peer).node.state.index, now_s()
        adverts = [life.node.state.advert for life in self._lives if life.running and self.reach(peer, life.peer)]
        others = [a for a in adverts if a.peer_id != peer]
        mates = [a for a in others if a.stage == index and a.state in TRAINED]
        entered = {a.peer_id: self.life(a.peer_id).trace.of("state")[-1].at_s for a in mates}
        held = [(a, h) for a in others for h in a.holds if h.stage == index]
        listed = {
            (h.peer, h.get("stage"), h.get("round"))
            for a in {a.peer_id: a for a, _ in held}
            for h in self.life(a).trace.of("guarded")
            if h.at_s <= now - self.bounds.listed_s
        }
        return There(
            now,
            tuple(a.outer_round for a in mates if entered[a.peer_id] <= now - self.bounds.listed_s),
            tuple(h.round for a, h in held if (a.peer_id, h.stage, h.round) in listed),
            tuple(h.round for h in self.disks[peer].held() if h.stage == index),
            tuple(self._newest(adverts, s) for s in range(self.plan.manifest.stages) if s != index),
        )

    @staticmethod
    def _newest(adverts: Sequence[Advert], stage: int) -> int:
        living = [a.outer_round for a in adverts if a.stage == stage and a.state in TRAINED]
        return max([*living, *(h.round for a in adverts for h in a.holds if h.stage == stage)], default=0)

    def reach(self, one: PeerId, other: PeerId) -> bool:
        """Whether messages have got through between two nodes for SETTLED_S."""
        since_s = now_s() - SETTLED_S
        return not any(fault.ends_s > since_s and fault.parts(one, other) for fault in self.begun)

    # --- what is done ---------------------------------------------------------------------------------------------

    def _begin(self, fault: Fault) -> None:
        self.begun.append(fault)
        self.done.append((now_s(), str(fault)))
        first, *rest = fault.peers
        match fault.kind:
            case "cut":
                for number, one in enumerate(fault.peers):
                    for other in fault.peers[number + 1 :]:
                        self.network.partition(one, other)
            case "one_way":
                for other in rest:
                    self.network.partition_one_way(first, other)
            case "split":
                others = [life.peer for life in self._lives if life.peer not in fault.peers]
                self.split(fault.peers, others)
            case _:
                for peer in fault.peers:
                    if fault.kind == "arrive" or self._was(peer):
                        self._hurt(peer, fault)

    def _hurt(self, peer: PeerId, fault: Fault) -> None:
        match fault.kind:
            case "arrive":
                if not self.over:
                    self.start(*_place(peer))
            case "crash":
                self.crash(peer)
            case "bounce":
                self.bounce(peer, fault.for_s)
            case "wipe":
                self.bounce(peer, fault.for_s)
                self.wipe(peer)
            case "hang" | "mute":
                self.network.hold(peer)
                if fault.kind == "hang":
                    self.registry.failing[peer] = None
            case "pause":
                self.pause(peer)
            case "slow":
                self.slow(peer, fault.factor * self.plan.slowness.get(peer, 1.0))
            case "leave" | "depart" if self.life(peer).running:
                self.drain(peer)

    def _end(self, fault: Fault) -> None:
        if fault.kind in ("hang", "mute", "cut", "one_way", "split", "pause", "slow"):
            self.done.append((now_s(), f"end of {fault.kind} {' '.join(fault.peers)}"))
        for number, peer in enumerate(fault.peers):
            if not self._was(peer):
                continue
            match fault.kind:
                case "cut" | "one_way":
                    for other in fault.peers[number + 1 :]:
                        self.network.repair(peer, other)
                case "hang" | "mute":
                    self.network.release(peer)
                    self.registry.failing.pop(peer, None)
                case "pause":
                    self.resume(peer)
                case "slow":
                    self.slow(peer, self.plan.slowness.get(peer, 1.0))
                case "leave" if not (self.life(peer).crashed or self.life(peer).running or self.over):
                    self.start(*self.life(peer).place)
        if fault.kind == "split":
            self.heal()

    def _was(self, peer: PeerId) -> bool:
        """It has been started; a newcomer never is who would come when the run is over."""
        return any(life.peer == peer for life in self._lives)

    # --- its end --------------------------------------------------------------------------------------------------

    def _ahead(self, schedule: asyncio.Task[None]) -> list[asyncio.Task[None]]:
        """Who came back, or was cut off from all who finished, until they had left, is told to leave too."""
        running = [life for life in self._lives if life.running]
        if self.over and all(self._late(life) for life in running):
            for life in running:
                life.node.drain()
        return super()._ahead(schedule)

    def _late(self, life: Life) -> bool:
        if life.node.state.advert.state in ("starting", "waiting"):
            return True
        if not self.begun:
            return False
        finished = [one for one in self._lives if one.node.finished]
        missed_s = min(one.trace.of("state")[-1].at_s for one in finished) + self.plan.config.directory.ttl_s / 2
        lasting = [fault for fault in self.begun if fault.ends_s > missed_s]
        return all(any(fault.parts(life.peer, one.peer) for fault in lasting) for one in finished)

    @property
    def over(self) -> bool:
        """Somebody has finished the run."""
        return any(life.node.finished for life in self._lives)


def _place(peer: PeerId) -> tuple[int, int]:
    """(stage, replica) of an id such as `s1r0`."""
    stage, replica = peer.removeprefix("s").split("r")
    return int(stage), int(replica)
