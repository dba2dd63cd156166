"""A replica comes back with old weights while the only other one of its stage leaves: the stage goes on with the newer
weights, which the one that leaves hands to a guardian."""

from dataclasses import replace

import pytest
from elastic import plan_of
from lawful import check
from simulated_parts import rounds
from slow_line import SlowLine
from soak import soak

from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.resume import NEAR_ROUNDS
from noloco_p2p.sim.faults import Fault, FaultySwarm
from noloco_p2p.sim.process import Outcome

AWAY_S, LEAVES_S = 6.0, 30.0
"""When one replica goes, and when the other one is told to leave."""
SLOWLY = 6.0
"""Bytes per second from the one that leaves to the other: a copy of its state does not arrive in time."""
CASES = [
    (kind, after_s, line, routing, stage)
    for kind, after_s, line in (
        ("bounce", 0.0, None),
        ("bounce", 0.2, None),
        ("pause", 0.0, None),
        ("pause", -2.0, SLOWLY),
        ("stop", 0.3, None),
        ("stop", -2.0, SLOWLY),
    )
    for routing in ("random", "balanced")
    for stage in (0, 1)
]
"""What happens to the replica that was away, how many seconds after LEAVES_S it is back, bytes per second of the line
from the other one, routing, stage."""
SHORT = (3, 5, 8, 10, 13, 18, 20, 23)


def lost_rounds(outcome: Outcome, leaves: PeerId, away: PeerId) -> int:
    """How many rounds of the replica that left are not in the weights with which the other one goes on."""
    left = outcome.nodes[leaves]
    resumed = [h for h in outcome.trace.of("resumed", away) if h.at_s > AWAY_S + 1.0]
    own = [h for h in outcome.trace.of("outer_round", away) if h.at_s < AWAY_S + 1.0]
    return rounds(left)[-1] - int((resumed or own)[-1].number("round"))


def while_it_leaves(
    kind: str, after_s: float, line: float | None, routing: str, stage: int, seed: int = 1
) -> tuple[FaultySwarm, PeerId, PeerId]:
    """A swarm, the replica that leaves, and the one that was away."""
    leaves, away = f"s{stage}r0", f"s{stage}r1"
    plan = plan_of((2, 2), steps=60, routing=routing, outer={"rule": "gossip", "deadline_s": 3.0}, seed=seed)
    if line is not None:
        plan = replace(plan, geography=SlowLine(pair=(leaves, away), pair_bytes_per_s=line))
    fault = Fault(AWAY_S, kind, (away,), LEAVES_S + after_s - AWAY_S)
    swarm = FaultySwarm(replace(plan, seed=seed), (fault,), limit_s=2000.0)
    swarm.at(LEAVES_S, lambda: swarm.drain(leaves))
    return swarm, leaves, away


@pytest.mark.parametrize(
    ("kind", "after_s", "line", "routing", "stage"),
    [*(CASES[i] for i in SHORT), *soak(one for i, one in enumerate(CASES) if i not in SHORT)],
)
def test_the_stage_goes_on_with_the_weights_of_the_replica_that_left(
    kind: str, after_s: float, line: float | None, routing: str, stage: int
) -> None:
    swarm, leaves, away = while_it_leaves(kind, after_s, line, routing, stage)
    assert lost_rounds(check(swarm), leaves, away) <= NEAR_ROUNDS
