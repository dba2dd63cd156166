"""Mutual TLS for gRPC: every connection proves, by certificate, which peer is at the other end."""

import asyncio
import json
import logging
import os
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from noloco_p2p.core.messages import Header, PeerId
from noloco_p2p.errors import Unreachable, Violation
from noloco_p2p.io.dht.identity import Identity, verify
from noloco_p2p.io.dht.reach import is_streamed
from noloco_p2p.io.dht.streams import Streams
from noloco_p2p.io.security import certificates
from noloco_p2p.io.security.certificates import Role, RunTrust
from noloco_p2p.io.security.credentials import Credentials

LABEL_S = 3_600.0
"""How long the label of a microbatch is valid, seconds. No call lasts longer."""
CUT = "one end of this call was revoked or closed"
_UNTIL = struct.Struct(">Q")
Options = tuple[tuple[str, Any], ...]


class Links:
    """How a node of one run listens, connects, and identifies its callers: mutual TLS (ARCHITECTURE.md, "Links")."""

    streams: Streams | None = None
    """The libp2p streams to and from peers that accept no connections; None if there are none."""

    def __init__(self, credentials: Credentials) -> None:
        self.me, self.run_id = credentials.peer_id, credentials.trust.run_id
        self._credentials = credentials
        self._served: tuple[bytes, bytes] | None = None
        """The leaf that the server presents."""
        self._calls: dict[asyncio.Timeout, Callable[[], bool]] = {}
        """Calls in progress, each with a function that returns whether the call must end."""
        credentials.revoked.listen(self.cut)
        logging.getLogger("grpc._cython.cygrpc").addFilter(_belongs_in_log)

    def own(self) -> Mapping[str, str]:
        """This node's connections to its own server: `host:port` → whose stream each carries (`Streams.hosts`)."""
        return {} if self.streams is None else self.streams.hosts

    @property
    def leaf(self) -> tuple[bytes, bytes]:
        """The key and the chain of the leaf that this node presents on new connections. New calls avoid connections on
        which it presented an earlier leaf, because the peer refuses every call on them once that leaf has expired."""
        return self._credentials.leaf()

    def add_port(self, server: Any, address: str) -> int:
        """Make a gRPC server listen at `host:port`; returns its TCP port. Raises RuntimeError if it cannot be bound.

        The server fetches the current leaf at each handshake.
        """
        first = self._configuration()
        return int(server.add_secure_port(address, grpc.dynamic_ssl_server_credentials(first, self._replaced, True)))

    def channel(self, address: str, peer: PeerId, options: Options, role: Role = "member") -> Any:
        """A gRPC channel to `peer`, which has this role, at an address from `target`. TLS accepts only an answer from a
        node with the name of `peer`. Raises Violation if no public key follows from its peer id.
        """
        trust, (key, chain) = self._credentials.trust, self._credentials.leaf()
        name = "grpc.ssl_target_name_override", trust.name_of(peer, role)
        # Unless told otherwise, gRPC would use the proxy that the environment names for the web (`http_proxy`).
        proxy = "grpc.enable_http_proxy", int("grpc_proxy" in os.environ)
        shown = grpc.ssl_channel_credentials(trust.anchor_of(peer), key, chain)
        return grpc.aio.secure_channel(address, shown, options=(*options, name, proxy))

    def caller(self, context: Any, *, observers: bool) -> PeerId:
        """The peer that makes this call; `observers` may make it too. Raises Violation or Declined if it may not."""
        return self._credentials.caller(context.auth_context(), observers=observers)

    def labelled(self, header: Header) -> Header:
        """The header of an outgoing activation with its origin's label: signed here if this node is the origin, and
        passed on unchanged otherwise."""
        if header.stage > 1:
            return header
        until = _UNTIL.pack(int(self._credentials.clock() + LABEL_S))
        return replace(header, label=until + self._credentials.identity.sign(_labelled(header, until)))

    def check_label(self, header: Header, caller: PeerId) -> None:
        """Raises Violation unless the origin began this microbatch and, at stage 1, is the caller."""
        origin = header.origin.peer
        if header.microbatch.peer != origin or (header.stage == 1 and origin != caller):
            raise Violation("stage 1 accepts a microbatch only from the node that read it")
        until, signature = header.label[: _UNTIL.size], header.label[_UNTIL.size :]
        if not verify(origin, _labelled(header, until), signature):
            raise Violation("the origin has not signed this microbatch")
        if _UNTIL.unpack(until)[0] <= self._credentials.clock():
            raise Violation("the origin's signature of this microbatch has expired")

    def calling(self, peer: PeerId, closed: Callable[[], bool] = lambda: False) -> AbstractAsyncContextManager[None]:
        """A context for a call to `peer`. Raises Unreachable inside it as soon as the peer, or its issuer, is revoked.

        Also ends at a `cut` after this node has `closed`, because gRPC leaves a call waiting if its first message has
        not been sent.
        """
        revoked = self._credentials.revoked
        return self._until(lambda: closed() or revoked.names(peer, revoked.admitted_by.get(peer) or peer))

    def called(self, context: Any) -> AbstractAsyncContextManager[None]:
        """A context for an incoming call, which ends as soon as its caller is revoked."""
        return self._until(lambda: self._credentials.refuses(context.auth_context()))

    @asynccontextmanager
    async def _until(self, must_end: Callable[[], bool]) -> AsyncIterator[None]:
        if must_end():
            raise Unreachable(CUT)
        ends = asyncio.timeout(None)
        try:
            async with ends:
                self._calls[ends] = must_end
                yield
        except TimeoutError:
            if not ends.expired():
                raise
            raise Unreachable(CUT) from None
        finally:
            self._calls.pop(ends, None)

    def cut(self) -> None:
        """End the calls in progress that must end."""
        for ends, must_end in self._calls.items():
            if must_end() and not ends.expired():
                ends.reschedule(asyncio.get_running_loop().time())

    def _configuration(self) -> Any:
        self._served = self._credentials.leaf()
        return grpc.ssl_server_certificate_configuration([self._served], self._credentials.trust.anchor)

    def _replaced(self) -> Any:
        """The configuration with a new leaf, or None if the leaf has not changed."""
        return None if self._credentials.leaf() is self._served else self._configuration()


async def target(links: Links, address: str, peer: PeerId) -> str:
    """The address that gRPC dials for one connection to a peer at an advertised address. Raises Unreachable."""
    if links.streams is not None:
        return await links.streams.target(address, peer)
    if is_streamed(address):
        raise Unreachable("it is behind NAT and can be reached by members only")
    return address


def open_links(identity: Identity, run_id: str) -> Links:
    """The links of a peer of an open run, which anybody may join."""
    trust = RunTrust.of_open_run(run_id)
    return Links(Credentials(trust, identity, certificates.own_chain(identity.key, trust)))


def _belongs_in_log(record: logging.LogRecord) -> bool:
    """Log filter: drops gRPC's errors about a status that it could not deliver, because then the caller disconnected
    and gRPC had not noticed, about a call that was cancelled before its method had begun, and about an odd text from a
    peer, which is not UTF-8. Keeps all others: failing even to begin sending a status is a bug."""
    error, odd = record.exc_info and record.exc_info[1], record.msg == "Invalid encoding on %s"
    return not (odd or isinstance(error, asyncio.CancelledError) or str(error).startswith('Failed "execute_batch"'))


def _labelled(header: Header, until: bytes) -> bytes:
    """The bytes that an origin signs. Evaluations differ in their ids."""
    content = header.run_id, *header.microbatch, header.origin.step, header.origin.index, until.hex()
    return b"noloco microbatch 1\x00" + json.dumps(content).encode()
