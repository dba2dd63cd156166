"""Which replica of the next stage gets a microbatch.

METHOD.md, "Random routing"; ARCHITECTURE.md, "Routing policies". Ranks are positions in the sorted ids of the
membership that a step started with. With R0 and R replicas at stages 0 and s, the slot of a microbatch at stage s is
g = index·R0 + origin rank, and its owner perm(seed, s, step)[(g + g div lcm(R0, R)) mod R].

Why slots: every node has to name the same owner from the label alone, without communication, and no replica may get
more than another. Slots are counted across the origins, index first, and every block of R slots meets each of the R
replicas once, so loads differ by at most one whatever the counts are. The same holds for the microbatches of a single
origin, because each lcm(R0, R) slots the blocks move on by one: if an origin is missing, every replica misses it alike.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from noloco_p2p.core.messages import Origin, PeerId
from noloco_p2p.core.seeds import generator

FREE = frozenset({"random", "weighted"})
"""The policies under which any replica may serve a microbatch; the others name one."""
FASTEST = 8.0
"""Upper limit on a replica's claimed speed, as a multiple of its stage's median: speeds are claims, and no claim may
attract all microbatches."""
SLOWEST = 1 / 64
"""Lower limit, likewise: every replica must get some microbatches."""


@dataclass(frozen=True, slots=True)
class StepView:
    """The membership at the start of an inner step of `me`, in groups sorted by id. `me` is in that of its stage."""

    me: PeerId
    origins: tuple[PeerId, ...] = ()
    mates: tuple[PeerId, ...] = ()
    following: tuple[PeerId, ...] = ()
    shares: Mapping[PeerId, float] = field(default_factory=dict)
    """Under `weighted`, the share that each of `following` has in its stage's speed."""
    my_share: float | None = None
    """Under `weighted`, the share that `me` has in its stage's speed; otherwise None."""


def target(microbatches_per_step: int, origins_count: int, replicas_count: int, share: float | None = None) -> int:
    """How many microbatches a replica takes into one inner step: its even share, rounded up, at least 1.

    Under `weighted`, its `share` of the stage's speed applies instead, rounded to the nearest integer, at least 1.
    """
    if share is not None:
        return max(1, round(microbatches_per_step * origins_count * share))
    return max(1, -(-microbatches_per_step * origins_count // max(1, replicas_count)))


def odds(speeds: Mapping[PeerId, float]) -> dict[PeerId, float]:
    """The share of each replica in its stage's speed, each above 0; they add up to 1.

    `speeds` are claims, in microbatches per second. One that is not a positive finite number counts as the stage's
    median (the lower one of two); the others are limited to between SLOWEST and FASTEST times the median.
    """
    measured = [speed for speed in speeds.values() if math.isfinite(speed) and speed > 0]
    usual = statistics.median_low(measured) if measured else 1.0
    ratios = {
        peer: min(FASTEST, max(SLOWEST, speed / usual)) if math.isfinite(speed) and speed > 0 else 1.0
        for peer, speed in sorted(speeds.items())
    }
    total = sum(ratios.values())
    return {peer: ratio / total for peer, ratio in ratios.items()}


def drawn(usable: Sequence[PeerId], odds: Mapping[PeerId, float], rng: Random) -> PeerId:
    """One of `usable`, drawn by its odds. A replica that came after the step began has none, and gets their mean."""
    peers = sorted(usable)
    mean = 1 / len(odds) if odds else 1.0
    return rng.choices(peers, [odds.get(peer, mean) for peer in peers])[0]


def candidate_sets(count: int, size: int, usable: Sequence[PeerId], rng: Random) -> list[list[PeerId]]:
    """`count` sets of `size` different replicas, or of all if there are fewer, drawn without replacement.

    All of `usable` are drawn before any is drawn again, so that the microbatches of a step are spread over them.
    """
    sets, left = [], list[PeerId]()
    for _ in range(count):
        if len(left) < min(size, len(usable)):
            # Those that are still left come last in the next permutation, so that no set gets one twice.
            left += sorted(rng.sample(sorted(usable), len(usable)), key=left.__contains__)
        sets.append(left[:size])
        del left[:size]
    return sets


def balanced_owner(
    seed: int, stage: int, step: int, slot: int, origins_count: int, replicas: Sequence[PeerId]
) -> PeerId:
    """The replica that serves slot g of `stage` in `step`. `replicas`: those of the stage, at least one."""
    order = sorted(set(replicas))
    generator(seed, "routing", stage, step).shuffle(order)
    return order[(slot + slot // math.lcm(origins_count, len(order))) % len(order)]


def balanced_slots(seed: int, stage: int, step: int, microbatches: int, view: StepView) -> set[tuple[PeerId, int]]:
    """The (origin, index) of the microbatches of `step` that `view.me` serves at `stage`; their number is its target.

    `microbatches`: how many each origin begins in a step. Over all replicas, every (origin, index) occurs exactly once.
    """
    order = sorted(set(view.mates))
    generator(seed, "routing", stage, step).shuffle(order)
    labels = [(origin, index) for index in range(microbatches) for origin in view.origins]
    cycle, mine = math.lcm(len(view.origins), len(order)), order.index(view.me)
    return {label for slot, label in enumerate(labels) if (slot + slot // cycle) % len(order) == mine}


def next_hop(
    policy: str, seed: int, stage: int, origin: Origin, view: StepView, usable: Sequence[PeerId], rng: Random
) -> tuple[PeerId, str]:
    """The replica of `stage` to send to, and why: `random`, `weighted`, `owner`, `fixed` or `fallback`.

    `usable` are the replicas that are live and not set aside, at least one. `balanced` and `fixed` name one of those
    that were there when the step began. If that one is not usable, `balanced` names one of `usable` by the same rule.
    `fixed`, or `balanced` if the origin was not there then, falls back to `random`: uniform over `usable`.
    """
    if policy == "random":
        return rng.choice(sorted(usable)), "random"
    if policy == "weighted":
        return drawn(usable, view.shares, rng), "weighted"
    wanted: PeerId | None = None
    if view.following and policy == "fixed":
        wanted = view.following[view.mates.index(view.me) % len(view.following)]
    elif view.following and origin.peer in view.origins:
        slot = origin.index * len(view.origins) + view.origins.index(origin.peer)
        wanted = balanced_owner(seed, stage, origin.step, slot, len(view.origins), view.following)
        if wanted not in usable:
            return balanced_owner(seed, stage, origin.step, slot, len(view.origins), usable), "fallback"
    if wanted is not None and wanted in usable:
        return wanted, "fixed" if policy == "fixed" else "owner"
    return rng.choice(sorted(usable)), "fallback"
