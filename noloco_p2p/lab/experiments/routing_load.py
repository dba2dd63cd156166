"""What a routing policy does to the replicas that serve it, without weights: load, waiting, throughput.

The simulator's nodes over stages that only cost time. Everything here is virtual time, and nothing of it needs torch.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from statistics import fmean
from types import MappingProxyType
from typing import Any

from noloco_p2p.config import RunManifest
from noloco_p2p.lab.experiments.markdown_page import Block, Cell, table
from noloco_p2p.lab.experiments.results import mean_column, select
from noloco_p2p.lab.experiments.spec import Figures, Results
from noloco_p2p.lab.experiments.training import CONFIG, largest_over_mean
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.stage import Costs
from noloco_p2p.sim.world import SimPlan, SimSwarm

POLICIES = ("fixed", "random", "balanced")
REPLICAS = 8
"""Of each of two stages."""
DEVICES: Mapping[str, tuple[float, Mapping[str, float]]] = MappingProxyType(
    {
        "equal": (0.0, {}),
        "log-normal 0.3": (0.3, {}),
        "one 3 times slower": (0.0, {"s1r0": 3.0}),
    }
)
"""Sigma of the device times, and which replicas are slower by what factor."""
LIMIT_S = 1e6
"""Virtual seconds after which a run is taken to hang."""


def serve(settings: Mapping[str, Any]) -> Figures:
    """A run with `policy`, `devices`, `steps` and `seed`: figures of the last stage and of the whole swarm.

    Of the last stage: `load` (microbatches by replica), `largest_over_mean` of it, `waited_s` per microbatch until it
    is admitted, `waited_share` of the microbatches that waited at all, `busy` answers per microbatch, `inner_steps`
    (fewest and most of any replica). Of the swarm: `microbatches_per_s`, `idle` (share of the node-seconds by cause).
    """
    spread, slowness = DEVICES[settings["devices"]]
    manifest = RunManifest.model_validate(
        {
            "seed": settings["seed"],
            "stages": 2,
            "start_replicas": REPLICAS,
            "routing": settings["policy"],
            "steps": settings["steps"],
            "microbatches_per_step": 2,
            "microbatch_size": 1,
            "sequence_length": 1,
            "outer": {"inner_steps": 10},
            "evaluation": {"every_steps": None, "microbatches": 1},
        }
    )
    both, costs = (REPLICAS, REPLICAS), Costs(spread=spread)
    plan = SimPlan(manifest, both, settings["seed"], CONFIG, costs=costs, slowness=slowness)
    return figures(SimSwarm(plan).run(LIMIT_S))


def figures(outcome: Outcome) -> Figures:
    """See `serve`."""
    servers = outcome.of_stage(1)
    load = {node.peer: node.microbatches["done"] for node in servers}
    done = sum(load.values())
    spans = [event for node in servers for event in node.trace.of("span") if event.get("name") == "wait"]
    waits = [event.number("seconds") for event in spans]
    began = min(event.at_s for event in outcome.trace.of("state") if event.get("state") == "training")
    took_s = max(event.at_s for event in outcome.trace.of("inner_step")) - began
    idle: dict[str, float] = defaultdict(float)
    for event in outcome.trace.of("idle"):
        idle[str(event.get("cause"))] += event.number("seconds") / (took_s * len(outcome.processes))
    return {
        "load": load,
        "largest_over_mean": largest_over_mean(list(load.values())),
        "waited_s": sum(waits) / done,
        "waited_share": sum(seconds > 0 for seconds in waits) / done,
        "busy": sum(node.trace.totals("busy", "direction")["in"] for node in servers) / done,
        "microbatches_per_s": done / took_s,
        "idle": dict(sorted(idle.items())),
        "inner_steps": [min(node.inner_steps for node in servers), max(node.inner_steps for node in servers)],
    }


def report(results: Results) -> list[Block]:
    """A table of all, and in words the throughput of each policy beside fixed routes."""
    groups = {(d, p): select(results, policy=p, devices=d) for d in DEVICES for p in POLICIES}

    columns: dict[str, Callable[[tuple[str, str]], Cell]] = {
        "devices": lambda row: row[0],
        "routes": lambda row: row[1],
        "microbatches / s": mean_column(groups, "microbatches_per_s"),
        "load, largest / mean": mean_column(groups, "largest_over_mean"),
        "waited for admission, %": mean_column(groups, lambda one: 100 * one["waited_share"], 3),
        "mean wait, ms": mean_column(groups, lambda one: 1000 * one["waited_s"], 3),
        "Busy per microbatch": mean_column(groups, "busy", 2),
        "idle, %": mean_column(groups, lambda one: 100 * sum(one["idle"].values()), 3),
        "fewest inner steps": mean_column(groups, lambda one: one["inner_steps"][0]),
    }
    caption = (
        f"Stages that only cost time, with outer rounds: {REPLICAS} replicas of each of two stages, two microbatches "
        "for each origin and step, forward 10 ms, backward 20 ms, links 1 ms. Waits are for admission at stage 1; "
        "seconds are virtual. Mean ± standard deviation over seeds."
    )
    blocks: list[Block] = [table(columns, groups, caption)]
    for devices in DEVICES:
        rate = {p: fmean(one["microbatches_per_s"] for one in groups[devices, p]) for p in POLICIES}
        beside = ", ".join(f"{policy} {100 * rate[policy] / rate['fixed']:.0f} %" for policy in POLICIES[1:])
        blocks.append(f"Throughput beside fixed routes, devices {devices}: {beside}.")
    return blocks
