"""What the system does with what gRPC has written: how much of it may wait unsent, and how fast it leaves.

Linux lets a socket take megabytes. On a slow line all that is in there goes before what is written later, and a write
that has ended says little about how fast its bytes leave. gRPC neither limits it nor shows its sockets: they are found
among the open files of this process.
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
from typing import TypeVar

from noloco_p2p.core.line_rate import LineRate, unsent_bytes
from noloco_p2p.io.dht.reach import joined

TCP_NOTSENT_LOWAT = 25
"""Of linux/tcp.h; Python has no name for it."""
ACKED, BUSY = struct.Struct("@120xQ"), struct.Struct("@168xQ")
"""Of `struct tcp_info` there: bytes that the other end has acknowledged, and microseconds in which some were sent and
not acknowledged yet (Linux 4.10)."""
OPEN_FILES = Path("/proc/self/fd")
LOOK_S = 1.0
"""Time between two looks at how fast the line is, seconds."""
COUNT_S = 0.25
"""Least time between two looks at what has been acknowledged, seconds."""
COUNT_SHARE = 0.01
"""The looks take at most this share of the time: each takes 10 µs of the event loop's thread for every open file, and
strangers may open thousands of connections."""
LEAST_COUNT_BYTES = 1 << 14
"""A connection with less than this between two looks carried no body, only short messages. On a far line it may have
waited for their acknowledgements most of the time."""
LEAST_BUSY_S = 0.004
"""The system counts in ticks of 1 to 10 ms."""
MAPPED = "::ffff:"
"""Before an IPv4 address where a socket of IPv6 takes both, as gRPC's do."""

T = TypeVar("T")


def _of_each(found: Callable[[socket.socket], T]) -> dict[int, T]:
    """What `found` gives of each TCP socket of this process, by its inode; it raises OSError where it is none.

    They are not ours to close, or to keep. Nothing where there is no /proc.
    """
    all_found = {}
    for number in map(int, os.listdir(OPEN_FILES) if OPEN_FILES.is_dir() else ()):
        with suppress(OSError), ExitStack() as leaving:  # closed meanwhile, or none of TCP
            file = os.stat(number)
            if stat.S_ISSOCK(file.st_mode):
                one = socket.socket(fileno=number)
                leaving.callback(one.detach)
                all_found[file.st_ino] = found(one)
    return all_found


class AckedBytes:
    """Measures how fast bytes leave this process, by what its peers' systems have acknowledged.

    Between two looks the line was busy for as long as the busiest connection, because on a full line all of them are.
    """

    def __init__(self, rate: LineRate, own: Callable[[], Collection[str]] = tuple) -> None:
        """`rate` gets what is found; `own`: `host:port` of the connections of this process to itself, whose bytes never
        leave."""
        self._rate, self._own = rate, own
        self._counts: dict[int, tuple[int, int]] | None = None
        """By inode: bytes acknowledged, and microseconds busy."""
        self._inside: set[int] = set()
        """The inodes among them that are, or were, ends of such connections."""
        self._looks_at = -math.inf

    def follow(self, now: float) -> None:
        """Count what has left since the last look, unless that was just now."""
        if now < self._looks_at:
            return
        before, began = self._counts, thread_time()
        self._counts = _of_each(_counted)
        if own := self._own():
            self._inside |= {inode for inode, ends in _of_each(_ends).items() if not ends.isdisjoint(own)}
        self._inside &= self._counts.keys()
        self._looks_at = now + max(COUNT_S, (thread_time() - began) / COUNT_SHARE)
        if before is None:
            return
        moved = [
            (acked - was[0], busy - was[1])
            for inode, (acked, busy) in self._counts.items()
            for was in [before.get(inode, (0, 0))]
            if acked - was[0] >= LEAST_COUNT_BYTES and inode not in self._inside
        ]
        if moved:
            busy_s = max(busy for _, busy in moved) / 1e6
            self._rate.counted(sum(acked for acked, _ in moved), max(LEAST_BUSY_S, busy_s), now)


def _ends(one: socket.socket) -> set[str]:
    """`host:port` of both ends of a connection. Raises OSError: it is not one."""
    if one.family not in (socket.AF_INET, socket.AF_INET6):
        return set()
    ends = one.getsockname()[:2], one.getpeername()[:2]
    return {joined(host.removeprefix(MAPPED), port) for host, port in ends}


def _counted(one: socket.socket) -> tuple[int, int]:
    """Bytes acknowledged, and microseconds busy. Raises OSError: the system does not count them."""
    found = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(found) < BUSY.size:
        raise OSError("an older Linux")
    return ACKED.unpack_from(found)[0], BUSY.unpack_from(found)[0]


class UnsentLimit:
    """A socket in which more waits takes nothing more; what is under way is not counted."""

    def __init__(self, rate: LineRate) -> None:
        """The limit follows this one."""
        self._rate = rate
        self._nbytes = unsent_bytes(None)
        self._looks_at = -math.inf

    def set(self) -> None:
        """Limit all TCP sockets that this process has now, and what those that listen will accept.

        Sockets of others than gRPC do not suffer from it.
        """
        _of_each(lambda one: one.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, self._nbytes))

    def follow(self, now: float) -> None:
        """Set it anew if the line is another than before."""
        if now < self._looks_at:
            return
        self._looks_at, before = now + LOOK_S, self._nbytes
        self._nbytes = unsent_bytes(self._rate.bytes_per_s)
        if self._nbytes != before:
            self.set()
