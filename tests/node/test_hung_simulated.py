"""Hung nodes and deserted stages in the simulator: which node is blamed, how long the swarm stalls, what is lost."""

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from barriers import barrier
from liars import LiarSwarm
from simulated_parts import linear_stage
from soak import soak

from noloco_p2p.config import (
    DirectorySettings,
    EvaluationSettings,
    LimitSettings,
    NodeConfig,
    OuterSettings,
    RunManifest,
)
from noloco_p2p.core.messages import Activation, Advert, LossSum
from noloco_p2p.errors import Busy, PeerError, Violation
from noloco_p2p.node import join, pauses, rebalance
from noloco_p2p.ports import Claim
from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.links import Link
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.transport import SimTransport
from noloco_p2p.sim.world import SimPlan, SimSwarm

HUNG_FROM_S, HUNG_UNTIL_S = 3.0, 7.0
GONE_FROM_S = 5.0
"""After the first outer round, so that the guardian has the weights."""
BLAMED_ABOVE_ALL = 0.01
"""Largest share of healthy nodes among all that are set aside."""


def plan_of(replicas: tuple[int, ...], routing: str, seed: int, *, ttl_s: float = 30.0, steps: int = 40) -> SimPlan:
    manifest = RunManifest(
        stages=len(replicas),
        start_replicas=1,
        steps=steps,
        sequence_length=4,
        microbatch_size=1,
        microbatches_per_step=3,
        outer=OuterSettings(rule="noloco", inner_steps=10, deadline_s=5.0),
        routing=routing,  # type: ignore[arg-type]
        seed=seed,
        evaluation=EvaluationSettings(every_steps=20, microbatches=4),
    )
    limits = LimitSettings(patience_floor_s=0.2, linger_s=10.0, drain_s=5.0)
    return SimPlan(
        manifest,
        replicas,
        seed=seed,
        # A node that moved to a deserted stage would end the situation under test.
        config=NodeConfig(limits=limits, directory=DirectorySettings(ttl_s=ttl_s), rebalance=False),
        link=Link(latency_s=0.005, spread=0.5),
        costs=Costs(spread=0.4),
    )


def check_ended(outcome: Outcome, microbatches_per_step: int = 3) -> None:
    """All nodes ended at their last step, and every microbatch that was begun is done; none was dropped."""
    for node in outcome.nodes.values():
        assert (node.state, node.error) == ("left", None), node.peer
    for node in outcome.of_stage(0):
        assert node.microbatches["done"] == microbatches_per_step * node.inner_steps, node.microbatches
        assert node.microbatches["dropped"] == 0, node.peer


def longest_stall_s(outcome: Outcome) -> float:
    done = [h.at_s for h in outcome.trace.of("microbatch") if h.peer.startswith("s0") and h.get("result") == "done"]
    return max(later - earlier for earlier, later in pairwise(done))


def with_hung(hung: str, routing: str, seed: int) -> Outcome:
    # A node that is tried just before it answers again is set aside for another 4 s: the run must last longer.
    swarm = SimSwarm(plan_of((3, 3, 3), routing, seed, steps=60))
    swarm.at(HUNG_FROM_S, lambda: swarm.network.block(barrier("hang", hung)))
    swarm.at(HUNG_UNTIL_S, lambda: swarm.network.unblock(barrier("hang", hung)))
    outcome = swarm.run(limit_s=300)
    check_ended(outcome)
    return outcome


@pytest.mark.parametrize(
    ("hung", "seed", "routing"),
    [
        ("s2r1", 0, "random"),
        ("s1r1", 1, "balanced"),
        *soak([("s1r1", 1, "random"), ("s1r1", 1, "weighted"), ("s2r1", 0, "weighted"), ("s2r1", 0, "balanced")]),
    ],
)
def test_only_the_hung_replica_is_set_aside(hung: str, seed: int, routing: str) -> None:
    outcome = with_hung(hung, routing, seed)
    blamed = Counter(
        str(h.get("peer"))
        for h in outcome.trace.of("reroute")
        # Which nodes the hung one blames does not matter here.
        if h.peer != hung and h.get("reason") in ("unreachable", "violation")
    )
    assert blamed[hung], "no node noticed"
    served = [h.at_s for h in outcome.trace.of("microbatch", hung) if h.get("result") == "done"]
    assert max(served) > HUNG_UNTIL_S, "it answers again but is not used"
    # A call to it fails, and a microbatch assigned to it waits until it answers again: 5.1 s in 16 seeds.
    # Random routes avoid it at once.
    at_once = (hung, routing) == ("s1r1", "random")
    assert longest_stall_s(outcome) < (2.0 if at_once else HUNG_UNTIL_S - HUNG_FROM_S + 1.5)
    healthy = {peer: times for peer, times in blamed.items() if peer != hung}
    assert sum(healthy.values()) <= BLAMED_ABOVE_ALL * blamed.total(), healthy


def test_an_evaluation_goes_round_a_hung_replica() -> None:
    swarm = SimSwarm(plan_of((3, 3, 3), "random", 1))
    swarm.at(HUNG_FROM_S, lambda: swarm.network.block(barrier("hang", "s2r1")))
    swarm.at(40.0, lambda: swarm.network.unblock(barrier("hang", "s2r1")))
    outcome = swarm.run(limit_s=300)
    for origin in ("s0r0", "s0r1", "s0r2"):
        evaluations = outcome.trace.of("evaluation", origin)
        assert len(evaluations) == 2, origin
        assert swarm.process(origin).node.state.evaluated_s < 4.0, origin


@pytest.mark.parametrize("replicas", [(3, 3), (3, 3, 3)])
@pytest.mark.parametrize(
    "error",
    [Violation("a loss of nan nats over 4 of 4 tokens makes no sense"), Busy("always")],
    ids=["nonsense", "busy"],
)
def test_an_evaluation_goes_round_a_replica_whose_losses_make_no_sense_or_that_is_always_busy(
    error: PeerError, replicas: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica trains as it should. Without another one in the place of a busy one, each evaluation would hold up
    training until the deadline of a microbatch, which is 10 minutes."""
    evaluate, liar, plan = SimTransport.evaluate, f"s{len(replicas) - 1}r1", plan_of(replicas, "random", 1)
    within_s = plan.config.limits.linger_s if isinstance(error, Busy) else 4.0

    async def replaced(self: SimTransport, peer: Advert, activation: Activation, claim: Claim) -> LossSum:
        loss = await evaluate(self, peer, activation, claim)
        if peer.peer_id == liar:
            raise error
        return loss

    monkeypatch.setattr(SimTransport, "evaluate", replaced)
    swarm = SimSwarm(plan)
    outcome = swarm.run(limit_s=300)
    for origin in ("s0r0", "s0r1", "s0r2"):
        assert outcome.trace.of("evaluation", origin), origin
        assert not [e for e in outcome.trace.of("warning", origin) if "was not evaluated" in str(e.get("message"))]
        assert swarm.process(origin).node.state.evaluated_s < within_s, origin


def test_a_node_that_is_told_to_leave_ends_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The microbatches of a step are given half of `drain_s`; an evaluation is not."""
    asked: list[float] = []

    async def refused(self: SimTransport, peer: Advert, activation: Activation, claim: Claim) -> LossSum:
        if not asked:
            swarm.drain("s0r0")
        asked.append(asyncio.get_running_loop().time())
        raise Busy("always")

    monkeypatch.setattr(SimTransport, "evaluate", refused)
    swarm = SimSwarm(plan_of((1, 2), "random", 1))
    for peer in ("s1r0", "s1r1"):
        swarm.at(20.0, partial(swarm.drain, peer))
    swarm.run(limit_s=100, tolerate=True)
    assert asked[-1] < asked[0] + 0.2


@pytest.mark.parametrize(
    ("fault", "routing", "replicas"),
    [
        ("crash", "balanced", (2, 1)),
        ("hang", "random", (2, 2, 1)),
        *soak([("crash", "random", (2, 2, 1)), ("hang", "random", (2, 1)), ("hang", "balanced", (2, 2, 1))]),
        *soak((fault, "weighted", shape) for fault in ("crash", "hang") for shape in ((2, 2, 1), (2, 1))),
    ],
)
def test_nothing_is_lost_while_a_stage_is_deserted(fault: str, routing: str, replicas: tuple[int, ...]) -> None:
    away_s, soon_s, last = 20.0, 3.0, len(replicas) - 1
    victim = f"s{last}r0"
    back_s = GONE_FROM_S + away_s
    swarm = SimSwarm(plan_of(replicas, routing, 1, ttl_s=6.0))
    graphs: list[int] = []
    if fault == "crash":
        swarm.at(GONE_FROM_S, lambda: swarm.bounce(victim, away_s))
    else:
        swarm.at(GONE_FROM_S, lambda: swarm.network.block(barrier("hang", victim)))
        swarm.at(back_s, lambda: swarm.network.unblock(barrier("hang", victim)))
    middles = [f"s1r{i}" for i in range(replicas[1])] if last == 2 else []
    if fault == "crash":
        swarm.at(back_s - 1, lambda: graphs.extend(len(linear_stage(swarm.process(m)).open_graphs) for m in middles))
    outcome = swarm.run(limit_s=300)
    check_ended(outcome)
    assert graphs == [0] * len(graphs), "middle stages free the graphs of microbatches that wait at stage 0"
    assert longest_stall_s(outcome) < away_s + soon_s, "it must continue soon"

    deserted = [h.get("stages") for h in outcome.trace.of("deserted") if h.peer.startswith(f"s{last - 1}")]
    stages = [mapping for mapping in deserted if isinstance(mapping, dict)]
    assert {stage for mapping in stages for stage in mapping} == {last}, "which stage"
    assert away_s - 8.0 < max(mapping.get(last, 0.0) for mapping in stages) < away_s + soon_s, "since when"
    assert stages[-1] == {}, "and that it is over"
    during = Counter(h.peer for h in outcome.trace.of("reroute") if GONE_FROM_S + 8 < h.at_s < back_s)
    assert max(during.values(), default=0) < 2 * 6 * away_s, "no node spins"


def test_nodes_whose_devices_hang_stop_and_another_one_takes_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """They held their stage alone, and still answered: the swarm stood still for ever."""
    monkeypatch.setattr(pauses, "HUNG_S", 20.0)
    plan = plan_of((4, 1), "random", 1)
    config = plan.config.model_copy(update={"rebalance": True})
    swarm, hung = SimSwarm(replace(plan, config=config, chooses_stage=True)), set[str]()

    def hang() -> None:
        hung.update(process.peer for process in swarm.processes if process.node.state.index == 1)
        for peer in hung:
            swarm.slow(peer, 1e6)

    swarm.at(GONE_FROM_S, hang)
    outcome = swarm.run(limit_s=300, tolerate=True)
    moved = outcome.trace.of("moved")
    assert [event.get("stage") for event in moved if event.at_s > GONE_FROM_S] == [1]
    for process in outcome.processes:
        if process.peer in hung:
            assert "the device has not completed its work for" in str(process.error)
        else:
            assert (process.error, process.step) == (None, plan.manifest.steps), process.peer


@pytest.mark.parametrize("refuses", ["silence", *soak(["busy"])])
def test_a_stage_whose_nodes_serve_nobody_gets_another_one(refuses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They say that they train. The swarm stood still for ever, although it had nodes to spare."""
    for each in (rebalance, join):
        monkeypatch.setattr(each, "TRANSFER_DEADLINE_S", 150.0)
    plan = plan_of((4, 1), "random", 1, ttl_s=6.0)
    config = plan.config.model_copy(update={"rebalance": True})
    swarm = LiarSwarm(replace(plan, config=config, chooses_stage=True))

    def begin() -> None:
        swarm.liars = {process.peer for process in swarm.processes if process.node.state.index == 1}
        swarm.refuses = refuses

    swarm.at(GONE_FROM_S, begin)
    outcome = swarm.run(limit_s=900, tolerate=True)
    assert {event.get("stage") for event in outcome.trace.of("moved") if event.at_s > GONE_FROM_S} == {1}
    for process in outcome.processes:
        assert (process.error, process.step) == (None, plan.manifest.steps), process.peer


@pytest.mark.parametrize(
    ("replicas", "routing"),
    [((3, 3), "random"), ((3, 3, 3), "balanced"), *soak([((3, 3), "balanced"), ((3, 3, 3), "random")])],
)
def test_what_one_replica_calls_a_violation_goes_to_another(replicas: tuple[int, ...], routing: str) -> None:
    """It said so of every microbatch, and its word alone cost the swarm all that it was offered."""
    swarm = LiarSwarm(plan_of(replicas, routing, 1))
    swarm.liars, swarm.refuses = {f"s{len(replicas) - 1}r1"}, "violation"
    outcome = swarm.run(limit_s=300)
    assert swarm.lies_told
    for origin in ("s0r0", "s0r1", "s0r2"):
        assert not [e for e in outcome.trace.of("microbatch", origin) if e.get("result") == "dropped"], origin
        assert not [e for e in outcome.trace.of("warning", origin) if "was not evaluated" in str(e.get("message"))]
        assert outcome.trace.of("evaluation", origin)[-1].number("step") == 40, origin


@pytest.mark.parametrize(("alone_s", "reported"), [(1.0, False), (6.0, True)])
def test_a_stage_that_is_deserted_is_reported_unless_this_node_soon_leaves_as_well(
    alone_s: float, reported: bool
) -> None:
    swarm = SimSwarm(plan_of((1, 1), "random", 1))

    def leave_later() -> None:
        noticed = bool(swarm.process("s1r0").node.swarm.deserted)
        leave = partial(swarm.drain, "s1r0") if noticed else leave_later
        asyncio.get_running_loop().call_later(alone_s if noticed else 0.1, leave)

    swarm.at(5.0, lambda: swarm.drain("s0r0"))
    swarm.at(5.0, leave_later)
    outcome = swarm.run(limit_s=300, tolerate=True)
    assert bool(outcome.trace.of("deserted")) == reported
