"""Whether a node is healthy (core/health.py): for every rule a case in which it fires, and one in which it does not."""

from dataclasses import replace

import pytest

from noloco_p2p.core.health import problem, problem_line
from noloco_p2p.core.messages import Advert, MicrobatchId
from noloco_p2p.core.status import (
    AnyReplica,
    ForMicrobatch,
    NodeFigures,
    Resource,
    SeenPeer,
    Status,
    Wait,
    for_microbatch,
)

ME = Advert("12D3me", "run", 0, ("h:1",), state="training")
OTHER = Advert("12D3other", "run", 1, ("h:2",), state="training")
WELL = Status(
    ME,
    "tiny",
    2,
    100,
    7,
    waits=(
        Wait("request to leave", Resource.OWNER, 900.0, None, idle=True),
        Wait("place in flight", Resource.INNER_STEP, 9.0, None),
        Wait("gradient", AnyReplica(1), 8.0, None, ForMicrobatch("12D3me", 3)),
        Wait("gradient", "12D3other", 4.0, 10.0, ForMicrobatch("12D3me", 3)),
    ),
    seen=(SeenPeer(OTHER),),
    step_took_s=1.0,
    since_step_s=9.0,
)


@pytest.mark.parametrize(("incarnation", "held_out"), [(0, True), (7, False)])
def test_a_microbatch_that_is_evaluated_is_called_held_out(incarnation: int, held_out: bool) -> None:
    assert for_microbatch(MicrobatchId("12D3me", incarnation, 3)) == ForMicrobatch("12D3me", 3, held_out)


def test_a_node_at_work_is_well() -> None:
    assert problem_line(WELL) is None
    assert problem_line(Status(ME, "tiny", 2, 100, 0)) is None


@pytest.mark.parametrize(
    ("wait", "line"),
    [
        (
            Wait("gradient", "12D3other", 11.2, 10.0, ForMicrobatch("12D3me", 3)),
            "overdue: waited 11.2 s (at most 10 s) for gradient from 12D3other (microbatch 3 of 12D3me)",
        ),
        (Wait("gradient", "12D3other", 10.9, 10.0), None),
        # It said 1.23e+04 s and 1e+03 s.
        (
            Wait("gradient", "12D3other", 12_345.0, 1000.0),
            "overdue: waited 12,345 s (at most 1,000 s) for gradient from 12D3other",
        ),
        (Wait("forward", Resource.DEVICE, 67.0, 60.0), "overdue: waited 67 s (at most 60 s) for forward from device"),
        (Wait("forward", Resource.DEVICE, 65.0, 60.0), None),
        (Wait("free replica", AnyReplica(1), 0.9, 0.1), None),
        (Wait("replicas of every stage", Resource.SWARM, 1e6, None), None),
    ],
)
def test_a_wait_that_outlives_its_deadline(wait: Wait, line: str | None) -> None:
    assert problem_line(replace(WELL, waits=(wait,))) == line


@pytest.mark.parametrize(
    ("since_s", "median_s", "late"),
    [
        (10.1, 1.0, True),
        (9.9, 1.0, False),
        (4.9, 0.1, False),
        (5.1, 0.1, True),
        (None, 1.0, False),
        (99.0, None, False),
    ],
)
def test_no_inner_step_for_ten_times_the_median(since_s: float | None, median_s: float | None, late: bool) -> None:
    found = problem(replace(WELL, since_step_s=since_s, step_took_s=median_s))
    assert (found is not None and found.key == "step") == late


def test_the_line_names_the_wait_that_leads_on_and_no_idle_one() -> None:
    line = problem_line(replace(WELL, since_step_s=42.0))
    assert line == (
        "no inner step for 42 s, the median is 1 s: waited 4 s (at most 10 s) for gradient from 12D3other "
        "(microbatch 3 of 12D3me)"
    )
    alone = replace(WELL, since_step_s=42.0, seen=())
    assert "waited 8 s for gradient from stage 1" in (problem_line(alone) or "")
    busy = replace(alone, waits=(*WELL.waits, Wait("forward", Resource.DEVICE, 2.0, None)))
    assert "waited 2 s for forward from device" in (problem_line(busy) or "")
    assert "waited 9 s for place in flight" in (problem_line(replace(alone, waits=WELL.waits[:2])) or "")
    idle = replace(WELL, since_step_s=42.0, waits=WELL.waits[:1])
    assert problem_line(idle) == "no inner step for 42 s, the median is 1 s"
    slow = replace(idle, since_step_s=4200.0, step_took_s=123.4)
    assert problem_line(slow) == "no inner step for 4,200 s, the median is 123 s"


def test_a_silent_loop_comes_first() -> None:
    silent = replace(WELL, since_step_s=42.0, figures=NodeFigures(loop_silent_s=7.2))
    assert problem_line(silent) == "the event loop has been silent for 7 s: something blocks this process"
    assert problem_line(replace(WELL, figures=NodeFigures(loop_silent_s=4.9))) is None
