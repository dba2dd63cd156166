"""Starts processes with a node's imports already in memory, from one fork server for all tests.

Importing is most of the cost of starting a node. The workers of pytest are forked from the same server, which the main
process of pytest starts (`lend`). A launcher that was itself forked uses a fork of itself as its server
(`ForkOfThisProcess`).
"""

import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

from forked_worker import LENDER, borrowed

from noloco_p2p.launch import fork_server_process
from noloco_p2p.launch.fork_server import ForkServer, run
from noloco_p2p.launch.fork_server_process import ForkServerProcess


@functools.cache
def server() -> ForkServerProcess:
    """The server of the main process of pytest; without one, it is started here. It ends with that process."""
    if LENDER in os.environ:
        return _Borrowed(os.environ[LENDER])
    made = ForkServerProcess()
    with patch.object(fork_server_process, "PROGRAM", (str(Path(__file__).with_name("warm_server.py")),)):
        made.start({**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    while not made.ready:
        time.sleep(0.02)
    return made


def lend(path: Path) -> None:
    """From now on, give the control socket of this process's server to whoever connects to this path."""
    control, lender = server()._control, socket.socket(socket.AF_UNIX)
    lender.bind(str(path))
    lender.listen()

    def answer() -> None:
        while True:
            with lender.accept()[0] as borrower:
                socket.send_fds(borrower, [b"s"], [control.fileno()])

    threading.Thread(target=answer, daemon=True).start()
    os.environ[LENDER] = str(path)


class _Borrowed(ForkServerProcess):
    """The server that another process has started."""

    ready = True

    def __init__(self, path: str) -> None:
        super().__init__()
        self._control = borrowed(path)


class SharedServer(ForkServerProcess):
    """The shared server in place of a launcher's own, which would take seconds to start."""

    ready = True

    def __init__(self) -> None:
        super().__init__()
        self._control = server()._control

    def start(self, environment: Mapping[str, str]) -> None:
        """Do nothing: the server is already running."""
        self.environment = environment

    def close(self) -> None:
        """Do nothing: the server stays."""


class ForkOfThisProcess(ForkServerProcess):
    """A server forked from a process that was itself forked and has done nothing yet: ready as soon as it is made."""

    def __init__(self) -> None:
        super().__init__()
        self._control, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._control.close()
            os.setsid()
            program = ForkServer(theirs).serve()
            if program is not None:
                run(program)
            os._exit(0)
        theirs.close()

    @property
    def ready(self) -> bool:
        """It is ready at once."""
        return True

    def start(self, environment: Mapping[str, str]) -> None:
        """Do nothing: the server is already running."""
        assert self._control.recv(1)
        self.environment = environment

    def close(self) -> None:
        """End the server."""
        self._control.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
