"""Slow weights φ and outer momentum δ of one replica, on the host, and the outer round (METHOD.md, "Outer round").

They are held in compute_dtype, which is at least float32.
"""

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

from noloco_p2p.compute import host_tensor, replica_tensors
from noloco_p2p.compute.lattice_pull import ReplicaDistances
from noloco_p2p.config import OuterSettings
from noloco_p2p.core import outer_update
from noloco_p2p.core.lattice_format import LATTICE_BITS
from noloco_p2p.core.snapshots import PartnerVector


class SlowWeights:
    """φ and δ. `fast` are the parameters θ on their device; only `merge`, `adopt` and `restore` write to them.

    Vectors of all parameters, which others see, are flat (`core.snapshots`).
    """

    def __init__(self, fast: Mapping[str, Tensor], settings: OuterSettings) -> None:
        self._fast = fast
        self._settings = settings
        self.slow = {name: host_tensor.copy(theta) for name, theta in fast.items()}
        """φ, by name. Tensors are replaced, never written to, because captured states share them."""
        self.momentum = {name: torch.zeros_like(phi) for name, phi in self.slow.items()}
        """δ, by name, likewise."""
        self._distances = _distances(settings)
        self.parameters = [host_tensor.spec_of(name, phi) for name, phi in self.slow.items()]
        """What they are, in the stage's order."""
        self.count = sum(phi.numel() for phi in self.slow.values())

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters of a flat vector: views of it."""
        ends = accumulate(phi.numel() for phi in self.slow.values())
        return {
            name: flat[end - phi.numel() : end].view(phi.shape)
            for (name, phi), end in zip(self.slow.items(), ends, strict=True)
        }

    def freeze(self) -> tuple[Tensor, Tensor]:
        """(u, θ_f): the vector of this round, and θ as it is now, both flat; nothing writes to them later."""
        vector, frozen = (torch.empty(self.count, dtype=self._dtype) for _ in range(2))
        thetas, s = self.by_name(frozen), self._settings
        for name, into in self.by_name(vector).items():
            phi = self.slow[name]
            thetas[name].copy_(self._fast[name].detach())
            into.copy_(outer_update.round_vector(phi, thetas[name] - phi, beta=s.beta, gamma=s.gamma))
        return vector, frozen

    def bounds(self, vector: Tensor) -> bytes:
        """How far others' vectors may be from the one that was just frozen, by chunk; empty where no codec asks."""
        if self._distances is None:
            return b""
        phi = torch.cat([one.flatten() for one in self.slow.values()])
        return bytes(self._distances.bounds(vector, vector - self._settings.gamma * phi).tolist())

    def met(self, theirs: PartnerVector | None) -> None:
        """A partner's vector is merged: how far it was is what later bounds are made from."""
        if self._distances is not None and theirs is not None and theirs.distances is not None:
            self._distances.observe(host_tensor.to_torch(theirs.distances))

    def merge(self, vectors: list[Tensor], frozen: Tensor) -> None:
        """N1 to N3; θ changes in place.

        `vectors` are u of this replica, and of its partner if it has one; `frozen` is θ_f. φ and δ are still those that
        they were frozen with: only rounds change them.
        """
        group, thetas_frozen, s = [self.by_name(vector) for vector in vectors], self.by_name(frozen), self._settings
        for name, phi in self.slow.items():
            members = [member[name] for member in group]
            phi_after, self.momentum[name] = outer_update.outer_step(
                phi, self.momentum[name], members, alpha=s.alpha, gamma=s.gamma
            )
            self._set(name, phi_after, self._carried_over(name, phi_after, thetas_frozen[name]))

    def _carried_over(self, name: str, phi_after: Tensor, frozen: Tensor) -> Tensor:
        """θ after the round (N3); where θ has not moved since it was frozen it is φ, bit for bit."""
        theta = host_tensor.copy(self._fast[name])
        return phi_after if torch.equal(theta, frozen) else outer_update.carried_over(phi_after, theta, frozen)

    def adopt(self, weights: Tensor) -> None:
        """φ = θ = θ_f of another replica, δ = 0 (ARCHITECTURE.md, "Joining"); it has been checked."""
        for name, theta in self.by_name(weights.to(self._dtype)).items():
            self.momentum[name] = torch.zeros_like(theta)
            self._set(name, theta.clone(), theta)
        self._distances = _distances(self._settings)

    def capture(self) -> dict[str, dict[str, Tensor]]:
        """The present φ, θ and δ, in host memory; nothing writes to them later."""
        fast = {name: host_tensor.copy(theta) for name, theta in self._fast.items()}
        return {"slow": dict(self.slow), "fast": fast, "momentum": dict(self.momentum)}

    def restore(self, kinds: replica_tensors.Kinds) -> None:
        """Continue with copies of φ and δ, and θ in place; they have been checked."""
        for name in self.slow:
            self.momentum[name] = kinds["momentum"][name].clone()
            self._set(name, kinds["slow"][name].clone(), kinds["fast"][name])
        self._distances = _distances(self._settings)

    @property
    def _dtype(self) -> torch.dtype:
        return next(iter(self.slow.values())).dtype

    def _set(self, name: str, phi: Tensor, theta: Tensor) -> None:
        """Set φ and θ."""
        self.slow[name] = phi
        with torch.no_grad():
            self._fast[name].copy_(theta)


def _distances(settings: OuterSettings) -> ReplicaDistances | None:
    """How far other replicas were from these weights: not known yet."""
    return ReplicaDistances(LATTICE_BITS[settings.codec]) if settings.codec in LATTICE_BITS else None
