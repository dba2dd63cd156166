"""Which stage a node should hold: a newcomer's choice, and moves of nodes that already train.

ARCHITECTURE.md, "Rebalancing". Every microbatch passes through every stage once, so the swarm is as fast as its slowest
stage. The capacity of a stage is the sum over its replicas of the microbatches per second that their devices can do.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import inf, isfinite
from operator import add
from typing import NamedTuple

from noloco_p2p.core.members import PRESENT
from noloco_p2p.core.messages import NO_STAGE, Advert, PeerId

MIN_GAIN = 1.2
"""A move must raise the slower of the two stages by a fifth: measured speeds vary by about a tenth from one reading to
the next, and a move costs the device time for a drain and a transfer."""
MIN_ROUNDS = 4.0
"""Outer rounds that must remain: a node that moves is no partner before its first complete outer interval, and should
then stay for longer than the move took."""
OTHERS_LEFT = 2
"""Other training replicas that a move must leave behind: if there were only one, its death would lose the stage. One is
enough for a move to a stage that nobody holds, because the swarm stands still without it."""

COUNTED = PRESENT - {"paused"}
"""Nodes in these states work at their stage, or soon will."""
ON_THE_WAY = frozenset({"starting", "waiting"})
UNSETTLED = frozenset({"syncing", "draining"})

ROUNDING = 1e-9
"""Capacities that differ by less than this fraction count as equal: they may be the same sum in another order."""


@dataclass(frozen=True, slots=True)
class StageCapacities:
    """The capacity of each stage, and the expected speed of one more replica of it, in microbatches per second."""

    of_stage: tuple[float, ...]
    replicas: tuple[int, ...]
    one_more: tuple[float, ...]
    """Mean of the measured replicas of the stage, else of all measured ones, else 1.0."""

    def slowest(self) -> int:
        """The stage of least capacity; among equals the one with the fewest replicas, then the first."""
        return min(range(len(self.of_stage)), key=lambda s: (self.of_stage[s], self.replicas[s], s))


def _measured(advert: Advert) -> bool:
    return isfinite(advert.microbatches_per_s) and advert.microbatches_per_s > 0


def _mean(values: Sequence[float], otherwise: float) -> float:
    """The same in every version of Python: `sum` rounds differently from 3.12 on."""
    return reduce(add, values) / len(values) if values else otherwise


def capacities(adverts: Iterable[Advert], stages: int) -> StageCapacities:
    """The capacities of all stages. A replica that has not measured its speed counts as the mean of those that have."""
    counted = sorted((a for a in adverts if a.state in COUNTED and 0 <= a.stage < stages), key=lambda a: a.peer_id)
    overall = _mean([a.microbatches_per_s for a in counted if _measured(a)], 1.0)
    of_stage, replicas, one_more = [], [], []
    for stage in range(stages):
        here = [a for a in counted if a.stage == stage]
        expected = _mean([a.microbatches_per_s for a in here if _measured(a)], overall)
        of_stage.append(len(here) * expected)
        replicas.append(len(here))
        one_more.append(expected)
    return StageCapacities(tuple(of_stage), tuple(replicas), tuple(one_more))


def choose_stage(me: Advert, others: Sequence[Advert], stages: int) -> int:
    """The stage that `me`, which has not made its weights yet, should hold. Nodes with the same view agree.

    A node that has not chosen yet (NO_STAGE) takes the stage of least capacity. When it is asked again, starting from
    the current stages of all nodes, the largest peer id that may still choose moves from the strongest stage to the
    weakest, and so on while the weaker of the two gains by it. Settled nodes never move.
    """
    placed = {a.peer_id: a for a in others if a.state in COUNTED and 0 <= a.stage < stages}
    if me.stage == NO_STAGE:
        return capacities(placed.values(), stages).slowest()
    placed[me.peer_id] = me
    now = capacities(placed.values(), stages)
    strength, counts = list(now.of_stage), list(now.replicas)
    movable = [a for a in placed.values() if not a.settled]
    while movable:
        low = min(range(stages), key=lambda s: (strength[s], counts[s], s))
        mover = max(movable, key=lambda a: (strength[a.stage], a.peer_id))
        high = mover.stage
        leaves = strength[high] - now.one_more[high]
        if leaves <= strength[low] + ROUNDING * strength[high]:
            break
        movable.remove(mover)
        strength[high], strength[low] = leaves, strength[low] + now.one_more[low]
        counts[high], counts[low] = counts[high] - 1, counts[low] + 1
        if mover.peer_id == me.peer_id:
            return low
    return me.stage


def may_move(me: Advert, others: Iterable[Advert]) -> bool:
    """Whether `me` may make the move that it announced: of several such nodes only the one with the lowest id moves."""
    return all(a.peer_id > me.peer_id for a in others if a.moving_to is not None)


def others_left(adverts: Iterable[Advert], target: int) -> int:
    """How many other replicas a node that moves to `target` must leave behind."""
    return OTHERS_LEFT if any(a.stage == target for a in adverts) else 1


class HoldUp(NamedTuple):
    """Why nobody moves now, or not to where a node is missing: because of `peer`."""

    peer: PeerId
    why: str
    """`away`: it is on its way; `moves`: it has announced a move; `unmeasured`: it trains, and has no speed yet;
    `idle`: its stage serves nothing, say most of those that train in the stage before."""

    @classmethod
    def among(cls, adverts: Sequence[Advert], doubted: Collection[PeerId] = ()) -> "set[HoldUp]":
        """All that these adverts show. What a `doubted` peer says of the next stage does not count."""
        found = {cls(a.peer_id, "away") for a in adverts if a.state in UNSETTLED | ON_THE_WAY}
        found |= {cls(a.peer_id, "moves") for a in adverts if a.moving_to is not None}
        training = [a for a in adverts if a.state == "training"]
        before = Counter(a.stage + 1 for a in training if a.peer_id not in doubted)
        unserved = Counter(a.stage + 1 for a in training if a.peer_id not in doubted and a.unserved)
        found |= {cls(a.peer_id, "idle") for a in training if 2 * unserved[a.stage] > before[a.stage]}
        return found | {cls(a.peer_id, "unmeasured") for a in training if not _measured(a)}


def expected(me: Advert, others: Iterable[Advert], overdue: Collection[HoldUp]) -> list[Advert]:
    """What `me` expects of the others: nothing of one that has been on its way for too long, or whose stage has long
    served nothing; and no move of one that announced it long ago, or has long trained without measuring its speed
    although `me` has measured its own."""

    def late(a: Advert, *why: str) -> bool:
        return any(HoldUp(a.peer_id, each) in overdue for each in why)

    # If nobody has measured a speed, the swarm stands still. Then each node would expect only itself to move.
    stay = ("moves", "unmeasured") if _measured(me) else ("moves",)
    counted = [a for a in others if not late(a, "away", "idle")]
    return [replace(a, moving_to=None, stays=True) if late(a, *stay) else a for a in counted]


def choose_move(
    me: Advert, others: Sequence[Advert], stages: int, rounds_left: float = inf, overdue: Collection[HoldUp] = ()
) -> tuple[int | None, str]:
    """The stage to which this node should move while it trains, or None to stay; and the reason.

    Nodes with the same view agree. In the whole swarm one node moves at a time: to the slowest stage, from the
    strongest stage that can spare a replica, and there the replica with the lowest id that can be spared. Call it again
    until the node moves: with `me.moving_to` set, the result shows whether the announced move still stands. It does not
    if a node with a lower id has announced one, too. `others`: see `expected`. `rounds_left`: outer rounds until the
    run ends. `overdue`: what has lasted for so long that the node must hang or lie; nobody waits for it any more.

    With fixed speeds, moves come to an end: the slowest stage gains, and no other stage becomes as slow as it was, so
    the sorted capacities grow with every move.
    """
    if stages < 2 or me.state != "training":
        return None, "not training, or nowhere to move"
    if HoldUp(me.peer_id, "moves") in overdue:
        return None, "the replicas of this stage have not answered for too long"
    everybody = [*others, me]
    now = capacities(everybody, stages)
    target = now.slowest()
    lost = all(a.stage != target for a in others)
    if (rounds_left < MIN_ROUNDS and not lost) or any(a.state == "finished" for a in others):
        return None, "the run is near its end"
    if not may_move(me, others) if me.moving_to is not None else any(a.moving_to is not None for a in others):
        return None, "another node moves"
    if any(a.state in UNSETTLED or (a.state == "starting" and not a.settled) for a in others):
        return None, "another node is on its way"
    if any(a.state in ON_THE_WAY and a.stage == target for a in others):
        return None, "another node is on its way"
    unmeasured = {one for one in HoldUp.among(everybody) if one.why == "unmeasured" and one not in overdue}
    if now.of_stage[target] > 0 and unmeasured:
        return None, "not every node has measured its speed"
    mover = _mover(everybody, now, target)
    if mover is None:
        return None, "no node can be spared"
    if mover.peer_id != me.peer_id:
        return None, "another node can be spared"
    return target, f"stage {target} can do {now.of_stage[target]:.3g} microbatches/s, mine {now.of_stage[me.stage]:.3g}"


def _mover(everybody: Sequence[Advert], now: StageCapacities, target: int) -> Advert | None:
    """The node that should move to `target`; None unless both stages would then be well above what `target` is now."""
    wanted = MIN_GAIN * now.of_stage[target]
    if now.of_stage[target] + now.one_more[target] < wanted:
        return None
    training = [a for a in everybody if a.state == "training" and 0 <= a.stage < len(now.of_stage)]
    counts, least = Counter(a.stage for a in training), others_left(everybody, target)
    spared = []
    for advert in training:
        left = counts[advert.stage] - 1
        rate = advert.microbatches_per_s if _measured(advert) else now.one_more[advert.stage]
        remains = now.of_stage[advert.stage] - rate
        if not advert.stays and advert.stage != target and left >= least and remains > 0 and remains >= wanted:
            spared.append(advert)
    return min(spared, key=lambda a: (-now.of_stage[a.stage], a.stage, a.peer_id), default=None)
