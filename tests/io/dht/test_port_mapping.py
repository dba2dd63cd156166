"""Port mappings of a home router: real UPnP in network namespaces, with every answer that routers give."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import gateways
import pytest
from daemons import daemon, run
from gateways import internet
from soak import soak

from noloco_p2p.config import ListenSettings
from noloco_p2p.errors import Unreachable
from noloco_p2p.io.dht import port_mapping, ways_in
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.dht.identity import peer_id_of
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.dht.port_mapping import LEASE_S, HomeRouter, RouterProcess, home_router, is_behind_router
from noloco_p2p.io.dht.streams import Streams
from noloco_p2p.io.dht.ways_in import WaysIn

in_namespaces = pytest.mark.skipif(gateways.why_no_namespaces() != "", reason=gateways.why_no_namespaces())
ONCE = str(Path(gateways.__file__).with_name("port_mapping_once.py"))
PEER = peer_id_of(bytes(range(32)))
ADD, DELETE = "AddPortMapping", "DeletePortMapping"
WHERE, NOWHERE = "[('11.1.1.12', 5001), ('11.1.1.12', 5009)]", "[None, None]"
Case = tuple[str, list[str], list[tuple[str, str, int]], list[tuple[str, str, None]]]

CASES: list[Case] = [
    (
        "",
        [WHERE],
        [(ADD, port, LEASE_S) for port in ("5001", "5009", "5001", "5009")],
        [(DELETE, "5001", None), (DELETE, "5009", None)],
    ),
    (
        "permanent",
        [WHERE],
        [(ADD, port, lease) for port in ("5001", "5009", "5001", "5009") for lease in (LEASE_S, 0)],
        [(DELETE, "5001", None), (DELETE, "5009", None)],
    ),
    (
        "taken",
        [WHERE.replace("5001", "5002")],
        [(ADD, port, LEASE_S) for port in ("5001", "5002", "5009", "5002", "5009")],
        [(DELETE, "5002", None), (DELETE, "5009", None)],
    ),
    (
        "held",
        [WHERE.replace("5001", "5002")],
        [(ADD, port, LEASE_S) for port in ("5002", "5009", "5002", "5009")],
        [(DELETE, "5002", None), (DELETE, "5009", None)],
    ),
    ("carrier", ["the router is behind another one: its outside address is 100.64.0.7", NOWHERE], [], []),
]
MORE_CASES: list[Case] = [
    ("refuses", ["Action not authorized", NOWHERE], [(ADD, "5001", LEASE_S)], []),
    ("offline", ["the router has no outside address", NOWHERE], [], []),
    ("silent", ["no router answers", NOWHERE], [], []),
]


def map_once(net: gateways.Internet, *time_s: str) -> subprocess.CompletedProcess[str]:
    """Run `port_mapping_once.py` behind the home router."""
    words = ["ip", "netns", "exec", net.namespace("at-home"), sys.executable, ONCE, *time_s]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60.0)


@in_namespaces
@pytest.mark.parametrize(("how", "printed", "added", "deleted"), [*CASES, *soak(MORE_CASES)])
def test_a_port_is_mapped_renewed_and_released(
    how: str, printed: list[str], added: list[tuple[str, str, int]], deleted: list[tuple[str, str, None]]
) -> None:
    with internet() as net:
        noted = net.router("home", 12, how, known_to=[])
        done = map_once(net)
        net.routers[0].terminate()
        seen = [json.loads(line) for line in noted]
    assert done.stdout.splitlines() == printed
    leases = [int(one["NewLeaseDuration"]) if "NewLeaseDuration" in one else None for one in seen]
    ports = [(one["action"], one["NewExternalPort"]) for one in seen]
    assert [(*port, lease) for port, lease in zip(ports, leases, strict=True)] == [*added, *deleted]
    assert all(one["NewInternalClient"] == "192.168.12.2" for one in seen if one["action"] == ADD)


@in_namespaces
def test_a_device_that_never_ends_its_answer_keeps_no_node_from_starting_or_ending() -> None:
    """Every half second it sends one byte of a long answer, for which miniupnpc waits for days."""
    with internet() as net:
        net.router("home", 12, "drips", known_to=[])
        done = map_once(net, "1.5")
    assert done.stdout.splitlines() == ["the router did not finish its answer within 1.5 s", NOWHERE]


@in_namespaces
def test_a_device_whose_answer_is_endless_does_not_fill_the_memory_of_a_node() -> None:
    """It filled 3.9 GB."""
    with internet() as net:
        net.router("home", 12, "floods", known_to=[])
        done = map_once(net, "3")
    assert done.stdout.splitlines()[1:] == [NOWHERE]
    assert int(done.stderr.splitlines()[-1]) < 64


LIBRARY = """
import time

class UPnP:
    lanaddr = "192.0.2.1"

    def discover(self):
        time.sleep(60)

    def selectigd(self):
        return len(bytes(1 << 30))
"""


def test_an_answer_has_a_time_and_a_size_and_the_time_between_two_has_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mappings are renewed every five minutes."""
    (tmp_path / "miniupnpc.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(port_mapping, "MAP_S", 2.0)
    router = RouterProcess()
    assert router.ask("lanaddr") == "192.0.2.1"
    time.sleep(2.5)
    with pytest.raises(Unreachable, match="no answer"):
        router.selectigd()
    for ask in (router.discover, router.selectigd):
        with pytest.raises(Unreachable, match="its answer was too long"):
            ask()


class FoundRouter:
    """A router as miniupnpc returns it, with this machine's address in its network as of the discovery."""

    def __init__(self, lanaddr: str, mapped: list[tuple[str, int]]) -> None:
        self.lanaddr, self._mapped = lanaddr, mapped

    def externalipaddress(self) -> str:
        return "11.1.1.12"

    def getspecificportmapping(self, outside: int, kind: str) -> None:
        return None

    def addportmapping(self, outside: int, kind: str, host: str, port: int, *rest: object) -> None:
        self._mapped.append((host, port))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("", "has no outside address"),
        ("0.0.0.0", "has no outside address"),
        ("2001:470::1%1", "has no outside address"),
        ("169.254.1.1", "is behind another one"),
        ("192.168.0.2", "is behind another one"),
    ],
)
def test_a_router_without_a_public_address_is_of_no_use(monkeypatch: pytest.MonkeyPatch, said: str, why: str) -> None:
    monkeypatch.setattr(FoundRouter, "externalipaddress", lambda _: said)
    monkeypatch.setattr(port_mapping, "_router", lambda: FoundRouter("127.0.0.1", []))
    with pytest.raises(Unreachable, match=f"the router {why}"):
        asyncio.run(HomeRouter().map(5001))


@pytest.mark.parametrize(("first", "last"), [(5001, 5008), (65534, 65535)])
def test_only_a_few_ports_are_asked_for_and_none_beyond_the_last_one(
    monkeypatch: pytest.MonkeyPatch, first: int, last: int
) -> None:
    """miniupnpc takes 65536 for port 0, which stands for all ports."""

    def held(router: FoundRouter, outside: int, kind: str) -> tuple[str, int]:
        assert outside < 65536
        return "192.0.2.7", 5001

    monkeypatch.setattr(FoundRouter, "getspecificportmapping", held)
    monkeypatch.setattr(port_mapping, "_router", lambda: FoundRouter("127.0.0.1", []))
    with pytest.raises(Unreachable, match=f"use the router's ports {first} to {last}"):
        asyncio.run(HomeRouter().map(first))


def test_after_a_change_of_the_local_address_ports_are_mapped_to_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mapped = list[tuple[str, int]]()
    found = [FoundRouter("127.0.0.1", mapped), FoundRouter("127.0.0.2", mapped)]
    first = found[0]
    monkeypatch.setattr(port_mapping, "_router", lambda: found.pop(0))

    async def scenario() -> None:
        router = HomeRouter()
        await router.map(5001)
        await router.renew()
        assert mapped == [("127.0.0.1", 5001)] * 2, "the router is discovered only once"
        first.lanaddr = "192.0.2.7"  # an address that this machine no longer has
        await router.renew()
        assert mapped[2:] == [("127.0.0.2", 5001)]

    asyncio.run(scenario())


def test_a_mapping_that_fails_to_renew_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = list[tuple[str, int]]()
    monkeypatch.setattr(port_mapping, "_router", lambda: FoundRouter("127.0.0.1", mapped))
    add = FoundRouter.addportmapping

    def refuse(router: FoundRouter, outside: int, kind: str, host: str, port: int, *rest: object) -> None:
        if port == 5001:
            raise Unreachable("Action not authorized")
        add(router, outside, kind, host, port, *rest)

    async def scenario() -> None:
        router = HomeRouter()
        for port in (5001, 5009):
            await router.map(port)
        mapped.clear()
        monkeypatch.setattr(FoundRouter, "addportmapping", refuse)
        with pytest.raises(Unreachable, match="Action not authorized"):
            await router.renew()
        assert mapped == [("127.0.0.1", 5009)]

    asyncio.run(scenario())


def test_a_mapping_that_the_router_has_lost_does_not_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def delete(router: FoundRouter, outside: int, kind: str) -> None:
        asked.append(outside)
        if outside == 5001:
            raise Unreachable("NoSuchEntryInArray")

    monkeypatch.setattr(FoundRouter, "deleteportmapping", delete, raising=False)
    monkeypatch.setattr(port_mapping, "_router", iter([FoundRouter("127.0.0.1", [])]).__next__)

    async def scenario() -> None:
        router = HomeRouter()
        for port in (5001, 5009):
            await router.map(port)
        assert router.place(5009) == ("11.1.1.12", 5009)
        await router.end()
        assert router.place(5009) is None

    asyncio.run(scenario())
    assert asked == [5001, 5009]


def test_mappings_that_could_not_be_renewed_are_removed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router did not answer for a moment, and has not lost them."""
    searched, removed = list[FoundRouter](), list[int]()

    def search() -> FoundRouter:
        searched.append(FoundRouter("127.0.0.1", []))
        return searched[-1]

    def silent(*_: object) -> str:
        raise Unreachable("timeout")

    monkeypatch.setattr(FoundRouter, "deleteportmapping", lambda _, port, kind: removed.append(port), raising=False)
    monkeypatch.setattr(port_mapping, "_router", search)

    async def scenario() -> None:
        router = HomeRouter()
        await router.end()
        assert not searched, "there is nothing to remove"
        await router.map(5001)
        with monkeypatch.context() as now:
            now.setattr(FoundRouter, "externalipaddress", silent)
            with pytest.raises(Unreachable, match="timeout"):
                await router.renew()
        await router.end()

    asyncio.run(scenario())
    assert (len(searched), removed) == (2, [5001])


def test_no_mapping_is_left_by_a_renewal_that_the_end_of_the_node_cuts_short(monkeypatch: pytest.MonkeyPatch) -> None:
    held, begun, may_go_on = dict[int, str](), threading.Event(), threading.Event()

    def add(router: FoundRouter, outside: int, kind: str, host: str, port: int, *rest: object) -> None:
        begun.set()
        may_go_on.wait()
        held[outside] = host

    def delete(router: FoundRouter, outside: int, kind: str) -> None:
        del held[outside]

    monkeypatch.setattr(FoundRouter, "addportmapping", add)
    monkeypatch.setattr(FoundRouter, "deleteportmapping", delete, raising=False)
    monkeypatch.setattr(port_mapping, "_router", lambda: FoundRouter("127.0.0.1", []))

    async def scenario() -> None:
        router = HomeRouter()
        may_go_on.set()
        await router.map(5001)
        begun.clear()
        may_go_on.clear()
        renewing = asyncio.create_task(router.renew())
        await asyncio.to_thread(begun.wait)
        renewing.cancel()
        ending = asyncio.create_task(router.end())
        await asyncio.sleep(0)
        may_go_on.set()
        await ending

    asyncio.run(scenario())
    assert held == {}


def test_a_port_that_others_found_shut_is_not_mapped_again_when_the_daemon_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node would announce a libp2p address at which nobody gets through, and keep DHT records again."""
    mapped = list[tuple[str, int]]()
    monkeypatch.setattr(FoundRouter, "deleteportmapping", lambda *_: None, raising=False)
    monkeypatch.setattr(port_mapping, "_router", lambda: FoundRouter("127.0.0.1", mapped))

    async def scenario() -> None:
        async with daemon(tmp_path / "a") as libp2p:
            inside = libp2p.join_addresses
            libp2p.router = HomeRouter()
            await libp2p.router.map(int(inside[0].split("/")[4]))
            assert len(libp2p.join_addresses) == 2
            ways = WaysIn(libp2p, cast(Streams, None), ("127.0.0.1", 9))
            libp2p.ways = ways.addresses
            await ways.not_through_router("11.1.1.12:5009: shut")
            await libp2p.restart()
            assert libp2p.join_addresses == inside
            assert libp2p.asks_only
            assert len(mapped) == 1

    run(scenario)


def test_a_router_that_mapped_nothing_is_not_asked_again_when_the_daemon_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node would announce a libp2p address that nobody outside has dialled, and map no gRPC port."""
    mapped = list[tuple[str, int]]()

    def silent() -> FoundRouter:
        raise Unreachable("no router answers")

    async def scenario() -> None:
        async with daemon(tmp_path / "a") as libp2p:
            inside, libp2p.router = libp2p.join_addresses, HomeRouter()
            for answering in (silent, lambda: FoundRouter("127.0.0.1", mapped)):
                monkeypatch.setattr(port_mapping, "_router", answering)
                await libp2p.restart()
            assert libp2p.join_addresses == inside
            assert mapped == []

    run(scenario)


def test_what_a_router_has_forgotten_is_mapped_again_at_the_next_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It restarts, does not answer for a while, and comes back with no mappings and another address."""
    mapped, answers, address = list[tuple[str, int]](), [True], ["11.1.1.12"]
    found_at = list[str]()

    def found() -> FoundRouter:
        if not answers[0]:
            raise Unreachable("no router answers")
        found_at.append(address[0])
        return FoundRouter("127.0.0.1", mapped)

    def outside(router: FoundRouter) -> str:
        if not answers[0]:
            raise Unreachable("timeout")
        return address[0]

    monkeypatch.setattr(port_mapping, "_router", found)
    monkeypatch.setattr(FoundRouter, "externalipaddress", outside)
    monkeypatch.setattr(ways_in, "RENEW_S", 0.01)

    async def scenario() -> None:
        router, told = HomeRouter(), asyncio.Event()
        libp2p = SimpleNamespace(router=router, outside=None)
        ways = WaysIn(cast(Libp2pDaemon, libp2p), cast(Streams, None), ("127.0.0.1", 5009))
        await router.map(5009)

        async def changed() -> None:
            told.set()

        await ways._keep_mapped(router, changed)
        assert not told.is_set(), "it has the same address"
        answers[0] = False
        keeping = asyncio.create_task(ways.keep(changed))
        await asyncio.sleep(0.1)
        assert ways.addresses()[0] == "11.1.1.12:5009", "the router may be back before anybody calls"
        mapped.clear()
        answers[0], address[0] = True, "11.1.1.13"
        await asyncio.wait_for(told.wait(), 10.0)
        assert mapped[0] == ("127.0.0.1", 5009)
        assert ways.addresses()[0] == "11.1.1.13:5009"
        assert found_at == ["11.1.1.12", "11.1.1.13"], "it may be another router"
        keeping.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("host", "behind"),
    [
        ("192.168.1.7", True),
        ("100.64.3.4", True),
        ("8.8.8.8", False),
        ("127.0.0.1", False),
        ("169.254.1.1", False),
        ("fd00::7", False),
        ("node.example.org", False),
        ("localhost", False),
    ],
)
def test_only_a_node_at_a_private_address_asks_the_router(host: str, behind: bool) -> None:
    assert is_behind_router(host) == behind


@pytest.mark.parametrize(
    ("upnp", "members", "join", "asked"),
    [
        (True, True, "", True),
        (True, False, "", False),
        (True, False, "/ip4/8.8.8.8/tcp/1/p2p/{}", True),
        (True, False, "/dns4/localhost/tcp/1/p2p/{}", False),
        (True, False, "/ip4/192.168.1.9/tcp/1/p2p/{}", False),
        (True, False, "/ip4/127.0.0.1/tcp/1/p2p/{}", False),
        (True, False, "/ip4/192.168.1.9/tcp/1/p2p/{}/invite/abc", True),
        (False, True, "/ip4/8.8.8.8/tcp/1/p2p/{}", False),
    ],
)
def test_the_ports_of_an_open_run_within_one_network_are_not_mapped(
    upnp: bool, members: bool, join: str, asked: bool
) -> None:
    joins = [JoinAddress.parse(join.format(PEER))] if join else []
    assert (home_router(ListenSettings(upnp=upnp), joins, members=members) is not None) == asked
