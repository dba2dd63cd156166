"""Members that say who they are and serve nothing, ten times as many as honest ones, in swarms of real nodes under
virtual time (ARCHITECTURE.md, "On trial")."""

import asyncio
from collections.abc import Sequence
from itertools import count, product

import pytest
from barriers import barrier
from elastic import plan_of
from lawful import check
from soak import soak
from test_strangers_simulated import stranger, swarm_with

from noloco_p2p.core.messages import Advert, Gradient, Header, MicrobatchId, NodeDescription, PeerId, Progress
from noloco_p2p.core.timeouts import CAPTURE_S
from noloco_p2p.core.trials import SERVED_TIMES, SHORTEST_SILENCES
from noloco_p2p.node.pipeline.serve import MicrobatchServer
from noloco_p2p.ports import Body
from noloco_p2p.sim.faults import FaultySwarm
from noloco_p2p.sim.figures import RunFigures, figures
from noloco_p2p.sim.transport import SimTransport
from noloco_p2p.sim.world import SimPlan

HONEST, TIMES = 4, 10
FROM_S, STEPS = 3.0, 60
HELD_S = 2 * SERVED_TIMES * SHORTEST_SILENCES
"""How long two failed calls in a row may take, where `limits.patience_floor_s` is 1."""
LEFT = {2: 0.87, 3: 0.8}
"""The smallest acceptable share of the tokens/s, by number of stages."""
REPORTS = ("nothing", "unknown", "standstill", "progress")
"""What they report about the microbatches that they have been sent."""


def is_hanging(peer: PeerId) -> bool:
    return peer.startswith("x")


def make_hang(monkeypatch: pytest.MonkeyPatch, reports: str) -> None:
    describe, progress, numbers = SimTransport.describe, SimTransport.progress, count()

    async def described(self: SimTransport, peer: Advert) -> NodeDescription:
        if not is_hanging(peer.peer_id):
            return await describe(self, peer)
        await asyncio.sleep(0.01)
        return NodeDescription(peer.peer_id, peer.run_id, peer.stage, peer.state, peer.step, peer.outer_round, "1", 0)

    async def reported(
        self: SimTransport, peer: Advert, microbatches: Sequence[MicrobatchId], timeout_s: float
    ) -> list[Progress | None]:
        if not is_hanging(peer.peer_id) or reports == "nothing":
            return await progress(self, peer, microbatches, timeout_s)
        await asyncio.sleep(0.01)
        known = Progress(next(numbers) if reports == "progress" else 1, 0.0)
        return [None if reports == "unknown" else known] * len(microbatches)

    monkeypatch.setattr(SimTransport, "describe", described)
    monkeypatch.setattr(SimTransport, "progress", reported)


def beside(plan: SimPlan, times: int, until_s: float) -> FaultySwarm:
    """A swarm with so many times as many beside it."""
    return among(plan, [(stage, i) for stage in range(len(plan.replicas)) for i in range(times * HONEST)], until_s)


def among(plan: SimPlan, places: Sequence[tuple[int, int]], until_s: float) -> FaultySwarm:
    """A swarm beside one at each place: a stage, and a number in it."""
    others = [stranger(f"x{stage}n{i}", stage, outer_round=1, settled=True) for stage, i in places]
    swarm = swarm_with(plan, *others, from_s=FROM_S, until_s=until_s)
    for one in others:
        swarm.network.block(barrier("hang", one.peer_id))
    return swarm


def hanging_beside(stages: int, seed: int, times: int) -> RunFigures:
    """The figures of a swarm beside so many times as many, who are listed until the run should have ended."""
    plan = plan_of((HONEST,) * stages, steps=STEPS, seed=seed, microbatches_per_step=4)
    swarm = beside(plan, times, 1.5 * STEPS)
    return figures(check(swarm), swarm.network.traffic.byte_counts(), 100, stages)


@pytest.mark.parametrize(
    ("reports", "stages", "seed"),
    [
        ("nothing", 2, 1),
        *soak(case for case in product(REPORTS, (2, 3), (1, 2, 3)) if case != ("nothing", 2, 1)),
    ],
)
def test_ten_times_as_many_hanging_members_cost_little(
    reports: str, stages: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of the cost falls into the first seconds. When an answer was enough to be sent microbatches, twice as many
    cost 58 and, if they told of no microbatch, 86 % of the tokens/s."""
    make_hang(monkeypatch, reports)
    quiet, hanging = (hanging_beside(stages, seed, times) for times in (0, TIMES))
    share = hanging.tokens_per_s / quiet.tokens_per_s
    assert share >= LEFT[stages], f"{share:.3f} of the tokens/s"
    # In three stages more than half of the rounds of so short a run are alone.
    assert stages > 2 or hanging.rounds.get("alone", 0) <= sum(hanging.rounds.values()) / 2


@pytest.mark.parametrize(
    ("rule", "inner_steps", "count", "steps", "left"),
    [
        ("sync", 1, 1, 60, 0.72),
        *soak([("diloco", 4, 1, 60, 0.8)]),
        *soak([("sync", 1, 1, 120, 0.8), ("sync", 1, 20, 120, 0.65), ("diloco", 4, 20, 120, 0.85)]),
        *soak([("dct", 4, 2, 120, 0.85)]),
    ],
)
def test_hanging_members_do_not_hold_up_each_round_of_a_rule_that_takes_from_all(
    rule: str, inner_steps: int, count: int, steps: int, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All waited for it again whenever one of them tried it again: 65 and 74 % of the tokens/s were left."""
    make_hang(monkeypatch, "nothing")
    outer = {"rule": rule, "inner_steps": inner_steps, "deadline_s": 3.0}
    plan = plan_of((HONEST, HONEST), steps=steps, microbatches_per_step=4, outer=outer)
    quiet, hanging = (
        figures(check(among(plan, [(1, i) for i in range(n)], until_s=1.5 * steps)), {}, 100, 2) for n in (0, count)
    )
    share = hanging.tokens_per_s / quiet.tokens_per_s
    assert share >= left, f"{share:.3f} of the tokens/s"


@pytest.mark.parametrize(
    ("stage", "times", "steps"), [(0, 2, 240), *soak([(1, 2, 240), (0, TIMES, 1200), (1, TIMES, 1200)])]
)
def test_a_newcomer_finds_a_donor_among_hanging_members_and_the_run_ends(
    stage: int, times: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked the same eight for their weights again and again, and the run never ended: later stages served those of
    stage 0 that claimed to train."""
    make_hang(monkeypatch, "nothing")
    plan = plan_of((HONEST, HONEST), steps=steps, microbatches_per_step=4)
    swarm = beside(plan, times, until_s=3.0 * steps)
    swarm.limit_s = 2.0 * steps
    swarm.at(10.0, lambda: swarm.start(stage, HONEST))
    outcome = check(swarm)
    [resumed] = outcome.trace.of("resumed", f"s{stage}r{HONEST}")
    assert resumed.get("source") == "peer"
    most_s = 1.25 * CAPTURE_S * HONEST * times
    assert resumed.at_s < 10.0 + most_s, f"each of them is asked for its weights once: {resumed.at_s}"
    assert {one.step for one in outcome.processes} == {float(steps)}


def test_one_that_has_served_and_then_reports_progress_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It held each microbatch for the 50 minutes that one call may take."""
    liar, from_s, numbers = "s1r2", 10.0, count()
    propagate, progress = MicrobatchServer.propagate, SimTransport.progress

    def lies(peer: PeerId) -> bool:
        return peer == liar and asyncio.get_running_loop().time() > from_s

    async def served(self: MicrobatchServer, caller: PeerId, header: Header, body: Body) -> Gradient:
        if lies(self._node.me):
            await asyncio.Event().wait()
        return await propagate(self, caller, header, body)

    async def reported(
        self: SimTransport, peer: Advert, microbatches: Sequence[MicrobatchId], timeout_s: float
    ) -> list[Progress | None]:
        if not lies(peer.peer_id):
            return await progress(self, peer, microbatches, timeout_s)
        await asyncio.sleep(0.01)
        return [Progress(next(numbers), 0.0)] * len(microbatches)

    monkeypatch.setattr(MicrobatchServer, "propagate", served)
    monkeypatch.setattr(SimTransport, "progress", reported)
    swarm = FaultySwarm(plan_of((2, 3), steps=40, microbatches_per_step=4), limit_s=1000.0)
    swarm.gap_s = HELD_S
    outcome = check(swarm)
    assert any(one.get("peer") == liar for one in outcome.trace.of("reroute")), "otherwise it was never asked"
    assert {one.step for one in outcome.of_stage(0)} == {40.0}
