"""How a node proves its identity in TLS, and verifies that of its peers."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import Declined, Violation
from noloco_p2p.io.dht.identity import Identity
from noloco_p2p.io.security import certificates
from noloco_p2p.io.security.certificates import CertifiedPeer, RunTrust
from noloco_p2p.io.security.revocations import Revocations

_SHOWN_LIMIT_BYTES = 2 * certificates.CHAIN_LIMIT_BYTES
"""Longest PEM text of all certificates that a caller presents; a longer one is refused unread."""
AuthContext = Mapping[str, Sequence[bytes]]
"""What gRPC knows about the remote end of a connection."""


class Credentials:
    """This node's certificate, and the leaf below it, which is replaced after half of its life.

    gRPC fetches the leaf from its own threads.
    """

    def __init__(
        self,
        trust: RunTrust,
        identity: Identity,
        chain: bytes,
        keep: Callable[[bytes], object] = len,
        clock: Callable[[], float] = time.time,
        revoked: Revocations | None = None,
    ) -> None:
        """See `adopt` for `chain`. `keep` is called with every certificate adopted; `clock` returns Unix seconds."""
        self.trust = trust
        self.revoked = revoked or Revocations(trust)
        self.clock = clock
        self.identity = identity
        self.peer_id = identity.peer_id
        """This node's peer id."""
        self._keep = keep
        self._lock = threading.Lock()
        self.adopt(chain)

    def adopt(self, chain: bytes) -> None:
        """Use this certificate (PEM, with its issuer's) from now on; it is `unkept` as long as `keep` raises. Raises
        Violation if it is not this node's."""
        membership = self._own(chain)
        with self._lock:
            self.chain, self.membership, self.unkept = chain, membership, chain
            self._replaced_at = 0.0
        self._keep(chain)
        self.unkept = b""

    def is_renewed_by(self, chain: bytes) -> bool:
        """Whether a certificate is valid now, has the role of the one in use, and either outlasts that or replaces it
        before it is valid. Raises as `adopt`."""
        found, held, now = self._own(chain), self.membership, self.clock()
        return found.role == held.role and found.begins <= now and (found.until > held.until or held.begins > now)

    def _own(self, chain: bytes) -> CertifiedPeer:
        """The contents of this node's certificate. Raises Violation if it is not this node's."""
        membership = self.trust.membership(chain)
        if membership.peer_id != self.peer_id:
            raise Violation(f"the certificate belongs to {membership.peer_id}, not to this node")
        return membership

    @property
    def renewal_at(self) -> float:
        """When half of the certificate's life is over, Unix seconds; now, if a clock that was ahead made it."""
        mine, now = self.membership, self.clock()
        return now if mine.begins > now else (mine.begins + mine.until) / 2

    def leaf(self) -> tuple[bytes, bytes]:
        """(private key, chain from the leaf to the issuer), PEM; the same objects until they are replaced."""
        now = self.clock()
        with self._lock:
            if now >= self._replaced_at:
                mine = self.membership
                until = min(now + certificates.LEAF_S, mine.until)
                name = self.trust.name_of(self.peer_id, mine.role)
                key, cert = certificates.leaf(self.identity.key, name, mine.begins, until)
                self._leaf = key, cert + self.chain
                self._replaced_at = max(now, (now + until) / 2)
            return self._leaf

    def caller(self, context: AuthContext, *, observers: bool) -> PeerId:
        """The peer at the remote end of a connection that TLS has accepted.

        Raises Violation if its certificate has expired, was revoked, or does not prove the name in it. Raises Declined
        if it may only observe, and its request is not open to `observers`.
        """
        names = context.get("x509_subject_alternative_name", ())
        if len(names) != 1 or list(names) != list(context.get("peer_dns", ())):
            raise Violation("a caller's certificate must have one DNS name and no other name")
        peer, role = self.trust.owner_of(names[0].decode("ascii", errors="replace"))
        if certificates.expiry(_chain(context)) <= self.clock():
            raise Violation("the caller's certificate has expired: it must be renewed")
        if not certificates.is_signed_by(peer, context["x509_pem_cert"][0]):
            raise Violation("the caller's certificate is not signed by the peer that it names")
        if self.refuses(context):
            raise Violation("the caller was revoked")
        if role == "observer" and not observers:
            raise Declined("an observer may not request this: join as a node, with an invitation")
        return peer

    def refuses(self, context: AuthContext) -> bool:
        """Whether the peer at the remote end, or its issuer, is revoked. Raises Violation as `certificates.read`."""
        return self.revoked.names(*certificates.read(_chain(context))[1])


def _chain(context: AuthContext) -> bytes:
    shown = *context.get("x509_pem_cert", ()), *context.get("x509_pem_cert_chain", ())
    if sum(map(len, shown)) > _SHOWN_LIMIT_BYTES:
        raise Violation("the caller presents more certificates than any peer has")
    return b"".join(shown)
