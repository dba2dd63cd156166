"""Real nodes in a simulated swarm in which only inner steps take time, and models of how they wait for each other."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.pairing import matching
from noloco_p2p.core.seeds import generator
from noloco_p2p.lab.experiments.allreduce import Times, Wire
from noloco_p2p.lab.experiments.pull_latency import FOREVER_S, number
from noloco_p2p.lab.experiments.spec import Figures
from noloco_p2p.sim.links import Link
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.stage import Costs
from noloco_p2p.sim.world import SimPlan, SimSwarm, peer_id

STEP_S = 1.0
"""Mean time of an inner step of an average node."""
ROUNDS = 12


def peers(given: Mapping[str, Any]) -> list[PeerId]:
    """The replicas of the one stage, sorted."""
    return sorted(peer_id(0, replica) for replica in range(given["nodes"]))


def slowness(given: Mapping[str, Any]) -> dict[PeerId, float]:
    """What each node's step times are multiplied by: log-normal of mean 1."""
    wire = Wire(1.0, given["speed_std"])
    rng = generator(given["seed"], "speed")
    return {peer: wire.median_s * float(np.exp(wire.sigma * rng.gauss(0.0, 1.0))) for peer in peers(given)}


def swarm(given: Mapping[str, Any]) -> SimSwarm:
    """A swarm of one stage in which only inner steps take time."""
    steps, patient = Wire(STEP_S, given["step_std"]), given["policy"] == "patient"
    manifest = RunManifest.model_validate(
        {
            "stages": 1,
            "start_replicas": given["nodes"],
            "seed": given["seed"],
            "steps": ROUNDS * given["inner_steps"],
            "sequence_length": 1,
            "microbatch_size": 1,
            "microbatches_per_step": 1,
            # `balanced` leaves the pull of the median out of the clock: everybody does m steps a round.
            "routing": "balanced" if patient else "random",
            "outer": {
                "inner_steps": given["inner_steps"],
                "partner_wait_s": FOREVER_S if patient else None,
                "deadline_s": FOREVER_S,
            },
            "evaluation": {"every_steps": None, "microbatches": 1},
        }
    )
    plan = SimPlan(
        manifest,
        (given["nodes"],),
        seed=given["seed"],
        config=NodeConfig.model_validate(
            {
                "checkpoint": {"every_rounds": None},
                "directory": {"ttl_s": FOREVER_S},
                # Who has finished stays until the last one has pulled from it.
                "limits": {"linger_s": FOREVER_S},
            }
        ),
        link=Link(0.0),
        costs=Costs(0.0, 0.0, steps.median_s, 0.0, spread=steps.sigma),
        slowness=slowness(given),
        save_s=0.0,
    )
    return SimSwarm(plan)


def steps_s(given: Mapping[str, Any], factors: Times, rng: np.random.Generator) -> Times:
    """The seconds of the m inner steps of a round, of each node."""
    drawn = Wire(STEP_S, given["step_std"]).draw(rng, (int(given["inner_steps"]), len(factors)))
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
    """What the replicas waited for each other, as shares of their time and in seconds, and how their rounds ended."""
    shares, steps, waits = [], 0, list[float]()
    span_s = idle_s = 0.0
    for node in outcome.of_stage(0):
        done = node.trace.of("inner_step")
        rounds = node.trace.of("outer_round")
        mine_s = [number(h.get("seconds")) for h in rounds]
        whole_s = rounds[-1].at_s - (done[0].at_s - number(done[0].get("busy_s")))
        shares.append(sum(mine_s) / whole_s)
        waits += mine_s
        span_s, idle_s, steps = span_s + whole_s, idle_s + sum(mine_s), steps + len(done)
    manifest_steps = outcome.of_stage(0)[0].step
    return {
        "idle": idle_s / span_s,
        "idle_most": max(shares),
        "steps_per_node_s": steps / span_s,
        "steps_per_clock": steps / (len(shares) * manifest_steps),
        "wait_p50_s": statistics.median(waits),
        "wait_most_s": max(waits),
        "results": dict(sorted(outcome.trace.totals("outer_round", "result").items())),
    }
