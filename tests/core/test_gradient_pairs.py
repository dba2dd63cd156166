"""Pairs of gradients for the same data (`core/gradient_pairs`): which are outliers, and which replica dissents."""

from collections import Counter
from itertools import combinations
from math import inf, sqrt
from random import Random

import pytest

from noloco_p2p.core.gradient_pairs import (
    CALM,
    COMPARED,
    EARLY,
    EARLY_PAIRS,
    REMEMBERED,
    SUSPICIOUS,
    SUSPICIOUS_PAIRS,
    GradientLikeness,
    GradientPairs,
)
from noloco_p2p.core.messages import MicrobatchId

SEEDS = range(30)


def likeness(a: list[float], b: list[float]) -> GradientLikeness:
    def product(x: list[float], y: list[float]) -> float:
        return sum(p * q for p, q in zip(x, y, strict=True))

    return GradientLikeness.of(product(a, a), product(b, b), product(a, b))


@pytest.mark.parametrize(
    ("other", "apart"),
    [
        ([3.0, 4.0], 0.0),
        ([-3.0, -4.0], sqrt(2)),
        ([4.0, -3.0], 1.0),
        ([0.0, 0.0], 1.0),
        ([3e9, 4e9], 1.0),
        ([6.0, 8.0], sqrt(1 / 5)),
        ([3e150, 4e150], 1.0),
    ],
)
def test_how_far_two_gradients_are_apart(other: list[float], apart: float) -> None:
    """The distance reflects direction and length, and does not depend on the order of the two."""
    assert likeness([3.0, 4.0], other).apart == pytest.approx(apart)
    assert likeness(other, [3.0, 4.0]).apart == pytest.approx(apart)


def test_two_zeros_are_equal() -> None:
    assert likeness([0.0], [0.0]) == ((0.0, 0.0), 0.0)
    assert likeness([0.0], [0.0]).apart == 0.0


def judged(replicas: int, liars: int, seed: int, pairs: int = 200, lies: float = 1.0) -> dict[str, int]:
    """The replicas that dissented, and after how many pairs; a liar returns the opposite with probability `lies`."""
    rng, audit, found = Random(seed), GradientPairs(seed), dict[str, int]()
    names = [f"p{at}" for at in range(replicas)]
    for number in range(pairs):
        one, other = rng.sample([name for name in names if name not in found], 2)
        wrong = [name in names[:liars] and rng.random() < lies for name in (one, other)]
        noise = abs(rng.gauss(0.25, 0.1))
        apart = sqrt(max(0.0, 2 - noise**2)) if wrong[0] != wrong[1] else noise
        if (dissenter := audit.observe((one,), (other,), apart)[1]) is not None:
            found[dissenter] = number + 1
    return found


@pytest.mark.parametrize(("replicas", "liars"), [(4, 1), (8, 1), (8, 2), (16, 3)])
def test_liars_are_found_and_nobody_else(replicas: int, liars: int) -> None:
    for seed in SEEDS:
        assert sorted(judged(replicas, liars, seed)) == [f"p{at}" for at in range(liars)], seed


def judged_routes(liar: str, seed: int, pairs: int = 400, *, framed: str | None = None) -> dict[str, int]:
    """As `judged`, over three stages of eight replicas, one of them `liar`. It may name `framed` as the replica that
    served it."""
    rng, audit, found = Random(seed), GradientPairs(seed), dict[str, int]()
    stages = [[f"{stage}{at}" for at in range(8)] for stage in "ab"]
    for number in range(pairs):
        routes = [rng.choice([name for name in names if name not in found]) for names in stages for _ in range(2)]
        one, other = (routes[0], routes[2]), (routes[1], routes[3])
        if one[0] == other[0]:
            continue
        noise = abs(rng.gauss(0.25, 0.1))
        apart = sqrt(max(0.0, 2 - noise**2)) if (liar in one) != (liar in other) else noise
        said, other_said = ((route[0], framed) if liar in route and framed else route for route in (one, other))
        if (dissenter := audit.observe(said, other_said, apart)[1]) is not None:
            found[dissenter] = number + 1
    return found


@pytest.mark.parametrize("liar", ["a3", "b3"])
def test_a_liar_is_found_at_any_stage_and_nobody_else(liar: str) -> None:
    after = [judged_routes(liar, seed) for seed in SEEDS]
    assert all(set(found) == {liar} for found in after)
    numbers = sorted(found[liar] for found in after)
    assert numbers[len(numbers) // 2] <= 30
    assert numbers[-1] <= 60


def test_a_liar_that_names_another_as_the_cause_is_blamed_alone() -> None:
    for seed in SEEDS:
        assert set(judged_routes("a3", seed, framed="b5")) == {"a3"}, seed


def test_one_replica_alone_cannot_get_a_later_one_blamed() -> None:
    """It names the replica after it, so it can attach one name to all its wrong answers, and be honest with others."""
    audit, others = GradientPairs(0), [(f"a{at}", f"b{at}") for at in range(8)]
    for one, other in combinations(others, 2):
        audit.observe(one, other, 0.1)
    for at in range(40):
        for further in (1, 2, 3):
            honest = others[at % 8], others[(at + further) % 8]
            assert audit.observe(("liar", honest[0][1]), honest[1], 0.1) == (False, None)
        assert audit.observe(("liar", "framed"), others[at % 8], sqrt(2)) == (True, None)


def test_the_pairs_of_a_replica_that_dissents_are_forgotten() -> None:
    """Otherwise its outliers would keep being held against those that it met, and all data be sent twice for long."""
    audit = GradientPairs(3)
    for one, other in combinations("abcdefgh", 2):
        audit.observe((one,), (other,), 0.1)
    for honest in "abcdefgh":
        if (found := audit.observe(("liar",), (honest,), sqrt(2))[1]) is not None:
            break
    assert found == "liar"
    ids = [MicrobatchId("me", 7, number) for number in range(20_000)]
    assert sum(map(audit.repeats, ids)) < 1.1 * EARLY * len(ids) < SUSPICIOUS * len(ids)


def test_only_the_pairs_of_a_replica_that_dissents_are_forgotten() -> None:
    """Those of another liar still count, so the next outlier shows it."""
    audit = GradientPairs(0)
    for one, other in combinations("abcdefgh", 2):
        audit.observe((one,), (other,), 0.1)
    for honest in "abc":
        assert audit.observe(("second",), (honest,), sqrt(2)) == (True, None)
    assert [audit.observe(("first",), (honest,), sqrt(2))[1] for honest in "defg"] == [None, None, None, "first"]
    assert audit.observe(("second",), ("d",), sqrt(2)) == (True, "second")


def test_a_replica_that_begins_to_lie_is_found_however_long_it_was_honest() -> None:
    """Only its last sixteen pairs count."""
    audit = GradientPairs(0)
    for one, other in list(combinations("abcdefgh", 2)) * 8:
        audit.observe((one,), (other,), 0.1)
    found = [audit.observe(("a",), (honest,), sqrt(2))[1] for honest in "bcdefghb"]
    assert found == [None] * 7 + ["a"]


def test_a_later_replica_is_blamed_if_three_before_it_named_it_and_not_if_two_did() -> None:
    for namers, blamed in ((2, None), (3, "liar")):
        audit, others = GradientPairs(0), [(f"a{at}", f"b{at}") for at in range(8)]
        for one, other in combinations(others, 2):
            audit.observe(one, other, 0.1)
        found = [audit.observe((f"a{at % namers}", "liar"), others[at + 3], sqrt(2))[1] for at in range(4)]
        assert found == [None, None, None, blamed]


def test_a_node_remembers_a_bounded_number_of_pairs() -> None:
    audit = GradientPairs(0)
    for one, other in list(combinations("abcdefghijkl", 2)) * 20:
        audit.observe((one,), (other,), 0.1)
    assert (len(audit._apart), len(audit._pairs)) == (COMPARED, REMEMBERED)
    for honest in "abcd":
        dissenter = audit.observe(("liar",), (honest,), sqrt(2))[1]
    assert dissenter == "liar"
    for one, other in list(combinations("abcdefghijkl", 2)) * 20:
        audit.observe((one,), (other,), 0.1)
    assert len(audit._pairs) == REMEMBERED, "also after some were forgotten"


def test_outliers_with_a_replica_that_agrees_with_nobody_do_not_make_outliers_usual() -> None:
    audit = GradientPairs(0)
    for one, other in combinations("abcdefgh", 2):
        audit.observe((one,), (other,), 0.1)
    for honest in "ab" * 20:
        assert audit.observe(("alone",), (honest,), sqrt(2)) == (True, None)
    assert [audit.observe(("liar",), (honest,), sqrt(2))[1] for honest in "cdef"] == [None, None, None, "liar"]


def test_a_pair_shows_nothing_where_one_replica_served_both_or_a_route_ends() -> None:
    """A liar in stage 2 agrees with itself, and one in stage 1 may leave out who served it."""
    audit, others = GradientPairs(0), [(f"a{at}", f"b{at}") for at in range(8)]
    for one, other in combinations(others, 2):
        audit.observe(one, other, 0.1)
    for at in range(40):
        assert audit.observe(("a0", "liar"), ("a1", "liar"), 0.1) == (False, None)
        assert audit.observe(("a0", "b0"), (f"a{1 + at % 7}",), sqrt(2) * (at % 16 == 0))[1] is None
    found = [audit.observe((f"a{at}", "liar"), others[at + 1], sqrt(2))[1] for at in range(4)]
    assert found == [None, None, None, "liar"]


def test_one_of_eight_is_found_after_some_twenty_pairs() -> None:
    after = sorted(judged(8, 1, seed)["p0"] for seed in SEEDS)
    assert after[len(after) // 2] <= 20
    assert after[-1] <= 45


def test_honest_replicas_never_dissent_from_one_another() -> None:
    for seed in SEEDS:
        assert judged(8, 0, seed, 2000) == {}


def test_nobody_is_blamed_for_outliers_with_fewer_than_three_others() -> None:
    """Two replicas that lie, to everybody or only to one, cannot get an honest third one set aside."""
    audit = GradientPairs(0)
    for _ in range(20):
        for liar in ("a", "b"):
            assert audit.observe((liar,), ("c",), 0.1) == (False, None)
            assert audit.observe(("honest",), (liar,), sqrt(2)) == (True, None)


def test_an_occasional_liar_is_not_found() -> None:
    """A known limit: a replica that lies in a tenth of its replies gets away with it."""
    assert not any("p0" in judged(8, 1, seed, lies=0.1) for seed in SEEDS)


def test_what_counts_as_an_outlier_grows_with_the_usual_distance() -> None:
    audit = GradientPairs(0)
    for one, other in list(combinations("abcdefgh", 2)):
        audit.observe((one,), (other,), 0.5)
    assert not audit.observe(("a",), ("b",), 1.4)[0]
    assert audit.observe(("a",), ("b",), inf)[0]


def test_one_in_a_hundred_is_sent_twice_and_more_at_first_and_after_an_outlier() -> None:
    ids = [MicrobatchId("me", 7, number) for number in range(20_000)]
    audit = GradientPairs(3)
    assert sum(map(audit.repeats, ids)) == pytest.approx(EARLY * len(ids), rel=0.1)
    for _ in range(EARLY_PAIRS):
        audit.observe(("a",), ("b",), 0.1)
    calm = [one for one in ids if audit.repeats(one)]
    assert len(calm) == pytest.approx(CALM * len(ids), rel=0.25)
    audit.observe(("a",), ("b",), sqrt(2))
    assert sum(map(audit.repeats, ids)) == pytest.approx(SUSPICIOUS * len(ids), rel=0.05)
    for _ in range(SUSPICIOUS_PAIRS):
        audit.observe(("a",), ("b",), 0.1)
    assert [one for one in ids if audit.repeats(one)] == calm


def test_which_data_is_sent_twice_depends_on_the_secret_and_the_id() -> None:
    ids = [MicrobatchId(peer, start, number) for peer in "ab" for start in (1, 2) for number in range(2000)]
    assert not any(map(GradientPairs(None).repeats, ids))
    drawn = {secret: [one for one in ids if GradientPairs(secret).repeats(one)] for secret in (1, 2)}
    assert drawn[1] == [one for one in ids if GradientPairs(1).repeats(one)] != drawn[2]
    assert len(Counter(one[:2] for one in drawn[1])) == 4
    assert len({one.counter for one in drawn[1]}) > len(drawn[1]) / 2
