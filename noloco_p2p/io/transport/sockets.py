"""Looks at gRPC's TCP sockets from outside: limits how much may wait unsent in them, and measures how fast bytes leave.

Linux lets a socket buffer megabytes. On a slow line, everything in the buffer goes ahead of what is written later, and
the end of a write says little about how fast its bytes leave. gRPC neither limits the buffer nor exposes its sockets,
so they are found among the open files of this process.
"""

import math
import os
import socket
import stat
import struct
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from pathlib import Path
from time import thread_time

from noloco_p2p.core.line_rate import LineRate, unsent_bytes
from noloco_p2p.io.dht.reach import MAPPED, T, joined

TCP_NOTSENT_LOWAT = 25
"""From linux/tcp.h; Python has no name for it."""
ACKED, BUSY = struct.Struct("@120xQ"), struct.Struct("@168xQ")
"""Fields of `struct tcp_info` in linux/tcp.h: bytes that the remote end has acknowledged, and microseconds during which
sent bytes were waiting to be acknowledged (Linux 4.10)."""
OPEN_FILES = Path("/proc/self/fd")
LOOK_S = 1.0
"""Time between two adjustments of the limit to the speed of the line, seconds."""
COUNT_S = 0.25
"""Shortest time between two looks at what has been acknowledged, seconds."""
COUNT_SHARE = 0.01
"""Upper limit on the share of time that these looks take. Each costs 10 µs of the event loop's thread per open file,
and strangers may open thousands of connections."""
MIN_COUNT_BYTES = 1 << 14
"""A connection with less than this between two looks carried no body, only short messages, and is not counted. If the
peer is far away, it may have waited for their acknowledgements most of the time."""
MIN_BUSY_S = 0.004
"""Lower limit on a busy time, because the system counts in ticks of 1 to 10 ms."""


def _of_each(found: Callable[[socket.socket], T]) -> dict[int, T]:
    """Inode → what `found` returns, for each TCP socket of this process; `found` raises OSError for other sockets.

    The sockets are only borrowed, neither closed nor kept.
    """
    all_found = {}
    with suppress(OSError):  # a look opens a file, and none can be opened now
        for number in map(int, os.listdir(OPEN_FILES)):
            with suppress(OSError), ExitStack() as leaving:  # closed in the meantime, or not a TCP socket
                file = os.stat(number)
                if stat.S_ISSOCK(file.st_mode):
                    one = socket.socket(fileno=number)
                    leaving.callback(one.detach)
                    all_found[file.st_ino] = found(one)
    return all_found


class AckedBytes:
    """Measures how fast bytes leave this process, from what its peers' systems have acknowledged.

    Between two looks the line counts as busy for as long as its busiest connection was, because on a full line every
    connection is busy.
    """

    def __init__(self, rate: LineRate, own: Callable[[], Collection[str]] = tuple) -> None:
        """`rate` receives the measurements; `own` returns `host:port` of the process's connections to itself, whose
        bytes never leave the machine."""
        self._rate, self._own = rate, own
        self._counts: dict[int, tuple[int, int]] = {}
        """By inode: bytes acknowledged, and microseconds busy, at the last look."""
        self._inside: set[int] = set()
        """Inodes of sockets that are, or were, ends of the process's connections to itself."""
        self._looks_at = -math.inf

    def follow(self, now: float) -> None:
        """Count what has left since the last look, unless that look was very recent."""
        if now < self._looks_at:
            return
        before, began = self._counts, thread_time()
        self._counts = _of_each(_counted)
        if own := self._own():
            self._inside |= {inode for inode, ends in _of_each(_ends).items() if not ends.isdisjoint(own)}
        self._inside &= self._counts.keys()
        self._looks_at = now + max(COUNT_S, (thread_time() - began) / COUNT_SHARE)
        if not before:
            return
        moved = [
            (acked - was[0], busy - was[1])
            for inode, (acked, busy) in self._counts.items()
            for was in [before.get(inode, (0, 0))]
            if acked - was[0] >= MIN_COUNT_BYTES and inode not in self._inside
        ]
        if moved:
            busy_s = max(busy for _, busy in moved) / 1e6
            self._rate.counted(sum(acked for acked, _ in moved), max(MIN_BUSY_S, busy_s), now)


def _ends(one: socket.socket) -> set[str]:
    """`host:port` of both ends of a connection. Raises OSError if the socket is not connected."""
    if one.family not in (socket.AF_INET, socket.AF_INET6):
        return set()
    ends = one.getsockname()[:2], one.getpeername()[:2]
    return {joined(host.removeprefix(MAPPED), port) for host, port in ends}


def _counted(one: socket.socket) -> tuple[int, int]:
    """Bytes acknowledged, and microseconds busy. Raises OSError if the system does not count them."""
    found = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(found) < BUSY.size:
        raise OSError("an older Linux")
    return ACKED.unpack_from(found)[0], BUSY.unpack_from(found)[0]


class UnsentLimit:
    """Limits how much may wait unsent in a socket before it accepts no more. Bytes in transit do not count."""

    def __init__(self, rate: LineRate) -> None:
        """The limit depends on `rate`, this node's measured upload rate."""
        self._rate = rate
        self._nbytes = unsent_bytes(None)
        self._looks_at = -math.inf

    def set(self) -> None:
        """Limit all TCP sockets that this process has now; a listening socket passes the limit on to those it accepts.

        It does no harm to sockets that are not gRPC's.
        """
        _of_each(lambda one: one.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, self._nbytes))

    def follow(self, now: float) -> None:
        """Set the limit again if the measured rate calls for another one."""
        if now < self._looks_at:
            return
        self._looks_at, before = now + LOOK_S, self._nbytes
        self._nbytes = unsent_bytes(self._rate.bytes_per_s)
        if self._nbytes != before:
            self.set()
