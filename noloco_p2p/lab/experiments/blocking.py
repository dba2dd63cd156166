"""How much of their time do replicas wait at outer rounds: with pair pulls, with a global barrier?

One stage, N replicas, {ROUNDS} outer rounds of m inner steps each, matched pairs. An inner step takes 1 s in the mean,
log-normal with the given std/mean, times the node's own speed, log-normal too and the same over the whole run. Links
take no time: only the waiting for others is left. (The paper's figure 5B asks the same; it gives no numbers that could
stand here.)

Limits: One stage: in a pipeline replicas also wait for microbatches, and a slow node holds its neighbours up (see the
scenario of stragglers of `noloco sim`). The barrier is the best one there can be: it ends at the very moment at which
the last replica arrives. What an old snapshot or a different number of inner steps does to the loss is not seen here
(see `staleness`).
"""

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from noloco_p2p.lab.experiments.allreduce import dice
from noloco_p2p.lab.experiments.bounds import members
from noloco_p2p.lab.experiments.markdown_page import Block, Cell, Table, table
from noloco_p2p.lab.experiments.pull_latency import FOREVER_S
from noloco_p2p.lab.experiments.results import group, mean_std
from noloco_p2p.lab.experiments.spec import Case, Experiment, Figures, Result, Results, describe
from noloco_p2p.lab.experiments.wait_models import (
    ROUNDS,
    barrier,
    figures_of,
    in_pairs,
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


def cases(quick: bool) -> list[Case]:
    """Numbers of replicas by spread of the steps, then nodes of unequal speed, then longer rounds; large ones first."""
    nodes, seeds = ((4, 16, 64), 1) if quick else ((4, 16, 64, 256), 3)
    grid = [(n, step, 0.0, INNER_STEPS) for n in nodes for step in (0.5, 1.0, 2.0)]
    grid += [(n, 0.5, speed, INNER_STEPS) for n in nodes for speed in (0.25, 0.5) if n < 256 or speed == 0.5]
    grid += [(16, 1.0, 0.0, m) for m in (1, 50)]
    return [
        Case(
            f"{policy}-{n}-{step:g}-{speed:g}-m{m}-{seed}",
            {"policy": policy, "nodes": n, "step_std": step, "speed_std": speed, "inner_steps": m, "seed": seed},
        )
        for n, step, speed, m in sorted(grid, reverse=True)
        for policy in POLICIES
        for seed in range(seeds if n < 256 else 1)
    ]


def measure(case: Case) -> Figures:
    """Idle share and throughput of the node's code, and of two models with steps from the same distribution."""
    settings, peers = case.settings, members(case.settings["nodes"])
    outcome = swarm(settings).run(limit_s=FOREVER_S)
    rng = dice(settings["seed"], "blocking", settings["nodes"])
    factors = np.array([slowness(settings)[peer] for peer in peers])
    barriers, pairs = list[float](), list[float]()
    for _ in range(DRAWS):
        # One row a round: the seconds of m steps of each node.
        work_s = np.stack([steps_s(settings, factors, rng) for _ in range(ROUNDS)])
        busy_s = float(work_s.sum(axis=0).mean())
        barriers.append(1 - busy_s / barrier(work_s))
        pairs.append(1 - busy_s / float(in_pairs(work_s, peers, int(rng.integers(2**31))).mean()))
    models = {"barrier_idle": statistics.fmean(barriers), "pairs_idle": statistics.fmean(pairs)}
    return {"node": figures_of(outcome), **models}


# --- the report -------------------------------------------------------------------------------------------------------

Setting = tuple[Any, ...]
"""Speed std, step std, m, replicas: the order of the rows."""
Groups = dict[Setting, list[Result]]
SETTING_COLUMNS: dict[str, Callable[[Setting], Cell]] = {
    "N": lambda key: key[3],
    "step std/mean": lambda key: f"{key[1]:g}",
    "speed std/mean": lambda key: f"{key[0]:g}",
    "m": lambda key: key[2],
}


def report(results: Results) -> list[Block]:
    """A table for each question, and plots over the number of replicas."""
    groups: Groups = dict(sorted(group(results, "speed_std", "step_std", "inner_steps", "nodes").items()))
    even = {key: found for key, found in groups.items() if key[0] == 0 and key[2] == INNER_STEPS}
    uneven = {key: found for key, found in groups.items() if key[0] > 0}
    lengths = {key: found for key, found in groups.items() if (key[3], key[1], key[0]) == (16, 1.0, 0.0)}
    return [
        _headline(groups),
        _EXPLAINED,
        _table(even, "### Equal nodes, steps of log-normal length"),
        *(_plot(even, step_std) for step_std in sorted({key[1] for key in even})),
        _table(uneven, "### Nodes of unequal speed, which they keep"),
        _table(lengths, "### Longer and shorter rounds"),
        _rounds(groups),
    ]


_EXPLAINED = (
    "Idle share: of the time from a node's first inner step to the end of its last outer round, what it waited for"
    " others; mean ± standard deviation over seeds. *Barrier* and *pairs* are models on step times drawn from the same"
    " distribution: at the end of each round every node waits for the last of all, or for its partner of the round,"
    " however long. *Waits for its partner* is the node's own code under that same rule; *default* is the node as it"
    " comes: it waits at most the device time of two inner steps, then takes the newest snapshot that there is, and its"
    " clock follows the median of the others, so that quick nodes do more steps a round and slow ones fewer."
)


def _idle(found: Results, name: str) -> list[float]:
    """Per cent, of a policy or of a model; of a model one figure a seed, as both policies carry the same."""
    if name in POLICIES:
        return [100 * one["node"]["idle"] for one in found if one["policy"] == name]
    return [100 * value for value in {one["seed"]: one[name] for one in found}.values()]


def _headline(groups: Groups) -> str:
    """The largest swarm at each spread, in a line."""
    chosen = {key: found for key, found in groups.items() if key[2] == INNER_STEPS}
    largest = max((key[3] for key in chosen), default=0)
    return "\n".join(
        f"- N = {largest}, steps of std/mean {step:g}, speeds of {speed:g}, m = {m}: idle"
        f" {statistics.fmean(_idle(found, 'barrier_idle')):.1f} % with a barrier,"
        f" {statistics.fmean(_idle(found, 'patient')):.1f} % when each waits for its partner,"
        f" {statistics.fmean(_idle(found, 'default')):.1f} % with the node as it comes."
        for (speed, step, m, nodes), found in chosen.items()
        if nodes == largest
    )


def _table(groups: Groups, caption: str) -> Table:
    titles = {**POLICIES, "pairs_idle": "pairs (model)", "barrier_idle": "barrier (model)"}
    columns = SETTING_COLUMNS | {
        f"{title}, %": lambda key, name=name: mean_std(_idle(groups[key], name), 3) for name, title in titles.items()
    }
    return table(columns, groups, caption)


def _plot(groups: Groups, step_std: float) -> Plot:
    found = {key[3]: results for key, results in groups.items() if key[1] == step_std}
    nodes = sorted(found)
    curves = []
    for name, title in {**POLICIES, "pairs_idle": "pairs (model)", "barrier_idle": "global barrier (model)"}.items():
        idle = [statistics.fmean(_idle(found[n], name)) for n in nodes]
        curves.append(Curve(title, nodes, idle, style="line" if name in POLICIES else "dashed"))
    title = f"Time lost waiting, steps of std/mean {step_std:g}, m = {INNER_STEPS}"
    return Plot(f"idle-{step_std:g}", title, ("replicas", "idle share, %"), curves, ("log2", "linear"))


def _rounds(groups: Groups) -> Table:
    """What the bounded wait and the clock cost: rounds that merged an old snapshot, and inner steps a round."""
    rows = {
        (*key, title): [one["node"] for one in found if one["policy"] == policy]
        for key, found in groups.items()
        for policy, title in POLICIES.items()
    }

    def share(kind: str) -> Callable[[Setting], Cell]:
        def cell(row: Setting) -> Cell:
            count = sum(sum(one["results"].values()) for one in rows[row])
            return float(100 * sum(one["results"].get(kind, 0) for one in rows[row]) / count)

        return cell

    columns: dict[str, Callable[[Setting], Cell]] = {
        **SETTING_COLUMNS,
        "policy": lambda row: row[-1],
        **{f"{kind}, %": share(kind) for kind in ("partner", "stale", "other", "alone")},
        "inner steps per step of the clock": lambda row: statistics.fmean(o["steps_per_clock"] for o in rows[row]),
        "most idle node, %": lambda row: max(100 * one["idle_most"] for one in rows[row]),
    }
    caption = (
        "### What the shorter waits cost\n\nRounds by result, and how many inner steps a replica did for each step of"
        " the clock that ends the run (below 1: the clock ran ahead of them, and the run ended with fewer):"
    )
    return table(columns, rows, caption)


EXPERIMENT = Experiment("blocking", describe(globals()), cases, measure, report)
