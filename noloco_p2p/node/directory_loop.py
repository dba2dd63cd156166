"""The task that announces a node and reads the membership (ARCHITECTURE.md, "Membership")."""

from collections.abc import Callable

from noloco_p2p.core.schedule import ADVERTS_PER_S, READING_S
from noloco_p2p.core.status import Resource
from noloco_p2p.errors import PeerError
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.state import NodeState
from noloco_p2p.ports import Directory

FIRST_S = 2.0
"""Seconds between two readings at stage 0, until the first inner steps have been timed."""
QUIET_S = 1.0
"""A node in training reads the membership again if no microbatch or gradient has arrived for this many seconds, and for
longer than an inner step with its outer round takes."""
RENEWALS_PER_TTL = 3


class MembershipLoop:
    """Announces this node and reads the membership, on a schedule and whenever this node's state changes.

    `changed` is called after every reading.
    """

    def __init__(self, node: NodeState, swarm: Membership, directory: Directory, changed: Callable[[], None]) -> None:
        self._node = node
        self._swarm = swarm
        self._directory = directory
        self._changed = changed
        self._announced: tuple[object, ...] = ()
        self._announced_at = float("-inf")
        self._renewal_s = node.config.directory.ttl_s / RENEWALS_PER_TTL
        self._read_at = float("-inf")
        self._sought_at = float("-inf")
        """When callers that were not listed were last looked for."""

    async def run(self) -> None:
        """Announce and read, forever. No other task uses the directory; all work with what this one has read."""
        while True:
            reading = self._reading_is_due()
            if self._has_news() or (self._node.chosen_stage is not None and self._renewal_is_due(reading)):
                await self._announce()
            if reading:
                await self._read()
            before = self._alarms()
            await self._node.waits.until(
                lambda before=before: self._has_news() or self._alarms() > before,  # type: ignore[misc]
                "time to look",
                Resource.DIRECTORY,
                self._sleep_s(),
                idle=True,
            )

    async def withdraw(self) -> None:
        """Tell the others that this node has left."""
        try:
            with self._node.waits.waiting("withdrawal", Resource.DIRECTORY, self._node.config.directory.ttl_s):
                await self._directory.withdraw(self._node.advert.step)
        except PeerError as error:
            self._node.event("warning", message=f"could not tell the others that this node leaves: {error}")

    async def next_reading(self) -> None:
        """Wait for the next reading of the membership."""
        node, swarm, before = self._node, self._swarm, self._swarm.readings
        await node.waits.until(
            lambda: swarm.readings > before or node.draining, "next reading of the membership", Resource.DIRECTORY
        )

    # --- when -------------------------------------------------------------------------------------------------------

    def _alarms(self) -> int:
        """The number of reasons to read ahead of schedule."""
        return bool(self._swarm.deserted) + self._swarm.unlisted_called

    def _reading_is_due(self) -> bool:
        """Whether to read now: in training every `refresh_s`, and at stage 0 every outer interval if that is shorter.
        More often if microbatches have stopped arriving, or while a stage is deserted, to notice soon when a node takes
        it.

        Stage 0 reads that often because clocks are projected only so far (`schedule.most_projected`) and may be one
        interval old when they are announced; older ones would hold everybody back. Later stages learn the clocks from
        the labels of their microbatches.
        """
        now = self._node.now()
        hurries = self._is_brisk or now - self._swarm.heard_at > self._quiet_s()
        return now - self._read_at >= (self._tick_s if hurries else self._refresh_s())

    @property
    def _is_brisk(self) -> bool:
        return bool(self._swarm.deserted) or self._node.advert.state != "training"

    @property
    def _tick_s(self) -> float:
        """Shortest time between two readings, seconds."""
        return max(min(READING_S, self._node.config.directory.refresh_s), len(self._swarm.members) / ADVERTS_PER_S)

    def _quiet_s(self) -> float:
        """QUIET_S, or the longest usual inner step. The two longest are left out: an evaluation or a stall."""
        return max([QUIET_S, *sorted(self._node.step_seconds)[:-2]])

    def _refresh_s(self) -> float:
        """Seconds between two readings in training. A caller that is not listed, whoever it is, can bring one reading
        forward, but not two within `refresh_s`: so strangers at most double the number of readings."""
        node = self._node
        due_s = usual_s = node.config.directory.refresh_s
        if node.index == 0:
            speed = node.advert.steps_per_s
            due_s = min(due_s, node.manifest.outer.inner_steps / speed if speed else FIRST_S)
        if self._swarm.unlisted_called:
            due_s = min(due_s, self._sought_at + usual_s - self._read_at)
        return max(due_s, self._tick_s)

    def _sleep_s(self) -> float:
        """Seconds until something may be due. News and alarms end the sleep early."""
        if self._is_brisk:
            return self._tick_s
        quiet_at, read_at = self._swarm.heard_at + self._quiet_s(), self._read_at + self._refresh_s()
        return max(self._tick_s, min(quiet_at, read_at, self._announced_at + self._renewal_s) - self._node.now())

    def _renewal_is_due(self, reading: bool) -> bool:
        """Whether to announce again without news. Adverts of stage 0 carry clocks, so they are renewed with each
        reading; the others only have to stay alive."""
        carries_the_clock = self._node.index == 0 and self._node.advert.state == "training"
        return (carries_the_clock and reading) or self._node.now() - self._announced_at >= self._renewal_s

    def _has_news(self) -> bool:
        """Whether something that others should know at once has changed since the last announcement."""
        return self._node.chosen_stage is not None and self._shown() != self._announced

    def _shown(self) -> tuple[object, ...]:
        a = self._node.advert
        return a.stage, a.state, a.settled, a.evaluated, a.partner_from_round, a.moving_to, a.holds

    # --- the directory ----------------------------------------------------------------------------------------------

    async def _announce(self) -> None:
        node, ttl_s = self._node, self._node.config.directory.ttl_s
        self._announced, self._announced_at = self._shown(), node.now()
        try:
            with node.waits.waiting("announcement", Resource.DIRECTORY, ttl_s, idle=True):
                await self._directory.announce(node.advert, ttl_s)
        except PeerError as error:
            self._announced_at = float("-inf")
            node.event("warning", message=f"this node could not be announced: {error}")

    async def _read(self) -> None:
        node = self._node
        self._read_at = node.now()
        if self._swarm.take_unlisted_call():
            self._sought_at = self._read_at
        try:
            with node.waits.waiting("membership", Resource.DIRECTORY, node.config.directory.ttl_s, idle=True):
                adverts = await self._directory.peers()
        except PeerError as error:
            node.event("warning", message=f"the membership could not be read: {error}")
            return
        self._swarm.read(adverts)
        self._changed()
        node.waits.pulse()
