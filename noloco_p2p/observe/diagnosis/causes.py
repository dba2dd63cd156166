"""Follows the waits of the nodes from one to the next, to whoever is the cause. Pure.

A waits for a gradient of B on behalf of a microbatch; B serves that microbatch and waits for its own device, or for C,
and so on. The place where such a path ends is blamed, and everybody on the way is counted as held back by it.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from noloco_p2p.core.members import IN_ROUNDS
from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.status import ACTIVATION, AnyReplica, ForMicrobatch, Purpose, Resource, Status, Wait
from noloco_p2p.humanize import elapsed, finite, short_id
from noloco_p2p.observe.diagnosis.findings import CallLink, Cause, Finding, Place, Severity, at_node, line, named
from noloco_p2p.observe.diagnosis.swarm_view import SwarmView
from noloco_p2p.observe.diagnosis.symptoms import loop_is_silent

PATIENCE_S = 2.0
"""Waits that are younger belong to training as it is."""
PATIENCE_STEPS = 2.0
"""A call that has not arrived in the time of this many inner steps is not on its way: slow nodes need their seconds."""
FIRST_PATIENCE_S = 15.0
"""The same before the first inner step ended, when nobody knows yet how long a call takes."""
WAITS_LIMIT = 64
"""Waits of one node that are followed, the longest ones."""

ASIDE_S = 1.0
"""Set aside for longer than this: a peer that failed at least twice in a row, with no answer since.

A call that fails sets the callee aside at its caller, for twice as long each time. So a node that is well and yet set
aside, again and again, by one caller has a link that is broken; set aside by all, a port that is closed.
"""
_ADVICE = "listen.grpc_port there must be open to all nodes: check firewalls, NAT and listen.announce_host"

Hop = tuple[PeerId, Purpose | None]
"""A node, and what it is waited for: only its waits on behalf of that are followed; None: all of them."""


@dataclass(slots=True)
class WaitPaths:
    """Where the waits of one node lead; noted as they are walked along."""

    swarm: SwarmView
    empty: Collection[Place | None]
    """The stages that nobody serves."""
    ends: set[Place] = field(default_factory=set)
    """Where a path ends, or what it goes by."""
    last: list[tuple[PeerId, Wait]] = field(default_factory=list)
    """The waits at the ends, which lead to no other node."""
    links: dict[CallLink, Wait] = field(default_factory=dict)
    """Links over which a call has not arrived, with the wait that shows it."""
    gone: dict[PeerId, PeerId] = field(default_factory=dict)
    """Nodes that are waited for and that nobody announces: by whom."""

    def follow(self, start: PeerId) -> Self:
        """Go wherever the long waits of a node lead."""
        status = self.swarm.statuses[start]
        waits = _holding_up(status)
        # A call that was tried again is young, what it is for is not: of each purpose the oldest wait decides.
        oldest: dict[Purpose | None, float] = {}
        for wait in waits:
            oldest[wait.why] = max(oldest.get(wait.why, 0.0), wait.since_s)
        hops = [*self.step(start, status, [wait for wait in waits if oldest[wait.why] > PATIENCE_S])]
        visited: set[Hop] = set()
        while hops:
            hop = hops.pop()
            # Waits may form a circle. One that comes back to the start says nothing new about it.
            if hop not in visited and hop[0] != start:
                visited.add(hop)
                hops += self.beyond(hop)
        return self

    def beyond(self, hop: Hop) -> Iterator[Hop]:
        """One node further."""
        peer, why = hop
        self.ends.add(peer)
        status = self.swarm.statuses.get(peer)
        # A node whose loop stands still is the end: what it says it waits for is not why it does not act.
        if status is None or loop_is_silent(status):
            return
        waits = _holding_up(status)
        if why is not None:
            mine = [wait for wait in waits if wait.why == why]
            # A microbatch that waits for the inner step to end is held up by whatever else holds that step up.
            for_step = any(wait.whom == Resource.INNER_STEP for wait in mine)
            waits = [wait for wait in waits if wait.why != why] if for_step else mine
        yield from self.step(peer, status, waits)

    def step(self, peer: PeerId, status: Status, waits: Sequence[Wait]) -> Iterator[Hop]:
        """The nodes that these waits of a node lead to."""
        called = {wait.why for wait in waits if isinstance(wait.whom, str)}
        for wait in waits:
            match wait.whom:
                case str() as other:
                    yield from self._call(peer, other, status, wait)
                case AnyReplica(stage) if wait.whom in self.empty:
                    self.ends.add(AnyReplica(stage))
                case AnyReplica(stage):
                    # Once one replica is called, the wait for any of its stage says nothing more.
                    if wait.why is None or wait.why not in called:
                        yield from ((report.peer, None) for report in self.swarm.of_stage(stage, IN_ROUNDS))
                case Resource.INNER_STEP:
                    pass
                case _:
                    self.last.append((peer, wait))

    def _call(self, peer: PeerId, other: PeerId, status: Status, wait: Wait) -> Iterator[Hop]:
        """One call to another node: is that node there, has the call arrived, and what does it wait for itself?"""
        theirs = self.swarm.statuses.get(other)
        if theirs is None:
            if other not in self.swarm.by_peer and wait.since_s > PATIENCE_S:
                self.gone[other] = peer
            self.ends.add(other)
        elif not isinstance(wait.why, ForMicrobatch):
            yield other, None
        else:
            # The receiver of an activation waits for its caller. Both ends name the microbatch of a call, so a call
            # that only the caller knows of has not arrived, and one whose activation does not come is cut on its way.
            receives = wait.what == ACTIVATION
            link = CallLink(other, peer) if receives else CallLink(peer, other)
            arrived = not receives and any(call.why == wait.why for call in theirs.serving)
            step_s = status.step_took_s or 0.0
            patience_s = max(PATIENCE_S, PATIENCE_STEPS * step_s) if step_s > 0 else FIRST_PATIENCE_S
            at_work = theirs.advert.state == "training" and not loop_is_silent(theirs)
            if not arrived and at_work and wait.since_s > patience_s:
                self.links[link] = wait
                self.ends.add(link)
            elif not receives:
                yield other, wait.why


def _holding_up(status: Status) -> list[Wait]:
    return [wait for wait in status.waits if not wait.idle][:WAITS_LIMIT]


# --- links that carry nothing although both their ends answer ---------------------------------------------------------


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
    for seen in status.seen if status.advert.state == "training" else ():
        theirs = swarm.adverts.get(seen.advert.peer_id) if seen.advert.peer_id in swarm.statuses else None
        if theirs is not None and theirs.state == "training" and theirs.stage == status.advert.stage + 1:
            deserted = status.deserted.get(theirs.stage, 0.0) > ASIDE_S
            yield theirs.peer_id, finite(seen.aside_s) > ASIDE_S or deserted


def _half_open(swarm: SwarmView, link: CallLink, wait: Wait | None) -> Cause:
    sentence = (
        f"{swarm.name(link.caller)} cannot reach {_where(swarm, link.callee)}, although both answer: half-open link"
    )
    if wait is not None:
        sentence += f" (a call has been under way for {elapsed(wait.since_s)} and has not arrived)"
    alone = link.caller in swarm.statuses and bool(swarm.statuses[link.caller].deserted)
    severity: Severity = "error" if alone or wait is not None else "warning"
    advice = f"something between {short_id(link.caller)} and {short_id(link.callee)} drops what they send; {_ADVICE}"
    return Cause(Finding(severity, "half-open-link", link.callee, sentence, advice), link)


def _where(swarm: SwarmView, peer: PeerId) -> str:
    """`node 12D3…Qx7Qf of stage 1 at 192.0.2.7:4100`."""
    advert = swarm.adverts.get(peer)
    at = f" at {line(advert.addresses[0])}" if advert is not None and advert.addresses else ""
    return swarm.name(peer) + at
