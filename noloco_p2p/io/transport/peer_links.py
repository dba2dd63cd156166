"""Who is at the other end of a connection: by its own claim in an open run, by its certificate among members."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import grpc
import grpc.aio

from noloco_p2p.core.messages import Header, PeerId
from noloco_p2p.errors import Unreachable, Violation
from noloco_p2p.io.dht.identity import verify
from noloco_p2p.io.dht.reach import is_streamed
from noloco_p2p.io.dht.streams import Streams
from noloco_p2p.io.security.certificates import Role
from noloco_p2p.io.security.credentials import Credentials

LABEL_S = 3_600.0
"""How long the label of a microbatch is valid, seconds: as long as the longest call."""
_UNTIL = struct.Struct(">Q")
Options = tuple[tuple[str, Any], ...]


class Links(Protocol):
    """How a node of one run listens, connects, and knows its callers."""

    me: PeerId
    run_id: str
    streams: Streams | None
    """The ways to and from peers that accept no connections; None: there are none."""

    def add_port(self, server: Any, address: str) -> int:
        """Let a gRPC server listen at `host:port`; its TCP port. Raises RuntimeError: it cannot be bound."""

    def channel(self, address: str, peer: PeerId, options: Options, role: Role = "member") -> Any:
        """A gRPC channel to `peer`, which has this role, at what `target` gave."""

    def caller(self, context: Any, *, observers: bool) -> PeerId:
        """Who makes this call; `observers` may make it too. Raises Violation, Declined: it may not."""

    def labelled(self, header: Header) -> Header:
        """The header of an activation that leaves this node, with the label of its origin."""

    def check_label(self, header: Header, caller: PeerId) -> None:
        """Raises Violation unless the origin began this microbatch and, at stage 1, is the caller."""

    def calling(self, peer: PeerId) -> AbstractAsyncContextManager[None]:
        """Around a call to `peer`. Raises Unreachable in the middle of it when the peer is revoked."""

    def called(self, context: Any) -> AbstractAsyncContextManager[None]:
        """The same around an incoming call."""

    def sign(self, message: bytes) -> bytes:
        """A signature that proves who answers; empty if the connection proves it, or this node answers no calls."""

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        """Whether `signature` proves that the answer is from `peer`."""


async def target(links: Links, address: str, peer: PeerId) -> str:
    """What gRPC dials for one connection to a peer at one of its addresses. Raises Unreachable."""
    if links.streams is not None:
        return await links.streams.target(address, peer)
    if is_streamed(address):
        raise Unreachable("it is behind NAT, and answers members only")
    return address


class OpenLinks:
    """Neither authenticated nor encrypted: callers are who they claim to be. `sign` is the libp2p identity's."""

    streams: Streams | None = None

    def __init__(self, me: PeerId, run_id: str, sign: Callable[[bytes], bytes] | None = None) -> None:
        self.me, self.run_id = me, run_id
        self._sign = sign

    def add_port(self, server: Any, address: str) -> int:
        """See Links."""
        return int(server.add_insecure_port(address))

    def channel(self, address: str, peer: PeerId, options: Options, role: Role = "member") -> Any:
        """See Links."""
        return grpc.aio.insecure_channel(address, options=options)

    def caller(self, context: Any, *, observers: bool) -> PeerId:
        """See Links."""
        return str(dict(context.invocation_metadata()).get("noloco-peer", ""))

    def labelled(self, header: Header) -> Header:
        """See Links."""
        return header

    def check_label(self, header: Header, caller: PeerId) -> None:
        """See Links. An open run has no labels."""

    def calling(self, peer: PeerId) -> AbstractAsyncContextManager[None]:
        """See Links."""
        return nullcontext()

    def called(self, context: Any) -> AbstractAsyncContextManager[None]:
        """See Links."""
        return nullcontext()

    def sign(self, message: bytes) -> bytes:
        """See Links."""
        return b"" if self._sign is None else self._sign(message)

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        """See Links."""
        return verify(peer, message, signature)


class MemberLinks:
    """Mutual TLS: both ends show a certificate of the run (ARCHITECTURE.md, "Members")."""

    streams: Streams | None = None

    def __init__(self, credentials: Credentials) -> None:
        self.me, self.run_id = credentials.peer_id, credentials.trust.run_id
        self._credentials = credentials
        self._served: tuple[bytes, bytes] | None = None
        """The leaf that the server shows."""
        self._calls: dict[asyncio.Timeout, Callable[[], bool]] = {}
        """Calls in progress; each with a function that returns whether it has to end."""
        credentials.revoked.listen(self._cut)

    def add_port(self, server: Any, address: str) -> int:
        """See Links. The server asks for the current leaf at each handshake."""
        first = self._configuration()
        return int(server.add_secure_port(address, grpc.dynamic_ssl_server_credentials(first, self._replaced, True)))

    def channel(self, address: str, peer: PeerId, options: Options, role: Role = "member") -> Any:
        """See Links. TLS compares the name of whoever answers with that of `peer`."""
        trust, (key, chain) = self._credentials.trust, self._credentials.leaf()
        named = (*options, ("grpc.ssl_target_name_override", trust.name_of(peer, role)))
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(trust.anchor, key, chain), options=named)

    def caller(self, context: Any, *, observers: bool) -> PeerId:
        """See Links. What the call itself claims is ignored."""
        return self._credentials.caller(context.auth_context(), observers=observers)

    def labelled(self, header: Header) -> Header:
        """See Links. A label of another origin is passed on unchanged."""
        if header.stage > 1:
            return header
        until = _UNTIL.pack(int(self._credentials.clock() + LABEL_S))
        return replace(header, label=until + self._credentials.sign(_labelled(header, until)))

    def check_label(self, header: Header, caller: PeerId) -> None:
        """See Links."""
        origin = header.origin.peer
        if header.microbatch.peer != origin or (header.stage == 1 and origin != caller):
            raise Violation("stage 1 takes a microbatch only from the node that read it")
        until, signature = header.label[: _UNTIL.size], header.label[_UNTIL.size :]
        if not verify(origin, _labelled(header, until), signature):
            raise Violation("the origin has not signed this microbatch")
        if _UNTIL.unpack(until)[0] <= self._credentials.clock():
            raise Violation("the origin's signature of this microbatch has expired")

    def calling(self, peer: PeerId) -> AbstractAsyncContextManager[None]:
        """See Links."""
        return self._until(lambda: self._credentials.revoked.names(peer))

    def called(self, context: Any) -> AbstractAsyncContextManager[None]:
        """See Links."""
        return self._until(lambda: self._credentials.refuses(context.auth_context()))

    @asynccontextmanager
    async def _until(self, revoked: Callable[[], bool]) -> AsyncIterator[None]:
        ends = asyncio.timeout(0.0 if revoked() else None)
        try:
            async with ends:
                self._calls[ends] = revoked
                yield
        except TimeoutError:
            if not ends.expired():
                raise
            raise Unreachable("one end of this call was revoked") from None
        finally:
            self._calls.pop(ends, None)

    def _cut(self) -> None:
        now = asyncio.get_running_loop().time() if self._calls else 0.0
        for ends, revoked in self._calls.items():
            if revoked() and not ends.expired():
                ends.reschedule(now)

    def sign(self, message: bytes) -> bytes:
        """See Links."""
        return b""

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        """See Links. TLS has already authenticated `peer`."""
        return True

    def _configuration(self) -> Any:
        self._served = self._credentials.leaf()
        return grpc.ssl_server_certificate_configuration([self._served], self._credentials.trust.anchor)

    def _replaced(self) -> Any:
        """What the server shows from now on; None: no change."""
        return None if self._credentials.leaf() is self._served else self._configuration()


def _labelled(header: Header, until: bytes) -> bytes:
    """What an origin signs. Evaluations have ids of their own."""
    content = header.run_id, *header.microbatch, header.origin.step, header.origin.index, until.hex()
    return b"noloco microbatch 1\x00" + json.dumps(content).encode()
