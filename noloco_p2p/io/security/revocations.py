"""The list of peers that no longer belong to a run: the run's root signs it, and every node passes it on.

Adverts contain the number of a node's list. A node that sees a higher number than its own asks that node for its list
over libp2p, in the same way as a newcomer asks the node that it joins. A list's number is the time at which it was
made; an older list never replaces a newer one.
"""

import asyncio
import logging
import random
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import ConfigError, LocalError, PeerError, Violation
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.dht.identity import peer_id_of, public_key_of
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.dht.streams import logged
from noloco_p2p.io.durable_files import read_if_there, write_whole, writing
from noloco_p2p.io.security.certificates import RunTrust

MAX_REVOKED = 8192
"""Most peers on a list. A line of 1 Mbit/s transfers it in half of CALL_TIMEOUT_S."""
LOOK_S = 5.0
"""Time between two checks of the file and of other nodes' lists, seconds."""
ASKED, REMEMBERED = 3, 64
"""How many of the peers with a newer list are asked at each check: those that were asked least often among the last so
many, because some may claim a list that they do not have."""
CALL, CALL_TIMEOUT_S = "noloco/revoked/1", 5.0
_FORM = struct.Struct(">16sQ")
"""The first half of the run id, and the number. The peers' public keys and a 64-byte signature follow."""
_KEY_BYTES = 32
_CONTEXT = b"noloco revocations 1\x00"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DenyList:
    """The root's signed statement that these peers do not belong to the run."""

    number: int = 0
    """When the list was made, in Unix seconds, or more if needed for a later list to have a greater number."""
    peers: tuple[PeerId, ...] = ()
    """In the order in which they were revoked."""
    signed: bytes = b""
    """The signed form that is sent and stored; it contains the other two."""

    @classmethod
    def make(cls, root: Ed25519PrivateKey, run_id: str, number: int, peers: Sequence[PeerId]) -> "DenyList":
        """Make and sign a list. Raises ConfigError if one of `peers` is not a peer id, or if there are too many."""
        kept = tuple(dict.fromkeys(peers))
        if len(kept) > MAX_REVOKED:
            raise ConfigError(f"a list holds at most {MAX_REVOKED:,} peers: revoke the node that admitted these")
        keys = [public_key_of(peer) for peer in kept]
        if None in keys:
            raise ConfigError(f"{kept[keys.index(None)]} is not a peer id: copy one from noloco top --json")
        content = _FORM.pack(bytes.fromhex(run_id)[:16], number) + b"".join(key for key in keys if key)
        return cls(number, kept, content + root.sign(_CONTEXT + content))

    @classmethod
    def read(cls, data: bytes, trust: RunTrust) -> "DenyList":
        """Parse a signed list. Raises Violation unless this run's root has signed it."""
        content, signature = data[:-64], data[-64:]
        keys = content[_FORM.size :]
        try:
            run, number = _FORM.unpack_from(content)
            if len(keys) % _KEY_BYTES or run != bytes.fromhex(trust.run_id)[:16]:
                raise ValueError("another length or run")
            if not trust.has_signed(_CONTEXT + content, signature):
                raise ValueError("another signer")
        except (struct.error, ValueError) as error:
            raise Violation("the list of revoked peers was not signed by this run's root") from error
        peers = tuple(peer_id_of(keys[at : at + _KEY_BYTES]) for at in range(0, len(keys), _KEY_BYTES))
        return cls(number, peers, data)


class Revocations:
    """The newest list that this node has seen, also kept in a file."""

    def __init__(self, trust: RunTrust, path: Path | None = None) -> None:
        """Read the file. Raises LocalError if it is damaged: without it, revoked peers would be trusted again."""
        self._trust, self._path = trust, path
        self.held, self._peers = DenyList(), frozenset[PeerId]()
        """The current list, whose number is 0 if it is empty, and the peers on it."""
        self.admitted_by: Mapping[PeerId, PeerId | None] = {}
        """The issuer of each member, as far as its record was there at the last reading of the directory."""
        self._listeners: list[Callable[[], object]] = []
        try:
            self.look()
        except Violation as error:
            raise LocalError(f"{path}: {error}; remove the file, and the node will ask others for theirs") from error

    def names(self, *peers: PeerId) -> bool:
        """Whether any of these peers is revoked."""
        return not self._peers.isdisjoint(peers)

    def refuse(self, mine: Sequence[PeerId]) -> None:
        """Raise LocalError if one of these is revoked: a node, and the one that issued its certificate."""
        if self.names(*mine[:1]):
            raise LocalError("this node was revoked: to take part again, it needs another --dir and a new invitation")
        if self.names(*mine):
            raise LocalError("the node that admitted this one was revoked: ask for a new invitation")

    def listen(self, changed: Callable[[], object]) -> None:
        """Call `changed` whenever a newer list is adopted from now on."""
        self._listeners.append(changed)

    def look(self) -> None:
        """Adopt a list that `noloco revoke` has written to the file, or replace it there by a newer one that this node
        has adopted. Raises Violation, LocalError."""
        if self._path is None:
            return
        data = read_if_there(self._path) or b""
        if data and data != self.held.signed:
            self.adopt(data)
        if data != self.held.signed:
            with writing(self._path):
                write_whole(self._path, self.held.signed)

    def adopt(self, data: bytes) -> bool:
        """Adopt a list if it is newer; returns whether it is. Raises Violation if the root has not signed it,
        LocalError if it cannot be written, in which case it is in force in this process only."""
        found = DenyList.read(data, self._trust)
        if (found.number, found.signed) <= (self.held.number, self.held.signed):
            return False
        if lost := self._peers.difference(found.peers):
            log.warning("list %d lacks revoked peers, such as %s: revoke them again", found.number, min(lost))
        self.held, self._peers = found, frozenset(found.peers)
        for changed in self._listeners:
            changed()
        self.look()  # the file may just have got a newer list
        return True


async def serve(libp2p: Libp2pDaemon, revocations: Revocations) -> None:
    """Send the list to every peer that asks. To be called once per `libp2p`."""

    async def answer(caller: PeerId, request: bytes) -> bytes:
        return revocations.held.signed

    await libp2p.serve(CALL, answer)


async def ask(libp2p: Libp2pDaemon, revocations: Revocations, others: Sequence[JoinAddress]) -> None:
    """Ask these peers for their lists, all at once: some may hang. Raises LocalError."""

    async def adopt_from(address: JoinAddress) -> None:
        with suppress(PeerError, ConfigError):
            await libp2p.dial(address)
            data = await libp2p.call(address.peer_id, CALL, b"", CALL_TIMEOUT_S)
            if data and revocations.adopt(data):
                log.info("peer %s has a newer list of revoked peers: %d", address.peer_id, len(revocations.held.peers))

    await asyncio.gather(*map(adopt_from, others))


async def keep(
    libp2p: Libp2pDaemon,
    revocations: Revocations,
    ahead: Callable[[], Sequence[JoinAddress]],
    mine: Callable[[], Sequence[PeerId]],
) -> None:
    """Keep looking for newer lists, in the file and at the peers that are `ahead`.

    Ends only with a LocalError, when one of `mine`, this node and the one that issued its certificate, is revoked.
    """
    lately, said, failed = deque[PeerId](maxlen=REMEMBERED), "", ""

    async def look() -> None:
        revocations.look()

    while True:
        revocations.refuse(mine())
        # The disk may be full, or the daemon dead until it is restarted.
        said = await logged("revocations", look(), said)
        asked = sorted(ahead(), key=lambda one: (lately.count(one.peer_id), random.random()))[:ASKED]
        lately.extend(one.peer_id for one in asked)
        failed = await logged("revocations", ask(libp2p, revocations, asked), failed)
        await asyncio.sleep(LOOK_S)
