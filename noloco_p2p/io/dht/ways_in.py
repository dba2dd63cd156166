"""How others reach a node that cannot be dialled at its own address: at a port of its router, or over the links that it
keeps to public members, two of which serve as relays (ARCHITECTURE.md, "Reachability").
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b

from noloco_p2p.core.messages import STREAM, PeerId
from noloco_p2p.errors import PeerError, Unreachable
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.dht.libp2p import Libp2pDaemon, Stream
from noloco_p2p.io.dht.port_mapping import RENEW_S, HomeRouter
from noloco_p2p.io.dht.reach import RELAY, is_private, joined
from noloco_p2p.io.dht.streams import RELAYED_STREAMS, STREAMS, Streams, logged, splice

RELAYS = 2
LOOK_S = 3.0
"""Time between two requests to each relay. Together with their timeout, a dead relay is replaced within 10 s."""
REFUSED_S = 60.0
"""How long a public member that refused to relay is not asked again, seconds."""
DIALS = 8
"""Most links opened at once."""
MAX_LINKS = 128
"""Most public members to which this node keeps links; all others come through the relays."""
STREAMS_OF_PEER, STREAMS_OF_RELAY, MAX_STREAMS = 16, 64, 512
"""Most streams open at a time: from one peer, through one relay, and of either kind: whoever can open a link may use up
the first kind under many names."""

log = logging.getLogger(__name__)


class WaysIn:
    """Keeps open the ways to this node. Belongs to one event loop."""

    def __init__(self, libp2p: Libp2pDaemon, streams: Streams, server: tuple[str, int], address: str = "") -> None:
        """`server`: host and port at which this machine reaches the node's gRPC server; `address`: `host:port` at which
        the node's own network reaches it."""
        self._libp2p, self._streams, self._server = libp2p, streams, server
        self._near = (address,) if is_private(address) else ()
        self._relays: tuple[PeerId, ...] = ()
        self._refused_at: dict[PeerId, float] = {}
        self._open: Counter[str] = Counter()

    def addresses(self) -> tuple[str, ...]:
        """The addresses in the advert, best first."""
        return self._outside or STREAM, *(f"{RELAY}{relay}" for relay in self._relays), *self._near

    @property
    def _outside(self) -> str:
        """`host:port` at which the router forwards connections to the gRPC server; empty if it does not."""
        place = self._libp2p.router and self._libp2p.router.place(self._server[1])
        return joined(*place) if place else ""

    async def serve(self) -> None:
        """Connect others' streams to the gRPC server from now on."""
        await self._libp2p.serve_streams(STREAMS, partial(self._carry, f"{STREAM}/", STREAMS_OF_PEER))
        await self._libp2p.serve_streams(RELAYED_STREAMS, self._relayed)

    async def through_router(self) -> str:
        """Have the router map the gRPC port too, if it maps the daemon's. Returns `host:port` outside, or nothing."""
        if (router := self._libp2p.router) is not None and self._libp2p.outside is not None:
            try:
                await router.map(self._server[1])
            except Unreachable as error:
                await self.not_through_router(str(error))
        return self._outside

    async def not_through_router(self, reason: str) -> None:
        """Remove the router's mappings, because others do not get through, and ask it for no more."""
        log.info("this node cannot be reached through its home router: %s", reason)
        if self._libp2p.router is not None:
            await self._libp2p.router.end()
            self._libp2p.router = None

    async def find_relays(self) -> bool:
        """Renew the reservations, and replace those that are lost. Returns whether the addresses changed."""
        before, now = self._relays, asyncio.get_running_loop().time()
        relays = await self._reserved_of(before)
        if len(relays) < RELAYS:
            self._refused_at = {one: at for one, at in self._refused_at.items() if now - at < REFUSED_S}
            asked = self._public.keys() & await self._libp2p.links() - {*before} - self._refused_at.keys()
            relays += await self._reserved_of(sorted(asked, key=self._place)[: 2 * RELAYS])
        self._relays = tuple(relays[:RELAYS])
        return self._relays != before

    async def keep(self, changed: Callable[[], Awaitable[object]]) -> None:
        """Keep relays, links and the router's mappings, forever. Calls `changed` when this node's addresses change."""
        async with asyncio.TaskGroup() as both:
            both.create_task(self._again(self._keep_relays, changed))
            both.create_task(self._again(self._keep_links))
            if self._libp2p.router is not None:
                both.create_task(self._again(self._keep_mapped, self._libp2p.router, changed, every_s=RENEW_S))

    async def _again(self, look: Callable[..., Awaitable[object]], *arguments: object, every_s: float = LOOK_S) -> None:
        said = ""
        while True:
            await asyncio.sleep(every_s)
            said = await logged("ways to this node", look(*arguments), said)

    async def _keep_mapped(self, router: HomeRouter, changed: Callable[[], Awaitable[object]]) -> None:
        """Renew the router's mappings. While that fails, callers come through the relays, and the addresses stay."""
        before = self._outside, self._libp2p.outside
        await router.renew()
        if before != (self._outside, self._libp2p.outside):
            log.info("the router has another address: %s", self._outside)
            await changed()

    async def _keep_relays(self, changed: Callable[[], Awaitable[object]]) -> None:
        if await self.find_relays():
            log.info("relays: %s", ", ".join(self._relays) or "none")
            await changed()

    @property
    def _public(self) -> dict[PeerId, JoinAddress]:
        return {one.peer_id: one for one in self._libp2p.joined} | self._libp2p.met

    async def _reserved_of(self, relays: Sequence[PeerId]) -> list[PeerId]:
        return list(filter(None, await asyncio.gather(*map(self._reserved, relays))))

    async def _reserved(self, relay: PeerId) -> PeerId | None:
        with suppress(PeerError):
            await self._streams.reserve(relay)
            return relay
        if relay in await self._libp2p.links():  # without a link it has not been asked
            self._refused_at[relay] = asyncio.get_running_loop().time()
        return None

    async def _keep_links(self) -> None:
        linked, public = await self._libp2p.links(), self._public
        wanted = [peer for peer in sorted(public, key=self._place)[:MAX_LINKS] if peer not in linked]
        # Not always the first ones: these may be dead.
        await self._libp2p.dial_all([public[peer] for peer in random.sample(wanted, min(DIALS, len(wanted)))])

    def _place(self, peer: PeerId) -> bytes:
        """Sort key of a member. Each node has its own order, so that they do not all choose the same relays."""
        return blake2b(f"{self._libp2p.peer_id} {peer}".encode()).digest()

    async def _relayed(self, peer: PeerId, stream: Stream) -> None:
        if peer in self._relays:
            await self._carry(RELAY, STREAMS_OF_RELAY, peer, stream)

    async def _carry(self, kind: str, most: int, peer: PeerId, stream: Stream) -> None:
        """Splice a stream with a connection to the gRPC server, and record whose stream that connection carries."""
        whose = kind + peer
        of_kind = sum(number for one, number in self._open.items() if one.startswith(kind))
        if self._open[whose] >= most or of_kind >= MAX_STREAMS:
            return
        self._open[whose] += 1
        try:
            with suppress(OSError):  # this node is shutting down
                server = Stream(*await asyncio.open_connection(*self._server))
                here = joined(*server.writer.get_extra_info("sockname")[:2])
                self._streams.hosts[here] = whose
                try:
                    await splice(stream, server)
                finally:
                    del self._streams.hosts[here]
        finally:
            self._open -= Counter((whose,))  # drops the entries that are zero
