"""Do microbatches that take other routes at every step hold the replicas together, with and without outer rounds, and
what do they cost in loss, load and waiting?

A byte-level Llama of two layers (hidden 64) on the text of the standard library, one layer a stage, {REPLICAS}
replicas of each stage; the node's own code in the simulator over real torch stages, device times log-normal (σ
{JITTER}). Microbatches of 8 × 64 tokens, one for each origin and inner step, m = {ROUND_STEPS}, two peak learning
rates. `fixed`: replica i always sends to replica i; `random`: to any replica that has room; `balanced`: by a
permutation drawn for each step. Validation goes from replica i to replica i under all of them. Then the same policies
over stages that only cost time, on equal and unequal devices.

Limits: A model of two layers and a few hundred steps of 512 tokens stand for 125M to 1.3B parameters and 25,000 steps:
signs can be compared, sizes hardly. Without outer rounds fixed routes are eight small models that never meet; a run
this short does not show what each would lose by seeing an eighth of the data. Under `random` and `fixed` the order of
arrival decides which replica takes how many inner steps, and the clock is pulled to the median: tokens differ by a few
per cent, and a part of the spread is that replicas of stage 1 have taken unequal numbers of inner steps. A full
replica says Busy, which evens the load of `random`: draws without that would be less even. Device and link times are
assumed, not measured.
"""

from collections.abc import Callable, Mapping
from math import exp
from statistics import fmean
from types import MappingProxyType

from noloco_p2p.lab.experiments import routing_load
from noloco_p2p.lab.experiments.markdown_page import Block, Cell, Table, table
from noloco_p2p.lab.experiments.results import mean_column, mean_std, published, select
from noloco_p2p.lab.experiments.routing_load import DEVICES, POLICIES, REPLICAS
from noloco_p2p.lab.experiments.spec import Case, Experiment, Figures, Result, Results, describe
from noloco_p2p.lab.experiments.training import TrainingPlan, largest_over_mean, small_manifest
from noloco_p2p.observe.plotting.plots import Curve, Plot
from noloco_p2p.sim.stage import Costs

ROUNDS: Mapping[str, str] = MappingProxyType({"without": "none", "with": "matched"})
"""Outer rounds: what a case says, and what the manifest says."""
ARMS = (("without", 1e-3), ("without", 3e-3), ("with", 3e-3))
"""Outer rounds or not, and the peak learning rate: without them the replicas drift apart slowly or quickly."""
ROUND_STEPS = 10
"""m, and without outer rounds the inner steps from one measurement of the spread to the next."""
JITTER = 0.2
"""Sigma of the log-normal device times where real weights are trained."""
EVALUATED = 60
"""Per cent of the run from one evaluation to the next; the last is at its end."""
STAGES = (0, 1)
TRAINED = ("validation", "validation_loss", "merged_loss", "tokens", "load", "uneven", "waiting", "busy", "rounds")
"""What is kept of a `TrainingSummary`."""


# --- the cases ------------------------------------------------------------------------------------------------------


def cases(quick: bool) -> list[Case]:
    """Every policy with and without outer rounds, then every policy on every kind of devices; same seeds for all."""
    seeds, steps = (range(1, 2), 60) if quick else (range(1, 4), 200)
    trained = [
        Case(
            f"{policy}-{rounds}-outer-{rate:g}-{seed}",
            {"kind": "train", "policy": policy, "rounds": rounds, "rate": rate}
            | {"replicas": REPLICAS, "steps": steps, "seed": seed},
        )
        for seed in seeds
        for rounds, rate in ARMS
        for policy in POLICIES
    ]
    served = [
        Case(
            f"{policy}-{devices.replace(' ', '-')}-{seed}",
            {"kind": "serve", "policy": policy, "devices": devices, "steps": steps // 2, "seed": seed},
        )
        for seed in seeds
        for devices in DEVICES
        for policy in POLICIES
    ]
    return [*trained, *served]


def measure(case: Case) -> Figures:
    """One run of stages that only cost time, or of real weights: TRAINED, and `spread`, (inner step, std) by stage."""
    from noloco_p2p.lab.experiments.real_swarm import train

    settings = case.settings
    if settings["kind"] == "serve":
        return routing_load.serve(settings)
    manifest = small_manifest(
        64,
        len(STAGES),
        routing=settings["policy"],
        steps=settings["steps"],
        inner={"peak_learning_rate": settings["rate"]},
        outer={"inner_steps": ROUND_STEPS, "pairing": ROUNDS[settings["rounds"]]},
        evaluation={"every_steps": EVALUATED * settings["steps"] // 100, "microbatches": 16},
    )
    both = (settings["replicas"], settings["replicas"])
    summary = train(TrainingPlan(manifest, both, settings["seed"], costs=Costs(spread=JITTER)))
    spread = [[(one.step, one.std) for one in summary.finite_spreads(stage)] for stage in STAGES]
    return summary.figures(*TRAINED, "virtual_s") | {"spread": spread}


# --- what they say --------------------------------------------------------------------------------------------------


def late_std(result: Result, stage: int, count: int) -> float | None:
    """Weight std over a stage's replicas, mean over the last half of the first `count`; None where there is none."""
    series = [std for _, std in result["spread"][stage]][:count]
    return fmean(series[len(series) // 2 :]) if series else None


def common_count(results: Results, rounds: str, rate: float) -> int:
    """How many measurements of the spread all runs of an arm have: a slow replica's few inner steps bound them."""
    return min(len(series) for one in select(results, rounds=rounds, rate=rate) for series in one["spread"])


def changes(results: Results, policy: str, rounds: str, rate: float) -> dict[str, list[float]]:
    """Against fixed routes with the same seed, in per cent: std by stage, both stages' mean, perplexity."""
    found: dict[str, list[float]] = {"std 0": [], "std 1": [], "std": [], "perplexity": []}
    count = common_count(results, rounds, rate)
    mine = select(results, policy=policy, rounds=rounds, rate=rate)
    for one, fixed in zip(mine, select(results, policy="fixed", rounds=rounds, rate=rate), strict=True):
        pairs = [(late_std(one, stage, count), late_std(fixed, stage, count)) for stage in STAGES]
        stds = [100 * (std / before - 1) for std, before in pairs if std is not None and before]
        if len(stds) == len(STAGES):
            found["std 0"].append(stds[0])
            found["std 1"].append(stds[1])
            found["std"].append(fmean(stds))
        loss, fixed_loss = one["validation_loss"], fixed["validation_loss"]
        if loss is not None and fixed_loss is not None:
            found["perplexity"].append(100 * (exp(loss - fixed_loss) - 1))
    return found


def report(results: Results) -> list[Block]:
    """Real weights beside the paper's figures, then load and waiting."""
    trained = [one for one in results if one["kind"] == "train"]
    return [
        "### Spread and loss",
        _weights(trained),
        _changes(trained),
        *(_finding(trained, policy, arm) for policy in POLICIES[1:] for arm in ARMS),
        *(_plot(trained, stage) for stage in STAGES),
        _perplexity(trained),
        "### Load, waiting and throughput",
        *routing_load.report([one for one in results if one["kind"] == "serve"]),
    ]


Row = tuple[str, float, str]
"""Outer rounds, peak rate, policy."""
SETTING_COLUMNS: dict[str, Callable[[Row], Cell]] = {
    "peak rate": lambda row: f"{row[1]:g}",
    "outer rounds": lambda row: row[0],
    "routes": lambda row: row[2],
}


def _weights(results: Results) -> Table:
    counts = {arm: common_count(results, *arm) for arm in ARMS}
    groups = {(*arm, p): select(results, rounds=arm[0], rate=arm[1], policy=p) for arm in ARMS for p in POLICIES}

    def std(stage: int) -> Callable[[Result], float | None]:
        return lambda one: late_std(one, stage, counts[one.case.settings["rounds"], one["rate"]])

    caption = (
        "Mean ± standard deviation over seeds. Losses in nats per token, the first is the mean over the replicas; std "
        "of the weights over the replicas of a stage, on θ before the merge where there is one, mean over the last "
        "half of the measurements that all runs of the arm have; load, and microbatches that wait for admission (mean "
        "over time), of stage 1."
    )
    columns = SETTING_COLUMNS | {
        "validation loss": mean_column(groups, "validation_loss"),
        "loss of the merged model": mean_column(groups, "merged_loss"),
        "std stage 0": mean_column(groups, std(0), 3),
        "std stage 1": mean_column(groups, std(1), 3),
        "tokens": mean_column(groups, "tokens", 6),
        "load, largest / mean": mean_column(
            groups, lambda one: largest_over_mean(list(one["load"].values())[one["replicas"] :])
        ),
        "waiting": mean_column(groups, lambda one: one["waiting"][1], 2),
    }
    return table(columns, groups, caption)


def _changes(results: Results) -> Table:
    columns = SETTING_COLUMNS | {
        title: lambda row, name=name: mean_std(changes(results, row[2], row[0], row[1])[name], 3)
        for title, name in {
            "std stage 0, %": "std 0",
            "std stage 1, %": "std 1",
            "std, mean of both, %": "std",
            "perplexity, %": "perplexity",
        }.items()
    }
    paper = published()["random_routing_without_outer"]
    stds = ", ".join(f"{100 * value:.0f} ({size})" for size, value in paper["weight_std_change"].items())
    most = f"at most +{100 * paper['perplexity_increase_at_most']:.0f}"
    caption = "Change against fixed routes with the same seed, mean ± standard deviation over seeds."
    ours = table(columns, [(*arm, policy) for arm in ARMS for policy in POLICIES[1:]])
    theirs = ("paper", "without", "a permutation each time", "–", "–", stds, most)
    return Table(ours.columns, [*ours.rows, theirs], caption)


def _finding(results: Results, policy: str, arm: tuple[str, float]) -> str:
    """In words: with how many seeds the spread is smaller, and the perplexity within what the paper saw."""
    bound = 100 * published()["random_routing_without_outer"]["perplexity_increase_at_most"]
    found = changes(results, policy, *arm)
    stds, within = found["std"], sum(value <= bound for value in found["perplexity"])
    smaller = sum(value < 0 for value in stds)
    return (
        f"{arm[0].capitalize()} outer rounds, peak rate {arm[1]:g}: {policy} routes change the spread by "
        f"{mean_std(stds, 3)} % (smaller with {smaller} of {len(stds)} seeds) and the perplexity by "
        f"{mean_std(found['perplexity'], 3)} % (within the paper's {bound:.0f} % with {within} of "
        f"{len(found['perplexity'])})."
    )


def _plot(results: Results, stage: int) -> Plot:
    """The mean over the seeds at every step at which all of them were measured, at the higher rate."""
    curves = []
    for rounds, rate in ARMS[1:]:
        for policy in POLICIES:
            found = select(results, policy=policy, rounds=rounds, rate=rate)
            series = [dict(one["spread"][stage]) for one in found]
            steps = sorted(set.intersection(*map(set, series)))
            means = [fmean(one[step] for one in series) for step in steps]
            curves.append(Curve(f"{policy}, {rounds}", steps, means, style="dashed" if rounds == "with" else "line"))
    title = f"Weight spread of stage {stage}, without and with outer rounds"
    return Plot(f"spread-stage-{stage}", title, ("inner steps", "std over the replicas"), curves, ("linear", "log"))


def _perplexity(results: Results) -> Plot:
    """Whether the price of other routes grows or shrinks: the mean over the seeds at every evaluation."""
    curves = []
    for rounds, rate in ARMS:
        fixed = select(results, policy="fixed", rounds=rounds, rate=rate)
        for policy in POLICIES[1:]:
            mine = select(results, policy=policy, rounds=rounds, rate=rate)
            together = list(zip(*map(_perplexity_gaps, mine, fixed), strict=False))
            x, y = ([fmean(pair[column] for pair in same) for same in together] for column in (0, 1))
            label = f"{policy}, {rounds}, {rate:g}"
            curves.append(Curve(label, x, y, style="dashed" if rounds == "with" else "line"))
    return Plot("perplexity", "Perplexity against fixed routes", ("steps", "change, %"), curves)


def _perplexity_gaps(one: Result, fixed: Result) -> list[tuple[int, float]]:
    """(step, perplexity against that of fixed routes in per cent) of every evaluation."""
    pairs = zip(one["validation"], fixed["validation"], strict=False)
    finite = [(step, loss, other) for (step, loss), (_, other) in pairs if loss is not None and other is not None]
    return [(step, 100 * (exp(loss - other) - 1)) for step, loss, other in finite]


EXPERIMENT = Experiment("routing", describe(globals()), cases, measure, report)
