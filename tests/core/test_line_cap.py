"""The owner's cap on a line: how much passes in any time, what goes first, and that no kind starves."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.core import line_cap
from noloco_p2p.core.line_cap import HELD_S, LineCap, LineTurn, Precedence
from noloco_p2p.core.line_rate import MIN_MESSAGE_BYTES

RATE = 1e6
GRADIENT, ACTIVATION, OTHER = Precedence


@dataclass
class World:
    """A capped line in virtual time."""

    cap: LineCap = field(default_factory=lambda: LineCap(RATE))
    now: float = 0.0
    gone: list[tuple[float, LineTurn]] = field(default_factory=list)
    """When each message was sent."""

    def ask(self, precedence: Precedence, age: int, nbytes: int, go: Callable[[], None] = lambda: None) -> LineTurn:
        turn = LineTurn(precedence, (age, 0), nbytes, go)
        self.cap.ask(turn)
        return turn

    def until(self, end: float) -> None:
        """Time passes; every message is sent as soon as it may be."""
        while True:
            while turn := self.cap.next(self.now):
                self.gone.append((self.now, turn))
                turn.go()
            free_at = self.cap.free_at()
            if free_at is None or free_at > end:
                self.now = end
                return
            assert free_at >= self.now
            self.now = max(free_at, self.now)


Asked = tuple[float, Precedence, int, int]
"""Seconds after the previous message, kind, age, bytes."""
asked = st.lists(
    st.tuples(st.floats(0, 0.3), st.sampled_from(Precedence), st.integers(0, 9), st.integers(1, 3 * MIN_MESSAGE_BYTES)),
    min_size=1,
    max_size=60,
)


@given(asked, st.lists(st.integers(0, 200_000), max_size=60))
def test_no_more_passes_than_the_cap_allows_and_no_time_is_lost(wanted: list[Asked], charged: list[int]) -> None:
    world, most = World(), max(nbytes for *_, nbytes in wanted)
    charges = [(0.0, 0)]
    for number, (after, kind, age, nbytes) in enumerate(wanted):
        world.until(world.now + after)
        if number < len(charged):
            world.cap.charge(charged[number], world.now)
            charges.append((world.now, charged[number]))
        world.ask(kind, age, nbytes)
    world.until(1e6)
    assert len(world.gone) == len(wanted)
    for first, (begin, _) in enumerate(world.gone):
        for (end, _), passed in zip(
            world.gone[first:], accumulate(turn.nbytes for _, turn in world.gone[first:]), strict=True
        ):
            assert passed <= RATE * (end - begin) + RATE * HELD_S + most + 1
    # The last message was sent as soon as everything before it was paid for.
    busy = sum(turn.nbytes for _, turn in world.gone[:-1]) + sum(nbytes for _, nbytes in charges)
    asked_at = sum(after for after, *_ in wanted)
    assert world.gone[-1][0] <= asked_at + busy / RATE + 1e-6


def test_a_full_line_passes_its_rate() -> None:
    world = World()
    for number in range(1000):
        world.ask(OTHER, number, 50_000)
    world.until(10.0)
    passed = sum(turn.nbytes for _, turn in world.gone)
    assert RATE * 10 <= passed <= RATE * (10 + HELD_S) + 50_000


@pytest.mark.parametrize(("rate", "most"), [(10 * RATE, 125_000), (RATE, MIN_MESSAGE_BYTES)])
def test_a_message_takes_an_eightieth_of_a_second_unless_a_frame_takes_longer(rate: float, most: int) -> None:
    assert LineCap(rate).message_bytes == most


def test_a_late_check_loses_nothing_that_the_bucket_holds() -> None:
    cap, passed = LineCap(RATE), 0
    for number in range(1000):
        cap.ask(LineTurn(OTHER, (number, 0), 20_000, lambda: None))
    for look in range(101):
        while turn := cap.next(look * HELD_S):
            passed += turn.nbytes
    assert passed == pytest.approx(RATE * 10, rel=0.02)


def test_gradients_go_first_and_of_a_kind_the_oldest() -> None:
    world = World()
    for kind, age in [(OTHER, 0), (ACTIVATION, 7), (GRADIENT, 9), (ACTIVATION, 3), (GRADIENT, 2), (ACTIVATION, 3)]:
        world.ask(kind, age, 1000)
    world.until(1.0)
    assert [(turn.precedence, turn.age[0]) for _, turn in world.gone] == [
        (GRADIENT, 2),
        (GRADIENT, 9),
        (ACTIVATION, 3),
        (ACTIVATION, 3),
        (ACTIVATION, 7),
        (OTHER, 0),
    ]


def test_a_kind_that_did_not_wait_is_owed_nothing() -> None:
    world = World()
    for age in range(50):
        world.ask(GRADIENT, age, 20_000)
    world.until(2.0)
    for kind in (OTHER, ACTIVATION, GRADIENT):
        world.ask(kind, 0, 1000)
    world.until(3.0)
    assert [turn.precedence for _, turn in world.gone[-3:]] == [GRADIENT, ACTIVATION, OTHER]


@given(st.lists(st.integers(5_000, 100_000), min_size=3, max_size=3), st.sets(st.sampled_from(Precedence), min_size=1))
def test_no_kind_starves(sizes: list[int], kinds: set[Precedence]) -> None:
    check_that_none_starves(sizes, kinds)


def check_that_none_starves(sizes: list[int], kinds: set[Precedence]) -> None:
    """Whichever kinds keep asking, each waiting kind gets a tenth of the line, to within a message or two."""
    world = World()
    for kind in kinds:

        def again(kind: Precedence = kind) -> None:
            world.ask(kind, 0, sizes[kind], lambda: again(kind))

        again()
    world.until(10.0)
    total = sum(turn.nbytes for _, turn in world.gone)
    assert total >= RATE * 10
    for kind in kinds:
        passed = sum(turn.nbytes for _, turn in world.gone if turn.precedence == kind)
        assert passed >= 0.1 * total - 3 * max(sizes), f"{kind.name} starves"


def test_a_kind_that_starves_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_cap, "SHARE", 0.05)
    with pytest.raises(AssertionError, match="starves"):
        check_that_none_starves([20_000, 20_000, 20_000], set(Precedence))


@given(asked, st.data())
def test_a_withdrawn_message_is_never_sent_and_holds_nothing_up(wanted: list[Asked], data: st.DataObject) -> None:
    world = World()
    turns = [world.ask(kind, age, nbytes) for _, kind, age, nbytes in wanted]
    dropped = data.draw(st.sets(st.sampled_from(range(len(turns)))))
    for number in dropped:
        turns[number].withdrawn = True
    world.until(1e6)
    assert {id(turn) for _, turn in world.gone} == {id(turn) for n, turn in enumerate(turns) if n not in dropped}
    assert world.cap.free_at() is None


def test_an_overcharge_is_refunded() -> None:
    world = World()
    world.cap.charge(500_000, 0.0)
    world.ask(OTHER, 0, 1000)
    world.until(0.1)
    assert world.gone == []
    world.cap.charge(-400_000, 0.1)
    world.until(0.11)
    assert len(world.gone) == 1
