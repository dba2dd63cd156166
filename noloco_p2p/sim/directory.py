"""The Directory port over a registry that all nodes of one process share, with stale views and faults."""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.errors import Unreachable


@dataclass(frozen=True, slots=True)
class _Entry:
    advert: Advert
    ttl_s: float
    group: Collection[PeerId] | None = None
    """Who can read it before the swarm is whole again; None: everybody."""

    @property
    def expires_at(self) -> float:
        return self.advert.announced_at + self.ttl_s


class Registry:
    """All that has been announced. Views are `view_age_s` old: what was announced later is not seen yet.

    While the swarm is split, what is announced in a group is read in that group only.
    """

    def __init__(self, view_age_s: float = 0.0, delay_s: float = 0.002) -> None:
        self.view_age_s = view_age_s
        self.delay_s = delay_s
        """Seconds that each reading and writing takes."""
        self.failing: dict[PeerId, None] = {}
        """Nodes whose readings and writings fail."""
        self._entries: dict[PeerId, list[_Entry]] = {}
        """What may still be read; while the swarm is split, its history."""
        self._groups: tuple[frozenset[PeerId], ...] | None = None
        self._to_come: deque[_Entry] = deque()
        """Too young to be seen, in the order of their announcement."""
        self._visible: dict[PeerId, Advert] = {}
        """What a whole swarm sees, sorted: it is kept up, not made anew, so that a thousand nodes can read it often."""
        self._expiries: list[tuple[float, int, Advert]] = []
        self._numbers = itertools.count()

    def split(self, groups: Sequence[Collection[PeerId]]) -> None:
        """From now on no announcement crosses from one group to another; who is in none hears and is heard by all."""
        self._groups = tuple(frozenset(group) for group in groups)

    def heal(self) -> None:
        """End the split: everything that was announced is for everybody."""
        self._groups = None
        for entries in self._entries.values():
            entries[:] = [replace(entry, group=None) for entry in entries]

    def publish(self, advert: Advert, ttl_s: float, *, now: float) -> None:
        """A new advert; it takes the place of the node's former one in every view made from now on."""
        entry = _Entry(replace(advert, announced_at=now), ttl_s, self._group(advert.peer_id))
        entries = self._entries.setdefault(advert.peer_id, [])
        entries.append(entry)
        if self._groups is None:
            seen = [entry for entry in entries if entry.advert.announced_at <= now - self.view_age_s]
            del entries[: max(0, len(seen) - 1)]
        self._to_come.append(entry)

    def view(self, *, now: float, reader: PeerId | None = None) -> list[Advert]:
        """The adverts that were live `view_age_s` ago, sorted by peer id.

        A `reader` of a group sees what that group announced, and what was announced before the split.
        """
        self._keep_up(now - self.view_age_s)
        if reader is None or self._group(reader) is None:
            return list(self._visible.values())
        seen_at, found = now - self.view_age_s, list[Advert]()
        for peer in sorted(self._entries):
            visible = [
                entry
                for entry in self._entries[peer]
                if entry.advert.announced_at <= seen_at and (entry.group is None or reader in entry.group)
            ]
            if visible and seen_at <= visible[-1].expires_at:
                found.append(visible[-1].advert)
        return found

    def _keep_up(self, seen_at: float) -> None:
        """Bring what a whole swarm sees up to a time."""
        while self._to_come and self._to_come[0].advert.announced_at <= seen_at:
            entry = self._to_come.popleft()
            new = entry.advert.peer_id not in self._visible
            self._visible[entry.advert.peer_id] = entry.advert
            if new:
                self._visible = dict(sorted(self._visible.items()))
            heapq.heappush(self._expiries, (entry.expires_at, next(self._numbers), entry.advert))
        while self._expiries and self._expiries[0][0] < seen_at:
            _, _, advert = heapq.heappop(self._expiries)
            if self._visible.get(advert.peer_id) is advert:
                del self._visible[advert.peer_id]

    def _group(self, peer: PeerId) -> Collection[PeerId] | None:
        if self._groups is None:
            return None
        return next((group for group in self._groups if peer in group), None)


class SimDirectory:
    """The Directory port of one node."""

    def __init__(self, registry: Registry, me: PeerId) -> None:
        self.dead = False
        """The process of this node has crashed: what its tasks still try has no effect."""
        self._registry = registry
        self._me = me
        self._last: tuple[Advert, float] | None = None

    async def announce(self, advert: Advert, ttl_s: float) -> None:
        """See `ports.Directory`."""
        await self._reach()
        self._last = (advert, ttl_s)
        self._registry.publish(advert, ttl_s, now=asyncio.get_running_loop().time())

    async def peers(self) -> Sequence[Advert]:
        """See `ports.Directory`."""
        await self._reach()
        return self._registry.view(now=asyncio.get_running_loop().time(), reader=self._me)

    async def withdraw(self) -> None:
        """See `ports.Directory`."""
        if self._last is not None and not self.dead:
            advert, ttl_s = self._last
            await self.announce(replace(advert, state="left"), ttl_s)

    async def _reach(self) -> None:
        await asyncio.sleep(self._registry.delay_s)
        if self.dead or self._me in self._registry.failing:
            raise Unreachable("the directory does not answer")
