"""Printing for commands: the console, and tables without ruled lines."""

import sys
from collections.abc import Collection, Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 100
"""Columns if standard output is not a terminal."""
COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}
"""Colour of a finding, by its severity."""


def console() -> Console:
    """A console on standard output, as wide as the terminal, or WIDTH columns if it is not one."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)


def plain_table(columns: Iterable[str], left: Collection[str], rows: Iterable[Iterable[str | Text]] = ()) -> Table:
    """A table with one line per row. Columns are right-aligned except those in `left`."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
