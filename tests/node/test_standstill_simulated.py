"""Nodes that stand still because their machine sleeps or their process is stopped."""

import asyncio
import math

import pytest
from elastic import config_for, manifest_for
from lawful import check
from soak import soak

from noloco_p2p.config import NodeConfig
from noloco_p2p.core import exchanges
from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.node.pauses import Pauses
from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.faults import Fault, FaultySwarm
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.telemetry import TraceEvent
from noloco_p2p.sim.world import SimPlan

COSTS = Costs(forward_s=0.2, backward_s=0.4, inner_step_s=0.1, spread=0.2)
"""An inner step takes 1.3 to 1.6 s, and an outer interval 5 to 6 s."""
FROM_S, LONG_S = 25.0, 50.0
WOKEN_S = FROM_S + LONG_S


def stopped(
    *faults: Fault,
    replicas: tuple[int, ...] = (2, 2),
    seed: int = 1,
    config: NodeConfig | None = None,
    **changes: object,
) -> FaultySwarm:
    manifest = manifest_for(replicas, **{"steps": 75, "seed": seed} | changes)
    plan = SimPlan(manifest, replicas, seed=seed, config=config or config_for(), costs=COSTS)
    return FaultySwarm(plan, faults, limit_s=3000.0)


def stop(*peers: PeerId, for_s: float = LONG_S) -> Fault:
    return Fault(FROM_S, "stop", peers, for_s)


def between(outcome: Outcome, kind: str, peer: PeerId, begin: float, end: float) -> list[TraceEvent]:
    return [event for event in outcome.trace.of(kind, peer) if begin < event.at_s < end]


def noticed(outcome: Outcome) -> list[PeerId]:
    return [h.peer for h in outcome.trace.of("info") if "stood still" in str(h.get("message"))]


def copied_before_it_went_on(outcome: Outcome, peer: PeerId) -> None:
    assert noticed(outcome) == [peer]
    assert not between(outcome, "inner_step", peer, FROM_S + 0.1, WOKEN_S)
    [came] = outcome.trace.of("resumed")
    assert (came.peer, came.get("source")) == (peer, "peer")
    assert WOKEN_S < came.at_s < WOKEN_S + 5.0
    # It finishes the step under way, and starts no other.
    assert len(between(outcome, "inner_step", peer, WOKEN_S, came.at_s)) <= 1
    assert not between(outcome, "outer_round", peer, WOKEN_S, came.at_s)
    assert not outcome.trace.of("warning", peer)
    assert between(outcome, "inner_step", peer, came.at_s, came.at_s + 10.0)


@pytest.mark.parametrize(
    ("peer", "routing"),
    [
        ("s0r1", "balanced"),
        ("s1r1", "random"),
        ("s2r0", "balanced"),
        *soak([("s0r1", "random"), ("s1r1", "balanced"), ("s2r0", "random")]),
    ],
)
def test_a_node_that_stood_still_while_others_trained_copies_one_before_it_goes_on(peer: PeerId, routing: str) -> None:
    swarm = stopped(stop(peer), replicas=(2, 2, 2), routing=routing)
    copied_before_it_went_on(check(swarm), peer)


@pytest.mark.parametrize("peer", ["s0r1", *soak(["s1r1"])])
def test_what_it_heard_before_its_machine_slept_does_not_make_the_others_seem_too_far_ahead(
    peer: PeerId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's clock does not advance while the machine sleeps, so old answers seem new."""
    monkeypatch.setattr(exchanges, "LIFETIMES", 1e9)
    copied_before_it_went_on(check(stopped(stop(peer))), peer)


@pytest.mark.parametrize("peer", ["s1r1", *soak(["s0r1"])])
def test_the_time_in_which_it_stood_still_is_not_taken_for_that_of_an_inner_step(peer: PeerId) -> None:
    swarm = stopped(stop(peer))
    adverts: list[Advert] = []
    for at_s in (FROM_S - 1.0, WOKEN_S + 6.0):
        swarm.at(at_s, lambda: adverts.append(swarm.process(peer).node.state.advert))
    check(swarm)
    speeds = [(advert.steps_per_s, advert.microbatches_per_s) for advert in adverts]
    for before, after in zip(*speeds, strict=True):
        assert before / 1.5 < after < 1.5 * before


@pytest.mark.parametrize("peer", ["s0r1", *soak(["s1r1"])])
def test_a_short_stall_changes_nothing(peer: PeerId) -> None:
    outcome = check(stopped(stop(peer, for_s=4.0)))
    assert not noticed(outcome)
    assert not outcome.trace.of("resumed")


@pytest.mark.parametrize("replicas", [(2, 1, 2), (1, 1), *soak([((2, 2),)])])
def test_a_swarm_that_slept_as_a_whole_goes_on_and_nobody_copies_anything(replicas: tuple[int, ...]) -> None:
    everybody = [f"s{stage}r{i}" for stage, count in enumerate(replicas) for i in range(count)]
    outcome = check(stopped(stop(*everybody), replicas=replicas, steps=40))
    assert sorted(noticed(outcome)) == everybody
    assert not outcome.trace.of("resumed")
    for peer in everybody:
        assert between(outcome, "inner_step", peer, WOKEN_S, WOKEN_S + 10.0)


@pytest.mark.parametrize("replicas", [(2, 1, 2), (1, 2), *soak([((2, 1),)])])
def test_the_last_replica_of_a_stage_goes_on_with_what_it_has(replicas: tuple[int, ...]) -> None:
    peer = f"s{replicas.index(1)}r0"
    outcome = check(stopped(stop(peer), replicas=replicas, steps=40))
    assert peer in noticed(outcome)
    assert not outcome.trace.of("resumed")
    assert between(outcome, "inner_step", peer, WOKEN_S, WOKEN_S + 10.0)


@pytest.mark.parametrize("slept", [("s1r0", "s1r1"), *soak([(("s0r1", "s1r0"),)])])
def test_nodes_that_slept_together_copy_one_that_has_trained_on(slept: tuple[PeerId, ...]) -> None:
    outcome = check(stopped(stop(*slept), replicas=(2, 3)))
    came = {h.peer: str(h.get("peer")) for h in outcome.trace.of("resumed")}
    assert sorted(came) == sorted(slept)
    assert not set(came.values()) & set(slept)


def test_a_node_whose_machine_slept_while_its_owner_had_it_goes_on_when_it_is_given_back() -> None:
    swarm = stopped(Fault(FROM_S - 10.0, "pause", ("s1r1",), LONG_S + 20.0), stop("s1r1"))
    outcome = check(swarm)
    [came] = outcome.trace.of("resumed")
    assert came.peer == "s1r1"
    assert WOKEN_S + 10.0 < came.at_s < WOKEN_S + 15.0


@pytest.mark.parametrize("for_s", [50.0, 52.0])
def test_a_node_that_stood_still_until_the_others_have_left_writes_no_checkpoint_of_the_last_step(for_s: float) -> None:
    """Its weights are those of an earlier step: they would pass for those of the end of the run."""
    outcome = check(stopped(stop("s1r1", for_s=for_s), steps=30))
    woken = FROM_S + for_s
    assert noticed(outcome) == ["s1r1"]
    assert not between(outcome, "resumed", "s1r1", woken, math.inf), "nobody is left whom it could copy"
    for kind in ("outer_round", "checkpoint"):
        assert {event.get("round") for event in between(outcome, kind, "s1r1", woken, math.inf)} == {3}


@pytest.mark.parametrize(
    ("at_s", "until_s", "looks"),
    [
        pytest.param(28.2, 74.5, True, id="it does not know yet that the run has ended"),
        pytest.param(28.5, 76.5, False, id="it learns that the run has ended before it looks at the clock"),
        pytest.param(27.5, 76.5, False, id="it looks at the clock after its last step"),
    ],
)
def test_nor_does_one_that_notices_it_only_after_the_end(
    at_s: float, until_s: float, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's clock does not advance while the machine sleeps, so the next look at the clock may take 5 s."""
    if not looks:
        monkeypatch.setattr(Pauses, "keep_watch", lambda _: asyncio.Event().wait())
    outcome = check(stopped(Fault(at_s, "stop", ("s1r1",), until_s - at_s), steps=30))
    assert noticed(outcome) == ["s1r1"]
    for kind in ("outer_round", "checkpoint"):
        assert {event.get("round") for event in between(outcome, kind, "s1r1", until_s, math.inf)} <= {3}
