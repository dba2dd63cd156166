"""The faults of a scenario: those that it lists, and those drawn from a seed at its churn rates.

All are drawn before the run and independently of it, so a seed determines the run.
"""

import itertools
import math
import random
import re
from collections.abc import Collection, Sequence

from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.seeds import generator
from noloco_p2p.errors import ConfigError
from noloco_p2p.sim.faults import Fault
from noloco_p2p.sim.scenario import FaultSettings, Scenario
from noloco_p2p.sim.world import peer_id

HOUR_S = 3600.0
LASTING = ("crash", "depart")
"""Faults from which a node does not come back."""
MAX_DRAWN = 1_000_000
"""Upper limit on the mean number of faults drawn in a run: all of them are in memory before it begins."""


class Roster:
    """The nodes that each stage will have, given the arrivals and losses drawn so far."""

    def __init__(self, replicas: Sequence[int], newcomers: Collection[PeerId] = ()) -> None:
        """`newcomers`: ids that other arrivals have taken."""
        self._newcomers = newcomers
        self._numbers = [*map(itertools.count, replicas)]
        """For each stage, the numbers of the next nodes that arrive."""
        self.stages = [[peer_id(stage, i) for i in range(count)] for stage, count in enumerate(replicas)]
        """The nodes of each stage that are not gone for good."""

    def peers(self) -> list[PeerId]:
        """All of these nodes."""
        return [peer for stage in self.stages for peer in stage]

    def arrive(self, rng: random.Random) -> PeerId:
        """Add a node to a uniformly drawn stage. Returns its id."""
        stage = rng.randrange(len(self.stages))
        ids = (peer_id(stage, number) for number in self._numbers[stage])
        self.stages[stage].append(peer := next(one for one in ids if one not in self._newcomers))
        return peer

    def lose(self, peer: PeerId) -> bool:
        """Remove a node for good. Returns False if it stays because it is the last of its stage."""
        stage = next(stage for stage in self.stages if peer in stage)
        if len(stage) > 1:
            stage.remove(peer)
            return True
        return False


def planned_faults(scenario: Scenario, seed: int) -> tuple[Fault, ...]:
    """All faults, in order of time. Raises ConfigError if one names an unknown node, or a new node with a bad id, or if
    there are too many."""
    listed = [one for fault in scenario.faults for one in _listed(scenario, fault, seed)]
    newcomers = [peer for fault in listed if fault.kind == "arrive" for peer in fault.peers]
    for number, peer in enumerate(newcomers):
        if peer in newcomers[:number]:
            raise ConfigError(f"the node {peer} arrives more than once")
        _check_new(peer, scenario.replicas)
    drawn = _drawn(scenario, seed, newcomers)
    return tuple(sorted([*listed, *drawn], key=lambda fault: (fault.at_s, fault.kind, fault.peers)))


def slowness(scenario: Scenario, seed: int, newcomers: Sequence[PeerId]) -> dict[PeerId, float]:
    """Factor on each node's device seconds, including newcomers: a function of the seed and the node's id."""
    sigma, peers = scenario.compute.node_spread, [*Roster(scenario.replicas).peers(), *newcomers]
    return {peer: math.exp(generator(seed, "slowness", peer).gauss(0.0, sigma)) for peer in peers} if sigma else {}


def _listed(scenario: Scenario, fault: FaultSettings, seed: int) -> list[Fault]:
    roster = Roster(scenario.replicas)
    everybody, peers = roster.peers(), list(fault.peers)
    if fault.region is not None:
        names = scenario.network.regions.names
        peers = [one for stage in roster.stages for i, one in enumerate(stage) if names[i % len(names)] == fault.region]
    elif fault.share is not None:
        rng = generator(seed, "share", fault.kind, str(fault.at_s))
        peers = [peer for stage in roster.stages for peer in rng.sample(stage, round(fault.share * len(stage)))]
        peers = sorted(peers) or [rng.choice(everybody)]
    unknown = [] if fault.kind == "arrive" else [peer for peer in peers if peer not in everybody]
    if unknown:
        raise ConfigError(f"a fault ({fault.kind} at {fault.at_s:g} s) names {unknown[0]}, which does not exist")
    return [Fault(fault.at_s, fault.kind, tuple(peers), fault.for_s, fault.factor)] if peers else []


def _check_new(peer: PeerId, replicas: Sequence[int]) -> None:
    """Raises ConfigError if the swarm begins with this node, or its id names no stage."""
    found = re.fullmatch(r"s(0|[1-9][0-9]*)r(0|[1-9][0-9]*)", peer)
    if not found or int(found[1]) >= len(replicas):
        raise ConfigError(f"{peer!r} cannot be the id of a new node; the first new node of stage 0 is s0r{replicas[0]}")
    if int(found[2]) < replicas[int(found[1])]:
        raise ConfigError(f"the node {peer} cannot arrive, because the swarm begins with it")


def _drawn(scenario: Scenario, seed: int, newcomers: Collection[PeerId]) -> list[Fault]:
    """Events of four kinds, drawn from independent Poisson processes at the rates of the whole swarm."""
    churn, rng = scenario.churn, generator(seed, "churn")
    rates = {
        "arrive": churn.arrivals_per_hour,
        "depart": churn.departures_per_hour,
        "crash": churn.crashes_per_hour,
        "other": churn.faults_per_hour if churn.kinds else 0.0,
    }
    per_s = sum(rates.values()) * sum(scenario.replicas) / HOUR_S
    if (mean := per_s * (scenario.limit_s - churn.from_s)) > MAX_DRAWN:
        raise ConfigError(f"churn: about {mean:.2g} events until limit_s are too many: at most {MAX_DRAWN:,}")
    roster = Roster(scenario.replicas, newcomers)
    found: list[Fault] = []
    at_s = churn.from_s
    while per_s and (at_s := at_s + rng.expovariate(per_s)) < scenario.limit_s:
        kind = rng.choices(list(rates), list(rates.values()))[0]
        peer = roster.arrive(rng) if kind == "arrive" else rng.choice(roster.peers())
        fault = _draw_one(scenario, rng, at_s, kind, peer, roster)
        if fault.kind not in LASTING or roster.lose(peer):
            found.append(fault)
    return found


def _draw_one(scenario: Scenario, rng: random.Random, at_s: float, kind: str, peer: PeerId, roster: Roster) -> Fault:
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
            others = [one for one in roster.peers() if one != peer]
            peers = (peer, rng.choice(others)) if others else (peer,)
        case "split":
            everybody = roster.peers()
            peers = tuple(sorted(rng.sample(everybody, rng.randint(1, max(1, len(everybody) // 2)))))
        case "arrive":
            peers = (roster.arrive(rng),)
        case "leave":
            for_s += scenario.node.limits.drain_s
        case "slow":
            factor = rng.uniform(1.5, 4.0)
    return Fault(at_s, kind, peers, 0.0 if kind in LASTING else for_s, factor)
