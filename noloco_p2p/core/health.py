"""Whether a node is healthy: the one line that `/health` and the watchdog show. Derived from its own status alone."""

from typing import NamedTuple

from noloco_p2p.core.status import AnyReplica, Resource, Status, Wait
from noloco_p2p.humanize import figure

STEPS_LATE = 10
"""A training node has stalled if it has taken no inner step for this many times the median step."""
SHORTEST_STALL_S = 5.0
"""Shorter pauses are not stalls: they may be an evaluation, or an outer round whose partner is late."""
OVERDUE_SHARE, OVERDUE_S = 0.1, 1.0
"""A wait is overdue if it is past its deadline by a tenth of it or by a second, whichever is more: timers fire late."""
LONGEST_SILENCE_S = 5.0
"""Longest time without a heartbeat of the event loop that is healthy; one is due every half second."""


class HealthProblem(NamedTuple):
    """What is wrong with a node."""

    key: str
    """Stays the same while it is the same problem."""
    line: str


def problem_line(status: Status) -> str | None:
    """What is wrong with a node, in one line; None if nothing is."""
    found = problem(status)
    return found.line if found is not None else None


def problem(status: Status) -> HealthProblem | None:
    """The first of these that applies: the event loop is stuck, a wait is overdue, no inner step for far too long."""
    silent_s = status.figures.loop_silent_s
    if silent_s > LONGEST_SILENCE_S:
        line = f"the event loop has been silent for {silent_s:,.0f} s: something blocks this process"
        return HealthProblem("loop", line)
    for wait in status.waits:
        if overdue(wait):
            return HealthProblem(f"wait {wait.what} {wait.whom} {wait.why}", f"overdue: {sentence(wait)}")
    late_s = lateness_s(status)
    if late_s is not None:
        line = f"no inner step for {late_s:,.0f} s, the median is {figure(status.step_took_s or 0.0, 2)} s"
        holder = longest_wait(status)
        return HealthProblem("step", line if holder is None else f"{line}: {sentence(holder)}")
    return None


def overdue(wait: Wait) -> bool:
    """Whether the wait is past its deadline by more than a late timer explains."""
    if wait.deadline_s is None:
        return False
    return wait.since_s > wait.deadline_s + max(OVERDUE_S, OVERDUE_SHARE * wait.deadline_s)


def lateness_s(status: Status) -> float | None:
    """Seconds since the last inner step if that is far too long; None if it is not, or if the node is not training."""
    since_s, took_s = status.since_step_s, status.step_took_s
    if since_s is None or took_s is None or since_s <= max(STEPS_LATE * took_s, SHORTEST_STALL_S):
        return None
    return since_s


def longest_wait(status: Status) -> Wait | None:
    """What holds training up: the longest wait for the device or a known peer, else for any replica of a stage, else
    the longest of all. Idle waits do not count."""
    others = {seen.advert.peer_id for seen in status.seen}
    waits = [wait for wait in status.waits if not wait.idle]
    leading = [wait for wait in waits if wait.whom == Resource.DEVICE or wait.whom in others]
    staged = [wait for wait in waits if isinstance(wait.whom, AnyReplica)]
    return next(iter(leading or staged or waits), None)


def sentence(wait: Wait) -> str:
    """A wait in words: how long it has lasted, its limit, what for, from whom, and on whose behalf."""
    limit = "" if wait.deadline_s is None else f" (at most {figure(wait.deadline_s)} s)"
    why = "" if wait.why is None else f" ({wait.why})"
    return f"waited {figure(wait.since_s)} s{limit} for {wait.what} from {wait.whom}{why}"
