"""What peers have answered about themselves: how long it counts, and what an advert alone does not prove."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from noloco_p2p.core.exchanges import LIFETIMES, PROBES, Exchanges, sample
from noloco_p2p.core.messages import Advert, NodeDescription

TTL_S = 30.0
VALID_S = LIFETIMES * TTL_S
ANN = Advert("ann", "run", 1, ("h:1",), state="training", announced_at=5.0)
SAID = NodeDescription("ann", "run", 1, "training", 3.0, 1, "")


def asked(*outcomes: tuple[float, NodeDescription | None]) -> Exchanges:
    """Ann has been asked at these times, with these outcomes."""
    exchanges = Exchanges(TTL_S)
    for at, said in outcomes:
        exchanges.note("ann", said, now=at)
    return exchanges


@pytest.mark.parametrize(
    ("outcomes", "now", "said"),
    [
        ((), 10.0, None),
        (((10.0, SAID),), 10.0 + VALID_S, SAID),
        (((10.0, SAID),), 10.1 + VALID_S, None),
        (((10.0, SAID), (20.0, None)), 20.0, None),
        (((10.0, None), (20.0, SAID)), 20.0, SAID),
    ],
)
def test_the_newest_answer_counts_for_two_lifetimes(
    outcomes: tuple[tuple[float, NodeDescription | None], ...], now: float, said: NodeDescription | None
) -> None:
    exchanges = asked(*outcomes)
    assert exchanges.said("ann", now=now) == said
    assert exchanges.proven([ANN], {"training", "paused"}, now=now) == ([ANN] if said else [])


def test_an_advert_of_another_stage_or_state_than_the_answer_proves_nothing() -> None:
    exchanges = asked((10.0, SAID))
    others = [replace(ANN, peer_id="bob"), replace(ANN, stage=2)]
    assert exchanges.proven([*others, ANN], {"training"}, now=10.0) == [ANN]
    assert exchanges.proven([ANN], {"paused"}, now=10.0) == []


def test_a_peer_is_silent_from_the_first_question_that_it_did_not_answer() -> None:
    exchanges = asked((10.0, SAID), (20.0, None), (30.0, None))
    assert exchanges.silent_s("bob", now=30.0) == 0.0, "it was not asked"
    assert exchanges.silent_s("ann", now=32.0) == 12.0
    assert exchanges.silent_s("ann", now=32.0, since=25.0) == 7.0
    assert exchanges.silent_s("ann", now=32.0, since=31.0) == 0.0, "it was not asked since"
    assert exchanges.silent_s("ann", now=30.0 + VALID_S) > 0.0
    assert exchanges.silent_s("ann", now=30.1 + VALID_S) == 0.0, "too long ago"
    assert asked((20.0, None)).silent_s("ann", now=20.0) > 0.0, "from this moment on"
    assert asked((20.0, None), (30.0, SAID)).silent_s("ann", now=32.0) == 0.0
    assert asked((20.0, None), (30.0, SAID), (40.0, None)).silent_s("ann", now=42.0) == 2.0


def test_a_peer_is_asked_again_after_half_of_that_time_or_when_it_announces_something_else() -> None:
    exchanges, bob = asked((10.0, SAID)), replace(ANN, peer_id="bob")
    half = 10.0 + VALID_S / 2
    assert exchanges.unknown([ANN, bob], now=half) == [bob]
    assert exchanges.unknown([ANN], now=half + 0.1) == [ANN]
    for announced_at, again in ((9.0, False), (11.0, True)):
        for other in (replace(ANN, stage=2), replace(ANN, state="paused")):
            moved = replace(other, announced_at=announced_at)
            assert exchanges.unknown([moved], now=12.0) == ([moved] if again else [])
            assert exchanges.unknown([moved], now=12.0, since=10.0) == [], "whatever it says now"
    assert exchanges.unknown([replace(ANN, announced_at=11.0)], now=12.0) == []
    assert exchanges.unknown([ANN], now=12.0, since=10.1) == [ANN]
    silent = asked((10.0, None))
    assert silent.unknown([replace(ANN, announced_at=11.0)], now=12.0) == [], "it did not answer a moment ago"


def test_peers_are_forgotten_after_twice_that_time() -> None:
    exchanges = asked((10.0, SAID))
    for now, known in ((10.0 + 2 * VALID_S, True), (10.1 + 2 * VALID_S, False)):
        exchanges.note("bob", None, now=now)
        assert exchanges.was_asked("ann") == known
    assert exchanges.was_asked("bob")


def test_few_are_asked_and_the_fastest_most_often() -> None:
    adverts = [replace(ANN, peer_id=f"p{n}", microbatches_per_s=float(n)) for n in range(3 * PROBES)]
    rng = Random(1)
    assert sample(adverts[:PROBES], rng) == adverts[:PROBES]
    drawn: Counter[str] = Counter()
    for _ in range(300):
        found = sample(adverts, rng)
        assert len({one.peer_id for one in found}) == PROBES
        drawn.update(one.peer_id for one in found)
    thirds = [sum(drawn[one.peer_id] for one in adverts[at : at + PROBES]) for at in (0, PROBES, 2 * PROBES)]
    assert thirds[0] * 2 < thirds[1] < thirds[2]
