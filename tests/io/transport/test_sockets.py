"""What waits unsent in the system's buffers."""

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

import pytest
from transport_fixture import Node, activation, echo, pair, run

from noloco_p2p.io.transport import sockets

pytestmark = pytest.mark.skipif(not sockets.OPEN_FILES.is_dir(), reason="Linux only")


def limits() -> list[tuple[int, int, int]]:
    """(own port, the other one's, limit) of every TCP connection of this process."""
    found = []
    for number in map(int, os.listdir(sockets.OPEN_FILES)):
        with suppress(OSError):
            if stat.S_ISSOCK(os.stat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as one:
                    limit = one.getsockopt(socket.IPPROTO_TCP, sockets.TCP_NOTSENT_LOWAT)
                    found.append((one.getsockname()[1], one.getpeername()[1], limit))
    return found


def taken(sender: socket.socket) -> int:
    """How many bytes a socket takes that nobody reads."""
    sender.setblocking(False)
    total = 0
    with suppress(BlockingIOError):
        while True:
            total += sender.send(bytes(1 << 16))
    return total


def test_a_socket_whose_other_end_does_not_read_takes_little_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        took = []
        for limited in (False, True):
            with socket.create_connection(server.getsockname()) as near, server.accept()[0]:
                if limited:
                    sockets.limit_unsent()
                took.append(taken(near))
    assert took[0] > 1 << 20
    assert took[1] < took[0] / 2
    assert took[1] < sockets.UNSENT_BYTES + (1 << 19)


def test_what_is_open_stays_as_it_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        near.settimeout(3.0)
        before = len(os.listdir(sockets.OPEN_FILES))
        sockets.limit_unsent()
        assert len(os.listdir(sockets.OPEN_FILES)) == before
        assert near.gettimeout() == 3.0
        far, _ = server.accept()
        with far:
            near.sendall(b"x")
            assert far.recv(1) == b"x"


def test_a_number_that_means_another_file_meanwhile_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """gRPC closes its sockets in threads of its own: between two looks a number may come to mean something else."""
    monkeypatch.setattr(stat, "S_ISSOCK", lambda mode: True)
    with (tmp_path / "file").open("w") as file:
        before = len(os.listdir(sockets.OPEN_FILES))
        sockets.limit_unsent()
        assert len(os.listdir(sockets.OPEN_FILES)) == before
        assert not file.closed
        file.write("x")


def test_both_ends_of_every_connection_between_nodes_are_limited() -> None:
    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            await both.a.propagate(both.peer, activation())
            await both.a.progress(both.peer, [], 1.0)
            ours = [limit for near, far, limit in limits() if both.b.port in (near, far)]
        assert len(ours) == 4
        assert set(ours) == {sockets.UNSENT_BYTES}

    run(scenario())
