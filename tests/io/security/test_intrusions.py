"""Impersonation: what the attacker holds, what he tries with it, and which layer refuses him.

`tls`: the handshake fails, so none of our code sees the call. `handler`: TLS accepts the certificate, but our check of
the caller does not. `door`: our check refuses the call without even reading the certificate. `itself`: the call is
served, as a call of the peer that the certificate belongs to, whatever the call claims. Further tables say what a
middle hop can do with a microbatch, and who is refused by issuers, relays, the directory and the list of revoked peers.

In an open run everybody holds the root's key, so anyone can be admitted under any name, but not sign with another
peer's key.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from members import HOUR_S, Club, forged, private, public
from node_stub import NodeStub
from transport_fixture import MAX_BODY_BYTES, Events, Node, activation, echo, run

from noloco_p2p.config import ListenSettings
from noloco_p2p.core.messages import Advert, Header, MicrobatchId, Origin
from noloco_p2p.errors import Declined, Unreachable, Violation
from noloco_p2p.io.dht.adverts import dht_time
from noloco_p2p.io.dht.identity import Identity, peer_id_of
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.dht.member_records import MemberRecords
from noloco_p2p.io.dht.relay_service import MemberRelay
from noloco_p2p.io.security import certificates
from noloco_p2p.io.security.admission import Issuer
from noloco_p2p.io.security.certificates import DAY_S
from noloco_p2p.io.security.credentials import Credentials
from noloco_p2p.io.security.invitations import Invitation, UseBook
from noloco_p2p.io.security.revocations import DenyList, Revocations
from noloco_p2p.io.transport import callers
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.grpc_transport import GrpcTransport
from noloco_p2p.io.transport.peer_links import Links

OTHER = peer_id_of(bytes(range(32)))
Shown = tuple[bytes, bytes] | None
"""What an attacker presents: (private key, chain from leaf to issuer) as PEM, or None for no certificate."""


@dataclass
class Mallory:
    """A member of the run that breaks the rules, and the victim that it impersonates."""

    club: Club

    def __post_init__(self) -> None:
        self.key, self.leaf_key = Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256R1())
        self.peer_id = peer_id_of(public(self.key))
        self.chain = self.club.chain(self.peer_id)
        self.name = self.club.trust.name_of(self.peer_id, "member")
        self.victim = self.club.credentials("victim")
        self.victims_name = self.club.trust.name_of(self.victim.peer_id, "member")

    def shows(self, *sans: x509.GeneralName, chain: bytes | None = None, **changes: Any) -> Shown:
        """A leaf with these names, below his own certificate or another chain."""
        cert = forged(self.leaf_key.public_key(), changes.pop("signer", self.key), *sans, **changes)
        return private(self.leaf_key), cert + (self.chain if chain is None else chain)

    def elsewhere(self, run_id: str, root: Ed25519PrivateKey) -> Club:
        """Another run that has admitted him too."""
        return Club(self.club.home, run_id, root, is_open=self.club.is_open)


def words(value: object) -> str:
    """The id of a test case: its texts."""
    return value if isinstance(value, str) else ""


def dns(name: str) -> x509.DNSName:
    return x509.DNSName(name)


def uri(name: str) -> x509.UniformResourceIdentifier:
    return x509.UniformResourceIdentifier(name)


def mail(name: str) -> x509.RFC822Name:
    return x509.RFC822Name(name)


def address(text: str) -> x509.IPAddress:
    return x509.IPAddress(ip_address(text))


def below(name: str) -> tuple[x509.ExtensionType, bool]:
    return x509.NameConstraints([dns(name)], None), True


def signing(length: int | None) -> tuple[x509.ExtensionType, bool]:
    return x509.BasicConstraints(True, length), True


def self_made(m: Mallory, name: str) -> Shown:
    """A whole, well-formed chain below a root of his own."""
    own = Club(m.club.home, m.club.run_id)
    return m.shows(dns(name), chain=own.chain(m.peer_id))


def self_made_whole(m: Mallory, name: str) -> Shown:
    """The same, with that root in the chain."""
    own = Club(m.club.home, m.club.run_id)
    return m.shows(dns(name), chain=own.chain(m.peer_id) + own.trust.anchor)


def with_the_anchor_forged(m: Mallory, name: str) -> Shown:
    """A chain that ends with a root of the true root's name and key, signed by Mallory."""
    return m.shows(dns(name), chain=m.chain + m.club.trust.anchor)


def friend(m: Mallory, name: Callable[[str], str]) -> Shown:
    """A friend's certificate, signed by Mallory as if he were an issuer."""
    pal = Ed25519PrivateKey.generate()
    own = name(m.club.trust.name_of(peer_id_of(public(pal)), "member"))
    cert = forged(pal.public_key(), m.key, subject="friend", more=[signing(0), below(own)])
    return m.shows(dns(own), chain=cert + m.chain, signer=pal, issuer="friend")


def unadmitted(m: Mallory) -> Shown:
    """A peer that is what it says, but that no issuer has admitted."""
    key, now = m.victim.identity.key, m.club.now
    return certificates.leaf(key, m.victims_name, now - HOUR_S, now + HOUR_S)


def leaf_signs(m: Mallory) -> Shown:
    """A leaf's key signs another leaf."""
    other = ec.generate_private_key(ec.SECP256R1())
    middle = forged(other.public_key(), m.key, dns(m.name), subject="between")
    return m.shows(dns(m.name), chain=middle + m.chain, signer=other, issuer="between")


def of_another_run(m: Mallory, *, name_here: bool) -> Shown:
    """A member of another run with the same root."""
    there = m.elsewhere("cd" * 32, m.club.root)
    return m.shows(dns(m.name if name_here else there.trust.name_of(m.peer_id, "member")), chain=there.chain(m.peer_id))


def issuer_of_another_run(m: Mallory) -> Shown:
    """An issuer of another run with the same root admits him to this one."""
    there = m.elsewhere("cd" * 32, m.club.root)
    chain = certificates.member_chain(there.issuer, there.door, m.club.trust, m.peer_id, "member", m.club.now)
    return m.shows(dns(m.name), chain=chain)


def observer(m: Mallory, role: certificates.Role) -> Shown:
    """He holds an observer's certificate, and presents a name of this role."""
    chain = m.club.chain(m.peer_id, "observer")
    return m.shows(dns(m.club.trust.name_of(m.peer_id, role)), chain=chain)


def expired(m: Mallory) -> Shown:
    return m.shows(dns(m.name), chain=m.club.chain(m.peer_id, now=m.club.now - 8 * certificates.DAY_S))


def at(m: Mallory, begins_s: float, until_s: float) -> Shown:
    return m.shows(dns(m.name), begins=m.club.now + begins_s, until=m.club.now + until_s)


def nothing(m: Mallory) -> Shown:
    return None


def below_the_victim(m: Mallory) -> Shown:
    return m.shows(dns(m.victims_name), chain=m.victim.chain)


def label_below(m: Mallory) -> Shown:
    return m.shows(dns(f"{m.victims_name.partition('.')[0]}.{m.name}"))


def friend_below(m: Mallory) -> Shown:
    return friend(m, lambda own: f"{own.partition('.')[0]}.{m.name}")


def admitted(m: Mallory, *sans: x509.GeneralName) -> Shown:
    """He admits himself (in an open run), as a member without name constraints."""
    mine = forged(m.key.public_key(), m.club.door, subject="member", issuer="issuer", more=[signing(0)])
    issuer = forged(m.club.door.public_key(), m.club.root, subject="issuer", issuer="root", more=[signing(1)])
    return m.shows(*sans, chain=mine + issuer)


def many(m: Mallory) -> Shown:
    return m.shows(dns(m.name), chain=m.chain + 10 * m.club.trust.anchor)


CALLERS: list[tuple[str, str, Callable[[Mallory], Shown], str]] = [
    ("nothing", "TLS without a certificate", nothing, "tls"),
    ("nothing", "a leaf signed by himself", lambda m: m.shows(dns(m.victims_name), chain=b"", issuer="leaf"), "tls"),
    ("nothing", "a chain below a root of his own", lambda m: self_made(m, m.name), "tls"),
    ("nothing", "the same, with that root", lambda m: self_made_whole(m, m.name), "tls"),
    (
        "a victim's chain, from its advert",
        "his leaf below it",
        below_the_victim,
        "tls",
    ),
    ("membership of another run of this root", "its name", lambda m: of_another_run(m, name_here=False), "handler"),
    (
        "membership of another run of this root",
        "a name of this run",
        lambda m: of_another_run(m, name_here=True),
        "tls",
    ),
    ("the issuer of another run of this root", "a membership of this one", issuer_of_another_run, "tls"),
    ("an expired membership", "a fresh leaf below it", expired, "tls"),
    ("membership", "an expired leaf", lambda m: at(m, -2 * HOUR_S, -HOUR_S), "tls"),
    ("membership", "a leaf that is not yet valid", lambda m: at(m, HOUR_S, 2 * HOUR_S), "tls"),
    ("membership", "the victim's name", lambda m: m.shows(dns(m.victims_name)), "tls"),
    ("membership", "both names", lambda m: m.shows(dns(m.name), dns(m.victims_name)), "tls"),
    (
        "membership",
        "the victim's name as URI next to his own",
        lambda m: m.shows(dns(m.name), uri(m.victims_name)),
        "tls",
    ),
    ("membership", "the victim's name as URI alone", lambda m: m.shows(uri(m.victims_name)), "tls"),
    ("membership", "a URI with the victim's host", lambda m: m.shows(dns(m.name), uri(f"x://{m.victims_name}")), "tls"),
    ("membership", "the victim's name as e-mail address", lambda m: m.shows(mail(m.victims_name)), "tls"),
    (
        "membership",
        "an e-mail address next to his name",
        lambda m: m.shows(dns(m.name), mail(f"a@{m.victims_name}")),
        "tls",
    ),
    ("membership", "an IP address next to his name", lambda m: m.shows(dns(m.name), address("127.0.0.1")), "tls"),
    ("membership", "an IPv6 address next to his name", lambda m: m.shows(dns(m.name), address("::1")), "tls"),
    ("membership", "no name, the victim's as common name", lambda m: m.shows(subject=m.victims_name[:64]), "tls"),
    ("membership", "a name for all members", lambda m: m.shows(dns(f"*.{m.club.trust.suffix}")), "tls"),
    ("membership", "a name for all below his", lambda m: m.shows(dns(f"*.{m.name}")), "handler"),
    (
        "membership",
        "the victim's label below his name",
        lambda m: m.shows(dns(f"{m.victims_name.partition('.')[0]}.{m.name}")),
        "handler",
    ),
    ("membership", "his name twice", lambda m: m.shows(dns(m.name), dns(m.name)), "handler"),
    ("membership", "his name and one below", lambda m: m.shows(dns(m.name), dns(f"a.{m.name}")), "handler"),
    ("membership", "his name in capitals", lambda m: m.shows(dns(m.name.upper())), "handler"),
    ("membership", "a friend admitted by him", lambda m: friend(m, lambda own: own), "tls"),
    (
        "membership",
        "a friend below his name",
        lambda m: friend(m, lambda own: f"{own.partition('.')[0]}.{m.name}"),
        "tls",
    ),
    ("membership", "a leaf below a leaf", leaf_signs, "tls"),
    ("membership", "the true root with a signature of his", lambda m: with_the_anchor_forged(m, m.victims_name), "tls"),
    ("an observer's certificate", "the work of a member", lambda m: observer(m, "observer"), "handler"),
    ("an observer's certificate", "a member's name", lambda m: observer(m, "member"), "tls"),
    ("membership", "the victim's name in what the call says", lambda m: m.shows(dns(m.name)), "itself"),
]
OPEN_CALLERS: list[tuple[str, str, Callable[[Mallory], Shown], str]] = [
    ("the open root", "TLS without a certificate", nothing, "tls"),
    ("the open root", "a leaf signed by himself", lambda m: m.shows(dns(m.name), chain=b"", issuer="leaf"), "tls"),
    ("the open root", "a chain below a root of his own", lambda m: self_made(m, m.name), "tls"),
    ("the open root", "his leaf below the victim's chain", below_the_victim, "tls"),
    ("the open root", "the victim's name, admitted to it", lambda m: admitted(m, dns(m.victims_name)), "handler"),
    ("the open root", "both names", lambda m: admitted(m, dns(m.name), dns(m.victims_name)), "handler"),
    ("the open root", "the victim's name as URI", lambda m: admitted(m, dns(m.name), uri(m.victims_name)), "handler"),
    ("the open root", "the victim's name as URI alone", lambda m: admitted(m, uri(m.victims_name)), "handler"),
    ("the open root", "a name for all", lambda m: admitted(m, dns(f"*.{m.club.trust.suffix}")), "handler"),
    ("the open root", "a name of no key", lambda m: admitted(m, dns(f"{'a' * 52}.{m.club.trust.suffix}")), "handler"),
    ("the open root", "a leaf of another key below his", leaf_signs, "tls"),
    ("the open root", "an expired leaf", lambda m: at(m, -2 * HOUR_S, -HOUR_S), "tls"),
    ("the open root", "his own name, and ten more certificates", many, "door"),
    ("the root of another open run", "its name", lambda m: of_another_run(m, name_here=False), "tls"),
    ("the root of another open run", "a name of this run", lambda m: of_another_run(m, name_here=True), "tls"),
    ("the open root", "the victim's name in what the call says", lambda m: m.shows(dns(m.name)), "itself"),
]
REFUSED = {"tls": grpc.StatusCode.UNAVAILABLE, "door": grpc.StatusCode.UNAUTHENTICATED}
ALL_CALLERS = [(False, *case) for case in CALLERS] + [(True, *case) for case in OPEN_CALLERS]
SERVERS: list[tuple[str, str, Callable[[Mallory], Shown]]] = [
    ("the victim's own key", "nothing wrong", lambda m: m.victim.leaf()),
    ("nothing", "no TLS", nothing),
    ("nothing", "a chain below a root of his own", lambda m: self_made(m, m.victims_name)),
    (
        "a victim's chain, from its advert",
        "his leaf below it",
        below_the_victim,
    ),
    ("membership", "his own name", lambda m: m.shows(dns(m.name))),
    ("membership", "the victim's name", lambda m: m.shows(dns(m.victims_name))),
    ("membership", "the victim's name as URI next to his own", lambda m: m.shows(dns(m.name), uri(m.victims_name))),
    ("membership", "the victim's name as e-mail address", lambda m: m.shows(dns(m.name), mail(m.victims_name))),
    ("membership", "no name, the victim's as common name", lambda m: m.shows(subject=m.victims_name[:64])),
    ("membership", "a name for all members", lambda m: m.shows(dns(f"*.{m.club.trust.suffix}"))),
    ("membership of another run of this root", "the victim's name", lambda m: of_another_run(m, name_here=True)),
    ("an observer's certificate", "its name", lambda m: observer(m, "observer")),
    ("an expired membership", "his own name", expired),
    ("the victim's own key", "a leaf below no membership", unadmitted),
]
OPEN_SERVERS: list[tuple[str, str, Callable[[Mallory], Shown]]] = [
    ("the victim's own key", "nothing wrong", lambda m: m.victim.leaf()),
    ("the open root", "no TLS", nothing),
    ("the open root", "his own name", lambda m: m.shows(dns(m.name))),
    ("the open root", "the victim's name, to which he is admitted", lambda m: admitted(m, dns(m.victims_name))),
    ("the open root", "his leaf below the victim's chain", below_the_victim),
    ("the root of another open run", "the victim's name", lambda m: of_another_run(m, name_here=True)),
]
ALL_SERVERS = [(False, *case) for case in SERVERS] + [(True, *case) for case in OPEN_SERVERS]


def transport(links: Links) -> GrpcTransport:
    return GrpcTransport(links, ListenSettings(), Events(), MAX_BODY_BYTES)


@asynccontextmanager
async def honest(
    club: Club, node: Node, credentials: Credentials | None = None
) -> AsyncIterator[tuple[GrpcTransport, Advert]]:
    """The transport of a member that serves, and its advert."""
    credentials = credentials or club.credentials("honest")
    mine = transport(Links(credentials))
    await mine.serve(node)
    try:
        yield mine, Advert(credentials.peer_id, club.run_id, 1, (f"127.0.0.1:{mine.port}",))
    finally:
        await mine.close()


def channel(club: Club, peer: Advert, shown: Shown) -> Any:
    key, chain = shown or (None, None)
    name, anchor = club.trust.name_of(peer.peer_id, "member"), club.trust.anchor_of(peer.peer_id)
    options = (("grpc.ssl_target_name_override", name), ("grpc.use_local_subchannel_pool", 1))
    proof = grpc.ssl_channel_credentials(anchor, key, chain)
    return grpc.aio.secure_channel(peer.addresses[0], proof, options=options)


@pytest.mark.parametrize(("is_open", "holds", "tries", "made", "layer"), ALL_CALLERS, ids=words)
def test_a_caller_cannot_impersonate_another_peer(
    tmp_path: Path, is_open: bool, holds: str, tries: str, made: Callable[[Mallory], Shown], layer: str
) -> None:
    club, node = Club(tmp_path, is_open=is_open), Node(echo)
    mallory = Mallory(club)

    async def ask() -> None:
        says = ("noloco-peer", mallory.victim.peer_id), *callers.metadata()
        async with honest(club, node) as (_, peer), channel(club, peer, made(mallory)) as link:
            asking = NodeStub(link).Progress(
                pb.ProgressRequest(microbatches=[pb.MicrobatchId(peer="a", incarnation=1, counter=1)]),
                timeout=20.0,
                metadata=says,
            )
            if layer in REFUSED:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await asking
                assert caught.value.code() is REFUSED[layer]
                assert not seen
                return
            reply = await asking
            assert reply.HasField("refusal") is (layer == "handler")
            assert seen == ([] if layer == "handler" else [mallory.peer_id])

    seen: list[str] = []

    def progress(caller: str, microbatches: object) -> list[None]:
        seen.append(caller)
        return [None]

    node.progress = progress  # type: ignore[assignment,method-assign]
    run(ask())


@pytest.mark.parametrize(("is_open", "holds", "tries", "made"), ALL_SERVERS, ids=words)
def test_a_server_cannot_impersonate_another_peer(
    tmp_path: Path, is_open: bool, holds: str, tries: str, made: Callable[[Mallory], Shown]
) -> None:
    club = Club(tmp_path, is_open=is_open)
    mallory = Mallory(club)
    seen: list[object] = []

    def whom(port: int) -> Advert:
        return Advert(mallory.victim.peer_id, club.run_id, 1, (f"127.0.0.1:{port}",))

    async def listen(request: Any, context: Any) -> bytes:
        seen.append(request)
        return b""

    async def ask() -> None:
        server = grpc.aio.server()
        handlers = {"Describe": grpc.unary_unary_rpc_method_handler(listen)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("noloco.v1.Node", handlers),))
        shown = made(mallory)
        if shown is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([shown]))
        await server.start()
        caller = transport(Links(club.credentials("caller")))
        if tries == "nothing wrong":
            with pytest.raises(Violation, match="description of itself is missing"):
                await caller.describe(whom(port))
            await caller.close()
            await server.stop(None)
            assert seen
            return
        with pytest.raises(Unreachable):
            await caller.describe(whom(port))
        await caller.close()
        await server.stop(None)
        assert not seen

    run(ask())


@pytest.mark.parametrize("is_open", [False, True])
def test_calls_without_tls_are_refused(tmp_path: Path, is_open: bool) -> None:
    club, node = Club(tmp_path, is_open=is_open), Node(echo)

    async def ask() -> None:
        async with honest(club, node) as (_, peer), grpc.aio.insecure_channel(peer.addresses[0]) as link:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await NodeStub(link).Describe(pb.DescribeRequest(), timeout=20.0, metadata=callers.metadata())
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    run(ask())


def test_members_train_and_are_known_by_their_certificates(tmp_path: Path) -> None:
    club, node = Club(tmp_path), Node(echo)

    async def ask() -> None:
        mine = club.credentials("mine")
        caller = transport(Links(mine))
        async with honest(club, node) as (_, peer):
            alien = activation(run_id=club.run_id)
            with pytest.raises(Violation, match="only from the node that read it"):
                await caller.propagate(peer, alien)
            label = MicrobatchId(mine.peer_id, 1, 1), Origin(mine.peer_id, 5, 1)
            for wrong in (replace(alien.header, microbatch=label[0]), replace(alien.header, origin=label[1])):
                with pytest.raises(Violation, match="only from the node that read it"):
                    await caller.propagate(peer, replace(alien, header=wrong))
            assert not node.calls
            sent = replace(alien, header=replace(alien.header, microbatch=label[0], origin=label[1]))
            gradient = await caller.propagate(peer, sent)
            assert bytes(gradient.grad.data) == bytes(sent.hidden.data)
            assert await caller.progress(peer, [MicrobatchId("a", 1, 1)], 5.0) == [None]
            assert [who for who, _ in node.calls] == [mine.peer_id]
        await caller.close()

    run(ask())


def label(header: Header, microbatch: dict[str, Any] | None = None, **origin: Any) -> Header:
    """The header with another id or origin, under its old signature."""
    changed = header.microbatch._replace(**microbatch or {})
    return replace(header, microbatch=changed, origin=replace(header.origin, **origin))


LABELS: list[tuple[str, str, Callable[[Header], Header], str]] = [
    ("a microbatch passed on", "nothing wrong", label, ""),
    ("a microbatch passed on", "no signature", lambda h: replace(h, label=b""), "not signed"),
    ("a microbatch passed on", "another id", lambda h: label(h, {"counter": 2}), "not signed"),
    ("a microbatch passed on", "an id of another start", lambda h: label(h, {"incarnation": 2}), "not signed"),
    ("a microbatch passed on", "an evaluation's id", lambda h: label(h, {"incarnation": 0}), "not signed"),
    ("a microbatch passed on", "a later step", lambda h: label(h, step=6), "not signed"),
    ("a microbatch passed on", "another place in the step", lambda h: label(h, index=2), "not signed"),
    ("a microbatch passed on", "a later end", lambda h: replace(h, label=bytes([1]) + h.label[1:]), "not signed"),
    ("a microbatch passed on", "another origin with the same id", lambda h: label(h, peer=OTHER), "that read it"),
    ("a microbatch passed on", "another origin", lambda h: label(h, {"peer": OTHER}, peer=OTHER), "not signed"),
    ("a microbatch of yesterday", "to be counted again", label, "expired"),
]


@pytest.mark.parametrize(("holds", "tries", "made", "why"), LABELS, ids=words)
def test_only_microbatches_that_their_origin_has_signed_are_passed_on(
    tmp_path: Path, holds: str, tries: str, made: Callable[[Header], Header], why: str
) -> None:
    club, node, later = Club(tmp_path), Node(echo), [0.0]

    async def ask() -> None:
        origin = club.credentials("origin", clock=lambda: club.now + later[0])
        plain = activation(run_id=club.run_id)
        begun = MicrobatchId(origin.peer_id, 1, 1), Origin(origin.peer_id, 5, 1)
        later[0] = -86_400.0 if why == "expired" else 0.0
        signed = Links(origin).labelled(replace(plain.header, microbatch=begun[0], origin=begun[1]))
        middle = transport(Links(club.credentials("middle")))
        async with honest(club, node) as (_, peer):
            sending = middle.propagate(peer, replace(plain, header=made(replace(signed, stage=2))))
            if not why:
                assert (await sending).tokens == 7
                assert node.calls[0][1].label == signed.label, "the label is passed on unchanged"
            else:
                with pytest.raises(Violation, match=why):
                    await sending
                assert not node.calls
        await middle.close()

    run(ask())


def test_an_observer_may_only_read(tmp_path: Path) -> None:
    club, node = Club(tmp_path), Node(echo)

    async def ask() -> None:
        caller = transport(Links(club.credentials("observer", "observer")))
        async with honest(club, node) as (_, peer):
            assert (await caller.describe(peer)).step == 7.5
            with pytest.raises(Declined, match="observer"):
                await caller.propagate(peer, activation(run_id=club.run_id))
            with pytest.raises(Declined, match="observer"):
                await caller.fetch_state(peer, 5.0, ())
            assert not node.calls
        await caller.close()

    run(ask())


def test_an_open_connection_is_refused_once_the_certificate_has_expired(tmp_path: Path) -> None:
    club, node, later = Club(tmp_path), Node(echo), [0.0]

    async def ask() -> None:
        caller = transport(Links(club.credentials("mine")))
        credentials = club.credentials("honest", clock=lambda: club.now + later[0])
        async with honest(club, node, credentials) as (_, peer):
            assert (await caller.describe(peer)).step == 7.5
            later[0] = certificates.LEAF_S - HOUR_S
            assert (await caller.describe(peer)).step == 7.5
            later[0] = certificates.LEAF_S + HOUR_S
            with pytest.raises(Violation, match="expired"):
                await caller.describe(peer)
        await caller.close()

    run(ask())


def test_a_leaf_is_replaced_at_half_of_its_lifetime_without_a_restart(tmp_path: Path) -> None:
    club, node, later = Club(tmp_path), Node(echo), [0.0]

    async def ask() -> None:
        credentials, shown = club.credentials("honest", clock=lambda: club.now + later[0]), []
        async with honest(club, node, credentials) as (_, peer):
            for hours in (0, 11, 13):
                later[0] = hours * HOUR_S
                caller = transport(Links(club.credentials("mine" + str(hours))))
                assert (await caller.describe(peer)).step == 7.5
                shown.append(credentials.leaf())
                await caller.close()
        assert shown[0] is shown[1]
        assert shown[1] is not shown[2]

    run(ask())


@pytest.mark.parametrize("is_open", [False, True], ids=["members", "open"])
def test_calls_outlive_the_leaf_with_which_their_connection_was_opened(tmp_path: Path, is_open: bool) -> None:
    club, node, later = Club(tmp_path, is_open=is_open), Node(echo), [0.0]

    def clock() -> float:
        return club.now + later[0]

    async def ask() -> None:
        caller = transport(Links(club.credentials("mine", clock=clock)))
        async with honest(club, node, club.credentials("honest", clock=clock)) as (_, peer):
            for hours in range(0, 37, 6):
                later[0] = hours * HOUR_S
                assert (await caller.describe(peer)).step == 7.5
        await caller.close()

    run(ask())


MISUSED: list[tuple[str, str, Callable[[Mallory], bytes]]] = [
    ("nothing", "no certificate", lambda m: b""),
    ("nothing", "malformed text", lambda m: b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
    ("nothing", "more bytes than the limit", lambda m: m.chain + b"\n" * 2000),
    ("nothing", "a chain below a root of his own", lambda m: Club(m.club.home).chain(m.peer_id)),
    ("membership", "his certificate without its issuer's", lambda m: m.chain[: m.chain.index(b"-----END") + 26]),
    ("membership", "the certificates in reverse order", lambda m: m.club.issuer + m.chain.removesuffix(m.club.issuer)),
    ("membership", "three certificates", lambda m: m.chain + m.club.trust.anchor),
    (
        "membership of another run of this root",
        "its certificate",
        lambda m: m.elsewhere("cd" * 32, m.club.root).chain(m.peer_id),
    ),
    (
        "the issuer of another run of this root",
        "a membership of this one",
        lambda m: issuer_of_another_run(m)[1].partition(b"-----END CERTIFICATE-----\n")[2],  # type: ignore[index]
    ),
    (
        "membership",
        "a friend admitted by him",
        lambda m: certificates.member_chain(
            m.chain, m.key, m.club.trust, m.victim.peer_id, "member", m.club.now
        ).removesuffix(m.club.issuer),
    ),
    (
        "membership",
        "the name of the victim above his own key",
        lambda m: (
            forged(
                m.key.public_key(), m.key, subject="member", issuer="issuer", more=[signing(0), below(m.victims_name)]
            )
            + m.club.issuer
        ),
    ),
]


@pytest.mark.parametrize(("holds", "tries", "made"), MISUSED, ids=words)
def test_an_invalid_chain_proves_no_membership(
    tmp_path: Path, holds: str, tries: str, made: Callable[[Mallory], bytes]
) -> None:
    mallory = Mallory(Club(tmp_path))
    assert mallory.club.trust.membership(mallory.chain).peer_id == mallory.peer_id
    with pytest.raises(Violation):
        mallory.club.trust.membership(made(mallory))


# --- the other doors: issuers, relays, the directory, the list of revoked peers ---------------------------------------


class Doors:
    """An issuer, a relay, the directory and the list of revoked peers of one member, as Mallory reaches them."""

    def __init__(self, m: Mallory, ahead_s: float = 0.0) -> None:
        """`ahead_s`: how far Mallory's issuer's clock is ahead."""
        self.m, club, home = m, m.club, m.club.home
        self.revoked = Revocations(club.trust)
        identity = Identity.open(home / "issuer.key")
        certificate = certificates.issuer_certificate(club.root, club.trust, identity.peer_id, club.now)
        book = UseBook(home / "book")
        self.issuer = Issuer(club.trust, identity, certificate, book, lambda: club.now + ahead_s, self.revoked)
        self.directory = MemberRecords(club.trust, self.revoked)

    def ask(self, caller: str, **asked: str) -> bytes:
        """Request a certificate."""
        return self.issuer.answer(caller, json.dumps(asked).encode())

    def renew(self, chain: bytes) -> bytes:
        """Request a renewal of this certificate."""
        return self.ask(self.m.peer_id, certificate=chain.decode())

    def join(self, **changes: Any) -> bytes:
        """Request a certificate with an invitation that is valid except for these changes."""
        fields: dict[str, Any] = {
            "run_id": self.m.club.run_id,
            "uses": 1,
            "until": self.m.club.now + HOUR_S,
            "stage": None,
        } | changes
        root = fields.pop("root", self.m.club.root)
        return self.ask(self.m.peer_id, invitation=Invitation.signed(root, **fields).text, role="member")

    def reserve(self, chain: bytes, run_id: str | None = None) -> bytes:
        """Reserve a place at the relay."""
        relay = MemberRelay(cast(Libp2pDaemon, None), self.m.club.run_id, self.directory, lambda: 1e6)
        request = f"{run_id or self.m.club.run_id}\n".encode() + chain
        return asyncio.run(relay._reserve(self.m.peer_id, request))

    def store(self, chain: bytes, lasts_s: float = 60.0) -> None:
        """Store a record of his in the directory."""
        if not self.directory.admits(self.m.peer_id, chain.decode(), dht_time() + lasts_s):
            raise Declined("not stored")

    def revoke(self, *peers: str, number: int | None = None) -> None:
        """The root revokes peers; an hour ago unless `number` says when, so that stored records have expired."""
        self.revoked.adopt(self.m.club.revoking(int(self.m.club.now - HOUR_S) if number is None else number, *peers))

    def spread(self, data: bytes) -> None:
        """Offer a list of revoked peers."""
        if not self.revoked.adopt(data):
            raise Declined("not newer")


def after(m: Mallory, *revoked: str, **how: Any) -> Doors:
    """The doors of a member that knows these peers to be revoked."""
    doors = Doors(m, **how)
    doors.revoke(*revoked)
    return doors


def door(m: Mallory) -> str:
    return peer_id_of(public(m.club.door))


def his_list(m: Mallory, **changes: Any) -> bytes:
    """A list that spares him, signed by himself unless the changes name another key."""
    made: dict[str, Any] = {
        "root": m.key,
        "run_id": m.club.run_id,
        "number": int(m.club.now),
        "peers": [OTHER],
    } | changes
    return DenyList.make(**made).signed


def used_up(m: Mallory) -> bytes:
    """An invitation for one peer, which another one has used."""
    doors = Doors(m)
    invitation = Invitation.signed(m.club.root, m.club.run_id, uses=1, until=m.club.now + HOUR_S, stage=None)
    doors.ask(OTHER, invitation=invitation.text, role="member")
    return doors.ask(m.peer_id, invitation=invitation.text, role="member")


def takes(m: Mallory, chain: bytes) -> None:
    """The victim's node adopts a certificate that an issuer gives it, if it is better than its own."""
    if not m.victim.is_renewed_by(chain):
        raise Declined("not a renewal")
    m.victim.adopt(chain)


def observing(m: Mallory) -> bytes:
    return m.club.chain(m.peer_id, "observer")


def ended(m: Mallory) -> bytes:
    return m.club.chain(m.peer_id, now=m.club.now - 8 * DAY_S)


DOORS: list[tuple[str, str, Callable[[Mallory], object], str]] = [
    # the list of revoked peers
    ("membership", "a place in the directory", lambda m: Doors(m).store(m.chain), ""),
    ("a revoked membership", "a place in the directory", lambda m: after(m, m.peer_id).store(m.chain), "not stored"),
    ("a revoked membership", "a relay", lambda m: after(m, m.peer_id).reserve(m.chain), "only members"),
    ("a revoked membership", "to renew it", lambda m: after(m, m.peer_id).renew(m.chain), "was revoked"),
    ("a revoked membership", "a new invitation", lambda m: after(m, m.peer_id).join(), "was revoked"),
    ("membership by a revoked issuer", "the directory", lambda m: after(m, door(m)).store(m.chain), "not stored"),
    ("membership by a revoked issuer", "a relay", lambda m: after(m, door(m)).reserve(m.chain), "only members"),
    ("membership by a revoked issuer", "to renew it", lambda m: after(m, door(m)).renew(m.chain), "was revoked"),
    ("a revoked membership", "a list of his own", lambda m: after(m, m.peer_id).spread(his_list(m)), "not signed"),
    (
        "an issuer's key",
        "a list that revokes another issuer",
        lambda m: Doors(m).spread(his_list(m, root=m.club.door)),
        "not signed",
    ),
    (
        "a revoked membership",
        "the root's list of another run",
        lambda m: after(m, m.peer_id).spread(his_list(m, root=m.club.root, run_id="cd" * 32)),
        "not signed",
    ),
    (
        "a revoked membership",
        "the root's list from before",
        lambda m: after(m, m.peer_id).spread(m.club.revoking(5)),
        "not newer",
    ),
    # a relay
    ("membership", "a relay", lambda m: Doors(m).reserve(m.chain), ""),
    ("nothing", "a relay", lambda m: Doors(m).reserve(b""), "only members"),
    ("a victim's chain, from its advert", "a relay", lambda m: Doors(m).reserve(m.victim.chain), "only members"),
    ("an observer's certificate", "a relay", lambda m: Doors(m).reserve(observing(m)), "only members"),
    ("an expired membership", "a relay", lambda m: Doors(m).reserve(ended(m)), "only members"),
    (
        "membership of another run of this root",
        "a relay",
        lambda m: Doors(m).reserve(m.elsewhere("cd" * 32, m.club.root).chain(m.peer_id)),
        "only members",
    ),
    ("membership", "a relay of another run", lambda m: Doors(m).reserve(m.chain, "cd" * 32), "another run"),
    # a renewal, or a first certificate
    ("membership", "to renew it", lambda m: Doors(m).renew(m.chain), ""),
    ("an expired membership", "to renew it", lambda m: Doors(m).renew(ended(m)), "has expired"),
    ("a victim's chain, from its advert", "to renew it", lambda m: Doors(m).renew(m.victim.chain), "not the caller's"),
    ("an observer's certificate", "to renew it as a member's", lambda m: Doors(m).renew(observing(m)), "not the call"),
    (
        "membership of another run of this root",
        "to renew it in this one",
        lambda m: Doors(m).renew(m.elsewhere("cd" * 32, m.club.root).chain(m.peer_id)),
        "not the name of a peer of this run",
    ),
    ("an invitation", "to join", lambda m: Doors(m).join(), ""),
    ("an expired invitation", "to join", lambda m: Doors(m).join(until=m.club.now - 1), "has expired"),
    ("an invitation to another run", "to join", lambda m: Doors(m).join(run_id="cd" * 32), "another run"),
    ("membership", "an invitation of his own", lambda m: Doors(m).join(root=m.key), "not made by this run's root"),
    ("an invitation that is used up", "to join", used_up, "used up"),
    # a clock
    (
        "an issuer's clock ahead",
        "to renew what is over by then",
        lambda m: Doors(m, 8 * DAY_S).renew(m.chain),
        "expired",
    ),
    ("an expired membership", "a record that outlives it", lambda m: Doors(m).store(m.chain, 8 * DAY_S), "not stored"),
    (
        "an issuer's clock ahead",
        "that a victim adopts a certificate that begins tomorrow",
        lambda m: takes(m, m.club.chain(m.victim.peer_id, now=m.club.now + DAY_S)),
        "not a renewal",
    ),
    (
        "an issuer's clock behind",
        "that a victim adopts a certificate that ends earlier",
        lambda m: takes(m, m.club.chain(m.victim.peer_id, now=m.club.now - DAY_S)),
        "not a renewal",
    ),
]


@pytest.mark.parametrize(("holds", "tries", "act", "why"), DOORS, ids=words)
def test_who_does_not_belong_to_the_run_is_refused_at_every_door(
    tmp_path: Path, holds: str, tries: str, act: Callable[[Mallory], object], why: str
) -> None:
    mallory = Mallory(Club(tmp_path))
    if not why:
        act(mallory)
        return
    with pytest.raises((Declined, Violation), match=why):
        act(mallory)


def test_an_observers_chain_states_its_role(tmp_path: Path) -> None:
    club = Club(tmp_path)
    observer_id = peer_id_of(bytes(range(32)))
    found = club.trust.membership(club.chain(observer_id, "observer"))
    assert (found.peer_id, found.role, found.issuer) == (observer_id, "observer", peer_id_of(public(club.door)))
    assert found.until - club.now == pytest.approx(certificates.LIFETIME_S["observer"], abs=1)


def test_credentials_do_not_adopt_another_peers_chain(tmp_path: Path) -> None:
    club = Club(tmp_path)
    mine, other = club.credentials("mine"), club.credentials("other")
    with pytest.raises(Violation, match="not to this node"):
        mine.adopt(other.chain)
    assert mine.membership.peer_id == mine.peer_id


def test_the_anchor_holds_the_roots_key(tmp_path: Path) -> None:
    club = Club(tmp_path)
    assert x509.load_pem_x509_certificate(club.trust.anchor).public_key() == club.root.public_key()
    assert x509.load_pem_x509_certificate(club.issuer).public_bytes(Encoding.PEM) == club.issuer
