"""Which peers count as proven, and how much time is lost on those that are not."""

import contextlib
import random
from collections import Counter

import pytest

from noloco_p2p.core.timeouts import FEWEST
from noloco_p2p.core.trials import SHARE, SHORTEST_SILENCES, SPARE_SILENCES, Trials
from noloco_p2p.errors import Busy, Declined, PeerError, Stalled, Unreachable, Violation

PATIENCE_S = 2.0


class Caller:
    """A node that calls peers. Each call takes some time."""

    def __init__(self) -> None:
        self.now, self.gone = 0.0, set[str]()
        self.trials = Trials(PATIENCE_S, lambda: self.now, lambda peer: peer not in self.gone)

    def call(self, peer: str, error: type[PeerError] | None = None, took_s: float = 0.0) -> float | None:
        """Returns how long the call may take."""
        with contextlib.suppress(PeerError), self.trials.call(peer) as longest_s:
            self.now += took_s
            if error is not None:
                raise error("no")
        return longest_s

    def among(self, peers: str, proven: bool = False, busy: str = "") -> str:
        return "".join(self.trials.among(list(peers), proven=proven, busy=busy))

    def waste(self) -> None:
        """Spend all the time that may be lost."""
        while self.among("sx") != "s":
            self.call("x", Unreachable, PATIENCE_S)


def test_a_peer_is_on_trial_until_it_serves_and_again_after_two_failures_in_a_row() -> None:
    caller = Caller()
    outcomes = (Busy, Declined, None, Unreachable, Busy, None, Stalled, Violation, None)
    found = []
    for outcome in outcomes:
        caller.call("a", outcome)
        found.append(caller.trials.on_trial("a"))
    assert found == [True, True, False, False, False, False, False, True, False]


def test_a_call_that_is_given_up_says_nothing() -> None:
    caller = Caller()
    with pytest.raises(KeyboardInterrupt), caller.trials.call("a"):
        raise KeyboardInterrupt
    assert caller.trials.on_trial("a")


def test_until_time_is_lost_everybody_is_chosen() -> None:
    """A swarm without faults is not slowed down, however many replicas are new."""
    caller, peers = Caller(), "abcdefgh"
    for peer in peers:
        assert caller.among(peers) == peers
        caller.call(peer, took_s=100.0)


def test_those_that_serve_are_chosen_once_time_has_been_lost_on_others() -> None:
    caller = Caller()
    caller.call("s")
    assert caller.among("asx") == "asx"
    assert caller.among("asx", proven=True) == "s"
    caller.waste()
    assert caller.among("asx") == "s"
    assert caller.among("ax") == "a", "if nobody is proven, those that failed least often"
    assert caller.among("ax", proven=True) == "a"
    assert caller.among("ax", busy="a") == "ax"
    assert caller.among("") == ""
    caller.now += 3600.0
    assert caller.among("asx") == "as"
    caller.call("a", took_s=5.0)
    assert caller.among("asx") == "asx"


def test_the_first_failure_of_a_peer_that_serves_is_not_charged_and_those_of_others_are_while_one_serves() -> None:
    caller = Caller()
    for peer in "sp":
        caller.call(peer)
    caller.call("p", Unreachable, 1000.0)
    assert caller.among("spx") == "spx"
    caller.call("p", Unreachable)
    assert caller.trials.on_trial("p")
    caller.call("p", Unreachable, SPARE_SILENCES * PATIENCE_S)
    assert caller.among("sx") == "sx", "it has served, so only a part of that counts"
    caller.call("y", Unreachable, SPARE_SILENCES * PATIENCE_S)
    assert caller.among("sx") == "s", "it never has, so all of that counts"


def test_the_time_that_may_be_lost_grows_with_the_time_and_not_with_the_calls() -> None:
    caller = Caller()
    caller.call("s")
    caller.call("x", Unreachable, 1000.0)
    assert {caller.among("sx") for _ in range(1000)} == {"s"}


def test_an_outage_of_the_node_itself_is_not_charged() -> None:
    """While it was cut off, all its calls failed. When the line was back, it used the first that served, and no other
    for minutes."""
    caller, peers = Caller(), "abcdef"
    for peer in peers:
        caller.call(peer)
    for _ in range(20):
        for peer in peers:
            caller.call(peer, Unreachable, 2 * PATIENCE_S)
    caller.call("a")
    assert caller.among(peers) == peers


def test_one_that_has_served_is_tried_before_others_that_failed() -> None:
    caller = Caller()
    for peer in "ps":
        caller.call(peer)
    for _ in range(5):
        caller.call("p", Unreachable)
    caller.call("x", Unreachable)
    assert caller.among("npsx") == "nps"


def test_a_trial_may_take_four_times_as_long_as_usual_and_longer_after_each_failure() -> None:
    caller = Caller()
    for _ in range(FEWEST):
        assert caller.call("s", took_s=10.0) is None
    outcomes = (Stalled, Busy, Stalled, None, Stalled, Stalled, Stalled)
    assert [caller.call("a", outcome) for outcome in outcomes] == [40.0, 80.0, 80.0, 160.0, 640.0, 640.0, 160.0]


def test_a_trial_may_always_take_several_times_the_patience() -> None:
    caller = Caller()
    for _ in range(FEWEST):
        with caller.trials.call("s", usual=False):
            caller.now += 1000.0
    assert caller.call("a") is None, "those were not usual calls"
    for _ in range(FEWEST):
        caller.call("s", took_s=0.1)
    assert caller.call("b") == SHORTEST_SILENCES * PATIENCE_S


def test_a_peer_may_fail_for_days() -> None:
    caller = Caller()
    for _ in range(FEWEST):
        caller.call("s", took_s=10.0)
    for _ in range(2000):
        longest_s = caller.call("a", Unreachable)
    assert longest_s == 40.0 * 2**16


def test_a_peer_that_has_failed_for_days_is_tried_again_although_newer_ones_have_failed_less_often() -> None:
    """Its owner has opened the port at last. Otherwise each of the others would first have to fail for as many days."""
    caller = Caller()
    caller.call("s")
    for _ in range(2000):
        caller.call("x", Unreachable)
    for _ in range(16):
        assert caller.among("sxn") == "sn"
        caller.call("n", Unreachable)
    assert caller.among("sxn") == "sxn"


def test_failures_of_calls_at_the_same_time_are_one() -> None:
    caller = Caller()
    caller.call("a")
    with contextlib.suppress(Unreachable), caller.trials.call("a"):
        caller.call("a", Unreachable)
        raise Unreachable("no")
    assert not caller.trials.on_trial("a")
    with contextlib.suppress(Unreachable), caller.trials.call("a"):
        caller.call("a", Unreachable)
        caller.call("a")
        raise Unreachable("no")
    caller.call("a", Unreachable)
    assert not caller.trials.on_trial("a"), "it has served since"


@pytest.mark.parametrize("seed", range(5))
def test_however_many_never_serve_they_cost_a_share_of_the_time(seed: int) -> None:
    """New ones come all the time, and each fails in its own time."""
    caller, rng, lost_s = Caller(), random.Random(seed), 0.0
    caller.call("s")
    while caller.now < 3600.0:
        names = ["s", *(f"x{int(caller.now / 60) + i}" for i in range(40))]
        peer = rng.choice(caller.trials.among(names))
        took_s = 0.5 if peer == "s" else rng.uniform(1.0, 20.0)
        caller.call(peer, None if peer == "s" else rng.choice([Unreachable, Stalled, Declined]), took_s)
        lost_s += took_s if peer != "s" else 0.0
    assert lost_s <= SHARE * caller.now + SPARE_SILENCES * PATIENCE_S + 20.0
    assert lost_s >= SHARE * caller.now / 2, "they are tried all the same"


def test_a_newcomer_is_found_among_many_that_have_failed() -> None:
    caller, rng = Caller(), random.Random(1)
    caller.call("s")
    names = ["s", *(f"x{i}" for i in range(40))]
    calls: Counter[str] = Counter()
    for second in range(8000):
        if second == 6000:
            names.append("newcomer")
        peer = rng.choice(caller.trials.among(names))
        calls[peer] += 1
        caller.call(peer, Unreachable if peer[0] == "x" else None, 2.0 if peer[0] == "x" else 1.0)
        if calls["newcomer"] == 1:
            assert second < 6250
            break
    assert calls["newcomer"] == 1


def test_nothing_is_kept_of_peers_that_are_not_listed_any_more() -> None:
    caller = Caller()
    for peer in "abc":
        caller.call(peer, Unreachable)
        caller.call(peer)
        caller.call(peer, Unreachable)
    caller.gone = {"a"}
    caller.call("x", Unreachable)
    assert caller.trials._failures.keys() == {"b", "c", "x"}
    assert caller.trials._served == {"b", "c"}
    caller.gone = {"a", "b"}
    caller.call("newcomer")
    assert caller.trials._failures.keys() == {"c", "x"}
    assert caller.trials._served == {"c", "newcomer"}
