"""Decides which addresses named by others this node dials, after resolving names, so that no stranger can make it
connect to hosts that only its owner can reach.

Public IP addresses are dialled. Private, link-local and loopback ones are dialled only if this node, or a host named by
its owner, has an address of that kind.
"""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from math import inf
from pathlib import Path
from typing import TypeVar

from noloco_p2p.config import ListenSettings
from noloco_p2p.core.messages import STREAM, Advert, PeerId
from noloco_p2p.io.blocking_calls import BlockingCalls
from noloco_p2p.io.dht.addresses import JoinAddress, ip_of
from noloco_p2p.io.dht.identity import public_key_of

CONTAINER_MARKS = "/.dockerenv", "/run/.containerenv"
"""Files that container engines put into their containers."""
LOOKUP_S = 2.0
"""Longest wait for names to be resolved, seconds. An answer that comes later is used the next time."""
NAMES_AT_ONCE = 32
NAMES_KEPT, KEPT_S, FORGOTTEN_S = 256, 60.0, 180.0
"""How many names' addresses are remembered, after how long they are looked up again, and when a name is forgotten that
nobody has asked for since, seconds. Those remembered go first, and keep their places. Names of nodes are asked for at
each reading of the directory; any stranger can have others looked up by asking for dial backs, but only so many."""
AT_ONCE = 128
"""How many peers of a list are looked at before other tasks get a turn."""
MAPPED = "::ffff:"
"""Prefix of an IPv4 address on an IPv6 socket that accepts both, as gRPC's sockets do."""
RELAY = "relay/"
"""Prefix of the address of a peer behind a relay; the relay's peer id follows."""
_HOST = r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9._-]{1,253}))"
_ENDPOINT = re.compile(rf"(?:http://)?{_HOST}:([1-9][0-9]{{0,4}})(?:/[A-Za-z0-9_./-]{{0,100}})?")
"""`host:port`, an IPv6 host in brackets; or the URL of a page there."""
T = TypeVar("T")


async def in_turns(items: Iterable[T], at_once: int = AT_ONCE) -> AsyncIterator[T]:
    """The items, with a turn for other tasks after each `at_once` of them, as there may be thousands."""
    for number, one in enumerate(items, 1):
        yield one
        if number % at_once == 0:
            await asyncio.sleep(0)


@lru_cache(16_384)
def scope(address: str) -> str:
    """Where an IP address can be reached from: `public`, `private`, `link`, `loopback`; or `nowhere`."""
    ip: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if ip.is_unspecified or ip.is_multicast:
        return "nowhere"
    if ip.is_loopback or ip.is_link_local:
        return "loopback" if ip.is_loopback else "link"
    return "public" if ip.is_global else "private"


def host_of(address: str) -> str:
    """What counts as one host if its owner is limited: an IP address; for IPv6 the /64 network, because all of its
    addresses belong to one subscriber."""
    plain = address.partition("%")[0].removeprefix(MAPPED)
    return str(ip_network((plain, 64), strict=False)) if ":" in plain else plain


def host_scope(host: str) -> str:
    """The `scope` of an IP address, or `name` for a host name, which is not resolved."""
    return scope(host) if ip_of(host) else "loopback" if host == "localhost" else "name"


def is_open_to_others(listen: ListenSettings) -> bool:
    """Whether strangers can reach a node with these settings: not on loopback, nor on a container's private address."""
    where = host_scope(listen.announce_host or listen.host)
    contained = any(Path(mark).exists() for mark in CONTAINER_MARKS)
    return where in ("public", "name") or (where != "loopback" and not contained)


def endpoint(text: str) -> tuple[str, int] | None:
    """The host and port of `host:port` or `http://host:port/page`; None if the text is neither."""
    found = _ENDPOINT.fullmatch(text)
    return (found[1] or found[2], int(found[3])) if found is not None and int(found[3]) < 65536 else None


def joined(host: str, port: int) -> str:
    """`host:port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_private(address: str) -> bool:
    """Whether an address is `host:port` with a private IP address."""
    place = endpoint(address)
    return place is not None and host_scope(place[0]) == "private"


def relay_of(address: str) -> PeerId | None:
    """The relay that an address names, or None."""
    relay = address.removeprefix(RELAY)
    return relay if address.startswith(RELAY) and public_key_of(relay) is not None else None


def is_streamed(address: str) -> bool:
    """Whether a peer at this address is reached over libp2p."""
    return address == STREAM or relay_of(address) is not None


class Reach:
    """Resolves and filters the addresses that this machine dials. Belongs to one event loop."""

    def __init__(self, own: Iterable[str]) -> None:
        """`own`: the hosts at which this node is reached, and those that its owner has named."""
        self._own = tuple(dict.fromkeys(own))
        self._known: dict[str, tuple[float, tuple[str, ...]]] = {}
        """Host name → when it was looked up, and its addresses."""
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._threads = BlockingCalls("names", 2)

    async def addresses(self, hosts: Iterable[str]) -> dict[str, str]:
        """Host → the IP address at which to dial it. Hosts not to be dialled, or not resolved yet, are left out."""
        wanted = dict.fromkeys(hosts)
        await self._look_up({host: None async for host in in_turns((*self._own, *wanted)) if not ip_of(host)})
        scopes = {"public"} | {scope(address) for host in self._own for address in self._of(host)} - {"nowhere"}
        found = {host: [one for one in self._of(host) if scope(one) in scopes] async for host in in_turns(wanted)}
        return {host: some[0] for host, some in found.items() if some}

    async def within(self, adverts: Iterable[Advert]) -> list[Advert]:
        """These adverts without the addresses that this node must not dial; names in gRPC addresses are resolved.

        Addresses reached over libp2p are kept, because their streams dial nothing but relays, whose own addresses are
        checked (`joins`).
        """
        adverts = [one async for one in in_turns(adverts)]
        named = {text for one in adverts for text in (*one.addresses, one.metrics, one.libp2p_metrics)}
        places = {text: at async for text in in_turns(sorted(named)) if (at := endpoint(text)) is not None}
        known = await self.addresses(host for host, _ in places.values())
        dialled = {text: joined(known[host], port) for text, (host, port) in places.items() if host in known}
        return [
            replace(
                one,
                addresses=tuple(dialled.get(at, at) for at in one.addresses if at in dialled or is_streamed(at)),
                metrics=one.metrics if one.metrics in dialled else "",
                libp2p_metrics=one.libp2p_metrics if one.libp2p_metrics in dialled else "",
            )
            async for one in in_turns(adverts)
        ]

    async def joins(self, addresses: Iterable[JoinAddress]) -> list[JoinAddress]:
        """Those of the addresses that this node may dial, with their names resolved."""
        addresses = list(addresses)
        known = await self.addresses(one.host for one in addresses)
        return [replace(one, host=known[one.host]) async for one in in_turns(addresses) if one.host in known]

    def _of(self, host: str) -> tuple[str, ...]:
        return (host,) if ip_of(host) else self._known.get(host, (0.0, ()))[1]

    async def _look_up(self, hosts: Collection[str]) -> None:
        """Resolve names, waiting LOOKUP_S at most, and for each request to a name server only once: a stranger's server
        may take minutes."""
        loop, begun = asyncio.get_running_loop(), list[asyncio.Task[None]]()
        stale = loop.time() - FORGOTTEN_S
        self._known = {host: one for host, one in self._known.items() if host in hosts or one[0] > stale}
        for host in sorted(hosts, key=lambda host: host not in self._known):
            due = loop.time() - self._known.get(host, (-inf, ()))[0] > KEPT_S and host not in self._asking
            room = host in self._known or len(self._known) + len(self._asking) < NAMES_KEPT
            if due and room and len(self._asking) < NAMES_AT_ONCE:
                self._asking[host] = loop.create_task(self._ask(host))
                begun.append(self._asking[host])
        if begun:
            await asyncio.wait(begun, timeout=LOOKUP_S)

    async def _ask(self, host: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            look_up = partial(socket.getaddrinfo, host, 1, type=socket.SOCK_STREAM)
            found = await loop.run_in_executor(self._threads, look_up)
            # Names of the local network may also lead to an IPv6 address with a zone; libp2p addresses have none.
            addresses = tuple(dict.fromkeys(str(one[4][0]) for one in found if "%" not in str(one[4][0])))
        except (OSError, UnicodeError):
            addresses = self._of(host)  # there may be no network at the moment
        finally:
            self._asking.pop(host, None)
        self._known[host] = loop.time(), addresses
