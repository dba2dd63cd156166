"""What is given up gives an owner's line back: no connection, and virtual time."""

import asyncio
from contextlib import suppress

import pytest

from noloco_p2p.config import LimitSettings
from noloco_p2p.core.line_cap import BYTES_PER_MBIT, MESSAGE_S
from noloco_p2p.io.transport.capped_line import OwnersLine
from noloco_p2p.sim.virtual_time import run

MBIT_PER_S, MESSAGES = 16.0, 200


@pytest.mark.parametrize("end", [asyncio.CancelledError, ConnectionError])
def test_messages_that_never_come_take_nothing_of_the_line(end: type[BaseException]) -> None:
    """A replica that loses a race has asked for a body that its caller will not send."""

    async def scenario() -> None:
        line, clock = OwnersLine(LimitSettings(download_mbit_per_s=MBIT_PER_S)), asyncio.get_running_loop().time
        message = bytes(int(MBIT_PER_S * BYTES_PER_MBIT * MESSAGE_S))

        async def never() -> bytes:
            await asyncio.sleep(MESSAGE_S)
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
        assert clock() <= (MESSAGES + 1) * MESSAGE_S
        all_here = True
        await losing

    run(scenario(), limit_s=60.0)
