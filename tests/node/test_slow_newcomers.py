"""Newcomers whose lines need long for the weights of their stage."""

from dataclasses import replace

import pytest
from elastic import plan_of
from lawful import check
from slow_line import SlowLine

from noloco_p2p.core.messages import PeerId
from noloco_p2p.sim.faults import Fault, FaultySwarm
from noloco_p2p.sim.links import Geography, Link, MessageSizes
from noloco_p2p.sim.process import SimProcess

RATE = 1000.0
"""Bytes/s of every line, if not said otherwise."""


def swarm(
    *faults: Fault,
    replicas: tuple[int, ...],
    steps: int = 18,
    state_s: float = 1.0,
    weights_s: float = 0.0,
    geography: Geography | None = None,
) -> FaultySwarm:
    """A state, and the weights that guardians keep, travel for so long at RATE."""
    n, weights, state = len(replicas), int(RATE * weights_s), int(RATE * state_s)
    sizes = MessageSizes(0, 0, (8,) * n, (weights,) * n, (state,) * n)
    geography = geography or Geography(Link(0.01, bytes_per_s=RATE))
    return FaultySwarm(replace(plan_of(replicas, steps=steps), sizes=sizes, geography=geography), faults)


def said(process: SimProcess) -> str:
    """Its last words."""
    return str(process.trace.of("info")[-1].get("message"))


COMPLETE = "nobody has weights of stage 1 any more, and the run has ended: the run is complete"


@pytest.mark.parametrize("crash", [(), ("s1r0", "s1r1", "s1r2")])
def test_a_newcomer_that_has_no_weights_when_the_run_ends_ends_too(crash: tuple[PeerId, ...]) -> None:
    """Its donors leave, or crash while stage 0 still waits for the evaluation: then it wrote its initial weights as
    those of the last step."""
    faults = [Fault(12.5, "crash", (peer,)) for peer in crash]
    late = swarm(Fault(6.0, "arrive", ("s1r3",)), *faults, replicas=(2, 3), state_s=200.0)
    outcome = check(late)
    node = outcome.nodes["s1r3"]
    assert min(outcome.nodes[peer].trace.of("state")[-1].at_s for peer in ("s0r0", "s0r1")) > 12.5
    assert node.node.finished
    assert not node.trace.of("resumed")
    assert not late.disks["s1r3"].held()
    assert said(node) == COMPLETE


def test_a_newcomer_that_is_told_to_leave_while_it_copies_weights_leaves_at_once() -> None:
    """It waited for the transfer, which it no longer needed, until `limits.drain_s` had passed."""
    faults = Fault(5.0, "arrive", ("s1r2",)), Fault(8.0, "depart", ("s1r2",))
    outcome = check(swarm(*faults, replicas=(2, 2), state_s=200.0))
    draining, left = outcome.trace.of("state", "s1r2")[-2:]
    assert (draining.at_s, left.get("state")) == (8.0, "left")
    assert left.at_s < 8.5


@pytest.mark.parametrize("stage", [0, 1])
def test_a_newcomer_goes_on_at_the_clock_that_the_others_have_when_its_state_arrives(stage: int) -> None:
    """Others pull from it after its first complete outer interval from there on."""
    newcomer = f"s{stage}r2"
    outcome = check(swarm(Fault(5.0, "arrive", (newcomer,)), replicas=(2, 2), steps=40, state_s=10.0))
    (came,) = outcome.trace.of("resumed", newcomer)
    taken = outcome.trace.of("inner_step", "s0r0")
    before = max(h.number("step") for h in taken if h.at_s < 5.0)
    then = max(h.number("step") for h in taken if h.at_s < came.at_s)
    assert then - before > 5
    assert came.number("step") > (before + then) / 2
    node = outcome.nodes[newcomer].node.state
    first = int(came.number("step")) // node.manifest.outer.inner_steps + 2
    assert node.advert.partner_from_round == first > came.number("round") + 2


def test_a_guardian_s_weights_that_come_after_the_end_do_not_pass_for_those_of_the_last_step() -> None:
    """They are of round 1 of 5. The node serves the evaluation with them."""
    crashes = [Fault(12.5, "crash", (peer,)) for peer in ("s1r0", "s1r1")]
    late = swarm(Fault(6.0, "arrive", ("s1r2",)), *crashes, replicas=(2, 2), state_s=200.0)
    outcome = check(late)
    assert [(one.peer, one.source, one.round) for one in late.resumptions] == [("s1r2", "guardian", 1)]
    assert len(outcome.trace.of("evaluation")) == 2
    assert not late.disks["s1r2"].held()


def test_a_guardian_s_weights_that_come_after_the_donor_has_left_at_the_end_are_not_trained_on() -> None:
    """They are of round 1 of 5. The newcomer took the last two steps with them, alone, and wrote the result as the
    weights of the last round."""
    late = swarm(Fault(6.0, "arrive", ("s0r1",)), replicas=(1, 2), state_s=200.0)
    outcome = check(late)
    assert [(one.peer, one.source, one.round) for one in late.resumptions] == [("s0r1", "guardian", 1)]
    assert outcome.nodes["s0r1"].node.finished
    assert not late.disks["s0r1"].held()


@pytest.mark.parametrize("crash", [(), ("s1r0", "s1r1")])
def test_two_newcomers_whose_donor_has_left_at_the_end_do_not_train_on_together(crash: tuple[PeerId, ...]) -> None:
    """Each took the other for one that was still at work. With no guardian left they began afresh."""
    newcomers = "s0r1", "s0r2"
    faults = [Fault(6.0, "arrive", (peer,)) for peer in newcomers] + [Fault(33.0, "crash", (peer,)) for peer in crash]
    late = swarm(*faults, replicas=(1, 2), state_s=200.0)
    outcome = check(late)
    assert [one.source for one in late.resumptions] == ([] if crash else ["guardian", "guardian"])
    for peer in newcomers:
        assert outcome.nodes[peer].node.finished
        assert not late.disks[peer].held()


def test_a_newcomer_that_has_only_read_that_stage_0_left_at_the_end_ends_too() -> None:
    """It was cut off from stage 0, and when the line was back nobody was there: it waited for ever."""
    cuts = [Fault(8.0, "cut", ("s1r2", peer), 60.0) for peer in ("s0r0", "s0r1")]
    late = swarm(Fault(6.0, "arrive", ("s1r2",)), *cuts, replicas=(2, 2), state_s=200.0)
    node = check(late).nodes["s1r2"]
    assert not node.trace.of("resumed")
    assert said(node) == COMPLETE


def test_a_lost_stage_goes_on_from_its_guardian_though_its_weights_travel_longer_than_a_round_may() -> None:
    """In `int4` a round sends a quarter of what a guardian keeps, and the line back may be slower. The guardian got
    nothing, or could not give it away in time."""
    back = SlowLine(Link(0.01, bytes_per_s=RATE), pair=("s0r0", "s1r0"), pair_bytes_per_s=RATE / 4)
    wiped = Fault(25.0, "wipe", ("s1r0",), 1.0)
    lost = swarm(wiped, replicas=(1, 1), steps=60, weights_s=10.0, geography=back)
    assert lost.plan.manifest.outer.deadline_s == 3.0
    outcome = check(lost)
    assert [(one.peer, one.source) for one in lost.resumptions] == [("s1r0", "guardian")]
    assert outcome.trace.of("resumed")[0].at_s > wiped.ends_s + 40.0


@pytest.mark.parametrize(("kind", "for_s"), [("mute", 28.0), ("hang", 100.0)])
def test_a_newcomer_whose_donor_falls_silent_in_the_middle_of_its_copy_waits_for_it(kind: str, for_s: float) -> None:
    """The copy had taken longer than a newcomer waits for peers that it only knows from adverts, and guardians
    cannot get the weights over such lines. So it began with the initial ones at once. When the donor was back, it
    was behind, and copied these: nothing of what the stage had learnt was left."""
    down = Fault(40.0, kind, ("s1r0",), for_s)
    cut = swarm(Fault(8.0, "arrive", ("s1r1",)), down, replicas=(1, 1), steps=200, state_s=60.0, weights_s=60.0)
    outcome = check(cut)
    (broken, *_) = outcome.trace.of("warning", "s1r1")
    assert broken.at_s - 8.0 > 3 * cut.plan.config.directory.ttl_s
    assert broken.at_s < down.ends_s
    assert [(one.peer, one.source) for one in cut.resumptions if one.peer == "s1r1"] == [("s1r1", "peer")]


def test_a_newcomer_waits_for_a_stage_that_is_cut_off_as_a_whole() -> None:
    """It began afresh after one advert lifetime. When the line was back, the trained replicas copied its weights."""
    cuts = [Fault(10.0, "cut", (f"s1r{i}", peer), 60.0) for i in range(3) for peer in ("s0r0", "s0r1", "s1r3")]
    away = swarm(*cuts, Fault(14.0, "arrive", ("s1r3",)), replicas=(2, 3), steps=200)
    check(away)
    assert cuts[0].for_s == 10 * away.plan.config.directory.ttl_s
    assert "fresh" not in {one.source for one in away.resumptions}
    assert any(one.peer == "s1r3" and one.at_s > cuts[0].ends_s for one in away.resumptions)
