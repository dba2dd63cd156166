"""What the outside tells a node while it lives: signals, and a launcher that is gone."""

import asyncio
import logging
import os
import signal
import sys

from noloco_p2p.node.loop import Node

log = logging.getLogger("noloco_p2p")


class SignalHandler:
    """What may end this process before the run does: signals, and a launcher that is gone. It listens at once.

    A signal makes the node leave in good order once there is a node; before that, and at the second one, and when the
    launcher is gone, everything is cancelled.
    """

    def __init__(self, watch_stdin: bool) -> None:
        self.node: Node | None = None
        self._all = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_leave)
        loop.add_signal_handler(signal.SIGUSR1, self._told, "pause")
        loop.add_signal_handler(signal.SIGUSR2, self._told, "resume")
        if watch_stdin:
            loop.add_reader(sys.stdin.fileno(), self._read_stdin)

    def _told_to_leave(self) -> None:
        if self.node is not None and not self.node.state.draining:
            self.node.drain()
        elif self._all is not None:
            self._all.cancel()

    def _told(self, what: str) -> None:
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
