"""Real nodes in a simulated swarm in which only inner steps take time, and models of how they wait for each other."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from noloco_p2p.config import NodeConfig
from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.pairing import matching
from noloco_p2p.core.seeds import generator
from noloco_p2p.lab.experiments.allreduce import Times, Wire
from noloco_p2p.lab.experiments.bounds import members
from noloco_p2p.lab.experiments.pull_latency import FOREVER_S, one_stage_manifest
from noloco_p2p.lab.experiments.spec import Figures
from noloco_p2p.sim.links import Link
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.stage import Costs
from noloco_p2p.sim.world import SimPlan, SimSwarm

STEP_S = 1.0
"""Mean time of an inner step of an average node."""
ROUNDS = 12


def slowness(settings: Mapping[str, Any]) -> dict[PeerId, float]:
    """What each node's step times are multiplied by: log-normal of mean 1."""
    wire = Wire(1.0, settings["speed_std"])
    rng = generator(settings["seed"], "speed")
    peers = members(settings["nodes"])
    return {peer: wire.median_s * float(np.exp(wire.sigma * rng.gauss(0.0, 1.0))) for peer in peers}


def swarm(settings: Mapping[str, Any]) -> SimSwarm:
    """A swarm of one stage in which only inner steps take time."""
    m, seed, patient = settings["inner_steps"], settings["seed"], settings["policy"] == "patient"
    steps = Wire(STEP_S, settings["step_std"])
    waits = {"partner_wait_s": FOREVER_S if patient else None, "deadline_s": FOREVER_S}
    plan = SimPlan(
        one_stage_manifest(
            settings["nodes"],
            seed,
            steps=ROUNDS * m,
            # `balanced` leaves the pull of the median out of the clock: all do m steps a round.
            routing="balanced" if patient else "random",
            outer={"inner_steps": m, **waits},
        ),
        (settings["nodes"],),
        seed=seed,
        config=NodeConfig.model_validate(
            {
                "checkpoint": {"every_rounds": None},
                "directory": {"ttl_s": FOREVER_S},
                # A node that has finished stays until the last one has pulled from it.
                "limits": {"linger_s": FOREVER_S},
            }
        ),
        link=Link(0.0),
        costs=Costs(0.0, 0.0, steps.median_s, 0.0, spread=steps.sigma),
        slowness=slowness(settings),
        save_s=0.0,
    )
    return SimSwarm(plan)


def steps_s(settings: Mapping[str, Any], factors: Times, rng: np.random.Generator) -> Times:
    """The seconds of the m inner steps of a round, of each node."""
    drawn = Wire(STEP_S, settings["step_std"]).draw(rng, (int(settings["inner_steps"]), len(factors)))
    return np.asarray(factors * drawn.sum(axis=0))


def barrier(work_s: Times) -> float:
    """Time of all rounds (rows) when every node (column) waits for the last one at the end of each."""
    return float(work_s.max(axis=1).sum())


def in_pairs(work_s: Times, replicas: Sequence[PeerId], seed: int) -> Times:
    """When each node has done all rounds, when it waits at the end of each for its partner of that round only.

    The pairs are those that nodes draw in a run of this seed.
    """
    place = {peer: column for column, peer in enumerate(replicas)}
    at = np.zeros(len(replicas))
    for turn, seconds in enumerate(work_s, start=1):
        mates = matching(seed, turn, replicas)
        done = at + seconds
        at = np.maximum(done, done[[place[mates.get(peer, peer)] for peer in replicas]])
    return at


def figures_of(outcome: Outcome) -> Figures:
    """How long the replicas waited for each other, in shares of their time and in seconds, and how rounds ended."""
    shares, steps, waits = [], 0, list[float]()
    span_s = idle_s = 0.0
    for node in outcome.of_stage(0):
        done = node.trace.of("inner_step")
        rounds = node.trace.of("outer_round")
        mine_s = [event.number("seconds") for event in rounds]
        whole_s = rounds[-1].at_s - (done[0].at_s - done[0].number("busy_s"))
        shares.append(sum(mine_s) / whole_s)
        waits += mine_s
        span_s, idle_s, steps = span_s + whole_s, idle_s + sum(mine_s), steps + len(done)
    return {
        "idle": idle_s / span_s,
        "idle_most": max(shares),
        "steps_per_node_s": steps / span_s,
        "steps_per_clock": steps / (len(shares) * outcome.of_stage(0)[0].step),
        "wait_p50_s": statistics.median(waits),
        "wait_most_s": max(waits),
        "results": dict(sorted(outcome.trace.totals("outer_round", "result").items())),
    }
