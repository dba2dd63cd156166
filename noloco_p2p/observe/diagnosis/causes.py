"""Follows waits from node to node to their root cause. Pure.

For example, A waits for a gradient from B on behalf of a microbatch; B serves that microbatch and waits for its own
device, or for C, and so on. The place where such a path ends is blamed, and every node on the path counts as held back
by it.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from noloco_p2p.core.members import IN_ROUNDS
from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.status import ACTIVATION, AnyReplica, ForMicrobatch, Purpose, Resource, Status, Wait
from noloco_p2p.humanize import elapsed, short_id
from noloco_p2p.observe.diagnosis.findings import CallLink, Cause, Finding, Place, Severity, at_node, line, named
from noloco_p2p.observe.diagnosis.swarm_view import SwarmView
from noloco_p2p.observe.diagnosis.symptoms import loop_is_silent

PATIENCE_S = 2.0
"""Shorter waits are a normal part of training."""
PATIENCE_STEPS = 2.0
"""A call that has not arrived within the time of this many inner steps is lost. Measured in steps, because slow nodes
take longer."""
FIRST_PATIENCE_S = 15.0
"""The same before the first inner step has ended, while it is unknown how long a call takes."""
HOPS_LIMIT = 1 << 21
"""Upper limit on the hops of all paths together, in equal parts for all nodes: a thousand strangers that claim to wait
for each other would make billions. Honest paths are far shorter."""

ASIDE_S = 1.0
"""A peer that is set aside for longer than this has failed at least twice in a row and not answered since.

After a failed call the caller sets the callee aside, each time for twice as long. So a healthy node that one caller
keeps setting aside has a broken link, and one that all callers set aside has a closed port.
"""
_ADVICE = "listen.grpc_port there must be open to all nodes: check firewalls, NAT and listen.announce_host"

Hop = tuple[PeerId, Purpose | None]
"""A node, and the purpose whose waits are to be followed there; None: follow all."""


@dataclass(slots=True)
class WaitPaths:
    """The paths along which the waits of one node lead, recorded while they are followed."""

    swarm: SwarmView
    empty: Collection[Place | None]
    """The stages that no node serves."""
    ends: set[Place] = field(default_factory=set)
    """The places where paths end, and those that they pass through."""
    last: list[tuple[PeerId, Wait]] = field(default_factory=list)
    """The waits at which paths end, each with its node: they lead to no other node."""
    links: dict[CallLink, Wait] = field(default_factory=dict)
    """Links over which a call has not arrived, with the wait that shows it."""
    gone: dict[PeerId, PeerId] = field(default_factory=dict)
    """Nodes that are waited for but no longer announced, each with a node that waits for it."""
    searched: set[int] = field(default_factory=set)
    """The stages whose replicas have all been reached: strangers may claim thousands of waits for them."""

    def follow(self, start: PeerId) -> Self:
        """Follow the long waits of a node."""
        status = self.swarm.statuses[start]
        waits = self.swarm.waits.get((start, None), [])
        # A retried call is recent even if its purpose is old, so the oldest wait for each purpose decides.
        long = {wait.why for wait in waits if wait.since_s > PATIENCE_S}
        hops = [*self.step(start, status, [wait for wait in waits if wait.why in long])]
        visited, left = set[Hop](), HOPS_LIMIT // len(self.swarm.statuses)
        while hops and left > 0:
            hop = hops.pop()
            # Waits may form a cycle. A path that returns to the start adds nothing.
            if hop not in visited and hop[0] != start:
                visited.add(hop)
                hops += (more := [*self.beyond(hop)])
                left -= 1 + len(more)
        return self

    def beyond(self, hop: Hop) -> Iterator[Hop]:
        """The hops that the waits at this node lead to."""
        peer, why = hop
        self.ends.add(peer)
        status = self.swarm.statuses.get(peer)
        # The path ends at a node whose event loop is stuck: the waits that it reports are not the reason.
        if status is None or loop_is_silent(status):
            return
        waits = self.swarm.waits.get(hop, [])
        # A microbatch that waits for the inner step to end is held up by whatever holds up that step.
        step = why is not None and any(wait.whom == Resource.INNER_STEP for wait in waits)
        yield from [(peer, None)] if step else self.step(peer, status, waits)

    def step(self, peer: PeerId, status: Status, waits: Sequence[Wait]) -> Iterator[Hop]:
        """The hops that these waits of a node lead to."""
        called = {wait.why for wait in waits if isinstance(wait.whom, str)}
        for wait in waits:
            match wait.whom:
                case str() as other:
                    yield from self._call(peer, other, status, wait)
                case AnyReplica(stage) if wait.whom in self.empty:
                    self.ends.add(AnyReplica(stage))
                case AnyReplica(stage):
                    # Once a particular replica is called, that call says more than the wait for any replica.
                    if (wait.why is None or wait.why not in called) and stage not in self.searched:
                        self.searched.add(stage)
                        yield from ((report.peer, None) for report in self.swarm.of_stage(stage, IN_ROUNDS))
                case _ if wait.whom != Resource.INNER_STEP:
                    self.last.append((peer, wait))

    def _call(self, peer: PeerId, other: PeerId, status: Status, wait: Wait) -> Iterator[Hop]:
        """Follow one call: does the called node exist, has the call arrived, and what does that node wait for?"""
        theirs = self.swarm.statuses.get(other)
        if theirs is None:
            if other not in self.swarm.adverts and wait.since_s > PATIENCE_S:
                self.gone[other] = peer
            self.ends.add(other)
        elif not isinstance(wait.why, ForMicrobatch):
            yield other, None
        else:
            # A wait for an activation is the receiver's, for its caller; any other is the caller's. Both ends name the
            # microbatch of a call. So a call that only the caller knows has not arrived, and a call whose activation
            # does not arrive is cut off.
            receives = wait.what == ACTIVATION
            link = CallLink(other, peer) if receives else CallLink(peer, other)
            arrived = not receives and wait.why in self.swarm.served[other]
            step_s = status.step_took_s or 0.0
            patience_s = max(PATIENCE_S, PATIENCE_STEPS * step_s) if step_s > 0 else FIRST_PATIENCE_S
            at_work = theirs.advert.state == "training" and not loop_is_silent(theirs)
            if not arrived and at_work and wait.since_s > patience_s:
                self.links[link] = wait
                self.ends.add(link)
            else:
                yield other, wait.why


# --- links that carry nothing although both ends answer ---------------------------------------------------------------


def broken_links(swarm: SwarmView, ill: Collection[Place | None], missing: Mapping[CallLink, Wait]) -> Iterator[Cause]:
    """Links and ports that are shown to be broken by peers set aside, or by calls that have not arrived.

    `missing` holds the waits of these calls, by link. Nodes in `ill` are skipped: it is known why calls to them fail.
    """
    failing: dict[PeerId, dict[PeerId, Wait | None]] = {}
    callers: Counter[PeerId] = Counter()
    for peer, status in swarm.statuses.items():
        for callee, aside in _callees(swarm, status):
            callers[callee] += 1
            if aside:
                failing.setdefault(callee, {})[peer] = None
    for link, wait in missing.items():
        failing.setdefault(link.callee, {})[link.caller] = wait
    for callee in sorted(failing.keys() - ill):
        waits = failing[callee]
        if len(waits) > 1 and len(waits) >= callers[callee]:
            others = named(sorted(waits))
            sentence = f"{_where(swarm, callee)} cannot be reached by {others}, although its status can"
            yield at_node("error", "port", callee, sentence, _ADVICE)
        else:
            for caller in sorted(waits.keys() - ill):
                yield _half_open(swarm, CallLink(caller, callee), waits[caller])


def _callees(swarm: SwarmView, status: Status) -> Iterator[tuple[PeerId, bool]]:
    """The training nodes that a training node calls for its microbatches, and whether it has set them aside."""
    for seen in status.seen if status.advert.state == "training" else ():
        theirs = swarm.statuses.get(seen.advert.peer_id)
        if theirs is not None and theirs.advert.state == "training" and theirs.advert.stage == status.advert.stage + 1:
            deserted = status.deserted.get(theirs.advert.stage, 0.0) > ASIDE_S
            yield seen.advert.peer_id, seen.aside_s > ASIDE_S or deserted


def _half_open(swarm: SwarmView, link: CallLink, wait: Wait | None) -> Cause:
    caller, callee = swarm.name(link.caller), _where(swarm, link.callee)
    sentence = f"{caller} cannot reach {callee}, although both answer: half-open link"
    if wait is not None:
        sentence += f" (a call has been under way for {elapsed(wait.since_s)} and has not arrived)"
    severity: Severity = "error" if swarm.statuses[link.caller].deserted or wait is not None else "warning"
    advice = f"something between {short_id(link.caller)} and {short_id(link.callee)} drops what they send; {_ADVICE}"
    return Cause(Finding(severity, "half-open-link", link.callee, sentence, advice), link)


def _where(swarm: SwarmView, peer: PeerId) -> str:
    """`node 12D3…Qx7Qf of stage 1 at 192.0.2.7:4100`."""
    addresses = swarm.adverts[peer].addresses
    return swarm.name(peer) + (f" at {line(addresses[0])}" if addresses else "")
