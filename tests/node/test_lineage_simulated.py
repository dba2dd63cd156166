"""Lineage of weights: a newcomer begins with initial weights while nobody with trained ones can be reached, and these
are found again later."""

from dataclasses import replace

import pytest
from elastic import plan_of
from lawful import check
from soak import soak

from noloco_p2p.sim.faults import Fault, FaultySwarm
from noloco_p2p.sim.laws import recording_stages
from noloco_p2p.sim.process import Outcome

TRAINED = ("s1r0", "s1r1", "s1r2")
LOST_S, ARRIVES_S, BRIEFLY_S, FOR_LONG_S = 15.0, 20.0, 147.0, 200.0
"""When a stage is lost, when a node arrives there, which begins afresh two minutes later, and when the stage is back:
the newcomer has trained for fewer rounds than it, or for more."""


def replaced_while(*faults: Fault, stage: int = 1, **changes: object) -> FaultySwarm:
    """A swarm in whose stage, which has three replicas and is lost for a while, a node arrives."""
    plan = plan_of((2, 3) if stage else (3, 2), **{"steps": 60} | changes)  # type: ignore[arg-type]
    swarm = FaultySwarm(plan, faults, limit_s=2000.0)
    swarm.at(ARRIVES_S - 0.001, lambda: swarm.start(stage, 3))
    return swarm


def cut_off(back_s: float, stage: int = 1, **changes: object) -> FaultySwarm:
    """As above. All replicas of the stage are cut off from the others, and then from the newcomer too."""
    trained = tuple(peer.replace("s1", f"s{stage}") for peer in TRAINED)
    splits = (Fault(at_s, "split", trained, back_s - at_s) for at_s in (LOST_S, ARRIVES_S))
    return replaced_while(*splits, stage=stage, **changes)


def lineages(outcome: Outcome, stage: int = 1) -> set[int]:
    """The lineages of the stage at the end."""
    return {one.node.state.advert.fresh_round for one in outcome.of_stage(stage)}


def began_afresh(outcome: Outcome) -> int:
    """The round at which the newcomer began with initial weights."""
    (fresh,) = [event for event in outcome.trace.of("resumed") if event.get("source") == "fresh"]
    assert fresh.peer.endswith("r3")
    assert fresh.at_s < BRIEFLY_S
    return int(fresh.number("round"))


@pytest.mark.parametrize(
    ("rule", "inner_steps", "routing", "stage"),
    [
        ("gossip", 1, "balanced", 1),
        ("diloco", 4, "random", 0),
        *soak([("noloco", 4, "random", 0), ("noloco", 4, "random", 1), ("gossip", 1, "balanced", 0)]),
        *soak([("diloco", 4, "random", 1), ("dct", 1, "balanced", 0), ("dct", 1, "balanced", 1)]),
    ],
)
def test_trained_replicas_that_were_cut_off_keep_their_weights_and_a_fresh_one_copies_them(
    rule: str, inner_steps: int, routing: str, stage: int
) -> None:
    outer = {"rule": rule, "inner_steps": inner_steps, "deadline_s": 3.0, "allow_unstable": True}
    outcome = check(cut_off(BRIEFLY_S, stage, outer=outer, routing=routing))
    assert began_afresh(outcome) > 0
    assert lineages(outcome, stage) == {0}
    newcomer = f"s{stage}r3"
    came = next(event for event in outcome.trace.of("resumed", newcomer) if event.at_s > BRIEFLY_S)
    assert came.get("source") == "peer"
    for process in outcome.of_stage(stage):
        for merge in recording_stages(process)[0].merged:
            if newcomer in (process.peer, merge.partner):
                assert merge.at_s > came.at_s, "initial weights and trained ones are never merged"


@pytest.mark.parametrize("routing", ["random", *soak(["balanced"])])
def test_trained_replicas_that_were_away_for_longer_than_they_had_trained_copy_the_fresh_one(routing: str) -> None:
    """They may have slept for days, and the stage would lose what it has learnt since."""
    outcome = check(cut_off(FOR_LONG_S, routing=routing, steps=150))
    assert lineages(outcome) == {began_afresh(outcome)}
    for peer in TRAINED:
        came = next(event for event in outcome.trace.of("resumed", peer) if event.at_s > FOR_LONG_S)
        assert came.get("source") == "peer"


@pytest.mark.parametrize(
    ("routing", "stage"), [("random", 0), ("balanced", 1), *soak([("random", 1), ("balanced", 0)])]
)
def test_the_only_replica_comes_back_with_its_checkpoint_after_a_newcomer_began_afresh(
    routing: str, stage: int
) -> None:
    first, *others = (f"s{stage}r{number}" for number in range(3))
    gone = (Fault(LOST_S, "crash", (peer,)) for peer in others)
    bounce = Fault(LOST_S, "bounce", (first,), BRIEFLY_S - LOST_S)
    swarm = replaced_while(bounce, *gone, stage=stage, routing=routing)
    outcome = check(swarm)
    assert began_afresh(outcome) > 0
    came = [(one.peer, one.source) for one in swarm.resumptions if one.at_s > BRIEFLY_S]
    assert came[:2] == [(first, "shard"), (f"s{stage}r3", "peer")]
    assert lineages(outcome, stage) == {0}


def test_a_newcomer_waits_for_the_checkpoint_of_a_stage_if_all_other_stages_restart_at_that_moment() -> None:
    """None of them trains yet, but their checkpoints show that the run has done rounds."""
    stops = (Fault(LOST_S, "bounce", (peer,), for_s) for peer, for_s in (("s0r0", 10.0), ("s1r0", 40.0)))
    swarm = FaultySwarm(plan_of((1, 1), steps=60), (*stops, Fault(LOST_S + 15.0, "arrive", ("s1r1",))))
    outcome = check(swarm)
    assert [(one.peer, one.source) for one in swarm.resumptions] == [
        ("s0r0", "shard"),
        ("s1r0", "shard"),
        ("s1r1", "peer"),
    ]
    assert lineages(outcome) == {0}


@pytest.mark.parametrize(("kind", "came_s"), [("depart", 15.0), ("crash", 21.0)])
def test_it_waits_for_it_too_if_the_node_that_showed_it_that_the_run_has_done_rounds_is_gone_again(
    kind: str, came_s: float
) -> None:
    """Those that come then know nothing of these rounds. Of a node that has died it may have seen only the advert."""
    stops = (Fault(LOST_S, "bounce", (peer,), for_s) for peer, for_s in (("s0r0", 10.0), ("s1r0", 40.0)))
    comes = (Fault(LOST_S + at_s, "arrive", (peer,)) for peer, at_s in (("s1r1", came_s), ("s0r1", 22.0)))
    swarm = FaultySwarm(plan_of((1, 1), steps=60), (*stops, *comes, Fault(LOST_S + 20.0, kind, ("s0r0",))))
    swarm.run()
    assert [(one.peer, one.source) for one in swarm.resumptions if one.peer[:2] == "s1"] == [
        ("s1r0", "shard"),
        ("s1r1", "peer"),
    ]


@pytest.mark.parametrize("stage", [1, *soak([0])])
def test_replicas_that_begin_afresh_at_the_same_time_end_up_with_the_same_lineage(stage: int) -> None:
    wiped = (Fault(LOST_S, "wipe", (f"s{stage}r{number}",), 3.0 + number / 5) for number in range(3))
    plan = plan_of((2, 3) if stage else (3, 2), steps=60, outer={"rule": "gossip", "inner_steps": 1})
    swarm = FaultySwarm(plan, tuple(wiped), limit_s=2000.0)
    outcome = check(swarm)
    assert any(one.source == "fresh" for one in swarm.resumptions)
    (lineage,) = lineages(outcome, stage)
    assert lineage > 0


def test_a_claim_of_a_later_lineage_makes_nobody_copy() -> None:
    """In a run whose stages never began afresh there is no earlier lineage to claim."""
    swarm = FaultySwarm(plan_of((2, 3), steps=40))
    swarm.at(6.0, lambda: swarm.process("s1r1").node.state.update(fresh_round=1))
    outcome = check(swarm)
    assert [(one.peer, one.source) for one in swarm.resumptions] == [("s1r1", "peer")], "only the liar itself copies"
    assert lineages(outcome) == {0}


def test_an_earlier_lineage_that_is_only_listed_makes_nobody_copy() -> None:
    """An advert proves nothing: the peer has to answer for it."""
    swarm = FaultySwarm(plan_of((2, 3), steps=40))

    def claim() -> None:
        for peer in TRAINED[1:]:
            swarm.process(peer).node.state.update(fresh_round=1)
        handler = swarm.process("s1r0").node.handler
        told = handler.describe
        handler.describe = lambda caller: replace(told(caller), fresh_round=1)  # type: ignore[method-assign]

    swarm.at(6.0, claim)
    outcome = check(swarm)
    assert not swarm.resumptions
    assert {one.peer: one.node.state.advert.fresh_round for one in outcome.of_stage(1)} == dict.fromkeys(TRAINED, 1) | {
        "s1r0": 0
    }
