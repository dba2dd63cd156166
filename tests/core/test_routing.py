"""Routing: balanced is a permutation with even loads, random is uniform, fixed is fixed."""

import itertools
import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.core.messages import Origin
from noloco_p2p.core.routing import (
    FASTEST,
    SLOWEST,
    StepView,
    balanced_owner,
    balanced_slots,
    candidate_sets,
    next_hop,
    odds,
    target,
)

small = st.integers(min_value=1, max_value=7)
seeds = st.integers(min_value=0, max_value=2**63 - 1)


def _peers(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def _hop(
    policy: str,
    origin: Origin,
    usable: list[str],
    seed: int = 1,
    me: str = "o0",
    rng: random.Random | None = None,
    shares: dict[str, float] | None = None,
) -> tuple[str, str]:
    origins, replicas, rng = (*_peers("o", 3),), (*_peers("r", 4),), rng or random.Random(0)
    return next_hop(policy, seed, 1, origin, StepView(me, origins, origins, replicas, shares or {}), usable, rng)


@given(seeds, small, small, small, st.integers(min_value=0, max_value=50))
def test_balanced_is_a_permutation_in_every_block(seed: int, stage: int, count: int, origins: int, step: int) -> None:
    replicas = _peers("r", count)
    for block in range(3):
        slots = range(block * count, (block + 1) * count)
        assert sorted(balanced_owner(seed, stage, step, slot, origins, replicas[::-1]) for slot in slots) == replicas


@given(seeds, small, small, small, st.integers(min_value=0, max_value=50))
def test_balanced_spreads_each_origin_over_the_replicas_so_all_miss_a_missing_one_alike(
    seed: int, microbatches: int, origins: int, count: int, step: int
) -> None:
    """With a permutation for each block one replica got all microbatches of an origin, and another none."""
    replicas = _peers("r", count)
    for rank in range(origins):
        slots = [index * origins + rank for index in range(microbatches)]
        held = Counter(balanced_owner(seed, 1, step, slot, origins, replicas) for slot in slots)
        assert max(held.values()) - min(held[one] for one in replicas) <= 1


@given(seeds, st.integers(min_value=0, max_value=50), small, small, small)
def test_balanced_slots_share_all_microbatches_out_within_one_of_each_other(
    seed: int, step: int, microbatches: int, origin_count: int, replica_count: int
) -> None:
    origins, replicas = _peers("o", origin_count), _peers("r", replica_count)
    views = [StepView(me, (*origins,), (*replicas,)) for me in replicas]
    held = [balanced_slots(seed, 1, step, microbatches, view) for view in views]
    together = Counter(label for slots in held for label in slots)
    assert together == Counter((o, i) for o in origins for i in range(microbatches))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    for me, slots in zip(replicas, held, strict=True):
        for peer, index in slots:
            slot = index * origin_count + origins.index(peer)
            assert balanced_owner(seed, 1, step, slot, origin_count, replicas) == me


def test_balanced_changes_with_seed_stage_step_and_block() -> None:
    replicas = _peers("r", 8)

    def owners(seed: int, stage: int, step: int, block: int) -> list[str]:
        return [balanced_owner(seed, stage, step, 8 * block + place, 8, replicas) for place in range(8)]

    first = owners(1, 1, 1, 0)
    assert first == owners(1, 1, 1, 0)
    assert first not in (owners(2, 1, 1, 0), owners(1, 2, 1, 0), owners(1, 1, 2, 0), owners(1, 1, 1, 1))


def test_balanced_goes_to_the_owner_and_otherwise_shares_out_over_those_that_can_be_reached() -> None:
    replicas, lost = _peers("r", 4), Counter[str]()
    for index in range(16):
        origin = Origin("o2", 9, index)
        owner = balanced_owner(1, 1, 9, index * 3 + 2, 3, replicas)
        assert _hop("balanced", origin, replicas) == (owner, "owner")
        others = [r for r in replicas if r != owner]
        fallen = {_hop("balanced", origin, others, rng=random.Random(i)) for i in range(9)}
        assert fallen == {(balanced_owner(1, 1, 9, index * 3 + 2, 3, others), "fallback")}
        lost[_hop("balanced", origin, ["r0", "r1", "r3"])[0]] += 1
    assert max(lost.values()) - min(lost[one] for one in ("r0", "r1", "r3")) <= 2
    newcomer = {_hop("balanced", Origin("newcomer", 9, 0), replicas, rng=random.Random(i)) for i in range(60)}
    assert newcomer == {(one, "fallback") for one in replicas}
    assert _hop("balanced", Origin("o0", 9, 0), ["r9"]) == ("r9", "fallback")


def test_random_is_uniform_over_the_usable() -> None:
    rng = random.Random(11)
    usable = ["r3", "r0", "r1", "late"]
    drawn = Counter(_hop("random", Origin("o0", 1, i % 4), usable, rng=rng) for i in range(4000))
    assert set(drawn) == {(r, "random") for r in usable}
    chi_square = sum((times - 1000) ** 2 / 1000 for times in drawn.values())
    assert chi_square < 11.34  # 1 % of uniform samples exceed it at 3 degrees of freedom


@given(small, st.integers(min_value=1, max_value=3), small, seeds)
def test_a_set_holds_different_replicas_and_all_come_before_any_comes_again(
    count: int, size: int, replicas: int, seed: int
) -> None:
    usable = _peers("r", replicas)
    sets = candidate_sets(count, size, usable, random.Random(seed))
    assert [len(set(each)) for each in sets] == [min(size, replicas)] * count
    for until in range(count + 1):
        times = Counter(peer for each in sets[:until] for peer in each)
        assert max(times[peer] for peer in usable) - min(times[peer] for peer in usable) <= 1


def test_candidates_are_uniform() -> None:
    rng, usable = random.Random(4), _peers("r", 5)
    firsts = Counter(each[0] for _ in range(2_000) for each in candidate_sets(3, 2, usable, rng))
    assert all(abs(firsts[peer] - 1_200) < 120 for peer in usable)


@pytest.mark.parametrize("policy", ["random", "weighted", "fixed"])
def test_the_order_of_the_usable_changes_nothing(policy: str) -> None:
    usable, origin = ["late", "other"], Origin("o0", 1, 0)
    for seed in range(9):
        one, other = (_hop(policy, origin, order, rng=random.Random(seed)) for order in (usable, usable[::-1]))
        assert one == other
        one_sets, other_sets = (candidate_sets(3, 1, order, random.Random(seed)) for order in (usable, usable[::-1]))
        assert one_sets == other_sets


def test_weighted_follows_the_odds_and_a_newcomer_counts_as_their_mean() -> None:
    rng, shares = random.Random(7), {"r0": 0.6, "r1": 0.3, "r2": 0.1}
    drawn = Counter(
        _hop("weighted", Origin("o0", 1, 0), ["late", "r0", "r1"], rng=rng, shares=shares)[0] for _ in range(5000)
    )
    wanted = {"r0": 0.6, "r1": 0.3, "late": 1 / 3}
    for peer, odd in wanted.items():
        assert drawn[peer] / 5000 == pytest.approx(odd / sum(wanted.values()), abs=0.03)
    assert _hop("weighted", Origin("o0", 1, 0), ["r9"]) == ("r9", "weighted"), "nothing was measured"


SPEEDS = st.one_of(st.floats(), st.floats(0.01, 100.0))


@given(st.dictionaries(st.sampled_from(_peers("r", 9)), SPEEDS, min_size=1))
def test_odds_are_a_distribution_whatever_is_claimed(claims: dict[str, float]) -> None:
    found = odds(claims)
    assert list(found) == sorted(claims)
    assert sum(found.values()) == pytest.approx(1.0)
    assert all(share > 0 for share in found.values())
    measured = sorted(speed for speed in claims.values() if speed > 0 and math.isfinite(speed))
    for one, other in itertools.permutations(claims, 2):
        assert found[one] <= found[other] * FASTEST / SLOWEST * (1 + 1e-9)
    usual = measured[(len(measured) - 1) // 2] if measured else 1.0
    believed = {peer: speed if speed in measured else usual for peer, speed in claims.items()}
    ratios = {peer: min(FASTEST, max(SLOWEST, speed / usual)) for peer, speed in believed.items()}
    assert found == pytest.approx({peer: ratio / sum(ratios.values()) for peer, ratio in ratios.items()})


@pytest.mark.parametrize("claim", [math.inf, math.nan, 0.0, -1.0])
def test_a_majority_of_impossible_claims_makes_no_other_replica_slow(claim: float) -> None:
    assert odds({"r0": claim, "r1": claim, "r2": 5.0}) == pytest.approx(dict.fromkeys(_peers("r", 3), 1 / 3))


@given(st.integers(2, 12), st.floats(1.0, 1e300))
def test_no_claim_takes_all_microbatches(count: int, claim: float) -> None:
    """Next to a liar, each of several equal honest replicas still gets its microbatches."""
    found = odds(dict.fromkeys(_peers("r", count), 1.0) | {"liar": claim})
    assert found["liar"] <= FASTEST / (FASTEST + count) + 1e-12
    assert target(16, 4, count, found["r0"]) >= 1


@given(st.integers(1, 64), small, st.lists(st.floats(0.1, 10.0), min_size=1, max_size=9))
def test_targets_by_speed_add_up_to_the_step(microbatches: int, origins: int, speeds: list[float]) -> None:
    found = odds(dict(zip(_peers("r", len(speeds)), speeds, strict=True)))
    targets = [target(microbatches, origins, len(speeds), share) for share in found.values()]
    assert min(targets) >= 1
    assert abs(sum(targets) - microbatches * origins) <= len(speeds)
    for share, wanted in zip(found.values(), targets, strict=True):
        assert wanted == max(1, round(microbatches * origins * share))


def test_fixed_is_my_rank_modulo_the_count() -> None:
    origin = Origin("o0", 5, 1)
    usable = _peers("r", 4)
    assert [_hop("fixed", origin, usable, me=f"o{i}", seed=i)[0] for i in range(3)] == ["r0", "r1", "r2"]
    assert _hop("fixed", origin, ["r2"]) == ("r2", "fallback")
    view = StepView("c", ("a",), ("a", "b", "c"), ("r", "s"))
    assert next_hop("fixed", 1, 1, origin, view, ["r", "s"], random.Random(0)) == ("r", "fixed")


@pytest.mark.parametrize("policy", ["balanced", "fixed"])
def test_a_replica_that_is_alone_and_came_after_the_step_began_is_used(policy: str) -> None:
    view = StepView("o", ("o",), ("o",), following=())
    assert next_hop(policy, 1, 1, Origin("o", 5, 1), view, ["late"], random.Random(0)) == ("late", "fallback")


@pytest.mark.parametrize(
    ("microbatches", "origins", "replicas", "expected"),
    [(2, 2, 1, 4), (2, 2, 2, 2), (2, 3, 2, 3), (1, 1, 4, 1), (2, 3, 4, 2), (2, 0, 4, 1)],
)
def test_the_target_is_the_even_share_rounded_up(microbatches: int, origins: int, replicas: int, expected: int) -> None:
    assert target(microbatches, origins, replicas) == expected
