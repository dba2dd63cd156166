"""Which replica pulls whose snapshot in an outer round (METHOD.md, "Pairing")."""

import random
from collections.abc import Sequence, Set
from typing import Literal

from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.seeds import generator


def matching(
    seed: int, round: int, members: Sequence[PeerId], hidden: Set[PeerId] = frozenset()
) -> dict[PeerId, PeerId]:
    """Each member's partner in a perfect matching that does not depend on the order of `members`. If their number is
    odd, one is left out.

    Two `hidden` replicas would need a relay, so such a pair swaps partners with a pair without hidden replicas, if
    there is one.
    """
    order = sorted(set(members))
    generator(seed, "pairing", round, *order).shuffle(order)
    found = dict(zip(order[0::2], order[1::2], strict=False))
    relayed = [pair for pair in found.items() if hidden >= {*pair}]
    direct = [pair for pair in found.items() if hidden.isdisjoint(pair)]
    for (one, other), (left, right) in zip(relayed, direct, strict=False):
        del found[left]
        found |= {one: left, other: right}
    return found | {other: one for one, other in found.items()}


def partner(
    kind: Literal["matched", "random"],
    seed: int,
    round: int,
    members: Sequence[PeerId],
    me: PeerId,
    rng: random.Random,
    hidden: Set[PeerId] = frozenset(),
) -> tuple[PeerId | None, str]:
    """The partner of `me` among the live replicas of its stage, and why: `matched`, `odd`, `random` or `nobody`.

    `members` need not be sorted, and may or may not include `me`. `matched` does not touch `rng`; `random` draws from
    it, uniformly among the others, or among those that need no relay if there are any. None: no partner in this round.
    """
    others = sorted(set(members) - {me})
    if not others:
        return None, "nobody"
    if kind == "random":
        return rng.choice(without_relay(others, me, hidden)), "random"
    found = matching(seed, round, [*others, me], hidden).get(me)
    return (None, "odd") if found is None else (found, "matched")


def without_relay(peers: Sequence[PeerId], me: PeerId, hidden: Set[PeerId]) -> Sequence[PeerId]:
    """The peers that `me` reaches without a relay; all peers if there are none."""
    return [peer for peer in peers if peer not in hidden] or peers if me in hidden else peers
