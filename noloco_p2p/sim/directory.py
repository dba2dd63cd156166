"""The Directory port: a registry shared by all nodes of one process, with stale views and faults."""

import asyncio
import heapq
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.errors import Unreachable

DELAY_S = 0.002
"""Seconds that each read or write takes."""
COPIES = 5
"""Number of nodes that store each advert and are asked for it: hivemind's `num_replicas`."""


@dataclass(slots=True)
class _AdvertView:
    """The adverts that a group of nodes reads, updated incrementally so that a thousand nodes can read them often."""

    upcoming: deque[tuple[Advert, float]] = field(default_factory=deque)
    """(advert, expiry) of those too recent to be visible, in the order in which they were announced."""
    visible: dict[PeerId, Advert] = field(default_factory=dict)
    """Sorted by peer id."""
    expiries: list[tuple[float, int, Advert]] = field(default_factory=list)
    taken: int = 0
    """Number of adverts that have become visible so far."""

    def __copy__(self) -> "_AdvertView":
        return _AdvertView(deque(self.upcoming), dict(self.visible), list(self.expiries), self.taken)

    def at(self, seen_at: float) -> list[Advert]:
        """The adverts that were live at `seen_at`, which must not decrease from one call to the next."""
        while self.upcoming and self.upcoming[0][0].announced_at <= seen_at:
            advert, expires_at = self.upcoming.popleft()
            new = advert.peer_id not in self.visible
            self.visible[advert.peer_id] = advert
            if new:
                self.visible = dict(sorted(self.visible.items()))
            heapq.heappush(self.expiries, (expires_at, self.taken, advert))
            self.taken += 1
        while self.expiries and self.expiries[0][0] < seen_at:
            _, _, advert = heapq.heappop(self.expiries)
            if self.visible.get(advert.peer_id) is advert:
                del self.visible[advert.peer_id]
        return list(self.visible.values())


class Registry:
    """Everything that has been announced. Views are `view_age_s` old: later announcements are not visible yet.

    While the swarm is split, announcements of a group are visible only within it.
    """

    def __init__(self, view_age_s: float = 0.0) -> None:
        self.view_age_s = view_age_s
        self.failing: list[PeerId] = []
        """Nodes whose reads and writes fail; one occurs as often as there are causes."""
        self._whole = _AdvertView()
        self._of_group: dict[frozenset[PeerId], _AdvertView] = {}
        """While the swarm is split: what each group reads, including everything announced before the split."""

    def split(self, groups: Iterable[Collection[PeerId]]) -> None:
        """From now on no announcement crosses between groups, and without groups all nodes see all announcements. A
        node in no group sees all and is seen by all.

        A group all of whose nodes were in the same group before, or new, starts with what that group could read, any
        other group with everything.
        """
        views: dict[frozenset[PeerId], _AdvertView] = {}
        for group in map(frozenset, groups):
            earlier = {self._group(peer) for peer in group} - {None}
            known = earlier.pop() if len(earlier) == 1 else None
            views[group] = copy(self._whole if known is None else self._of_group[known])
        self._of_group = views

    def publish(self, advert: Advert, ttl_s: float, *, now: float) -> None:
        """Publish an advert. It replaces the node's previous one in every later view."""
        entry = (replace(advert, announced_at=now), now + ttl_s)
        group = self._group(advert.peer_id)
        for view in (self._whole, *(view for peers, view in self._of_group.items() if group in (None, peers))):
            view.upcoming.append(entry)

    def view(self, *, now: float, reader: PeerId | None = None) -> list[Advert]:
        """The adverts that were live `view_age_s` ago, sorted by peer id.

        A `reader` in a group sees what that group announced, and what was announced before the split.
        """
        group = None if reader is None else self._group(reader)
        return (self._whole if group is None else self._of_group[group]).at(now - self.view_age_s)

    def _group(self, peer: PeerId) -> frozenset[PeerId] | None:
        return next((group for group in self._of_group if peer in group), None)


class SimDirectory:
    """The Directory port of one node."""

    def __init__(self, registry: Registry, me: PeerId, exchange: Callable[[int], Awaitable[None]]) -> None:
        """`exchange` waits as long as this many adverts take over this node's line, up and down.

        The node downloads what it reads, and uploads about as much for others, who read the part that it stores.
        """
        self.dead = False
        """The node's process has crashed; nothing that its tasks still do has any effect."""
        self._registry = registry
        self._me = me
        self._exchange = exchange
        self._last: tuple[Advert, float] | None = None

    async def announce(self, advert: Advert, ttl_s: float) -> None:
        """See `ports.Directory`."""
        await self._reach()
        await self._exchange(COPIES)
        self._last = (advert, ttl_s)
        self._registry.publish(advert, ttl_s, now=asyncio.get_running_loop().time())

    async def peers(self) -> Sequence[Advert]:
        """See `ports.Directory`."""
        await self._reach()
        adverts = self._registry.view(now=asyncio.get_running_loop().time(), reader=self._me)
        await self._exchange(COPIES * len(adverts))
        return adverts

    async def withdraw(self, step: float) -> None:
        """See `ports.Directory`."""
        if self._last is not None and not self.dead:
            advert, ttl_s = self._last
            await self.announce(replace(advert, state="left", step=step), ttl_s)

    async def _reach(self) -> None:
        await asyncio.sleep(DELAY_S)
        if self.dead or self._me in self._registry.failing:
            raise Unreachable("the directory does not answer")
