"""Nine causes, each planted in a swarm that is well: the diagnosis names that cause and that node, and before it none.

A stage without replica, a slow node, a half-open link and a stuck device are planted in simulated swarms of real nodes.
The rest is planted in one swarm of real processes, and taken back.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from test_swarm_simulated import LIMITS, manifest_for

from noloco_p2p.config import DirectorySettings, NodeConfig
from noloco_p2p.core import diagnosis
from noloco_p2p.core.findings import Finding, Report
from noloco_p2p.core.messages import PeerId
from noloco_p2p.sim.network import Link
from noloco_p2p.sim.world import Life, Swarm, SwarmPlan, peer_id

WELL_S, PLANTED_S = (8.0, 9.0, 10.0, 11.0, 12.0), 14.05
"""Virtual seconds: when a swarm is looked at while it is well, and when something is done to it."""
FOR_EVER = 1e9


# --- simulated swarms ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """What an observer saw of a swarm at one moment."""

    findings: list[Finding]
    sentence: str

    @property
    def bad(self) -> list[tuple[str, PeerId | None]]:
        """(name, who) of what is not well, worst first."""
        return [(finding.name, finding.peer) for finding in self.findings if finding.severity != "ok"]


def reports(swarm: Swarm) -> list[Report]:
    """What everybody who is announced says of itself; who has crashed refuses the connection."""
    now = asyncio.get_running_loop().time()
    found = []
    for advert in swarm.registry.view(now=now):
        life: Life = swarm.life(advert.peer_id)
        status = life.node.status(now) if life.running else None
        found.append(Report(advert.peer_id, advert, status, "" if status else "connection refused", 0.0))
    return found


def looked(replicas: tuple[int, ...], plant: Callable[[Swarm], object], *after_s: float) -> list[Look]:
    """A swarm is looked at while it is well, then hurt by `plant`, and looked at again so long after; then it is ended.

    Fails the test when something is found while all is well.
    """
    config = NodeConfig(limits=LIMITS, directory=DirectorySettings(refresh_s=0.5, ttl_s=6.0))
    plan = SwarmPlan(manifest_for(replicas, steps=100_000), replicas, seed=3, config=config, link=Link(latency_s=0.002))
    swarm, well, hurt = Swarm(plan), list[Look](), list[Look]()

    def look(into: list[Look]) -> None:
        told = reports(swarm)
        into.append(Look(diagnosis.findings(told), diagnosis.sentence(told)))

    def end() -> None:
        for stage, count in enumerate(replicas):
            for replica in range(count):
                swarm.crash(peer_id(stage, replica))

    for at_s in WELL_S:
        swarm.at(at_s, lambda: look(well))
    swarm.at(PLANTED_S, lambda: plant(swarm))
    for one_s in after_s:
        swarm.at(PLANTED_S + one_s, lambda: look(hurt))
    swarm.at(PLANTED_S + max(after_s) + 0.1, end)
    swarm.run(limit_s=200.0, tolerate=True)
    assert len(well) == len(WELL_S)
    assert len(hurt) == len(after_s)
    for one in well:
        assert set(one.bad) <= {("stage-thin", None)}, "nothing was planted yet"
        assert one.sentence.startswith("training: ")
    return hurt


def test_1_a_stage_without_replica_is_named() -> None:
    def plant(swarm: Swarm) -> None:
        swarm.crash("s1r0")
        swarm.crash("s1r1")

    for seen in looked((2, 2), plant, 4.0, 6.0, 12.0):  # while their adverts still live, and after that
        assert seen.bad[0] == ("stage-empty", None), seen.findings
        assert seen.sentence.startswith("stage 1 has no replica since ")


def test_2_a_node_five_times_slower_is_named() -> None:
    for seen in looked((2, 3), lambda swarm: swarm.slow("s1r1", 5.0), 15.0, 20.0):
        assert seen.bad == [("slow-node", "s1r1")]
        assert "slower than its stage's median and holds back stage 1" in seen.sentence


HALF_OPEN = ("half-open-link", "s1r1")


@pytest.mark.parametrize("way", [("s0r0", "s1r1"), ("s1r1", "s0r0")], ids=["requests", "answers"])
def test_3_a_half_open_link_is_named_with_both_its_ends(way: tuple[PeerId, PeerId]) -> None:
    """Just when the link is tried again there is nothing to see of it; an observer looks twice."""
    looks = looked((2, 2), lambda swarm: swarm.network.partition_one_way(*way), *(10 + 0.5 * n for n in range(20)))
    for first, second in zip(looks, looks[5:], strict=False):
        assert HALF_OPEN in (first.bad + second.bad)
    for seen in looks:
        assert set(seen.bad) <= {HALF_OPEN}
        assert not seen.bad or ("s0r0" in seen.sentence and "s1r1" in seen.sentence)


def test_3_the_only_link_to_a_stage_is_an_error() -> None:
    for seen in looked((1, 1), lambda swarm: swarm.network.partition_one_way("s0r0", "s1r0"), 12.0, 15.0, 20.0):
        assert seen.findings[0].severity == "error", seen.findings
        assert seen.bad[0] == ("half-open-link", "s1r0")
        assert "s0r0" in seen.sentence


def test_9_a_device_that_is_stuck_is_named_and_not_those_who_wait_for_it() -> None:
    for seen in looked((2, 2), lambda swarm: swarm.slow("s1r0", FOR_EVER), 15.0, 20.0, 30.0):
        assert seen.bad[0] == ("device", "s1r0"), seen.findings
        assert "its device is stuck in" in seen.sentence
