"""The certificate in a record of a members' run: what this node's carry, and which ones count."""

import functools
from collections.abc import Callable

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import Violation
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.security.certificates import RunTrust

_CHECKED_LIMIT = 4096
"""Chains that are remembered: one costs a millisecond, and comes with every record of its peer for days."""


class MemberRecords:
    """What a directory asks about members, and the issuers that it has seen."""

    def __init__(self, trust: RunTrust, chain: Callable[[], bytes] = bytes) -> None:
        """`chain`: this node's certificate with its issuer's, PEM; without one it announces nothing."""
        self.issuers: dict[PeerId, JoinAddress] = {}
        """Where those are that admit members and renew their certificates."""
        self._chain = chain
        self._checked = functools.lru_cache(_CHECKED_LIMIT)(trust.membership)

    @property
    def certificate(self) -> str:
        """For this node's own records."""
        return self._chain().decode()

    def admits(self, peer_id: PeerId, certificate: str, until: float, at: list[JoinAddress]) -> bool:
        """Whether a record of this peer, which is kept `until` (unix seconds), is that of a member all that time.

        `at`: where the peer says that it is.
        """
        try:
            found = self._checked(certificate.encode())
        except Violation:
            return False
        if (found.peer_id, found.role) != (peer_id, "member") or found.until < until:
            return False
        if found.issuer == peer_id and at:
            self.issuers[peer_id] = at[0]
        return True
