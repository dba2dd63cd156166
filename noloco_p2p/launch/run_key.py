"""The key of a members-only run, and its uses: admit this machine's node, invite others, revoke members, observe."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import ConfigError, LocalError, Violation
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.dht.adverts import dht_time
from noloco_p2p.io.dht.hivemind_directory import HivemindDirectory
from noloco_p2p.io.dht.identity import Identity
from noloco_p2p.io.dht.join_handshake import PROBE_TIMEOUT_S
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.dht.member_records import MemberRecords
from noloco_p2p.io.durable_files import make_folders
from noloco_p2p.io.security import admission, certificates, revocations
from noloco_p2p.io.security.admission import Issuer
from noloco_p2p.io.security.certificates import RunTrust
from noloco_p2p.io.security.credentials import Credentials
from noloco_p2p.io.security.invitations import MOST_USES, Invitation, UseBook
from noloco_p2p.io.security.revocations import DenyList, Revocations
from noloco_p2p.io.transport.peer_links import Links, open_links
from noloco_p2p.io.transport.probe import probe
from noloco_p2p.launch import homes, node_probe, run_files
from noloco_p2p.launch.swarm_plan import ROOT_KEY

KEY, CERTIFICATE, ISSUER, BOOK, REVOKED = ROOT_KEY, "certificate.pem", "issuer.pem", "invitations.json", "revoked"
"""The root's key, beside the directories of nodes; in that of a node its certificates, who has used invitations, and
who is revoked."""
PRINTED_USES, PRINTED_S = 100, 7 * 86_400.0
"""Of the invitation in the address that a node with the run's key prints."""


def make(path: Path) -> str:
    """Write a new root key, mode 0600; its public half, in hexadecimal. Raises ConfigError: the file is there."""
    key = Ed25519PrivateKey.generate()
    if path.exists():
        raise ConfigError(f"{path} is there already: name another file, or use that key")
    try:
        make_folders(path.parent)
    except OSError as error:
        raise LocalError(f"{path.parent} cannot be made: {error.strerror}") from error
    run_files.write_whole(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    return public_half(key)


def read(path: Path) -> Ed25519PrivateKey:
    """Raises ConfigError: it is no root key, or others may read it."""
    try:
        key = load_pem_private_key(path.read_bytes(), None)
        readable = path.stat().st_mode & 0o077
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not what noloco key new writes"
        raise ConfigError(f"the run's key {path} cannot be read: {reason}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is no Ed25519 key: make one with noloco key new")
    if readable:
        raise ConfigError(f"{path} is readable by others: run chmod 600 on it")
    return key


def public_half(key: Ed25519PrivateKey) -> str:
    """For `security.root_key`."""
    return key.public_key().public_bytes_raw().hex()


def trust_in(manifest: RunManifest) -> RunTrust | None:
    """None: the run is open."""
    root = manifest.security.root_key
    return None if root is None else RunTrust(manifest.run_id, bytes.fromhex(root))


def invite(node_dir: Path, key: Path | None, *, uses: int, seconds: float, stage: int | None) -> str:
    """A join address of the node with an invitation to its run. Raises ConfigError, one line that says what to do."""
    node_dir, manifest = _members_run(node_dir)
    found = node_probe.read_endpoints(node_dir)
    if found is None:
        raise ConfigError(f"no node has run in {node_dir}: --dir is the directory of the node that others will join")
    if not (node_dir / ISSUER).exists():
        raise ConfigError(f"the node of {node_dir} admits nobody: start it with --key, or name one that was")
    if stage is not None and stage >= manifest.stages:
        raise ConfigError(f"stage {stage}: the run has stages 0 to {manifest.stages - 1}")
    if not 1 <= uses <= MOST_USES:
        raise ConfigError(f"--uses must be between 1 and {MOST_USES}, not {uses}")
    until = dht_time() + seconds
    made = Invitation.signed(_root(node_dir, key, manifest), manifest.run_id, uses=uses, until=until, stage=stage)
    return f"{found.join[0]}/invite/{made.text}"


def revoke(node_dir: Path, key: Path | None, peers: Sequence[PeerId]) -> DenyList:
    """Add peers to the list in a node's directory, which it gives to all others. Raises ConfigError, LocalError."""
    node_dir, manifest = _members_run(node_dir)
    trust = trust_in(manifest)
    assert trust is not None
    revoked = Revocations(trust, node_dir / REVOKED)
    before = revoked.held
    number = max(int(dht_time()), before.number + 1)
    made = DenyList.make(_root(node_dir, key, manifest), manifest.run_id, number, [*before.peers, *peers])
    revoked.adopt(made.signed)
    return made


def _members_run(directory: Path) -> tuple[Path, RunManifest]:
    """A node's directory, of a swarm's that of its first node, and the manifest of its members-only run.

    Raises ConfigError: there is none.
    """
    is_swarm = homes.kind_of(directory) is homes.Home.SWARM
    node_dir = next(node_probe.node_dirs(directory), directory) if is_swarm else directory
    manifest = run_files.stored_manifest(node_dir)
    if manifest is None:
        raise ConfigError(f"no node has run in {node_dir}: --dir is the directory of a node of the run")
    if manifest.security.root_key is None:
        raise ConfigError(f"the run of {node_dir} is open: anybody can join it by its join address")
    return node_dir, manifest


def _root(node_dir: Path, key: Path | None, manifest: RunManifest) -> Ed25519PrivateKey:
    """The run's key, from the file that was named, or beside or above the node's directory. Raises ConfigError."""
    places = [node_dir / KEY, node_dir.parent / KEY, node_probe.HOME / KEY]
    place = key or next(filter(Path.exists, places), None)
    if place is None:
        raise ConfigError(f"the run's key is none of {', '.join(map(str, places))}: name it with --key")
    root = read(place)
    if public_half(root) != manifest.security.root_key:
        raise ConfigError("the key is not that of this run: name the file given to --key when the run was started")
    return root


def with_invited_stage(local: NodeConfig, libp2p: Libp2pDaemon) -> NodeConfig:
    """The settings of a newcomer, which holds the stage that its invitation names unless it was told another one."""
    stages = (Invitation.parse(address.invitation).stage for address in libp2p.joined if address.invitation)
    return local if local.stage is not None else local.model_copy(update={"stage": next(stages, None)})


@dataclass(frozen=True, slots=True)
class Standing:
    """What a node or an observer is in its run."""

    links: Links
    records: MemberRecords | None = None
    """None: the run is open. The same holds for the fields below."""
    credentials: Credentials | None = None
    issuer: Issuer | None = None
    invitation: str = ""
    """What makes a join address enough for newcomers; empty where none is needed, or the run's key is not here."""

    async def probe(self, address: str, peer: PeerId) -> str | None:
        """See `join_handshake.ReachabilityProbe`. Who examines a machine (noloco doctor) is an observer there."""
        reason = await probe(address, peer, self.links, PROBE_TIMEOUT_S)
        if reason is not None and self.credentials is not None:
            seen = await probe(address, peer, self.links, PROBE_TIMEOUT_S, "observer")
            reason = None if seen is None else reason
        return reason

    async def open_directory(self, libp2p: Libp2pDaemon, manifest: RunManifest, home: Path) -> HivemindDirectory:
        """The run's directory; `home` keeps the addresses that were seen. Raises as `HivemindDirectory.open`."""
        known = home / "known-peers.json"
        return await HivemindDirectory.open(
            libp2p, run_id=manifest.run_id, stages=manifest.stages, known_path=known, members=self.records
        )

    async def keep_valid(self, libp2p: Libp2pDaemon, changed: Callable[[str | None], None]) -> None:
        """See `admission.keep_valid`; for members."""
        assert self.credentials is not None
        assert self.records is not None
        records = self.records

        def issuers() -> list[JoinAddress]:
            return [at for peer, at in records.issuers.items() if not records.revoked.names(peer)]

        await admission.keep_valid(libp2p, self.credentials, self.issuer, issuers, changed)

    async def keep_revoked(self, libp2p: Libp2pDaemon) -> None:
        """See `revocations.keep`; for members."""
        records, credentials = self.records, self.credentials
        assert records is not None
        assert credentials is not None

        def mine() -> tuple[PeerId, PeerId]:
            return credentials.peer_id, credentials.membership.issuer

        await revocations.keep(libp2p, records.revoked, lambda: records.ahead, mine)

    def how_to_join(self, home: Path, joins: Sequence[str]) -> str:
        """What others are told: to join at the first address, nearby also at others, or who invites them."""
        if self.credentials is None or self.invitation:
            return "\nnearby   ".join(f"noloco-node --join {address}" for address in joins)
        if self.issuer is None:
            return "members-only; this node admits nobody: ask whoever started the run for an invitation"
        return f"members-only; to make an invitation: noloco invite --dir {home}"


async def of_node(
    home: Path, identity: Identity, key: Path | None, manifest: RunManifest, libp2p: Libp2pDaemon
) -> Standing:
    """A node's, by the certificate that its directory has, by the run's key, or by an invitation.

    Raises ConfigError or a PeerError, in one line, when none of them admits it; LocalError (a full disk).
    """
    trust = trust_in(manifest)
    if trust is None:
        return Standing(open_links(identity, manifest.run_id))
    invitation = ""
    if key is not None:
        root = read(key)
        if public_half(root) != manifest.security.root_key:
            raise ConfigError(f"--key {key} is not the key of this run: leave it out, or name the right one")
        run_files.write_whole(home / ISSUER, certificates.issuer_certificate(root, trust, identity.peer_id, dht_time()))
        until = dht_time() + PRINTED_S
        token = Invitation.signed(root, trust.run_id, uses=PRINTED_USES, until=until, stage=None)
        invitation = f"/invite/{token.text}"
    revoked = Revocations(trust, home / REVOKED)
    await revocations.ask(libp2p, revoked, libp2p.joined)
    issuer = _issuer(home, trust, identity, revoked)
    chain = _stored(home, revoked, trust, identity.peer_id)
    if issuer is not None:
        chain = issuer.issue(identity.peer_id, "member")
    if chain is None:
        if not libp2p.joined:
            raise ConfigError("security.root_key: start a members-only run with --key FILE (see noloco key new)")
        chain = await admission.invited(libp2p, trust, "member", dht_time())

    def keep(chain: bytes) -> None:
        run_files.write_whole(home / CERTIFICATE, chain)

    credentials = Credentials(trust, identity, chain, keep, dht_time, revoked)
    records = MemberRecords(trust, revoked, lambda: credentials.chain)
    return Standing(Links(credentials), records, credentials, issuer, invitation)


async def of_observer(identity: Identity, manifest: RunManifest, libp2p: Libp2pDaemon, *, calls: bool) -> Standing:
    """An observer's, who reads the directory and `calls` nodes over gRPC or not.

    For that the address that it joined has to carry an invitation, of which it costs no use. Raises as `of_node`.
    """
    trust = trust_in(manifest)
    if trust is None:
        return Standing(open_links(identity, manifest.run_id))
    records = MemberRecords(trust, Revocations(trust))
    await revocations.ask(libp2p, records.revoked, libp2p.joined)
    if not calls:
        return Standing(open_links(identity, manifest.run_id), records)  # no member takes a call over these
    chain = await admission.invited(libp2p, trust, "observer", dht_time())
    credentials = Credentials(trust, identity, chain, revoked=records.revoked)
    return Standing(Links(credentials), records, credentials)


def _issuer(home: Path, trust: RunTrust, identity: Identity, revoked: Revocations) -> Issuer | None:
    """None: this node may not admit others, or not any more."""
    try:
        certificate = (home / ISSUER).read_bytes()
        trust.membership(
            certificates.member_chain(certificate, identity.key, trust, identity.peer_id, "member", dht_time())
        )
    except (FileNotFoundError, Violation, ValueError):
        return None
    except OSError as error:
        raise LocalError(f"{home / ISSUER} cannot be read: {error.strerror}") from error
    return Issuer(trust, identity, certificate, UseBook(home / BOOK), dht_time, revoked)


def _stored(home: Path, revoked: Revocations, trust: RunTrust, peer_id: PeerId) -> bytes | None:
    """The certificate that this node had, if it is still valid."""
    try:
        chain = (home / CERTIFICATE).read_bytes()
        found = trust.membership(chain)
    except (FileNotFoundError, Violation):
        return None
    except OSError as error:
        raise LocalError(f"{home / CERTIFICATE} cannot be read: {error.strerror}") from error
    good = found.peer_id == peer_id and dht_time() < found.until and not revoked.names(found.issuer)
    return chain if good else None
