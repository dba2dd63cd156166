"""Instrumented real stages for simulated nodes: exact replica spread, loads, stale and lost partners, noise.

The node's code is unchanged: an instrumented stage passes every call on to the `TorchStage` that it wraps.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean

import torch

from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.core.messages import PeerId, ReplicaState
from noloco_p2p.core.seeds import generator
from noloco_p2p.core.snapshots import FrozenRound, PartnerVector, SnapshotRequest
from noloco_p2p.core.stage_values import StepLabel, StepResult
from noloco_p2p.lab.experiments.training import ReplicaSpread, TrainingPlan

KEPT_ROUNDS = 5
"""Number of vectors kept per replica, in addition to those that are pulled late: a partner may be ahead."""


ReplicaWeights = tuple[list[torch.Tensor], int, float]
"""One replica of a stage at one round: θ, inner steps taken, and the last learning rate."""


@dataclass(slots=True)
class TrainingMonitor:
    """What the stages of one run share: the replicas' weights at each round, and what was lost."""

    plan: TrainingPlan
    lost: set[tuple[PeerId, int]] = field(default_factory=set)
    """(replica, round) of pulls that were lost."""
    served: Counter[PeerId] = field(default_factory=Counter)
    """Microbatches counted in inner steps."""
    spreads: dict[tuple[int, int], ReplicaSpread] = field(default_factory=dict)
    """By (round, stage), once all replicas have reached it."""
    _reached: dict[tuple[int, int], dict[PeerId, ReplicaWeights]] = field(default_factory=lambda: defaultdict(dict))
    _vectors: dict[PeerId, dict[int, PartnerVector]] = field(default_factory=lambda: defaultdict(dict))

    def reached(self, stage: int, round: int, peer: PeerId, weights: ReplicaWeights) -> None:
        """Note that a replica has reached a round. The weights are released once all others have reached it as well."""
        count = self.plan.replicas[stage]
        if count == 1:
            return
        found = self._reached[round, stage]
        found[peer] = weights
        if len(found) < count:
            return
        thetas, steps, rates = zip(*(found[peer] for peer in sorted(found)), strict=True)
        spread = ReplicaSpread(stage, round, int(fmean(steps) + 0.5), replica_std(thetas), fmean(rates))
        self.spreads[round, stage] = spread
        for key in [key for key in self._reached if key[1] == stage and key[0] <= round]:
            del self._reached[key]

    def keep(self, vector: PartnerVector) -> None:
        """Keep a vector for partners that pull it late."""
        kept = self._vectors[vector.peer]
        kept[vector.round] = vector
        for old in sorted(kept)[: -self.plan.stale_rounds - KEPT_ROUNDS]:
            del kept[old]

    def pulled(self, me: PeerId, mine: FrozenRound, theirs: PartnerVector) -> PartnerVector | None:
        """The vector that arrives in place of a pulled one; None if it is lost."""
        chance = generator(self.plan.seed, "lost partner", me, mine.round).random()
        if chance < self.plan.lost_partner:
            self.lost.add((me, mine.round))
            return None
        if self.plan.stale_rounds:
            kept = self._vectors[theirs.peer]
            return kept[max(round for round in kept if round <= max(0, theirs.round - self.plan.stale_rounds))]
        return theirs


class InstrumentedStage:
    """The synchronous stage of one replica with instruments. For every method see `ports.Stage`."""

    def __init__(self, stage: TorchStage, monitor: TrainingMonitor, me: PeerId) -> None:
        self.stage = stage
        self._monitor = monitor
        self._me = me
        self._inner_steps = 0
        self._learning_rate = 0.0
        self._clean: list[torch.Tensor] = []
        """θ, while noise has been added to it."""
        # Calls that are not measured are passed on unchanged.
        self.forward, self.backward, self.loss_backward = stage.forward, stage.backward, stage.loss_backward
        self.discard, self.evaluate, self.adopt = stage.discard, stage.evaluate, stage.adopt
        self.encode, self.decode, self.is_sound = stage.encode, stage.decode, stage.is_sound
        self.restore, self.compare, self.check, self.state = stage.restore, stage.compare, stage.check, stage.state

    @property
    def places(self) -> int | None:
        """The stage's places."""
        return self.stage.places

    def inner_step(self, label: StepLabel) -> StepResult:
        """Measures. Without outer rounds, every m inner steps count as a round."""
        self._set_noise(0)
        result = self.stage.inner_step(label)
        self._set_noise(label.inner_step + 1)
        self._inner_steps, self._learning_rate = label.inner_step, label.learning_rate
        self._monitor.served[self._me] += result.microbatches
        outer = self._monitor.plan.manifest.outer
        if outer.pairing == "none" and label.inner_step % outer.inner_steps == 0:
            self._measure(label.inner_step // outer.inner_steps)
        return result

    def snapshot(self, round: int, step: int) -> FrozenRound:
        """Measures θ before the merge."""
        with self._without_noise():
            taken = self.stage.snapshot(round, step)
        if self._monitor.plan.stale_rounds:
            request = SnapshotRequest(self.state.index, round, lattice=taken.lattice)
            self._monitor.keep(self.stage.decode(taken, request, self.stage.encode(taken, request, self._me)))
        if round > 0:
            self._measure(round)
        return taken

    def merge(self, mine: FrozenRound, theirs: Sequence[PartnerVector] = (), counted: bool = True) -> float | None:
        """Merges only what the plan lets through."""
        pulled = [self._monitor.pulled(self._me, mine, one) for one in theirs]
        return self.stage.merge(mine, [one for one in pulled if one is not None], counted)

    def capture(self, round: int, step: float, inner_steps: int) -> ReplicaState:
        """Captures what others may restore: weights without noise."""
        with self._without_noise():
            return self.stage.capture(round, step, inner_steps)

    def _set_noise(self, step: int) -> None:
        """Replace the noise with that of this step's gradients; none at step 0 and after the plan's last step."""
        plan, thetas = self._monitor.plan, list(self.stage.parameters.values())
        for theta, clean in zip(thetas, self._clean, strict=False):
            theta.data.copy_(clean)
        stds = [std for last, std in plan.noise[self.state.index] if 0 < step <= last] if plan.noise else []
        self._clean = [theta.detach().clone() for theta in thetas] if stds else []
        draws = torch.Generator().manual_seed(generator(plan.seed, "noise", self._me, step).randrange(2**62))
        for theta in thetas if stds else []:
            theta.data.add_(torch.randn(theta.shape, generator=draws), alpha=stds[0])

    @contextmanager
    def _without_noise(self) -> Iterator[None]:
        noisy = [theta.detach().clone() for theta in self.stage.parameters.values()] if self._clean else []
        for theta, clean in zip(self.stage.parameters.values(), self._clean, strict=False):
            theta.data.copy_(clean)
        yield
        for theta, value in zip(self.stage.parameters.values(), noisy, strict=False):
            theta.data.copy_(value)

    def _measure(self, round: int) -> None:
        theta = [parameter.detach().clone() for parameter in self.stage.parameters.values()]
        self._monitor.reached(self.state.index, round, self._me, (theta, self._inner_steps, self._learning_rate))


def replica_std(replicas: Sequence[Sequence[torch.Tensor]]) -> float:
    """sqrt( Σ_i ‖mean θ − θ_i‖² / (n·count) ) over n replicas, in float64 (METHOD.md, "Measures")."""
    square, count = 0.0, 0
    for tensors in zip(*replicas, strict=True):
        every = torch.stack(tensors).double()
        square += float((every - every.mean(0)).square().sum())
        count += tensors[0].numel()
    return sqrt(square / (len(replicas) * count))
