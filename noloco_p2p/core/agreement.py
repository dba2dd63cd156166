"""Which offers count in a round under a rule that takes from all replicas (ARCHITECTURE.md, "All replicas").

This needs no extra messages: each offer carries its owner's view, and nodes with the same offers reach the same result.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import xxhash

from noloco_p2p.core.messages import PeerId

LARGEST_GROUP = 1024
"""Maximum number of replicas that an offer may name."""
NOT_YET = 2**53
"""`Advert.partner_from_round` of a replica that does not have the run's weights yet."""


class GroupView(NamedTuple):
    """What a replica's offer says in addition to its vector."""

    peers: tuple[PeerId, ...]
    """The replicas that it expects to count in that round, ascending. It names itself, unless it has just copied its
    weights."""
    digest: int
    """64-bit digest of what all replicas of the stage have in common."""


class Agreement(NamedTuple):
    """The outcome of the offers of a round."""

    counted: tuple[PeerId, ...]
    """The replicas whose vectors are merged, ascending; never empty."""
    digest: int
    """The digest of these. A replica with another digest copies the state of one of them."""


def digest(parts: Iterable[memoryview | bytes]) -> int:
    """64-bit digest of what replicas should have in common, by which they notice that they differ."""
    found = xxhash.xxh3_64()
    for part in parts:
        found.update(part)
    return int(found.intdigest())


def agree(views: Mapping[PeerId, GroupView]) -> Agreement:
    """Of the replicas that all offers name, the largest set with equal digests; among sets of equal size, the one with
    the smallest peer id.

    `views`: those of all offers that arrived, this replica's included. If all offers name no common replica, the result
    is the largest such set of all that arrived.
    """
    named = set(views).intersection(*(view.peers for view in views.values())) or set(views)
    parts: dict[int, list[PeerId]] = {}
    for peer in sorted(named):
        parts.setdefault(views[peer].digest, []).append(peer)
    theirs, counted = min(parts.items(), key=lambda part: (-len(part[1]), part[1]))
    return Agreement(tuple(counted), theirs)
