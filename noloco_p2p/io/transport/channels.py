"""Open gRPC connections to peers: made when first needed, shared by the calls to a peer, dropped when they fail.

A peer is reached at the first of its advertised addresses that accepts a connection.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.errors import Unreachable
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.noloco_pb2_grpc import NodeStub

CHANNELS_PER_PEER = 2
"""A second connection is opened while the first one is in use: over long links each is limited by its send buffer."""
MAX_LINKS = 64
"""Connections kept at once; the one unused for longest makes place. Links with calls in flight are never closed."""
CONNECT_S = 5.0
"""Longest wait for one address to accept a connection; one that refuses answers in a millisecond."""
KEEPALIVE_MS = 5_000
"""Silence after which a link with calls in flight is probed, milliseconds."""
PROBE_MS = 10_000
"""Longest wait for the answer to a probe, milliseconds. On a slow link it comes after all that is in the socket buffers
of the other end, up to 4 MiB."""
KEEPALIVE = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    # Of the kernel's wait for acknowledgements. gRPC never looks at it for its probes while the next one is larger:
    # src/core/ext/transport/chttp2/transport/writing.cc, grpc_chttp2_end_write.
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", PROBE_MS),
    ("grpc.http2.max_pings_without_data", 0),
)
"""How both ends find out within 15 s that the other one is gone without a word."""
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.use_local_subchannel_pool", 1),
    *KEEPALIVE,
    ("grpc.client_idle_timeout_ms", 120_000),
    ("grpc.enable_retries", 0),
)

SERVICE = "/noloco.v1.Node"
RpcMethod = Callable[..., Any]
"""A gRPC method of a channel, to be called with a request and `timeout`, `metadata`."""


@dataclass(slots=True, eq=False)
class PeerChannel:
    """One connection, and the methods of the peer at its other end."""

    address: str
    channel: Any
    calls: int = 0
    streamed: dict[str, RpcMethod] = field(init=False)
    """Propagate and Evaluate. Here and below, messages with tensor bytes are given and taken as they travel."""
    whole: dict[str, RpcMethod] = field(init=False)
    """The same for an activation and a reply of one message each: half the work."""
    fetch_snapshot: RpcMethod = field(init=False)
    fetch_state: RpcMethod = field(init=False)
    describe: RpcMethod = field(init=False)

    def __post_init__(self) -> None:
        names = ("Propagate", "Evaluate")
        self.streamed = {name: self.channel.stream_stream(f"{SERVICE}/{name}") for name in names}
        self.whole = {name: self.channel.unary_unary(f"{SERVICE}/{name}") for name in names}
        self.fetch_snapshot = self.channel.unary_stream(
            f"{SERVICE}/FetchSnapshot", request_serializer=pb.SnapshotRequest.SerializeToString
        )
        self.fetch_state = self.channel.unary_stream(
            f"{SERVICE}/FetchState", request_serializer=pb.StateRequest.SerializeToString
        )
        self.describe = NodeStub(self.channel).Describe

    @property
    def ready(self) -> bool:
        """The connection stands, as far as is known here."""
        return bool(self.channel.get_state() is grpc.ChannelConnectivity.READY)


ChannelKey = tuple[PeerId, int]


class ChannelPool:
    """Owns every outgoing connection of a node. Used from one event loop."""

    def __init__(self) -> None:
        self._links: dict[ChannelKey, PeerChannel] = {}
        """Kept for the next call, in order of last use."""
        self._open_links: set[PeerChannel] = set()
        """Every one not yet closed, also those that only end their last calls."""
        self._opening: dict[ChannelKey, asyncio.Task[PeerChannel | str]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    @asynccontextmanager
    async def link(self, peer: Advert, seconds: float) -> AsyncIterator[PeerChannel]:
        """A connection to the peer for one call. Raises Unreachable when no address accepts one in time."""
        key = self._key(peer)
        link = self._links.pop(key, None)
        if link is not None and not (link.ready and link.address in peer.addresses):
            self._retire(link)
            link = None
        if link is None:
            link = await self._opened(key, peer, seconds)
        else:
            self._links[key] = link
        link.calls += 1
        try:
            yield link
        except Unreachable:
            # Also after a deadline: a link whose other end is gone without a word still looks well.
            if self._links.get(key) is link:
                del self._links[key]
            raise
        finally:
            link.calls -= 1
            if link.calls == 0 and self._links.get(key) is not link:
                self._retire(link)

    async def close(self) -> None:
        """Cancel all calls and close every connection."""
        self._closed = True
        opening = list(self._opening.values())
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        self._links.clear()
        for link in list(self._open_links):
            self._close(link)
        await asyncio.gather(*self._closing)

    def _key(self, peer: Advert) -> ChannelKey:
        """The peer's least used connection; a further one only while all others are in use."""
        for slot in range(CHANNELS_PER_PEER):
            link = self._links.get((peer.peer_id, slot))
            if link is None or link.calls == 0:
                return peer.peer_id, slot
        return min(((peer.peer_id, slot) for slot in range(CHANNELS_PER_PEER)), key=lambda key: self._links[key].calls)

    async def _opened(self, key: ChannelKey, peer: Advert, seconds: float) -> PeerChannel:
        """Waits for a connection that is being opened, and begins one if none is. Its waiters may be cancelled."""
        if self._closed:
            raise Unreachable("this node's transport is closed")
        task = self._opening.get(key)
        if task is None:
            task = self._opening[key] = asyncio.create_task(self._connected(key, peer))
        await asyncio.wait([task], timeout=seconds)
        if not task.done() or task.cancelled():
            raise Unreachable(f"{peer.peer_id} did not accept a connection within {seconds:.1f} s")
        outcome = task.result()
        if isinstance(outcome, str) or outcome not in self._open_links:
            raise Unreachable(f"{peer.peer_id} cannot be reached: {outcome}")
        return outcome

    async def _connected(self, key: ChannelKey, peer: Advert) -> PeerChannel | str:
        """A new link, or why there is none."""
        try:
            reasons = []
            for address in peer.addresses:
                channel = grpc.aio.insecure_channel(address, options=OPTIONS)
                reason: str | None = "the connection was given up"
                try:
                    reason = await connect(channel, CONNECT_S)
                finally:
                    if reason is not None:
                        await channel.close()
                if reason is None:
                    self._make_place()
                    link = self._links[key] = PeerChannel(address, channel)
                    self._open_links.add(link)
                    return link
                reasons.append(f"{address}: {reason}")
            return "; ".join(reasons) or "it announces no address"
        finally:
            self._opening.pop(key, None)

    def _make_place(self) -> None:
        unused = [key for key, link in self._links.items() if link.calls == 0]
        for key in unused[: max(0, len(self._links) + 1 - MAX_LINKS)]:
            self._retire(self._links.pop(key))

    def _retire(self, link: PeerChannel) -> None:
        """Close a link that is no longer kept, now or when its last call ends."""
        if link.calls == 0:
            self._close(link)

    def _close(self, link: PeerChannel) -> None:
        if link not in self._open_links:
            return
        self._open_links.remove(link)
        task = asyncio.create_task(link.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def connect(channel: Any, seconds: float) -> str | None:
    """Waits until the channel's connection stands; otherwise the reason, in words."""
    try:
        async with asyncio.timeout(seconds):
            state = channel.get_state(try_to_connect=True)
            while state is not grpc.ChannelConnectivity.READY:
                if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                    return "nothing accepts connections there"
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError:
        return f"no answer within {seconds:.1f} s"
    return None
