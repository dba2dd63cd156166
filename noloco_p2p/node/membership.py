"""Keeping up with the membership: the one task that speaks to the directory (design.md §6)."""

from collections.abc import Callable

from noloco_p2p.core.status import Resource
from noloco_p2p.errors import PeerError
from noloco_p2p.node.state import NodeState

BRISK_S = 0.5
"""Seconds between two readings of the membership while the node does not train."""
ADVERTS_PER_S = 200
"""At most so many are read in a second, on average: each is a signature to check, and a swarm can have thousands."""
FIRST_S = 2.0
"""And at stage 0 while the first inner steps have not been timed."""
QUIET_S = 1.0
"""Without a microbatch or a gradient for so long, and longer than an inner step with its outer round takes, a node in
training looks who is still there."""
RENEWALS_PER_TTL = 3


class MembershipLoop:
    """Announces this node and reads the membership, on a schedule and whenever this node's state changes.

    `changed` is called after every reading.
    """

    def __init__(self, node: NodeState, changed: Callable[[], None]) -> None:
        self._node = node
        self._changed = changed
        self._announced: tuple[object, ...] = ()
        self._announced_at = float("-inf")
        self._read_at = float("-inf")
        self._readings = 0

    async def run(self) -> None:
        """The one task that speaks to the directory; everything else routes from what it read."""
        while True:
            reading = self._reading_is_due()
            if self._has_news() or (self._node.index >= 0 and self._renewal_is_due(reading)):
                await self._announce()
            if reading:
                await self._read()
            calm = not self._node.deserted
            await self._node.until(
                lambda calm=calm: self._has_news() or (calm and bool(self._node.deserted)),  # type: ignore[misc]
                "time to look",
                Resource.DIRECTORY,
                self._sleeps_s(),
                idle=True,
            )

    def _reading_is_due(self) -> bool:
        """While training once in `refresh_s`, and at stage 0 in an outer interval; briskly when nobody calls any more,
        or while a stage is deserted: who takes it is to be seen soon.

        Clocks are projected two outer intervals at most, and may be one old when they are announced: what is older
        holds everybody back. Later stages learn the clocks from the labels of their microbatches.
        """
        node = self._node
        age_s = node.now() - self._read_at
        if node.deserted or node.advert.state != "training" or node.now() - node.heard_at > self._quiet_s():
            return age_s >= self._tick_s
        return age_s >= self._refresh_s()

    @property
    def _tick_s(self) -> float:
        """Shortest time between two readings."""
        return max(min(BRISK_S, self._node.config.directory.refresh_s), len(self._node.members) / ADVERTS_PER_S)

    def _quiet_s(self) -> float:
        # Two of them may have been odd: an evaluation, a stall.
        usual = sorted(self._node.steps_took)[:-2]
        return max(QUIET_S, usual[-1]) if usual else QUIET_S

    def _refresh_s(self) -> float:
        """Time between two readings in training."""
        node = self._node
        due_s = node.config.directory.refresh_s
        if node.index == 0:
            speed = node.advert.steps_per_s
            due_s = min(due_s, node.manifest.outer.inner_steps / speed if speed else FIRST_S)
        return max(due_s, self._tick_s)

    def _sleeps_s(self) -> float:
        """Until something may be due; news, or a stage that becomes deserted, come in between."""
        node, now = self._node, self._node.now()
        if node.deserted or node.advert.state != "training":
            return self._tick_s
        quiet_at, read_at = node.heard_at + self._quiet_s(), self._read_at + self._refresh_s()
        renewed_at = self._announced_at + node.config.directory.ttl_s / RENEWALS_PER_TTL
        return max(self._tick_s, min(quiet_at, read_at, renewed_at) - now)

    def _renewal_is_due(self, reading: bool) -> bool:
        """The clocks of stage 0 are read from its adverts; those of other stages only have to stay alive."""
        age_s = self._node.now() - self._announced_at
        tells_the_clock = self._node.index == 0 and self._node.advert.state == "training"
        return (tells_the_clock and reading) or age_s >= self._node.config.directory.ttl_s / RENEWALS_PER_TTL

    def _has_news(self) -> bool:
        """What others should know at once has changed since the last announcement."""
        return self._node.index >= 0 and self._shown() != self._announced

    def _shown(self) -> tuple[object, ...]:
        advert = self._node.advert
        told = advert.stage, advert.state, advert.settled, advert.evaluated
        return *told, advert.partner_from_round, advert.moving_to, advert.holds

    async def _announce(self) -> None:
        node = self._node
        self._announced, self._announced_at = self._shown(), node.now()
        ttl_s = node.config.directory.ttl_s
        try:
            with node.waiting("announcement", Resource.DIRECTORY, ttl_s, idle=True):
                await node.world.directory.announce(node.advert, ttl_s)
        except PeerError as error:
            self._announced_at = float("-inf")
            node.event("warning", message=f"this node could not be announced: {error}")

    async def _read(self) -> None:
        node = self._node
        self._read_at = node.now()
        try:
            with node.waiting("membership", Resource.DIRECTORY, node.config.directory.ttl_s, idle=True):
                adverts = await node.world.directory.peers()
        except PeerError as error:
            node.event("warning", message=f"the membership could not be read: {error}")
            return
        joined, departed = node.members.update(adverts, now=node.now())
        counts = node.members.counts()
        counts[node.index, node.advert.state] = counts.get((node.index, node.advert.state), 0) + 1
        node.event("membership", counts=counts, joined=joined, departed=departed)
        self._readings += 1
        self._changed()
        node.pulse()

    async def withdraw(self) -> None:
        """Tell the others that this node has left."""
        try:
            with self._node.waiting("withdrawal", Resource.DIRECTORY, self._node.config.directory.ttl_s):
                await self._node.world.directory.withdraw()
        except PeerError as error:
            self._node.event("warning", message=f"could not tell the others that this node leaves: {error}")

    async def next_reading(self) -> None:
        """Wait until the membership has been read anew, from now on."""
        seen = self._readings
        await self._node.until(
            lambda: self._readings > seen or self._node.draining, "next reading of the membership", Resource.DIRECTORY
        )
