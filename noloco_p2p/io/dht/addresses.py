"""Addresses of this machine and of others: join addresses, the host to announce, ports, and the file of known peers.

Does not import hivemind.
"""

import contextlib
import errno
import functools
import ipaddress
import json
import re
import socket
import threading
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import NO_JSON, ConfigError, LocalError
from noloco_p2p.io.dht.identity import public_key_of
from noloco_p2p.io.durable_files import make_folders, read_if_there, write_whole, writing

_FORM = re.compile(
    r"/(ip4|ip6|dns4)/([^/\s]{1,253})/tcp/([0-9]{1,5})/p2p/([1-9A-Za-z]+)(?:/invite/([1-9A-Za-z]{1,256}))?"
)
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
PEERS_LIMIT = 64
"""Most known peers; beyond that, the one that was seen longest ago is forgotten first."""
_NOWHERE = "192.0.2.1"
"""An address reserved for documentation (RFC 5737). The route to it is the default route; nothing is sent there."""


@dataclass(frozen=True, slots=True)
class JoinAddress:
    """Where a libp2p daemon listens, and its peer id: `/ip4/HOST/tcp/PORT/p2p/PEER_ID` (or `ip6`, `dns4`).

    In a members-only run `/invite/INVITATION` may follow.
    """

    host: str
    """IP address or DNS name."""
    port: int
    peer_id: PeerId
    invitation: str = field(default="", compare=False)
    """Admits a newcomer to a members-only run. It is not part of the address proper, and is not printed with it."""

    @classmethod
    def parse(cls, text: str) -> "JoinAddress":
        """Parse a join address. Raises ConfigError that quotes the text and says what is wrong with it."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise ConfigError(_malformed(text, "it is not of the form /ip4/HOST/tcp/PORT/p2p/PEER_ID"))
        kind, host, port, peer_id, invitation = found.groups()
        if not 0 < int(port) < 65536:
            raise ConfigError(_malformed(text, f"there is no port {port}"))
        if public_key_of(peer_id) is None:
            raise ConfigError(_malformed(text, "its peer id is mistyped or cut off"))
        if kind != _kind(host):
            raise ConfigError(_malformed(text, f"{host!r} is not a valid {kind} host"))
        return cls(host, int(port), peer_id, invitation or "")

    @property
    def multiaddress(self) -> str:
        """The address without the peer id: `/ip4/HOST/tcp/PORT`."""
        return host_multiaddress(self.host, self.port)

    def __str__(self) -> str:
        """The text that others pass to `--join`."""
        return f"{self.multiaddress}/p2p/{self.peer_id}"


@functools.lru_cache(16_384)
def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a host is given as; None if it is given as a name, or not a host."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _malformed(text: str, reason: str) -> str:
    shown = text if len(text) <= 160 else text[:157] + "..."
    return f"malformed join address {shown!r}: {reason}; copy the address that a running node prints"


def _kind(host: str) -> str | None:
    """`ip4`, `ip6` or `dns4`; None if it is not a host at all, or has a zone, of which libp2p addresses have none."""
    if (ip := ip_of(host)) is not None and "%" not in host:
        return f"ip{ip.version}"
    return "dns4" if _NAME.fullmatch(host) and not re.fullmatch(r"[0-9.]+", host) else None


def host_multiaddress(host: str, port: int) -> str:
    """`/ip4/HOST/tcp/PORT` for an IP address or name. Raises ConfigError if `host` is neither."""
    kind = _kind(host)
    if kind is None:
        raise ConfigError(f"{host!r} in listen.host or listen.announce_host is neither an IP address nor a host name")
    return f"/{kind}/{host}/tcp/{port}"


def local_host_towards(*hosts: str, only: int = 0) -> str:
    """The address of this machine on the route to the first of `hosts` to which there is one; the loopback address if
    there is none. `only`: an address family; 0 for any. IPv6 addresses with a zone, to which names of the local network
    may lead, are passed over, because libp2p addresses have none.

    A UDP socket is connected and closed; no packet is sent.
    """
    for host in hosts:
        with contextlib.suppress(OSError, StopIteration):
            found = socket.getaddrinfo(host, 9, only, socket.SOCK_DGRAM)
            family, _, _, _, target = next(one for one in found if "%" not in str(one[4][0]))
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def announced_host(host: str, announce_host: str | None, join: Sequence[JoinAddress]) -> str:
    """The host that this node announces: `announce_host`, or otherwise the address that it listens on.

    If it listens on a wildcard address, it announces this machine's address on the route to the first peer of `join` to
    which there is one; otherwise, as the first node of a run does, on the default route.
    """
    if announce_host is not None:
        return announce_host
    if (ip := ip_of(host)) is not None and ip.is_unspecified:
        only = socket.AF_INET if ip.version == 4 else 0  # a socket on 0.0.0.0 does not accept IPv6
        return local_host_towards(*(one.host for one in join), _NOWHERE, only=only)
    return host


def from_here(host: str) -> str:
    """The host, as written in a URL, by which a process on this machine reaches a server that listens on `host`."""
    if (ip := ip_of(host)) is not None and ip.is_unspecified:
        host = "127.0.0.1" if ip.version == 4 else "::1"
    return f"[{host}]" if ":" in host else host


def reserve_port(host: str, port: int, key: str = "listen.dht_port") -> socket.socket:
    """A socket bound to (host, port); port 0 picks a free one. It does not listen: keep it until the real listener is
    up.

    The libp2p daemon would silently share a port with another daemon, so the check is made here. `key` is the setting
    that has the port. Raises LocalError that names the port if it is in use, or the host if it is not this machine's.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise LocalError(
            f"cannot listen on {host}: no such host; set listen.host to an address of this machine"
        ) from error
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind(target)
    except OSError as error:
        held.close()
        if error.errno == errno.EADDRINUSE:
            raise LocalError(port_in_use(host, port, key)) from error
        raise LocalError(
            f"cannot listen on {host} port {port}: {error.strerror}; change listen.host or the port"
        ) from error
    return held


def port_in_use(host: str, port: int, key: str) -> str:
    """The error message for a port in use; `key` is the setting that has the port."""
    return f"port {port} on {host} is in use by another process: choose another {key}, or 0 to pick one"


class KnownPeers:
    """Libp2p addresses of peers seen before, kept in a small file, so that a node finds its swarm after a restart.

    At most `PEERS_LIMIT`, one per peer, in the order in which they were last seen. A peer that answers is never
    displaced by a new one.
    """

    def __init__(self, path: Path, joined: Iterable[JoinAddress] = ()) -> None:
        """Reads the file if there is one, skipping anything that is not an address: the file is only a convenience.
        Raises LocalError if it exists but cannot be read.

        `joined`: addresses named by the owner. They are dialled even if another address of the peer is known: such an
        address may be a name that leads to another IP address tomorrow.
        """
        self._path, self._joined = path, tuple(joined)
        self._addresses: dict[PeerId, JoinAddress] = {}
        self._turn, self._remembering = 0, threading.Lock()
        entries: object = []
        with contextlib.suppress(*NO_JSON):
            entries = json.loads(read_if_there(path) or b"[]")
        for entry in entries if isinstance(entries, list) else []:
            with contextlib.suppress(ConfigError):
                self._put(JoinAddress.parse(str(entry)))
        self._stored = set(self._addresses.values())

    def remember(self, addresses: Iterable[JoinAddress]) -> None:
        """Remember peers that answer now, and write the file if it lacks a peer or an address. May run in any thread,
        because a disk may take seconds.

        Raises LocalError if the file cannot be written.
        """
        with self._remembering, writing(self._path):
            answering = {address.peer_id: address for address in addresses}
            for address in answering.values():
                self._put(address, answering)
            if (known := set(self._addresses.values())) != self._stored:
                make_folders(self._path.parent)
                text = json.dumps([str(address) for address in self._addresses.values()], indent=1)
                write_whole(self._path, text.encode())
                self._stored = known

    def unlinked(self, linked: set[PeerId], limit: int) -> list[JoinAddress]:
        """Addresses to be dialled: up to `limit` known peers without a link, different ones at each call, and all
        joined peers without a link."""
        missing = [address for peer_id, address in list(self._addresses.items()) if peer_id not in linked]
        start = self._turn % len(missing) if missing else 0
        chosen = (missing[start:] + missing[:start])[:limit]
        self._turn += len(chosen)
        return list(dict.fromkeys([*chosen, *(one for one in self._joined if one.peer_id not in linked)]))

    def _put(self, address: JoinAddress, answering: Container[PeerId] = ()) -> None:
        if self._addresses.pop(address.peer_id, None) is None and len(self._addresses) == PEERS_LIMIT:
            gone = next((peer_id for peer_id in self._addresses if peer_id not in answering), None)
            if gone is None:
                return
            del self._addresses[gone]
        self._addresses[address.peer_id] = address
