"""Guardians depend only on the set of nodes, change little as nodes come and go, and are never of their ward."""

import random
from dataclasses import replace

import pytest

from noloco_p2p.core.guardians import GUARDIANS, guardians_of, holders
from noloco_p2p.core.members import HOLDING, STATES
from noloco_p2p.core.messages import Advert, Holding


def advert(peer: str, stage: int, state: str = "training", *holds: Holding) -> Advert:
    return Advert(peer, "run", stage, ("127.0.0.1:1",), state=state, holds=holds)


def swarm(seed: int, stages: int = 3) -> list[Advert]:
    """Stage 0 has one or two replicas, the other stages some nodes in any state; one node has no stage yet."""
    rng = random.Random(seed)
    ward = [advert(f"w{i}", 0) for i in range(rng.choice([1, 2]))]
    others = [
        advert(f"p{rng.getrandbits(32):x}", rng.randrange(1, stages), rng.choice(STATES))
        for _ in range(rng.randrange(12))
    ]
    return [*ward, *others, advert("new", -1, "training")]


@pytest.mark.parametrize("seed", range(60))
def test_guardians_are_a_function_of_the_set_and_never_of_the_stage_itself(seed: int) -> None:
    adverts = swarm(seed)
    found = guardians_of(0, adverts, 7)
    shuffled = random.Random(seed).sample(adverts, len(adverts))
    assert guardians_of(0, shuffled, 7) == found
    able = [a.peer_id for a in adverts if a.stage > 0 and a.state in HOLDING]
    assert set(found) <= set(able), "a node of another stage that has trained weights"
    assert len(found) == min(GUARDIANS, len(able)) == len(set(found))


def test_stages_and_runs_have_guardians_of_their_own() -> None:
    adverts = [advert("w", 0), advert("x", 1), *(advert(f"p{i}", 2) for i in range(30))]
    assert len({guardians_of(stage, adverts, seed) for stage in (0, 1) for seed in range(10)}) > 15


def test_a_node_that_comes_or_goes_changes_no_other_guardian() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        adverts = [advert("w", 0), *(advert(f"p{rng.getrandbits(32):x}", 1) for _ in range(rng.randrange(1, 9)))]
        before = guardians_of(0, adverts, seed)
        gone = rng.choice(adverts[1:])
        without = guardians_of(0, [a for a in adverts if a is not gone], seed)
        assert set(before) - {gone.peer_id} <= set(without), "a guardian that stays keeps guarding"
        if gone.peer_id not in before:
            assert without == before
        newcomer = advert("newcomer", 1)
        later = guardians_of(0, [*adverts, newcomer], seed)
        assert set(later) <= {*before, "newcomer"}
        assert tuple(p for p in later if p != "newcomer") == before[: len(later) - ("newcomer" in later)]


def test_every_candidate_guards_about_equally_often() -> None:
    adverts = [advert("w", 0), *(advert(p, 1) for p in "abcde")]
    counts = dict.fromkeys("abcde", 0)
    for seed in range(500):
        for peer in guardians_of(0, adverts, seed):
            counts[peer] += 1
    assert all(150 < n < 250 for n in counts.values()), counts


def test_the_holders_of_the_weights_that_have_been_trained_most_come_first() -> None:
    a = advert("a", 1, "training", Holding(0, 4, 16), Holding(2, 9, 36), Holding(0, 7, 28, 5))
    b = advert("b", 1, "training", Holding(0, 5, 20))
    c = advert("c", 2, "waiting", Holding(0, 5, 21), Holding(0, 3, 12))
    d = advert("d", 2, "training", Holding(0, 5, 20))
    expected = [("c", 5, 21), ("b", 5, 20), ("d", 5, 20), ("a", 4, 16), ("c", 3, 12), ("a", 7, 28)]
    assert [(who.peer_id, h.round, h.step) for who, h in holders(0, [d, c, b, a])] == expected
    assert holders(1, [a, b, c, replace(d, holds=())]) == []
