"""A libp2p daemon that dies is started again: the node is the same peer, at the same address, and knows the others."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from daemons import RUN, Node, daemon, node, run, until
from machine import at_most

from noloco_p2p.core.messages import Advert
from noloco_p2p.errors import LocalError, Unreachable
from noloco_p2p.io.dht import dht_supervisor as presence_module
from noloco_p2p.io.dht.dht_supervisor import SupervisedDirectory
from noloco_p2p.io.dht.join_handshake import fetch_manifest, serve_manifest
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.launch.node_probe import scrape


@dataclass
class Kept:
    """A node's presence, kept; what it tells of its troubles."""

    presence: SupervisedDirectory
    address: str
    keeping: "asyncio.Task[None]"
    troubles: list[str | None] = field(default_factory=list)

    @property
    def advert(self) -> Advert:
        return Advert(self.presence.libp2p.peer_id, RUN, 0, ("127.0.0.1:5000",), state="training", step=1.5)

    async def kill(self) -> None:
        """Kill the daemon, and wait until it is known to be dead."""
        libp2p = self.presence.libp2p
        os.kill(libp2p.daemon_pid, signal.SIGKILL)
        with suppress(LocalError):
            await asyncio.shield(libp2p.failed)

    async def back(self) -> None:
        """Until the directory can be read again."""

        async def readable() -> bool:
            with suppress(Unreachable):
                await self.presence.peers()
                return True
            return False

        await until(readable)


@asynccontextmanager
async def kept(home: Path) -> AsyncIterator[Kept]:
    async def offer(libp2p: Libp2pDaemon) -> None:
        await serve_manifest(libp2p, b"the manifest")

    async with daemon(home, metrics_port=0) as libp2p:
        presence = await SupervisedDirectory.open(
            libp2p, run_id=RUN, stages=2, known_path=home / "known.json", offer=offer
        )
        troubles: list[str | None] = []
        keeping = asyncio.create_task(presence.keep(troubles.append))
        try:
            yield Kept(presence, libp2p.join_addresses[0], keeping, troubles)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await presence.close()


async def step_seen_by(other: Node, peer: str) -> float | None:
    return next((advert.step for advert in await other.directory.peers() if advert.peer_id == peer), None)


def test_who_loses_its_daemon_is_found_again_and_still_knows_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence_module, "RECOVERED_S", 1.0)

    async def scenario() -> None:
        async with kept(tmp_path / "a") as a, node(tmp_path / "b", join=[a.address]) as b:

            async def settled() -> bool:
                return a.troubles[-1] is None

            me, before = a.advert.peer_id, a.presence.libp2p
            await a.presence.announce(a.advert, 30.0)
            await b.directory.announce(b.advert(stage=1), 30.0)
            both = sorted([me, b.libp2p.peer_id])
            assert [peer.peer_id for peer in await a.presence.peers()] == both
            await a.kill()
            for cut_off in (a.presence.peers(), a.presence.announce(a.advert, 30.0), a.presence.withdraw()):
                with pytest.raises(Unreachable, match="libp2p daemon"):
                    await cut_off
            await a.back()

            assert a.presence.libp2p is not before
            assert a.presence.libp2p.join_addresses == before.join_addresses == [a.address]
            await asyncio.to_thread(scrape, f"http://127.0.0.1:{before.metrics_port}/metrics", 5.0)
            assert not os.path.exists(before.p2p._daemon_listen_maddr["unix"])  # noqa: ASYNC240
            assert [peer.peer_id for peer in await a.presence.peers()] == both, "what was known is kept"
            await a.presence.withdraw()
            assert [(p.peer_id, p.state) for p in await b.directory.peers() if p.peer_id == me] == [(me, "left")]
            await a.presence.announce(replace(a.advert, step=9.0), 30.0)
            assert await step_seen_by(b, me) == 9.0
            async with daemon(tmp_path / "c", join=[a.address]) as newcomer:
                assert (await fetch_manifest(newcomer, me))[0] == b"the manifest"
            await until(settled, 3.0)
            died, again, well = a.troubles
            assert "has died (signal 9); it is being started again" in str(died)
            assert "has died (signal 9); started again 1 time" in str(again)
            assert well is None

    run(scenario)


def test_a_daemon_that_dies_again_and_again_is_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence_module, "PAUSES_S", (0.0, 0.0))

    async def scenario() -> None:
        async with kept(tmp_path / "a") as a:
            for _ in presence_module.PAUSES_S:
                await a.kill()
                await a.back()
            await a.kill()
            with pytest.raises(LocalError, match="started again 2 times") as caught:
                await asyncio.wait_for(asyncio.shield(a.keeping), at_most(3.0))
            assert "\n" not in str(caught.value)
            with pytest.raises(Unreachable):
                await a.presence.peers()

    run(scenario)


def test_a_daemon_that_cannot_start_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence_module, "PAUSES_S", (0.3, 1.0))

    async def scenario() -> None:
        async with kept(tmp_path / "a") as a:
            port = int(a.address.split("/")[4])
            await a.kill()
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind(("127.0.0.1", port))
                other.listen()

                async def tried() -> bool:
                    return any("in use" in (trouble or "") for trouble in a.troubles)

                await until(tried)
            await a.back()
            assert a.presence.libp2p.join_addresses == [a.address]
            assert a.troubles[-1] is not None
            assert "started again 2 times" in a.troubles[-1]

    run(scenario)
