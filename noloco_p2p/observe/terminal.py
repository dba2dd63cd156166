"""How commands print tables: the console, and tables without lines. rich is imported when something is printed."""

import sys
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 100
"""Columns where there is no terminal that has its own."""
COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}
"""Of what is found, by its severity."""


def console() -> "Console":
    """Standard output, as wide as the terminal or WIDTH."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)


def plain_table(columns: Iterable[str], left: Collection[str], rows: Iterable[Iterable[str]] = ()) -> "Table":
    """A table of one line a row; columns are aligned to the right but for those in `left`."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
