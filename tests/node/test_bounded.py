"""A node that has seen a thousand others come and go holds no more than one that has seen a hundred."""

import gc
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import pytest
from prometheus_client import generate_latest

from noloco_p2p.config import DirectorySettings, LimitSettings, NodeConfig, OuterSettings, RunManifest
from noloco_p2p.core import spent_ids
from noloco_p2p.core.messages import HostTensor
from noloco_p2p.io.telemetry.prometheus_telemetry import PrometheusTelemetry
from noloco_p2p.ports import Telemetry
from noloco_p2p.sim.process import SimProcess
from noloco_p2p.sim.stage import Costs
from noloco_p2p.sim.world import SimPlan, SimSwarm, peer_id

VISITORS, EVERY_S, STAY_S = 1000, 0.2, 2.0
FIRST_LOOK, SECOND_LOOK = 100, 1000
"""Visitors that have come by then."""
FIXED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.FrameType, types.CodeType)


class Both:
    """A telemetry that passes everything on to two others."""

    def __init__(self, *others: Telemetry) -> None:
        self.others = others

    def event(self, kind: str, /, **fields: object) -> None:
        for other in self.others:
            other.event(kind, **fields)

    def span(self, name: str) -> AbstractContextManager[None]:
        return self.others[0].span(name)


def held_bytes(roots: Iterable[object], outside: Iterable[object]) -> int:
    """Bytes of all objects that can be reached from `roots` and belong to the node: not the world, code or classes."""
    seen = {id(one) for one in outside}
    found, heap = 0, list(roots)
    while heap:
        one = heap.pop()
        if id(one) in seen or isinstance(one, FIXED) or type(one).__module__.startswith(("asyncio", "_asyncio")):
            continue
        seen.add(id(one))
        found += 0 if isinstance(one, HostTensor) else sys.getsizeof(one)
        heap.extend(gc.get_referents(one))
    return found


def outside(swarm: SimSwarm, process: SimProcess) -> Iterator[object]:
    """What is the simulator's."""
    yield from (swarm, swarm.network, swarm.registry, swarm.trace)
    yield from (process, process.world, *process.ports, *process.devices, *process.models)


def test_a_thousand_joins_and_departures_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    # So many spent ids are kept in any case; here they are not to hide what grows.
    monkeypatch.setattr(spent_ids, "SPENT_IDS", 64)
    manifest = RunManifest(
        stages=2,
        start_replicas=1,
        steps=10**6,
        sequence_length=2,
        microbatch_size=1,
        outer=OuterSettings(inner_steps=4, deadline_s=2.0),
    )
    limits = LimitSettings(patience_floor_s=0.5, linger_s=2.0, drain_s=2.0)
    config = NodeConfig(limits=limits, directory=DirectorySettings(ttl_s=3.0, refresh_s=1.0), rebalance=False)
    costs = Costs(forward_s=0.1, backward_s=0.2, inner_step_s=0.05, outer_s=0.02)
    swarm = SimSwarm(SimPlan(manifest, (2, 2), config=config, costs=costs))
    telemetries = {peer: PrometheusTelemetry(manifest.stages) for peer in ("s0r0", "s1r0")}
    series: dict[str, list[set[str]]] = {peer: [] for peer in telemetries}
    held: dict[str, list[tuple[int, int]]] = {peer: [] for peer in telemetries}
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
            node = held_bytes([process.node], [*outside(swarm, process), telemetry])
            held[peer] += [(node, held_bytes([telemetry], [telemetry.registry]))]

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
    looks = [3.0 + EVERY_S * number + 10.0 for number in (FIRST_LOOK, SECOND_LOOK)]
    for at_s in looks:
        swarm.at(at_s, look)
    for whole_s in range(int(looks[-1])):
        swarm.at(whole_s + 0.5, meet)
    for peer in ("s0r0", "s0r1", "s1r0", "s1r1"):
        swarm.at(looks[-1] + 1.0, lambda peer=peer: swarm.drain(peer))  # type: ignore[misc]
    swarm.run(limit_s=600, tolerate=True)
    assert len(met) > 0.7 * VISITORS, "they were seen"
    for peer in telemetries:
        first, second = series[peer]
        # A stage is guarded, or not, as its replicas come and go: one series for each stage at most.
        assert {one for one in second - first if "guarded_round" not in one} == set()
        early, late = held[peer]
        assert late[0] < 1.2 * early[0] + 10_000, (peer, held)
        assert late[1] < 1.2 * early[1] + 10_000, (peer, held)
