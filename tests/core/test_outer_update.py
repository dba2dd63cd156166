"""N1, N2 and S1 (METHOD.md, "Outer round" and "Stability"): recorded rounds, invariants, and the stability bound."""

import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from noloco_p2p.config import RunManifest
from noloco_p2p.core.outer_update import instability, largest_gamma, outer_step, round_vector

VECTORS = Path(__file__).parents[1] / "support" / "vectors" / "outer_round.json"

fractions = st.fractions(min_value=-100, max_value=100, max_denominator=50)
coefficients = st.fractions(min_value=0, max_value=2, max_denominator=20)


def _flat(value: Any) -> list[float]:
    return [number for part in value for number in _flat(part)] if isinstance(value, list) else [value]


def _recorded() -> tuple[dict[str, Any], dict[tuple[int, int], dict[str, Any]]]:
    recorded = json.loads(VECTORS.read_text())
    rounds = {(int(r), one["round"]): one for r, rounds in recorded["replicas"].items() for one in rounds}
    return recorded, rounds


def test_reproduces_the_recorded_rounds_of_the_reference_code() -> None:
    recorded, rounds = _recorded()
    alpha, beta, gamma = (float(recorded[name]) for name in ("alpha", "beta", "gamma"))
    momentum = {replica: [0.0] * len(_flat(one["phi"])) for (replica, _), one in rounds.items()}
    worst = 0.0
    for (replica, number), one in sorted(rounds.items(), key=lambda item: item[0][1]):
        members = [rounds[member, number] for member in one["group"]]
        phi, expected = _flat(one["phi"]), list(zip(_flat(one["momentum_after"]), _flat(one["phi_after"]), strict=True))
        after = []
        for i, value in enumerate(phi):
            group = [(_flat(m["phi"])[i], _flat(m["theta"])[i] - _flat(m["phi"])[i]) for m in members]
            vectors = [round_vector(*pair, beta=beta, gamma=gamma) for pair in group]
            phi_after, momentum_after = outer_step(value, momentum[replica][i], vectors, alpha=alpha, gamma=gamma)
            after.append(momentum_after)
            worst = max(worst, abs(momentum_after - expected[i][0]), abs(phi_after - expected[i][1]))
        momentum[replica] = after
    assert len(rounds) == 16
    assert worst <= 1e-14


@given(fractions, fractions, fractions, coefficients, coefficients, coefficients)
def test_alone_it_is_plain_momentum(
    phi: Fraction, momentum: Fraction, delta: Fraction, alpha: Fraction, beta: Fraction, gamma: Fraction
) -> None:
    vector = round_vector(phi, delta, beta=beta, gamma=gamma)
    phi_after, momentum_after = outer_step(phi, momentum, [vector], alpha=alpha, gamma=gamma)
    assert momentum_after == alpha * momentum + beta * delta
    assert phi_after == phi + momentum_after


@given(st.lists(st.tuples(fractions, fractions, fractions), min_size=2, max_size=4), coefficients, coefficients)
def test_it_is_n1_of_the_method_and_gamma_leaves_the_mean_unchanged(
    replicas: list[tuple[Fraction, Fraction, Fraction]], beta: Fraction, gamma: Fraction
) -> None:
    n, alpha = len(replicas), Fraction(1, 2)
    vectors = [round_vector(phi, delta, beta=beta, gamma=gamma) for phi, _, delta in replicas]
    unpulled = [round_vector(phi, delta, beta=beta, gamma=Fraction(0)) for phi, _, delta in replicas]
    mean_phi, mean_delta = sum(p for p, _, _ in replicas) / Fraction(n), sum(d for *_, d in replicas) / Fraction(n)
    with_pull, without = [], []
    for phi, momentum, _ in replicas:
        phi_after, momentum_after = outer_step(phi, momentum, vectors, alpha=alpha, gamma=gamma)
        assert momentum_after == alpha * momentum + beta * mean_delta + gamma * (mean_phi - phi)
        with_pull.append(phi_after)
        without.append(outer_step(phi, momentum, unpulled, alpha=alpha, gamma=Fraction(0))[0])
    assert sum(with_pull) == sum(without)
    if gamma and len({phi for phi, _, _ in replicas}) > 1:
        assert with_pull != without


@given(fractions, fractions, fractions, fractions, coefficients, coefficients)
def test_equal_replicas_stay_equal(
    phi: Fraction, momentum: Fraction, mine: Fraction, theirs: Fraction, beta: Fraction, gamma: Fraction
) -> None:
    alpha, none = Fraction(1, 2), Fraction(0)
    vectors, unpulled = (
        [round_vector(phi, delta, beta=beta, gamma=pull) for delta in (mine, theirs)] for pull in (gamma, none)
    )
    one = outer_step(phi, momentum, vectors, alpha=alpha, gamma=gamma)
    other = outer_step(phi, momentum, vectors[::-1], alpha=alpha, gamma=gamma)
    assert one == other == outer_step(phi, momentum, unpulled, alpha=alpha, gamma=none)


finite = st.floats(min_value=-1e3, max_value=1e3)


@given(finite, finite, finite, finite)
def test_an_equal_pair_stays_equal_bit_for_bit_in_floats(phi: float, momentum: float, a: float, b: float) -> None:
    vectors = [round_vector(phi, delta, beta=0.7, gamma=0.7) for delta in (a, b)]
    one = outer_step(phi, momentum, vectors, alpha=0.5, gamma=0.7)
    other = outer_step(phi, momentum, vectors[::-1], alpha=0.5, gamma=0.7)
    assert [x.hex() for x in one] == [x.hex() for x in other]


@pytest.mark.parametrize(
    ("alpha", "group", "bound"), [(0.0, 2, 2.0), (0.5, 2, 1.5), (0.9, 2, 0.38), (0.5, 4, 1.5 / 0.75)]
)
def test_the_bound_is_s1(alpha: float, group: int, bound: float) -> None:
    assert largest_gamma(alpha=alpha, group=group) == pytest.approx(bound, rel=1e-12)
    assert instability(alpha=alpha, gamma=0.99 * bound, group=group) is None
    for gamma in (bound, 1.01 * bound, 0.0, -0.1, float("nan")):
        assert "S1" in str(instability(alpha=alpha, gamma=gamma, group=group))


def test_a_run_outside_s1_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValidationError, match=r"alpha 0\.9 and gamma 0\.7 break the stability bound S1.* 0\.38 "):
        RunManifest.model_validate({"outer": {"rule": "noloco", "alpha": 0.9, "gamma": 0.7}})
    for escape in ({"allow_unstable": True}, {"pairing": "none"}):
        outer = {"rule": "noloco", "alpha": 0.9, "gamma": 0.7, **escape}
        assert RunManifest.model_validate({"outer": outer}).outer.gamma == 0.7


def _spread_after(alpha: float, gamma: float, rounds: int = 400, replicas: int = 8) -> float:
    """Variance of φ over the replicas after `rounds` rounds of random pairs and noisy Δ, averaged over 6 runs."""
    total = 0.0
    for seed in range(6):
        rng = random.Random(seed)
        phi, momentum = [0.0] * replicas, [0.0] * replicas
        for _ in range(rounds):
            order = rng.sample(range(replicas), replicas)
            delta = [rng.gauss(0.0, 1.0) for _ in range(replicas)]
            before = list(phi)
            for a, b in zip(order[0::2], order[1::2], strict=True):
                vectors = [round_vector(before[i], delta[i], beta=0.7, gamma=gamma) for i in (a, b)]
                for i in (a, b):
                    phi[i], momentum[i] = outer_step(before[i], momentum[i], vectors, alpha=alpha, gamma=gamma)
        mean = sum(phi) / replicas
        total += sum((x - mean) ** 2 for x in phi) / replicas
    return total / 6


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
def test_replicas_stay_together_below_gamma_max_and_drift_apart_beyond(alpha: float) -> None:
    bound = largest_gamma(alpha=alpha)
    assert _spread_after(alpha, 0.5 * bound) < 100
    assert _spread_after(alpha, 0.9 * bound) < 1000
    assert _spread_after(alpha, 1.8 * bound) > 1e9
