"""Signals to a running node, and the end of its launcher."""

import asyncio
import logging
import os
import signal
import sys

from noloco_p2p.node.loop import Node

log = logging.getLogger("noloco_p2p")


class SignalHandler:
    """Ends this process before the run ends, on a signal or when the launcher is gone. It listens at once.

    The first signal makes a node leave in good order. Before there is a node, at the second signal, and when the
    launcher is gone, everything is cancelled.
    """

    def __init__(self, watch_stdin: bool) -> None:
        self.node: Node | None = None
        self._all = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._leave)
        loop.add_signal_handler(signal.SIGUSR1, self._pause_or_resume, "pause")
        loop.add_signal_handler(signal.SIGUSR2, self._pause_or_resume, "resume")
        if watch_stdin:
            loop.add_reader(sys.stdin.fileno(), self._read_stdin)

    def _leave(self) -> None:
        if self.node is not None and not self.node.state.draining:
            self.node.drain()
        elif self._all is not None:
            self._all.cancel()

    def _pause_or_resume(self, what: str) -> None:
        if self.node is None:
            log.warning("this node is still starting: it cannot %s yet", what)
        elif what == "pause":
            self.node.pause()
        else:
            self.node.resume()

    def _read_stdin(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            log.warning("the launcher is gone: this node stops")
            if self._all is not None:
                self._all.cancel()
