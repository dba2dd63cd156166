"""Certificates in the DHT records of a members-only run: this node's own, and the checks of others'."""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import Violation
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.security.certificates import RunTrust
from noloco_p2p.io.security.revocations import Revocations

if TYPE_CHECKING:
    from noloco_p2p.io.dht.adverts import AdvertRecord

REVOKED_STORED_S = 360.0
"""A revoked peer's records are refused if they expire later than this after the revocation, seconds. Those that expire
earlier may have been stored before it, so they are only skipped when read: in hivemind, a reader that refuses one
record refuses the whole answer."""
_CHECKED_LIMIT = 16_384
"""How many checked chains are remembered: checking one takes a millisecond, and a peer's records carry it for days."""


class MemberRecords:
    """Answers a directory's questions about members, and keeps the addresses of the issuers that it has seen."""

    def __init__(self, trust: RunTrust, revoked: Revocations, chain: Callable[[], bytes] = bytes) -> None:
        """`chain` returns this node's certificate and its issuer's, PEM; a node that has none announces nothing."""
        self.revoked = revoked
        self.ahead: Sequence[JoinAddress] = ()
        """Those peers' addresses that had a newer list of revoked peers at the last reading."""
        self.issuers: dict[PeerId, JoinAddress] = {}
        """Addresses of peers that admit members and renew their certificates."""
        self._chain = chain
        self._checked = functools.lru_cache(_CHECKED_LIMIT)(trust.membership)

    @property
    def certificate(self) -> str:
        """The certificate for this node's own records, PEM."""
        return self._chain().decode()

    def admits(self, peer_id: PeerId, certificate: str, until: float) -> bool:
        """Whether a record of this peer that expires at `until` (Unix seconds) is a member's for all of that time."""
        try:
            found = self._checked(certificate.encode())
        except Violation:
            return False
        if (found.peer_id, found.role) != (peer_id, "member") or found.until < until:
            return False
        late = until > self.revoked.held.number + REVOKED_STORED_S
        return not (late and self.revoked.names(peer_id, found.issuer))

    def belongs(self, peer_id: PeerId, certificate: str, until: float) -> bool:
        """Whether this is the certificate of a member that is not revoked, valid until `until` (Unix seconds)."""
        admitted = self.admits(peer_id, certificate, until)
        return admitted and not self.revoked.names(peer_id, self._checked(certificate.encode()).issuer)

    def read(self, records: Sequence["AdvertRecord"], met: Mapping[PeerId, JoinAddress]) -> list["AdvertRecord"]:
        """The records of a reading, with revoked peers in state `left`. Notes who admitted each peer, which of them
        admit others, and which have a newer list of those revoked. `met`: where others' daemons are, if this node may
        dial them."""
        self.revoked.admitted_by = issuers = {one.advert.peer_id: self._issuer(one) for one in records}
        self.issuers |= {peer: met[peer] for peer, issuer in issuers.items() if issuer == peer and peer in met}
        ahead = [one.advert.peer_id for one in records if one.revoked > self.revoked.held.number]
        self.ahead = [met[peer] for peer in ahead if peer in met]
        gone = {peer for peer, issuer in issuers.items() if not issuer or self.revoked.names(peer, issuer)}
        return [
            replace(one, advert=replace(one.advert, state="left", step=0.0)) if one.advert.peer_id in gone else one
            for one in records
        ]

    def _issuer(self, record: "AdvertRecord") -> PeerId | None:
        with suppress(Violation):
            return self._checked(record.certificate.encode()).issuer
        return None
