"""Compares a partner's vector with this replica's own, by group of tensors (`core.guard`). Host memory only."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import hypot, inf, prod, sqrt

import torch
from torch import Tensor

from noloco_p2p.compute import host_tensor
from noloco_p2p.core import guard
from noloco_p2p.core.messages import TensorSpec
from noloco_p2p.core.snapshots import FrozenRound, PartnerVector

CHUNK = 1 << 17
"""How many values are compared at once, so that they stay in a core's cache."""


class PartnerGuard:
    """The guard of one stage, whose vectors offer `offered` values of each parameter. It judges one pull at a time."""

    def __init__(self, parameters: Sequence[TensorSpec], offered: int) -> None:
        names = [(part, guard.group_of(spec)) for part in range(offered) for spec in parameters]
        ends = accumulate((prod(spec.shape) for _ in range(offered) for spec in parameters), initial=0)
        places = {name: place for place, name in enumerate(dict.fromkeys(names))}
        self._offered, self._groups = offered, len(places)
        self._tensors = [(places[name], slice(*ends)) for name, ends in zip(names, pairwise(ends), strict=True)]
        self._parts = [
            (group, slice(at, min(at + CHUNK, values.stop)))
            for group, values in self._tensors
            for at in range(values.start, values.stop, CHUNK)
        ]
        self._stranger: PartnerVector | None = None
        """The last vector, if it was refused. If another peer's vector agrees with it, this replica is the outlier."""

    def judge(self, mine: FrozenRound, theirs: PartnerVector) -> PartnerVector:
        """The partner's vector after clipping, with its distances and the verdict. A refused one must not be merged."""
        own, found = host_tensor.to_torch(mine.vector), host_tensor.to_torch(theirs.vector)
        known = mine.radii or (0.0,) * self._groups
        radii = known if all(known) else self._filled_in(known, own)
        apart = self._distances(own, found)
        factors = guard.factors(apart, radii)
        clips = factors is None or min(factors) < 1 or inf in radii
        # Out of all proportion to this replica's own vector?
        far = clips and hypot(*apart) > guard.FURTHEST * hypot(*self._distances(own, None))
        if factors is None or far:
            other, self._stranger = self._stranger, theirs
            agreed = other is not None and other.peer != theirs.peer and self._agree(other, theirs, radii)
            return replace(theirs, verdict="outlier" if agreed and not far else "refused")
        self._stranger, vector, unclipped = None, found, apart
        if theirs.distances is not None:
            vector, sums = self._within(own, found, mine.limits or (inf,) * self._groups)
            if vector is not found:
                apart = self._distances(own, vector)
                factors = guard.factors(apart, radii) or factors
                theirs = replace(theirs, limits=self._by_tensor(mine.limits))
            each = zip(factors, apart, sums, strict=True)
            theirs = replace(theirs, sizes=tuple(one * far * far / total if total else 0.0 for one, far, total in each))
        theirs = replace(theirs, apart=tuple(map(min, apart, radii)))
        if min(factors) < 1:
            theirs = replace(theirs, factors=self._by_tensor(factors))
            vector = host_tensor.copy(found) if vector is found else vector
            for factor, (_, values) in zip(theirs.factors, self._tensors, strict=True):
                if factor < 1:
                    torch.lerp(own[values], vector[values], factor, out=vector[values])
        if vector is found:
            return theirs
        left = zip(theirs.apart, unclipped, strict=True)
        noticeable = min(factors) < 1 or any(after < guard.NOTICEABLE * before for after, before in left)
        clipped = host_tensor.from_torch("vector", vector)
        return replace(theirs, vector=clipped, distances=None, verdict="clipped" if noticeable else "")

    def _within(self, own: Tensor, found: Tensor, limits: Sequence[float]) -> tuple[Tensor, list[float]]:
        """A copy in which no value is further away than its group's limit, or `found` itself if none is; and the sums
        of how far its values are, by group."""
        within, sums = found, [0.0] * self._groups
        for group, part in self._parts:
            gap, limit = torch.sub(own[part], found[part]).abs_(), limits[group]
            if float(gap.amax()) > limit:
                within = host_tensor.copy(found) if within is found else within
                torch.clamp(found[part], own[part] - limit, own[part] + limit, out=within[part])
                gap.clamp_(max=limit)
            sums[group] += float(gap.sum())
        return within, sums

    def _by_tensor(self, by_group: Sequence[float]) -> tuple[float, ...]:
        return tuple(by_group[group] for group, _ in self._tensors)

    def _filled_in(self, radii: Sequence[float], own: Tensor) -> tuple[float, ...]:
        """The radii with unknown ones, which are 0, estimated from the norm of everything offered for the group."""
        norms, groups = self._distances(own, None), self._groups // self._offered
        both = [hypot(*norms[group % groups :: groups]) for group in range(self._groups)]
        return tuple(radius or guard.UNKNOWN * norm or inf for radius, norm in zip(radii, both, strict=True))

    def _agree(self, one: PartnerVector, other: PartnerVector, radii: Sequence[float]) -> bool:
        """Whether the two vectors are as close to each other as partners usually are."""
        vectors = host_tensor.to_torch(one.vector), host_tensor.to_torch(other.vector)
        return all(distance <= radius for distance, radius in zip(self._distances(*vectors), radii, strict=True))

    def _distances(self, own: Tensor, theirs: Tensor | None) -> tuple[float, ...]:
        """L2 norms by group of the difference, or of `own` if `theirs` is None; infinite if the squares overflow."""
        squares = [0.0] * self._groups
        for group, part in self._parts:
            gap = own[part] if theirs is None else torch.sub(own[part], theirs[part])
            squares[group] += float(torch.dot(gap, gap))
        return tuple(map(sqrt, squares))
