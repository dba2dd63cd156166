"""What the experiment `convergence` says of its results, and the methods that it compares."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp
from statistics import fmean
from types import MappingProxyType

from noloco_p2p.lab.experiments.markdown_page import Block, Table, mean_std
from noloco_p2p.lab.experiments.paper import published
from noloco_p2p.lab.experiments.spec import Result, Results
from noloco_p2p.observe.plotting.plots import Curve, Plot

REPLICAS, STAGES, ROUND_STEPS = 8, 2, 10


@dataclass(frozen=True, slots=True)
class Method:
    """How the replicas of a stage are kept together."""

    told: str
    replicas: int
    """Of each stage, in one swarm."""
    share: int = 1
    """Microbatches of an optimizer step, in units of one replica's."""
    pairing: str = "none"
    routing: str = "fixed"


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "one": Method("one process", 1),
        "parallel": Method("synchronous data parallel", 1, share=REPLICAS),
        "noloco": Method("NoLoCo", REPLICAS, pairing="matched", routing="balanced"),
        "apart": Method("no communication", 1),
    }
)


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
        f"{first['parameters']:,} parameters, {first['tokens']:,} tokens in each run, mean ± standard deviation "
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
