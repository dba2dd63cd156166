"""The fork server: it imports once what a node imports, which takes seconds, and forks every node of a launcher.

A forked node is a process like any other: a session of its own, with its own directory, environment, standard files,
signals and libp2p daemon. It has nothing but modules from the server, which runs no thread and no event loop and has
computed nothing. Variables that a library reads when it is imported (OMP_NUM_THREADS) are those of the server.

    launcher → server   on the control socket: three standard files and a socket, for each node
    launcher → server   on that socket: a line of JSON with program, environment and directory
    server → launcher   on that socket: the process id, and at the end the exit code

It ends with its launcher, after the last of its nodes.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import socket
import struct
import sys
from pathlib import Path
from typing import Any

MODULES = ("noloco_p2p.launch.compose", "noloco_p2p.observe.web_page", "typer")
"""What every node imports beside what `bootstrap` imports ahead."""
READY = b"r"
"""Sent once, when it can fork."""
NUMBER = struct.Struct("<i")
"""A process id, the negative number of an error in its place, or an exit code."""


def main() -> None:
    """Serve the socket that is standard input, once all is imported. A fork returns from here when its program ends."""
    gc.disable()  # Importing makes hardly any garbage, and looking for it takes a fifth of the time.
    for name in MODULES:
        importlib.import_module(name)
    importlib.import_module("noloco_p2p.launch.bootstrap").import_ahead()
    gc.freeze()  # What is never looked at is never copied.
    gc.enable()
    program = ForkServer(socket.socket(fileno=0)).serve()
    if program is not None:
        run(program)


def run(program: list[str]) -> None:
    """What `python <program>` does, in this process: `-m module` or a script, then arguments."""
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = program, str(Path(program[0]).parent)
        runpy.run_path(program[0], run_name="__main__")


class ForkServer:
    """All processes that it forks, from the request to the moment when the launcher lets go."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._running: dict[int, tuple[int, int]] = {}
        """pidfd → process id and socket to the launcher, as a descriptor."""
        self._ended: dict[int, int] = {}
        """That socket → process id: it is not reaped yet, so nobody else has the id."""
        self._poll = select.poll()

    def serve(self) -> list[str] | None:
        """Fork a process for each request; returns its program there, None here once launcher and nodes are gone.

        Exits when a thread runs, which no fork would have.
        """
        if threads := [path.read_text().strip() for path in sorted(Path("/proc/self/task").glob("[0-9]*/comm"))][1:]:
            sys.exit(
                f"error: nodes cannot be forked beside a thread ({', '.join(threads)}): something that Python imports"
                " at start-up, such as a tracing agent, started it; disable that, or start each node with noloco-node"
            )
        control = self._control.fileno()
        self._tell(control, READY)
        self._poll.register(control, select.POLLIN)
        listens = True
        while listens or self._running or self._ended:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._running:
                    self._has_ended(descriptor)
                elif descriptor in self._ended:
                    os.waitpid(self._ended.pop(descriptor), 0)
                    self._forget(descriptor)
                elif passed := self._passed():
                    request = self._fork(*passed)
                    if request is not None:
                        return _become(request)
                else:
                    listens = False
                    self._poll.unregister(control)
        return None

    def _passed(self) -> list[int]:
        """The descriptors of a request; none when the launcher is gone."""
        try:
            return socket.recv_fds(self._control, 1, 4)[1]
        except ConnectionError:
            return []

    def _fork(self, *passed: int) -> dict[str, Any] | None:
        """Fork, and report the id once the process leads its own session and group; returns the request in the fork."""
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
        os.read(reading, 1)  # until the fork has closed the other end, or has died
        os.close(reading)
        self._tell(report, NUMBER.pack(pid))
        if pid > 0:
            watch = os.pidfd_open(pid)
            self._running[watch] = pid, report
            self._poll.register(watch, select.POLLIN)
        else:
            os.close(report)
        return None

    def _has_ended(self, pidfd: int) -> None:
        pid, report = self._running.pop(pidfd)
        self._forget(pidfd)
        how = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert how is not None
        code = how.si_status if how.si_code == os.CLD_EXITED else -how.si_status
        self._tell(report, NUMBER.pack(code))
        self._ended[report] = pid
        self._poll.register(report, 0)  # which tells that the other end is closed

    def _forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        os.close(descriptor)

    def _tell(self, report: int, what: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the launcher is gone
            os.write(report, what)


def _become(request: dict[str, Any]) -> list[str]:
    """In a fork: take on directory, environment, name and a random seed of its own (`random` has one); its program."""
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    Path("/proc/self/comm").write_text(request["name"])
    importlib.import_module("numpy").random.seed()
    program: list[str] = request["program"]
    return program


if __name__ == "__main__":
    main()
