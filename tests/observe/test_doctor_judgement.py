"""How `noloco doctor` judges: whose clock is wrong, and what speed is to be expected of the links and the device."""

import pytest

from noloco_p2p.config import RunManifest
from noloco_p2p.observe.diagnosis.findings import Finding
from noloco_p2p.observe.doctor import peers
from noloco_p2p.observe.doctor.run_requirements import StageLinks, expected_rate, round_seconds

# --- clocks -------------------------------------------------------------------------------------------------------

TTL_S = 30.0


def judged(**ahead: float) -> list[Finding]:
    return peers.judge_clocks(ahead, TTL_S)


def test_clocks_that_agree_are_well() -> None:
    assert [(f.severity, f.peer) for f in judged(a=0.2, b=-0.4)] == [("ok", None)]
    assert judged() == []


@pytest.mark.parametrize(("off", "severity"), [(-120.0, "error"), (120.0, "error"), (4.0, "warning")])
def test_this_machines_clock_is_the_wrong_one_when_the_others_agree(off: float, severity: str) -> None:
    (found,) = judged(a=off, b=off + 0.3)
    assert (found.severity, found.name, found.peer) == (severity, "clock", None)
    way = "behind" if off > 0 else "ahead of"
    assert f"this machine's clock is {abs(off):.1f} s {way} those of 2 nodes" == found.sentence


def test_the_one_node_whose_clock_is_off_is_named() -> None:
    (found,) = judged(a=0.1, b=120.0, c=0.0)
    assert (found.severity, found.name, found.peer) == ("error", "clock", "b")
    assert "119.9 s ahead of" in found.sentence
    (found,) = judged(a=0.1, b=-121.0)
    assert (found.peer, found.severity) == ("b", "error"), "this machine agrees with the other one"


# --- expectations -------------------------------------------------------------------------------------------------

MEGABYTE = 1_000_000


def expected(following: StageLinks | None, max_in_flight: int, stage: int = 0, stages: int = 2) -> tuple[float, str]:
    """Microbatches per second of a stage that takes 0.1 s for one, whose hidden states have 1 MB."""
    return expected_rate(0.1, (MEGABYTE, MEGABYTE), stage, stages - 1 - stage, following, max_in_flight)


def test_a_fast_link_leaves_the_device_as_the_bound() -> None:
    assert expected(StageLinks(0.001, 1e9), 4) == (10.0, "device")
    assert expected(None, 4) == (10.0, "device")


def test_a_thin_link_bounds_by_its_bytes_and_a_long_one_by_the_places_in_flight() -> None:
    rate, bound = expected(StageLinks(0.001, 5e6), 8)
    assert bound == "link"
    assert rate == pytest.approx(5)
    rate, bound = expected(StageLinks(1.0, 1e9), 4)
    assert bound == "places in flight"
    assert rate == pytest.approx(4 / (0.1 + 1.0 + 0.002 + 0.1))


def test_a_middle_stage_sends_and_receives_twice_as_much_and_the_last_one_nothing_further() -> None:
    assert expected(StageLinks(0.001, 1e7), 8, stage=1, stages=3)[0] == pytest.approx(5)
    assert expected(StageLinks(9.0, 10.0), 1, stage=2, stages=3) == (10.0, "device")


def test_an_outer_round_takes_its_bytes_over_the_bandwidth_and_a_round_trip() -> None:
    assert round_seconds(10_000_000, StageLinks(0.5, 1e6)) == 10.5
    assert round_seconds(10_000_000, StageLinks(0.5, None)) is None


@pytest.mark.parametrize("stage", [0, 1])
def test_the_device_is_measured_on_the_stage_in_question(stage: int) -> None:
    from noloco_p2p.compute.stage_timing import time_stage

    assert 0 < time_stage(RunManifest(), stage, "cpu", repeats=1) < 60
