"""Nodes are assigned to regions in turn, and a node's access line is a function of the seed and its id."""

from dataclasses import replace
from statistics import median

import pytest

from noloco_p2p.sim.links import Access, Geography, Link, Regions
from noloco_p2p.sim.scenario import Scenario
from noloco_p2p.sim.simulation import geography_of

REGIONS = Regions(((2.0, 90.0), (90.0, 4.0)), ((None, 50e6), (25e6, 100e6)))
EU_US = Geography(Link(spread=0.1, loss=0.001), regions=REGIONS)


def test_a_link_has_half_of_the_round_trip_and_the_bandwidth_of_its_direction() -> None:
    assert EU_US.link("s0r4", "s2r11") == Link(0.045, 0.1, 50e6, loss=0.001)
    assert EU_US.link("s0r1", "s1r0") == Link(0.045, 0.1, 25e6, loss=0.001)
    assert EU_US.link("s0r0", "s1r0") == Link(0.001, 0.1, None, loss=0.001)
    assert Geography(Link(bytes_per_s=7.0), regions=Regions(((10.0,),))).link("s0r0", "s0r1") == Link(0.005)


def test_access_is_drawn_around_its_median_and_stays_asymmetric() -> None:
    drawn = replace(EU_US, each=Access(2e6, 10e6), access_spread=0.6, seed=3)
    nodes = [f"s0r{number}" for number in range(801)]
    lines = [drawn.access(peer) for peer in nodes]
    assert lines == [replace(drawn).access(peer) for peer in nodes]
    ups = [line.up_bytes_per_s or 0.0 for line in lines]
    assert median(ups) == pytest.approx(2e6, rel=0.1)
    assert sum(up < 2e6 * 2.718281828**-0.6 for up in ups) / 801 == pytest.approx(0.159, abs=0.04)
    assert all((line.down_bytes_per_s or 0.0) / (line.up_bytes_per_s or 1.0) == pytest.approx(5.0) for line in lines)
    assert drawn.link("s0r0", "s0r1") == EU_US.link("s0r0", "s0r1")


@pytest.mark.parametrize("spread", [0.0, 0.6])
def test_a_direction_without_a_limit_stays_unlimited(spread: float) -> None:
    access = Geography(each=Access(None, 7.0), access_spread=spread).access("s0r0")
    assert access.up_bytes_per_s is None
    assert (access.down_bytes_per_s == 7.0) == (spread == 0.0)


def test_an_owners_cap_limits_the_line() -> None:
    capped = Geography(Link(0.02), Access(None, 7.0), cap=Access(3.0, 9.0))
    assert capped.access("s0r0") == Access(3.0, 7.0)
    assert capped.link("s0r0", "s1r0") == Link(0.02)
    capped_by_all = Scenario.model_validate({"node": {"limits": {"download_mbit_per_s": 8}}})
    assert geography_of(capped_by_all, 0).access("s1r1").down_bytes_per_s == 1e6
