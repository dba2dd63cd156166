"""How much of what gRPC has written may wait unsent in the system's buffers.

Linux lets a socket take megabytes, and on a slow line all that is in there goes before what is written later. gRPC
neither limits it nor shows its sockets: they are found among the open files of this process.
"""

import os
import socket
import stat
from contextlib import ExitStack, suppress
from pathlib import Path

UNSENT_BYTES = 128 * 1024
"""A socket in which more waits takes nothing more; what is under way is not counted."""
TCP_NOTSENT_LOWAT = 25
"""Of linux/tcp.h; Python has no name for it."""
OPEN_FILES = Path("/proc/self/fd")


def limit_unsent() -> None:
    """Limit it on all TCP sockets that this process has now, and on what those that listen will accept.

    Sockets of others than gRPC do not suffer from it. Nothing happens where there is no /proc.
    """
    for number in map(int, os.listdir(OPEN_FILES) if OPEN_FILES.is_dir() else ()):
        with suppress(OSError), ExitStack() as leaving:  # closed meanwhile, or none of TCP
            if stat.S_ISSOCK(os.stat(number).st_mode):
                one = socket.socket(fileno=number)
                leaving.callback(one.detach)  # it is not ours to close
                one.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_BYTES)
