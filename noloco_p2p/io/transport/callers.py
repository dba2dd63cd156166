"""What callers may hold of this node, and how long it waits for them (ARCHITECTURE.md, "What a stranger can do").

In an open run anybody has as many names as he likes. So there are two limits: one for each name at a host, and a
larger one for the host.
"""

import asyncio
import ipaddress
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote
from weakref import WeakValueDictionary

import grpc.aio
from google.protobuf.message import DecodeError

from noloco_p2p.core.messages import PEER_ID_CHARACTERS, PeerId
from noloco_p2p.errors import Busy, NolocoError, PeerError, Unreachable, Violation
from noloco_p2p.io.dht.reach import RELAY
from noloco_p2p.io.transport import message_codec

PROTOCOL = "9"
"""Version of proto/noloco.proto that this node speaks."""
MAX_CALL_S = 3600.0
"""Longest deadline that a caller may set. Without a limit a call could hold memory forever."""
MAX_CALLS = 6144
"""Calls served at once; a further one is refused as Busy."""
LONGEST_TRANSFER_S = 1800.0
"""Time in which a complete state must arrive, seconds."""
RESERVE_S = 20.0
"""How far a caller may fall behind with bytes that are due, seconds: a message of 1 MiB at 0.5 Mbit/s."""
STATE_RESERVE_S = 60.0
"""The same for a state, whose bytes are due at an even rate until its deadline."""
LET_GO_S = 10.0
"""How long a caller has to end a call on which a write was broken off, before its connection is ended, seconds. The end
of a call comes after all that waits in the sockets of its caller."""
LEAST_BYTES_PER_S = 8192.0
"""A slower transfer uses up its reserve, and is then given up."""

T = TypeVar("T")


class Share(NamedTuple):
    """How many of something one caller may hold at once, and how many all callers of a host together."""

    what: str
    of_caller: int
    of_host: int


CALLS = Share("calls", 2816, 3072)
"""Half of those that a node serves at once. An activation takes one for each connection that carries it."""
ACTIVATIONS = Share("activations", 160, 192)
"""Out of at most 256 headers that wait in line."""
TRANSFERS = Share("transfers of weights", 4, 64)
DRAINS = Share("refused calls that are drained", 128, 256)
LATE = Share("refusals that wait", 512, 1024)
LATE_PER_S = 20.0
"""Calls of strangers, and of those who hold their share already, that are refused in a second to one host: each costs
0.9 ms of CPU, and could be made again at once."""
OF_RELAYED = 4
"""A caller behind a relay may hold at most one part in so many of what all callers behind that relay may."""


def metadata(wanted_bytes: int = 0) -> tuple[tuple[str, str], ...]:
    """What all calls but `Warm` carry. `wanted_bytes`: the tensor bytes per message that it asks for; 0: any size."""
    wanted = (("noloco-message-bytes", str(wanted_bytes)),) if wanted_bytes else ()
    return ("noloco-protocol", PROTOCOL), *wanted


class Caller(NamedTuple):
    """Who calls."""

    host: str
    """The IP address; for IPv6 the /64 network, because all of its addresses belong to one subscriber. For a stream,
    `p2p/` and the peer that opened it, or `relay/` and the relay: who is behind it is unknown, so all of them count
    together."""
    name: PeerId
    """Whose certificate the caller shows. Until it is checked, the name in that certificate."""

    @classmethod
    def of(cls, context: Any, streams: Mapping[str, str]) -> "Caller":
        """Who makes a call; `streams`: see `Links.own`."""
        [name, *_] = context.auth_context().get("peer_dns", ()) or [b""]
        host = streams.get(connection_of(context)) or _host(str(context.peer()))
        return cls(host, name[:PEER_ID_CHARACTERS].decode(errors="replace"))


def connection_of(context: Any) -> str:
    """`host:port` of the other end of the connection that carries a call."""
    return unquote(str(context.peer())).partition(":")[2]


@lru_cache(1024)
def _host(peer: str) -> str:
    """The host of a connection, as gRPC names it: `ipv4:127.0.0.1:40000`, `ipv6:%5B::1%5D:40000`."""
    return host_of(unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]"))


def host_of(address: str) -> str:
    """`Caller.host` of an IP address."""
    plain = address.partition("%")[0]
    return str(ipaddress.ip_network((plain, 64), strict=False)) if ":" in plain else plain


def check_admissible(context: Any) -> None:
    """Raises Violation for a call by another protocol, or without what every call has."""
    protocol = str(dict(context.invocation_metadata()).get("noloco-protocol"))[:64]
    if protocol != PROTOCOL:
        raise Violation(f"the caller speaks protocol {protocol!r}, this node speaks {PROTOCOL!r}: use equal versions")
    seconds = context.time_remaining()
    if seconds is None or seconds > MAX_CALL_S:
        raise Violation(f"a call needs a deadline of at most {MAX_CALL_S:g} s")


def wanted_bytes(context: Any) -> int:
    """What `metadata` was given by the caller."""
    wanted = str(dict(context.invocation_metadata()).get("noloco-message-bytes", ""))
    return int(wanted) if re.fullmatch("[0-9]{1,9}", wanted) else 0


def least_rate(nbytes: int, seconds: float) -> float:
    """The rate at which so many bytes arrive in that time, but at least LEAST_BYTES_PER_S."""
    return max(LEAST_BYTES_PER_S, nbytes / seconds)


class Silent(Unreachable):
    """A peer was given up. Its call takes no further read or write, because gRPC has one still in progress."""


class Unread(PeerError):
    """The peer does not take what is written. gRPC cannot end its call any more, only the connection can be ended."""


async def read_request(context: Any) -> bytes:
    """The only message of a call with one request. Raises Silent, DecodeError: there is none."""
    message: Any = await Patience().reading(context.read)()
    if message is grpc.aio.EOF:
        raise DecodeError
    return bytes(message)


async def refuse(write: Callable[[bytes], Awaitable[object]], kind: Callable[..., Any], error: NolocoError) -> None:
    """Tell the caller why it is not served, if it is still there. Raises Unread."""
    error.with_traceback(None)  # Its frames hold what the caller has sent.
    with suppress(grpc.aio.InternalError):
        await write(kind(refusal=message_codec.to_refusal(error)).SerializeToString())


class Patience:
    """Waits for bytes that others owe or have to take, who may fall `RESERVE_S` behind `LEAST_BYTES_PER_S`.

    Concurrent waits share the allowance. Delays by this node do not count.
    """

    def __init__(self, reserve_s: float | None = None) -> None:
        """`reserve_s` instead of `RESERVE_S`."""
        self._reserve_s = self._left_s = reserve_s or RESERVE_S
        self._at = 0.0
        """When `_left_s` was right."""
        self._waits: set[asyncio.Timeout] = set()

    async def wait(
        self,
        transfer: Awaitable[T],
        nbytes: int = 0,
        least_bytes_per_s: float = LEAST_BYTES_PER_S,
        error: type[PeerError] = Silent,
    ) -> T:
        """The result of `transfer`, which has then moved `nbytes`, or the bytes that it returns. Raises `error`."""
        came_s = 0.0
        self._settle(0.0)
        try:
            async with asyncio.timeout(self._left_s) as timeout:
                self._waits.add(timeout)
                result = await transfer
                came_s = (len(result) if isinstance(result, bytes) else nbytes) / least_bytes_per_s
                return result
        except TimeoutError:
            raise error(f"the peer moved next to no data for {self._reserve_s:g} s") from None
        finally:
            self._settle(came_s)
            self._waits.discard(timeout)
            for other in self._waits if came_s else ():
                if not other.expired():
                    other.reschedule(self._at + self._left_s)

    def reading(
        self, read: Callable[[], Awaitable[T]], least_bytes_per_s: float = LEAST_BYTES_PER_S
    ) -> Callable[[], Awaitable[T]]:
        """`read`, with this patience."""
        return lambda: self.wait(read(), 0, least_bytes_per_s)

    def writing(
        self, write: Callable[[bytes], Awaitable[object]], least_bytes_per_s: float = LEAST_BYTES_PER_S
    ) -> Callable[[bytes], Awaitable[object]]:
        """`write`, with this patience. Raises Unread."""
        return lambda message: self.wait(write(message), len(message), least_bytes_per_s, Unread)

    def _settle(self, came_s: float) -> None:
        now = asyncio.get_running_loop().time()
        spent_s = now - self._at if self._waits else 0.0
        self._at, self._left_s = now, min(self._reserve_s, self._left_s - spent_s + came_s)


class Callers:
    """Who holds what."""

    def __init__(self) -> None:
        self._held: Counter[tuple[str, ...]] = Counter()
        self._patience: dict[Caller, Patience] = {}
        self._taking = WeakValueDictionary[Caller, Patience]()
        """See `taking`."""
        self._late: dict[str, float] = {}
        """When the last `late` refusal that waits will be given to each host."""
        self.unread = Counter[str]()
        """Connections with calls whose caller does not read, as `connection_of`, and how many calls: they are to end,
        because gRPC keeps what such a call has brought and what it should take."""

    @property
    def holds_nothing(self) -> bool:
        """No call is here any more."""
        return not self._held and not self._patience

    @contextmanager
    def holding(self, share: Share, caller: Caller) -> Iterator[None]:
        """The caller holds one more of these while the `with` lasts. Raises Busy."""
        of_host, of_caller = (share.what, caller.host), (share.what, *caller)
        relayed = caller.host.startswith(RELAY)
        most = min(share.of_caller, share.of_host // OF_RELAYED) if relayed else share.of_caller
        if self._held[of_host] >= share.of_host or self._held[of_caller] >= most:
            raise Busy(f"{caller.host} has as many {share.what} here as allowed", late=True)
        self._held.update((of_host, of_caller))
        try:
            yield
        finally:
            for key in (of_host, of_caller):
                self._held[key] -= 1
                if not self._held[key]:
                    del self._held[key]

    async def until_over(self, connection: str, answer: Callable[[ExitStack], Awaitable[None]]) -> None:
        """Answer a call; the shares that its caller holds are in the stack. A caller that does not take what is written
        holds them until the call is over, and gRPC cancels this."""
        with ExitStack() as held:
            with suppress(Unread):  # With the error go the frames that hold what would have been sent.
                await answer(held)
                return
            await asyncio.sleep(LET_GO_S)
            self.unread[connection] += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.unread -= Counter((connection,))

    @contextmanager
    def sending(self, caller: Caller) -> Iterator[Patience]:
        """The patience for one activation. All of a caller's share it, because its bodies leave it one by one."""
        with self.holding(ACTIVATIONS, caller):
            try:
                yield self._patience.setdefault(caller, Patience())
            finally:
                if self._held[ACTIVATIONS.what, *caller] == 1:
                    del self._patience[caller]

    def taking(self, caller: Caller) -> Patience:
        """The patience for replies to activations. All that are being sent to a caller share it, because they leave one
        by one."""
        return self._taking.setdefault(caller, Patience())

    async def delay(self, caller: Caller, refusal: Exception) -> None:
        """Wait for the turn of a refusal that is `late`. If too many wait, it goes at once."""
        if not (isinstance(refusal, Busy) and refusal.late):
            return
        with suppress(Busy), self.holding(LATE, caller):
            now, host = asyncio.get_running_loop().time(), caller.host
            turn = self._late[host] = max(now, self._late.get(host, 0.0)) + 1 / LATE_PER_S
            try:
                await asyncio.sleep(turn - now)
            finally:
                if self._held[LATE.what, host] == 1:
                    del self._late[host]

    async def drain(
        self, caller: Caller, context: Any, unwanted: Callable[[bytes], bool] = lambda message: False
    ) -> bool:
        """Read on until the caller notices its reply, for at most RESERVE_S. True: a message was `unwanted`.

        If the call ended earlier, gRPC would fail the caller's pending write, and drop a reply that was not read yet.
        """
        with suppress(Busy, TimeoutError), self.holding(DRAINS, caller):
            async with asyncio.timeout(RESERVE_S):
                while (message := await context.read()) is not grpc.aio.EOF:
                    if unwanted(message):
                        return True
        return False
