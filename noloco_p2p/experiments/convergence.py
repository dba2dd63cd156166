"""Loss at equal tokens: one process, synchronous data parallel, NoLoCo, and replicas that never meet.

Every method reads the same microbatches in all, and its peak learning rate is chosen by the same rule: the best of
RATES with the first seed, going on by the same factor while the best one is the first or the last of those tried.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp
from statistics import fmean
from types import MappingProxyType

from noloco_p2p.experiments.page import Block, Curve, Plot, Table, mean_std
from noloco_p2p.experiments.paper import published
from noloco_p2p.experiments.spec import Case, Experiment, Figures, Result, Results
from noloco_p2p.experiments.training import Trained, Training, small_manifest, train

REPLICAS, STAGES, ROUND_STEPS = 8, 2, 10
RATES = (1.5e-3, 4e-3, 1e-2)
FACTOR = 2.5
"""From one rate to the next beyond RATES."""
MOST_RATES = 5
FLOAT_BYTES = 4
CURVE_POINTS = 50


@dataclass(frozen=True, slots=True)
class Method:
    """How the replicas of a stage are kept together."""

    told: str
    replicas: int
    """Of each stage; the data of one that stands for several are theirs."""
    share: int = 1
    """Microbatches of an optimizer step, in units of one replica's."""
    pairing: str = "none"
    routing: str = "fixed"


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "one": Method("one process", 1),
        "parallel": Method("synchronous data parallel", 1, share=REPLICAS),
        "noloco": Method("NoLoCo", REPLICAS, pairing="matched", routing="balanced"),
        "apart": Method("no communication", REPLICAS),
    }
)


@dataclass(frozen=True, slots=True)
class Size:
    """What is trained, for how long."""

    hidden: int
    layers: int
    steps: int
    """Optimizer steps of each replica of eight."""
    seeds: int


FULL, QUICK = Size(128, 4, 200, 3), Size(64, 2, 60, 2)


def runs(quick: bool) -> list[Case]:
    """Every method at every rate, with the first seed."""
    return [_case(method, rate, 1, quick) for method in METHODS for rate in RATES]


def further(quick: bool, results: Results) -> list[Case]:
    """Rates beyond the best one while that is the last on its side; then the other seeds at the best."""
    cases = []
    for method in METHODS:
        rates, best = sorted({one["rate"] for one in results if one["method"] == method}), chosen(results, method)
        beyond = {rates[0]: best / FACTOR, rates[-1]: best * FACTOR}
        if best in beyond and len(rates) < MOST_RATES:
            cases.append(_case(method, float(f"{beyond[best]:.2g}"), 1, quick))
        else:
            cases += [_case(method, best, seed, quick) for seed in range(2, 1 + (QUICK if quick else FULL).seeds)]
    known = {one.case.name for one in results}
    return [case for case in cases if case.name not in known]


def _case(method: str, rate: float, seed: int, quick: bool) -> Case:
    size = QUICK if quick else FULL
    settings = {"method": method, "rate": rate, "seed": seed, "steps": size.steps}
    return Case(f"{method}-{rate:g}-{seed}", settings | {"hidden": size.hidden, "layers": size.layers})


def plan(settings: Mapping[str, object]) -> Training:
    """The swarm of a case: `method`, `rate`, `seed`, `steps`, `hidden`, `layers`."""
    told = {name: int(str(settings[name])) for name in ("steps", "hidden", "layers", "seed")}
    method = METHODS[str(settings["method"])]
    manifest = small_manifest(
        told["hidden"],
        told["layers"],
        microbatch_size=4,
        microbatches_per_step=method.share,
        steps=told["steps"] * REPLICAS // (method.replicas * method.share),
        routing=method.routing,
        # Longer than any run: the warm-up is a tenth of the steps for all methods (method.md §2).
        inner={"peak_learning_rate": settings["rate"], "warmup_steps": 10**6},
        outer={"inner_steps": ROUND_STEPS, "pairing": method.pairing},
        evaluation={"every_steps": None, "microbatches": 32},
    )
    return Training(manifest, (method.replicas,) * STAGES, told["seed"], streams=REPLICAS)


def measure(case: Case) -> Figures:
    """Losses, the curve of the training loss over tokens, and bytes."""
    trained = train(plan(case.settings))
    told = trained.json()
    names = ("validation_loss", "merged_loss", "final_losses", "tokens", "parameters", "rounds")
    figures = {name: told[name] for name in names} | {"optimizer_steps": len(trained.training)}
    figures["curve"] = curve(trained)
    figures["between_stages"] = 0.0 if case.settings["method"] == "one" else _pipeline(trained)
    figures["between_replicas"] = _between_replicas(str(case.settings["method"]), trained)
    return figures


def curve(trained: Trained) -> list[list[float]]:
    """[tokens of all replicas, training loss], the mean over as many stretches of the run as are drawn."""
    steps, length = trained.training, -(-len(trained.training) // CURVE_POINTS)
    parts = [steps[at : at + length] for at in range(0, len(steps), length)]
    return [[part[-1][0] * trained.tokens / len(steps), fmean(loss for _, loss in part)] for part in parts]


def _pipeline(trained: Trained) -> float:
    return trained.bytes_per_token["activation"] + trained.bytes_per_token["gradient"]


def _between_replicas(method: str, trained: Trained) -> float:
    """Bytes per token, all replicas together. Data parallel is modelled as a ring all-reduce of the gradients, in which
    each of N replicas sends 2·(N−1)/N of them at every step (Patarasuk and Yuan 2009, bandwidth-optimal all-reduce)."""
    if method != "parallel":
        return trained.bytes_per_token["snapshot"]
    ring = 2 * (REPLICAS - 1) * FLOAT_BYTES * sum(trained.parameters)
    return ring * len(trained.training) / trained.tokens


# --- what they say --------------------------------------------------------------------------------------------------


def chosen(results: Results, method: str) -> float:
    """The rate with the lowest held-out loss, mean over the replicas, with the first seed. ValueError without runs."""
    found = [one for one in results if one["method"] == method and one["seed"] == 1]
    return float(min(found, key=lambda one: _or_infinite(one["validation_loss"]))["rate"])


def _or_infinite(loss: float | None) -> float:
    return float("inf") if loss is None else loss


def best(results: Results, method: str) -> list[Result]:
    """The runs of a method at its rate, by seed."""
    rate = chosen(results, method)
    found = [one for one in results if one["method"] == method and one["rate"] == rate]
    return sorted(found, key=lambda one: int(one["seed"]))


def tell(results: Results) -> list[Block]:
    """The table, in words, the curves, the rates that were tried, and the paper."""
    return [_table(results), *_findings(results), _plot(results), _tried(results), _paper(results)]


COLUMNS = (
    "method",
    "peak rate",
    "optimizer steps",
    "loss, mean over replicas",
    "loss of the merged model",
    "perplexity",
    "against data parallel, nats",
    "bytes/token between stages",
    "bytes/token between replicas",
)


def _table(results: Results) -> Table:
    rows = []
    for name, method in METHODS.items():
        found = best(results, name)
        losses = [one["validation_loss"] for one in found if one["validation_loss"] is not None]
        rows.append(
            (
                method.told,
                f"{found[0]['rate']:g}",
                found[0]["optimizer_steps"],
                mean_std(losses),
                mean_std([one["merged_loss"] for one in found if one["merged_loss"] is not None]),
                mean_std([exp(loss) for loss in losses]),
                mean_std(against_parallel(results, name), 3),
                f"{found[0]['between_stages']:.4g}",
                f"{found[0]['between_replicas']:.4g}",
            )
        )
    first = results[0]
    caption = (
        f"{sum(first['parameters']):,} parameters, {first['tokens']:,} tokens in each run, mean ± standard deviation "
        f"over {len(best(results, 'noloco'))} seeds. Losses in nats per byte on the same held-out text. Differences "
        "are of runs with the same seed."
    )
    return Table(COLUMNS, rows, caption)


def against_parallel(results: Results, method: str) -> list[float]:
    """Held-out loss less that of data parallel with the same seed, for every seed that both have."""
    pairs = zip(best(results, method), best(results, "parallel"), strict=False)
    losses = [(mine["validation_loss"], theirs["validation_loss"]) for mine, theirs in pairs]
    return [mine - theirs for mine, theirs in losses if mine is not None and theirs is not None]


def _findings(results: Results) -> list[str]:
    """In words, with the numbers."""
    noloco, apart, parallel = (best(results, name) for name in ("noloco", "apart", "parallel"))
    below = sum(
        _or_infinite(a["validation_loss"]) < _or_infinite(b["validation_loss"]) for a, b in _pairs(noloco, apart)
    )
    ratio = parallel[0]["between_replicas"] / noloco[0]["between_replicas"]
    above = {name: mean_std(against_parallel(results, name), 3) for name in METHODS}
    return [
        f"Against synchronous data parallel (nats, more is worse) NoLoCo ends at {above['noloco']}, replicas that "
        f"never meet at {above['apart']}, one process with {REPLICAS} times the optimizer steps at {above['one']}. "
        f"NoLoCo is below the replicas that never meet with {below} of {len(noloco)} seeds.",
        "The model whose weights are the mean over the replicas, against the replicas themselves, in nats: "
        f"{merged_against_replicas(noloco)} for NoLoCo, {merged_against_replicas(apart)} for replicas that never meet. "
        "Near zero or below it the replicas are one model; above it they are several.",
        f"Between replicas the ring moves {ratio:.3g} times the bytes of NoLoCo with m = {ROUND_STEPS}, and every step "
        "waits for it.",
    ]


def merged_against_replicas(results: list[Result]) -> str:
    """Loss of the merged model less the mean loss of the replicas, over seeds."""
    losses = [(one["merged_loss"], one["validation_loss"]) for one in results]
    return mean_std([merged - mean for merged, mean in losses if merged is not None and mean is not None], 2)


def _pairs(mine: list[Result], theirs: list[Result]) -> list[tuple[Result, Result]]:
    return list(zip(mine, theirs, strict=False))


def _plot(results: Results) -> Plot:
    curves = []
    for name, method in METHODS.items():
        found = [one["curve"] for one in best(results, name)]
        points = [(same[0][0], [loss for _, loss in same]) for same in zip(*found, strict=True)]
        known = [(tokens, losses) for tokens, losses in points if None not in losses]
        curves.append(Curve(method.told, [tokens for tokens, _ in known], [fmean(losses) for _, losses in known]))
    axes = ("tokens, all replicas", "training loss, nats per byte")
    return Plot("convergence", "Training loss at equal tokens, each at its best rate", axes, curves)


def _tried(results: Results) -> Table:
    rates = sorted({one["rate"] for one in results})
    rows = []
    for name, method in METHODS.items():
        losses = {one["rate"]: one["validation_loss"] for one in results if (one["method"], one["seed"]) == (name, 1)}
        cells = [None if rate not in losses else f"{_or_infinite(losses[rate]):.4g}" for rate in rates]
        rows.append((method.told, *cells, f"{chosen(results, name):g}"))
    caption = "Held-out loss (mean over the replicas, first seed) by peak learning rate; a dash: not tried."
    return Table(("method", *(f"{rate:g}" for rate in rates), "chosen"), rows, caption)


def _paper(results: Results) -> str:
    row = next(one for one in published()["final_perplexity"] if (one["size"], one["dp"], one["pp"]) == ("small", 8, 2))
    ratios = {data: row[data]["noloco"] / row[data]["fsdp"] for data in ("reddit", "c4")}
    mine = mean_std([exp(gap) for gap in against_parallel(results, "noloco")], 3)
    return (
        f"The paper's small model at 8 × 2 (arXiv 2506.10911, final perplexities): NoLoCo over data parallel "
        f"{ratios['reddit']:.3f} on Reddit, {ratios['c4']:.3f} on C4, after 25,000 steps; here {mine}."
    )


EXPERIMENT = Experiment(
    "convergence",
    question="What does it cost in loss that replicas meet one peer now and then, instead of all of them at every "
    "step or nobody at all, when everybody reads the same number of tokens?",
    setting=f"A byte-level Llama (full size: about a million parameters) in {STAGES} stages on the text of the "
    f"standard library; {REPLICAS} replicas of each stage, one microbatch of 4 × 64 tokens for each and inner step; "
    "the node's own code in the simulator over real torch stages. *One process*: a single replica, the same "
    f"microbatches one after the other, {REPLICAS} times the optimizer steps. *Synchronous data parallel*: one replica "
    f"that takes its steps on the microbatches of {REPLICAS}, which is what replicas compute that average "
    "their gradients (order of additions apart); its bytes are those of a ring all-reduce in float32. *NoLoCo*: "
    "matched pairs every "
    f"{ROUND_STEPS} inner steps, α 0.5, β = γ = 0.7, balanced routes. *No communication*: fixed routes, so "
    f"{REPLICAS} models that never meet. The data streams, the schedule (a tenth warm-up, cosine to a tenth) and the "
    "clip over each stage are the same for all. The learning rate of each method is the best of the same geometric "
    "grid with the first seed, which is continued while the best is at its end; the other seeds use it.",
    limits="A model of this size after a few hundred steps is far from converged, and its batch is far below the size "
    "at which more parallelism stops to pay: the order of the methods can be seen here, and whether the replicas form "
    "one model; the size of the gaps at 25,000 steps and a hundred times the parameters cannot. The one process takes "
    "eight times the optimizer steps, so it shows what small batches give, not what communication costs. Rates were "
    "chosen with one seed on the held-out text that is reported, and other settings (m, α, γ) not at all. Nothing "
    "here is about seconds.",
    runs=runs,
    measure=measure,
    tell=tell,
    further=further,
)
