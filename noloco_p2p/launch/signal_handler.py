"""How signals, and the end of its launcher, reach a node."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable

from noloco_p2p.node.loop import Node

log = logging.getLogger("noloco_p2p")


class SignalHandler:
    """Handles the signals of this process, from its creation on, and the closing of standard input.

    The first signal to stop makes the node leave in good order. Before there is a node, at the second signal, and when
    the launcher is gone, everything is cancelled. Two other signals pause and resume the node.
    """

    def __init__(self, watch_stdin: bool) -> None:
        self.node: Node | None = None
        self._all = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._leave)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        loop.add_signal_handler(signal.SIGUSR1, self._command, "pause", Node.pause)
        loop.add_signal_handler(signal.SIGUSR2, self._command, "resume", Node.resume)
        if watch_stdin:
            loop.add_reader(sys.stdin.fileno(), self._read_stdin)

    def _leave(self) -> None:
        if self.node is not None and not self.node.state.leaving:
            self.node.drain()
        elif self._all is not None:
            self._all.cancel()

    def _hang_up(self) -> None:
        """A closed terminal may send several of these signals; they count as one."""
        if self.node is None or not self.node.state.leaving:
            self._leave()

    def _command(self, what: str, do: Callable[[Node], None]) -> None:
        if self.node is None:
            log.warning("this node is still starting: it cannot %s yet", what)
        else:
            do(self.node)

    def _read_stdin(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            log.warning("the launcher is gone: stopping this node")
            if self._all is not None:
                self._all.cancel()
