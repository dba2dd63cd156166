"""The effect of an outer round on a replica under each rule, written from METHOD.md, "Outer rules".

Nothing from the package may be imported here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lattice_reference import as_decoded

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class FrozenReplica:
    """θ, φ and δ of a replica when it froze a round; φ and δ only if the rule has them."""

    fast: Tensors
    slow: Tensors
    momentum: Tensors

    def offered(self, outer: Mapping[str, Any]) -> list[Tensors]:
        """The parts of the vector that it offers."""
        alpha, beta, gamma = outer["alpha"], outer["beta"], outer["gamma"]
        match outer["rule"]:
            case "noloco":
                return [{name: beta * (self.fast[name] - phi) + gamma * phi for name, phi in self.slow.items()}]
            case "averaged":
                moved = {
                    name: alpha * self.momentum[name] + beta * (self.fast[name] - phi)
                    for name, phi in self.slow.items()
                }
                return [self.slow, moved]
            case "gossip":
                return [self.fast]
            case rule:
                raise AssertionError(f"no reference for the rule {rule}")


def decoded(
    mine: FrozenReplica,
    theirs: FrozenReplica,
    used: Sequence[Tensors],
    outer: Mapping[str, Any],
    factors: Mapping[str, float],
    limits: Mapping[str, float],
) -> list[Tensors]:
    """What the parts of `theirs` may be decoded to at the replica `mine`, which `used` these values; see `as_decoded`.

    Afterwards single differences to the replica's own were reduced to the limit of their tensor in `limits`, and then
    those of each tensor were multiplied by its factor in `factors`.
    """
    own, other, found = map(_joined, (mine.offered(outer), theirs.offered(outer), used))
    places = {f"{at}/{name}": f"partner_vector{at or ''}/{name}" for at, part in enumerate(used) for name in part}
    by_name = {name: factors.get(place, 1.0) for name, place in places.items()}
    most = {name: limits.get(place, math.inf) for name, place in places.items()}
    whole = {name: own[name] + (values - own[name]) / by_name[name] for name, values in found.items()}
    joined = as_decoded(own, other, whole if factors else found, outer["codec"], most)
    clipped = {name: own[name] + by_name[name] * (joined[name] - own[name]) for name in joined} if factors else joined
    return [{name: clipped[f"{at}/{name}"] for name in part} for at, part in enumerate(used)]


def _joined(parts: Sequence[Tensors]) -> Tensors:
    """The parts one after another, as in the vector on the wire."""
    return {f"{at}/{name}": tensor for at, part in enumerate(parts) for name, tensor in part.items()}


def merged(
    mine: FrozenReplica, theirs: tuple[FrozenReplica, list[Tensors]] | None, lag: int, outer: Mapping[str, Any]
) -> dict[str, Tensors]:
    """(`slow`, `momentum`, `fast`) after a round with a partner's vector as decoded; `fast` is θ_f′."""
    match outer["rule"]:
        case "noloco":
            return _noloco(mine, theirs, outer)
        case "averaged":
            return _averaged(mine, theirs, outer)
        case "gossip":
            if theirs is None:
                return {"slow": {}, "momentum": {}, "fast": mine.fast}
            weight = outer["gamma"] / (1 + lag / outer["inner_steps"])
            (vector,) = theirs[1]
            fast = {name: theta + weight * (vector[name] - theta) for name, theta in mine.fast.items()}
            return {"slow": {}, "momentum": {}, "fast": fast}
        case _:
            return {}


def merged_with_all(
    group: Sequence[FrozenReplica], mine: FrozenReplica, outer: Mapping[str, Any]
) -> dict[str, Tensors]:
    """`diloco`: δ ← α·δ + mean Δ; φ ← φ + β·(mean Δ + α·δ), with every Δ, also the own, as it travels. `dct`: see
    `_dct`."""
    slow, momentum = Tensors(), Tensors()
    if outer["rule"] == "dct":
        return _dct(group, mine, outer)
    for name, phi in mine.slow.items():
        deltas = torch.stack([member.fast[name] - member.slow[name] for member in group])
        mean_delta = (deltas.bfloat16().double() if outer["codec"] == "bfloat16" else deltas).mean(0)
        momentum[name] = outer["alpha"] * mine.momentum[name] + mean_delta
        slow[name] = phi + outer["beta"] * (mean_delta + outer["alpha"] * momentum[name])
    return {"slow": slow, "momentum": momentum, "fast": slow}


def _dct(group: Sequence[FrozenReplica], mine: FrozenReplica, outer: Mapping[str, Any]) -> dict[str, Tensors]:
    """δ ← α·δ + Δ − IDCT(q) + IDCT(mean q); φ ← φ + β·IDCT(mean q). δ is kept as its coefficients, by tile."""
    slow, momentum = Tensors(), Tensors()
    for name, phi in mine.slow.items():
        tiles = _Tiles(phi.shape)

        def added(one: FrozenReplica, name: str = name, tiles: "_Tiles" = tiles) -> torch.Tensor:
            delta = tiles.coefficients(one.fast[name] - one.slow[name])
            alpha: float = outer["alpha"]
            return delta + alpha * one.momentum[name].view(delta.shape)

        shared = torch.stack([tiles.largest(added(one)) for one in group]).mean(0)
        momentum[name] = (added(mine) - tiles.largest(added(mine)) + shared).view(phi.shape)
        slow[name] = phi + outer["beta"] * tiles.values(shared)
    return {"slow": slow, "momentum": momentum, "fast": slow}


class _Tiles:
    """The orthonormal DCT-II of a parameter in tiles, whose sides are the largest divisors up to 64 of the sides of its
    matrix. Coefficients are N×R×C."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape, sides = shape, (math.prod(shape[:-1]), math.prod(shape[-1:]))
        self.rows, self.columns = ([n for n in range(1, 65) if side % n == 0][-1] for side in sides)
        self.grid = (sides[0] // self.rows, self.rows, sides[1] // self.columns, self.columns)

    def coefficients(self, value: torch.Tensor) -> torch.Tensor:
        tiles = value.reshape(self.grid).transpose(1, 2).reshape(-1, self.rows, self.columns)
        return torch.einsum("kr,nrc,lc->nkl", _waves(self.rows), tiles, _waves(self.columns))

    def values(self, coefficients: torch.Tensor) -> torch.Tensor:
        tiles = torch.einsum("kr,nkl,lc->nrc", _waves(self.rows), coefficients, _waves(self.columns))
        down, rows, across, columns = self.grid
        return tiles.view(down, across, rows, columns).transpose(1, 2).reshape(self.shape)

    def largest(self, coefficients: torch.Tensor) -> torch.Tensor:
        """32 of 4,096 coefficients of each tile, rounded up; 0 for the others."""
        flat = coefficients.flatten(1)
        kept = flat.abs().argsort(dim=1, descending=True, stable=True)[:, : math.ceil(flat.shape[1] * 32 / 4096)]
        return torch.zeros_like(flat).scatter(1, kept, flat.gather(1, kept)).view(coefficients.shape)


def _waves(size: int) -> torch.Tensor:
    """Row k is c_k·cos(π·k·(2n + 1) / 2·size)."""
    n = torch.arange(size, dtype=torch.float64)
    waves = torch.cos(math.pi * n[:, None] * (2 * n + 1) / (2 * size)) * math.sqrt(2 / size)
    return torch.cat([waves[:1] / math.sqrt(2), waves[1:]])


def _noloco(
    mine: FrozenReplica, theirs: tuple[FrozenReplica, list[Tensors]] | None, outer: Mapping[str, Any]
) -> dict[str, Tensors]:
    """N1 and N2 with φ and Δ of both; the error that the codec has made in the partner's u is added."""
    alpha, beta, gamma = outer["alpha"], outer["beta"], outer["gamma"]
    group = [mine] if theirs is None else [mine, theirs[0]]
    slow, momentum = Tensors(), Tensors()
    for name, phi in mine.slow.items():
        mean_delta = sum(member.fast[name] - member.slow[name] for member in group) / len(group)
        mean_phi = sum(member.slow[name] for member in group) / len(group)
        momentum[name] = alpha * mine.momentum[name] + beta * mean_delta + gamma * (mean_phi - phi)
        if theirs is not None:
            ((vector,), (exact,)) = theirs[1], theirs[0].offered(outer)
            momentum[name] += (vector[name] - exact[name]) / 2
        slow[name] = phi + momentum[name]
    return {"slow": slow, "momentum": momentum, "fast": slow}


def _averaged(
    mine: FrozenReplica, theirs: tuple[FrozenReplica, list[Tensors]] | None, outer: Mapping[str, Any]
) -> dict[str, Tensors]:
    """δ ← mean (α·δ + β·Δ); φ ← mean φ + δ."""
    own = mine.offered(outer)
    both = [own] if theirs is None else [own, theirs[1]]
    mean_slow, momentum = (
        {name: torch.stack([parts[at][name] for parts in both]).mean(0) for name in mine.slow} for at in (0, 1)
    )
    slow = {name: mean + momentum[name] for name, mean in mean_slow.items()}
    return {"slow": slow, "momentum": momentum, "fast": slow}
