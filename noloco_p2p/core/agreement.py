"""Whose offers a round counts, where a rule takes from all replicas of a stage (ARCHITECTURE.md, "All replicas").

No message is sent for it: each offer says what its owner thinks, and whoever has the same offers comes to the same end.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import xxhash

from noloco_p2p.core.messages import PeerId

LARGEST_GROUP = 1024
"""Replicas of a stage that an offer may name."""
NOT_YET = 2**53
"""In the place of the round from which a replica counts: it has no weights of the run yet."""


class GroupView(NamedTuple):
    """What one replica's offer says beside its vector."""

    peers: tuple[PeerId, ...]
    """Whom it counts with in that round, ascending; itself among them, unless its weights are new to it."""
    digest: int
    """64 bits of what all replicas of the stage have in common."""


class Agreement(NamedTuple):
    """What the offers of a round come to."""

    counted: tuple[PeerId, ...]
    """Whose vectors are merged, ascending; never empty."""
    digest: int
    """Theirs. Whoever has another one takes over the state of one of them."""


def digest(parts: Iterable[memoryview | bytes]) -> int:
    """64 bits of what replicas have in common, by which they find out whether they have."""
    found = xxhash.xxh3_64()
    for part in parts:
        found.update(part)
    return int(found.intdigest())


def agree(views: Mapping[PeerId, GroupView]) -> Agreement:
    """The largest part, by digest, of those that all offers name; of equal parts that of the smallest peer id.

    `views`: of all offers that came, one's own among them. Where nobody is named by all, all that came count.
    """
    named = set(views).intersection(*(view.peers for view in views.values())) or set(views)
    parts: dict[int, list[PeerId]] = {}
    for peer in sorted(named):
        parts.setdefault(views[peer].digest, []).append(peer)
    theirs, counted = min(parts.items(), key=lambda part: (-len(part[1]), part[1]))
    return Agreement(tuple(counted), theirs)
