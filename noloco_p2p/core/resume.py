"""Where a replica's weights come from when the run has begun before it: pure decisions on adverts.

ARCHITECTURE.md, "Recovery". A living replica of the stage comes first, or the node's own checkpoint when that is hardly
older. A stage without a living replica resumes from the newest weights that exist of it: those of a checkpoint, or
those that a guardian holds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

from noloco_p2p.core.exchanges import PROBES
from noloco_p2p.core.guardians import holders
from noloco_p2p.core.members import TRAINED
from noloco_p2p.core.messages import Advert, Holding, PeerId

NEAR_ROUNDS = 1
"""A checkpoint at most this many outer rounds behind the living replicas is resumed from, without a transfer."""

BOLD_ROUNDS = 3
"""Who says that it is further ahead of the median of its stage is asked last."""


@dataclass(frozen=True, slots=True)
class RestoreSource:
    """Where weights can be had: of a living `peer`, from a `shard` (my checkpoint), from a `guardian`, or `fresh`.

    `wait`: a replica of my stage is about to resume from newer weights than I could find.
    """

    kind: str
    reason: str
    peer: Advert | None = None
    """Of `peer` and `guardian`: the node to ask; None for a guardian: this node guards it itself."""
    holding: Holding | None = None
    """Of `shard` and `guardian`: what it is."""


def run_has_begun(adverts: Iterable[Advert]) -> bool:
    """A node trains or has trained, now or before all were stopped."""
    return any(a.state in TRAINED or a.step > 0 or a.holds for a in adverts)


def common_round(adverts: Sequence[Advert], stages: int) -> int | None:
    """The newest outer round that every stage can resume from: the least over stages of what the stage's nodes have.

    Living replicas have the round that they announce, others what they hold of their own stage, guardians what they
    hold of another. Stages without any weights do not count. None: there are no weights at all.
    """
    held = [holding for advert in adverts for holding in _claims(advert)]
    return least_newest(holding for holding in held if 0 <= holding.stage < stages)


def _claims(advert: Advert) -> list[Holding]:
    living = [Holding(advert.stage, advert.outer_round, int(advert.step))] if advert.state in TRAINED else []
    return [*advert.holds, *living]


def deciding(me: Advert, answered: Sequence[Advert], listed: Sequence[Advert], stages: int) -> list[Advert]:
    """Those of `listed` who have yet to answer before it is settled where my weights come from.

    The living replicas of my stage, if there are any; else of each stage the one that claims the newest weights, and
    those that claim the newest ones of mine.
    """
    if living := [a for a in listed if a.stage == me.stage and a.state in TRAINED]:
        return living
    everybody, found = [*answered, *listed], dict[PeerId, Advert]()
    for stage in range(stages):
        claims = [(held.round, a.peer_id, a) for a in everybody for held in _claims(a) if held.stage == stage]
        newest = sorted(claims, key=lambda claim: claim[:2], reverse=True)[: PROBES if stage == me.stage else 1]
        found |= {peer: advert for _, peer, advert in newest}
    unasked = {advert.peer_id for advert in listed}
    return [advert for peer, advert in sorted(found.items()) if peer in unasked]


def least_newest(held: Iterable[Holding]) -> int | None:
    """The least over the stages that occur of the newest outer round held of each; None when nothing is held."""
    newest: dict[int, int] = {}
    for holding in held:
        newest[holding.stage] = max(holding.round, newest.get(holding.stage, 0))
    return min(newest.values(), default=None)


def nearness(held: Holding, meeting: int) -> tuple[int, bool, int]:
    """Sorts checkpoints by their distance to the round at which all stages meet again. Of two that are as near, the
    older one comes first, which the others can reach; of one round, the one of the latest step."""
    behind = meeting - held.round
    return abs(behind), behind < 0, -held.step


def restore_sources(
    me: Advert, others: Sequence[Advert], own: Sequence[Holding], stages: int, guarded: Holding | None = None
) -> list[RestoreSource]:
    """Where to look for the weights of my stage, best first; never empty.

    `own` are my checkpoints of this stage, `guarded` is what I hold of it as its guardian that moves to it. With a
    living replica in the stage, fresh weights are no choice.
    """
    checkpoints = sorted(own, key=lambda h: (h.round, h.step), reverse=True)
    mates = [a for a in others if a.stage == me.stage]
    living = [a for a in mates if a.state in TRAINED]
    if living:
        usual = median_low([a.outer_round for a in living])
        # The boldest come last, because they may lie; relays are slow.
        living.sort(key=lambda a: (a.outer_round > usual + BOLD_ROUNDS, me.needs_relay(a), -a.outer_round, a.peer_id))
        ahead = max(a.outer_round for a in living if a.outer_round <= usual + BOLD_ROUNDS)
        pulls = [RestoreSource("peer", "a living replica has it", peer) for peer in living]
        near = [
            _own_checkpoint(h, "hardly behind the others") for h in checkpoints[:1] if ahead - h.round <= NEAR_ROUNDS
        ]
        return near + pulls
    limit = common_round([me, *others], stages)
    strangers = [a for a in others if a.stage != me.stage]
    guards = [RestoreSource("guardian", "guarded", a, h) for a, h in holders(me.stage, strangers)]
    if guarded is not None:
        guards.append(RestoreSource("guardian", "guarded by this node", holding=guarded))
    return _of_a_lost_stage(me.stage, checkpoints, guards, mates, limit)


def _of_a_lost_stage(
    stage: int, own: Sequence[Holding], guards: Sequence[RestoreSource], mates: Sequence[Advert], limit: int | None
) -> list[RestoreSource]:
    """No replica of my stage trains: the weights nearest to the round from which all stages can resume together.

    All nodes may have been stopped at once, so checkpoints count by their distance to that round. Guardians have
    outlived the stage, so what they hold is the newest that exists, the last state of a replica that left: of it the
    newest comes first, even beyond that round.
    """

    meeting = max((h.round for h in own), default=0) if limit is None else limit

    def order(source: RestoreSource) -> tuple[int, bool, int, bool, str]:
        held, guarded = source.holding, source.kind == "guardian"
        assert held is not None
        distance, is_newer, earlier = nearness(held, meeting)
        distance = meeting - held.round if guarded else distance
        # Of one round and step the checkpoint comes first, which has the optimizer's state too.
        return distance, is_newer, earlier, guarded, source.peer.peer_id if source.peer else ""

    within = [h.round for h in own if h.round <= meeting] + [g.holding.round for g in guards if g.holding]
    best = max(within, default=-1 - NEAR_ROUNDS)
    theirs = [h.round for a in mates for h in a.holds if h.stage == stage and h.round <= meeting]
    if theirs and max(theirs) - best > NEAR_ROUNDS:
        return [RestoreSource("wait", f"another node has round {max(theirs)} of stage {stage}")]
    mine = [_own_checkpoint(h, "the nearest to what all stages have") for h in own]
    return [*sorted([*mine, *guards], key=order), RestoreSource("fresh", "nobody has its weights")]


def _own_checkpoint(holding: Holding, reason: str) -> RestoreSource:
    return RestoreSource("shard", reason, holding=holding)
