"""Invitations to a members-only run, which are part of a join address, and the record of who has used them."""

import contextlib
import json
import secrets
import struct
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import base58
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import ConfigError, Declined, LocalError
from noloco_p2p.io.durable_files import write_whole
from noloco_p2p.io.security.certificates import RunTrust

MOST_USES = 10_000
NO_STAGE = 255
ANOTHER = "ask for another one (noloco invite)"
_FORM = struct.Struct(">16s8sIHB")
"""The first half of the run id, a number drawn at random, unix seconds of its end, uses, stage."""
_CONTEXT = b"noloco invitation 1\x00"


@dataclass(frozen=True, slots=True)
class Invitation:
    """The root's signed permission that so many peers may become members until a certain time."""

    run: bytes
    number: bytes
    until: int
    uses: int
    stage: int | None
    """The stage that the newcomers are to hold; none: the neediest."""
    signature: bytes

    @classmethod
    def signed(
        cls, root: Ed25519PrivateKey, run_id: str, *, uses: int, until: float, stage: int | None
    ) -> "Invitation":
        """A new one."""
        unsigned = cls(bytes.fromhex(run_id)[:16], secrets.token_bytes(8), int(until), uses, stage, b"")
        return replace(unsigned, signature=root.sign(_CONTEXT + unsigned._packed()))

    @classmethod
    def parse(cls, text: str) -> "Invitation":
        """Raises ConfigError: mistyped, or cut off."""
        with contextlib.suppress(ValueError):
            data = base58.b58decode(text)
            if len(data) == _FORM.size + 64:
                run, number, until, uses, stage = _FORM.unpack(data[: _FORM.size])
                return cls(run, number, until, uses, None if stage == NO_STAGE else stage, data[_FORM.size :])
        raise ConfigError("the invitation at the end of the join address is mistyped or cut off: copy the whole line")

    @property
    def text(self) -> str:
        """About 130 letters and digits."""
        return base58.b58encode(self._packed() + self.signature).decode("ascii")

    def check(self, trust: RunTrust, now: float) -> None:
        """Raises Declined, in one line, if it admits nobody to this run at this time (unix seconds)."""
        if self.run != bytes.fromhex(trust.run_id)[:16]:
            raise Declined(f"the invitation is to another run: {ANOTHER}")
        if not trust.has_signed(_CONTEXT + self._packed(), self.signature):
            raise Declined(f"the invitation was changed, or not made by this run's root: {ANOTHER}")
        if now >= self.until:
            ended = datetime.fromtimestamp(self.until, UTC)
            raise Declined(f"the invitation has expired ({ended:%Y-%m-%d %H:%M} UTC): {ANOTHER}")

    def _packed(self) -> bytes:
        stage = NO_STAGE if self.stage is None else self.stage
        return _FORM.pack(self.run, self.number, self.until, self.uses, stage)


class UseBook:
    """Which peers have used which invitations at this issuer. The file is on disk before anybody is admitted."""

    def __init__(self, path: Path) -> None:
        """Raises LocalError if the file exists and cannot be read: without it uses would be counted from zero."""
        self._path = path
        self._used: dict[str, tuple[int, list[PeerId]]] = {}
        """For each invitation's number, when it expires, and who has used it."""
        try:
            found = json.loads(path.read_bytes())
            self._used = {number: (int(until), list(map(str, peers))) for number, (until, peers) in found.items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise LocalError(f"{path}, the book of invitations, cannot be read: {error}") from error

    def use(self, invitation: Invitation, peer: PeerId, now: float) -> None:
        """Record that the peer is admitted; the same peer again costs no use. Raises Declined: used up; LocalError."""
        number = invitation.number.hex()
        peers = self._used.get(number, (0, []))[1]
        if peer in peers:
            return
        if len(peers) >= invitation.uses:
            raise Declined(f"the invitation is used up ({len(peers)} of {invitation.uses}): {ANOTHER}")
        used = {n: one for n, one in self._used.items() if one[0] > now} | {number: (invitation.until, [*peers, peer])}
        try:
            write_whole(self._path, json.dumps(used).encode(), 0o600)
        except OSError as error:
            raise LocalError(f"{self._path} cannot be written: {error.strerror}") from error
        self._used = used
