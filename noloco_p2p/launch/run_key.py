"""The root key of a members-only run, and who may do what: admit a node, invite others, revoke members, observe."""

import fcntl
import shlex
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import ConfigError, Violation
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.dht.adverts import dht_time
from noloco_p2p.io.dht.hivemind_directory import HivemindDirectory
from noloco_p2p.io.dht.identity import Identity
from noloco_p2p.io.dht.join_handshake import PROBE_TIMEOUT_S
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.dht.member_records import MemberRecords
from noloco_p2p.io.durable_files import make_folders, read_if_there, writing
from noloco_p2p.io.security import admission, certificates, revocations
from noloco_p2p.io.security.admission import Issuer
from noloco_p2p.io.security.certificates import CertifiedPeer, RunTrust
from noloco_p2p.io.security.credentials import Credentials
from noloco_p2p.io.security.invitations import MAX_USES, NO_STAGE, Invitation, UseBook
from noloco_p2p.io.security.revocations import DenyList, Revocations
from noloco_p2p.io.transport.peer_links import Links, open_links
from noloco_p2p.io.transport.probe import probe
from noloco_p2p.launch import homes, node_probe, run_files
from noloco_p2p.launch.swarm_plan import ROOT_KEY

KEY, CERTIFICATE, ISSUER, BOOK, REVOKED = ROOT_KEY, "certificate.pem", "issuer.pem", "invitations.json", "revoked"
"""File names. The root key may be in a node's directory or above it. The others are in a node's directory: its
certificates, who has used invitations, and who is revoked."""
PRINTED_USES, PRINTED_S = 100, 7 * 86_400.0
"""Uses and lifetime of the invitation in the address that a node with the root key prints."""
SETTLED_S = 1.0
"""Within this time a node that has read the list in its directory has replaced it, if it had a newer one, seconds."""


def make(path: Path) -> str:
    """Write a new root key, with mode 0600. Returns its public half in hexadecimal.

    Raises ConfigError if the file exists, and LocalError.
    """
    key = Ed25519PrivateKey.generate()
    homes.require_file("", path)
    if path.exists():
        raise ConfigError(f"{path} already exists: name another file, or use that key")
    with writing(path), ExitStack() as undo:
        make_folders(path.parent)
        path.touch(0o600, exist_ok=False)  # fails if another process makes a key there at this moment
        undo.callback(path.unlink)
        run_files.write_whole(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
        undo.pop_all()
    return public_half(key)


def read(path: Path) -> Ed25519PrivateKey:
    """Read a root key. Raises ConfigError if the file does not hold one, or if others may read it."""
    try:
        key = load_pem_private_key(path.read_bytes(), None)
        readable = path.stat().st_mode & 0o077
    except (OSError, *certificates.UNREADABLE) as error:
        reason = error.strerror if isinstance(error, OSError) else "it was not written by noloco key new"
        raise ConfigError(f"the run's key {path} cannot be read: {reason}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is not an Ed25519 key: make one with noloco key new")
    if readable:
        raise ConfigError(f"{path} is readable by others: run chmod 600 on it")
    return key


def public_half(key: Ed25519PrivateKey) -> str:
    """The public half of a root key in hexadecimal, as in `security.root_key`."""
    return key.public_key().public_bytes_raw().hex()


def trust_in(manifest: RunManifest) -> RunTrust | None:
    """The trust root for certificates of this run; None if the run is open."""
    root = manifest.security.root_key
    return None if root is None else RunTrust(manifest.run_id, bytes.fromhex(root))


def invite(node_dir: Path, key: Path | None, *, uses: int, seconds: float, stage: int | None) -> str:
    """A join address of the node, with an invitation to its run. Raises ConfigError, one line that says what to do."""
    node_dir, manifest, _ = _members_run(node_dir)
    found = node_probe.read_endpoints(node_dir)
    if found is None or not found.join:
        raise ConfigError(f"no node has run in {node_dir}: give --dir the directory of the node that others will join")
    if not (node_dir / ISSUER).exists():
        raise ConfigError(f"the node of {node_dir} cannot admit others: start it with --key, or name one that was")
    if not found.dialled:
        raise ConfigError(f"others cannot dial the node of {node_dir}: name another one that was started with --key")
    if stage is not None and stage >= (most := min(manifest.stages, NO_STAGE)):
        raise ConfigError(f"stage {stage}: an invitation to this run can name stages 0 to {most - 1}")
    if not 1 <= uses <= MAX_USES:
        raise ConfigError(f"--uses must be between 1 and {MAX_USES}, not {uses}")
    until = dht_time() + seconds
    made = Invitation.signed(_root(node_dir, key, manifest), manifest.run_id, uses=uses, until=until, stage=stage)
    return f"{found.join[0]}/invite/{made.text}"


def revoke(node_dir: Path, key: Path | None, peers: Sequence[PeerId]) -> DenyList:
    """Add peers to the deny list in a node's directory, which the node spreads. Raises ConfigError, LocalError.

    Refuses to expel that node itself: it would stop without telling others. The only issuer can thus not be expelled,
    which would end the run.
    """
    node_dir, manifest, trust = _members_run(node_dir)
    own = _certified(node_dir, trust)
    if own is not None and (it := next((peer for peer in peers if peer in (own[1].peer_id, own[1].issuer)), None)):
        why = f"{it} is the node of {node_dir} or has admitted it: that node would be expelled as well, and tell nobody"
        raise ConfigError(f"{why}; give --dir the directory of a node that another one has admitted")
    with (node_dir / run_files.MANIFEST).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two commands at once, one would replace the other's list
        while not {*peers}.issubset((revoked := Revocations(trust, node_dir / REVOKED)).held.peers):
            number = max(int(dht_time()), revoked.held.number + 1)
            made = DenyList.make(_root(node_dir, key, manifest), manifest.run_id, number, [*revoked.held.peers, *peers])
            revoked.adopt(made.signed)
            sleep(SETTLED_S)  # the node may just be replacing the list that it read before with one from another node
    return revoked.held


def _members_run(directory: Path) -> tuple[Path, RunManifest, RunTrust]:
    """(directory of a node, manifest and trust of its members-only run). A swarm's directory stands for its first node.

    Raises ConfigError if there is no node, if its run is open, or if the node was revoked, as far as it knows.
    """
    is_swarm = homes.kind_of(directory) is homes.Home.SWARM
    node_dir = next(node_probe.node_dirs(directory), directory) if is_swarm else directory
    manifest = run_files.stored_manifest(node_dir)
    if manifest is None:
        raise ConfigError(f"no node has run in {node_dir}: give --dir the directory of a node of the run")
    if (trust := trust_in(manifest)) is None:
        raise ConfigError(f"the run of {node_dir} is open: anybody can join it, and nobody can be expelled")
    _, own = _certified(node_dir, trust) or (b"", None)
    if own is not None and Revocations(trust, node_dir / REVOKED).names(own.peer_id, own.issuer):
        raise ConfigError(f"the node of {node_dir} was revoked: give --dir the directory of another node of the run")
    return node_dir, manifest, trust


def _root(node_dir: Path, key: Path | None, manifest: RunManifest) -> Ed25519PrivateKey:
    """The root key, from the file that was named, or in or above the node's directory, or in `noloco-runs`.

    Raises ConfigError.
    """
    places = [node_dir / KEY, node_dir.absolute().parent / KEY, node_probe.HOME / KEY]
    place = key or next(filter(Path.exists, places), None)
    if place is None:
        raise ConfigError(f"the run's key is not at {' or '.join(map(str, places))}: name it with --key")
    root = read(place)
    if public_half(root) != manifest.security.root_key:
        raise ConfigError("this is not the run's key: name the file given to --key when the run was started")
    return root


def with_invited_stage(local: NodeConfig, libp2p: Libp2pDaemon) -> NodeConfig:
    """The settings of a newcomer: it takes the stage that its invitation names, unless its own settings name one."""
    stages = (Invitation.parse(address.invitation).stage for address in libp2p.joined if address.invitation)
    return local if local.stage is not None else local.model_copy(update={"stage": next(stages, None)})


@dataclass(frozen=True, slots=True)
class Standing:
    """The rights of a node or an observer in its run, and the certificates that prove them."""

    links: Links
    records: MemberRecords | None = None
    """None if the run is open. This also holds for the fields below."""
    credentials: Credentials | None = None
    """Also None for an observer that does not call nodes."""
    issuer: Issuer | None = None
    """Also None if this node may not admit others."""
    invitation: str = ""
    """Appended to a join address so that newcomers need nothing else; empty in an open run or without the root key."""

    async def probe(self, address: str, peer: PeerId) -> str | None:
        """See `join_handshake.ReachabilityProbe`. The machine may also be an observer's (noloco doctor)."""
        reason = await probe(address, peer, self.links, PROBE_TIMEOUT_S)
        if reason and self.credentials and not await probe(address, peer, self.links, PROBE_TIMEOUT_S, "observer"):
            return None
        return reason

    async def open_directory(self, libp2p: Libp2pDaemon, manifest: RunManifest, home: Path) -> HivemindDirectory:
        """The run's directory. `home` keeps the addresses seen there. Raises as `HivemindDirectory.open` does."""
        known = home / "known-peers.json"
        return await HivemindDirectory.open(
            libp2p, run_id=manifest.run_id, stages=manifest.stages, known_path=known, members=self.records
        )

    def keeping(self, libp2p: Libp2pDaemon, changed: Callable[[str | None], None]) -> list[Coroutine[Any, Any, None]]:
        """What a member keeps running: `admission.keep_valid` and `revocations.keep`. Nothing in an open run."""
        records, credentials = self.records, self.credentials
        if records is None or credentials is None:
            return []

        def issuers() -> list[JoinAddress]:
            return [at for peer, at in records.issuers.items() if not records.revoked.names(peer)]

        def mine() -> tuple[PeerId, PeerId]:
            return credentials.peer_id, credentials.membership.issuer

        return [
            admission.keep_valid(libp2p, credentials, self.issuer, issuers, changed),
            revocations.keep(libp2p, records.revoked, lambda: records.ahead, mine),
        ]

    def how_to_join(self, home: Path, joins: Sequence[str]) -> str:
        """Instructions for others: the first address, further ones for nearby machines, or how to get an invitation."""
        if self.credentials is None or self.invitation:
            return "\nnearby   ".join(f"noloco-node --join {address}" for address in joins)
        if self.issuer is None:
            return "members-only; this node cannot admit others: ask whoever started the run for an invitation"
        return f"members-only; to create an invitation: noloco invite --dir {shlex.quote(str(home))}"


async def of_node(
    home: Path, identity: Identity, key: Path | None, manifest: RunManifest, libp2p: Libp2pDaemon
) -> Standing:
    """The standing of a node: by the certificate in its directory, by the root key, or by an invitation.

    Raises ConfigError or a PeerError, in one line, if none of them admits it; LocalError (a full disk).
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
        token = Invitation.signed(root, trust.run_id, uses=PRINTED_USES, until=dht_time() + PRINTED_S, stage=None)
        invitation = f"/invite/{token.text}"
    revoked = Revocations(trust, home / REVOKED)
    await revocations.ask(libp2p, revoked, libp2p.joined)
    issuer = _issuer(home, trust, identity, revoked)
    chain = issuer.issue(identity.peer_id, "member") if issuer else _stored(home, revoked, trust, identity.peer_id)
    is_invited = any(address.invitation for address in libp2p.joined)
    if chain is None or (is_invited and dht_time() < trust.membership(chain).begins):  # made by a clock that was ahead
        chain = await admission.invited(libp2p, trust, "member", dht_time())
    keep = partial(run_files.write_whole, home / CERTIFICATE)
    credentials = Credentials(trust, identity, chain, keep, dht_time, revoked)
    records = MemberRecords(trust, revoked, lambda: credentials.chain)
    return Standing(Links(credentials), records, credentials, issuer, invitation)


async def of_observer(identity: Identity, manifest: RunManifest, libp2p: Libp2pDaemon, *, calls: bool) -> Standing:
    """The standing of an observer, which reads the directory and, if it `calls`, also calls nodes over gRPC.

    To call nodes of a members-only run, the address that it joined must carry an invitation; this does not count as one
    of its uses. Raises as `of_node` does.
    """
    trust = trust_in(manifest)
    if trust is None:
        return Standing(open_links(identity, manifest.run_id))
    records = MemberRecords(trust, Revocations(trust))
    await revocations.ask(libp2p, records.revoked, libp2p.joined)
    if not calls:
        return Standing(open_links(identity, manifest.run_id), records)  # no member answers calls over these links
    chain = await admission.invited(libp2p, trust, "observer", dht_time())
    credentials = Credentials(trust, identity, chain, revoked=records.revoked)
    return Standing(Links(credentials), records, credentials)


def _issuer(home: Path, trust: RunTrust, identity: Identity, revoked: Revocations) -> Issuer | None:
    """The issuer with which this node admits others; None if it may not, or no longer."""
    if (certificate := read_if_there(home / ISSUER)) is None:
        return None
    issuer = Issuer(trust, identity, certificate, UseBook(home / BOOK), dht_time, revoked)
    with suppress(Violation):
        if dht_time() < trust.membership(issuer.issue(identity.peer_id, "member")).until:
            return issuer
    return None


def _stored(home: Path, revoked: Revocations, trust: RunTrust, peer_id: PeerId) -> bytes | None:
    """The certificate chain in this node's directory, if it is a member's and still valid."""
    chain, found = _certified(home, trust) or (None, None)
    mine = found and (found.peer_id, found.role) == (peer_id, "member") and not revoked.names(found.issuer)
    return chain if found and mine and dht_time() < found.until else None


def _certified(home: Path, trust: RunTrust) -> tuple[bytes, CertifiedPeer] | None:
    """The certificate chain in a node's directory, valid or not, and its contents."""
    chain = read_if_there(home / CERTIFICATE)
    with suppress(Violation):
        return None if chain is None else (chain, trust.membership(chain))
    return None
