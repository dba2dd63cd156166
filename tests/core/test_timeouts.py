"""Adaptive timeouts: what recent calls say about the next one, and deadlines that nest."""

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


def chain_that_hangs(
    budget_s: float, deadlines: list[float | None], lost_s: list[float]
) -> list[tuple[float, float, float]]:
    """What happens in a chain whose last callee hangs: for each hop, from the first stage's on, when its call begins,
    when it gives it up, and when its own caller gives up.

    `deadlines` are the patiences of the hops; `lost_s` what each spends at its door and on its device before it calls.
    """
    hops, now, until = [], 0.0, budget_s
    for place, (deadline, lost) in enumerate(zip(deadlines, lost_s, strict=True)):
        now += lost
        mine = until - (ANSWER_SHARE * max(0.0, until - now) if place else 0.0)
        gives_up = now + attempt_s(max(0.0, mine - now), len(deadlines) - 1 - place, deadline)
        hops.append((now, gives_up, until))
        until = gives_up
    return hops


HOPS = st.integers(1, 4)


@given(st.data(), HOPS)
def test_the_hop_next_to_the_hung_one_gives_up_first(data: st.DataObject, hops: int) -> None:
    budget_s = data.draw(st.floats(0.5, 100.0))
    deadlines = data.draw(st.lists(st.none() | SECONDS, min_size=hops, max_size=hops))
    # Together less than any hop may have been given.
    lost_s = [data.draw(st.floats(0, 0.1 / hops)) * min([budget_s / 5, *filter(None, deadlines)]) for _ in range(hops)]
    chain = chain_that_hangs(budget_s, deadlines, lost_s)
    for began, gives_up, caller_gives_up in chain:
        assert began < gives_up < caller_gives_up
        assert caller_gives_up - gives_up >= (caller_gives_up - began) / (hops + 2)


@given(st.data(), HOPS)
def test_a_retry_has_the_time_of_a_typical_call(data: st.DataObject, hops: int) -> None:
    """Durations include those of nested calls; a budget that binds nobody; on the way as much is lost as usual."""
    own_s = [data.draw(st.lists(st.floats(0.01, 5.0), min_size=16, max_size=16)) for _ in range(hops)]
    whole_s = [[sum(parts) for parts in zip(*own_s[place:], strict=True)] for place in range(hops)]
    typical = [median(durations) for durations in whole_s]
    floor_s = data.draw(st.floats(0.0, 3.0))
    deadlines = [after(durations).deadline_s(floor_s) for durations in whole_s]
    lost_s = [0.0, *(data.draw(st.floats(0, 1)) * (typical[place - 1] - typical[place]) for place in range(1, hops))]
    budget_s = 1000.0 * max(filter(None, deadlines))
    for place, (_, gives_up, caller_gives_up) in enumerate(chain_that_hangs(budget_s, deadlines, lost_s)):
        left_s = (caller_gives_up - gives_up) * (1 - ANSWER_SHARE)
        assert attempt_s(left_s, hops - 1 - place, deadlines[place]) >= typical[place]


def test_without_observations_every_hop_gets_the_same_slice() -> None:
    assert [attempt_s(60.0, 3, None), attempt_s(48.0, 2, None), attempt_s(36.0, 1, None)] == [48.0, 36.0, 24.0]
    assert attempt_s(24.0, 0, None) == 12.0


def test_under_one_in_a_hundred_healthy_calls_takes_longer() -> None:
    """Durations of a busy swarm have long tails: log-normal, sigma 0.7. With k = 4 it is one in forty."""
    rng = random.Random(1)
    late = 0
    for _ in range(200):
        deadline = after([rng.lognormvariate(0.0, 0.7) for _ in range(WINDOW)]).deadline_s()
        assert deadline is not None
        late += sum(rng.lognormvariate(0.0, 0.7) > deadline for _ in range(WINDOW))
    assert late < 0.01 * 200 * WINDOW, late / (200 * WINDOW)
