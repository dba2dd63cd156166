"""Stages that record what they froze, loaded and merged. `laws` checks these records."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import add, sub
from typing import TypeVar

from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import HostTensor, MicrobatchId, PeerId, ReplicaState
from noloco_p2p.core.snapshots import FrozenRound, PartnerVector, Snapshot
from noloco_p2p.core.stage_values import StepLabel, StepResult
from noloco_p2p.sim.linear_stage import LinearStage

T = TypeVar("T")
Values = tuple[float, ...]
"""One value per weight."""
ROUNDING = 1e-9
"""By how much two sums of the same numbers in another order may differ, as a share of the weights."""
FROZEN_ROUNDS = 64
"""Number of frozen rounds that a stage remembers, which is more than are ever open."""


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Weights that a stage loaded, from a snapshot or from a full state."""

    kind: str
    """`adopt` or `restore`."""
    origin: PeerId
    round: int
    theta: Values
    """φ after loading."""
    frozen_theta: Values | None
    """φ (or θ) when these weights were frozen; None if no replica ever froze them."""
    lineage: frozenset[MicrobatchId]
    """Ids that the replica had counted when the weights were frozen."""
    counted_before: int
    """Length of the stage's `counted` at the time of loading."""


@dataclass(frozen=True, slots=True)
class MergedSnapshot:
    """A partner's snapshot that was merged."""

    at_s: float
    frozen_at_s: float
    """When its round was frozen and the partner was chosen."""
    round: int
    partner: PeerId
    frozen: bool
    """Whether it is what the partner froze."""


@dataclass(frozen=True, slots=True)
class FrozenProgress:
    """A replica's progress when it froze a round; each value is (gain, bias)."""

    at_s: float
    trained: Values
    """What inner steps had added to θ that no merge had included yet."""
    delta: Values
    """Δ."""


@dataclass(frozen=True, slots=True)
class AvailableWeights:
    """The weights of its stage from which a node could continue at one moment: their ages (`core.resume`)."""

    at_s: float
    living: tuple[int, ...]
    """Of reachable replicas of the stage that have trained for at least `FaultySwarm.listed_s`."""
    training: tuple[int, ...]
    """Of all other replicas of the stage in training, reachable or not: the node may know of any of them."""
    guarded: tuple[int, ...]
    """Of reachable guardians, announced for at least as long."""
    own: tuple[int, ...]
    """On its own disk, intact."""
    others: tuple[int, ...]
    """For each other stage, the newest round that any reachable node has."""
    replaced: int | None = None
    """Its own age, if it trains and gives its weights up because they differ from those of the others."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """A node continued from weights of its stage."""

    at_s: float
    peer: PeerId
    source: str
    round: int
    available: AvailableWeights
    """When it chose them (`WeightsChoice`)."""
    fresh_round: int = 0


class WeightsChoice:
    """What one node could have continued from when it chose its weights: it has just asked the others what they have,
    and it has no control over how long weights then travel."""

    def __init__(self, available: Callable[[], AvailableWeights], settled_s: float) -> None:
        """What was `available` when the node asked counts for `settled_s`, in which all answers have come."""
        self._available = available
        self._settled_s = settled_s
        self._seen: AvailableWeights | None = None
        self._counts_until_s = 0.0
        self._fetching = False

    def ask(self) -> None:
        """The node asks somebody. While weights travel, and once they have arrived, that is for another purpose."""
        if not self._fetching and (self._seen is None or self._seen.at_s < now_s()):
            self._see(self._available())

    async def fetch(self, transfer: Awaitable[T]) -> T:
        """The node has chosen, and fetches weights. If they do not come, it will choose again."""
        chosen, self._fetching = self.take(), True
        try:
            fetched = await transfer
            self._see(chosen)
        finally:
            self._fetching = self._seen is chosen
        return fetched

    def take(self) -> AvailableWeights:
        """What was available when it chose."""
        seen, self._seen, self._fetching, now = self._seen, None, False, self._available()
        # A replica that trains has learnt from a round, not from what it asked before, that others are ahead.
        if seen is None or now_s() > self._counts_until_s or (seen.replaced is None and now.replaced is not None):
            return now
        # Those that have gone meanwhile can lend nothing.
        return seen if now.living else replace(seen, living=(), training=())

    def _see(self, seen: AvailableWeights) -> None:
        self._seen, self._counts_until_s = seen, now_s() + self._settled_s


@dataclass(slots=True)
class FrozenWeights:
    """All weights that nodes of a swarm froze, and that others may load later."""

    snapshots: dict[tuple[PeerId, int, int, int], set[Values]] = field(default_factory=dict)
    """θ and then u, by (peer, stage, round, step)."""
    states: dict[tuple[PeerId, Values], frozenset[MicrobatchId]] = field(default_factory=dict)
    """Counted ids by (peer, values of the full state)."""


class RecordingStage(LinearStage):
    """A linear stage that records what it froze, loaded and merged."""

    def __init__(self, manifest: RunManifest, index: int, me: PeerId, frozen: FrozenWeights) -> None:
        super().__init__(manifest, index, me)
        self.peer = me
        self.forwards = 0
        self.loaded: list[LoadedWeights] = []
        self.merged: list[MergedSnapshot] = []
        self.miscounted: list[str] = []
        """The merges after which Δ or θ was not what inner steps had added, in words."""
        self._trained: Values = (0.0, 0.0)
        """What inner steps have added to θ that no merge has included yet."""
        self._at_freeze: dict[int, FrozenProgress] = {}
        """The most recent rounds."""
        self._frozen = frozen

    def forward(self, inputs: HostTensor, mask: HostTensor | None) -> tuple[int, HostTensor]:
        """Counts the pass."""
        self.forwards += 1
        return super().forward(inputs, mask)

    def inner_step(self, label: StepLabel) -> StepResult:
        """Records its contribution to θ."""
        before = (*self.theta,)
        result = super().inner_step(label)
        self._trained = tuple(map(add, self._trained, map(sub, self.theta, before)))
        return result

    def snapshot(self, round: int, step: int) -> FrozenRound:
        """Records the call."""
        self._at_freeze[round] = FrozenProgress(now_s(), self._trained, (*map(sub, self.theta, self.base),))
        for old in sorted(self._at_freeze)[:-FROZEN_ROUNDS]:
            del self._at_freeze[old]
        frozen = super().snapshot(round, step)
        known = self._frozen.snapshots.setdefault((self.peer, self.state.index, round, step), set())
        known.add(_values(frozen.weights, frozen.vector))
        return frozen

    def capture(self, round: int, step: float, inner_steps: int) -> ReplicaState:
        """Records the state, with the ids that these weights include."""
        state = super().capture(round, step, inner_steps)
        ended = len(self.counted) - len(self._used)
        begun, lineage = (self.loaded[-1].counted_before, self.loaded[-1].lineage) if self.loaded else (0, frozenset())
        used = {one.microbatch for one in self.counted[begun:ended]}
        self._frozen.states[self.peer, _values(*state.tensors)] = lineage | used
        return state

    def adopt(self, theirs: Snapshot) -> None:
        """Records the call."""
        super().adopt(theirs)
        theta = (*self.theta,)
        found = next((theta for values in self._known(theirs) if values[:2] == theta), None)
        self._trained = (0.0, 0.0)
        one = LoadedWeights("adopt", theirs.peer, theirs.round, theta, found, frozenset(), len(self.counted))
        self.loaded.append(one)

    def restore(self, theirs: ReplicaState) -> None:
        """Records the call."""
        super().restore(theirs)
        values = _values(*theirs.tensors)
        lineage = self._frozen.states.get((theirs.peer, values))
        found = None if lineage is None else values[:2]
        self._trained = tuple(map(sub, self.theta, self.base))
        counted, lineage = len(self.counted), lineage or frozenset()
        self.loaded.append(LoadedWeights("restore", theirs.peer, theirs.round, (*self.theta,), found, lineage, counted))

    def merge(self, mine: FrozenRound, theirs: Sequence[PartnerVector] = (), counted: bool = True) -> float | None:
        """Records the call, and compares what it made of the trained progress with what inner steps added."""
        frozen = self._at_freeze[mine.round]
        for one in theirs:
            known = _values(one.sample, one.vector) in self._known(one)
            self.merged.append(MergedSnapshot(now_s(), frozen.at_s, mine.round, one.peer, known))
        result = super().merge(mine, theirs, counted)
        self._trained = tuple(map(sub, self._trained, frozen.trained))
        kept = tuple(map(sub, self.theta, self.base))
        for what, found, added in (("Δ", frozen.delta, frozen.trained), ("θ", kept, self._trained)):
            off = max(abs(a - b) for a, b in zip(found, added, strict=True))
            if not off <= ROUNDING * (1 + max(map(abs, self.theta))):
                self.miscounted.append(f"round {mine.round}: {what} is {found}, steps added {added}")
        return result

    def _known(self, theirs: Snapshot | PartnerVector) -> set[Values]:
        """What a replica of this stage froze at that round."""
        return self._frozen.snapshots.get((theirs.peer, self.state.index, theirs.round, theirs.step), set())


def now_s() -> float:
    """Virtual time."""
    return asyncio.get_running_loop().time()


def _values(*tensors: HostTensor) -> Values:
    return tuple(value for tensor in tensors for value in tensor.data.cast("d"))
