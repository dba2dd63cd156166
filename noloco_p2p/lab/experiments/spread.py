"""Does the spread of the replicas' weights follow the learning rate over a run, as the paper reports?

A byte-level Llama of two layers (hidden 64) on the text of the standard library, one layer a stage, {REPLICAS}
replicas of each stage, balanced routes, matched pairs, α 0.5, β 0.7, γ 0.7; the node's own code in the simulator over
real torch stages. Peak learning rate {PEAK:g} after a warm-up of a tenth of the run, then a cosine to a tenth of it.
Microbatches of 8 × 64 tokens, one for each origin and inner step. The spread is exact, measured at every outer round.
Varied: m, and as controls a rate that stays at its peak, and no outer rounds.

Limits: A model of two layers and a few hundred steps, at one peak rate and one number of replicas. A correlation over
a run has as many points as outer rounds, they are no independent draws, and anything that falls with time correlates
with a falling rate: the two controls, not r, say whether the rate is the cause. The paper's range is over its models
and runs, ours over seeds and stages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from statistics import correlation, fmean, linear_regression
from typing import Literal

from noloco_p2p.lab.experiments.markdown_page import Block, Cell, Table, table
from noloco_p2p.lab.experiments.results import known, mean_std, published, select
from noloco_p2p.lab.experiments.spec import Case, Experiment, Figures, Results, describe
from noloco_p2p.lab.experiments.training import TrainingPlan, small_manifest
from noloco_p2p.observe.plotting.plots import Curve, Plot

REPLICAS = 8
"""Of each of two stages."""
STAGES = (0, 1)
PEAK = 3e-3
"""Peak learning rate."""


@dataclass(frozen=True, slots=True)
class SpreadArm:
    """One way to train; equal seeds read equal data."""

    name: str
    inner_steps: int = 10
    """m, and without outer rounds the inner steps from one measurement of the spread to the next."""
    final_fraction: float = 0.1
    """Learning rate of the last step over the peak; 1: it stays there after the warm-up."""
    pairing: str = "matched"


ARMS = (
    SpreadArm("m = 10"),
    SpreadArm("m = 5", inner_steps=5),
    SpreadArm("m = 20", inner_steps=20),
    SpreadArm("constant rate", final_fraction=1.0),
    SpreadArm("no outer rounds", pairing="none"),
)


# --- the cases ------------------------------------------------------------------------------------------------------


def cases(quick: bool) -> list[Case]:
    """Every arm with every seed."""
    seeds, steps = (range(1, 2), 160) if quick else (range(1, 4), 300)
    return [
        Case(f"{arm.name.replace(' ', '-')}-{seed}", {"arm": arm.name, "steps": steps, "seed": seed})
        for seed in seeds
        for arm in ARMS
    ]


def measure(case: Case) -> Figures:
    """`spread`: by stage, (inner step, learning rate, std) of every measurement that is finite; and the final loss."""
    from noloco_p2p.lab.experiments.real_swarm import train

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
    summary = train(TrainingPlan(manifest, (REPLICAS, REPLICAS), settings["seed"]))
    spread = [[(one.step, one.learning_rate, one.std) for one in summary.finite_spreads(stage)] for stage in STAGES]
    return summary.figures("validation_loss", "tokens", "rounds") | {"spread": spread}


# --- what they say --------------------------------------------------------------------------------------------------

Series = Sequence[tuple[int, float, float]]
"""(inner step, learning rate, std), in order."""


def pearson(series: Series) -> float | None:
    """r of std and learning rate; None for fewer than three points, or when one of the two never changes."""
    rates, stds = [rate for _, rate, _ in series], [std for _, _, std in series]
    if len(series) < 3 or len(set(rates)) == 1 or len(set(stds)) == 1:
        return None
    return correlation(rates, stds)


def falling(series: Series) -> Series:
    """From the highest learning rate on: the warm-up is left out."""
    peak = max(range(len(series)), key=lambda at: series[at][1], default=0)
    return series[peak:]


def delay(series: Series) -> tuple[int, float] | None:
    """How many points the std lags behind the rate: the shift, at most a third of the run, with the largest r, and r.

    None where the rate does not change after the warm-up, or the std does not follow it at all (no r above 0).
    """
    if pearson(falling(series)) is None:
        return None
    found: list[tuple[int, float]] = []
    for shift in range(len(series) // 3 + 1):
        pairs = zip(series, series[shift:], strict=False)
        r = pearson([(step, rate, std) for (_, rate, _), (step, _, std) in pairs])
        if r is not None and r > 0:
            found.append((shift, r))
    return max(found, key=lambda one: one[1], default=None)


def exponent(series: Series) -> float | None:
    """p of std ∝ rate^p, the least-squares line through the logarithms; None where `pearson` is."""
    if pearson(series) is None or min(min(rate, std) for _, rate, std in series) <= 0:
        return None
    return linear_regression([log(rate) for _, rate, _ in series], [log(std) for _, _, std in series]).slope


def remaining(series: Series, column: int) -> float:
    """The mean of the last tenth of a series over its largest value: 1 where nothing fell. Column 1 rate, 2 std."""
    values = [point[column] for point in series]
    return fmean(values[-max(1, len(values) // 10) :]) / max(values)


def report(results: Results) -> list[Block]:
    """The correlations beside the paper's, how far both fall, and both over the run."""
    return [
        _correlations(results),
        *(_finding(results, arm) for arm in ARMS),
        *(_plot(results, stage) for stage in STAGES),
    ]


def _correlations(results: Results) -> Table:
    def over(measure: Callable[[Series], float | None], digits: int) -> Callable[[tuple[SpreadArm, int]], Cell]:
        """Mean ± std over the seeds that have it."""

        def cell(row: tuple[SpreadArm, int]) -> Cell:
            every = [one["spread"][row[1]] for one in select(results, arm=row[0].name)]
            return mean_std(known(measure(series) for series in every if series), digits)

        return cell

    def delayed(part: int) -> Callable[[Series], float | None]:
        return lambda series: None if (found := delay(series)) is None else found[part]

    columns: dict[str, Callable[[tuple[SpreadArm, int]], Cell]] = {
        "arm": lambda row: row[0].name,
        "stage": lambda row: str(row[1]),
        "measurements": over(len, 4),
        "r": over(pearson, 3),
        "r after the warm-up": over(lambda series: pearson(falling(series)), 3),
        "rounds behind": over(delayed(0), 2),
        "r of that shift": over(delayed(1), 3),
        "p": over(lambda series: exponent(falling(series)), 3),
        "rate left": over(lambda series: remaining(series, 1), 2),
        "std left": over(lambda series: remaining(series, 2), 2),
    }
    caption = (
        "Pearson correlation r of the weight std (over the replicas of a stage, θ before the merge) with the learning "
        "rate, over the outer rounds of a run; `after the warm-up` leaves out what comes before the peak, the exponent "
        "p is that of std ∝ rate^p there. `rounds behind` is the shift of the std against the rate with the largest r, "
        "found after the fact. `left` is the mean of the last tenth of the run over the largest value. Mean ± standard "
        "deviation over seeds; a dash where the rate does not change, or the std does not follow it. With a constant "
        "rate r is that of the warm-up alone."
    )
    ours = table(columns, [(arm, stage) for arm in ARMS for stage in STAGES], caption)
    low, high = published()["pearson_weight_std_vs_lr"]
    return Table(ours.columns, [*ours.rows, ("paper", "–", "–", f"{low} … {high}", *"––––––")], caption)


def _finding(results: Results, arm: SpreadArm) -> str:
    """In words: the range of r over seeds and stages beside the paper's, and how far rate and std fall."""
    low, high = published()["pearson_weight_std_vs_lr"]
    every = [series for one in select(results, arm=arm.name) for series in one["spread"] if series]
    if not every:
        return f"{arm.name}: the weights were never finite at a round."
    found = known(map(pearson, every))
    left = [fmean(remaining(series, column) for series in every) for column in (1, 2)]
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
    firsts = [(arm, one["spread"][stage]) for arm in ARMS for one in select(results, arm=arm.name)[:1]]
    rates = [_curve("learning rate", series, 1, "dashed") for arm, series in firsts if arm is ARMS[0]]
    stds = [_curve(f"std, {arm.name}", series, 2, "line") for arm, series in firsts]
    axes = ("inner steps", "beside its largest value")
    return Plot(f"over-the-run-stage-{stage}", f"Weight spread of stage {stage} and learning rate", axes, rates + stds)


def _curve(label: str, series: Series, column: int, style: Literal["line", "dashed"]) -> Curve:
    largest = max((point[column] for point in series), default=1.0)
    return Curve(label, [point[0] for point in series], [point[column] / largest for point in series], style=style)


EXPERIMENT = Experiment("spread", describe(globals()), cases, measure, report)
