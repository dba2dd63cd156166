"""For which α and γ do the replicas of a stage stay together: under S1, or under the condition of the paper's eq. 74?

One stage (a byte-level Llama of one layer, hidden {SIZES[hidden_size]}, on the standard library's text, real torch
weights, the node's own code in the simulator), 8 and 16 replicas, matched pairs, β = {BETA:g}, m =
{SIZES[inner_steps]}, {ROUNDS} outer rounds, {SLOW_ROUNDS} from α = {SLOW_ALPHA:g} on. The learning rate starts at
{PEAK_LEARNING_RATE:g} without warm-up and falls to 0 as a cosine, so a spread that does not fall with it is maintained
by the outer rounds alone. Growth is the factor per round of the replicas' weight std before the merge, over the last
third of the run (least squares on its logarithm). The spread *grew* if that is 1 or more, or if nodes stopped because
nothing was finite.

- *S1*: γ_max = 2(1−α²), mean square, many replicas. *S1 for N*: the same algebra for N matched replicas, whose
  partners are one another's N−1 others: γ_max = 2(1−α²) / (1−α/(N−1)).
- *Nearly every run*: the γ at which the outer rounds without training neither shrink nor grow deviations in one long
  run (their Lyapunov exponent is 0), found by bisection. It lies above S1, because a few unlucky sequences of pairs
  dominate the mean square.
- *Eq. 74* of arXiv 2506.10911, as far as it is known here: √(n/(2(n−1)))·α < γ < √(n/(2(n−1)))·(2+α), with n the size
  of the group; next to it, the same with n read as the number of replicas.

Limits: One stage of a tiny model and few inner steps per round. With longer rounds the loss's own curvature pulls
replicas together more strongly between two merges. Near the bound the runs are too short to tell a factor of 1.01 from
0.99. Pairs are matched; with one-sided random pulls the mean of the replicas is not kept, and the bound differs. A γ
inside the bound does not promise a good loss. Eq. 74 could not be compared with the paper's text when this was written.
"""

import statistics
from collections.abc import Callable, Mapping
from itertools import product

from noloco_p2p.errors import LocalError
from noloco_p2p.lab.experiments import bounds
from noloco_p2p.lab.experiments.results import Columns, group, over, select, table
from noloco_p2p.lab.experiments.spec import Block, Case, Cell, Figures, Results, Table
from noloco_p2p.lab.experiments.training import TrainingPlan, one_layer_manifest
from noloco_p2p.observe.plotting.plots import Curve, Plot

ALPHAS = (0.0, 0.3, 0.5, 0.7, 0.9)
MULTIPLES = (0.3, 0.6, 0.9, 1.1, 1.4)
"""γ of the grid, in units of S1's γ_max at that α."""
BETA = 0.7
ROUNDS, SLOW_ROUNDS, SLOW_ALPHA = 30, 90, 0.8
"""Outer rounds; the longer run from this α on, because everything changes more slowly."""
NAMED = (0.9, 0.7)
"""The point (α, γ) of METHOD.md, "Stability", outside S1."""
SIZES = {"inner_steps": 2, "hidden_size": 32, "sequence_length": 32, "microbatch_size": 4}
PEAK_LEARNING_RATE = 1e-3


def cases(quick: bool) -> list[Case]:
    """The grid for each number of replicas and each seed, and the bound for nearly every run at each α."""
    alphas, multiples = ((0.0, 0.5, 0.9), (0.6, 0.9, 1.4)) if quick else (ALPHAS, MULTIPLES)
    seeds = {8: range(1)} if quick else {16: range(1), 8: range(2)}
    points = [(alpha, round(multiple * bounds.s1(alpha), 4)) for alpha, multiple in product(alphas, multiples)]
    cases = []
    for count, (alpha, gamma) in product(seeds, [*points, NAMED]):
        point = {"kind": "training", "replicas": count, "alpha": alpha, "gamma": gamma, **SIZES}
        point["rounds"] = SLOW_ROUNDS if alpha >= SLOW_ALPHA else ROUNDS
        cases += [Case.named("n{replicas} a{alpha:g} g{gamma:g} s{seed}", seed=seed, **point) for seed in seeds[count]]
    for count, alpha in product(seeds, alphas):
        cases.append(Case.named("n{replicas} a{alpha:g} {kind}", kind="typical", replicas=count, alpha=alpha, seed=0))
    return cases


def measure(case: Case) -> Figures:
    """Train with one (α, γ), or find the typical bound."""
    from noloco_p2p.lab.experiments.real_swarm import train

    settings = case.settings
    alpha, replicas, seed = settings["alpha"], settings["replicas"], settings["seed"]
    if settings["kind"] == "typical":
        return {"bound": bounds.typical_bound(alpha, replicas, seed=seed)}
    m, steps = settings["inner_steps"], settings["rounds"] * settings["inner_steps"]
    manifest = one_layer_manifest(
        settings,
        steps=steps,
        inner={"peak_learning_rate": PEAK_LEARNING_RATE, "warmup_steps": 0, "final_fraction": 0.0},
        outer={"alpha": alpha, "beta": BETA, "gamma": settings["gamma"], "inner_steps": m}
        | {"pairing": "matched", "allow_unstable": True},
        evaluation={"microbatches": 8},
    )
    try:
        trained = train(TrainingPlan(manifest, (replicas,), seed))
    except LocalError as error:  # a node stops when nothing is finite any more
        return {"growth": None, "spreads": [], "loss": None, "merged_loss": None, "stopped": str(error)}
    spreads = [spread.std for spread in trained.spreads]
    losses = {"loss": trained.validation_loss, "merged_loss": trained.merged_loss}
    # Growth is the factor per round in the last third, where the learning rate falls from a quarter of its peak to 0.
    return losses | {"growth": bounds.slope(spreads[-(len(spreads) // 3) :]), "spreads": spreads, "stopped": None}


# --- the report -------------------------------------------------------------------------------------------------------

Points = Mapping[tuple[int, float, float], Results]
"""The runs of all seeds by (replicas, α, γ)."""
Limits = Mapping[tuple[int, float], Mapping[str, tuple[float, float]]]
"""`bounds.conditions` by (replicas, α)."""


def growth(point: Results) -> float | None:
    """The geometric mean over the seeds; None if a run was stopped because nothing was finite."""
    found = [one["growth"] for one in point]
    return None if None in found else statistics.geometric_mean(found)


def grew(point: Results) -> bool:
    """Whether the spread grew while the learning rate fell."""
    factor = growth(point)
    return factor is None or factor >= 1


def report(results: Results) -> list[Block]:
    """Where the spread grew, compared with the bounds."""
    trained = select(results, kind="training")
    limits = {
        (one["replicas"], one["alpha"]): bounds.conditions(one["alpha"], one["replicas"], one["bound"])
        for one in select(results, kind="typical")
    }
    points = dict(sorted(group(trained, "replicas", "alpha", "gamma").items()))
    series: dict[tuple[int, float], list[tuple[float, float | None]]] = {}
    for (count, alpha, gamma), point in points.items():
        series.setdefault((count, alpha), []).append((gamma, growth(point)))
    crossings = {key: bounds.crossing(grown) for key, grown in series.items()}
    blocks = [_summary(points, crossings), _verdicts(points, limits), _crossings(crossings, limits)]
    for count in sorted({count for count, _, _ in points}):
        mine = {key: point for key, point in points.items() if key[0] == count}
        blocks.append(_plane(mine, count, limits))
    named = [(key[0], point) for key, point in points.items() if key[1:] == NAMED]
    return [*blocks, *(_named(count, point, limits) for count, point in named), _all(points)]


def _summary(points: Points, crossings: Mapping[tuple[int, float], float | None]) -> Block:
    inside = [grew(point) for (_, alpha, gamma), point in points.items() if gamma < bounds.s1(alpha)]
    ratios = [gamma / bounds.s1(alpha) for (_, alpha), gamma in crossings.items() if gamma is not None]
    began = f"; where it began to grow, γ was {min(ratios):.2f} to {max(ratios):.2f} of S1's γ_max" if ratios else ""
    return f"Inside S1 the spread grew at {sum(inside)} of {len(inside)} points{began}."


def _verdicts(points: Points, limits: Limits) -> Block:
    """How often each condition predicted what the spread did."""
    said: dict[str, list[tuple[bool, bool]]] = {}
    for (count, alpha, gamma), point in points.items():
        for name, (low, high) in limits[count, alpha].items():
            said.setdefault(name, []).append((low < gamma < high, grew(point)))
    rows: list[list[Cell]] = []
    for name, pairs in said.items():
        counts = [pairs.count(pair) for pair in ((True, False), (True, True), (False, False), (False, True))]
        rows.append([name, *counts, f"{(counts[0] + counts[3]) / len(pairs):.0%}"])
    columns = ("condition", "allowed, fell", "allowed, **grew**", "refused, **fell**", "refused, grew", "right")
    return Table(columns, rows, "Grid points (replicas, α, γ) by what each condition said and what the spread did.")


def _crossings(crossings: Mapping[tuple[int, float], float | None], limits: Limits) -> Block:
    rows: list[dict[str, Cell]] = []
    for (count, alpha), crossing in crossings.items():
        said = limits[count, alpha].items()
        allowed = {name: _range(limit) if name.startswith("eq.") else limit[1] for name, limit in said}
        rows.append({"N": count, "α": alpha, "γ where the spread began to grow": crossing, **allowed})
    caption = (
        "The γ at which the growth per round crosses one, interpolated between grid points (–: it does not"
        " cross), and what the conditions say."
    )
    return Table(tuple(rows[0]), [list(row.values()) for row in rows], caption)


def _range(limits: tuple[float, float]) -> str:
    return f"{limits[0]:.3g} to {limits[1]:.3g}"


def _plane(points: Points, count: int, limits: Limits) -> Block:
    """The bounds over α, and where the spread fell or grew."""
    drawn = [step / 20 for step in range(20)]
    measured = sorted(alpha for replicas, alpha in limits if replicas == count)
    curves = [
        Curve("S1", [(x, bounds.s1(x)) for x in drawn]),
        Curve(f"S1 for N = {count}", [(x, bounds.s1(x, count)) for x in drawn]),
        Curve("nearly every run", [(x, limits[count, x]["nearly every run"][1]) for x in measured], "points"),
        Curve("eq. 74, lower", [(x, bounds.equation_74(x)[0]) for x in drawn], "dashed"),
        Curve("eq. 74, upper", [(x, bounds.equation_74(x)[1]) for x in drawn], "dashed"),
    ]
    for label, found in (("spread fell", False), ("spread grew", True)):
        some = [(alpha, gamma) for (_, alpha, gamma), point in points.items() if grew(point) == found]
        curves.append(Curve(label, some, "points"))
    return Plot(f"stability-n{count}", f"Where the spread grew, {count} replicas", ("α", "γ"), curves)


def _named(count: int, point: Results, limits: Limits) -> str:
    (alpha, gamma), factor = NAMED, growth(point)
    change = f"the spread changed by a factor of {factor:.3f} per round" if factor else "the nodes stopped"
    said = limits[count, alpha]
    return (
        f"At α = {alpha:g}, γ = {gamma:g} with {count} replicas {change}. S1 allows γ up to {said['S1'][1]:.3g}, for"
        f" this number of replicas {said['S1 for N'][1]:.3g}; eq. 74 asks for {_range(said['eq. 74, n = 2'])} with"
        f" n = 2, {_range(said['eq. 74, n = N'])} with n the number of replicas."
    )


def _all(points: Points) -> Block:
    def finite_over(name: str) -> Callable[[Results], Cell]:
        return lambda point: "not finite" if None in [one[name] for one in point] else over(name)(point)

    columns: Columns = {
        "N": "replicas",
        "α": "alpha",
        "γ": "gamma",
        "γ/γ_max": lambda point: point[0]["gamma"] / bounds.s1(point[0]["alpha"]),
        "grew": lambda point: "**yes**" if grew(point) else "no",
        "growth": finite_over("growth"),
        "mean square, long run": lambda p: bounds.growth(p[0]["alpha"], p[0]["gamma"], p[0]["replicas"]),
        "validation loss": finite_over("loss"),
        "loss of the merged model": finite_over("merged_loss"),
    }
    caption = "Every point; factors per round, mean ± standard deviation over the seeds."
    return table(columns, points.values(), caption)
