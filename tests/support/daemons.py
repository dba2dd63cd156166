"""Nodes over real libp2p daemons on loopback, for tests of the directory."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from noloco_p2p.core.messages import Advert
from noloco_p2p.io.dht.hivemind_directory import HivemindDirectory
from noloco_p2p.io.dht.identity import Identity, peer_id_of
from noloco_p2p.io.dht.libp2p import Libp2pDaemon

RUN = "cd" * 32
STRANGER = peer_id_of(bytes(range(32)))


@asynccontextmanager
async def daemon(
    home: Path, *, port: int = 0, join: list[str] | None = None, metrics_port: int | None = None
) -> AsyncIterator[Libp2pDaemon]:
    identity = Identity.open(home / "identity.key")
    try:
        libp2p = await Libp2pDaemon.open(
            identity, host="127.0.0.1", port=port, join=join or [], metrics_port=metrics_port
        )
        try:
            yield libp2p
        finally:
            await libp2p.close()
    finally:
        identity.close()


@dataclass
class Node:
    libp2p: Libp2pDaemon
    directory: HivemindDirectory

    def advert(self, **changes: Any) -> Advert:
        return replace(Advert(self.libp2p.peer_id, RUN, 0, ("127.0.0.1:5000",), state="training", step=1.5), **changes)

    @property
    def address(self) -> str:
        return self.libp2p.join_addresses[0]


@asynccontextmanager
async def node(home: Path, **options: Any) -> AsyncIterator[Node]:
    async with daemon(home, **options) as libp2p:
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
    """Poll until the condition holds; fails after `seconds`."""
    async with asyncio.timeout(seconds):
        while not await holds():  # noqa: ASYNC110  what is awaited lies in other processes
            await asyncio.sleep(0.05)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
