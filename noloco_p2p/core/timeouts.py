"""How long an answer may take, learnt from recent ones, and how the time of a microbatch is shared over its hops.

Pure: durations come in, seconds go out; the caller holds the clock.
"""

from collections import deque
from statistics import median

WINDOW = 64
"""Recent calls that are remembered."""
FEWEST = 8
"""With fewer calls than this there is no deadline of their own yet."""
SPREADS = 10.0
"""k of median + k · median absolute deviation. In simulations k = 4 blamed healthy middle peers in 41–50 % of the
cases, k = 10 in 0–1 %."""
SLOWER = 4.0
"""A replica that needs this many times the median is slow, not hung. Where most replicas are alike the deviation is
next to nothing, and would allow nothing for the one that is three times slower."""
ANSWER_SHARE = 0.1
"""Part of the time it was given that a hop keeps for its own answer to travel up."""
WAIT_SHARE = 0.5
"""Part of a call's time for which it may wait for admission; then the answer is Busy, and no peer is taken for hung."""


class AdaptiveTimeout:
    """The durations of the last calls of one kind that succeeded, seconds."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=WINDOW)

    def observe(self, seconds: float) -> None:
        """A call succeeded after `seconds`."""
        self._seconds.append(seconds)

    def deadline_s(self, floor_s: float = 0.0) -> float | None:
        """How long a call of this kind may take, `floor_s` at least; None until enough of them were seen."""
        if len(self._seconds) < FEWEST:
            return None
        typical = median(self._seconds)
        spread = median(abs(seconds - typical) for seconds in self._seconds)
        return max(floor_s, SLOWER * typical, typical + SPREADS * spread)


def attempt_s(left_s: float, hops_below: int) -> float:
    """Seconds without progress that one call to the next stage gets of the `left_s` that its caller bears.

    `hops_below` calls are nested in it: 0 when the callee is the last stage. It gets (hops_below + 1) /
    (hops_below + 2) of the time left, so that each hop gives up before the one above it and has time for a retry.
    """
    return left_s * (hops_below + 1) / (hops_below + 2)
