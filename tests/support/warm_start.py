"""Nodes that begin with what a node imports already in memory: one interpreter reads it and forks itself for each.

Importing is most of what starting a node costs, five seconds of CPU, and it is the same every time. A forked node is a
process like any other: its own group, directory, environment, signals, libp2p daemon and exit code. The interpreter
runs no thread and no event loop, and has computed nothing, so what it forks has nothing but modules from it.

Run as a script it is that interpreter, and serves the socket whose file descriptor it is given. A forked launcher of
nodes can be such an interpreter too (`forked_interpreter`).
"""

import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

MODULES = (
    "hivemind.dht.node",
    "hivemind.p2p",
    "noloco_p2p.launch.compose",
    "noloco_p2p.compute.device_stage",
    "noloco_p2p.compute.hardware",
    "noloco_p2p.io.data.threaded_batches",
    "transformers.models.auto.modeling_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "typer",
    "uvloop",
)
"""What a node of the tests imports sooner or later."""
REQUEST_LIMIT_BYTES = 1 << 17


class WarmProcess:
    """A forked node: what the tests use of `subprocess.Popen`. Its parent reports on it through a pipe."""

    def __init__(self, reports: int) -> None:
        """`reports` is the reading end of that pipe; the process is there when this returns."""
        self._reports = reports
        self.stdin: IO[bytes] | None = None
        self.returncode: int | None = None
        self.pid = self._number()

    def poll(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        if self.returncode is None and select.select([self._reports], [], [], 0)[0]:
            self.returncode = self._number()
            os.close(self._reports)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended. Raises subprocess.TimeoutExpired."""
        if self.returncode is None and not select.select([self._reports], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"node {self.pid}", timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Nothing happens when it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _number(self) -> int:
        report = os.read(self._reports, 4)
        assert len(report) == 4, "the interpreter that forks nodes is gone"
        return int(struct.unpack("<i", report)[0])


def start(
    interpreter: socket.socket,
    program: Sequence[str],
    output: tuple[int, int],
    environment: Mapping[str, str],
    cwd: Path,
) -> WarmProcess:
    """Fork a node that runs `program`: `-m module` or a script, then arguments.

    `output`: its standard output and error. Its standard input is a pipe, `stdin` of what is returned.
    """
    reports, report_to = os.pipe()
    reading, writing = os.pipe()
    request = json.dumps({"program": list(program), "environment": dict(environment), "cwd": str(cwd)}).encode()
    socket.send_fds(interpreter, [request], [reading, *output, report_to])
    for descriptor in (report_to, reading):
        os.close(descriptor)
    process = WarmProcess(reports)
    process.stdin = os.fdopen(writing, "wb", buffering=0)
    return process


def in_place_of_subprocess(interpreter: socket.socket) -> SimpleNamespace:
    """What launch/node_process.py uses of the module `subprocess`, for nodes that are forked instead."""

    def popen(
        command: Sequence[str],
        *,
        stdin: int,
        stdout: IO[bytes],
        stderr: int,
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> WarmProcess:
        given = stdin, stderr, start_new_session
        assert given == (subprocess.PIPE, subprocess.STDOUT, True), "what is forked has this, whatever was asked for"
        return start(interpreter, command[1:], (stdout.fileno(), stdout.fileno()), env, Path.cwd())

    return SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)


@functools.cache
def interpreter() -> socket.socket:
    """Started at the first use in a test process, and ended with it: then its socket is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        process_group=0,
    )
    theirs.close()
    return ours


def forked_interpreter() -> socket.socket:
    """In a process that was forked itself and has done nothing yet: a fork of it takes the part of the interpreter."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        run(serve(theirs))
        sys.exit(0)
    theirs.close()
    return ours


def serve(control: socket.socket) -> list[str]:
    """Fork a node for each request; returns only in a node: the program that it has to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, REQUEST_LIMIT_BYTES, 4)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            control.close()
            return _become(json.loads(request), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(request: dict[str, Any], descriptors: list[int]) -> list[str]:
    """In a fork of the interpreter: fork the node, report its pid and at its end its exit code. Returns in the node."""
    *standard, report_to = descriptors
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ready, go = os.pipe()
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)
        for descriptor in (*standard, ready, go):
            os.close(descriptor)
        os.write(report_to, struct.pack("<i", pid))
        _, status = os.waitpid(pid, 0)
        os.write(report_to, struct.pack("<i", os.waitstatus_to_exitcode(status)))
        os._exit(0)
    for descriptor in (report_to, go):
        os.close(descriptor)
    os.read(ready, 1)  # ends when the other end is closed: the node is in a group of its own
    os.close(ready)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    return list(request["program"])


def run(program: list[str]) -> None:
    """What `python <program>` does, in this process."""
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        sys.path[0] = str(Path(program[0]).parent)
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    for name in MODULES:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads may not be forked"
    gc.collect()
    gc.freeze()
    run(serve(socket.socket(fileno=int(sys.argv[1]))))
