"""How many peers are set aside although they are healthy, in swarms with churn, partitions and slow lines and nodes.

A peer is healthy if its process runs and no fault has touched it, or the one that sets it aside, for LASTS_S.
"""

from collections import Counter

import pytest
from lawful import check
from soak import soak
from test_scenarios import short

from noloco_p2p.core.members import Members
from noloco_p2p.core.messages import Activation, Advert, Gradient, PeerId
from noloco_p2p.ports import ALONE, Claim
from noloco_p2p.sim.calls import DEAD_LINK_S
from noloco_p2p.sim.faults import FaultySwarm
from noloco_p2p.sim.simulation import build
from noloco_p2p.sim.transport import SimTransport

LASTS_S = 2 * DEAD_LINK_S
NAMES = ("churn", "partition", "stragglers", "consumer", "continents")
ALLOWED = 0.001


def touched(swarm: FaultySwarm, one: PeerId, other: PeerId, now: float) -> bool:
    """Whether one of these nodes does not run, or a fault of either has not been over for LASTS_S."""
    running = {process.peer for process in swarm.processes if process.running}
    recent = [fault for fault in swarm.begun if fault.ends_s > now - LASTS_S]
    hurt = any(fault.separates(one, other) or {one, other} & {*fault.peers} for fault in recent)
    return hurt or not {one, other} <= running


def counted(swarm: FaultySwarm, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Run a swarm. Returns the number of calls with microbatches, and of peers set aside, rightly and wrongly."""
    counts: Counter[str] = Counter()
    failed, propagate = Members.failed, SimTransport.propagate

    def noted(self: Members, peer: PeerId, *, now: float) -> None:
        before = self.is_aside(peer, now=now)
        failed(self, peer, now=now)
        if not before and self.is_aside(peer, now=now):
            counts["rightly" if touched(swarm, self._me, peer, now) else "wrongly"] += 1

    async def called(self: SimTransport, peer: Advert, activation: Activation, claim: Claim = ALONE) -> Gradient:
        counts["calls"] += 1
        return await propagate(self, peer, activation, claim)

    with monkeypatch.context() as patch:
        patch.setattr(Members, "failed", noted)
        patch.setattr(SimTransport, "propagate", called)
        check(swarm)
    return counts


@pytest.mark.parametrize("name", ["churn", *soak(NAMES[1:])])
def test_healthy_peers_are_hardly_ever_set_aside(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, counts = short(name), Counter[str]()
    for seed in (1, 2, 3):
        counts += counted(build(scenario.of_nodes(8), seed), monkeypatch)
    assert counts["calls"] > 100
    assert counts["wrongly"] <= ALLOWED * counts["calls"], dict(counts)
    assert name not in ("churn", "partition") or counts["rightly"] > 0, "otherwise nothing happened"
