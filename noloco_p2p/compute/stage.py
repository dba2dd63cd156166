"""One pipeline stage in plain synchronous torch; it implements the Stage port.

It runs on the thread of `device.py`; the simulator calls it directly. Weights, moments, φ and δ are in compute_dtype;
hidden states and gradients travel in the codecs of `wire`; GPUs run the passes under bfloat16 autocast if they compute
in it.

**A microbatch that is not finite leaves nothing behind.** Its parameter gradients are computed separately from the
accumulated ones (autograd.grad), their norm is taken, and only finite ones are added. Compared with `.backward()` this
costs one more pass over the gradients, and temporarily a second set of them.

Shape legend: B microbatch, T sequence, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from math import isfinite, sqrt
from statistics import fmean

import torch
from torch import Tensor

from noloco_p2p.compute import host_tensor, replica_tensors
from noloco_p2p.compute.accumulator import AccumulatedMicrobatch, GradientAccumulator, total_norm
from noloco_p2p.compute.activation_codec import ActivationCodec
from noloco_p2p.compute.audit import Audit
from noloco_p2p.compute.graphs import GraphMemory, GraphStore, KeptGraph
from noloco_p2p.compute.hardware import autocast
from noloco_p2p.compute.inner_optimizer import InnerOptimizer
from noloco_p2p.compute.model import StageModule
from noloco_p2p.compute.outer_state import OuterState
from noloco_p2p.compute.snapshot_codec import SnapshotCodec
from noloco_p2p.config import RunManifest
from noloco_p2p.core.guard import NormClip
from noloco_p2p.core.messages import Gradient, HostTensor, LossSum, MicrobatchId, PeerId, ReplicaState, TensorSpec
from noloco_p2p.core.snapshots import GUARDED_DTYPE, FrozenRound, PartnerVector, Snapshot, round_group
from noloco_p2p.core.stage_values import Contribution, StageState, StepLabel, StepResult
from noloco_p2p.errors import Violation

IGNORED = -100
"""A target that is not counted as a token (METHOD.md, "Inner step")."""


class TorchStage:
    """The real stage. Its methods raise the errors of the port, and torch's own (out of memory).

    `recompute`: graphs are not kept but rebuilt from their input. `discard` frees them in either case.
    """

    def __init__(
        self,
        part: StageModule,
        manifest: RunManifest,
        peer_id: PeerId,
        device: torch.device,
        audit: Audit | None = None,
        recompute: bool = False,
    ) -> None:
        self._part = part
        self._manifest, self._peer_id = manifest, peer_id
        self._device = device
        self._audit = audit
        part.causal.to(device)
        self._first, self._last = part.index == 0, part.index == part.stages - 1
        self._compute = host_tensor.DTYPES[manifest.compute_dtype]
        self._parameters = list(part.parameters.values())
        self._sums = GradientAccumulator(self._parameters)
        matrices = part.layer_matrices() if manifest.inner.optimizer == "muon" else frozenset[str]()
        self._optimizer = InnerOptimizer(part.parameters, manifest.inner, matrices)
        self._outer = OuterState(part.parameters, manifest.outer)
        self._codec = SnapshotCodec(manifest, part.index, self._outer.parameters, device)
        self.encode, self.decode = self._codec.encode, self._codec.decode  # as in the port; any thread may call them
        self._returned = NormClip()
        self._inner_steps = 0  # taken on these weights
        shape_BT = (manifest.microbatch_size, manifest.sequence_length)
        shape_BTD = (*shape_BT, part.hidden_size)
        self._hidden = ActivationCodec("hidden", manifest.wire.forward, shape_BTD, self._compute)
        self._grad = ActivationCodec("grad", manifest.wire.backward, shape_BTD, self._compute)
        self.compare = self._grad.compare  # as in the port; any thread may call it
        body_bytes = self._hidden.spec.nbytes * (2 - self._first - self._last)
        self.memory = GraphMemory(device, self._parameters, body_bytes, keeps=not (self._last or recompute))
        self._graphs = GraphStore(self.memory, recompute=recompute)
        self._inputs, self._targets = (TensorSpec(name, "int32", shape_BT) for name in ("inputs", "targets"))
        self._mask = TensorSpec("mask", "uint8", shape_BT)
        self.state = StageState(
            part.index,
            part.counts[part.index],
            self._hidden.spec,
            self._grad.spec,
            self._codec.specs,
            replica_tensors.specs(manifest.state_kinds, self._outer.parameters, matrices),
            tuple(TensorSpec("weights", GUARDED_DTYPE, (count,)) for count in part.counts),
            self._codec.lattice,
        )

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """θ by global name: the live tensors, for tests, benchmarks and export."""
        return dict(self._part.parameters)

    @property
    def places(self) -> int | None:
        """As in the port."""
        return self.memory.places

    def forward(self, inputs: HostTensor, mask: HostTensor | None) -> tuple[int, HostTensor]:
        """Forward with a graph, as in the port."""
        graph, hidden_BTD = self._graphs.forward(self._pass, inputs, mask)
        return graph, self._sent(hidden_BTD)

    def check(self, gradient: Gradient) -> None:
        """Raise Violation if a gradient is not in the run's codec, or claims too many tokens, as in the port."""
        self._grad.check(gradient.grad)
        if not 0 <= gradient.tokens <= self._manifest.microbatch_size * self._manifest.sequence_length:
            raise Violation(f"the gradient claims {gradient.tokens} tokens")

    def backward(self, graph: int, microbatch: MicrobatchId, gradient: Gradient) -> Contribution:
        """Backward through a kept graph, as in the port. If the gradient is not finite, or is marked so, `finite` is
        False."""
        wire = host_tensor.to_torch(gradient.grad)
        if not (gradient.finite and isfinite(gradient.loss_sum) and self._grad.is_finite(wire)):
            self._graphs.discard(graph)
            return self._not_finite(microbatch)
        kept = self._graphs.take(self._pass, graph)
        grad_BTD = self._grad.decode(self._to_device(wire)).to(kept.hidden.dtype)
        if not isfinite(norm := total_norm([grad_BTD])):
            return self._not_finite(microbatch)
        if (clip := self._returned.factor(norm / sqrt(max(1, gradient.tokens)))) < 1:
            grad_BTD = grad_BTD * clip
        added = AccumulatedMicrobatch(microbatch, gradient.tokens, gradient.loss_sum, clip)
        return self._contribute(added, kept.leaf, kept.hidden, grad_BTD)

    def loss_backward(
        self, microbatch: MicrobatchId, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None
    ) -> Contribution:
        """Forward, summed loss and backward at the last stage, as in the port."""
        leaf = self._leaf(inputs)
        with self.memory.measured():
            loss, tokens = self._loss(leaf, targets, mask)
        self.memory.look(0)
        loss_sum = float(loss.detach())
        if not isfinite(loss_sum):
            return self._not_finite(microbatch)
        return self._contribute(AccumulatedMicrobatch(microbatch, tokens, loss_sum), leaf, loss, None)

    def discard(self, graph: int) -> None:
        """Free a graph that will not be used; unknown handles are ignored."""
        self._graphs.discard(graph)

    @torch.no_grad()
    def evaluate(self, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None) -> HostTensor | LossSum:
        """Forward without a graph, as in the port."""
        if self._last:
            loss, tokens = self._loss(self._leaf(inputs), targets, mask)
            return LossSum(float(loss), tokens)
        return self._sent(self._pass(inputs, mask).hidden)

    @torch.no_grad()
    def is_sound(self) -> bool:
        """As in the port. The squares of the output must be finite as well, because a later stage computes them."""
        inputs = self._part.any_inputs(self._inputs.shape, self._compute)
        with autocast(self._parameters[0]):
            output = self._part(inputs.to(self._device), None)
        return isfinite(total_norm([output.to(self._compute), *self._parameters]))

    def inner_step(self, label: StepLabel) -> StepResult:
        """Divide by the tokens, clip, update θ. Without tokens nothing changes. The device fills in `busy_s`."""
        added, tokens, norm = self._sums.added, self._sums.tokens, 0.0
        self._graphs.weights_change()
        if self._sums.divisor:
            norm = self._sums.average_and_clip(self._manifest.inner.clip_norm)
            self._optimizer.step(label.learning_rate)
        self._sums.close_step()
        self._inner_steps, self._outer.learning_rate = label.inner_step, label.learning_rate
        if self._audit is not None:
            self._audit.inner_step(label, added, first=self._first)
        return StepResult(tokens, sum(one.loss_sum for one in added), len(added), norm, 0.0)

    def snapshot(self, round: int, step: int) -> FrozenRound:
        """Freeze θ and what the rule offers, as in the port."""
        gradients = self._sums.flat() if self._outer.rule.gradients else None
        return self._codec.frozen(self._peer_id, (round, step, self._inner_steps), self._outer, gradients)

    def merge(self, mine: FrozenRound, theirs: Sequence[PartnerVector] = (), counted: bool = True) -> float | None:
        """The outer rule and N3, as in the port; the optimizer's moments stay."""
        self._graphs.weights_change()
        spreads = [self._codec.pair_std(mine, one) for one in theirs]
        self._outer.observe(theirs)
        group = round_group(mine, theirs, counted)
        vectors = list(map(host_tensor.to_torch, group.vectors))
        replica_std = fmean(spreads) if spreads else None
        if self._outer.rule.gradients:
            self._sums.replace(*self._outer.summed(vectors))
            return replica_std
        record = None if self._audit is None else self._outer.record(mine, theirs)
        self._outer.merge(vectors, group.mine, host_tensor.to_torch(mine.weights), group.lag)
        if self._audit is not None and record is not None:
            record |= {f"{kind}_after": named for kind, named in self._outer.kinds.items()} | self._optimizer.moments()
            self._audit.round(mine.round, theirs, (mine.inner_steps, self._inner_steps), record, self._manifest.outer)
        return replica_std

    def adopt(self, theirs: Snapshot) -> None:
        """Take over another replica's θ_f, with δ = 0 and a fresh optimizer, as in the port."""
        expected, whose = [self.state.weights[self.state.index]], f"the weights of {theirs.peer}"
        self._outer.adopt(*replica_tensors.checked(theirs.tensors, expected, whose, self._outer.largest_accepted))
        self._optimizer.reset()
        self._graphs.clear()
        self._sums.restart(())

    def capture(self, round: int, step: float, inner_steps: int) -> ReplicaState:
        """Freeze the current φ, θ, δ, moments and spent ids in host memory, as in the port. `number` stays 0."""
        moments = self._optimizer.moments().items()
        copies = {kind: {name: host_tensor.copy(one) for name, one in named.items()} for kind, named in moments}
        counts = (self.state.index, round, step, inner_steps, self._optimizer.steps)
        tensors = replica_tensors.pack(self._outer.capture() | copies)
        return ReplicaState(self._peer_id, *counts, tensors, 0, self._sums.spent(), self._returned.norms)

    def restore(self, theirs: ReplicaState) -> None:
        """Become that replica, as in the port. Open graphs are freed."""
        limits = self._outer.largest_accepted, self._manifest.inner.most_mean
        kinds = replica_tensors.unpack_state(theirs, self.state.index, self.state.replica, *limits)
        self._outer.restore(kinds)
        self._optimizer.restore(kinds, theirs.adam_steps)
        self._graphs.clear()
        self._sums.restart(theirs.spent)
        self._returned, self._inner_steps = NormClip(theirs.returned_norms), theirs.inner_steps

    def _pass(self, inputs: HostTensor, mask: HostTensor | None) -> KeptGraph:
        """See `graphs.Pass`."""
        leaf = self._leaf(inputs)
        with autocast(self._parameters[0]):
            return KeptGraph(leaf, self._part(leaf, self._mask_on_device(mask)))

    def _contribute(
        self, added: AccumulatedMicrobatch, leaf: Tensor, output: Tensor, grad_output: Tensor | None
    ) -> Contribution:
        """Backward from `output`. The gradients are added if they are finite and the id is not spent."""
        counted = not self._sums.is_spent(added.microbatch)
        wanted = ([] if self._first else [leaf]) + (self._parameters if counted else [])
        grads = list(torch.autograd.grad(output, wanted, grad_output, allow_unused=True)) if wanted else []
        grad = None
        if not self._first:
            leaf_grad = grads.pop(0)
            wire = host_tensor.to_host(self._grad.encode(torch.zeros_like(leaf) if leaf_grad is None else leaf_grad))
            if not self._grad.is_finite(wire):
                return self._not_finite(added.microbatch)
            grad = host_tensor.from_torch("grad", wire)
        if counted:
            if not isfinite(total_norm([one for one in grads if one is not None])):
                return self._not_finite(added.microbatch)
            self._sums.add(added, grads)
        return Contribution(grad, added.loss_sum, added.tokens, counted, True, added.clip)

    def _not_finite(self, microbatch: MicrobatchId) -> Contribution:
        """A microbatch that was not finite: its id is spent with zero tokens, and no gradient is added."""
        counted = not self._sums.is_spent(microbatch)
        if counted:
            self._sums.add(AccumulatedMicrobatch(microbatch, 0, 0.0), ())
        return Contribution(None if self._first else self._grad.zeros(), 0.0, 0, counted, finite=False)

    def _loss(self, leaf: Tensor, targets: HostTensor, mask: HostTensor | None) -> tuple[Tensor, int]:
        """Cross entropy summed over the targets that count, in float32 or more, and their number."""
        targets_BT = host_tensor.check(targets, self._targets)
        counts_BT = targets_BT != IGNORED
        self._check_ids("targets", torch.where(counts_BT, targets_BT, 0))
        with autocast(self._parameters[0]):
            logits_BTV = self._part(leaf, self._mask_on_device(mask))
        wide = logits_BTV if logits_BTV.dtype == torch.float64 else logits_BTV.float()
        loss = torch.nn.functional.cross_entropy(
            wide.flatten(0, 1), self._to_device(targets_BT).long().flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return loss, int(counts_BT.sum())

    def _leaf(self, inputs: HostTensor) -> Tensor:
        """The checked input on the device: B×T tokens, or a B×T×D leaf in compute_dtype that requires a gradient."""
        if self._first:
            ids_BT = host_tensor.check(inputs, self._inputs)
            self._check_ids("inputs", ids_BT)
            return self._to_device(ids_BT).long()
        wire = self._hidden.check(inputs)
        if not self._hidden.is_finite(wire):
            raise Violation("hidden: not finite")
        return self._hidden.decode(self._to_device(wire)).requires_grad_(torch.is_grad_enabled())

    def _check_ids(self, name: str, ids_BT: Tensor) -> None:
        least, most = torch.aminmax(ids_BT)
        if int(least) < 0 or int(most) >= self._part.vocabulary:
            raise Violation(f"{name}: ids outside the vocabulary of {self._part.vocabulary}")

    def _mask_on_device(self, mask: HostTensor | None) -> Tensor | None:
        return None if mask is None else self._to_device(host_tensor.check(mask, self._mask)).bool()

    def _to_device(self, values: Tensor) -> Tensor:
        return values if self._device.type == "cpu" else values.pin_memory().to(self._device, non_blocking=True)

    def _sent(self, hidden_BTD: Tensor) -> HostTensor:
        """A stage's output as it travels, encoded on the device so that less is copied."""
        return host_tensor.from_torch("hidden", host_tensor.to_host(self._hidden.encode(hidden_BTD)))
