"""One outer round of real nodes in a simulated swarm in which nothing else takes time, and how long it took."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.lab.experiments.allreduce import Wire
from noloco_p2p.lab.experiments.spec import Figures
from noloco_p2p.sim.links import Access, Link, MessageSizes, Uniform
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.stage import Costs
from noloco_p2p.sim.world import SimPlan, SimSwarm

LATENCY_S = 0.010
"""Mean one-way latency of every link."""
VECTOR_BYTES = 12_500_000
"""One vector of a stage: Δ, or φ."""
BYTES_PER_S = 12_500_000.0
"""Each way of a node's access in the bandwidth-bound regime: 100 Mbit/s, so that a vector takes 100 mean latencies."""
FOREVER_S = 1e5


def wire_of(regime: str, std_over_mean: float) -> Wire:
    """The links of a regime."""
    return Wire(LATENCY_S, std_over_mean, VECTOR_BYTES / BYTES_PER_S if regime == "bandwidth" else 0.0)


def one_stage_manifest(nodes: int, seed: int, **changes: object) -> RunManifest:
    """A run of one stage with as little to compute as there can be; `changes` are fields of RunManifest."""
    least = {"sequence_length": 1, "microbatch_size": 1, "microbatches_per_step": 1}
    evaluation = {"every_steps": None, "microbatches": 1}
    fields = {"stages": 1, "start_replicas": nodes, "seed": seed, **least, "evaluation": evaluation}
    return RunManifest.model_validate(fields | changes)


def pull_round(settings: Mapping[str, Any], seed: int) -> Outcome:
    """A swarm of one stage whose computing takes no time, over one outer round, which all begin together."""
    wire, bound = wire_of(settings["regime"], settings["std_over_mean"]), settings["regime"] == "bandwidth"
    waits = {"partner_wait_s": FOREVER_S, "deadline_s": FOREVER_S}
    outer = {"inner_steps": 1, "pairing": settings["pairing"], **waits}
    plan = SimPlan(
        one_stage_manifest(settings["nodes"], seed, steps=1, outer=outer),
        (settings["nodes"],),
        seed=seed,
        config=NodeConfig.model_validate(
            {"checkpoint": {"every_rounds": None}, "directory": {"ttl_s": FOREVER_S, "refresh_s": FOREVER_S}}
        ),
        geography=Uniform(Link(wire.median_s, wire.sigma), Access(BYTES_PER_S, BYTES_PER_S) if bound else Access()),
        # A snapshot is two vectors, φ and Δ. In the latency-bound regime they weigh nothing.
        sizes=MessageSizes(0, 0, (2 * VECTOR_BYTES if bound else 0,), (0,)),
        costs=Costs(0.0, 0.0, 0.0, 0.0),
        save_s=0.0,
    )
    return SimSwarm(plan).run(limit_s=FOREVER_S)


def figures_of(worlds: Sequence[Outcome]) -> Figures:
    """How long a round took: by replica, by pair (the later of two that pulled from each other), the swarm's last."""
    took: dict[str, list[float]] = {"replica": [], "pair": [], "last": []}
    results: Counter[str] = Counter()
    apart: list[float] = []
    for world in worlds:
        rounds = world.trace.of("outer_round")
        results += world.trace.totals("outer_round", "result")
        mine = {event.peer: event.number("seconds") for event in rounds}
        partner = {event.peer: str(event.get("partner")) for event in rounds}
        began = [event.at_s - mine[event.peer] for event in rounds]
        apart.append(max(began) - min(began))
        took["replica"] += mine.values()
        took["pair"] += [max(mine[a], mine[b]) for a, b in partner.items() if a < b and partner.get(b) == a]
        took["last"].append(max(mine.values()))
    summaries = {name: summary(sample) if sample else None for name, sample in took.items()}
    return summaries | {"results": dict(sorted(results.items())), "begun_apart_s": max(apart)}


def summary(sample: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation, seconds; 0 for a sample of one."""
    std = statistics.stdev(sample) if len(sample) > 1 else 0.0
    return {"mean_s": statistics.fmean(sample), "std_s": std, "count": len(sample)}
