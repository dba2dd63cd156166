"""The transfer of a state over links that break or fall silent: it resumes with the same copy, or fails soon."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
from link_fixture import Fault, Proxy
from machine import in_time, slowness
from state_fixture import LONG, LONG_SPECS, MIB, NUMBER, SPECS, STATE, Donor, linked
from transport_fixture import Node, Pair, alive, hang, pair, run, soon, transport, watched_buffers

from noloco_p2p.core import wire
from noloco_p2p.core.messages import Advert, HostTensor, PeerId, ReplicaState
from noloco_p2p.core.timeouts import TRANSFER_DEADLINE_S
from noloco_p2p.errors import Declined, PeerError, Unreachable, Violation
from noloco_p2p.io.transport import channels, grpc_transport, slow_transfers, weights_codec
from noloco_p2p.sim import virtual_time


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[wire.Chunk]]:
    """The chunks that the donor sends, by call."""
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
def impatient(monkeypatch: pytest.MonkeyPatch) -> float:
    """Lower the limits on silence to far below a second on a quiet machine; returns the slowdown of this machine."""
    times = round(slowness(), 1)
    monkeypatch.setattr(grpc_transport, "SILENCE_S", 0.3 * times)
    monkeypatch.setattr(grpc_transport, "CAPTURE_S", 0.6 * times)
    monkeypatch.setattr(grpc_transport, "RESUME_PAUSE_S", 0.05)
    monkeypatch.setattr(channels, "CONNECT_S", 0.3 * times)
    return times


def test_an_interrupted_transfer_resumes_with_the_same_copy_where_it_was(calls: list[list[wire.Chunk]]) -> None:
    async def scenario() -> None:
        donor = Donor(LONG, LONG)
        async with linked(donor, (10 * MIB, "cut"), (14 * MIB, "cut")) as (both, proxy):
            assert await both.a.fetch_state(proxy.peer, 20.0, LONG_SPECS) == LONG
        assert donor.asked == [None, NUMBER, NUMBER]
        assert len(proxy.wires) == 3
        assert donor.lent == 0

    run(scenario())
    begins = [(sent[0].tensor, sent[0].offset) for sent in calls]
    assert (0, 0) == begins[0] < begins[1] < begins[2]
    assert begins[1] < (1, 0), "it resumes in the middle of a tensor"
    for before, after in pairwise(calls):
        place = after[0].tensor, after[0].offset
        come = sum(len(chunk.data) for chunk in before if (chunk.tensor, chunk.offset) < place)
        twice = sum(len(chunk.data) for chunk in before if (chunk.tensor, chunk.offset) >= place)
        assert come > 4 * MIB, "received bytes are not requested again"
        assert {chunk.tensor for chunk in before if chunk.tensor < place[0]}.isdisjoint(chunk.tensor for chunk in after)
        assert twice < 16 * MIB, "only bytes lost in flight are sent twice"


@pytest.mark.parametrize(
    ("again", "error", "text"),
    [
        (None, Declined, "that copy is gone"),
        (replace(LONG, number=4), Violation, "another copy"),
        (replace(LONG, round=8), Violation, "another copy"),
        (
            replace(LONG, tensors=tuple(replace(t, data=memoryview(bytes(t.data.nbytes))) for t in LONG.tensors)),
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
        donor = Donor(LONG, again)
        async with linked(donor, (int(10.5 * MIB), "cut")) as (both, proxy):
            with pytest.raises(error, match=text or "do not match the digest"):
                await both.a.fetch_state(proxy.peer, 20.0, LONG_SPECS)
            assert donor.asked == [None, NUMBER]
            assert alive(made) == 0 < len(made)

    run(scenario())


async def _seconds_to_unreachable(both: Pair, proxy: Proxy, fail: Callable[[], object]) -> float:
    """The time from the fault until the fetch fails."""
    clock = asyncio.get_running_loop().time
    fetching = asyncio.create_task(both.a.fetch_state(proxy.peer, 25.0, SPECS))
    await soon(proxy.faulty.wait())
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
        assert in_time(seconds, 4.0)
        assert donor.lent == 0

    run(scenario())


def test_a_persistently_silent_link_is_given_up_after_a_few_tries(
    impatient: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = watched_buffers(monkeypatch)

    async def scenario() -> None:
        donor = Donor()
        always: list[tuple[int, Fault]] = [(0, "swallow")] * 9
        async with linked(donor, (10 * MIB, "swallow"), *always) as (both, proxy):
            assert in_time(await _seconds_to_unreachable(both, proxy, lambda: None), 4.0)
            assert len(proxy.wires) == 1 + grpc_transport.RESUMES
            assert alive(made) == 0 < len(made)

    run(scenario())


def test_a_donor_that_sends_next_to_nothing_in_each_call_is_given_up_like_one_that_does_so_in_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It used to keep a newcomer until the deadline, half an hour."""

    class Reader:
        def __init__(self, *_: object) -> None:
            self.place = 0, 0

        def close(self) -> None: ...

    async def fetch(peer: Advert, reader: Reader, *_: object) -> None:
        reader.place = 0, reader.place[1] + 1
        raise Unreachable("reset")

    async def scenario() -> None:
        now, both = asyncio.get_running_loop().time, transport("A")
        monkeypatch.setattr(weights_codec, "StateReader", Reader)
        monkeypatch.setattr(both, "_fetch", fetch)
        with pytest.raises(slow_transfers.Silent):
            await both.fetch_state(Advert("B", "run", 0, ()), TRANSFER_DEADLINE_S, LONG_SPECS)
        assert now() == pytest.approx(slow_transfers.STATE_RESERVE_S, rel=0.1)

    virtual_time.run(scenario(), limit_s=10_000)


def test_a_link_that_falls_silent_once_is_replaced(impatient: float) -> None:
    async def scenario() -> None:
        donor = Donor()
        async with linked(donor, (10 * MIB, "swallow")) as (both, proxy):
            assert await both.a.fetch_state(proxy.peer, 20.0, SPECS) == STATE
        assert donor.asked == [None, NUMBER]

    run(scenario())


def test_a_donor_may_pause_longer_before_the_start_than_during_the_transfer(impatient: float) -> None:
    async def scenario() -> None:
        donor = Donor()
        wait_s = 0.45 * impatient

        @asynccontextmanager
        async def late(caller: PeerId, number: int | None) -> AsyncIterator[ReplicaState]:
            await asyncio.sleep(wait_s)
            async with donor.lend(caller, number) as state:
                yield state

        async with pair(Node(hang, lend=late)) as both:
            assert await both.a.fetch_state(both.peer, 20.0, SPECS) == STATE
            wait_s = 60.0
            with pytest.raises(Unreachable, match=re.escape(f"for {0.6 * impatient:g} s")):
                await both.a.fetch_state(both.peer, 20.0, SPECS)
        assert donor.asked == [None]

    run(scenario())


def test_a_cancelled_fetch_releases_the_copy() -> None:
    async def scenario() -> None:
        donor = Donor()
        async with linked(donor, (10 * MIB, "swallow")) as (both, proxy):
            fetching = asyncio.create_task(both.a.fetch_state(proxy.peer, 20.0, SPECS))
            await soon(proxy.faulty.wait())
            assert donor.lent == 1
            proxy.wires[0].cut()
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
            await soon(donor.returned.wait())
            assert donor.lent == 0

    run(scenario())
