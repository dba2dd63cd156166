"""The measured speed of a line is what it can do, not how much it is used."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.core.line_cap import BYTES_PER_MBIT
from noloco_p2p.core.line_rate import (
    ASKED_S,
    CONNECTIONS,
    DOWN_SHARE,
    FAR_BYTES,
    FAR_S,
    FILLER_BYTES,
    MIN_ASKED,
    MIN_DOWN_S,
    MIN_MESSAGE_BYTES,
    PART_BYTES,
    PARTS,
    PEERS,
    RESTED_S,
    SMALL_BYTES,
    STALE_S,
    LineRate,
    MeasuredLine,
    Sending,
    message_bytes,
)
from noloco_p2p.core.wire import PACK_BYTES

RATE = 1e6
"""Bytes per second of the lines in these tests."""


def shared_line(arrivals: list[tuple[float, int]], rate: float = RATE, share: float = 0.75) -> LineRate:
    """The measured rate of a line that bodies, given as (second at which each begins, bytes), share evenly."""
    line, waiting, moving, now = LineRate(share), sorted(arrivals), dict[int, list[float]](), 0.0
    number = 0
    while waiting or moving:
        next_at = waiting[0][0] if waiting else float("inf")
        left_s = [left[0] * len(moving) / rate for left in moving.values()]
        ends_at = now + min(left_s, default=float("inf"))
        at = min(next_at, ends_at)
        for left in moving.values():
            left[0] -= (at - now) * rate / len(moving)
        now = at
        if next_at <= ends_at:
            _, nbytes = waiting.pop(0)
            moving[number] = [float(nbytes), line.began(now), float(nbytes)]
            number += 1
        else:
            ended = min(moving, key=lambda one: moving[one][0])
            _, began, size = moving.pop(ended)
            line.ended(began, size, now)
    return line


@given(st.lists(st.tuples(st.floats(0.0, 50.0), st.integers(10_000, 2_000_000)), min_size=1, max_size=40))
def test_a_line_that_is_shared_measures_its_own_rate_however_busy_it_is(arrivals: list[tuple[float, int]]) -> None:
    assert shared_line(arrivals).bytes_per_s == pytest.approx(RATE, rel=1e-3)


def test_idle_time_says_nothing() -> None:
    line = LineRate(0.75)
    assert line.bytes_per_s is None
    for second in range(0, 1000, 100):
        line.ended(line.began(second), RATE / 2, second + 0.5)
    assert line.bytes_per_s == pytest.approx(RATE)


def test_what_the_other_end_slows_down_does_not_count_as_this_line() -> None:
    """A third of the bytes goes to peers that accept them at a tenth of the rate."""
    line, now = LineRate(0.75), 0.0
    for number in range(90):
        took_s = 0.1 if number % 3 else 1.0
        line.ended(line.began(now), RATE * 0.1, now := now + took_s)
    assert line.bytes_per_s == pytest.approx(RATE)


def test_a_line_that_becomes_slower_is_measured_anew_and_memory_is_bounded() -> None:
    line, now = LineRate(1.0), 0.0
    for rate in (10 * RATE, RATE):
        for _ in range(PARTS):
            line.ended(line.began(now), rate, now := now + 1.0)
        assert line.bytes_per_s == pytest.approx(rate)
    assert len(line._parts) == PARTS


def test_messages_that_waited_in_a_buffer_do_not_make_the_line_faster() -> None:
    """Most of every second message had arrived before: it takes 1 ms, and the next one 19 ms."""
    line, now = LineRate(DOWN_SHARE, MIN_DOWN_S), 0.0
    for number in range(4 * PARTS):
        line.ended(line.began(now), RATE * 0.01, now := now + (0.001 if number % 2 else 0.019))
        assert (line.bytes_per_s is None) == (now < MIN_DOWN_S)
    assert line.bytes_per_s == pytest.approx(RATE, rel=0.05)


def test_the_systems_own_counts_replace_what_writes_suggest() -> None:
    line = LineRate(1.0)
    line.ended(line.began(0.0), 100 * RATE, 1.0)
    line.counted(int(RATE), 1.0, 2.0)
    assert line.bytes_per_s == RATE
    line.ended(line.began(3.0), 100 * RATE, 4.0)
    assert (line.bytes_per_s, line.measured_at) == (RATE, 2.0)


@pytest.mark.parametrize(("share", "rate"), [(0.2, 1e6), (0.75, 2e6), (0.85, 3e6), (1.0, 5e6)])
def test_the_rate_is_a_quantile_of_the_parts_weighted_by_their_bytes(share: float, rate: float) -> None:
    line = LineRate(share)
    for each, nbytes in ((5e6, 10), (1e6, 30), (3e6, 10), (2e6, 50)):
        line.counted(nbytes, nbytes / each, 1.0)
    assert line.bytes_per_s == pytest.approx(rate)


def test_a_transfer_that_took_no_time_on_the_clock_says_nothing() -> None:
    line = LineRate(1.0)
    line.ended(line.began(1.0), 1000, 1.0)
    assert line.bytes_per_s is None


def test_a_cap_bounds_the_measured_rate() -> None:
    line = MeasuredLine(most_up=1e6, most_down=3e6)
    for rate in (line.up, line.down):
        rate.counted(2_000_000, 1.0, 1.0)
    assert (line.up.bytes_per_s, line.down.bytes_per_s) == (1e6, 2e6)


@pytest.mark.parametrize(
    ("mbit_per_s", "most"), [(None, 1 << 16), (0.5, MIN_MESSAGE_BYTES), (8, 100_000), (50, 625_000), (1000, PACK_BYTES)]
)
def test_a_message_takes_a_tenth_of_a_second_unless_it_is_long(mbit_per_s: float | None, most: int) -> None:
    assert message_bytes(None if mbit_per_s is None else mbit_per_s * BYTES_PER_MBIT) == most


def test_an_aborted_transfer_counts_with_the_bytes_that_moved() -> None:
    line = LineRate(0.75)
    began = line.began(0.0)
    line.ended(began, 0, 5.0)
    assert line.bytes_per_s is None
    line.ended(line.began(5.0), RATE / 10, 5.1)
    assert line.bytes_per_s == pytest.approx(RATE)


def line_of(rate: float = RATE, round_trip_s: float = 0.05) -> MeasuredLine:
    line = MeasuredLine()
    line.up.ended(line.up.began(0.0), rate, 1.0)
    line.answered("p", round_trip_s)
    return line


def asks(line: MeasuredLine, nbytes: int, now: float = 2.0, peer: str = "p") -> bool:
    return line.sending(peer, nbytes, now, fits=True) is Sending.ASKED


def test_a_body_is_announced_when_it_takes_longer_than_half_a_round_trip() -> None:
    line = line_of()
    assert asks(line, 100_000), "0.1 s against 0.025 s"
    assert not asks(line, SMALL_BYTES), "small ones go at once"
    assert asks(line_of(round_trip_s=0.19), 100_000)
    assert not asks(line_of(round_trip_s=0.21), 100_000)
    assert not asks(line_of(rate=1e9, round_trip_s=0.0001), 1_000_000), "one room"
    assert line.sending("p", SMALL_BYTES, 2.0, fits=False) is Sending.ASKED


def test_a_body_is_announced_when_it_takes_long_on_the_line_of_its_receiver() -> None:
    line = line_of(rate=1e9, round_trip_s=0.05)
    assert not asks(line, 1_000_000)
    line.granted("p", 1_000_000, 100_000)  # 1 MB/s
    assert asks(line, 1_000_000)
    line.granted("p", 1_000_000, 0)
    assert asks(line, 1_000_000), "that says nothing about its line"
    line.granted("p", 1_000_000, PACK_BYTES)
    assert not asks(line, 1_000_000)
    for number in range(2 * PEERS):
        line.granted(str(number), 1_000_000, 100_000)
    assert len(line._lines) == PEERS


def test_a_body_sent_to_a_far_peer_at_once_uses_several_connections() -> None:
    far = line_of(rate=1e9, round_trip_s=0.2)
    assert far.sending("p", PART_BYTES - 1, 2.0, fits=True) is Sending.WHOLE
    assert far.sending("p", PART_BYTES, 2.0, fits=True) is Sending.AT_ONCE


def test_where_nothing_is_measured_a_body_is_announced_and_so_measured() -> None:
    assert asks(MeasuredLine(), SMALL_BYTES + 1, 0.0)
    fast = line_of(rate=1e9)
    assert not asks(fast, 100_000)
    assert not asks(fast, 100_000, peer="stranger"), "as if it were near"
    assert asks(line_of(rate=1e6), 100_000, peer="stranger"), "0.1 s"
    assert not asks(fast, 100_000, 1.0 + STALE_S)
    assert asks(fast, 100_000, 1.1 + STALE_S)


def test_a_round_trip_is_the_shortest_recent_one_and_peers_are_forgotten() -> None:
    line = MeasuredLine()
    for seconds in (0.3, 0.05, 4.0):
        line.answered("p", seconds)
    assert line.round_trip_s("p") == 0.05
    for number in range(PEERS):
        line.answered(f"q{number}", 1.0)
    assert line.round_trip_s("p") is None


def test_places_are_asked_for_what_the_line_sends_soon() -> None:
    assert MeasuredLine().asks_for(10_000), "nothing is known"
    slow, fast = line_of(), line_of(100 * RATE)
    for line in (slow, fast):
        line.up.carries("activation", int(2 * RATE * ASKED_S))
    assert [slow.asks_for(asked) for asked in range(4)] == [asked < MIN_ASKED for asked in range(4)]
    assert fast.asks_for(49)
    assert not fast.asks_for(50)


@pytest.mark.parametrize(("down", "first_s", "last_s", "middle_s"), [(4, 0.3, 0.2, 0.5), (0.25, 0.8, 1.2, 2.0)])
def test_a_microbatch_takes_the_busier_direction(down: float, first_s: float, last_s: float, middle_s: float) -> None:
    line = line_of()
    line.down.ended(line.down.began(0.0), down * RATE, 1.0)
    for rate in (line.up, line.down):
        rate.carries("activation", 300_000)
        rate.carries("gradient", 200_000)
    assert line.microbatch_s(first=True, last=False) == pytest.approx(first_s)
    assert line.microbatch_s(first=False, last=True) == pytest.approx(last_s)
    assert line.microbatch_s(first=False, last=False) == pytest.approx(middle_s)
    assert MeasuredLine().microbatch_s(first=False, last=False) == 0.0


def test_the_typical_round_trip_is_the_median_of_the_shortest_ones() -> None:
    line = MeasuredLine()
    assert line.typical_round_trip_s is None
    for peer, trips in {"a": (0.3, 0.1), "b": (0.2, 0.9), "c": (5.0,)}.items():
        for trip_s in trips:
            line.answered(peer, trip_s)
    assert line.typical_round_trip_s == 0.2


def test_connections_have_rested_when_nothing_has_left_for_a_while() -> None:
    line = MeasuredLine()
    assert line.rested("B", 0.0), "they have never been used"
    line.leaves("B")
    line.leaves("B")
    line.has_left("B", 1.0)
    assert not line.rested("B", 99.0), "one is still leaving"
    line.has_left("B", 100.0)
    assert not line.rested("B", 100.0 + RESTED_S)
    assert line.rested("B", 100.1 + RESTED_S)
    for number in range(PEERS):
        line.leaves(str(number))
    line.has_left("B", 101.0)
    line.leaves("B")
    line.has_left("B", 102.0)
    line.has_left("B", 102.0)
    assert line.rested("B", 103.0), "a peer that was forgotten meanwhile is like a new one"
    assert len(line._leaving) == PEERS


@pytest.mark.parametrize(
    ("rate", "round_trip_s", "peers", "expected"),
    [
        (1e9, 0.2, 2, 1 << 17),
        (25e6, 0.1, 1, 1 << 17),  # 84 ms for the filler, and more than twice as much for the body
        (25e6, 0.05, 1, 1 << 14),
        (25e6, 0.1, 2, 1 << 14),
        (2e6, 0.2, 9, 0),
        (1e9, 0.001, 1, 0),
    ],
)
def test_filler_takes_little_of_the_time_that_it_saves(
    rate: float, round_trip_s: float, peers: int, expected: int
) -> None:
    much = 64 << 20
    line = MeasuredLine()
    line.answered("B", round_trip_s)
    assert (line.filler_bytes("B", much) > 0) == (round_trip_s >= FAR_S), "an unknown line counts as fast"
    line.up.ended(line.up.began(0.0), int(rate), 1.0)
    assert line.filler_bytes("B", much, peers=peers) == expected
    line.down.ended(line.down.began(0.0), int(rate), 1.0)
    assert line.filler_bytes("B", much, comes=True, peers=peers) == expected
    assert line.filler_bytes("B", 1000) == 0, "one connection carries it in a round trip"


def test_what_comes_from_a_peer_depends_on_the_line_down_and_not_on_what_the_peer_can_receive() -> None:
    line, much = MeasuredLine(), 64 << 20
    line.answered("B", 0.1)
    line.up.ended(line.up.began(0.0), RATE, 1.0)
    line.down.ended(line.down.began(0.0), 1000 * RATE, 1.0)
    needed = 1 + int(RATE / 10) // FAR_BYTES
    assert (line.connections("B", much), line.connections("B", much, comes=True)) == (needed, CONNECTIONS)
    assert (line.filler_bytes("B", much), line.filler_bytes("B", much, comes=True)) == (0, FILLER_BYTES[0])
    assert line.granted("B", much, MIN_MESSAGE_BYTES - 1) == 1
    assert line.connections("B", much, comes=True) == CONNECTIONS


def test_where_losses_limit_each_connection_a_body_keeps_using_several() -> None:
    # At 1 % a connection has 1.22 · 1,460 bytes / √0.01 in flight.
    line, round_trip_s, nbytes, now = MeasuredLine(), 0.4, 1 << 20, 0.0
    line.answered("B", round_trip_s)
    used = []
    for _ in range(2 * PARTS):
        used.append(line.connections("B", nbytes))
        began = line.up.began(now)
        now += nbytes * round_trip_s / (used[-1] * 17_812)
        line.up.ended(began, nbytes, now)
    assert set(used) == {1 + nbytes // PART_BYTES}


def test_of_too_many_peers_those_are_forgotten_that_were_not_used_for_longest() -> None:
    line = MeasuredLine()
    for peer in ("old", "used", *map(str, range(PEERS - 2)), "used", "new", "newest"):
        line.answered(peer, 1.0)
        line.granted(peer, 1, 100_000)
        line.leaves(peer)
    for kept in (line._round_trips, line._lines, line._leaving):
        assert len(kept) == PEERS
        assert kept.keys().isdisjoint({"old", "0"})
        assert {"used", "1", "new", "newest"} <= kept.keys()


def test_filler_before_a_short_body_is_short() -> None:
    line = MeasuredLine()
    line.answered("B", 0.2)
    line.up.ended(line.up.began(0.0), 6_250_000, 1.0)
    assert line.filler_bytes("B", 1 << 20) == 1 << 14, "six times 128 KiB take 0.13 s of its line, the body 0.17 s"
    assert line.filler_bytes("B", 4 << 20, peers=9) == 0
