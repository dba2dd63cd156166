"""What of a frozen round travels, and what it comes to on the other side. Host memory only; no state but the shape.

Any thread may call it: frozen rounds are never written to.
"""

import torch
from torch import Tensor

from noloco_p2p.compute import host_tensor, replica_tensors
from noloco_p2p.core.messages import HostTensor, TensorSpec
from noloco_p2p.core.snapshots import (
    FrozenRound,
    PartnerVector,
    Snapshot,
    SnapshotRequest,
    pair_std,
    sample_size,
    sampled_coordinates,
)
from noloco_p2p.errors import Violation

WIDTHS = ("bfloat16", "float32", "float64")
"""Element types in which θ_f may be asked for; one wider than compute_dtype would say no more."""


class SnapshotCodec:
    """Of one stage with `parameters` parameters in `dtype` (compute_dtype), in the run with this seed."""

    def __init__(self, seed: int, stage: int, parameters: int, dtype: torch.dtype) -> None:
        self._seed, self._stage, self._parameters, self._dtype = seed, stage, parameters, dtype
        name = str(dtype).removeprefix("torch.")
        sizes = {"vector": parameters, "sample": sample_size(parameters)}
        self.specs = tuple(TensorSpec(kind, name, (size,)) for kind, size in sizes.items())
        """What travels to a partner."""

    def encode(self, frozen: FrozenRound, request: SnapshotRequest) -> Snapshot:
        """What `request` asks for. Raises Violation for an element type that weights do not travel in."""
        if request.weights is None:
            sample = host_tensor.from_torch("sample", self._sample(frozen, frozen.round))
            tensors: tuple[HostTensor, ...] = (frozen.vector, sample)
        elif request.weights == frozen.weights.dtype:
            tensors = (frozen.weights,)
        elif request.weights in WIDTHS:
            narrow = host_tensor.to_torch(frozen.weights).to(host_tensor.DTYPES[request.weights])
            tensors = (host_tensor.from_torch("weights", narrow),)
        else:
            raise Violation(f"weights travel as one of {', '.join(WIDTHS)}, not {request.weights[:32]!r}")
        return Snapshot(frozen.peer, frozen.round, frozen.step, tensors)

    def decode(self, theirs: Snapshot) -> PartnerVector:
        """A partner's vector and sample. Raises Violation unless they are what travels, and finite."""
        replica_tensors.checked(theirs.tensors, self.specs, f"the snapshot of {theirs.peer}")
        vector, sample = theirs.tensors
        return PartnerVector(theirs.peer, theirs.round, vector, sample)

    def pair_std(self, mine: FrozenRound, theirs: PartnerVector) -> float:
        """The replica std that the pair's θ_f tell of (METHOD.md, "Measures")."""
        gap = self._sample(mine, theirs.round) - host_tensor.to_torch(theirs.sample)
        norm = float(torch.linalg.vector_norm(gap, dtype=torch.float64))
        return pair_std(norm * norm, gap.numel())

    def _sample(self, frozen: FrozenRound, round: int) -> Tensor:
        """θ_f at the coordinates of a round, which may be another one's."""
        places = sampled_coordinates(self._seed, self._stage, round, self._parameters)
        return host_tensor.to_torch(frozen.weights)[torch.tensor(places, dtype=torch.int64)]
