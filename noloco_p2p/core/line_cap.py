"""An owner's cap on one direction of a node's line: a token bucket, and the order of waiting messages. Pure.

A message may be sent if the bucket is not in debt; its bytes are then taken from the bucket. So in any time T at most
rate·T, the capacity of the bucket, and one message are sent. Gradients go before activations, and these before
everything else; within a kind the oldest goes first. Each waiting kind gets at least a tenth of the line, so that none
starves.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count

from noloco_p2p.core.line_rate import MIN_MESSAGE_BYTES

BYTES_PER_MBIT = 125_000
HELD_S = 0.1
"""Capacity of the bucket, in seconds at its rate. An event loop that wakes up later than this wastes some of it."""
CAPPED_MESSAGE_S = 0.0125
"""The size to which messages on a capped line are limited, in seconds at its rate. Senders see only the size and take
the line for one that is an eighth as fast, so they use few connections (`MeasuredLine.granted`)."""
SHARE = 0.1
"""Minimum share of a busy line for each waiting kind."""


class Precedence(IntEnum):
    """The kinds of messages, most urgent first."""

    GRADIENT = 0
    """It frees a graph at its receiver and at all nodes upstream of that."""
    ACTIVATION = 1
    OTHER = 2
    """Snapshots and states: no computation waits for them."""


@dataclass(slots=True, eq=False)
class LineTurn:
    """A message that waits for its turn."""

    precedence: Precedence
    age: tuple[float, ...]
    """Step and index of its microbatch at its origin, and what decides between equal ones. Within a kind the smallest
    goes first; ties go by arrival."""
    nbytes: int
    go: Callable[[], object]
    """Called when it may be sent."""
    withdrawn: bool = False
    """True if its sender has given up waiting."""


@dataclass(slots=True)
class _Queue:
    """The waiting messages of one kind."""

    turns: list[tuple[tuple[float, ...], int, LineTurn]] = field(default_factory=list)
    """A heap, by age and then by order of arrival."""
    owed: float = 0.0
    """Bytes of its share that it has not received yet."""

    def head(self) -> LineTurn | None:
        """The next message that has not been withdrawn; None if there is none."""
        while self.turns and self.turns[0][2].withdrawn:
            heapq.heappop(self.turns)
        return self.turns[0][2] if self.turns else None


class LineCap:
    """One direction of a line, capped at `bytes_per_s`. Times are seconds on the caller's clock."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._level = self._most = bytes_per_s * HELD_S
        """Bytes that may be sent at once; below 0, the bucket is in debt."""
        self._as_of = -math.inf
        self._queues = [_Queue() for _ in Precedence]
        self._numbers = count()

    @property
    def message_bytes(self) -> int:
        """The largest message that keeps the traffic smooth."""
        return max(MIN_MESSAGE_BYTES, int(self._rate * CAPPED_MESSAGE_S))

    def ask(self, turn: LineTurn) -> None:
        """Queue a message."""
        heapq.heappush(self._queues[turn.precedence].turns, (turn.age, next(self._numbers), turn))

    def charge(self, nbytes: int, now: float) -> None:
        """Charge bytes that were sent without asking; negative if fewer were sent than were asked for."""
        self._fill(now)
        self._level = min(self._most, self._level - nbytes)

    def next(self, now: float) -> LineTurn | None:
        """Take the message to send now, and charge it to the bucket. None if the bucket is in debt or nothing waits."""
        self._fill(now)
        # Rounding may leave up to a byte of a debt that has been paid.
        if self._level < -1:
            return None
        waiting = [(queue, head) for queue in self._queues if (head := queue.head())]
        if not waiting:
            return None
        queue, turn = next((one for one in waiting[1:] if one[0].owed >= one[1].nbytes), waiting[0])
        heapq.heappop(queue.turns)
        self._level -= turn.nbytes
        for other in self._queues:
            # The next message of the same kind may follow in a moment.
            other.owed = other.owed + SHARE * turn.nbytes if other is queue or other.head() else 0.0
        queue.owed = max(0.0, queue.owed - turn.nbytes)
        return turn

    def free_at(self) -> float | None:
        """When `next` will return a message; None if none is queued."""
        if not any(queue.head() for queue in self._queues):
            return None
        return self._as_of + max(0.0, -self._level) / self._rate

    def _fill(self, now: float) -> None:
        self._level = min(self._most, self._level + (now - self._as_of) * self._rate)
        self._as_of = now
