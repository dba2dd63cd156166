"""Real stages and data for the simulator's nodes, watched: exact replica spread, loads, stale and lost partners.

Nothing of the node is changed: a stage that is watched passes every call on to the `TorchStage` it wraps.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean

import torch

from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.core.messages import (
    Gradient,
    HostTensor,
    LossSum,
    MicrobatchId,
    PeerId,
    ReplicaState,
    Snapshot,
)
from noloco_p2p.core.seeds import generator
from noloco_p2p.lab.experiments.training import Spread, Training
from noloco_p2p.ports import Contribution, MergeResult, StageState, StepLabel, StepResult

KEPT_ROUNDS = 5
"""Snapshots of a replica that are kept, beyond those that are pulled late: a partner may be ahead."""


@dataclass(slots=True)
class Seen:
    """One replica of a stage at one round."""

    theta: list[torch.Tensor]
    step: int
    learning_rate: float


@dataclass(slots=True)
class Watch:
    """What the stages of one run share: who has been seen at which round, and what was lost."""

    plan: Training
    lost: set[tuple[PeerId, int]] = field(default_factory=set)
    """(replica, round) of what was pulled and then lost."""
    served: dict[PeerId, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Microbatches counted in each inner step."""
    spreads: dict[tuple[int, int], Spread] = field(default_factory=dict)
    """By (round, stage), once all replicas were seen."""
    _seen: dict[tuple[int, int], dict[PeerId, Seen]] = field(default_factory=lambda: defaultdict(dict))
    _snapshots: dict[PeerId, dict[int, Snapshot]] = field(default_factory=lambda: defaultdict(dict))

    def see(self, stage: int, round: int, peer: PeerId, seen: Seen) -> None:
        """A replica has come to a round. Its weights are let go once the others have, too."""
        count = self.plan.replicas[stage]
        if count == 1:
            return
        found = self._seen[round, stage]
        found[peer] = seen
        if len(found) < count:
            return
        everybody = [found[peer] for peer in sorted(found)]
        step = int(fmean(one.step for one in everybody) + 0.5)
        rate = fmean(one.learning_rate for one in everybody)
        self.spreads[round, stage] = Spread(stage, round, step, replica_std([one.theta for one in everybody]), rate)
        for key in [key for key in self._seen if key[1] == stage and key[0] <= round]:
            del self._seen[key]

    def keep(self, snapshot: Snapshot) -> None:
        """For those who will pull it late."""
        if self.plan.stale_rounds:
            kept = self._snapshots[snapshot.peer]
            kept[snapshot.round] = snapshot
            for old in sorted(kept)[: -self.plan.stale_rounds - KEPT_ROUNDS]:
                del kept[old]

    def pulled(self, me: PeerId, mine: Snapshot, theirs: Snapshot | None) -> Snapshot | None:
        """What arrives of the snapshot that a node has pulled."""
        if theirs is None:
            return None
        chance = generator(self.plan.seed, "lost partner", me, mine.round).random()
        if chance < self.plan.lost_partner:
            self.lost.add((me, mine.round))
            return None
        if self.plan.stale_rounds:
            kept = self._snapshots[theirs.peer]
            return kept[max(round for round in kept if round <= max(0, theirs.round - self.plan.stale_rounds))]
        return theirs


class Observed:
    """The synchronous stage of one replica, watched. Every method: see `ports.Stage`."""

    def __init__(self, stage: TorchStage, watch: Watch, me: PeerId) -> None:
        self.stage = stage
        self._watch = watch
        self._me = me
        self._inner_steps = 0
        self._learning_rate = 0.0

    @property
    def state(self) -> StageState:
        """As ever."""
        return self.stage.state

    def forward(self, inputs: HostTensor, mask: HostTensor | None) -> tuple[int, HostTensor]:
        """As ever."""
        return self.stage.forward(inputs, mask)

    def backward(self, graph: int, microbatch: MicrobatchId, gradient: Gradient) -> Contribution:
        """As ever."""
        return self.stage.backward(graph, microbatch, gradient)

    def loss_backward(
        self, microbatch: MicrobatchId, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None
    ) -> Contribution:
        """As ever."""
        return self.stage.loss_backward(microbatch, inputs, targets, mask)

    def discard(self, graph: int) -> None:
        """As ever."""
        self.stage.discard(graph)

    def evaluate(self, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None) -> HostTensor | LossSum:
        """As ever."""
        return self.stage.evaluate(inputs, targets, mask)

    def inner_step(self, label: StepLabel) -> StepResult:
        """Without outer rounds, every m inner steps take the place of a round."""
        result = self.stage.inner_step(label)
        self._inner_steps, self._learning_rate = label.inner_step, label.learning_rate
        self._watch.served[self._me].append(result.microbatches)
        outer = self._watch.plan.manifest.outer
        if outer.pairing == "none" and label.inner_step % outer.inner_steps == 0:
            self._see(label.inner_step // outer.inner_steps)
        return result

    def snapshot(self, round: int, step: int) -> Snapshot:
        """θ is seen as it is before the merge."""
        taken = self.stage.snapshot(round, step)
        self._watch.keep(taken)
        if round > 0:
            self._see(round)
        return taken

    def merge(self, mine: Snapshot, theirs: Snapshot | None) -> MergeResult:
        """With what the plan lets through."""
        return self.stage.merge(mine, self._watch.pulled(self._me, mine, theirs))

    def adopt(self, theirs: Snapshot) -> None:
        """As ever."""
        self.stage.adopt(theirs)

    def capture(self, round: int, step: float, inner_steps: int) -> ReplicaState:
        """As ever."""
        return self.stage.capture(round, step, inner_steps)

    def restore(self, theirs: ReplicaState) -> None:
        """As ever."""
        self.stage.restore(theirs)

    def _see(self, round: int) -> None:
        theta = [parameter.detach().clone() for parameter in self.stage.parameters.values()]
        self._watch.see(self.state.index, round, self._me, Seen(theta, self._inner_steps, self._learning_rate))


def replica_std(replicas: Sequence[Sequence[torch.Tensor]]) -> float:
    """sqrt( Σ_i ‖mean θ − θ_i‖² / (n·count) ) over n replicas, each a list of tensors; in float64 (method.md §5)."""
    square, count = 0.0, 0
    for tensors in zip(*replicas, strict=True):
        every = torch.stack(tensors).double()
        square += float((every - every.mean(0)).square().sum())
        count += tensors[0].numel()
    return sqrt(square / (len(replicas) * count))
