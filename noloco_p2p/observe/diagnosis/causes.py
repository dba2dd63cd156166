"""Follows the waits of the nodes from one to the next, to whoever is the cause. Pure.

A waits for a gradient of B on behalf of a microbatch; B serves that microbatch and waits for its own device, or for C,
and so on. The place where such a path ends is blamed, and everybody on the way is counted as held back by it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from noloco_p2p.core.members import IN_ROUNDS
from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.status import INNER_STEP, Status, Wait
from noloco_p2p.observe.diagnosis.findings import Report, number
from noloco_p2p.observe.diagnosis.swarm_view import Swarm
from noloco_p2p.observe.diagnosis.symptoms import LOOP_SILENT_S

PATIENCE_S = 2.0
"""Waits that are younger belong to training as it is."""
PATIENCE_STEPS = 2.0
"""A call that has not come in the time of so many inner steps is not on its way: slow nodes need their seconds."""
FIRST_PATIENCE_S = 15.0
"""The same before the first inner step ended, when nobody knows yet how long a call takes."""
WAITS_LIMIT = 64
"""Waits of one node that are followed, the longest ones."""


def link(caller: PeerId, callee: PeerId) -> str:
    """The place of a link in `Cause.at`."""
    return f"{caller} > {callee}"


@dataclass(slots=True)
class Paths:
    """Where the waits of one node lead."""

    ends: set[str] = field(default_factory=set)
    """Places (`Cause.at`) at which a path ends, or by which it goes."""
    last: list[tuple[PeerId, Wait]] = field(default_factory=list)
    """The waits at the ends, which lead to no other node."""
    links: dict[str, tuple[PeerId, PeerId, Wait]] = field(default_factory=dict)
    """Links over which a call has not come: caller, callee, the wait that tells."""
    gone: dict[PeerId, PeerId] = field(default_factory=dict)
    """Nodes that are waited for and that nobody announces: by whom."""


class Follower:
    """Follows the waits of one swarm. `empty` has the stages that nobody serves, as `stage N`."""

    def __init__(self, swarm: Swarm, empty: frozenset[str]) -> None:
        self._swarm = swarm
        self._empty = empty
        self._statuses = dict(swarm.statuses)

    def follow(self, peer: PeerId) -> Paths:
        """Where all long waits of a node lead."""
        paths = Paths()
        seen: set[tuple[PeerId, str]] = set()
        todo: list[tuple[PeerId, str]] = []
        status = self._statuses.get(peer)
        if status is not None:
            oldest: dict[str, float] = {}
            for wait in self._waits(status):
                oldest[wait.why] = max(oldest.get(wait.why, 0.0), number(wait.since_s))
            long = [wait for wait in self._waits(status) if oldest[wait.why] > PATIENCE_S]
            todo += self._steps(peer, status, long, paths)
        while todo:
            at = todo.pop()
            if at in seen or at[0] == peer:
                continue
            seen.add(at)
            paths.ends.add(at[0])
            todo += self._from(*at, paths)
        return paths

    def _from(self, peer: PeerId, why: str, paths: Paths) -> list[tuple[PeerId, str]]:
        """One node further: on behalf of `why`, or with all of its waits when that is not known."""
        status = self._statuses.get(peer)
        if status is None or number(status.figures.loop_silent_s) > LOOP_SILENT_S:
            return []
        waits = self._waits(status)
        if why:
            mine = [wait for wait in waits if wait.why == why]
            if any(wait.whom == INNER_STEP for wait in mine):
                mine = [wait for wait in waits if wait.why != why]
            waits = mine
        return self._steps(peer, status, waits, paths)

    def _steps(self, peer: PeerId, status: Status, waits: Sequence[Wait], paths: Paths) -> list[tuple[PeerId, str]]:
        """Whom these waits of a node lead to; what ends here goes into `paths`."""
        further: list[tuple[PeerId, str]] = []
        called = {wait.why for wait in waits if self._is_peer(wait.whom)}
        for wait in waits:
            if self._is_peer(wait.whom):
                further += self._call(peer, status, wait, paths)
            elif wait.whom.startswith("stage "):
                if wait.whom in self._empty:
                    paths.ends.add(wait.whom)
                elif not (wait.why and wait.why in called):
                    further += [(r.peer, "") for r in self._replicas(wait.whom)]
            elif wait.whom != INNER_STEP:
                paths.last.append((peer, wait))
        return further

    def _call(self, peer: PeerId, status: Status, wait: Wait, paths: Paths) -> list[tuple[PeerId, str]]:
        """One call to another node: is it there, has the call arrived, and what is it waiting for itself?"""
        other = self._statuses.get(wait.whom)
        if other is None:
            if wait.whom not in self._swarm.by_peer and number(wait.since_s) > PATIENCE_S:
                paths.gone[wait.whom] = peer
            paths.ends.add(wait.whom)
            return []
        if not is_microbatch(wait.why):
            return [(wait.whom, "")]
        caller, callee = (wait.whom, peer) if wait.what == "activation" else (peer, wait.whom)
        arrived = caller != peer or any(serving.why == wait.why for serving in other.serving)
        step_s = number(status.step_took_s)
        late = number(wait.since_s) > (max(PATIENCE_S, PATIENCE_STEPS * step_s) if step_s > 0 else FIRST_PATIENCE_S)
        silent = number(other.figures.loop_silent_s) > LOOP_SILENT_S
        if late and not silent and other.advert.state == "training" and (not arrived or caller != peer):
            paths.links[link(caller, callee)] = caller, callee, wait
            paths.ends.add(link(caller, callee))
            return []
        return [] if caller != peer else [(wait.whom, wait.why)]

    @staticmethod
    def _waits(status: Status) -> list[Wait]:
        return [wait for wait in status.waits if not wait.idle][:WAITS_LIMIT]

    def _is_peer(self, whom: str) -> bool:
        """The wait is for one node: one that is known, or what looks like a peer id."""
        return whom in self._swarm.by_peer or (len(whom) > 40 and whom.isalnum())

    def _replicas(self, whom: str) -> list[Report]:
        number_of = whom.removeprefix("stage ")
        if not (number_of.isascii() and number_of.isdigit() and len(number_of) < 8):
            return []
        return self._swarm.of_stage(int(number_of), IN_ROUNDS)


def is_microbatch(why: str) -> bool:
    """The wait is on behalf of a microbatch, whose calls tell at both ends that they are there."""
    return why.startswith(("microbatch ", "held-out microbatch "))
