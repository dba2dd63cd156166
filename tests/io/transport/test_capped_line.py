"""Abandoned transfers release the owner's line: without connections, in virtual time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import grpc.aio
import pytest
from transport_fixture import advert, tensor, transport

from noloco_p2p.config import LimitSettings
from noloco_p2p.core.line_cap import BYTES_PER_MBIT, CAPPED_MESSAGE_S, HELD_S, SHARE, Precedence
from noloco_p2p.core.line_rate import CONNECTIONS, MIN_MESSAGE_BYTES
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.core.timeouts import SILENCE_S
from noloco_p2p.errors import Unreachable
from noloco_p2p.io.transport import weights_codec
from noloco_p2p.io.transport.capped_line import OTHER, OwnersLine
from noloco_p2p.io.transport.exchange import Fetched
from noloco_p2p.io.transport.servicer import GrpcServicer
from noloco_p2p.io.transport.slow_transfers import STATE_RESERVE_S, Silent
from noloco_p2p.io.transport.stripes import Duplex
from noloco_p2p.sim.virtual_time import run

MBIT_PER_S, MESSAGES = 16.0, 200


@pytest.mark.parametrize("end", [asyncio.CancelledError, ConnectionError])
def test_messages_that_never_arrive_use_none_of_the_line(end: type[BaseException]) -> None:
    """A replica that loses a race has requested a body that its caller will not send."""

    async def scenario() -> None:
        line, clock = OwnersLine(LimitSettings(download_mbit_per_s=MBIT_PER_S)), asyncio.get_running_loop().time
        message = bytes(int(MBIT_PER_S * BYTES_PER_MBIT * CAPPED_MESSAGE_S))

        async def never() -> bytes:
            await asyncio.sleep(CAPPED_MESSAGE_S)
            raise end

        async def comes() -> bytes:
            return message

        async def lose() -> None:
            while not all_here:
                with suppress(end):
                    await line.receiver(never)()

        all_here, read = False, line.receiver(comes)
        losing = asyncio.create_task(lose())
        for _ in range(MESSAGES):
            await read()
        assert clock() <= (MESSAGES + 1) * CAPPED_MESSAGE_S
        all_here = True
        await losing

    run(scenario(), limit_s=60.0)


def test_calls_that_send_nothing_use_none_of_the_line() -> None:
    """Anybody may open hundreds. What their first messages will take is not known, and is charged when they come."""

    async def scenario() -> None:
        line, clock = OwnersLine(LimitSettings(download_mbit_per_s=MBIT_PER_S)), asyncio.get_running_loop().time
        message = bytes(int(MBIT_PER_S * BYTES_PER_MBIT * CAPPED_MESSAGE_S))
        servicer = cast(GrpcServicer, SimpleNamespace(_line=line))

        async def never() -> bytes:
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

        async def comes() -> bytes:
            return message

        silent = [GrpcServicer._first_message(servicer, SimpleNamespace(read=never)) for _ in range(MESSAGES)]
        strangers = asyncio.gather(*silent, return_exceptions=True)
        await asyncio.sleep(0.1)
        read = line.receiver(comes)
        for _ in range(MESSAGES):
            await read()
        assert clock() <= (MESSAGES + 3) * CAPPED_MESSAGE_S
        assert {type(end) for end in await strangers} == {Silent}
        firsts = [GrpcServicer._first_message(servicer, SimpleNamespace(read=comes)) for _ in range(MESSAGES)]
        began = clock()
        await asyncio.gather(*firsts)
        await read()
        assert clock() - began >= (MESSAGES - 3) * CAPPED_MESSAGE_S - HELD_S, "what comes is charged"

    run(scenario(), limit_s=120.0)


def test_what_may_be_in_transit_is_given_back_when_a_body_fails() -> None:
    async def scenario() -> None:
        line = OwnersLine(LimitSettings(download_mbit_per_s=MBIT_PER_S))
        for _ in range(MESSAGES):
            with suppress(ConnectionError):
                async with line.in_transit(OTHER):
                    raise ConnectionError
        assert asyncio.get_running_loop().time() == 0.0

    run(scenario(), limit_s=60.0)


def test_a_message_that_is_cancelled_as_its_turn_comes_uses_none_of_the_line() -> None:
    """A replica that grants a place cancels the calls to the others, whose turn may come at that moment."""

    async def scenario() -> None:
        line = OwnersLine(LimitSettings(upload_mbit_per_s=MBIT_PER_S))

        async def write(message: bytes) -> None:
            raise AssertionError("its turn was cancelled")

        for _ in range(MESSAGES):
            line.charge(sent=1 << 20, received=0)
            sending = asyncio.ensure_future(line.sender(write)(bytes(1 << 18)))
            await asyncio.sleep(0)
            line.charge(sent=-(1 << 20), received=0)
            sending.cancel()
            await asyncio.wait([sending])
        assert asyncio.get_running_loop().time() == 0.0
        await line.sender(AsyncMock())(bytes(1 << 18))
        assert asyncio.get_running_loop().time() == 0.0

    run(scenario(), limit_s=60.0)


def test_short_messages_are_charged_without_waiting() -> None:
    async def scenario() -> None:
        line, clock = OwnersLine(LimitSettings(upload_mbit_per_s=MBIT_PER_S)), asyncio.get_running_loop().time
        send = line.sender(AsyncMock())
        for _ in range(MESSAGES):
            await send(bytes(MIN_MESSAGE_BYTES))
        assert clock() == 0.0
        await send(bytes(MIN_MESSAGE_BYTES + 1))
        assert clock() == pytest.approx(MESSAGES * MIN_MESSAGE_BYTES / (MBIT_PER_S * BYTES_PER_MBIT) - HELD_S, abs=0.01)

    run(scenario(), limit_s=60.0)


@pytest.mark.parametrize("limits", [LimitSettings(), LimitSettings(upload_mbit_per_s=MBIT_PER_S)])
def test_a_peer_cannot_have_its_messages_made_tiny(limits: LimitSettings) -> None:
    assert OwnersLine(limits).agreed(1) == MIN_MESSAGE_BYTES


def test_a_message_that_fails_leaves_the_measured_rates_right() -> None:
    """A transfer that never ended would share the line with all later ones."""

    async def scenario() -> None:
        line, message, ends = OwnersLine(LimitSettings()), bytes(1 << 20), iter((None, *2 * (ConnectionError, None)))

        async def move(*_: object) -> bytes:
            await asyncio.sleep(1.0)
            if error := next(ends):
                raise error
            return message

        read, send = line.receiver(move), partial(line.sender(move), message)
        await read()  # Nothing is measured before the second message.
        for transfer, rate in (read, line.measured.down), (send, line.measured.up):
            with pytest.raises(ConnectionError):
                await transfer()
            await transfer()
            assert rate.bytes_per_s == pytest.approx(len(message))

    run(scenario(), limit_s=60.0)


def test_a_fetch_delayed_by_this_nodes_own_line_continues_and_a_silent_one_is_given_up() -> None:
    """The line is full of bodies, so weights get a tenth of it, and one turn of every connection takes seconds."""

    async def scenario() -> None:
        line, clock = OwnersLine(LimitSettings(download_mbit_per_s=MBIT_PER_S)), asyncio.get_running_loop().time
        message = bytes(int(MBIT_PER_S * BYTES_PER_MBIT * CAPPED_MESSAGE_S))

        async def comes() -> bytes:
            return message

        async def bodies() -> None:
            while True:
                await line.receiver(comes, (Precedence.ACTIVATION, (1, 1)))()

        async def fetch(messages: int, last: int) -> str:
            """Fetch `messages` messages from a sender that falls silent after `last` of them."""
            left = [messages]

            def feed(message: bytes) -> str | None:
                left[0] -= 1
                return None if left[0] else "whole"

            async def read() -> bytes:
                await asyncio.sleep(0.01)
                if left[0] <= messages - last:
                    await asyncio.Event().wait()
                return message

            @asynccontextmanager
            async def parallel() -> AsyncIterator[Duplex]:
                yield nowhere, line.receiver(read, first_at_once=True, held=fetched.held)

            async def nowhere(message: bytes) -> None:
                pass

            fetched = Fetched(feed, "weights")
            way = line.receiver(read, first_at_once=True, held=fetched.held)
            call, others = SimpleNamespace(cancel=lambda: None), [parallel() for _ in range(CONNECTIONS)]
            return (await fetched.within(call, others, (way, way), (SILENCE_S, SILENCE_S, None)))[0]

        full = [asyncio.create_task(bodies()) for _ in range(2)]
        fetches = [asyncio.create_task(fetch(100, 100)) for _ in range(2)]
        assert await asyncio.gather(*fetches) == ["whole", "whole"]
        assert clock() > 100 * CAPPED_MESSAGE_S / SHARE
        began = clock()
        with pytest.raises(Unreachable, match="no more of the weights for 5 s"):
            await fetch(100, 20)
        assert clock() - began < 2 * (SILENCE_S + 20 * CAPPED_MESSAGE_S / SHARE)
        for task in full:
            task.cancel()

    run(scenario(), limit_s=600.0)


def test_weights_that_are_late_because_this_nodes_own_line_is_full_are_not_given_up() -> None:
    """They are due at an even rate, but bodies fill the line for longer than the peer may fall behind."""
    sent, full_s = Snapshot("B", 4, 40, (tensor("weights", "float32", (1 << 18,)),)), 1.1 * STATE_RESERVE_S

    async def scenario() -> None:
        mine = transport("A", limits=LimitSettings(download_mbit_per_s=MBIT_PER_S))
        messages = weights_codec.to_snapshot(sent, mine._line.wanted_bytes)

        async def read() -> Any:
            await asyncio.sleep(0.01)
            return next(messages, grpc.aio.EOF)

        call = SimpleNamespace(read=read, cancel=lambda: None)
        channel = SimpleNamespace(fetch=lambda *_, **options: call, at_most=lambda connections: connections)
        mine._calling = lambda *_, **options: nullcontext((channel, 1000.0))  # type: ignore[method-assign,assignment]
        mine.line.answered("B", 0.0)
        mine._line.charge(sent=0, received=int(full_s * MBIT_PER_S * BYTES_PER_MBIT))
        request, expected = SnapshotRequest(1, 4, 0.0, "float32"), tuple(one.spec for one in sent.tensors)
        fetched = await mine.fetch_snapshot(advert("127.0.0.1:1"), request, 900.0, expected)
        assert [one.data for one in fetched.tensors] == [one.data for one in sent.tensors]
        assert asyncio.get_running_loop().time() > STATE_RESERVE_S

    run(scenario(), limit_s=200.0)
