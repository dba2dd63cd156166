"""Swarms with faults drawn from a seed keep every law.

The laws are in `noloco_p2p/sim/laws.py`. `python tests/support/elastic.py SEED` replays one swarm. In the same
folder, `mixed.py`, `varied.py`, `flickering.py` and `lying.py SEED UNTIL` look for swarms that break a law.
"""

import pytest
from choosing import ChoosingSwarm
from elastic import config_for, drawn, manifest_for
from flickering import drawn as drawn_flickering
from lawful import check
from lying import drawn as drawn_lying
from lying import judge as judge_lying
from mixed import drawn as drawn_mixed
from noted import noted
from soak import soak
from varied import drawn as drawn_varied

from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.faults import Fault, FaultySwarm
from noloco_p2p.sim.world import SimPlan

SEEDS, SOAK_SEEDS = 10, 200
SWARMS_A_TEST = 5
MIXED, SOAK_MIXED = 5, 400
VARIED, SOAK_VARIED = 5, 400
LYING, SOAK_LYING = 5, 400
SOAK_FLICKERING = 200
CHOOSING = range(3, 8)


@pytest.mark.parametrize("block", [*range(0, SEEDS, SWARMS_A_TEST), *soak(range(SEEDS, SOAK_SEEDS, SWARMS_A_TEST))])
def test_swarms_survive_what_is_drawn(block: int) -> None:
    sources = set[str]()
    for seed in range(block, block + SWARMS_A_TEST):
        with noted(f"seed {seed}; replay: python tests/support/elastic.py {seed}"):
            swarm = FaultySwarm(*drawn(seed))
            check(swarm)
        sources |= {one.source for one in swarm.resumptions}
    if block == 0:
        assert sources == {"peer", "shard", "guardian", "fresh"}, "otherwise the swarms prove less than they seem to"


def test_a_guardian_that_restarted_is_not_waited_for_as_if_a_transfer_had_broken_off() -> None:
    """The only replica of a stage came back while the adverts of two guardians that had lost its weights still listed
    them: it waited for half an hour."""
    check(FaultySwarm(*drawn(189)))


@pytest.mark.parametrize("seed", [5188, 5340])
def test_a_silent_node_does_not_let_the_answers_grow_old_by_which_weights_are_chosen(seed: int) -> None:
    """A node that came back asked its replicas, waited three seconds for the clock of a silent node, and only then
    continued from a checkpoint that had meanwhile fallen behind."""
    check(FaultySwarm(*drawn(seed)))


def test_a_node_begins_afresh_only_if_no_other_one_has_meanwhile() -> None:
    """All three replicas of a stage lost their disks. One decided to begin afresh, asked whether it was cut off, which
    took three seconds, and then began with initial weights of its own although the two others trained."""
    plan, faults = drawn(91074)
    arrivals = [Fault(at_s, "arrive", (peer,)) for at_s, peer in ((13.578789, "s1r2"), (14.49426, "s1r3"))]
    check(FaultySwarm(plan, (*faults, *arrivals)))


def test_a_node_that_catches_up_takes_no_honest_replica_for_bold() -> None:
    """One replica had fallen behind as well. What the run's clock allows did not count, so the two others came last."""
    check(drawn_mixed(2470))


def test_a_guardian_whose_answer_is_lost_is_asked_again_before_a_stage_begins_afresh() -> None:
    """Stage 0 had not done a round yet, so initial weights passed for as good as those of the guardian."""
    check(drawn_mixed(303))


@pytest.mark.parametrize("block", [*range(0, MIXED, SWARMS_A_TEST), *soak(range(MIXED, SOAK_MIXED, SWARMS_A_TEST))])
def test_swarms_of_every_rule_survive_every_kind_of_fault(block: int) -> None:
    for seed in range(block, block + SWARMS_A_TEST):
        with noted(f"seed {seed}; replay: python tests/support/mixed.py {seed}"):
            check(drawn_mixed(seed))


@pytest.mark.parametrize("block", [*range(0, VARIED, SWARMS_A_TEST), *soak(range(VARIED, SOAK_VARIED, SWARMS_A_TEST))])
def test_swarms_with_other_settings_and_hours_survive_every_kind_of_fault(block: int) -> None:
    for seed in range(block, block + SWARMS_A_TEST):
        with noted(f"seed {seed}; replay: python tests/support/varied.py {seed}"):
            check(drawn_varied(seed))


@pytest.mark.parametrize("block", soak(range(0, SOAK_FLICKERING, SWARMS_A_TEST)))
def test_swarms_survive_faults_that_come_back_again_and_again(block: int) -> None:
    for seed in range(block, block + SWARMS_A_TEST):
        with noted(f"seed {seed}; replay: python tests/support/flickering.py {seed}"):
            check(drawn_flickering(seed))


@pytest.mark.parametrize("block", [*range(0, LYING, SWARMS_A_TEST), *soak(range(LYING, SOAK_LYING, SWARMS_A_TEST))])
def test_the_others_survive_every_kind_of_lie(block: int) -> None:
    lies = set[str]()
    for seed in range(block, block + SWARMS_A_TEST):
        with noted(f"seed {seed}; replay: python tests/support/lying.py {seed}"):
            swarm = drawn_lying(seed)
            judge_lying(swarm, swarm.run())
        lies |= {swarm.lie} if swarm.lies_told else set()
    if block == 0:
        assert len(lies) >= 4, "otherwise the swarms prove less than they seem to"


def test_a_node_whose_only_checkpoint_is_torn_may_begin_afresh() -> None:
    """The law took the checkpoint for one to continue from: the node had not read it yet."""
    check(drawn_varied(3043))


def test_a_node_that_leaves_drops_what_has_not_reached_its_device() -> None:
    """The law took the microbatches that were cancelled before their forward pass for lost ones."""
    manifest = manifest_for((2, 2), steps=3, microbatches_per_step=12)
    plan = SimPlan(manifest, (2, 2), config=config_for(), costs=Costs(forward_s=0.8, backward_s=1.0))
    swarm = FaultySwarm(plan, (Fault(2.4, "leave", ("s0r1",), 6.9),), limit_s=1000.0)
    swarm.gap_s = 60.0
    outcome = check(swarm)
    reasons = [event.get("reason") for event in outcome.trace.of("microbatch", "s0r1")]
    assert "cancelled" in reasons


def test_one_seed_gives_one_run() -> None:
    hashes = []
    for seed in (11, 11, 12):
        swarm = FaultySwarm(*drawn(seed))
        check(swarm)
        hashes.append(swarm.trace.trace_hash)
    assert hashes[0] == hashes[1] != hashes[2]


def test_every_kind_of_fault_is_drawn() -> None:
    """Otherwise the swarms above would prove less than they seem to."""
    kinds = {fault.kind for seed in range(SEEDS) for fault in drawn(seed)[1]}
    assert kinds == {"bounce", "wipe", "crash", "hang", "mute", "cut", "split", "pause", "leave"}


def test_swarms_whose_nodes_choose_their_stages_survive_what_is_drawn() -> None:
    """Nodes move, and are hit by faults while they do."""
    struck, moved = set[str](), 0
    for seed in CHOOSING:
        with noted(f"seed {seed}; replay: python tests/support/choosing.py {seed}"):
            swarm = ChoosingSwarm(seed)
            moved += len(check(swarm).trace.of("moved"))
        struck |= {*swarm.struck}
    assert moved >= len(CHOOSING)
    assert len(struck) >= 4, "otherwise the swarms prove less than they seem to"
