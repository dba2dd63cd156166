"""The fork server, as the launcher uses it: starts it, has it fork processes, watches and signals these, ends it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait  # unlike select.select, for any number of files
from pathlib import Path
from typing import IO

from noloco_p2p.errors import LocalError
from noloco_p2p.io.transport.connection_limit import allow_many_files
from noloco_p2p.launch.fork_server import NUMBER

PROGRAM = ("-m", "noloco_p2p.launch.fork_server")
"""Arguments with which Python runs the server."""
ANSWER_S = 10.0
"""Time limit for a server that is ready to fork a process, seconds."""


class ForkedProcess:
    """A process forked by the server. No other process gets its id, or that of its group, before its end was read."""

    def __init__(self, server: socket.socket, stdin: IO[bytes]) -> None:
        """Wait until the process exists. `server`: the socket to the server for this process. Raises OSError if not."""
        self._server = server
        self.stdin = stdin
        """The write end of the pipe that is its standard input."""
        self.returncode: int | None = None
        self.server_ended = False
        """Whether it was killed here, because the server had died before it."""
        number = self._number()
        if number is None:
            raise BrokenPipeError("the fork server of the nodes has ended")
        if number < 0:
            raise OSError(-number, os.strerror(-number))
        self.pid = number

    def poll(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs. Kills it if the server has died."""
        if self.returncode is None and wait([self._server], 0):
            self.wait()
        return self.returncode

    def wait(self) -> int:
        """Wait for its end. Returns what `poll` does."""
        if self.returncode is None:
            self._server.settimeout(None)
            code = self._number()
            if code is None:
                self.server_ended = True
                self.kill_group()
            self.returncode = -signal.SIGKILL if code is None else code
            self._server.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to this process alone. Does nothing if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Send SIGKILL to its process group, unless its end has been read."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the group has just ended
                os.killpg(self.pid, signal.SIGKILL)

    def _number(self) -> int | None:
        found = self._server.recv(NUMBER.size)
        return NUMBER.unpack(found)[0] if found else None


class ForkServerProcess:
    """The process. It ends with the launcher, after the nodes, whose standard input also closes with the launcher."""

    def __init__(self) -> None:
        self.environment: Mapping[str, str] = {}
        """The environment that it was started with, which all nodes get too."""
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False

    def start(self, environment: Mapping[str, str]) -> None:
        """Start it; it then spends seconds on imports, until it is `ready`. Raises LocalError."""
        if not hasattr(os, "pidfd_open"):
            raise LocalError("forking nodes needs Linux 5.3 or newer; on other systems start each with noloco-node")
        allow_many_files()  # the launcher and the server have two or three for each node
        self.environment = environment
        self._control, theirs = socket.socketpair()
        command = [sys.executable, *PROGRAM]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment, start_new_session=True
                )
            except OSError as error:
                raise LocalError(f"the fork server of the nodes cannot be started: {error}") from error

    @property
    def ready(self) -> bool:
        """Whether it has imported what a node needs. Raises LocalError if it has ended instead."""
        assert self._process is not None
        if not self._ready and wait([self._control], 0):
            self._ready = bool(self._control.recv(1))
            if not self._ready:
                raise LocalError(f"the fork server of the nodes has ended with exit code {self._process.wait()}")
        return self._ready

    def fork(
        self,
        name: str,
        program: Sequence[str],
        output: tuple[int, int],
        environment: Mapping[str, str],
        directory: Path,
    ) -> ForkedProcess:
        """Fork a process that runs `program`: `-m module` or a script, then arguments. Raises OSError.

        `name` is what `ps -e` and `top` show, up to 15 characters; `output` are its standard output and error.
        """
        wanted = {"name": name, "program": program, "environment": {**environment}, "directory": str(directory)}
        ours, theirs = socket.socketpair()
        ours.settimeout(ANSWER_S)
        reading, writing = os.pipe()
        stdin = os.fdopen(writing, "wb", buffering=0)
        try:
            with theirs, os.fdopen(reading, "rb"):
                socket.send_fds(self._control, [b"f"], [reading, *output, theirs.fileno()])
            ours.sendall(json.dumps(wanted).encode() + b"\n")
            return ForkedProcess(ours, stdin)
        except OSError:
            stdin.close()
            ours.close()
            raise

    def close(self) -> None:
        """End it. Its nodes must have ended."""
        if self._process is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()
