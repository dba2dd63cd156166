"""A running node notices that its machine's clock is wrong."""

import asyncio
import os
import re
import signal
import struct
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from daemons import daemon, run, until

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import Violation
from noloco_p2p.io.dht import clock_watch
from noloco_p2p.io.dht.adverts import dht_time
from noloco_p2p.io.dht.clock_watch import wrong_clock
from noloco_p2p.io.dht.join_handshake import MANIFEST_CALL, fetch_manifest


@pytest.mark.parametrize(
    "ahead",
    [
        [],
        [0.2, -0.1, 14.9],
        [15.0, 15.0],
        [900.0],
        [900.0, 0.1],
        [16.0, -16.0],
        [900.0, -900.0, 0.0],
        [20.0, 0.0, 30.0, 0.0],
    ],
)
def test_a_clock_is_trusted_unless_most_peers_disagree_with_it(ahead: list[float]) -> None:
    assert wrong_clock(ahead, 30.0) is None


@pytest.mark.parametrize(
    ("ahead", "sentence"),
    [
        ([120.0, 121.0, 122.0], "this machine's clock is 121 s behind those of 3 of 3 nodes, "),
        ([-15.1, -17.0], "this machine's clock is 16 s ahead of those of 2 of 2 nodes, "),
        ([3600.0, 0.0, 3600.0], "this machine's clock is 3,600 s behind those of 2 of 3 nodes, "),
    ],
)
def test_the_warning_says_by_how_much_and_what_to_do(ahead: list[float], sentence: str) -> None:
    end = "and adverts expire after 30 s: set the clock (for example with NTP)"
    assert wrong_clock(ahead, 30.0) == sentence + end


def test_linked_nodes_are_asked_and_a_corrected_clock_clears_the_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_watch, "PERIOD_S", 0.05)
    ahead = {"b": 120.0, "c": 121.0, "d": float("nan")}

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            mine = await stack.enter_async_context(daemon(tmp_path / "a"))
            for name in ahead:

                async def answer(caller: PeerId, request: bytes, name: str = name) -> bytes:
                    return struct.pack(">d", dht_time() + ahead[name]) + b"the manifest"

                other = await stack.enter_async_context(daemon(tmp_path / name, join=[mine.join_addresses[0]]))
                await other.serve(MANIFEST_CALL, answer)
            with pytest.raises(Violation, match=r"^peer \w+ sent a time that is not finite$"):
                await fetch_manifest(mine, other.peer_id)
            told: list[str | None] = []
            watching = asyncio.create_task(clock_watch.keep(mine, 30.0, told.append))

            async def complains() -> bool:
                return bool(told) and told[-1] is not None

            async def is_content() -> bool:
                return told[-1] is None

            await until(complains)
            assert re.match(r"this machine's clock is 1[12]\d s behind those of 2 of 2 nodes, ", str(told[-1]))
            ahead.update(b=0.0, c=0.0)
            await until(is_content)
            watching.cancel()

    run(scenario)


def test_a_daemon_that_dies_during_a_check_does_not_end_the_clock_watch(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with daemon(tmp_path / "a") as mine, daemon(tmp_path / "b", join=mine.join_addresses) as other:
            asked, told = asyncio.Event(), asyncio.Queue[str | None]()

            async def never(caller: PeerId, request: bytes) -> bytes:
                asked.set()
                return await asyncio.Future()

            await other.serve(MANIFEST_CALL, never)
            watching = asyncio.create_task(clock_watch.keep(mine, 30.0, told.put_nowait))
            await asked.wait()
            os.kill(mine.p2p._child.pid, signal.SIGKILL)
            saying = asyncio.create_task(told.get())
            await asyncio.wait([watching, saying], return_when=asyncio.FIRST_COMPLETED)
            assert not watching.done(), watching.exception()
            assert await saying is None
            watching.cancel()

    run(scenario)
