"""What does it cost in loss that replicas meet one peer now and then, instead of all of them at every step or nobody at
all, when everybody reads the same number of tokens?

A byte-level Llama (full size: about a million parameters) in {STAGES} stages on the text of the standard library;
{REPLICAS} replicas of each stage, one microbatch of 4 × 64 tokens for each and inner step; the node's own code in the
simulator over real torch stages. *One process*: a single replica, the same microbatches one after the other,
{REPLICAS} times the optimizer steps. *Synchronous data parallel*: one replica that takes its steps on the microbatches
of {REPLICAS}, which is what replicas compute that average their gradients (order of additions apart); its bytes are
those of a ring all-reduce in float32. *NoLoCo*: matched pairs every {ROUND_STEPS} inner steps, α 0.5, β = γ = 0.7,
balanced routes. *No communication*: {REPLICAS} swarms of one replica that never meet, the weights of all of them
averaged at the end for the merged model. The data streams, the schedule (a tenth warm-up, cosine to a tenth) and the
clip over each stage are the same for all. Losses in nats per byte on the same held-out text; mean ± standard deviation
over seeds, and differences of runs with the same seed. The learning rate of each method is the best of the same
geometric grid with the first seed, which is continued while the best is at its end; the other seeds use it.

Limits: A model of this size after a few hundred steps is far from converged, and its batch is far below the size at
which more parallelism stops to pay: the order of the methods can be seen here, and whether the replicas form one
model; the size of the gaps at 25,000 steps and a hundred times the parameters cannot. The one process takes eight
times the optimizer steps, so it shows what small batches give, not what communication costs. Rates were chosen with
one seed on the held-out text that is reported, and other settings (m, α, γ) not at all. Nothing here is about seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf
from statistics import fmean

from noloco_p2p.lab.experiments.markdown_page import Block, Cell, Table
from noloco_p2p.lab.experiments.results import Columns, differences, mean_curve, mean_std, over, select, table
from noloco_p2p.lab.experiments.spec import Case, Experiment, Figures, Result, Results, describe, published
from noloco_p2p.lab.experiments.training import TrainingPlan, TrainingSummary, finite, small_manifest
from noloco_p2p.observe.plotting.plots import Plot

REPLICAS, STAGES, ROUND_STEPS = 8, 2, 10
RATES = (1.5e-3, 4e-3, 1e-2)
FACTOR = 2.5
"""From one rate to the next beyond RATES."""
MOST_RATES = 5
FLOAT_BYTES = 4
CURVE_POINTS = 50
HELD_OUT = 32
"""Microbatches."""


FULL, QUICK = {"hidden": 128, "layers": 4, "steps": 200}, {"hidden": 64, "layers": 2, "steps": 120}
"""What is trained, for how many optimizer steps of each replica of eight."""
SEEDS, QUICK_SEEDS = 3, 2


@dataclass(frozen=True, slots=True)
class Method:
    """How the replicas of a stage are kept together."""

    title: str
    replicas: int
    """Of each stage, in one swarm."""
    share: int = 1
    """Microbatches of an optimizer step, in units of one replica's."""
    pairing: str = "none"
    routing: str = "fixed"


METHODS = {
    "one": Method("one process", 1),
    "parallel": Method("synchronous data parallel", 1, share=REPLICAS),
    "noloco": Method("NoLoCo", REPLICAS, pairing="matched", routing="balanced"),
    "apart": Method("no communication", 1),
}


def cases(quick: bool) -> list[Case]:
    """Every method at every rate, with the first seed."""
    return [_case(method, rate, 1, quick) for method in METHODS for rate in RATES]


def further(quick: bool, results: Results) -> list[Case]:
    """Rates beyond the best one while that is the last on its side; then the other seeds at the best."""
    cases = []
    for method in METHODS:
        rates, best = sorted({one["rate"] for one in results if one["method"] == method}), best_rate(results, method)
        beyond = {rates[0]: best / FACTOR, rates[-1]: best * FACTOR}
        if best in beyond and len(rates) < MOST_RATES:
            cases.append(_case(method, float(f"{beyond[best]:.2g}"), 1, quick))
        else:
            cases += [_case(method, best, seed, quick) for seed in range(2, 1 + (QUICK_SEEDS if quick else SEEDS))]
    measured = {one.case.name for one in results}
    return [case for case in cases if case.name not in measured]


def _case(method: str, rate: float, seed: int, quick: bool) -> Case:
    size = QUICK if quick else FULL
    return Case.named("{method}-{rate:g}-{seed}", method=method, rate=rate, seed=seed, **size)


def measure(case: Case) -> Figures:
    """Losses, the curve of the training loss over tokens, and bytes."""
    from noloco_p2p.lab.experiments.real_swarm import train, train_apart

    name, settings = str(case.settings["method"]), case.settings
    method = METHODS[name]
    manifest = small_manifest(
        settings["hidden"],
        settings["layers"],
        microbatch_size=4,
        microbatches_per_step=method.share,
        steps=settings["steps"] * (REPLICAS if name == "one" else 1),
        routing=method.routing,
        # Longer than any run: the warm-up is a tenth of the steps for all methods (METHOD.md, "Inner step").
        inner={"peak_learning_rate": settings["rate"], "warmup_steps": 10**6},
        outer={"inner_steps": ROUND_STEPS, "pairing": method.pairing},
        evaluation={"every_steps": None, "microbatches": HELD_OUT},
    )
    plan = TrainingPlan(manifest, (method.replicas,) * STAGES, settings["seed"], streams=tuple(range(REPLICAS)))
    if name == "apart":
        swarms, merged = train_apart(plan, range(REPLICAS))
    else:
        swarms = [train(plan)]
        merged = swarms[0].merged_loss
    losses = [loss for swarm in swarms for loss in swarm.final_losses]
    per_token = swarms[0].bytes_per_token
    figures = {
        "validation_loss": fmean(losses),
        "merged_loss": merged,
        "final_losses": losses,
        "tokens": sum(swarm.tokens for swarm in swarms),
        "optimizer_steps": len(swarms[0].training),
        "parameters": sum(swarms[0].parameters),
        "rounds": dict(swarms[0].rounds),
        "curve": curve(swarms),
        "between_stages": 0.0 if name == "one" else per_token["activation"] + per_token["gradient"],
        "between_replicas": _ring_bytes(swarms[0]) if name == "parallel" else per_token["snapshot"],
    }
    return dict(finite(figures))


def curve(swarms: Sequence[TrainingSummary]) -> list[list[float]]:
    """[tokens of all replicas, training loss], the mean over each of at most CURVE_POINTS parts of the run."""
    losses = [fmean(loss for _, loss in same) for same in zip(*(swarm.training for swarm in swarms), strict=True)]
    tokens, length = sum(swarm.tokens for swarm in swarms) / len(losses), -(-len(losses) // CURVE_POINTS)
    parts = [range(at, min(at + length, len(losses))) for at in range(0, len(losses), length)]
    return [[part.stop * tokens, fmean(losses[index] for index in part)] for part in parts]


def _ring_bytes(trained: TrainingSummary) -> float:
    """Bytes per token, all replicas together, of a ring all-reduce of the gradients at every step: each of N replicas
    sends 2·(N−1)/N of them (Patarasuk and Yuan 2009, bandwidth-optimal all-reduce)."""
    ring = 2 * (REPLICAS - 1) * FLOAT_BYTES * sum(trained.parameters)
    return ring * len(trained.training) / trained.tokens


# --- the report -----------------------------------------------------------------------------------------------------

Best = Mapping[str, Results]
"""Of each method the runs at its best rate, by seed."""


def loss(result: Result) -> float:
    """At the end, on held-out text, the mean over the replicas; infinite where it was not finite."""
    return inf if result["validation_loss"] is None else float(result["validation_loss"])


def best_rate(results: Results, method: str) -> float:
    """The rate with the lowest held-out loss, mean over the replicas, with the first seed. ValueError without runs."""
    return float(min(select(results, method=method, seed=1), key=loss)["rate"])


def report(results: Results) -> list[Block]:
    """The table, in words, the curves, the rates that were tried, and the paper."""
    best = {name: select(results, method=name, rate=best_rate(results, name)) for name in METHODS}
    pairs = {name: zip(best[name], best["parallel"], strict=False) for name in METHODS}
    gaps = {name: differences((a["validation_loss"], b["validation_loss"]) for a, b in pairs[name]) for name in METHODS}
    curves = [mean_curve(method.title, [one["curve"] for one in best[name]]) for name, method in METHODS.items()]
    axes, title = ("tokens, all replicas", "training loss, nats per byte"), "Training loss at equal tokens"
    plot = Plot("convergence", f"{title}, each at its best rate", axes, curves)
    return [_table(best, gaps), *_findings(best, gaps), plot, _tried(results), _paper(gaps["noloco"])]


def _table(best: Best, gaps: Mapping[str, list[float]]) -> Table:
    columns: Columns = {
        "method": lambda runs: METHODS[runs[0]["method"]].title,
        "peak rate": lambda runs: f"{runs[0]['rate']:g}",
        "optimizer steps": "optimizer_steps",
        "loss, mean over replicas": over("validation_loss"),
        "loss of the merged model": over("merged_loss"),
        "perplexity": over(lambda one: None if one["validation_loss"] is None else exp(loss(one))),
        "against data parallel, nats": lambda runs: mean_std(gaps[runs[0]["method"]], 3),
        "bytes/token between stages": "between_stages",
        "bytes/token between replicas": "between_replicas",
    }
    first, seeds = best["one"][0], len(best["noloco"])
    caption = f"{first['parameters']:,} parameters, {first['tokens']:,} tokens in each run, {seeds} seeds."
    return table(columns, best.values(), caption)


def _findings(best: Best, gaps: Mapping[str, list[float]]) -> list[str]:
    """In words, with the numbers."""
    noloco, apart, parallel = best["noloco"], best["apart"], best["parallel"]
    below = sum(loss(mine) < loss(theirs) for mine, theirs in zip(noloco, apart, strict=False))
    ratio = parallel[0]["between_replicas"] / noloco[0]["between_replicas"]
    above = {name: mean_std(gap, 3) for name, gap in gaps.items()}
    merged = {
        name: mean_std(differences((one["merged_loss"], one["validation_loss"]) for one in best[name]), 2)
        for name in ("noloco", "apart")
    }
    return [
        f"Against synchronous data parallel (nats, more is worse) NoLoCo ends at {above['noloco']}, replicas that "
        f"never meet at {above['apart']}, one process with {REPLICAS} times the optimizer steps at {above['one']}. "
        f"NoLoCo is below the replicas that never meet with {below} of {len(noloco)} seeds.",
        "The model whose weights are the mean over the replicas, against the replicas themselves, in nats: "
        f"{merged['noloco']} for NoLoCo, {merged['apart']} for replicas that never meet. "
        "Near zero or below it the replicas are one model; above it they are several.",
        f"Between replicas the ring moves {ratio:.3g} times the bytes of NoLoCo with m = {ROUND_STEPS}, and every step "
        "waits for it.",
    ]


def _tried(results: Results) -> Table:
    rates = sorted({one["rate"] for one in results})
    rows: list[list[Cell]] = []
    for name, method in METHODS.items():
        losses = {one["rate"]: loss(one) for one in select(results, method=name, seed=1)}
        rows.append([method.title, *(losses.get(rate) for rate in rates), f"{best_rate(results, name):g}"])
    caption = "Held-out loss (mean over the replicas, first seed) by peak learning rate; a dash: not tried."
    return Table(("method", *(f"{rate:g}" for rate in rates), "chosen"), rows, caption)


def _paper(gaps: Sequence[float]) -> str:
    row = next(one for one in published()["final_perplexity"] if (one["size"], one["dp"], one["pp"]) == ("small", 8, 2))
    ratios = {data: row[data]["noloco"] / row[data]["fsdp"] for data in ("reddit", "c4")}
    return (
        f"The paper's small model at 8 × 2 (arXiv 2506.10911, final perplexities): NoLoCo over data parallel "
        f"{ratios['reddit']:.3f} on Reddit, {ratios['c4']:.3f} on C4, after 25,000 steps; here"
        f" {mean_std([exp(gap) for gap in gaps], 3)}."
    )


EXPERIMENT = Experiment("convergence", describe(globals()), cases, measure, report, further)
