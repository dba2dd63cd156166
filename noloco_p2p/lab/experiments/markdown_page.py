"""The report of an experiment in Markdown: its blocks, and how they are written."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Scale = Literal["linear", "log", "log2"]


Cell = str | int | float | None
"""A float is written with four significant digits, None as a dash."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    """A sentence of Markdown above the table."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line, or a set of points, of a plot."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None
    """Standard deviations, drawn as bars."""
    style: Literal["line", "dashed", "points"] = "line"


@dataclass(frozen=True, slots=True)
class Plot:
    """Curves over two axes; a PNG of this name."""

    name: str
    """File name without its ending, unique in the report."""
    title: str
    axes: tuple[str, str]
    """What stands along x and y, units included."""
    curves: Sequence[Curve]
    scales: tuple[Scale, Scale] = ("linear", "linear")


@dataclass(frozen=True, slots=True)
class Heatmap:
    """Values over a grid; a PNG of this name."""

    name: str
    """File name without its ending, unique in the report."""
    title: str
    axes: tuple[str, str, str]
    """What stands along x and y, and what is coloured, units included."""
    grid: tuple[Sequence[float], Sequence[float]]
    """The x of the columns and the y of the rows, ascending."""
    values: Sequence[Sequence[float | None]]
    """A row for each y, a value for each x; None: not measured, or not finite."""
    marked: Sequence[tuple[float, float]] = ()
    """Cells (x, y) that get a cross."""
    curves: Sequence[Curve] = ()
    """Drawn over it, in the units of the axes."""
    log_values: bool = False
    """Colours follow the logarithm."""


Chart = Plot | Heatmap
Block = str | Table | Plot | Heatmap
"""A string is a paragraph of Markdown (a heading: `### …`)."""


def mean_std(values: Sequence[float], digits: int = 4) -> str:
    """`mean ± standard deviation` of a sample; of one value only that, of none a dash. `digits`: of the mean."""
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.{digits}g}"
    return f"{mean} ± {statistics.stdev(values):.2g}" if len(values) > 1 else mean


def charts(blocks: Sequence[Block]) -> list[Chart]:
    """The charts among the blocks. Raises ValueError when two have the same name."""
    found = [block for block in blocks if isinstance(block, Plot | Heatmap)]
    names = [chart.name for chart in found]
    if len(set(names)) < len(names):
        raise ValueError(f"two charts have the same name: {sorted(names)}")
    return found


def markdown(blocks: Sequence[Block], *, drawn: bool) -> str:
    """The blocks, a blank line between them; `drawn`: the PNGs stand beside the page."""
    return "\n\n".join(_block(block, drawn) for block in blocks) + "\n"


def _block(block: Block, drawn: bool) -> str:
    if isinstance(block, str):
        return block.strip()
    if isinstance(block, Table):
        return _table(block)
    if drawn:
        return f"![{block.title}]({block.name}.png)"
    return f"*Plot “{block.title}”: not drawn, matplotlib is not installed (extra `plots`).*"


def _table(table: Table) -> str:
    rows = [table.columns, *(tuple(_cell(cell) for cell in row) for row in table.rows)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(table.columns))
    return "\n".join([*([table.caption, ""] if table.caption else []), *lines])


def _cell(cell: Cell) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return str(cell).replace("|", "\\|")
