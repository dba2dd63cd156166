"""Revoked peers: the list that names them, how it spreads, and what it ends."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from daemons import daemon, until
from daemons import run as run_daemons
from machine import at_most
from members import HOUR_S, RUN, Club, public
from node_stub import NodeStub
from test_intrusions import transport
from transport_fixture import SOON_S, Node, activation, all_have_ended, hang, logged, run, soon, tensor

from noloco_p2p.config import RunManifest, SecuritySettings
from noloco_p2p.core.messages import Advert, MicrobatchId, Origin, PeerId
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.errors import ConfigError, Declined, LocalError, PeerError, Unreachable, Violation
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.dht.hivemind_directory import HivemindDirectory
from noloco_p2p.io.dht.identity import Identity, peer_id_of
from noloco_p2p.io.dht.join_handshake import serve_manifest
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.dht.member_records import MemberRecords
from noloco_p2p.io.security import certificates, revocations
from noloco_p2p.io.security.admission import Issuer
from noloco_p2p.io.security.credentials import Credentials
from noloco_p2p.io.security.invitations import Invitation, UseBook
from noloco_p2p.io.security.revocations import DenyList, Revocations
from noloco_p2p.io.transport import callers, connection_limit, slow_transfers
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.connection_limit import ConnectionLimit
from noloco_p2p.io.transport.grpc_transport import GrpcTransport
from noloco_p2p.io.transport.peer_links import Links
from noloco_p2p.launch import bootstrap, run_key

ANN, BOB, EVE = (peer_id_of(bytes([i]) * 32) for i in (1, 2, 3))


def test_a_list_survives_serialisation_and_only_the_root_can_make_one(tmp_path: Path) -> None:
    club = Club(tmp_path)
    data = club.revoking(7, ANN, BOB, ANN)
    found = DenyList.read(data, club.trust)
    assert (found.number, found.peers, found.signed) == (7, (ANN, BOB), data)
    other = Ed25519PrivateKey.generate()

    def signed(content: bytes) -> bytes:
        return content + club.root.sign(b"noloco revocations 1\x00" + content)

    assert signed(data[:-64]) == data
    wrong = {
        "another root": DenyList.make(other, RUN, 7, [ANN]).signed,
        "an issuer": DenyList.make(club.door, RUN, 7, [ANN]).signed,
        "another run": DenyList.make(club.root, "cd" * 32, 7, [ANN]).signed,
        "another number": data[:23] + b"\x08" + data[24:],
        "one peer less": data[:24] + data[56:],
        "half a peer": data[:40] + data[-64:],
        "half a peer, of the root": signed(data[:40]),
        "cut off": data[:50],
        "nothing": b"",
    }
    for what, one in wrong.items():
        with pytest.raises(Violation, match="not signed by this run's root"):
            pytest.fail(f"{what}: {DenyList.read(one, club.trust)}")
    with pytest.raises(ConfigError, match="nobody is not a peer id"):
        DenyList.make(club.root, RUN, 7, ["nobody"])


def test_a_full_list_takes_no_more_and_forgets_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    club = Club(tmp_path)
    many = [peer_id_of(i.to_bytes(32)) for i in range(revocations.MAX_REVOKED + 1)]
    found = DenyList.read(club.revoking(1, *many[1:], many[1]), club.trust)
    assert list(found.peers) == many[1:]
    assert len(found.signed) * 8 < 1e6 * revocations.CALL_TIMEOUT_S / 2, "it comes over a line of 1 Mbit/s"
    with pytest.raises(ConfigError, match="a list holds at most 8,192 peers: revoke the node that admitted these"):
        club.revoking(1, *many)
    monkeypatch.setattr(revocations, "MAX_REVOKED", 2)
    assert DenyList.read(found.signed, club.trust) == found, "the root decides how long a list is"


def test_a_newer_list_that_lacks_peers_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    club = Club(tmp_path)
    mine = Revocations(club.trust)
    for number, peers in ((1, [ANN]), (2, [ANN, BOB]), (3, [ANN, EVE])):
        mine.adopt(club.revoking(number, *peers))
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"list 3 lacks revoked peers, such as {BOB}: revoke them again"]


def test_an_older_list_never_replaces_a_newer_one_even_after_a_restart(tmp_path: Path) -> None:
    club, path, told = Club(tmp_path), tmp_path / "revoked", [0]
    mine = Revocations(club.trust, path)
    assert (mine.held.number, mine.names(ANN, BOB, EVE)) == (0, False)
    mine.listen(lambda: told.append(mine.held.number))
    assert mine.adopt(club.revoking(5, ANN))
    assert mine.names(BOB, ANN)
    for older in (4, 5):
        assert not mine.adopt(club.revoking(older, ANN))
    again = Revocations(club.trust, path)
    assert (again.held.number, again.names(ANN)) == (5, True)
    assert not again.adopt(club.revoking(4, BOB))
    assert mine.adopt(club.revoking(6, BOB))
    again.look()
    assert (again.names(ANN), again.names(BOB)) == (False, True)
    assert told == [0, 5, 6]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(LocalError, match="remove the file"):
        Revocations(club.trust, path)
    path.unlink()
    path.mkdir()
    with pytest.raises(LocalError, match="cannot be read: Is a directory"):
        Revocations(club.trust, path)


def test_a_list_from_a_peer_does_not_replace_a_newer_one_that_has_just_been_written(tmp_path: Path) -> None:
    club, path = Club(tmp_path), tmp_path / "revoked"
    revoked = Revocations(club.trust, path)
    newer = club.revoking(2, ANN, BOB)
    path.write_bytes(newer)  # as `noloco revoke` does
    assert revoked.adopt(club.revoking(1, ANN))
    assert revoked.held.signed == path.read_bytes() == newer
    assert revoked.names(BOB)


def test_of_two_lists_with_one_number_every_node_ends_up_with_the_same(tmp_path: Path) -> None:
    club = Club(tmp_path)
    both = [club.revoking(5, ANN), club.revoking(5, BOB)]
    held = []
    for order in (both, both[::-1]):
        one = Revocations(club.trust)
        for data in order:
            one.adopt(data)
        held.append(one.held)
    assert held[0] == held[1]


def test_a_list_that_cannot_be_written_applies_and_is_written_later(tmp_path: Path) -> None:
    club, path, told = Club(tmp_path), tmp_path / "gone" / "revoked", list[int]()
    mine = Revocations(club.trust, path)
    mine.listen(lambda: told.append(mine.held.number))
    with pytest.raises(LocalError, match="cannot be written"):
        mine.adopt(club.revoking(5, ANN))
    assert mine.names(ANN)
    with pytest.raises(LocalError, match="cannot be written"):
        mine.look()
    path.parent.mkdir()
    mine.look()
    assert Revocations(club.trust, path).held == mine.held
    written = path.stat().st_ino
    mine.look()
    assert path.stat().st_ino == written, "it is written once"
    assert told == [5]


@asynccontextmanager
async def two(club: Club, node: Node) -> AsyncIterator[tuple[Credentials, Credentials, GrpcTransport, Advert]]:
    """A serving and a calling member: the credentials of both, the caller's transport, the server's advert."""
    server, caller = club.credentials("server"), club.credentials("caller")
    serving, calling = transport(Links(server)), transport(Links(caller))
    await serving.serve(node)
    try:
        yield server, caller, calling, Advert(server.peer_id, club.run_id, 1, (f"127.0.0.1:{serving.port}",))
    finally:
        await calling.close()
        await serving.close()


@pytest.mark.parametrize(
    ("at", "who"),
    [(at, who) for at in ("the server", "the caller") for who in ("the peer", "its issuer")],
)
def test_a_call_in_progress_ends_when_the_other_end_is_revoked(tmp_path: Path, at: str, who: str) -> None:
    club, node = Club(tmp_path), Node(hang)

    async def ask() -> None:
        async with two(club, node) as (server, caller, calling, peer):
            sent = activation(run_id=club.run_id)
            begun = replace(
                sent.header, microbatch=MicrobatchId(caller.peer_id, 1, 1), origin=Origin(caller.peer_id, 5, 1)
            )
            signed = Links(caller).labelled(begun)
            call = asyncio.create_task(calling.propagate(peer, replace(sent, header=signed)))
            await soon(node.entered.wait())
            believer, other = (server, caller) if at == "the server" else (caller, server)
            named = other.peer_id if who == "the peer" else peer_id_of(public(club.door))
            caller.revoked.admitted_by = {server.peer_id: peer_id_of(public(club.door))}  # as its record says
            assert believer.revoked.adopt(club.revoking(1, named))
            with pytest.raises(Unreachable, match="revoked"):
                await soon(call)
            await soon(node.ended.wait())
            assert node.ends == ["CancelledError"]
            with pytest.raises(PeerError, match="revoked"):
                await soon(calling.describe(peer))
            assert believer.revoked.adopt(club.revoking(2, EVE))
            assert (await soon(calling.describe(peer))).step == 7.5, "a peer that is no longer on the list is served"

    run(ask())


@pytest.mark.parametrize("method", ["Propagate", "FetchSnapshot", "FetchState"])
def test_a_call_of_a_revoked_caller_is_refused_without_a_logged_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    club = Club(tmp_path)
    requests = {"FetchSnapshot": pb.SnapshotRequest(), "FetchState": pb.StateRequest()}

    async def ask() -> None:
        async with (
            two(club, Node(hang)) as (server, caller, _, peer),
            Links(caller).channel(peer.addresses[0], peer.peer_id, ()) as channel,
        ):
            stub, said = NodeStub(channel), {"timeout": 20.0, "metadata": callers.metadata()}
            assert (await soon(stub.Describe(pb.DescribeRequest(), **said))).description.stage == 1
            assert server.revoked.adopt(club.revoking(1, caller.peer_id))
            begin = getattr(stub, method)
            call = begin(requests[method], **said) if method in requests else begin(**said)
            with pytest.raises(grpc.aio.AioRpcError, match="was revoked"):
                await soon(call.read())

    run(ask())
    assert not logged(caplog)


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_revoked_peer_that_does_not_read_loses_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_given_up: bool
) -> None:
    """gRPC cannot end its call, and would keep the connection and all that came on it."""
    monkeypatch.setattr(connection_limit, "LOOK_S", 0.0)
    monkeypatch.setattr(callers, "LET_GO_S", 0.1)
    if is_given_up:
        monkeypatch.setattr(slow_transfers, "RESERVE_S", min(at_most(1.0), SOON_S / 2))
    club, asked = Club(tmp_path), asyncio.Event()

    async def freeze(request: SnapshotRequest) -> Snapshot:
        asked.set()
        return Snapshot("B", 4, 40, (tensor("w", "float32", (8,)),))

    async def ask() -> None:
        blind = ("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0)
        server, caller = club.credentials("server"), club.credentials("caller")
        serving = transport(Links(server))
        await serving.serve(Node(hang, freeze))
        async with Links(caller).channel(f"127.0.0.1:{serving.port}", server.peer_id, blind) as channel:
            call = channel.stream_stream("/noloco.v1.Node/FetchSnapshot")(timeout=60.0, metadata=callers.metadata())
            await call.write(pb.SnapshotRequest(stage=1, round=4).SerializeToString())
            await soon(asked.wait())
            while is_given_up and not serving.unread:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert server.revoked.adopt(club.revoking(1, caller.peer_id))
            watching = asyncio.create_task(ConnectionLimit(serving.port, serving.unread).watch())
            assert await soon(call.code()) is grpc.StatusCode.UNAVAILABLE
            await all_have_ended(serving)
            watching.cancel()
        await serving.close()

    run(ask())
    assert not logged(caplog)


def test_a_revocation_does_not_affect_other_peers(tmp_path: Path) -> None:
    club, node = Club(tmp_path), Node(hang)

    async def ask() -> None:
        async with two(club, node) as (server, caller, calling, peer):
            call = asyncio.create_task(calling.progress(peer, [], 20.0))
            assert server.revoked.adopt(club.revoking(1, ANN))
            assert caller.revoked.adopt(club.revoking(1, ANN))
            assert await soon(call) == []

    run(ask())


def test_no_issuer_admits_or_renews_a_revoked_peer(tmp_path: Path) -> None:
    club = Club(tmp_path)
    identity = Identity.open(tmp_path / "issuer.key")
    own = certificates.issuer_certificate(club.root, club.trust, identity.peer_id, club.now)
    revoked = Revocations(club.trust)
    mine = Issuer(club.trust, identity, own, UseBook(tmp_path / "book"), lambda: club.now, revoked)
    token = Invitation.signed(club.root, RUN, uses=9, until=club.now + HOUR_S, stage=None).text

    def asks(peer: PeerId, **what: str) -> bytes:
        return mine.answer(peer, json.dumps(what).encode())

    held = {peer: asks(peer, invitation=token).decode() for peer in (ANN, BOB)}
    elsewhere = club.chain(EVE).decode()
    assert revoked.adopt(club.revoking(1, ANN, peer_id_of(public(club.door))))
    for wrong in ({"invitation": token}, {"certificate": held[ANN]}, {"invitation": token, "role": "observer"}):
        with pytest.raises(Declined, match="was revoked"):
            asks(ANN, **wrong)
    with pytest.raises(Declined, match="the node that admitted this peer was revoked"):
        asks(EVE, certificate=elsewhere)
    assert asks(BOB, certificate=held[BOB])
    assert asks(EVE, invitation=token)


@dataclass
class Member:
    """The parts of a node that deal with lists of revoked peers, over libp2p."""

    libp2p: Libp2pDaemon
    records: MemberRecords
    directory: HivemindDirectory
    home: Path
    run_id: str

    @property
    def me(self) -> PeerId:
        return self.libp2p.peer_id

    def keep(self) -> asyncio.Task[None]:
        held = self.records
        return asyncio.create_task(revocations.keep(self.libp2p, held.revoked, lambda: held.ahead, lambda: [self.me]))

    async def look(self) -> dict[PeerId, Advert]:
        """Announce this node, and read the adverts of all."""
        await self.directory.announce(
            Advert(self.me, self.run_id, 0, ("127.0.0.1:5000",), state="training", step=3.5), 30.0
        )
        return {one.peer_id: one for one in await self.directory.peers()}


@asynccontextmanager
async def member(club: Club, home: Path, *join: str) -> AsyncIterator[Member]:
    home.mkdir()  # noqa: ASYNC240  a test
    async with daemon(home, join=list(join)) as libp2p:
        chain = club.chain(libp2p.peer_id)
        records = MemberRecords(club.trust, Revocations(club.trust, home / "revoked"), lambda: chain)
        await revocations.serve(libp2p, records.revoked)
        directory = await HivemindDirectory.open(
            libp2p, run_id=club.run_id, stages=1, known_path=home / "known", members=records
        )
        try:
            yield Member(libp2p, records, directory, home, club.run_id)
        finally:
            await directory.close()


@pytest.mark.parametrize("what", ["disk is full", "daemon has died"])
def test_a_node_keeps_looking_for_new_lists_while_its(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(revocations, "LOOK_S", 0.0)

    async def test() -> None:
        club, looks = Club(tmp_path), asyncio.Semaphore(0)
        async with daemon(tmp_path) as a, daemon(tmp_path / "b", join=a.join_addresses) as b:
            theirs = Revocations(club.trust)
            theirs.adopt(club.revoking(1, ANN))
            await revocations.serve(a, theirs)
            mine = Revocations(club.trust, tmp_path / "gone" / "revoked" if what == "disk is full" else None)
            if what == "daemon has died":
                os.kill(b.p2p._child.pid, signal.SIGKILL)
                await asyncio.wait([b.failed])

            def ahead() -> Sequence[JoinAddress]:
                looks.release()
                return b.joined

            keeping = asyncio.create_task(revocations.keep(b, mine, ahead, lambda: [b.peer_id]))
            both: list[asyncio.Future[Any]] = [keeping, asyncio.gather(*(looks.acquire() for _ in range(3)))]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            assert not keeping.done(), keeping.exception()
            assert mine.names(ANN) == (what == "disk is full")
            keeping.cancel()

    run_daemons(test)


def test_a_damaged_list_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log had a line about it every five seconds, for as long as the node ran."""
    mine, looks = Revocations(Club(tmp_path).trust, tmp_path / "revoked"), asyncio.Queue[None]()
    monkeypatch.setattr(revocations, "LOOK_S", 0.0)

    def ahead() -> Sequence[JoinAddress]:
        looks.put_nowait(None)
        return ()

    async def test() -> None:
        (tmp_path / "revoked").write_bytes(b"damaged")
        keeping = asyncio.create_task(revocations.keep(cast(Libp2pDaemon, None), mine, ahead, lambda: [ANN]))
        for _ in range(5):
            await looks.get()
        keeping.cancel()

    asyncio.run(test())
    why = "the list of revoked peers was not signed by this run's root"
    assert [record.getMessage() for record in caplog.records] == [f"revocations: {why}"]


def test_an_observer_learns_of_a_list_that_is_made_after_it_has_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`noloco top` showed a revoked peer that went on announcing itself as one that trains, until it was restarted."""
    monkeypatch.setattr(revocations, "LOOK_S", 0.05)

    async def test() -> None:
        root = Ed25519PrivateKey.generate()
        manifest = RunManifest(stages=1, security=SecuritySettings(root_key=run_key.public_half(root)))
        club = Club(tmp_path, manifest.run_id, root)
        async with member(club, tmp_path / "a") as a, member(club, tmp_path / "b", *a.libp2p.join_addresses) as b:
            await serve_manifest(a.libp2p, manifest.canonical_json())
            async with bootstrap.observing(a.libp2p.join_addresses) as observer:

                async def seen(state: str) -> bool:
                    await a.look()
                    await b.look()
                    return {one.peer_id: one.state for one in await observer.directory.peers()}.get(b.me) == state

                await until(lambda: seen("training"))
                a.records.revoked.adopt(club.revoking(int(club.now), b.me))
                await until(lambda: seen("left"))

    run_daemons(test)


def test_a_node_that_claims_a_newer_list_and_hangs_delays_nobody(tmp_path: Path) -> None:
    async def test() -> None:
        club, adopted = Club(tmp_path), asyncio.Event()
        async with daemon(tmp_path) as a, daemon(tmp_path / "b", join=a.join_addresses) as b:
            theirs, mine = Revocations(club.trust), Revocations(club.trust)
            theirs.adopt(club.revoking(1, ANN))
            await revocations.serve(a, theirs)
            mine.listen(adopted.set)
            with socket.create_server(("127.0.0.1", 0)) as silent:
                liar = JoinAddress("127.0.0.1", silent.getsockname()[1], BOB)
                asking = asyncio.create_task(revocations.ask(b, mine, [liar, *b.joined]))
                adopting = asyncio.create_task(adopted.wait())
                await asyncio.wait([asking, adopting], return_when=asyncio.FIRST_COMPLETED)
                assert mine.names(ANN)
                assert not asking.done(), "the liar was waited for"
                await asking

    run_daemons(test)


def test_peers_that_claim_a_newer_list_in_vain_are_asked_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocations, "LOOK_S", 0.0)
    ahead = [JoinAddress("127.0.0.1", 1, peer_id_of(bytes([9, i]) * 16)) for i in range(5 * revocations.ASKED)]
    asked = list[JoinAddress]()

    async def in_vain(libp2p: Libp2pDaemon, held: Revocations, others: Sequence[JoinAddress]) -> None:
        assert len(others) == revocations.ASKED, "at once"
        asked.extend(others)
        if len(asked) >= len(ahead):
            raise EOFError("enough")

    monkeypatch.setattr(revocations, "ask", in_vain)
    with pytest.raises(EOFError, match="enough"):
        asyncio.run(revocations.keep(cast(Libp2pDaemon, None), Revocations(Club(tmp_path).trust), lambda: ahead, list))
    assert sorted(asked, key=str) == sorted(ahead, key=str), "each of them once"


@pytest.mark.parametrize(
    ("revoked", "advice"),
    [(0, "^this node was revoked: .* another --dir"), (1, "that admitted this one .* new invitation$")],
)
def test_an_expelled_node_is_told_what_would_help(revoked: int, advice: str, tmp_path: Path) -> None:
    """A node that was itself on the list was told to ask for another invitation, with which it ended the same way."""
    club = Club(tmp_path)
    mine = [peer_id_of(bytes([number] * 32)) for number in range(2)]
    held = Revocations(club.trust)
    held.adopt(club.revoking(1, mine[revoked]))
    with pytest.raises(LocalError, match=advice):
        asyncio.run(revocations.keep(cast(Libp2pDaemon, None), held, list, lambda: mine))


def test_a_list_spreads_by_adverts_and_reaches_newcomers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocations, "LOOK_S", 0.1)

    async def test() -> None:
        club = Club(tmp_path)
        async with member(club, tmp_path / "a") as a:
            address = a.libp2p.join_addresses[0]
            async with member(club, tmp_path / "b", address) as b, member(club, tmp_path / "c", address) as c:
                nodes = (a, b, c)
                keeping = [node.keep() for node in nodes]
                while min([len(await node.look()) for node in nodes]) < 3:  # noqa: ASYNC110  other processes
                    await asyncio.sleep(0.1)
                # As `noloco revoke` does.
                (a.home / "revoked").write_bytes(club.revoking(1, c.me))
                while not all(node.records.revoked.names(c.me) for node in nodes):
                    for node in (a, b):
                        await node.look()
                    await c.directory.peers()
                    await asyncio.sleep(0.1)
                with pytest.raises(Unreachable, match="no peer stored it"):
                    await c.look()
                seen = await b.look()
                assert (seen[c.me].state, seen[c.me].step) == ("left", 0.0)
                assert seen[a.me].state == "training"
                done, _ = await asyncio.wait(keeping, return_when=asyncio.FIRST_COMPLETED)
                with pytest.raises(LocalError, match=r"^this node was revoked: .* needs another --dir"):
                    done.pop().result()
                assert keeping[2].done()
                late = Revocations(club.trust)
                await revocations.ask(b.libp2p, late, b.libp2p.joined)
                assert late.names(c.me)
                for task in keeping:
                    task.cancel()

    run_daemons(test)
