"""Which replica pulls which one's snapshot in an outer round (METHOD.md, "Pairing")."""

import random
from collections.abc import Sequence
from typing import Literal

from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.seeds import generator


def matching(seed: int, round: int, members: Sequence[PeerId]) -> dict[PeerId, PeerId]:
    """A perfect matching, both ways round, from (seed, round, set of ids) only; with an odd count one is left out."""
    order = sorted(set(members))
    generator(seed, "pairing", round, *order).shuffle(order)
    pairs = list(zip(order[0::2], order[1::2], strict=False))
    return dict(pairs) | {b: a for a, b in pairs}


def partner(
    kind: Literal["matched", "random"],
    seed: int,
    round: int,
    members: Sequence[PeerId],
    me: PeerId,
    rng: random.Random,
) -> tuple[PeerId | None, str]:
    """My partner among the live replicas of my stage, and why: `matched`, `odd`, `random` or `nobody`.

    `members` may or may not name me and need not be sorted. `matched` does not touch `rng`; `random` draws from it,
    uniformly among the others. None: I go alone.
    """
    others = sorted(set(members) - {me})
    if not others:
        return None, "nobody"
    if kind == "random":
        return rng.choice(others), "random"
    found = matching(seed, round, [*others, me]).get(me)
    return (None, "odd") if found is None else (found, "matched")
