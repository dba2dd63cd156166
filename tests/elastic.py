"""Swarms that are hurt at random, from a seed: what is drawn, what is done to them, and the story of one of them.

    python tests/elastic.py SEED

replays one seed, prints what was done to the swarm and what became of it, and which law it broke, if any. The laws
themselves stand in `elastic_laws.py`.
"""

import asyncio
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elastic_record import Ledger, TakeUp, Watched, now_s, timeline

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.members import TRAINED
from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.sim.links import Link
from noloco_p2p.sim.stage import Costs, SyncStage
from noloco_p2p.sim.world import Life, Swarm, SwarmPlan, peer_id

LIMIT_S = 400.0
"""Virtual seconds in which every drawn swarm must have ended."""
DRAIN_S, TTL_S = 5.0, 6.0
SETTLED_S = 6.0
"""A newcomer decides on answers that are as old as the longest wait for another answer."""
LISTED_S = 2.0
"""What has been announced for so long has been read by everybody who can read."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is done to some nodes, undone after `for_s` seconds."""

    at_s: float
    kind: str
    peers: tuple[PeerId, ...]
    for_s: float = 0.0

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
            case "split":
                return (one in self.peers) != (other in self.peers)
        return False


class HurtSwarm(Swarm):
    """A swarm with a list of faults, whose stages write down what they do."""

    def __init__(self, plan: SwarmPlan, faults: tuple[Fault, ...] = ()) -> None:
        self.ledger = Ledger()

        def factory(manifest: RunManifest, index: int, me: PeerId) -> SyncStage:
            return Watched(manifest, index, me, self.ledger)

        super().__init__(replace(plan, stage_factory=factory))
        self.faults = faults
        self.taken_up: list[TakeUp] = []
        self._under_way: list[Fault] = []
        self.done: list[tuple[float, str]] = []
        """What was done to the swarm, and when."""
        for fault in faults:
            self.at(fault.at_s, lambda fault=fault: self._begin(fault))  # type: ignore[misc]
            self.at(fault.ends_s, lambda fault=fault: self._end(fault))  # type: ignore[misc]

    def start(self, stage: int, replica: int) -> None:
        """As ever; each time that the node takes weights up, it is written down what there was."""
        super().start(stage, replica)
        telemetry = self._lives[-1].ports[2]
        tell = telemetry.event

        def event(kind: str, /, **fields: object) -> None:
            tell(kind, **fields)
            if kind == "resumed" and not telemetry.dead:
                self.taken_up.append(self._take_up(peer_id(stage, replica), fields))

        telemetry.event = event  # type: ignore[method-assign]

    def _take_up(self, peer: PeerId, fields: Mapping[str, object]) -> TakeUp:
        seat, now = self.life(peer).node.seat, now_s()
        adverts = [life.node.seat.advert for life in self._lives if life.running and self.reach(peer, life.peer)]
        others = [a for a in adverts if a.peer_id != peer]
        entered = {life.peer: h.at_s for life in self._lives if life.running for h in life.trace.of("state")}
        settled = {one for one, at_s in entered.items() if at_s <= now - LISTED_S}
        listed = {
            (h.peer, h.get("stage"), h.get("round")) for h in self.trace.of("guarded") if h.at_s <= now - LISTED_S
        }
        held = [(a, h) for a in others for h in a.holds]
        return TakeUp(
            now,
            peer,
            seat.index,
            str(fields["source"]),
            int(str(fields["round"])),
            tuple(
                a.outer_round for a in others if a.stage == seat.index and a.state in TRAINED and a.peer_id in settled
            ),
            tuple(h.round for a, h in held if h.stage == seat.index and (a.peer_id, h.stage, h.round) in listed),
            tuple(h.round for h in self.disks[peer].held() if h.stage == seat.index),
            tuple(self._newest(adverts, s) for s in range(self.plan.manifest.stages) if s != seat.index),
        )

    @staticmethod
    def _newest(adverts: Sequence[Advert], stage: int) -> int:
        living = [a.outer_round for a in adverts if a.stage == stage and a.state in TRAINED]
        return max([*living, *(h.round for a in adverts for h in a.holds if h.stage == stage)], default=0)

    def reach(self, one: PeerId, other: PeerId) -> bool:
        """Whether messages have got through between two nodes for SETTLED_S."""
        under_way = [*self._under_way, *(fault for fault in self.faults if 0 <= now_s() - fault.ends_s < SETTLED_S)]
        return not any(fault.parts(one, other) for fault in under_way)

    def _begin(self, fault: Fault) -> None:
        self._under_way.append(fault)
        self.done.append((now_s(), str(fault)))
        for peer in fault.peers:
            match fault.kind:
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
                case "leave" if self.life(peer).running:
                    self.drain(peer)
        if fault.kind == "cut":
            self.network.partition(*fault.peers)
        if fault.kind == "split":
            others = [life.peer for life in self._lives if life.peer not in fault.peers]
            self.split(fault.peers, others)

    def _end(self, fault: Fault) -> None:
        self._under_way.remove(fault)
        if fault.kind in ("hang", "mute", "cut", "split", "pause"):
            self.done.append((now_s(), f"end of {fault.kind} {' '.join(fault.peers)}"))
        for peer in fault.peers:
            match fault.kind:
                case "hang" | "mute":
                    self.network.release(peer)
                    self.registry.failing.pop(peer, None)
                case "pause":
                    self.resume(peer)
                case "leave" if not (self.life(peer).crashed or self.life(peer).running or self.over):
                    self.start(*self.life(peer).place)
        if fault.kind == "cut":
            self.network.repair(*fault.peers)
        if fault.kind == "split":
            self.heal()

    def _ahead(self, schedule: asyncio.Task[None]) -> list[asyncio.Task[None]]:
        """Who came back, or was cut off, until the run was over and the others had left, is told to leave too."""
        running = [life for life in self._lives if life.running]
        if self.over and all(self._late(life) for life in running):
            for life in running:
                life.node.drain()
        return super()._ahead(schedule)

    def _late(self, life: Life) -> bool:
        ended_s = min(one.trace.of("state")[-1].at_s for one in self._lives if one.node.finished)
        missed = [f for f in self.faults if life.peer in f.peers or f.kind == "split"]
        cut_off = any(f.ends_s > ended_s + TTL_S / 2 and f.kind in ("hang", "mute", "cut", "split") for f in missed)
        return cut_off or life.node.seat.advert.state in ("starting", "waiting")

    @property
    def over(self) -> bool:
        """Somebody has finished the run."""
        return any(life.node.finished for life in self._lives)


# --- what is drawn ----------------------------------------------------------------------------------------------------

SHAPES = ((3, 3, 3), (3, 3, 3), (2, 2), (3, 2, 3), (1, 2, 3), (2, 2, 2), (3, 1, 2), (2, 3), (3, 3, 1), (2, 1, 3))
COSTS = Costs(forward_s=0.05, backward_s=0.1, inner_step_s=0.02, outer_s=0.02, spread=0.2)


def manifest_for(replicas: tuple[int, ...], **changes: object) -> RunManifest:
    """A tiny run of so many stages."""
    settings = {
        "stages": len(replicas),
        "start_replicas": min(replicas),
        "steps": 20,
        "sequence_length": 2,
        "microbatch_size": 1,
        "microbatches_per_step": 2,
        "outer": {"inner_steps": 4, "deadline_s": 3.0},
        "evaluation": {"every_steps": None, "microbatches": 2},
    }
    return RunManifest.model_validate(settings | changes)


def config_for(**changes: object) -> NodeConfig:
    """The local settings of every node."""
    settings = {
        "checkpoint": {"every_rounds": 1},
        "directory": {"ttl_s": TTL_S, "refresh_s": 1.0},
        "limits": {"microbatch_deadline_s": 6.0, "patience_floor_s": 1.0, "linger_s": 12.0, "drain_s": DRAIN_S},
    }
    return NodeConfig.model_validate(settings | changes)


def drawn(seed: int) -> tuple[SwarmPlan, tuple[Fault, ...]]:
    """A swarm and what will be done to it."""
    rng = random.Random(seed)
    replicas = SHAPES[seed % len(SHAPES)]
    manifest = manifest_for(
        replicas, seed=seed, steps=rng.randint(14, 20), routing=rng.choice(["random", "random", "balanced"])
    )
    plan = SwarmPlan(
        manifest,
        replicas,
        seed=seed,
        config=config_for(checkpoint={"every_rounds": rng.choice([1, 2])}),
        link=Link(latency_s=0.005, spread=0.3, reply_loss=rng.choice([0.0, 0.0, 0.01])),
        costs=COSTS,
        view_age_s=rng.choice([0.0, 0.0, 0.5]),
        unequal_batches=True,
        torn_by_crash=rng.random() < 0.5,
    )
    return plan, tuple(sorted(_faults(rng, replicas), key=lambda fault: fault.at_s))


def _faults(rng: random.Random, replicas: tuple[int, ...]) -> list[Fault]:
    """Three to eight of them. A node that crashes for good leaves another one of its stage, which comes back."""
    stages = [[peer_id(stage, i) for i in range(count)] for stage, count in enumerate(replicas)]
    everybody = [peer for stage in stages for peer in stage]
    gone: set[PeerId] = set()
    faults = []
    for _ in range(rng.randint(3, 8)):
        at_s, peer = rng.uniform(1.0, 14.0), rng.choice(everybody)
        stage = stages[int(peer[1])]
        kind = rng.choices(
            ["bounce", "wipe", "crash", "hang", "mute", "cut", "split", "pause", "leave", "stage", "all"],
            [20, 8, 8, 10, 6, 8, 5, 8, 8, 8, 3],
        )[0]
        match kind:
            case "bounce" | "wipe":
                faults.append(Fault(at_s, kind, (peer,), rng.uniform(0.5, 10.0)))
            case "crash" if len(stage) > 1 and not gone & set(stage):
                gone.add(peer)
                faults.append(Fault(max(3.0, at_s), kind, (peer,)))
            case "hang" | "mute" | "pause":
                faults.append(Fault(at_s, kind, (peer,), rng.uniform(1.0, 10.0)))
            case "cut":
                faults.append(
                    Fault(at_s, kind, (peer, rng.choice([p for p in everybody if p != peer])), rng.uniform(2, 15))
                )
            case "split":
                part = rng.sample(everybody, rng.randint(1, len(everybody) // 2))
                faults.append(Fault(at_s, kind, tuple(sorted(part)), rng.uniform(2.0, 15.0)))
            case "leave":
                faults.append(Fault(at_s, kind, (peer,), DRAIN_S + rng.uniform(0.5, 6.0)))
            case "stage" | "all":
                whom, down_s = stage if kind == "stage" else everybody, rng.uniform(0.5, 6.0)
                lost = rng.random() < 0.4
                for each in whom:
                    wiped = lost if kind == "stage" else rng.random() < 0.15
                    faults.append(Fault(at_s, "wipe" if wiped else "bounce", (each,), down_s + rng.uniform(0.0, 1.0)))
    return faults


def main(seed: int) -> int:
    """Replay one seed; 1 when it breaks a law."""
    from elastic_laws import broken

    plan, faults = drawn(seed)
    swarm = HurtSwarm(plan, faults)
    failure = broken(swarm)
    lines = [f"{fault.at_s:8.3f} planned: {fault}" for fault in faults] + timeline(swarm.done, swarm.trace)
    run = f"{plan.replicas}, {plan.manifest.routing}, {plan.manifest.steps} steps"
    lines.append(f"seed {seed}: {run}: {failure or 'all laws hold'}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
