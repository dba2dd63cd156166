"""The libp2p daemon (`p2pd`) of this node: start, links to peers, small authenticated calls, its death, its end.

hivemind is imported where it is used, because that takes two seconds. None of its calls has a timeout, and a dead
daemon leaves them waiting for ever, so every one goes through `guard`. Foreign exceptions are mapped to ours here.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import ConfigError, Declined, LocalError, PeerError, Unreachable, Violation
from noloco_p2p.io.addresses import JoinAddress, announced_host, host_multiaddress, port_in_use, reserve_port
from noloco_p2p.io.identity import Identity

T = TypeVar("T")
CallHandler = Callable[[PeerId, bytes], Awaitable[bytes]]
"""Answers one call: (authenticated caller, request) → response. A PeerError's text is told to the caller."""

DIAL_TIMEOUT_S = 5.0
DAEMON_TIMEOUT_S = 5.0
START_TIMEOUT_S = 30.0
CALL_LIMIT_BYTES = 1 << 20
"""Largest request or response; hivemind's own limit is 4 MiB."""
_SOCKETS = "hivemind-p2p*.sock"
_SOCKETS_MIN_AGE_S = 60.0
_ERROR, _ANSWER = b"\x00", b"\x01"

log = logging.getLogger(__name__)


def sweep_stale_sockets(directory: Path = Path("/tmp"), min_age_s: float = _SOCKETS_MIN_AGE_S) -> int:
    """Remove the daemon sockets of this user that nobody listens on any more; returns how many.

    hivemind puts them into /tmp by name. Young ones are left alone: their daemon may be about to listen.
    """
    removed = 0
    for path in sorted(directory.glob(_SOCKETS)):
        with contextlib.suppress(OSError):
            status = path.stat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < min_age_s:
                continue
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(0.2)
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink()
                    removed += 1
    return removed


class Libp2p:
    """A running daemon, owned by this object from `open` to `close`."""

    def __init__(self, identity: Identity, p2p: Any, address: JoinAddress) -> None:
        self.identity = identity
        self.p2p = p2p
        """hivemind's `P2P`; for the DHT node only."""
        self.joined: tuple[JoinAddress, ...] = ()
        """The given join addresses that answered."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises LocalError to whoever awaits it when the daemon has died; cancelled by `close`."""
        self._address = address
        self._watch = asyncio.create_task(self._watched())

    @classmethod
    async def open(
        cls, identity: Identity, *, host: str, port: int, announce_host: str | None = None, join: Sequence[str] = ()
    ) -> "Libp2p":
        """Start the daemon on (host, port), 0 picks a port, and dial the addresses to join.

        One live address among those given suffices. Raises LocalError (port in use, daemon does not start),
        ConfigError (malformed address, another peer at the address) or Unreachable (nobody answers), within 10 s.
        """
        targets = [JoinAddress.parse(text) for text in join]
        others = [target for target in targets if target.peer_id != identity.peer_id]
        if targets and not others:
            raise ConfigError(f"join address {targets[0]} is this node's own: give the address of another node")
        sweep_stale_sockets()
        told = announced_host(host, announce_host, others[0] if others else None)
        with reserve_port(host, port) as held:
            address = JoinAddress(told, held.getsockname()[1], identity.peer_id)
            p2p = await _start_daemon(identity, host, address)
        libp2p = cls(identity, p2p, address)
        try:
            if others:
                libp2p.joined = await libp2p._join(others)
        except BaseException:
            await libp2p.close()
            raise
        return libp2p

    @property
    def peer_id(self) -> PeerId:
        """This node's."""
        return self.identity.peer_id

    @property
    def join_addresses(self) -> list[str]:
        """What others pass to `--join`: `/ip4/…/tcp/…/p2p/<peer id>`, best first."""
        return [str(self._address)]

    @property
    def daemon_pid(self) -> int:
        """Process id of the daemon."""
        return int(self.p2p._child.pid)

    async def dial(self, target: JoinAddress) -> None:
        """Make a link to a peer; at once when there is one. Raises ConfigError (another peer), Unreachable."""
        from hivemind.p2p import PeerID
        from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
        from hivemind.utils.multiaddr import Multiaddr

        where = Multiaddr(host_multiaddress(target.host, target.port))
        connect = self.p2p._client.connect(PeerID.from_base58(target.peer_id), [where])
        try:
            await self.guard(connect, DIAL_TIMEOUT_S, "an answer")
        except Unreachable as error:
            raise Unreachable(_nobody(target, str(error))) from error
        except P2PDaemonError as error:
            reason = str(error)
            if "peer id mismatch" in reason:
                other = reason.rpartition("remote key matches ")[2].split()[0]
                raise ConfigError(
                    f"join address {target}: another peer answers there ({other}); copy the address that it prints"
                ) from error
            last = reason.strip().splitlines()[-1].rpartition(": ")[2].rpartition("] ")[2]
            raise Unreachable(_nobody(target, last)) from error

    async def links(self) -> set[PeerId]:
        """The peers to which there is a link now. Raises LocalError."""
        try:
            peers = await self.guard(self.p2p.list_peers(), DAEMON_TIMEOUT_S, "the libp2p daemon")
        except Unreachable as error:
            raise LocalError("the libp2p daemon does not answer") from error
        return {peer.peer_id.to_base58() for peer in peers}

    async def serve(self, name: str, handler: CallHandler) -> None:
        """Answer calls of this name from now on. Once per name."""
        from google.protobuf.wrappers_pb2 import BytesValue

        async def answer(request: BytesValue, context: Any) -> BytesValue:
            try:
                return BytesValue(value=_ANSWER + await handler(context.remote_id.to_base58(), request.value))
            except PeerError as error:
                return BytesValue(value=_ERROR + str(error).encode())

        adding = self.p2p.add_protobuf_handler(name, answer, BytesValue)
        await self.guard(adding, DAEMON_TIMEOUT_S, "the libp2p daemon")

    async def call(self, peer_id: PeerId, name: str, request: bytes, timeout_s: float) -> bytes:
        """Call a linked peer; libp2p authenticates both ends.

        Raises Unreachable (no link, no answer in time), Declined (no such call there, or it said no), Violation.
        """
        from google.protobuf.wrappers_pb2 import BytesValue
        from hivemind.p2p import PeerID
        from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError

        message = BytesValue(value=request)
        calling = self.p2p.call_protobuf_handler(PeerID.from_base58(peer_id), name, message, BytesValue)
        try:
            answer = bytes((await self.guard(calling, timeout_s, f"peer {peer_id}: an answer to {name}")).value)
        except P2PHandlerError as error:
            raise Declined(f"peer {peer_id} failed at {name}: {str(error)[:200]!r}") from error
        except P2PDaemonError as error:
            if "protocols not supported" in str(error):
                raise Declined(f"peer {peer_id} does not answer {name}: it is no noloco node, or not ready") from error
            raise Unreachable(f"peer {peer_id} cannot be reached: {str(error)[:200]!r}") from error
        if len(answer) > CALL_LIMIT_BYTES or answer[:1] not in (_ERROR, _ANSWER):
            raise Violation(f"peer {peer_id} answered {name} with {len(answer)} bytes that mean nothing")
        if answer[:1] == _ERROR:
            raise Declined(f"peer {peer_id}: {answer[1:201].decode(errors='replace')!r}")
        return answer[1:]

    async def guard(self, waiting: Awaitable[T], timeout_s: float, what: str) -> T:
        """Await something that the daemon does. Raises Unreachable when it takes longer, LocalError when it is dead."""
        task = asyncio.ensure_future(waiting)
        both: set[asyncio.Future[Any]] = {task, self.failed}
        try:
            await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self.failed.done():
                raise LocalError(_DEAD)
            if not task.done():
                raise Unreachable(f"{what} did not come within {timeout_s:g} s")
            return await task
        except TimeoutError as error:
            raise Unreachable(f"{what} did not come in time") from error
        except (OSError, EOFError) as error:
            raise LocalError(f"the libp2p daemon does not answer ({error or 'its socket was closed'})") from error
        finally:
            if not task.cancel() and not task.cancelled():
                task.exception()  # marks it as seen

    async def close(self) -> None:
        """End the daemon and all that hangs on it. Harmless when called twice, or after the daemon died."""
        self._watch.cancel()
        if not self.failed.done():
            self.failed.cancel()
        await _stop_daemon(self.p2p)

    async def _watched(self) -> None:
        await self.p2p._child.wait()
        log.error(_DEAD)
        if not self.failed.done():
            self.failed.set_exception(LocalError(_DEAD))
            self.failed.exception()  # marks it as seen: whoever wants to know awaits it

    async def _join(self, targets: Sequence[JoinAddress]) -> tuple[JoinAddress, ...]:
        results = await asyncio.gather(*(self.dial(target) for target in targets), return_exceptions=True)
        errors = [result for result in results if result is not None]
        for error in errors:
            if not isinstance(error, ConfigError | Unreachable):
                raise error
        if len(errors) == len(targets):
            raise errors[0]
        for error in errors:
            log.warning("%s", error)
        return tuple(target for target, result in zip(targets, results, strict=True) if result is None)


def _nobody(target: JoinAddress, reason: str) -> str:
    return f"join address {target}: nobody answers ({reason}); check that the node runs and its port is open"


_DEAD = "the libp2p daemon (p2pd) has died: this node is cut off from the directory and has to be started again"


async def _start_daemon(identity: Identity, host: str, address: JoinAddress) -> Any:
    """hivemind's P2P, listening on `host` and the port of `address`, which it announces. Raises LocalError."""
    from hivemind.p2p import P2P
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
    from hivemind.utils.logging import use_hivemind_log_handler

    class OwnGroup(P2P):  # type: ignore[misc]  # hivemind is untyped
        """Its daemon is in a process group of its own: Ctrl-C in a terminal must reach the node alone, which then
        still needs the daemon to say that it leaves."""

        @staticmethod
        def _make_process_args(*args: Any, **options: Any) -> list[str]:
            program = "import os, sys; os.setpgrp(); os.execv(sys.argv[1], sys.argv[1:])"
            return [sys.executable, "-I", "-S", "-c", program, *P2P._make_process_args(*args, **options)]

    use_hivemind_log_handler("nowhere")
    try:
        return await OwnGroup.create(
            identity_path=str(identity.path),
            check_if_identity_free=False,  # it knows RSA keys only; the lock file beside the key does this
            host_maddrs=[host_multiaddress(host, address.port)],
            announce_maddrs=[address.multiaddress],
            startup_timeout=START_TIMEOUT_S,
            nat_port_map=False,
            auto_nat=False,
            use_relay=False,
        )
    except P2PDaemonError as error:
        if "address already in use" in str(error):
            raise LocalError(port_in_use(host, address.port)) from error
        raise LocalError(f"the libp2p daemon did not start: {' '.join(str(error).split())[:300]}") from error


async def _stop_daemon(p2p: Any) -> None:
    """SIGTERM, and SIGKILL to a daemon that is not gone after that."""
    try:
        await asyncio.wait_for(p2p.shutdown(), DAEMON_TIMEOUT_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(p2p._child.pid, signal.SIGKILL)
        await p2p._child.wait()
