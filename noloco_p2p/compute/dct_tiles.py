"""The DCT of parameters in tiles, and the part of it that travels (`core.tiles`; METHOD.md, "Outer rules"). Works on
host memory only.

Coefficients are stored tile after tile, in a tensor of the parameter's shape.

Shape legend: N tiles, R rows, C columns, V = R·C values of a tile, K values of a tile that travel.
"""

from collections.abc import Sequence
from functools import cache
from math import cos, pi, prod, sqrt

import torch
from torch import Tensor

from noloco_p2p.compute import host_tensor
from noloco_p2p.core.tiles import PLACE, tiling
from noloco_p2p.errors import Violation


class DctTiles:
    """The orthonormal DCT-II over both dimensions of every tile (Ahmed, Natarajan and Rao 1974), as a `Transform`."""

    def forward(self, value: Tensor) -> Tensor:
        """See `Transform`."""
        tiles = tiling(value.shape)
        value_NRC = value.reshape(tiles.down, tiles.rows, tiles.across, tiles.columns).transpose(1, 2)
        rows_RR, columns_CC = basis(tiles.rows, value.dtype), basis(tiles.columns, value.dtype)
        return (rows_RR @ value_NRC @ columns_CC.T).reshape(value.shape)

    def largest(self, coefficients: Tensor) -> Tensor:
        """See `Transform`. Among equal values the first ones are kept."""
        tiles = tiling(coefficients.shape)
        values_NV = coefficients.reshape(-1, tiles.rows * tiles.columns)
        values_NK, places_NK = _largest(values_NV, tiles.kept)
        return torch.zeros_like(values_NV).scatter_(1, places_NK, values_NK).view(coefficients.shape)

    def inverse(self, coefficients: Tensor) -> Tensor:
        """See `Transform`. Products are added one by one, each rounded: a matrix product has no defined order."""
        tiles = tiling(coefficients.shape)
        values_NRC = coefficients.reshape(-1, tiles.rows, tiles.columns)
        half_NRC, found_NRC = torch.zeros_like(values_NRC), torch.zeros_like(values_NRC)
        for row, wave_R in enumerate(basis(tiles.rows, coefficients.dtype)):
            half_NRC += values_NRC[:, row, None, :] * wave_R[:, None]
        for column, wave_C in enumerate(basis(tiles.columns, coefficients.dtype)):
            found_NRC += half_NRC[:, :, column, None] * wave_C
        found = found_NRC.view(tiles.down, tiles.across, tiles.rows, tiles.columns)
        return found.transpose(1, 2).reshape(coefficients.shape)


class SparseVector:
    """The coefficients of a stage's parameters that travel: the largest of each tile, and their places in it."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        self._tilings = [tiling(shape) for shape in shapes]
        self.kept = sum(tiles.kept_of_all for tiles in self._tilings)
        """Number of values that travel."""
        self._counts = [prod(shape) for shape in shapes]

    def split(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """(values, places) of a flat vector, tile after tile, by place in each."""
        parts = zip(torch.split(vector, self._counts), self._tilings, strict=True)
        found = [_largest(part.view(-1, tiles.rows * tiles.columns), tiles.kept) for part, tiles in parts]
        values, places = (torch.cat([part.flatten() for part in kind]) for kind in zip(*found, strict=True))
        return values, places.to(host_tensor.DTYPES[PLACE])

    def join(self, values: Tensor, places: Tensor, whose: str) -> Tensor:
        """The flat vector, with 0 where nothing travelled.

        Raises Violation if places lie outside their tiles or do not ascend. `whose` starts the message.
        """
        parts, counts = [], [tiles.kept_of_all for tiles in self._tilings]
        for tiles, *both in zip(
            self._tilings, torch.split(values, counts), torch.split(places.long(), counts), strict=True
        ):
            size, (values_NK, places_NK) = tiles.rows * tiles.columns, (part.view(-1, tiles.kept) for part in both)
            if bool((places_NK[:, 0] < 0).any() | (places_NK[:, -1] >= size).any() | (places_NK.diff() <= 0).any()):
                raise Violation(f"{whose} has places that do not ascend within a tile of {size} values")
            parts.append(values.new_zeros(len(values_NK), size).scatter_(1, places_NK, values_NK).flatten())
        return torch.cat(parts)


def _largest(values_NV: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """The `kept` values of largest magnitude in each tile, N×K, and their places, ascending; among equal values the
    first ones."""
    places_NK = values_NV.abs().sort(dim=1, descending=True, stable=True).indices[:, :kept].sort(1).values
    return values_NV.gather(1, places_NK), places_NK


@cache
def basis(size: int, dtype: torch.dtype) -> Tensor:
    """Waves of `size` values, the constant one first: row k is c_k·cos(πk(n + ½)/size)."""
    scales = [sqrt((2 if k else 1) / size) for k in range(size)]
    # The angle is reduced modulo whole turns, to keep cos as exact as possible.
    turns = [[k * (2 * n + 1) % (4 * size) / (2 * size) for n in range(size)] for k in range(size)]
    waves = [[scale * cos(pi * turn) for turn in row] for scale, row in zip(scales, turns, strict=True)]
    return torch.tensor(waves, dtype=torch.float64).to(dtype)
