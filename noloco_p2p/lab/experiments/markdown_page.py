"""An experiment's report in Markdown: its blocks, and how they are written."""

from collections.abc import Sequence
from dataclasses import dataclass

from noloco_p2p import humanize
from noloco_p2p.observe.plotting.plots import Chart

Cell = str | int | float | None
"""A float is shown with four significant digits, None as a dash."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    """Markdown above the table."""


Block = str | Table | Chart
"""A string is a paragraph of Markdown (a heading: `### …`)."""


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
