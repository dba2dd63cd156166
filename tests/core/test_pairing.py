"""Pairing: perfect, symmetric, a function of its arguments only; random is uniform among the others."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.core.pairing import matching, partner

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
