"""Bandwidth that concurrent transfers share, max-min fair, in virtual time.

The allocation is that of progressive filling: all rates grow together, and a transfer stops where a way that it takes
is full (Bertsekas and Gallager, "Data networks", 1992, section 6.5.2). It is the only one in which every transfer has a
bottleneck: a way that is full and on which nobody is faster. So when a transfer begins or ends, those who had their
bottleneck on its ways are looked at first, and others only where the new rates leave somebody without one.
"""

import asyncio
import heapq
from collections.abc import Callable, Iterable

SAME = 1e-9
"""Rates that differ by less than this, relatively, are equal."""
WIDENINGS = 6
"""How often those looked at are widened one by one, before everybody who is connected to them is taken."""


class Way:
    """Something that has a limited bandwidth, and the transfers that take it now."""

    __slots__ = ("bytes_per_s", "transfers")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.transfers: dict[Transfer, None] = {}


class Transfer:
    """Some bytes on their way. Made, moved and ended by `Bandwidth`."""

    __slots__ = ("as_of", "bottleneck", "left", "nbytes", "on_end", "rate", "timer", "ways")

    def __init__(self, nbytes: float, on_end: Callable[[], None]) -> None:
        self.nbytes = nbytes
        self.on_end = on_end
        """Called when all bytes have left."""
        self.left = nbytes
        """Bytes that had not left at `as_of`."""
        self.as_of = 0.0
        self.rate = 0.0
        """Bytes per second; 0 while it stands still."""
        self.ways: tuple[Way, ...] = ()
        """What it takes; empty while it stands still."""
        self.bottleneck: Way | None = None
        self.timer: asyncio.TimerHandle | None = None

    def moved(self, now: float) -> float:
        """Bytes that have left."""
        return min(self.nbytes, self.nbytes - self.left + self.rate * (now - self.as_of))


class Bandwidth:
    """Moves the transfers of one event loop."""

    def go(self, transfer: Transfer, ways: tuple[Way, ...]) -> None:
        """Set a transfer that stands still in motion, over at least one way."""
        transfer.ways, transfer.as_of = ways, asyncio.get_running_loop().time()
        touched = _held_up(ways)
        for way in ways:
            way.transfers[transfer] = None
        self._share([transfer, *touched])

    def stop(self, transfer: Transfer) -> None:
        """Let a transfer stand still, for good or until `go`; its share is the others' from this moment."""
        if not transfer.ways:
            return
        _move(transfer, asyncio.get_running_loop().time())
        if transfer.timer is not None:
            transfer.timer.cancel()
        ways, transfer.ways = transfer.ways, ()
        transfer.rate, transfer.bottleneck, transfer.timer = 0.0, None, None
        for way in ways:
            del way.transfers[transfer]
        self._share(_held_up(ways))

    def resize(self, way: Way, bytes_per_s: float) -> None:
        """Change what a way can carry."""
        way.bytes_per_s = bytes_per_s
        self._share(way.transfers)

    def _end(self, transfer: Transfer) -> None:
        self.stop(transfer)
        transfer.left = 0.0
        transfer.on_end()

    def _share(self, seeds: Iterable[Transfer]) -> None:
        """Give these their fair rates, and everybody whose rate changes with theirs."""
        chosen = dict.fromkeys(seeds)
        if not chosen:
            return
        rates = _alone(chosen) or _fair(chosen)
        loop = asyncio.get_running_loop()
        now = loop.time()
        for transfer, (rate, bottleneck) in rates.items():
            transfer.bottleneck = bottleneck
            if abs(rate - transfer.rate) <= SAME * transfer.rate:
                continue
            _move(transfer, now)
            transfer.rate = rate
            if transfer.timer is not None:
                transfer.timer.cancel()
            transfer.timer = loop.call_at(now + transfer.left / rate, self._end, transfer)


Rates = dict[Transfer, tuple[float, Way]]
"""Bytes per second of each transfer, and the way that gives it no more."""


def _held_up(ways: tuple[Way, ...]) -> list[Transfer]:
    """Those whose bottleneck one of these ways is: their rates change when somebody comes or goes."""
    return [transfer for way in ways for transfer in way.transfers if transfer.bottleneck is way]


def _move(transfer: Transfer, now: float) -> None:
    transfer.left = max(0.0, transfer.left - transfer.rate * (now - transfer.as_of))
    transfer.as_of = now


def _alone(chosen: dict[Transfer, None]) -> Rates | None:
    """The rate of the only transfer on its ways: the most frequent case, and a simple one."""
    if len(chosen) > 1:
        return None
    [transfer] = chosen
    bottleneck = transfer.ways[0]
    for way in transfer.ways:
        if len(way.transfers) > 1:
            return None
        if way.bytes_per_s < bottleneck.bytes_per_s:
            bottleneck = way
    return {transfer: (bottleneck.bytes_per_s, bottleneck)}


def _fair(chosen: dict[Transfer, None]) -> Rates:
    """The rates of these, and of all others that change with them."""
    rates = _fill(chosen)
    for _ in range(WIDENINGS):
        unfair = _unfair(rates)
        if not unfair:
            return rates
        chosen.update(dict.fromkeys(unfair))
        rates = _fill(chosen)
    return _fill(_connected(chosen))


def _fill(chosen: dict[Transfer, None]) -> Rates:
    """Progressive filling of these transfers; all others keep their rates."""
    room: dict[Way, float] = {}
    unfixed: dict[Way, int] = {}
    for transfer in chosen:
        for way in transfer.ways:
            if way in room:
                unfixed[way] += 1
            else:
                unfixed[way] = 1
                room[way] = way.bytes_per_s - sum([one.rate for one in way.transfers if one not in chosen])
    heap = [(max(0.0, room[way]) / unfixed[way], number, way) for number, way in enumerate(room)]
    heapq.heapify(heap)
    rates: Rates = {}
    while len(rates) < len(chosen):
        share, number, full = heapq.heappop(heap)
        if not unfixed[full]:
            continue
        rate = max(0.0, room[full]) / unfixed[full]
        if rate > share:
            # Some that take this way were fixed below its share: it fills later than was thought.
            heapq.heappush(heap, (rate, number, full))
            continue
        for transfer in full.transfers:
            if transfer in chosen and transfer not in rates:
                rates[transfer] = (rate, full)
                for way in transfer.ways:
                    room[way] -= rate
                    unfixed[way] -= 1
    return rates


def _unfair(rates: Rates) -> list[Transfer]:
    """Transfers outside of `rates` that with these have lost their bottleneck, or have more than is their share."""
    found = []
    for way in dict.fromkeys(way for transfer in rates for way in transfer.ways):
        others = [one for one in way.transfers if one not in rates]
        if not others:
            continue
        inside = [rates[one] for one in way.transfers if one in rates]
        fastest = max(rate for rate, _ in inside)
        limited = min((rate for rate, bottleneck in inside if bottleneck is way), default=float("inf"))
        used = sum(rate for rate, _ in inside) + sum(one.rate for one in others)
        full = used >= way.bytes_per_s * (1 - SAME)
        for other in others:
            loses = other.bottleneck is way and (not full or other.rate < fastest * (1 - SAME))
            if loses or other.rate > limited * (1 + SAME):
                found.append(other)
    return found


def _connected(chosen: dict[Transfer, None]) -> dict[Transfer, None]:
    """All that share a way with one of these, or with one that does, and so on."""
    found, seen, queue = dict(chosen), dict[Way, None](), list(chosen)
    while queue:
        for way in queue.pop().ways:
            if way not in seen:
                seen[way] = None
                new = [one for one in way.transfers if one not in found]
                found.update(dict.fromkeys(new))
                queue += new
    return found
