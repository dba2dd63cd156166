"""How a peer obtains a certificate and renews it in time: from an issuer, over libp2p, which proves who asks."""

import asyncio
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import NO_JSON, ConfigError, Declined, LocalError, NolocoError, PeerError, Violation
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.dht.identity import Identity
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.security import certificates
from noloco_p2p.io.security.certificates import Role, RunTrust
from noloco_p2p.io.security.credentials import Credentials
from noloco_p2p.io.security.invitations import Invitation, UseBook
from noloco_p2p.io.security.revocations import Revocations

CERTIFICATE_CALL = "noloco/certificate/1"
CALL_TIMEOUT_S = 10.0
LOOK_S = 60.0
"""Time between two checks of how long the certificate is still valid, seconds."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Issuer:
    """Admits peers with this node's issuer certificate."""

    trust: RunTrust
    identity: Identity
    certificate: bytes
    """The issuer certificate, PEM, for this node's key."""
    book: UseBook
    clock: Callable[[], float]
    """Returns Unix seconds."""
    revoked: Revocations
    """Peers on this list are not admitted."""

    def issue(self, peer_id: PeerId, role: Role) -> bytes:
        """A new certificate for a peer, followed by this issuer's, PEM."""
        return certificates.member_chain(self.certificate, self.identity.key, self.trust, peer_id, role, self.clock())

    def answer(self, caller: PeerId, request: bytes) -> bytes:
        """Answer a request made with `ask`: the certificate. Raises Declined if the caller may not have it, Violation
        if the request is malformed."""
        asked = _parsed(request)
        if self.revoked.names(caller):
            raise Declined("the caller was revoked")
        role: Role = "observer" if asked.get("role") == "observer" else "member"
        if "certificate" in asked:
            held = self.trust.membership(asked["certificate"].encode())
            if (held.peer_id, held.role) != (caller, "member") or held.until <= self.clock():
                raise Declined("the certificate to be renewed is not the caller's, or has expired")
            if self.revoked.names(held.issuer):
                raise Declined("the node that admitted this peer was revoked: join with a new invitation")
            return self.issue(caller, "member")
        try:
            invitation = Invitation.parse(asked.get("invitation", ""))
        except ConfigError as error:
            raise Violation(str(error)) from None
        invitation.check(self.trust, self.clock())
        if role == "member":
            self.book.use(invitation, caller, self.clock())
        return self.issue(caller, role)


async def serve(libp2p: Libp2pDaemon, issuer: Issuer | None) -> None:
    """Answer requests for certificates, one at a time. To be called once per `libp2p`."""
    thread = ThreadPoolExecutor(1, "admission")  # what a caller has begun there goes on even if the caller gives up

    async def answer(caller: PeerId, request: bytes) -> bytes:
        if issuer is None or certificates.expiry(issuer.certificate) <= issuer.clock():
            raise Declined("this node admits nobody: use the address of a node that was started with --key")
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, issuer.answer, caller, request)
        except LocalError as error:
            log.warning("%s", error)
            raise Declined("this node cannot record which peers it admits") from error

    await libp2p.serve(CERTIFICATE_CALL, answer)


async def ask(libp2p: Libp2pDaemon, issuer: PeerId, **asked: str) -> bytes:
    """Ask a linked peer for a certificate, PEM. `asked` has either `invitation` and `role`, or the old `certificate`.

    Raises Unreachable, Declined with the peer's reason, Violation.
    """
    return await libp2p.call(issuer, CERTIFICATE_CALL, json.dumps(asked).encode(), CALL_TIMEOUT_S)


async def invited(libp2p: Libp2pDaemon, trust: RunTrust, role: Role, now: float) -> bytes:
    """Obtain a certificate, PEM, with the invitation in a joined address; one of another peer, role or run is refused.
    Raises ConfigError if there is no invitation, otherwise the error of the last one."""
    failure: NolocoError = ConfigError(
        "this run is members-only, and no node was joined with an invitation: ask a member who can make one"
        " (noloco invite) for the complete address; only a node with the run's key (--key FILE) needs none"
    )
    for address in libp2p.joined:
        if address.invitation:
            try:
                Invitation.parse(address.invitation).check(trust, now)
                made = await ask(libp2p, address.peer_id, invitation=address.invitation, role=role)
                if (found := trust.membership(made)).role == role and found.peer_id == libp2p.peer_id:
                    return made
                failure = Violation(f"issuer {address.peer_id} gave this node the certificate of another peer or role")
            except (PeerError, ConfigError) as error:
                failure = error
    raise failure


async def keep_valid(
    libp2p: Libp2pDaemon,
    credentials: Credentials,
    issuer: Issuer | None,
    issuers: Callable[[], list[JoinAddress]],
    changed: Callable[[str | None], None],
) -> None:
    """Renew the certificate after half of its life, at any issuer. Ends only with a LocalError, when it has expired.

    `changed` receives what is wrong, and None after each renewal.
    """
    while True:
        due_s = credentials.renewal_at - credentials.clock()
        if due_s > 0 and not credentials.unkept:
            await asyncio.sleep(min(due_s, LOOK_S))
            continue
        try:
            made = credentials.unkept if due_s > 0 else await _renewed(libp2p, credentials, issuer, issuers())
            credentials.adopt(made)
            changed(None)
        except (PeerError, LocalError) as error:
            if credentials.clock() >= credentials.membership.until:
                raise LocalError(
                    f"this node's certificate has expired ({error}): join with a new invitation (noloco invite)"
                ) from error
            if isinstance(error, LocalError):  # a full disk, or the daemon has died and is being restarted
                changed(f"this node's certificate could not be renewed: {error}")
            else:
                changed(f"no issuer renews this node's certificate ({error}): start a node that admits members")
        await asyncio.sleep(LOOK_S)


async def _renewed(
    libp2p: Libp2pDaemon, credentials: Credentials, issuer: Issuer | None, issuers: list[JoinAddress]
) -> bytes:
    """Obtain a certificate that is valid for longer than the current one. Raises the error of the last issuer."""
    failure: PeerError = Declined("no issuer is known")
    if issuer is not None:
        made = issuer.issue(credentials.peer_id, "member")
        if credentials.is_renewed_by(made):
            return made
        failure = Declined("this node's own issuer certificate expires too soon: restart it with --key")
    for address in issuers:
        try:
            await libp2p.dial(address, "issuer")
            made = await ask(libp2p, address.peer_id, certificate=credentials.chain.decode())
            if credentials.is_renewed_by(made):
                return made
            why = "its clock is ahead, or its own certificate expires too soon: restart it with --key"
            failure = Declined(f"issuer {address.peer_id}: {why}")
        except (PeerError, ConfigError) as error:
            failure = error if isinstance(error, PeerError) else Declined(str(error))
    raise failure


def _parsed(request: bytes) -> dict[str, str]:
    """A request parsed from JSON. Raises Violation unless it is an object of ASCII strings."""
    try:
        found: Any = json.loads(request[:4096])
    except NO_JSON:
        found = None
    if not isinstance(found, dict) or not all(isinstance(one, str) and one.isascii() for one in found.values()):
        raise Violation("the request for a certificate cannot be read")
    return found
