"""Invariants of the step clock, the outer rounds and the learning rate."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.core.schedule import (
    READING_S,
    SLOWEST,
    advance,
    clock_median,
    due_round,
    furthest,
    learning_rate,
    most_projected,
    project,
    smooth_rate,
)

lengths = st.integers(min_value=1, max_value=500)


@given(lengths, st.integers(min_value=0, max_value=200), st.floats(min_value=1e-5, max_value=1.0))
def test_the_learning_rate_rises_to_the_peak_and_falls_to_its_last_value(steps: int, warmup: int, peak: float) -> None:
    rates = [learning_rate(t, steps, peak, warmup, 0.1) for t in range(1, steps + 1)]
    top = min(warmup, steps // 10)
    assert all(a < b for a, b in pairwise(rates[:top]))
    assert all(a >= b for a, b in pairwise(rates[max(0, top - 1) :]))
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in rates)
    assert rates[-1] == pytest.approx(0.1 * peak)
    if top:
        assert rates[top - 1] == pytest.approx(peak)
        assert rates[0] == pytest.approx(peak / top)
    assert learning_rate(steps + 5, steps, peak, warmup, 0.1) == rates[-1]


def test_the_cosine_is_at_its_middle_half_way() -> None:
    assert learning_rate(100 + 450, 1000, 2.0, 100, 0.1) == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert learning_rate(100 + 225, 1000, 2.0, 100, 0.1) == pytest.approx(
        2.0 * (0.1 + 0.45 * (1 + math.cos(math.pi / 4)))
    )


@given(
    lengths,
    st.integers(min_value=1, max_value=20),
    st.lists(st.integers(min_value=0, max_value=40), max_size=80),
)
def test_each_round_is_done_at_most_once_and_the_last_step_is_one(steps: int, m: int, jumps: list[int]) -> None:
    step, last, done = 0, 0, []
    for jump in [*jumps, steps]:
        before, step = step, min(steps, step + jump)
        number = due_round(step, m, last, steps)
        if step == before and last == before // m:
            assert number is None or step == steps
        if number is not None:
            assert number == (step // m if step < steps else math.ceil(steps / m))
            done.append(number)
            last = number
        assert due_round(step, m, last, steps) is None
    assert done == sorted(set(done))
    assert done[-1] == math.ceil(steps / m)


def test_a_clock_without_jumps_does_every_round() -> None:
    last, done = 0, []
    for step in range(1, 26):
        number = due_round(step, 10, last, 25)
        if number is not None:
            last = number
            done.append((step, number))
    assert done == [(10, 1), (20, 2), (25, 3)]
    assert [due_round(step, 10, 0, 20) for step in (9, 10, 19, 20)] == [None, 1, 1, 2]


clocks = st.floats(min_value=0, max_value=1000)


@given(clocks, st.one_of(st.none(), st.floats(min_value=-1e6, max_value=1e6)), lengths, st.booleans())
def test_the_clock_never_goes_back_and_never_beyond_the_end(
    step: float, median: float | None, steps: int, pull: bool
) -> None:
    step = min(step, steps)
    after = advance(step, median, steps, pull)
    assert min(steps, step + SLOWEST) <= after <= steps, "a false clock stops nobody"
    if not pull or median is None:
        assert after == min(steps, step + 1)
    elif step + SLOWEST < after < steps:
        behind = median - step - 0.5
        assert after == pytest.approx(step + 1 + max(behind / 4, behind - 2))


def test_a_clock_at_a_sixth_of_the_speed_stays_within_nine_steps_of_the_others() -> None:
    slow, others = 0.0, 0.0
    for _ in range(40):
        others += 6.0
        slow = advance(slow, others, 1000, True)
        assert others - slow < 9.0


def test_equal_clocks_advance_by_one_and_different_ones_converge() -> None:
    assert advance(7.0, 7.5, 100, True) == 8.0
    slow, fast = 10.0, 30.0
    for _ in range(20):
        middle = (slow + fast) / 2 + 0.5
        slow, fast = advance(slow, middle, 100, True), advance(fast, middle, 100, True)
    assert abs(fast - slow) < 0.5


def test_the_median_ignores_one_liar_among_three() -> None:
    assert clock_median([]) is None
    assert clock_median([4.0]) == 4.0
    assert clock_median([6.0, 4.0]) == 5.0
    assert clock_median([1e12, 5.0, 4.0]) == 5.0


def test_a_projection_is_bounded_and_believes_no_nonsense() -> None:
    assert project(10.0, 2.0, 3.0, 20.0) == 16.0
    assert project(10.0, 100.0, 3.0, 20.0) == 30.0
    assert project(10.0, 0.5, 0.25, 20.0) == 10.125
    for age_s, speed in ((-1.0, 3.0), (2.0, -3.0), (2.0, math.nan), (math.nan, 3.0), (0.0, math.inf)):
        assert project(10.0, age_s, speed, 20.0) == 10.0
    assert project(10.0, 1.0, math.inf, 20.0) == 30.0


def test_a_clock_is_projected_over_two_outer_intervals_or_the_time_between_readings() -> None:
    assert most_projected(10, 8, 2.0) == 20.0
    assert most_projected(1, 8, 2.0) == 4 * READING_S * 2.0
    assert most_projected(1, 1000, 2.0) == 4 * 5.0 * 2.0, "a large membership is read less often"
    assert most_projected(1, 8, 0.0) == 2.0


def test_a_claimed_clock_is_believed_up_to_two_intervals_and_twice_the_own_speed() -> None:
    assert furthest(100.0, 0.0, 3.0, 10) == 120.0
    assert furthest(100.0, 5.0, 3.0, 10) == 150.0
    assert furthest(100.0, 5.0, 3.0, 1) == 138.0, "at least eight steps"
    assert furthest(100.0, -5.0, 3.0, 10) == 120.0


def test_the_rate_is_that_of_the_mean_duration_not_the_mean_of_the_rates() -> None:
    assert smooth_rate(0.0, 0.5) == 2.0
    assert smooth_rate(2.0, 0.5) == pytest.approx(2.0)
    rate = 0.0
    for took_s in [0.1, 1.9] * 200:
        rate = smooth_rate(rate, took_s)
    assert rate == pytest.approx(1.0, rel=0.1)
