"""Problems of nodes and stages that can be seen without following any wait. Pure.

Each rule yields the problems of one kind. The rules in NODE_RULES look at one node that answers; those in SWARM_RULES
compare nodes, or report missing ones. Thresholds are at the top, with their reasons.
"""

from collections.abc import Iterator, Mapping

from noloco_p2p.core.members import IN_ROUNDS, PRESENT
from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.status import AnyReplica, Resource, Status, Wait
from noloco_p2p.humanize import compact, elapsed, plural, short_id, size_text
from noloco_p2p.observe.diagnosis.findings import Cause, Finding, Report, Severity, at_node, line, named
from noloco_p2p.observe.diagnosis.swarm_view import SwarmView, median, most_common

SLOW_FACTOR = 2.0
"""A node is slow if it is this many times slower than the others of its stage."""
SLOW_FACTOR_ACROSS = 3.0
"""The same in comparison with other stages, whose work is not quite the same."""
CLOCK_OFF_S = 5.0
"""A clock that is off by more than this is wrong. Part of the limit covers the time that asking takes; with NTP, clocks
stay far below it."""
CLOCK_BAD_S = 15.0
"""Half the default lifetime of an advert: beyond this, adverts look expired, and nodes may be unable to join."""
LOOP_SILENT_S = 5.0
"""An event loop that has not given a sign of life for this long is stuck; it normally gives many per second."""
STUCK_STEPS, STUCK_FLOOR_S = 10.0, 10.0
"""A device operation that takes longer than this many inner steps, and than this many seconds, is not expected to
finish."""
DISK_LOW_BYTES, DISK_FULL_BYTES = 1 << 30, 128 << 20
"""Free space below which there is a warning, and below which it is an error. The size of a checkpoint is not known
here; a model of a few million parameters needs 100 MB for one."""
ADVERT_OLD_S = 15.0
"""An advert older than this was not renewed on time; by default they are renewed every ten seconds."""
NONFINITE_SHARE, MIN_NONFINITE = 0.1, 3
"""Warn about non-finite microbatches if they are at least this share of all and at least this many."""
DISTRUSTED_SHARE, MIN_DISTRUSTED = 0.01, 3
"""The same for refused vectors, as a share of the outer rounds: in honest runs none is refused (METHOD.md)."""
SET_CLOCK = "set the clock of that machine (for example with NTP); it must agree within half of directory.ttl_s"
TROUBLES_LIMIT = 8
"""Upper limit on the troubles reported per node."""
_SERIOUS = ("clock", "disk", "libp2p")
"""Troubles that end the run or the node if nobody intervenes."""


def symptoms(swarm: SwarmView) -> list[Cause]:
    """The findings of all rules, those about single nodes first."""
    found = [
        each for rule in NODE_RULES for peer, status in swarm.statuses.items() for each in rule(swarm, peer, status)
    ]
    return found + [each for rule in SWARM_RULES for each in rule(swarm)]


def loop_is_silent(status: Status) -> bool:
    """Whether the node's event loop is stuck, so that the waits it reports cannot be relied on."""
    return status.figures.loop_silent_s > LOOP_SILENT_S


def stuck(status: Status) -> Wait | None:
    """The longest wait of a node for its own device that has taken too long to be expected to end; None: none has."""
    step_s = status.step_took_s or 0.0
    longest_s = max(STUCK_STEPS * step_s, STUCK_FLOOR_S) if step_s > 0 else float("inf")
    for wait in status.waits:
        late = wait.since_s > longest_s or (wait.deadline_s is not None and wait.since_s > wait.deadline_s > 0)
        if late and wait.whom == Resource.DEVICE and not wait.idle:
            return wait
    return None


# --- one node ---------------------------------------------------------------------------------------------------------


def _silent_loop(swarm: SwarmView, peer: PeerId, status: Status) -> Iterator[Cause]:
    if loop_is_silent(status):
        silent = elapsed(status.figures.loop_silent_s)
        advice = "something blocks its process (a debugger, a hung disk, no memory): check there, then restart it"
        yield at_node("error", "loop", peer, f"{swarm.name(peer)}: its event loop has been stuck for {silent}", advice)


def _stuck_device(swarm: SwarmView, peer: PeerId, status: Status) -> Iterator[Cause]:
    wait = stuck(status)
    if wait is not None:
        waited = elapsed(wait.since_s)
        sentence = f"{swarm.name(peer)}: its device has been stuck in {wait.what} for {waited}"
        advice = "check the device there (nvidia-smi, other programs on it, memory); restart the node"
        yield at_node("error", "device", peer, sentence, advice)


def _troubles(swarm: SwarmView, peer: PeerId, status: Status) -> Iterator[Cause]:
    for trouble in status.troubles[:TROUBLES_LIMIT]:
        sentence = f"{swarm.name(peer)}: {trouble.message} (for {elapsed(trouble.since_s)})"
        severity: Severity = "error" if trouble.name in _SERIOUS else "warning"
        yield at_node(severity, line(trouble.name), peer, sentence, "the node continues; its log has details")


def _disk(swarm: SwarmView, peer: PeerId, status: Status) -> Iterator[Cause]:
    free = status.figures.disk_free_bytes
    if free is not None and free < DISK_LOW_BYTES and not any(trouble.name == "disk" for trouble in status.troubles):
        sentence = f"{swarm.name(peer)}: {size_text(free)} left on the disk of its directory"
        advice = "free some space there, or lower checkpoint.keep: checkpoints fail on a full disk"
        yield at_node("error" if free < DISK_FULL_BYTES else "warning", "disk", peer, sentence, advice)


def _non_finite(swarm: SwarmView, peer: PeerId, status: Status) -> Iterator[Cause]:
    ended = status.figures.microbatches
    bad, total = ended.get("nonfinite", 0), sum(ended.values())
    if bad >= MIN_NONFINITE and bad >= NONFINITE_SHARE * total:
        sentence = f"{swarm.name(peer)}: {compact(bad)} of {compact(total)} microbatches were not finite"
        lower = "the next run needs a lower inner.peak_learning_rate"
        advice = f"if only this node is affected, check its device; otherwise {lower}"
        yield at_node("warning", "nonfinite", peer, sentence, advice)


def _refused(swarm: SwarmView, peer: PeerId, status: Status) -> Iterator[Cause]:
    refused, rounds = status.figures.distrusted.get("refused", 0), sum(status.figures.rounds.values())
    if refused >= MIN_DISTRUSTED and refused >= DISTRUSTED_SHARE * rounds:
        sentence = f"{swarm.name(peer)}: refused {compact(refused)} vectors of peers in {compact(rounds)} outer rounds"
        advice = "its events.jsonl names the peers; if other nodes' name them too, expel them (noloco revoke PEER)"
        yield at_node("warning", "distrusted", peer, sentence, advice)


def _paused_or_leaving(swarm: SwarmView, peer: PeerId, status: Status) -> Iterator[Cause]:
    if status.closed_until is not None:
        sentence = f"{swarm.name(peer)} is paused until {status.closed_until} (its local time)"
        yield at_node("ok", "paused", peer, sentence, "nothing to do: its owner's hours (limits.hours) begin then")
    elif status.advert.state == "paused":
        yield at_node("ok", "paused", peer, f"{swarm.name(peer)} is paused", "noloco resume --dir DIR on its machine")
    elif status.advert.state == "draining":
        yield at_node("ok", "draining", peer, f"{swarm.name(peer)} is finishing its work to leave", "nothing to do")


NODE_RULES = (_silent_loop, _stuck_device, _troubles, _disk, _non_finite, _refused, _paused_or_leaving)


# --- nodes compared ---------------------------------------------------------------------------------------------------


def _clocks(swarm: SwarmView) -> Iterator[Cause]:
    known = {r.peer: r.clock_ahead_s for r in swarm.reports if r.clock_ahead_s is not None}
    # No place is given, because nothing waits for a clock; waits of or for that node are diagnosed separately.
    yield from (Cause(finding, None) for finding in wrong_clocks(known, CLOCK_OFF_S, CLOCK_BAD_S))


def wrong_clocks(ahead: Mapping[PeerId, float], close_s: float, bad_s: float) -> list[Finding]:
    """Findings about wrong clocks, given how far each node's clock is ahead of the observer's, seconds.

    Clocks at most `close_s` apart agree, and the time on which most clocks agree counts as right; if no two agree, a
    node's. A clock that is off by more than `bad_s` is an error.
    """
    votes = [*(ahead[peer] for peer in sorted(ahead)), 0.0]
    right = max(votes, key=lambda one: sum(abs(one - other) <= close_s for other in votes))
    agreeing = [peer for peer in sorted(ahead) if abs(ahead[peer] - right) <= close_s]
    found = []
    for peer in (None, *sorted(ahead)):
        off_s = (0.0 if peer is None else ahead[peer]) - right
        if abs(off_s) <= close_s:
            continue
        culprit, off = peer, f"{abs(off_s):,.1f} s {'ahead of' if off_s > 0 else 'behind'}"
        if peer is not None:
            sentence = f"the clock of node {short_id(peer)} is {off} the others'"
        elif len(agreeing) > 1:
            sentence = f"this machine's clock is {off} those of {len(agreeing)} nodes"
        else:  # with two clocks, nobody can tell which one is wrong
            culprit = agreeing[0]
            sentence = f"the clocks of node {short_id(culprit)} and of this machine are {abs(off_s):,.1f} s apart"
        found.append(Finding("error" if abs(off_s) > bad_s else "warning", "clock", culprit, sentence, SET_CLOCK))
    return found


def _unreachable(swarm: SwarmView) -> Iterator[Cause]:
    advice = "if its process is gone, restart it; otherwise its listen.metrics_port must be open to this machine"
    for report in swarm.reports:
        advert = report.advert
        if report.status is not None or advert.state in ("draining", "left"):
            continue
        address = advert.metrics.removesuffix("/metrics")
        at = f" at {address}" if address not in report.failure else ""
        age = f"it announced itself {elapsed(report.age_s)} ago"
        sentence = f"{swarm.name(report.peer)} does not return its status{at}: {report.failure}; {age}"
        yield at_node("warning" if swarm.statuses else "error", "unreachable", report.peer, sentence, advice)


def _versions(swarm: SwarmView) -> Iterator[Cause]:
    versions = {peer: status.advert.version for peer, status in swarm.statuses.items()}
    usual = most_common(versions.values()) or ""
    for version in sorted({*versions.values()} - {usual}):
        peers = [peer for peer in versions if versions[peer] == version]
        theirs = line(usual)[:40] or "an unknown one"
        sentence = f"{named(peers)}: version {line(version)[:40] or 'unknown'}, the others have {theirs}"
        yield Cause(Finding("warning", "version", peers[0], sentence, "install the same version everywhere"), None)


def _slow(swarm: SwarmView) -> Iterator[Cause]:
    adverts = [status.advert for status in swarm.statuses.values() if status.advert.state == "training"]
    adverts = [advert for advert in adverts if advert.microbatches_per_s > 0]
    advice = "check what else uses its device, or give it a faster one; the run may be faster without it"
    for mine in adverts:
        mates = [o.microbatches_per_s for o in adverts if o.stage == mine.stage and o.peer_id != mine.peer_id]
        usual = median(mates or [other.microbatches_per_s for other in adverts if other.stage != mine.stage])
        factor = 0.0 if usual is None else usual / mine.microbatches_per_s
        if factor >= (SLOW_FACTOR if mates else SLOW_FACTOR_ACROSS):
            than = "its stage's median" if mates else "the other stages' median"
            slower = f"{min(factor, 9999.0):.1f}× slower than {than}"
            sentence = f"node {short_id(mine.peer_id)} is {slower} and holds back stage {mine.stage}"
            yield at_node("warning", "slow-node", mine.peer_id, sentence, advice)


# --- where nodes are missing ------------------------------------------------------------------------------------------


def _stages(swarm: SwarmView) -> Iterator[Cause]:
    """Stages with one replica or none."""
    if swarm.ended or not swarm.begun or not swarm.statuses:
        return
    thin: list[int] = []
    for stage in range(swarm.stages):
        replicas = swarm.of_stage(stage, IN_ROUNDS)
        answering = any(report.status is not None for report in replicas)
        # A replica that has just announced itself may be training, with only its status port closed to the observer.
        there = sum(report.status is not None or report.age_s <= ADVERT_OLD_S for report in replicas)
        if not answering and (swarm.deserted_s(stage) > 0 or not there):
            yield _empty_stage(swarm, stage, replicas)
        elif there == 1:
            thin.append(stage)
    if thin:
        which = f"stages {', '.join(map(str, thin))}" if len(thin) <= 12 else plural(len(thin), "stage")
        which = f"{which} have one replica each" if len(thin) > 1 else f"stage {thin[0]} has one replica"
        advice = "start one more node: it takes the stage that needs it most"
        yield at_node("warning", "stage-thin", None, f"{which}: the run stops without it", advice)


def _empty_stage(swarm: SwarmView, stage: int, silent: list[Report]) -> Cause:
    """The finding about a stage without a working replica.

    `silent`: its replicas that do not answer. If there are none, those that are paused or starting are named instead.
    """
    empty_s = swarm.deserted_s(stage)
    lasted = f"had no replica for {elapsed(empty_s)}" if empty_s > 0 else "no replica"
    why, advice = "", f"start a node (it takes the stage that lacks one): noloco-node --join ADDR --stage {stage}"
    paused, starting = ([report.peer for report in swarm.of_stage(stage, {state})] for state in ("paused", "starting"))
    blamed = [report.peer for report in silent] or paused
    if silent:
        why = f": {named(blamed)} {'does' if len(silent) == 1 else 'do'} not answer"
        advice = f"restart it, or start another node in its place; {silent[0].failure}"
    elif paused or starting:
        state = "paused" if paused else "starting"
        why = f": {named(paused or starting)} {'is' if len(paused or starting) == 1 else 'are'} {state}"
        begins = [report.status.closed_until for report in swarm.of_stage(stage, {"paused"}) if report.status]
        if times := sorted({time for time in begins if time is not None}):
            advice = f"wait until {' or '.join(times)}, when its owner's hours begin, or start another node"
        else:
            advice = "noloco resume --dir DIR on its machine, or start another node" if paused else "wait for it"
    peer = blamed[0] if len(blamed) == 1 else None
    return Cause(Finding("error", "stage-empty", peer, f"stage {stage} has {lasted}{why}", advice), AnyReplica(stage))


def _start(swarm: SwarmView) -> Iterator[Cause]:
    """If the run has not begun: the replicas that are still missing."""
    if swarm.begun:
        return
    needed = most_common(status.start_replicas for status in swarm.statuses.values()) or 0
    lacks = {stage: needed - len(swarm.of_stage(stage, PRESENT)) for stage in range(swarm.stages)}
    words = [f"{plural(lack, 'more replica')} of stage {stage}" for stage, lack in lacks.items() if lack > 0]
    # A node without a stage will take one that lacks a replica.
    undecided = sum(advert.stage < 0 for advert in swarm.adverts.values())
    if sum(lack for lack in lacks.values() if lack > 0) > undecided:
        some = ", ".join(words[:3]) + (f" and of {plural(len(words) - 3, 'other stage')}" if len(words) > 3 else "")
        waits = (wait for status in swarm.statuses.values() for wait in status.waits)
        waited_s = max((wait.since_s for wait in waits if wait.whom == Resource.SWARM), default=0.0)
        lasted = f" (for {elapsed(waited_s)})" if waited_s > 0 else ""
        advice = "start more nodes (noloco-node --join ADDR); the run then begins automatically"
        yield at_node("warning", "start", None, f"waiting for {some}{lasted}: the run has not begun", advice)


SWARM_RULES = (_clocks, _unreachable, _versions, _slow, _stages, _start)
