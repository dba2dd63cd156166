"""Slow weights φ and outer momentum δ of one replica, on the host, and the outer round (METHOD.md, "Outer round").

They are held in compute_dtype, which is at least float32.
"""

from collections.abc import Mapping
from math import sqrt

import torch
from torch import Tensor

from noloco_p2p.compute import host_tensor, replica_tensors
from noloco_p2p.config import OuterSettings
from noloco_p2p.core import outer_update
from noloco_p2p.core.messages import HostTensor, Snapshot

Deltas = dict[str, tuple[Tensor, Tensor]]
"""By parameter name: (φ, Δ)."""


class SlowWeights:
    """φ and δ. `fast` are the parameters θ on their device; only `merge`, `adopt` and `restore` write to them."""

    def __init__(self, fast: Mapping[str, Tensor], settings: OuterSettings) -> None:
        self._fast = fast
        self._settings = settings
        self.slow = {name: host_tensor.copy(theta) for name, theta in fast.items()}
        """φ, by name. Tensors are replaced, never written to, because snapshots share them."""
        self.momentum = {name: torch.zeros_like(phi) for name, phi in self.slow.items()}
        """δ, by name. Tensors are replaced, never written to, because captured states share them."""
        self.frozen: dict[str, Tensor] = {}
        """θ_f: θ at the newest snapshot, until it is merged. Kept only in runs that train on during a round."""
        self.parameters = [host_tensor.spec_of(name, phi) for name, phi in self.slow.items()]
        """What they are, in the stage's order."""
        self.specs = replica_tensors.specs(replica_tensors.SNAPSHOT_KINDS, self.parameters)
        """The tensors of a snapshot, in order."""

    def snapshot(self) -> tuple[HostTensor, ...]:
        """The present φ and Δ = θ − φ, frozen: `slow/<name>` for each parameter, then `delta/<name>`."""
        fast = {name: host_tensor.copy(theta) for name, theta in self._fast.items()}
        deltas = {name: fast[name] - phi for name, phi in self.slow.items()}
        if self._settings.overlap and self._settings.pairing != "none":
            self.frozen = fast
        return replica_tensors.pack({"slow": self.slow, "delta": deltas})

    def _read(self, snapshot: Snapshot, *, finite: bool) -> Deltas:
        """A snapshot's tensors. Raises Violation as `replica_tensors.unpack`."""
        kinds = replica_tensors.unpack(snapshot, self.specs, finite=finite)
        return {name: (kinds["slow"][name], kinds["delta"][name]) for name in self.slow}

    def merge(self, mine: Snapshot, theirs: Snapshot | None) -> float | None:
        """N1 to N3 with a partner's snapshot, or alone; θ changes in place. Returns the pair's replica std.

        `mine` is the newest snapshot. φ and δ are still those that it was frozen with: only rounds change them.

        Raises Violation, with nothing changed, when `theirs` does not fit or is not finite.
        """
        group = [self._read(mine, finite=False)]
        if theirs is not None:
            group.append(self._read(theirs, finite=True))
        std = None if theirs is None else _pair_std(*group)
        s = self._settings
        for name, phi in self.slow.items():
            members = [member[name] for member in group]
            phi_after, self.momentum[name] = outer_update.outer_step(
                phi, self.momentum[name], members, alpha=s.alpha, beta=s.beta, gamma=s.gamma
            )
            self._set(name, phi_after, self._carried_over(name, phi_after))
        self.frozen = {}
        return std

    def _carried_over(self, name: str, phi_after: Tensor) -> Tensor | None:
        """θ after the round (N3); None where θ has not moved since it was frozen: then it is φ, bit for bit."""
        if name not in self.frozen:
            return None
        theta, frozen = host_tensor.copy(self._fast[name]), self.frozen[name]
        return None if torch.equal(theta, frozen) else outer_update.carried_over(phi_after, theta, frozen)

    def adopt(self, theirs: Snapshot) -> None:
        """φ = θ = φ_r + Δ_r of another replica, δ = 0 (ARCHITECTURE.md, "Joining"). Raises Violation as merge."""
        for name, (phi, delta) in self._read(theirs, finite=True).items():
            self.momentum[name] = torch.zeros_like(phi)
            self._set(name, phi + delta)
        self.frozen = {}

    def capture(self) -> dict[str, dict[str, Tensor]]:
        """The present φ, θ and δ, in host memory; nothing writes to them later."""
        fast = {name: host_tensor.copy(theta) for name, theta in self._fast.items()}
        return {"slow": dict(self.slow), "fast": fast, "momentum": dict(self.momentum)}

    def restore(self, kinds: replica_tensors.Kinds) -> None:
        """Continue with copies of φ and δ, and θ in place; they have been checked."""
        for name in self.slow:
            self.momentum[name] = kinds["momentum"][name].clone()
            self._set(name, kinds["slow"][name].clone(), kinds["fast"][name])
        self.frozen = {}

    def _set(self, name: str, phi: Tensor, theta: Tensor | None = None) -> None:
        """Set φ, and θ to `theta`, or to φ where it is None."""
        self.slow[name] = phi
        with torch.no_grad():
            self._fast[name].copy_(phi if theta is None else theta)


def _pair_std(mine: Deltas, theirs: Deltas) -> float:
    """Replica std of the pair on θ before the merge: sqrt((n−1)/n · ‖θ_i − θ_j‖² / (2·count)), n = 2.

    METHOD.md, "Measures".
    """
    square, count = 0.0, 0
    for name, (phi, delta) in mine.items():
        their_phi, their_delta = theirs[name]
        gap = (phi + delta) - (their_phi + their_delta)
        square += float(torch.linalg.vector_norm(gap, dtype=torch.float64)) ** 2
        count += gap.numel()
    return sqrt(0.5 * square / (2 * count))
