"""Freezes a stage's rounds in host memory, encodes what travels of them, and decodes what arrives.

Any thread may call `encode` and `decode`, because frozen rounds are never written to.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from noloco_p2p.compute import host_tensor, replica_tensors
from noloco_p2p.compute.dct_tiles import SparseVector
from noloco_p2p.compute.lattice_codec import LatticeCodec, PairDither
from noloco_p2p.compute.lattice_pull import LatticePull
from noloco_p2p.compute.outer_state import OuterState
from noloco_p2p.compute.partner_guard import CHUNK, PartnerGuard
from noloco_p2p.config import RunManifest
from noloco_p2p.core.agreement import GroupView
from noloco_p2p.core.lattice_format import LatticeRequest
from noloco_p2p.core.messages import HostTensor, PeerId, TensorSpec
from noloco_p2p.core.outer_rules import vector_size
from noloco_p2p.core.snapshots import (
    FrozenRound,
    PartnerVector,
    Snapshot,
    SnapshotRequest,
    answer_specs,
    largest_accepted,
    pair_std,
    sampled_coordinates,
    snapshot_specs,
)
from noloco_p2p.errors import Violation

WIDTHS = ("bfloat16", "float32", "float64")
"""Element types in which θ_f may be requested. One wider than compute_dtype adds nothing."""


class SnapshotCodec:
    """The codec of one stage of a run; `parameters` are those of the stage."""

    def __init__(self, run: RunManifest, stage: int, parameters: Sequence[TensorSpec], device: torch.device) -> None:
        shapes = [spec.shape for spec in parameters]
        count = sum(map(prod, shapes))
        self._seed, self._stage, self._parameters = run.seed, stage, count
        self._dtype = host_tensor.DTYPES[run.compute_dtype]
        self._offered = vector_size(run.outer.update, count)
        self._sparse = SparseVector(shapes) if run.outer.update.sparse else None
        kept = None if self._sparse is None else self._sparse.kept
        self._guard = PartnerGuard(parameters, run.outer.update.offered)
        self._common, self._gradients = bool(run.outer.update.common), run.outer.update.gradients
        tokens = run.microbatches_per_step * run.microbatch_size * run.sequence_length
        self._least = float(tokens) if self._gradients else 0.0
        """Under `sync`, values may be as large as for this many tokens: this replica's own sum may have none."""
        self.specs, self.lattice = snapshot_specs(run.outer.codec, count, self._offered, run.compute_dtype, kept)
        """The tensors that travel to a partner, and the lattice format in a codec with bounds."""
        self._lattice = None
        if self.lattice is not None:
            self._lattice = LatticeCodec(self.lattice.bits, self._offered, self._dtype, device)

    def frozen(
        self, peer: PeerId, place: tuple[int, int, int], outer: OuterState, gradients: Tensor | None = None
    ) -> FrozenRound:
        """A frozen round of these weights. `gradients`: the offer, under a rule that exchanges gradients.

        `place`: round, step and inner steps taken. What all replicas have to merge alike is rounded as it travels.
        """
        vector, theta = outer.freeze(gradients)
        if self._common:
            vector = vector.to(host_tensor.DTYPES[self.specs[0].dtype]).to(self._dtype)
        bounds, on_host = outer.bounds(vector), host_tensor.to_host(theta)
        weights = host_tensor.from_torch("weights", on_host)
        kept = host_tensor.from_torch("vector", on_host if vector is theta else host_tensor.to_host(vector))
        view = GroupView((), outer.digest(on_host)) if self._common else None
        round, step, inner_steps = place
        far = outer.radii(), outer.limits()
        return FrozenRound(peer, round, step, kept, weights, inner_steps, bounds, view, *far)

    def encode(self, frozen: FrozenRound, request: SnapshotRequest, caller: PeerId) -> Snapshot:
        """What `caller` requests of a frozen round, as it travels.

        Raises Violation if weights do not travel in that element type, or if bounds are invalid; Declined if the vector
        is not finite and its codec would not show that.
        """
        if request.weights is None:
            tensors = self._vector(frozen, request.lattice, caller)
        elif request.weights in WIDTHS:
            tensors = (_as_type(frozen.weights, request.weights),)
        else:
            raise Violation(f"weights travel as one of {', '.join(WIDTHS)}, not {request.weights[:32]!r}")
        view = frozen.view if request.weights is None else None
        return Snapshot(frozen.peer, frozen.round, frozen.step, tensors, view)

    def _vector(self, frozen: FrozenRound, asked: LatticeRequest | None, caller: PeerId) -> tuple[HostTensor, ...]:
        if (asked is None) != (self._lattice is None):
            raise Violation(f"in this run vectors travel {'with' if self._lattice else 'without'} bounds")
        sample = host_tensor.from_torch("sample", self._sample(frozen, frozen.round))
        if self._sparse is not None:
            values, places = self._sparse.split(host_tensor.to_torch(frozen.vector))
            return host_tensor.from_torch("vector", values), host_tensor.from_torch("places", places), sample
        if self._lattice is None or asked is None:
            return _as_type(frozen.vector, self.specs[0].dtype), sample
        vector, dither = host_tensor.to_torch(frozen.vector), self._dither(frozen.round, (frozen.peer, caller))
        bounds_C = torch.frombuffer(bytearray(frozen.bounds), dtype=torch.uint8)
        codes = host_tensor.from_torch("lattice", self._lattice.encode(vector, bounds_C, asked, dither))
        return (codes,) if asked.some else (codes, sample)

    def decode(
        self, mine: FrozenRound, request: SnapshotRequest, theirs: Snapshot, before: PartnerVector | None = None
    ) -> PartnerVector:
        """A partner's vector and sample, as in the port.

        Raises Violation if they are not what was requested or not finite, or, under a rule that takes from all
        replicas, if a value is far larger than this replica's own.
        """
        found = self._decoded(mine, request, theirs, before)
        if not self._common:
            return found if found.missing else self._guard.judge(mine, found)
        own, most = (host_tensor.largest(host_tensor.to_torch(one)) for one in (mine.vector, found.vector))
        if not most <= (limit := largest_accepted(max(own, self._least))):
            raise Violation(f"the snapshot of {theirs.peer} has a value of {most:.3g}; the limit is {limit:.3g}")
        return found

    def _decoded(
        self, mine: FrozenRound, request: SnapshotRequest, theirs: Snapshot, before: PartnerVector | None
    ) -> PartnerVector:
        asked, whose = request.lattice, f"the snapshot of {theirs.peer}"
        replica_tensors.checked(theirs.tensors, answer_specs(self.specs, self.lattice, asked), whose)
        sample = theirs.tensors[-1] if before is None else before.sample
        if self._lattice is None or asked is None:
            sent = theirs.tensors[0]
            if self._sparse is not None:
                values, places = map(host_tensor.to_torch, theirs.tensors[:2])
                sent = host_tensor.from_torch("vector", self._sparse.join(values, places, whose))
            if self._gradients and not (tokens := float(host_tensor.to_torch(sent)[-1])) == abs(int(tokens)):
                raise Violation(f"{whose} claims gradients of {tokens} tokens")
            vector = _as_type(sent, mine.vector.dtype) if self._common else _own_plus_difference(mine.vector, sent)
            return PartnerVector(theirs.peer, theirs.round, theirs.step, vector, sample, view=theirs.view)
        own = host_tensor.to_torch(mine.vector)
        if before is None or before.distances is None:
            whole, distances = host_tensor.copy(own), torch.zeros(len(mine.bounds), dtype=torch.float64)
        else:
            whole, distances = map(host_tensor.to_torch, (before.vector, before.distances))
        pull = LatticePull(self._lattice, own, asked, whole, distances)
        pull.take(host_tensor.to_torch(theirs.tensors[0]), self._dither(theirs.round, (mine.peer, theirs.peer)))
        found = map(host_tensor.from_torch, ("vector", "distances"), (pull.vector, pull.distances))
        return PartnerVector(theirs.peer, theirs.round, theirs.step, next(found), sample, next(found), pull.missing)

    def _dither(self, round: int, pair: tuple[PeerId, PeerId]) -> PairDither:
        return PairDither(self._seed, round, pair, self._offered)

    def pair_std(self, mine: FrozenRound, theirs: PartnerVector) -> float:
        """The replica std estimated from the pair's θ_f (METHOD.md, "Measures")."""
        gap = self._sample(mine, theirs.round) - host_tensor.to_torch(theirs.sample)
        return pair_std(float(gap.double().square().sum()), gap.numel())

    def _sample(self, frozen: FrozenRound, round: int) -> Tensor:
        """θ_f at the coordinates that are sampled in `round`, which may be another round."""
        places = sampled_coordinates(self._seed, self._stage, round, self._parameters)
        return host_tensor.to_torch(frozen.weights)[torch.tensor(places, dtype=torch.int64)]


def _as_type(values: HostTensor, dtype: str) -> HostTensor:
    """The values converted to an element type, unless they have it already."""
    if values.dtype == dtype:
        return values
    return host_tensor.from_torch(values.name, host_tensor.to_torch(values).to(host_tensor.DTYPES[dtype]))


def _own_plus_difference(own: HostTensor, sent: HostTensor) -> HostTensor:
    """û_j of a vector in a plain codec: this replica's own plus the difference of the two as they travel.

    METHOD.md, "Codecs of outer rounds". Takes memory for the result only.
    """
    if sent.dtype == own.dtype:
        return sent
    u, sent_u = host_tensor.to_torch(own), host_tensor.to_torch(sent)
    found = sent_u.to(u.dtype)
    for theirs, mine in zip(torch.split(found, CHUNK), torch.split(u, CHUNK), strict=True):
        theirs.sub_(mine.to(sent_u.dtype)).add_(mine)
    return host_tensor.from_torch(own.name, found)
