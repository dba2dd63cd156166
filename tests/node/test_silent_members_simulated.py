"""Members that announce themselves and answer no call, ten times as many as honest ones, in swarms of real nodes under
virtual time (ARCHITECTURE.md, "What a stranger can do")."""

import zlib
from functools import partial

import pytest
from barriers import barrier
from elastic import plan_of
from lawful import check
from soak import soak
from test_strangers_simulated import STEPS, stranger, swarm_with

from noloco_p2p.core.messages import Advert, NodeDescription
from noloco_p2p.core.timeouts import DESCRIBE_S
from noloco_p2p.sim.faults import FaultySwarm
from noloco_p2p.sim.figures import RunFigures, figures
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.transport import SimTransport
from noloco_p2p.sim.world import SimPlan

HONEST, TIMES = 4, 10
FROM_S, UNTIL_S = 3.0, 390.0
"""The silent ones are listed from the first steps until long after the run."""
JOINS_S = 8.0
ROUTINGS = ("random", "weighted", "balanced")


def silent(times: float = TIMES) -> list[Advert]:
    count = int(times * HONEST)
    return [stranger(f"x{s}n{i}", s, outer_round=1, settled=True) for s in (0, 1) for i in range(count)]


def plan_for(routing: str, seed: int, steps: int = STEPS, replicas: int = HONEST) -> SimPlan:
    return plan_of((replicas, replicas), steps=steps, routing=routing, seed=seed, microbatches_per_step=4)


def swarm_beside(plan: SimPlan, *others: Advert) -> FaultySwarm:
    """A swarm beside these adverts. Calls to them vanish."""
    swarm = swarm_with(plan, *others, from_s=FROM_S, until_s=UNTIL_S) if others else FaultySwarm(plan)
    for one in others:
        swarm.network.block(barrier("hang", one.peer_id))
    return swarm


def figures_of(swarm: FaultySwarm) -> RunFigures:
    return figures(check(swarm), swarm.network.traffic.byte_counts(), 100, 2)


def served_at(outcome: Outcome, peer: str, after_s: float = 0.0) -> float:
    """When a node's first microbatch ended, in training or in service."""
    done = [one.at_s for one in outcome.trace.of("microbatch", peer) if one.get("result") == "done"]
    return next(at_s for at_s in done if at_s > after_s)


@pytest.mark.parametrize(
    ("routing", "seed", "steps"),
    [
        ("random", 1, STEPS),
        *soak([("balanced", 1, STEPS)]),
        *soak((routing, i, 60) for routing in ROUTINGS for i in (1, 2, 3)),
    ],
)
def test_ten_times_as_many_silent_members_cost_at_most_a_twentieth_of_the_tokens_per_second(
    routing: str, seed: int, steps: int
) -> None:
    """Before silent peers were kept aside, random and weighted routing were left with 0.15 of the tokens/s, and
    balanced stood still."""
    plan = plan_for(routing, seed, steps)
    quiet, beside = figures_of(swarm_beside(plan)), figures_of(swarm_beside(plan, *silent()))
    share = beside.tokens_per_s / quiet.tokens_per_s
    assert share >= 0.95, f"{share:.3f} of the tokens/s; rounds {beside.rounds}"
    assert beside.rounds.get("alone", 0) <= sum(beside.rounds.values()) / 10
    assert [one.inner_steps for one in beside.stages] == pytest.approx(
        [one.inner_steps for one in quiet.stages], rel=0.05
    )


@pytest.mark.parametrize(
    ("stage", "routing", "seed"),
    [
        (0, "random", 1),
        *soak((stage, routing, i) for stage in (0, 1) for routing in ROUTINGS for i in (1, 2, 3)),
    ],
)
def test_a_newcomer_is_found_among_silent_members_and_calls_none_of_them(stage: int, routing: str, seed: int) -> None:
    """It and those that it joins ask many silent peers. It waited behind them, and a late node called each once."""
    swarm, me = swarm_beside(plan_for(routing, seed, 2 * STEPS), *silent()), f"s{stage}r{HONEST}"
    swarm.at(JOINS_S, lambda: swarm.start(stage, HONEST))
    outcome = check(swarm)
    began = next(one.at_s for one in outcome.trace.of("state", me) if one.get("state") == "training")
    assert began < JOINS_S + 4 * DESCRIBE_S
    assert served_at(outcome, me) < began + 5.0
    assert not [one for one in outcome.trace.of("reroute") if one.get("reason") != "fallback"]


def test_a_member_that_restarts_beside_silent_ones_is_served_again_at_once() -> None:
    swarm = swarm_beside(plan_for("random", 1, 2 * STEPS), *silent())
    for peer in ("s0r1", "s1r1"):
        swarm.at(2 * JOINS_S, lambda peer=peer: swarm.bounce(peer, 1.0))  # type: ignore[misc]
    outcome = check(swarm)
    for peer in ("s0r1", "s1r1"):
        began = [one.at_s for one in outcome.trace.of("state", peer) if one.get("state") == "training"]
        assert served_at(outcome, peer, began[1]) < began[1] + 2.0


@pytest.mark.parametrize("seed", [1, *soak((2, 3))])
def test_under_balanced_a_few_silent_members_that_all_count_cost_a_tenth_of_the_tokens_per_second_at_most(
    seed: int,
) -> None:
    """Two beside four in each stage. Each step waited for the microbatches of the silent ones until it had given them
    up, and the others' were shared out unevenly: 0.71 and 0.74 of the tokens/s were left (seeds 1 and 2)."""
    plan = plan_for("balanced", seed, 60)
    quiet, beside = figures_of(swarm_beside(plan)), figures_of(swarm_beside(plan, *silent(times=0.5)))
    share = beside.tokens_per_s / quiet.tokens_per_s
    assert share >= 0.9, f"{share:.3f} of the tokens/s"


@pytest.mark.parametrize("stage", [1, *soak([0])])
def test_under_balanced_a_newcomer_that_one_mate_cannot_reach_costs_nothing(stage: int) -> None:
    """That mate saw another membership than all others, and each waited for microbatches that never came: 0.7 of the
    tokens/s were left."""
    figures_by_cut = []
    for cut in (False, True):
        swarm, me = FaultySwarm(plan_for("balanced", 1, 2 * STEPS, replicas=3)), f"s{stage}r3"
        swarm.at(JOINS_S, lambda swarm=swarm: swarm.start(stage, 3))  # type: ignore[misc]
        if cut:
            swarm.at(JOINS_S, partial(swarm.network.block, barrier("cut", me, f"s{stage}r0")))
        figures_by_cut.append(figures(swarm.run(), swarm.network.traffic.byte_counts(), 100, 2).tokens_per_s)
    assert figures_by_cut[1] > 0.9 * figures_by_cut[0]


@pytest.mark.parametrize(("routing", "answers"), [("random", 50), *soak(("balanced", n) for n in (50, 100))])
def test_members_that_say_who_they_are_to_some_and_nothing_else_stop_nobody(
    routing: str, answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tells `answers` percent of the others who it is: so nodes differ in whom they count."""
    right = SimTransport.describe

    async def describe(self: SimTransport, peer: Advert) -> NodeDescription:
        if peer.peer_id[0] != "x" or zlib.crc32(f"{self._me} {peer.peer_id}".encode()) % 100 >= answers:
            return await right(self, peer)
        return NodeDescription(peer.peer_id, peer.run_id, peer.stage, peer.state, peer.step, peer.outer_round, "1", 0)

    monkeypatch.setattr(SimTransport, "describe", describe)
    outcome = check(swarm_beside(plan_for(routing, 1), *silent(times=1)))
    assert {one.step for one in outcome.processes} == {STEPS}
