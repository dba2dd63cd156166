"""Whose offers a round counts, under a rule that takes from all replicas of a stage (ARCHITECTURE.md, "All replicas").

This needs no message of its own: each offer carries its owner's view, and nodes with the same offers reach the same
result.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import xxhash

from noloco_p2p.core.messages import PeerId

LARGEST_GROUP = 1024
"""Replicas of a stage that an offer may name."""
NOT_YET = 2**53
"""Stands for the round from which a replica counts, while the replica has no weights of the run yet."""


class GroupView(NamedTuple):
    """What one replica's offer says besides its vector."""

    peers: tuple[PeerId, ...]
    """Whom it expects to count in that round, ascending; itself included, unless it has just copied its weights."""
    digest: int
    """64 bits of what all replicas of the stage have in common."""


class Agreement(NamedTuple):
    """The result of the offers of a round."""

    counted: tuple[PeerId, ...]
    """Whose vectors are merged, ascending; never empty."""
    digest: int
    """Theirs. A replica with another digest copies the state of one of them."""


def digest(parts: Iterable[memoryview | bytes]) -> int:
    """64 bits of what replicas should have in common, so that they notice when they differ."""
    found = xxhash.xxh3_64()
    for part in parts:
        found.update(part)
    return int(found.intdigest())


def agree(views: Mapping[PeerId, GroupView]) -> Agreement:
    """Among the replicas that all offers name, the largest set with the same digest; of equal sets, the one with the
    smallest peer id.

    `views`: of all offers that arrived, one's own included. If no replica is named by all, all that arrived count.
    """
    named = set(views).intersection(*(view.peers for view in views.values())) or set(views)
    parts: dict[int, list[PeerId]] = {}
    for peer in sorted(named):
        parts.setdefault(views[peer].digest, []).append(peer)
    theirs, counted = min(parts.items(), key=lambda part: (-len(part[1]), part[1]))
    return Agreement(tuple(counted), theirs)
