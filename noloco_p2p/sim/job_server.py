"""Servers that do one job at a time in simulated time, without asyncio, for the estimates of `throughput_bound`."""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Priority = tuple[int, float, int]
"""The lowest value goes first."""
Action = Callable[[], None]


class Timeline:
    """Runs actions in order of time."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds."""
        self._heap: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, action: Action) -> None:
        """Run an action this many seconds from now."""
        heapq.heappush(self._heap, (self.now + seconds, next(self._numbers), action))

    def run(self) -> None:
        """Run all actions, and those that they add."""
        while self._heap:
            self.now, _, action = heapq.heappop(self._heap)
            action()


@dataclass(slots=True, eq=False)
class JobServer:
    """A device, or a part of a path. It does one job at a time and finishes every job that it has started."""

    timeline: Timeline
    speed: float = 1.0
    """Work per second: bytes for a line, seconds for a device."""
    backlog_s: float = 0.0
    """Total duration of all unfinished jobs."""
    worked_s: float = 0.0
    _busy: bool = False
    _jobs: list[tuple[Priority, int, float, Action, Action]] = field(default_factory=list)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def submit(self, priority: Priority, work: float, ended: Action, began: Action = lambda: None) -> None:
        """Queue a job. `began` and `ended` are called when it starts and when it ends."""
        seconds = work / self.speed
        self.backlog_s += seconds
        heapq.heappush(self._jobs, (priority, next(self._numbers), seconds, ended, began))
        self._next()

    def _next(self) -> None:
        if self._busy or not self._jobs:
            return
        self._busy = True
        _, _, seconds, ended, began = heapq.heappop(self._jobs)
        began()
        self.timeline.after(seconds, lambda: self._end(seconds, ended))

    def _end(self, seconds: float, ended: Action) -> None:
        self._busy = False
        self.backlog_s -= seconds
        self.worked_s += seconds
        ended()
        self._next()


def carry(parts: Sequence[JobServer], priority: Priority, nbytes: int, ended: Action) -> None:
    """Send over all parts of a path at once: each part starts when the previous one does, or once it is free."""
    left = len(parts)

    def part_ended() -> None:
        nonlocal left
        left -= 1
        if not left:
            ended()

    def enter(part: int) -> None:
        further = (lambda: enter(part + 1)) if part + 1 < len(parts) else (lambda: None)
        parts[part].submit(priority, nbytes, part_ended, further)

    enter(0)
