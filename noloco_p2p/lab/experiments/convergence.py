"""What does it cost in loss to meet one peer now and then, or often and in few bits, instead of averaging all gradients
at every step, if all methods read the same number of tokens, and how many bytes does each take?

A byte-level Llama (full size: about a million parameters) in {STAGES} stages on the text of the standard library;
{REPLICAS} replicas of each stage, each with one microbatch of 4 × 64 tokens per inner step; the node's own code in the
simulator over real torch stages. *Synchronous data parallel*: one replica that takes its steps on the microbatches of
{REPLICAS}. This is what replicas that average their gradients compute (apart from the order of additions); its bytes
are those of a ring all-reduce in float32. The inner optimizer is AdamW, or Muon where the table says so. The outer
rules (METHOD.md, "Outer rules") have their defaults unless the table says otherwise, matched pairs, balanced routes,
and rounds that are waited for, unless they are *overlapped*. *No communication*: {REPLICAS} swarms of one replica that
never meet; for the merged model the weights of all are averaged at the end. The data streams, the schedule (a tenth
warm-up, cosine to a tenth) and the clip over each stage are the same for all. Losses are in nats per byte on the same
held-out text; mean ± standard deviation over seeds, and differences between runs with the same seed. Bytes between
replicas are what a replica receives per parameter and inner step, including requests and chunks requested again. The
learning rate is the best on the optimizer's geometric grid with the first seed; the grid is extended while the best
rate is at its end. The other seeds use that rate, and so do the runs of {LONG_FACTOR} times as many steps, with one
seed.

Limits: A model of this size is far from converged after a few hundred steps, and its batch is far below the size at
which more parallelism stops paying off. The order of the methods can be seen here, and whether the replicas form one
model; the size of the gaps at 25,000 steps and a hundred times the parameters cannot. Rates were chosen with one seed
on the reported held-out text, and other settings not at all. Times are not considered: the simulator predicts what a
line makes of the bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp
from statistics import fmean
from typing import Any

from noloco_p2p.humanize import plural
from noloco_p2p.lab.experiments.rate_search import best_rate, next_runs, rate_beyond
from noloco_p2p.lab.experiments.results import Columns, above, known, loss, mean_curve, mean_std, over, select, table
from noloco_p2p.lab.experiments.spec import Block, Case, Cell, Figures, Results, Table, published
from noloco_p2p.lab.experiments.training import TrainingPlan, TrainingSummary, sized_manifest
from noloco_p2p.observe.plotting.plots import Curve, Plot

REPLICAS, STAGES, LONG_FACTOR = 8, 2, 8
"""The last: length of a long run as a multiple of a short one's."""
RATES = {"adamw": (1.6e-3, 4e-3, 1e-2), "muon": (1e-2, 1.4e-2, 2e-2)}
"""Rates of each optimizer. Muon's are closer together, because a factor of 2.5 from the best rate costs more than the
methods differ."""
PARALLEL = {"adamw": "parallel", "muon": "parallel-muon"}
FLOAT_BYTES = 4
CURVE_POINTS, HELD_OUT = 50, 32
"""Points of a loss curve; held-out microbatches."""
FULL, QUICK = {"hidden": 128, "layers": 4, "steps": 200}, {"hidden": 64, "layers": 2, "steps": 120}
"""Sizes of the trained model, and the optimizer steps of each of eight replicas."""
SEEDS, QUICK_SEEDS = 3, 2


@dataclass(frozen=True, slots=True)
class Method:
    """A way to keep the replicas of a stage together."""

    title: str
    replicas: int = REPLICAS
    """Replicas of each stage in one swarm."""
    share: int = 1
    """Microbatches per optimizer step, as a multiple of one replica's."""
    outer: Mapping[str, Any] = field(default_factory=lambda: {"pairing": "none"})
    """Settings of the outer round."""
    optimizer: str = "adamw"
    """The inner optimizer."""
    long: bool = False
    """Whether it is also run for LONG_FACTOR times as many steps."""


INT4 = {"rule": "gossip", "codec": "int4", "overlap": True}
BY_ADAMW = {
    "parallel": Method("synchronous data parallel", 1, share=REPLICAS, long=True),
    "noloco": Method("NoLoCo, m = 10", outer={"rule": "noloco"}),
    "averaged": Method("averaged φ and δ, m = 10", outer={"rule": "averaged"}),
    "diloco": Method("DiLoCo, H = 20", outer={"rule": "diloco", "inner_steps": 20}),
    "dct": Method("DCT momentum, H = 20", outer={"rule": "dct", "inner_steps": 20}),
    "gossip": Method("gossip, m = 1", outer={"rule": "gossip", "codec": "full"}),
    "gossip-int4": Method("gossip, m = 1, int4, overlapped", outer=INT4, long=True),
    "gossip-int4-2": Method("gossip, m = 2, int4, overlapped", outer=INT4 | {"inner_steps": 2}),
    "apart": Method("no communication", 1),
}
METHODS = BY_ADAMW | {
    f"{name}-muon": replace(method, title=f"{method.title}, Muon", optimizer="muon")
    for name, method in BY_ADAMW.items()
}


def cases(quick: bool) -> list[Case]:
    """Every method at every rate, with the first seed."""
    return [_case(method, rate, 1, quick) for method in METHODS for rate in RATES[METHODS[method].optimizer]]


def further(quick: bool, results: Results) -> list[Case]:
    """Rates beyond the best one while it is at the end of its grid; then other seeds at the best, and long runs."""
    cases = [_case(name, *rate_seed, quick) for name in METHODS for rate_seed in next_rates(results, name, quick)]
    for name, method in METHODS.items():
        runs = first_runs(results, name)
        if method.long and not quick and rate_beyond(runs, RATES[method.optimizer]) is None:
            cases.append(_case(name, best_rate(runs), 1, quick, long=True))
    return cases


def first_runs(results: Results, method: str) -> Results:
    """A method's short runs with the first seed: every rate that was tried."""
    return select(results, method=method, seed=1, long=False)


def next_rates(results: Results, method: str, quick: bool) -> list[tuple[float, int]]:
    """(rate, seed) of a method's next runs: a rate beyond the best one if that is at an end, otherwise other seeds."""
    grid, seeds = RATES[METHODS[method].optimizer], QUICK_SEEDS if quick else SEEDS
    return next_runs(first_runs(results, method), grid, seeds)


def _case(method: str, rate: float, seed: int, quick: bool, long: bool = False) -> Case:
    size = dict(QUICK if quick else FULL)
    size["steps"] *= LONG_FACTOR if long else 1
    return Case.named("{method}-{rate:g}-{seed}-{steps}", method=method, rate=rate, seed=seed, long=long, **size)


def plan_of(settings: Mapping[str, Any]) -> TrainingPlan:
    """The run of a case as one swarm: its method, rate, seed, size and number of steps."""
    method = METHODS[settings["method"]]
    manifest = sized_manifest(
        settings,
        {"optimizer": method.optimizer, "peak_learning_rate": settings["rate"]},
        microbatches_per_step=method.share,
        routing="fixed" if method.replicas == 1 else "balanced",
        outer=method.outer,
        evaluation={"microbatches": HELD_OUT},
    )
    return TrainingPlan(manifest, (method.replicas,) * STAGES, settings["seed"], streams=tuple(range(REPLICAS)))


def measure(case: Case) -> Figures:
    """Losses, the curve of the training loss over tokens, and bytes."""
    from noloco_p2p.lab.experiments.real_swarm import train, train_apart

    name, plan = str(case.settings["method"]), plan_of(case.settings)
    if name.startswith("apart"):
        swarms, merged = train_apart(plan, range(REPLICAS))
    else:
        swarms = [train(plan)]
        merged = swarms[0].merged_loss
    losses = [loss for swarm in swarms for loss in swarm.final_losses]
    first = swarms[0]
    per_token = first.bytes_per_token
    between = _ring_bytes(first) if name.startswith("parallel") else per_token["snapshot"]
    return {
        "validation_loss": fmean(losses),
        "merged_loss": merged,
        "final_losses": losses,
        "tokens": sum(swarm.tokens for swarm in swarms),
        "optimizer_steps": len(first.training),
        "parameters": sum(first.parameters),
        "rounds": dict(first.rounds),
        "asked_again": first.asked_again,
        "curve": curve(swarms),
        "between_stages": per_token["activation"] + per_token["gradient"],
        "per_parameter_step": between * first.tokens / (sum(first.parameters) * REPLICAS * case.settings["steps"]),
    }


def curve(swarms: Sequence[TrainingSummary]) -> list[list[float]]:
    """[tokens of all replicas, training loss], the mean over each of at most CURVE_POINTS parts of the run."""
    losses = [fmean(loss for _, loss in same) for same in zip(*(swarm.training for swarm in swarms), strict=True)]
    tokens, length = sum(swarm.tokens for swarm in swarms) / len(losses), -(-len(losses) // CURVE_POINTS)
    parts = [range(at, min(at + length, len(losses))) for at in range(0, len(losses), length)]
    return [[part.stop * tokens, fmean(losses[index] for index in part)] for part in parts]


def _ring_bytes(trained: TrainingSummary) -> float:
    """Bytes per token of all replicas together for a ring all-reduce of the gradients at every step: each of N replicas
    sends 2·(N−1)/N of them (Patarasuk and Yuan 2009, bandwidth-optimal all-reduce)."""
    ring = 2 * (REPLICAS - 1) * FLOAT_BYTES * sum(trained.parameters)
    return ring * len(trained.training) / trained.tokens


# --- the report -----------------------------------------------------------------------------------------------------

Best = Mapping[str, Results]
"""For each method the runs at its best rate, by seed."""


def report(results: Results) -> list[Block]:
    """The answer, the tables, the curves, loss over bytes, the rates tried, and the paper's figures."""
    rates = {name: best_rate(first_runs(results, name)) for name in METHODS}
    best = {name: select(results, method=name, rate=rate, long=False) for name, rate in rates.items()}
    long = {name: select(results, method=name, long=True) for name in METHODS}
    gaps, long_gaps = _all_gaps(best), _all_gaps(long)
    curves = [mean_curve(method.title, [one["curve"] for one in best[name]]) for name, method in METHODS.items()]
    axes, title = ("tokens, all replicas", "training loss, nats per byte"), "Training loss at equal tokens"
    plot = Plot("convergence", f"{title}, each at its best rate", axes, curves)
    blocks: list[Block] = [_answer(best, gaps), _table(best, gaps), _merged(best), plot, _frontier(best)]
    blocks += [_table(long, long_gaps)] if any(long.values()) else []
    return [*blocks, _tried(results), _paper(gaps["noloco"])]


def _all_gaps(runs: Best) -> dict[str, list[float]]:
    """Gap to data parallel with the same optimizer in nats, for each pair of runs with the same seed."""
    parallel = {name: runs[PARALLEL[method.optimizer]] for name, method in METHODS.items()}
    return {name: above(runs[name], parallel[name], "validation_loss") for name in METHODS}


def _table(best: Best, gaps: Mapping[str, list[float]]) -> Table:
    """The methods that have runs. With one seed there is no spread."""
    columns: Columns = {
        "method": lambda runs: METHODS[runs[0]["method"]].title,
        "peak rate": lambda runs: f"{runs[0]['rate']:g}",
        "optimizer steps": "optimizer_steps",
        "loss, mean over replicas": over("validation_loss"),
        "loss of the merged model": over("merged_loss"),
        "perplexity": over(lambda one: None if one["validation_loss"] is None else exp(loss(one))),
        "against data parallel with its optimizer, nats": lambda runs: mean_std(gaps[runs[0]["method"]], 3),
        "bytes between replicas, per parameter and inner step": lambda runs: f"{runs[0]['per_parameter_step']:.3g}",
        "bytes/token between stages": "between_stages",
    }
    rows = [runs for runs in best.values() if runs]
    first, seeds = rows[0][0], plural(max(map(len, rows)), "seed")
    caption = f"{first['parameters']:,} parameters, {first['tokens']:,} tokens in each run, {seeds}."
    return table(columns, rows, caption)


def _frontier(best: Best) -> Plot:
    """Loss over bytes, with a line through the methods that no other beats in both."""
    points = {
        name: (runs[0]["per_parameter_step"], fmean(known(runs, "validation_loss")))
        for name, runs in best.items()
        if runs[0]["per_parameter_step"] > 0 and known(runs, "validation_loss")
    }
    line: list[tuple[float, float]] = []
    for point in sorted(points.values()):
        if not line or point[1] < line[-1][1]:
            line.append(point)
    curves = [Curve(METHODS[name].title, [point], style="points") for name, point in points.items()]
    axes = ("bytes between replicas, per parameter and inner step", "held-out loss, nats per byte")
    title = "Loss against bytes; the line joins what nothing else beats in both"
    return Plot("frontier", title, axes, [*curves, Curve("frontier", line)], scales=("log", "linear"))


def _answer(best: Best, gaps: Mapping[str, list[float]]) -> str:
    found = {name: fmean(gap) for name, gap in gaps.items() if gap and name not in PARALLEL.values()}
    closest = min(found, key=lambda name: found[name], default="apart")
    return (
        f"The method closest to synchronous data parallel with the same optimizer is {METHODS[closest].title}: its loss"
        f" is {mean_std(gaps[closest], 3)} nats higher at equal tokens, for"
        f" {best[closest][0]['per_parameter_step']:.3g} bytes per parameter and inner step; without communication it"
        f" is {mean_std(gaps['apart'], 3)} nats higher."
    )


def _merged(best: Best) -> str:
    merged = {name: mean_std(above(runs, runs, "merged_loss", "validation_loss"), 2) for name, runs in best.items()}
    together = [f"{METHODS[name].title} {gap}" for name, gap in merged.items() if not name.startswith("parallel")]
    return (
        "The model whose weights are the mean over the replicas, against the replicas themselves, in nats: "
        f"{'; '.join(together)}. Near zero or below it the replicas are one model; above it they are several."
    )


def _tried(results: Results) -> Table:
    rates = sorted({one["rate"] for one in results})
    rows: list[list[Cell]] = []
    for name, method in METHODS.items():
        runs = first_runs(results, name)
        losses = {one["rate"]: loss(one) for one in runs}
        rows.append([method.title, *(losses.get(rate) for rate in rates), f"{best_rate(runs):g}"])
    caption = "Held-out loss (mean over the replicas, first seed) by peak learning rate; a dash: not tried."
    return Table(("method", *(f"{rate:g}" for rate in rates), "chosen"), rows, caption)


def _paper(gaps: Sequence[float]) -> str:
    ratios = {data: one["noloco"] / one["fsdp"] for data, one in published()["final_perplexity_small_8x2"].items()}
    return (
        f"The paper's small model at 8 × 2 (arXiv 2506.10911, final perplexities): NoLoCo over data parallel "
        f"{ratios['reddit']:.3f} on Reddit, {ratios['c4']:.3f} on C4, after 25,000 steps; here"
        f" {mean_std([exp(gap) for gap in gaps], 3)}."
    )
