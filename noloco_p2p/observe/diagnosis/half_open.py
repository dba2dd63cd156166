"""Links between two nodes that carry nothing although both nodes answer the observer. Pure.

A call that fails sets the callee aside at its caller, for twice as long each time. So a node that is well and yet set
aside, again and again, by one caller has a link that is broken; set aside by all, a port that is closed.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.status import Status, Wait
from noloco_p2p.humanize import elapsed, finite, short_id
from noloco_p2p.observe.diagnosis.findings import CallLink, Cause, Finding, Place, Severity, at_node, line, named
from noloco_p2p.observe.diagnosis.swarm_view import SwarmView

ASIDE_S = 1.0
"""Set aside for longer than this: a peer that failed at least twice in a row, with no answer since."""
_ADVICE = "listen.grpc_port there must be open to all nodes: look at firewalls and NAT, and at listen.announce_host"


def broken_links(swarm: SwarmView, ill: Collection[Place | None], missing: Mapping[CallLink, Wait]) -> Iterator[Cause]:
    """What nodes that set others aside show, and `missing`: by their links, the waits of calls that have not arrived.

    Nodes that are `ill` are passed over: their callers have their reason.
    """
    failing: dict[PeerId, dict[PeerId, Wait | None]] = {}
    callers: Counter[PeerId] = Counter()
    for peer, status in swarm.statuses.items():
        for callee, aside in _callees(swarm, status):
            callers[callee] += 1
            if aside:
                failing.setdefault(callee, {})[peer] = None
    for link in sorted(missing):
        failing.setdefault(link.callee, {})[link.caller] = missing[link]
    for callee in sorted(failing.keys() - set(ill)):
        waits = failing[callee]
        if len(waits) > 1 and len(waits) >= callers[callee]:
            others = named(sorted(waits))
            sentence = f"{_where(swarm, callee)} cannot be reached by {others}, although its status can"
            yield at_node("error", "port", callee, sentence, _ADVICE)
        else:
            for caller in sorted(waits.keys() - set(ill)):
                yield _half_open(swarm, CallLink(caller, callee), waits[caller])


def _callees(swarm: SwarmView, status: Status) -> Iterator[tuple[PeerId, bool]]:
    """The nodes in training that one in training calls for its microbatches, and whether it has set them aside."""
    me = status.advert
    if me.state != "training":
        return
    for seen in status.seen:
        other = swarm.statuses.get(seen.advert.peer_id)
        if other is not None and other.advert.state == "training" and other.advert.stage == me.stage + 1:
            deserted = status.deserted.get(other.advert.stage, 0.0) > ASIDE_S
            yield seen.advert.peer_id, finite(seen.aside_s) > ASIDE_S or deserted


def _half_open(swarm: SwarmView, link: CallLink, wait: Wait | None) -> Cause:
    caller, callee = short_id(link.caller), short_id(link.callee)
    where = f"{swarm.name(link.caller)} cannot reach {_where(swarm, link.callee)}"
    sentence = f"{where}, although both answer: half-open link"
    if wait is not None:
        under_way = elapsed(wait.since_s)
        sentence += f" (a call has been under way for {under_way} and has not arrived)"
    alone = link.caller in swarm.statuses and bool(swarm.statuses[link.caller].deserted)
    severity: Severity = "error" if alone or wait is not None else "warning"
    advice = f"something between {caller} and {callee} drops what they send; {_ADVICE}"
    return Cause(Finding(severity, "half-open-link", link.callee, sentence, advice), link)


def _where(swarm: SwarmView, peer: PeerId) -> str:
    """`node 12D3…Qx7Qf of stage 1 at 192.0.2.7:4100`."""
    advert = swarm.adverts.get(peer)
    at = f" at {line(advert.addresses[0])}" if advert is not None and advert.addresses else ""
    return swarm.name(peer) + at
