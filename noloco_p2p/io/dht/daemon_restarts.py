"""When a libp2p daemon that has died is restarted, and when it is given up."""

import asyncio
from collections.abc import Awaitable, Callable

from noloco_p2p.errors import LocalError
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.dht.p2p_daemon import MEMORY_BYTES

PAUSES_S = (0.0, 2.0, 8.0, 60.0)
"""Pause before each restart until one has recovered, seconds; the last pause before all further ones. A daemon that
fails to start that often in a row is given up, but not one that dies after each start: a stranger can cause that."""
RECOVERED_S = 60.0
"""A restarted daemon that has lived this long has recovered."""


async def keep(
    libp2p: Libp2pDaemon, restart: Callable[[], Awaitable[str]], trouble: Callable[[str | None], None]
) -> None:
    """Restart the daemon whenever it dies. Ends only with a LocalError: it cannot be started.

    `restart` returns why there is still no daemon, or an empty text. `trouble` is told what is wrong, from the death
    until RECOVERED_S after the restart, and then None.
    """
    starts = 0
    while True:
        await asyncio.wait([libp2p.failed], timeout=RECOVERED_S if starts else None)
        if not libp2p.failed.done():
            starts = 0
            trouble(None)
            continue
        died = cut_off = str(libp2p.failed.exception())
        failures = 0
        while cut_off:
            if failures == len(PAUSES_S):
                raise LocalError(f"{cut_off}; it was {_again(starts)}: start this node again")
            trouble(f"{cut_off}; it is being started again: this node is cut off from the directory")
            await asyncio.sleep(PAUSES_S[min(starts, len(PAUSES_S) - 1)])
            starts += 1
            failures += 1
            cut_off = await restart()
        memory = f"a lack of memory? It gets {MEMORY_BYTES >> 30} GiB"
        trouble(f"{died}; {_again(starts)}: find out what kills it ({memory}; see also dmesg)")


def _again(starts: int) -> str:
    return f"started again {starts} time{'s' if starts > 1 else ''}"
