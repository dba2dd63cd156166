"""gRPC over libp2p streams on loopback: to a peer with an open link, through a relay, and who is refused."""

import asyncio
import gc
import itertools
import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from errno import ENOSPC
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast
from unittest.mock import AsyncMock, Mock

import pytest
from daemons import RUN, STRANGER, daemon, run, until
from machine import in_time
from members import Club
from soak import soak
from transport_fixture import MAX_BODY_BYTES, Events, Node, activation, echo

from noloco_p2p.config import LimitSettings, ListenSettings, NodeConfig
from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.errors import Busy, Declined, LocalError, PeerError, Unreachable, Violation
from noloco_p2p.humanize import short_id
from noloco_p2p.io.dht import join_handshake, relay_service, streams, ways_in
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.dht.identity import peer_id_of
from noloco_p2p.io.dht.join_handshake import (
    DIAL_BACK_CALL,
    TRIED,
    UNTRIED,
    ask_dial_back,
    check_reachable,
    find_way,
    serve_dial_back,
)
from noloco_p2p.io.dht.libp2p import Libp2pDaemon, Stream
from noloco_p2p.io.dht.member_records import MemberRecords
from noloco_p2p.io.dht.reach import Reach
from noloco_p2p.io.dht.relay_service import MemberRelay
from noloco_p2p.io.dht.streams import CHUNK_BYTES, RELAY_STREAMS, RELAYED_STREAMS, Streams, cancelled, hear, say
from noloco_p2p.io.dht.ways_in import DIALS, WaysIn
from noloco_p2p.io.security import admission
from noloco_p2p.io.security.certificates import DAY_S
from noloco_p2p.io.security.credentials import Credentials
from noloco_p2p.io.security.revocations import Revocations
from noloco_p2p.io.transport import service
from noloco_p2p.io.transport.grpc_transport import GrpcTransport
from noloco_p2p.io.transport.peer_links import Links, open_links
from noloco_p2p.io.transport.sockets import COUNT_S
from noloco_p2p.launch import ways as reachability
from noloco_p2p.launch.run_key import Standing
from noloco_p2p.observe.doctor.doctor_report import DoctorReport
from noloco_p2p.observe.doctor.peers import _dialled_back, check_reached
from noloco_p2p.sim import virtual_time

RELAYING = peer_id_of(bytes([7]) * 32)
BODY = (1, 512, 512)
"""1 MiB: more than all buffers along the path hold."""


@dataclass
class Peer:
    """A member that serves gRPC at a port that it does not announce."""

    libp2p: Libp2pDaemon
    streams: Streams
    links: Links
    transport: GrpcTransport
    ways: WaysIn

    @property
    def id(self) -> PeerId:
        return self.libp2p.peer_id

    async def reaches(self, other: "Peer", *addresses: str) -> None:
        """Check that an activation gets there and its gradient comes back."""
        sent = activation(BODY, run_id=RUN)
        head = sent.header
        mine = head.microbatch._replace(peer=self.id), replace(head.origin, peer=self.id)
        sent = replace(sent, header=replace(head, microbatch=mine[0], origin=mine[1]))
        peer = Advert(other.id, RUN, 1, addresses or other.ways.addresses())
        assert (await self.transport.propagate(peer, sent)).grad.data == sent.hidden.data

    async def circuit(self, relay: "Peer", target: PeerId) -> str:
        """The relay's answer to a request for a stream to a target; raises Unreachable if it does not answer."""
        stream = await self.libp2p.open_stream(relay.id, RELAY_STREAMS)
        await say(stream, target)
        answer = await hear(stream)
        stream.writer.close()
        return answer


@asynccontextmanager
async def member(club: Club, name: str, *join: Peer) -> AsyncIterator[Peer]:
    async with daemon(club.home / name, join=[one.libp2p.join_addresses[0] for one in join]) as libp2p:
        chain = club.chain(libp2p.peer_id)
        streams = Streams(libp2p, RUN, chain.decode)
        links = Links(Credentials(club.trust, libp2p.identity, chain))
        links.streams = streams
        transport = GrpcTransport(links, ListenSettings(), Events(), MAX_BODY_BYTES)
        await transport.serve(Node(echo))
        try:
            yield Peer(libp2p, streams, links, transport, WaysIn(libp2p, streams, ("127.0.0.1", transport.port)))
        finally:
            await transport.close()
            await streams.close()


@asynccontextmanager
async def relay(
    club: Club, name: str, mbit_per_s: float = 8000.0, revoked: Revocations | None = None
) -> AsyncIterator[Peer]:
    async with member(club, name) as peer:
        relaying = relay_of(peer, MemberRecords(club.trust, revoked or Revocations(club.trust)), mbit_per_s)
        assert relaying is not None
        await relaying.serve()
        yield peer


@asynccontextmanager
async def relayed(club: Club, bytes_per_s: float) -> AsyncIterator[tuple[Peer, Peer, str]]:
    """Two members, and the address at which the first reaches the second through a relay that allows this rate."""
    async with relay(club, "r", bytes_per_s * 8 / 1e6) as r, member(club, "a", r) as a, member(club, "b", r) as b:
        await b.ways.serve()
        await b.ways.find_relays()
        yield a, b, f"relay/{r.id}"


def test_one_caller_with_many_circuits_gets_no_more_of_a_relay_than_one_with_a_single_circuit() -> None:
    passed = Counter[PeerId]()

    async def scenario() -> None:
        relay = MemberRelay(cast(Libp2pDaemon, None), RUN, None, lambda: 10.0 * CHUNK_BYTES)

        async def circuit(caller: PeerId) -> None:
            while True:
                await relay.pace(caller, CHUNK_BYTES)
                passed[caller] += 1

        with suppress(TimeoutError):
            async with asyncio.timeout(20.0), asyncio.TaskGroup() as circuits:
                for caller in 8 * ["many"] + ["one"]:
                    circuits.create_task(circuit(caller))

    virtual_time.run(scenario(), limit_s=60.0)
    assert passed.total() == pytest.approx(200, abs=5)
    assert passed["one"] == pytest.approx(passed["many"], abs=2)


def relay_of(peer: Peer, records: MemberRecords | None, mbit_per_s: float | None) -> MemberRelay | None:
    """The relay of a node with this `limits.relay_mbit_per_s`; its run is open if there are no `records`."""
    local = NodeConfig(limits=LimitSettings(relay_mbit_per_s=mbit_per_s))
    return reachability.relay(peer.libp2p, RUN, Standing(peer.links, records), peer.transport, local)


def test_members_that_cannot_be_dialled_are_reached_over_links_and_through_relays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    club, links = Club(tmp_path, RUN), Libp2pDaemon.links
    folders = list["TemporaryDirectory[str]"]()

    def recorded(*, prefix: str, dir: str) -> "TemporaryDirectory[str]":
        folders.append(TemporaryDirectory(prefix=prefix, dir=dir))
        return folders[-1]

    monkeypatch.setattr(streams, "TemporaryDirectory", recorded)

    async def scenario() -> None:
        async with AsyncExitStack() as closing:
            enter = closing.enter_async_context
            r, s = await enter(relay(club, "r")), await enter(relay(club, "s"))
            b = await enter(member(club, "b", r, s))
            a = await enter(member(club, "a", r))

            hidden = {b.id, s.id}

            async def links_of_a(libp2p: Libp2pDaemon) -> set[PeerId]:
                """The links of a, without the hidden ones: on loopback libp2p dials every peer that it hears of."""
                return await links(libp2p) - (hidden if libp2p is a.libp2p else set())

            monkeypatch.setattr(Libp2pDaemon, "links", links_of_a)
            await b.ways.serve()
            with pytest.raises(Unreachable, match="p2p: there is no link"):
                await a.reaches(b)
            assert await b.ways.find_relays()
            assert set(b.ways.addresses()) == {"p2p", f"relay/{r.id}", f"relay/{s.id}"}
            with pytest.raises(Unreachable, match="the address of relay"):
                await a.reaches(b, f"relay/{s.id}")
            hidden.remove(s.id)
            a.libp2p.met = {one.peer_id: one for one in b.libp2p.joined}
            for one in (r, s):
                await a.reaches(b, f"relay/{one.id}")
                assert f"relay/{one.id}" in b.streams.hosts.values()
            with monkeypatch.context() as full:
                full.setattr(asyncio, "start_unix_server", Mock(side_effect=OSError(ENOSPC, "No space left on device")))
                with pytest.raises(Unreachable, match="cannot create a socket in /tmp: No space left"):
                    await s.reaches(b)
            await s.reaches(b)
            assert f"p2p/{s.id}" in b.streams.hosts.values()
            with pytest.raises(Unreachable, match="this node is the relay"):
                await r.reaches(b, f"relay/{r.id}")
            assert not await b.ways.find_relays(), "both are renewed"
            assert folders
            assert not any(os.path.exists(one.name) for one in folders), "a killed node leaves no folder behind"  # noqa: ASYNC240
            sockets = Path("/proc/net/unix").read_text().splitlines()  # noqa: ASYNC240
            listening = [line.split()[-1] for line in sockets if " 00010000 " in line]
            assert not any(path.startswith(one.name) for path in listening for one in folders)

            await s.libp2p.close()

            async def gone() -> bool:
                return f"relay/{s.id}" not in b.streams.hosts.values()

            await until(gone)
            assert await b.ways.find_relays()
            assert b.ways.addresses() == ("p2p", f"relay/{r.id}")
            await a.reaches(b)
        assert not b.streams.hosts

    run(scenario)


def test_neither_a_dead_relay_nor_a_dead_issuer_is_called_a_join_address(tmp_path: Path) -> None:
    club, said = Club(tmp_path, RUN), asyncio.Queue[str | None]()
    credentials = club.credentials("mine", clock=lambda: club.now + 4 * DAY_S)

    async def scenario() -> None:
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            dead = JoinAddress("127.0.0.1", deaf.getsockname()[1], RELAYING)
            async with daemon(tmp_path / "a") as libp2p:
                libp2p.met = {RELAYING: dead}
                with pytest.raises(Unreachable, match=f"^relay {dead}: nobody answers"):
                    await Streams(libp2p, RUN).target(f"relay/{RELAYING}", STRANGER)
                keeping = asyncio.create_task(
                    admission.keep_valid(libp2p, credentials, None, lambda: [dead], said.put_nowait)
                )
                assert f"(issuer {dead}: nobody answers" in str(await said.get())
                await cancelled([keeping])

    run(scenario)


def test_a_stream_that_breaks_before_any_message_is_unreachable() -> None:
    async def scenario() -> None:
        here, there = socket.socketpair()
        stream = Stream(*await asyncio.open_connection(sock=here))
        there.close()
        with pytest.raises(Unreachable, match="closed the stream"):
            await say(stream, "word")
        with pytest.raises(Unreachable, match="does not answer"):
            await hear(stream)

    asyncio.run(scenario())


Ends = tuple[tuple[Stream, socket.socket], tuple[Stream, socket.socket]]


@asynccontextmanager
async def spliced() -> AsyncIterator[tuple[Ends, "asyncio.Task[None]"]]:
    """Two spliced streams, each with its remote end, and the task that splices them."""
    pairs = [socket.socketpair() for _ in range(2)]
    first, second = [(Stream(*await asyncio.open_connection(sock=here)), there) for here, there in pairs]
    task = asyncio.create_task(streams.splice(first[0], second[0]))
    yield (first, second), task
    for _, there in (first, second):
        there.close()
    await task


def test_a_splice_ends_when_no_byte_has_passed_for_a_while() -> None:
    """gRPC ends a connection without calls before, and probes one with a silent call far more often."""
    options = dict(service.OPTIONS)
    assert streams.IDLE_S * 1e3 > options["grpc.max_connection_idle_ms"] > 10 * options["grpc.keepalive_time_ms"]

    async def scenario() -> None:
        readers, clock = [asyncio.StreamReader() for _ in range(2)], asyncio.get_running_loop().time
        first, second = (Stream(reader, Mock(drain=AsyncMock())) for reader in readers)
        task = asyncio.create_task(streams.splice(first, second))
        for number in range(6):
            await asyncio.sleep(0.9 * streams.IDLE_S)
            readers[number % 2].feed_data(b"a")
        used_at = clock()
        assert not task.done(), "either direction is use"
        await task
        assert clock() - used_at == pytest.approx(streams.IDLE_S)

    virtual_time.run(scenario(), limit_s=10 * streams.IDLE_S)


def test_what_a_peer_does_not_take_is_dropped_soon_after_the_end_of_a_splice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "END_S", 0.2)

    async def scenario() -> None:
        async with spliced() as ((first, second), task):
            first[1].setblocking(False)
            while first[0].reader._buffer or not second[0].writer.transport.get_write_buffer_size():  # type: ignore[attr-defined]
                with suppress(BlockingIOError):
                    first[1].send(bytes(1 << 16))
                await asyncio.sleep(0)
            second[1].shutdown(socket.SHUT_WR)
            await asyncio.wait_for(task, 5.0)
            assert second[0].writer.transport.get_write_buffer_size() > 0
            async with asyncio.timeout(5.0):
                with suppress(ConnectionError):
                    await second[0].writer.wait_closed()

    asyncio.run(scenario())


def test_a_relay_serves_members_with_a_reservation_up_to_a_limit_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    club = Club(tmp_path, RUN)
    monkeypatch.setattr(relay_service, "CIRCUITS_OF_PEER", 2)

    async def scenario() -> None:
        async with AsyncExitStack() as closing:
            enter = closing.enter_async_context
            revoked = Revocations(club.trust)
            r = await enter(relay(club, "r", revoked=revoked))
            a, b = await enter(member(club, "a", r)), await enter(member(club, "b", r))
            for shown in (b"", club.chain(b.id), club.chain(a.id, "observer"), b"\n" * 9000):
                with pytest.raises(Declined, match="only members of its run"):
                    await Streams(a.libp2p, RUN, shown.decode).reserve(r.id)
            with pytest.raises(Declined, match="belongs to another run"):
                await Streams(a.libp2p, "ef" * 32).reserve(r.id)
            await b.ways.serve()
            await b.ways.find_relays()
            with pytest.raises(Unreachable, match="does not answer"):
                await a.circuit(r, b.id)
            await a.streams.reserve(r.id)
            assert await a.circuit(r, STRANGER) == f"{STRANGER} has no reservation"
            held = [await a.libp2p.open_stream(r.id, RELAY_STREAMS) for _ in range(2)]
            for stream in held:
                await say(stream, b.id)
                assert await hear(stream) == ""
            with pytest.raises(Unreachable, match="does not answer"):
                await a.circuit(r, b.id)
            for stream in held:
                stream.writer.close()

            async def free() -> bool:
                with suppress(Unreachable):
                    return await a.circuit(r, b.id) == ""
                return False

            await until(free)
            await b.ways.find_relays()
            live = await a.libp2p.open_stream(r.id, RELAY_STREAMS)
            await say(live, b.id)
            assert await hear(live) == ""
            revoked.adopt(club.revoking(int(time.time()), a.id))
            async with asyncio.timeout(10.0):  # later its target would end it, which waits for a handshake
                assert await live.reader.read() == b"", "a revocation ends circuits"
            with pytest.raises(Unreachable, match="does not answer"):
                await a.circuit(r, b.id)
            with pytest.raises(Declined, match="only members of its run"):
                await a.streams.reserve(r.id)
            assert not await b.ways.find_relays(), "a peer that is still a member renews its reservation"
            stray = await a.libp2p.open_stream(b.id, RELAYED_STREAMS)
            assert await stray.reader.read() == b"", (
                "a node accepts relayed streams only from relays that it has chosen"
            )
            stray.writer.close()

    run(scenario)


def test_a_full_relay_accepts_others_once_reservations_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_service, "MAX_RESERVED", 1)

    async def scenario() -> None:
        relay = MemberRelay(cast(Libp2pDaemon, None), RUN, None, lambda: 1.0)
        for _ in range(2):
            await relay._reserve("one", RUN.encode())
            with pytest.raises(Declined, match="no more reservations"):
                await relay._reserve("another", RUN.encode())
            await asyncio.sleep(0.9 * relay_service.RESERVED_S)
        await asyncio.sleep(0.2 * relay_service.RESERVED_S)
        await relay._reserve("another", RUN.encode())

    virtual_time.run(scenario(), limit_s=60.0)


def test_one_peer_cannot_take_all_the_circuits_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    club = Club(tmp_path, RUN)
    monkeypatch.setattr(relay_service, "CIRCUITS_OF_PAIR", 2)
    monkeypatch.setattr(relay_service, "CIRCUITS_OF_PEER", 4)
    monkeypatch.setattr(relay_service, "CIRCUITS", 3)

    async def scenario() -> None:
        async with AsyncExitStack() as closing:
            enter = closing.enter_async_context
            r = await enter(relay(club, "r"))
            a, b, c = [await enter(member(club, name, r)) for name in "abc"]
            await b.ways.serve()
            await b.ways.find_relays()
            for one in (a, c):
                await one.streams.reserve(r.id)
            answers = list[str]()
            for one in (a, a, a, a, c):
                stream = await one.libp2p.open_stream(r.id, RELAY_STREAMS)
                closing.callback(stream.writer.close)
                await say(stream, b.id)
                answers.append(await hear(stream))
            assert answers == ["", "", *[f"{b.id} may have no more circuits"] * 2, ""]
            with pytest.raises(Unreachable, match="does not answer"):
                await c.circuit(r, a.id)

    run(scenario)


def test_streams_under_many_names_do_not_keep_out_those_of_the_relays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can open a link to a node behind NAT may have any number of peer ids."""
    spliced, ports = list[Stream](), itertools.count()

    async def splicing(one: Stream, other: Stream) -> None:
        spliced.append(one)
        await asyncio.Event().wait()

    monkeypatch.setattr(ways_in, "splice", splicing)
    server = Mock(get_extra_info=Mock(return_value=("127.0.0.1", 9)))
    monkeypatch.setattr(asyncio, "open_connection", AsyncMock(return_value=(Mock(), server)))
    monkeypatch.setattr(ways_in, "joined", lambda *_: str(next(ports)))

    async def scenario() -> None:
        ways = WaysIn(cast(Libp2pDaemon, Mock()), Streams(cast(Libp2pDaemon, Mock()), RUN), ("127.0.0.1", 9))
        ways._relays = (STRANGER,)
        stream = Stream(Mock(), Mock())
        ids = [peer_id_of(bytes([n]) * 32) for n in range(40)]
        carrying = list[asyncio.Task[None]]()

        async def come(*peers: PeerId) -> int:
            """How many streams there are after as many as allowed, and one more, from each of these peers."""
            count = len(peers) * (ways_in.STREAMS_OF_PEER + 1)
            some = [ways._carry("p2p/", ways_in.STREAMS_OF_PEER, peers[n % len(peers)], stream) for n in range(count)]
            carrying.extend(map(asyncio.create_task, some))
            for _ in range(5):
                await asyncio.sleep(0)
            return len(spliced)

        assert await come(ids[0]) == ways_in.STREAMS_OF_PEER
        assert await come(*ids) == ways_in.MAX_STREAMS
        carrying += [asyncio.create_task(ways._relayed(peer, stream)) for peer in (ids[0], STRANGER)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(spliced) == ways_in.MAX_STREAMS + 1, "only this node's relays bring streams of others"
        await cancelled(carrying)
        assert not ways._open
        assert not ways._streams.hosts

    asyncio.run(scenario())


def test_a_private_address_that_nobody_could_dial_back_is_not_relied_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is joined by many at once, or asked by a stranger, is busy dialling others back."""
    asked_at = list[float]()

    async def busy(*_: object) -> None:
        asked_at.append(asyncio.get_running_loop().time())
        raise Busy("busy dialling others back")

    monkeypatch.setattr(join_handshake, "ask_dial_back", busy)

    async def scenario(joined: str, address: str) -> bool:
        asked_at.clear()
        peer = JoinAddress(joined, 4001, STRANGER)
        libp2p = cast(Libp2pDaemon, Mock(joined=(peer,), reach=Reach([joined]), router=None))
        ways = Mock(serve=AsyncMock(), through_router=AsyncMock(return_value=""))
        direct = await check_reachable(libp2p, address, ways)
        assert ways.serve.called is not direct
        assert [at - asked_at[0] for at in asked_at] == [0.0, 1.0, 3.0]
        return direct

    assert not virtual_time.run(scenario("8.8.8.8", "192.168.1.2:9"), limit_s=9.0)
    assert virtual_time.run(scenario("8.8.8.8", "8.8.4.4:9"), limit_s=9.0)
    assert virtual_time.run(scenario("192.168.1.3", "192.168.1.2:9"), limit_s=9.0)


def test_a_single_peer_that_denies_that_it_reaches_a_node_does_not_end_its_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It can keep the other joined peers busy with dialling it back."""

    async def answer(_: object, peer: PeerId, address: str) -> str:
        if peer == STRANGER:
            return "nothing accepts connections there"
        raise Busy("busy dialling others back")

    monkeypatch.setattr(join_handshake, "ask_dial_back", answer)
    liar, honest = (JoinAddress("8.8.8.8", 4001, peer) for peer in (STRANGER, RELAYING))

    def starts(*joined: JoinAddress) -> bool:
        libp2p = cast(Libp2pDaemon, Mock(joined=joined, reach=Reach(["8.8.8.8"]), router=None))
        ways = Mock(serve=AsyncMock(), through_router=AsyncMock(return_value=""))
        return virtual_time.run(check_reachable(libp2p, "8.8.4.4:9", ways), limit_s=9.0)

    assert starts(liar, honest)
    assert starts(honest, liar)
    assert "it is not known whether others reach this node at 8.8.4.4:9: busy" in caplog.text
    with pytest.raises(LocalError, match="others cannot reach this node"):
        starts(liar)


@pytest.mark.parametrize(
    ("address", "asked", "direct"),
    [("8.8.4.4:9", 2, True), ("node.example:9", 2, True), ("192.168.1.2:9", 1, False)],
)
def test_a_node_that_one_joined_peer_reaches_is_not_behind_nat_because_another_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, address: str, asked: int, direct: bool
) -> None:
    """That one may be behind a firewall that lets nothing out, or lie. It says that it reaches the node over libp2p."""

    async def answer(_: object, peer: PeerId, place: str) -> str | None:
        peers.append(peer)
        if silent and peer == RELAYING:
            raise Unreachable("gone")
        return "shut" if place != "p2p" and peer == STRANGER else None

    monkeypatch.setattr(join_handshake, "ask_dial_back", answer)
    one, other = (JoinAddress("8.8.8.8", 4001, peer) for peer in (STRANGER, RELAYING))
    ways = Mock(serve=AsyncMock(), through_router=AsyncMock(return_value=""))
    for silent in (False, True):
        peers = list[PeerId]()
        libp2p = cast(Libp2pDaemon, Mock(joined=(one, other)))
        assert virtual_time.run(check_reachable(libp2p, address, ways), limit_s=9.0) is (direct and not silent)
        assert len({*peers}) == asked
    assert caplog.text.count("until then they use links") == 2 - direct
    peers, silent = [], False
    libp2p = cast(Libp2pDaemon, Mock(joined=(other, one)))
    assert virtual_time.run(check_reachable(libp2p, address, ways), limit_s=9.0)
    assert peers == [RELAYING], "no other needs to be asked"


OUTSIDE, OWN = "11.1.1.12:5009", "192.168.1.2:9"


@pytest.mark.parametrize(
    ("joined", "answers", "found", "serves"),
    [
        ("8.8.8.8", {OUTSIDE: None}, (OUTSIDE, ""), True),
        ("192.168.1.3", {}, (OUTSIDE, ""), True),
        ("8.8.8.8", {OUTSIDE: "shut", OWN: None}, (OWN, ""), False),
        ("8.8.8.8", {OUTSIDE: "shut", OWN: "far", "p2p": None}, ("p2p", "far"), True),
        ("8.8.8.8", {OUTSIDE: "shut", OWN: "far", "p2p": "no"}, ("", "far, nor over libp2p: no"), True),
        ("8.8.8.8", {OUTSIDE: "shut", OWN: "far", "p2p": Declined("no")}, ("", "far, nor over libp2p: no"), True),
        ("8.8.8.8", {OUTSIDE: "shut", OWN: "far", "p2p": Busy("no")}, ("p2p", "far"), True),
    ],
)
def test_the_port_of_a_router_comes_first_unless_a_peer_outside_finds_it_shut(
    monkeypatch: pytest.MonkeyPatch,
    joined: str,
    answers: dict[str, str | Declined | Busy | None],
    found: tuple[str, str],
    serves: bool,
) -> None:
    asked = AsyncMock(side_effect=answers.values())
    monkeypatch.setattr(join_handshake, "ask_dial_back", asked)
    ways = Mock(serve=AsyncMock(), through_router=AsyncMock(return_value=OUTSIDE), not_through_router=AsyncMock())
    peer = JoinAddress(joined, 4001, STRANGER)
    libp2p = cast(Libp2pDaemon, Mock(joined=(peer,)))
    assert asyncio.run(find_way(libp2p, peer, OWN, ways)) == (peer, *found)
    assert [call.args[2] for call in asked.call_args_list] == list(answers)
    assert ways.serve.called is serves
    shut = [f"{OUTSIDE}: {reason}" for reason in answers.values() if reason == "shut"]
    assert [call.args[0] for call in ways.not_through_router.call_args_list] == shut


@pytest.mark.parametrize(
    ("others", "kept"),
    [
        ([("8.8.8.8", None)], True),
        ([("8.8.8.8", Unreachable("gone")), ("8.8.8.8", None)], True),
        ([("8.8.8.8", "shut")], False),
        ([("192.168.1.3", None)], False),
    ],
)
def test_the_port_of_a_router_is_kept_if_another_joined_peer_gets_through(
    monkeypatch: pytest.MonkeyPatch, others: list[tuple[str, str | PeerError | None]], kept: bool
) -> None:
    """One at 192.168.1.3 is behind the same router, which may lead it back inside and still keep others out."""
    first = JoinAddress("8.8.8.8", 4001, STRANGER)
    hosts = {peer_id_of(bytes([n]) * 32): one for n, one in enumerate(others, 1)}
    more = [JoinAddress(host, 4001, peer) for peer, (host, _) in hosts.items()]

    async def answer(_: object, peer: PeerId, address: str) -> str | None:
        found = None if address == "p2p" else "shut" if peer == STRANGER or address == OWN else hosts[peer][1]
        if isinstance(found, PeerError):
            raise found
        return found

    monkeypatch.setattr(join_handshake, "ask_dial_back", answer)
    ways = Mock(serve=AsyncMock(), through_router=AsyncMock(return_value=OUTSIDE), not_through_router=AsyncMock())
    libp2p = cast(Libp2pDaemon, Mock(joined=(first, *more)))
    found = (more[-1], OUTSIDE, "") if kept else (first, "p2p", "shut")
    assert asyncio.run(find_way(libp2p, first, OWN, ways)) == found
    assert ways.not_through_router.called is not kept


@pytest.mark.parametrize(
    ("joined", "outside", "said"),
    [
        ((), "", []),
        ((), OUTSIDE, [UNTRIED]),
        (("192.168.1.3",), OUTSIDE, [UNTRIED]),
        (("8.8.8.8",), OUTSIDE, [TRIED]),
        (("8.8.8.8",), "", []),
    ],
)
def test_a_node_says_whether_anybody_has_reached_it_through_its_router(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    joined: tuple[str, ...],
    outside: str,
    said: list[str],
) -> None:
    """The first node of a run has nobody to ask, and does not wait for anybody."""
    monkeypatch.setattr(join_handshake, "ask_dial_back", AsyncMock(return_value=None))
    caplog.set_level(logging.INFO)
    peers = tuple(JoinAddress(host, 4001, STRANGER) for host in joined)
    libp2p = cast(Libp2pDaemon, Mock(joined=peers, reach=Reach(joined)))
    ways = Mock(serve=AsyncMock(), through_router=AsyncMock(return_value=outside))

    async def scenario() -> tuple[bool, float]:
        began = asyncio.get_running_loop().time()
        return await check_reachable(libp2p, OWN, ways), asyncio.get_running_loop().time() - began

    assert virtual_time.run(scenario(), limit_s=9.0) == (not outside, 0.0)
    assert ways.serve.called is bool(outside)
    assert caplog.messages == [one % outside for one in said]


@pytest.mark.parametrize("outsider_first", [True, False])
@pytest.mark.parametrize(
    ("outside", "open_to_outsider", "direct", "said"),
    [
        (OUTSIDE, True, False, f"at {OUTSIDE}, a port mapped"),
        (OUTSIDE, False, False, "reached over links that it keeps"),
        ("", False, False, "reached over links that it keeps"),
        (OUTSIDE, None, False, "is behind it and cannot test it"),
        ("", None, True, f"reaches this machine at {OWN}"),
    ],
)
def test_a_joined_peer_outside_decides_how_a_node_is_reached_wherever_it_is_listed(
    monkeypatch: pytest.MonkeyPatch,
    outsider_first: bool,
    outside: str,
    open_to_outsider: bool | None,
    direct: bool,
    said: str,
) -> None:
    """Behind one in its own network, it was not asked whether the router's ports lead to the node, and the node took a
    private address for one that all others reach. None: it cannot be asked."""

    async def answer(_: object, peer: PeerId, place: str) -> str | None:
        if peer == STRANGER:
            return None
        if open_to_outsider is None:
            raise Unreachable("gone")
        return None if place == "p2p" or (place == outside and open_to_outsider) else "shut"

    monkeypatch.setattr(join_handshake, "ask_dial_back", answer)
    joined = [JoinAddress("192.168.1.3", 4001, STRANGER), JoinAddress("8.8.8.8", 4001, RELAYING)]
    libp2p = cast(Libp2pDaemon, Mock(joined=tuple(joined[:: -1 if outsider_first else 1])))
    report = DoctorReport(as_json=True)

    async def scenario() -> bool:
        ways = [Mock(serve=AsyncMock(), not_through_router=AsyncMock()) for _ in range(2)]
        for each in ways:
            each.through_router = AsyncMock(return_value=outside)
        await _dialled_back(report, libp2p, OWN, ways[0])
        found = await check_reachable(libp2p, OWN, ways[1])
        assert ways[1].serve.called is not found
        assert ways[1].not_through_router.called is (outside != "" and open_to_outsider is False)
        return found

    assert virtual_time.run(scenario(), limit_s=9.0) is direct
    [(_, finding)] = report.findings
    assert said in finding.sentence


@pytest.mark.parametrize("address", ["8.8.4.4:9", "192.168.1.2:9"])
def test_the_doctor_says_what_a_node_would_find(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """The first joined peer may be behind a firewall that lets nothing out."""

    async def answer(_: object, peer: PeerId, place: str) -> str | None:
        return "shut" if place != "p2p" and peer == STRANGER else None

    monkeypatch.setattr(join_handshake, "ask_dial_back", answer)
    libp2p = cast(Libp2pDaemon, Mock(joined=[JoinAddress("8.8.8.8", 4001, peer) for peer in (STRANGER, RELAYING)]))
    ways, report = Mock(serve=AsyncMock(), through_router=AsyncMock(return_value="")), DoctorReport(as_json=True)

    async def scenario() -> bool:
        await _dialled_back(report, libp2p, address, ways)
        return await check_reachable(libp2p, address, ways)

    direct = virtual_time.run(scenario(), limit_s=9.0)
    [(_, found)] = report.findings
    name = short_id(RELAYING if direct else STRANGER)
    says = f"{name} reaches this machine at" if direct else f"{name} cannot reach this machine at"
    assert found.sentence.startswith(f"{says} {address}")
    assert found.severity == ("ok" if direct else "warning")


def test_a_relay_keeps_nothing_of_streams_that_have_ended() -> None:
    async def scenario() -> None:
        relay = MemberRelay(cast(Libp2pDaemon, Mock()), RUN, None, lambda: 1e9)
        for _ in range(20):
            await asyncio.create_task(relay._relay(STRANGER, Stream(Mock(), Mock())))
        await asyncio.sleep(0)
        gc.collect()
        assert not len(relay._carrying)

    asyncio.run(scenario())


@pytest.mark.parametrize("most", [24, 10])
def test_members_whose_links_cannot_be_opened_do_not_keep_a_node_from_the_others(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    dead = {peer_id_of(bytes([i]) * 32): JoinAddress("127.0.0.1", 1, peer_id_of(bytes([i]) * 32)) for i in range(24)}
    dialled = set[PeerId]()

    class Libp2p:
        peer_id, joined, met = STRANGER, (), dead

        async def links(self) -> set[PeerId]:
            return set()

        async def dial_all(self, targets: list[JoinAddress]) -> None:
            assert len(targets) == DIALS
            dialled.update(target.peer_id for target in targets)

    monkeypatch.setattr(ways_in, "MAX_LINKS", most)

    async def scenario() -> None:
        ways = WaysIn(cast(Libp2pDaemon, Libp2p()), cast(Streams, None), ("127.0.0.1", 9))
        for _ in range(100):
            await ways._keep_links()
        assert len(dialled) == most

    asyncio.run(scenario())


def test_a_node_asks_a_few_members_to_relay_in_an_order_of_its_own_and_those_that_refuse_only_once() -> None:
    links = {peer_id_of(bytes([i]) * 32) for i in range(24)}

    async def asked_by(me: PeerId) -> list[PeerId]:
        libp2p = Mock(joined=(), met=dict.fromkeys(links), peer_id=me, links=AsyncMock(return_value=links))
        refusing = Mock(reserve=AsyncMock(side_effect=Declined("no")))
        ways = WaysIn(libp2p, refusing, ("127.0.0.1", 9))
        for looks in (1, 2):
            assert not await ways.find_relays()
            assert refusing.reserve.await_count == looks * 2 * ways_in.RELAYS
        return [call.args[0] for call in refusing.reserve.await_args_list]

    async def scenario() -> None:
        mine, others = await asked_by(STRANGER), await asked_by(peer_id_of(bytes([99]) * 32))
        assert len(set(mine)) == len(mine)
        assert mine != others
        libp2p = Mock(joined=(), met=dict.fromkeys(links), peer_id=STRANGER, links=AsyncMock(return_value=links))
        willing = Mock(reserve=AsyncMock())
        ways = WaysIn(libp2p, willing, ("127.0.0.1", 9))
        assert [await ways.find_relays() for _ in range(3)] == [True, False, False]
        assert willing.reserve.await_count == (2 + 1 + 1) * ways_in.RELAYS, "later its own relays only"

    asyncio.run(scenario())


def test_a_router_that_maps_only_one_of_two_ports_is_of_no_use() -> None:
    """Nothing stays mapped, and neither the advert nor a join address names the router."""

    async def scenario() -> None:
        router = Mock(map=AsyncMock(side_effect=Unreachable("full")), end=AsyncMock(), place=Mock(return_value=None))
        libp2p = Mock(router=router, outside=OUTSIDE)
        ways = WaysIn(libp2p, Mock(), ("127.0.0.1", 9))
        assert await ways.through_router() == ""
        assert libp2p.router is None
        router.end.assert_awaited_once_with()
        assert ways.addresses() == ("p2p",)

    asyncio.run(scenario())


def test_members_that_refuse_to_relay_are_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways_in, "REFUSED_S", 0.0)
    links = {peer_id_of(bytes([i]) * 32) for i in range(24)}
    libp2p = Mock(joined=(), met=dict.fromkeys(links), peer_id=STRANGER, links=AsyncMock(return_value=links))

    async def scenario() -> None:
        refusing = Mock(reserve=AsyncMock(side_effect=Declined("no")))
        ways = WaysIn(libp2p, refusing, ("127.0.0.1", 9))
        for _ in range(2):
            assert not await ways.find_relays()
            assert ways._refused_at
        libp2p.links.return_value = set()
        await ways.find_relays()
        assert not ways._refused_at

    asyncio.run(scenario())


def test_while_the_daemon_is_dead_the_log_says_once_that_relays_and_links_are_not_looked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A daemon that dies again is restarted only after a minute. A node behind NAT wrote 40 lines meanwhile."""
    dead = AsyncMock(side_effect=LocalError("the libp2p daemon has died"))
    ways = WaysIn(cast(Libp2pDaemon, Mock(links=dead, joined=(), met={}, router=None)), Mock(), ("127.0.0.1", 9))

    async def scenario() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(60.0):
                await ways.keep(AsyncMock())

    virtual_time.run(scenario(), limit_s=99.0)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["ways to this node: the libp2p daemon has died"] * 2


def test_a_relay_is_used_again_as_soon_as_there_is_a_link_to_it_again() -> None:
    """It has not refused: its daemon was being restarted, or that of this node."""
    libp2p = Mock(
        joined=(), met={RELAYING: None}, router=None, peer_id=STRANGER, links=AsyncMock(return_value={RELAYING})
    )

    async def scenario() -> None:
        relay = Mock(reserve=AsyncMock())
        ways = WaysIn(libp2p, relay, ("127.0.0.1", 9))
        assert await ways.find_relays()
        libp2p.links.return_value, relay.reserve.side_effect = set(), Unreachable("no link")
        assert await ways.find_relays()
        assert ways.addresses() == ("p2p",)
        libp2p.links.return_value, relay.reserve.side_effect = {RELAYING}, None
        assert await ways.find_relays()
        assert ways.addresses() == ("p2p", f"relay/{RELAYING}")

    asyncio.run(scenario())


def test_a_relay_keeps_to_the_rate_that_its_owner_allows(tmp_path: Path) -> None:
    club, rate = Club(tmp_path, RUN), 2e6

    async def scenario() -> None:
        async with relayed(club, rate) as (a, b, address):
            clock = asyncio.get_running_loop().time
            began = clock()
            for _ in range(2):
                await a.reaches(b, address)
            there_and_back = 4 * 4 * 512 * 512
            assert clock() - began >= there_and_back / rate - relay_service.BURST_S
            b.transport._line._acked.follow(clock() + COUNT_S)
            assert not b.transport.line.up._from_system, (
                "bytes that the server hands to its end of a stream have not left yet"
            )

    run(scenario)


@pytest.mark.soak
def test_relayed_bodies_get_four_fifths_of_the_line_that_the_relay_gives_them(tmp_path: Path) -> None:
    club, rate = Club(tmp_path, RUN), 1e6

    async def scenario() -> None:
        async with relayed(club, rate) as (a, b, address):
            await a.reaches(b, address)  # opens the circuit, and uses up what may be sent in one burst
            clock = asyncio.get_running_loop().time
            began = clock()
            for _ in range(4):
                await a.reaches(b, address)
            assert in_time(clock() - began, 4 * 2 * 4 * 512 * 512 / rate / 0.8)

    run(scenario)


@pytest.mark.parametrize("how", [signal.SIGSTOP, *soak([signal.SIGKILL])])
def test_a_lost_relay_is_replaced_within_ten_seconds(tmp_path: Path, how: signal.Signals) -> None:
    """One that hangs is noticed last: it only does not answer."""
    club = Club(tmp_path, RUN)

    async def scenario() -> None:
        async with AsyncExitStack() as closing:
            relays = [await closing.enter_async_context(relay(club, name)) for name in "rst"]
            by_address = {f"relay/{one.id}": one for one in relays}
            a = await closing.enter_async_context(member(club, "a", *relays))
            b = await closing.enter_async_context(member(club, "b", *relays))
            await b.ways.serve()
            await b.ways.find_relays()
            first = [by_address.pop(address) for address in b.ways.addresses()[1:]]
            assert (len(first), len(by_address)) == (2, 1)
            announced, clock = asyncio.Event(), asyncio.get_running_loop().time

            async def announce() -> None:
                if by_address.keys() <= {*b.ways.addresses()}:
                    announced.set()

            keeping = asyncio.create_task(b.ways.keep(announce))
            closing.callback(keeping.cancel)
            lost = first[0].libp2p.p2p._child.pid
            began = clock()
            os.kill(lost, how)
            if how is signal.SIGSTOP:
                closing.callback(os.kill, lost, signal.SIGCONT)
            await announced.wait()
            assert in_time(clock() - began, 10.0)
            assert f"relay/{first[0].id}" not in b.ways.addresses()
            await a.reaches(b, *b.ways.addresses()[1:])

    run(scenario)


def test_only_members_relay_unless_their_owner_decides_otherwise(tmp_path: Path) -> None:
    club = Club(tmp_path, RUN)

    async def scenario() -> None:
        async with member(club, "a") as a:
            records = MemberRecords(club.trust, Revocations(club.trust))
            assert relay_of(a, None, None) is None
            assert relay_of(a, None, 1.0) is not None
            assert relay_of(a, records, None) is not None
            assert relay_of(a, records, 0.0) is None

    run(scenario)


def test_a_node_that_cannot_be_dialled_learns_at_its_start_whether_streams_reach_it(tmp_path: Path) -> None:
    reaches = {"p2p"}

    async def probe(address: str, peer: PeerId) -> str | None:
        return None if address in reaches else "nothing accepts connections there"

    async def scenario() -> None:
        async with daemon(tmp_path / "a") as a, daemon(tmp_path / "b", join=a.join_addresses) as b:
            await serve_dial_back(a, probe)
            ways = WaysIn(b, Streams(b, RUN), ("127.0.0.1", 9))
            assert not await check_reachable(b, "127.0.0.1:9", ways)
            report = DoctorReport(as_json=True)
            await check_reached(report, b, ListenSettings(), open_links(b.identity, RUN))
            [(_, found)] = report.findings
            assert (found.severity, found.name) == ("warning", "port")
            assert "would be reached over links that it keeps" in found.sentence
            assert "open TCP port" in found.advice
            found_ways = await reachability.find(b, Streams(b, RUN), ListenSettings(), "192.168.1.2", 9)
            assert found_ways is not None
            assert found_ways.addresses() == ("p2p", "192.168.1.2:9"), "the last one is for peers in its own network"
            assert b.asks_only
            reaches.clear()
            with pytest.raises(LocalError, match=r"nor over libp2p: nothing accepts .*: open TCP port 9, "):
                await check_reachable(b, "127.0.0.1:9", ways)
            reaches.add("127.0.0.1:9")
            assert await check_reachable(b, "127.0.0.1:9", ways)

    run(scenario)


def test_a_peer_that_may_dial_back_only_once_more_does_not_end_a_start_behind_nat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of twelve nodes behind NAT that joined a peer within five seconds one ended: the peer was too busy to answer its
    second question."""

    async def probe(address: str, peer: PeerId) -> str | None:
        return "nothing accepts connections there"

    async def scenario() -> None:
        async with daemon(tmp_path / "a") as a, daemon(tmp_path / "b", join=a.join_addresses) as b:
            monkeypatch.setattr(join_handshake, "DIALS_PER_MINUTE", 1)
            await serve_dial_back(a, probe)
            ways = WaysIn(b, Streams(b, RUN), ("127.0.0.1", 9))
            assert not await check_reachable(b, "127.0.0.1:9", ways)

    run(scenario)


def test_a_nonsensical_dial_back_answer_does_not_keep_a_node_from_starting(tmp_path: Path) -> None:
    answers = [b"0", b"{}", b"\xff", b'{"reason": 1}', b'{"reason": null, "more": 1}', b"[" * 4096]

    async def nonsense(caller: PeerId, request: bytes) -> bytes:
        return answers[int(request)] if request.isdigit() else answers[-1]

    async def probe(address: str, peer: PeerId) -> str | None:
        return None

    async def scenario() -> None:
        async with daemon(tmp_path / "liar") as liar, daemon(tmp_path / "a") as a:
            await liar.serve(DIAL_BACK_CALL, nonsense)
            await serve_dial_back(a, probe)
            async with daemon(tmp_path / "b", join=[*liar.join_addresses, *a.join_addresses]) as b:
                for number in range(len(answers)):
                    with pytest.raises(Violation, match="answered the dial-back with"):
                        await ask_dial_back(b, liar.peer_id, str(number))
                ways = WaysIn(b, Streams(b, RUN), ("127.0.0.1", 9))
                assert await check_reachable(b, "127.0.0.1:9", ways)

    run(scenario)
