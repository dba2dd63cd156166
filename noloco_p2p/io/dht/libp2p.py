"""This node's libp2p daemon: links to peers, small authenticated calls and streams, and how its death is noticed.

hivemind is imported where it is used: the import takes time. None of its calls has a timeout, and a dead daemon leaves
them waiting forever, so each one goes through `guard`. Its exceptions are translated to ours here.
"""

import asyncio
import contextlib
import importlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import ConfigError, Declined, LocalError, PeerError, Unreachable, Violation
from noloco_p2p.io.dht import p2p_daemon
from noloco_p2p.io.dht.addresses import JoinAddress, announced_host, reserve_port
from noloco_p2p.io.dht.identity import Identity
from noloco_p2p.io.dht.port_mapping import HomeRouter, is_behind_router
from noloco_p2p.io.dht.reach import Reach, T

CallHandler = Callable[[PeerId, bytes], Awaitable[bytes]]
"""Answers one call: (authenticated caller, request) → response. The text of a PeerError reaches the caller."""


class Stream(NamedTuple):
    """A two-way byte stream to a peer, or to a process on this machine."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


StreamHandler = Callable[[PeerId, Stream], Awaitable[None]]
"""Serves one stream of an authenticated peer; the stream is closed when it returns."""

DIAL_TIMEOUT_S = 5.0
CALL_LIMIT_BYTES = 1 << 20
"""Largest request or response; hivemind's own limit is 4 MiB."""
_ERROR, _ANSWER = b"\x00", b"\x01"

log = logging.getLogger(__name__)


class Libp2pDaemon:
    """A running daemon, owned by this object from `open` to `close`."""

    p2p: Any
    """hivemind's `P2P`; for the DHT node only."""
    reach: Reach
    """Decides which addresses named by others this node dials."""
    failed: asyncio.Future[None]
    """Awaiting this raises LocalError once the daemon has died; cancelled by `close`."""

    def __init__(self, identity: Identity, host: str, address: JoinAddress, metrics_port: int | None) -> None:
        """See `open`; `address` is the announced one."""
        self.identity, self.peer_id = identity, identity.peer_id
        self.joined: tuple[JoinAddress, ...] = ()
        """The given join addresses that answered."""
        self.metrics_port = metrics_port
        """TCP port of the daemon's own /metrics, on the host where it listens; None if it serves none."""
        self._host, self._address = host, address
        self._death = "the libp2p daemon has ended"
        self._watch: asyncio.Task[None] | None = None
        self._added: list[Callable[[], Awaitable[object]]] = []
        """Functions that make the daemon answer calls, or accept streams, of one name; called again after a restart."""
        self._stream_handlers: dict[str, StreamHandler] = {}
        self.met: dict[PeerId, JoinAddress] = {}
        """Addresses of other peers' daemons from the last reading of the directory; only those that this node dials."""
        self.ways: Callable[[], tuple[str, ...]] | None = None
        """Returns the gRPC addresses of a node that cannot be dialled at its own address; None if it can."""
        self.router: HomeRouter | None = None
        """The home router that may map this daemon's port and others; None if it is not to be asked."""

    @classmethod
    async def open(
        cls,
        identity: Identity,
        *,
        host: str,
        port: int,
        announce_host: str | None = None,
        join: Sequence[str] = (),
        metrics_port: int | None = None,
        router: HomeRouter | None = None,
    ) -> "Libp2pDaemon":
        """Start the daemon on (host, port; 0 picks one), and dial the addresses to join, one of which has to answer.

        With `metrics_port` (0 again picks one) the daemon serves its own metrics there. At a private IPv4 address,
        `router` is asked to map the port. Raises LocalError (port in use, daemon does not start), ConfigError
        (malformed address, another peer at each of them) or Unreachable (no answer).
        """
        targets = [JoinAddress.parse(text) for text in join]
        others = [target for target in targets if target.peer_id != identity.peer_id]
        if targets and not others:
            raise ConfigError(f"join address {targets[0]} is this node's own: give the address of another node")
        announced = announced_host(host, announce_host, others)
        libp2p = cls(identity, host, JoinAddress(announced, port, identity.peer_id), metrics_port)
        libp2p.reach = Reach([announced, *(target.host for target in others)])
        libp2p.router = router if is_behind_router(announced) else None
        try:
            await libp2p._start()
            if others:
                libp2p.joined = await libp2p._join(others)
        except BaseException:
            await libp2p.close()
            raise
        return libp2p

    async def restart(self) -> None:
        """Restart a daemon that has died, as the same peer on the same ports and answering the same calls.

        Raises LocalError, Unreachable.
        """
        await self._stop()
        await self._start()
        for add in tuple(self._added):
            await self.guard(add(), p2p_daemon.ANSWER_TIMEOUT_S, "the libp2p daemon")

    @property
    def join_addresses(self) -> list[str]:
        """The addresses that others pass to `--join`, `/ip4/…/tcp/…/p2p/<peer id>`, best first."""
        return [str(one) for one in self._places]

    @property
    def outside(self) -> JoinAddress | None:
        """The address outside at which a home router maps this daemon's port; None if it does not."""
        place = self.router.place(self._address.port) if self.router is not None else None
        return None if place is None else JoinAddress(*place, self.peer_id)

    @property
    def asks_only(self) -> bool:
        """Whether this node only asks in the DHT and never answers, because most others could not dial it."""
        return self.ways is not None and self.outside is None

    async def dial(self, target: JoinAddress, what: str = "join address") -> None:
        """Open a link to a peer; returns at once if there is one. Raises ConfigError (another peer), Unreachable; their
        messages call the target `what`."""
        try:
            reason = await self.guard(p2p_daemon.connect(self.p2p, target, what), DIAL_TIMEOUT_S, "an answer")
        except Unreachable as error:
            reason = str(error)
        if reason:
            advice = "check that the node is running and its port is open"
            raise Unreachable(f"{what} {target}: nobody answers ({reason}); {advice}")

    async def dial_all(self, targets: Iterable[JoinAddress]) -> list[ConfigError | PeerError | None]:
        """Open links to several peers. Returns why each could not be opened, None if it was. Raises LocalError."""
        failures: list[Any] = await asyncio.gather(*map(self.dial, targets), return_exceptions=True)
        for other in (one for one in failures if not isinstance(one, ConfigError | PeerError | None)):
            raise other
        return failures

    async def links(self) -> set[PeerId]:
        """The peers to which there is a link at the moment. Raises LocalError."""
        try:
            peers = await self.guard(self.p2p.list_peers(), p2p_daemon.ANSWER_TIMEOUT_S, "the libp2p daemon")
        except Unreachable as error:
            raise LocalError("the libp2p daemon does not answer") from error
        return {peer.peer_id.to_base58() for peer in peers}

    async def serve(self, name: str, handler: CallHandler) -> None:
        """Answer calls of this name from now on, also after a restart. To be called once per name."""
        from google.protobuf.wrappers_pb2 import BytesValue

        async def answer(request: BytesValue, context: Any) -> BytesValue:
            try:
                return BytesValue(value=_ANSWER + await handler(context.remote_id.to_base58(), request.value))
            except PeerError as error:
                return BytesValue(value=_ERROR + str(error).encode())

        await self._add(lambda: self.p2p.add_protobuf_handler(name, answer, BytesValue))

    async def call(self, peer_id: PeerId, name: str, request: bytes, timeout_s: float) -> bytes:
        """Call a linked peer; libp2p authenticates both ends.

        Raises Unreachable (no link, no answer in time), Declined (no such call there, or it was refused), Violation.
        """
        from google.protobuf.message import DecodeError
        from google.protobuf.wrappers_pb2 import BytesValue
        from hivemind.p2p import PeerID
        from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError

        reply = self.p2p.call_protobuf_handler(PeerID.from_base58(peer_id), name, BytesValue(value=request), BytesValue)
        try:
            answer = bytes((await self.guard(reply, timeout_s, f"peer {peer_id}: an answer to {name}")).value)
        except P2PHandlerError as error:
            raise Declined(f"peer {peer_id} failed to answer {name}: {str(error)[:200]!r}") from error
        except P2PDaemonError as error:
            if "protocols not supported" in str(error):
                why = "it is still starting, or runs another version of noloco: use equal versions"
                raise Declined(f"peer {peer_id} does not answer {name}: {why}") from error
            raise Unreachable(f"peer {peer_id} cannot be reached: {str(error)[:200]!r}") from error
        except (DecodeError, TypeError) as error:  # TypeError: the answer is empty
            raise Violation(f"peer {peer_id} answered {name} with something that cannot be read") from error
        if len(answer) > CALL_LIMIT_BYTES or answer[:1] not in (_ERROR, _ANSWER):
            raise Violation(f"peer {peer_id} answered {name} with {len(answer)} bytes that are not a valid answer")
        if answer[:1] == _ERROR:
            raise Declined(f"peer {peer_id}: {answer[1:201].decode(errors='replace')!r}")
        return answer[1:]

    async def serve_streams(self, name: str, handler: StreamHandler) -> None:
        """Accept streams of this name from now on, also after a restart. Another call replaces the handler."""

        async def answer(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await self._stream_handlers[name](info.peer_id.to_base58(), Stream(reader, writer))
            finally:
                writer.close()

        known, self._stream_handlers[name] = name in self._stream_handlers, handler
        if not known:
            await self._add(lambda: self.p2p.add_binary_stream_handler(name, answer))

    async def open_stream(self, peer_id: PeerId, name: str) -> Stream:
        """Open a stream to a linked peer; opens no new link. Raises Unreachable (no link, no answer), LocalError."""
        from hivemind.p2p import PeerID
        from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

        if peer_id not in await self.links():
            raise Unreachable(f"there is no link to {peer_id}")
        opening = self.p2p.call_binary_stream_handler(PeerID.from_base58(peer_id), name)
        try:
            _, reader, writer = await self.guard(opening, DIAL_TIMEOUT_S, f"peer {peer_id}: a stream for {name}")
        except P2PDaemonError as error:
            raise Unreachable(f"peer {peer_id} accepts no stream for {name}: {str(error)[-100:]!r}") from error
        return Stream(reader, writer)

    async def guard(self, waiting: Awaitable[T], timeout_s: float, what: str) -> T:
        """Await something that the daemon does. Raises Unreachable after `timeout_s`, LocalError if the daemon dies."""
        task = asyncio.ensure_future(waiting)
        both: set[asyncio.Future[Any]] = {task, self.failed}
        try:
            await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self.failed.done():
                raise LocalError(self._death)
            if not task.done():
                raise Unreachable(f"{what} did not arrive within {timeout_s:g} s")
            return await task
        except TimeoutError as error:
            raise Unreachable(f"{what} did not arrive in time") from error
        except (OSError, EOFError) as error:
            raise LocalError(f"the libp2p daemon does not answer ({error or 'its socket was closed'})") from error
        finally:
            if not task.cancel() and not task.cancelled():
                task.exception()  # marks it as seen

    async def close(self) -> None:
        """Stop the daemon, and remove the router's mappings. Harmless if called twice, or after the daemon has died."""
        await self._stop()
        if self.router is not None:
            await self.router.end()

    @property
    def _places(self) -> list[JoinAddress]:
        """The addresses at which this daemon can be dialled, best first."""
        return [self._address] if self.outside is None else [self.outside, self._address]

    async def _add(self, add: Callable[[], Awaitable[object]]) -> None:
        self._added.append(add)
        await self.guard(add(), p2p_daemon.ANSWER_TIMEOUT_S, "the libp2p daemon")

    async def _stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self.failed.cancel()
            await p2p_daemon.stop(self.p2p)

    async def _start(self) -> None:
        """Start the daemon. A port of 0 is replaced by the one that was picked."""
        p2p_daemon.sweep_stale_sockets()
        with contextlib.ExitStack() as held:
            own = held.enter_context(reserve_port(self._host, self._address.port, "listen.dht_port"))
            self._address = replace(self._address, port=own.getsockname()[1])
            if self.metrics_port is not None:
                metrics = reserve_port(self._host, self.metrics_port, "listen.libp2p_metrics_port")
                self.metrics_port = held.enter_context(metrics).getsockname()[1]
            if self.router is not None:  # searching for a router takes as long as the import, so do both
                importing = asyncio.to_thread(importlib.import_module, "hivemind.p2p")
                await asyncio.gather(self.router.try_map(self._address.port), importing)
                if self.outside is None:
                    self.router = None  # it is not asked again
            self.p2p = await p2p_daemon.start(self.identity, self._host, self._places, self.metrics_port)
        self.failed = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._watched())

    async def _watched(self) -> None:
        self._death = f"the libp2p daemon (p2pd) has died ({p2p_daemon.how_it_ended(await self.p2p._child.wait())})"
        if not self.failed.done():
            self.failed.set_exception(LocalError(self._death))
            self.failed.exception()  # marks it as retrieved, because perhaps nobody ever awaits it

    async def _join(self, targets: Sequence[JoinAddress]) -> tuple[JoinAddress, ...]:
        failures = await self.dial_all(targets)
        errors = list(filter(None, failures))
        if len(errors) == len(targets):
            raise min(errors, key=lambda one: isinstance(one, ConfigError))  # who does not answer may come back
        for error in errors:
            log.warning("%s", error)
        return tuple(target for target, failure in zip(targets, failures, strict=True) if failure is None)
