"""The directory of a node, kept when its libp2p daemon dies: daemon, DHT, and the calls that are answered there."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from noloco_p2p.core.messages import Advert
from noloco_p2p.errors import LocalError, PeerError, Unreachable
from noloco_p2p.io.dht.hivemind_directory import HivemindDirectory
from noloco_p2p.io.dht.libp2p import Libp2pDaemon

PAUSES_S = (0.0, 2.0, 8.0)
"""Pause before each restart, seconds; a daemon that would need another one without having recovered is given up."""
RECOVERED_S = 60.0
"""A restarted daemon that has lived this long has recovered."""

T = TypeVar("T")
RegisterHandlers = Callable[[Libp2pDaemon], Awaitable[None]]
"""Registers the handlers of peers' calls on a fresh daemon."""


class SupervisedDirectory:
    """`ports.Directory` of a node, on a daemon that is started again when it dies.

    While there is none every call raises Unreachable. Identity, address, adverts, known peers and the records that this
    node keeps for others outlive the daemon, so its peers need not notice.
    """

    def __init__(self, libp2p: Libp2pDaemon, directory: HivemindDirectory, offer: RegisterHandlers) -> None:
        """See `open`."""
        self.libp2p = libp2p
        """The current daemon."""
        self._directory = directory
        self._offer = offer

    @classmethod
    async def open(
        cls, libp2p: Libp2pDaemon, *, run_id: str, stages: int, known_path: Path, offer: RegisterHandlers
    ) -> "SupervisedDirectory":
        """The directory of a run on a running daemon. `offer` comes last: a peer that is answered finds a DHT as well.

        Raises as `HivemindDirectory.open`. The given daemon stays its owner's; later ones are closed here.
        """
        directory = await HivemindDirectory.open(libp2p, run_id=run_id, stages=stages, known_path=known_path)
        try:
            await offer(libp2p)
        except BaseException:
            await directory.close()
            raise
        return cls(libp2p, directory, offer)

    async def announce(self, advert: Advert, ttl_s: float) -> None:
        """See `ports.Directory`. Raises ConfigError for an advert that no peer would accept."""
        await self._asked(self._directory.announce(advert, ttl_s))

    async def peers(self) -> Sequence[Advert]:
        """See `ports.Directory`."""
        return await self._asked(self._directory.peers())

    async def withdraw(self) -> None:
        """See `ports.Directory`."""
        await self._asked(self._directory.withdraw())

    async def keep(self, trouble: Callable[[str | None], None]) -> None:
        """Start the daemon again whenever it dies. Ends only with a LocalError: it could not be kept alive.

        `trouble` gets what is wrong, from the death until RECOVERED_S after the restart, and then None.
        """
        starts = 0
        while True:
            died = await self._death(RECOVERED_S if starts else None)
            if died is None:
                starts = 0
                trouble(None)
                continue
            reason = died
            while reason:
                if starts == len(PAUSES_S):
                    raise LocalError(f"{reason}; it was {_again(starts)}: start this node again")
                trouble(f"{reason}; it is being started again: this node is cut off from the directory")
                await asyncio.sleep(PAUSES_S[starts])
                starts += 1
                reason = await self._start()
            trouble(f"{died}; {_again(starts)}: find out what kills it (a lack of memory? see dmesg)")

    async def close(self) -> None:
        """Close the directory and the current daemon. Does not withdraw."""
        await self._directory.close()
        await self.libp2p.close()

    async def _asked(self, asking: Awaitable[T]) -> T:
        try:
            return await asking
        except LocalError as error:
            raise Unreachable(f"{error}") from error

    async def _death(self, within_s: float | None) -> str | None:
        """Why the daemon died; None when it is still alive after `within_s`."""
        failed = self.libp2p.failed
        await asyncio.wait([failed], timeout=within_s)
        return str(failed.exception()) if failed.done() else None

    async def _start(self) -> str:
        """Restart everything on a fresh daemon; returns why that failed, or an empty text."""
        await self.close()
        async with contextlib.AsyncExitStack() as closing:
            try:
                libp2p = await self.libp2p.reopened()
                closing.push_async_callback(libp2p.close)
                directory = await self._directory.reopened(libp2p)
                closing.push_async_callback(directory.close)
                await self._offer(libp2p)
            except (LocalError, PeerError) as error:
                return f"the libp2p daemon (p2pd) could not be started again ({error})"
            closing.pop_all()
        self.libp2p, self._directory = libp2p, directory
        return ""


def _again(starts: int) -> str:
    return f"started again {starts} time{'s' if starts > 1 else ''}"
