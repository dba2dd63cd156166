"""The directory over a real DHT on loopback: a few libp2p daemons, one event loop."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from noloco_p2p.config import MANIFEST_LIMIT_BYTES
from noloco_p2p.core.messages import Advert
from noloco_p2p.errors import Busy, ConfigError, Declined, LocalError, Unreachable, Violation
from noloco_p2p.io import libp2p as libp2p_module
from noloco_p2p.io.adverts import Record, encode, packed_bytes, packed_text, stage_key
from noloco_p2p.io.directory import HivemindDirectory
from noloco_p2p.io.identity import Identity, peer_id_of
from noloco_p2p.io.join import DialAllowance, ask_dial_back, fetch_manifest, offer_manifest, serve_dial_back
from noloco_p2p.io.libp2p import Libp2p, sweep_stale_sockets

RUN = "cd" * 32
STRANGER = peer_id_of(bytes(range(32)))


@asynccontextmanager
async def daemon(home: Path, *, port: int = 0, join: list[str] | None = None) -> AsyncIterator[Libp2p]:
    identity = Identity.open(home / "identity.key")
    try:
        libp2p = await Libp2p.open(identity, host="127.0.0.1", port=port, join=join or [])
        try:
            yield libp2p
        finally:
            await libp2p.close()
    finally:
        identity.close()


@dataclass
class Node:
    libp2p: Libp2p
    directory: HivemindDirectory

    def advert(self, **changes: Any) -> Advert:
        return replace(Advert(self.libp2p.peer_id, RUN, 0, ("127.0.0.1:5000",), state="training", step=1.5), **changes)

    @property
    def address(self) -> str:
        return self.libp2p.join_addresses[0]


@asynccontextmanager
async def node(home: Path, *, port: int = 0, join: list[str] | None = None) -> AsyncIterator[Node]:
    async with daemon(home, port=port, join=join) as libp2p:
        directory = await HivemindDirectory.open(libp2p, run_id=RUN, stages=2, known_path=home / "known_peers.json")
        try:
            yield Node(libp2p, directory)
        finally:
            await directory.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60.0):
            await test()

    uvloop.run(bounded())


async def until(holds: Callable[[], Awaitable[bool]], seconds: float = 10.0) -> None:
    """Ask again until it holds; fails after `seconds`."""
    async with asyncio.timeout(seconds):
        while not await holds():  # noqa: ASYNC110  what is awaited lies in other processes
            await asyncio.sleep(0.05)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_three_nodes_see_each_other_move_leave_and_expire(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            node(tmp_path / "a") as a,
            node(tmp_path / "b", join=[a.address]) as b,
            node(tmp_path / "c", join=[a.address]) as c,
        ):
            assert await a.directory.peers() == []
            await a.directory.announce(a.advert(), 30.0)
            await b.directory.announce(b.advert(stage=1), 30.0)
            await c.directory.announce(c.advert(step=7.25), 1.0)
            everybody = sorted((a.advert(), b.advert(stage=1), c.advert(step=7.25)), key=lambda one: one.peer_id)
            for one in (a, b, c):
                seen = await one.directory.peers()
                assert [replace(peer, age_s=0.0) for peer in seen] == everybody
                assert all(0.0 < peer.age_s < 5.0 for peer in seen)

            async def expired() -> bool:
                return {peer.peer_id for peer in await a.directory.peers()} == {a.libp2p.peer_id, b.libp2p.peer_id}

            await until(expired, 3.0)  # c does not renew, and nobody says so
            await b.directory.announce(b.advert(stage=0, state="syncing"), 30.0)
            moved = [peer for peer in await a.directory.peers() if peer.peer_id == b.libp2p.peer_id]
            assert [(peer.stage, peer.state) for peer in moved] == [(0, "syncing")]
            await b.directory.withdraw()
            assert [peer.peer_id for peer in await a.directory.peers()] == [a.libp2p.peer_id]
            await b.directory.withdraw()
            await b.directory.announce(
                b.advert(), 1.0
            )  # shorter than what it announced before, and renewed all the same
            assert b.libp2p.peer_id in [peer.peer_id for peer in await c.directory.peers()]
            pids = [one.libp2p.daemon_pid for one in (a, b, c)]
            assert not any(gone(pid) for pid in pids)
        assert all(gone(pid) for pid in pids)

    run(scenario)


def test_an_advert_of_somebody_else_is_not_announced(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path / "a") as a:
            for wrong in (a.advert(peer_id=STRANGER), a.advert(run_id="ef" * 32), a.advert(stage=2)):
                with pytest.raises(ConfigError):
                    await a.directory.announce(wrong, 30.0)
            with pytest.raises(ConfigError):
                await a.directory.announce(a.advert(), 1e6)
            assert await a.directory.peers() == []

    run(scenario)


def test_forged_records_are_refused_by_storing_and_by_reading_nodes(tmp_path: Path) -> None:
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DictionaryDHTValue

    async def scenario() -> None:
        async with node(tmp_path / "a") as a, node(tmp_path / "b", join=[a.address]) as b:
            await a.directory.announce(a.advert(), 30.0)
            await b.directory.announce(b.advert(), 30.0)
            honest = [peer.peer_id for peer in await b.directory.peers()]
            key = DHTID.generate(stage_key(RUN, 0))
            mallory, victim = a.directory._node.protocol, b.directory._node.protocol
            expires = time.time() + 60.0
            made = packed_bytes(encode(Record(a.advert(step=99.0), time.time(), ())))
            forged = bytes(64) + made
            stored = [
                await mallory.call_store(b.libp2p.p2p.peer_id, [key], [forged], [expires], subkeys=[subkey])
                for subkey in (STRANGER, b.libp2p.peer_id, None)
            ]
            assert stored == [[False]] * 3
            poisoned = DictionaryDHTValue()
            poisoned.store(STRANGER, forged, expires)
            assert await mallory.call_store(b.libp2p.p2p.peer_id, [key], [poisoned], [expires]) == [False]
            assert STRANGER not in victim.storage.get(key).value

            # Mallory's own storage answers readers with a forgery: the reader drops it and keeps what is honest.
            mallory.storage.store(key, forged, expires, subkey=STRANGER)
            assert [peer.peer_id for peer in await b.directory.peers()] == honest
            assert packed_text(STRANGER)[2:] == STRANGER.encode()

    run(scenario)


def test_a_restarted_node_outbids_its_earlier_advert(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path / "a") as a:
            async with node(tmp_path / "b", join=[a.address]) as b:
                await b.directory.announce(b.advert(step=1.0), 60.0)
            async with node(tmp_path / "b", join=[a.address]) as b:
                await b.directory.announce(b.advert(step=2.0), 10.0)
            assert [peer.step for peer in await a.directory.peers()] == [2.0]

    run(scenario)


def test_a_restarted_bootstrap_node_rejoins_its_swarm(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path / "a") as a, node(tmp_path / "b", join=[a.address]) as b:
            await b.directory.announce(b.advert(), 30.0)
            await a.directory.peers()
            await a.directory.rejoin()
            await a.directory.close()
            await a.libp2p.close()
            a.libp2p.identity.close()
            async with node(tmp_path / "a") as again:
                assert again.libp2p.joined == ()
                assert [peer.peer_id for peer in await again.directory.peers()] == [b.libp2p.peer_id]
                await again.directory.announce(again.advert(), 30.0)
                assert len(await b.directory.peers()) == 2

    run(scenario)


def test_an_isolated_node_finds_its_swarm_again_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noloco_p2p.io.directory.REJOIN_PERIOD_S", 2.0)

    async def scenario() -> None:
        async with node(tmp_path / "a") as a:
            port = int(a.address.split("/")[4])
            async with node(tmp_path / "b", join=[a.address]) as b:
                await a.directory.close()
                await a.libp2p.close()
                a.libp2p.identity.close()

                async def alone() -> bool:
                    return not await b.libp2p.links()

                await until(alone)
                table = b.directory._node.protocol.routing_table
                for node_id in list(table.uid_to_peer_id):
                    del table[node_id]  # as hivemind does when a peer does not answer
                (tmp_path / "a" / "known_peers.json").unlink(missing_ok=True)
                async with node(tmp_path / "a", port=port) as again:
                    await again.directory.announce(again.advert(), 30.0)

                    async def seen() -> bool:
                        return [peer.peer_id for peer in await b.directory.peers()] == [again.libp2p.peer_id]

                    await until(seen, 20.0)

    run(scenario)


def test_bad_join_addresses_each_have_their_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert libp2p_module.DIAL_TIMEOUT_S <= 5.0
    monkeypatch.setattr("noloco_p2p.io.libp2p.DIAL_TIMEOUT_S", 1.0)
    monkeypatch.setattr("noloco_p2p.io.directory.BOOTSTRAP_TIMEOUT_S", 1.0)

    async def refused(join: list[str], kind: type[Exception], message: str) -> None:
        begun = time.monotonic()
        with pytest.raises(kind, match=message) as caught:
            async with daemon(tmp_path / "b", join=join):
                pass
        assert "\n" not in str(caught.value)
        assert time.monotonic() - begun < 10.0

    async def scenario() -> None:
        async with daemon(tmp_path / "a") as a:
            good = a.join_addresses[0]
            with socket.socket() as silent:
                silent.bind(("127.0.0.1", 0))
                dead = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{a.peer_id}"
                await refused([dead], Unreachable, "nobody answers .*refused")
                silent.listen()
                await refused([dead], Unreachable, "an answer did not come within 1 s")
            await refused([good[:-4]], ConfigError, "malformed join address")
            await refused([good.replace(a.peer_id, STRANGER)], ConfigError, f"another peer answers there .{a.peer_id}")
            with pytest.raises(ConfigError, match="this node's own"):
                await Libp2p.open(a.identity, host="127.0.0.1", port=0, join=[good])
            async with daemon(tmp_path / "b", join=[dead.replace(a.peer_id, STRANGER), good]) as b:
                assert [str(address) for address in b.joined] == [good]
                with pytest.raises(Unreachable, match="keeps no directory of this run"):
                    await HivemindDirectory.open(b, run_id=RUN, stages=1, known_path=tmp_path / "known")

    run(scenario)


def test_a_port_in_use_is_refused_even_by_another_daemon(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with daemon(tmp_path / "a") as a:
            port = int(a.join_addresses[0].split("/")[4])
            with pytest.raises(LocalError, match=f"port {port} on 127.0.0.1 is in use"):
                async with daemon(tmp_path / "b", port=port):
                    pass

    run(scenario)


def test_ctrl_c_in_a_terminal_does_not_reach_the_daemon(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with daemon(tmp_path / "a") as a:
            assert os.getpgid(a.daemon_pid) == a.daemon_pid != os.getpgid(0)

    run(scenario)


def test_the_death_of_the_daemon_is_noticed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path / "a") as a:
            await a.directory.announce(a.advert(), 30.0)
            os.kill(a.libp2p.daemon_pid, signal.SIGKILL)
            with pytest.raises(LocalError, match="has died"):
                await asyncio.wait_for(asyncio.shield(a.libp2p.failed), 5.0)
            for refused in (a.directory.announce(a.advert(), 30.0), a.directory.peers(), a.directory.withdraw()):
                with pytest.raises(LocalError, match="has died"):
                    await refused

    run(scenario)


def test_the_manifest_and_the_time_come_from_the_joined_peer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with daemon(tmp_path / "a") as a, daemon(tmp_path / "b", join=a.join_addresses) as b:
            with pytest.raises(Declined, match="no noloco node, or not ready"):
                await fetch_manifest(b, a.peer_id)
            await offer_manifest(a, b"m" * MANIFEST_LIMIT_BYTES)
            before = time.time()
            manifest, theirs = await fetch_manifest(b, a.peer_id)
            assert manifest == b"m" * MANIFEST_LIMIT_BYTES
            assert before <= theirs <= time.time()
            await offer_manifest(b, b"m" * (MANIFEST_LIMIT_BYTES + 1))
            with pytest.raises(Violation, match="manifest of 65537 bytes"):
                await fetch_manifest(a, b.peer_id)
            with pytest.raises(Unreachable):
                await b.call(STRANGER, "noloco/manifest/1", b"", 2.0)

    run(scenario)


def test_a_joined_peer_dials_back(tmp_path: Path) -> None:
    dialled: list[tuple[str, str]] = []

    async def probe(address: str, peer_id: str) -> str | None:
        dialled.append((address, peer_id))
        if address.endswith(":2"):
            raise Unreachable("refused")
        return None if address.endswith(":1") else "another peer is there"

    async def scenario() -> None:
        async with daemon(tmp_path / "a") as a, daemon(tmp_path / "b", join=a.join_addresses) as b:
            await serve_dial_back(a, probe, DialAllowance(per_minute=3))
            assert await ask_dial_back(b, a.peer_id, "127.0.0.1:1") is None
            assert await ask_dial_back(b, a.peer_id, "127.0.0.1:2") == "refused"
            assert await ask_dial_back(b, a.peer_id, "127.0.0.1:3") == "another peer is there"
            assert dialled == [(f"127.0.0.1:{port}", b.peer_id) for port in (1, 2, 3)]
            with pytest.raises(Declined, match="not of the form host:port"):
                await ask_dial_back(b, a.peer_id, "nonsense")
            with pytest.raises(Busy):
                await ask_dial_back(b, a.peer_id, "127.0.0.1:1")
            assert len(dialled) == 3

    run(scenario)


def test_only_sockets_that_nobody_listens_on_are_swept(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as live:
        dead.bind(str(tmp_path / "hivemind-p2pd-dead.sock"))
        live.bind(str(tmp_path / "hivemind-p2pd-live.sock"))
        live.listen()
        (tmp_path / "other.sock").touch()
        assert sweep_stale_sockets(tmp_path, libp2p_module._SOCKETS_MIN_AGE_S) == 0
        assert sweep_stale_sockets(tmp_path, 0.0) == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == ["hivemind-p2pd-live.sock", "other.sock"]
