"""Ports of the home router that lead to this node, if the router maps them when asked over UPnP
(ARCHITECTURE.md, "Reachability").

miniupnpc blocks, so it runs in a thread.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import Any

from noloco_p2p.config import ListenSettings
from noloco_p2p.errors import Unreachable
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.dht.reach import host_scope, scope

SEARCH_MS = 500
"""How long a router has to answer. Kinds of routers are searched for one after the other, until one answers."""
LEASE_S = 3600
"""A router forgets a mapping after this, unless it is renewed."""
RENEW_S = 300.0
"""Time between renewals. A router that restarts forgets its mappings until the next one."""
TRIES = 8
"""Ports of the router that are tried: others may have the first ones."""
END_S = 3.0
"""Longest wait until the mappings are removed."""
_PERMANENT, _TAKEN = "OnlyPermanentLeasesSupported", "ConflictInMappingEntry"
"""What miniupnpc calls the errors 725 and 718 of a router."""

log = logging.getLogger(__name__)


def home_router(listen: ListenSettings, join: Sequence[JoinAddress], *, members: bool) -> "HomeRouter | None":
    """What a node asks for mappings; None: it does not ask. For an open run it does only if it joins at a public
    address, so a run within a private network stays there. `members`: the run is known to be members-only."""
    wanted = members or any(one.invitation or _is_public(one.host) for one in join)
    return HomeRouter() if listen.upnp and wanted else None


def _is_public(host: str) -> bool:
    try:
        return scope(str(socket.getaddrinfo(host, 9, type=socket.SOCK_STREAM)[0][4][0])) == "public"
    except OSError:
        return False


def is_behind_router(host: str) -> bool:
    """Whether `host` is a private IPv4 address."""
    return host_scope(host) == "private" and ip_address(host).version == 4


class HomeRouter:
    """The mappings of TCP ports of this machine. Belongs to one event loop."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[str, int]] = {}
        """Each port of this machine that is mapped, and where."""
        self._found: Any = None
        """miniupnpc's router, once it has been found; None: it is searched for."""

    def place(self, port: int) -> tuple[str, int] | None:
        """The IP address and port outside that lead to a port of this machine."""
        return self._places.get(port)

    async def map(self, port: int) -> None:
        """Have a port mapped, or its mapping renewed. Raises Unreachable: no router does that; what was stays."""
        await asyncio.to_thread(self._map, port)

    async def try_map(self, port: int) -> None:
        """Have a port mapped, if that can be."""
        try:
            await self.map(port)
        except Unreachable as error:
            log.info("no home router maps a port to this node: %s", error)

    async def renew(self) -> None:
        """Have every mapping renewed. Raises Unreachable when one is not; the others are, all the same."""
        failures = list[Unreachable]()
        for port in sorted(self._places):
            try:
                await self.map(port)
            except Unreachable as error:
                failures.append(error)
        if failures:
            raise failures[0]

    async def end(self) -> None:
        """Remove the mappings."""
        ports, self._places = sorted(port for _, port in self._places.values()), {}
        if ports:
            try:
                await asyncio.wait_for(asyncio.to_thread(self._remove, ports), END_S)
            except (Unreachable, TimeoutError) as error:
                log.info("the router keeps the mappings of its ports %s: %s", ports, error)

    def _map(self, port: int) -> None:
        held = self._found is not None and _is_of_this_machine(self._found.lanaddr)
        router, (_, first) = self._found if held else _router(), self._places.get(port, ("", port))
        self._found = None  # until it has answered
        host = _address(router)
        for outside in range(first, first + TRIES):
            try:
                self._add(router, outside, port)
            except Unreachable as error:
                if str(error) == _TAKEN:
                    continue
                raise
            self._places[port], self._found = (host, outside), router
            return
        raise Unreachable(f"other machines have the router's ports {first} to {first + TRIES - 1}")

    def _add(self, router: Any, outside: int, port: int) -> None:
        held = _answer(router.getspecificportmapping, outside, "TCP")
        if held is not None and held[:2] != (router.lanaddr, port):
            raise Unreachable(_TAKEN)  # some routers would give it to whoever asks last
        request = outside, "TCP", router.lanaddr, port, "noloco-node", ""
        try:
            _answer(router.addportmapping, *request, LEASE_S)
        except Unreachable as error:
            if str(error) != _PERMANENT:
                raise
            _answer(router.addportmapping, *request, 0)

    def _remove(self, ports: list[int]) -> None:
        router = self._found or _router()
        for port in ports:
            _answer(router.deleteportmapping, port, "TCP")


def _router() -> Any:
    """Raises Unreachable: there is none."""
    import miniupnpc

    router = miniupnpc.UPnP()
    router.discoverdelay = SEARCH_MS
    try:
        _answer(router.discover)
        _answer(router.selectigd)
    except Unreachable as error:
        raise Unreachable("no router answers") from error
    return router


def _is_of_this_machine(address: str) -> bool:
    """Whether this machine still has an address: in its network it may have been given another one since."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _address(router: Any) -> str:
    """Outside. Raises Unreachable: it has none, or one that leads nowhere from outside, as behind a second router."""
    said = _answer(router.externalipaddress)
    try:
        where = scope(said)
    except ValueError:
        raise Unreachable("the router has no address outside") from None
    if where != "public":
        raise Unreachable(f"the router is behind another one: its address outside is {ip_address(said)}")
    return str(ip_address(said))


def _answer(ask: Callable[..., Any], *words: object) -> Any:
    """Raises Unreachable, with what miniupnpc says: it raises nothing more particular than Exception."""
    try:
        return ask(*words)
    except Exception as error:
        raise Unreachable(str(error)) from error
