"""What must hold in every simulated swarm, whatever is done to it."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import NolocoError
from noloco_p2p.sim.faults import FaultySwarm
from noloco_p2p.sim.ledger import Watched
from noloco_p2p.sim.outcome import NodeOutcome, Outcome
from noloco_p2p.sim.traffic import KINDS, Account

COPY_ROUNDS = 3
"""A copy that a donor lends to several newcomers is two outer intervals old at most, and a round may be under way."""


def broken(swarm: FaultySwarm) -> str | None:
    """Run it; the first law that does not hold, None when all do."""
    try:
        check(swarm)
    except (AssertionError, NolocoError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def check(swarm: FaultySwarm) -> Outcome:
    """Run a swarm and check every law. Raises AssertionError, Deadlock, or what a node or a handler raised."""
    outcome = swarm.run(swarm.bounds.limit_s)
    judge(swarm, outcome)
    return outcome


def judge(swarm: FaultySwarm, outcome: Outcome) -> None:
    """Check every law on what became of a swarm. Raises AssertionError, in words, for the first that does not hold."""
    everybody_finished(swarm, outcome)
    for life in outcome.lives:
        every_microbatch_ended_once(life)
        no_id_counted_twice(life)
        rounds_increase(life)
        weights_are_what_was_frozen(life)
    weights_survive(swarm)
    newcomers_are_no_partners(swarm, outcome)
    nobody_waits_for_ever(swarm, outcome)
    every_byte_is_booked(swarm)


def watched(life: NodeOutcome) -> list[Watched]:
    """Its stages."""
    return [stage for stage in life.models if isinstance(stage, Watched)]


def everybody_finished(swarm: FaultySwarm, outcome: Outcome) -> None:
    """Who neither crashed nor was told to leave has come to the last step, and has left."""
    steps = float(swarm.plan.manifest.steps)
    for life in outcome.lives:
        if life.crashed:
            continue
        assert (life.state, life.error) == ("left", None), f"{life.peer} ended as {life.state}: {life.error}"
        if not told_to_leave(life):
            assert life.step == steps, f"{life.peer} ended at step {life.step} of {steps}"


def told_to_leave(life: NodeOutcome) -> bool:
    """It was drained before the run had ended."""
    return any(h.get("reason") == "told to leave" for h in life.trace.of("state"))


def every_microbatch_ended_once(life: NodeOutcome) -> None:
    """What a stage-0 life began was done, was dropped with a reason, or went down with it; no graph is left."""
    stages = watched(life)
    begun = sum(stage.forwards for stage in stages if stage.state.index == 0)
    results: Counter[str] = Counter()
    for one in life.trace.of("microbatch"):
        results[str(one.get("result"))] += 1
        if one.get("result") == "dropped":
            assert one.get("reason"), f"{life.peer} dropped a microbatch without a reason"
    if life.crashed:
        return
    for stage in stages:
        assert stage.open_graphs == 0, f"{life.peer} left {stage.open_graphs} graphs open"
    if begun and len(stages) == 1:
        ended = results["done"] + results["nonfinite"] + results["dropped"]
        assert begun == ended, f"{life.peer} began {begun} microbatches, of which {ended} ended: {results}"
        assert results["done"] == len(stages[0].counted), f"{life.peer}: {results}, {len(stages[0].counted)} counted"


def no_id_counted_twice(life: NodeOutcome) -> None:
    """Not into the same weights: what a checkpoint has counted, and what was counted since it was taken up."""
    for stage in watched(life):
        cuts = [0, *stage.counted_before, len(stage.counted)]
        for number, (begin, end) in enumerate(pairwise(cuts)):
            ids = [one.microbatch for one in stage.counted[begin:end]]
            twice = [each for each, count in Counter(ids).items() if count > 1]
            assert not twice, f"{life.peer} counted {twice} twice"
            if number and stage.taken[number - 1].origin == life.peer:
                again = stage.taken[number - 1].lineage & set(ids)
                assert not again, f"{life.peer} counted {sorted(again)} again after its restart"


def rounds_increase(life: NodeOutcome) -> None:
    """Strictly, on one stage."""
    if len(life.models) == 1:
        numbers = [number for number, _ in life.rounds]
        assert numbers == sorted(set(numbers)), f"{life.peer} did the rounds {numbers}"


def weights_are_what_was_frozen(life: NodeOutcome) -> None:
    """What is taken up is bit for bit what somebody of the stage froze at that round."""
    for stage in watched(life):
        for one in stage.taken:
            assert one.frozen_phi is not None, f"{life.peer} took up weights that {one.origin} never froze: {one}"
            assert one.phi == one.frozen_phi, f"{life.peer} took up {one.phi} for {one.frozen_phi}"


def weights_survive(swarm: FaultySwarm) -> None:
    """A stage goes on from the newest weights that there were, at most one outer round back; never from fresh ones."""
    for one in swarm.taken_up:
        was = one.there
        there = [*was.living, *was.guarded, *was.own]
        if one.source == "fresh":
            assert not there, f"{one.peer} began afresh, although there was: {one}"
        elif was.living:
            assert one.round >= max(was.living) - COPY_ROUNDS, f"{one.peer} went on far behind the living: {one}"
        elif there:
            # A swarm that was stopped as a whole goes on from the newest round that all stages have.
            limit = min([*was.others, max(there)])
            newest = max([round for round in there if round <= limit], default=limit)
            assert one.round >= newest - 1, f"{one.peer} lost more than one outer round: {one}"


def every_byte_is_booked(swarm: FaultySwarm) -> None:
    """What left the nodes has come to one, was lost, or is on its way."""
    sums = {kind: Account() for kind in KINDS}
    for accounts in swarm.network.ledger.values():
        for kind, account in accounts.items():
            sums[kind].add(account)
    for kind, all_of in sums.items():
        ended = all_of.received + all_of.lost + all_of.in_flight
        assert all_of.sent == ended, f"{all_of.sent - ended} bytes of {kind}s are in no book: {all_of}"


def newcomers_are_no_partners(swarm: FaultySwarm, outcome: Outcome) -> None:
    """Nobody merges weights of a node that took its own from a peer less than one outer interval before.

    Who could not read its advert since then could not know.
    """
    for life in outcome.lives:
        for merge in (merge for stage in watched(life) for merge in stage.merged):
            lives = [one for one in outcome.lives if one.peer == merge.partner]
            partner = next((one for one in lives if ended_s(swarm, one) >= merge.at_s), lives[-1])
            came = [h for h in partner.trace.of("resumed") if h.at_s < merge.at_s]
            if not came or came[-1].get("source") != "peer" or merge.round >= int(str(came[-1].get("round"))) + 2:
                continue
            cut_off = [f.ends_s for f in swarm.begun if f.ends_s <= merge.at_s and f.parts(life.peer, merge.partner)]
            known_s = max([came[-1].at_s, *cut_off]) + swarm.bounds.listed_s
            assert merge.at_s - swarm.bounds.round_s < known_s, f"{life.peer} merged {merge} of a newcomer: {came[-1]}"


def ended_s(swarm: FaultySwarm, life: NodeOutcome) -> float:
    """When it ended, or would have."""
    return swarm.bounds.limit_s if life.ended_at_s is None else life.ended_at_s


# --- time -------------------------------------------------------------------------------------------------------------

Spans = list[tuple[float, float]]


def nobody_waits_for_ever(swarm: FaultySwarm, outcome: Outcome) -> None:
    """While every stage has a replica that trains and can be reached, stage 0 takes inner steps."""
    for peer, gap_s, at_s in gaps(swarm, outcome):
        assert gap_s <= swarm.bounds.gap_s, f"{peer} took no inner step for {gap_s:.1f} s up to {at_s:.1f} s"


def gaps(swarm: FaultySwarm, outcome: Outcome) -> Iterator[tuple[PeerId, float, float]]:
    """(peer, seconds without an inner step, end of it) of all gaps of stage 0 while the swarm was sound."""
    sound = [(life, undisturbed(swarm, life, training(life))) for life in outcome.lives]
    served = [
        union(spans for life, spans in sound if life.stage == stage) for stage in range(swarm.plan.manifest.stages)
    ]
    healthy = served[0]
    for spans in served[1:]:
        healthy = common(healthy, spans)
    for life, spans in sound:
        if life.stage != 0:
            continue
        steps = [h.at_s for h in life.trace.of("inner_step")]
        for begin, end in common(spans, healthy):
            marks = [begin, *(at_s for at_s in steps if begin < at_s < end), end]
            for one, other in pairwise(marks):
                yield life.peer, other - one, other


def training(life: NodeOutcome) -> Spans:
    """From when to when it was in state `training`."""
    states = life.trace.of("state")
    ends = [h.at_s for h in states[1:]] + [life.ended_at_s or 0.0]
    return [(h.at_s, end_s) for h, end_s in zip(states, ends, strict=False) if h.get("state") == "training"]


def undisturbed(swarm: FaultySwarm, life: NodeOutcome, spans: Spans) -> Spans:
    """Without the times in which something was done to it."""
    for fault in swarm.begun:
        if life.peer in fault.peers or fault.kind == "split":
            spans = common(spans, [(0.0, fault.at_s), (fault.ends_s, swarm.bounds.limit_s)])
    return spans


def common(ones: Spans, others: Spans) -> Spans:
    """Where both are."""
    both = [(max(a, c), min(b, d)) for a, b in ones for c, d in others]
    return sorted((begin, end) for begin, end in both if begin < end)


def union(many: Iterable[Spans]) -> Spans:
    """Where one of them is."""
    joined: Spans = []
    for begin, end in sorted(span for spans in many for span in spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
