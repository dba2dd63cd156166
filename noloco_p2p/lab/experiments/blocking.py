"""What share of their time do replicas wait at outer rounds, with pair pulls and with a global barrier?

One stage, N replicas, {ROUNDS} outer rounds of m inner steps each, matched pairs. An inner step takes 1 s on average,
log-normal with the given std/mean, times the node's own speed, which is also log-normal and constant over the run.
Links take no time, so only the waiting for others remains. (The paper's figure 5B asks the same, but gives no numbers
to compare with.)

Idle share: the part of the time from a node's first inner step to the end of its last outer round in which it waited
for others; mean ± standard deviation over seeds. *Barrier* and *pairs* are models with step times from the same
distribution: at the end of each round every node waits for the last of all nodes, or for its partner of the round,
without a limit. *Waits for its partner* is the node's own code under the same rule. *default* is the node with default
settings except that `outer.overlap`, under which nobody waits, is off: it waits at most for the device time of two
inner steps and then takes the newest available snapshot. Its clock follows the median of the others, so fast nodes do
more steps per round and slow ones fewer.

Limits: There is only one stage. In a pipeline replicas also wait for microbatches, and a slow node holds up its
neighbours (see the stragglers scenario of `noloco sim`). The barrier is the best possible one: it ends the moment the
last replica arrives. The effect of an old snapshot or of a different number of inner steps on the loss is not
measured here (see `staleness`).
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.seeds import generator
from noloco_p2p.lab.experiments.allreduce import Times, Wire, dice
from noloco_p2p.lab.experiments.bounds import members, partners
from noloco_p2p.lab.experiments.results import Columns, group, mean_std, table, total_shares
from noloco_p2p.lab.experiments.spec import Block, Case, Cell, Figures, Results, Table
from noloco_p2p.lab.experiments.training import FOREVER_S, timing_swarm
from noloco_p2p.observe.plotting.plots import Curve, Plot
from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.links import Link
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.world import SimSwarm

STEP_S = 1.0
"""Mean time of an inner step of an average node."""
ROUNDS = 12
INNER_STEPS = 10
"""m, unless it is varied."""
DRAWS = 100
"""Draws per model, with new pairs each time."""
POLICIES = {"default": "node, default", "patient": "node, waits for its partner"}
"""`default`: default settings without overlap. `patient`: the paper's rule, m steps a round, however long it takes."""


def cases(quick: bool) -> list[Case]:
    """By number of replicas and spread of the steps, then nodes of unequal speed, then other round lengths."""
    nodes, seeds = ((4, 16, 64), 1) if quick else ((4, 16, 64, 256), 3)
    grid = [(n, step, 0.0, INNER_STEPS) for n in nodes for step in (0.5, 1.0, 2.0)]
    grid += [(n, 0.5, speed, INNER_STEPS) for n in nodes for speed in (0.25, 0.5) if n < 256 or speed == 0.5]
    grid += [(16, 1.0, 0.0, m) for m in (1, 50)]
    name = "{policy}-{nodes}-{step_std:g}-{speed_std:g}-m{inner_steps}-{seed}"
    return [
        Case.named(name, policy=policy, nodes=n, step_std=step, speed_std=speed, inner_steps=m, seed=seed)
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
        # One row per round: the seconds of m steps of each node.
        work_s = np.stack([steps_s(settings, factors, rng) for _ in range(ROUNDS)])
        busy_s = float(work_s.sum(axis=0).mean())
        barriers.append(1 - busy_s / barrier(work_s))
        pairs.append(1 - busy_s / float(in_pairs(work_s, peers, int(rng.integers(2**31))).mean()))
    models = {"barrier_idle": statistics.fmean(barriers), "pairs_idle": statistics.fmean(pairs)}
    return {"node": figures_of(outcome), **models}


def slowness(settings: Mapping[str, Any]) -> dict[PeerId, float]:
    """Factor on each node's step times: log-normal with mean 1."""
    wire = Wire(1.0, settings["speed_std"])
    rng = generator(settings["seed"], "speed")
    peers = members(settings["nodes"])
    return {peer: wire.median_s * float(np.exp(wire.sigma * rng.gauss(0.0, 1.0))) for peer in peers}


def swarm(settings: Mapping[str, Any]) -> SimSwarm:
    """A swarm of one stage in which only inner steps take time."""
    m, seed, patient = settings["inner_steps"], settings["seed"], settings["policy"] == "patient"
    steps = Wire(STEP_S, settings["step_std"])
    waits = {"partner_wait_s": FOREVER_S if patient else None, "deadline_s": FOREVER_S}
    # Under `balanced` the clock does not follow the median: all nodes do m steps per round.
    routing, outer = "balanced" if patient else "random", {"inner_steps": m, **waits}
    run = {"steps": ROUNDS * m, "routing": routing, "outer": outer}
    costs = Costs(0.0, 0.0, steps.median_s, 0.0, spread=steps.sigma)
    return timing_swarm((settings["nodes"],), seed, run, link=Link(0.0), costs=costs, slowness=slowness(settings))


def steps_s(settings: Mapping[str, Any], factors: Times, rng: np.random.Generator) -> Times:
    """Seconds of the m inner steps of a round for each node."""
    drawn = Wire(STEP_S, settings["step_std"]).draw(rng, (int(settings["inner_steps"]), len(factors)))
    return np.asarray(factors * drawn.sum(axis=0))


def barrier(work_s: Times) -> float:
    """Time of all rounds (rows) if every node (column) waits for the last one at the end of each."""
    return float(work_s.max(axis=1).sum())


def in_pairs(work_s: Times, replicas: Sequence[PeerId], seed: int) -> Times:
    """When each node has done all rounds, if at the end of each it waits only for its partner of that round.

    The pairs are those that nodes draw in a run with this seed.
    """
    at = np.zeros(len(replicas))
    for turn, seconds in enumerate(work_s, start=1):
        done = at + seconds
        at = np.maximum(done, done[partners(seed, turn, replicas)])
    return at


def figures_of(outcome: Outcome) -> Figures:
    """How long the replicas waited for each other, as a share of their time, and how rounds ended."""
    nodes, spans_s, waits, steps = outcome.of_stage(0), list[float](), list[list[float]](), 0
    for node in nodes:
        done, rounds = node.trace.of("inner_step"), node.trace.of("outer_round")
        spans_s.append(rounds[-1].at_s - (done[0].at_s - done[0].number("busy_s")))
        waits.append([event.number("seconds") for event in rounds])
        steps += len(done)
    return {
        "idle": sum(map(sum, waits)) / sum(spans_s),
        "idle_most": max(sum(mine) / span_s for mine, span_s in zip(waits, spans_s, strict=True)),
        "steps_per_clock": steps / (len(nodes) * nodes[0].step),
        "results": dict(sorted(outcome.trace.totals("outer_round", "result").items())),
    }


# --- the report -------------------------------------------------------------------------------------------------------

Groups = Sequence[Results]
"""Results that differ in policy and seed."""
ALL = {**POLICIES, "pairs_idle": "pairs (model)", "barrier_idle": "barrier (model)"}
"""What the report compares: the policies and the models."""
SETTING_COLUMNS: Columns = {
    "N": "nodes",
    "step std/mean": lambda found: f"{found[0]['step_std']:g}",
    "speed std/mean": lambda found: f"{found[0]['speed_std']:g}",
    "m": "inner_steps",
}


def report(results: Results) -> list[Block]:
    """The answer, a table per question, and plots over the number of replicas."""
    groups = dict(sorted(group(results, "speed_std", "step_std", "inner_steps", "nodes").items()))
    even = {(key[1], key[3]): found for key, found in groups.items() if key[0] == 0 and key[2] == INNER_STEPS}
    uneven = [found for key, found in groups.items() if key[0] > 0]
    lengths = [found for key, found in groups.items() if (key[3], key[1], key[0]) == (16, 1.0, 0.0)]
    return [
        _answer(even),
        _table(list(even.values()), "### Equal nodes, steps of log-normal length"),
        *(_plot(even, step_std) for step_std in sorted({step_std for step_std, _ in even})),
        _table(uneven, "### Nodes of unequal, constant speed"),
        _table(lengths, "### Longer and shorter rounds"),
        _rounds(list(groups.values())),
    ]


def _idle(found: Results, name: str) -> list[float]:
    """Idle share of a policy or model in per cent; a model's once per seed, because both policies carry the same."""
    if name in POLICIES:
        return [100 * one["node"]["idle"] for one in found if one["policy"] == name]
    return [100 * value for value in {one["seed"]: one[name] for one in found}.values()]


def _answer(even: Mapping[tuple[float, int], Results]) -> str:
    """For the largest swarm of equal nodes with the noisiest steps."""
    step_std, nodes = max(even, key=lambda key: (key[1], key[0]))
    idle = {name: f"{statistics.fmean(_idle(even[step_std, nodes], name)):.1f} %" for name in ALL}
    return (
        f"With {nodes} equal replicas and steps of std/mean {step_std:g}, a replica waits {idle['barrier_idle']} of its"
        f" time at a barrier for all, {idle['patient']} if it waits for its partner, and {idle['default']} with the"
        " node's short wait."
    )


def _table(groups: Groups, caption: str) -> Table:
    def idle(name: str) -> Callable[[Results], Cell]:
        return lambda found: mean_std(_idle(found, name), 3)

    return table({**SETTING_COLUMNS, **{f"{title}, %": idle(name) for name, title in ALL.items()}}, groups, caption)


def _plot(groups: Mapping[tuple[float, int], Results], step_std: float) -> Plot:
    shown = {nodes: found for (spread, nodes), found in groups.items() if spread == step_std}
    curves = [
        Curve(
            title,
            [(nodes, statistics.fmean(_idle(found, name))) for nodes, found in shown.items()],
            "line" if name in POLICIES else "dashed",
        )
        for name, title in ALL.items()
    ]
    title = f"Time lost waiting, steps of std/mean {step_std:g}, m = {INNER_STEPS}"
    return Plot(f"idle-{step_std:g}", title, ("replicas", "idle share, %"), curves, ("log2", "linear"))


def _rounds(groups: Groups) -> Table:
    """What the bounded wait and the clock cost: rounds that merged an old snapshot, and inner steps per round."""

    def share(kind: str) -> Callable[[Results], Cell]:
        return lambda found: 100 * total_shares(found, lambda one: one["node"]["results"]).get(kind, 0.0)

    columns: Columns = {
        **SETTING_COLUMNS,
        "policy": lambda found: POLICIES[found[0]["policy"]],
        **{f"{kind}, %": share(kind) for kind in ("partner", "stale", "other", "alone")},
        "inner steps per step of the clock": lambda found: statistics.fmean(
            o["node"]["steps_per_clock"] for o in found
        ),
        "most idle node, %": lambda found: max(100 * one["node"]["idle_most"] for one in found),
    }
    caption = (
        "### What the shorter waits cost\n\nRounds by result, and how many inner steps a replica did for each step of"
        " the clock that ends the run (below 1: the clock ran ahead of them, and the run ended with fewer):"
    )
    return table(columns, [found for both in groups for _, found in group(both, "policy").items()], caption)
