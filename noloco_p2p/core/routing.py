"""Which replica of the next stage gets a microbatch.

METHOD.md, "Random routing"; ARCHITECTURE.md, "Routing policies". Ranks are positions in the sorted ids of the
membership that a step started with. With R0 and R replicas at stages 0 and s, the slot of a microbatch at stage s is
g = index·R0 + origin rank, and its owner perm(seed, s, step, g div R)[g mod R].

Why slots: every node has to name the same owner from the label alone, without a word to the others, and no replica may
get more than another. Counting slots across the origins, index first, gives each run of R slots to all R replicas once,
so loads are within one of each other whatever the counts are; a permutation of its own for each run makes the pairs of
sender and receiver as random as with `random`.
"""

import random
from collections.abc import Sequence

from noloco_p2p.core.messages import Origin, PeerId
from noloco_p2p.core.seeds import generator


def target(microbatches_per_step: int, origins_count: int, replicas_count: int) -> int:
    """How many microbatches a replica takes into one inner step: its even share, rounded up, at least 1."""
    return max(1, -(-microbatches_per_step * origins_count // max(1, replicas_count)))


def _permutation(seed: int, stage: int, step: int, block: int, replicas: Sequence[PeerId]) -> list[PeerId]:
    order = sorted(set(replicas))
    generator(seed, "routing", stage, step, block).shuffle(order)
    return order


def balanced_owner(seed: int, stage: int, step: int, slot: int, replicas: Sequence[PeerId]) -> PeerId:
    """Who serves slot g of `stage` in `step`. `replicas` are those of that stage, not empty."""
    block, place = divmod(slot, len(set(replicas)))
    return _permutation(seed, stage, step, block, replicas)[place]


def balanced_slots(
    seed: int,
    stage: int,
    step: int,
    microbatches: int,
    origins: Sequence[PeerId],
    replicas: Sequence[PeerId],
    me: PeerId,
) -> frozenset[tuple[PeerId, int]]:
    """The (origin, index) of the microbatches of `step` that `me` serves at `stage`; their number is its target.

    `microbatches` is the count that each origin begins in a step. Over all replicas these are all pairs, once each.
    """
    ranked = sorted(set(origins))
    width = len(set(replicas))
    labels = [(origin, index) for index in range(microbatches) for origin in ranked]
    mine: set[tuple[PeerId, int]] = set()
    for start in range(0, len(labels), width):
        order = _permutation(seed, stage, step, start // width, replicas)
        mine.update(label for owner, label in zip(order, labels[start : start + width], strict=False) if owner == me)
    return frozenset(mine)


def next_hop(
    policy: str,
    seed: int,
    stage: int,
    origin: Origin,
    origins: Sequence[PeerId],
    me: PeerId,
    peers_of_my_stage: Sequence[PeerId],
    replicas: Sequence[PeerId],
    usable: Sequence[PeerId],
    rng: random.Random,
) -> tuple[PeerId, str]:
    """The replica of `stage` to send to, and why: `random`, `owner`, `fixed` or `fallback`.

    `replicas` is the stage's membership that the step started with, `usable` those that are live and not set aside
    (not empty; ValueError). `balanced` and `fixed` name one of `replicas`; when that one is not usable, or the origin
    was no member when the step started, the choice falls back to `random`: uniform over `usable`.
    """
    if not usable:
        raise ValueError("next_hop needs at least one usable replica")
    wanted: PeerId | None = None
    match policy:
        case "random":
            return rng.choice(sorted(usable)), "random"
        case "balanced":
            reason, ranked = "owner", sorted(set(origins))
            if origin.peer in ranked and replicas:
                slot = origin.index * len(ranked) + ranked.index(origin.peer)
                wanted = balanced_owner(seed, stage, origin.step, slot, replicas)
        case "fixed":
            reason, ordered, mates = "fixed", sorted(set(replicas)), sorted({*peers_of_my_stage, me})
            if ordered:
                wanted = ordered[mates.index(me) % len(ordered)]
        case _:
            raise ValueError(f"no routing policy {policy!r}")
    if wanted is not None and wanted in usable:
        return wanted, reason
    return rng.choice(sorted(usable)), "fallback"
