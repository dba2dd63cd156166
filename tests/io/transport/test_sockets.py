"""The data that waits unsent in the kernel's socket buffers."""

import asyncio
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

import pytest
from transport_fixture import LARGE, Node, activation, echo, pair, run

from noloco_p2p.core.line_cap import BYTES_PER_MBIT
from noloco_p2p.core.line_rate import FAST_BYTES_PER_S, MORE_UNSENT_BYTES, UNSENT_BYTES, LineRate, unsent_bytes
from noloco_p2p.io.transport import sockets
from noloco_p2p.io.transport.sockets import COUNT_S, LOOK_S, MIN_COUNT_BYTES, AckedBytes, UnsentLimit

pytestmark = pytest.mark.skipif(not sockets.OPEN_FILES.is_dir(), reason="Linux only")


def limits() -> list[tuple[int, int, int]]:
    """(local port, remote port, limit) of every TCP connection of this process."""
    found = []
    for number in map(int, os.listdir(sockets.OPEN_FILES)):
        with suppress(OSError):
            if stat.S_ISSOCK(os.stat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as one:
                    limit = one.getsockopt(socket.IPPROTO_TCP, sockets.TCP_NOTSENT_LOWAT)
                    found.append((one.getsockname()[1], one.getpeername()[1], limit))
    return found


def taken(sender: socket.socket) -> int:
    """How many bytes a socket accepts while the other end does not read."""
    sender.setblocking(False)
    total = 0
    with suppress(BlockingIOError):
        while True:
            total += sender.send(bytes(1 << 16))
    return total


def test_a_socket_whose_other_end_does_not_read_accepts_little_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        took = []
        for limited in (False, True):
            with socket.create_connection(server.getsockname()) as near, server.accept()[0]:
                if limited:
                    UnsentLimit(LineRate(1.0)).set()
                took.append(taken(near))
    assert took[0] > 1 << 20
    assert took[1] < took[0] / 2
    assert took[1] < UNSENT_BYTES + (1 << 19)


def test_open_sockets_keep_their_settings() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        near.settimeout(3.0)
        before = len(os.listdir(sockets.OPEN_FILES))
        UnsentLimit(LineRate(1.0)).set()
        assert len(os.listdir(sockets.OPEN_FILES)) == before
        assert near.gettimeout() == 3.0
        far, _ = server.accept()
        with far:
            near.sendall(b"x")
            assert far.recv(1) == b"x"


def refers_to(descriptor: Path, directory: Path) -> bool:
    """Whether it is one of a file in this directory. Other threads close descriptors meanwhile."""
    try:
        return directory in descriptor.readlink().parents
    except FileNotFoundError:
        return False


def test_a_reused_descriptor_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """gRPC closes its sockets in its own threads, so a descriptor may refer to another file the next time."""
    monkeypatch.setattr(stat, "S_ISSOCK", lambda mode: True)
    with (tmp_path / "file").open("w") as file:
        UnsentLimit(LineRate(1.0)).set()
        assert [one.name for one in sockets.OPEN_FILES.iterdir() if refers_to(one, tmp_path)] == [str(file.fileno())]
        file.write("x")


def test_both_ends_of_every_connection_between_nodes_are_limited() -> None:
    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            await both.a.propagate(both.peer, activation())
            await both.a.progress(both.peer, [], 1.0)
            ours = [limit for near, far, limit in limits() if both.b.port in (near, far)]
        assert len(ours) == 4
        assert set(ours) == {UNSENT_BYTES}

    run(scenario())


def test_a_process_that_can_open_no_more_files_still_sends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not even the directory of open files can be opened then."""

    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            monkeypatch.setattr(sockets, "OPEN_FILES", tmp_path / "cannot be opened")
            sent = activation(LARGE)
            assert (await both.a.propagate(both.peer, sent)).grad.data == sent.hidden.data

    run(scenario())


def test_the_limit_follows_the_speed_of_the_line() -> None:
    assert unsent_bytes(None) == unsent_bytes(FAST_BYTES_PER_S - 1) == UNSENT_BYTES
    for megabits in (1, 2, 5, 20):
        assert unsent_bytes(megabits * BYTES_PER_MBIT) <= 0.25 * megabits * BYTES_PER_MBIT
    rate = LineRate(1.0)
    unsent = UnsentLimit(rate)

    def after(bytes_per_s: float, looked_at: float) -> int:
        rate.ended(rate.began(0.0), bytes_per_s, 1.0)
        unsent.follow(looked_at)
        return near.getsockopt(socket.IPPROTO_TCP, sockets.TCP_NOTSENT_LOWAT)

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        unsent.set()
        assert after(FAST_BYTES_PER_S / 2, 0.0) == UNSENT_BYTES
        assert after(FAST_BYTES_PER_S, LOOK_S / 2) == UNSENT_BYTES, "the last look was too recent"
        assert after(FAST_BYTES_PER_S, LOOK_S) == MORE_UNSENT_BYTES


def test_bytes_in_the_buffers_do_not_count_as_sent() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as near,
        server.accept()[0] as far,
    ):

        def acked() -> int:
            return sockets._of_each(sockets._counted)[os.fstat(near.fileno()).st_ino][0]

        total = taken(near)
        assert acked() < total
        near.settimeout(30.0)
        near.shutdown(socket.SHUT_WR)
        while far.recv(1 << 20):
            pass
        far.sendall(b"x")  # carries the acknowledgement of everything received
        assert near.recv(1) == b"x"
        assert total <= acked() <= total + 2, "SYN and FIN count as a byte each"


def test_the_line_rate_is_measured_from_acknowledged_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {1: (10**9, 10**9)}
    monkeypatch.setattr(sockets, "_of_each", lambda found: dict(counts))
    rate = LineRate(1.0)
    acked = AckedBytes(rate)
    acked.follow(0.0)
    assert rate.bytes_per_s is None, "traffic before the first look may be old"
    counts |= {1: (10**9 + 500_000, 10**9 + 100_000), 2: (500_000, 200_000), 3: (MIN_COUNT_BYTES - 1, 10**7)}
    acked.follow(COUNT_S / 2)
    assert rate.bytes_per_s is None, "the last look was too recent"
    acked.follow(COUNT_S)
    assert rate.bytes_per_s == pytest.approx(1e6 / 0.2), "over the time of the busiest connection that carried a body"
    counts[1] = counts[1][0] + MIN_COUNT_BYTES - 1, counts[1][1]
    acked.follow(2 * COUNT_S)
    assert rate.bytes_per_s == pytest.approx(1e6 / 0.2), "no body was sent"


def test_bytes_that_a_node_sends_to_itself_do_not_count() -> None:
    """A node forwards the streams of others to its own server over local connections."""
    both = socket.has_dualstack_ipv6()
    rate, own = LineRate(1.0), set[str]()
    acked = AckedBytes(rate, lambda: own)
    looks = iter(600.0 * look for look in range(9))  # far enough apart even after a look that took long

    def carried(one: socket.socket, other: socket.socket) -> float | None:
        """Send a body over this connection; returns the rate afterwards."""
        one.sendall(bytes(MIN_COUNT_BYTES))
        assert len(other.recv(MIN_COUNT_BYTES, socket.MSG_WAITALL)) == MIN_COUNT_BYTES
        other.sendall(b"x")  # carries the acknowledgement of everything received
        assert one.recv(1) == b"x"
        acked.follow(next(looks))
        return rate.bytes_per_s

    with (
        socket.create_server(
            ("", 0), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both
        ) as server,
        socket.create_connection(("127.0.0.1", server.getsockname()[1])) as stream,
        server.accept()[0] as served,
        socket.create_connection(("127.0.0.1", server.getsockname()[1])) as caller,
        server.accept()[0] as called,
    ):
        own.add(f"127.0.0.1:{stream.getsockname()[1]}")
        acked.follow(next(looks))
        assert carried(stream, served) is None, "an incoming stream"
        assert carried(served, stream) is None, "its answer"
        own.clear()
        assert carried(served, stream) is None, "the stream has just ended"
        assert carried(called, caller) is not None
        assert len(acked._inside) == 2
    acked.follow(next(looks))
    assert not acked._inside, "closed sockets are forgotten"


def test_a_transport_measures_its_line_from_acknowledged_bytes() -> None:
    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            rate = both.a.line.up
            both.a._line._acked.follow(asyncio.get_running_loop().time() - COUNT_S)
            await both.a.propagate(both.peer, activation(LARGE))
            both.a._line._acked.follow(asyncio.get_running_loop().time() + COUNT_S)
            counted = rate.bytes_per_s
            rate.ended(rate.began(0.0), 1e15, 1.0)
            assert counted is not None
            assert rate.bytes_per_s == counted, "the duration of writes no longer counts"

    run(scenario())


def test_a_transport_on_a_fast_line_allows_more_unsent_bytes() -> None:
    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            rate, now = both.a.line.up, asyncio.get_running_loop().time()
            rate.ended(rate.began(now - 1.0), 10 * FAST_BYTES_PER_S, now)
            await both.a.propagate(both.peer, activation(LARGE))
            ours = [limit for near, far, limit in limits() if both.b.port in (near, far)]
        assert set(ours) == {MORE_UNSENT_BYTES}

    run(scenario())


def test_counting_uses_at_most_a_hundredth_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, spent_s = list[float](), 0.0

    def slow(found: object) -> dict[int, tuple[int, int]]:
        nonlocal spent_s
        looks.append(now)
        spent_s += 0.04
        return {}

    monkeypatch.setattr(sockets, "_of_each", slow)
    monkeypatch.setattr(sockets, "thread_time", lambda: spent_s)
    acked = AckedBytes(LineRate(1.0))
    for now in range(20):
        acked.follow(float(now))
    assert looks == [0, 4, 8, 12, 16]
