"""When results that are not finite are this node's own fault (ARCHITECTURE.md, "Failure and timeouts")."""

from collections.abc import Collection

from noloco_p2p.core.messages import PeerId

LONGEST_STREAK = 10


class NonFiniteStreak:
    """Counts microbatches in a row whose loss or gradient was not finite, with the peers they came from or through."""

    def __init__(self) -> None:
        self._length = 0
        self._peers: set[PeerId] = set()

    def record(self, finite: bool, peer: PeerId) -> None:
        """One microbatch has ended; `peer` is its origin, or at stage 0 the replica that it went through."""
        if finite:
            self._length = 0
            self._peers.clear()
        else:
            self._length += 1
            self._peers.add(peer)

    def reason_to_stop(self, known: Collection[PeerId]) -> str | None:
        """Why the node must stop: ten in a row by two peers or more, or by the only one of `known`; else None."""
        if self._length < LONGEST_STREAK or (len(self._peers) < 2 and not self._peers.issuperset(known)):
            return None
        return (
            f"{self._length} microbatches in a row had a loss or gradient that is not finite: "
            "this node's weights or device are broken; restart it, perhaps with a lower inner.peak_learning_rate"
        )
