"""Whether a node is well: the one line of `/health` and of the watchdog. Pure, from the node's own status."""

from typing import NamedTuple

from noloco_p2p.core.status import AnyReplica, Resource, Status, Wait

STEPS_LATE = 10
"""A node in training that has done no inner step for this many times the median stands still."""
SHORTEST_STALL_S = 5.0
"""A shorter pause is none: it may be an evaluation, or an outer round whose partner is late."""
OVERDUE_SHARE, OVERDUE_S = 0.1, 1.0
"""A wait is overdue a tenth of its deadline or a second after it, whichever is more: timers come late, too."""
LONGEST_SILENCE_S = 5.0
"""The event loop comes to its heartbeat every half second."""


class HealthProblem(NamedTuple):
    """What is wrong with a node."""

    key: str
    """Equal as long as it is the same problem."""
    line: str


def problem_line(status: Status) -> str | None:
    """What is wrong with a node, in one line; None when it is well."""
    found = problem(status)
    return found.line if found is not None else None


def problem(status: Status) -> HealthProblem | None:
    """The first of: the event loop stands still, a wait is overdue, no inner step for far too long."""
    silent_s = status.figures.loop_silent_s
    if silent_s > LONGEST_SILENCE_S:
        line = f"the event loop has been silent for {silent_s:.0f} s: something blocks this process"
        return HealthProblem("loop", line)
    for wait in status.waits:
        if overdue(wait):
            return HealthProblem(f"wait {wait.what} {wait.whom} {wait.why}", f"overdue: {sentence(wait)}")
    late_s = lateness_s(status)
    if late_s is not None:
        line = f"no inner step for {late_s:.0f} s, the median is {status.step_took_s or 0.0:.2g} s"
        holder = longest_wait(status)
        return HealthProblem("step", line if holder is None else f"{line}: {sentence(holder)}")
    return None


def overdue(wait: Wait) -> bool:
    """The wait has outlived its deadline, by more than timers come late."""
    if wait.deadline_s is None:
        return False
    return wait.since_s > wait.deadline_s + max(OVERDUE_S, OVERDUE_SHARE * wait.deadline_s)


def lateness_s(status: Status) -> float | None:
    """Seconds since the last inner step when that is far too long; None while training goes on, or is not going on."""
    since_s, took_s = status.since_step_s, status.step_took_s
    if since_s is None or took_s is None or since_s <= max(STEPS_LATE * took_s, SHORTEST_STALL_S):
        return None
    return since_s


def longest_wait(status: Status) -> Wait | None:
    """What holds the training up: the longest wait that leads to somebody, else the longest of all; no idle ones."""
    others = {seen.advert.peer_id for seen in status.seen}
    waits = [wait for wait in status.waits if not wait.idle]
    leading = [wait for wait in waits if wait.whom == Resource.DEVICE or wait.whom in others]
    staged = [wait for wait in waits if isinstance(wait.whom, AnyReplica)]
    return next(iter(leading or staged or waits), None)


def sentence(wait: Wait) -> str:
    """A wait for people: how long, of how long at most, what for, from whom, on whose behalf."""
    limit = "" if wait.deadline_s is None else f" (at most {wait.deadline_s:.3g} s)"
    why = "" if wait.why is None else f" ({wait.why})"
    return f"waited {wait.since_s:.3g} s{limit} for {wait.what} from {wait.whom}{why}"
