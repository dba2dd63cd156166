"""For which α and γ do the replicas of a stage stay together: is it S1, or the condition of the paper's eq. 74?

One stage (a byte-level Llama of one layer, hidden {SIZES[hidden_size]}, on the standard library's text, real torch
weights, the node's own code in the simulator), 8 and 16 replicas, matched pairs, β = {BETA:g}, m =
{SIZES[inner_steps]}, {ROUNDS} outer rounds, {SLOW_ROUNDS} from α = {SLOW_ALPHA:g} on. The learning rate begins at
{PEAK_LEARNING_RATE:g} without warm-up and falls to 0 as a cosine, so that a spread that does not fall with it is kept
up by the outer rounds alone. Growth is the factor per round of the replicas' weight std before the merge, over the
last third of the run (least squares on its logarithm); the spread *grew* where that is 1 or more, or where nodes
stopped because nothing was finite.

- *S1*: γ_max = 2(1−α²), mean square, many replicas. *S1 for N*: the same algebra for N matched replicas, whose
  partners are one another's N−1 others: γ_max = 2(1−α²) / (1−α/(N−1)).
- *Nearly every run*: the γ at which the outer rounds without training neither shrink nor grow deviations in one long
  run (their Lyapunov exponent is 0), found by bisection. It lies above S1, because the mean square is carried by few
  unlucky sequences of pairs.
- *Eq. 74* of arXiv 2506.10911, as far as it is known here: √(n/(2(n−1)))·α < γ < √(n/(2(n−1)))·(2+α), with n the size
  of the group; beside it, the same with n read as the number of replicas.

Limits: One stage of a tiny model and few inner steps per round: with longer rounds the loss's own curvature pulls
replicas together more strongly between two merges. Near the bound the runs are too short: a factor of 1.01 and one of
0.99 cannot be told apart. Pairs are matched; with one-sided random pulls the mean of the replicas is not kept, and the
bound is another one. A γ inside the bound is no promise of a good loss. Eq. 74 could not be compared with the paper's
text when this was written.
"""

from collections.abc import Sequence
from functools import partial

from noloco_p2p.core import schedule
from noloco_p2p.errors import LocalError
from noloco_p2p.lab.experiments import bounds
from noloco_p2p.lab.experiments.spec import Case, Experiment, Figures, describe
from noloco_p2p.lab.experiments.stability_report import NAMED, report
from noloco_p2p.lab.experiments.training import TrainingPlan, finite, small_manifest

ALPHAS = (0.0, 0.3, 0.5, 0.7, 0.9)
MULTIPLES = (0.3, 0.6, 0.9, 1.1, 1.4)
"""γ of the grid, in units of S1's γ_max at that α."""
BETA = 0.7
ROUNDS, SLOW_ROUNDS, SLOW_ALPHA = 30, 90, 0.8
"""Outer rounds; from this α on the longer run, because everything changes more slowly."""
SIZES = {"inner_steps": 2, "hidden_size": 32, "sequence_length": 32, "microbatch_size": 4}
PEAK_LEARNING_RATE = 1e-3


def cases(quick: bool) -> list[Case]:
    """The grid for each number of replicas and each seed, and the bound for nearly every run at each α."""
    alphas, multiples = ((0.0, 0.5, 0.9), (0.6, 0.9, 1.4)) if quick else (ALPHAS, MULTIPLES)
    seeds = {8: range(1)} if quick else {16: range(1), 8: range(2)}
    points = [(alpha, round(multiple * bounds.s1(alpha), 4)) for alpha in alphas for multiple in multiples]
    grid = [
        Case(
            f"n{count} a{alpha:g} g{gamma:g} s{seed}",
            {"kind": "training", "replicas": count, "alpha": alpha, "gamma": gamma, "seed": seed}
            | {"rounds": SLOW_ROUNDS if alpha >= SLOW_ALPHA else ROUNDS, **SIZES},
        )
        for count in seeds
        for alpha, gamma in [*points, NAMED]
        for seed in seeds[count]
    ]
    typical = [
        Case(f"n{count} a{alpha:g} typical", {"kind": "typical", "replicas": count, "alpha": alpha, "seed": 0})
        for count in seeds
        for alpha in alphas
    ]
    return grid + typical


def measure(case: Case) -> Figures:
    """Train with one (α, γ), and play the same pairs with noise instead of training; or look for the typical bound."""
    from noloco_p2p.lab.experiments.real_swarm import train

    settings = case.settings
    alpha, replicas, seed = settings["alpha"], settings["replicas"], settings["seed"]
    if settings["kind"] == "typical":
        return {"bound": bounds.typical_bound(alpha, replicas, seed=seed)}
    m, steps = settings["inner_steps"], settings["rounds"] * settings["inner_steps"]
    manifest = small_manifest(
        settings["hidden_size"],
        1,
        sequence_length=settings["sequence_length"],
        microbatch_size=settings["microbatch_size"],
        steps=steps,
        inner={"peak_learning_rate": PEAK_LEARNING_RATE, "warmup_steps": 0, "final_fraction": 0.0},
        outer={"alpha": alpha, "beta": BETA, "gamma": settings["gamma"], "inner_steps": m}
        | {"pairing": "matched", "allow_unstable": True},
        routing="balanced",
        evaluation={"every_steps": None, "microbatches": 8},
    )
    noise = bounds.noise_spreads(
        (alpha, BETA, settings["gamma"]),
        partial(bounds.partners, seed, members=bounds.members(replicas)),
        bounds.round_means([schedule.learning_rate(t, steps, 1.0, 0, 0.0) for t in range(1, steps + 1)], m),
        replicas=replicas,
        seed=seed,
    )
    figures: Figures = {"noise_growth": _growth(noise), "noise_spreads": noise}
    try:
        trained = train(TrainingPlan(manifest, (replicas,), seed))
    except LocalError as error:  # a node stops itself when nothing is finite any more
        return figures | {"growth": None, "spreads": [], "loss": None, "merged_loss": None, "stopped": str(error)}
    spreads = [spread.std for spread in trained.spreads]
    losses = {"loss": finite(trained.validation_loss), "merged_loss": finite(trained.merged_loss)}
    return figures | losses | {"growth": _growth(spreads), "spreads": spreads, "stopped": None}


def _growth(spreads: Sequence[float]) -> float:
    """Factor per round in the last third of the run, where the learning rate falls from a quarter of its peak to 0."""
    return bounds.slope(spreads[-(len(spreads) // 3) :])


EXPERIMENT = Experiment("stability", describe(globals()), cases, measure, report)
