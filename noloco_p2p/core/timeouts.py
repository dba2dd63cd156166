"""How long a call may take before its peer is taken for hung: learnt from recent calls, nested hop by hop.

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
TIMER_S = 0.01
"""Timers are as exact as this: a call that took all of its time but this was ended by it."""


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

    def was_hurried(self, given_s: float, took_s: float) -> bool:
        """A call was ended by its `given_s`, and that is less than such calls need: no proof against its peer."""
        needed_s = self.deadline_s()
        return needed_s is not None and given_s < needed_s and took_s >= given_s - TIMER_S


def attempt_s(left_s: float, hops_below: int, deadline_s: float | None) -> float:
    """Seconds that one call to the next stage gets of the `left_s` that its caller has.

    `hops_below` calls are nested in it: 0 when the callee is the last stage. Of the time left it gets a share of
    (hops_below + 1) / (hops_below + 2), so that each hop gives up before the one above it and has time for a retry;
    of its own deadline, once it has one, as many as there are hops that may each have to wait for theirs.
    """
    share = left_s * (hops_below + 1) / (hops_below + 2)
    return share if deadline_s is None else min(share, (hops_below + 1) * deadline_s)
