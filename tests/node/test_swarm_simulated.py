"""Proofs 4 and 8 in the simulator: swarms of real nodes end on their own, whatever the links and speeds are."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from noted import noted
from short_runs import LIMITS, manifest_for
from simulated_parts import linear_stage, rounds
from soak import soak

from noloco_p2p.config import (
    DirectorySettings,
    NodeConfig,
)
from noloco_p2p.core.messages import STREAM, Advert, MicrobatchId, PeerId
from noloco_p2p.sim import world
from noloco_p2p.sim.batches import SimBatches
from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.links import Link
from noloco_p2p.sim.process import Outcome, SimProcess
from noloco_p2p.sim.world import SimPlan, SimSwarm, peer_id

SHAPES = [(2, 2), (2, 3), (3, 2), (1, 3), (3, 3), (2, 2, 2), (2, 3, 1), (1, 2, 3), (2, 1, 2, 2), (2, 2, 2, 2)]
SEEDS, SOAK_SEEDS = 20, 100
SWARMS_A_TEST = 10


def counted(outcome: Outcome, stage: int) -> Counter[MicrobatchId]:
    return Counter(one.microbatch for node in outcome.of_stage(stage) for one in linear_stage(node).counted)


def drawn(seed: int) -> SimPlan:
    """A swarm from a seed: its shape, policy, speeds, links and waits."""
    rng = random.Random(seed)
    replicas = SHAPES[seed % len(SHAPES)]
    manifest = manifest_for(
        replicas,
        steps=9,
        seed=seed,
        routing=rng.choice(["random", "weighted", "balanced"]),
        outer={"rule": "noloco", "inner_steps": 4, "deadline_s": 2.0, "partner_wait_s": rng.choice([None, 0.0, 300.0])},
    )
    slow = peer_id(stage := rng.randrange(len(replicas)), rng.randrange(replicas[stage]))
    return SimPlan(
        manifest,
        replicas,
        seed=seed,
        config=NodeConfig(limits=LIMITS),
        link=Link(latency_s=0.005, spread=0.5, reply_loss=rng.choice([0.0, 0.0, 0.01])),
        costs=Costs(spread=0.4),
        slowness={slow: 3.0},
        view_age_s=rng.choice([0.0, 1.0]),
        batches_factory=partial(SimBatches, unequal=True),
    )


def check_ended(plan: SimPlan, outcome: Outcome) -> None:
    """All nodes ended on their own at `steps`, and no replica counted an id twice."""
    for one in outcome.processes:
        assert (one.state, one.step, one.error) == ("left", float(plan.manifest.steps), None), one.peer
        numbers = rounds(one)
        assert numbers == sorted(set(numbers)), f"{one.peer} did a round twice: {numbers}"
        ids = [entry.microbatch for entry in linear_stage(one).counted]
        assert len(ids) == len(set(ids)), f"{one.peer} counted an id twice"
    for node in outcome.of_stage(0):
        begun = plan.manifest.microbatches_per_step * node.inner_steps
        assert begun == node.microbatches["done"] + node.microbatches["dropped"] + node.microbatches["violation"]


@pytest.mark.parametrize("block", [*range(0, SEEDS, SWARMS_A_TEST), *soak(range(SEEDS, SOAK_SEEDS, SWARMS_A_TEST))])
def test_swarms_end_by_themselves_at_their_last_step(block: int) -> None:
    for seed in range(block, block + SWARMS_A_TEST):
        plan = drawn(seed)
        with noted(f"seed {seed}: drawn({seed})"):
            check_ended(plan, SimSwarm(plan).run(limit_s=600))


def test_without_losses_every_microbatch_counts_exactly_once_at_every_stage() -> None:
    for seed in range(20):
        plan = drawn(seed)
        # Patient enough that no slow node is taken for hung and its work repeated by another.
        patient = NodeConfig(limits=LIMITS.model_copy(update={"patience_floor_s": 60.0, "microbatch_deadline_s": 60.0}))
        plan = replace(plan, link=replace(plan.link, reply_loss=0.0), config=patient)
        outcome = SimSwarm(plan).run(limit_s=600)
        first = counted(outcome, 0)
        for stage in range(len(plan.replicas)):
            assert counted(outcome, stage) == first, f"seed {seed}, stage {stage}"
            assert set(first.values()) == {1}, f"seed {seed}"


# --- the clock --------------------------------------------------------------------------------------------------------


def clock_plan(
    replicas: tuple[int, ...], *, view_age_steps: float = 0.0, slow: dict[str, float] | None = None
) -> SimPlan:
    """m = 10 and steps of about a tenth of a second; views are that many steps old, plus the time between two."""
    manifest = manifest_for(replicas, steps=100, outer={"rule": "noloco", "inner_steps": 10, "deadline_s": 5.0})
    step_s = 0.105
    return SimPlan(
        manifest,
        replicas,
        seed=3,
        config=NodeConfig(limits=LIMITS, directory=DirectorySettings(refresh_s=2 * step_s)),
        link=Link(latency_s=0.002),
        costs=Costs(spread=0.1),
        slowness=slow or {},
        view_age_s=max(0.0, view_age_steps - 2) * step_s,
        batches_factory=partial(SimBatches, unequal=True),
    )


CLOCKS = {
    "equal": clock_plan((2, 2)),
    "equal, views 20 steps old": clock_plan((3, 3), view_age_steps=20),
    "one of stage 0 three times faster": clock_plan((3, 3), slow={"s0r1": 3.0, "s0r2": 3.0}),
    "1 + 4": clock_plan((1, 4)),
}
MORE_CLOCKS = {
    "equal, three": clock_plan((3, 3)),
    "equal, views 2 steps old": clock_plan((2, 2), view_age_steps=2),
    "2 + 3": clock_plan((2, 3)),
    "2 + 3, views 20 steps old": clock_plan((2, 3), view_age_steps=20),
}


def lonely(outcome: Outcome) -> tuple[int, int]:
    """(rounds that ended alone although the stage had a partner for them, rounds of stages that had any partner)."""
    alone = total = 0
    for one in outcome.processes:
        if len(outcome.of_stage(one.stage)) < 2:
            continue
        for happening in one.trace.of("outer_round"):
            total += 1
            alone += happening.get("result") == "alone" and happening.get("reason") != "odd"
    return alone, total


@pytest.mark.parametrize("name", [*list(CLOCKS)[1::2], *soak([*list(CLOCKS)[::2], *MORE_CLOCKS])])
def test_the_clock_keeps_the_swarm_together(name: str) -> None:
    plan = (CLOCKS | MORE_CLOCKS)[name]
    outcome = SimSwarm(plan).run(limit_s=3000)
    check_ended(plan, outcome)
    alone, total = lonely(outcome)
    assert alone < 0.03 * total, f"{alone} of {total} rounds found no partner"
    first = counted(outcome, 0)
    for stage in range(1, len(plan.replicas)):
        assert counted(outcome, stage) == first, "no gradient is lost because an id repeats"
    if name.startswith("equal"):
        for one in outcome.of_stage(0):
            assert abs(one.inner_steps - 100) <= 5, f"{one.peer} took {one.inner_steps} inner steps for 100"


def test_a_faster_origin_takes_more_inner_steps() -> None:
    outcome = SimSwarm(CLOCKS["one of stage 0 three times faster"]).run(limit_s=3000)
    steps: dict[str, SimProcess] = outcome.nodes
    assert steps["s0r0"].inner_steps > 1.5 * steps["s0r1"].inner_steps


def test_an_origin_at_a_sixth_of_the_speed_ends_with_the_others() -> None:
    outcome = SimSwarm(clock_plan((3, 3), slow={"s0r2": 6.0})).run(limit_s=3000)
    last, others, slow = (
        [event.at_s for event in outcome.trace.of("inner_step", peer)] for peer in ("s0r1", "s0r0", "s0r2")
    )
    ended_at_s = max(last[-1], others[-1])
    assert len(slow) < len(others) / 4
    assert sum(at_s > ended_at_s for at_s in slow) <= 2, "one that it was in, and one more"


def test_nodes_that_nobody_can_dial_exchange_snapshots_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = {peer_id(1, 0), peer_id(1, 2)}

    def advert(peer: PeerId, run_id: str, stage: int, addresses: tuple[str, ...]) -> Advert:
        return Advert(peer, run_id, stage, (*addresses, STREAM) if peer in hidden else addresses)

    monkeypatch.setattr(world, "Advert", advert)
    manifest = manifest_for((1, 4), steps=24, outer={"rule": "noloco", "inner_steps": 2, "deadline_s": 2.0})
    outcome = SimSwarm(SimPlan(manifest, (1, 4), config=NodeConfig(limits=LIMITS))).run()
    met = [(e.peer, str(e.get("partner"))) for e in outcome.trace.of("outer_round") if e.get("partner")]
    assert hidden <= {one for one, _ in met}
    assert not [pair for pair in met if hidden.issuperset(pair)]
