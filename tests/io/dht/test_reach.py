"""Which of the addresses that strangers name are dialled ("What a stranger can do", hole 14)."""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from daemons import STRANGER, daemon, node, run

from noloco_p2p.core.messages import STREAM, Advert
from noloco_p2p.io.dht import reach as reaching
from noloco_p2p.io.dht.addresses import JoinAddress, KnownPeers
from noloco_p2p.io.dht.join_handshake import DIALS_PER_MINUTE, ask_dial_back, serve_dial_back
from noloco_p2p.io.dht.reach import Reach, endpoint, host_of, joined, scope

T = TypeVar("T")
SCOPES = {
    "8.8.8.8": "public",
    "2606:4700::1": "public",
    "10.1.2.3": "private",
    "192.168.0.1": "private",
    "100.64.0.1": "private",
    "fd00::1": "private",
    "::ffff:10.0.0.1": "private",
    "169.254.169.254": "link",
    "fe80::1%eth0": "link",
    "127.0.0.2": "loopback",
    "::1": "loopback",
    "::ffff:127.0.0.1": "loopback",
    "0.0.0.0": "nowhere",
    "224.0.0.1": "nowhere",
}


def test_an_ipv6_network_is_one_host_and_so_is_an_ipv4_address_on_any_socket() -> None:
    assert host_of("2001:db8::1") == host_of("2001:db8::2") != host_of("2001:db8:0:1::1")
    assert host_of("::ffff:8.8.8.8") == host_of("8.8.8.8") != host_of("::ffff:8.8.8.9")


def test_addresses_are_classified_by_scope() -> None:
    assert {address: scope(address) for address in SCOPES} == SCOPES


@pytest.mark.parametrize(
    "text",
    [
        "unix:/run/secret.sock",
        "unix:///run/secret.sock",
        "dns:///inside:80",
        "dns://8.8.8.8/inside:80",
        "ipv4:10.0.0.1:80",
        "vsock:1:2",
        "host",
        "host:0",
        "host:65536",
        "host:80,other:80",
        "ho st:80",
        "host:80\n",
        "::1:80",
        "user@host:80",
        "",
    ],
)
def test_text_that_is_not_a_host_and_port_yields_none(text: str) -> None:
    assert endpoint(text) is None


def test_hosts_and_ports_are_parsed() -> None:
    assert endpoint("10.0.0.1:80") == ("10.0.0.1", 80)
    assert endpoint("[::1]:4102") == ("::1", 4102)
    assert endpoint("node-1.example:9464") == ("node-1.example", 9464)
    assert endpoint("http://[fd00::1]:9464/metrics") == ("fd00::1", 9464)
    assert [joined("::1", 80), joined("10.0.0.1", 80)] == ["[::1]:80", "10.0.0.1:80"]


NAMES = {"me.example": ["8.8.4.4"], "inside.example": ["10.0.0.7"], "both.example": ["127.0.0.1", "8.8.8.8"]}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked = list[str]()

    def getaddrinfo(host: str, *rest: Any, **more: Any) -> Any:
        asked.append(host)
        if host not in NAMES:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 1)) for address in NAMES[host]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


@pytest.mark.parametrize(
    ("own", "dialled"),
    [
        (["8.8.4.4"], {"8.8.8.8", "both.example"}),
        (["me.example"], {"8.8.8.8", "both.example"}),
        (["192.168.1.5"], {"8.8.8.8", "both.example", "10.0.0.1", "inside.example"}),
        (["8.8.4.4", "inside.example"], {"8.8.8.8", "both.example", "10.0.0.1", "inside.example"}),
        (["127.0.0.1"], {"8.8.8.8", "both.example", "127.0.0.9"}),
        (["unknown.example"], {"8.8.8.8", "both.example"}),
        (["0.0.0.0"], {"8.8.8.8", "both.example"}),
    ],
)
def test_private_hosts_are_dialled_if_the_owner_named_private_ones(
    own: list[str], dialled: set[str], names: list[str]
) -> None:
    hosts = ["8.8.8.8", "10.0.0.1", "127.0.0.9", "169.254.169.254", "0.0.0.0", *NAMES, "nobody.example"]
    hosts.remove("me.example")

    async def scenario() -> None:
        found = await Reach(own).addresses(hosts)
        assert set(found) == dialled
        assert found.get("inside.example", "10.0.0.7") == "10.0.0.7"
        if "127.0.0.1" not in own:
            assert found["both.example"] == "8.8.8.8", "the only address that may be dialled"

    asyncio.run(scenario())


def test_a_name_is_resolved_once_a_minute_and_its_address_is_dialled(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        reach = Reach(["8.8.4.4"])
        advert = Advert(STRANGER, "run", 0, ("both.example:4102",))
        for _ in range(3):
            [found] = await reach.within([advert])
            assert found.addresses == ("8.8.8.8:4102",), "gRPC does not resolve the name again"
        assert names == ["both.example"]
        monkeypatch.setitem(NAMES, "both.example", ["10.0.0.9"])
        monkeypatch.setattr(reaching, "KEPT_S", -1.0)
        [found] = await reach.within([advert])
        assert found.addresses == (), "the name now resolves to a forbidden address"

    asyncio.run(scenario())


def test_an_advert_keeps_the_addresses_that_may_be_dialled_and_those_of_streams() -> None:
    kept = "8.8.8.8:4102", "[2606:4700::1]:4102", STREAM, f"relay/{STRANGER}"
    dropped = "10.0.0.1:4102", STRANGER, "relay/nobody", "relay/"
    inside, outside = "http://10.0.0.1:9464/metrics", "http://8.8.8.8:9464/metrics"
    one = Advert(STRANGER, "run", 0, (*kept, *dropped), metrics=inside, libp2p_metrics=outside)
    other = replace(one, metrics=outside, libp2p_metrics=inside)
    found = asyncio.run(Reach(["8.8.4.4"]).within([one, other]))
    assert found == [replace(one, addresses=kept, metrics=""), replace(other, addresses=kept, libp2p_metrics="")]


class Turns:
    """Counts in which turn of the event loop each item of a list is read."""

    def __init__(self) -> None:
        self.now, self.read = 0, Counter[int]()

    async def count(self) -> None:
        while True:
            self.now += 1
            await asyncio.sleep(0)

    def noted(self, items: Iterable[T]) -> Iterator[T]:
        for one in items:
            self.read[self.now] += 1
            yield one


def test_thousands_of_peers_are_gone_through_a_few_at_a_time() -> None:
    async def scenario() -> None:
        turns, reach = Turns(), Reach(["8.8.4.4"])
        counting = asyncio.create_task(turns.count())
        many = [Advert(STRANGER, "run", 0, (f"8.8.{n >> 8}.{n % 256}:4102",)) for n in range(6000)]
        assert len(await reach.within(turns.noted(many))) == 6000
        counting.cancel()
        assert turns.now > 4 * 6000 / reaching.AT_ONCE, "adverts, places, hosts and results"
        assert max(turns.read.values()) <= reaching.AT_ONCE

    asyncio.run(scenario())


def test_a_failed_look_up_keeps_the_known_address(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop that wakes up, or a router that reconnects at night, has no network for a moment."""

    async def scenario() -> None:
        reach = Reach(["inside.example"])
        hosts = ["both.example", "10.0.0.9", "nobody.example"]
        before = await reach.addresses(hosts)
        assert set(before) == {"both.example", "10.0.0.9"}
        monkeypatch.setattr(reaching, "KEPT_S", -1.0)
        monkeypatch.setattr(reaching, "FORGOTTEN_S", 0.0)  # it has slept for hours
        for name in ("inside.example", "both.example"):
            monkeypatch.delitem(NAMES, name)
        assert await reach.addresses(hosts) == before
        monkeypatch.setitem(NAMES, "both.example", ["8.8.4.4"])
        assert await reach.addresses(["both.example"]) == {"both.example": "8.8.4.4"}

    asyncio.run(scenario())


def test_a_name_of_the_local_network_is_dialled_at_an_address_without_a_zone(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address with a zone cannot be written as a libp2p address: storing it ended the dialling of known peers."""
    monkeypatch.setitem(NAMES, "near.local", ["fe80::1%eth0", "192.168.1.5"])
    monkeypatch.setitem(NAMES, "nearer.local", ["fe80::2%eth0"])

    async def scenario() -> None:
        near = [JoinAddress(host, 41001, STRANGER) for host in ("near.local", "nearer.local")]
        known = KnownPeers(tmp_path / "known_peers.json")
        known.remember(await Reach(["near.local", "fe80::9", "192.168.1.2"]).joins(near))
        assert known.unlinked(set(), 8) == [JoinAddress("192.168.1.5", 41001, STRANGER)]

    asyncio.run(scenario())


def test_slow_names_delay_a_read_by_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "LOOKUP_S", 0.1)

    async def scenario() -> None:
        reach, answer = Reach(["8.8.4.4"]), asyncio.Event()
        asked = list[str]()

        async def slow(self: Reach, host: str) -> None:
            asked.append(host)
            await answer.wait()

        monkeypatch.setattr(Reach, "_ask", slow)
        hosts = [f"n{n}.example" for n in range(1000)]
        assert await reach.addresses([*hosts, "8.8.8.8"]) == {"8.8.8.8": "8.8.8.8"}
        assert len(asked) == reaching.NAMES_AT_ONCE
        answer.set()

    asyncio.run(scenario())


def test_a_name_that_is_being_resolved_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an answer from the name server, each reading of the directory would queue all names again."""
    monkeypatch.setattr(reaching, "LOOKUP_S", 0.05)
    asked, answer = list[str](), threading.Event()

    def getaddrinfo(host: str, *rest: Any, **more: Any) -> Any:
        asked.append(host)
        answer.wait()
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    async def scenario() -> None:
        reach = Reach(["8.8.4.4"])
        for _ in range(5):
            assert await reach.addresses(["slow.example"]) == {}
        answer.set()
        assert await reach.addresses(["slow.example"]) == {}
        assert asked == ["slow.example"]

    asyncio.run(scenario())


def test_a_name_server_that_never_answers_delays_only_one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async def never(self: Reach, host: str) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(Reach, "_ask", never)
        monkeypatch.setattr(reaching, "LOOKUP_S", 0.01)
        reach = Reach(["8.8.4.4"])
        assert await reach.addresses(["slow.example"]) == {}
        monkeypatch.setattr(reaching, "LOOKUP_S", 3600.0)
        async with asyncio.timeout(10.0):
            assert await reach.addresses(["slow.example", "8.8.8.8"]) == {"8.8.8.8": "8.8.8.8"}

    asyncio.run(scenario())


def test_a_known_name_is_not_displaced_by_any_number_of_new_ones(
    monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    """In an open run a stranger can announce as many names as it likes."""
    monkeypatch.setattr(reaching, "KEPT_S", 0.0)
    monkeypatch.setattr(reaching, "LOOKUP_S", 60.0)

    async def scenario() -> None:
        reach = Reach(["8.8.4.4"])
        await reach.addresses(["both.example"])
        for reading in range(12):
            found = await reach.addresses([*(f"a{reading}-{n}.example" for n in range(99)), "both.example"])
            assert "both.example" in found
        assert len(reach._known) <= reaching.NAMES_KEPT
        assert names.count("both.example") == 13, "it is looked up again at each reading"

    asyncio.run(scenario())


def test_names_that_nobody_asks_for_any_more_make_room_for_new_ones(
    monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    """Over weeks a node sees more names than it remembers, and a stranger can announce that many at once."""

    async def scenario() -> None:
        reach = Reach(["8.8.4.4"])
        hosts = ["me.example", *(f"n{n}.example" for n in range(1, reaching.NAMES_KEPT))]
        while len(reach._known) < len(hosts):
            await reach.addresses(hosts)
        assert await reach.addresses(["both.example"]) == {}
        with monkeypatch.context() as later:
            later.setattr(reaching, "KEPT_S", -1.0)
            later.setitem(NAMES, "me.example", ["8.8.8.9"])
            assert await reach.addresses(["me.example"]) == {"me.example": "8.8.8.9"}, "known names stay up to date"
        monkeypatch.setattr(reaching, "FORGOTTEN_S", 0.0)
        assert await reach.addresses(["both.example"]) == {"both.example": "8.8.8.8"}

    asyncio.run(scenario())


def test_strangers_that_ask_for_dial_backs_leave_room_for_the_names_of_nodes() -> None:
    assert reaching.NAMES_AT_ONCE + DIALS_PER_MINUTE * reaching.FORGOTTEN_S / 60 < reaching.NAMES_KEPT
    assert reaching.FORGOTTEN_S > reaching.KEPT_S + reaching.LOOKUP_S, "a name in use is looked up before that"


def test_adverts_cannot_make_a_node_dial_its_private_network(tmp_path: Path) -> None:
    """The nodes meet over loopback, so loopback addresses may be dialled but no other private ones."""
    bad = ("unix:/run/docker.sock", "dns:///localhost:22", "10.0.0.1:22", "169.254.169.254:80")

    async def scenario() -> None:
        async with node(tmp_path / "a") as a, node(tmp_path / "b", join=[a.address]) as b:
            page = "http://10.0.0.1:80/metrics"
            sent = b.advert(addresses=bad, metrics=page, libp2p_metrics="http://127.0.0.1:1/metrics")
            await b.directory.announce(sent, 30.0)
            [found] = await a.directory.peers()
            assert replace(found, announced_at=0.0) == replace(sent, addresses=(), metrics="")
            inside = JoinAddress("10.0.0.1", 22, STRANGER)
            here = JoinAddress("127.0.0.1", 22, STRANGER)
            assert await a.libp2p.reach.joins([inside, here]) == [here]

    run(scenario)


def test_a_dial_back_does_not_reach_the_private_network(tmp_path: Path) -> None:
    dialled = list[str]()

    async def probe(address: str, peer: str) -> str | None:
        dialled.append(address)
        return None

    async def scenario() -> None:
        async with daemon(tmp_path / "a") as a, daemon(tmp_path / "b", join=a.join_addresses) as b:
            await serve_dial_back(a, probe)
            reason = await ask_dial_back(b, a.peer_id, "192.168.0.1:22")
            assert reason == "the peer does not dial 192.168.0.1"
            assert await ask_dial_back(b, a.peer_id, "127.0.0.1:4102") is None
        assert dialled == ["127.0.0.1:4102"]

    run(scenario)
