"""Adaptive timeouts: deadlines derived from recent calls, and deadlines that nest."""

import random
from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.core.timeouts import ANSWER_SHARE, FEWEST, WINDOW, AdaptiveTimeout, attempt_s

SECONDS = st.floats(min_value=0.001, max_value=100.0)


def after(durations: list[float]) -> AdaptiveTimeout:
    patience = AdaptiveTimeout()
    for seconds in durations:
        patience.observe(seconds)
    return patience


def test_it_knows_nothing_until_it_has_seen_eight_calls() -> None:
    assert after([0.1] * (FEWEST - 1)).deadline_s(2.0) is None
    assert after([0.1] * FEWEST).deadline_s(2.0) == 2.0


def test_median_and_ten_deviations() -> None:
    patience = after([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
    assert patience.deadline_s(2.0) == 5.0 + 10 * 2.0
    assert patience.deadline_s(40.0) == 40.0


def test_only_the_last_calls_count() -> None:
    patience = after([50.0] * WINDOW + [1.0] * WINDOW)
    assert patience.deadline_s() == 4.0


def test_one_wild_call_moves_nothing() -> None:
    assert after([1.0, 1.1, 0.9, 1.0, 1.2, 0.8, 1.0, 1.1] * 4 + [500.0]).deadline_s() == 4.0


def test_a_replica_that_is_three_times_slower_is_not_taken_for_hung() -> None:
    rng = random.Random(5)
    for _ in range(50):
        durations = [rng.choice([1.0, 1.0, 3.0]) * rng.uniform(0.95, 1.05) for _ in range(WINDOW)]
        deadline = after(durations).deadline_s()
        assert deadline is not None
        assert deadline > max(durations), durations


@given(st.lists(SECONDS, min_size=FEWEST, max_size=2 * WINDOW), st.floats(0, 10))
def test_the_deadline_is_never_below_the_floor_nor_four_medians(durations: list[float], floor_s: float) -> None:
    deadline = after(durations).deadline_s(floor_s)
    assert deadline is not None
    assert deadline >= max(floor_s, 4 * median(durations[-WINDOW:]))


HOPS = st.integers(1, 8)


@given(st.data(), HOPS)
def test_the_hop_next_to_the_hung_one_gives_up_first(data: st.DataObject, hops: int) -> None:
    """In a chain of calls without progress. Each hop spends `lost_s` in line and on its device before it calls on."""
    until = budget_s = data.draw(st.floats(0.5, 1000.0))
    now = 0.0
    for place in range(hops):
        lost_s = data.draw(st.floats(0, 0.01)) * (until - now)
        now += lost_s
        mine = until - (ANSWER_SHARE * (until - now) if place else 0.0)
        gives_up = now + attempt_s(mine - now, hops - 1 - place)
        assert now < gives_up < until
        assert until - gives_up >= (until - now) / (hops + 2), "there is time for a retry"
        until = gives_up
    assert budget_s > until


def test_every_hop_gets_the_same_slice() -> None:
    assert [attempt_s(60.0, 3), attempt_s(48.0, 2), attempt_s(36.0, 1), attempt_s(24.0, 0)] == [48.0, 36.0, 24.0, 12.0]


def test_under_one_in_a_hundred_healthy_calls_takes_longer() -> None:
    """Durations of a busy swarm have long tails: log-normal, sigma 0.7. With k = 4 it is one in forty."""
    rng = random.Random(1)
    late = 0
    for _ in range(200):
        deadline = after([rng.lognormvariate(0.0, 0.7) for _ in range(WINDOW)]).deadline_s()
        assert deadline is not None
        late += sum(rng.lognormvariate(0.0, 0.7) > deadline for _ in range(WINDOW))
    assert late < 0.01 * 200 * WINDOW, late / (200 * WINDOW)
