"""Bandwidth sharing between concurrent flows, max-min fair, in virtual time.

The allocation is that of progressive filling: all rates grow together, and a flow stops growing when a segment of its
path is full (Bertsekas and Gallager, "Data networks", 1992, section 6.5.2). It is the only allocation in which every
flow has a bottleneck: a full segment on which no flow is faster. So when a flow starts or ends, the flows whose
bottleneck is on its path are recomputed first, and others only if the new rates leave them without a bottleneck.
"""

import asyncio
import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

SAME = 1e-9
"""Rates with a smaller relative difference are equal."""


@dataclass(slots=True, eq=False)
class Segment:
    """A part of a path with limited bandwidth, and the flows that use it now."""

    bytes_per_s: float
    flows: "dict[Flow, None]" = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes in flight, controlled by `start` and `stop`."""

    nbytes: float
    on_end: Callable[[], None]
    """Called when all bytes have left."""
    left: float = field(init=False)
    """Bytes that had not left at `as_of`."""
    as_of: float = 0.0
    rate: float = 0.0
    """Bytes per second; 0 while stopped."""
    reached: float = 0.0
    """The rate when the flow was stopped."""
    path: tuple[Segment, ...] = ()
    """Empty while stopped."""
    bottleneck: Segment | None = None
    timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        """Nothing has left yet."""
        self.left = self.nbytes

    def moved(self, now: float) -> float:
        """Bytes that have left."""
        return min(self.nbytes, self.nbytes - self.left + self.rate * (now - self.as_of))


def start(flow: Flow, path: tuple[Segment, ...]) -> None:
    """Start a stopped flow over at least one segment."""
    flow.path, flow.as_of = path, asyncio.get_running_loop().time()
    touched = _held_up(path)
    for segment in path:
        segment.flows[flow] = None
    _share([flow, *touched])


def stop(flow: Flow) -> None:
    """Stop a flow, for good or until `start`. The other flows get its share at once."""
    if not flow.path:
        return
    _move(flow, asyncio.get_running_loop().time())
    if flow.timer is not None:
        flow.timer.cancel()
    path, flow.path = flow.path, ()
    flow.reached, flow.rate, flow.bottleneck, flow.timer = flow.rate, 0.0, None, None
    for segment in path:
        del segment.flows[flow]
    _share(_held_up(path))


def resize(segment: Segment, bytes_per_s: float) -> None:
    """Change the bandwidth of a segment while flows use it."""
    segment.bytes_per_s = bytes_per_s
    _share(segment.flows)


def _end(flow: Flow) -> None:
    stop(flow)
    flow.left = 0.0
    flow.on_end()


def _share(seeds: Iterable[Flow]) -> None:
    """Set the fair rates of these flows, and of all flows whose rates change as a result."""
    chosen = dict.fromkeys(seeds)
    if not chosen:
        return
    rates = _alone(chosen) or _fair(chosen)
    loop = asyncio.get_running_loop()
    now = loop.time()
    for flow, (rate, bottleneck) in rates.items():
        flow.bottleneck = bottleneck
        if abs(rate - flow.rate) <= SAME * flow.rate:
            continue
        _move(flow, now)
        flow.rate = rate
        if flow.timer is not None:
            flow.timer.cancel()
        flow.timer = loop.call_at(now + flow.left / rate, _end, flow)


Rates = dict[Flow, tuple[float, Segment]]
"""Bytes per second of each flow, and its bottleneck segment."""


def _held_up(path: tuple[Segment, ...]) -> list[Flow]:
    """The flows whose bottleneck is on this path. Their rates change when another flow starts or ends there."""
    return [flow for segment in path for flow in segment.flows if flow.bottleneck is segment]


def _move(flow: Flow, now: float) -> None:
    flow.left = max(0.0, flow.left - flow.rate * (now - flow.as_of))
    flow.as_of = now


def _alone(chosen: dict[Flow, None]) -> Rates | None:
    """The most frequent case, done quickly: the rate of the only flow on its path. None if there are others."""
    if len(chosen) > 1:
        return None
    [flow] = chosen
    bottleneck = flow.path[0]
    for segment in flow.path:
        if len(segment.flows) > 1:
            return None
        if segment.bytes_per_s < bottleneck.bytes_per_s:
            bottleneck = segment
    return {flow: (bottleneck.bytes_per_s, bottleneck)}


def _fair(chosen: dict[Flow, None]) -> Rates:
    """The rates of these flows and of all others that change with them."""
    rates = _fill(chosen)
    while unfair := _unfair(rates):
        chosen.update(dict.fromkeys(unfair))
        rates = _fill(chosen)
    return rates


def _fill(chosen: dict[Flow, None]) -> Rates:
    """Progressive filling of these flows. All others keep their rates."""
    unfixed: dict[Segment, int] = {}
    for flow in chosen:
        for segment in flow.path:
            unfixed[segment] = unfixed.get(segment, 0) + 1
    room = {part: part.bytes_per_s - sum([one.rate for one in part.flows if one not in chosen]) for part in unfixed}
    heap = [(max(0.0, room[segment]) / unfixed[segment], number, segment) for number, segment in enumerate(room)]
    heapq.heapify(heap)
    rates: Rates = {}
    while len(rates) < len(chosen):
        share, number, full = heapq.heappop(heap)
        if not unfixed[full]:
            continue
        rate = max(0.0, room[full]) / unfixed[full]
        if rate > share:
            # Some flows on this segment were fixed below its share, so it fills later than its heap entry says.
            heapq.heappush(heap, (rate, number, full))
            continue
        for flow in full.flows:
            if flow in chosen and flow not in rates:
                rates[flow] = (rate, full)
                for segment in flow.path:
                    room[segment] -= rate
                    unfixed[segment] -= 1
    return rates


def _unfair(rates: Rates) -> list[Flow]:
    """Flows outside `rates` that have lost their bottleneck with the new rates, or have more than their share."""
    found = []
    for segment in dict.fromkeys(segment for flow in rates for segment in flow.path):
        others = [one for one in segment.flows if one not in rates]
        if not others:
            continue
        inside = [rates[one] for one in segment.flows if one in rates]
        fastest = max(rate for rate, _ in inside)
        limited = min((rate for rate, bottleneck in inside if bottleneck is segment), default=float("inf"))
        used = sum(rate for rate, _ in inside) + sum(one.rate for one in others)
        full = used >= segment.bytes_per_s * (1 - SAME)
        for other in others:
            loses = other.bottleneck is segment and (not full or other.rate < fastest * (1 - SAME))
            if loses or other.rate > limited * (1 + SAME):
                found.append(other)
    return found
