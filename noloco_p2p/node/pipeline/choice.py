"""Which replicas of the next stage a microbatch is offered to."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from noloco_p2p.core import members as membership
from noloco_p2p.core import routing
from noloco_p2p.core.line_rate import FAR_S, MeasuredLine, Sending
from noloco_p2p.core.messages import Advert, Origin, PeerId
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.state import NodeState

FIRST_PAUSE_S = 0.005
LONGEST_PAUSE_S = 0.1
"""Pause after every replica said Busy; it doubles from the first to the longest."""
LONGEST_WITH_NOBODY_S = 0.5
"""The longest one when every replica failed."""
FAILED_AGAIN_S = 1.0
"""After so long a replica that failed may be asked again although another one keeps saying Busy: that one may stay
closed until its outer round's deadline, and may even wait for what this delivery holds up."""


@dataclass(slots=True)
class Attempts:
    """What one delivery has heard so far."""

    trains: bool
    avoid: Set[PeerId]
    """Replicas that the origin would rather not have: they are asked if there is no other."""
    busy: set[PeerId] = field(default_factory=set)
    failed: dict[PeerId, float] = field(default_factory=dict)
    """When each did, on the loop's clock."""
    skipped: int = 0
    """Replicas that cannot serve it for no fault of theirs."""
    pause_s: float = FIRST_PAUSE_S
    """The pause after the next time that none is left to ask."""
    busy_at: float | None = None
    """When Busy was first heard, on the loop's clock."""
    alone_since: float | None = None
    """Since when nobody could even be asked, on the loop's clock."""
    fell_back: bool = False
    failure: str = ""
    """The last one, in words."""

    def begin_anew(self, now: float) -> None:
        """After a pause: those that were busy or failed a while ago may be asked again, or all if none was busy."""
        longest_s = LONGEST_WITH_NOBODY_S if self.trains and not self.busy else LONGEST_PAUSE_S
        self.pause_s = min(2 * self.pause_s, longest_s)
        self.failed = {peer: at for peer, at in self.failed.items() if self.busy and now - at < FAILED_AGAIN_S}
        self.busy.clear()


class Choice(NamedTuple):
    """Whom to ask now. Nobody: all have just said Busy or failed."""

    replicas: list[Advert]
    header_first: bool = False
    """They get the body when they ask for it, or one of them does."""
    patient: bool = True
    """They may keep the question in their line; False: there are others to ask, Busy is the better answer."""


class StepCandidates(NamedTuple):
    """The candidates of each microbatch of a step of the clock."""

    step: int
    sets: list[list[PeerId]]


class ReplicaChoice:
    """Chooses for one node."""

    def __init__(self, node: NodeState, swarm: Membership, line: MeasuredLine) -> None:
        self._node = node
        self._swarm = swarm
        self._line = line
        self._candidates = StepCandidates(-1, [])

    def by_policy(self, origin: Origin, heard: Attempts, sending: Callable[[Advert], Sending]) -> Choice:
        """Training: the replica that the run's policy chooses.

        Where any may serve, two are drawn, if only the header goes to the one that comes too late: loads even out.
        Under `weighted` they may be the same, else the fastest would be drawn too seldom. Under `random` stage 0
        draws those of a step together, and the first microbatches get the pairs that are farthest away.
        """
        node, members, policy = self._node, self._swarm.members, self._node.manifest.routing
        usable = members.usable(node.index + 1, now=node.now(), without=heard.failed)
        usable = [peer for peer in usable if peer not in heard.avoid] or usable
        free = [peer for peer in usable if peer not in heard.busy] if policy in routing.FREE else usable
        if not free or (heard.busy and policy not in routing.FREE):
            return Choice([])
        drawn = self._drawn_together(origin, usable) if policy == "random" and node.index == 0 else []
        pair = [advert for peer in drawn if peer in free and (advert := members.get(peer)) is not None]
        first = pair[0] if pair else self._draw(origin, heard, free)
        way = sending(first)
        if way is Sending.AT_ONCE and heard.busy_at is not None:
            way = Sending.ASKED  # or all of it is sent again for each time that Busy is heard
        header_first = way is Sending.ASKED
        if policy not in routing.FREE:
            return Choice([first], header_first)
        # Who is asked alone although there are others had better say Busy: whichever is free first serves.
        patient = way is not Sending.WHOLE or len(usable) == 1
        others = free if policy == "weighted" else [peer for peer in free if peer != first.peer_id]
        if not (header_first and others):
            return Choice([first], header_first, patient)
        second = pair[1] if len(pair) > 1 else self._draw(origin, heard, others)
        return Choice([first] if second == first else [first, second], header_first, patient)

    def expected(self, origin: Origin) -> list[Advert]:
        """Who may get a microbatch, as far as it is known before its output is there; nobody where it is not."""
        members, index = self._swarm.members, self._node.index
        peers = members.usable(index + 1, now=self._node.now(), without=())
        if len(peers) > 1:
            known = index == 0 and self._node.manifest.routing == "random"
            peers = list(self._drawn_together(origin, peers)) if known else []
        return [advert for peer in peers if (advert := members.get(peer)) is not None]

    def _drawn_together(self, origin: Origin, usable: Sequence[PeerId]) -> Sequence[PeerId]:
        """The two candidates of this microbatch, drawn together with those of the others of its step."""

        def far(candidates: Sequence[PeerId]) -> int:
            """By the nearer one, because it is first to grant a place."""
            return int(min(self._line.round_trip_s(peer) or 0.0 for peer in candidates) / FAR_S)

        if self._candidates.step != origin.step:
            sets = routing.candidate_sets(self._node.manifest.microbatches_per_step, 2, usable, self._node.rng)
            self._candidates = StepCandidates(origin.step, sorted(sets, key=far, reverse=True))
        return self._candidates.sets[origin.index]

    def _draw(self, origin: Origin, heard: Attempts, usable: Sequence[PeerId]) -> Advert:
        """One of `usable`, which are not none, by the run's policy."""
        node, run = self._node, self._node.manifest
        chosen, reason = routing.next_hop(
            run.routing, run.seed, node.index + 1, origin, self._swarm.view, usable, node.rng
        )
        if reason == "fallback" and not heard.fell_back:
            heard.fell_back = True
            node.event("reroute", reason="fallback", peer=chosen, message="the named replica cannot be reached")
        advert = self._swarm.members.get(chosen)
        assert advert is not None, "it is usable"
        return advert

    def in_turn(self, origin: Origin, heard: Attempts, sending: Callable[[Advert], Sending]) -> Choice:
        """Evaluation: replica i of stage 0 (`origin.index` is i) goes through replica i mod n of each later stage.

        The next one in turn stands in for a replica that is set aside or has declined.
        """
        node, members = self._node, self._swarm.members
        replicas = members.of_stage(node.index + 1, membership.HOLDING)
        if not replicas:
            return Choice([])
        turn = (origin.index + heard.skipped) % len(replicas)
        in_turn = [*replicas[turn:], *replicas[:turn]]
        free = [a for a in in_turn if not members.is_aside(a.peer_id, now=node.now())]
        chosen = (free or in_turn)[0]
        return Choice([chosen], sending(chosen) is not Sending.WHOLE)
