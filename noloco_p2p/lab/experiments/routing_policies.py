"""Do microbatches that take different routes at every step hold the replicas together, with and without outer rounds,
and what do they cost in loss, load and waiting?

Byte-level Llamas of two layers (hidden 32, 64 and 128) on the text of the standard library, one layer per stage,
{REPLICAS} replicas of each stage; the node's own code in the simulator over real torch stages, device times log-normal
(σ {JITTER}). Microbatches of 8 × 64 tokens, one per origin and inner step, m = {ROUND_STEPS}, two peak learning rates.
`fixed`: replica i always sends to replica i; `random`: to any replica that has room; `weighted`: likewise, with odds
and loads by measured speed; `balanced`: by a permutation drawn for each step. Validation always goes from replica i to
replica i. Then the same policies over stages that only cost time, on equal and unequal devices: {REPLICAS} replicas of
each of two stages, two microbatches per origin and step, forward 10 ms, backward 20 ms, links 1 ms, virtual seconds.

Mean ± standard deviation over seeds. Losses are in nats per token; the first is the mean over the replicas. The std of
the weights is taken over the replicas of a stage, on θ before the merge if there is one, as the mean over the last half
of the measurements that all runs of the arm have. Load and waits for admission (mean over time) are those of stage 1.

Limits: Models of two layers and a few hundred steps of 512 tokens stand for 125M to 1.3B parameters and 25,000 steps:
signs can be compared, magnitudes hardly. Without outer rounds fixed routes are eight small models that never meet; a
run this short does not show what each would lose by seeing an eighth of the data. Under `random` and `fixed` the order
of arrival decides which replica takes how many inner steps, and the clock follows the median: tokens differ by a few
per cent, and part of the spread is that replicas of stage 1 have taken unequal numbers of inner steps. A full replica
says Busy, which evens out the load of `random`: draws without that would be less even. Device and link times are
assumed, not measured.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import exp
from statistics import fmean
from typing import Any

from noloco_p2p.lab.experiments.results import Columns, above, mean_curve, mean_std, over, select, table, value_range
from noloco_p2p.lab.experiments.spec import Block, Case, Cell, Figures, Result, Results, Table, published
from noloco_p2p.lab.experiments.training import CONFIG, FOREVER_S, TrainingPlan, small_manifest, timing_swarm
from noloco_p2p.observe.plotting.plots import Plot
from noloco_p2p.observe.plotting.svg import LineStyle
from noloco_p2p.sim.device import Costs

POLICIES = ("fixed", "random", "weighted", "balanced")
REPLICAS = 8
"""Replicas of each of the two stages."""
DEVICES = {"equal": (0.0, 1.0), "log-normal 0.3": (0.3, 1.0), "one 3 times slower": (0.0, 3.0)}
"""(sigma of the device times, factor on those of the first replica of the last stage)."""
PAIRINGS = {"without": "none", "with": "matched"}
"""Outer rounds: the name in a case, and the value in the manifest."""
HIGH_RATES = [{"rounds": rounds, "rate": 3e-3, "hidden": size} for rounds, size in product(PAIRINGS, (64, 32, 128))]
ARMS: Sequence[Mapping[str, Any]] = ({"rounds": "without", "rate": 1e-3, "hidden": 64}, *HIGH_RATES)
"""Outer rounds, hidden size, and peak learning rate: it makes replicas that never meet drift apart slowly or fast."""
PLOTTED = [arm for arm in HIGH_RATES if arm["hidden"] == 64]
ROUND_STEPS = 10
"""m; without outer rounds, the number of inner steps between two measurements of the spread."""
JITTER = 0.2
"""Sigma of the log-normal device times when real weights are trained."""
STAGES = (0, 1)


def cases(quick: bool) -> list[Case]:
    """Every policy with and without outer rounds, then every policy on every kind of devices; same seeds for all."""
    seeds, steps = (range(1, 2), 60) if quick else (range(1, 4), 200)
    train, serve = {"kind": "train", "replicas": REPLICAS, "steps": steps}, {"kind": "serve", "steps": steps // 2}
    cases = []
    for seed, arm, policy in product(seeds, ARMS, POLICIES):
        name = "{policy}-{rounds}-outer-{rate:g}-h{hidden}-{seed}"
        cases.append(Case.named(name, **train, **arm, policy=policy, seed=seed))
    for seed, devices, policy in product(seeds, DEVICES, POLICIES):
        settings = {**serve, "policy": policy, "devices": devices, "seed": seed}
        cases.append(Case(f"{policy}-{devices.replace(' ', '-')}-{seed}", settings))
    return cases


def measure(case: Case) -> Figures:
    """One run of stages that only cost time, or of real weights, with `spread`: (inner step, std) by stage."""
    from noloco_p2p.lab.experiments.real_swarm import train

    settings = case.settings
    if settings["kind"] == "serve":
        return serve(settings)
    manifest = small_manifest(
        settings["hidden"],
        len(STAGES),
        routing=settings["policy"],
        steps=settings["steps"],
        inner={"peak_learning_rate": settings["rate"]},
        outer={"inner_steps": ROUND_STEPS, "pairing": PAIRINGS[settings["rounds"]]},
    )
    plan = TrainingPlan(manifest, (settings["replicas"],) * 2, settings["seed"], costs=Costs(spread=JITTER))
    summary = train(plan)
    spread = [[(one.step, one.std) for one in summary.finite_spreads(stage)] for stage in STAGES]
    return summary.figures("validation_loss", "merged_loss", "tokens", "uneven", "waiting") | {"spread": spread}


def serve(settings: Mapping[str, Any]) -> Figures:
    """A run with `policy`, `devices`, `steps` and `seed`: figures of the last stage and of the whole swarm.

    For the last stage: `load` (microbatches by replica), its `largest_over_mean`, `waited_s` per microbatch until
    admission, `waited_share` of the microbatches that waited at all, `busy` answers per microbatch, `inner_steps`
    (fewest and most of any replica). For the swarm: `microbatches_per_s`, `idle` (share of the node-seconds by cause).
    """
    (spread, factor), both, seed = DEVICES[settings["devices"]], (REPLICAS, REPLICAS), settings["seed"]
    run = {"routing": settings["policy"], "steps": settings["steps"], "microbatches_per_step": 2}
    world = {"config": CONFIG, "costs": Costs(spread=spread), "slowness": {"s1r0": factor}}
    outcome = timing_swarm(both, seed, run | {"outer": {"inner_steps": 10}}, **world).run(FOREVER_S)
    servers, trace = outcome.of_stage(1), outcome.trace
    load = {node.peer: node.microbatches["done"] for node in servers}
    done = sum(load.values())
    spans = [event for node in servers for event in node.trace.of("span") if event.get("name") == "wait"]
    waits = [event.number("seconds") for event in spans]
    began = min(event.at_s for event in trace.of("state") if event.get("state") == "training")
    took_s = max(event.at_s for event in trace.of("inner_step")) - began
    idle: dict[str, float] = defaultdict(float)
    for event in trace.of("idle"):
        idle[str(event.get("cause"))] += event.number("seconds") / (took_s * len(outcome.processes))
    steps = [node.inner_steps for node in servers]
    return {
        "load": load,
        "largest_over_mean": max(load.values()) / fmean(load.values()),
        "waited_s": sum(waits) / done,
        "waited_share": sum(seconds > 0 for seconds in waits) / done,
        "busy": sum(node.trace.totals("busy", "direction")["in"] for node in servers) / done,
        "microbatches_per_s": done / took_s,
        "idle": dict(sorted(idle.items())),
        "inner_steps": [min(steps), max(steps)],
    }


# --- the report -------------------------------------------------------------------------------------------------------


def late_std(result: Result, stage: int, count: int) -> float | None:
    """Weight std over a stage's replicas, mean over the last half of the first `count` measurements; None if none."""
    series = [std for _, std in result["spread"][stage]][:count]
    return fmean(series[len(series) // 2 :]) if series else None


def common_count(results: Results, arm: Mapping[str, Any]) -> int:
    """How many measurements of the spread all runs of an arm have. The inner steps of slow replicas limit this."""
    return min(len(series) for one in select(results, **arm) for series in one["spread"])


def changes(results: Results, policy: str, arm: Mapping[str, Any]) -> dict[str, list[float]]:
    """Changes against fixed routes with the same seed, in per cent: std by stage, mean of both stages, perplexity."""
    found: dict[str, list[float]] = {"std 0": [], "std 1": [], "std": [], "perplexity": []}
    count = common_count(results, arm)
    mine, theirs = (select(results, policy=one, **arm) for one in (policy, "fixed"))
    for one, fixed in zip(mine, theirs, strict=True):
        pairs = [(late_std(one, stage, count), late_std(fixed, stage, count)) for stage in STAGES]
        stds = [100 * (std / before - 1) for std, before in pairs if std is not None and before]
        if len(stds) == len(STAGES):
            for name, value in zip(("std 0", "std 1", "std"), (*stds, fmean(stds)), strict=True):
                found[name].append(value)
    found["perplexity"] = [100 * (exp(gap) - 1) for gap in above(mine, theirs, "validation_loss")]
    return found


def report(results: Results) -> list[Block]:
    """The answer, real weights compared with the paper's figures, then load and waiting."""
    trained = select(results, kind="train")
    return [
        _answer(trained),
        "### Spread and loss",
        _weights(trained),
        _changes(trained),
        *(_spread_plot(trained, stage) for stage in STAGES),
        "### Load, waiting and throughput",
        _served(select(results, kind="serve")),
    ]


def _answer(results: Results) -> str:
    """What random routes change: the range over sizes and rates."""

    def change(rounds: str) -> str:
        both = [changes(results, "random", arm) for arm in ARMS if arm["rounds"] == rounds]
        std, perplexity = ([fmean(one[name]) for one in both if one[name]] for name in ("std", "perplexity"))
        return f"the std of the weights by {value_range(std)} % and the perplexity by {value_range(perplexity)} %"

    return (
        f"Compared with fixed routes, random ones change {change('without')} without outer rounds, and"
        f" {change('with')} with them."
    )


SETTING_COLUMNS: Columns = {
    "hidden": "hidden",
    "peak rate": lambda found: f"{found[0]['rate']:g}",
    "outer rounds": lambda found: found[0].case.settings["rounds"],
    "routes": "policy",
}


def _groups(results: Results, policies: Sequence[str]) -> list[list[Result]]:
    return [select(results, policy=policy, **arm) for arm, policy in product(ARMS, policies)]


def _arm(result: Result) -> dict[str, Any]:
    return {name: result.case.settings[name] for name in ARMS[0]}


def _weights(results: Results) -> Table:
    def std(stage: int) -> Callable[[Result], float | None]:
        return lambda one: late_std(one, stage, common_count(results, _arm(one)))

    columns: Columns = {
        **SETTING_COLUMNS,
        "validation loss": over("validation_loss"),
        "loss of the merged model": over("merged_loss"),
        "std stage 0": over(std(0), 3),
        "std stage 1": over(std(1), 3),
        "tokens": over("tokens", 6),
        "load, largest / mean": over(lambda one: one["uneven"][1]),
        "waiting": over(lambda one: one["waiting"][1], 2),
    }
    return table(columns, _groups(results, POLICIES), "Loss, spread, load and waiting.")


def _changes(results: Results) -> Table:
    def change(name: str) -> Callable[[Results], Cell]:
        return lambda found: mean_std(changes(results, found[0]["policy"], _arm(found[0]))[name], 3)

    columns: Columns = {
        **SETTING_COLUMNS,
        "std stage 0, %": change("std 0"),
        "std stage 1, %": change("std 1"),
        "std, mean of both, %": change("std"),
        "perplexity, %": change("perplexity"),
    }
    paper = published()["random_routing_without_outer"]
    most = f"at most +{100 * paper['perplexity_increase_at_most']:.0f}"
    stds = ", ".join(f"{100 * value:.0f} ({size})" for size, value in paper["weight_std_change"].items())
    theirs = ("paper", "–", "without", "a permutation each time", "–", "–", stds, most)
    return table(columns, _groups(results, POLICIES[1:]), "Change against fixed routes with the same seed.", theirs)


def _spread_plot(results: Results, stage: int) -> Plot:
    """The mean over the seeds, at every step at which all of them were measured, for the higher rate and hidden 64."""
    curves = []
    for arm, policy in product(PLOTTED, POLICIES):
        series = [one["spread"][stage] for one in select(results, policy=policy, **arm)]
        style: LineStyle = "dashed" if arm["rounds"] == "with" else "line"
        curves.append(mean_curve(f"{policy}, {arm['rounds']}", series, style))
    title = f"Weight spread of stage {stage}, without and with outer rounds"
    return Plot(f"spread-stage-{stage}", title, ("inner steps", "std over the replicas"), curves, ("linear", "log"))


def _served(results: Results) -> Table:
    groups = [select(results, policy=p, devices=d) for d, p in product(DEVICES, POLICIES)]
    columns: Columns = {
        "devices": "devices",
        "routes": "policy",
        "microbatches / s": over("microbatches_per_s"),
        "load, largest / mean": over("largest_over_mean"),
        "waited for admission, %": over(lambda one: 100 * one["waited_share"], 3),
        "mean wait, ms": over(lambda one: 1000 * one["waited_s"], 3),
        "Busy per microbatch": over("busy", 2),
        "idle, %": over(lambda one: 100 * sum(one["idle"].values()), 3),
        "fewest inner steps": over(lambda one: one["inner_steps"][0]),
    }
    return table(columns, groups, "Stages that only cost time, with outer rounds.")
