"""What an export is made from, wherever it comes from: replicas of every stage at one outer round."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import PeerId

if TYPE_CHECKING:
    from noloco_p2p.compute.export import Weights

Say = Callable[[str], None]
"""Takes a line for the user."""


@dataclass(frozen=True, slots=True)
class ReplicaWeights:
    """The weights of one replica at one outer round."""

    peer: PeerId
    stage: int
    round: int
    step: int
    """Floor of its clock."""
    weights: "Weights"
    """θ by global name."""


@dataclass(frozen=True, slots=True)
class CollectedWeights:
    """What an export is made from: replicas of every stage, all at the same outer round."""

    manifest: RunManifest
    round: int
    stages: tuple[tuple[ReplicaWeights, ...], ...]
    """By stage, each sorted by peer id, at least one."""


def common(manifest: RunManifest, found: Sequence[ReplicaWeights]) -> CollectedWeights | None:
    """The replicas of the newest round of which every stage has one; None when there is no such round."""
    stages = range(manifest.stages)
    for round in sorted({replica.round for replica in found}, reverse=True):
        here = sorted((replica for replica in found if replica.round == round), key=lambda replica: replica.peer)
        by_stage = tuple(tuple(replica for replica in here if replica.stage == stage) for stage in stages)
        if all(by_stage):
            return CollectedWeights(manifest, round, by_stage)
    return None


def better(one: CollectedWeights | None, other: CollectedWeights | None) -> CollectedWeights | None:
    """The one with more replicas; of equals the newer."""
    if one is None or other is None:
        return one or other

    def rank(collection: CollectedWeights) -> tuple[int, int]:
        return sum(len(stage) for stage in collection.stages), collection.round

    return max(other, one, key=rank)
