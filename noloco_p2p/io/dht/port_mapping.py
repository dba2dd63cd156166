"""Asks the home router over UPnP to map ports to this node (ARCHITECTURE.md, "Reachability").

miniupnpc waits for as long as a byte of an answer comes every few seconds, and keeps an answer of any length. So it
runs in a process of its own, with a limit on its time and its memory, for which a thread waits.
"""

import asyncio
import json
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from subprocess import DEVNULL, PIPE, Popen
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
"""Longest wait for a port to be mapped, which is also that for a single answer, and for all mappings to be removed,
seconds."""
MEMORY_BYTES = 64 << 20
"""Memory of miniupnpc's process. A router's answers have some kilobytes."""
PROGRAM = """
import json, miniupnpc, resource, signal, sys
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]),) * 2)
router = miniupnpc.UPnP()
router.discoverdelay = int(sys.argv[2])
for line in sys.stdin:
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv[3]))
    name, *arguments = json.loads(line)
    try:
        found = getattr(router, name)
        answer = found(*arguments) if callable(found) else found, ""
    except Exception as error:
        answer = None, str(error) or "no answer"
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps(answer), flush=True)
"""
"""Calls miniupnpc's methods for the lines of JSON that it reads, and answers each with a line of JSON: the result, and
what went wrong. An alarm that rings ends it."""
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
        held = router.getspecificportmapping(outside, "TCP")
        if held is not None and [*held[:2]] != [router.lanaddr, port]:
            raise Unreachable(_TAKEN)  # some routers would give the port to the machine that asks last
        request = outside, "TCP", router.lanaddr, port, "noloco-node", ""
        try:
            router.addportmapping(*request, LEASE_S)
        except Unreachable as error:
            if str(error) != _PERMANENT:
                raise
            router.addportmapping(*request, 0)

    def _remove(self) -> None:
        places, self._places = self._places, {}
        router: Any = self._found or (_router() if places else None)
        for port in sorted(port for _, port in places.values()):
            try:
                router.deleteportmapping(port, "TCP")
            except Unreachable as error:  # it may have lost this mapping, and still have the others
                log.info("the router's mapping of port %s cannot be removed: %s", port, error)


class RouterProcess:
    """The process of PROGRAM, with the methods of miniupnpc's router. It ends with this object, or with the node."""

    def __init__(self) -> None:
        limits = map(str, (MEMORY_BYTES, SEARCH_MS, MAP_S))
        pipes: dict[str, Any] = {"stdin": PIPE, "stdout": PIPE, "stderr": DEVNULL, "text": True}
        # In a process group of its own, so that Ctrl-C in a terminal leaves it to remove the mappings.
        self._process: Any = Popen([sys.executable, "-P", "-c", PROGRAM, *limits], **pipes, process_group=0)

    def __del__(self) -> None:
        with suppress(AttributeError):  # it could not be started
            self._process.kill()
            self._process.communicate()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self.ask, name)

    def ask(self, name: str, *arguments: object) -> Any:
        """The result of a method, or an attribute. Raises Unreachable with miniupnpc's error text."""
        with suppress(BrokenPipeError):
            print(json.dumps([name, *arguments]), file=self._process.stdin, flush=True)
        found, error = json.loads(self._process.stdout.readline() or '[null, "its answer was too long"]')
        if error:
            raise Unreachable(error)
        return found


def _router() -> Any:
    """Search for a router. Raises Unreachable if there is none."""
    try:
        router: Any = RouterProcess()
        router.discover()
        router.selectigd()
        router.lanaddr = router.ask("lanaddr")
    except (Unreachable, OSError) as error:
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
    said = router.externalipaddress()
    if (ip := ip_of(said)) is None or ip.is_unspecified or "%" in said:  # with a zone, it is an address of one link
        raise Unreachable("the router has no outside address")
    if scope(said) != "public":
        raise Unreachable(f"the router is behind another one: its outside address is {ip}")
    return str(ip)
