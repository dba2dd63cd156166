"""Does the spread of the replicas' weights follow the learning rate? arXiv 2506.10911 finds r = 0.91 … 0.97.

The spread is the weight std over the replicas of a stage on θ before each merge (method.md §5). Two controls: a
learning rate that does not fall, and no outer rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from statistics import correlation, fmean, linear_regression
from typing import Literal

from noloco_p2p.lab.experiments.markdown_page import Block, Table, mean_std
from noloco_p2p.lab.experiments.paper import published
from noloco_p2p.lab.experiments.spec import Case, Experiment, Figures, Result, Results
from noloco_p2p.lab.experiments.training import Training, small_manifest, train
from noloco_p2p.observe.plotting.plots import Curve, Plot

REPLICAS = 8
"""Of each of two stages."""
STAGES = (0, 1)
PEAK = 3e-3
"""Peak learning rate."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train; equal seeds read equal data."""

    name: str
    inner_steps: int = 10
    """m, and without outer rounds the inner steps from one look at the spread to the next."""
    final_fraction: float = 0.1
    """Learning rate of the last step beside the peak; 1: it stays there after the warm-up."""
    pairing: str = "matched"


ARMS = (
    Arm("m = 10"),
    Arm("m = 5", inner_steps=5),
    Arm("m = 20", inner_steps=20),
    Arm("constant rate", final_fraction=1.0),
    Arm("no outer rounds", pairing="none"),
)


# --- the cases ------------------------------------------------------------------------------------------------------


def runs(quick: bool) -> list[Case]:
    """Every arm with every seed."""
    seeds, steps = (range(1, 2), 160) if quick else (range(1, 4), 300)
    return [
        Case(f"{arm.name.replace(' ', '-')}-{seed}", {"arm": arm.name, "steps": steps, "seed": seed})
        for seed in seeds
        for arm in ARMS
    ]


def measure(case: Case) -> Figures:
    """`spread`: by stage, (inner step, learning rate, std) of every look that is finite; and the loss at the end."""
    settings = case.settings
    arm = next(one for one in ARMS if one.name == settings["arm"])
    manifest = small_manifest(
        64,
        len(STAGES),
        routing="balanced",
        steps=settings["steps"],
        inner={"peak_learning_rate": PEAK, "final_fraction": arm.final_fraction},
        outer={"inner_steps": arm.inner_steps, "pairing": arm.pairing},
        evaluation={"every_steps": None, "microbatches": 16},
    )
    found = train(Training(manifest, (REPLICAS, REPLICAS), settings["seed"])).json()
    finite = [one for one in found["spreads"] if one["std"] is not None]
    spread = [
        [(one["step"], one["learning_rate"], one["std"]) for one in finite if one["stage"] == stage] for stage in STAGES
    ]
    return {name: found[name] for name in ("validation_loss", "tokens", "rounds")} | {"spread": spread}


# --- what they say --------------------------------------------------------------------------------------------------

Looks = Sequence[tuple[int, float, float]]
"""(inner step, learning rate, std), in order."""


def pearson(looks: Looks) -> float | None:
    """r of std and learning rate; None for fewer than three looks, or when one of the two never changes."""
    rates, stds = [rate for _, rate, _ in looks], [std for _, _, std in looks]
    if len(looks) < 3 or len(set(rates)) == 1 or len(set(stds)) == 1:
        return None
    return correlation(rates, stds)


def falling(looks: Looks) -> Looks:
    """From the highest learning rate on: the warm-up is left out."""
    peak = max(range(len(looks)), key=lambda at: looks[at][1], default=0)
    return looks[peak:]


def delay(looks: Looks) -> tuple[int, float] | None:
    """By how many looks the std lags behind the rate: the shift, at most a third of the run, with the largest r; and r.

    None where the rate does not change after the warm-up, or the std does not follow it at all (no r above 0).
    """
    if pearson(falling(looks)) is None:
        return None
    found: list[tuple[int, float]] = []
    for shift in range(len(looks) // 3 + 1):
        pairs = zip(looks, looks[shift:], strict=False)
        r = pearson([(step, rate, std) for (_, rate, _), (step, _, std) in pairs])
        if r is not None and r > 0:
            found.append((shift, r))
    return max(found, key=lambda one: one[1], default=None)


def exponent(looks: Looks) -> float | None:
    """p of std ∝ rate^p, the least-squares line through the logarithms; None where `pearson` is."""
    if pearson(looks) is None or min(min(rate, std) for _, rate, std in looks) <= 0:
        return None
    return linear_regression([log(rate) for _, rate, _ in looks], [log(std) for _, _, std in looks]).slope


def kept(looks: Looks, column: int) -> float:
    """The mean of the last tenth of the looks over the largest: 1 where nothing has fallen. Column 1 rate, 2 std."""
    values = [look[column] for look in looks]
    return fmean(values[-max(1, len(values) // 10) :]) / max(values)


COLUMNS = (
    "arm",
    "stage",
    "looks",
    "r",
    "r after the warm-up",
    "rounds behind",
    "r of that shift",
    "p",
    "rate left",
    "std left",
)


def tell(results: Results) -> list[Block]:
    """The correlations beside the paper's, how far both fall, and both over the run."""
    low, high = published()["pearson_weight_std_vs_lr"]
    rows = [_row(arm, stage, _of(results, arm)) for arm in ARMS for stage in STAGES]
    rows.append(("paper", "–", "–", f"{low} … {high}", *"––––––"))
    caption = (
        "Pearson correlation r of the weight std (over the replicas of a stage, θ before the merge) with the learning "
        "rate, over the outer rounds of a run; `after the warm-up` leaves out what comes before the peak, the exponent "
        "p is that of std ∝ rate^p there. `rounds behind` is the shift of the std against the rate with the largest r, "
        "found after the fact. `left` is the mean of the last tenth of the run over the largest value. Mean ± standard "
        "deviation over seeds; a dash where the rate does not change, or the std does not follow it. With a constant "
        "rate r is that of the warm-up alone."
    )
    return [
        Table(COLUMNS, rows, caption),
        *(_finding(results, arm) for arm in ARMS),
        *(_plot(results, stage) for stage in STAGES),
    ]


def _of(results: Results, arm: Arm) -> list[Result]:
    return sorted((one for one in results if one["arm"] == arm.name), key=lambda one: int(one["seed"]))


def _row(arm: Arm, stage: int, found: Results) -> tuple[str, ...]:
    series = [one["spread"][stage] for one in found if one["spread"][stage]]
    delays = [late for looks in series if (late := delay(looks)) is not None]
    return (
        arm.name,
        str(stage),
        mean_std([len(looks) for looks in series]),
        mean_std(_known([pearson(looks) for looks in series]), 3),
        mean_std(_known([pearson(falling(looks)) for looks in series]), 3),
        mean_std([shift for shift, _ in delays], 2),
        mean_std([r for _, r in delays], 3),
        mean_std(_known([exponent(falling(looks)) for looks in series]), 3),
        mean_std([kept(looks, 1) for looks in series], 2),
        mean_std([kept(looks, 2) for looks in series], 2),
    )


def _finding(results: Results, arm: Arm) -> str:
    """In words: the range of r over seeds and stages beside the paper's, and how far rate and std fall."""
    low, high = published()["pearson_weight_std_vs_lr"]
    series = [looks for one in _of(results, arm) for looks in one["spread"] if looks]
    if not series:
        return f"{arm.name}: the weights were never finite at a round."
    found = _known([pearson(looks) for looks in series])
    left = [fmean(kept(looks, column) for looks in series) for column in (1, 2)]
    fall = f"At the end the rate is at {left[0]:.2f} of its largest value, the std at {left[1]:.2f}."
    if not found:
        return f"{arm.name}: too few rounds for a correlation. {fall}"
    within, above = sum(low <= r <= high for r in found), sum(r > high for r in found)
    return (
        f"{arm.name}: r from {min(found):.3f} to {max(found):.3f} over seeds and stages; of {len(found)}, {within} are "
        f"within the paper's {low} … {high} and {above} above. {fall}"
    )


def _plot(results: Results, stage: int) -> Plot:
    """The first seed of every arm, and the falling rate, each over its largest value."""
    curves = []
    for arm in ARMS:
        for one in _of(results, arm)[:1]:
            looks = one["spread"][stage]
            curves.append(_curve(f"std, {arm.name}", looks, 2, "line"))
            if arm is ARMS[0]:
                curves.insert(0, _curve("learning rate", looks, 1, "dashed"))
    axes = ("inner steps", "beside its largest value")
    return Plot(f"over-the-run-stage-{stage}", f"Weight spread of stage {stage} and learning rate", axes, curves)


def _curve(label: str, looks: Looks, column: int, style: Literal["line", "dashed"]) -> Curve:
    largest = max((look[column] for look in looks), default=1.0)
    return Curve(label, [look[0] for look in looks], [look[column] / largest for look in looks], style=style)


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


EXPERIMENT = Experiment(
    "spread",
    question="Does the spread of the replicas' weights follow the learning rate over a run, as the paper reports?",
    setting="A byte-level Llama of two layers (hidden 64) on the text of the standard library, one layer a stage, "
    f"{REPLICAS} replicas of each stage, balanced routes, matched pairs, α 0.5, β 0.7, γ 0.7; the node's own code in "
    f"the simulator over real torch stages. Peak learning rate {PEAK:g} after a warm-up of a tenth of the run, then a "
    "cosine to a tenth of it. Microbatches of 8 × 64 tokens, one for each origin and inner step. The spread is "
    "exact, measured at every outer round. Varied: m, and as controls a rate that stays at its peak, and no outer "
    "rounds.",
    limits="A model of two layers and a few hundred steps, at one peak rate and one number of replicas. A "
    "correlation over a run has as many points as outer rounds, they are no independent draws, and anything that "
    "falls with time correlates with a falling rate: the two controls, not r, say whether the rate is the cause. The "
    "paper's range is over its models and runs, ours over seeds and stages.",
    runs=runs,
    measure=measure,
    tell=tell,
)
