"""Certificates in the DHT records of a members-only run: this node's own, and the checks of others'."""

import functools
from collections.abc import Callable, Sequence
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
_CHECKED_LIMIT = 4096
"""How many checked chains are remembered: checking one takes a millisecond, and a peer's records carry it for days."""


class MemberRecords:
    """Answers a directory's questions about members, and keeps the addresses of the issuers that it has seen."""

    def __init__(self, trust: RunTrust, revoked: Revocations, chain: Callable[[], bytes] = bytes) -> None:
        """`chain` returns this node's certificate and its issuer's, PEM; a node that has none announces nothing."""
        self.revoked = revoked
        self.ahead: Sequence[JoinAddress] = ()
        """Addresses of peers that had a newer list of revoked peers at the last reading."""
        self.issuers: dict[PeerId, JoinAddress] = {}
        """Addresses of peers that admit members and renew their certificates."""
        self._chain = chain
        self._checked = functools.lru_cache(_CHECKED_LIMIT)(trust.membership)

    @property
    def certificate(self) -> str:
        """The certificate for this node's own records, PEM."""
        return self._chain().decode()

    def admits(self, peer_id: PeerId, certificate: str, until: float, at: list[JoinAddress]) -> bool:
        """Whether a record of this peer that expires at `until` (Unix seconds) is a member's for all of that time.

        `at` are the addresses that the peer claims.
        """
        try:
            found = self._checked(certificate.encode())
        except Violation:
            return False
        if (found.peer_id, found.role) != (peer_id, "member") or found.until < until:
            return False
        if self.revoked.names(peer_id, found.issuer) and until > self.revoked.held.number + REVOKED_STORED_S:
            return False
        if found.issuer == peer_id and at:
            self.issuers[peer_id] = at[0]
        return True

    def belongs(self, peer_id: PeerId, certificate: str, until: float) -> bool:
        """Whether this is the certificate of a member that is not revoked, valid until `until` (Unix seconds)."""
        issuer = self.admits(peer_id, certificate, until, []) and self._checked(certificate.encode()).issuer
        return bool(issuer) and not self.revoked.names(peer_id, str(issuer))

    def read(
        self, records: Sequence["AdvertRecord"], daemons: Callable[["AdvertRecord"], Sequence[JoinAddress]]
    ) -> list["AdvertRecord"]:
        """The records of a reading, with revoked peers in state `left`. Notes which peers have a newer list of them."""
        ahead = [record for record in records if record.revoked > self.revoked.held.number]
        self.ahead = [address for record in ahead for address in daemons(record)[:1]]
        return [
            replace(record, advert=replace(record.advert, state="left", step=0.0)) if self._is_gone(record) else record
            for record in records
        ]

    def _is_gone(self, record: "AdvertRecord") -> bool:
        with suppress(Violation):
            return self.revoked.names(record.advert.peer_id, self._checked(record.certificate.encode()).issuer)
        return True
