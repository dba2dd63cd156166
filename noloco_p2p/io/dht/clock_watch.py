"""Compares this machine's clock with other nodes' clocks while a node runs. Adverts expire by these clocks."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import SystemRandom
from statistics import median

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import LocalError, PeerError
from noloco_p2p.io.dht.join_handshake import fetch_manifest
from noloco_p2p.io.dht.libp2p import Libp2pDaemon

PERIOD_S = 60.0
ASKED = 8
"""How many linked peers are asked each time, chosen at random."""
MIN_AGREEING = 2
"""How many clocks must agree against ours. If only two clocks differ, nobody can say which of them is wrong."""


async def keep(libp2p: Libp2pDaemon, ttl_s: float, trouble: Callable[[str | None], None]) -> None:
    """Report to `trouble` every PERIOD_S what is wrong with this machine's clock, or None. Never ends.

    `ttl_s` is the lifetime of an advert, seconds.
    """
    while True:
        trouble(wrong_clock(await _ahead(libp2p), ttl_s))
        await asyncio.sleep(PERIOD_S)


def wrong_clock(ahead: Sequence[float], ttl_s: float) -> str | None:
    """What is wrong with this machine's clock, or None if nothing is. Pure.

    It is wrong if most of the peers' clocks, and at least MIN_AGREEING, are off in the same direction by more than
    half of an advert's lifetime, which is also the limit for a node that joins. `ahead` says how far each clock is
    ahead of ours, seconds.
    """
    for sign, side in ((1, "behind"), (-1, "ahead of")):
        off = [sign * one for one in ahead if sign * one > ttl_s / 2]
        if len(off) >= MIN_AGREEING and 2 * len(off) > len(ahead):
            return (
                f"this machine's clock is {median(off):,.0f} s {side} those of {len(off)} of {len(ahead)} nodes, and "
                f"adverts expire after {ttl_s:g} s: set the clock (for example with NTP)"
            )
    return None


async def _ahead(libp2p: Libp2pDaemon) -> list[float]:
    """How far the clocks of some linked peers are ahead of ours, seconds. Peers that do not answer are left out."""

    async def ask(peer: PeerId) -> list[float]:
        with suppress(PeerError, LocalError):
            return [(await fetch_manifest(libp2p, peer))[1]]
        return []

    # The daemon may die at any moment. A node without its daemon is cut off, which `daemon_restarts` reports.
    with suppress(LocalError):
        linked = sorted(await libp2p.links())
        peers = SystemRandom().sample(linked, min(ASKED, len(linked)))
        return [one for answer in await asyncio.gather(*map(ask, peers)) for one in answer]
    return []
