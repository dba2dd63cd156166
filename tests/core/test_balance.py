"""Balance: newcomers raise the slowest stage; moves during training never lower it, and come to an end."""

import random
from dataclasses import replace
from math import inf, nan

import pytest
from soak import soak

from noloco_p2p.core.balance import (
    MIN_ROUNDS,
    HoldUp,
    StageCapacities,
    capacities,
    choose_move,
    choose_stage,
    expected,
    may_move,
    others_left,
)
from noloco_p2p.core.messages import Advert


def advert(peer: str, stage: int = 1, state: str = "training", **more: object) -> Advert:
    return replace(Advert(peer, "run", stage, ("127.0.0.1:1",), state=state), **more)  # type: ignore[arg-type]


def trainers(*stages: str) -> list[Advert]:
    """A training node for each letter, on the stage with the index of its word, at 1 microbatch per second."""
    return [
        advert(peer, stage, microbatches_per_s=1.0, settled=True) for stage, word in enumerate(stages) for peer in word
    ]


def without(adverts: list[Advert], peer: str) -> tuple[Advert, list[Advert]]:
    me = next(a for a in adverts if a.peer_id == peer)
    return me, [a for a in adverts if a.peer_id != peer]


# --- newcomers ------------------------------------------------------------------------------------------------------


def settle(adverts: list[Advert], stages: int, views: random.Random | None = None) -> list[Advert]:
    """All nodes choose by the same rule, one after the other or on outdated views, until nobody moves."""
    seen = {a.peer_id: a for a in adverts}
    for _ in range(50):
        base = dict(seen) if views is None or views.random() < 0.5 else None
        moved = False
        for me in list(seen.values()):
            others = [a for a in (base or seen).values() if a.peer_id != me.peer_id]
            stage = choose_stage(me, others, stages)
            if stage != me.stage and not me.settled:
                seen[me.peer_id] = replace(me, stage=stage)
                moved = True
        if not moved:
            break
    else:
        pytest.fail("they never agree")
    return list(seen.values())


def counts(adverts: list[Advert], stages: int) -> list[int]:
    return [sum(a.stage == stage for a in adverts) for stage in range(stages)]


@pytest.mark.parametrize(("nodes", "stages"), [(4, 2), (7, 3), (2, 2), (9, 4), (1, 3)])
def test_simultaneous_joiners_end_even(nodes: int, stages: int) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        start = [advert(f"p{rng.random()}", rng.randrange(stages), "starting") for _ in range(nodes)]
        ended = counts(settle(start, stages, rng), stages)
        assert max(ended) - min(ended) <= 1, (seed, ended)


def test_settled_nodes_stay_and_the_others_make_room() -> None:
    start = [advert(p, 0, "starting", settled=p < "c") for p in "abcd"]
    assert counts(settle(start, 2), 2) == [2, 2]
    assert choose_stage(advert("x", -1, "starting"), start, 2) == 1
    assert choose_stage(start[0], start[1:], 2) == 0


def test_newcomers_spread_at_once_the_largest_ids_first() -> None:
    """Those that work nowhere yet, or not now, are no part of it."""
    start = [advert(p, 0, "starting") for p in "abcd"]
    assert [choose_stage(*without(start, p), 3) for p in "abcd"] == [0, 0, 2, 1]
    for other in (advert("z", -1, "starting"), advert("z", 1, "paused"), advert("z", 2, "starting")):
        assert choose_stage(advert("b", 1, "starting"), [advert("a", 1, "starting"), other], 2) == 0


@pytest.mark.parametrize(
    ("stages", "speeds", "chosen"),
    [("00200", "11111", "00211"), ("202120", "122112", "202101"), ("3022233", "2211222", "3022011")],
)
def test_of_stages_that_have_become_equal_the_one_with_the_fewest_replicas_gets_the_next(
    stages: str, speeds: str, chosen: str
) -> None:
    """One digit for each node."""
    start = [
        advert(str(at), int(stage), "starting", microbatches_per_s=float(speed))
        for at, (stage, speed) in enumerate(zip(stages, speeds, strict=True))
    ]
    found = [choose_stage(*without(start, one.peer_id), max(map(int, stages)) + 1) for one in start]
    assert "".join(map(str, found)) == chosen


def test_a_newcomer_takes_the_slowest_stage_not_the_smallest() -> None:
    fast = advert("a", 0, microbatches_per_s=9.0, settled=True)
    slow = [advert(p, 1, microbatches_per_s=2.0, settled=True) for p in "bcd"]
    new = advert("x", -1, "starting")
    assert choose_stage(new, [fast, *slow], 2) == 1
    assert choose_stage(new, [fast, *slow], 3) == 2, "an empty stage comes first"
    assert choose_stage(replace(new, stage=1), [fast, *slow], 2) == 1, "and stays there"
    unmeasured = replace(fast, microbatches_per_s=0.0)
    assert choose_stage(new, [unmeasured, *slow], 2) == 0, (
        "a node that has not measured counts as the mean of those that have"
    )
    claims = replace(fast, microbatches_per_s=float("inf"))
    assert choose_stage(new, [claims, *slow], 2) == 0, "a speed that is not a finite number does not count"
    pausing = [replace(fast, state="paused"), *slow]
    assert choose_stage(new, pausing, 2) == 0, "a paused replica does nothing for its stage"


def test_ties_go_to_the_fewest_replicas_then_to_the_first_stage() -> None:
    new = advert("x", -1, "starting")
    one, two = advert("a", 1, microbatches_per_s=4.0), [advert(p, 0, microbatches_per_s=2.0) for p in "bc"]
    assert choose_stage(new, [one, *two], 2) == 1
    assert choose_stage(new, trainers("a", "b"), 2) == 0


def test_capacities_are_the_same_in_every_python() -> None:
    slow = [replace(one, microbatches_per_s=0.1) for one in trainers("abcdefghij")]
    assert capacities(slow, 1).of_stage == (0.9999999999999999,), "one tenth after the other"


def test_only_those_that_work_at_a_stage_count() -> None:
    fast = [advert("p", 1, "paused"), advert("q", -1, "starting"), advert("r", 2)]
    found = capacities([*trainers("ab", "x"), *(replace(one, microbatches_per_s=9.0) for one in fast)], 2)
    assert found == StageCapacities((2.0, 1.0), (2, 1), (1.0, 1.0))


def test_a_replica_without_a_speed_counts_as_the_mean_of_its_stage_else_of_all() -> None:
    speeds = {"a": 2.0, "b": 4.0, "c": inf, "x": 12.0, "z": nan}
    nodes = [replace(one, microbatches_per_s=speeds[one.peer_id]) for one in trainers("abc", "x", "z", "")]
    nodes += [advert(str(stage), stage, microbatches_per_s=99.0) for stage in (-1, 4)]  # no such stages
    assert capacities(nodes, 4) == StageCapacities((9.0, 12.0, 6.0, 0.0), (3, 1, 1, 0), (3.0, 12.0, 6.0, 6.0))


def test_nobody_moves_for_the_rounding_of_a_sum() -> None:
    nodes = [advert(peer, peer in "xy", "starting", microbatches_per_s=1.3) for peer in "abcxy"]
    now = capacities(nodes, 2)
    assert now.of_stage[0] - now.one_more[0] > now.of_stage[1]
    assert [choose_stage(*without(nodes, peer), 2) for peer in "abcxy"] == [0, 0, 0, 1, 1]


def test_capacities_do_not_depend_on_the_order_of_nodes() -> None:
    """Each node lists itself last."""
    nodes = [
        replace(one, microbatches_per_s=speed) for one, speed in zip(trainers("abc"), (0.1, 0.2, 0.3), strict=True)
    ]
    assert 0.1 + 0.2 + 0.3 != 0.3 + 0.2 + 0.1
    assert capacities(nodes, 1) == capacities(nodes[::-1], 1)


def test_newcomers_to_a_run_under_way_raise_its_slowest_stage() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        stages = rng.randrange(2, 5)
        working = [
            advert(f"w{i}", i % stages, settled=True, microbatches_per_s=rng.uniform(1, 8))
            for i in range(rng.randrange(stages, 12))
        ]
        new = [advert(f"n{i}", -1, "starting") for i in range(rng.randrange(1, 6))]
        placed: list[Advert] = []
        for one in new:  # all of them choose before any has been seen by another: the worst case
            placed.append(replace(one, stage=choose_stage(one, working, stages)))
        before = capacities(working, stages)
        ended = settle([*working, *placed], stages, rng)
        after = capacities(ended, stages)
        assert min(after.of_stage) >= min(before.of_stage), seed
        for one in ended:
            left = after.of_stage[one.stage] - after.one_more[one.stage]
            assert one.settled or left <= min(after.of_stage) + 1e-6, f"seed {seed}: one more move would help"


# --- moves ----------------------------------------------------------------------------------------------------------


def test_one_node_of_the_strong_stage_moves_to_the_slow_one() -> None:
    adverts = trainers("dcba", "x")
    assert [a.peer_id for a in adverts if choose_move(*without(adverts, a.peer_id), 2)[0] == 1] == ["a"]
    target, reason = choose_move(*without(adverts, "a"), 2)
    assert (target, reason) == (1, "stage 1 can do 1 microbatches/s, mine 4")


def test_a_stage_does_not_spare_the_replica_without_which_it_would_be_the_slowest() -> None:
    speeds = {"a": 4.0, "b": 1.0, "c": 1.0, "x": 2.0}
    adverts = [replace(a, microbatches_per_s=speeds[a.peer_id]) for a in trainers("abc", "x")]
    assert [a.peer_id for a in adverts if choose_move(*without(adverts, a.peer_id), 2)[0] == 1] == ["b"]


def test_a_stage_is_idle_if_most_of_the_stage_before_say_so_whatever_doubted_peers_say() -> None:
    adverts = [replace(a, unserved=a.peer_id in "ac") for a in trainers("abcd", "x")]
    idle = HoldUp("x", "idle")
    assert [idle in HoldUp.among(adverts, doubted) for doubted in ("", "b", "ab", "acd", "bd")] == [
        False, True, False, False, True
    ]  # fmt: skip


def test_what_holds_up_moves() -> None:
    adverts = [*trainers("ab"), advert("c", 0, moving_to=1), advert("d", 0, "finished"), advert("e", 1, "paused")]
    away = [advert(state, 1, state) for state in ("starting", "waiting", "syncing", "draining")]
    found = {HoldUp(one.peer_id, "away") for one in away} | {HoldUp("c", "moves"), HoldUp("c", "unmeasured")}
    assert HoldUp.among([*adverts, *away]) == found


@pytest.mark.parametrize(
    ("why", "speed", "counts", "stays"),
    [
        ("away", 1.0, False, False),
        ("idle", 1.0, False, False),
        ("moves", 1.0, True, True),
        ("moves", 0.0, True, True),
        ("unmeasured", 1.0, True, True),
        ("unmeasured", 0.0, True, False),
    ],
)
def test_little_is_expected_of_one_that_has_held_up_moves_for_too_long(
    why: str, speed: float, counts: bool, stays: bool
) -> None:
    other, late = advert("x", moving_to=0), advert("y", moving_to=0)
    after = [replace(late, moving_to=None, stays=True) if stays else late] if counts else []
    assert expected(advert("me", microbatches_per_s=speed), [other, late], {HoldUp("y", why)}) == [other, *after]


def test_nobody_waits_any_longer_for_a_speed_or_to_be_spared_once_that_has_lasted_too_long() -> None:
    slow = [replace(a, microbatches_per_s=0.1) for a in trainers("abcd", "x")]
    me, others = without([*slow, advert("z", 1)], "a")
    assert choose_move(me, others, 2) == (None, "not every node has measured its speed")
    assert choose_move(me, others, 2, overdue={HoldUp("z", "unmeasured")})[0] == 1
    found = choose_move(replace(me, moving_to=1), others[:-1], 2, overdue={HoldUp("a", "moves")})
    assert found == (None, "the replicas of this stage have not answered for too long")


def test_one_that_stays_leaves_the_move_to_another() -> None:
    adverts = [replace(a, stays=a.peer_id in "ab") for a in trainers("dcba", "x")]
    assert [a.peer_id for a in adverts if choose_move(*without(adverts, a.peer_id), 2)[0] == 1] == ["c"]
    everybody = [replace(a, stays=True) for a in adverts]
    assert choose_move(*without(everybody, "a"), 2) == (None, "no node can be spared")


@pytest.mark.parametrize(("stages", "why"), [
    (("abc", "x", ""), "an empty stage is the slowest"),
    (("abcd", "xy", ""), "of four that can be spared the lowest id"),
    (("ab", "x", ""), "one left behind is enough: without it the swarm stands still"),
])  # fmt: skip
def test_a_deserted_stage_is_taken(stages: tuple[str, ...], why: str) -> None:
    adverts = trainers(*stages)
    assert choose_move(*without(adverts, "a"), 3)[0] == 2, why
    for speed in (0.0, inf):
        idle = [replace(a, microbatches_per_s=speed) for a in adverts]
        assert choose_move(*without(idle, "a"), 3)[0] == 2, "nobody can measure while a stage is missing"
    assert choose_move(*without(adverts, "a"), 3, rounds_left=0.1)[0] == 2, "the run cannot end without it"


def test_nobody_leaves_a_single_other_for_a_stage_that_is_only_paused() -> None:
    adverts = [*trainers("ab"), advert("x", 1, "paused")]
    assert choose_move(*without(adverts, "a"), 2) == (None, "no node can be spared")


def test_only_others_that_train_are_left_behind() -> None:
    adverts = [replace(a, state="waiting") if a.peer_id in "bcd" else a for a in trainers("abcd", "x")]
    assert choose_move(*without(adverts, "a"), 2) == (None, "no node can be spared")


@pytest.mark.parametrize(("stages", "reason"), [
    (("a", ""), "no node can be spared"),
    (("ab", "x"), "no node can be spared"),
    (("abc", "xy"), "no node can be spared"),
    (("abc", "xyz"), "no node can be spared"),
    (("abcdefghi", "uvwxyz"), "no node can be spared"),
])  # fmt: skip
def test_nobody_leaves_fewer_than_two_others_or_gains_less_than_a_fifth(stages: tuple[str, ...], reason: str) -> None:
    adverts = trainers(*stages)
    for one in adverts:
        assert choose_move(*without(adverts, one.peer_id), len(stages)) == (None, reason)


BUSY: dict[str, tuple[Advert, str]] = {
    "announces": (advert("z", 0, microbatches_per_s=1.0, moving_to=1), "another node moves"),
    "syncing": (advert("z", 0, "syncing"), "another node is on its way"),
    "draining": (advert("z", 0, "draining"), "another node is on its way"),
    "has not settled": (advert("z", 0, "starting"), "another node is on its way"),
    "waits to join the slow stage": (advert("z", 1, "waiting", settled=True), "another node is on its way"),
    "makes weights of the slow stage": (advert("z", 1, "starting", settled=True), "another node is on its way"),
    "has just begun": (advert("z", 1), "not every node has measured its speed"),
    "has finished": (advert("z", 0, "finished"), "the run is near its end"),
}


@pytest.mark.parametrize("what", BUSY)
def test_nobody_moves_while_another_node(what: str) -> None:
    other, reason = BUSY[what]
    adverts = [*trainers("abcd", "x"), other]
    for peer in "abcdx":
        assert choose_move(*without(adverts, peer), 2) == (None, reason)


@pytest.mark.parametrize(
    "other",
    [advert("z", 0, "starting", settled=True), advert("z", 0, "waiting"), advert("0", 2, microbatches_per_s=9.0)],
    ids=["makes weights of the strong stage", "waits to join the strong stage", "trains a stage that does not exist"],
)
def test_the_move_goes_on_while_another_node(other: Advert) -> None:
    assert choose_move(*without([*trainers("abcd", "x"), other], "a"), 2)[0] == 1


def test_nobody_moves_near_the_end_or_while_it_does_not_train() -> None:
    adverts = trainers("abcd", "x")
    me, others = without(adverts, "a")
    assert choose_move(me, others, 2, MIN_ROUNDS)[0] == 1
    assert choose_move(me, others, 2, MIN_ROUNDS - 0.1) == (None, "the run is near its end")
    assert choose_move(replace(me, state="paused"), others, 2) == (None, "not training, or nowhere to move")


def test_of_several_announcers_the_lowest_goes_and_the_others_give_way() -> None:
    swarm = [replace(a, stays=a.peer_id == "a") for a in trainers("abcdefg", "x")]
    adverts = [replace(a, moving_to=1) if a.peer_id in "bdf" else a for a in swarm]
    assert [peer for peer in "bdf" if may_move(*without(adverts, peer))] == ["b"]
    assert choose_move(*without(adverts, "b"), 2)[0] == 1, "a node that has announced a move keeps to it"
    for peer in "cdf":
        assert choose_move(*without(adverts, peer), 2) == (None, "another node moves")


def drawn(seed: int) -> tuple[list[Advert], int, dict[tuple[str, int], float]]:
    """A training swarm, its stages, and the fixed speed of every node at every stage."""
    rng = random.Random(seed)
    stages = rng.randrange(2, 6)
    cost = [rng.choice([1.0, rng.uniform(0.5, 4)]) for _ in range(stages)]
    names = [f"p{rng.getrandbits(32):08x}" for _ in range(rng.randrange(1, 25))]
    power = {name: rng.choice([1.0, rng.uniform(0.1, 8)]) for name in names}
    speeds = {(name, s): power[name] / cost[s] * rng.uniform(0.7, 1.4) for name in names for s in range(stages)}
    places = [rng.choice([0, rng.randrange(stages)]) for _ in names]
    return [advert(n, s, microbatches_per_s=speeds[n, s]) for n, s in zip(names, places, strict=True)], stages, speeds


@pytest.mark.parametrize("block", [*range(0, 200, 50), *soak(range(200, 400, 50))])
def test_moves_end_and_the_slowest_stage_never_gets_slower(block: int) -> None:
    moved = 0
    for seed in range(block, block + 50):
        adverts, stages, speeds = drawn(seed)
        for _ in range(200):
            wanting = [a for a in adverts if choose_move(*without(adverts, a.peer_id), stages)[0] is not None]
            assert len(wanting) <= 1, f"seed {seed}: {wanting} move at once"
            if not wanting:
                break
            mover = wanting[0]
            target = choose_move(*without(adverts, mover.peer_id), stages)[0]
            assert target is not None
            before, left = min(capacities(adverts, stages).of_stage), others_left(adverts, target)
            arrived = replace(mover, stage=target, microbatches_per_s=speeds[mover.peer_id, target])
            adverts = [arrived if a is mover else a for a in adverts]
            assert sum(a.stage == mover.stage for a in adverts) >= left, f"seed {seed}"
            assert min(capacities(adverts, stages).of_stage) >= before, f"seed {seed}"
            moved += 1
        else:
            pytest.fail(f"seed {seed}: they move for ever")
    assert moved > 20, "these swarms should have been out of balance"
