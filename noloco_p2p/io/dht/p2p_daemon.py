"""The process of the libp2p daemon, `p2pd`: its start, its end, and the sockets that it may leave behind.

hivemind starts it; what hivemind has no parameter for is added to the daemon's command line here.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.io.dht.addresses import JoinAddress, host_multiaddress, port_in_use
from noloco_p2p.io.dht.identity import Identity

START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 5.0
SOCKETS_MIN_AGE_S = 60.0
_SOCKETS = "hivemind-p2p*.sock"


def sweep_stale_sockets(directory: Path = Path("/tmp"), min_age_s: float = SOCKETS_MIN_AGE_S) -> None:
    """Remove the daemon sockets of this user that have no listener any more.

    hivemind puts them into /tmp by name. Young ones are left alone: their daemon may be about to listen.
    """
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


class _Calls(dict[Any, "asyncio.Future[bytes]"]):
    """hivemind's calls by their ids, of which it knows only those that still wait. Otherwise an answer to a call that
    was given up just now, or a second answer, would end its reading of all answers."""

    def __contains__(self, call: object) -> bool:
        waiting = self.get(call)
        return waiting is not None and not waiting.done()


class _Answers(dict[Any, "asyncio.Task[None]"]):
    """hivemind's answers that are being made, by the ids of the calls. It forgets none whose caller gave up."""

    def __setitem__(self, call: object, making: "asyncio.Task[None]") -> None:
        super().__setitem__(call, making)
        making.add_done_callback(lambda _: self.pop(call, None))


async def start(identity: Identity, host: str, places: Sequence[JoinAddress], metrics_port: int | None) -> Any:
    """hivemind's P2P, listening on `host` and the port of the last of the `places`, all of which it announces.

    Raises LocalError. With `metrics_port` (not 0) it serves its own metrics on that port of `host`, at /metrics.
    """
    from hivemind.p2p import P2P
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
    from hivemind.utils.logging import use_hivemind_log_handler

    class OwnGroup(P2P):  # type: ignore[misc]  # hivemind is untyped
        """Its daemon is in a process group of its own: Ctrl-C in a terminal must reach the node alone, which then
        still needs the daemon to say that it leaves."""

        @staticmethod
        def _make_process_args(*args: Any, **options: Any) -> list[str]:
            program = "import os, sys; os.setpgrp(); os.execv(sys.argv[1], sys.argv[1:])"
            return [sys.executable, "-I", "-S", "-c", program, *P2P._make_process_args(*args, **options), *metrics]

    bare, port = f"[{host}]" if ":" in host else host, places[-1].port
    metrics = [] if metrics_port is None else [f"-metricsAddr={bare}:{metrics_port}"]
    use_hivemind_log_handler("nowhere")
    try:
        made = await OwnGroup.create(
            identity_path=str(identity.path),
            check_if_identity_free=False,  # it knows RSA keys only; the lock file beside the key does this
            host_maddrs=[host_multiaddress(host, port)],
            announce_maddrs=[place.multiaddress for place in places],
            startup_timeout=START_TIMEOUT_S,
            nat_port_map=False,
            auto_nat=False,
            use_relay=False,
        )
        made._client.control._pending_calls, made._client.control._handler_tasks = _Calls(), _Answers()
        made._client.control._handler = partial(_handled, made._client.control._handler)
        return made
    except P2PDaemonError as error:
        if "address already in use" in str(error):
            raise LocalError(port_in_use(host, port, "listen.dht_port")) from error
        raise LocalError(f"the libp2p daemon did not start: {' '.join(str(error).split())[:300]}") from error
    except (OSError, EOFError) as error:
        raise LocalError(f"the libp2p daemon died while it started ({error or type(error).__name__})") from error


async def connect(p2p: Any, target: JoinAddress) -> str:
    """Make a link to a peer; why there is none, or an empty text. Raises ConfigError: another peer is there."""
    from hivemind.p2p import PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
    from hivemind.utils.multiaddr import Multiaddr

    try:
        await p2p._client.connect(PeerID.from_base58(target.peer_id), [Multiaddr(target.multiaddress)])
    except P2PDaemonError as error:
        reason = str(error)
        if "peer id mismatch" in reason:
            other = reason.rpartition("remote key matches ")[2].split()[0]
            raise ConfigError(
                f"join address {target}: another peer answers there ({other}); copy the address that it prints"
            ) from error
        return reason.strip().splitlines()[-1].rpartition(": ")[2].rpartition("] ")[2]
    return ""


async def _handled(handler: Any, reader: Any, writer: Any) -> None:
    """hivemind's handler of streams, without a traceback for each one that was reset before it began."""
    with contextlib.suppress(OSError, EOFError):
        await handler(reader, writer)


async def stop(p2p: Any) -> None:
    """SIGTERM, and SIGKILL to a daemon that is not gone after that. Harmless when it is dead already."""
    try:
        await asyncio.wait_for(p2p.shutdown(), END_TIMEOUT_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(p2p._child.pid, signal.SIGKILL)
        await p2p._child.wait()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(p2p._daemon_listen_maddr["unix"])  # a daemon that was killed leaves it
