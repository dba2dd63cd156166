"""A pipeline stage without torch: two weights, exact gradients, and a record of everything counted.

Stage s maps every hidden value h to gain·h + bias. Stage 0 reads h = token/100, and the loss of the last stage is the
sum of ½(h − target/100)² over the targets that count. All in float64, whatever the manifest's dtypes; the optimizer is
plain gradient descent after the clip. The stage checks that the node keeps its promise: the forward and backward pass
of a microbatch use the same weights.

Shape legend: B microbatch, T sequence, D = 1 hidden size.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import hypot, isfinite
from operator import mul
from statistics import fmean
from typing import NamedTuple

from noloco_p2p.config import RunManifest
from noloco_p2p.core.agreement import GroupView, digest
from noloco_p2p.core.gradient_pairs import GradientLikeness
from noloco_p2p.core.messages import Gradient, HostTensor, LossSum, MicrobatchId, PeerId, ReplicaState, TensorSpec
from noloco_p2p.core.outer_rules import vector_size
from noloco_p2p.core.outer_update import carried_over
from noloco_p2p.core.seeds import generator
from noloco_p2p.core.snapshots import FrozenRound, PartnerVector, Snapshot, SnapshotRequest, pair_std, round_group
from noloco_p2p.core.spent_ids import SpentIds
from noloco_p2p.core.stage_values import Contribution, StageState, StepLabel, StepResult
from noloco_p2p.errors import Violation
from noloco_p2p.sim.batches import IGNORED

NAMES = ("gain", "bias")
TOKEN_SCALE = 0.01
SAMPLE = TensorSpec("sample", "float64", (len(NAMES),))
WEIGHTS = TensorSpec("weights", "float64", (len(NAMES),))


class CountedMicrobatch(NamedTuple):
    """A microbatch whose gradients were added."""

    microbatch: MicrobatchId
    inner_step: int
    """The inner step that used it, counted from 1."""
    version: int
    """Number of changes of the weights before it."""
    tokens: int
    loss_sum: float


class LinearStage:
    """The synchronous stage. `theta` is θ; `kept` is what the outer rule keeps, by kind. Each is (gain, bias)."""

    def __init__(self, manifest: RunManifest, index: int, me: PeerId) -> None:
        rng = generator(manifest.seed, "weights", index)
        self.theta = [1.0 + 0.1 * rng.random(), 0.1 * rng.random()]
        self._rule = manifest.outer.update
        self.kept = self._new()
        self.base = list(self.theta)
        """θ as the newest round left it, without what has been trained since that round was frozen."""
        self.counted: list[CountedMicrobatch] = []
        """In the order of addition."""
        self.dropped: list[MicrobatchId] = []
        """Microbatches computed for the reply only, because their ids were already spent."""
        self.version = 0
        self.inner_steps = 0
        self.most_graphs = 0
        self._manifest, self._me = manifest, me
        self.places: int | None = None  # memory is not limited
        self._first, self._last = index == 0, index == manifest.stages - 1
        self.open_graphs: dict[int, tuple[int, list[float]]] = {}
        """(`version`, inputs) of each forward pass that has been neither used nor discarded."""
        self._handles = 0
        self._spent = SpentIds()
        self._sums = [0.0, 0.0]
        self._tokens_of_all: int | None = None  # of `_sums`, once they hold the sums of all replicas
        self._used: list[CountedMicrobatch] = []
        rows = (manifest.microbatch_size, manifest.sequence_length)
        self._targets = TensorSpec("targets", "int32", rows)
        replica = tuple(
            TensorSpec(f"{kind}/{name}", "float64", (1,)) for kind in manifest.state_kinds for name in NAMES
        )
        hidden, grad = (TensorSpec(name, "float64", (*rows, 1)) for name in ("hidden", "grad"))
        vector = TensorSpec("vector", "float64", (vector_size(self._rule, len(NAMES)),))
        snapshot, weights = (vector, SAMPLE), (WEIGHTS,) * manifest.stages
        self.state = StageState(index, len(NAMES), hidden, grad, snapshot, replica, weights)

    def forward(self, inputs: HostTensor, mask: HostTensor | None) -> tuple[int, HostTensor]:
        """See `ports.Stage`."""
        values = self._values(inputs)
        self._handles += 1
        self.open_graphs[self._handles] = (self.version, values)
        self.most_graphs = max(self.most_graphs, len(self.open_graphs))
        return self._handles, self._hidden("hidden", self._outputs(values))

    def check(self, gradient: Gradient) -> None:
        """See `ports.Stage`."""
        if gradient.grad.spec[1:] != self.state.gradient[1:]:
            raise Violation(f"a gradient of {gradient.grad.spec}, not {self.state.gradient}")

    def backward(self, graph: int, microbatch: MicrobatchId, gradient: Gradient) -> Contribution:
        """See `ports.Stage`. Raises AssertionError if the weights have changed since the forward pass."""
        version, inputs = self.open_graphs.pop(graph)
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
        self.open_graphs.pop(graph, None)

    def evaluate(self, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None) -> HostTensor | LossSum:
        """See `ports.Stage`."""
        values = self._values(inputs)
        errors, tokens = self._errors(values, targets) if self._last else ([], 0)
        loss = LossSum(sum(0.5 * e * e for e in errors), tokens)
        return loss if self._last else self._hidden("hidden", self._outputs(values))

    def is_sound(self) -> bool:
        """See `ports.Stage`."""
        return all(isfinite(value * value) for value in (*self.theta, *self._outputs([1.0])))

    def compare(self, one: Gradient, other: Gradient) -> GradientLikeness:
        """See `ports.Stage`."""
        a, b = one.grad.data.cast("d"), other.grad.data.cast("d")
        return GradientLikeness.of(sum(map(mul, a, a)), sum(map(mul, b, b)), sum(map(mul, a, b)))

    def inner_step(self, label: StepLabel) -> StepResult:
        """See `ports.Stage`."""
        self.inner_steps += 1
        used, self._used = self._used, []
        tokens, norm = sum(one.tokens for one in used), 0.0
        divisor, self._tokens_of_all = tokens if self._tokens_of_all is None else self._tokens_of_all, None
        if divisor:
            mean = [total / divisor for total in self._sums]
            norm = hypot(*mean)
            rate = label.learning_rate * min(1.0, self._manifest.inner.clip_norm / (norm + 1e-6))
            self.theta = [value - rate * grad for value, grad in zip(self.theta, mean, strict=True)]
        self._sums = [0.0, 0.0]
        self._spent.end_step()
        self.version += 1
        return StepResult(tokens, sum(one.loss_sum for one in used), len(used), norm, 0.0)

    def snapshot(self, round: int, step: int) -> FrozenRound:
        """See `ports.Stage`."""
        offers = [self._rule.offer(self._own(at, theta)) for at, theta in enumerate(self.theta)]
        vector = [value for part in zip(*offers, strict=True) for value in part]
        if self._rule.gradients:
            vector.append(sum(one.tokens for one in self._used))
        common = [array("d", (self.kept | {"fast": self.theta})[kind]).tobytes() for kind in self._rule.common]
        tensors = (_flat(self.state.snapshot[0], vector), _flat(WEIGHTS, self.theta))
        view = GroupView((), digest(common)) if common else None
        return FrozenRound(self._me, round, step, *tensors, self.inner_steps, view=view)

    def encode(self, frozen: FrozenRound, request: SnapshotRequest, caller: PeerId) -> Snapshot:
        """See `ports.Stage`. All weights are sampled, because there are only two."""
        tensors = (frozen.vector, replace(frozen.weights, name="sample")) if request.weights is None else ()
        return Snapshot(frozen.peer, frozen.round, frozen.step, tensors or (frozen.weights,), frozen.view)

    def decode(
        self, mine: FrozenRound, request: SnapshotRequest, theirs: Snapshot, before: PartnerVector | None = None
    ) -> PartnerVector:
        """See `ports.Stage`."""
        _values_of(theirs.tensors, self.state.snapshot, f"the snapshot of {theirs.peer}")
        vector, sample = theirs.tensors
        return PartnerVector(theirs.peer, theirs.round, theirs.step, vector, sample, view=theirs.view)

    def merge(self, mine: FrozenRound, theirs: Sequence[PartnerVector] = (), counted: bool = True) -> float | None:
        """See `ports.Stage`."""
        group, frozen = round_group(mine, theirs, counted), mine.weights.data.cast("d")
        vectors = [list(vector.data.cast("d")) for vector in group.vectors]
        if self._rule.gradients:
            self._tokens_of_all = int(sum(vector.pop() for vector in vectors))
        for at, theta_frozen in enumerate(frozen):
            members = [tuple(vector[at :: len(NAMES)]) for vector in vectors]
            after = self._rule.merge(self._own(at, theta_frozen), members, group.mine, group.lag)
            if self._rule.gradients:
                self._sums[at], self.base[at] = after["gradient"], self.theta[at]
                continue
            self.base[at] = after.pop("fast")
            self.theta[at] = carried_over(self.base[at], self.theta[at], theta_frozen)
            for kind in after:
                self.kept[kind][at] = after[kind]
        self.version += 1
        squares = [sum((a - b) ** 2 for a, b in zip(frozen, one.sample.data.cast("d"), strict=True)) for one in theirs]
        return fmean(pair_std(square, len(NAMES)) for square in squares) if squares else None

    def adopt(self, theirs: Snapshot) -> None:
        """See `ports.Stage`."""
        self.theta = _values_of(theirs.tensors, (WEIGHTS,), f"the weights of {theirs.peer}")
        self.kept, self.base = self._new(), list(self.theta)
        self._restart(())

    def capture(self, round: int, step: float, inner_steps: int) -> ReplicaState:
        """See `ports.Stage`. Without Adam, its moments are zeros and its step count is 0."""
        kept = [value for values in self.kept.values() for value in values]
        values = [*self.theta, *kept, *[0.0] * (2 * len(NAMES))]
        tensors = tuple(_flat(spec, [value]) for spec, value in zip(self.state.replica, values, strict=True))
        spent = self._spent.ended()
        return ReplicaState(self._me, self.state.index, round, step, inner_steps, 0, tensors, spent=spent)

    def restore(self, theirs: ReplicaState) -> None:
        """See `ports.Stage`."""
        if theirs.stage != self.state.index or theirs.adam_steps < 0:
            raise Violation(f"the state of {theirs.peer} is of stage {theirs.stage}, not {self.state.index}")
        values = _values_of(theirs.tensors, self.state.replica, f"the state of {theirs.peer}")
        n = len(NAMES)
        if min(values[-n:]) < 0:
            raise Violation(f"the state of {theirs.peer} has a mean square below zero")
        self.theta = values[:n]
        self.kept = {kind: values[at * n : (at + 1) * n] for at, kind in enumerate(self._rule.kinds, 1)}
        self.base = list(self.kept.get("slow", self.theta))
        self.inner_steps = theirs.inner_steps
        self._restart(theirs.spent)

    def _own(self, at: int, theta_frozen: float) -> dict[str, float]:
        known = {"fast": theta_frozen, "gradient": self._sums[at]}
        return known | {kind: values[at] for kind, values in self.kept.items()}

    def _new(self) -> dict[str, list[float]]:
        """What the outer rule keeps initially, given the current weights."""
        started = [self._rule.start(theta) for theta in self.theta]
        return {kind: [one[kind] for one in started] for kind in self._rule.kinds}

    def _values(self, inputs: HostTensor) -> list[float]:
        """The B·T input values. Raises Violation if they have the wrong shape or are not finite."""
        if self._first:
            if inputs.spec[1:] != self._targets[1:]:
                raise Violation(f"tokens of {inputs.spec}, not {self._targets[1:]}")
            return [TOKEN_SCALE * token for token in inputs.data.cast("i")]
        if inputs.spec[1:] != self.state.hidden[1:]:
            raise Violation(f"hidden states of {inputs.spec}, not {self.state.hidden}")
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
            raise Violation(f"targets of {targets.spec}, not {self._targets}")
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

    def _restart(self, spent: Iterable[MicrobatchId]) -> None:
        """After a change of weights: forget open graphs and the current inner step; only `spent` ids count as seen."""
        del self.counted[len(self.counted) - len(self._used) :]
        self._used, self._sums, self._tokens_of_all = [], [0.0, 0.0], None
        self.open_graphs.clear()
        self._spent.refill(spent)
        self.version += 1


def _flat(spec: TensorSpec, values: Iterable[float]) -> HostTensor:
    return HostTensor(*spec, memoryview(array("d", values).tobytes()))


def _values_of(tensors: Sequence[HostTensor], specs: tuple[TensorSpec, ...], whose: str) -> list[float]:
    """The values of all tensors. Raises Violation (about `whose` tensors) if specs differ or values are not finite."""
    if tuple(tensor.spec for tensor in tensors) != specs:
        raise Violation(f"{whose} does not have this stage's tensors")
    if not all(map(isfinite, values := [value for tensor in tensors for value in tensor.data.cast("d")])):
        raise Violation(f"{whose} is not finite")
    return values
