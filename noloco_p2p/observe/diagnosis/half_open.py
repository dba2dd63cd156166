"""Links between two nodes that carry nothing although both nodes answer the observer. Pure.

A call that fails sets the callee aside at its caller, for twice as long each time. So a node that is well and yet set
aside, again and again, by one caller has a link that is broken; set aside by all, a port that is closed.
"""

from collections.abc import Iterator, Mapping

from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.status import Status, Wait
from noloco_p2p.humanize import elapsed, finite, short_id
from noloco_p2p.observe.diagnosis.findings import Finding, Severity, line, named
from noloco_p2p.observe.diagnosis.swarm_view import Swarm
from noloco_p2p.observe.diagnosis.symptoms import CallLink, Cause, Place, cause, who

ASIDE_S = 1.0
"""Set aside for longer than this: a peer that failed at least twice in a row, with no answer since."""
_WHY = "listen.grpc_port there must be open to all nodes: look at firewalls and NAT, and at listen.announce_host"


def broken_links(swarm: Swarm, ill: frozenset[Place | None], silent: Mapping[CallLink, Wait]) -> Iterator[Cause]:
    """From whom is set aside by whom, and from `silent`: the waits of calls that have not come, by their links.

    Nodes that are `ill` are passed over: their callers have their reason.
    """
    calls: dict[PeerId, dict[PeerId, Wait | None]] = {}
    callers: dict[PeerId, int] = {}
    for peer, status in swarm.statuses:
        for callee, aside in _called_by(swarm, status):
            callers[callee] = callers.get(callee, 0) + 1
            if aside:
                calls.setdefault(callee, {})[peer] = None
    for link in sorted(silent):
        calls.setdefault(link.callee, {})[link.caller] = silent[link]
    for callee in sorted(calls.keys() - ill):
        failing = calls[callee]
        if len(failing) > 1 and len(failing) >= callers.get(callee, 0):
            told = f"{_where(swarm, callee)} cannot be reached by {named(sorted(failing))}, although its status can"
            yield cause("error", "port", callee, told, _WHY)
        else:
            for caller in sorted(failing.keys() - ill):
                yield _half_open(swarm, caller, callee, failing[caller])


def _called_by(swarm: Swarm, status: Status) -> Iterator[tuple[PeerId, bool]]:
    """The nodes in training that one in training calls for its microbatches, and whether it has set them aside."""
    me = status.advert
    if me.state != "training":
        return
    for seen in status.seen:
        report = swarm.by_peer.get(seen.advert.peer_id)
        if report is None or report.status is None:
            continue
        other = report.status.advert
        if other.state == "training" and other.stage == me.stage + 1:
            deserted = other.stage in status.deserted and finite(status.deserted[other.stage]) > ASIDE_S
            yield report.peer, finite(seen.aside_s) > ASIDE_S or deserted


def _half_open(swarm: Swarm, caller: PeerId, callee: PeerId, wait: Wait | None) -> Cause:
    mine = swarm.by_peer[caller]
    told = f"{who(mine)} cannot reach {_where(swarm, callee)}, although both answer: half-open link"
    if wait is not None:
        told += f" (a call is under way since {elapsed(wait.since_s)} and has not come)"
    alone = mine.status is not None and bool(mine.status.deserted)
    advice = f"something between {short_id(caller)} and {short_id(callee)} drops what they send; {_WHY}"
    severity: Severity = "error" if alone or wait is not None else "warning"
    return Cause(Finding(severity, "half-open-link", callee, told, advice), CallLink(caller, callee))


def _where(swarm: Swarm, peer: PeerId) -> str:
    """`node 12D3…Qx7Qf of stage 1 at 192.0.2.7:4100`."""
    advert = swarm.advert(peer)
    at = f" at {line(advert.addresses[0])}" if advert is not None and advert.addresses else ""
    return who(swarm.by_peer[peer]) + at
