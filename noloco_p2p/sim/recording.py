"""Stages that record what they froze, loaded and merged: what `laws` judges a swarm by."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add, sub

from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import HostTensor, MicrobatchId, PeerId, ReplicaState
from noloco_p2p.core.snapshots import FrozenRound, PartnerVector, Snapshot
from noloco_p2p.core.stage_values import MergeResult, StepLabel, StepResult
from noloco_p2p.sim.linear_stage import LinearStage

Values = tuple[float, ...]
"""One for each weight."""
FROZEN_ROUNDS = 64
"""Rounds of which a stage remembers how they were frozen: more than one stays open."""


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Weights that a stage loaded, from a snapshot or from a whole state."""

    kind: str
    """`adopt` or `restore`."""
    origin: PeerId
    round: int
    theta: Values
    """φ after it."""
    frozen_theta: Values | None
    """What φ (or θ) was when these weights were frozen; None when nobody ever froze them."""
    lineage: frozenset[MicrobatchId]
    """Ids that the replica had counted by the time at which it was frozen."""
    counted_before: int
    """Length of the stage's `counted` when it loaded them."""


@dataclass(frozen=True, slots=True)
class MergedSnapshot:
    """A partner's snapshot that was merged."""

    at_s: float
    frozen_at_s: float
    """When its round was frozen, and the partner chosen."""
    round: int
    partner: PeerId


@dataclass(frozen=True, slots=True)
class FrozenProgress:
    """A replica when it froze a round, each of (gain, bias)."""

    at_s: float
    trained: Values
    """What inner steps had added to θ that no merge has had."""
    delta: Values
    """Δ."""


@dataclass(frozen=True, slots=True)
class MergedProgress:
    """What a merge did with what was trained, against the inner steps as they were taken, each of (gain, bias)."""

    round: int
    delta: Values
    """Δ of the snapshot that it merged."""
    trained: Values
    """What inner steps had added by then that no merge before had."""
    kept: Values
    """θ after it, without what the round itself gave (`LinearStage.base`)."""
    trained_since: Values
    """What inner steps have added to θ since the snapshot was frozen."""


@dataclass(frozen=True, slots=True)
class AvailableWeights:
    """The weights of its stage that a node could go on from at one moment, as round numbers."""

    at_s: float
    living: tuple[int, ...]
    """Of replicas of the stage that have trained for a while (`FaultySwarm.listed_s`) and can be reached."""
    guarded: tuple[int, ...]
    """Listed for as long by nodes that can be reached."""
    own: tuple[int, ...]
    """On its disk, not torn."""
    others: tuple[int, ...]
    """The newest that any node has of each other stage."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """A node went on from weights of its stage."""

    at_s: float
    peer: PeerId
    source: str
    round: int
    available: AvailableWeights
    """When it asked the others what they have; how long the weights then travel is not its choice."""


@dataclass(slots=True)
class FrozenWeights:
    """All weights that any node froze in one swarm: those that may be loaded later."""

    snapshots: dict[tuple[PeerId, int, int, int], set[Values]] = field(default_factory=dict)
    """θ by (peer, stage, round, step)."""
    states: dict[tuple[PeerId, Values], frozenset[MicrobatchId]] = field(default_factory=dict)
    """Ids counted, by (peer, values of the whole state)."""


class RecordingStage(LinearStage):
    """A linear stage that records what it froze, loaded and merged."""

    def __init__(self, manifest: RunManifest, index: int, me: PeerId, frozen: FrozenWeights) -> None:
        super().__init__(manifest, index, me)
        self.peer = me
        self.forwards = 0
        self.loaded: list[LoadedWeights] = []
        self.merged: list[MergedSnapshot] = []
        self.progress: list[MergedProgress] = []
        """Of every merge."""
        self._trained: Values = (0.0, 0.0)
        """What inner steps added to θ that no merge has had."""
        self._at_freeze: dict[int, FrozenProgress] = {}
        """By round, the newest ones."""
        self._frozen = frozen

    def forward(self, inputs: HostTensor, mask: HostTensor | None) -> tuple[int, HostTensor]:
        """Counted."""
        self.forwards += 1
        return super().forward(inputs, mask)

    def inner_step(self, label: StepLabel) -> StepResult:
        """Its part of θ is recorded."""
        before = (*self.theta,)
        result = super().inner_step(label)
        self._trained = tuple(map(add, self._trained, map(sub, self.theta, before)))
        return result

    def snapshot(self, round: int, step: int) -> FrozenRound:
        """Recorded."""
        self._at_freeze[round] = FrozenProgress(now_s(), self._trained, (*map(sub, self.theta, self.base),))
        for old in sorted(self._at_freeze)[:-FROZEN_ROUNDS]:
            del self._at_freeze[old]
        self._frozen.snapshots.setdefault((self.peer, self.state.index, round, step), set()).add((*self.theta,))
        return super().snapshot(round, step)

    def capture(self, round: int, step: float, inner_steps: int) -> ReplicaState:
        """Recorded, with the ids that are in these weights."""
        state = super().capture(round, step, inner_steps)
        ended = len(self.counted) - len(self._used)
        begun, lineage = (self.loaded[-1].counted_before, self.loaded[-1].lineage) if self.loaded else (0, frozenset())
        self._frozen.states[self.peer, _values(state)] = lineage | {one.microbatch for one in self.counted[begun:ended]}
        return state

    def adopt(self, theirs: Snapshot) -> None:
        """Recorded."""
        super().adopt(theirs)
        theta = (*self.theta,)
        frozen = self._frozen.snapshots.get((theirs.peer, self.state.index, theirs.round, theirs.step), set())
        found = theta if theta in frozen else None
        self._trained = (0.0, 0.0)
        self.loaded.append(
            LoadedWeights("adopt", theirs.peer, theirs.round, theta, found, frozenset(), len(self.counted))
        )

    def restore(self, theirs: ReplicaState) -> None:
        """Recorded."""
        super().restore(theirs)
        values = _values(theirs)
        lineage = self._frozen.states.get((theirs.peer, values))
        found = None if lineage is None else values[:2]
        self._trained = tuple(map(sub, self.theta, self.base))
        counted, lineage = len(self.counted), lineage or frozenset()
        self.loaded.append(LoadedWeights("restore", theirs.peer, theirs.round, (*self.theta,), found, lineage, counted))

    def merge(self, mine: FrozenRound, theirs: Sequence[PartnerVector] = (), counted: bool = True) -> MergeResult:
        """Recorded."""
        frozen = self._at_freeze[mine.round]
        for one in theirs:
            self.merged.append(MergedSnapshot(now_s(), frozen.at_s, mine.round, one.peer))
        result = super().merge(mine, theirs, counted)
        self._trained = tuple(map(sub, self._trained, frozen.trained))
        kept = tuple(map(sub, self.theta, self.base))
        self.progress.append(MergedProgress(mine.round, frozen.delta, frozen.trained, kept, self._trained))
        return result


def now_s() -> float:
    """Virtual time."""
    return asyncio.get_running_loop().time()


def _values(state: ReplicaState) -> Values:
    return tuple(tensor.data.cast("d")[0] for tensor in state.tensors)
