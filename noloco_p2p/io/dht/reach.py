"""Which of the addresses that others name this node dials: public IP addresses, and private ones if this node's own are
private, too; names are resolved first. So no stranger makes a node connect to what only its owner can reach.
"""

import asyncio
import re
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from noloco_p2p.config import ListenSettings
from noloco_p2p.core.messages import PEER_ID_CHARACTERS, STREAM, Advert, PeerId
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.dht.identity import public_key_of

CONTAINER_MARKS = "/.dockerenv", "/run/.containerenv"
"""Files that engines put into containers."""
LOOKUP_S = 2.0
"""Longest wait for the addresses of names; later answers are there the next time."""
NAMES_AT_ONCE = 32
NAMES_KEPT, KEPT_S = 256, 60.0
"""Names whose addresses are remembered, and for how long, seconds."""
RELAY = "relay/"
"""Followed by the peer id of a relay: the address of a peer to which that relay splices streams."""
_HOST = r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9._-]{1,253}))"
_ENDPOINT = re.compile(rf"(?:http://)?{_HOST}:([1-9][0-9]{{0,4}})(?:/[A-Za-z0-9_./-]{{0,100}})?")
"""`host:port`, an IPv6 host in brackets; or the URL of a page there."""


@lru_cache(4096)
def scope(address: str) -> str:
    """From where an IP address can be reached: `public`, `private`, `link`, `loopback`; `nowhere`: no host has it."""
    ip: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if ip.is_unspecified or ip.is_multicast:
        return "nowhere"
    if ip.is_loopback or ip.is_link_local:
        return "loopback" if ip.is_loopback else "link"
    return "public" if ip.is_global else "private"


def host_scope(host: str) -> str:
    """The `scope` of an IP address; `name` for a name, whose addresses are not looked up."""
    return scope(host) if _is_address(host) else "loopback" if host == "localhost" else "name"


def is_open_to_others(listen: ListenSettings) -> bool:
    """Whether strangers' nodes can reach what listens there: not on loopback, nor in a network of containers."""
    where = host_scope(listen.announce_host or listen.host)
    contained = any(Path(mark).exists() for mark in CONTAINER_MARKS)
    return where in ("public", "name") or (where != "loopback" and not contained)


def _is_address(host: str) -> bool:
    try:
        return bool(ip_address(host))
    except ValueError:
        return False


def endpoint(text: str) -> tuple[str, int] | None:
    """The host and the port of `host:port` or `http://host:port/page`; None: it is neither."""
    found = _ENDPOINT.fullmatch(text)
    return (found[1] or found[2], int(found[3])) if found is not None and int(found[3]) < 65536 else None


def joined(host: str, port: int) -> str:
    """`host:port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_private(address: str) -> bool:
    """Whether an address is `host:port` with the IP address of a private network."""
    place = endpoint(address)
    return place is not None and host_scope(place[0]) == "private"


def relay_of(address: str) -> PeerId | None:
    """The relay that an address names; None: it names none."""
    relay = address.removeprefix(RELAY)
    known = address.startswith(RELAY) and len(relay) <= PEER_ID_CHARACTERS and public_key_of(relay) is not None
    return relay if known else None


def is_streamed(address: str) -> bool:
    """Whether a peer at this address is reached over libp2p."""
    return address == STREAM or relay_of(address) is not None


class Reach:
    """What one machine dials. Belongs to one event loop."""

    def __init__(self, own: Iterable[str]) -> None:
        """`own`: the hosts under which this node is reached, and those that its owner has named."""
        self._own = tuple(dict.fromkeys(own))
        self._known: dict[str, tuple[float, tuple[str, ...]]] = {}
        """Names: when they were asked for, and their addresses."""
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(2, "names")

    async def addresses(self, hosts: Iterable[str]) -> dict[str, str]:
        """Host → the IP address at which it is dialled. Hosts not dialled, or not resolved yet, are left out."""
        wanted = dict.fromkeys(hosts)
        await self._look_up([*self._own, *wanted])
        scopes = {"public"} | {scope(address) for host in self._own for address in self._of(host)} - {"nowhere"}
        found = {host: [one for one in self._of(host) if scope(one) in scopes] for host in wanted}
        return {host: some[0] for host, some in found.items() if some}

    async def within(self, adverts: Iterable[Advert]) -> list[Advert]:
        """These adverts without the addresses that this node does not dial; in those of gRPC names are resolved.

        Streams dial only relays, at the addresses that these announce (`joins`).
        """
        adverts = list(adverts)
        named = {text for one in adverts for text in (*one.addresses, one.metrics, one.libp2p_metrics)}
        places = {text: at for text in sorted(named) if (at := endpoint(text)) is not None}
        known = await self.addresses(host for host, _ in places.values())
        dialled = {text: joined(known[host], port) for text, (host, port) in places.items() if host in known}
        return [
            replace(
                one,
                addresses=tuple(
                    dialled.get(text, text) for text in one.addresses if text in dialled or is_streamed(text)
                ),
                metrics=one.metrics if one.metrics in dialled else "",
                libp2p_metrics=one.libp2p_metrics if one.libp2p_metrics in dialled else "",
            )
            for one in adverts
        ]

    async def joins(self, addresses: Iterable[JoinAddress]) -> list[JoinAddress]:
        """Of these addresses, those that this node dials."""
        addresses = list(addresses)
        known = await self.addresses(one.host for one in addresses)
        return [replace(one, host=known[one.host]) for one in addresses if one.host in known]

    def _of(self, host: str) -> tuple[str, ...]:
        return (host,) if _is_address(host) else self._known.get(host, (0.0, ()))[1]

    async def _look_up(self, hosts: Iterable[str]) -> None:
        """Resolve names, for LOOKUP_S at most."""
        loop = asyncio.get_running_loop()
        fresh = {host for host, (at, _) in self._known.items() if at > loop.time() - KEPT_S}
        for host in hosts:
            if not _is_address(host) and host not in fresh and len(self._asking) < NAMES_AT_ONCE:
                self._asking.setdefault(host, loop.create_task(self._ask(host)))
        if self._asking:
            await asyncio.wait(self._asking.values(), timeout=LOOKUP_S)

    async def _ask(self, host: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(
                self._threads, lambda: socket.getaddrinfo(host, 1, type=socket.SOCK_STREAM)
            )
            addresses = tuple(dict.fromkeys(str(one[4][0]) for one in found))
        except (OSError, UnicodeError):
            addresses = self._of(host)  # there may be no network at the moment
        finally:
            self._asking.pop(host, None)
        self._known.pop(host, None)
        self._known[host] = loop.time(), addresses
        while len(self._known) > NAMES_KEPT:
            del self._known[next(iter(self._known))]
