"""Certificates. In a members-only run one public key, the root's, determines who belongs to the run.

    root ──▶ issuer ──▶ member ──▶ leaf

The root's public key is in the manifest. Its private key signs issuers (and invitations) and may be kept offline. An
issuer and a member use their node's Ed25519 key, from which the peer id is made. Leaves are ECDSA P-256, because gRPC's
TLS does not accept Ed25519 there; each node makes its own leaf and replaces it. Names tie the chain together. An
issuer's certificate admits only names below `<run>.p2p`. A member's admits only its own name,
`<base32 of its key>.<run>.p2p`, and an observer's only `<base32>.observer.<run>.p2p`. TLS checks chain, times, path
lengths and names (RFC 5280) in every handshake.

In an open run everybody has the root's private key, so a chain from it proves nothing; it exists only because gRPC
would not ask callers for a certificate without it. There, what counts is that the leaf is signed by the key in its
peer's id: a client trusts this key and no other, and a server checks the signature (`is_signed_by`).
"""

import base64
import functools
import hashlib
import ipaddress
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import Violation
from noloco_p2p.io.dht.identity import peer_id_of, public_key_of, verify

Role = Literal["member", "observer"]
_OF_X509 = x509.ExtensionNotFound, x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType
UNREADABLE = ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, *_OF_X509
"""What `cryptography` raises for certificates and keys that are malformed, or not what they should be."""
DAY_S = 86_400.0
ISSUER_S = 365 * DAY_S
LIFETIME_S: dict[Role, float] = {"member": 7 * DAY_S, "observer": 3_600.0}
LEAF_S = DAY_S
"""How long certificates are valid, seconds. None outlives the certificate above it."""
BACKDATED_S = 3_600.0
"""How long before it is made a certificate becomes valid, seconds, because clocks differ."""
ALWAYS = 0.0, 253_402_300_799.0
"""Validity (from, until) of a certificate that does not expire: RFC 5280, section 4.1.2.5."""
CHAIN_LIMIT_BYTES = 1_200
"""Longest PEM text of a member's and its issuer's certificate together; a longer one is refused unread."""
_NAME = re.compile(r"([a-z2-7]{52})(?:\.(observer))?\.([0-9a-f]{32}\.p2p)")
_NOTHING = (
    x509.UniformResourceIdentifier("invalid"),
    x509.RFC822Name("invalid"),
    x509.IPAddress(ipaddress.ip_network("0.0.0.0/32")),
)
"""Constraints that permit no usable name of any other kind. gRPC does not distinguish kinds of names, and a constraint
on one kind leaves the others unrestricted."""


@dataclass(frozen=True, slots=True)
class CertifiedPeer:
    """The contents of a verified chain of certificates."""

    peer_id: PeerId
    role: Role
    issuer: PeerId
    """The node that signed the peer's certificate."""
    begins: float
    until: float
    """Start and end of the chain's validity, Unix seconds."""


@dataclass(frozen=True)
class RunTrust:
    """What the nodes of a run trust: certificates for this run id that lead to its root."""

    run_id: str
    root_key: bytes
    """The root's raw Ed25519 public key."""
    is_open: bool = False
    """Whether this is an open run, in which everybody has the root's private key, too."""

    @classmethod
    def of_open_run(cls, run_id: str) -> "RunTrust":
        """The trust of the nodes of an open run."""
        return cls(run_id, _open_root(run_id).public_key().public_bytes_raw(), True)

    @property
    def suffix(self) -> str:
        """The suffix of the names of all members of the run."""
        return f"{self.run_id[:32]}.p2p"

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        """Whether the root has signed this message."""
        return verify(peer_id_of(self.root_key), message, signature)

    @functools.cached_property
    def anchor(self) -> bytes:
        """The root as a certificate, PEM."""
        return _anchor("root", Ed25519PublicKey.from_public_bytes(self.root_key))

    def anchor_of(self, peer_id: PeerId) -> bytes:
        """The trust anchor of a client that calls this peer, PEM: the root, or in an open run the peer's own key."""
        return _anchor("member", _key_of(peer_id)) if self.is_open else self.anchor

    def name_of(self, peer_id: PeerId, role: Role) -> str:
        """The TLS name of a peer in this role. Raises Violation if the peer id does not contain an Ed25519 key."""
        label = base64.b32encode(_key_of(peer_id).public_bytes_raw()).decode().rstrip("=").lower()
        return f"{label}.{self.suffix}" if role == "member" else f"{label}.{role}.{self.suffix}"

    def owner_of(self, name: str) -> tuple[PeerId, Role]:
        """The peer that has this name, and its role. Raises Violation if it is not the name of a peer of this run."""
        found = _NAME.fullmatch(name)
        if found is not None:
            peer_id = peer_id_of(base64.b32decode(found[1].upper() + "===="))
            role: Role = "observer" if found[2] else "member"
            if self.name_of(peer_id, role) == name:
                return peer_id, role
        raise Violation("the name in the certificate is not the name of a peer of this run")

    def membership(self, chain: bytes) -> CertifiedPeer:
        """The contents of a chain, PEM: the certificate of a member or observer, then its issuer's.

        Does not check whether it is valid now. Raises Violation if it does not lead to the root of this run.
        """
        try:
            if len(chain) > CHAIN_LIMIT_BYTES:
                raise ValueError("too long")
            one, issuer = x509.load_pem_x509_certificates(chain)
            if not self.has_signed(issuer.tbs_certificate_bytes, issuer.signature):
                raise ValueError("not the root's signature")
            one.verify_directly_issued_by(issuer)
            peer_id, role = self.owner_of(_name_below(one))
            if _peer_of(one) != peer_id or _name_below(issuer) != self.suffix:
                raise ValueError("other names than keys")
            signer = _peer_of(issuer)
        except UNREADABLE as error:
            raise Violation("the certificate was not issued for this run") from error
        begins = max(cert.not_valid_before_utc.timestamp() for cert in (one, issuer))
        return CertifiedPeer(peer_id, role, signer, begins, expiry(chain))


def issuer_certificate(root: Ed25519PrivateKey, trust: RunTrust, peer_id: PeerId, now: float) -> bytes:
    """The certificate, PEM, with which a node may admit members."""
    return _issuer(root, trust, peer_id, now - BACKDATED_S, now + ISSUER_S)


def member_chain(
    issuer: bytes, key: Ed25519PrivateKey, trust: RunTrust, peer_id: PeerId, role: Role, now: float
) -> bytes:
    """The certificate of a member or observer and its issuer's, PEM; `key` is the private key of the issuer."""
    until = min(now + LIFETIME_S[role], expiry(issuer))
    return _member(key, trust, peer_id, role, min(now, until) - BACKDATED_S, until) + issuer


def own_chain(key: Ed25519PrivateKey, trust: RunTrust) -> bytes:
    """The member chain that a node of an open run makes for itself; `key` is its private key."""
    me = peer_id_of(key.public_key().public_bytes_raw())
    issuer = _issuer(_open_root(trust.run_id), trust, me, *ALWAYS)
    return _member(key, trust, me, "member", *ALWAYS) + issuer


def leaf(key: Ed25519PrivateKey, name: str, begins: float, until: float) -> tuple[bytes, bytes]:
    """(fresh private key, its TLS certificate for this name), PEM; `key` is the member's private key."""
    fresh = ec.generate_private_key(ec.SECP256R1())
    builder = _builder("leaf", "member", fresh.public_key(), begins, until)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), False)
    return fresh.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), _pem(builder.sign(key, None))


@functools.lru_cache(4096)
def is_signed_by(peer_id: PeerId, certificate: bytes) -> bool:
    """Whether the peer's own key signed this certificate (PEM)."""
    try:
        cert = x509.load_pem_x509_certificate(certificate)
    except UNREADABLE:
        return False
    return verify(peer_id, cert.tbs_certificate_bytes, cert.signature)


def expiry(chain: bytes) -> float:
    """When the first of these certificates (PEM) expires, Unix seconds. Raises Violation if they cannot be parsed."""
    return read(chain)[0]


@functools.lru_cache(4096)
def read(chain: bytes) -> tuple[float, tuple[PeerId, ...]]:
    """The `expiry` of these certificates (PEM), and all nodes whose keys are in them. Raises as `expiry`."""
    try:
        certs = x509.load_pem_x509_certificates(chain)
        nodes = tuple(_peer_of(cert) for cert in certs if isinstance(cert.public_key(), Ed25519PublicKey))
        return min(cert.not_valid_after_utc.timestamp() for cert in certs), nodes
    except UNREADABLE as error:
        raise Violation("the certificate cannot be read") from error


def _open_root(run_id: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"noloco open run 1\x00" + run_id.encode()).digest())


def _anchor(name: str, key: Ed25519PublicKey) -> bytes:
    """A trust anchor for TLS, PEM. Its signature means nothing, because the key itself is trusted."""
    builder = _builder(name, name, key, *ALWAYS).add_extension(*_authority(None))
    return _pem(builder.sign(Ed25519PrivateKey.generate(), None))


def _issuer(root: Ed25519PrivateKey, trust: RunTrust, peer_id: PeerId, begins: float, until: float) -> bytes:
    builder = _builder("issuer", "root", _key_of(peer_id), begins, until)
    builder = builder.add_extension(*_authority(1)).add_extension(*_names(trust.suffix, *_NOTHING))
    return _pem(builder.sign(root, None))


def _member(key: Ed25519PrivateKey, trust: RunTrust, peer_id: PeerId, role: Role, begins: float, until: float) -> bytes:
    builder = _builder("member", "issuer", _key_of(peer_id), begins, until)
    builder = builder.add_extension(*_authority(0)).add_extension(*_names(trust.name_of(peer_id, role)))
    return _pem(builder.sign(key, None))


def _builder(
    subject: str, issuer: str, key: Ed25519PublicKey | ec.EllipticCurvePublicKey, begins: float, until: float
) -> x509.CertificateBuilder:
    subject_name, issuer_name = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)]) for n in (subject, issuer))
    start, end = (datetime.fromtimestamp(at, UTC) for at in (begins, until))
    return x509.CertificateBuilder(issuer_name, subject_name, key, x509.random_serial_number(), start, end)


def _authority(length: int | None) -> tuple[x509.BasicConstraints, bool]:
    """The extension of a certificate that signs others, with at most `length` signing ones between it and a leaf."""
    return x509.BasicConstraints(True, length), True


def _names(below: str, *more: x509.GeneralName) -> tuple[x509.NameConstraints, bool]:
    return x509.NameConstraints([x509.DNSName(below), *more], None), True


def _name_below(cert: x509.Certificate) -> str:
    """The one DNS suffix that this certificate permits in names below it. Raises ValueError."""
    found = cert.extensions.get_extension_for_class(x509.NameConstraints).value.permitted_subtrees or []
    [name] = [str(one.value) for one in found if isinstance(one, x509.DNSName)]
    return name


def _key_of(peer_id: PeerId) -> Ed25519PublicKey:
    key = public_key_of(peer_id)
    if key is None:
        raise Violation("the peer id contains no Ed25519 key")
    return Ed25519PublicKey.from_public_bytes(key)


def _peer_of(cert: x509.Certificate) -> PeerId:
    key = cert.public_key()
    if not isinstance(key, Ed25519PublicKey):
        raise TypeError("no node's key")
    return peer_id_of(key.public_bytes_raw())


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(Encoding.PEM)
