"""The certificates in the records of a members-only run: which one this node's carry, and whose count."""

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
"""Records of a revoked peer are refused if they expire later than this after its revocation, seconds. Earlier ones may
have been stored before it, so they are only skipped when read: in hivemind, a reader that refuses one record refuses
the whole answer."""
_CHECKED_LIMIT = 4096
"""Chains that are remembered: checking one takes a millisecond, and each record of its peer carries it for days."""


class MemberRecords:
    """What a directory asks about members, and the issuers that it has seen."""

    def __init__(self, trust: RunTrust, revoked: Revocations, chain: Callable[[], bytes] = bytes) -> None:
        """`chain`: this node's certificate with its issuer's, PEM; without one it announces nothing."""
        self.revoked = revoked
        self.ahead: Sequence[JoinAddress] = ()
        """Where the peers are that had a newer list of revoked peers at the last reading."""
        self.issuers: dict[PeerId, JoinAddress] = {}
        """Where the peers are that admit members and renew their certificates."""
        self._chain = chain
        self._checked = functools.lru_cache(_CHECKED_LIMIT)(trust.membership)

    @property
    def certificate(self) -> str:
        """For this node's own records."""
        return self._chain().decode()

    def admits(self, peer_id: PeerId, certificate: str, until: float, at: list[JoinAddress]) -> bool:
        """Whether a record of this peer, kept `until` then (unix seconds), is a member's for all that time.

        `at`: where the peer says that it is.
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
        """Whether this is the certificate of a member that is not revoked, valid `until` then."""
        issuer = self.admits(peer_id, certificate, until, []) and self._checked(certificate.encode()).issuer
        return bool(issuer) and not self.revoked.names(peer_id, str(issuer))

    def read(
        self, records: Sequence["AdvertRecord"], daemons: Callable[["AdvertRecord"], Sequence[JoinAddress]]
    ) -> list["AdvertRecord"]:
        """What a reading found, with revoked peers counted as having left; notes who has a newer list of them."""
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
