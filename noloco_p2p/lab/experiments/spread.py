"""Does the spread of the replicas' weights follow the learning rate over a run, as the paper reports?

A byte-level Llama of two layers (hidden 64) on the text of the standard library, one layer per stage, {REPLICAS}
replicas of each stage, balanced routes, matched pairs, α 0.5, β 0.7, γ 0.7; the node's own code in the simulator over
real torch stages. Peak learning rate {PEAK:g} after a warm-up of a tenth of the run, then a cosine to a tenth of it.
Microbatches of 8 × 64 tokens, one per origin and inner step. The spread is exact and measured at every outer round.
Varied: m, and as controls a rate that stays at its peak, and no outer rounds.

r is the Pearson correlation of the weight std (over the replicas of a stage, θ before the merge) with the learning
rate, over the outer rounds of a run. *After the warm-up* leaves out what precedes the peak. *Rounds behind* is the
shift of the std against the rate with the largest r, found after the fact.
*Left* is the mean of the last tenth of the run over the largest value. Mean ± standard deviation over seeds; a dash
where the rate does not change, or the std does not follow it. With a constant rate r is that of the warm-up alone.

Limits: A model of two layers and a few hundred steps, at one peak rate and one number of replicas. A correlation over a
run has as many points as outer rounds. These are not independent draws, and anything that falls with time correlates
with a falling rate: the two controls, not r, say whether the rate is the cause. The paper's range is over its models
and runs, ours over seeds and stages.
"""

from collections.abc import Callable, Sequence
from statistics import correlation, fmean

from noloco_p2p.lab.experiments.results import Columns, mean_std, select, table
from noloco_p2p.lab.experiments.spec import Block, Case, Cell, Figures, Results, Table, published
from noloco_p2p.lab.experiments.training import TrainingPlan, small_manifest
from noloco_p2p.observe.plotting.plots import Curve, Plot
from noloco_p2p.observe.plotting.svg import LineStyle

REPLICAS = 8
"""Replicas of each of the two stages."""
STAGES = (0, 1)
PEAK = 3e-3
"""Peak learning rate."""
ARMS: dict[str, dict[str, object]] = {
    "m = 10": {},
    "m = 5": {"inner_steps": 5},
    "m = 20": {"inner_steps": 20},
    "constant rate": {"final_fraction": 1.0},
    "no outer rounds": {"pairing": "none"},
}
"""Ways to train. They differ in m (without outer rounds: the inner steps between two measurements of the spread), in
the final learning rate over the peak, or in the pairing. Runs with equal seeds read equal data."""
DEFAULT = {"inner_steps": 10, "final_fraction": 0.1, "pairing": "matched"}


def cases(quick: bool) -> list[Case]:
    """Every arm with every seed."""
    seeds, steps = (range(1, 2), 160) if quick else (range(1, 4), 300)
    return [
        Case(f"{arm.replace(' ', '-')}-{seed}", {"arm": arm, "steps": steps, "seed": seed})
        for seed in seeds
        for arm in ARMS
    ]


def measure(case: Case) -> Figures:
    """`spread`: by stage, (inner step, learning rate, std) of every finite measurement; and the final loss."""
    from noloco_p2p.lab.experiments.real_swarm import train

    arm = DEFAULT | ARMS[case.settings["arm"]]
    manifest = small_manifest(
        64,
        len(STAGES),
        steps=case.settings["steps"],
        inner={"peak_learning_rate": PEAK, "final_fraction": arm["final_fraction"]},
        outer={"inner_steps": arm["inner_steps"], "pairing": arm["pairing"]},
    )
    summary = train(TrainingPlan(manifest, (REPLICAS, REPLICAS), case.settings["seed"]))
    spread = [[(one.step, one.learning_rate, one.std) for one in summary.finite_spreads(stage)] for stage in STAGES]
    return summary.figures("validation_loss", "tokens", "rounds") | {"spread": spread}


# --- the report -------------------------------------------------------------------------------------------------------

Series = Sequence[tuple[int, float, float]]
"""(inner step, learning rate, std), in order."""


def pearson(series: Series) -> float | None:
    """r of std and learning rate; None for fewer than three points, or if one of the two never changes."""
    rates, stds = [rate for _, rate, _ in series], [std for _, _, std in series]
    if len(series) < 3 or len(set(rates)) == 1 or len(set(stds)) == 1:
        return None
    return correlation(rates, stds)


def falling(series: Series) -> Series:
    """The series from the highest learning rate on, without the warm-up."""
    peak = max(range(len(series)), key=lambda at: series[at][1], default=0)
    return series[peak:]


def delay(series: Series) -> tuple[int, float] | None:
    """(shift, r): how many points the std lags behind the rate, as the shift of at most a third of the run with the
    largest r.

    None if the rate does not change after the warm-up, or the std does not follow it at all (no r above 0).
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


def remaining(series: Series, column: int) -> float:
    """The mean of the last tenth of a series over its largest value: 1 if nothing fell. Column 1: rate, 2: std."""
    values = [point[column] for point in series]
    return fmean(values[-max(1, len(values) // 10) :]) / max(values)


def std_left(series: Series) -> float:
    """What remains of the std."""
    return remaining(series, 2)


def report(results: Results) -> list[Block]:
    """The answer, the correlations compared with the paper's, how far std and rate fall, and both over the run."""
    return [_answer(results), _correlations(results), *(_plot(results, stage) for stage in STAGES)]


def _answer(results: Results) -> str:
    r, falls, stays = (
        _over(select(results, arm=arm), STAGES, measure, 2)
        for arm, measure in (("m = 10", pearson), ("m = 10", std_left), ("constant rate", std_left))
    )
    return (
        f"With m = 10, std and learning rate correlate with r = {r}; at the end the std is at {falls} of its largest"
        f" value, and at {stays} if the rate stays at its peak."
    )


def _over(runs: Results, stages: Sequence[int], measure: Callable[[Series], float | None], digits: int) -> str:
    """Mean ± std over the runs and stages that have a value."""
    values = [measure(one["spread"][stage]) for one in runs for stage in stages if one["spread"][stage]]
    return mean_std([value for value in values if value is not None], digits)


def _correlations(results: Results) -> Table:
    def over(measure: Callable[[Series], float | None], digits: int) -> Callable[[tuple[str, int]], Cell]:
        return lambda row: _over(select(results, arm=row[0]), [row[1]], measure, digits)

    columns: Columns = {
        "arm": lambda row: row[0],
        "stage": lambda row: row[1],
        "measurements": over(len, 4),
        "r": over(pearson, 3),
        "r after the warm-up": over(lambda series: pearson(falling(series)), 3),
        "rounds behind": over(lambda series: (delay(series) or (None, None))[0], 2),
        "r of that shift": over(lambda series: (delay(series) or (None, None))[1], 3),
        "rate left": over(lambda series: remaining(series, 1), 2),
        "std left": over(std_left, 2),
    }
    low, high = published()["pearson_weight_std_vs_lr"]
    rows = [(arm, stage) for arm in ARMS for stage in STAGES]
    return table(columns, rows, "Weight spread and learning rate.", ("paper", "–", "–", f"{low} … {high}", *"–––––"))


def _plot(results: Results, stage: int) -> Plot:
    """The first seed of every arm, and the falling rate, each relative to its largest value."""

    def curve(label: str, series: Series, column: int, style: LineStyle) -> Curve:
        largest = max((point[column] for point in series), default=1.0)
        return Curve(label, [(point[0], point[column] / largest) for point in series], style)

    firsts = {arm: one["spread"][stage] for arm in ARMS for one in select(results, arm=arm)[:1]}
    rates = [curve("learning rate", series, 1, "dashed") for series in list(firsts.values())[:1]]
    stds = [curve(f"std, {arm}", series, 2, "line") for arm, series in firsts.items()]
    axes = ("inner steps", "relative to its largest value")
    return Plot(f"over-the-run-stage-{stage}", f"Weight spread of stage {stage} and learning rate", axes, rates + stds)
