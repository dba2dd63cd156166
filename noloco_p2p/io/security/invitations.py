"""Invitations to a members-only run, which are part of a join address, and an issuer's record of who has used them."""

import contextlib
import json
import secrets
import struct
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import base58
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import NO_JSON, ConfigError, Declined, LocalError
from noloco_p2p.io.durable_files import read_if_there, write_whole, writing
from noloco_p2p.io.security.certificates import LIFETIME_S, RunTrust

MAX_USES = 10_000
NO_STAGE = 255
"""Means that an invitation names no stage."""
ANOTHER = "ask for another one (noloco invite)"
_FORM = struct.Struct(">16s8sIHB")
"""The first half of the run id, a random number, expiry in Unix seconds, uses, stage."""
_CONTEXT = b"noloco invitation 1\x00"


@dataclass(frozen=True, slots=True)
class Invitation:
    """The root's signed permission for up to `uses` peers to become members `until` a certain time (Unix seconds)."""

    run: bytes
    number: bytes
    until: int
    uses: int
    stage: int | None
    """The stage that newcomers are to hold; None lets them take the neediest one."""
    data: bytes
    """The signed form: all of the above, and the signature."""

    @classmethod
    def signed(
        cls, root: Ed25519PrivateKey, run_id: str, *, uses: int, until: float, stage: int | None
    ) -> "Invitation":
        """Make an invitation; `until` is in Unix seconds."""
        run, number = bytes.fromhex(run_id)[:16], secrets.token_bytes(8)
        content = _FORM.pack(run, number, int(until), uses, NO_STAGE if stage is None else stage)
        return cls(run, number, int(until), uses, stage, content + root.sign(_CONTEXT + content))

    @classmethod
    def parse(cls, text: str) -> "Invitation":
        """Parse the text of an invitation. Raises ConfigError if it is mistyped or cut off."""
        with contextlib.suppress(ValueError):
            data = base58.b58decode(text)
            if len(data) == _FORM.size + 64:
                run, number, until, uses, stage = _FORM.unpack_from(data)
                return cls(run, number, until, uses, None if stage == NO_STAGE else stage, data)
        raise ConfigError("the invitation at the end of the join address is mistyped or cut off: copy the whole line")

    @property
    def text(self) -> str:
        """The invitation as about 130 letters and digits (base58)."""
        return base58.b58encode(self.data).decode("ascii")

    def check(self, trust: RunTrust, now: float) -> None:
        """Raises Declined, with one line of text, unless the invitation admits to this run at `now` (Unix seconds)."""
        if self.run != bytes.fromhex(trust.run_id)[:16]:
            raise Declined(f"the invitation is for another run: {ANOTHER}")
        if not trust.has_signed(_CONTEXT + self.data[: _FORM.size], self.data[_FORM.size :]):
            raise Declined(f"the invitation was altered, or not made by this run's root: {ANOTHER}")
        if now >= self.until:
            ended = datetime.fromtimestamp(self.until, UTC)
            raise Declined(f"the invitation has expired ({ended:%Y-%m-%d %H:%M} UTC): {ANOTHER}")


class UseBook:
    """Records which peers have used which invitations at this issuer. A use is on disk before its peer is admitted."""

    def __init__(self, path: Path) -> None:
        """Read the file, if there is one. Raises LocalError if that fails: uses must not count from zero again."""
        self._path = path
        self._used: dict[str, tuple[int, list[PeerId]]] = {}
        """Number of an invitation → when it expires, and which peers have used it."""
        if (data := read_if_there(path)) is None:
            return
        try:
            found = json.loads(data)
            self._used = {number: (int(until), list(map(str, peers))) for number, (until, peers) in found.items()}
        except (*NO_JSON, TypeError, AttributeError, OverflowError) as error:
            raise LocalError(f"{path}, the book of invitations, cannot be read: {error}") from error

    def use(self, invitation: Invitation, peer: PeerId, now: float) -> None:
        """Record that a peer is admitted. The same peer again costs no further use. Raises Declined if the invitation
        is used up, LocalError if the file cannot be written."""
        number = invitation.number.hex()
        peers = self._used.get(number, (0, []))[1]
        if peer in peers:
            return
        if len(peers) >= invitation.uses:
            raise Declined(f"the invitation is used up ({len(peers)} of {invitation.uses}): {ANOTHER}")
        old = now - LIFETIME_S["member"]  # The clock may be ahead by this much; once set back, no use may be forgotten.
        used = {n: one for n, one in self._used.items() if one[0] > old} | {number: (invitation.until, [*peers, peer])}
        with writing(self._path):
            write_whole(self._path, json.dumps(used).encode(), 0o600)
        self._used = used
