"""Asks the home router over UPnP to map ports to this node (ARCHITECTURE.md, "Reachability").

miniupnpc blocks, so it runs in a thread.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from noloco_p2p.config import ListenSettings
from noloco_p2p.errors import Unreachable
from noloco_p2p.io.blocking_calls import BlockingCalls
from noloco_p2p.io.dht.addresses import JoinAddress, ip_of
from noloco_p2p.io.dht.reach import host_scope, scope

SEARCH_MS = 500
"""How long a router has to answer, milliseconds. Kinds of routers are tried in turn until one answers."""
LEASE_S = 3600
"""Lifetime of a mapping that is not renewed, seconds."""
RENEW_S = 300.0
"""Time between renewals, seconds. A router that restarts forgets its mappings until the next renewal."""
TRIES = 8
"""How many ports of the router are tried, because other machines may have the first ones."""
MAP_S, END_S = 20.0, 3.0
"""Longest wait for a port to be mapped, and for all mappings to be removed, seconds. miniupnpc itself waits for as long
as a byte of an answer comes every few seconds."""
_PERMANENT, _TAKEN = "OnlyPermanentLeasesSupported", "ConflictInMappingEntry"
"""miniupnpc's names for a router's errors 725 and 718."""

log = logging.getLogger(__name__)


def home_router(listen: ListenSettings, join: Sequence[JoinAddress], *, members: bool) -> "HomeRouter | None":
    """The router that a node asks for mappings, or None if it is not to ask. In an open run it asks only if it joins at
    a public address, so that a run within a private network stays there. `members`: the run is known to be
    members-only."""
    wanted = members or any(one.invitation or _is_public(one.host) for one in join)
    return HomeRouter() if listen.upnp and wanted else None


def _is_public(host: str) -> bool:
    with suppress(OSError):
        return scope(str(socket.getaddrinfo(host, 9, type=socket.SOCK_STREAM)[0][4][0])) == "public"
    return False


def is_behind_router(host: str) -> bool:
    """Whether `host` is a private IPv4 address."""
    return host_scope(host) == "private" and ":" not in host


class HomeRouter:
    """The router's mappings to TCP ports of this machine. Belongs to one event loop."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[str, int]] = {}
        """Port of this machine → the outside IP address and port that lead to it."""
        self._found: Any = None
        """miniupnpc's router, or None if it must be searched for."""
        self._thread = BlockingCalls("router")
        """Only one, so that what is cancelled here and goes on there comes before the removal of all mappings."""

    def place(self, port: int) -> tuple[str, int] | None:
        """The outside IP address and port that lead to a port of this machine, or None."""
        return self._places.get(port)

    async def map(self, port: int) -> None:
        """Have a port mapped, or its mapping renewed. Raises Unreachable if no router does so, and keeps an old one."""
        mapping = asyncio.get_running_loop().run_in_executor(self._thread, self._map, port)
        try:
            await asyncio.wait_for(mapping, MAP_S)
        except TimeoutError:
            raise Unreachable(f"the router did not finish its answer within {MAP_S:g} s") from None

    async def try_map(self, port: int) -> None:
        """Have a port mapped if possible; log it if not."""
        try:
            await self.map(port)
        except Unreachable as error:
            log.info("no home router maps a port to this node: %s", error)

    async def renew(self) -> None:
        """Have every mapping renewed. Raises Unreachable if one cannot be, after trying all of them."""
        renewed = await asyncio.gather(*map(self.map, sorted(self._places)), return_exceptions=True)
        for failure in filter(None, renewed):
            raise failure

    async def end(self) -> None:
        """Remove the mappings, also one that is just being made."""
        try:
            await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(self._thread, self._remove), END_S)
        except (Unreachable, TimeoutError) as error:
            log.info("the router may still map ports to this machine: %s", str(error) or "no answer yet")

    def _map(self, port: int) -> None:
        held = self._found is not None and _is_of_this_machine(self._found.lanaddr)
        router, (_, first) = self._found if held else _router(), self._places.get(port, ("", port))
        self._found = None  # search again unless this router answers
        host = _address(router)
        for outside in range(first, min(first + TRIES, 65536)):
            try:
                self._add(router, outside, port)
            except Unreachable as error:
                if str(error) == _TAKEN:
                    continue
                raise
            self._places[port], self._found = (host, outside), router
            return
        raise Unreachable(f"other machines use the router's ports {first} to {outside}")

    def _add(self, router: Any, outside: int, port: int) -> None:
        held = _answer(router.getspecificportmapping, outside, "TCP")
        if held is not None and held[:2] != (router.lanaddr, port):
            raise Unreachable(_TAKEN)  # some routers would give the port to the machine that asks last
        request = outside, "TCP", router.lanaddr, port, "noloco-node", ""
        try:
            _answer(router.addportmapping, *request, LEASE_S)
        except Unreachable as error:
            if str(error) != _PERMANENT:
                raise
            _answer(router.addportmapping, *request, 0)

    def _remove(self) -> None:
        places, self._places = self._places, {}
        router: Any = self._found or (_router() if places else None)
        for port in sorted(port for _, port in places.values()):
            try:
                _answer(router.deleteportmapping, port, "TCP")
            except Unreachable as error:  # it may have lost this mapping, and still have the others
                log.info("the router's mapping of port %s cannot be removed: %s", port, error)


def _router() -> Any:
    """Search for a router. Raises Unreachable if there is none."""
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
    """Whether this machine has an address; its network may have given it another one in the meantime."""
    with suppress(OSError), socket.socket() as probe:
        probe.bind((address, 0))
        return True
    return False


def _address(router: Any) -> str:
    """The router's outside IP address. Raises Unreachable if there is none, or it is not public (a second router)."""
    said = _answer(router.externalipaddress)
    if (ip := ip_of(said)) is None or ip.is_unspecified or "%" in said:  # with a zone, it is an address of one link
        raise Unreachable("the router has no outside address")
    if scope(said) != "public":
        raise Unreachable(f"the router is behind another one: its outside address is {ip}")
    return str(ip)


def _answer(ask: Callable[..., Any], *arguments: object) -> Any:
    """Call miniupnpc. Raises Unreachable with its error text: it raises nothing more specific than Exception."""
    try:
        return ask(*arguments)
    except Exception as error:
        raise Unreachable(str(error)) from error
