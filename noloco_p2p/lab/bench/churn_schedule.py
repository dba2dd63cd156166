"""Decides from a seed which nodes are killed and stopped, and when. churn_figures.py computes what that costs.

A schedule is an iterator that is advanced each time the swarm is polled: it does what is due, and yields what it did.
"""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

from noloco_p2p.lab.bench.node_fleet import Fleet, FleetNode

PAUSE_S = (2.0, 6.0)
"""A killed node is restarted after a time in this range, seconds."""
HUNG_S = (5.0, 15.0)
"""A node is stopped for a time in this range, seconds."""
KILLS_TO_A_STOP = 3
"""After this many kills another node is stopped as well, half an interval later."""
ASK_EVERY_S = 1.0
"""Interval between two readings of all nodes' metrics, seconds."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A disturbance of the swarm."""

    at: float
    """Unix seconds."""
    kind: str
    """`kill` or `stop`."""
    nodes: tuple[str, ...]
    emptied: int | None = None
    """The stage that lost its last replicas with these nodes, if any."""


Schedule = Iterator[Disturbance | None]


def victim(rng: Random, training: Mapping[int, Sequence[str]]) -> str | None:
    """A node that can be disturbed because another one of its stage trains; None if no node can be spared.

    `training`: the names of the nodes that train now, by stage.
    """
    spare = [name for _, names in sorted(training.items()) for name in sorted(names) if len(names) > 1]
    return rng.choice(spare) if spare else None


def kill_nodes(fleet: Fleet, rng: Random, every_s: float) -> Schedule:
    """Kill a random node every `every_s` and stop one now and then, but never the last one that trains in its stage.

    If no node can be spared, this happens as soon as one can.
    """
    due_at = time.time() + every_s
    for number in count(1):
        node = yield from _spared(fleet, rng, due_at)
        killed_at = time.time()
        fleet.kill(node, rng.uniform(*PAUSE_S))
        yield Disturbance(killed_at, "kill", (node.name,))
        if number % KILLS_TO_A_STOP == 0:
            node = yield from _spared(fleet, rng, killed_at + every_s / 2)
            fleet.stop(node, rng.uniform(*HUNG_S))
            yield Disturbance(time.time(), "stop", (node.name,))
        due_at = max(due_at + every_s, killed_at)


def _spared(fleet: Fleet, rng: Random, due_at: float) -> Generator[None, None, FleetNode]:
    """Wait until `due_at`, and until there is a node that can be spared."""
    while True:
        name = victim(rng, fleet.training()) if time.time() >= due_at else None
        if name is not None:
            return fleet.nodes[name]
        yield None


def kill_stages(fleet: Fleet, rng: Random, every_s: float) -> Schedule:
    """Kill whole stages for good: all replicas and their directories, so that only guardians have the weights.

    Guardians work while a stage has two replicas or fewer. So the stage is first reduced to two. Once a node of another
    stage holds a newer outer round of it, the remaining replicas are killed, together or one after the other. Then new
    nodes are started.
    """
    while True:
        yield from _pause(every_s)
        while not all(node.active for node in fleet.nodes.values()):
            yield None
        stage = rng.randrange(fleet.stages)
        dead = fleet.of_stage(stage)[2:]
        yield _killed_for_good(fleet, dead)
        guarded_from = 1 + max(_guarded_round(fleet, stage), _newest_round(fleet, stage))
        emptied = False
        while not emptied:
            yield from _pause(every_s)
            while _guarded_round(fleet, stage) < guarded_from:
                yield from _pause(ASK_EVERY_S)
            left = [node for node in fleet.of_stage(stage) if node.active]
            together = rng.random() < 0.5
            emptied = together or len(left) == 1
            killed = left if together else left[:1]
            yield _killed_for_good(fleet, killed, stage if emptied else None)
            dead += killed
        for node in dead:
            node.restart_at = time.time() + rng.uniform(*PAUSE_S)


def _pause(seconds: float) -> Schedule:
    over_at = time.time() + seconds
    while time.time() < over_at:
        yield None


def _killed_for_good(fleet: Fleet, nodes: Sequence[FleetNode], emptied: int | None = None) -> Disturbance | None:
    now = time.time()
    for node in nodes:
        fleet.kill(node, None, fresh=True)
    return Disturbance(now, "kill", tuple(node.name for node in nodes), emptied) if nodes else None


def _guarded_round(fleet: Fleet, stage: int) -> float:
    """The newest outer round of the stage that any node of another stage holds; 0 if there is none."""
    readings = [node.read_metrics() for node in fleet.nodes.values() if node.stage != stage]
    return max((one.total("guarded_round", stage=str(stage)) for one in readings if one is not None), default=0.0)


def _newest_round(fleet: Fleet, stage: int) -> float:
    """The newest outer round of the stage's training replicas; 0 if there is none."""
    events = fleet.events("outer_round", [node for node in fleet.of_stage(stage) if node.active])
    return max((event.number("round") or 0.0 for event in events), default=0.0)
