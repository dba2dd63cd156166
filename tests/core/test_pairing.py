"""Pairing: `matched` is perfect, symmetric, and depends only on its arguments; `random` is uniform over the others."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.core.pairing import matching, partner, without_relay

peers = st.lists(st.text(alphabet="abcdef123", min_size=1, max_size=6), unique=True, max_size=12)
seeds = st.integers(min_value=0, max_value=2**63 - 1)


@given(seeds, st.integers(min_value=0, max_value=10**6), peers, st.randoms(use_true_random=False))
def test_matched_is_perfect_symmetric_and_argument_only(
    seed: int, round: int, members: list[str], rng: random.Random
) -> None:
    shuffled = rng.sample(members, len(members))
    found = {
        me: partner("matched", seed, round, shuffled if i % 2 else members, me, random.Random(i))
        for i, me in enumerate(members)
    }
    alone = [me for me, (other, _) in found.items() if other is None]
    assert len(alone) == len(members) % 2
    for me, (other, reason) in found.items():
        if other is None:
            assert reason == ("nobody" if len(members) == 1 else "odd")
        else:
            assert reason == "matched"
            assert other != me
            assert found[other][0] == me
    assert matching(seed, round, members + members) == matching(seed, round, shuffled)


def test_matched_leaves_the_generator_alone_and_adds_me() -> None:
    rng = random.Random(1)
    assert partner("matched", 1, 1, ["a"], "b", rng) == ("a", "matched")
    assert rng.random() == random.Random(1).random()


@pytest.mark.parametrize("count", [3, 5])
def test_every_replica_is_alone_about_equally_often(count: int) -> None:
    members = [f"peer-{i}" for i in range(count)]
    rounds = 3000
    alone: Counter[str] = Counter()
    pairs: Counter[tuple[str, str]] = Counter()
    for round in range(rounds):
        found = matching(5, round, members)
        alone.update(set(members) - set(found))
        pairs.update(pair for pair in found.items() if pair[0] < pair[1])
    assert sum(alone.values()) == rounds
    assert all(abs(alone[m] - rounds / count) < 0.12 * rounds / count for m in members)
    each = rounds * (count // 2) / (count * (count - 1) / 2)
    assert len(pairs) == count * (count - 1) // 2
    assert all(abs(times - each) < 0.15 * each for times in pairs.values())


def test_random_is_uniform_among_the_others() -> None:
    rng = random.Random(3)
    drawn = Counter(partner("random", 0, 0, ["d", "b", "a", "c"], "b", rng) for _ in range(3000))
    assert set(drawn) == {("a", "random"), ("c", "random"), ("d", "random")}
    assert all(abs(times - 1000) < 120 for times in drawn.values())
    assert partner("random", 0, 0, ["b"], "b", rng) == (None, "nobody")


def test_random_draws_from_the_sorted_ids_in_every_process() -> None:
    """The order of a set of strings differs from process to process."""
    others = [f"peer-{number}" for number in range(9)]
    expected = random.Random(5).choice(others), "random"
    assert partner("random", 0, 0, [*reversed(others), "me"], "me", random.Random(5)) == expected


@given(seeds, peers, st.data())
def test_two_hidden_replicas_meet_only_if_there_are_more_of_them_than_others(
    seed: int, members: list[str], data: st.DataObject
) -> None:
    hidden = set(data.draw(st.lists(st.sampled_from(members), unique=True) if members else st.just([])))
    found = matching(seed, 7, members, hidden)
    pairs = {frozenset(pair) for pair in found.items()}
    assert len(found) == 2 * len(pairs) == len(members) // 2 * 2
    assert all(found[other] == one for one, other in found.items())
    assert set(found) == set(matching(seed, 7, members)), "being hidden leaves nobody alone more often"
    kinds = Counter(len(pair & hidden) for pair in pairs)
    assert not (kinds[2] and kinds[0])


def test_the_hidden_meet_all_others_equally_often() -> None:
    members, rounds = [f"peer-{i}" for i in range(6)], 3000
    hidden = set(members[:2])
    pairs = Counter(pair for round in range(rounds) for pair in matching(5, round, members, hidden).items())
    assert pairs[members[0], members[1]] == 0
    assert all(abs(pairs[one, other] - rounds / 4) < 0.15 * rounds / 4 for one in hidden for other in members[2:])


def test_a_hidden_replica_draws_one_that_can_be_dialled_where_there_is_one() -> None:
    rng = random.Random(3)
    assert {partner("random", 0, 0, "abcd", "a", rng, {"a", "b"})[0] for _ in range(50)} == {"c", "d"}
    assert {partner("random", 0, 0, "abcd", "c", rng, {"a", "b"})[0] for _ in range(50)} == {"a", "b", "d"}
    assert without_relay(["b"], "a", {"a", "b"}) == ["b"]
