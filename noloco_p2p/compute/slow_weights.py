"""Slow weights φ and outer momentum δ of one replica, on the host, and the outer round on them (method.md §3).

They are held in compute_dtype, never less than float32. What reads and writes θ is handed in.
"""

from collections.abc import Mapping
from math import sqrt

import torch
from torch import Tensor

from noloco_p2p.compute import host_tensor, replica
from noloco_p2p.config import OuterSettings
from noloco_p2p.core import outer_update
from noloco_p2p.core.messages import HostTensor, Snapshot, TensorSpec
from noloco_p2p.errors import Violation

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
        self.specs = tuple(
            TensorSpec(f"{kind}/{name}", host_tensor.from_torch(name, phi).dtype, tuple(phi.shape))
            for kind in ("slow", "delta")
            for name, phi in self.slow.items()
        )
        """The tensors of a snapshot, in order."""

    def snapshot(self) -> tuple[HostTensor, ...]:
        """φ and Δ = θ − φ of now, frozen: `slow/<name>` for each parameter, then `delta/<name>`."""
        deltas = {name: host_tensor.copy(self._fast[name]).sub_(phi) for name, phi in self.slow.items()}
        return tuple(
            host_tensor.from_torch(f"{kind}/{name}", tensor)
            for kind, tensors in (("slow", self.slow), ("delta", deltas))
            for name, tensor in tensors.items()
        )

    def read(self, snapshot: Snapshot) -> Deltas:
        """A snapshot's tensors. Raises Violation unless names, dtypes, shapes and lengths are those of this stage."""
        values = host_tensor.unpack(snapshot.tensors, self.specs, f"the snapshot of {snapshot.peer}")
        half = len(values) // 2
        return dict(zip(self.slow, zip(values[:half], values[half:], strict=True), strict=True))

    def _read_finite(self, snapshot: Snapshot) -> Deltas:
        """`read`, and every value is finite, else Violation."""
        values = self.read(snapshot)
        for name, pair in values.items():
            if not all(host_tensor.is_finite(value) for value in pair):
                raise Violation(f"the snapshot of {snapshot.peer} is not finite in {name}")
        return values

    def merge(self, mine: Snapshot, theirs: Snapshot | None) -> float | None:
        """N1 and N2 with a partner's snapshot, or alone; θ ← φ in place. Returns the pair's replica std.

        Raises Violation, with nothing changed, when `theirs` does not fit or is not finite.
        """
        group = [self.read(mine)] if theirs is None else [self.read(mine), self._read_finite(theirs)]
        std = None if theirs is None else _pair_std(*group)
        s = self._settings
        for name, phi in self.slow.items():
            members = [member[name] for member in group]
            phi_after, self.momentum[name] = outer_update.outer_step(
                phi, self.momentum[name], members, alpha=s.alpha, beta=s.beta, gamma=s.gamma
            )
            self._set(name, phi_after)
        return std

    def adopt(self, theirs: Snapshot) -> None:
        """φ = θ = φ_r + Δ_r of another replica, δ = 0 (design.md §4). Raises Violation as merge."""
        for name, (phi, delta) in self._read_finite(theirs).items():
            self.momentum[name] = torch.zeros_like(phi)
            self._set(name, phi + delta)

    def capture(self) -> replica.Kinds:
        """φ, θ and δ of now, in host memory; nothing writes to them later."""
        fast = {name: host_tensor.copy(theta) for name, theta in self._fast.items()}
        return {"slow": dict(self.slow), "fast": fast, "momentum": dict(self.momentum)}

    def restore(self, kinds: replica.Kinds) -> None:
        """Go on with copies of φ and δ, and θ in place; they have been checked."""
        for name in self.slow:
            self.momentum[name] = kinds["momentum"][name].clone()
            self._set(name, kinds["slow"][name].clone(), kinds["fast"][name])

    def _set(self, name: str, phi: Tensor, theta: Tensor | None = None) -> None:
        """φ, and θ where it is not φ."""
        self.slow[name] = phi
        with torch.no_grad():
            self._fast[name].copy_(phi if theta is None else theta)


def _pair_std(mine: Deltas, theirs: Deltas) -> float:
    """Replica std of the pair on θ before the merge: sqrt((n−1)/n · ‖θ_i − θ_j‖² / (2·count)), n = 2 (method.md §5)."""
    square, count = 0.0, 0
    for name, (phi, delta) in mine.items():
        their_phi, their_delta = theirs[name]
        gap = (phi + delta) - (their_phi + their_delta)
        square += float(torch.linalg.vector_norm(gap, dtype=torch.float64)) ** 2
        count += gap.numel()
    return sqrt(0.5 * square / (2 * count))
