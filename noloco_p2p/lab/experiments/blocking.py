"""Experiment 2: the share of their time that replicas stand still, with the node's pair pulls and with barriers."""

import statistics
from collections.abc import Sequence

import numpy as np

from noloco_p2p.lab.experiments.allreduce import dice
from noloco_p2p.lab.experiments.markdown_page import Block, Cell, Table, mean_std
from noloco_p2p.lab.experiments.pull_latency import FOREVER_S
from noloco_p2p.lab.experiments.spec import Case, Experiment, Figures, Result, Results
from noloco_p2p.lab.experiments.wait_models import (
    ROUNDS,
    STEP_S,
    barrier,
    figures_of,
    in_pairs,
    peers,
    slowness,
    steps_s,
    swarm,
)
from noloco_p2p.observe.plotting.plots import Curve, Plot

INNER_STEPS = 10
"""m, where it is not varied."""
DRAWS = 100
"""Of each model, with pairs anew each time."""
POLICIES = {"default": "node, default", "patient": "node, waits for its partner"}
"""`default`: as a user gets it. `patient`: the paper's rule, m steps a round, however long the partner takes."""


def runs(quick: bool) -> list[Case]:
    """Numbers of replicas by spread of the steps, then nodes of unequal speed, then longer rounds; large ones first."""
    nodes, seeds = ((4, 16, 64), 1) if quick else ((4, 16, 64, 256), 3)
    grid = [(n, step, 0.0, INNER_STEPS) for n in nodes for step in (0.5, 1.0, 2.0)]
    grid += [(n, 0.5, speed, INNER_STEPS) for n in nodes for speed in (0.25, 0.5) if n < 256 or speed == 0.5]
    grid += [(16, 1.0, 0.0, m) for m in (1, 50)]
    return [
        Case(
            f"{policy}-{n}-{step:g}-{speed:g}-m{m}-{seed}",
            {
                "policy": policy,
                "nodes": n,
                "step_std": step,
                "speed_std": speed,
                "inner_steps": m,
                "seed": seed,
            },
        )
        for n, step, speed, m in sorted(grid, reverse=True)
        for policy in POLICIES
        for seed in range(seeds if n < 256 else 1)
    ]


# --- one case ---------------------------------------------------------------------------------------------------------


def measure(case: Case) -> Figures:
    """Idle share and throughput of the node's code, and of two models with steps from the same distribution."""
    given = case.settings
    outcome = swarm(given).run(limit_s=FOREVER_S)
    rng = dice(given["seed"], "blocking", given["nodes"])
    factors = np.array([slowness(given)[peer] for peer in peers(given)])
    barriers, pairs = list[float](), list[float]()
    for _ in range(DRAWS):
        # One row a round: the seconds of m steps of each node.
        work_s = np.stack([steps_s(given, factors, rng) for _ in range(ROUNDS)])
        busy_s = float(work_s.sum(axis=0).mean())
        barriers.append(1 - busy_s / barrier(work_s))
        pairs.append(1 - busy_s / float(in_pairs(work_s, peers(given), int(rng.integers(2**31))).mean()))
    return {
        "node": figures_of(outcome),
        "barrier_idle": statistics.fmean(barriers),
        "pairs_idle": statistics.fmean(pairs),
    }


# --- the report -------------------------------------------------------------------------------------------------------


def tell(results: Results) -> list[Block]:
    """A table for each question, and plots over the number of replicas."""
    even = [one for one in results if one["speed_std"] == 0 and one["inner_steps"] == INNER_STEPS]
    uneven = [one for one in results if one["speed_std"] > 0]
    lengths = [one for one in results if (one["nodes"], one["step_std"], one["speed_std"]) == (16, 1.0, 0.0)]
    return [
        _headline(results),
        _EXPLAINED,
        _table(even, "### Equal nodes, steps of log-normal length"),
        *(_plot(even, spread) for spread in sorted({float(one["step_std"]) for one in even})),
        _table(uneven, "### Nodes of unequal speed, which they keep"),
        _table(lengths, "### Longer and shorter rounds"),
        _rounds(results),
    ]


_EXPLAINED = (
    "Idle share: of the time from a node's first inner step to the end of its last outer round, what it waited for"
    " others; mean ± standard deviation over seeds. *Barrier* and *pairs* are models on step times drawn from the same"
    " distribution: at the end of each round everybody waits for the last of all, or for its partner of the round,"
    " however long. *Waits for its partner* is the node's own code under that same rule; *default* is the node as it"
    " comes: it waits at most the device time of two inner steps, then takes the newest snapshot that there is, and its"
    " clock follows the median of the others, so that quick nodes do more steps a round and slow ones fewer."
)


def _grouped(results: Results) -> dict[tuple[int, float, float, int], list[Result]]:
    """By (replicas, step std, speed std, m), sorted."""
    groups: dict[tuple[int, float, float, int], list[Result]] = {}
    for one in results:
        key = (int(one["nodes"]), float(one["step_std"]), float(one["speed_std"]), int(one["inner_steps"]))
        groups.setdefault(key, []).append(one)
    return dict(sorted(groups.items(), key=lambda entry: (entry[0][2], entry[0][1], entry[0][3], entry[0][0])))


def _idle(group: Sequence[Result], policy: str) -> list[float]:
    return [100 * one["node"]["idle"] for one in group if one["policy"] == policy]


def _modelled(group: Sequence[Result], name: str) -> list[float]:
    """One figure a seed: both policies carry the same."""
    return [100 * value for value in {one["seed"]: one[name] for one in group}.values()]


def _headline(results: Results) -> str:
    """The largest swarm at each spread, in a line."""
    groups = {key: group for key, group in _grouped(results).items() if key[3] == INNER_STEPS}
    largest = max((key[0] for key in groups), default=0)
    return "\n".join(
        f"- N = {largest}, steps of std/mean {step:g}, speeds of {speed:g}, m = {m}: idle"
        f" {statistics.fmean(_modelled(group, 'barrier_idle')):.1f} % with a barrier,"
        f" {statistics.fmean(_idle(group, 'patient')):.1f} % when each waits for its partner,"
        f" {statistics.fmean(_idle(group, 'default')):.1f} % with the node as it comes."
        for (nodes, step, speed, m), group in groups.items()
        if nodes == largest
    )


def _table(results: Results, caption: str) -> Table:
    rows: list[list[Cell]] = []
    for (nodes, step, speed, m), group in _grouped(results).items():
        own = [mean_std(_idle(group, policy), 3) for policy in POLICIES]
        models = [mean_std(_modelled(group, name), 3) for name in ("pairs_idle", "barrier_idle")]
        rows.append([nodes, f"{step:g}", f"{speed:g}", m, *own, *models])
    columns = ("N", "step std/mean", "speed std/mean", "m", *(f"{title}, %" for title in POLICIES.values()))
    return Table((*columns, "pairs (model), %", "barrier (model), %"), rows, caption)


def _plot(results: Results, step_std: float) -> Plot:
    groups = {key[0]: group for key, group in _grouped(results).items() if key[1] == step_std}
    nodes = sorted(groups)
    curves = [
        Curve(title, nodes, [statistics.fmean(_idle(groups[n], policy)) for n in nodes])
        for policy, title in POLICIES.items()
    ]
    for name, title in (("pairs_idle", "pairs (model)"), ("barrier_idle", "global barrier (model)")):
        idle = [statistics.fmean(_modelled(groups[n], name)) for n in nodes]
        curves.append(Curve(title, nodes, idle, style="dashed"))
    title = f"Time lost waiting, steps of std/mean {step_std:g}, m = {INNER_STEPS}"
    return Plot(f"idle-{step_std:g}", title, ("replicas", "idle share, %"), curves, ("log2", "linear"))


def _rounds(results: Results) -> Table:
    """What the bounded wait and the clock cost: rounds that merged an old snapshot, and inner steps a round."""
    rows: list[list[Cell]] = []
    for (nodes, step, speed, m), group in _grouped(results).items():
        for policy, title in POLICIES.items():
            mine = [one["node"] for one in group if one["policy"] == policy]
            count = sum(sum(one["results"].values()) for one in mine)
            share = [100 * sum(one["results"].get(kind, 0) for one in mine) / count for kind in _KINDS]
            clock = statistics.fmean(one["steps_per_clock"] for one in mine)
            most = max(100 * one["idle_most"] for one in mine)
            rows.append([nodes, f"{step:g}", f"{speed:g}", m, title, *share, clock, most])
    return Table(
        (
            *("N", "step std/mean", "speed std/mean", "m", "policy"),
            *(f"{kind}, %" for kind in _KINDS),
            *("inner steps per step of the clock", "most idle node, %"),
        ),
        rows,
        "### What the shorter waits cost\n\nRounds by result, and how many inner steps a replica did for each step of"
        " the clock that ends the run (below 1: the clock ran ahead of them, and the run ended with fewer):",
    )


_KINDS = ("partner", "stale", "other", "alone")


EXPERIMENT = Experiment(
    name="blocking",
    question="How much of their time do replicas stand still at outer rounds: with pair pulls, with a global barrier?",
    setting=(
        f"One stage, N replicas, {ROUNDS} outer rounds of m inner steps each, matched pairs. An inner step takes"
        f" {STEP_S:g} s in the mean, log-normal with the given std/mean, times the node's own speed, log-normal too and"
        " the same over the whole run. Links take no time: only the waiting for others is left. (The paper's figure 5B"
        " asks the same; it gives no numbers that could stand here.)"
    ),
    limits=(
        "One stage: in a pipeline replicas also wait for microbatches, and a slow node holds its neighbours up (see the"
        " scenario of stragglers of `noloco sim`). The barrier is the best one there can be: it ends at the very moment"
        " at which the last replica arrives. What an old snapshot or a different number of inner steps does to the loss"
        " is not seen here (see `staleness`)."
    ),
    runs=runs,
    measure=measure,
    tell=tell,
)
