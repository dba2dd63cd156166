"""The libp2p addresses of peers once seen, in a small file of the node, so that a restarted node finds its swarm."""

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.io.dht.addresses import JoinAddress

PEERS_LIMIT = 64
"""More than these are forgotten, the one that was seen longest ago first."""
_FILE_LIMIT_BYTES = 65_536


class KnownPeers:
    """At most `PEERS_LIMIT` addresses, one a peer, in the order in which they were last seen."""

    def __init__(self, path: Path) -> None:
        """Reads nothing yet; see `load`."""
        self._path = path
        self._addresses: dict[PeerId, JoinAddress] = {}
        self._turn = 0

    def load(self) -> None:
        """Read the file if there is one. What is not an address in it is passed over: it is only a help.

        Raises LocalError when the file exists and cannot be read.
        """
        try:
            with open(self._path, "rb") as file:
                entries = json.loads(file.read(_FILE_LIMIT_BYTES))
        except (FileNotFoundError, ValueError):
            return
        except OSError as error:
            raise LocalError(f"known peers {self._path}: {error.strerror}") from error
        for entry in entries if isinstance(entries, list) else []:
            with contextlib.suppress(ConfigError):
                self._put(JoinAddress.parse(str(entry)))

    def remember(self, addresses: Iterable[JoinAddress]) -> None:
        """Remember peers that answer now, and write the file when a peer or an address is new.

        Raises LocalError when the file cannot be written.
        """
        before = set(self._addresses.values())
        for address in addresses:
            self._put(address)
        if set(self._addresses.values()) == before:
            return
        fresh = self._path.with_name(self._path.name + ".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(fresh, "w", encoding="utf-8") as file:
                json.dump([str(address) for address in self._addresses.values()], file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._path)
        except OSError as error:
            raise LocalError(f"known peers {self._path}: {error.strerror}") from error

    def unlinked(self, linked: set[PeerId], limit: int) -> list[JoinAddress]:
        """Up to `limit` known peers without a link, to be dialled now; the next call begins with others."""
        missing = [address for peer_id, address in self._addresses.items() if peer_id not in linked]
        start = self._turn % len(missing) if missing else 0
        chosen = (missing[start:] + missing[:start])[:limit]
        self._turn += len(chosen)
        return chosen

    def _put(self, address: JoinAddress) -> None:
        self._addresses.pop(address.peer_id, None)
        self._addresses[address.peer_id] = address
        while len(self._addresses) > PEERS_LIMIT:
            del self._addresses[next(iter(self._addresses))]
