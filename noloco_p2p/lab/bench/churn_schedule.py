"""Which nodes are killed and stopped when, from a seed. What it costs is worked out in churn_result.py."""

from dataclasses import dataclass, field
from random import Random

from noloco_p2p.lab.bench.churn_stats import victim
from noloco_p2p.lab.bench.node_fleet import Fleet, NodeSlot

PAUSE_S = (2.0, 6.0)
"""A killed node is started again after a time between these."""
HUNG_S = (5.0, 15.0)
"""A node is stopped for a time between these."""
KILLS_TO_A_STOP = 3
"""After this many kills another node is stopped as well, half an interval later."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Something that was done to the swarm."""

    at: float
    kind: str
    """`kill` or `stop`."""
    nodes: tuple[str, ...]


@dataclass(slots=True)
class NodeKiller:
    """Kills a random node every `every_s` and stops one now and then; spares the last that trains in its stage."""

    fleet: Fleet
    rng: Random
    every_s: float
    next_at: float
    done: list[Disturbance] = field(default_factory=list)
    _stop_at: float | None = None

    def tick(self, now: float) -> None:
        """Do what is due. When no node can be spared it is done as soon as one can."""
        if self._stop_at is not None and now >= self._stop_at and (node := self._drawn()) is not None:
            self.fleet.stop(node, self.rng.uniform(*HUNG_S))
            self.done.append(Disturbance(now, "stop", (node.name,)))
            self._stop_at = None
        if now >= self.next_at and (node := self._drawn()) is not None:
            self.next_at = max(self.next_at + self.every_s, now)
            self.done.append(Disturbance(now, "kill", (node.name,)))
            node.read_metrics()
            self.fleet.kill(node, self.rng.uniform(*PAUSE_S))
            if sum(one.kind == "kill" for one in self.done) % KILLS_TO_A_STOP == 0:
                self._stop_at = now + self.every_s / 2

    def _drawn(self) -> NodeSlot | None:
        name = victim(self.rng, self.fleet.training())
        return None if name is None else self.fleet.nodes[name]


@dataclass(slots=True)
class StageKiller:
    """Kills whole stages for good: all replicas, and their directories, so that only guardians have the weights.

    Guardians are at work while a stage has two replicas or fewer: first it is brought down to two, and when another
    node holds a newer outer round of it the rest is killed, at once or one after the other. Then new nodes come.
    """

    fleet: Fleet
    rng: Random
    every_s: float
    next_at: float
    done: list[Disturbance] = field(default_factory=list)
    deaths: list[tuple[int, float]] = field(default_factory=list)
    """(stage, when its last replica died)."""
    _stage: int | None = None
    _guarded_from: float = 0.0
    _dead: list[NodeSlot] = field(default_factory=list)

    def tick(self, now: float) -> None:
        """Take the next step, when it is due and the swarm is ready for it."""
        if now < self.next_at:
            return
        training = self.fleet.training()
        if self._stage is None:
            if all(node.active for node in self.fleet.nodes.values()):
                self._stage = self.rng.randrange(self.fleet.stages)
                self._kill([self.fleet.nodes[name] for name in training[self._stage][2:]], now)
                self._guarded_from = 1 + max(self._guarded(self._stage), self._round(self._stage))
            return
        self.next_at = now + 1.0  # not at every tick: the metrics are read
        if self._guarded(self._stage) < self._guarded_from:
            return
        left = [self.fleet.nodes[name] for name in training[self._stage]]
        together = self.rng.random() < 0.5
        self._kill(left if together else left[:1], now)
        if together or len(left) == 1:
            self.deaths.append((self._stage, now))
            for node in self._dead:
                node.restart_at = now + self.rng.uniform(*PAUSE_S)
            self._stage, self._dead = None, []

    def _kill(self, nodes: list[NodeSlot], now: float) -> None:
        self.next_at = now + self.every_s
        if nodes:
            self.done.append(Disturbance(now, "kill", tuple(node.name for node in nodes)))
        for node in nodes:
            node.read_metrics()
            self.fleet.kill(node, None, fresh=True)
        self._dead += nodes

    def _guarded(self, stage: int) -> float:
        """The newest outer round of the stage that a node of another stage holds; 0 when none does."""
        rounds = [0.0]
        for node in self.fleet.nodes.values():
            if node.stage != stage:
                node.read_metrics()
                if node.metrics is not None:
                    rounds.append(node.metrics.total("guarded_round", stage=str(stage)))
        return max(rounds)

    def _round(self, stage: int) -> float:
        """The newest outer round that a replica of the stage has done."""
        found = self.fleet.logged("outer_round", self.fleet.training()[stage])
        return max((float(one["round"]) for one in found), default=0.0)
