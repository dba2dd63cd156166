"""How much of what gRPC has written may wait unsent in the system's buffers.

Linux lets a socket take megabytes, and on a slow line all that is in there goes before what is written later. gRPC
neither limits it nor shows its sockets: they are found among the open files of this process.
"""

import math
import os
import socket
import stat
from contextlib import ExitStack, suppress
from pathlib import Path

from noloco_p2p.core.line_rate import LineRate, unsent_bytes

TCP_NOTSENT_LOWAT = 25
"""Of linux/tcp.h; Python has no name for it."""
OPEN_FILES = Path("/proc/self/fd")
LOOK_S = 1.0
"""Time between two looks at how fast the line is, seconds."""


class UnsentLimit:
    """A socket in which more waits takes nothing more; what is under way is not counted."""

    def __init__(self, rate: LineRate) -> None:
        """The limit follows this one."""
        self._rate = rate
        self._nbytes = unsent_bytes(None)
        self._looks_at = -math.inf

    def set(self) -> None:
        """Limit all TCP sockets that this process has now, and what those that listen will accept.

        Sockets of others than gRPC do not suffer from it. Nothing happens where there is no /proc.
        """
        for number in map(int, os.listdir(OPEN_FILES) if OPEN_FILES.is_dir() else ()):
            with suppress(OSError), ExitStack() as leaving:  # closed meanwhile, or none of TCP
                if stat.S_ISSOCK(os.stat(number).st_mode):
                    one = socket.socket(fileno=number)
                    leaving.callback(one.detach)  # it is not ours to close
                    one.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, self._nbytes)

    def follow(self, now: float) -> None:
        """Set it anew if the line is another than before."""
        if now < self._looks_at:
            return
        self._looks_at, before = now + LOOK_S, self._nbytes
        self._nbytes = unsent_bytes(self._rate.bytes_per_s)
        if self._nbytes != before:
            self.set()
