"""A replica's state over gRPC: bit for bit, over cut links too, of one copy of one peer; or an error and nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from math import nan

import pytest
from link_fixture import Fault, Proxy
from transport_fixture import Events, Node, Pair, alive, hang, pair, run, tensor, watched_buffers

from noloco_p2p.core import wire
from noloco_p2p.core.messages import REPLICA_KINDS, HostTensor, MicrobatchId, PeerId, ReplicaState, TensorSpec
from noloco_p2p.errors import Declined, PeerError, Unreachable, Violation
from noloco_p2p.io import channels, transport, weights

MIB = 1 << 20
TENSORS = tuple(
    tensor(f"{kind}/{name}", "float32", shape, seed=len(kind))
    for kind in REPLICA_KINDS
    for name, shape in (("embed", (3, MIB // 3)), ("norm", (3,)), ("none", (0, 4)), ("head", (MIB // 4, 1)))
)
"""25 MiB."""
SPECS = tuple(t.spec for t in TENSORS)
NUMBER = (1 << 64) - 5
STATE = ReplicaState("B", 1, 7, 70.25, 66, 65, TENSORS, NUMBER)


class Donor:
    """Lends its one copy, and remembers who asked for which; `again` is lent to who goes on."""

    def __init__(self, state: ReplicaState = STATE, again: ReplicaState | None = STATE) -> None:
        self.state = state
        self.again = again
        self.asked: list[int | None] = []
        self.lent = 0
        self.returned = asyncio.Event()

    @asynccontextmanager
    async def lend(self, caller: PeerId, number: int | None) -> AsyncIterator[ReplicaState]:
        self.asked.append(number)
        if number is not None and self.again is None:
            raise Declined("that copy is gone")
        self.lent += 1
        try:
            yield self.again if number is not None and self.again else self.state
        finally:
            self.lent -= 1
            self.returned.set()


@asynccontextmanager
async def linked(donor: Donor, *faults: tuple[int, Fault]) -> AsyncIterator[tuple[Pair, Proxy]]:
    async with pair(Node(hang, lend=donor.lend)) as both, Proxy(both.b.port, *faults) as proxy:
        try:
            yield both, proxy
        finally:
            await both.a.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[wire.Chunk]]:
    """What the donor sends in each call."""
    original, seen = wire.frames, list[list[wire.Chunk]]()

    def noted(
        tensors: Iterable[HostTensor], digests: Iterable[int], *, first: int = 0, offset: int = 0
    ) -> Iterator[wire.Frame]:
        sent: list[wire.Chunk] = []
        seen.append(sent)
        for frame in original(tensors, digests, first=first, offset=offset):
            if isinstance(frame, wire.Chunk):
                sent.append(frame)
            yield frame

    monkeypatch.setattr(wire, "frames", noted)
    return seen


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds on silence, far below a second."""
    monkeypatch.setattr(transport, "SILENCE_S", 0.3)
    monkeypatch.setattr(transport, "CAPTURE_S", 0.6)
    monkeypatch.setattr(transport, "RESUME_PAUSE_S", 0.05)
    monkeypatch.setattr(channels, "CONNECT_S", 0.3)


def test_a_state_arrives_bit_for_bit_but_for_what_does_not_travel() -> None:
    async def scenario() -> None:
        mine, theirs = Events(), Events()
        donor = Donor(replace(STATE, spent=(MicrobatchId("A", 1, 2),)))
        async with pair(Node(hang, lend=donor.lend), mine, theirs) as both:
            assert await both.a.fetch_state(both.peer, 10.0, SPECS) == STATE
            await asyncio.wait_for(donor.returned.wait(), 3.0)
            assert (donor.asked, donor.lent) == ([None], 0)
        size = sum(spec.nbytes for spec in SPECS)
        assert mine.seen == [("bytes", {"direction": "in", "kind": "state", "bytes": size})]
        assert theirs.seen == [("bytes", {"direction": "out", "kind": "state", "bytes": size})]

    run(scenario())


def test_a_transfer_that_is_cut_goes_on_with_the_same_copy_where_it_was(calls: list[list[wire.Chunk]]) -> None:
    async def scenario() -> None:
        donor = Donor()
        async with linked(donor, (10 * MIB, "cut"), (6 * MIB, "cut")) as (both, proxy):
            assert await both.a.fetch_state(proxy.peer, 20.0, SPECS) == STATE
        assert donor.asked == [None, NUMBER, NUMBER]
        assert len(proxy.wires) == 3
        assert donor.lent == 0

    run(scenario())
    begins = [(sent[0].tensor, sent[0].offset) for sent in calls]
    assert (0, 0) == begins[0] < begins[1] < begins[2]
    for before, after in pairwise(calls):
        place = after[0].tensor, after[0].offset
        come = sum(len(chunk.data) for chunk in before if (chunk.tensor, chunk.offset) < place)
        twice = sum(len(chunk.data) for chunk in before if (chunk.tensor, chunk.offset) >= place)
        assert come > 4 * MIB, "what had come is not asked for again"
        assert {chunk.tensor for chunk in before if chunk.tensor < place[0]}.isdisjoint(chunk.tensor for chunk in after)
        assert twice < 16 * MIB, "only what was lost in flight is sent twice"


@pytest.mark.parametrize(
    ("again", "error", "text"),
    [
        (None, Declined, "that copy is gone"),
        (replace(STATE, number=4), Violation, "another copy"),
        (replace(STATE, round=8), Violation, "another copy"),
        (
            replace(STATE, tensors=tuple(replace(t, data=memoryview(bytes(t.data.nbytes))) for t in TENSORS)),
            Violation,
            "",
        ),
    ],
    ids=["gone", "number", "round", "other bytes"],
)
def test_two_copies_are_never_mixed(
    again: ReplicaState | None, error: type[PeerError], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = watched_buffers(monkeypatch)

    async def scenario() -> None:
        donor = Donor(STATE, again)
        async with linked(donor, (int(10.5 * MIB), "cut")) as (both, proxy):
            with pytest.raises(error, match=text or "do not have the digest"):
                await both.a.fetch_state(proxy.peer, 20.0, SPECS)
            assert donor.asked == [None, NUMBER]
            assert alive(made) == 0 < len(made)

    run(scenario())


def test_a_flipped_bit_is_a_violation_and_everything_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    made, original = watched_buffers(monkeypatch), wire.frames

    def flipped(
        tensors: Iterable[HostTensor], digests: Iterable[int], *, first: int = 0, offset: int = 0
    ) -> Iterator[wire.Frame]:
        for frame in original(tensors, digests, first=first, offset=offset):
            if isinstance(frame, wire.Chunk) and frame.tensor == 5:
                yield frame._replace(data=bytes([frame.data[0] ^ 16]) + bytes(frame.data[1:]))
            else:
                yield frame

    monkeypatch.setattr(wire, "frames", flipped)

    async def scenario() -> None:
        donor = Donor()
        async with pair(Node(hang, lend=donor.lend)) as both:
            with pytest.raises(Violation, match=f"'{SPECS[5].name}' do not have the digest") as caught:
                await both.a.fetch_state(both.peer, 10.0, SPECS)
            assert not caught.value.ours
            assert alive(made) == 0 < len(made)
            assert donor.asked == [None], "the same bytes are never asked for again"

    run(scenario())


@pytest.mark.parametrize(
    ("changes", "expected", "error"),
    [
        ({}, SPECS[:-1], Violation),
        ({}, (*SPECS, TensorSpec("adam_square/more", "float32", (3,))), Violation),
        ({}, (SPECS[1], SPECS[0], *SPECS[2:]), Violation),
        ({}, (SPECS[0]._replace(shape=(MIB // 3, 3)), *SPECS[1:]), Violation),
        ({}, (SPECS[0]._replace(dtype="int32"), *SPECS[1:]), Violation),
        ({"peer": "C"}, SPECS, Violation),
        ({"step": nan}, SPECS, Violation),
        ({"step": -1.0}, SPECS, Violation),
        ({"adam_steps": 67}, SPECS, Violation),
        ({"round": 1 << 60}, SPECS, Violation),
        ({"stage": 2}, SPECS, Declined),
    ],
)
def test_what_was_not_expected_is_refused_before_any_memory_is_taken(
    changes: dict[str, object],
    expected: tuple[TensorSpec, ...],
    error: type[PeerError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = watched_buffers(monkeypatch)

    async def scenario() -> None:
        donor = Donor(replace(STATE, **changes))  # type: ignore[arg-type]
        async with pair(Node(hang, lend=donor.lend)) as both:
            with pytest.raises(error) as caught:
                await both.a.fetch_state(both.peer, 10.0, expected)
            assert not getattr(caught.value, "ours", False)
            assert made == []
            await asyncio.wait_for(donor.returned.wait(), 3.0)

    run(scenario())


def test_a_peer_that_has_no_state_and_one_that_is_not_there() -> None:
    async def scenario() -> None:
        async with pair(Node(hang)) as both:
            with pytest.raises(Declined, match="no state here"):
                await both.a.fetch_state(both.peer, 10.0, SPECS)
            await both.b.close()
            with pytest.raises(Unreachable, match="cannot be reached"):
                await both.a.fetch_state(both.peer, 10.0, SPECS)

    run(scenario())


@pytest.mark.parametrize("where", [(99, 0), (len(TENSORS), 0), (1, 13)])
def test_a_place_that_the_state_does_not_have_is_a_violation(where: tuple[int, int]) -> None:
    with pytest.raises(Violation, match="has no byte"):
        next(weights.to_state(STATE, *where))


async def _seconds_to_unreachable(both: Pair, proxy: Proxy, fail: Callable[[], object]) -> float:
    """From the fault on, until the fetch fails."""
    clock = asyncio.get_running_loop().time
    fetching = asyncio.create_task(both.a.fetch_state(proxy.peer, 25.0, SPECS))
    await asyncio.wait_for(proxy.faulty.wait(), 5.0)
    began = clock()
    fail()
    with pytest.raises(Unreachable):
        await fetching
    return clock() - began


def test_a_donor_that_dies_in_the_middle_is_unreachable_within_seconds() -> None:
    async def scenario() -> None:
        donor = Donor()
        async with linked(donor, (10 * MIB, "cut")) as (both, proxy), asyncio.TaskGroup() as group:
            seconds = await _seconds_to_unreachable(both, proxy, lambda: group.create_task(both.b.close()))
        assert seconds < 4.0
        assert donor.lent == 0

    run(scenario())


def test_a_link_that_stays_silent_is_given_up_after_a_few_tries(
    impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = watched_buffers(monkeypatch)

    async def scenario() -> None:
        donor = Donor()
        always: list[tuple[int, Fault]] = [(0, "swallow")] * 9
        async with linked(donor, (10 * MIB, "swallow"), *always) as (both, proxy):
            assert await _seconds_to_unreachable(both, proxy, lambda: None) < 4.0
            assert len(proxy.wires) == 1 + transport.RESUMES
            assert alive(made) == 0 < len(made)

    run(scenario())


def test_a_link_that_falls_silent_once_is_replaced(impatient: None) -> None:
    async def scenario() -> None:
        donor = Donor()
        async with linked(donor, (10 * MIB, "swallow")) as (both, proxy):
            assert await both.a.fetch_state(proxy.peer, 20.0, SPECS) == STATE
        assert donor.asked == [None, NUMBER]

    run(scenario())


def test_a_donor_may_take_longer_to_begin_than_to_go_on(impatient: None) -> None:
    async def scenario() -> None:
        donor = Donor()
        wait_s = 0.45

        @asynccontextmanager
        async def late(caller: PeerId, number: int | None) -> AsyncIterator[ReplicaState]:
            await asyncio.sleep(wait_s)
            async with donor.lend(caller, number) as state:
                yield state

        async with pair(Node(hang, lend=late)) as both:
            assert await both.a.fetch_state(both.peer, 20.0, SPECS) == STATE
            wait_s = 60.0
            with pytest.raises(Unreachable, match=r"for 0\.6 s"):
                await both.a.fetch_state(both.peer, 20.0, SPECS)
        assert donor.asked == [None]

    run(scenario())


def test_a_fetch_that_is_given_up_gives_the_copy_back() -> None:
    async def scenario() -> None:
        donor = Donor()
        async with linked(donor, (10 * MIB, "swallow")) as (both, proxy):
            fetching = asyncio.create_task(both.a.fetch_state(proxy.peer, 20.0, SPECS))
            await asyncio.wait_for(proxy.faulty.wait(), 5.0)
            assert donor.lent == 1
            proxy.wires[0].cut()
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
            await asyncio.wait_for(donor.returned.wait(), 3.0)
            assert donor.lent == 0

    run(scenario())
