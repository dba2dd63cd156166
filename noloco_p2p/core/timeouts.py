"""How long an answer may take, at most and as learnt from recent ones, and how the time of a microbatch is divided
among its hops.

Pure: durations come in, seconds go out; the caller holds the clock.
"""

from collections import deque
from statistics import median

WINDOW = 64
"""How many recent calls are remembered."""
FEWEST = 8
"""With fewer calls than this, no deadline is derived from them."""
SPREADS = 10.0
"""k of median + k · median absolute deviation. In simulations k = 4 blamed healthy middle peers in 41–50 % of the
cases, k = 10 in 0–1 %."""
SLOWER = 4.0
"""A replica that takes up to this many times the median is slow, not hung. Where most replicas are alike, the deviation
is next to nothing, and would not tolerate one that is three times slower."""
ANSWER_SHARE = 0.1
"""Share of its time that a hop reserves for its own answer to travel back."""
WAIT_SHARE = 0.5
"""Share of its time that a call may wait for admission; after that it gets Busy, so that no peer is taken for hung."""

DESCRIBE_S = 5.0
"""Longest wait for a peer's description of itself, seconds."""
LONGEST_CALL_S = 3_000.0
"""Longest call with an activation, seconds. A peer that makes no progress ends its call earlier."""
SILENCE_S = 5.0
"""Longest time between two messages of a transfer, seconds. A measured line sends each in a tenth of a second, or 16
KiB, so even if many transfers share the line, a peer that is silent for longer hangs."""
CAPTURE_S = 20.0
"""Longest wait for the first message of a state, seconds: the peer first copies it from its device."""
TRANSFER_DEADLINE_S = 1800.0
"""Longest transfer of the weights that a node starts from, of a replica or a guardian, seconds. One that falls silent
is given up sooner."""


class AdaptiveTimeout:
    """Derives a deadline for calls of one kind from the durations of the last ones that succeeded."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=WINDOW)

    def observe(self, seconds: float) -> None:
        """A call succeeded after `seconds`."""
        self._seconds.append(seconds)

    def deadline_s(self, floor_s: float = 0.0) -> float | None:
        """How long a call of this kind may take, at least `floor_s`; None until enough calls have been observed."""
        if len(self._seconds) < FEWEST:
            return None
        typical = median(self._seconds)
        spread = median(abs(seconds - typical) for seconds in self._seconds)
        return max(floor_s, SLOWER * typical, typical + SPREADS * spread)


def attempt_s(left_s: float, hops_below: int) -> float:
    """Seconds without progress that a call to the next stage is given, out of the `left_s` that its caller tolerates.

    `hops_below` calls are nested in it: 0 if the callee is the last stage. It gets (hops_below + 1) / (hops_below + 2)
    of the time left, so that each hop gives up before the one above it, which then has time for a retry.
    """
    return left_s * (hops_below + 1) / (hops_below + 2)
