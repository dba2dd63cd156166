"""Membership: states, peers that are set aside, peers that vanish, and the swarm's clock."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from noloco_p2p.core.members import READY, STATES, TRAINING, TRANSITIONS, Members, next_state
from noloco_p2p.core.messages import Advert, Origin

EVENTS = sorted({event for _, event in TRANSITIONS})


def advert(peer: str, stage: int = 1, state: str = "training", **more: object) -> Advert:
    return replace(Advert(peer, "run", stage, ("127.0.0.1:1",), state=state), **more)  # type: ignore[arg-type]


def read(members: Members, adverts: list[Advert], now: float) -> tuple[int, int]:
    """A reading at `now`; adverts without a time were announced at that moment."""
    return members.update([a if a.announced_at else replace(a, announced_at=now) for a in adverts], now=now)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(STATES, EVENTS)))
def test_every_state_and_event(state: str, event: str) -> None:
    legal = {
        "starting": {"made": "waiting", "drain": "draining"},
        "waiting": {"begin": "syncing", "drain": "draining"},
        "syncing": {"synced": "training", "drain": "draining"},
        "training": {"end": "finished", "pause": "paused", "stand still": "syncing", "drain": "draining"},
        "paused": {"resume": "training", "drain": "draining"},
        "finished": {"drain": "draining"},
        "draining": {"leave": "left", "move": "syncing"},
        "left": {},
    }
    if event in legal[state]:
        assert next_state(state, event) == legal[state][event]
    else:
        with pytest.raises(ValueError, match=f"{state}.*{event}"):
            next_state(state, event)


def test_an_empty_reading_removes_nobody_and_a_missing_peer_goes_once_its_advert_has_expired() -> None:
    members = Members("me", ttl_s=30)
    read(members, [advert("a"), advert("b"), advert("me")], now=0)
    read(members, [], now=1)
    read(members, [advert("me")], now=2)
    assert [a.peer_id for a in members.all()] == ["a", "b"]
    for now in (3, 4, 5, 30):
        read(members, [advert("b")], now=now)
        assert [a.peer_id for a in members.all()] == ["a", "b"], "its advert from second 0 lives for 30 s"
    read(members, [advert("b")], now=31)
    assert [a.peer_id for a in members.all()] == ["b"]


def test_a_single_reading_that_misses_somebody_with_an_expired_advert_is_not_believed() -> None:
    members = Members("me", ttl_s=30)
    read(members, [advert("a"), advert("b")], now=0)
    read(members, [advert("b")], now=40)
    assert [a.peer_id for a in members.all()] == ["a", "b"]
    read(members, [advert("b")], now=41)
    assert [a.peer_id for a in members.all()] == ["b"]


def test_only_successive_readings_that_miss_a_peer_count() -> None:
    members = Members("me", ttl_s=30)
    known = [advert("a", announced_at=1.0), advert("b", announced_at=1.0)]
    for now, found in ((1, known), (40, known[1:]), (41, known), (42, known[1:])):
        read(members, found, now=now)
        assert [one.peer_id for one in members.of_stage(1)] == ["a", "b"]
    read(members, known[1:], now=43)
    assert [one.peer_id for one in members.of_stage(1)] == ["b"]


def test_if_nothing_can_be_read_a_peer_is_believed_for_three_lives_of_an_advert() -> None:
    members = Members("me", ttl_s=30)
    read(members, [advert("a")], now=1)
    assert [(read(members, [], now=now), len(members)) for now in (90, 91, 92)] == [
        ((0, 0), 1),
        ((0, 0), 1),
        ((0, 1), 0),
    ]


def test_a_reading_counts_who_joined_and_left_and_keeps_peers_sorted() -> None:
    members = Members("me", ttl_s=30)
    assert read(members, [advert("c"), advert("me"), advert("a", 0)], now=1) == (2, 0)
    assert read(members, [advert("c", 0), advert("a", state="left"), advert("b"), advert("d")], now=2) == (2, 1)
    assert read(members, [advert("c"), advert("b", state="left"), advert("e", state="left")], now=3) == (0, 1)
    read(members, [advert("b")], now=4)
    for found in (members.all(), members.of_stage(1)):
        assert [one.peer_id for one in found] == ["b", "c", "d"]


@pytest.mark.parametrize("way", ["left", "moved"])
def test_a_peer_that_comes_back_or_moves_starts_with_a_clean_slate(way: str) -> None:
    members = Members("me", ttl_s=30)
    read(members, [advert("a", 0), advert("b")], now=0)
    for now in (1.0, 5.0):
        members.failed("a", now=now)
    members.heard(Origin("a", 8, 0), now=6.0)
    if way == "left":
        read(members, [advert("a", 0, "left"), advert("b")], now=7)
    read(members, [advert("a", 0 if way == "left" else 1, step=2.0), advert("b")], now=7)
    assert not members.is_aside("a", now=6.5)
    assert (members.step_of("a"), members.heard_at("a")) == (2.0, -math.inf)


@pytest.mark.parametrize(("stage", "state"), [(0, "left"), (0, "training"), (1, "left")])
def test_an_older_record_of_a_peer_that_has_moved_or_come_back_is_not_believed(stage: int, state: str) -> None:
    """Each stage has its own key in the DHT, so a search may find the peer only under the old one; or it finds only
    nodes that missed the newer record."""
    members, here = Members("me", ttl_s=30), advert("a", 1, "syncing", announced_at=2.0)
    read(members, [here, advert("b")], now=3)
    members.failed("a", now=3)
    read(members, [advert("a", stage, state, step=7.0, announced_at=1.0), advert("b")], now=4)
    assert members.get("a") == here
    assert members.is_aside("a", now=3.5)
    read(members, [advert("a", stage, "left", announced_at=5.0), advert("b")], now=5)
    assert members.get("a") is None


def test_a_peer_that_announces_that_it_left_is_gone_at_once() -> None:
    members = Members("me", ttl_s=30)
    read(members, [advert("a")], now=0)
    read(members, [advert("a", state="left")], now=1)
    assert members.all() == []


def test_an_older_advert_does_not_replace_a_newer_one() -> None:
    members = Members("me", 30)
    read(members, [advert("a", step=7.0)], now=10)
    read(members, [advert("a", step=3.0, announced_at=6.0)], now=11)
    assert members.all()[0].step == 7.0
    read(members, [advert("a", step=8.0, announced_at=10.0)], now=11)
    assert members.all()[0].step == 8.0, "of two from one moment the one that was read last counts"


def test_a_failing_peer_is_set_aside_for_a_growing_bounded_time() -> None:
    members = Members("me", 30)
    read(members, [advert("a"), advert("b")], now=0)
    members.answered("a")
    now, waits = 0.0, []
    for _ in range(9):
        members.failed("a", now=now)
        assert list(members.usable(1, now=now)) == ["b"]
        members.failed("a", now=now)  # the same outage, reported twice
        start = now
        while list(members.usable(1, now=now)) == ["b"]:
            now += 0.5
        waits.append(now - start)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    members.answered("a")
    members.failed("a", now=now)
    assert len(members.usable(1, now=now + 1)) == 2, "an answer forgives"


def test_when_all_are_set_aside_the_first_to_return_is_tried() -> None:
    members = Members("me", 30)
    read(members, [advert("a"), advert("b")], now=0)
    members.failed("b", now=0)
    members.failed("a", now=0.5)
    assert list(members.usable(1, now=0.6)) == ["b"]
    assert list(members.usable(1, now=0.6, without={"b"})) == ["a"]
    assert list(members.usable(2, now=0.6)) == [], "nobody is there"


def test_a_distrusted_peer_is_set_aside_for_an_hour_whatever_it_answers() -> None:
    members = Members("me", 30)
    read(members, [advert("a"), advert("b")], now=10)
    members.answered("b")
    members.distrust("a", now=10.0)
    members.failed("b", now=20.0)
    members.answered("a")
    assert [members.is_aside(peer, now=20.5) for peer in "ab"] == [True, True]
    assert list(members.usable(1, now=20.5)) == ["b"], "a stage whose replicas are all set aside is still called"
    assert {one.advert.peer_id: one.aside_s for one in members.seen(now=20.5)} == {"a": 3589.5, "b": 0.5}
    assert list(members.usable(1, now=22.0)) == ["b"]
    assert list(members.usable(1, now=3610.0)) == ["a", "b"]
    members.distrust("a", now=20.0, for_s=60.0)  # its replies still under way were not finite: a lesser offence
    assert members.distrusted(3609.0) == {"a": 3610.0}
    assert members.distrusted(3610.0) == {}


def test_clocks_take_the_newest_sign() -> None:
    members = Members("me", 30)
    read(members, [advert("a", stage=0, step=4.5, steps_per_s=2.0, announced_at=9.0)], now=10)
    assert members.clocks(members.of_stage(0, TRAINING), now=10) == [(4.5, 1.0, 2.0)]
    members.heard(Origin("a", 8, 0), now=12)
    assert members.clocks(members.of_stage(0, TRAINING), now=13) == [(8.0, 1.0, 2.0)]
    assert members.step_of("a") == 8
    members.heard(Origin("a", 6, 0), now=14)
    assert members.step_of("a") == 8, "a late label does not turn the clock back"
    assert members.clocks(members.of_stage(0, TRAINING), now=15) == [(8.0, 3.0, 2.0)], "nor does it make it newer"
    assert members.last_sign("a") == 14, "but it is a sign of life"
    members.heard(Origin("a", 8, 1), now=15)
    assert members.clocks(members.of_stage(0, TRAINING), now=16) == [(8.0, 1.0, 2.0)], "the same step at a later time"
    assert [members.heard_at("a"), members.last_sign("a")] == [15, 15]
    read(members, [advert("a", stage=0, step=7.5, steps_per_s=2.0, announced_at=17.0)], now=18)
    assert members.clocks(members.of_stage(0, TRAINING), now=18) == [(7.5, 1.0, 2.0)]
    members.heard(Origin("a", 6, 1), now=17.5)
    assert members.clocks(members.of_stage(0, TRAINING), now=18) == [(7.5, 1.0, 2.0)], "that label is late as well"
    assert members.last_sign("a") == 17.5
    assert [one.age_s for one in members.seen(now=16.5)] == [0.0], "clocks differ"
    assert members.clocks(members.of_stage(0, TRAINING), now=16.5) == [(7.5, 0.0, 2.0)]
    members.heard(Origin("nobody", 8, 0), now=18)
    assert (members.step_of("nobody"), members.last_sign("nobody")) == (None, None)
    assert members.heard_at("nobody") == -math.inf, "nothing is kept about strangers"


def test_a_clock_without_a_measured_speed_holds_nobody_back() -> None:
    members = Members("me", 30)
    read(members, [advert("a", stage=0, step=4.0), advert("b", stage=0, step=5.0, steps_per_s=1.0)], now=0)
    assert members.clocks(members.of_stage(0, TRAINING), now=3) == [(5.0, 3.0, 1.0)]


def test_an_origin_has_not_left_step_0_before_its_label_says_so() -> None:
    members = Members("me", 30)
    read(members, [advert("a", stage=0)], now=0)
    assert members.step_of("a") == 0
    members.heard(Origin("a", 0, 0), now=1)
    assert members.step_of("a") == 0


def used(members: Members, *, now: float) -> list[str]:
    return list(members.usable(1, now=now))


def test_a_hung_peer_that_answers_again_is_used_again_soon_after_its_time() -> None:
    members = Members("me", 30)
    read(members, [advert("a"), advert("b")], now=0)
    members.answered("a")
    for now in (0.0, 10.0, 20.0):
        members.failed("a", now=now)
    assert [members.is_aside("a", now=now) for now in (23.9, 24.0)] == [True, False]
    assert used(members, now=23.9) == ["b"]
    assert used(members, now=24.0) == ["a", "b"], "tried again when its time has ended, without being asked for"
    members.answered("a")
    members.failed("a", now=25.0)
    assert used(members, now=26.0) == ["a", "b"], "after an answer its time starts at a second again"


def test_a_failed_peer_that_has_changed_its_state_since_is_used_at_once() -> None:
    members = Members("me", 30)
    read(members, [advert("a", state="syncing"), advert("b")], now=0)
    members.answered("a")
    for now in (5.0, 10.0, 15.0, 20.0):
        members.failed("a", now=now)
    read(members, [advert("a", announced_at=20.0), advert("b")], now=20.5)
    assert used(members, now=20.5) == ["b"], "this advert is no newer than the last failure"
    read(members, [advert("a"), advert("b")], now=21)
    assert used(members, now=21) == ["b"], "its state is the same"
    read(members, [advert("a", state="waiting"), advert("b")], now=22)
    assert used(members, now=22) == ["a", "b"], "it has a new process"
    members.failed("a", now=23.0)
    assert used(members, now=24.0) == ["a", "b"], "which has failed once"


def test_a_stage_is_deserted_when_nobody_is_there_or_nobody_answers() -> None:
    members = Members("me", 30)
    read(members, [advert("a", 0), advert("b", 2), advert("c", 2), advert("d", 3, "starting")], now=0)
    assert members.deserted(4, 1) == [3], "a node without weights serves nobody yet"
    assert not members.anybody(3)
    read(members, [advert("a", 0), advert("b", 2), advert("c", 2), advert("d", 3, "waiting")], now=1)
    assert members.deserted(4, 1) == []
    for peer, now in (("b", 2.0), ("b", 4.0), ("c", 5.0)):
        members.failed(peer, now=now)
    assert members.deserted(4, 1) == [], "c has failed only once"
    members.failed("c", now=7.0)
    assert members.deserted(4, 1) == [2]
    assert members.anybody(2), "deserted until it answers, but worth a call"
    members.answered("b")
    assert members.deserted(4, 1) == []


def test_failures_of_a_stage_that_is_not_called_do_not_desert_it() -> None:
    members = Members("me", 30)
    read(members, [advert("a", 0), advert("b", 1), advert("c", 2)], now=0)
    for peer in ("a", "c"):
        members.failed(peer, now=1.0)
        members.failed(peer, now=5.0)
    assert members.deserted(3, 0) == []
    members.failed("b", now=1.0)
    members.failed("b", now=5.0)
    assert members.deserted(3, 0) == [1]


def test_the_furthest_clock_of_those_that_left_is_known() -> None:
    members = Members("me", ttl_s=30.0)
    read(members, [advert("a", 0, step=9.0), advert("b", 1, state="left", step=7.0)], now=0.0)
    assert members.left_at_step == 7.0
    read(members, [advert("a", 0, state="left", step=9.0)], now=1.0)
    read(members, [advert("c", 0, state="left", step=5.0)], now=2.0)
    assert members.left_at_step == 9.0


def test_a_peer_that_never_answered_stays_aside_until_it_does() -> None:
    members = Members("me", 30)
    members.update([advert("a", 1), advert("b", 1)], now=0)
    members.update([advert("a", 1), advert("b", 1), advert("new", 1)], now=0, doubts=True)
    assert used(members, now=0) == ["a", "b"], "who was there from the start counts until it fails"
    members.answered("a")
    for peer in "ab":
        members.failed(peer, now=0)
    assert members.doubted() == {"new"}, "others count in targets until there is time to ask them"
    assert members.to_meet(now=1) == {"b": 1, "new": 0}
    for peer in "ab":
        members.failed(peer, now=1)
    assert members.doubted() == {"b", "new"}
    assert used(members, now=50) == ["a"]
    assert [members.is_aside(peer, now=50) for peer in ("a", "b", "new")] == [False, True, True]
    assert [one.aside_s > 0 for one in members.seen(now=50)] == [False, True, True]
    later = [replace(advert(peer, 1, "syncing"), announced_at=60) for peer in ("b", "new")]
    members.update([advert("a", 1), *later], now=60)
    assert used(members, now=60) == ["a"], "an advert is no answer"
    members.answered("new")
    assert used(members, now=60) == ["a", "new"]
    members.failed("new", now=61)
    assert used(members, now=62) == ["a", "new"], "one that has answered comes back by itself"


def test_a_peer_that_answers_falsely_is_set_aside_and_not_doubted() -> None:
    members = Members("me", 30)
    members.update([advert("x"), advert("y")], now=0, doubts=True)
    for now in (0, 5):
        members.failed("x", now=now, answered=True)
    members.failed("nobody", now=0, answered=True)
    assert (members.doubted(), members.met) == ({"y"}, {"x"})
    assert [members.is_aside("x", now=now) for now in (5.5, 9)] == [True, False]


def test_doubted_peers_are_called_only_if_there_are_no_others() -> None:
    members = Members("me", 30)
    members.update([advert("x"), advert("y")], now=0, doubts=True)
    assert used(members, now=0) == ["x", "y"]
    members.failed("x", now=0)
    assert used(members, now=0.5) == ["y"]
    members.failed("y", now=0.6)
    assert used(members, now=0.7) == ["x"], "its time ends first"
    members.answered("y")
    members.failed("y", now=10)
    assert used(members, now=10.5) == ["y"], "it has failed just now, but it exists"
    assert list(members.usable(1, now=10.5, without={"y"})) == []


def test_those_that_failed_least_often_are_met_first() -> None:
    members = Members("me", 30)
    members.update([advert("x"), advert("y")], now=0, doubts=True)
    assert members.to_meet(now=0) == {"x": 0, "y": 0}
    members.failed("x", now=0)
    assert members.to_meet(now=0.5) == {"y": 0}
    assert members.to_meet(now=1.0) == {"x": 1, "y": 0}
    members.answered("y")
    members.failed("y", now=2.0)
    assert members.to_meet(now=9.0) == {"x": 1}, "it needs no answer to come back"
    for now in range(10, 500, 70):
        members.failed("x", now=now)
    assert members.to_meet(now=450) == {}
    members.update([advert("x", state="syncing", announced_at=450), advert("y")], now=451)
    assert list(members.to_meet(now=451)) == ["x"], "a new process is asked at once"


@pytest.mark.parametrize("way", ["left", "moved"])
def test_a_peer_that_comes_back_after_it_left_or_moved_has_to_answer_anew(way: str) -> None:
    members = Members("me", 30)
    read(members, [advert("a"), advert("b")], now=0)
    members.answered("a")
    members.answered("nobody")
    if way == "left":
        read(members, [advert("a", state="left"), advert("b")], now=1)
        members.answered("a")
    assert members.met == ({"a"} if way == "moved" else set()), "nothing is kept about peers that are not listed"
    back = advert("a", 1 if way == "left" else 0)
    members.update([replace(back, announced_at=2), advert("b")], now=2, doubts=True)
    assert members.doubted() == {"a"}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_peers_announce_and_do_nothing_is_kept_about_those_that_are_not_listed(seed: int) -> None:
    rng, members, peers = random.Random(seed), Members("me", 5), ["me", *"abcdefgh"]
    for now in range(200):
        peer = rng.choice(peers)
        some = rng.sample(peers, rng.randrange(5))
        adverts = [advert(p, rng.randrange(2), rng.choice(STATES), announced_at=now - rng.random()) for p in some]
        members.update(adverts, now=now, doubts=rng.random() < 0.5)
        if rng.random() < 0.5:
            members.answered(peer)
        else:
            members.failed(peer, now=now)
        listed = {one.peer_id for one in members.all()}
        assert listed >= members.met | members.doubted() | members.to_meet(now=now).keys()
        ready, without = {one.peer_id for one in members.of_stage(1, READY)}, set(rng.sample(peers, 2))
        assert ready - without >= {*members.usable(1, now=now, without=without)}
        assert bool(ready) == bool(members.usable(1, now=now)), "a stage with replicas is called"
        assert {one.advert.peer_id for one in members.seen(now=now) if one.aside_s > 0} >= members.doubted()
