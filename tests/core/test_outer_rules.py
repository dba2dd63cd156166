"""Outer rules against METHOD.md, "Outer rules", in exact fractions: each formula, and what must stay unchanged."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from noloco_p2p.config import OuterSettings, RunManifest
from noloco_p2p.core.outer_rules import (
    DEFAULTS,
    Averaged,
    Dct,
    Diloco,
    Gossip,
    Noloco,
    OuterRule,
    make_rule,
    vector_size,
)
from noloco_p2p.core.tiles import Untransformed

fractions = st.fractions(min_value=-100, max_value=100, max_denominator=50)
triples = st.tuples(fractions, fractions, fractions)


def own(theta: Fraction, phi: Fraction, momentum: Fraction) -> dict[str, Fraction]:
    return {"fast": theta, "slow": phi, "momentum": momentum}


def met(rule: OuterRule, one: dict[str, Any], other: dict[str, Any], lag: float = 0) -> tuple[dict[str, Any], ...]:
    """Both replicas of a pair after their round."""
    members = [rule.offer(one), rule.offer(other)]
    return rule.merge(one, members, 0, lag), rule.merge(other, members, 1, lag)


@given(triples, triples)
def test_averaged(one: tuple[Fraction, ...], other: tuple[Fraction, ...]) -> None:
    rule = Averaged(Fraction(1, 3), Fraction(3, 4))  # type: ignore[arg-type]
    (theta_i, phi_i, delta_i), (theta_j, phi_j, delta_j) = one, other
    delta = (Fraction(1, 3) * (delta_i + delta_j) + Fraction(3, 4) * (theta_i - phi_i + theta_j - phi_j)) / 2
    phi = (phi_i + phi_j) / 2 + delta
    expected = {"slow": phi, "momentum": delta, "fast": phi}
    assert met(rule, own(*one), own(*other)) == (expected, expected), "both replicas of a pair leave it equal"


@given(st.fractions(0, Fraction(7, 8), max_denominator=8), fractions)
def test_averaged_lets_the_second_value_move_the_first_by_its_gain(alpha: Fraction, momentum: Fraction) -> None:
    """In rounds alone, without training, φ ends up where the first round's α·δ times the gain takes it."""
    rule = Averaged(alpha, Fraction(1, 2))  # type: ignore[arg-type]
    one = own(Fraction(0), Fraction(0), momentum)
    [_, moves] = rule.offer(one)
    for _ in range(200):
        one = {kind: float(value) for kind, value in rule.merge(one, [rule.offer(one)], 0, 0).items()}  # type: ignore[misc]
    assert float(one["slow"]) == pytest.approx(float(moves * rule.gain), abs=1e-6)


@given(triples, triples, st.integers(0, 20))
def test_gossip(one: tuple[Fraction, ...], other: tuple[Fraction, ...], lag: int) -> None:
    rule = Gossip(Fraction(1, 2), 4)  # type: ignore[arg-type]
    weight = Fraction(1, 2) / (1 + Fraction(lag, 4))
    first, second = met(rule, own(*one), own(*other), Fraction(lag))  # type: ignore[arg-type]
    assert first == {"fast": one[0] + weight * (other[0] - one[0])}
    assert first["fast"] + second["fast"] == one[0] + other[0], "their mean stays"
    assert lag or first == second


@given(st.lists(triples, min_size=2, max_size=3))
def test_diloco(replicas: list[tuple[Fraction, ...]]) -> None:
    rule = Diloco(Fraction(1, 3), Fraction(3, 4))  # type: ignore[arg-type]
    mean = sum(theta - phi for theta, phi, _ in replicas) / Fraction(len(replicas))
    theta, phi, delta = replicas[0]
    momentum = delta / 3 + mean
    slow = phi + Fraction(3, 4) * (mean + momentum / 3)
    members = [rule.offer(own(*one)) for one in replicas]
    for mine, group in ((0, members), (-1, members)):
        assert rule.merge(own(theta, phi, delta), group, mine, 0) == own(slow, slow, momentum)


class Scaled(Untransformed):
    """A transform of which half of every coefficient travels."""

    def forward(self, value: Any) -> Any:
        return 3 * value

    def largest(self, coefficients: Any) -> Any:
        return coefficients / 2

    def inverse(self, coefficients: Any) -> Any:
        return coefficients / 3


@given(st.lists(triples, min_size=2, max_size=3), st.booleans())
def test_dct(replicas: list[tuple[Fraction, ...]], counted: bool) -> None:
    """What a replica sends leaves its δ, even if it does not count."""
    rule = Dct(Fraction(1, 3), Fraction(3, 4), Scaled())  # type: ignore[arg-type]
    sums = [delta / 3 + 3 * (theta - phi) for theta, phi, delta in replicas]
    members = [rule.offer(own(*one)) for one in replicas]
    assert members == [(one / 2,) for one in sums]
    group = members if counted else members[1:]
    shared = sum(one for (one,) in group) / Fraction(len(group))
    slow = replicas[0][1] + Fraction(3, 4) * shared / 3
    found = rule.merge(own(*replicas[0]), group, 0 if counted else -1, 0)
    assert found == own(slow, slow, sums[0] / 2 + shared)


@given(triples)
def test_alone_nothing_is_pulled_anywhere(one: tuple[Fraction, ...]) -> None:
    theta, phi, momentum = one
    mine = own(theta, phi, momentum)
    gossip = Gossip(0.5, 1)
    assert gossip.merge(mine, [gossip.offer(mine)], 0, 0) == {"fast": theta}
    half = Fraction(1, 2)
    for rule in (Noloco(half, half, half), Averaged(half, half)):  # type: ignore[arg-type]
        delta = half * momentum + half * (theta - phi)
        after = {"slow": phi + delta, "momentum": delta, "fast": phi + delta}
        assert rule.merge(mine, [rule.offer(mine)], 0, 0) == after, "plain momentum"


def test_each_rule_has_its_own_defaults() -> None:
    for name, defaults in DEFAULTS.items():
        settings = RunManifest(outer=OuterSettings(rule=name)).outer
        assert {key: getattr(settings, key) for key in defaults} == defaults
    assert OuterSettings(rule="gossip", inner_steps=3).inner_steps == 3
    assert OuterSettings().model_dump() == OuterSettings(rule="gossip").model_dump()


def test_what_a_rule_begins_with_and_offers_of_ten_parameters() -> None:
    assert make_rule("noloco", alpha=0.5, beta=0.7, gamma=0.7, inner_steps=1).start(7) == {"slow": 7, "momentum": 0}
    sizes = {name: vector_size(OuterSettings(rule=name).update, 10) for name in DEFAULTS}
    assert sizes == dict.fromkeys(DEFAULTS, 10) | {"averaged": 20, "sync": 11}


@pytest.mark.parametrize(
    ("outer", "said"),
    [
        ({"rule": "gossip", "gamma": 1.0}, "gamma 1 drives pairs apart"),
        ({"rule": "gossip", "gamma": 0.0}, "gamma 0 drives"),
        ({"rule": "noloco", "beta": 0.0}, "beta 0 is not a valid outer learning rate"),
        ({"rule": "averaged", "beta": 0.0}, "beta 0 is not a valid outer learning rate"),
        ({"rule": "averaged", "alpha": 1.0}, "Input should be less than 1"),
        ({"rule": "dct", "beta": 0.0}, "beta 0 is not a valid outer learning rate"),
        ({"rule": "diloco", "beta": 0.0}, "beta 0 is not a valid outer learning rate"),
        ({"rule": "noloco", "gamma": 1.6}, "break the stability bound S1"),
        ({"rule": "fedavg"}, "Input should be 'noloco'"),
    ],
)
def test_settings_with_which_replicas_drift_apart_are_refused(outer: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        RunManifest.model_validate({"outer": outer})
    if outer["rule"] in DEFAULTS and outer.get("alpha") != 1.0:
        assert RunManifest.model_validate({"outer": outer | {"allow_unstable": True}}).outer.allow_unstable
