"""The membership as one node sees it: the states of nodes, who is present, who is set aside, and how far peers are. All
routing uses this snapshot of adverts (ARCHITECTURE.md, "Membership"). Pure: `now` is the caller's clock in seconds."""

from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from math import inf

from noloco_p2p.core.messages import Advert, Origin, PeerId
from noloco_p2p.core.status import SeenPeer

STATES = ("starting", "waiting", "syncing", "training", "paused", "finished", "draining", "left")

TRANSITIONS: dict[tuple[str, str], str] = {
    ("starting", "made"): "waiting",
    ("waiting", "begin"): "syncing",
    ("syncing", "synced"): "training",
    ("training", "end"): "finished",
    ("training", "pause"): "paused",
    ("training", "stand still"): "syncing",
    ("paused", "resume"): "training",
    ("draining", "move"): "syncing",
    **{(state, "drain"): "draining" for state in STATES if state not in ("draining", "left")},
    ("draining", "leave"): "left",
}
"""(state, event) → state; any other pair is a bug of the caller."""

FIRST_ASIDE_S = 1.0
LONGEST_ASIDE_S = 60.0
"""A peer that fails is set aside for 1, 2, 4, … seconds, but at most for this long."""
DISTRUSTED_S = 3600.0  # how long a peer is set aside whose gradients are wrong again and again

FAILURES_TO_DESERT = 2
"""A stage counts as having no replica if all of its replicas have failed this often in a row, with no answer since."""

READS_TO_VANISH = 2
"""A peer is gone if its advert has expired and it is missing from this many successive readings. Until then a reading
without it counts as a bad one: a loaded DHT returns bad readings for seconds, and a node that leaves announces it."""

TRAINING = frozenset({"training"})
READY = frozenset({"waiting", "syncing", "training"})
"""Nodes that have their weights: they count as replicas, and those that do not serve yet answer Busy."""
HOLDING = frozenset({"training", "finished"})
"""Nodes with a replica's trained weights: newcomers start from these, and evaluations use them."""
TRAINED = HOLDING | {"paused"}
"""Nodes that have and keep a replica's trained weights: a stage with one of these is not lost."""
IN_ROUNDS = READY | HOLDING
"""Possible partners in an outer round. In an old view of the membership a replica may still appear to be waiting."""
PRESENT = frozenset({"starting", "waiting", "syncing", "training", "paused", "finished"})
STAGE_0_AT_WORK = frozenset({"training", "syncing", "draining"})
"""The run has not ended while a stage-0 node is in one of these states. Nobody waits for a paused node."""


def next_state(state: str, event: str) -> str:
    """The state after `event`. Raises ValueError, which names both, if there is no such transition."""
    if (state, event) not in TRANSITIONS:
        raise ValueError(f"no transition from state {state!r} on event {event!r}")
    return TRANSITIONS[state, event]


@dataclass(slots=True)
class _Failures:
    """The failures of a peer since its last answer."""

    doubted: bool = False  # only an answer brings it back
    count: int = 0
    newest_at: float = float("-inf")
    aside_until: float = 0.0


class Members:
    """Who is in the swarm, and who is set aside. Peers are always sorted by id.

    Callers must not modify the lists returned: equal queries return the same list until the next reading. A reading
    costs little for a peer without a new advert, so a node can know thousands.
    """

    def __init__(self, me: PeerId, ttl_s: float) -> None:
        self._me = me
        self._ttl_s = ttl_s
        self._adverts: dict[PeerId, Advert] = {}
        """All other nodes, sorted."""
        self._missed: dict[PeerId, int] = {}
        """How many successive readings have missed a peer; the last one listed all peers that are not in here."""
        self._heard: dict[PeerId, tuple[int, float, float]] = {}
        """By peer: (highest step in labels, when that last came, when any label last came: it may have restarted)."""
        self._failures: dict[PeerId, _Failures] = {}
        self.met: set[PeerId] = set()
        """Peers that have answered a call of this node; any other may be a mere advert."""
        self._distrusted: dict[PeerId, float] = {}
        """Until when a peer is set aside, whatever it answers."""
        self._by_state: dict[tuple[int, str], list[Advert]] = {}
        """`_adverts` by (stage, state), as of the last reading."""
        self._found: dict[tuple[int, Set[str]], list[Advert]] = {}
        """Cached results of `of_stage`, by stage and states."""
        self.left_at_step = 0.0
        """The highest clock of the nodes that left. At the last step, the run has ended without this node."""

    def update(self, adverts: Sequence[Advert], *, now: float, doubts: bool = False) -> tuple[int, int]:
        """Apply a reading, with new peers doubted if it `doubts`. An empty one only removes. Returns (joined, left)."""
        known, before, joined, listed = self._adverts, len(self._adverts), 0, 0
        for advert in adverts:
            peer, old = advert.peer_id, known.get(advert.peer_id)
            # An older record means that the search missed the newer one, which is stored elsewhere.
            if old is None or (old is not advert and advert.announced_at >= old.announced_at):
                if peer == self._me:
                    continue
                if advert.state == "left":
                    self.left_at_step = max(self.left_at_step, advert.step)
                    self._forget(peer)
                    continue
                if old is None or old.stage != advert.stage:
                    self._forget_history(peer)
                    if doubts:
                        self._failures[peer] = _Failures(doubted=True)
                    joined += old is None
                    known[peer] = advert
                else:
                    self._renew(old, advert)
            listed += 1
        if self._missed or listed != len(known):
            self._miss({advert.peer_id for advert in adverts} - {self._me}, now)
        if joined:
            self._adverts = dict(sorted(known.items()))
        self._index()
        return joined, before + joined - len(known)

    def _renew(self, old: Advert, advert: Advert) -> None:
        failures = self._failures.get(advert.peer_id)
        if failures is not None and old.state != advert.state and advert.announced_at > failures.newest_at:
            # A peer that has changed its state since it failed is at work, maybe in a new process.
            failures.aside_until = 0.0
            if advert.peer_id in self.met:
                del self._failures[advert.peer_id]
        self._adverts[advert.peer_id] = advert

    def _miss(self, listed: Set[PeerId], now: float) -> None:
        """Count the readings that missed each peer, and forget peers that are gone."""
        for peer, advert in list(self._adverts.items()):
            if peer in listed:
                self._missed.pop(peer, None)
                continue
            self._missed[peer] = self._missed.get(peer, 0) + bool(listed)
            age_s = now - advert.announced_at
            if (self._missed[peer] >= READS_TO_VANISH and age_s > self._ttl_s) or age_s > 3 * self._ttl_s:
                self._forget(peer)

    def _forget(self, peer: PeerId) -> None:
        self._adverts.pop(peer, None)
        self._forget_history(peer)

    def _forget_history(self, peer: PeerId) -> None:
        for history in (self._missed, self._heard, self._failures):
            history.pop(peer, None)
        self.met.discard(peer)

    def _index(self) -> None:
        self._by_state, self._found = {}, {}
        for advert in self._adverts.values():
            self._by_state.setdefault((advert.stage, advert.state), []).append(advert)

    def __len__(self) -> int:
        """Number of other nodes."""
        return len(self._adverts)

    # --- who is there -----------------------------------------------------------------------------------------------

    def get(self, peer: PeerId) -> Advert | None:
        """The newest advert of a peer; None if the peer is unknown."""
        return self._adverts.get(peer)

    def of_stage(self, stage: int, states: Set[str] = PRESENT) -> Sequence[Advert]:
        """Other nodes of a stage that are in one of `states`."""
        asked = stage, frozenset(states)
        found = self._found.get(asked)
        if found is None:
            parts = [some for state in STATES if state in states and (some := self._by_state.get((stage, state)))]
            found = parts[0] if len(parts) == 1 else sorted(chain(*parts), key=lambda advert: advert.peer_id)
            self._found[asked] = found
        return found

    def all(self) -> Sequence[Advert]:
        """All other nodes."""
        return [*self._adverts.values()]

    def counts(self) -> dict[tuple[int, str], int]:
        """Number of other nodes in each (stage, state)."""
        return {which: len(adverts) for which, adverts in self._by_state.items()}

    def seen(self, *, now: float) -> tuple[SeenPeer, ...]:
        """All other nodes as of `now`. Callable from any thread."""
        aside = dict.fromkeys(self.doubted(), now + FIRST_ASIDE_S / 2) | self._aside(now)
        adverts = tuple(self._adverts.values())
        return tuple(SeenPeer(a, max(0.0, now - a.announced_at), aside.get(a.peer_id, now) - now) for a in adverts)

    # --- trust in peers -------------------------------------------------------------------------------------------

    def failed(self, peer: PeerId, *, now: float, answered: bool = False) -> None:
        """A call to a peer failed, or it `answered` falsely: set it aside for a time that doubles with each failure."""
        if peer not in self._adverts:
            return
        self.met |= {peer} if answered else set()
        failures = self._failures.setdefault(peer, _Failures())
        if now >= failures.aside_until:
            failures.newest_at, failures.doubted = now, failures.doubted or failures.count > 0
            failures.aside_until = now + min(LONGEST_ASIDE_S, FIRST_ASIDE_S * 2**failures.count)
            failures.count = min(failures.count + 1, 16)

    def answered(self, peer: PeerId) -> None:
        """A peer answered a call, whatever the answer."""
        self._failures.pop(peer, None)
        self.met |= {peer} & self._adverts.keys()

    def doubted(self) -> Set[PeerId]:
        """The peers that have never answered, and have failed twice or were doubted when they came."""
        return {peer for peer, one in self._failures.copy().items() if one.doubted} - self.met

    def to_meet(self, *, now: float) -> dict[PeerId, int]:
        """The peers to ask because they never answered, not just after a failure, and how often each has failed."""
        return {p: one.count for p, one in self._failures.items() if one.aside_until <= now and p not in self.met}

    def distrust(self, peer: PeerId, *, now: float, for_s: float | None = None) -> None:
        """Set a peer aside `for_s` seconds, or DISTRUSTED_S, whatever it answers; or longer, if it already is."""
        until = max(now + (for_s or DISTRUSTED_S), self._distrusted.get(peer, 0.0))
        self._distrusted = {**self.distrusted(now), peer: until}

    def distrusted(self, now: float) -> dict[PeerId, float]:
        """The peers that are distrusted now, and until when."""
        return {peer: until for peer, until in self._distrusted.items() if until > now}

    def is_aside(self, peer: PeerId, *, now: float) -> bool:
        """Whether the peer is set aside now, because it failed, is doubted or distrusted."""
        one, until = self._failures.get(peer, _Failures()), self._distrusted.get(peer, 0.0)
        return max(one.aside_until, until) > now or (one.doubted and peer not in self.met)

    def _aside(self, now: float) -> dict[PeerId, float]:
        failed = {peer: one.aside_until for peer, one in self._failures.copy().items() if one.aside_until > now}
        return failed | self.distrusted(now)

    def usable(self, stage: int, *, now: float, without: Collection[PeerId] = ()) -> Sequence[PeerId]:
        """Ready replicas not set aside (nor doubted, unless all are); if all are, the one that is back first."""
        doubted, aside = self.doubted(), self._aside(now)
        listed = [advert.peer_id for advert in self.of_stage(stage, READY)]
        ready = [peer for peer in listed if peer not in doubted] or listed
        ready = [peer for peer in ready if peer not in without]
        return [p for p in ready if p not in aside] or sorted(ready, key=lambda peer: (aside[peer], peer))[:1]

    def deserted(self, stages: int, mine: int) -> list[int]:
        """Stages other than `mine` that nobody serves: there is no replica, or none of the next stage answers any more.

        Silence counts only for the next stage: it is called continually, so an answer soon shows that it is back.
        """
        silent = {peer for peer, one in self._failures.items() if one.count >= FAILURES_TO_DESERT}

        def served(stage: int) -> bool:
            replicas = self.of_stage(stage, IN_ROUNDS)
            return any(a.peer_id not in silent for a in replicas) if stage == mine + 1 else bool(replicas)

        return [stage for stage in range(stages) if stage != mine and not served(stage)]

    def anybody(self, stage: int) -> bool:
        """Whether the stage has a replica other than this node, whether it answers or not."""
        return bool(self.of_stage(stage, IN_ROUNDS))

    # --- the clock of the swarm -----------------------------------------------------------------------------------

    def heard(self, origin: Origin, *, now: float) -> None:
        """A microbatch of `origin` arrived; its label says how far that node has come."""
        if origin.peer in self._adverts:
            step, at, _ = self._heard.get(origin.peer, (0, now, now))
            self._heard[origin.peer] = (origin.step, now, now) if origin.step >= step else (step, at, now)

    def heard_at(self, peer: PeerId) -> float:
        """When this peer's newest microbatch arrived; −inf if none has."""
        return self._heard[peer][2] if peer in self._heard else -inf

    def last_sign(self, peer: PeerId) -> float | None:
        """When a peer was last known to be alive, by its advert or a microbatch; None if the peer is unknown."""
        advert = self._adverts.get(peer)
        return None if advert is None else max(advert.announced_at, self.heard_at(peer))

    def step_of(self, peer: PeerId) -> float | None:
        """The highest known step of a peer; None if the peer is unknown."""
        advert, heard = self._adverts.get(peer), self._heard.get(peer)
        return None if advert is None else max(advert.step, heard[0] if heard else 0)

    def clocks(self, of: Iterable[Advert], *, now: float) -> list[tuple[float, float, float]]:
        """(step, age in seconds, steps per second) of these stage-0 replicas, each at its latest sign of life.

        One that has not measured its speed yet is left out: its clock cannot be projected, and would hold others back.
        """
        found = []
        for advert in (one for one in of if one.steps_per_s > 0):
            step, at, heard = advert.step, advert.announced_at, self._heard.get(advert.peer_id)
            if heard is not None and heard[1] > at:
                step, at = max(step, float(heard[0])), heard[1]
            found.append((step, max(0.0, now - at), advert.steps_per_s))
        return found
