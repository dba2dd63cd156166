"""Which peers have served this node, and how much time it may lose on others (ARCHITECTURE.md, "On trial").

To say who one is costs nothing. Only a peer that has served a call shows that it serves. Pure: the caller has the
clock.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from noloco_p2p.core.members import FAILURES_TO_DESERT
from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.timeouts import AdaptiveTimeout
from noloco_p2p.errors import Declined, Unreachable, Violation

SHARE = 0.02
"""Share of a node's time that it may lose on calls to peers on trial."""
SERVED_SHARE = 0.25
"""How much of the time counts that is lost on a peer that has served before: it may soon be back."""
SPARE_SILENCES = 5.0
"""The most of this time that is saved up, in units of `limits.patience_floor_s`."""
SHORTEST_SILENCES = 5.0
"""How long a trial may always take, likewise."""

MOST_FAILURES = 16
"""At most this many failures of a peer count: one that failed for days must not wait until all others have failed as
often, and its trial must not become endless."""
SERVED_TIMES = 16.0
"""How much longer than a first trial a call to a peer that serves may take: so at least 64 medians, because `weighted`
reckons with peers that are as slow as that (`core/routing`)."""


class Trials:
    """The calls of one kind that a node makes. A peer is on trial until it has served one, and after two failures in a
    row until it serves the next. At first as many trials as usual are made; once too much time has been lost on those
    that failed, only few.
    """

    def __init__(self, patience_s: float, now: Callable[[], float], listed: Callable[[PeerId], object]) -> None:
        self._patience_s, self._now, self._listed = patience_s, now, listed
        self._served: set[PeerId] = set()
        self._failures: dict[PeerId, int] = {}
        """How often each peer has failed since it last served a call, or first failed; at most MOST_FAILURES."""
        self._took = AdaptiveTimeout()
        self._most_s = self._spare_s = SPARE_SILENCES * patience_s
        self._as_of = 0.0

    def on_trial(self, peer: PeerId) -> bool:
        """Whether the peer has not served a call, or has failed twice since the last one."""
        return peer not in self._served or self._failures.get(peer, 0) >= FAILURES_TO_DESERT

    def among(self, peers: Sequence[PeerId], *, proven: bool = False, busy: Collection[PeerId] = ()) -> list[PeerId]:
        """Those of `peers` to choose from: only those not on trial if this call should go to a `proven` one or there is
        no time to lose, otherwise also those on trial that have failed least often. If all are on trial, these.

        `busy`: the peers that would not take the call now."""
        trials = {peer for peer in peers if self.on_trial(peer)}
        found = [peer for peer in peers if peer not in trials]
        if found and (proven or self._spend(0.0) <= 0):
            return found
        fewest = min((self._rank(peer) for peer in trials if peer not in busy), default=0)
        return [peer for peer in peers if self._rank(peer) <= fewest]

    def _rank(self, peer: PeerId) -> int:
        return 0 if peer in self._served else self._failures.get(peer, 0)

    @contextmanager
    def call(self, peer: PeerId, *, usual: bool = True) -> Iterator[float | None]:
        """Note how a call to a peer ends, and if it is a `usual` one, how long it takes. Busy is neither a failure nor
        a success, and neither is a cancelled call.

        Yields how many seconds it may take, whatever progress the peer reports; None: too little is known. A trial may
        take longer than the usual calls, and twice as long after each counted failure, so that a slow peer passes in
        the end.
        """
        began, trial, failed = self._now(), self.on_trial(peer), self._failures.get(peer, 0)
        usual_s = self._took.deadline_s(SHORTEST_SILENCES * self._patience_s)
        try:
            yield usual_s and usual_s * (2.0**failed if trial else SERVED_TIMES)
        except (Unreachable, Declined, Violation):
            if self._failures.get(peer, 0) == failed:  # otherwise it is the same outage, or it has served meanwhile
                self._failures[peer] = min(failed + 1, MOST_FAILURES)
            self._forget_departed()
            if trial and not all(map(self.on_trial, self._served)):  # otherwise there was no other to call
                self._spend((self._now() - began) * (SERVED_SHARE if peer in self._served else 1.0))
            raise
        else:
            if peer not in self._served:
                self._forget_departed()
            self._served.add(peer)
            self._failures.pop(peer, None)
            if usual:
                self._took.observe(self._now() - began)

    def _forget_departed(self) -> None:
        self._failures = {one: count for one, count in self._failures.items() if self._listed(one)}
        self._served = {one for one in self._served if self._listed(one)}

    def _spend(self, seconds: float) -> float:
        """Take `seconds` from the time that may be lost. Returns what is left."""
        now = self._now()
        self._spare_s = min(self._most_s, self._spare_s + SHARE * (now - self._as_of)) - seconds
        self._as_of = now
        return self._spare_s
