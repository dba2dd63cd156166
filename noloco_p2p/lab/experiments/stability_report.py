"""The report of the experiment `stability`: where the spread grew, beside the conditions that say where it should."""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from noloco_p2p.lab.experiments import bounds
from noloco_p2p.lab.experiments.markdown_page import Block, Cell, Table, table
from noloco_p2p.lab.experiments.results import group, mean_std
from noloco_p2p.lab.experiments.spec import Result, Results
from noloco_p2p.observe.plotting.plots import Curve, Heatmap, Plot

NAMED = (0.9, 0.7)
"""The point (α, γ) of METHOD.md, "Stability", outside S1."""


@dataclass(frozen=True, slots=True)
class GridPoint:
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
        """The geometric mean over the seeds; None when a run was stopped because nothing was finite."""
        found = [one["growth"] for one in self.results]
        return None if None in found else statistics.geometric_mean(found)

    @property
    def grew(self) -> bool:
        """The spread grew while the learning rate fell."""
        return self.growth is None or self.growth >= 1


Points = Sequence[GridPoint]
Typical = Mapping[tuple[int, float], float]
"""By (replicas, α): the γ up to which nearly every run stays together."""


def report(results: Results) -> list[Block]:
    """Where the spread grew, beside the bounds."""
    trained = [one for one in results if one["kind"] == "training"]
    typical = {(one["replicas"], one["alpha"]): one["bound"] for one in results if one["kind"] == "typical"}
    points = [
        GridPoint(replicas, alpha, gamma, runs)
        for (replicas, alpha, gamma), runs in sorted(group(trained, "replicas", "alpha", "gamma").items())
    ]
    series: dict[tuple[int, float], list[GridPoint]] = {}
    for point in points:
        series.setdefault((point.replicas, point.alpha), []).append(point)
    blocks: list[Block] = [_summary(points, series), _verdicts(points, typical), _crossings(series, typical)]
    for count in sorted({point.replicas for point in points}):
        mine = [point for point in points if point.replicas == count]
        blocks += [_plane(mine, count, typical), _growth_map(mine, count, typical), _by_round(mine, count)]
    named = [point for point in points if (point.alpha, point.gamma) == NAMED]
    return [*blocks, *(_named(point) for point in named), *_noise(points), _all(points)]


def _summary(points: Points, series: Mapping[tuple[int, float], Points]) -> str:
    inside = [point for point in points if point.gamma < bounds.s1(point.alpha)]
    crossings = [(_crossing(mine), bounds.s1(alpha)) for (_, alpha), mine in series.items()]
    ratios = [crossing / bound for crossing, bound in crossings if crossing is not None]
    began = f"; where it began to grow, γ was {min(ratios):.2f} to {max(ratios):.2f} of S1's γ_max" if ratios else ""
    return f"Inside S1 the spread grew at {sum(point.grew for point in inside)} of {len(inside)} points{began}."


def _verdicts(points: Points, typical: Typical) -> Table:
    """How often each condition was right."""
    conditions: dict[str, Callable[[GridPoint], bool]] = {
        "S1: γ < 2(1−α²)": lambda p: p.gamma < bounds.s1(p.alpha),
        "S1 for N replicas: γ < 2(1−α²) / (1−α/(N−1))": lambda p: p.gamma < bounds.s1(p.alpha, p.replicas),
        "nearly every run, without training": lambda p: p.gamma < typical[p.replicas, p.alpha],
        "paper, eq. 74, n = 2: α < γ < 2+α": lambda p: _within(p.gamma, bounds.equation_74(p.alpha)),
        "paper, eq. 74, n = N": lambda p: _within(p.gamma, bounds.equation_74(p.alpha, p.replicas)),
    }
    rows: list[list[Cell]] = []
    for name, allows in conditions.items():
        said = [(allows(point), point.grew) for point in points]
        counts = [said.count(pair) for pair in ((True, False), (True, True), (False, False), (False, True))]
        rows.append([name, *counts, f"{(counts[0] + counts[3]) / len(said):.0%}"])
    columns = ("condition", "allowed, fell", "allowed, **grew**", "refused, **fell**", "refused, grew", "right")
    return Table(columns, rows, "Points (replicas, α, γ) of the grid, by what each condition said and the spread did.")


def _within(value: float, limits: tuple[float, float]) -> bool:
    return limits[0] < value < limits[1]


def _crossings(series: Mapping[tuple[int, float], Points], typical: Typical) -> Table:
    columns: dict[str, Callable[[tuple[int, float]], Cell]] = {
        "N": lambda key: key[0],
        "α": lambda key: key[1],
        "γ where the spread began to grow": lambda key: _crossing(series[key]),
        "S1": lambda key: bounds.s1(key[1]),
        "S1 for N": lambda key: bounds.s1(key[1], key[0]),
        "nearly every run": lambda key: typical[key],
        "eq. 74, n = 2": lambda key: _range(bounds.equation_74(key[1])),
    }
    caption = (
        "The γ at which the growth per round passes one, interpolated between neighbours of the grid (–: it does not"
        " pass), and what the conditions say."
    )
    return table(columns, series, caption)


def _range(limits: tuple[float, float]) -> str:
    return f"{limits[0]:.3g} to {limits[1]:.3g}"


def _crossing(points: Points) -> float | None:
    """Where the logarithm of the growth first turns positive, on a line between neighbours in γ."""
    known = sorted((point.gamma, math.log(point.growth)) for point in points if point.growth is not None)
    for (low, falls), (high, grows) in itertools.pairwise(known):
        if falls < 0 <= grows:
            return low + (high - low) * -falls / (grows - falls)
    return None


def _bounds(count: int, typical: Typical, unit: Callable[[float], float]) -> list[Curve]:
    """The bounds over α, each divided by `unit(α)`."""
    drawn = [step / 20 for step in range(20)]
    measured = sorted(alpha for replicas, alpha in typical if replicas == count)
    Bound = tuple[str, Sequence[float], Callable[[float], float], Literal["line", "points", "dashed"]]
    kinds: list[Bound] = [
        ("S1", drawn, bounds.s1, "line"),
        (f"S1 for N = {count}", drawn, lambda alpha: bounds.s1(alpha, count), "line"),
        ("nearly every run", measured, lambda alpha: typical[count, alpha], "points"),
        ("eq. 74, lower", drawn, lambda alpha: bounds.equation_74(alpha)[0], "dashed"),
        ("eq. 74, upper", drawn, lambda alpha: bounds.equation_74(alpha)[1], "dashed"),
    ]
    return [Curve(label, xs, [bound(x) / unit(x) for x in xs], style=style) for label, xs, bound, style in kinds]


def _plane(points: Points, count: int, typical: Typical) -> Plot:
    curves = _bounds(count, typical, lambda alpha: 1.0)
    for label, grew in (("spread fell", False), ("spread grew", True)):
        some = [point for point in points if point.grew == grew]
        curves.append(Curve(label, [one.alpha for one in some], [one.gamma for one in some], style="points"))
    return Plot(f"stability-n{count}", f"Where the spread grew, {count} replicas", ("α", "γ"), curves)


def _growth_map(points: Points, count: int, typical: Typical) -> Heatmap:
    alphas = sorted({point.alpha for point in points})
    found = {(p.alpha, round(p.multiple, 3)): p for p in points if (p.alpha, p.gamma) != NAMED}
    multiples = sorted({multiple for _, multiple in found})
    return Heatmap(
        f"growth-n{count}",
        f"Growth of the spread, {count} replicas (cross: it grew)",
        ("α", "γ / γ_max of S1", "factor per round, last third of the run"),
        (alphas, multiples),
        [[found[alpha, multiple].growth for alpha in alphas] for multiple in multiples],
        marked=[key for key, point in sorted(found.items()) if point.grew],
        curves=_bounds(count, typical, bounds.s1),
    )


def _by_round(points: Points, count: int) -> Plot:
    """At the α in the middle of the grid, the mean over the seeds."""
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


def _named(point: GridPoint) -> str:
    change = f"the spread changed by a factor of {point.growth:.3f} a round" if point.growth else "the nodes stopped"
    return (
        f"At α = {point.alpha:g}, γ = {point.gamma:g} with {point.replicas} replicas {change}. S1 allows γ up to"
        f" {bounds.s1(point.alpha):.3g}, for this number of replicas {bounds.s1(point.alpha, point.replicas):.3g};"
        f" eq. 74 asks for {_range(bounds.equation_74(point.alpha))} with n = 2,"
        f" {_range(bounds.equation_74(point.alpha, point.replicas))} with n the number of replicas."
    )


def _noise(points: Points) -> list[Block]:
    """How well the outer rounds alone, with noise in the same pairs, predict the growth."""
    pairs = [(one["noise_growth"], one["growth"]) for point in points for one in point.results if one["growth"]]
    gaps = [abs(math.log(growth / noise)) for noise, growth in pairs]
    same = sum((growth >= 1) == (noise >= 1) for noise, growth in pairs)
    said = "No run came to its end."
    if pairs:
        said = (
            "**Does training matter?** The same pairs of the same runs, with white noise of the learning rate's size in"
            f" the place of training, give the same verdict in {same} of {len(pairs)} runs; their factor per round"
            f" differs by {math.expm1(statistics.median(gaps)):.1%} in the median and {math.expm1(max(gaps)):.1%} at"
            " most."
        )
    ends = [min(map(min, pairs)), max(map(max, pairs))] if pairs else []
    curves = [
        Curve("a run", [noise for noise, _ in pairs], [growth for _, growth in pairs], style="points"),
        Curve("equal", ends, ends, style="dashed"),
    ]
    axes = ("factor per round, noise in the place of training", "factor per round, training")
    return [said, Plot("foretold", "What the outer rounds alone foretell, last third of the runs", axes, curves)]


def _all(points: Points) -> Table:
    def over(name: str) -> Callable[[GridPoint], Cell]:
        def cell(point: GridPoint) -> Cell:
            values = [one[name] for one in point.results]
            return "not finite" if None in values else mean_std(values)

        return cell

    columns: dict[str, Callable[[GridPoint], Cell]] = {
        "N": lambda p: p.replicas,
        "α": lambda p: p.alpha,
        "γ": lambda p: p.gamma,
        "γ/γ_max": lambda p: p.multiple,
        "grew": lambda p: "**yes**" if p.grew else "no",
        "training": over("growth"),
        "noise": over("noise_growth"),
        "mean square, long run": lambda p: bounds.growth(p.alpha, p.gamma, p.replicas),
        "validation loss": over("loss"),
        "loss of the merged model": over("merged_loss"),
    }
    return table(columns, points, "Every point; factors per round, mean ± standard deviation over the seeds.")
