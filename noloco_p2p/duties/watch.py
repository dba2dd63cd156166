"""Keeping up with the membership: the one task that speaks to the directory (design.md §6)."""

from collections.abc import Callable

from noloco_p2p.duties.seat import Seat
from noloco_p2p.errors import PeerError

BRISK_REFRESH_S = 0.5
"""Seconds between two readings of the membership while the node does not train."""
RENEWALS_PER_TTL = 3


class Watch:
    """Announces this node and reads the membership, on a schedule and whenever this node's state changes.

    `changed` is called after every reading.
    """

    def __init__(self, seat: Seat, changed: Callable[[], None]) -> None:
        self._seat = seat
        self._changed = changed
        self._announced: tuple[object, ...] = ()
        self._announced_at = float("-inf")
        self._readings = 0

    async def run(self) -> None:
        """The one task that speaks to the directory; everything else routes from what it read."""
        seat = self._seat
        while True:
            if self._has_news() or (seat.index >= 0 and self._renewal_is_due()):
                await self._announce()
            await self._read()
            await seat.until(self._has_news, self._period_s())

    def _period_s(self) -> float:
        """Seconds to the next reading: while training also at least two in an outer interval, for the clock's sake.

        Clocks are projected two outer intervals at most; what is older holds everybody back.
        """
        seat, refresh_s = self._seat, self._seat.config.directory.refresh_s
        if seat.advert.state != "training":
            return min(refresh_s, BRISK_REFRESH_S)
        if not seat.advert.steps_per_s:
            return refresh_s
        half_interval_s = seat.manifest.outer.inner_steps / (2 * seat.advert.steps_per_s)
        return min(refresh_s, max(half_interval_s, BRISK_REFRESH_S))

    def _renewal_is_due(self) -> bool:
        """The clocks of stage 0 are read from its adverts; those of other stages only have to stay alive."""
        age_s = self._seat.now() - self._announced_at
        tells_the_clock = self._seat.index == 0 and self._seat.advert.state == "training"
        return tells_the_clock or age_s >= self._seat.config.directory.ttl_s / RENEWALS_PER_TTL

    def _has_news(self) -> bool:
        """What others should know at once has changed since the last announcement."""
        return self._seat.index >= 0 and self._shown() != self._announced

    def _shown(self) -> tuple[object, ...]:
        advert = self._seat.advert
        return advert.stage, advert.state, advert.settled, advert.evaluated

    async def _announce(self) -> None:
        seat = self._seat
        self._announced, self._announced_at = self._shown(), seat.now()
        try:
            await seat.world.directory.announce(seat.advert, seat.config.directory.ttl_s)
        except PeerError as error:
            self._announced_at = float("-inf")
            seat.event("warning", message=f"this node could not be announced: {error}")

    async def _read(self) -> None:
        seat = self._seat
        try:
            adverts = await seat.world.directory.peers()
        except PeerError as error:
            seat.event("warning", message=f"the membership could not be read: {error}")
            return
        seat.members.update([a for a in adverts if a.run_id == seat.run_id], now=seat.now())
        counts: dict[tuple[int, str], int] = {}
        for advert in (*seat.members.all(), seat.advert):
            counts[advert.stage, advert.state] = counts.get((advert.stage, advert.state), 0) + 1
        seat.event("membership", counts=counts)
        self._readings += 1
        self._changed()
        seat.pulse()

    async def next_reading(self) -> None:
        """Wait until the membership has been read anew, from now on."""
        seen = self._readings
        await self._seat.until(lambda: self._readings > seen or self._seat.draining)
