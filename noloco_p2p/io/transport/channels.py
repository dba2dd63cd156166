"""Pool of gRPC connections to peers: opened when first needed, shared by the calls to a peer, dropped on failure.

A peer is reached at the first of its advertised addresses that accepts a connection, or on this node's own network.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any
from weakref import WeakValueDictionary

from google.protobuf.message import Message
from grpc import ChannelConnectivity

from noloco_p2p.core.line_rate import MeasuredLine
from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.core.recent import Recent
from noloco_p2p.errors import Unreachable
from noloco_p2p.io.dht.reach import is_private, is_streamed
from noloco_p2p.io.dht.streams import cancelled
from noloco_p2p.io.transport.peer_links import Links, target

CHANNELS_PER_PEER = 2
"""Connections to a peer for calls; the second one is opened while the first is in use."""
CONTROL_SLOT = CHANNELS_PER_PEER
"""Slot of the connection for short requests and announcements. The slots of stripes follow it."""
MAX_CHANNELS = 512
"""Most connections kept open; the one unused for longest makes room. One with calls in flight is never closed."""
CONNECT_S = 5.0
"""Longest wait for one address to accept a connection, seconds. A refusal takes about a millisecond."""
NEAR_S, NOT_NEAR_S = 0.5, 300.0
"""A private address that is not the peer's first one is tried before all others, for NEAR_S, because the peer may be on
this node's own network. If it does not answer, it is not tried this way again for NOT_NEAR_S."""
MAX_NOT_NEAR = 1024
"""How many addresses that did not answer are remembered."""
KEEPALIVE_MS = 5_000
"""Silence after which a link with calls in flight is probed, milliseconds."""
PROBE_MS = 10_000
"""Longest wait for the answer to a probe, milliseconds. On a slow link the answer comes after everything in the remote
end's socket buffers, up to 4 MiB."""
KEEPALIVE = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    # The kernel's wait for acknowledgements, counted from the first of a row of lost segments. With 5 s it ended
    # connections over full lines of 0.5 to 2 Mbit/s that carried bodies in both directions.
    ("grpc.keepalive_timeout_ms", PROBE_MS),
    ("grpc.http2.ping_timeout_ms", PROBE_MS),
    ("grpc.http2.max_pings_without_data", 0),
)
"""Lets both ends find out within 15 s that the other one has silently gone."""
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.use_local_subchannel_pool", 1),
    *KEEPALIVE,
    ("grpc.client_idle_timeout_ms", 120_000),
    ("grpc.enable_retries", 0),
)

SERVICE = "/noloco.v1.Node"


@dataclass(slots=True, eq=False, repr=False)
class PeerChannel:
    """A connection on which this node has shown `leaf`. Messages with tensor bytes are passed as raw bytes."""

    address: str
    leaf: object
    channel: Any
    calls: int = 0
    """Calls in flight."""

    async def send_whole(self, method: str, message: bytes, **options: Any) -> bytes:
        """Call a method with one message, and return the one of the reply, which is empty if none came: Propagate and
        Evaluate with half the work of a stream, Warm, Progress or Describe."""
        return await self.channel.unary_unary(f"{SERVICE}/{method}")(message, **options) or b""

    def send_stream(self, method: str, **options: Any) -> Any:
        """Call Propagate, Evaluate or Stripe with any number of messages in each direction."""
        call = self.channel.stream_stream(f"{SERVICE}/{method}")(**options)
        # gRPC's own `cancel` does nothing after a write that failed. The call would then last, with its connection, as
        # long as this process, if the peer has ended it and its answer was not read.
        call.cancel = partial(call._cython_call.cancel, "the caller needs it no longer")
        return call

    def fetch(self, method: str, request: Message, **options: Any) -> Any:
        """Call FetchSnapshot or FetchState; the call yields the messages of the reply."""
        return self.channel.unary_stream(f"{SERVICE}/{method}")(request.SerializeToString(), **options)

    def at_most(self, connections: int) -> int:
        """How many of `connections` a body may use: fewer if all of them go over one libp2p link, or over a relay."""
        return min(connections, CHANNELS_PER_PEER) if is_streamed(self.address) else connections

    @property
    def ready(self) -> bool:
        """Whether the connection is open, as far as gRPC knows."""
        return bool(self.channel.get_state() is ChannelConnectivity.READY)


class Turns:
    """Makes announced bodies to the same peer go one after the other, and likewise the gradients that answer them. In
    parallel, all of them would arrive late."""

    def __init__(self, line: MeasuredLine) -> None:
        """`line` is notified when sending of a body begins and when it ends."""
        self._line = line
        self._locks = WeakValueDictionary[PeerId, asyncio.Lock]()
        """A lock is dropped when no body holds it or waits for it any more."""

    @asynccontextmanager
    async def of(self, peer: PeerId, begins: Callable[[], object] = lambda: None) -> AsyncIterator[None]:
        """Wait for a body's turn, then call `begins`; the turn lasts as long as the context."""
        async with self._locks.setdefault(peer, asyncio.Lock()), self.at_once(peer, begins):
            yield

    @asynccontextmanager
    async def at_once(self, peer: PeerId, begins: Callable[[], object] = lambda: None) -> AsyncIterator[None]:
        """The turn of a body that does not wait for others; calls `begins`."""
        begins()
        self._line.leaves(peer)
        try:
            yield
        finally:
            self._line.has_left(peer, asyncio.get_running_loop().time())


ChannelKey = tuple[PeerId, int]


class ChannelPool:
    """Owns every outgoing connection of a node. Used from one event loop."""

    def __init__(
        self, links: Links, options: tuple[tuple[str, int], ...] = (), on_open: Callable[[], object] = lambda: None
    ) -> None:
        """The gRPC `options` are added to those of every connection; `on_open` is called after each one is opened."""
        self._links = links
        self._on_open = on_open
        self._options = (*OPTIONS, *options)
        self._kept: dict[ChannelKey, PeerChannel] = {}
        """Connections that new calls may use, in order of last use."""
        self._open: set[PeerChannel] = set()
        """All connections not closed yet, including those being opened and those finishing their last calls."""
        self._opening: dict[tuple[ChannelKey, tuple[str, ...]], asyncio.Task[PeerChannel | str]] = {}
        """Connections being opened, by slot and by the addresses of the peer's advert, which change when it moves."""
        self._awaited = Counter[ChannelKey]()
        """How many calls are waiting for a connection that is being opened, or has just been opened."""
        self._closing: set[asyncio.Task[None]] = set()
        self._not_near = Recent[str, float](MAX_NOT_NEAR)
        """Private addresses that did not answer, and when."""
        self._closed = False

    @asynccontextmanager
    async def acquire(
        self, peer: Advert, seconds: float, *, control: bool = False, part: int = 0
    ) -> AsyncIterator[PeerChannel]:
        """A connection to the peer for one call. With `control` it is one that carries no bodies, so nothing delays the
        call; with `part`, the one for stripes with this index.

        Raises Unreachable if no address accepts a connection in time.
        """
        key = (peer.peer_id, CONTROL_SLOT + part) if control or part else self._key(peer)
        channel, leaf = self._kept.get(key), self._links.leaf
        if channel and channel.ready and channel.leaf is leaf and channel.address in peer.addresses:
            self._kept[key] = self._kept.pop(key)
        else:
            self._drop(key)
            channel = await self._opened(key, peer, seconds)
        channel.calls += 1
        try:
            async with self._links.calling(peer.peer_id, lambda: self._closed):
                yield channel
        except Unreachable:
            # After a deadline, too: a connection whose other end has silently gone still looks healthy.
            if self._kept.get(key) is channel:
                del self._kept[key]
            raise
        finally:
            channel.calls -= 1
            if channel.calls == 0 and self._kept.get(key) is not channel:
                self._close(channel)

    async def close(self) -> None:
        """Cancel all calls and close every connection."""
        self._closed = True
        self._links.cut()
        await cancelled(self._opening.values())
        self._kept.clear()
        for channel in list(self._open):
            self._close(channel)
        await asyncio.gather(*self._closing)

    def _key(self, peer: Advert) -> ChannelKey:
        """The slot of the peer's connection with the fewest calls; an unopened one only while the others are in use."""
        keys = [(peer.peer_id, slot) for slot in range(CHANNELS_PER_PEER)]
        return min(keys, key=lambda key: self._kept[key].calls if key in self._kept else 0)

    async def _opened(self, key: ChannelKey, peer: Advert, seconds: float) -> PeerChannel:
        """Waits for a connection that is being opened, or opens one. Cancelling a wait does not cancel the opening."""
        if self._closed:
            raise Unreachable("this node's transport is closed")
        began = asyncio.get_running_loop().time()
        task = self._opening.get((key, peer.addresses))
        if task is None:
            task = self._opening[key, peer.addresses] = asyncio.create_task(self._connected(key, peer))
        self._awaited[key] += 1
        try:
            await asyncio.wait([task], timeout=seconds)
        finally:
            self._awaited -= Counter((key,))  # drops the entries that are zero
        if not task.done() or task.cancelled():
            raise Unreachable(f"{peer.peer_id} did not accept a connection within {seconds:.1f} s")
        outcome = task.result()
        if isinstance(outcome, str):
            raise Unreachable(f"{peer.peer_id} cannot be reached: {outcome}")
        if outcome in self._open:
            return outcome
        # Another call to this peer, by another advert of it, has closed the connection before this one could use it.
        return await self._opened(key, peer, began + seconds - asyncio.get_running_loop().time())

    async def _connected(self, key: ChannelKey, peer: Advert) -> PeerChannel | str:
        """A new connection, or the reason why none could be opened."""
        try:
            reasons = []
            for address, seconds in self._tries(peer.addresses):
                try:
                    dialled = await target(self._links, address, peer.peer_id)
                except Unreachable as error:
                    reasons.append(f"{address}: {error}")
                    continue
                leaf = self._links.leaf
                channel = PeerChannel(address, leaf, self._links.channel(dialled, peer.peer_id, self._options))
                self._open.add(channel)
                if (reason := await connect(channel.channel, seconds)) is None:
                    self._on_open()
                    self._make_room()
                    self._drop(key)  # One to other addresses of the peer may have been opened meanwhile.
                    self._kept[key] = channel
                    return channel
                self._close(channel)
                if seconds == NEAR_S:
                    self._not_near[address] = asyncio.get_running_loop().time()
                reasons.append(f"{address}: {reason}")
            return "; ".join(reasons) or "it announces no address"
        finally:
            self._opening.pop((key, peer.addresses), None)

    def _tries(self, addresses: Sequence[str]) -> list[tuple[str, float]]:
        """Which addresses to try, in order, and for how many seconds each."""
        now = asyncio.get_running_loop().time()
        near = [one for one in addresses[1:] if is_private(one) and now - self._not_near.get(one, -inf) >= NOT_NEAR_S]
        return [*((one, NEAR_S) for one in near), *((one, CONNECT_S) for one in addresses)]

    def _make_room(self) -> None:
        unused = [key for key, channel in self._kept.items() if channel.calls == 0 and not self._awaited[key]]
        for key in unused[: max(0, len(self._kept) + 1 - MAX_CHANNELS)]:
            self._close(self._kept.pop(key))

    def _drop(self, key: ChannelKey) -> None:
        """Let no new calls use the connection in this slot."""
        if (channel := self._kept.pop(key, None)) is not None and channel.calls == 0:
            self._close(channel)

    def _close(self, channel: PeerChannel) -> None:
        if channel in self._open:
            self._open.remove(channel)
            task = asyncio.create_task(channel.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


async def connect(channel: Any, seconds: float) -> str | None:
    """Waits until a new channel is connected. Returns None, or the reason why it is not. A channel that has lost its
    first connection is idle again, and would connect anew without a pause."""
    channel.get_state(try_to_connect=True)
    try:
        async with asyncio.timeout(seconds):
            await channel.wait_for_state_change(ChannelConnectivity.IDLE)
            while (state := channel.get_state()) is ChannelConnectivity.CONNECTING:
                await channel.wait_for_state_change(state)
    except TimeoutError:
        return f"no answer within {seconds:.1f} s"
    if state is ChannelConnectivity.READY:
        return None
    return "nothing accepts connections there, or it is not the expected node of this run"
