"""Follows the waits of the nodes from one to the next, to whoever is the cause. Pure.

A waits for a gradient of B on behalf of a microbatch; B serves that microbatch and waits for its own device, or for C,
and so on. The place where such a path ends is blamed, and everybody on the way is counted as held back by it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from noloco_p2p.core.members import IN_ROUNDS
from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.status import ACTIVATION, AnyReplica, ForMicrobatch, Purpose, Resource, Status, Wait
from noloco_p2p.humanize import finite
from noloco_p2p.observe.diagnosis.swarm_view import Swarm
from noloco_p2p.observe.diagnosis.symptoms import LOOP_SILENT_S, CallLink, Place

PATIENCE_S = 2.0
"""Waits that are younger belong to training as it is."""
PATIENCE_STEPS = 2.0
"""A call that has not come in the time of so many inner steps is not on its way: slow nodes need their seconds."""
FIRST_PATIENCE_S = 15.0
"""The same before the first inner step ended, when nobody knows yet how long a call takes."""
WAITS_LIMIT = 64
"""Waits of one node that are followed, the longest ones."""


@dataclass(slots=True)
class Paths:
    """Where the waits of one node lead."""

    ends: set[Place] = field(default_factory=set)
    """Where a path ends, or what it goes by."""
    last: list[tuple[PeerId, Wait]] = field(default_factory=list)
    """The waits at the ends, which lead to no other node."""
    links: dict[CallLink, Wait] = field(default_factory=dict)
    """Links over which a call has not come, with the wait that shows it."""
    gone: dict[PeerId, PeerId] = field(default_factory=dict)
    """Nodes that are waited for and that nobody announces: by whom."""


class Follower:
    """Follows the waits of one swarm. `empty` has the stages that nobody serves."""

    def __init__(self, swarm: Swarm, empty: frozenset[AnyReplica]) -> None:
        self._swarm = swarm
        self._empty = empty
        self._statuses = dict(swarm.statuses)

    def follow(self, peer: PeerId) -> Paths:
        """Where all long waits of a node lead."""
        paths = Paths()
        seen: set[tuple[PeerId, Purpose | None]] = set()
        todo: list[tuple[PeerId, Purpose | None]] = []
        status = self._statuses.get(peer)
        if status is not None:
            oldest: dict[Purpose | None, float] = {}
            for wait in self._waits(status):
                oldest[wait.why] = max(oldest.get(wait.why, 0.0), finite(wait.since_s))
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

    def _from(self, peer: PeerId, why: Purpose | None, paths: Paths) -> list[tuple[PeerId, Purpose | None]]:
        """One node further: on behalf of `why`, or with all of its waits when that is not known."""
        status = self._statuses.get(peer)
        if status is None or finite(status.figures.loop_silent_s) > LOOP_SILENT_S:
            return []
        waits = self._waits(status)
        if why is not None:
            mine = [wait for wait in waits if wait.why == why]
            if any(wait.whom == Resource.INNER_STEP for wait in mine):
                mine = [wait for wait in waits if wait.why != why]
            waits = mine
        return self._steps(peer, status, waits, paths)

    def _steps(
        self, peer: PeerId, status: Status, waits: Sequence[Wait], paths: Paths
    ) -> list[tuple[PeerId, Purpose | None]]:
        """Whom these waits of a node lead to; what ends here goes into `paths`."""
        further: list[tuple[PeerId, Purpose | None]] = []
        called = {wait.why for wait in waits if isinstance(wait.whom, str)}
        for wait in waits:
            if isinstance(wait.whom, str):
                further += self._call(peer, status, wait, wait.whom, paths)
            elif isinstance(wait.whom, AnyReplica):
                if wait.whom in self._empty:
                    paths.ends.add(wait.whom)
                elif wait.why is None or wait.why not in called:
                    further += [(r.peer, None) for r in self._swarm.of_stage(wait.whom.stage, IN_ROUNDS)]
            elif wait.whom != Resource.INNER_STEP:
                paths.last.append((peer, wait))
        return further

    def _call(
        self, peer: PeerId, status: Status, wait: Wait, whom: PeerId, paths: Paths
    ) -> list[tuple[PeerId, Purpose | None]]:
        """One call to another node: is it there, has the call arrived, and what is it waiting for itself?"""
        other = self._statuses.get(whom)
        if other is None:
            if whom not in self._swarm.by_peer and finite(wait.since_s) > PATIENCE_S:
                paths.gone[whom] = peer
            paths.ends.add(whom)
            return []
        if not isinstance(wait.why, ForMicrobatch):
            return [(whom, None)]
        link = CallLink(whom, peer) if wait.what == ACTIVATION else CallLink(peer, whom)
        arrived = link.caller != peer or any(serving.why == wait.why for serving in other.serving)
        step_s = finite(status.step_took_s)
        late = finite(wait.since_s) > (max(PATIENCE_S, PATIENCE_STEPS * step_s) if step_s > 0 else FIRST_PATIENCE_S)
        silent = finite(other.figures.loop_silent_s) > LOOP_SILENT_S
        if late and not silent and other.advert.state == "training" and (not arrived or link.caller != peer):
            paths.links[link] = wait
            paths.ends.add(link)
            return []
        return [] if link.caller != peer else [(whom, wait.why)]

    @staticmethod
    def _waits(status: Status) -> list[Wait]:
        return [wait for wait in status.waits if not wait.idle][:WAITS_LIMIT]
