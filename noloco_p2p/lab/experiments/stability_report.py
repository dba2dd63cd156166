"""The report of experiment 3: where the spread grew, beside the conditions that say where it should."""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from noloco_p2p.lab.experiments import bounds
from noloco_p2p.lab.experiments.markdown_page import Block, Table, mean_std
from noloco_p2p.lab.experiments.spec import Result, Results
from noloco_p2p.observe.plotting.plots import Curve, Heatmap, Plot

NAMED = (0.9, 0.7)
"""The point (α, γ) of method.md §3, outside S1."""
Row = list[str | int | float | None]


@dataclass(frozen=True, slots=True)
class Point:
    """The runs of one (replicas, α, γ)."""

    replicas: int
    alpha: float
    gamma: float
    results: Sequence[Result]

    @property
    def multiple(self) -> float:
        """γ in units of S1's γ_max."""
        return self.gamma / bounds.s1(self.alpha)

    @property
    def growth(self) -> float | None:
        """The geometric mean over the seeds; None when a run was stopped by what was not finite."""
        found = [one["growth"] for one in self.results]
        return None if None in found else statistics.geometric_mean(found)

    @property
    def grew(self) -> bool:
        """The spread grew while the learning rate fell."""
        return self.growth is None or self.growth >= 1


def tell(results: Results) -> list[Block]:
    """Where the spread grew, beside the bounds."""
    trained = [one for one in results if one["kind"] == "training"]
    typical = {(one["replicas"], one["alpha"]): one["bound"] for one in results if one["kind"] == "typical"}
    keys = sorted({(one["replicas"], one["alpha"], one["gamma"]) for one in trained})
    points = [
        Point(*key, [one for one in trained if (one["replicas"], one["alpha"], one["gamma"]) == key]) for key in keys
    ]
    blocks: list[Block] = [_summary(points), _verdicts(points, typical), _crossings(points, typical)]
    for count in sorted({point.replicas for point in points}):
        mine = [point for point in points if point.replicas == count]
        blocks += [_plane(mine, count, typical), _cells(mine, count, typical), _by_round(mine, count)]
    named = [point for point in points if (point.alpha, point.gamma) == NAMED]
    return [*blocks, *(_named(point) for point in named), _noise(points), _foretold(points), _all(points)]


def _summary(points: Sequence[Point]) -> str:
    inside = [point for point in points if point.gamma < bounds.s1(point.alpha)]
    parted = sum(point.grew for point in inside)
    keys = sorted({(point.replicas, point.alpha) for point in points})
    series = [[point for point in points if (point.replicas, point.alpha) == key] for key in keys]
    found = [(_crossing(mine), bounds.s1(mine[0].alpha)) for mine in series]
    ratios = [crossing / bound for crossing, bound in found if crossing is not None]
    began = f"; where it began to grow, γ was {min(ratios):.2f} to {max(ratios):.2f} of S1's γ_max" if ratios else ""
    return f"Inside S1 the spread grew at {parted} of {len(inside)} points{began}."


def _verdicts(points: Sequence[Point], typical: dict[tuple[int, float], float]) -> Table:
    """How often each condition was right."""
    conditions: dict[str, Callable[[Point], bool]] = {
        "S1: γ < 2(1−α²)": lambda p: p.gamma < bounds.s1(p.alpha),
        "S1 for N replicas: γ < 2(1−α²) / (1−α/(N−1))": lambda p: p.gamma < bounds.s1(p.alpha, p.replicas),
        "nearly every run, without training": lambda p: p.gamma < typical[p.replicas, p.alpha],
        "paper, eq. 74, n = 2: α < γ < 2+α": lambda p: _within(p.gamma, bounds.equation_74(p.alpha)),
        "paper, eq. 74, n = N": lambda p: _within(p.gamma, bounds.equation_74(p.alpha, p.replicas)),
    }
    rows: list[Row] = []
    for name, allows in conditions.items():
        said = [(allows(point), point.grew) for point in points]
        counts = [said.count(pair) for pair in ((True, False), (True, True), (False, False), (False, True))]
        rows.append([name, *counts, f"{(counts[0] + counts[3]) / len(said):.0%}"])
    columns = ("condition", "allowed, fell", "allowed, **grew**", "refused, **fell**", "refused, grew", "right")
    return Table(columns, rows, "Points (replicas, α, γ) of the grid, by what each condition said and the spread did.")


def _within(value: float, limits: tuple[float, float]) -> bool:
    return limits[0] < value < limits[1]


def _crossings(points: Sequence[Point], typical: dict[tuple[int, float], float]) -> Table:
    rows: list[Row] = []
    for count, alpha in sorted({(point.replicas, point.alpha) for point in points}):
        mine = [point for point in points if (point.replicas, point.alpha) == (count, alpha)]
        low, high = bounds.equation_74(alpha)
        told = [bounds.s1(alpha), bounds.s1(alpha, count), typical[count, alpha]]
        rows.append([count, alpha, _crossing(mine), *told, f"{low:.3g} to {high:.3g}"])
    columns = ("N", "α", "γ where the spread began to grow", "S1", "S1 for N", "nearly every run", "eq. 74, n = 2")
    caption = (
        "The γ at which the growth per round passes one, interpolated between neighbours of the grid (–: it does not"
        " pass), and what the conditions say."
    )
    return Table(columns, rows, caption)


def _crossing(points: Sequence[Point]) -> float | None:
    """Where the logarithm of the growth first turns positive, on a line between neighbours in γ."""
    known = sorted((point.gamma, math.log(point.growth)) for point in points if point.growth is not None)
    for (low, falls), (high, grows) in itertools.pairwise(known):
        if falls < 0 <= grows:
            return low + (high - low) * -falls / (grows - falls)
    return None


def _curves(count: int, typical: dict[tuple[int, float], float], unit: Callable[[float], float]) -> list[Curve]:
    """The bounds over α, each divided by `unit(α)`."""
    drawn = [step / 20 for step in range(20)]
    measured = sorted(alpha for replicas, alpha in typical if replicas == count)
    kinds: list[tuple[str, Sequence[float], Callable[[float], float]]] = [
        ("S1", drawn, bounds.s1),
        (f"S1 for N = {count}", drawn, lambda alpha: bounds.s1(alpha, count)),
        ("nearly every run", measured, lambda alpha: typical[count, alpha]),
        ("eq. 74, lower", drawn, lambda alpha: bounds.equation_74(alpha)[0]),
        ("eq. 74, upper", drawn, lambda alpha: bounds.equation_74(alpha)[1]),
    ]
    styles: list[Literal["line", "points", "dashed"]] = ["line", "line", "points", "dashed", "dashed"]
    return [
        Curve(label, xs, [bound(x) / unit(x) for x in xs], style=style)
        for (label, xs, bound), style in zip(kinds, styles, strict=True)
    ]


def _plane(points: Sequence[Point], count: int, typical: dict[tuple[int, float], float]) -> Plot:
    curves = _curves(count, typical, lambda alpha: 1.0)
    for label, grew in (("spread fell", False), ("spread grew", True)):
        some = [point for point in points if point.grew == grew]
        curves.append(Curve(label, [one.alpha for one in some], [one.gamma for one in some], style="points"))
    return Plot(f"stability-n{count}", f"Where the spread grew, {count} replicas", ("α", "γ"), curves)


def _cells(points: Sequence[Point], count: int, typical: dict[tuple[int, float], float]) -> Heatmap:
    alphas = sorted({point.alpha for point in points})
    grid = [point for point in points if (point.alpha, point.gamma) != NAMED]
    multiples = sorted({round(point.multiple, 3) for point in grid})
    found = {(point.alpha, round(point.multiple, 3)): point for point in grid}
    rows = [[found[alpha, multiple].growth for alpha in alphas] for multiple in multiples]
    return Heatmap(
        f"growth-n{count}",
        f"Growth of the spread, {count} replicas (cross: it grew)",
        ("α", "γ / γ_max of S1", "factor per round, last third of the run"),
        (alphas, multiples),
        rows,
        marked=[key for key, point in sorted(found.items()) if point.grew],
        curves=_curves(count, typical, bounds.s1),
    )


def _by_round(points: Sequence[Point], count: int) -> Plot:
    """At the α in the middle of the grid, seed by seed averaged."""
    alphas = sorted({point.alpha for point in points})
    alpha = alphas[len(alphas) // 2]
    curves = []
    for point in points:
        spreads = [one["spreads"] for one in point.results]
        if point.alpha == alpha and all(spreads):
            means = [statistics.geometric_mean(same) for same in zip(*spreads, strict=True)]
            curves.append(Curve(f"γ = {point.gamma:g} ({point.multiple:.1f} γ_max)", range(1, len(means) + 1), means))
    title = f"Weight std over {count} replicas, α = {alpha:g}; the learning rate falls to 0"
    return Plot(f"spread-n{count}", title, ("outer round", "std before the merge"), curves, ("linear", "log"))


def _named(point: Point) -> str:
    low, high = bounds.equation_74(point.alpha)
    wide = bounds.equation_74(point.alpha, point.replicas)
    bound, exact = bounds.s1(point.alpha), bounds.s1(point.alpha, point.replicas)
    did = (
        "the nodes stopped" if point.growth is None else f"the spread changed by a factor of {point.growth:.3f} a round"
    )
    return (
        f"At α = {point.alpha:g}, γ = {point.gamma:g} with {point.replicas} replicas {did}. S1 allows γ up to"
        f" {bound:.3g}, for this number of replicas {exact:.3g}; eq. 74 asks for {low:.3g} to {high:.3g} with n = 2,"
        f" {wide[0]:.3g} to {wide[1]:.3g} with n the number of replicas."
    )


def _noise(points: Sequence[Point]) -> str:
    """How well the outer rounds alone foretell the growth."""
    pairs = [(one["growth"], one["noise_growth"]) for point in points for one in point.results if one["growth"]]
    if not pairs:
        return "No run came to its end."
    gaps = [abs(math.log(growth / noise)) for growth, noise in pairs]
    same = sum((growth >= 1) == (noise >= 1) for growth, noise in pairs)
    return (
        "**Does training matter?** The same pairs of the same runs, with white noise of the learning rate's size in the"
        f" place of training, give the same verdict in {same} of {len(pairs)} runs; their factor per round differs by"
        f" {math.expm1(statistics.median(gaps)):.1%} in the median and {math.expm1(max(gaps)):.1%} at most."
    )


def _foretold(points: Sequence[Point]) -> Plot:
    """The factors of all runs against those that noise gives in the same pairs."""
    pairs = [(one["noise_growth"], one["growth"]) for point in points for one in point.results if one["growth"]]
    ends = [min(min(pair) for pair in pairs), max(max(pair) for pair in pairs)] if pairs else []
    curves = [
        Curve("a run", [noise for noise, _ in pairs], [growth for _, growth in pairs], style="points"),
        Curve("equal", ends, ends, style="dashed"),
    ]
    axes = ("factor per round, noise in the place of training", "factor per round, training")
    return Plot("foretold", "What the outer rounds alone foretell, last third of the runs", axes, curves)


def _all(points: Sequence[Point]) -> Table:
    rows: list[Row] = []
    for point in points:
        told = [[one[name] for one in point.results] for name in ("growth", "noise_growth", "loss", "merged_loss")]
        cells = [mean_std(values) if None not in values else "not finite" for values in told]
        theory = bounds.growth(point.alpha, point.gamma, point.replicas)
        place = [point.replicas, point.alpha, point.gamma, point.multiple]
        rows.append([*place, "**yes**" if point.grew else "no", *cells[:2], theory, *cells[2:]])
    growths = ("training", "noise", "mean square, long run")
    columns = ("N", "α", "γ", "γ/γ_max", "grew", *growths, "validation loss", "loss of the merged model")
    caption = "Every point; factors per round, mean ± standard deviation over the seeds."
    return Table(columns, rows, caption)
