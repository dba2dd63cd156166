"""Which m, α, β, γ and learning rate should a run of NoLoCo have, and which m, γ and rate a run of gossip, with 4, 8
and 16 replicas (arXiv 2506.10911, open question 1)?

One stage: a byte-level Llama of {SIZES[layers]} layer (hidden {SIZES[hidden]}) on the standard library's text,
microbatches of 4 × 32 tokens, one per replica and inner step, Muon, a tenth of warm-up and a cosine to a tenth;
matched pairs, rounds that are waited for; gossip in int4. The search goes one coordinate at a time: every setting is
the rule's default with one value changed. For every setting and number of replicas the peak rate is the best of
{RATES} with the first seed, by the loss on held-out text (nats per byte, mean over the replicas). While the best is the
lowest or highest, half or twice that rate is tried as well, up to five rates in total. The other seeds use the best.
*Minus the default's*: the loss minus that of the default with the same seed, each at its own best rate. *Better* or
*worse*: the mean difference is more than {SURE} times its standard error over the seeds, and none has the other sign;
*unclear* otherwise. So the recommendation for each value is the best one that is better, or otherwise the default.

Limits: A tiny model in a short run, whose weights move fast: long runs want a larger m, and their α, β and γ act over
many more rounds. Rates have a factor of 2 between them, and were chosen on the text that is reported and with one seed,
which counts among the others. With few seeds and many comparisons, some settings differ by {SURE} standard errors by
chance. Changing two values at once is not tried, and bytes, which depend on m, are not weighed against loss.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from noloco_p2p.lab.experiments.rate_search import best_rate, next_runs
from noloco_p2p.lab.experiments.results import Columns, above, mean_std, over, select, table
from noloco_p2p.lab.experiments.spec import Block, Case, Figures, Results, Table
from noloco_p2p.lab.experiments.training import TrainingPlan, sized_manifest

REPLICAS = (4, 8, 16)
RATES = (1.4e-2, 2.8e-2)
SIZES = {"hidden": 32, "layers": 1}
SURE = 2.0
TRIED: Mapping[str, Mapping[str, Sequence[float]]] = {
    "noloco": {"inner_steps": (5, 20), "alpha": (0.3, 0.7), "beta": (0.4, 1.0), "gamma": (0.4, 1.0)},
    "gossip": {"inner_steps": (2, 4), "gamma": (0.35,)},
}
"""For each rule, what is tried instead of its defaults (METHOD.md, "Outer rules"), one value at a time."""
SYMBOLS = {"inner_steps": "m", "alpha": "α", "beta": "β", "gamma": "γ"}
DEFAULT = "default"


class Setting(NamedTuple):
    """A rule with one change, for one number of replicas."""

    rule: str
    replicas: int
    what: str
    """The key that is changed, or DEFAULT."""
    value: float
    """Its new value."""

    def __str__(self) -> str:
        return "the default" if self.what == DEFAULT else f"{SYMBOLS[self.what]} = {self.value:g}"


def settings(rule: str, replicas: int) -> list[Setting]:
    """Every setting of a rule, the default first."""
    changes = [(DEFAULT, 0.0), *((what, value) for what, values in TRIED[rule].items() for value in values)]
    return [Setting(rule, replicas, *change) for change in changes]


SETTINGS = [one for replicas in REPLICAS for rule in TRIED for one in settings(rule, replicas)]


def cases(quick: bool) -> list[Case]:
    """Every setting at every rate with the first seed."""
    return [_case(one, rate, 1, quick) for one in SETTINGS for rate in RATES]


def further(quick: bool, results: Results) -> list[Case]:
    """Rates beyond a setting's best one while that is the lowest or highest; then the other seeds at the best."""
    return [_case(one, *run, quick) for one in SETTINGS for run in next_runs(first_runs(results, one), RATES, seeds=3)]


def first_runs(results: Results, setting: Setting) -> Results:
    """A setting's runs with the first seed: every rate that was tried."""
    return select(results, **setting._asdict(), seed=1)


def _case(setting: Setting, rate: float, seed: int, quick: bool) -> Case:
    name, steps = "{rule}-{replicas}-{what}-{value:g}-{rate:g}-{seed}", 80 if quick else 400
    return Case.named(name, **setting._asdict(), rate=rate, seed=seed, steps=steps, **SIZES)


def measure(case: Case) -> Figures:
    """The final loss."""
    from noloco_p2p.lab.experiments.real_swarm import train

    one = case.settings
    changed = {} if one["what"] == DEFAULT else {one["what"]: one["value"]}
    inner = {"optimizer": "muon", "peak_learning_rate": one["rate"]}
    manifest = sized_manifest(one, inner, sequence_length=32, outer={"rule": one["rule"], **changed})
    trained = train(TrainingPlan(manifest, (one["replicas"],), one["seed"]))
    return trained.figures("validation_loss", "merged_loss", "tokens") | {"parameters": sum(trained.parameters)}


# --- the report -----------------------------------------------------------------------------------------------------


def verdict(differences: Sequence[float]) -> str:
    """`better`, `worse` or `unclear`: whether the differences from the default are surely below or above 0."""
    if len(differences) < 2:
        return "unclear"
    mean, error = fmean(differences), stdev(differences) / sqrt(len(differences))
    one_sign = min(differences) > 0 or max(differences) < 0
    if not one_sign or abs(mean) <= SURE * error:
        return "unclear"
    return "better" if mean < 0 else "worse"


def report(results: Results) -> list[Block]:
    """The recommendation; and for each rule and number of replicas, every setting against the default."""
    blocks: list[Block] = []
    advice = []
    for rule in TRIED:
        for replicas in REPLICAS:
            default, *_ = every = settings(rule, replicas)
            runs = {one: select(results, **one._asdict(), rate=best_rate(first_runs(results, one))) for one in every}
            gaps = {one: above(runs[one], runs[default], "validation_loss") for one in runs}
            blocks.append(_table(runs, runs[default], gaps))
            advice.append(f"`{rule}` with {replicas} replicas: {_advice(gaps)}")
    return [f"Recommended: {'; '.join(advice)}.", *blocks]


def _table(runs: Mapping[Setting, Results], default: Results, gaps: Mapping[Setting, list[float]]) -> Table:
    columns: Columns = {
        "setting": str,
        "peak rate": lambda one: f"{runs[one][0]['rate']:g}",
        "held-out loss": lambda one: over("validation_loss")(runs[one]),
        "minus the default's": lambda one: mean_std(gaps[one], 2),
        "verdict": lambda one: "–" if one.what == DEFAULT else verdict(gaps[one]),
    }
    first = default[0]
    caption = (
        f"`{first['rule']}`, {first['replicas']} replicas, {first['tokens']:,} tokens, {first['parameters']:,}"
        f" parameters, {len(default)} seeds."
    )
    return table(columns, runs, caption)


def _advice(gaps: Mapping[Setting, list[float]]) -> str:
    better: dict[str, Setting] = {}
    for one in sorted((one for one in gaps if verdict(gaps[one]) == "better"), key=lambda one: fmean(gaps[one])):
        better.setdefault(one.what, one)
    return ", ".join(f"{one} ({mean_std(gaps[one], 2)})" for one in better.values()) or "the defaults"
