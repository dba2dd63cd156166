"""Diagnoses what is wrong with a swarm, causes first, from the statuses of all its nodes. Pure.

findings.py            the values
swarm_view.py          all nodes of the run, and what the other modules need to know about them
symptoms.py            what a node shows by itself or compared with the others; stages without nodes
causes.py              follows the waits from node to node; links that carry nothing
throughput_advice.py   which settings of a run would use the devices better
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from noloco_p2p.core import health
from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.status import AnyReplica
from noloco_p2p.humanize import compact, count, elapsed, plural, short_id
from noloco_p2p.observe.diagnosis.causes import WaitPaths, broken_links
from noloco_p2p.observe.diagnosis.findings import SEVERITIES, Cause, Finding, Place, Report, at_node, line
from noloco_p2p.observe.diagnosis.swarm_view import SwarmView
from noloco_p2p.observe.diagnosis.symptoms import symptoms
from noloco_p2p.observe.diagnosis.throughput_advice import line_advice

ORDER = (
    *("loop", "device", "stage-empty", "libp2p", "disk", "port", "half-open-link", "unreachable", "slow-node"),
    *("nonfinite", "stall", "overdue", "clock", "start", "stage-thin", "version"),
)
"""For equal severity, likely causes come before likely consequences. Unknown names come last."""
HOLDERS = frozenset({"loop", "device", "stage-empty", "port", "half-open-link", "unreachable", "stall", "overdue"})
"""Findings whose sentence says how many nodes wait for them."""
QUIET = frozenset({"stage-thin", "version", "unreachable"})
"""Warnings that are not used as the sentence for the whole swarm, because training continues."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that an observer should know about a swarm."""

    findings: tuple[Finding, ...]
    """Everything that is wrong, the worst first, and causes before consequences; empty if nothing is.

    A consequence of another finding is not listed separately; the sentence of its cause counts the nodes that wait.
    Findings of severity `ok` report what is unusual but intended, and what could be faster.
    """
    progress: str
    """How far the swarm has come: `training: step 1234 of 5000 (25 %), 6 nodes, 12.3k tokens/s, loss 2.31`."""

    @property
    def sentence(self) -> str:
        """One line for the whole swarm: the worst cause, or its progress if nothing is seriously wrong."""
        bad = (f for f in self.findings if f.severity == "error" or (f.severity == "warning" and f.name not in QUIET))
        return next((finding.sentence for finding in bad), self.progress)


def diagnose(reports: Sequence[Report]) -> Diagnosis:
    """Diagnose the swarm that these reports describe. Never raises, whatever strangers have put into them."""
    swarm = SwarmView(reports)
    return Diagnosis(tuple(_findings(swarm)), _progress(swarm))


def _progress(swarm: SwarmView) -> str:
    if not swarm.reports:
        return "no node was found"
    nodes = plural(len(swarm.reports), "node")
    if not swarm.statuses:
        return f"no status of {nodes}"
    if not swarm.begun:
        return f"starting: {nodes}"
    share = f" ({100 * min(1.0, swarm.step / swarm.steps):.0f} %)" if swarm.steps > 0 else ""
    words = [f"step {int(swarm.step):,} of {count(swarm.steps)}{share}", nodes]
    if not swarm.ended:
        words.append(f"{compact(swarm.tokens_per_s)} tokens/s")
    if (loss := swarm.mean("loss")) is not None:
        words.append(f"loss {min(loss, 9999.0):.2f}")
    # A node that syncs copies the state that it needs to train.
    at_work = any(status.advert.state in ("training", "syncing") for status in swarm.statuses.values())
    state = "finished" if swarm.ended else "training" if at_work else "not training"
    return f"{state}: {', '.join(words)}"


# --- from symptoms to causes ------------------------------------------------------------------------------------------


def _findings(swarm: SwarmView) -> list[Finding]:
    """All findings in order."""
    shown = symptoms(swarm)
    empty = {each.at for each in shown if isinstance(each.at, AnyReplica)}
    paths = {peer: WaitPaths(swarm, empty).follow(peer) for peer in swarm.statuses}
    ill = {each.at for each in shown if each.finding.name in ("loop", "device", "unreachable")}
    shown += broken_links(swarm, ill, {link: wait for each in paths.values() for link, wait in each.links.items()})
    shown += _gone(paths)
    shown = _without_consequences(swarm, shown)
    shown += _unexplained(swarm, shown, paths)
    if not any(each.finding.severity == "error" for each in shown):
        shown += line_advice(swarm)
    return sorted((_with_held(each, paths) for each in shown), key=_rank)


def _gone(paths: Mapping[PeerId, WaitPaths]) -> Iterator[Cause]:
    """Nodes that others wait for, but that are no longer announced."""
    gone = {missing: by for each in paths.values() for missing, by in each.gone.items()}
    for missing in sorted(gone):
        node, by = short_id(missing), short_id(gone[missing])
        text = f"node {node} is no longer in the directory, but node {by} waits for it"
        yield at_node("warning", "unreachable", missing, text, "if this persists, restart that node")


def _without_consequences(swarm: SwarmView, shown: Sequence[Cause]) -> list[Cause]:
    """The causes, without those that another finding about the same node or its stage explains."""

    def places(*names: str) -> set[Place | None]:
        return {each.at for each in shown if each.finding.name in names}

    empty = places("stage-empty")
    explained: dict[str, Collection[Place | None]] = {
        "unreachable": {peer for peer, advert in swarm.adverts.items() if AnyReplica(advert.stage) in empty},
        "device": places("loop"),
        "slow-node": places("loop", "device"),
    }
    return [each for each in shown if each.at not in explained.get(each.finding.name, ())]


def _unexplained(swarm: SwarmView, shown: Sequence[Cause], paths: Mapping[PeerId, WaitPaths]) -> list[Cause]:
    """Nodes that make no progress, or whose waits exceed their deadlines, without a known cause."""
    known = {each.at for each in shown if each.finding.severity != "ok"}
    found: dict[PeerId, Cause] = {}
    for peer, status in swarm.statuses.items():
        late_s, overdue = health.lateness_s(status), next(filter(health.overdue, status.waits), None)
        if (late_s is None and overdue is None) or peer in known or paths[peer].ends & known:
            continue
        # Blame the oldest of the waits at which the paths end, because the others wait for it; without one, blame the
        # node itself.
        last = max(paths[peer].last, key=lambda end: end[1].since_s, default=None)
        at, wait = (peer, overdue or health.longest_wait(status)) if last is None else last
        if at in found and (late_s is None or found[at].finding.name == "stall"):
            continue
        waits = f"{swarm.name(at)} waits for nothing"
        if wait is not None:
            whom = f"node {short_id(wait.whom)}" if isinstance(wait.whom, str) else wait.whom
            waits = f"{swarm.name(at)} has waited {elapsed(wait.since_s)} for {wait.what} from {whom}"
        advice = "check the log of that node"
        if late_s is not None:
            advice += "; restarting it costs one outer round"
            found[at] = at_node("error", "stall", at, f"no inner step for {elapsed(late_s)}: {waits}", advice)
        else:
            found[at] = at_node("warning", "overdue", at, f"{waits}, longer than it should take", advice)
    return [found[at] for at in sorted(found)]


def _with_held(each: Cause, paths: Mapping[PeerId, WaitPaths]) -> Finding:
    """The finding, with the number of nodes that wait for it added to its sentence; its texts are single lines."""
    found, text, severity = each.finding, each.finding.sentence, each.finding.severity
    held = sum(each.at in path.ends for path in paths.values())
    if held and found.name in HOLDERS:
        text = f"{text}; that holds back {plural(held, 'node')}"
        severity = "error" if found.name == "unreachable" else severity
    return replace(found, severity=severity, sentence=line(text), advice=line(found.advice))


def _rank(found: Finding) -> tuple[int, int, str, str]:
    place = ORDER.index(found.name) if found.name in ORDER else len(ORDER)
    return -SEVERITIES.index(found.severity), place, found.peer or "", found.sentence
