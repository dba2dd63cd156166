"""The libp2p daemon's process, `p2pd`: starting it, stopping it, and removing the sockets that it may leave behind.

hivemind starts the process. Options that hivemind has no parameter for are added to the daemon's command line here.
"""

import asyncio
import contextlib
import gc
import os
import re
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.humanize import plain
from noloco_p2p.io.dht.addresses import JoinAddress, host_multiaddress, port_in_use
from noloco_p2p.io.dht.identity import Identity

START_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 5.0
END_TIMEOUT_S = 5.0
SOCKETS_MIN_AGE_S = 60.0
MEMORY_BYTES = 1 << 30
"""Limit on a daemon's memory. It needs a tenth of this with hundreds of links, but keeps whatever strangers send it."""
_SETTINGS = Path(__file__).with_name("p2pd.json")
"""Settings that turn the circuit relay off. The daemon's argument `-relay=0` has no effect: its built-in default, to
relay for everybody, wins. Without the relay it also starts with a quarter of the CPU time, in half the memory."""
_SOCKETS = "hivemind-p2p*.sock"
_LINES = 200
"""How many of the last lines of a daemon's output are kept: enough for the trace of a crash in Go."""


def sweep_stale_sockets(directory: Path = Path("/tmp"), min_age_s: float = SOCKETS_MIN_AGE_S) -> None:
    """Remove this user's daemon sockets that no process listens on any more.

    hivemind puts these sockets into /tmp. Young ones are left alone, because their daemon may be about to listen.
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
    """hivemind's pending calls by id. Only calls that still wait for their answer count as contained. Otherwise an
    answer to a call that was just abandoned, or a second answer, would end the task that reads all answers."""

    def __contains__(self, call: object) -> bool:
        waiting = self.get(call)
        return waiting is not None and not waiting.done()


class _Answers(dict[Any, "asyncio.Task[None]"]):
    """hivemind's tasks that answer calls, by call id. hivemind itself never removes one whose caller gave up."""

    def __setitem__(self, call: object, answer: "asyncio.Task[None]") -> None:
        super().__setitem__(call, answer)
        answer.add_done_callback(lambda _: self.pop(call, None))


async def start(identity: Identity, host: str, places: Sequence[JoinAddress], metrics_port: int | None) -> Any:
    """Start hivemind's P2P, which listens on `host` and the last place's port, and announces all `places`.

    With `metrics_port` (not 0) the daemon serves its own metrics on that port of `host`. Raises LocalError.
    """
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
    from hivemind.utils.logging import use_hivemind_log_handler

    bare, port = f"[{host}]" if ":" in host else host, places[-1].port
    extra = [f"-f={_SETTINGS}", *([] if metrics_port is None else [f"-metricsAddr={bare}:{metrics_port}"])]
    started, said = list[Any](), deque[str](maxlen=_LINES)
    use_hivemind_log_handler("nowhere")
    try:
        with _nothing_collected():
            made = await _own_group(extra, started, said).create(
                identity_path=str(identity.path),
                check_if_identity_free=False,  # that only knows RSA keys; the lock file next to the key replaces it
                host_maddrs=[host_multiaddress(host, port)],
                announce_maddrs=[place.multiaddress for place in places],
                startup_timeout=START_TIMEOUT_S,
                nat_port_map=False,
                auto_nat=False,
                use_relay=False,
            )
        _mend(made._client.control)
        return made
    except P2PDaemonError as error:
        if "address already in use" in str(error):
            raise LocalError(port_in_use(host, port, "listen.dht_port")) from error
        why = f"{' '.join(str(error).split())[:300]} ({await _end(started, said)})"
        raise LocalError(f"the libp2p daemon did not start: {why}") from error
    except (OSError, EOFError) as error:
        why = f"{error or type(error).__name__}; {await _end(started, said)}"
        raise LocalError(f"the libp2p daemon died while starting ({why})") from error
    except asyncio.CancelledError:
        if started and started[0]._child is not None:
            await stop(started[0])
        raise


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """No garbage collection here, nor in a process that is forked meanwhile, until that runs another program.

    A gRPC channel freed in the fork waits for a thread that only this process has, while this process and its event
    loop wait for the fork.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _mend(control: Any) -> None:
    """Patch those parts of hivemind's connection to the daemon that crash or leak."""
    control._pending_calls, control._handler_tasks = _Calls(), _Answers()
    control._handler = partial(_handled, control._handler)
    for task in (control._read_task, control._write_task):
        task.add_done_callback(_broke)


def _own_group(extra: Sequence[str], started: list[Any], said: deque[str]) -> Any:
    """hivemind's P2P class with `extra` arguments. Adds each instance to `started`, and its output to `said`."""
    from hivemind.p2p import P2P

    class OwnGroup(P2P):  # type: ignore[misc]  # hivemind is untyped
        """Runs the daemon in a process group of its own, so that Ctrl-C in a terminal reaches only the node, which
        still needs the daemon to announce that it leaves."""

        def __init__(self) -> None:
            super().__init__()
            started.append(self)

        @staticmethod
        def _log_p2pd_message(line: str) -> None:
            said.append(line)

        @staticmethod
        def _make_process_args(*args: Any, **options: Any) -> list[str]:
            program = (
                "import os, resource, sys; resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]),) * 2); "
                "os.setpgrp(); os.execv(sys.argv[2], sys.argv[2:])"
            )
            command = [*P2P._make_process_args(*args, **options), *extra]
            return [sys.executable, "-I", "-S", "-c", program, str(MEMORY_BYTES), *command]

    return OwnGroup


async def _end(started: Sequence[Any], said: Sequence[str]) -> str:
    """How a daemon that failed to start ended, with the reason that it printed. Stops it if it is still running."""
    if not started or started[0]._child is None:
        return "there is no process"
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(started[0]._child.wait(), END_TIMEOUT_S)
    ended = how_it_ended(started[0]._child.returncode)
    await stop(started[0])
    cause = next((line for line in said if line.startswith(("panic:", "fatal error:", "runtime:"))), "")
    return f"{ended}: {cause[:200]}" if cause else ended


def how_it_ended(code: int | None) -> str:
    """`signal 9` or `exit code 2`, from a process's return code; None means that it is still running."""
    if code is None:
        return "it is still running"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


async def connect(p2p: Any, target: JoinAddress, what: str) -> str:
    """Open a link to a peer. Returns why that failed, or an empty string. Raises ConfigError for another peer; its
    message calls the target `what`."""
    from hivemind.p2p import PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
    from hivemind.utils.multiaddr import Multiaddr

    try:
        await p2p._client.connect(PeerID.from_base58(target.peer_id), [Multiaddr(target.multiaddress)])
    except P2PDaemonError as error:
        reason = str(error).strip()  # with what the remote end said, which may be anything
        if found := re.search(r"peer id mismatch.* remote key matches (\w{1,128})", reason):
            why = f"another peer answers there ({found[1]}); copy the address that it prints"
            raise ConfigError(f"{what} {target}: {why}") from error
        return plain(reason.splitlines()[-1].rpartition(": ")[2].rpartition("] ")[2], 200)
    return ""


async def _handled(handler: Any, reader: Any, writer: Any) -> None:
    """hivemind's stream handler, without a traceback for each stream that was reset before it began."""
    with contextlib.suppress(OSError, EOFError):
        await handler(reader, writer)


def _broke(task: "asyncio.Task[None]") -> None:
    """Report an error of hivemind's two unawaited tasks. If the daemon died, `Libp2pDaemon.failed` reports it."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, OSError | EOFError | RuntimeError):
        context = {"message": "the connection to the libp2p daemon broke", "exception": error, "task": task}
        task.get_loop().call_exception_handler(context)


def kill(p2p: Any) -> None:
    """Send SIGKILL to the daemon. Harmless if it is dead already."""
    with contextlib.suppress(ProcessLookupError):
        p2p._child.kill()


async def stop(p2p: Any) -> None:
    """Send SIGTERM, and SIGKILL if the daemon has not ended in END_TIMEOUT_S. Harmless if it is dead already."""
    try:
        await asyncio.wait_for(p2p.shutdown(), END_TIMEOUT_S)
    except TimeoutError:
        kill(p2p)
        await p2p._child.wait()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(p2p._daemon_listen_maddr["unix"])  # a daemon that was killed leaves it
