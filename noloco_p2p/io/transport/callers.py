"""Limits on callers' use of this node and on its waits for them (ARCHITECTURE.md, "What a stranger can do").

In an open run anybody can have any number of names. So there are two limits: one for each name at a host, and a larger
one for the host.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import unquote
from weakref import WeakValueDictionary

import grpc.aio

from noloco_p2p.core import wire
from noloco_p2p.core.messages import PEER_ID_CHARACTERS, PeerId
from noloco_p2p.errors import Busy, NolocoError, Violation
from noloco_p2p.io.dht.reach import RELAY, host_of
from noloco_p2p.io.transport import message_codec, slow_transfers
from noloco_p2p.io.transport.slow_transfers import Patience, Unread

MAX_CALL_S = 3600.0
"""Longest deadline that a caller may set, seconds. Without a limit a call could hold memory forever."""
MAX_CALLS = 6144
"""Calls served in parallel; any beyond that are refused as Busy."""
LET_GO_S = 10.0
"""How long a caller has to end a call on which a write was broken off, before its connection is ended, seconds. The end
of a call arrives only after everything that is waiting in its caller's sockets."""


class Share(NamedTuple):
    """How many of something one caller may hold at a time, and how many all callers of a host may hold together."""

    what: str
    of_caller: int
    of_host: int


CALLS = Share("calls", 2816, 3072)
"""A host gets half of MAX_CALLS. An activation takes one call for each connection that carries it."""
ACTIVATIONS = Share("activations", 160, 192)
"""At most 256 headers wait in line, so one host cannot take all places."""
TRANSFERS = Share("transfers of weights", 4, 64)
DRAINS = Share("refused calls that are drained", 128, 256)
LATE = Share("refusals that wait", 512, 1024)
LATE_PER_S = 20.0
"""How many calls of strangers, and of callers that have used up their share, are refused per second to one host. A
refusal costs 0.9 ms of CPU, and its caller could call again at once."""
OF_RELAYED = 4
"""A caller behind a relay may hold at most 1 / OF_RELAYED of what all callers behind that relay may hold together."""


def metadata(wanted_bytes: int = 0) -> tuple[tuple[str, str], ...]:
    """Metadata of all calls but `Warm`. `wanted_bytes`: the most tensor bytes wanted per message; 0 for any number."""
    wanted = (("noloco-message-bytes", str(wanted_bytes)),) if wanted_bytes else ()
    return ("noloco-protocol", wire.PROTOCOL), *wanted


class Caller(NamedTuple):
    """Identifies a caller, for the limits on what it may hold."""

    host: str
    """The `host_of` its IP address. For a stream, `p2p/` and the peer that opened it, or `relay/` and the relay: the
    peers behind a relay cannot be told apart, so all of them count as one host."""
    name: PeerId
    """The peer whose certificate the caller shows; until that has been checked, the name in the certificate."""

    @classmethod
    def of(cls, context: Any, streams: Mapping[str, str]) -> "Caller":
        """The caller in a gRPC context; `streams`: see `Links.own`."""
        [name, *_] = context.auth_context().get("peer_dns", ()) or [b""]
        host = streams.get(connection_of(context)) or _host(str(context.peer()))
        return cls(host, name[:PEER_ID_CHARACTERS].decode(errors="replace"))


def connection_of(context: Any) -> str:
    """`host:port` of the remote end of the connection that carries a call, without the zone of an IPv6 address."""
    return re.sub("%[^]]*", "", unquote(str(context.peer())).partition(":")[2])


@lru_cache(1024)
def _host(peer: str) -> str:
    """`Caller.host` of a connection in gRPC's notation: `ipv4:127.0.0.1:40000`, `ipv6:%5B::1%5D:40000`."""
    return host_of(unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]"))


def check_admissible(context: Any) -> None:
    """Raises Violation for a call with another protocol version, or without an acceptable deadline."""
    protocol = str(dict(context.invocation_metadata()).get("noloco-protocol"))[:64]
    if protocol != wire.PROTOCOL:
        raise Violation(
            f"the caller speaks protocol {protocol!r}, this node speaks {wire.PROTOCOL!r}: use equal versions"
        )
    seconds = context.time_remaining()
    if seconds is None or seconds > MAX_CALL_S:
        raise Violation(f"a call needs a deadline of at most {MAX_CALL_S:g} s")


def wanted_bytes(context: Any) -> int:
    """The `wanted_bytes` that the caller gave to `metadata`; 0 if it gave none."""
    wanted = str(dict(context.invocation_metadata()).get("noloco-message-bytes", ""))
    return int(wanted) if re.fullmatch("[0-9]{1,9}", wanted) else 0


async def refuse(write: Callable[[bytes], Awaitable[object]], kind: Callable[..., Any], error: NolocoError) -> None:
    """Tell the caller why it is not served, if it is still connected. Raises Unread."""
    error.with_traceback(None)  # The traceback's frames hold what the caller has sent.
    with suppress(grpc.aio.InternalError):
        await write(kind(refusal=message_codec.to_refusal(error)).SerializeToString())


class Callers:
    """What each caller holds of this node at the moment."""

    def __init__(self) -> None:
        self._held: Counter[tuple[str, ...]] = Counter()
        self._patience: dict[Caller, Patience] = {}
        self._taking = WeakValueDictionary[Caller, Patience]()
        """See `taking`."""
        self._late = WeakValueDictionary[str, asyncio.Lock]()
        """By host: of its waiting `late` refusals, one at a time has its turn."""
        self.unread = Counter[str]()
        """Connections (as from `connection_of`) with calls whose caller does not read, and how many such calls. They
        must be closed, because gRPC keeps what such a call has brought and what it should accept."""

    @contextmanager
    def holding(self, share: Share, caller: Caller) -> Iterator[None]:
        """Within the context the caller holds one more of this share. Raises Busy if it has used up the share."""
        of_host, of_caller = (share.what, caller.host), (share.what, *caller)
        relayed = caller.host.startswith(RELAY)
        most = min(share.of_caller, share.of_host // OF_RELAYED) if relayed else share.of_caller
        if self._held[of_host] >= share.of_host or self._held[of_caller] >= most:
            raise Busy(f"{caller.host} has reached this node's limit on {share.what}", late=True)
        self._held.update((of_host, of_caller))
        try:
            yield
        finally:
            for key in (of_host, of_caller):
                self._held[key] -= 1
                if not self._held[key]:
                    del self._held[key]

    async def until_over(self, connection: str, answer: Callable[[ExitStack], Awaitable[None]]) -> None:
        """Answer a call; the stack holds the shares that the call uses. If the caller does not read what is written,
        they are held until the call ends, when gRPC cancels this task."""
        with ExitStack() as held:
            with suppress(Unread):  # Dropping the error also frees the frames that hold what was to be sent.
                await answer(held)
                return
            await asyncio.sleep(LET_GO_S)
            await self._close(connection, MAX_CALL_S)

    async def give_up(self, context: Any, error: NolocoError) -> None:
        """End a call, or its connection if gRPC cannot end the call: a write was broken off, or is not read."""
        try:
            async with asyncio.timeout(LET_GO_S):
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except (TimeoutError, grpc.aio.InternalError):
            # From now on gRPC does not cancel this task when the call ends.
            await self._close(connection_of(context), LET_GO_S)

    async def _close(self, connection: str, seconds: float) -> None:
        """Count a connection as `unread` for this long, or until cancelled."""
        self.unread[connection] += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self.unread -= Counter((connection,))

    @contextmanager
    def sending(self, caller: Caller) -> Iterator[Patience]:
        """The patience for an activation. A caller's activations share it, because their bodies arrive one by one."""
        with self.holding(ACTIVATIONS, caller):
            try:
                yield self._patience.setdefault(caller, Patience())
            finally:
                if self._held[ACTIVATIONS.what, *caller] == 1:
                    del self._patience[caller]

    def taking(self, caller: Caller) -> Patience:
        """The patience for a reply to an activation. Replies to the same caller share it: they are sent one by one."""
        return self._taking.setdefault(caller, Patience())

    async def delay(self, caller: Caller, refusal: Exception) -> None:
        """If the refusal is `late`, wait for its turn; if too many are waiting already, do not wait."""
        if not (isinstance(refusal, Busy) and refusal.late):
            return
        with suppress(Busy), self.holding(LATE, caller):
            async with self._late.setdefault(caller.host, asyncio.Lock()):
                await asyncio.sleep(1 / LATE_PER_S)

    async def drain(
        self, caller: Caller, context: Any, unwanted: Callable[[bytes], bool] = lambda message: False
    ) -> bool:
        """Read on until the caller notices its reply, for at most RESERVE_S. Returns whether a message was `unwanted`.

        If the call ended earlier, gRPC would fail the caller's pending write and drop a reply that it had not read yet.
        """
        with suppress(Busy, TimeoutError), self.holding(DRAINS, caller):
            async with asyncio.timeout(slow_transfers.RESERVE_S):
                while (message := await context.read()) is not grpc.aio.EOF:
                    if unwanted(message):
                        return True
        return False
