"""Adverts of nodes that do not exist, in swarms of real nodes under virtual time: nothing is lost because of them, no
node waits for them, and the run ends when it should (ARCHITECTURE.md, "What a stranger can do").

A stranger is an advert that is renewed like others, with an address at which nobody answers.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
from elastic import TTL_S, config_for, plan_of
from lawful import check

from noloco_p2p.core.messages import (
    Activation,
    Advert,
    Gradient,
    Header,
    Holding,
    MicrobatchId,
    Origin,
    PeerId,
    ReplicaState,
    TensorSpec,
)
from noloco_p2p.errors import Busy, Violation
from noloco_p2p.node.join import RETURN_LIFETIMES
from noloco_p2p.node.pipeline.serve import MicrobatchServer
from noloco_p2p.ports import ALONE, Body, Claim
from noloco_p2p.sim.faults import FaultySwarm
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.transport import SimTransport
from noloco_p2p.sim.world import SimPlan

RENEWED_S = 1.5
STEPS = 24


def stranger(name: str, stage: int, state: str = "training", **claims: object) -> Advert:
    return replace(Advert(name, "run", stage, (name,), state=state), **claims)  # type: ignore[arg-type]


def swarm_with(plan: SimPlan, *strangers: Advert, from_s: float = 0.0, until_s: float = 60.0) -> FaultySwarm:
    """A swarm whose directory has these adverts from `from_s` until `until_s`."""
    swarm = FaultySwarm(plan)

    def publish(at_s: float) -> None:
        for one in strangers:
            swarm.registry.publish(replace(one, run_id=plan.manifest.run_id), TTL_S, now=at_s)

    for number in range(int((until_s - from_s) / RENEWED_S)):
        at_s = from_s + RENEWED_S * number
        swarm.at(at_s, lambda at_s=at_s: publish(at_s))  # type: ignore[misc]
    return swarm


def fast(names: str, stage: int) -> list[Advert]:
    """Adverts of replicas that claim to train a million microbatches per second."""
    return [
        stranger(name, stage, microbatches_per_s=1e6, capacity_per_s=1e6, outer_round=2, settled=True) for name in names
    ]


def steps(outcome: Outcome) -> set[float]:
    return {one.step for one in outcome.processes if not one.crashed}


def test_guardians_keep_what_they_hold_though_three_claim_to_train() -> None:
    swarm = swarm_with(plan_of((2, 1), steps=2 * STEPS), *fast("xyz", 1), from_s=3.0)
    swarm.at(24.0, lambda: swarm.crash("s1r0"))
    swarm.at(25.0, lambda: swarm.wipe("s1r0"))
    swarm.at(27.0, lambda: swarm.start(1, 1))
    outcome = check(swarm)
    [resumed] = outcome.trace.of("resumed", "s1r1")
    assert resumed.get("source") == "guardian"
    assert resumed.number("round") >= 2, "weights were also pulled after the strangers came"


def test_a_last_replica_that_leaves_hands_over_though_others_claim_to_train() -> None:
    swarm = swarm_with(plan_of((2, 1), steps=STEPS), *fast("xyz", 1), from_s=3.0)
    swarm.at(8.0, lambda: swarm.drain("s1r0"))
    swarm.at(16.0, lambda: swarm.start(1, 1))
    outcome = check(swarm)
    done = max(event.number("round") for event in outcome.trace.of("outer_round", "s1r0"))
    [resumed] = outcome.trace.of("resumed", "s1r1")
    assert (resumed.get("source"), resumed.number("round")) == ("guardian", done + 1)


def test_nobody_moves_away_from_a_stage_because_of_claims() -> None:
    plan = replace(plan_of((7, 0), steps=40, start_replicas=1), chooses_stage=True)
    outcome = check(swarm_with(plan, *fast("xyz", 0), from_s=4.0))
    assert not outcome.trace.of("moved")
    swarm = swarm_with(plan, *fast("xyz", 1), from_s=4.0)
    assert not check(swarm).trace.of("moved")


@pytest.mark.parametrize(("lie", "lifetimes"), [
    ({"state": "waiting", "holds": (Holding(1, 10**6, 10**7),)}, 3),
    ({"state": "training", "outer_round": 10**6, "step": 1e7}, RETURN_LIFETIMES),
    ({"state": "training"}, 3),
])  # fmt: skip
def test_recovery_does_not_wait_forever_for_peers_that_are_only_listed(lie: dict[str, object], lifetimes: int) -> None:
    """The only stage is lost before its first round together with its disks, and has no guardian: it starts over."""
    lies = stranger("x", 0, **lie)  # type: ignore[arg-type]
    swarm = swarm_with(plan_of((1,), steps=STEPS), lies, from_s=3.0, until_s=300.0)
    swarm.at(2.0, lambda: swarm.crash("s0r0"))
    swarm.at(5.5, lambda: swarm.wipe("s0r0"))
    swarm.at(6.0, lambda: swarm.start(0, 1))
    [resumed] = check(swarm).trace.of("resumed", "s0r1")
    assert resumed.get("source") == "fresh"
    assert resumed.number("step") == 0
    assert resumed.at_s < 6.0 + (lifetimes + 1) * TTL_S


def test_a_run_that_was_stopped_goes_on_though_strangers_hold_newer_weights() -> None:
    lies = [stranger(f"x{s}", s, "waiting", holds=(Holding(s, 10**6, 10**7),)) for s in (0, 1)]
    swarm = swarm_with(plan_of((2, 2), steps=STEPS), *lies, from_s=6.0)
    for peer in ("s0r0", "s0r1", "s1r0", "s1r1"):
        swarm.at(8.0, lambda peer=peer: swarm.bounce(peer, 1.0))  # type: ignore[misc]
    outcome = check(swarm)
    assert {event.get("source") for event in outcome.trace.of("resumed")} == {"shard"}
    assert max(event.at_s for event in outcome.trace.of("resumed")) < 9.0 + 3 * TTL_S


@pytest.mark.parametrize("state", ["finished", "left"])
def test_one_advert_does_not_end_the_run(state: str) -> None:
    """Stage 0 is gone for a while. A later stage that believed a stranger would end without it."""
    plan = plan_of((1, 1), steps=60, start_replicas=1)
    swarm = swarm_with(plan, stranger("x", 0, state, step=60.0, outer_round=15, evaluated=True), until_s=13.0)
    swarm.at(4.0, lambda: swarm.bounce("s0r0", TTL_S + 3.0))
    seen: list[bool] = []
    swarm.at(12.5, lambda: seen.append(swarm.process("s1r0").node.swarm.run_ended))
    outcome = check(swarm)
    assert seen == [False]
    assert steps(outcome) == {60.0}


def test_the_run_ends_though_strangers_claim_to_train_on() -> None:
    plan = plan_of((2, 2), steps=STEPS)
    lies = [stranger(f"x{i}", 0, step=3.0, steps_per_s=0.1, settled=True) for i in range(2)]
    outcome = check(swarm_with(plan, *lies, from_s=8.0, until_s=200.0))
    ended = [event.at_s for event in outcome.trace.of("state") if event.get("state") == "finished"]
    assert max(ended) < 60.0, "they are listed until 200 s"


def test_clocks_that_are_only_listed_move_no_clock() -> None:
    plan = plan_of((2, 2), steps=STEPS)
    lies = [stranger(name, 0, step=1e6, steps_per_s=1.0, settled=True) for name in "xyz"]
    outcome = check(swarm_with(plan, *lies, from_s=2.0, until_s=6.0))
    quiet = check(FaultySwarm(plan))
    longest = max(one.inner_steps for one in quiet.processes)
    assert all(one.inner_steps > longest / 3 for one in outcome.processes), "otherwise the clock has jumped to the end"


def test_a_label_counts_as_far_as_its_origin_can_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two origins labels its microbatches with a step far ahead. Later stages once jumped to the run's end."""
    propagate, plan = SimTransport.propagate, plan_of((2, 2), steps=60)

    async def forged(self: SimTransport, peer: Advert, activation: Activation, claim: Claim = ALONE) -> Gradient:
        if self._me == "s0r1":
            header = activation.header
            header = replace(header, origin=replace(header.origin, step=header.origin.step + 10**6))
            activation = replace(activation, header=header)
        return await propagate(self, peer, activation, claim)

    quiet = check(FaultySwarm(plan))
    monkeypatch.setattr(SimTransport, "propagate", forged)
    outcome = check(FaultySwarm(plan))
    for peer in ("s1r0", "s1r1"):
        assert len(outcome.trace.of("outer_round", peer)) > len(quiet.trace.of("outer_round", peer)) / 2


def test_a_donor_that_says_it_has_come_further_than_anybody_can_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetch, asked = SimTransport.fetch_state, list[str]()

    async def bold(
        self: SimTransport, peer: Advert, deadline_s: float, expected: tuple[TensorSpec, ...]
    ) -> ReplicaState:
        state = await fetch(self, peer, deadline_s, expected)
        asked.append(peer.peer_id)
        return replace(state, round=2**53, step=1e9) if len(asked) == 1 else state

    monkeypatch.setattr(SimTransport, "fetch_state", bold)
    swarm = FaultySwarm(plan_of((2, 2), steps=STEPS))
    swarm.at(6.0, lambda: swarm.start(1, 2))
    outcome = check(swarm)
    assert [event.get("peer") for event in outcome.trace.of("resumed", "s1r2")] == asked[1:]


def test_rounds_find_a_partner_among_sixty_mates_that_are_only_listed() -> None:
    """Pairs are drawn from all that are listed; if the partner is silent, a mate that delivered before is asked."""
    lies = [stranger(f"x{i:02}", 0, outer_round=3, settled=True) for i in range(60)]
    outcome = check(swarm_with(plan_of((4,), steps=60), *lies, from_s=9.0, until_s=200.0))
    results = [event.get("result") for event in outcome.trace.of("outer_round") if event.at_s > 15.0]
    assert len(results) >= 16
    assert results.count("alone") < len(results) / 4


@pytest.mark.parametrize("routing", ["balanced", "fixed"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_replica_that_is_always_busy_is_waited_for_as_long_as_an_honest_one_is_busy(
    routing: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is an outer round only if replicas wait for it instead of training on."""
    right = MicrobatchServer.propagate

    async def propagate(server: MicrobatchServer, caller: PeerId, header: Header, body: Body) -> Gradient:
        if server._node.me == "s1r1":
            raise Busy("never")
        return await right(server, caller, header, body)

    monkeypatch.setattr(MicrobatchServer, "propagate", propagate)
    outer = {"rule": "noloco", "overlap": overlap, "deadline_s": 60.0 if overlap else 4.0}
    outcome = check(FaultySwarm(plan_of((2, 2), steps=STEPS, routing=routing, outer=outer)))
    assert steps(outcome) == {STEPS}
    done = sorted(event.at_s for event in outcome.trace.of("microbatch") if event.peer.startswith("s0"))
    stalls = [later - earlier for earlier, later in pairwise(done) if later - earlier > 2.0]
    assert len(stalls) <= (not overlap), "once it is known, no node waits for it"


def test_only_the_stage_before_is_heard() -> None:
    """With nodes that join, leave and move, one that calls from another stage, and one that is unknown."""
    plan = plan_of((2, 2, 2), steps=STEPS)
    swarm, heard = FaultySwarm(plan), dict[str, str]()

    def call() -> None:
        server = swarm.process("s2r0").node
        header = Header(plan.manifest.run_id, MicrobatchId("s0r0", 1, 1), Origin("s0r0", 1, 0), 2, 5.0)
        for caller in ("s0r0", "s1r0", "s2r1", "s2r0", "nobody"):
            try:
                server.handler._check(caller, header)
            except Violation:
                heard[caller] = "Violation"
            except Busy as error:
                heard[caller] = "late" if error.late else "Busy"

    swarm.at(6.0, call)
    swarm.at(7.0, lambda: swarm.crash("s1r0"))
    swarm.at(9.0, lambda: swarm.start(1, 2))
    outcome = check(swarm)
    # Its own tensors are missing, but the caller is checked first.
    assert heard == {"s1r0": "Violation"} | dict.fromkeys(("s0r0", "s2r1", "s2r0", "nobody"), "late")
    assert steps(outcome) == {STEPS}


REFRESH_S = 5.0


def rarely_read(steps: int) -> SimPlan:
    """A swarm that reads the membership as rarely as by default."""
    return replace(plan_of((2, 2), steps=steps), config=config_for(directory={"ttl_s": 30.0, "refresh_s": REFRESH_S}))


@pytest.mark.parametrize("at_s", [6.0, 7.3])
def test_a_newcomer_of_stage_0_is_served_after_the_reading_that_its_first_call_brings(at_s: float) -> None:
    """Without that reading it would take up to `refresh_s`."""
    swarm = FaultySwarm(rarely_read(25))
    swarm.at(at_s, lambda: swarm.start(0, 2))
    outcome = check(swarm)
    began = next(one.at_s for one in outcome.trace.of("state", "s0r2") if one.get("state") == "training")
    served = next(one.at_s for one in outcome.trace.of("microbatch", "s0r2") if one.get("result") == "done")
    assert "out" in {one.get("direction") for one in outcome.trace.of("busy", "s0r2") if one.at_s < served}
    assert served < began + 1.0


@pytest.mark.parametrize("every_s", [0.05, REFRESH_S + 0.6])
def test_callers_that_nobody_lists_at_most_double_the_readings(every_s: float) -> None:
    """However many callers there are. The second kind calls just after each reading that was due anyway."""
    swarm, until_s = FaultySwarm(rarely_read(45)), 28.0

    def call(number: int) -> None:
        node = swarm.process("s1r0").node
        header = Header(node.state.run_id, MicrobatchId("x", 1, 1), Origin("x", 1, 0), 1, 5.0)
        with pytest.raises(Busy):
            node.handler._check(f"x{number}", header)

    for number in range(int((until_s - 8.0) / every_s)):
        swarm.at(8.0 + every_s * number, lambda number=number: call(number))  # type: ignore[misc]
    read = [one.at_s for one in check(swarm).trace.of("membership", "s1r0")]
    assert sum(8.0 <= at_s < until_s for at_s in read) <= 2 * (until_s - 8.0) / REFRESH_S + 1
