"""A libp2p daemon that dies is restarted: the node keeps its peer id and its address, and still knows the others."""

import asyncio
import gc
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from errno import ENOSPC
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import base58
import pytest
from daemons import STRANGER, Node, daemon, node, run, until
from machine import at_most

from noloco_p2p.errors import LocalError, Unreachable
from noloco_p2p.io.dht import addresses, daemon_restarts, p2p_daemon
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.dht.join_handshake import fetch_manifest, serve_manifest
from noloco_p2p.io.dht.libp2p import Libp2pDaemon, Stream
from noloco_p2p.launch.node_probe import scrape
from noloco_p2p.sim import virtual_time


@dataclass
class Kept(Node):
    """A node whose daemon is restarted when it dies, and the troubles that this task has reported."""

    keeping: "asyncio.Task[None]"
    troubles: list[str | None]

    async def kill(self) -> None:
        """Kill the daemon, and wait until it is known to be dead."""
        failed = self.libp2p.failed
        os.kill(self.libp2p.p2p._child.pid, signal.SIGKILL)
        with suppress(LocalError):
            await asyncio.shield(failed)

    async def back(self) -> None:
        """Wait until the directory can be read again."""

        async def readable() -> bool:
            with suppress(Unreachable):
                await self.directory.peers()
                return True
            return False

        await until(readable)


@asynccontextmanager
async def kept(home: Path) -> AsyncIterator[Kept]:
    async with node(home, metrics_port=0) as own:
        await serve_manifest(own.libp2p, b"the manifest")
        troubles: list[str | None] = []
        keeping = asyncio.create_task(own.directory.keep(troubles.append))
        try:
            yield Kept(own.libp2p, own.directory, keeping, troubles)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


async def step_seen_by(other: Node, peer: str) -> float | None:
    return next((advert.step for advert in await other.directory.peers() if advert.peer_id == peer), None)


def test_a_node_whose_daemon_was_restarted_is_found_again_and_still_knows_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(daemon_restarts, "RECOVERED_S", 1.0)

    async def scenario() -> None:
        async with kept(tmp_path / "a") as a, node(tmp_path / "b", join=[a.address]) as b:

            async def settled() -> bool:
                return a.troubles[-1] is None

            me, before = a.libp2p.peer_id, a.libp2p.p2p
            await a.directory.announce(a.advert(), 30.0)
            await b.directory.announce(b.advert(stage=1), 30.0)
            address, metrics_port = a.address, a.libp2p.metrics_port
            both = sorted([me, b.libp2p.peer_id])
            assert [peer.peer_id for peer in await a.directory.peers()] == both
            await a.kill()
            for cut_off in (a.directory.peers(), a.directory.announce(a.advert(), 30.0), a.directory.withdraw(7.0)):
                with pytest.raises(Unreachable, match="libp2p daemon"):
                    await cut_off
            await a.back()

            assert "rejoining" not in caplog.text
            assert a.libp2p.p2p is not before
            assert a.libp2p.join_addresses == [address]
            await asyncio.to_thread(scrape, f"http://127.0.0.1:{metrics_port}/metrics", 5.0)
            assert not os.path.exists(before._daemon_listen_maddr["unix"])  # noqa: ASYNC240
            assert [peer.peer_id for peer in await a.directory.peers()] == both, "what the node knew is kept"
            await a.directory.withdraw(7.0)
            assert [(p.peer_id, p.state) for p in await b.directory.peers() if p.peer_id == me] == [(me, "left")]
            await a.directory.announce(a.advert(step=9.0), 30.0)
            assert await step_seen_by(b, me) == 9.0
            async with daemon(tmp_path / "c", join=[a.address]) as newcomer:
                assert (await fetch_manifest(newcomer, me))[0] == b"the manifest"
            await until(settled, 3.0)
            died, again, well = a.troubles
            assert "has died (signal 9); it is being restarted" in str(died)
            assert "has died (signal 9); restarted 1 time" in str(again)
            assert well is None

    run(scenario)


def test_a_full_disk_does_not_keep_a_node_whose_daemon_was_restarted_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with kept(tmp_path / "a") as a, node(tmp_path / "b", join=[a.address]) as b:
            await b.directory.announce(b.advert(), 30.0)
            await a.directory.peers()
            monkeypatch.setattr(addresses, "write_whole", Mock(side_effect=OSError(ENOSPC, "No space left on device")))
            await a.kill()
            await a.back()
            assert await a.libp2p.links() == {b.libp2p.peer_id}
            assert "known_peers.json cannot be written" in caplog.text

    run(scenario)


def test_a_daemon_that_hangs_is_killed_and_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(daemon_restarts, "RECOVERED_S", 0.5)
    monkeypatch.setattr(p2p_daemon, "ANSWER_TIMEOUT_S", 1.0)

    async def scenario() -> None:
        async with kept(tmp_path / "a") as a:
            await a.directory.announce(a.advert(), 30.0)
            before = a.libp2p.p2p
            os.kill(before._child.pid, signal.SIGSTOP)

            async def another() -> bool:
                return a.libp2p.p2p is not before

            await until(another, 60.0)
            await a.back()
            assert [peer.peer_id for peer in await a.directory.peers()] == [a.libp2p.peer_id]
            assert "does not answer: killing it" in caplog.text

    run(scenario)


def provider_record(peer: bytes) -> bytes:
    """A message of libp2p's own DHT after which the daemon stores, for a day or two, that this peer provides a key."""

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    address = bytes([4, 127, 0, 0, 1, 6, 16, 32])  # /ip4/127.0.0.1/tcp/4128
    key, who = os.urandom(80), field(1, peer) + field(2, address)
    message = b"\x08\x02" + field(2, key) + field(9, who)
    return bytes([len(message) & 127 | 128, len(message) >> 7]) + message


def test_a_stranger_cannot_make_a_daemon_exceed_its_memory_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fill(b: Libp2pDaemon, other: str) -> None:
        me = base58.b58decode(b.peer_id)
        while True:
            with suppress(ConnectionError, Unreachable):
                _, writer = await b.open_stream(other, "/ipfs/kad/1.0.0")
                while True:
                    writer.write(b"".join(provider_record(me) for _ in range(1000)))
                    await writer.drain()

    async def scenario() -> None:
        monkeypatch.setattr(p2p_daemon, "MEMORY_BYTES", 128 << 20)
        async with kept(tmp_path / "a") as a:
            monkeypatch.undo()  # for the stranger's own daemon
            async with daemon(tmp_path / "b", join=[a.address]) as b:
                failed, filling = a.libp2p.failed, asyncio.create_task(fill(b, a.libp2p.peer_id))
                await asyncio.wait([failed, filling], return_when=asyncio.FIRST_COMPLETED)
                assert failed.done()
                filling.cancel()
                await a.back()
                assert "has died (exit code 2); restarted 1 time" in str(a.troubles[-1])

    run(scenario)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)  # until all of its threads have stopped


def test_a_daemon_that_dies_during_a_call_leaves_no_unhandled_errors(tmp_path: Path) -> None:
    bugs = list[dict[str, Any]]()

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: bugs.append(context))
        async with kept(tmp_path / "a") as a:
            control = a.libp2p.p2p._client.control
            stop(a.libp2p.p2p._child.pid)
            call = asyncio.create_task(a.libp2p.call(STRANGER, "a question that it never reads", b"", 60.0))
            for _ in range(20):
                await asyncio.sleep(0)
            await a.kill()
            with pytest.raises(LocalError, match="has died"):
                await call
            await asyncio.wait([control._read_task, control._write_task])
            await a.back()

    run(scenario)
    gc.collect()
    assert not bugs


def test_a_daemon_that_keeps_dying_is_restarted_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_restarts, "PAUSES_S", (0.0, 0.0))

    async def scenario() -> None:
        async with kept(tmp_path / "a") as a:
            for _ in range(len(daemon_restarts.PAUSES_S) + 1):
                await a.kill()
                await a.back()
            assert "restarted 3 times" in str(a.troubles[-1])
            assert not a.keeping.done()

    run(scenario)


def test_pauses_grow_until_a_daemon_has_recovered_and_only_a_second_silence_in_a_row_kills_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lives, troubles = iter([10.0] * 5 + [130.0, 70.0, inf]), list[str | None]()
    restarted_at, killed_at = list[float](), list[float]()
    silent = LocalError("the daemon does not answer")
    answers = [set[str](), set[str](), silent, silent, set[str](), silent, silent, set[str]()]
    libp2p: Any = SimpleNamespace(links=AsyncMock(side_effect=answers), p2p=None)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        begun_at = loop.time()

        async def restart() -> str:
            restarted_at.append(loop.time() - begun_at)
            libp2p.failed = loop.create_future()
            if (life_s := next(lives)) < inf:
                loop.call_later(life_s, libp2p.failed.set_exception, LocalError("it died"))
            return ""

        monkeypatch.setattr(p2p_daemon, "kill", lambda _: killed_at.append(loop.time() - begun_at))
        await restart()
        with suppress(TimeoutError):
            async with asyncio.timeout(700.0):
                await daemon_restarts.keep(libp2p, restart, troubles.append)

    virtual_time.run(scenario(), limit_s=1000.0)
    assert restarted_at == [0.0, 10.0, 22.0, 40.0, 110.0, 180.0, 310.0, 380.0]
    assert [number for number, one in enumerate(troubles) if one is None] == [10, 13, 16]
    assert killed_at == [620.0]


def listener(a: Kept) -> socket.socket:
    """A socket that occupies the port of the dead daemon."""
    other = socket.socket()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    other.bind(("127.0.0.1", int(a.address.split("/")[4])))
    other.listen()
    return other


def test_a_daemon_that_cannot_start_is_given_up_after_a_few_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_restarts, "PAUSES_S", (0.3, 1.0, 2.0))

    async def scenario() -> None:
        async with kept(tmp_path / "a") as a:
            address = a.address
            await a.kill()
            with listener(a):

                async def tried() -> bool:
                    return any("in use" in (trouble or "") for trouble in a.troubles)

                await until(tried)
            await a.back()
            assert a.libp2p.join_addresses == [address]
            again = re.search(r"restarted ([23]) times", str(a.troubles[-1]))  # 3 if the test itself was slow
            assert again is not None

            monkeypatch.setattr(daemon_restarts, "PAUSES_S", (0.0, 0.0))
            await a.kill()
            with listener(a), pytest.raises(LocalError, match=r"in use.*it was restarted .* times") as caught:
                await asyncio.wait_for(asyncio.shield(a.keeping), at_most(3.0))
            assert f"it was restarted {int(again[1]) + 2} times" in str(caught.value)
            assert "\n" not in str(caught.value)
            with pytest.raises(Unreachable):
                await a.directory.peers()

    run(scenario)


def test_a_daemon_that_dies_during_its_restart_accepts_streams_after_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with daemon(tmp_path / "a") as a, daemon(tmp_path / "b", join=a.join_addresses) as b:
            callers: list[str] = []

            async def note(caller: str, _: Stream) -> None:
                callers.append(caller)

            for name in ("one", "other"):
                await a.serve_streams(name, note)
            start = a._start

            async def start_and_die() -> None:
                await start()
                os.kill(a.p2p._child.pid, signal.SIGKILL)
                await asyncio.wait([a.failed])

            monkeypatch.setattr(a, "_start", start_and_die)
            with pytest.raises(LocalError):
                await a.restart()
            monkeypatch.undo()
            await a.restart()

            async def linked() -> bool:
                with suppress(Unreachable):  # b's daemon found a's dead, and dials it again only after a while
                    await b.dial(JoinAddress.parse(a.join_addresses[0]))
                    return True
                return False

            await until(linked)
            for name in ("one", "other"):
                await b.open_stream(a.peer_id, name)

            async def both_are_noted() -> bool:
                return callers == [b.peer_id] * 2

            await until(both_are_noted)

    run(scenario)
