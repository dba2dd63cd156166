"""Results in a row that are not finite (ARCHITECTURE.md, "A microbatch")."""

from noloco_p2p.core.messages import PeerId

LONGEST_STREAK = 10
REASON = (
    f"{LONGEST_STREAK} microbatches in a row had a loss or gradient that is not finite: "
    "this node's weights or device are broken; restart it, perhaps with a lower inner.peak_learning_rate"
)


class NonFiniteStreak:
    """Counts microbatches in a row whose loss or gradient was not finite, with the peers they came from or through."""

    def __init__(self) -> None:
        self._peers: list[PeerId] = []

    def record(self, finite: bool, peer: PeerId) -> set[PeerId]:
        """One microbatch has ended; `peer` is its origin, or at stage 0 the replica that it went through.

        The peers of ten in a row, whereupon the streak begins anew; empty: they are not ten.
        """
        self._peers = [] if finite else [*self._peers, peer]
        if len(self._peers) < LONGEST_STREAK:
            return set()
        found, self._peers = set(self._peers), []
        return found
