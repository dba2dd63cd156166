"""Regions have their distances, and a node's access is a function of the seed and its id."""

from statistics import median

import pytest

from noloco_p2p.errors import ConfigError
from noloco_p2p.sim.links import Access, Link, Regions, Uniform, VariedAccess

EU_US = Regions(
    ("eu", "us"),
    ((2.0, 90.0), (90.0, 4.0)),
    ((None, 50e6), (25e6, 100e6)),
    spread=0.1,
    loss=0.001,
    home={"helsinki": "eu", "s0r4": "us"},
)


def test_a_node_stands_in_the_region_that_it_was_given_or_in_turn() -> None:
    nodes = ("helsinki", "s0r4", "s1r4", "s0r0", "s0r1", "s2r11")
    assert [EU_US.region(peer) for peer in nodes] == ["eu", "us", "eu", "eu", "us", "us"]
    with pytest.raises(ConfigError, match="node lisbon has no region"):
        EU_US.region("lisbon")


def test_a_link_has_half_the_round_trip_and_the_bandwidth_of_its_direction() -> None:
    assert EU_US.link("helsinki", "s0r1") == Link(0.045, 0.1, 50e6, loss=0.001)
    assert EU_US.link("s0r1", "helsinki") == Link(0.045, 0.1, 25e6, loss=0.001)
    assert EU_US.link("s0r0", "s1r0") == Link(0.001, 0.1, None, loss=0.001)
    assert Regions(("one",), ((10.0,),)).link("s0r0", "s0r1") == Link(0.005)


@pytest.mark.parametrize(
    ("names", "round_trip_ms", "bytes_per_s", "message"),
    [
        (("eu", "eu"), ((1.0, 1.0), (1.0, 1.0)), None, "different names"),
        (("eu", "us"), ((1.0, 1.0),), None, "round_trip_ms needs 2 rows of 2"),
        (("eu", "us"), ((1.0, 1.0), (1.0, 1.0)), ((1.0, 1.0), (1.0,)), "bytes_per_s needs 2 rows of 2"),
        (("eu",), ((0.0,),), None, "above 0"),
        (("eu",), ((1.0,),), ((-5.0,),), "above 0"),
    ],
)
def test_what_does_not_fit_is_refused(
    names: tuple[str, ...],
    round_trip_ms: tuple[tuple[float, ...], ...],
    bytes_per_s: tuple[tuple[float, ...], ...] | None,
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        Regions(names, round_trip_ms, bytes_per_s)


def test_a_home_in_no_region_is_refused() -> None:
    with pytest.raises(ConfigError, match="no region 'mars'"):
        Regions(("eu",), ((1.0,),), home={"a": "mars"})


def test_access_is_drawn_around_its_median_and_stays_asymmetric() -> None:
    drawn = VariedAccess(EU_US, Access(2e6, 10e6), spread=0.6, seed=3)
    nodes = [f"s0r{number}" for number in range(801)]
    lines = [drawn.access(peer) for peer in nodes]
    assert lines == [VariedAccess(EU_US, Access(2e6, 10e6), spread=0.6, seed=3).access(peer) for peer in nodes]
    ups = [line.up_bytes_per_s or 0.0 for line in lines]
    assert median(ups) == pytest.approx(2e6, rel=0.1)
    assert sum(up < 2e6 * 2.718281828**-0.6 for up in ups) / 801 == pytest.approx(0.159, abs=0.04)
    assert all((line.down_bytes_per_s or 0.0) / (line.up_bytes_per_s or 1.0) == pytest.approx(5.0) for line in lines)
    assert drawn.link("s0r0", "s0r1") == EU_US.link("s0r0", "s0r1")


def test_a_direction_without_a_median_keeps_what_lies_beneath() -> None:
    plain = Uniform(each=Access(1.0, 2.0))
    assert VariedAccess(plain, Access(None, 7.0), spread=0.0, seed=1).access("s0r0") == Access(1.0, 7.0)
