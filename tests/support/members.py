"""A run, members-only or open, and certificates that no honest node would issue; used by the security tests."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from noloco_p2p.core.messages import PeerId
from noloco_p2p.io.dht.identity import Identity, peer_id_of
from noloco_p2p.io.security import certificates
from noloco_p2p.io.security.certificates import Role, RunTrust
from noloco_p2p.io.security.credentials import Credentials
from noloco_p2p.io.security.revocations import DenyList

RUN = "ab" * 32
HOUR_S = 3600.0
Key = Ed25519PrivateKey | ec.EllipticCurvePrivateKey


def public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


@dataclass
class Club:
    """A run, its root, and one issuer. In an open run everybody has the root's key."""

    home: Path
    run_id: str = RUN
    root: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    now: float = field(default_factory=time.time)
    is_open: bool = False

    def __post_init__(self) -> None:
        self.trust = RunTrust(self.run_id, public(self.root))
        if self.is_open:
            self.root, self.trust = certificates._open_root(self.run_id), RunTrust.of_open_run(self.run_id)
        self.door = Ed25519PrivateKey.generate()
        """The issuer's key."""
        self.issuer = certificates.issuer_certificate(self.root, self.trust, peer_id_of(public(self.door)), self.now)

    def chain(self, peer_id: PeerId, role: Role = "member", now: float | None = None) -> bytes:
        return certificates.member_chain(self.issuer, self.door, self.trust, peer_id, role, now or self.now)

    def credentials(
        self, name: str, role: Role = "member", clock: Callable[[], float] | None = None, now: float | None = None
    ) -> Credentials:
        """Credentials of a node with this name, whose key is in its own directory."""
        identity = Identity.open(self.home / f"{name}.key")
        own, admitted = certificates.own_chain(identity.key, self.trust), self.chain(identity.peer_id, role, now)
        return Credentials(self.trust, identity, own if self.is_open else admitted, clock=clock or time.time)

    def revoking(self, number: int, *peers: PeerId) -> bytes:
        """A revocation list signed by the root."""
        return DenyList.make(self.root, self.run_id, number, peers).signed


def forged(
    key: CertificatePublicKeyTypes,
    signer: Key,
    *sans: x509.GeneralName,
    subject: str = "leaf",
    issuer: str = "member",
    begins: float | None = None,
    until: float | None = None,
    more: Sequence[tuple[x509.ExtensionType, bool]] = (),
) -> bytes:
    """A certificate with arbitrary content, in PEM."""
    now = time.time()
    above, own = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, one)]) for one in (issuer, subject))
    start, end = (datetime.fromtimestamp(at, UTC) for at in (begins or now - HOUR_S, until or now + HOUR_S))
    builder = x509.CertificateBuilder(above, own, key, x509.random_serial_number(), start, end)
    for extension, critical in [*([(x509.SubjectAlternativeName(sans), False)] if sans else []), *more]:
        builder = builder.add_extension(extension, critical)
    algorithm = None if isinstance(signer, Ed25519PrivateKey) else hashes.SHA256()
    return builder.sign(signer, algorithm).public_bytes(Encoding.PEM)


def private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
