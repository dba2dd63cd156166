"""The membership as one node sees it, the states of a node, and the choice of a stage.

A snapshot of adverts that one task refreshes and everything else routes from (design.md §6). Pure: `now` is the
caller's clock in seconds. Nothing here is on the way of a call to the DHT.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from noloco_p2p.core.messages import Advert, Origin, PeerId
from noloco_p2p.core.status import Seen

STATES = ("starting", "waiting", "syncing", "training", "paused", "finished", "draining", "left")

TRANSITIONS: dict[tuple[str, str], str] = {
    ("starting", "made"): "waiting",
    ("waiting", "begin"): "syncing",
    ("syncing", "synced"): "training",
    ("training", "end"): "finished",
    ("training", "pause"): "paused",
    ("paused", "resume"): "training",
    ("draining", "move"): "syncing",
    **{(state, "drain"): "draining" for state in STATES if state not in ("draining", "left")},
    ("draining", "leave"): "left",
}
"""(state, event) → state; every pair that is not here is a bug of the caller."""

FIRST_ASIDE_S = 1.0
LONGEST_ASIDE_S = 60.0
"""A peer that fails is set aside for 1, 2, 4, … seconds, at most this long."""

FAILURES_TO_DESERT = 2
"""A stage whose replicas have all failed so often in a row, with no answer since, is as good as without any."""

READS_TO_VANISH = 2
"""A peer that is missing in this many successive readings is gone; one reading of a DHT can miss somebody."""

TRAINING = frozenset({"training"})
READY = frozenset({"waiting", "syncing", "training"})
"""They have their weights: a membership counts them, and who is not serving yet answers Busy."""
HOLDING = frozenset({"training", "finished"})
"""They have a replica's trained weights: newcomers start from them, evaluations go through them."""
TRAINED = HOLDING | {"paused"}
"""They have a replica's trained weights and keep them: a stage with one of these is not lost."""
IN_ROUNDS = READY | HOLDING
"""Partners of an outer round; with an old view of the membership a mate may still look as if it waited."""
PRESENT = frozenset({"starting", "waiting", "syncing", "training", "paused", "finished"})
STAGE_0_AT_WORK = frozenset({"training", "syncing", "draining"})
"""The run has not ended while one of these is there; who pauses is not waited for."""


def next_state(state: str, event: str) -> str:
    """The state after `event`. Raises ValueError, which names both, for a pair that is not legal."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise ValueError(f"no transition from state {state!r} on event {event!r}") from None


@dataclass(slots=True)
class _Member:
    advert: Advert
    missed_reads: int = 0
    read_in: int = 0
    """Number of the newest reading that listed it."""
    heard: tuple[int, float] | None = None
    """Newest label that came from it: (step, when)."""
    failures: int = 0
    failed_at: float = float("-inf")
    aside_until: float = 0.0


class Members:
    """Who is in the swarm, who is set aside. Peers are always returned sorted by id.

    What is returned is not to be changed: the same list answers the same question until the membership changes.
    """

    def __init__(self, me: PeerId, ttl_s: float) -> None:
        self._me = me
        self._ttl_s = ttl_s
        self._members: dict[PeerId, _Member] = {}
        """Sorted."""
        self._readings = 0
        self._failing: dict[PeerId, None] = {}
        """Those that failed since they answered last; nobody else is set aside."""
        self._found: dict[tuple[int, Collection[str]] | None, list[Advert]] = {}
        """Answers that still hold, by stage and states; None: everybody."""
        self._ids: dict[tuple[int, Collection[str]], tuple[PeerId, ...]] = {}
        self._counts: Mapping[tuple[int, str], int] = {}
        self.left_at_step = 0.0
        """The furthest clock of those of stage 0 who have left: at the last step, the run has ended without us."""

    def update(self, adverts: Sequence[Advert], *, now: float) -> tuple[int, int]:
        """A reading of the directory; how many came and how many went. One that lists nobody else wipes nothing."""
        members, before, joined = self._members, len(self._members), 0
        self._readings += 1
        listed = False
        for advert in adverts:
            peer = advert.peer_id
            if peer == self._me:
                continue
            listed = True
            member = members.get(peer)
            if advert.state == "left":
                self.left_at_step = max(self.left_at_step, advert.step if advert.stage == 0 else 0.0)
                members.pop(peer, None)
                continue
            if member is None or member.advert.stage != advert.stage:
                joined += member is None
                members[peer] = member = _Member(advert)
            elif member.advert is not advert:
                self._renew(member, advert)
            member.missed_reads, member.read_in = 0, self._readings
        for peer, member in list(members.items()):
            if member.read_in == self._readings:
                continue
            member.missed_reads += listed
            if member.missed_reads >= READS_TO_VANISH or now - member.advert.announced_at > 3 * self._ttl_s:
                del members[peer]
        if joined:
            self._members = dict(sorted(members.items()))
        self._found.clear()
        self._ids.clear()
        self._counts = {}
        self._failing = {peer: None for peer in self._failing if peer in self._members}
        return joined, before + joined - len(members)

    @staticmethod
    def _renew(member: _Member, advert: Advert) -> None:
        if advert.announced_at >= member.advert.announced_at:
            if member.advert.state != advert.state and advert.announced_at > member.failed_at:
                # Who has gone on to another state since is at work, maybe in a new process.
                member.failures, member.aside_until = 0, 0.0
            member.advert = advert

    def get(self, peer: PeerId) -> Advert | None:
        """The newest advert of a peer."""
        member = self._members.get(peer)
        return member.advert if member else None

    def of_stage(self, stage: int, states: Set[str] = PRESENT) -> Sequence[Advert]:
        """Others of a stage that are in one of `states`."""
        asked = stage, frozenset(states)
        if asked not in self._found:
            self._found[asked] = [a for a in self.all() if a.stage == stage and a.state in states]
        return self._found[asked]

    def ids(self, stage: int, states: Set[str]) -> tuple[PeerId, ...]:
        """The same, by id."""
        asked = stage, frozenset(states)
        if asked not in self._ids:
            self._ids[asked] = tuple(advert.peer_id for advert in self.of_stage(stage, states))
        return self._ids[asked]

    def all(self) -> Sequence[Advert]:
        """Everybody else."""
        if None not in self._found:
            self._found[None] = [member.advert for member in self._members.values()]
        return self._found[None]

    def counts(self) -> Mapping[tuple[int, str], int]:
        """How many others there are of each (stage, state)."""
        if not self._counts:
            self._counts = Counter((advert.stage, advert.state) for advert in self.all())
        return self._counts

    def seen(self, *, now: float) -> tuple[Seen, ...]:
        """Everybody else as of `now`."""
        found = [(member.advert, member.aside_until) for member in tuple(self._members.values())]
        return tuple(Seen(a, max(0.0, now - a.announced_at), max(0.0, aside_until - now)) for a, aside_until in found)

    # --- trust in peers -------------------------------------------------------------------------------------------

    def failed(self, peer: PeerId, *, now: float) -> None:
        """A call to a peer failed: set it aside for a time that doubles with each failure."""
        member = self._members.get(peer)
        if member is not None and now >= member.aside_until:
            member.failed_at = now
            member.aside_until = now + min(LONGEST_ASIDE_S, FIRST_ASIDE_S * 2**member.failures)
            member.failures = min(member.failures + 1, 16)
            self._failing[peer] = None

    def answered(self, peer: PeerId) -> None:
        """A call to a peer was answered, with whatever."""
        member = self._members.get(peer)
        if member is not None and member.failures:
            member.failures, member.aside_until = 0, 0.0
            self._failing.pop(peer, None)

    def is_aside(self, peer: PeerId, *, now: float) -> bool:
        """The peer has failed of late, and its time has not ended."""
        member = self._members.get(peer)
        return member is not None and member.aside_until > now

    def usable(self, stage: int, *, now: float, without: Collection[PeerId] = ()) -> Sequence[PeerId]:
        """Ready replicas of a stage that are not set aside; when all are, the one whose time ends first."""
        aside = [peer for peer in self._failing if self.is_aside(peer, now=now)]
        ready: Sequence[PeerId] = self.ids(stage, READY)
        if without:
            ready = [peer for peer in ready if peer not in without]
        if not aside or not ready:
            return ready
        free = [peer for peer in ready if peer not in aside]
        return free or [min(ready, key=lambda peer: (self._members[peer].aside_until, peer))]

    def deserted(self, stages: int, mine: int) -> list[int]:
        """Stages other than `mine` that nobody serves: no replica is there, or none of the next one answers any more.

        Only the next stage is called all the time: only there an answer would soon tell that it is served again.
        """
        there = {s: self.of_stage(s, IN_ROUNDS) for s in range(stages) if s != mine}
        if mine + 1 in there:
            answering = [a for a in there[mine + 1] if self._members[a.peer_id].failures < FAILURES_TO_DESERT]
            there[mine + 1] = answering
        return [stage for stage, replicas in there.items() if not replicas]

    def anybody(self, stage: int) -> bool:
        """Somebody else of a stage is there, whether it answers or not."""
        return bool(self.of_stage(stage, IN_ROUNDS))

    # --- the clock of the swarm -----------------------------------------------------------------------------------

    def heard(self, origin: Origin, *, now: float) -> None:
        """A microbatch of `origin` came by: its label says how far that node has come."""
        member = self._members.get(origin.peer)
        if member is not None and (member.heard is None or origin.step >= member.heard[0]):
            member.heard = (origin.step, now)

    def last_sign(self, peer: PeerId) -> float | None:
        """When a peer was last known to be alive: it announced itself, or a microbatch of it came; None: a stranger."""
        member = self._members.get(peer)
        if member is None:
            return None
        return max(member.advert.announced_at, member.heard[1] if member.heard else member.advert.announced_at)

    def step_of(self, peer: PeerId) -> float | None:
        """The furthest that a peer is known to have come, in steps; None for a stranger."""
        member = self._members.get(peer)
        if member is None:
            return None
        return max(member.advert.step, member.heard[0] if member.heard else 0)

    def clocks(self, *, now: float) -> list[tuple[float, float, float]]:
        """(step, age in seconds, steps per second) of the stage-0 replicas in training, each at its newest sign.

        One that has not measured its speed yet cannot be projected to now, and would hold everybody back.
        """
        found = []
        for advert in self.of_stage(0, TRAINING):
            member = self._members[advert.peer_id]
            if not advert.steps_per_s > 0:
                continue
            step, at = advert.step, member.advert.announced_at
            if member.heard is not None and member.heard[1] > at:
                step, at = max(step, float(member.heard[0])), member.heard[1]
            found.append((step, max(0.0, now - at), advert.steps_per_s))
        return found


def lacking(
    me: Advert, others: Sequence[Advert], stages: int, start_replicas: int, states: Collection[str]
) -> dict[int, int]:
    """How many replicas in one of `states` each stage still lacks before the run may start; empty when it may."""
    counts = [0] * stages
    for advert in (*others, me):
        if advert.state in states and 0 <= advert.stage < stages:
            counts[advert.stage] += 1
    return {s: start_replicas - n for s, n in enumerate(counts) if n < start_replicas}
