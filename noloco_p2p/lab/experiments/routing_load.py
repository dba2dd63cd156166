"""What a routing policy does to the replicas that serve it, without weights: load, waiting, throughput.

The simulator's nodes over stages that only cost time. Everything here is virtual time, and nothing of it needs torch.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from types import MappingProxyType
from typing import Any

from noloco_p2p.config import RunManifest
from noloco_p2p.lab.experiments.markdown_page import Block, Table, mean_std
from noloco_p2p.lab.experiments.spec import Figures, Result, Results
from noloco_p2p.lab.experiments.training import CONFIG
from noloco_p2p.sim.process import Outcome, SimProcess
from noloco_p2p.sim.stage import Costs
from noloco_p2p.sim.telemetry import TraceEvent
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
"""Sigma of the device times, and who is slow by how much."""
LIMIT_S = 1e6
"""Virtual seconds after which a run is taken to hang."""


def serve(settings: Mapping[str, Any]) -> Figures:
    """A run with `policy`, `devices`, `steps` and `seed`: figures of the last stage's doors and of the whole swarm.

    `load` (microbatches by replica), `largest_over_mean` of it, `waited_s` per microbatch at a door, `waited_share` of
    the microbatches that waited there at all, `busy` answers per microbatch, `microbatches_per_s`, `idle` (share of
    the node-seconds by cause), `inner_steps` (fewest and most of any replica).
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
    doors = outcome.of_stage(1)
    load = {node.peer: node.microbatches["done"] for node in doors}
    done = sum(load.values())
    waits = [_number(one, "seconds") for one in _told(doors, "span") if one.get("name") == "wait"]
    began = min(one.at_s for one in outcome.trace.of("state") if one.get("state") == "training")
    took_s = max(one.at_s for one in outcome.trace.of("inner_step")) - began
    idle: dict[str, float] = defaultdict(float)
    for one in outcome.trace.of("idle"):
        idle[str(one.get("cause"))] += _number(one, "seconds") / (took_s * len(outcome.processes))
    return {
        "load": load,
        "largest_over_mean": largest_over_mean(list(load.values())),
        "waited_s": sum(waits) / done,
        "waited_share": sum(seconds > 0 for seconds in waits) / done,
        "busy": sum(one.get("direction") == "in" for one in _told(doors, "busy")) / done,
        "microbatches_per_s": done / took_s,
        "idle": dict(sorted(idle.items())),
        "inner_steps": [min(one.inner_steps for one in doors), max(one.inner_steps for one in doors)],
    }


def largest_over_mean(load: Sequence[int]) -> float:
    """1.0 where everybody has as much to do."""
    return max(load) / fmean(load)


def _told(nodes: Sequence[SimProcess], kind: str) -> list[TraceEvent]:
    return [one for node in nodes for one in node.trace.of(kind)]


def _number(one: TraceEvent, name: str) -> float:
    return float(str(one.get(name)))


# --- the report -----------------------------------------------------------------------------------------------------


def of(results: Results, **wanted: str | float) -> list[Result]:
    """Those with these settings, by seed."""
    found = [one for one in results if all(one.case.settings.get(name) == value for name, value in wanted.items())]
    return sorted(found, key=lambda one: int(one["seed"]))


COLUMNS = (
    "devices",
    "routes",
    "microbatches / s",
    "load, largest / mean",
    "waited at a door, %",
    "mean wait, ms",
    "Busy per microbatch",
    "idle, %",
    "fewest inner steps",
)


def tell(results: Results) -> list[Block]:
    """A table of all, and in words the throughput of each policy beside fixed routes."""
    rows = [
        _row(devices, policy, of(results, policy=policy, devices=devices)) for devices in DEVICES for policy in POLICIES
    ]
    caption = (
        f"Stages that only cost time, with outer rounds: {REPLICAS} replicas of each of two stages, two microbatches "
        "for each origin and step, forward 10 ms, backward 20 ms, links 1 ms. Doors are those of stage 1; the seconds "
        "are virtual. Mean ± standard deviation over seeds."
    )
    told: list[Block] = [Table(COLUMNS, rows, caption)]
    for devices in DEVICES:
        rate = {p: fmean(one["microbatches_per_s"] for one in of(results, policy=p, devices=devices)) for p in POLICIES}
        beside = ", ".join(f"{policy} {100 * rate[policy] / rate['fixed']:.0f} %" for policy in POLICIES[1:])
        told.append(f"Throughput beside fixed routes, devices {devices}: {beside}.")
    return told


def _row(devices: str, policy: str, found: Results) -> tuple[str, ...]:
    return (
        devices,
        policy,
        mean_std([one["microbatches_per_s"] for one in found]),
        mean_std([one["largest_over_mean"] for one in found]),
        mean_std([100 * one["waited_share"] for one in found], 3),
        mean_std([1000 * one["waited_s"] for one in found], 3),
        mean_std([one["busy"] for one in found], 2),
        mean_std([100 * sum(one["idle"].values()) for one in found], 3),
        mean_std([one["inner_steps"][0] for one in found]),
    )
