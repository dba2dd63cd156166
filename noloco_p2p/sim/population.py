"""What happens to the swarm of a scenario, drawn from a seed: who comes, who goes, who fails, and for how long.

Everything is drawn before the run, with no look at it, so that a seed tells one story.
"""

import math
import random
from collections.abc import Sequence

from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.seeds import generator
from noloco_p2p.errors import ConfigError
from noloco_p2p.sim.faults import Fault
from noloco_p2p.sim.scenario import FaultSettings, Scenario
from noloco_p2p.sim.world import peer_id

HOUR_S = 3600.0
LASTING = ("crash", "depart")
"""Who is hit by these does not come back."""


class Population:
    """The nodes of each stage that will be there, as far as it has been drawn."""

    def __init__(self, replicas: Sequence[int]) -> None:
        self.started = list(replicas)
        """Nodes of each stage that ever were."""
        self._present = [[peer_id(stage, i) for i in range(count)] for stage, count in enumerate(replicas)]
        self._leaving_at: dict[PeerId, float] = {}

    def everybody(self) -> list[PeerId]:
        """Those who have not gone for good."""
        return [peer for stage in self._present for peer in stage]

    def arrive(self, rng: random.Random) -> PeerId:
        """A new node, of a stage drawn evenly."""
        stage = rng.randrange(len(self.started))
        peer = peer_id(stage, self.started[stage])
        self.started[stage] += 1
        self._present[stage].append(peer)
        return peer

    def can_spare(self, peer: PeerId) -> bool:
        """Its stage has others."""
        return len(self._mates(peer)) > 1

    def lose(self, peer: PeerId) -> None:
        """It goes for good."""
        self._mates(peer).remove(peer)

    def _mates(self, peer: PeerId) -> list[PeerId]:
        return next(stage for stage in self._present if peer in stage)


def faults(scenario: Scenario, seed: int) -> tuple[Fault, ...]:
    """All that will be done to the swarm, in order of time. Raises ConfigError for a node that there is not."""
    given = [one for fault in scenario.faults for one in _given(scenario, fault, seed)]
    return tuple(sorted([*given, *_drawn(scenario, seed)], key=lambda fault: (fault.at_s, fault.kind, fault.peers)))


def slowness(scenario: Scenario, seed: int, peers: Sequence[PeerId]) -> dict[PeerId, float]:
    """Each node's own factor on its device seconds, a function of the seed and its id."""
    sigma = scenario.compute.node_spread
    if not sigma:
        return {}
    return {peer: math.exp(generator(seed, "slowness", peer).gauss(0.0, sigma)) for peer in peers}


def _given(scenario: Scenario, fault: FaultSettings, seed: int) -> list[Fault]:
    stages = [[peer_id(stage, i) for i in range(count)] for stage, count in enumerate(scenario.replicas)]
    everybody = [peer for stage in stages for peer in stage]
    peers = list(fault.peers)
    if fault.region is not None:
        names = scenario.network.regions.names
        peers = [peer for stage in stages for i, peer in enumerate(stage) if names[i % len(names)] == fault.region]
    elif fault.share is not None:
        rng = generator(seed, "share", fault.kind, str(fault.at_s))
        peers = [peer for stage in stages for peer in rng.sample(stage, round(fault.share * len(stage)))]
        peers = sorted(peers) or [rng.choice(everybody)]
    strange = [] if fault.kind == "arrive" else [peer for peer in peers if peer not in everybody]
    if strange:
        raise ConfigError(f"a fault ({fault.kind} at {fault.at_s:g} s) is for {strange[0]}, which there is not")
    return [Fault(fault.at_s, fault.kind, tuple(peers), fault.for_s, fault.factor)] if peers else []


def _drawn(scenario: Scenario, seed: int) -> list[Fault]:
    """Events of four kinds as independent Poisson streams of the whole swarm's rate."""
    churn, rng = scenario.churn, generator(seed, "churn")
    rates = {
        "arrive": churn.arrivals_per_hour,
        "depart": churn.departures_per_hour,
        "crash": churn.crashes_per_hour,
        "other": churn.faults_per_hour if churn.kinds else 0.0,
    }
    per_s = sum(rates.values()) * sum(scenario.replicas) / HOUR_S
    population = Population(scenario.replicas)
    found: list[Fault] = []
    at_s = churn.from_s
    while per_s and (at_s := at_s + rng.expovariate(per_s)) < scenario.limit_s:
        kind = rng.choices(list(rates), list(rates.values()))[0]
        peer = population.arrive(rng) if kind == "arrive" else rng.choice(population.everybody())
        drawn = _one(scenario, rng, at_s, kind, peer, population)
        if drawn.kind in LASTING:
            if not population.can_spare(peer):
                continue
            population.lose(peer)
        found.append(drawn)
    return found


def _one(scenario: Scenario, rng: random.Random, at_s: float, kind: str, peer: PeerId, population: Population) -> Fault:
    churn = scenario.churn
    if kind == "crash" and churn.down_s is not None:
        return Fault(at_s, "bounce", (peer,), rng.expovariate(1.0 / churn.down_s) if churn.down_s else 0.0)
    if kind != "other":
        return Fault(at_s, kind, (peer,))
    kind, for_s = rng.choice(churn.kinds), rng.expovariate(1.0 / churn.fault_s)
    peers: tuple[PeerId, ...] = (peer,)
    factor = 1.0
    match kind:
        case "cut" | "one_way":
            others = [one for one in population.everybody() if one != peer]
            peers = (peer, rng.choice(others)) if others else (peer,)
        case "split":
            everybody = population.everybody()
            peers = tuple(sorted(rng.sample(everybody, rng.randint(1, max(1, len(everybody) // 2)))))
        case "leave":
            for_s += scenario.node.limits.drain_s
        case "slow":
            factor = rng.uniform(1.5, 4.0)
    return Fault(at_s, kind, peers, 0.0 if kind in LASTING else for_s, factor)
