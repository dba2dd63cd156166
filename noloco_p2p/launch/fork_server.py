"""The fork server: imports once what all nodes need, which takes seconds, and forks each node of a launcher from there.

A forked node is a process like any other, in its own session, with its own directory, environment, standard files,
signals and libp2p daemon. All it inherits from the server is modules: the server has no other threads, no event loop,
and has computed nothing. Variables that a library reads on import (OMP_NUM_THREADS) are those of the server.

    launcher → server   on the control socket, for each node: three standard files and a socket
    launcher → server   on that socket: a line of JSON with name, program, environment and directory
    server → launcher   on that socket: the process id, and at the end the exit code

The server ends with its launcher, after the last of its nodes.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import socket
import struct
import sys
from functools import partial
from pathlib import Path
from typing import Any

MODULES = ("noloco_p2p.launch.compose", "noloco_p2p.observe.web_page", "typer")
"""Modules that every node imports in addition to those of `bootstrap.import_ahead`."""
READY = b"r"
"""Sent once, when the server can fork."""
NUMBER = struct.Struct("<i")
"""A process id; in place of it, minus the number of an error; or an exit code."""


def main() -> None:
    """Import everything, then serve the socket that is standard input. A fork runs its program in here."""
    gc.disable()  # Importing leaves hardly any garbage, and searching for it takes a fifth of the time.
    for name in MODULES:
        importlib.import_module(name)
    importlib.import_module("noloco_p2p.launch.bootstrap").import_ahead()
    gc.freeze()  # Memory that the collector never touches is never copied in a fork.
    gc.enable()
    program = ForkServer(socket.socket(fileno=0)).serve()
    if program is not None:
        run(program)


def run(program: list[str]) -> None:
    """Do in this process what `python <program>` does: run `-m module` or a script, with the arguments that follow."""
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = program, str(Path(program[0]).parent)
        runpy.run_path(program[0], run_name="__main__")


class ForkServer:
    """Forks processes on request, and keeps track of each until the launcher closes its socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._waits = selectors.PollSelector()
        """What the server waits for: requests; for each process its end, and then until its socket is closed. With each
        descriptor, what to do."""

    def serve(self) -> list[str] | None:
        """Fork a process for each request. Returns the program in the fork, and None in the server when all is over.

        That is when launcher and nodes are gone. Exits if another thread is running, because forks would lack it.
        """
        if threads := [path.read_text().strip() for path in sorted(Path("/proc/self/task").glob("[0-9]*/comm"))][1:]:
            sys.exit(
                f"error: nodes cannot be forked while a thread runs ({', '.join(threads)}): something that Python"
                " imports at startup, such as a tracing agent, started it; disable that, or start each node with"
                " noloco-node"
            )
        self._tell(self._control.fileno(), READY)
        self._waits.register(self._control, selectors.EVENT_READ, self._receive)
        while self._waits.get_map():
            for key, _ in self._waits.select():
                request = key.data()
                if request is not None:
                    return _take_over(request)
        return None

    def _receive(self) -> dict[str, Any] | None:
        """Take a request, or note that the launcher is gone. Returns the request in the fork."""
        try:
            passed = socket.recv_fds(self._control, 1, 4)[1]
        except ConnectionError:
            passed = []
        if passed:
            return self._fork(*passed)
        self._waits.unregister(self._control)
        return None

    def _fork(self, *passed: int) -> dict[str, Any] | None:
        """Fork, and report the process id once the process leads its own session. Returns the request in the fork."""
        *standard, report = passed
        with open(report, closefd=False) as lines:
            request: dict[str, Any] = json.loads(lines.readline())
        reading, writing = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or 1)
        if pid == 0:
            os.setsid()
            for number, descriptor in enumerate(standard):
                os.dup2(descriptor, number)
            self._control.detach()
            os.closerange(3, 1 + max(map(int, os.listdir("/proc/self/fd"))))
            return request
        for descriptor in (*standard, writing):
            os.close(descriptor)
        os.read(reading, 1)  # returns when the fork has closed the other end, or has died
        os.close(reading)
        self._tell(report, NUMBER.pack(pid))
        if pid > 0:
            watch = os.pidfd_open(pid)
            self._waits.register(watch, selectors.EVENT_READ, partial(self._report_exit, watch, pid, report))
        else:
            os.close(report)
        return None

    def _report_exit(self, pidfd: int, pid: int, report: int) -> None:
        """Report the exit code. The process is not yet reaped, so that its id stays taken."""
        self._forget(pidfd)
        how = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert how is not None
        self._tell(report, NUMBER.pack(how.si_status if how.si_code == os.CLD_EXITED else -how.si_status))
        self._waits.register(report, selectors.EVENT_READ, partial(self._reap, pid, report))

    def _reap(self, pid: int, report: int) -> None:
        """The launcher has closed its end of the socket."""
        os.waitpid(pid, 0)
        self._forget(report)

    def _forget(self, descriptor: int) -> None:
        self._waits.unregister(descriptor)
        os.close(descriptor)

    def _tell(self, report: int, what: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the launcher is gone
            os.write(report, what)


def _take_over(request: dict[str, Any]) -> list[str]:
    """In a fork: take over directory, environment and name, and reseed numpy (`random` does so itself).

    Returns the program to run.
    """
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    Path("/proc/self/comm").write_text(request["name"])
    importlib.import_module("numpy").random.seed()
    return list(request["program"])


if __name__ == "__main__":
    main()
