"""Remembers which microbatches have been counted, so that none counts twice (ARCHITECTURE.md, "Exactly once")."""

from collections import OrderedDict
from collections.abc import Iterable

from noloco_p2p.core.messages import MicrobatchId, PeerId
from noloco_p2p.core.recent import Recent

SPENT_STEPS = 8
SPENT_IDS = 4096
"""Counted ids are remembered for at least SPENT_STEPS inner steps, and the newest SPENT_IDS in any case."""
ORIGINS = 1024
"""Number of processes for which the highest forgotten counter is kept; beyond that, the oldest goes."""


class SpentIds:
    """Ids that were counted. They are forgotten after `SPENT_STEPS` inner steps, except for the newest `SPENT_IDS`.

    For each process that gave ids, the highest counter that was forgotten is kept: an id up to that may have been
    counted, and is taken as counted.
    """

    def __init__(self) -> None:
        self._step_of: OrderedDict[MicrobatchId, int] = OrderedDict()
        self._forgotten = Recent[tuple[PeerId, int], int](ORIGINS)
        self._steps = 0

    def __contains__(self, microbatch: MicrobatchId) -> bool:
        peer, incarnation, counter = microbatch
        return microbatch in self._step_of or counter <= self._forgotten.get((peer, incarnation), -1)

    def spend(self, microbatch: MicrobatchId) -> bool:
        """Record an id. Returns True if it was certainly not recorded before."""
        if microbatch in self:
            return False
        self._step_of[microbatch] = self._steps
        return True

    def ended(self) -> tuple[MicrobatchId, ...]:
        """Ids that were counted before the current step, oldest first."""
        return tuple(microbatch for microbatch, step in self._step_of.items() if step < self._steps)

    def refill(self, ended: Iterable[MicrobatchId]) -> None:
        """Remember these ids instead, given oldest first, as if the step that has just ended had counted them. What had
        been forgotten before is still taken as counted."""
        self._step_of = OrderedDict.fromkeys(ended, self._steps)
        self.end_step()

    def end_step(self) -> None:
        """An inner step has been taken: forget old ids."""
        self._steps += 1
        while len(self._step_of) > SPENT_IDS:
            oldest, step = next(iter(self._step_of.items()))
            if step > self._steps - SPENT_STEPS:
                break
            del self._step_of[oldest]
            origin = (oldest.peer, oldest.incarnation)
            self._forgotten[origin] = max(oldest.counter, self._forgotten.get(origin, -1))
