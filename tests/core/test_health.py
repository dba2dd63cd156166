"""Whether a node is well (core/health.py): every rule with a case that fires and one that does not."""

from dataclasses import replace

import pytest

from noloco_p2p.core.health import ailment, examine
from noloco_p2p.core.messages import Advert
from noloco_p2p.core.status import AnyReplica, Figures, ForMicrobatch, Resource, Seen, Status, Wait

ME = Advert("12D3me", "run", 0, ("h:1",), state="training")
OTHER = Advert("12D3other", "run", 1, ("h:2",), state="training")
WELL = Status(
    ME,
    "tiny",
    2,
    100,
    7,
    waits=(
        Wait("order to leave", Resource.OWNER, 900.0, None, idle=True),
        Wait("place in flight", Resource.INNER_STEP, 9.0, None),
        Wait("gradient", AnyReplica(1), 8.0, None, ForMicrobatch("12D3me", 3)),
        Wait("gradient", "12D3other", 4.0, 10.0, ForMicrobatch("12D3me", 3)),
    ),
    seen=(Seen(OTHER),),
    step_took_s=1.0,
    since_step_s=9.0,
)


def test_a_node_at_work_is_well() -> None:
    assert ailment(WELL) is None
    assert ailment(Status(ME, "tiny", 2, 100, 0)) is None


@pytest.mark.parametrize(
    ("wait", "line"),
    [
        (
            Wait("gradient", "12D3other", 11.2, 10.0, ForMicrobatch("12D3me", 3)),
            "overdue: gradient of 12D3other since 11.2 s of at most 10 s (microbatch 3 of 12D3me)",
        ),
        (Wait("gradient", "12D3other", 10.9, 10.0), None),
        (Wait("forward", Resource.DEVICE, 67.0, 60.0), "overdue: forward of device since 67 s of at most 60 s"),
        (Wait("forward", Resource.DEVICE, 65.0, 60.0), None),
        (Wait("free replica", AnyReplica(1), 0.9, 0.1), None),
        (Wait("replicas of every stage", Resource.SWARM, 1e6, None), None),
    ],
)
def test_a_wait_that_outlives_its_deadline(wait: Wait, line: str | None) -> None:
    assert ailment(replace(WELL, waits=(wait,))) == line


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
    found = examine(replace(WELL, since_step_s=since_s, step_took_s=median_s))
    assert (found is not None and found.key == "step") == late


def test_the_line_names_what_leads_on_and_no_idle_wait() -> None:
    line = ailment(replace(WELL, since_step_s=42.0))
    assert line == (
        "no inner step for 42 s, the median is 1 s: waits for gradient of 12D3other since 4 s of at most 10 s "
        "(microbatch 3 of 12D3me)"
    )
    alone = replace(WELL, since_step_s=42.0, seen=())
    assert "waits for gradient of stage 1 since 8 s" in (ailment(alone) or "")
    idle = replace(WELL, since_step_s=42.0, waits=WELL.waits[:1])
    assert ailment(idle) == "no inner step for 42 s, the median is 1 s"


def test_a_silent_loop_comes_first() -> None:
    silent = replace(WELL, since_step_s=42.0, figures=Figures(loop_silent_s=7.2))
    assert ailment(silent) == "the event loop has been silent for 7 s: something blocks this process"
    assert ailment(replace(WELL, figures=Figures(loop_silent_s=4.9))) is None
