"""Stages that write down what they froze, took up and merged: what `laws` judges a swarm by."""

import asyncio
from dataclasses import dataclass, field

from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import HostTensor, MicrobatchId, PeerId, ReplicaState, Snapshot
from noloco_p2p.ports import MergeResult
from noloco_p2p.sim.telemetry import Trace
from noloco_p2p.sim.toy_stage import ModelStage

Values = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Taken:
    """Weights that a stage took up: from a snapshot or from a whole state."""

    at_s: float
    kind: str
    """`adopt` or `restore`."""
    origin: PeerId
    round: int
    phi: Values
    """φ after it."""
    frozen_phi: Values | None
    """What φ (or φ + Δ) was when these weights were frozen; None when nobody ever froze them."""
    known: frozenset[MicrobatchId]
    """Ids whose gradients are in these weights, as far as the state says so."""
    lineage: frozenset[MicrobatchId]
    """Ids that the replica which was frozen had counted by then."""


@dataclass(frozen=True, slots=True)
class Merge:
    """A partner's snapshot that was merged."""

    at_s: float
    round: int
    partner: PeerId
    partner_round: int


@dataclass(frozen=True, slots=True)
class There:
    """What weights of its stage there were for a node at one moment, as round numbers."""

    at_s: float
    living: tuple[int, ...]
    """Of replicas of the stage that have trained for a while (`Bounds.listed_s`) and can be reached."""
    guarded: tuple[int, ...]
    """Listed for as long by nodes that can be reached."""
    own: tuple[int, ...]
    """On its disk, not torn."""
    others: tuple[int, ...]
    """The newest that anybody has of each other stage."""


@dataclass(frozen=True, slots=True)
class TakeUp:
    """A node went on from weights of its stage."""

    at_s: float
    peer: PeerId
    stage: int
    source: str
    round: int
    there: There
    """When it asked the others what they have; how long the weights then travel is not its choice."""


@dataclass(slots=True)
class Ledger:
    """All weights that anybody froze in one swarm: what may be taken up later."""

    snapshots: dict[tuple[PeerId, int, int, int], set[Values]] = field(default_factory=dict)
    """φ + Δ by (peer, stage, round, step)."""
    states: dict[tuple[PeerId, Values], frozenset[MicrobatchId]] = field(default_factory=dict)
    """Ids counted, by (peer, values of the whole state)."""


class Watched(ModelStage):
    """A model stage that writes down what it froze, took up and merged."""

    def __init__(self, manifest: RunManifest, index: int, me: PeerId, ledger: Ledger) -> None:
        super().__init__(manifest, index, me)
        self.peer = me
        self.forwards = 0
        self.fresh = (*self.theta,)
        self.taken: list[Taken] = []
        self.counted_before: list[int] = []
        """Length of `counted` at each entry of `taken`."""
        self.merged: list[Merge] = []
        self._ledger = ledger
        self._lineage: frozenset[MicrobatchId] = frozenset()

    def forward(self, inputs: HostTensor, mask: HostTensor | None) -> tuple[int, HostTensor]:
        """Counted."""
        self.forwards += 1
        return super().forward(inputs, mask)

    def snapshot(self, round: int, step: int) -> Snapshot:
        """Written down."""
        key = (self.peer, self.state.index, round, step)
        self._ledger.snapshots.setdefault(key, set()).add(self._adopted(self.phi, self.theta))
        return super().snapshot(round, step)

    def capture(self, round: int, step: float, inner_steps: int) -> ReplicaState:
        """Written down, with the ids that are in these weights."""
        state = super().capture(round, step, inner_steps)
        ended = len(self.counted) - len(self._used)
        begun = self.counted_before[-1] if self.counted_before else 0
        ids = self._lineage | {one.microbatch for one in self.counted[begun:ended]}
        self._ledger.states[self.peer, _values(state)] = ids
        return state

    def adopt(self, theirs: Snapshot) -> None:
        """Written down."""
        super().adopt(theirs)
        frozen = self._ledger.snapshots.get((theirs.peer, self.state.index, theirs.round, theirs.step), set())
        same = next((values for values in frozen if values == (*self.phi,)), None)
        self._take("adopt", theirs.peer, theirs.round, same, frozenset(), frozenset())

    def restore(self, theirs: ReplicaState) -> None:
        """Written down."""
        super().restore(theirs)
        values = _values(theirs)
        lineage = self._ledger.states.get((theirs.peer, values))
        frozen = None if lineage is None else values[:2]
        self._take("restore", theirs.peer, theirs.round, frozen, frozenset(theirs.spent), lineage or frozenset())

    def merge(self, mine: Snapshot, theirs: Snapshot | None) -> MergeResult:
        """Written down."""
        if theirs is not None:
            self.merged.append(Merge(now_s(), mine.round, theirs.peer, theirs.round))
        return super().merge(mine, theirs)

    def _take(
        self,
        kind: str,
        peer: PeerId,
        round: int,
        frozen: Values | None,
        known: frozenset[MicrobatchId],
        lineage: frozenset[MicrobatchId],
    ) -> None:
        self._lineage = lineage
        self.counted_before.append(len(self.counted))
        self.taken.append(Taken(now_s(), kind, peer, round, (*self.phi,), frozen, known, lineage))

    @staticmethod
    def _adopted(phi: list[float], theta: list[float]) -> Values:
        """φ + Δ as whoever adopts it computes it."""
        return tuple(p + (t - p) for p, t in zip(phi, theta, strict=True))


def now_s() -> float:
    """Virtual time."""
    return asyncio.get_running_loop().time()


def _values(state: ReplicaState) -> Values:
    return tuple(tensor.data.cast("d")[0] for tensor in state.tensors)


TOLD = ("state", "resumed", "deserted", "guarded", "checkpoint", "outer_round", "evaluation", "warning", "moved")


def timeline(done: list[tuple[float, str]], trace: Trace) -> list[str]:
    """What was done and what was told, in order of time, without the microbatches."""
    lines = [(at_s, f"{at_s:8.3f} ----- {what}") for at_s, what in done]
    for one in trace.happenings:
        if one.kind in TOLD or (one.kind == "microbatch" and one.get("result") == "dropped"):
            told = " ".join(f"{name}={value}" for name, value in one.fields if value not in ("", None))
            lines.append((one.at_s, f"{one.at_s:8.3f} {one.peer} {one.kind} {told}"))
    return [line for _, line in sorted(lines, key=lambda entry: entry[0])]
