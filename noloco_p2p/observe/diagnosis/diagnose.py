"""What is wrong with a swarm, cause first, from what all its nodes say of themselves. Pure.

findings.py     the values, and the words for people
swarm_view.py   all nodes, put in order
symptoms.py     what one node or one stage shows by itself
causes.py       follows the waits from node to node
links.py        links that carry nothing
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from noloco_p2p.core import health
from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.status import AnyReplica, WaitTarget
from noloco_p2p.humanize import compact, elapsed, finite, plural, short_id
from noloco_p2p.observe.diagnosis.causes import Follower, Paths
from noloco_p2p.observe.diagnosis.coverage import vacancies
from noloco_p2p.observe.diagnosis.findings import SEVERITIES, Finding, Report, Severity, line
from noloco_p2p.observe.diagnosis.half_open import broken_links
from noloco_p2p.observe.diagnosis.swarm_view import Swarm
from noloco_p2p.observe.diagnosis.symptoms import Cause, Place, cause, symptoms, who

__all__ = ["Finding", "Report", "Severity", "findings", "progress", "sentence"]

ORDER = (
    "loop",
    "device",
    "stage-empty",
    "libp2p",
    "disk",
    "port",
    "half-open-link",
    "unreachable",
    "slow-node",
    "nonfinite",
    "stall",
    "overdue",
    "clock",
    "start",
    "run",
    "stage-thin",
    "version",
)
"""Of equal severity, what is rather a cause comes before what is rather a consequence; unknown names come last."""
HOLDERS = frozenset({"loop", "device", "stage-empty", "port", "half-open-link", "unreachable", "stall", "overdue"})
"""Findings whose sentence says how many nodes wait for them."""
QUIET = frozenset({"stage-thin", "version", "unreachable"})
"""Warnings that the one sentence for the swarm passes over: training goes on with them."""


def findings(reports: Sequence[Report]) -> list[Finding]:
    """Everything that is wrong, the worst and most causal first; empty: nothing. Never raises.

    What is only a consequence of another finding is not told by itself, but counted there. Findings of severity `ok`
    say what is unusual and intended.
    """
    return [each.finding for each in _causes(Swarm(reports))]


def sentence(reports: Sequence[Report]) -> str:
    """One line for the whole swarm: the worst cause, or how far it has come."""
    return headline(reports, findings(reports))


def headline(reports: Sequence[Report], found: Sequence[Finding]) -> str:
    """The same of findings that are known already."""
    worst = next((f for f in found if f.severity == "error" or (f.severity == "warning" and f.name not in QUIET)), None)
    return progress(reports) if worst is None else worst.sentence


def progress(reports: Sequence[Report]) -> str:
    """How far the swarm has come: `training: step 1234 of 5000 (25 %), 6 nodes, 12.3k tokens/s, loss 2.31`."""
    swarm = Swarm(reports)
    if not swarm.reports:
        return "no node was found"
    nodes = plural(len(swarm.reports), "node")
    if not swarm.statuses:
        return f"no status of {nodes}"
    if not swarm.begun:
        return f"starting: {nodes}"
    steps, step = finite(swarm.steps), swarm.step
    share = f" ({100 * min(1.0, step / steps):.0f} %)" if steps > 0 else ""
    told = [f"step {min(step, 1e15):.0f} of {min(steps, 1e15):.0f}{share}", nodes]
    first = [status for _, status in swarm.statuses if status.advert.stage == 0]
    rate = sum(finite(status.figures.tokens_per_s) for status in first if status.advert.state == "training")
    losses = [finite(status.figures.loss) for status in first if status.figures.loss is not None]
    if not swarm.ended:
        told.append(f"{compact(rate)} tokens/s")
    if losses:
        told.append(f"loss {min(sum(losses) / len(losses), 9999.0):.2f}")
    state = "finished" if swarm.ended else "training" if swarm.training else "not training"
    return f"{state}: {', '.join(told)}"


# --- from symptoms to causes ------------------------------------------------------------------------------------------


def _causes(swarm: Swarm) -> list[Cause]:
    """All findings with their places, in order."""
    shown = [*symptoms(swarm), *vacancies(swarm)]
    empty = frozenset(each.at for each in shown if isinstance(each.at, AnyReplica))
    follower = Follower(swarm, empty)
    paths = {peer: follower.follow(peer) for peer, _ in swarm.statuses}
    ill = frozenset(each.at for each in shown if each.finding.name in ("loop", "device", "unreachable"))
    silent = {link: wait for each in paths.values() for link, wait in each.links.items()}
    shown += broken_links(swarm, ill, silent)
    shown += _gone(paths)
    shown = _without_consequences(shown, swarm)
    shown += _unexplained(swarm, shown, paths)
    told = [_with_held(each, paths) for each in shown]
    return sorted(told, key=_rank)


def _gone(paths: dict[PeerId, Paths]) -> Iterator[Cause]:
    """Nodes that somebody waits for and nobody announces any more."""
    gone = {missing: by for each in paths.values() for missing, by in each.gone.items()}
    for missing in sorted(gone):
        waiting = short_id(gone[missing])
        told = f"node {short_id(missing)} is not in the directory any more, and node {waiting} waits for it"
        yield cause("warning", "unreachable", missing, told, "if it does not end by itself, start that node again")


def _without_consequences(shown: Iterable[Cause], swarm: Swarm) -> list[Cause]:
    """Without what another finding about the same node explains."""
    shown = list(shown)
    by_name: dict[str, set[Place | None]] = {}
    for each in shown:
        by_name.setdefault(each.finding.name, set()).add(each.at)
    of_empty = {
        report.peer
        for report in swarm.reports
        if report.newest is not None and AnyReplica(report.newest.stage) in by_name.get("stage-empty", ())
    }
    explained: dict[str, Collection[Place | None]] = {
        "unreachable": of_empty,
        "device": by_name.get("loop", set()),
        "slow-node": by_name.get("loop", set()) | by_name.get("device", set()),
    }
    return [each for each in shown if each.at not in explained.get(each.finding.name, ())]


def _unexplained(swarm: Swarm, shown: Sequence[Cause], paths: dict[PeerId, Paths]) -> list[Cause]:
    """Nodes that stand still, or whose waits have outlived their deadlines, without any cause that was found."""
    known = {each.at for each in shown if each.finding.severity != "ok"}
    found: dict[PeerId, Cause] = {}
    for peer, status in swarm.statuses:
        late_s, overdue = health.lateness_s(status), next(filter(health.overdue, status.waits), None)
        if (late_s is None and overdue is None) or peer in known or paths[peer].ends & known:
            continue
        last = max(paths[peer].last, key=lambda end: finite(end[1].since_s), default=None)
        at, wait = (peer, overdue or health.longest_wait(status)) if last is None else last
        if at in known or at in found or wait is None:
            continue
        waits = f"waits for: {wait.what}, from {_whom(wait.whom)}, since {elapsed(wait.since_s)}"
        if late_s is not None:
            told = f"no inner step since {elapsed(late_s)}: {who(swarm.by_peer[at])} {waits}"
            found[at] = cause(
                "error", "stall", at, told, "look at the log of that node; restarting it costs one outer round"
            )
        else:
            told = f"{who(swarm.by_peer[at])} {waits}, longer than such a wait may take"
            found[at] = cause("warning", "overdue", at, told, "look at the log of that node")
    return [found[at] for at in sorted(found)]


def _whom(whom: WaitTarget) -> str:
    return f"node {short_id(whom)}" if isinstance(whom, str) else str(whom)


def _with_held(each: Cause, paths: dict[PeerId, Paths]) -> Cause:
    """How many nodes wait for it, in its sentence; everything in one line."""
    found, text = each.finding, each.finding.sentence
    held = sum(each.at in path.ends for peer, path in paths.items() if peer != each.at) if each.at else 0
    severity = found.severity
    if held and found.name in HOLDERS:
        text = f"{text}; that holds back {plural(held, 'node')}"
        severity = "error" if found.name == "unreachable" else severity
    return replace(each, finding=replace(found, severity=severity, sentence=line(text), advice=line(found.advice)))


def _rank(each: Cause) -> tuple[int, int, str, str]:
    found = each.finding
    place = ORDER.index(found.name) if found.name in ORDER else len(ORDER)
    return -SEVERITIES.index(found.severity), place, found.peer or "", found.sentence
