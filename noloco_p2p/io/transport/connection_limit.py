"""Which connections this node ends: those beyond as many as it accepts, because gRPC does not limit them by host, and
those of callers that do not read, because gRPC keeps what came on them.

gRPC does not show its sockets. Here they are found among the open files of this process, as in `sockets`; on a system
without /proc nothing happens.
"""

import asyncio
import os
import resource
import socket
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from noloco_p2p.io.dht.reach import joined
from noloco_p2p.io.transport.allocator import give_back_freed
from noloco_p2p.io.transport.callers import host_of
from noloco_p2p.io.transport.sockets import MAPPED, OPEN_FILES

MOST_FILES = 65_536
"""Files that a process asks for; the system may allow fewer."""
MOST_CONNECTIONS = 4_096
"""Accepted connections that are left alone. One that only exists takes 20 KB, with TLS 60 KB."""
FEW = 64
"""Nobody who has so many is cut off before those who have more."""
LOOK_S = 1.0
"""Time between two looks, seconds."""
End = tuple[str, int]
"""Address and port of the other end of a connection."""


def allow_many_files() -> None:
    """Raise this process's limit on open files: connections of strangers must not take those that it needs itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def room() -> int:
    """How many accepted connections are left alone: at most half of the files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, soft // 2)


class ConnectionLimit:
    """Ends connections to a port: those that are `unread`, and others while there are more than `room`: of the hosts
    with the most, the newest first.

    If no host has more than FEW, the newest end. To gRPC it looks as if the other end had closed them.
    """

    def __init__(self, port: int, unread: Collection[str] = ()) -> None:
        """`unread`: see `Callers`; it may change."""
        self._port = port
        self._unread = unread
        self._known: set[End] = set()
        """Those that there were at the last look."""
        self._ends: dict[tuple[int, int], End | None] = {}
        """Of each file open then, by device and inode: the other end, None if it is no accepted connection."""

    async def watch(self) -> None:
        """Look again and again. The memory of what was unread goes back to the system one look later."""
        ended = False
        while OPEN_FILES.is_dir():
            await asyncio.sleep(LOOK_S)
            if ended:
                await asyncio.to_thread(give_back_freed)
            ended = bool(self._unread)
            with suppress(OSError):  # a look opens a file, and none can be opened now
                if self._unread or len(os.listdir(OPEN_FILES)) > room():
                    await asyncio.to_thread(self.look, frozenset(self._unread))

    def look(self, unread: Collection[str] = ()) -> None:
        """End those that are unread, count the others, and end what is too much."""
        files = self.accepted()
        for end in [end for end in files if joined(*end) in unread]:
            _end(end, files.pop(end))
        hosts = defaultdict[str, list[End]](list)
        newest = sorted(files, key=self._known.__contains__, reverse=True)
        for end in newest:
            hosts[host_of(end[0])].append(end)
        for _ in range(len(files) - room()):
            busiest = max(hosts.values(), key=len)
            end = busiest.pop() if len(busiest) > FEW else newest.pop()
            _end(end, files.pop(end, -1))
        self._known = set(files)

    def accepted(self) -> dict[End, int]:
        """The other ends of all connections to the port, and which files they are here."""
        found, known, self._ends = dict[End, int](), self._ends, {}
        for number in map(int, os.listdir(OPEN_FILES)):
            with suppress(OSError):  # gone
                file = os.fstat(number)
                key = file.st_dev, file.st_ino
                self._ends[key] = end = known[key] if key in known else self._other_end(number)
                if end is not None:
                    found[end] = number
        return found

    def _other_end(self, number: int) -> End | None:
        with suppress(OSError), _copied(number) as one:  # else it is something else
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == self._port:
                host, port, *_ = one.getpeername()
                return host.removeprefix(MAPPED), port
        return None


def _end(end: End, number: int) -> None:
    """End the connection behind a file, unless that is another one by now."""
    with suppress(OSError), _copied(number) as one:
        if one.getpeername()[1] == end[1]:
            one.shutdown(socket.SHUT_RDWR)


@contextmanager
def _copied(number: int) -> Iterator[socket.socket]:
    """The socket behind a file, which gRPC may close meanwhile. Raises OSError: it is none, or gone."""
    copy = os.dup(number)
    try:
        one = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with one:
        yield one
