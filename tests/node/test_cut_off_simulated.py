"""A node is cut off from all others by the network, for much longer than a microbatch may take."""

import pytest
from elastic import config_for
from lawful import check
from soak import soak
from test_standstill_simulated import FROM_S, WOKEN_S, between, stopped

from noloco_p2p.core.messages import PeerId
from noloco_p2p.sim.faults import Fault
from noloco_p2p.sim.process import Outcome

LONG_S = WOKEN_S - FROM_S


of_either_stage = pytest.mark.parametrize(
    ("peer", "routing"),
    [("s0r1", "balanced"), ("s1r1", "random"), *soak([("s0r1", "random"), ("s1r1", "balanced")])],
)


def cut_off(peer: PeerId, routing: str) -> Outcome:
    return check(stopped(Fault(FROM_S, "split", (peer,), LONG_S), routing=routing, steps=90))


def copied_before_it_went_on(outcome: Outcome, peer: PeerId, donors: tuple[PeerId, ...]) -> None:
    [came] = outcome.trace.of("resumed", peer)
    assert (came.get("source"), came.get("peer") in donors) == ("peer", True)
    assert came.at_s > WOKEN_S
    assert len(between(outcome, "inner_step", peer, WOKEN_S, came.at_s)) <= 1, "it ends what it had begun"
    assert not between(outcome, "outer_round", peer, WOKEN_S, came.at_s)
    assert between(outcome, "inner_step", peer, came.at_s, came.at_s + 10.0)


@of_either_stage
def test_a_node_that_was_cut_off_while_others_trained_copies_one_before_it_goes_on(peer: PeerId, routing: str) -> None:
    outcome = cut_off(peer, routing)
    [came] = outcome.trace.of("resumed")
    assert (came.peer, came.get("source")) == (peer, "peer")
    assert WOKEN_S < came.at_s < WOKEN_S + 10.0
    assert len(between(outcome, "inner_step", peer, WOKEN_S, came.at_s)) <= 1, "it ends what it had begun"
    assert not between(outcome, "outer_round", peer, WOKEN_S, came.at_s)
    assert between(outcome, "inner_step", peer, came.at_s, came.at_s + 10.0)


@pytest.mark.parametrize("routing", ["random", "balanced"])
def test_a_replica_that_hears_from_no_origin_takes_no_empty_steps(routing: str) -> None:
    outcome = cut_off("s1r1", routing)
    steps = between(outcome, "inner_step", "s1r1", FROM_S + 2.0, WOKEN_S)
    assert sum(one.get("tokens") == 0 for one in steps) <= 1, "only the one in which the last origin is given up"
    after = between(outcome, "inner_step", "s1r1", WOKEN_S, WOKEN_S + 30.0)
    assert sum(int(str(step.get("tokens"))) for step in after) > 0


@of_either_stage
def test_it_copies_one_too_if_the_others_adverts_were_still_known_to_it(peer: PeerId, routing: str) -> None:
    """A node that reads nothing but its own advert keeps the others' adverts for three lifetimes."""
    fault = Fault(FROM_S, "split", (peer,), LONG_S)
    config = config_for(directory={"ttl_s": 16.0, "refresh_s": 1.0})
    copied_before_it_went_on(check(stopped(fault, routing=routing, config=config)), peer, (peer[:3] + "0",))


@pytest.mark.parametrize("peer", ["s0r1", "s1r1"])
def test_it_copies_one_too_if_only_its_calls_were_cut_off(peer: PeerId) -> None:
    outcome = check(stopped(Fault(FROM_S, "mute", (peer,), LONG_S), steps=90))
    copied_before_it_went_on(outcome, peer, (peer[:3] + "0",))


@pytest.mark.parametrize(
    ("replicas", "pair", "routing"),
    [
        ((3, 2), ("s0r1", "s0r2"), "random"),
        ((2, 3), ("s1r1", "s1r2"), "balanced"),
        *soak([((3, 2), ("s0r1", "s0r2"), "balanced"), ((2, 3), ("s1r1", "s1r2"), "random")]),
    ],
)
def test_two_that_were_cut_off_together_copy_one_that_trained_on(
    replicas: tuple[int, ...], pair: tuple[PeerId, PeerId], routing: str
) -> None:
    """They saw each other all the time."""
    outcome = check(stopped(Fault(FROM_S, "split", pair, LONG_S), replicas=replicas, routing=routing, steps=90))
    for peer in pair:
        # The second node may copy the first, if that has copied the node that was not cut off.
        copied_before_it_went_on(outcome, peer, tuple({f"{peer[:2]}r{i}" for i in range(3)} - {peer}))


@pytest.mark.parametrize("replicas", [(2, 2), (3, 3)])
def test_an_origin_that_announces_itself_but_can_call_nobody_does_not_stop_the_others(
    replicas: tuple[int, ...],
) -> None:
    """Under `balanced` every replica waits for what each origin sends it."""
    outcome = check(stopped(Fault(FROM_S, "mute", ("s0r1",), LONG_S), replicas=replicas, routing="balanced"))
    before = len(between(outcome, "inner_step", "s0r0", FROM_S - 20.0, FROM_S)) / 20.0
    meanwhile = len(between(outcome, "inner_step", "s0r0", FROM_S + 15.0, WOKEN_S)) / (LONG_S - 15.0)
    assert meanwhile > 0.8 * before
    assert between(outcome, "inner_step", "s0r1", WOKEN_S + 10.0, WOKEN_S + 20.0), "it is waited for again"


@pytest.mark.parametrize("kind", ["split", "mute"])
def test_a_newcomer_that_is_cut_off_before_it_has_weights_waits_for_those_of_the_run(kind: str) -> None:
    """Once, after three lifetimes of an advert, it started from the initial weights and kept training with them."""
    arrival, fault = Fault(FROM_S, "arrive", ("s1r2",)), Fault(FROM_S, kind, ("s1r2",), LONG_S)
    outcome = check(stopped(arrival, fault))
    [came] = outcome.trace.of("resumed", "s1r2")
    # A guardian's weights would be older. Once, it got those because the guardian answered first after the cut.
    assert came.get("source") == "peer"
    assert WOKEN_S < came.at_s < WOKEN_S + 10.0


def test_a_newcomer_does_not_take_a_guardian_s_weights_because_its_stage_was_out_of_reach_for_a_moment() -> None:
    dips = [Fault(FROM_S - 0.5, "mute", (peer,), 4.5) for peer in ("s1r0", "s1r1")]
    outcome = check(stopped(*dips, Fault(FROM_S, "arrive", ("s1r2",)), steps=30))
    [came] = outcome.trace.of("resumed", "s1r2")
    assert came.get("source") == "peer"


def test_a_node_that_was_cut_off_while_the_run_began_does_not_begin_with_its_initial_weights() -> None:
    """Its first readings of the membership may have missed the others as well."""
    faults = Fault(2.0, "split", ("s0r0",), 30.0), Fault(5.0, "arrive", ("s0r2", "s0r3"))
    outcome = check(stopped(*faults, replicas=(2,), start_replicas=3, steps=40))
    [came] = outcome.trace.of("resumed")
    assert (came.peer, came.get("source")) == ("s0r0", "peer")
    assert 32.0 < came.at_s < min(step.at_s for step in outcome.trace.of("inner_step", "s0r0"))


def test_nor_does_a_newcomer_that_finds_the_others_as_they_wake() -> None:
    """They are syncing then. Nobody is listed while they sleep, and nobody guards their weights."""
    faults = Fault(FROM_S, "stop", ("s0r0", "s0r1"), LONG_S), Fault(WOKEN_S - 2.0, "arrive", ("s0r2",))
    outcome = check(stopped(*faults, replicas=(2,), steps=40))
    [came] = outcome.trace.of("resumed")
    assert (came.peer, came.get("source")) == ("s0r2", "peer")


def test_a_newcomer_does_not_begin_afresh_if_the_run_ends_while_it_asks_a_last_time() -> None:
    """Its initial weights would pass for those of the last step. No replica of its stage answers it in time."""
    cuts = (Fault(1.0, "cut", (f"s1r{i}", "s1r3"), 300.0) for i in range(3))
    config = config_for(directory={"ttl_s": 2.0, "refresh_s": 0.5})
    outcome = check(stopped(*cuts, Fault(5.0, "arrive", ("s1r3",)), replicas=(1, 3), steps=28, config=config))
    assert not outcome.trace.of("resumed", "s1r3")
    assert not outcome.trace.of("checkpoint", "s1r3")
