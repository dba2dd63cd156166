"""Which nodes guard the weights of a stage that has few replicas, and which nodes can give them back.

ARCHITECTURE.md, "Guardians". A guardian is a node of another stage that pulls snapshots of its ward, so that a stage
whose replicas all die at once is not lost. Nodes with the same view of the membership name the same guardians.
"""

from collections.abc import Iterable
from functools import lru_cache

from noloco_p2p.core.members import HOLDING, TRAINED
from noloco_p2p.core.messages import NO_STAGE, Advert, Holding, PeerId
from noloco_p2p.core.seeds import generator

GUARDIANS = 2
"""Guardians of a stage: one of them may die with its ward, or shortly before it."""
GUARDED_REPLICAS = 2
"""A stage with more replicas than this has no guardians: losing it would take three deaths in one outer interval."""

WITH_WEIGHTS = TRAINED | {"draining"}
"""States in which a node has a replica's trained weights, even if not for long."""


def guardians_of(stage: int, adverts: Iterable[Advert], seed: int) -> tuple[PeerId, ...]:
    """The nodes that guard `stage` while it has GUARDED_REPLICAS or fewer: at most GUARDIANS, best first.

    `adverts` are those of all nodes, the caller included, in any order. The nodes of other stages that train or have
    finished are ranked by a score drawn for this stage (rendezvous hashing). A node that comes or goes does not change
    the order of the others, so a guardian changes only if one of them goes or a better one comes.
    """
    able = {a.peer_id for a in adverts if a.stage not in (stage, NO_STAGE) and a.state in HOLDING}
    return tuple(sorted(able, key=lambda peer: (_score(seed, stage, peer), peer), reverse=True)[:GUARDIANS])


@lru_cache(maxsize=16_384)  # needed for all candidates whenever the membership is read
def _score(seed: int, stage: int, peer: PeerId) -> int:
    return generator(seed, "guardian", stage, peer).getrandbits(64)


def holders(stage: int, adverts: Iterable[Advert]) -> list[tuple[Advert, Holding]]:
    """All weights of `stage` that any node claims to hold: by age, then step, the greatest first, then by id."""
    found = [(advert, held) for advert in adverts for held in advert.holds if held.stage == stage]
    return sorted(found, key=lambda entry: (-entry[1].age, -entry[1].step, entry[0].peer_id))
