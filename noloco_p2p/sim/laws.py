"""What must hold in every simulated swarm under all faults."""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import pairwise
from math import inf
from statistics import median_low

from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.resume import BOLD_ROUNDS
from noloco_p2p.sim.faults import FaultySwarm
from noloco_p2p.sim.payloads import totals
from noloco_p2p.sim.process import Outcome, SimProcess
from noloco_p2p.sim.recording import RecordingStage

COPY_ROUNDS = 3
"""How many rounds a copy may lag: a donor's copy for several newcomers is up to two outer intervals old, and a round
may be in progress."""


def judge(swarm: FaultySwarm, outcome: Outcome) -> None:
    """Check every law on the outcome of a swarm. Raises AssertionError, with a description, if a law does not hold."""
    all_nodes_finished(swarm, outcome)
    for process in outcome.processes:
        every_microbatch_ended_once(process)
        no_id_counted_twice(process)
        rounds_increase(process)
        progress_counts_once(process)
        weights_are_what_was_frozen(process)
    undisturbed_ids_count_once_per_stage(swarm, outcome)
    weights_survive(swarm)
    newcomers_are_no_partners(swarm, outcome)
    nobody_waits_for_ever(swarm, outcome)
    every_byte_is_accounted_for(swarm)


def recording_stages(process: SimProcess) -> list[RecordingStage]:
    """The stages of a process."""
    return [stage for stage in process.models if isinstance(stage, RecordingStage)]


def all_nodes_finished(swarm: FaultySwarm, outcome: Outcome) -> None:
    """Every process that did not crash has left, and has reached the last step unless it was told to leave."""
    steps = float(swarm.plan.manifest.steps)
    for process in outcome.processes:
        if process.crashed:
            continue
        ended = (process.state, process.error)
        assert ended == ("left", None), f"{process.peer} ended as {process.state}: {process.error}"
        if not process.told_to_leave:
            assert process.step == steps, f"{process.peer} ended at step {process.step} of {steps}"


def every_microbatch_ended_once(process: SimProcess) -> None:
    """Every microbatch of a stage-0 process was done, dropped with a reason, or died with it. No graph is left open."""
    stages = recording_stages(process)
    begun = sum(stage.forwards for stage in stages if stage.state.index == 0)
    dropped = [e.get("reason") for e in process.trace.of("microbatch") if e.get("result") == "dropped"]
    assert all(dropped), f"{process.peer} dropped a microbatch without a reason"
    if process.crashed:
        return
    for stage in stages:
        assert not stage.open_graphs, f"{process.peer} left {len(stage.open_graphs)} graphs open"
    if begun and len(stages) == 1:
        results, counted = process.microbatches, len(stages[0].counted)
        ended = results["done"] + results["nonfinite"] + results["dropped"]
        waited = dropped.count("cancelled")  # at most this many never got the device, because the node left
        assert ended - waited <= begun <= ended, f"{process.peer} began {begun} microbatches, {ended} ended: {results}"
        assert results["done"] == counted, f"{process.peer} counted {counted} microbatches, but {results}"


def no_id_counted_twice(process: SimProcess) -> None:
    """No id counts twice in the same weights: not twice since they were loaded, and not if they already included it."""
    for stage in recording_stages(process):
        cuts = [0, *(loaded.counted_before for loaded in stage.loaded), len(stage.counted)]
        for (begin, end), loaded in zip(pairwise(cuts), [None, *stage.loaded], strict=True):
            ids = [one.microbatch for one in stage.counted[begin:end]]
            twice = [each for each, count in Counter(ids).items() if count > 1]
            assert not twice, f"{process.peer} counted {twice} twice"
            if loaded is not None:
                again = loaded.lineage & set(ids)
                assert not again, f"{process.peer} counted {sorted(again)} again, which its weights already included"


def undisturbed_ids_count_once_per_stage(swarm: FaultySwarm, outcome: Outcome) -> None:
    """In a run without faults or failed calls no id counts twice in a stage: the first replica that grants gets it."""
    disturbed = swarm.begun or outcome.trace.of("reroute")
    if disturbed or any(process.crashed or process.told_to_leave for process in outcome.processes):
        return
    stages = [stage for process in outcome.processes for stage in recording_stages(process)]
    counted = Counter((stage.state.index, one.microbatch) for stage in stages for one in stage.counted)
    twice = [each for each, count in counted.items() if count > 1]
    assert not twice, f"two replicas of a stage counted the same microbatches: {twice[:3]}"


def rounds_increase(process: SimProcess) -> None:
    """Within one process and stage, round numbers increase strictly, except that loaded weights may be older."""
    if len(process.models) == 1:
        came = [event.at_s for event in process.trace.of("resumed")]
        for begin, end in pairwise([0.0, *came, inf]):
            done = process.trace.of("outer_round")
            numbers = [int(event.number("round")) for event in done if begin <= event.at_s < end]
            assert numbers == sorted(set(numbers)), f"{process.peer}: its rounds do not increase: {numbers}"


def progress_counts_once(process: SimProcess) -> None:
    """What inner steps add to θ, even while a round is open, is in the Δ of exactly one merge, and in θ until then."""
    for stage in recording_stages(process):
        assert not stage.miscounted, f"{process.peer}, {stage.miscounted[0]}"


def weights_are_what_was_frozen(process: SimProcess) -> None:
    """The weights that a stage loads or merges are bit for bit those that a replica of it froze at that round."""
    for stage in recording_stages(process):
        for one in stage.loaded:
            assert one.theta == one.frozen_theta, f"{process.peer} loaded what {one.origin} never froze: {one}"
        for merge in stage.merged:
            assert merge.frozen, f"{process.peer} merged what {merge.partner} never froze: {merge}"


def weights_survive(swarm: FaultySwarm) -> None:
    """A stage continues from its oldest available weights, those that have been trained most, at most one outer round
    back, and never from fresh ones."""
    for one in swarm.resumptions:
        was = one.available
        rounds, age = [*was.living, *was.guarded, *was.own], one.round - one.fresh_round
        if one.source == "fresh":
            assert not rounds, f"{one.peer} began with fresh weights, although there were others: {one}"
        elif was.replaced is not None:
            # It takes over what most of the others agree on, even if a replica that lost touch with them is further. At
            # the end its own round may be the last one, which the others have yet to reach.
            mine = min(was.replaced, max(was.training, default=was.replaced))
            assert age >= mine - COPY_ROUNDS, f"{one.peer} gave up newer weights: {one}"
        elif was.living:
            # A replica that is far ahead of the usual round may be lying, so it is asked last.
            usual = min(map(median_low, (was.living, was.training)))
            newest = max((round for round in was.living if round <= usual + BOLD_ROUNDS), default=usual)
            assert age >= newest - COPY_ROUNDS, f"{one.peer} resumed far behind the living replicas: {one}"
        elif rounds:
            # A swarm that was stopped as a whole continues from the newest round that all stages have.
            limit = min([*was.others, max(rounds)])
            newest = max([round for round in rounds if round <= limit], default=limit)
            # A peer that has finished lends copies as well.
            oldest = newest - (COPY_ROUNDS if one.source == "peer" else 1)
            assert age >= oldest, f"{one.peer} lost more than one outer round: {one}"


def every_byte_is_accounted_for(swarm: FaultySwarm) -> None:
    """Every byte that left a node was received, was lost, or is in flight."""
    for kind, total in totals(swarm.network.traffic.byte_counts()).items():
        ended = total.received + total.lost + total.in_flight
        assert total.sent == ended, f"{total.sent - ended} bytes of {kind}s are unaccounted for: {total}"


def newcomers_are_no_partners(swarm: FaultySwarm, outcome: Outcome) -> None:
    """No node merges the weights of a node that copied them from a peer less than one outer interval earlier.

    A node that has not been able to read the newcomer's advert since then is exempt: it cannot know.
    """
    for process in outcome.processes:
        for merge in (merge for stage in recording_stages(process) for merge in stage.merged):
            candidates = [one for one in outcome.processes if one.peer == merge.partner]
            partner = next((one for one in candidates if (one.ended_at_s or inf) >= merge.at_s), candidates[-1])
            came = [event for event in partner.trace.of("resumed") if event.at_s < merge.at_s]
            if not came or came[-1].get("source") != "peer" or merge.round >= came[-1].number("round") + 2:
                continue
            faults = [fault for fault in swarm.begun if fault.ends_s <= merge.at_s]
            cut_off = [fault.ends_s for fault in faults if fault.separates(process.peer, merge.partner)]
            known_s = max([came[-1].at_s, *cut_off]) + swarm.listed_s
            assert merge.frozen_at_s < known_s, f"{process.peer} merged {merge} of a newcomer: {came[-1]}"


# --- time -------------------------------------------------------------------------------------------------------------

Spans = list[tuple[float, float]]


def nobody_waits_for_ever(swarm: FaultySwarm, outcome: Outcome) -> None:
    """While every stage has a reachable replica in training, stage 0 takes inner steps."""
    for peer, gap_s, at_s in gaps(swarm, outcome):
        assert gap_s <= swarm.gap_s, f"{peer} took no inner step for {gap_s:.1f} s up to {at_s:.1f} s"


def gaps(swarm: FaultySwarm, outcome: Outcome) -> Iterator[tuple[PeerId, float, float]]:
    """(peer, seconds without an inner step, end of that time) for all gaps of stage 0 while no stage was disturbed."""
    sound = [
        (process, period.stage, undisturbed(swarm, process, period.training))
        for process in outcome.processes
        for period in process.periods(outcome.ended_at_s)
    ]
    stages = range(swarm.plan.manifest.stages)
    served = [union(spans for _, held, spans in sound if held == stage) for stage in stages]
    healthy = reduce(common, served)
    for process, held, spans in sound:
        if held != 0:
            continue
        steps = [event.at_s for event in process.trace.of("inner_step")]
        for begin, end in common(spans, healthy):
            marks = [begin, *(at_s for at_s in steps if begin < at_s < end), end]
            for one, other in pairwise(marks):
                yield process.peer, other - one, other


def undisturbed(swarm: FaultySwarm, process: SimProcess, spans: Spans) -> Spans:
    """The given spans without the times in which a fault affected the process."""
    for fault in swarm.begun:
        if process.peer in fault.peers or fault.kind == "split":
            spans = common(spans, [(0.0, fault.at_s), (fault.ends_s, swarm.limit_s)])
    return spans


def common(ones: Spans, others: Spans) -> Spans:
    """The intersection."""
    both = [(max(a, c), min(b, d)) for a, b in ones for c, d in others]
    return sorted((begin, end) for begin, end in both if begin < end)


def union(many: Iterable[Spans]) -> Spans:
    """The union."""
    joined: Spans = []
    for begin, end in sorted(span for spans in many for span in spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
