"""Functions for reports that select and group results, turn them into tables and curves, and write them in Markdown."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any

from noloco_p2p import humanize
from noloco_p2p.lab.experiments.spec import Block, Cell, Result, Results, Table
from noloco_p2p.observe.plotting.plots import Chart, Curve
from noloco_p2p.observe.plotting.svg import LineStyle

Figure = str | Callable[[Result], float | None]
"""The name of a figure, or a function of the result. Its value is None if it was not finite."""
Column = str | Callable[[Any], Cell]
"""The name of a figure or setting of the row, or a function from the row to the cell."""
Columns = Mapping[str, Column]
"""By title."""


# --- choosing results -------------------------------------------------------------------------------------------------


def select(results: Results, **settings: object) -> list[Result]:
    """The results with these settings, sorted by seed."""
    found = [one for one in results if all(one.case.settings.get(name) == value for name, value in settings.items())]
    return sorted(found, key=lambda one: int(one["seed"]))


def group(results: Results, *names: str) -> dict[tuple[Any, ...], list[Result]]:
    """The results grouped by the values of these settings, in their order."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for one in results:
        groups.setdefault(tuple(one[name] for name in names), []).append(one)
    return groups


def known(results: Results, figure: Figure) -> list[float]:
    """The finite values of a figure."""
    values = [one[figure] if isinstance(figure, str) else figure(one) for one in results]
    return [value for value in values if value is not None]


def above(runs: Results, base: Results, name: str, base_name: str | None = None) -> list[float]:
    """A figure of each run minus that of the base run with the same seed, if both are finite.

    `base_name`: the base's figure, if it is another one. Runs beyond the shorter of the two lists are left out.
    """
    pairs = ((mine[name], other[base_name or name]) for mine, other in zip(runs, base, strict=False))
    return [mine - other for mine, other in pairs if mine is not None and other is not None]


def loss(result: Result) -> float:
    """Final loss on held-out text, mean over the replicas; infinite if it was not finite."""
    return inf if result["validation_loss"] is None else float(result["validation_loss"])


def total_shares(results: Results, figure: Callable[[Result], Mapping[Any, int]]) -> dict[Any, float]:
    """A tally summed over the results, each name's count as a share of the total, sorted by name."""
    totals = sum((Counter(figure(one)) for one in results), Counter[Any]())
    return {name: count / totals.total() for name, count in sorted(totals.items())}


# --- showing results in a report --------------------------------------------------------------------------------------


def table(columns: Columns, rows: Iterable[Any], caption: str = "", *more: Sequence[Cell]) -> Table:
    """A table with one row for each of `rows`, and `more` finished rows. A column given by name needs rows that are
    results or groups of results, of which the first is taken."""

    def cell(row: Any, column: Column) -> Cell:
        if not isinstance(column, str):
            return column(row)
        found: Cell = (row if isinstance(row, Result) else row[0])[column]
        return found

    cells = [[cell(row, column) for column in columns.values()] for row in rows]
    return Table(tuple(columns), [*cells, *more], caption)


def over(figure: Figure, digits: int = 4) -> Callable[[Results], Cell]:
    """A column for rows that are groups of results: mean ± std of a figure over the group."""
    return lambda results: mean_std(known(results, figure), digits)


def mean_std(values: Sequence[float], digits: int = 4) -> str:
    """`mean ± standard deviation` of a sample; a single value alone; a dash if empty. `digits`: of the mean."""
    if len(values) < 2:
        return humanize.figure(values[0] if values else None, digits)
    return plus_minus(statistics.fmean(values), statistics.stdev(values), digits)


def value_range(values: Sequence[float]) -> str:
    """The smallest and the largest value; a dash if there are none."""
    ends = [humanize.figure(value, 3) for value in (min(values), max(values))] if values else ["–"]
    return " to ".join(dict.fromkeys(ends))


def plus_minus(mean: float, std: float, digits: int = 4) -> str:
    """A mean and its standard deviation."""
    return f"{humanize.figure(mean, digits)} ± {humanize.figure(std, 2)}"


def mean_curve(label: str, runs: Iterable[Iterable[tuple[float, float | None]]], style: LineStyle = "line") -> Curve:
    """The mean over runs of (x, y) points, at every x at which all of them are finite."""
    known = [{x: y for x, y in run if y is not None} for run in runs]
    common = sorted(set.intersection(*map(set, known))) if known else []
    return Curve(label, [(x, statistics.fmean(run[x] for run in known)) for x in common], style)


# --- the page ---------------------------------------------------------------------------------------------------------


def charts(blocks: Sequence[Block]) -> list[Chart]:
    """The charts among the blocks. Raises ValueError if two have the same name."""
    found = [block for block in blocks if isinstance(block, Chart)]
    names = [chart.name for chart in found]
    if len(set(names)) < len(names):
        raise ValueError(f"two charts have the same name: {sorted(names)}")
    return found


def markdown(blocks: Sequence[Block]) -> str:
    """The blocks, separated by blank lines. Charts are files next to the page."""
    return "\n\n".join(_block(block) for block in blocks) + "\n"


def _block(block: Block) -> str:
    if isinstance(block, str):
        return block.strip()
    if isinstance(block, Table):
        return _table(block)
    return f"![{block.title}]({block.name}.svg)"


def _table(table: Table) -> str:
    rows = [table.columns, *(tuple(_cell(cell) for cell in row) for row in table.rows)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(table.columns))
    return "\n".join([*([table.caption, ""] if table.caption else []), *lines])


def _cell(cell: Cell) -> str:
    if cell is None or isinstance(cell, float):
        return humanize.figure(cell, 4)
    return str(cell).replace("|", "\\|")
