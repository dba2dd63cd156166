"""Which peers have recently answered this node, and what they said about themselves.

An advert is a claim: anybody can sign one without running a node. Decisions that many nodes must make alike (pairs,
guardians, stages) count adverts nevertheless, because they need one view. An action that destroys something, or
that cannot be undone, also needs an answer from the peers that it depends on (ARCHITECTURE.md, "What a stranger can
do"). Pure.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from math import inf
from random import Random

from noloco_p2p.core.messages import Advert, NodeDescription, PeerId

PROBES = 8
"""Maximum number of peers asked for one decision, so that nobody can make a swarm call a victim of their choice."""
LIFETIMES = 2.0
"""How long an answer stays valid, in lifetimes of an advert."""


@dataclass(frozen=True, slots=True)
class _Asked:
    at: float
    said: NodeDescription | None
    silent_since: float | None


class Exchanges:
    """The newest outcome of asking each peer. `now` is the caller's clock, in seconds."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._outcomes: dict[PeerId, _Asked] = {}

    def note(self, peer: PeerId, said: NodeDescription | None, *, now: float) -> None:
        """A peer has been asked. `said`: its answer; None if no answer came that proves who it is."""
        before = self._outcomes.pop(peer, None)
        since = None if said else now if before is None or before.silent_since is None else before.silent_since
        kept = {one: of for one, of in self._outcomes.items() if now - of.at <= 2 * LIFETIMES * self._ttl_s}
        self._outcomes = kept | {peer: _Asked(now, said, since)}

    def said(self, peer: PeerId, *, now: float) -> NodeDescription | None:
        """The peer's newest answer; None if it did not answer, or was last asked more than LIFETIMES ago."""
        found = self._outcomes.get(peer)
        return found.said if found is not None and now - found.at <= LIFETIMES * self._ttl_s else None

    def silent_s(self, peer: PeerId, *, now: float, since: float = -inf) -> float:
        """For how long, from `since` on, the peer has not answered; 0 if it answered, or was not asked recently."""
        found = self._outcomes.get(peer)
        if found is None or found.silent_since is None or found.at < max(since, now - LIFETIMES * self._ttl_s):
            return 0.0
        return max(now - max(found.silent_since, since), 1e-9)

    def proven(self, adverts: Iterable[Advert], states: Set[str], *, now: float) -> list[Advert]:
        """Those whose peers have answered, with the advertised stage and with one of these states."""
        answers = [(advert, self.said(advert.peer_id, now=now)) for advert in adverts]
        return [a for a, said in answers if said is not None and said.stage == a.stage and said.state in states]

    def unknown(self, adverts: Iterable[Advert], *, now: float, since: float | None = None) -> list[Advert]:
        """Those whose peers have not been asked since `since`. By default: not within half of the time for which an
        answer is valid, or not since they announced another stage or state than they answered."""
        from_s = now - LIFETIMES * self._ttl_s / 2 if since is None else since
        return [a for a in adverts if self._asked_at(a, anew=since is None) < from_s]

    def was_asked(self, peer: PeerId) -> bool:
        """Whether the peer has been asked recently, whether it answered or not."""
        return peer in self._outcomes

    def _asked_at(self, advert: Advert, *, anew: bool) -> float:
        found = self._outcomes.get(advert.peer_id)
        if found is None:
            return -inf
        other = found.said is not None and (found.said.stage, found.said.state) != (advert.stage, advert.state)
        return -inf if anew and other and advert.announced_at > found.at else found.at


def sample(adverts: Sequence[Advert], rng: Random) -> list[Advert]:
    """At most PROBES of `adverts`, drawn with odds by the announced speeds: decisions rest most on the fastest ones.

    Efraimidis and Spirakis, Weighted random sampling with a reservoir (2006).
    """
    if len(adverts) <= PROBES:
        return list(adverts)
    keys = {a.peer_id: rng.random() ** (1 / max(1e-9, a.microbatches_per_s)) for a in adverts}
    return sorted(adverts, key=lambda a: (-keys[a.peer_id], a.peer_id))[:PROBES]
