"""Watches the libp2p daemon, and restarts it when it has died or hangs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from noloco_p2p.errors import LocalError
from noloco_p2p.humanize import plural
from noloco_p2p.io.dht import p2p_daemon
from noloco_p2p.io.dht.libp2p import Libp2pDaemon

PAUSES_S = (0.0, 2.0, 8.0, 60.0)
"""Pauses before the first and each further restart, seconds, until a daemon has recovered; the last one is repeated. If
as many consecutive starts fail, the daemon is given up. A daemon that dies after each start is not: a stranger can
cause that."""
RECOVERED_S = 60.0
"""A restarted daemon that has lived this long has recovered, seconds. Also how often a daemon is asked whether it still
answers."""
SILENCES = 2
"""Consecutive unanswered requests after which the daemon is considered hung and killed."""

log = logging.getLogger(__name__)


async def keep(
    libp2p: Libp2pDaemon, restart: Callable[[], Awaitable[str]], trouble: Callable[[str | None], None]
) -> None:
    """Restart the daemon whenever it dies or hangs. Ends only with a LocalError, when the daemon cannot be started.

    `restart` returns why there is still no daemon, or an empty string. `trouble` receives what is wrong when the daemon
    dies, and None once a restarted one has recovered.
    """
    starts = silent = 0
    while True:
        await asyncio.wait([libp2p.failed], timeout=RECOVERED_S)
        if not libp2p.failed.done():
            if starts:
                starts = 0
                trouble(None)
            try:
                await libp2p.links()
                silent = 0
            except LocalError:
                silent += 1
            if silent == SILENCES:
                log.warning("the libp2p daemon does not answer: killing it")
                p2p_daemon.kill(libp2p.p2p)
            continue
        silent = failures = 0
        died = cut_off = str(libp2p.failed.exception())
        while cut_off:
            if failures == len(PAUSES_S):
                raise LocalError(f"{cut_off}; it was {_restarted(starts)}: restart this node")
            trouble(f"{cut_off}; it is being restarted: this node is cut off from the directory")
            await asyncio.sleep(PAUSES_S[min(starts, len(PAUSES_S) - 1)])
            starts += 1
            failures += 1
            cut_off = await restart()
        memory = f"out of memory? Its limit is {p2p_daemon.MEMORY_BYTES >> 30} GiB"
        trouble(f"{died}; {_restarted(starts)}: find out what kills it ({memory}; see also dmesg)")


def _restarted(starts: int) -> str:
    return f"restarted {plural(starts, 'time')}"
