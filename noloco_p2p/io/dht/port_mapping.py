"""A port of the home router that leads to this node, if the router maps one when asked over UPnP
(ARCHITECTURE.md, "Reachability").

miniupnpc blocks, so it runs in a thread.
"""

import asyncio
import logging
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

from noloco_p2p.config import ListenSettings
from noloco_p2p.errors import Unreachable
from noloco_p2p.io.dht.reach import joined, scope

SEARCH_MS = 500
"""How long a router has to answer. Kinds of routers are searched for one after the other, until one answers."""
LEASE_S = 3600
"""A router forgets a mapping after this, unless it is renewed."""
RENEW_S = 300.0
"""Time between renewals. A router that restarts forgets the mapping until the next one."""
TRIES = 8
"""Ports of the router that are tried: others may have the first ones."""
END_S = 3.0
"""Longest wait until a mapping is removed."""
_PERMANENT, _TAKEN = "OnlyPermanentLeasesSupported", "ConflictInMappingEntry"
"""What miniupnpc calls the errors 725 and 718 of a router."""

log = logging.getLogger(__name__)


def port_mapping(listen: ListenSettings, host: str, port: int) -> "PortMapping | None":
    """The mapping that a node which announces `host` may ask for; None: its owner does not want one, or `host` is not
    that of a machine behind a home router."""
    try:
        private = scope(host) == "private" and ip_address(host).version == 4
    except ValueError:
        return None  # its owner has named it
    return PortMapping(port) if listen.upnp and private else None


class PortMapping:
    """The mapping to one TCP port of this machine. Belongs to one event loop."""

    def __init__(self, port: int) -> None:
        self._port, self._outside = port, port
        self.address = ""
        """`host:port` of the router; empty: nothing is mapped."""

    async def renew(self) -> None:
        """Have the port mapped. Raises Unreachable: no router does that."""
        self.address = await asyncio.to_thread(self._map)

    async def end(self) -> None:
        """Remove the mapping, if there is one."""
        if self.address:
            self.address = ""
            try:
                await asyncio.wait_for(asyncio.to_thread(self._remove), END_S)
            except (Unreachable, TimeoutError) as error:
                log.info("the router keeps the mapping of its port %d: %s", self._outside, error)

    def _map(self) -> str:
        router, first = _router(), self._outside
        host = _address(router)
        for port in range(first, first + TRIES):
            try:
                self._add(router, port)
            except Unreachable as error:
                if str(error) == _TAKEN:
                    continue
                raise
            self._outside = port
            return joined(host, port)
        raise Unreachable(f"other machines have the router's ports {first} to {first + TRIES - 1}")

    def _add(self, router: Any, port: int) -> None:
        request = port, "TCP", router.lanaddr, self._port, "noloco-node", ""
        try:
            _answer(router.addportmapping, *request, LEASE_S)
        except Unreachable as error:
            if str(error) != _PERMANENT:
                raise
            _answer(router.addportmapping, *request, 0)

    def _remove(self) -> None:
        _answer(_router().deleteportmapping, self._outside, "TCP")


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


def _address(router: Any) -> str:
    """Outside. Raises Unreachable: it has none, or says what is none."""
    said = _answer(router.externalipaddress)
    try:
        return str(ip_address(said))
    except ValueError:
        raise Unreachable("the router has no address outside") from None


def _answer(ask: Callable[..., Any], *words: object) -> Any:
    """Raises Unreachable, with what miniupnpc says: it raises nothing more particular than Exception."""
    try:
        return ask(*words)
    except Exception as error:
        raise Unreachable(str(error)) from error
