"""A node that has seen hundreds of others come and go holds no more memory than after half as many."""

import gc
import re
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import pytest
from prometheus_client import generate_latest

from noloco_p2p.config import DirectorySettings, LimitSettings, NodeConfig, OuterSettings, RunManifest
from noloco_p2p.core import line_rate, spent_ids
from noloco_p2p.core.messages import HostTensor
from noloco_p2p.io.telemetry import log
from noloco_p2p.io.telemetry.prometheus_telemetry import PrometheusTelemetry
from noloco_p2p.ports import Telemetry
from noloco_p2p.sim import virtual_time
from noloco_p2p.sim.calls import SimCall
from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.process import SimProcess
from noloco_p2p.sim.world import SimPlan, SimSwarm, peer_id

VISITORS, EVERY_S, STAY_S = 300, 0.2, 2.0
FIRST_LOOK, SECOND_LOOK = 120, 270
"""Numbers of visitors after which memory is compared; some are still present. Bounded things are full by the first."""
GLANCES, GLANCE_S = 5, 0.37
"""Measurements per comparison, of which the smallest counts: what is in flight comes and goes within an inner step."""
FIXED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.FrameType, types.CodeType)
LOOP = ("asyncio", "_asyncio")
VISITOR = re.compile(r"s[01]r[1-9]\d\d+")
BETWEEN = (SimCall, virtual_time._Handle)
"""Objects of the simulator that both ends share: through a call in flight, everything of its other end is reachable,
and through a timer all others."""


class Both:
    """Telemetry that passes everything on to two others."""

    def __init__(self, *others: Telemetry) -> None:
        self.others = others

    def event(self, kind: str, /, **fields: object) -> None:
        for other in self.others:
            other.event(kind, **fields)

    def span(self, name: str) -> AbstractContextManager[None]:
        return self.others[0].span(name)


class Held(NamedTuple):
    """What is reachable from some objects and belongs to the node: not the world, code or classes."""

    nbytes: int
    visitors: int
    """How many visitors, present or gone, are named in it."""


def held(roots: Iterable[object], outside: Iterable[object]) -> Held:
    """What `roots` hold, without `outside`."""
    seen = {id(one) for one in outside}
    nbytes, heap = 0, list(roots)
    visitors: set[str] = set()
    while heap:
        one = heap.pop()
        if id(one) in seen or isinstance(one, FIXED + BETWEEN) or type(one).__module__.startswith(LOOP):
            continue
        seen.add(id(one))
        nbytes += 0 if isinstance(one, HostTensor) else sys.getsizeof(one)
        if isinstance(one, str) and VISITOR.fullmatch(one):
            visitors.add(one)
        heap.extend(gc.get_referents(one))
        if isinstance(one, dict):
            heap.extend(one)  # the characters of strings are not referents
    return Held(nbytes, len(visitors))


def least(glances: Iterable[Held]) -> Held:
    """The smallest value of each figure."""
    return Held(*map(min, zip(*glances, strict=True)))


def outside(swarm: SimSwarm, process: SimProcess) -> Iterator[object]:
    """The objects that belong to the simulator."""
    yield from (swarm, swarm.network, swarm.registry, swarm.trace)
    yield from (process, process.world, *process.ports, *(part for stage in process.stages for part in stage))


def test_hundreds_of_joins_and_departures_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    # A fixed number of these is always kept; it must not hide what grows.
    monkeypatch.setattr(spent_ids, "SPENT_IDS", 64)
    monkeypatch.setattr(spent_ids, "ORIGINS", 4)
    monkeypatch.setattr(line_rate, "PEERS", 16)
    monkeypatch.setattr(log, "MAX_KEYS", 16)
    manifest = RunManifest(
        stages=2,
        start_replicas=1,
        steps=10**6,
        sequence_length=2,
        microbatch_size=1,
        outer=OuterSettings(rule="noloco", inner_steps=4, deadline_s=2.0),
    )
    limits = LimitSettings(patience_floor_s=0.5, linger_s=2.0, drain_s=2.0)
    config = NodeConfig(limits=limits, directory=DirectorySettings(ttl_s=3.0, refresh_s=1.0), rebalance=False)
    costs = Costs(forward_s=0.1, backward_s=0.2, inner_step_s=0.05, outer_s=0.02)
    swarm = SimSwarm(SimPlan(manifest, (2, 2), config=config, costs=costs))
    telemetries = {peer: PrometheusTelemetry(manifest.stages) for peer in ("s0r0", "s1r0")}
    series: dict[str, list[set[str]]] = {peer: [] for peer in telemetries}
    by_node: dict[str, list[Held]] = {peer: [] for peer in telemetries}
    by_telemetry: dict[str, list[Held]] = {peer: [] for peer in telemetries}
    met: set[str] = set()

    def watch() -> None:
        for peer, telemetry in telemetries.items():
            node = swarm.process(peer).node.state
            node.telemetry = Both(node.telemetry, telemetry)

    def look() -> None:
        gc.collect()
        for peer, telemetry in telemetries.items():
            process = swarm.process(peer)
            lines = generate_latest(telemetry.registry).decode().splitlines()
            series[peer].append({line.rpartition(" ")[0] for line in lines if not line.startswith("#")})
            node = process.node, process.ports.transport.line
            by_node[peer].append(held(node, [*outside(swarm, process), telemetry]))
            by_telemetry[peer].append(held([telemetry], [telemetry.registry]))

    def meet() -> None:
        met.update(advert.peer_id for advert in swarm.process("s0r0").node.swarm.members.all())

    def come_and_go(number: int) -> None:
        at_s, place = 3.0 + EVERY_S * number, (number % 2, 100 + number)
        leave = swarm.crash if number % 3 else swarm.drain
        swarm.at(at_s, lambda: swarm.start(*place))
        swarm.at(at_s + STAY_S, lambda: leave(peer_id(*place)))

    swarm.at(1.0, watch)
    for number in range(VISITORS):
        come_and_go(number)
    looks = [3.0 + EVERY_S * number for number in (FIRST_LOOK, SECOND_LOOK)]
    for at_s in looks:
        for glance in range(GLANCES):
            swarm.at(at_s + GLANCE_S * glance, look)
    end_s = 3.0 + EVERY_S * VISITORS + 10.0
    for whole_s in range(int(end_s)):
        swarm.at(whole_s + 0.5, meet)
    for peer in ("s0r0", "s0r1", "s1r0", "s1r1"):
        swarm.at(end_s, lambda peer=peer: swarm.drain(peer))  # type: ignore[misc]
    swarm.run(limit_s=600, tolerate=True)
    assert len(met) > 0.7 * VISITORS, "they were seen"
    for peer in telemetries:
        first, second = (set().union(*glances) for glances in (series[peer][:GLANCES], series[peer][GLANCES:]))
        # A stage is guarded or not as its replicas come and go, so there is at most one series per stage.
        assert {one for one in second - first if "guarded_round" not in one} == set()
        for glances in (by_node[peer], by_telemetry[peer]):
            early, late = least(glances[:GLANCES]), least(glances[GLANCES:])
            assert late.nbytes < 1.1 * early.nbytes + 8_000, (peer, glances)
            assert late.visitors < early.visitors + 30, (peer, glances)
