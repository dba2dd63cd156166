"""How rule `dct` divides a parameter into tiles; a few coefficients of each tile travel (METHOD.md, "Outer rules").

A parameter is viewed as a matrix: its last dimension by all the others. Each side of a tile is the largest divisor of
the matrix's side that is at most SIDE, as in DeMo (arXiv 2411.19870). Tiles are in row-major order, and so are the
values in each.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

SIDE, KEPT = 64, 32
"""KEPT values of a tile of SIDE × SIDE travel (arXiv 2510.03371); of a smaller tile the same fraction, rounded up."""
PLACE = "int16"
"""Element type of a position within a tile."""


class Tiling(NamedTuple):
    """The tiles of one parameter."""

    down: int
    across: int
    """Number of tiles in each direction."""
    rows: int
    columns: int
    """Size of a tile."""

    @property
    def kept(self) -> int:
        """Number of values of a tile that travel."""
        return kept_of(self.rows * self.columns)

    @property
    def kept_of_all(self) -> int:
        """Number of values of all tiles that travel."""
        return self.down * self.across * self.kept


def kept_of(parameters: int) -> int:
    """Number of values that travel of this many parameters, if they fill complete tiles."""
    return -(-KEPT * parameters // SIDE**2)


def tiling(shape: Sequence[int]) -> Tiling:
    """The tiles of a parameter of this shape."""
    height, width = prod(shape[:-1]), prod(shape[-1:])
    rows, columns = (max(n for n in range(1, SIDE + 1) if side % n == 0) for side in (height, width))
    return Tiling(height // rows, width // columns, rows, columns)


class Transform(Protocol):
    """The linear, invertible transform through which rule `dct` sees a parameter."""

    def forward(self, value: Any) -> Any:
        """The coefficients of a parameter, in its shape."""

    def largest(self, coefficients: Any) -> Any:
        """The few coefficients of largest magnitude, with 0 in place of all others."""

    def inverse(self, coefficients: Any) -> Any:
        """The parameter with these coefficients; the same bits on any machine."""


class Untransformed:
    """The transform of a parameter that is a single number: the DCT of a 1×1 tile, which keeps its one coefficient."""

    def forward(self, value: Any) -> Any:
        """See `Transform`."""
        return value

    largest = inverse = forward
