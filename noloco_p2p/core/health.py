"""Whether a node is well: the one line of `/health` and of the watchdog. Pure, from what the node tells of itself."""

from typing import NamedTuple

from noloco_p2p.core.status import AnyReplica, Resource, Status, Wait

STEPS_LATE = 10
"""Without an inner step for so many times the median, a node in training stands still."""
SHORTEST_STALL_S = 5.0
"""Yet a pause of so many seconds is none: an evaluation, or an outer round whose partner is late."""
OVERDUE_SHARE, OVERDUE_S = 0.1, 1.0
"""A wait has outlived its deadline by a tenth of it or by a second, whichever is more: timers come late, too."""
LONGEST_SILENCE_S = 5.0
"""The event loop comes to its heartbeat every half second."""


class Ailment(NamedTuple):
    """What is wrong with a node."""

    key: str
    """Equal while it is the same that is wrong."""
    line: str


def ailment(status: Status) -> str | None:
    """What is wrong with a node, in one line; None when it is well."""
    found = examine(status)
    return found.line if found is not None else None


def examine(status: Status) -> Ailment | None:
    """The first of: the event loop stands, a wait has outlived its deadline, no inner step for far too long."""
    silent_s = status.figures.loop_silent_s
    if silent_s > LONGEST_SILENCE_S:
        return Ailment("loop", f"the event loop has been silent for {silent_s:.0f} s: something blocks this process")
    for wait in status.waits:
        if overdue(wait):
            return Ailment(f"wait {wait.what} {wait.whom} {wait.why}", f"overdue: {told(wait)}")
    late_s = lateness_s(status)
    if late_s is not None:
        line = f"no inner step for {late_s:.0f} s, the median is {status.step_took_s or 0.0:.2g} s"
        holder = longest(status)
        return Ailment("step", line if holder is None else f"{line}: waits for {told(holder)}")
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


def longest(status: Status) -> Wait | None:
    """What holds the training up: the longest wait that leads to somebody, else the longest of all; no idle ones."""
    waits = [wait for wait in status.waits if not wait.idle]
    leading = [wait for wait in waits if wait.whom == Resource.DEVICE or wait.whom in _others(status)]
    staged = [wait for wait in waits if isinstance(wait.whom, AnyReplica)]
    return next(iter(leading or staged or waits), None)


def told(wait: Wait) -> str:
    """A wait for people: what, of whom, since when, of how long, why."""
    limit = "" if wait.deadline_s is None else f" of at most {wait.deadline_s:.3g} s"
    why = "" if wait.why is None else f" ({wait.why})"
    return f"{wait.what} of {wait.whom} since {wait.since_s:.3g} s{limit}{why}"


def _others(status: Status) -> set[str]:
    return {seen.advert.peer_id for seen in status.seen}
