"""Keeping up with the membership: the one task that speaks to the directory (design.md §6)."""

from collections.abc import Callable

from noloco_p2p.duties.seat import Seat
from noloco_p2p.errors import PeerError

BRISK_REFRESH_S = 0.5
"""Seconds between two readings of the membership while the node does not train."""


class Watch:
    """Announces this node and reads the membership, on a schedule and whenever this node's state changes.

    `changed` is called after every reading.
    """

    def __init__(self, seat: Seat, changed: Callable[[], None]) -> None:
        self._seat = seat
        self._changed = changed
        self._announced: tuple[object, ...] = ()
        self._readings = 0

    async def run(self) -> None:
        """The one task that speaks to the directory; everything else routes from what it read."""
        seat = self._seat
        while True:
            self._announced = self._shown()
            if seat.index >= 0:
                await self._announce()
            await self._read()
            await seat.until(lambda: self._shown() != self._announced, self._period_s())

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

    def _shown(self) -> tuple[object, ...]:
        """The part of the advert whose change is announced at once."""
        advert = self._seat.advert
        return advert.stage, advert.state, advert.settled, advert.evaluated

    async def _announce(self) -> None:
        seat = self._seat
        try:
            await seat.world.directory.announce(seat.advert, seat.config.directory.ttl_s)
        except PeerError as error:
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
