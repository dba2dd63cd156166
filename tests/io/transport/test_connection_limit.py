"""How a node limits the connections that it accepts (`io/transport/connection_limit`)."""

import asyncio
import errno
import os
import resource
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from types import SimpleNamespace

import grpc
import pytest
from machine import at_most
from node_stub import NodeStub
from transport_fixture import (
    SOON_S,
    Events,
    NamedLinks,
    Node,
    activation,
    advert,
    all_have_ended,
    bare,
    echo,
    hang,
    pair,
    run,
    soon,
)

from noloco_p2p.config import ListenSettings
from noloco_p2p.io.dht import reach
from noloco_p2p.io.transport import callers, connection_limit, message_codec, service, slow_transfers, sockets
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.connection_limit import ConnectionLimit
from noloco_p2p.io.transport.grpc_transport import GrpcTransport

ME = callers.metadata()
DEADLINE = "grpc.server_handshake_timeout_ms"

pytestmark = pytest.mark.skipif(not sockets.OPEN_FILES.is_dir(), reason="Linux only")


class Crowd:
    """Connections to one port, by their source address."""

    def __init__(self, leaving: ExitStack) -> None:
        self._leaving = leaving
        self._server = leaving.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        self.port = self._server.getsockname()[1]
        self._ends: list[tuple[str, socket.socket]] = []

    def come(self, host: str, count: int) -> None:
        for _ in range(count):
            near = socket.create_connection(("127.0.0.1", self.port), source_address=(host, 0))
            self._ends.append((host, self._leaving.enter_context(near)))
            self._leaving.enter_context(self._server.accept()[0])

    def left(self) -> list[int]:
        """How many connections of each host are still open, in the order of the hosts' names."""
        found = Counter[str]()
        for host, near in self._ends:
            near.setblocking(False)
            with suppress(BlockingIOError):
                assert near.recv(1) == b""
                continue
            found[host] += 1
        return [found[host] for host in sorted({host for host, _ in self._ends})]


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crowd]:
    monkeypatch.setattr(connection_limit, "MAX_CONNECTIONS", 12)
    monkeypatch.setattr(connection_limit, "FEW", 4)
    with ExitStack() as leaving:
        yield Crowd(leaving)


def test_the_host_with_the_most_connections_loses_its_newest(crowd: Crowd) -> None:
    here = ConnectionLimit(crowd.port)
    crowd.come("127.0.0.1", 3)
    crowd.come("127.0.0.2", 6)
    here.look()
    assert crowd.left() == [3, 6]
    first = crowd._ends[3:9]
    crowd.come("127.0.0.3", 2)
    crowd.come("127.0.0.2", 5)
    files = len(os.listdir(sockets.OPEN_FILES))
    here.look()
    assert crowd.left() == [3, 7, 2]
    assert len(os.listdir(sockets.OPEN_FILES)) == files
    crowd._ends = first
    assert crowd.left() == [6], "established connections stay"


def test_many_hosts_with_few_connections_each_do_not_displace_established_ones(crowd: Crowd) -> None:
    here = ConnectionLimit(crowd.port)
    crowd.come("127.0.0.1", 4)
    here.look()
    for host in range(2, 14):
        crowd.come(f"127.0.0.{host}", 1)
    here.look()
    assert crowd.left()[0] == 4
    assert sum(crowd.left()) == 12


def test_a_newcomer_with_the_number_of_a_closed_file_does_not_displace_established_ones(crowd: Crowd) -> None:
    here, free = ConnectionLimit(crowd.port), [os.dup(0) for _ in range(2)]
    for host in range(2, 14):
        crowd.come(f"127.0.0.{host}", 1)
    here.look()
    for number in free:
        os.close(number)
    crowd.come("127.0.0.99", 1)
    here.look()
    assert crowd.left() == [1] * 12 + [0]


def test_a_network_of_one_subscriber_counts_as_one_host(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit, "host_of", lambda address: address.rpartition(".")[0])
    for host in range(2, 7):
        crowd.come(f"127.0.0.{host}", 2)
    crowd.come("127.0.1.1", 3)
    ConnectionLimit(crowd.port).look()
    assert crowd.left() == [2] * 4 + [1, 3]


def test_a_file_that_is_another_connection_by_now_stays_open(crowd: Crowd) -> None:
    crowd.come("127.0.0.2", 2)
    (one, _), (_, number) = ConnectionLimit(crowd.port).accepted().items()
    connection_limit._end(one, number)
    assert crowd.left() == [2]


def test_one_look_closes_all_that_are_too_many(crowd: Crowd) -> None:
    """Those that a busy host has lost already are also among the newest."""
    for host in range(2, 12):
        crowd.come(f"127.0.0.{host}", 1)
    crowd.come("127.0.0.1", 8)
    ConnectionLimit(crowd.port).look()
    assert sum(crowd.left()) == 12


def test_connections_to_other_ports_are_left_alone(crowd: Crowd) -> None:
    crowd.come("127.0.0.2", 20)
    with socket.create_server(("127.0.0.1", 0)) as other:
        files = len(os.listdir(sockets.OPEN_FILES))
        ConnectionLimit(other.getsockname()[1]).look()
        assert len(os.listdir(sockets.OPEN_FILES)) == files, "nothing that it looked at stays open"
    assert crowd.left() == [20]


def test_a_link_local_end_has_the_same_name_as_among_the_callers_that_do_not_read() -> None:
    """gRPC adds the number of the network interface, and the system does not."""
    context = SimpleNamespace(peer=lambda: "ipv6:%5Bfe80::fc:1%254%5D:51098")
    assert callers.connection_of(context) == reach.joined("fe80::fc:1", 51098)


def test_half_of_the_file_descriptors_are_reserved_for_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 4096), (256, 512), (resource.RLIM_INFINITY,) * 2]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[0])
    asked = list[tuple[int, int]]()
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: asked.append(wanted))
    rooms = []
    while limits:
        rooms.append(connection_limit.room())
        connection_limit.allow_many_files()
        limits.pop(0)
    assert rooms == [512, 128, 4096]
    assert asked == [(4096, 4096), (512, 512)]


def test_running_out_of_file_descriptors_does_not_end_the_watch(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit, "LOOK_S", 0.0)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def scenario() -> None:
        watching = asyncio.create_task(ConnectionLimit(crowd.port).watch())
        os.close(next_one := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, before[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                os.listdir(sockets.OPEN_FILES)
            for _ in range(5):
                await asyncio.sleep(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        crowd.come("127.0.0.2", 20)
        while sum(crowd.left()) > connection_limit.room():
            assert not watching.done(), watching.exception()
            await asyncio.sleep(0)
        watching.cancel()

    run(scenario())


def test_connections_that_came_while_no_file_could_be_opened_count_later(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They used to be left alone for as long as they stayed open."""

    def dup(number: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    here = ConnectionLimit(crowd.port)
    crowd.come("127.0.0.2", 20)
    with monkeypatch.context() as full:
        full.setattr(os, "dup", dup)
        here.look()
    here.look()
    assert crowd.left() == [12]


def test_a_connection_without_a_handshake_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the deadline is half a minute."""
    assert dict(service.OPTIONS)[DEADLINE] == 30_000
    monkeypatch.setattr(service, "OPTIONS", (*(one for one in service.OPTIONS if one[0] != DEADLINE), (DEADLINE, 300)))

    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            for first in (b"", b"\x16\x03\x01\x0f\xff\x01"):
                with socket.create_connection(("127.0.0.1", both.b.port)) as end:
                    end.sendall(first)
                    end.settimeout(at_most(20.0))
                    assert end.recv(1) == b""

    run(scenario())


def test_connections_beyond_the_limit_are_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "room", lambda: 8)

    async def scenario() -> None:
        async with pair(Node(echo)) as both:
            await both.a.propagate(both.peer, activation())
            with ExitStack() as leaving:
                ends = [leaving.enter_context(socket.create_connection(("127.0.0.1", both.b.port))) for _ in range(14)]
                ended = 0
                for end in ends[::-1]:
                    end.settimeout(0.5)
                    with suppress(TimeoutError):
                        ended += end.recv(1) == b""
            assert (await both.a.propagate(both.peer, activation())).tokens, "the established connection stays"
        assert ended >= 2

    run(scenario())


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_caller_that_does_not_read_loses_its_connection_and_its_memory_is_freed(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC kept 4 MiB for each of thousands of such calls for up to an hour, and the process kept the memory longer."""
    monkeypatch.setattr(slow_transfers, "RESERVE_S", min(at_most(1.0), SOON_S / 2))
    monkeypatch.setattr(callers, "LET_GO_S", 0.1)
    monkeypatch.setattr(connection_limit, "LOOK_S", 0.0)

    async def scenario() -> None:
        loop, given_back = asyncio.get_running_loop(), asyncio.Event()
        give_back = partial(loop.call_soon_threadsafe, given_back.set)
        monkeypatch.setattr(connection_limit, "give_back_freed", give_back)
        b = GrpcTransport(NamedLinks("B"), ListenSettings(host=host), Events(), 1 << 20)
        await b.serve(Node(hang))
        watching = asyncio.create_task(ConnectionLimit(b.port, b.unread).watch())
        peer = advert(f"127.0.0.1:{b.port}")
        blind = ("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0)
        async with bare(peer, "A") as honest, bare(peer, "X", blind) as channel:
            served = NodeStub(honest).Propagate(timeout=60.0, metadata=ME)
            await served.write(pb.ActivationMessage.FromString(message_codec.announced(activation(), 0)[0]))
            ask = channel.stream_stream("/noloco.v1.Node/Describe")
            calls = [ask(timeout=60.0, metadata=ME) for _ in range(3)]
            for call in calls:
                await call.write(pb.DescribeRequest().SerializeToString())
            for call in calls:
                assert await soon(call.code()) is grpc.StatusCode.UNAVAILABLE
            assert not served.done(), "connections of others stay"
            served.cancel()
            await all_have_ended(b)
        assert not b.unread
        await soon(given_back.wait())
        watching.cancel()
        await b.close()

    run(scenario())
