"""Where a node gets the weights of its stage if the run has already begun: pure decisions on adverts.

ARCHITECTURE.md, "Recovery". A living replica of the stage comes first, or the node's own checkpoint if that is hardly
older. A stage without living replicas resumes from the best of its weights that still exist: those of a checkpoint, or
those that a guardian holds.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

from noloco_p2p.core.exchanges import PROBES
from noloco_p2p.core.guardians import holders
from noloco_p2p.core.members import TRAINED
from noloco_p2p.core.messages import Advert, Holding, PeerId

NEAR_ROUNDS = 1
"""A checkpoint at most this many outer rounds behind the living replicas is used instead of a transfer."""

BOLD_ROUNDS, BOLD_STEPS = 3, 12
"""A replica that claims to be more than this many rounds ahead of the median of its stage, and this many steps ahead of
the median clock of the swarm, is asked last."""


@dataclass(frozen=True, slots=True)
class RestoreSource:
    """Where to get weights: from a living `peer`, a `shard` (this node's checkpoint), a `guardian`, or `fresh` ones.

    `wait`: another node of the stage is about to resume from newer weights than this node can find.
    """

    kind: str
    reason: str
    peer: Advert | None = None
    """The node to ask, for `peer` and `guardian`. None for a guardian: this node itself guards the weights."""
    holding: Holding | None = None
    """The weights, for `shard` and `guardian`."""


def age(replica: Advert) -> int:
    """The age of a replica's weights: the outer rounds since they were initial ones."""
    return replica.outer_round - replica.fresh_round


def eldest(replicas: Iterable[Advert]) -> Advert:
    """The replica whose weights are of the greatest age; among equals, of the earliest lineage."""
    return max(replicas, key=lambda a: (age(a), -a.fresh_round))


def has_last_step(waiting: Advert, steps: int) -> bool:
    """Whether a node that does not train yet lists a checkpoint of the last step."""
    return any(held.step >= steps for held in waiting.holds)


def run_has_begun(adverts: Iterable[Advert]) -> bool:
    """Whether any node trains or has trained, even if that was before all nodes were stopped."""
    return any(a.state in TRAINED or a.step > 0 or a.holds for a in adverts)


def lacking(
    me: Advert, others: Sequence[Advert], stages: int, start_replicas: int, states: Collection[str]
) -> dict[int, int]:
    """How many replicas in one of `states` each stage still lacks before the run may start; empty if none lacks any."""
    at = [advert.stage for advert in (*others, me) if advert.state in states]
    return {s: start_replicas - at.count(s) for s in range(stages) if at.count(s) < start_replicas}


def common_round(adverts: Sequence[Advert], stages: int) -> int | None:
    """The newest outer round from which every stage can resume: the lowest of the newest rounds that exist per stage.

    Living replicas have the round that they announce, other nodes what they hold of their own stage, and guardians what
    they hold of another stage. Stages without any weights do not count. None: there are no weights at all.
    """
    return least_newest(h for advert in adverts for h in claimed(advert) if 0 <= h.stage < stages)


def claimed(advert: Advert) -> list[Holding]:
    """All weights that a node says it has."""
    return [*advert.holds, *_own_weights(advert)]


def _own_weights(advert: Advert) -> list[Holding]:
    # A replica that leaves hands its weights over, and one that syncs may have stood still. It has none if that came
    # before it had got any.
    has = advert.state in TRAINED or (advert.state in ("draining", "syncing") and advert.outer_round > 0)
    return [Holding(advert.stage, advert.outer_round, int(advert.step), advert.fresh_round)] if has else []


def deciding(me: Advert, answered: Sequence[Advert], listed: Sequence[Advert], stages: int) -> list[Advert]:
    """The nodes of `listed` that have to answer before it is settled where this node's weights come from.

    The living replicas of its stage, if there are any; otherwise of each other stage the node that claims the newest
    weights, and of its own stage the PROBES nodes that do. A replica's advert may be older than what a guardian has
    pulled from it since, so the replica that announces the newest round has to answer as well.
    """
    if living := [a for a in listed if a.stage == me.stage and a.state in TRAINED]:
        return living
    nodes, found = [*answered, *listed], set[PeerId]()
    for stage in range(stages):
        mine = stage == me.stage
        for weights in (claimed, _own_weights):
            claims = [(h.age if mine else h.round, a.peer_id) for a in nodes for h in weights(a) if h.stage == stage]
            found.update(peer for _, peer in sorted(claims, reverse=True)[: PROBES if mine else 1])
    return sorted((a for a in listed if a.peer_id in found), key=lambda a: a.peer_id)


def least_newest(held: Iterable[Holding]) -> int | None:
    """The lowest of the newest outer rounds held of each stage that occurs; None if nothing is held."""
    newest: dict[int, int] = {}
    for holding in held:
        newest[holding.stage] = max(holding.round, newest.get(holding.stage, 0))
    return min(newest.values(), default=None)


def nearness(held: Holding, meeting: int) -> tuple[int, bool, int]:
    """Sort key of checkpoints: their distance to the round at which all stages meet again. Of two at equal distance the
    older one comes first, because the others can reach it; of one round, the one of the latest step."""
    behind = meeting - held.round
    return abs(behind), behind < 0, -held.step


def restore_sources(
    me: Advert,
    others: Sequence[Advert],
    own: Sequence[Holding],
    stages: int,
    guarded: Holding | None = None,
    *,
    credible: int = 0,
    late: bool = False,
) -> list[RestoreSource]:
    """Where `me` should look for the weights of its stage, best first; never empty.

    `own`: its checkpoints of this stage; `guarded`: what it holds if it was the stage's guardian and moves there;
    `credible`: the round that the run's clock allows; `late`: nobody has given any for as long as a transfer may take.
    While the stage has a living replica, fresh weights are not an option, nor a guardian's until it is `late`. Of
    several lineages the one of the greatest age comes first.
    """
    checkpoints = sorted(own, key=lambda h: (h.age, h.step), reverse=True)
    mates, guards = [a for a in others if a.stage == me.stage], _guards(me.stage, others)
    living = [a for a in mates if a.state in TRAINED]
    if living:
        bold = max(credible, median_low([a.outer_round for a in living]) + BOLD_ROUNDS)
        best = eldest(a for a in living if a.outer_round <= bold)

        def order(a: Advert) -> tuple[bool, bool, bool, int, PeerId]:
            """The boldest claims come last, because they may be lies; relays are slow."""
            other = a.fresh_round != best.fresh_round
            return a.outer_round > bold, other, me.needs_relay(a), -a.outer_round, a.peer_id

        near = [_own_checkpoint(h, "hardly behind the others") for h in checkpoints if age(best) - h.age <= NEAR_ROUNDS]
        peers = [RestoreSource("peer", "a living replica has them", a) for a in sorted(living, key=order)]
        return near[:1] + peers + (guards if late else [])
    limit = common_round([me, *others], stages)
    if guarded is not None:
        guards.append(RestoreSource("guardian", "this node guards the weights", holding=guarded))
    return _of_a_lost_stage(me.stage, checkpoints, guards, mates, limit)


def _guards(stage: int, others: Iterable[Advert]) -> list[RestoreSource]:
    strangers = [a for a in others if a.stage != stage]
    return [RestoreSource("guardian", "a guardian has the weights", a, h) for a, h in holders(stage, strangers)]


def guards_ahead(me: Advert, others: Iterable[Advert]) -> list[RestoreSource]:
    """The guardians whose weights are ahead of those of `me`, the only replica of its stage: another one trained on
    while this one was away, and has left."""
    return [one for one in _guards(me.stage, others) if one.holding and one.holding.age - age(me) > NEAR_ROUNDS]


def _of_a_lost_stage(
    stage: int, own: Sequence[Holding], guards: Sequence[RestoreSource], mates: Sequence[Advert], limit: int | None
) -> list[RestoreSource]:
    """Sources for a stage without living replicas, nearest first to the round from which all stages can resume.

    All nodes may have been stopped at once, so checkpoints are ranked by their distance to that round. Guardians have
    outlived the stage, so they hold the newest weights that exist, the last state of a replica that left: of these the
    newest come first, even if they are beyond that round. Of several lineages the one of the greatest age comes first.
    """

    meeting = max((h.round for h in own), default=0) if limit is None else limit
    mine = [_own_checkpoint(h, "nearest to the round that all stages have") for h in own]
    found = [one.holding for one in (*mine, *guards) if one.holding]
    lineage = max(found, key=lambda h: (h.age, -h.fresh_round)).fresh_round if found else 0

    def order(source: RestoreSource) -> tuple[bool, int, bool, int, bool, str]:
        held, guarded = source.holding, source.kind == "guardian"
        assert held is not None
        distance, is_newer, earlier = nearness(held, meeting)
        distance = meeting - held.round if guarded else distance
        # At equal round and step the checkpoint comes first, because it has the optimizer's state too.
        other = held.fresh_round != lineage
        return other, distance, is_newer, earlier, guarded, source.peer.peer_id if source.peer else ""

    within = [h.age for h in own if h.round <= meeting] + [g.holding.age for g in guards if g.holding]
    best = max(within, default=-1 - NEAR_ROUNDS)
    theirs = [h for a in mates for h in a.holds if h.stage == stage and h.round <= meeting]
    theirs += [h for a in mates for h in _own_weights(a)]
    eldest = max(theirs, key=lambda h: h.age, default=None)
    if eldest is not None and eldest.age - best > NEAR_ROUNDS:
        return [RestoreSource("wait", f"another node has round {eldest.round} of stage {stage}")]
    return [*sorted([*mine, *guards], key=order), RestoreSource("fresh", "nobody has weights of this stage")]


def _own_checkpoint(holding: Holding, reason: str) -> RestoreSource:
    return RestoreSource("shard", reason, holding=holding)
