"""Closes connections that would use up this node: those beyond its limit, which gRPC does not enforce by host, and
those of callers that do not read, for which gRPC keeps everything received.

gRPC does not expose its sockets, so they are found among the open files of this process, as in `sockets`.
"""

import asyncio
import os
import resource
import socket
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress

from noloco_p2p.io.dht.reach import MAPPED, host_of, joined
from noloco_p2p.io.transport.allocator import give_back_freed
from noloco_p2p.io.transport.sockets import OPEN_FILES

MAX_FILES = 65_536
"""How many open files a process asks the system for; it may allow fewer."""
MAX_CONNECTIONS = 4_096
"""Most accepted connections that are left alone. An idle one takes 20 KB, with TLS 60 KB."""
FEW = 64
"""Hosts with more connections than this lose connections first."""
LOOK_S = 1.0
"""Time between two looks, seconds."""
End = tuple[str, int]
"""Address and port of the remote end of a connection."""


def allow_many_files() -> None:
    """Raise this process's limit on open files, so that strangers' connections leave enough for its own needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def room() -> int:
    """How many accepted connections are left alone; at most half of the files that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 2)


class ConnectionLimit:
    """Closes connections to a port: those that are `unread`, and others while there are more than `room`.

    The host with the most connections loses its newest first; if no host has more than FEW, the newest of all is
    closed. To gRPC it looks as if the remote end had closed the connection.
    """

    def __init__(self, port: int, unread: Collection[str] = ()) -> None:
        """`unread`: see `Callers`; it may change."""
        self._port = port
        self._unread = unread
        self._known: set[End] = set()
        """The connections that existed at the last look."""
        self._ends: dict[tuple[int, int], End | None] = {}
        """By device and inode, for each socket open at the last look: its remote end; None if it was not accepted."""

    async def watch(self) -> None:
        """Look once a second. One look after connections were unread, their memory is returned to the system."""
        ended = False
        while True:
            await asyncio.sleep(LOOK_S)
            if ended:
                await asyncio.to_thread(give_back_freed)
            ended = bool(self._unread)
            with suppress(OSError):  # a look opens a file, and none can be opened now
                if self._unread or len(os.listdir(OPEN_FILES)) > room():
                    await asyncio.to_thread(self.look, frozenset(self._unread))

    def look(self, unread: Collection[str] = ()) -> None:
        """Close the connections that are unread, and then as many others as exceed `room`."""
        files = self.accepted()
        for end in [end for end in files if joined(*end) in unread]:
            _end(end, files.pop(end))
        hosts = defaultdict[str, list[End]](list)
        newest = sorted(files, key=self._known.__contains__, reverse=True)
        for end in newest:
            hosts[host_of(end[0])].append(end)
        while len(files) > room():
            busiest = max(hosts.values(), key=len)
            end = busiest.pop() if len(busiest) > FEW else newest.pop()
            _end(end, files.pop(end, -1))
        self._known = set(files)

    def accepted(self) -> dict[End, int]:
        """Remote end → file descriptor, for all accepted connections to the port."""
        found, known, self._ends = dict[End, int](), self._ends, {}
        for number in map(int, os.listdir(OPEN_FILES)):
            with suppress(OSError):  # closed in the meantime, or not a socket, or no file can be opened now
                file = os.fstat(number)
                key = file.st_dev, file.st_ino
                self._ends[key] = end = known[key] if key in known else self._other_end(number)
                if end is not None:
                    found[end] = number
        return found

    def _other_end(self, number: int) -> End | None:
        with _copied(number) as one, suppress(OSError):  # not connected
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == self._port:
                host, port, *_ = one.getpeername()
                return host.removeprefix(MAPPED), port
        return None


def _end(end: End, number: int) -> None:
    """Close the connection behind a file descriptor, unless that is a different connection by now."""
    with suppress(OSError), _copied(number) as one:
        if one.getpeername()[1] == end[1]:
            one.shutdown(socket.SHUT_RDWR)


def _copied(number: int) -> socket.socket:
    """A copy of the socket behind a descriptor, which gRPC may close at any time. Raises OSError if it is not one."""
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
