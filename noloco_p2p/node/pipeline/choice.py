"""Chooses the replicas of the next stage to which a microbatch is offered."""

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
"""Pause after every replica has answered Busy, seconds; it doubles from the first to the longest."""
PAUSE_SHARE, LONG_WAIT_PAUSE_S = 0.05, 1.0
"""After a long wait a pause may take this share of it, but not more than so many seconds: without `outer.overlap` a
stage may be closed for minutes, and a twentieth more is no great delay. Only if any replica will do: `balanced` and
`fixed` skip a replica that stays busy, but for FAILED_AGAIN_S: after such a pause they would always name it again."""
LONGEST_WITH_NOBODY_S = 0.5
"""The longest pause if every replica has failed, seconds."""
FAILED_AGAIN_S = 1.0
"""Seconds after which a replica that failed may be asked again even though another one keeps answering Busy: that one
may stay closed until the deadline of its outer round, and may even be waiting for what this delivery holds up."""
UNSERVED_S = 60.0
"""A node says in its advert that the next stage does not serve it if this has lasted for so many seconds."""


@dataclass(slots=True)
class Attempts:
    """The answers and failures of one delivery so far. Times are on the loop's clock."""

    trains: bool
    avoid: Set[PeerId]
    """Replicas that the origin distrusts: they are asked only if there is no other."""
    step: int = 0
    """The step of the microbatch."""
    busy: set[PeerId] = field(default_factory=set)
    failed: dict[PeerId, float] = field(default_factory=dict)
    """Replicas that failed → when."""
    refused: set[PeerId] = field(default_factory=set)
    """Replicas to which it is a violation of the protocol."""
    skipped: int = 0
    """How many replicas could not serve it through no fault of their own."""
    pause_s: float = FIRST_PAUSE_S
    """The next pause, for when no replica is left to ask."""
    busy_at: float | None = None
    """When the first Busy was received."""
    alone_since: float | None = None
    """Since when no replica could even be asked."""
    fell_back: bool = False
    """Whether the fallback of `balanced` and `fixed` has been reported."""
    failure: str = ""
    """The message of the last failure."""

    def begin_anew(self, now: float, *, free: bool) -> None:
        """After a pause: replicas that were busy, or that failed a while ago, may be asked again; if none was busy, so
        may all that failed. `free`: any replica may serve it."""
        waited_s = 0.0 if self.busy_at is None or not free else now - self.busy_at
        longest_s = max(LONGEST_PAUSE_S, min(LONG_WAIT_PAUSE_S, PAUSE_SHARE * waited_s))
        self.pause_s = min(2 * self.pause_s, LONGEST_WITH_NOBODY_S if self.trains and not self.busy else longest_s)
        self.failed = {peer: at for peer, at in self.failed.items() if self.busy and now - at < FAILED_AGAIN_S}
        self.busy.clear()


class Choice(NamedTuple):
    """The replicas to ask now, possibly one twice; none if all have just answered Busy or failed."""

    replicas: list[Advert]
    header_first: bool = False
    """Whether only the header is sent at first; the replica that asks for the body first gets it."""
    patient: bool = True
    """Whether they may queue the header. False if there are other replicas to ask: then Busy is the better answer."""


class StepCandidates(NamedTuple):
    """For one step of the clock, the candidates of each microbatch, by its index."""

    step: int
    sets: list[list[PeerId]]


class ReplicaChoice:
    """Chooses replicas of the next stage for one node."""

    def __init__(self, node: NodeState, swarm: Membership, line: MeasuredLine) -> None:
        self._node = node
        self._swarm = swarm
        self._line = line
        self._candidates = StepCandidates(-1, [])
        self._unserved_since: float | None = None
        """The first attempt since the next stage has served something."""

    def served_by(self, peer: PeerId) -> None:
        """Note that a replica has served a microbatch."""
        self._unserved_since = None
        if self._node.advert.unserved:
            self._node.update(unserved=False)
        self._swarm.answered(peer)

    def by_policy(self, origin: Origin, attempts: Attempts, sending: Callable[[Advert], Sending]) -> Choice:
        """For training: the replica that the run's policy chooses, or two that compete for the microbatch.

        If any replica may serve it, and the header goes first so that the loser costs no more than that, two are drawn:
        this evens out the load. Under `weighted` both may be the same replica, otherwise the fastest would be drawn too
        rarely. Under `random`, stage 0 draws the pairs of a step together, and the first microbatches get the most
        distant pairs.
        """
        node, members, policy = self._node, self._swarm.members, self._node.manifest.routing
        self._unserved_since = self._unserved_since or node.now()
        if node.now() - self._unserved_since > UNSERVED_S and not node.advert.unserved:
            node.update(unserved=True)
        usable = members.usable(node.index + 1, now=node.now(), without=attempts.failed)
        usable = self._swarm.trials.among(usable, proven=bool(attempts.failed), busy=attempts.busy)
        usable = [peer for peer in usable if peer not in attempts.avoid] or usable
        free = [peer for peer in usable if peer not in attempts.busy] if policy in routing.FREE else usable
        if not free or (attempts.busy and policy not in routing.FREE):
            return Choice([])
        drawn = self._drawn_together(origin, usable) if policy == "random" and node.index == 0 else []
        pair = [advert for peer in drawn if peer in free and (advert := members.get(peer)) is not None]
        first = pair[0] if pair else self._draw(origin, attempts, free)
        way = sending(first)
        if way is Sending.AT_ONCE and attempts.busy_at is not None:
            way = Sending.ASKED  # otherwise every further Busy would cost the whole body again
        header_first = way is Sending.ASKED
        if policy not in routing.FREE:
            return Choice([first], header_first)
        # If a replica is asked alone although there are others, Busy is the better answer: any free replica will do.
        patient = way is not Sending.WHOLE or len(usable) == 1
        others = free if policy == "weighted" else [peer for peer in free if peer != first.peer_id]
        if not (header_first and others):
            return Choice([first], header_first, patient)
        second = pair[1] if len(pair) > 1 else self._draw(origin, attempts, others)
        return Choice([first, second], header_first, patient)

    def expected(self, origin: Origin) -> list[Advert]:
        """The replicas that may get a microbatch, if that is known before its output is ready; otherwise none."""
        members, index = self._swarm.members, self._node.index
        peers = self._swarm.trials.among(members.usable(index + 1, now=self._node.now(), without=()))
        if len(peers) > 1:
            known = index == 0 and self._node.manifest.routing == "random"
            peers = list(self._drawn_together(origin, peers)) if known else []
        return [advert for peer in peers if (advert := members.get(peer)) is not None]

    def _drawn_together(self, origin: Origin, usable: Sequence[PeerId]) -> Sequence[PeerId]:
        """The two candidates of this microbatch, drawn together with those of the other microbatches of its step."""

        def far(candidates: Sequence[PeerId]) -> int:
            """The distance of a pair: that of its nearer replica, which is the first to grant a place."""
            return int(min(self._line.round_trip_s(peer) or 0.0 for peer in candidates) / FAR_S)

        if self._candidates.step != origin.step:
            sets = routing.candidate_sets(self._node.manifest.microbatches_per_step, 2, usable, self._node.rng)
            self._candidates = StepCandidates(origin.step, sorted(sets, key=far, reverse=True))
        return self._candidates.sets[origin.index]

    def _draw(self, origin: Origin, attempts: Attempts, usable: Sequence[PeerId]) -> Advert:
        """One of the `usable` replicas, of which there must be some, by the run's policy."""
        node, run = self._node, self._node.manifest
        chosen, reason = routing.next_hop(
            run.routing, run.seed, node.index + 1, origin, self._swarm.view, usable, node.rng
        )
        if reason == "fallback" and not attempts.fell_back:
            attempts.fell_back = True
            node.event("reroute", reason="fallback", peer=chosen, message="the policy's replica cannot be reached")
        advert = self._swarm.members.get(chosen)
        assert advert is not None, "a usable replica has an advert"
        return advert

    def in_turn(self, origin: Origin, attempts: Attempts, sending: Callable[[Advert], Sending]) -> Choice:
        """For evaluation: replica i of stage 0 (`origin.index` is i) goes through replica i mod n of each later stage.

        The next replica in order stands in for one that is set aside or has declined.
        """
        node, members = self._node, self._swarm.members
        replicas = members.of_stage(node.index + 1, membership.HOLDING)
        if not replicas:
            return Choice([])
        turn = (origin.index + attempts.skipped) % len(replicas)
        in_turn = [*replicas[turn:], *replicas[:turn]]
        free = [a for a in in_turn if not members.is_aside(a.peer_id, now=node.now())]
        likely = self._swarm.trials.among([a.peer_id for a in free], proven=bool(attempts.failed))
        chosen = next((a for a in free if a.peer_id in likely), in_turn[0])
        return Choice([chosen], sending(chosen) is not Sending.WHOLE)
