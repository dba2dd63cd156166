"""What outer rounds change in one replica: θ, and on the host what the rule keeps (METHOD.md, "Outer rules").

All of it is held in compute_dtype, which is at least float32. Rounds are computed on θ's device, one parameter after
another; but on the host under rules whose results must be the same on all replicas, bit for bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from noloco_p2p.compute import host_tensor, replica_tensors
from noloco_p2p.compute.dct_tiles import DctTiles
from noloco_p2p.compute.lattice_pull import ReplicaDistances
from noloco_p2p.config import OuterSettings
from noloco_p2p.core import agreement, outer_update
from noloco_p2p.core.guard import PairDistances, limits, moved_by
from noloco_p2p.core.lattice_format import LATTICE_BITS
from noloco_p2p.core.outer_rules import Dct, Offer, OuterRule
from noloco_p2p.core.snapshots import FrozenRound, PartnerVector, largest_accepted

ByName = dict[str, Tensor]


class OuterState:
    """`fast` are the parameters θ on their device; only `merge`, `adopt` and `restore` write to them.

    Vectors of all parameters, which other replicas see, are flat (`core.snapshots`).
    """

    def __init__(self, fast: Mapping[str, Tensor], settings: OuterSettings) -> None:
        self._fast = fast
        self._settings = settings
        rule = settings.update
        self.rule: OuterRule = replace(rule, transform=DctTiles()) if isinstance(rule, Dct) else rule
        self._device = next(iter(fast.values())).device
        self._place = torch.device("cpu") if self.rule.common else self._device
        """Where rounds are computed."""
        self.kinds: dict[str, ByName] = {kind: {} for kind in self.rule.kinds}
        """What the rule keeps, by kind and name. Tensors are replaced, never written to: captured states share them."""
        thetas = {name: host_tensor.copy(theta) for name, theta in fast.items()}
        for name, theta in thetas.items():
            self._set(name, self.rule.start(theta))
        self.parameters = [host_tensor.spec_of(name, theta) for name, theta in thetas.items()]
        """Specs of the parameters, in the stage's order."""
        self.count = sum(theta.numel() for theta in thetas.values())
        self.learning_rate = 0.0
        """Learning rate of the last inner step; distances between replicas depend on it."""
        self._forget_others()

    def by_name(self, flat: Tensor) -> ByName:
        """The parameters in a flat vector, by name, as views of it."""
        parts = torch.split(flat, [theta.numel() for theta in self._fast.values()])
        return {name: part.view(theta.shape) for (name, theta), part in zip(self._fast.items(), parts, strict=True)}

    def freeze(self, gradients: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Freeze a round: (the offer, θ_f), both flat, where rounds are computed. Nothing writes to them later.

        If the offer is θ_f, both are the same tensor. If `gradients` are given, they are the offer.
        """
        frozen = self._empty(self.count)
        thetas = self.by_name(frozen)
        for name, theta in thetas.items():
            theta.copy_(self._fast[name].detach())
        if gradients is not None:
            return gradients, frozen
        vector, offered = frozen, dict[str, Offer]()
        for name, theta in thetas.items():
            values = self.rule.offer(self._own(name, theta))
            if len(values) == 1 and values[0] is theta:
                continue
            if vector is frozen:
                vector = self._empty(self.rule.offered * self.count)
                offered = self.offers(vector)
            for into, value in zip(offered[name], values, strict=True):
                into.copy_(value)
        return vector, frozen

    def offers(self, vector: Tensor) -> dict[str, Offer]:
        """The offer of each parameter in a flat vector, as views of it."""
        parts = [self.by_name(part) for part in vector.chunk(self.rule.offered)]
        return {name: tuple(part[name] for part in parts) for name in self._fast}

    def digest(self, frozen: Tensor) -> int:
        """Digest of what all replicas of the stage have in common; `frozen` is θ_f."""
        every = self.kinds | {"fast": {"": frozen}}
        values = (value for kind in self.rule.common for value in every[kind].values())
        return agreement.digest(host_tensor.from_torch("", value).data for value in values)

    def bounds(self, vector: Tensor) -> bytes:
        """How far others' vectors may be from the one just frozen, by chunk; empty if the codec has no bounds."""
        return b"" if self._distances is None else bytes(self._distances.bounds(vector).tolist())

    def radii(self) -> tuple[float, ...]:
        """How far a partner's vector may be from the one just frozen, by group of tensors."""
        return self._usual(self._pairs)

    def limits(self) -> tuple[float, ...]:
        """How far a single value of it may be, by group of tensors."""
        return limits(self._usual(self._sizes))

    def _usual(self, pairs: PairDistances) -> tuple[float, ...]:
        radii = pairs.radii(self.learning_rate)
        return moved_by(radii, self.rule.gain) if self.rule.gain else radii

    def observe(self, theirs: Sequence[PartnerVector]) -> None:
        """Record how far away merged vectors of others were; later bounds and radii follow from that."""
        for one in theirs:
            if one.apart:
                self._pairs.observe(one.apart, self.learning_rate)
                self._sizes.observe(one.sizes, self.learning_rate)
            if self._distances is not None and one.distances is not None:
                self._distances.observe(host_tensor.to_torch(one.distances))

    def merge(self, members: Sequence[Tensor], mine: int, frozen: Tensor, lag: float) -> None:
        """Apply the rule and N3; θ changes in place.

        `members` are the vectors of the group, with this replica's at index `mine`; `frozen` is θ_f. What the rule
        keeps has not changed since the round was frozen, because only rounds change it. `lag`: as in `OuterRule.merge`.
        """
        offers, thetas_frozen = [self.offers(vector) for vector in members], self.by_name(frozen)
        for name, theta_frozen in thetas_frozen.items():
            own = self._own(name, theta_frozen)
            given = [tuple(value.to(self._place) for value in offer[name]) for offer in offers]
            after = self.rule.merge(own, given, mine, lag)
            base, theta = after.pop("fast"), None
            if base is not own["fast"]:  # otherwise the round moves nothing, so θ must not be rounded either
                before, now = own["fast"].to(self._device), self._fast[name].detach()
                theta = outer_update.carried_over(base.to(self._device), now, before)
            self._set(name, after, theta)

    def summed(self, vectors: Sequence[Tensor]) -> tuple[list[Tensor], int]:
        """The gradients of the group as summed by the rule, one per parameter, and their number of tokens."""
        total = self.rule.merge({}, [(vector[:-1],) for vector in vectors], -1, 0.0)["gradient"]
        return list(self.by_name(total).values()), sum(int(vector[-1]) for vector in vectors)

    def record(self, mine: FrozenRound, theirs: Sequence[PartnerVector]) -> dict[str, ByName]:
        """For the audit, before a merge: what the rule keeps, θ_f, θ, and the partners' vectors."""
        tensors = {kind: named.copy() for kind, named in self.kinds.items()}
        tensors["frozen"] = self.by_name(host_tensor.to_torch(mine.weights))
        tensors["fast"] = {name: host_tensor.copy(theta) for name, theta in self._fast.items()}
        for one in () if self.rule.common else theirs:  # under a rule that takes from all, their own files have these
            for at, part in enumerate(host_tensor.to_torch(one.vector).chunk(self.rule.offered)):
                tensors[f"partner_vector{at or ''}"] = self.by_name(part)
        return tensors

    def adopt(self, weights: Tensor) -> None:
        """Start from another replica's θ_f (ARCHITECTURE.md, "Joining"), which has been checked."""
        for name, theta in self.by_name(weights).items():
            self._set(name, self.rule.start(theta.to(self._dtype, copy=True)), theta)
        self._forget_others()

    def capture(self) -> dict[str, ByName]:
        """The current θ and what the rule keeps, in host memory; nothing writes to them later."""
        fast = {name: host_tensor.copy(theta) for name, theta in self._fast.items()}
        return {"fast": fast} | {kind: dict(named) for kind, named in self.kinds.items()}

    def restore(self, kinds: replica_tensors.Kinds) -> None:
        """Continue from these tensors, which have been checked: copies of what the rule keeps, and θ in place."""
        for name in self._fast:
            self._set(name, {kind: kinds[kind][name].clone() for kind in self.kinds}, kinds["fast"][name])
        self._forget_others()

    @property
    def largest_accepted(self) -> float:
        """The largest magnitude allowed in weights that replace these."""
        return largest_accepted(max(host_tensor.largest(theta.detach()) for theta in self._fast.values()))

    @property
    def _dtype(self) -> torch.dtype:
        return next(iter(self._fast.values())).dtype

    def _empty(self, count: int) -> Tensor:
        """A tensor where rounds are computed; in pinned memory if θ is elsewhere."""
        return torch.empty(count, dtype=self._dtype, device=self._place, pin_memory=self._place != self._device)

    def _own(self, name: str, theta_frozen: Tensor) -> dict[str, Tensor]:
        own = {kind: named[name] for kind, named in self.kinds.items()} | {"fast": theta_frozen}
        return {kind: value.to(self._place) for kind, value in own.items()}

    def _set(self, name: str, kept: Mapping[str, Tensor], theta: Tensor | None = None) -> None:
        """Set what the rule keeps for a parameter, and θ if given."""
        for kind, value in kept.items():
            self.kinds[kind][name] = host_tensor.to_host(value)
        if theta is not None:
            with torch.no_grad():
                self._fast[name].copy_(theta)

    def _forget_others(self) -> None:
        """Forget how far away other replicas are, which is unknown for new weights."""
        codec = self._settings.codec
        self._distances = ReplicaDistances(LATTICE_BITS[codec]) if codec in LATTICE_BITS else None
        self._pairs, self._sizes = PairDistances(), PairDistances()
