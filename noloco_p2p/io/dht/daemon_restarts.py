"""When a libp2p daemon that has died or hangs is restarted, and when it is given up."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from noloco_p2p.errors import LocalError
from noloco_p2p.humanize import plural
from noloco_p2p.io.dht import p2p_daemon
from noloco_p2p.io.dht.libp2p import Libp2pDaemon

PAUSES_S = (0.0, 2.0, 8.0, 60.0)
"""Pause before each restart until one has recovered, seconds; the last pause before all further ones. A daemon that
fails to start that often in a row is given up, but not one that dies after each start: a stranger can cause that."""
RECOVERED_S = 60.0
"""A restarted daemon that has lived this long has recovered. As often each daemon is asked whether it still answers."""
SILENCES = 2
"""A daemon that leaves so many questions in a row without an answer hangs, and is killed."""

log = logging.getLogger(__name__)


async def keep(
    libp2p: Libp2pDaemon, restart: Callable[[], Awaitable[str]], trouble: Callable[[str | None], None]
) -> None:
    """Restart the daemon whenever it dies or hangs. Ends only with a LocalError: it cannot be started.

    `restart` returns why there is still no daemon, or an empty text. `trouble` is told what is wrong, from the death
    until RECOVERED_S after the restart, and then None.
    """
    starts = silent = 0
    while True:
        await asyncio.wait([libp2p.failed], timeout=RECOVERED_S)
        if not libp2p.failed.done():
            if starts:
                starts = 0
                trouble(None)
            silent = 0 if await _answers(libp2p) else silent + 1
            if silent == SILENCES:
                log.warning("the libp2p daemon does not answer: it is killed")
                p2p_daemon.kill(libp2p.p2p)
            continue
        silent = 0
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
        memory = f"a lack of memory? It gets {p2p_daemon.MEMORY_BYTES >> 30} GiB"
        trouble(f"{died}; {_again(starts)}: find out what kills it ({memory}; see also dmesg)")


async def _answers(libp2p: Libp2pDaemon) -> bool:
    try:
        await libp2p.links()
    except LocalError:
        return False
    return True


def _again(starts: int) -> str:
    return f"started again {plural(starts, 'time')}"
