"""Tiles of a parameter, of whose coefficients a few travel (METHOD.md, "Outer rules", `dct`).

A parameter is a matrix: its last dimension by all the others. A tile's side is the largest divisor of the matrix's that
is at most SIDE, as in DeMo (arXiv 2411.19870). Tiles follow one another row by row, and so do the values in each.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

SIDE, KEPT = 64, 32
"""Of a tile of SIDE × SIDE, KEPT values travel (arXiv 2510.03371); of a smaller one as large a part, rounded up."""
PLACE = "int16"
"""Element type of a place in a tile."""


class Tiling(NamedTuple):
    """Of one parameter."""

    down: int
    across: int
    """Tiles."""
    rows: int
    columns: int
    """Of a tile."""

    @property
    def kept(self) -> int:
        """Values of a tile that travel."""
        return kept_of(self.rows * self.columns)

    @property
    def kept_of_all(self) -> int:
        """Of all tiles."""
        return self.down * self.across * self.kept


def kept_of(parameters: int) -> int:
    """Values that travel of so many parameters, where their tiles are whole."""
    return -(-KEPT * parameters // SIDE**2)


def tiling(shape: Sequence[int]) -> Tiling:
    """Of a parameter of that shape."""
    height, width = prod(shape[:-1]), prod(shape[-1:])
    rows, columns = (max(n for n in range(1, SIDE + 1) if side % n == 0) for side in (height, width))
    return Tiling(height // rows, width // columns, rows, columns)


class Transform(Protocol):
    """What rule `dct` sees a parameter through: linear, with an inverse."""

    def forward(self, value: Any) -> Any:
        """Its coefficients, of the same shape."""

    def largest(self, coefficients: Any) -> Any:
        """The few largest by magnitude, and 0 for all others."""

    def inverse(self, coefficients: Any) -> Any:
        """The parameter; the same bits on any machine."""


class Untransformed:
    """Of a parameter that is one number: the DCT of a 1×1 tile, of which one coefficient is kept."""

    def forward(self, value: Any) -> Any:
        """See `Transform`."""
        return value

    largest = inverse = forward
