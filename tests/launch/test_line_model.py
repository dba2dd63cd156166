"""The emulated lines under a virtual clock, without sockets: rates, latency, fairness, slow start, bounds."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from soak import soak

from noloco_p2p.errors import ConfigError
from noloco_p2p.launch.line_model import BUFFER_S, Line, LineModel, OneWay
from noloco_p2p.launch.line_spec import LineSpec
from noloco_p2p.sim.links import FIRST_WINDOW_BYTES

MBIT = 1e6 / 8


@dataclass
class Home:
    """A node's line."""

    up: Line
    down: Line


def home(down_mbit: float, up_mbit: float | None = None) -> Home:
    return Home(Line((up_mbit or down_mbit) * MBIT), Line(down_mbit * MBIT))


@dataclass
class World:
    """Connections, the clock, and a record of arrivals."""

    latency_s: float = 0.025
    spread: float = 0.0
    now: float = 0.0
    arrivals: list[tuple[float, OneWay, bytes]] = field(default_factory=list)
    held: dict[OneWay, bool] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        self.model = LineModel(self.latency_s, self.spread, random.Random(self.seed))

    def flow(self, sender: Home, receiver: Home, *, warm: bool = True) -> OneWay:
        """One direction of a connection; if `warm`, past its slow start."""

        def deliver(piece: memoryview) -> None:
            self.arrivals.append((self.at, flow, bytes(piece)))

        def hold(held: bool) -> None:
            self.held[flow] = held

        flow = OneWay((sender.up, receiver.down), deliver, hold)
        flow.window_bytes = 1e9 if warm else FIRST_WINDOW_BYTES
        flow.sent_at = self.now
        return flow

    def send(self, flow: OneWay, data: bytes) -> None:
        self.model.send(flow, data, self.now)

    def run(self, until: float) -> None:
        """Process events one after the other up to the time `until`."""
        while (at := self.model.next_at) is not None and at <= until:
            self.at = at
            self.model.advance(at)
        self.now = until

    def keep_busy(self, flows: list[OneWay], until: float, step_s: float = 0.01) -> None:
        """Let sources send without end, except while they are held back."""
        while self.now < until:
            for flow in flows:
                while not self.held.get(flow):
                    self.send(flow, bytes(20_000))
            self.run(self.now + step_s)

    def received(self, flow: OneWay, begin: float = 0.0) -> int:
        return sum(len(piece) for at, one, piece in self.arrivals if one is flow and at >= begin)


@pytest.mark.parametrize(
    ("mbit", "latency_s"),
    [
        (50, 0.0),
        (50, 0.1),
        (1_000, 0.01),
        *soak([(0.5, 0.0), (0.5, 0.01), (0.5, 0.1), (50, 0.01), (1_000, 0.0), (1_000, 0.1)]),
    ],
)
def test_one_connection_gets_the_rate_of_the_slower_line(mbit: float, latency_s: float) -> None:
    world = World(latency_s)
    begin, seconds = 2.0, 1.0 if mbit == 1_000 else 4.0
    fast = home(4 * mbit)
    for sender, receiver in ((home(8 * mbit, mbit), fast), (fast, home(mbit))):
        flow = world.flow(sender, receiver)
        world.now, world.arrivals = 0.0, []
        world.model = LineModel(latency_s, 0.0, random.Random(0))
        world.keep_busy([flow], begin + seconds)
        assert world.received(flow, begin) / seconds == pytest.approx(mbit * MBIT, rel=0.03)


def test_a_message_takes_the_latency_and_its_transmission_time_on_both_lines() -> None:
    world = World(0.025)
    flow = world.flow(home(100, 20), home(50))
    world.send(flow, bytes(1_000))
    world.run(1.0)
    assert [at for at, _, _ in world.arrivals] == pytest.approx([0.025 + 1_000 / (20 * MBIT) + 1_000 / (50 * MBIT)])


def test_lines_are_shared_fairly_whoever_sends_more() -> None:
    """Three senders into one line down, the first with a slow line up: max-min fair, 20 : 40 : 40."""
    world, receiver = World(0.05), home(100)
    flows = [world.flow(home(1_000, up), receiver) for up in (20, 200, 1_000)]
    world.keep_busy(flows, 4.0)
    rates = [world.received(flow, 2.0) / 2.0 / MBIT for flow in flows]
    assert rates == pytest.approx([20, 40, 40], rel=0.06)


def test_a_connection_limited_by_its_receiver_leaves_the_line_up_to_others() -> None:
    world, sender = World(0.05), home(100)
    slow, fast = world.flow(sender, home(10)), world.flow(sender, home(1_000))
    world.keep_busy([slow, fast], 4.0)
    assert world.received(slow, 2.0) / 2.0 == pytest.approx(10 * MBIT, rel=0.05)
    assert world.received(fast, 2.0) / 2.0 == pytest.approx(90 * MBIT, rel=0.05)


def test_the_two_directions_of_a_line_are_independent() -> None:
    world, one, other = World(0.01), home(100), home(100)
    there, back = world.flow(one, other), world.flow(other, one)
    world.keep_busy([there, back], 2.0)
    for flow in (there, back):
        assert world.received(flow, 1.0) == pytest.approx(100 * MBIT, rel=0.03)


def test_a_short_message_does_not_wait_behind_the_bulk_of_others() -> None:
    world, sender, receiver = World(0.025), home(50), home(50)
    bulk = [world.flow(sender, receiver) for _ in range(8)]
    world.keep_busy(bulk, 3.0)
    control = world.flow(sender, receiver)
    for _ in range(5):
        sent_at = world.now
        world.send(control, bytes(100))
        world.keep_busy(bulk, world.now + 0.2)
        (at,) = [at for at, flow, piece in world.arrivals if flow is control and piece and at > sent_at]
        assert at - sent_at < 0.025 + 0.01


def test_bytes_in_flight_are_bounded_and_the_source_is_held_back() -> None:
    """Ten connections into one line: a new byte waits for at most the latency and the two buffers."""
    world, receiver = World(0.05), home(50)
    flows = [world.flow(home(1_000), receiver) for _ in range(10)]
    world.keep_busy(flows, 6.0)
    allowed = (0.05 + BUFFER_S) * receiver.down.bytes_per_s
    assert sum(flow.under_way_bytes for flow in flows) < 1.2 * allowed
    assert all(world.held[flow] for flow in flows)
    assert all(flow.inbox.nbytes < BUFFER_S * flow.up.bytes_per_s + 20_000 for flow in flows)


def test_a_stalled_destination_holds_back_only_its_own_connection() -> None:
    world, sender, receiver = World(0.01), home(100), home(100)
    stuck, free = world.flow(sender, receiver), world.flow(sender, receiver)
    world.model.stall(stuck, True, 0.0)
    world.keep_busy([stuck, free], 2.0)
    assert world.received(stuck) == 0
    assert world.received(free, 1.0) == pytest.approx(100 * MBIT, rel=0.03)
    assert world.held[stuck]
    world.model.stall(stuck, False, world.now)
    world.keep_busy([stuck, free], 4.0)
    assert world.received(stuck, 3.0) == pytest.approx(50 * MBIT, rel=0.05)


def test_a_connection_starts_slowly_and_again_after_being_idle() -> None:
    """It sends the first window, then twice as much in each round trip, until the line is full."""
    world = World(0.1)
    flow = world.flow(home(100), home(100), warm=False)
    world.send(flow, bytes(1_000_000))
    world.run(1.3)
    within = [world.received(flow) - world.received(flow, 0.2 * n + 0.15) for n in range(4)]
    assert [round(sent / FIRST_WINDOW_BYTES) for sent in within] == [1, 3, 7, 15]
    for idle_s, slower in ((0.1, False), (60.0, True)):
        world.run(world.now + idle_s)
        world.arrivals = []
        began = world.now
        world.send(flow, bytes(200_000))
        world.run(began + 1.0)
        took_s = world.arrivals[-1][0] - began
        assert (took_s > 0.3) == slower


def test_a_window_shrinks_while_only_short_messages_use_it() -> None:
    """With a short message every 50 ms a connection is never idle, yet after 10 s it has a new connection's window."""
    world = World(0.1)
    flow = world.flow(home(100), home(100), warm=False)
    took = []
    for _ in range(2):
        began = world.now
        world.send(flow, bytes(500_000))
        world.run(began + 3.0)
        took.append(world.arrivals[-1][0] - began)
        for _ in range(200):
            world.send(flow, bytes(20))
            world.run(world.now + 0.05)
    assert took[1] == pytest.approx(took[0], rel=0.05)
    assert took[0] > 1.0


def test_the_end_arrives_last_and_nothing_arrives_after_a_connection_is_gone() -> None:
    world, sender, receiver = World(0.025), home(10), home(10)
    whole, cut = world.flow(sender, receiver), world.flow(sender, receiver)
    for flow in (whole, cut):
        world.send(flow, bytes(100_000))
        world.send(flow, b"")
    world.run(0.05)
    cut.end()
    got = world.received(cut)
    world.run(2.0)
    assert world.received(cut) == got
    assert world.received(whole) == 100_000
    assert [piece for _, flow, piece in world.arrivals if flow is whole][-1] == b""
    assert receiver.down.carried_bytes <= sender.up.carried_bytes < 200_000
    assert world.model.next_at is None


def test_jitter_spreads_the_latency_and_keeps_the_order() -> None:
    world = World(0.05, spread=0.2, seed=3)
    flow = world.flow(home(1_000), home(1_000))
    took, sent = [], []
    for number in range(400):
        began = world.now
        message = number.to_bytes(2, "big")
        sent.append(message)
        world.send(flow, message)
        world.run(world.now + 0.5)
        took.append(world.arrivals[-1][0] - began)
    assert [piece for _, _, piece in world.arrivals] == sent
    took.sort()
    assert took[200] == pytest.approx(0.05, rel=0.05)
    assert (took[336] - took[63]) / 2 == pytest.approx(0.01, rel=0.2)


@given(
    st.integers(0, 10_000),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 50_000)), max_size=40),
)
def test_every_byte_arrives_once_and_in_order_however_late_the_clock_is(
    seed: int, sends: list[tuple[int, int, int]]
) -> None:
    rng = random.Random(seed)
    world = World(rng.choice([0.0, 0.03]), rng.choice([0.0, 0.5]), seed=seed)
    homes = [home(rng.choice([1, 30, 500])) for _ in range(3)]
    flows = [world.flow(homes[n % 3], homes[(n + 1) % 3], warm=n == 0) for n in range(4)]
    sent = dict.fromkeys(flows, b"")
    for wait, which, size in sends:
        world.now += wait * rng.random() * 0.1
        world.at = world.now
        world.model.advance(world.now)
        data = rng.randbytes(size)
        sent[flows[which]] += data
        world.send(flows[which], data)
    world.run(10_000.0)
    for flow in flows:
        assert b"".join(piece for _, one, piece in world.arrivals if one is flow) == sent[flow]
        assert (flow.under_way_bytes, flow.unacknowledged_bytes, flow.inbox.nbytes) == (0, 0, 0)
    assert sum(one.up.carried_bytes for one in homes) == sum(map(len, sent.values()))


def test_a_link_is_parsed_as_providers_write_it() -> None:
    assert LineSpec.parse("200mbit,25ms") == LineSpec(25e6, 25e6, 0.025)
    assert LineSpec.parse("200/20Mbit, 25ms, 5ms") == LineSpec(25e6, 2.5e6, 0.025, 0.005 / 0.025)
    assert LineSpec.parse("1gbit") == LineSpec(125e6, 125e6)
    assert LineSpec.parse("200mbit,25ms,5ms").spread == pytest.approx(0.2)


@pytest.mark.parametrize(
    "text",
    [
        *("", "200", "200mbit,25", "0mbit,1ms", "200/0mbit", "1.2.3mbit", "1mbit,1ms,2ms", "-1mbit", "200mbit,25ms,"),
        *("9" * 400 + "mbit", f"1/{'9' * 400}kbit", f"1mbit,{'9' * 400}ms"),  # beyond the range of a float
    ],
    ids=lambda text: text[:20],
)
def test_a_malformed_link_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--link .*200/20mbit"):
        LineSpec.parse(text)
