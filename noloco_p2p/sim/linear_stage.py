"""A pipeline stage without torch: two weights, exact gradients, and a record of all that was counted.

Stage s maps every hidden value h to gain·h + bias; stage 0 reads h = token/100, the last stage's loss is the sum of
½(h − target/100)² over the targets that count. All in float64, whatever the manifest's dtypes; the optimizer is plain
gradient descent after the clip. It checks what a node promises its stage: forward and backward of a microbatch see the
same weights.

Shape legend: B microbatch, T sequence, D = 1 hidden size.
"""

from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from math import hypot, isfinite, sqrt
from typing import NamedTuple

from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import (
    REPLICA_KINDS,
    Gradient,
    HostTensor,
    LossSum,
    MicrobatchId,
    PeerId,
    ReplicaState,
    Snapshot,
    TensorSpec,
)
from noloco_p2p.core.outer_update import carried_over, outer_step
from noloco_p2p.core.seeds import generator
from noloco_p2p.core.spent_ids import SpentIds
from noloco_p2p.core.stage_values import Contribution, MergeResult, StageState, StepLabel, StepResult
from noloco_p2p.errors import Violation
from noloco_p2p.sim.batches import IGNORED

NAMES = ("gain", "bias")
TOKEN_SCALE = 0.01


class CountedMicrobatch(NamedTuple):
    """One microbatch whose gradients were added."""

    microbatch: MicrobatchId
    inner_step: int
    """The inner step that used it, from 1."""
    version: int
    """How often the weights had changed before."""
    tokens: int
    loss_sum: float


class LinearStage:
    """The synchronous stage. `theta`, `phi` and `momentum` are θ, φ and δ of (gain, bias)."""

    def __init__(self, manifest: RunManifest, index: int, me: PeerId) -> None:
        rng = generator(manifest.seed, "weights", index)
        self.theta = [1.0 + 0.1 * rng.random(), 0.1 * rng.random()]
        self.phi, self.momentum = list(self.theta), [0.0, 0.0]
        self.theta_frozen = list(self.theta)
        """θ_f: θ at the newest snapshot."""
        self.counted: list[CountedMicrobatch] = []
        """In the order in which they were added."""
        self.dropped: list[MicrobatchId] = []
        """Computed for the reply only: the id was spent."""
        self.version = 0
        self.inner_steps = 0
        self.most_graphs = 0
        self._manifest = manifest
        self._me = me
        self._first, self._last = index == 0, index == manifest.stages - 1
        self._graphs: dict[int, tuple[int, list[float]]] = {}
        """(`version`, inputs) of each forward pass whose backward pass is still to come."""
        self._handles = 0
        self._spent = SpentIds()
        self._sums = [0.0, 0.0]
        self._used: list[CountedMicrobatch] = []
        rows = (manifest.microbatch_size, manifest.sequence_length)
        self._targets = TensorSpec("targets", "int32", rows)
        snapshot, replica = _specs(("slow", "delta")), _specs(REPLICA_KINDS)
        hidden, grad = (TensorSpec(name, "float64", (*rows, 1)) for name in ("hidden", "grad"))
        every_bytes = (sum(spec.nbytes for spec in snapshot),) * manifest.stages
        self.state = StageState(index, len(NAMES), hidden, grad, snapshot, replica, every_bytes)

    @property
    def open_graphs(self) -> int:
        """Graphs that are neither used nor discarded."""
        return len(self._graphs)

    def forward(self, inputs: HostTensor, mask: HostTensor | None) -> tuple[int, HostTensor]:
        """See `ports.Stage`."""
        values = self._values(inputs)
        self._handles += 1
        self._graphs[self._handles] = (self.version, values)
        self.most_graphs = max(self.most_graphs, len(self._graphs))
        return self._handles, self._hidden("hidden", self._outputs(values))

    def backward(self, graph: int, microbatch: MicrobatchId, gradient: Gradient) -> Contribution:
        """See `ports.Stage`. Raises AssertionError when the weights have changed since the forward pass."""
        if gradient.grad.spec[1:] != self.state.gradient[1:]:
            raise Violation(f"a gradient of {gradient.grad.spec}")
        version, inputs = self._graphs.pop(graph)
        assert version == self.version, f"{microbatch}: forward with weights {version}, backward with {self.version}"
        grads = list(gradient.grad.data.cast("d"))
        return self._contribute(microbatch, inputs, grads, gradient.tokens, gradient.loss_sum)

    def loss_backward(
        self, microbatch: MicrobatchId, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None
    ) -> Contribution:
        """See `ports.Stage`."""
        values = self._values(inputs)
        errors, tokens = self._errors(values, targets)
        return self._contribute(microbatch, values, errors, tokens, sum(0.5 * e * e for e in errors))

    def discard(self, graph: int) -> None:
        """See `ports.Stage`."""
        self._graphs.pop(graph, None)

    def evaluate(self, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None) -> HostTensor | LossSum:
        """See `ports.Stage`."""
        values = self._values(inputs)
        if not self._last:
            return self._hidden("hidden", self._outputs(values))
        errors, tokens = self._errors(values, targets)
        return LossSum(sum(0.5 * e * e for e in errors), tokens)

    def inner_step(self, label: StepLabel) -> StepResult:
        """See `ports.Stage`."""
        self.inner_steps += 1
        used, self._used = self._used, []
        tokens, norm = sum(one.tokens for one in used), 0.0
        if tokens:
            mean = [total / tokens for total in self._sums]
            norm = hypot(*mean)
            rate = label.learning_rate * min(1.0, self._manifest.inner.clip_norm / (norm + 1e-6))
            self.theta = [value - rate * grad for value, grad in zip(self.theta, mean, strict=True)]
        self._sums = [0.0, 0.0]
        self._spent.end_step()
        self.version += 1
        return StepResult(tokens, sum(one.loss_sum for one in used), len(used), norm, 0.0)

    def snapshot(self, round: int, step: int) -> Snapshot:
        """See `ports.Stage`."""
        self.theta_frozen = list(self.theta)
        deltas = [value - slow for value, slow in zip(self.theta, self.phi, strict=True)]
        return Snapshot(self._me, round, step, _pack(self.state.snapshot, [*self.phi, *deltas]))

    def merge(self, mine: Snapshot, theirs: Snapshot | None) -> MergeResult:
        """See `ports.Stage`."""
        group = [self._read(one) for one in (mine, theirs) if one is not None]
        outer = self._manifest.outer
        step = partial(outer_step, alpha=outer.alpha, beta=outer.beta, gamma=outer.gamma)
        of_weight = [[(phi[i], delta[i]) for phi, delta in group] for i in range(len(NAMES))]
        after = [step(*one) for one in zip(self.phi, self.momentum, of_weight, strict=True)]
        self.phi, self.momentum = [phi for phi, _ in after], [momentum for _, momentum in after]
        self.theta = list(map(carried_over, self.phi, self.theta, self.theta_frozen))
        self.version += 1
        if theirs is None:
            return MergeResult(None)
        thetas = [[p + d for p, d in zip(phi, delta, strict=True)] for phi, delta in group]
        square = sum((a - b) ** 2 for a, b in zip(*thetas, strict=True))
        return MergeResult(sqrt(0.5 * square / (2 * len(NAMES))))

    def adopt(self, theirs: Snapshot) -> None:
        """See `ports.Stage`."""
        phi, delta = self._read(theirs)
        self.phi = [p + d for p, d in zip(phi, delta, strict=True)]
        self.theta, self.momentum = list(self.phi), [0.0, 0.0]
        self._restart(())

    def capture(self, round: int, step: float, inner_steps: int) -> ReplicaState:
        """See `ports.Stage`. There is no Adam here: its moments are zeros, after no steps."""
        values = [*self.phi, *self.theta, *self.momentum, *[0.0] * (2 * len(NAMES))]
        tensors, spent = _pack(self.state.replica, values), self._spent.ended()
        return ReplicaState(self._me, self.state.index, round, step, inner_steps, 0, tensors, spent=spent)

    def restore(self, theirs: ReplicaState) -> None:
        """See `ports.Stage`."""
        if theirs.stage != self.state.index or theirs.adam_steps < 0:
            raise Violation(f"the state of {theirs.peer} is of stage {theirs.stage}, not {self.state.index}")
        values = _unpack(theirs.tensors, self.state.replica, f"the state of {theirs.peer}")
        n = len(NAMES)
        if min(values[4 * n :]) < 0:
            raise Violation(f"the state of {theirs.peer} has a mean square below zero")
        self.phi, self.theta, self.momentum = values[:n], values[n : 2 * n], values[2 * n : 3 * n]
        self.inner_steps = theirs.inner_steps
        self._restart(theirs.spent)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _values(self, inputs: HostTensor) -> list[float]:
        """The hidden values that enter, B·T of them. Raises Violation when they do not fit or are not finite."""
        if self._first:
            if inputs.spec[1:] != self._targets[1:]:
                raise Violation(f"tokens of {inputs.spec}")
            return [TOKEN_SCALE * token for token in inputs.data.cast("i")]
        if inputs.spec[1:] != self.state.hidden[1:]:
            raise Violation(f"hidden states of {inputs.spec}")
        values = list(inputs.data.cast("d"))
        if not all(map(isfinite, values)):
            raise Violation("hidden states that are not finite")
        return values

    def _outputs(self, values: Sequence[float]) -> list[float]:
        gain, bias = self.theta
        return [gain * value + bias for value in values]

    def _errors(self, values: Sequence[float], targets: HostTensor) -> tuple[list[float], int]:
        """Gradient of the summed loss with respect to the outputs, and the number of targets that count."""
        if targets.spec[1:] != self._targets[1:]:
            raise Violation(f"targets of {targets.spec}")
        wanted = list(targets.data.cast("i"))
        pairs = zip(self._outputs(values), wanted, strict=True)
        errors = [0.0 if target == IGNORED else value - TOKEN_SCALE * target for value, target in pairs]
        return errors, sum(target != IGNORED for target in wanted)

    def _contribute(
        self, microbatch: MicrobatchId, inputs: list[float], grads: list[float], tokens: int, loss_sum: float
    ) -> Contribution:
        finite = tokens > 0 and isfinite(loss_sum) and all(map(isfinite, grads))
        if not finite:
            grads, tokens, loss_sum = [0.0] * len(grads), 0, 0.0
        counted = self._spent.spend(microbatch)
        if counted:
            self._used.append(CountedMicrobatch(microbatch, self.inner_steps + 1, self.version, tokens, loss_sum))
            self.counted.append(self._used[-1])
            self._sums[0] += sum(g * h for g, h in zip(grads, inputs, strict=True))
            self._sums[1] += sum(grads)
        else:
            self.dropped.append(microbatch)
        grad = None if self._first else self._hidden("grad", [self.theta[0] * g for g in grads])
        return Contribution(grad, loss_sum, tokens, counted, finite)

    def _hidden(self, name: str, values: list[float]) -> HostTensor:
        _, dtype, shape = self.state.hidden
        return HostTensor(name, dtype, shape, memoryview(array("d", values).tobytes()))

    def _read(self, snapshot: Snapshot) -> tuple[list[float], list[float]]:
        """(φ, Δ). Raises Violation when they do not fit or are not finite."""
        values = _unpack(snapshot.tensors, self.state.snapshot, f"the snapshot of {snapshot.peer}")
        return values[: len(NAMES)], values[len(NAMES) :]

    def _restart(self, spent: Iterable[MicrobatchId]) -> None:
        """Other weights: kept graphs and the inner step under way are forgotten, `spent` alone count as seen."""
        del self.counted[len(self.counted) - len(self._used) :]
        self._used, self._sums = [], [0.0, 0.0]
        self._graphs.clear()
        self._spent.refill(spent)
        self.version += 1


def _specs(kinds: Iterable[str]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(f"{kind}/{name}", "float64", (1,)) for kind in kinds for name in NAMES)


def _pack(specs: tuple[TensorSpec, ...], values: Iterable[float]) -> tuple[HostTensor, ...]:
    """One value each."""
    pairs = zip(specs, values, strict=True)
    return tuple(HostTensor(*spec, memoryview(array("d", [value]).tobytes())) for spec, value in pairs)


def _unpack(tensors: Sequence[HostTensor], specs: tuple[TensorSpec, ...], whose: str) -> list[float]:
    """One value each. Raises Violation when they do not fit or are not finite; `whose` begins the message."""
    if tuple(tensor.spec for tensor in tensors) != specs:
        raise Violation(f"{whose} does not have this stage's tensors")
    values = [tensor.data.cast("d")[0] for tensor in tensors]
    if not all(map(isfinite, values)):
        raise Violation(f"{whose} is not finite")
    return values
