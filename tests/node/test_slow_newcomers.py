"""Newcomers whose lines need long for the weights of their stage."""

from dataclasses import replace

import pytest
from elastic import plan_of
from lawful import check

from noloco_p2p.core.messages import PeerId
from noloco_p2p.sim.faults import Fault, FaultySwarm
from noloco_p2p.sim.links import Geography, Link, MessageSizes
from noloco_p2p.sim.process import SimProcess


def swarm(*faults: Fault, state_s: float, replicas: tuple[int, ...] = (2, 2), steps: int = 18) -> FaultySwarm:
    """A state travels for so long."""
    n, state_bytes = len(replicas), int(1000 * state_s)
    sizes = MessageSizes(0, 0, (8,) * n, (8,) * n, (state_bytes,) * n)
    geography = Geography(Link(0.01, bytes_per_s=1000.0))
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
    late = swarm(Fault(6.0, "arrive", ("s1r3",)), *faults, state_s=200.0, replicas=(2, 3))
    outcome = check(late)
    node = outcome.nodes["s1r3"]
    assert min(outcome.nodes[peer].trace.of("state")[-1].at_s for peer in ("s0r0", "s0r1")) > 12.5
    assert node.node.finished
    assert not node.trace.of("resumed")
    assert not late.disks["s1r3"].held()
    assert said(node) == COMPLETE


def test_a_newcomer_that_has_only_read_that_stage_0_left_at_the_end_ends_too() -> None:
    """It was cut off from stage 0, and when the line was back nobody was there: it waited for ever."""
    cuts = [Fault(8.0, "cut", ("s1r2", peer), 60.0) for peer in ("s0r0", "s0r1")]
    late = swarm(Fault(6.0, "arrive", ("s1r2",)), *cuts, state_s=200.0)
    node = check(late).nodes["s1r2"]
    assert not node.trace.of("resumed")
    assert said(node) == COMPLETE
