"""Join addresses, announced hosts, known peers, clocks and dial limits: the parts that need no network."""

import asyncio
import errno
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from noloco_p2p.errors import Busy, ConfigError, Declined, LocalError, PeerError, Unreachable
from noloco_p2p.io.dht import addresses, join_handshake
from noloco_p2p.io.dht.addresses import (
    PEERS_LIMIT,
    JoinAddress,
    KnownPeers,
    announced_host,
    from_here,
    local_host_towards,
    reserve_port,
)
from noloco_p2p.io.dht.identity import peer_id_of
from noloco_p2p.io.dht.join_handshake import DialRateLimit, check_clock, first_manifest
from noloco_p2p.sim import virtual_time

PEER = peer_id_of(bytes(range(32)))


@pytest.mark.parametrize("where", ["/ip4/10.0.0.1", "/ip6/fe80::1", f"/dns4/n.node-1.{'a' * 63}"])
def test_a_join_address_is_read_and_written_back(where: str) -> None:
    text = f"{where}/tcp/4001/p2p/{PEER}"
    assert str(JoinAddress.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not of the form"),
        ("10.0.0.1:4001", "not of the form"),
        (f"/ip4/10.0.0.1/udp/4001/p2p/{PEER}", "not of the form"),
        (f"/ip4/10.0.0.1/tcp/4001/p2p/{PEER}\n", "not of the form"),
        ("/ip4/10.0.0.1/tcp/4001", "not of the form"),
        (f"/ip4/10.0.0.1/tcp/0/p2p/{PEER}", "no port 0"),
        (f"/ip4/10.0.0.1/tcp/70000/p2p/{PEER}", "no port 70000"),
        (f"/ip4/10.0.0.1/tcp/4001/p2p/{PEER[:-1]}", "mistyped or cut off"),
        (f"/ip4/10.0.0.300/tcp/4001/p2p/{PEER}", "not a valid ip4 host"),
        (f"/ip4/name/tcp/4001/p2p/{PEER}", "not a valid ip4 host"),
        (f"/ip6/10.0.0.1/tcp/4001/p2p/{PEER}", "not a valid ip6 host"),
        (f"/ip6/2600::1%eth0/tcp/4001/p2p/{PEER}", "not a valid ip6 host"),
        (f"/dns4/10.0.0.300/tcp/4001/p2p/{PEER}", "not a valid dns4 host"),
        (f"/dns4/-name/tcp/4001/p2p/{PEER}", "not a valid dns4 host"),
        (f"/dns4/node..example.org/tcp/4001/p2p/{PEER}", "not a valid dns4 host"),
        (f"/dns4/{'a' * 64}.org/tcp/4001/p2p/{PEER}", "not a valid dns4 host"),
    ],
)
def test_a_malformed_join_address_is_reported_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        JoinAddress.parse(text)
    assert "\n" not in str(caught.value)


def test_the_announced_host_is_one_that_others_can_use() -> None:
    join = JoinAddress.parse(f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}")
    assert announced_host("0.0.0.0", "node.example", [join]) == "node.example"
    assert announced_host("0.0.0.0", None, [join]) == "127.0.0.1"
    assert announced_host("0.0.0.0", None, []) not in ("", "0.0.0.0")
    assert announced_host("127.0.0.3", None, [join]) == "127.0.0.3"
    assert local_host_towards("no such host") == "127.0.0.1"


def test_a_join_address_to_which_there_is_no_route_does_not_decide_what_a_node_announces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its name may be gone, or this machine may have no IPv6."""
    look_up = socket.getaddrinfo

    def resolved(host: str, *arguments: Any, **named: Any) -> Any:
        if host == "gone.example":
            raise socket.gaierror
        return look_up("127.0.0.1" if host == addresses._NOWHERE else host, *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    join = [JoinAddress("gone.example", 4001, PEER), JoinAddress("::1", 4001, PEER)]
    assert announced_host("::", None, join) == "::1"


def test_a_node_that_listens_on_ipv4_only_announces_no_ipv6_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's name may have both, or this node joins at an IPv6 address."""
    look_up = socket.getaddrinfo

    def both(host: str, port: int, family: int = 0, *more: Any, **named: Any) -> Any:
        hosts = {"both.example": ["::1", "127.0.0.1"], addresses._NOWHERE: ["127.0.0.1"]}.get(host, [host])
        found = [one for host in hosts for one in look_up(host, port, 0, *more, **named) if family in (0, one[0])]
        if not found:
            raise socket.gaierror
        return found

    monkeypatch.setattr(socket, "getaddrinfo", both)
    for host in ("both.example", "::1"):
        join = [JoinAddress(host, 4001, PEER)]
        assert announced_host("0.0.0.0", None, join) == "127.0.0.1"
        assert announced_host("::", None, join) == "::1"


def test_a_name_of_the_local_network_gives_an_address_without_a_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may lead to a link-local address first. `noloco top` then refused a setting that nobody had made."""
    near = [(socket.AF_INET6, 0, 0, "", (host, 9, 0, scope)) for host, scope in (("fe80::1%eth0", 2), ("::1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: near)
    assert local_host_towards("near.local") == "::1"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: near[:1])
    assert local_host_towards("near.local") == "127.0.0.1"


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(LocalError, match=f"port {port} on 127.0.0.1 is in use"):
            reserve_port("127.0.0.1", port)
    reserve_port("127.0.0.1", port).close()
    with pytest.raises(LocalError, match=r"cannot listen on 192\.0\.2\.1"):
        reserve_port("192.0.2.1", 0)
    with pytest.raises(LocalError, match=r"cannot listen on a\.\.b: no such host; set listen\.host"):
        reserve_port("a..b", 0)


def address(number: int) -> JoinAddress:
    return JoinAddress("10.0.0.1", 1 + number, peer_id_of(number.to_bytes(32)))


def test_known_peers_survive_a_restart_and_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "node" / "known_peers.json"
    known = KnownPeers(path)
    known.remember(address(number) for number in range(PEERS_LIMIT + 6))
    again = KnownPeers(path)
    found = again.unlinked(set(), 1000)
    assert found == [address(number) for number in range(PEERS_LIMIT)]
    assert again.unlinked({one.peer_id for one in found[1:]}, 1000) == [found[0]]
    assert [path.name for path in path.parent.iterdir()] == ["known_peers.json"]


def test_known_peers_that_answer_are_not_pushed_out_by_new_ones(tmp_path: Path) -> None:
    known = KnownPeers(tmp_path / "known_peers.json")
    known.remember(address(number) for number in range(PEERS_LIMIT))
    answering = [address(number) for number in range(2, PEERS_LIMIT)]
    known.remember([*(address(number) for number in range(1000, 1100)), *answering])
    kept = {one.port - 1 for one in known.unlinked(set(), 1000)}
    assert kept == {*range(2, PEERS_LIMIT), 1000, 1001}


def test_known_peers_that_were_met_while_the_disk_was_full_are_stored_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "known_peers.json"
    known = KnownPeers(path)
    with monkeypatch.context() as patch:
        patch.setattr(addresses, "write_whole", full)
        for _ in range(2):
            with pytest.raises(LocalError, match="No space left"):
                known.remember([address(1)])
    known.remember([])
    assert KnownPeers(path).unlinked(set(), 8) == [address(1)]


def test_known_peers_take_turns(tmp_path: Path) -> None:
    known = KnownPeers(tmp_path / "known_peers.json")
    known.remember(address(number) for number in range(5))
    dialled = known.unlinked(set(), 2) + known.unlinked(set(), 2) + known.unlinked(set(), 1)
    assert sorted(map(str, dialled)) == sorted(str(address(number)) for number in range(5))


def test_a_joined_host_name_is_dialled_again_whatever_its_peer_announces(tmp_path: Path) -> None:
    """A home router may get a new IP address every night; the peer behind it was seen at yesterday's."""
    joined = JoinAddress.parse(f"/dns4/home.example/tcp/41001/p2p/{PEER}")
    seen = JoinAddress.parse(f"/ip4/8.8.8.8/tcp/41001/p2p/{PEER}")
    known = KnownPeers(tmp_path / "known_peers.json", [joined])
    known.remember([joined])
    assert known.unlinked(set(), 8) == [joined]
    known.remember([seen])
    assert known.unlinked(set(), 8) == [seen, joined]
    assert known.unlinked({PEER}, 8) == []


@pytest.mark.parametrize("text", ["", "{", "17", '["nonsense", 5, null]', "\0\0"])
def test_a_corrupt_file_of_known_peers_is_ignored(tmp_path: Path, text: str) -> None:
    path = tmp_path / "known_peers.json"
    path.write_text(text)
    known = KnownPeers(path)
    assert known.unlinked(set(), 10) == []


SILENT, BUSY, STARTING = Unreachable("no answer"), Busy("busy"), Declined("it is still starting")


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ((SILENT, STARTING, None), (b"{}", 0.5, 1.0)),
        ((SILENT, STARTING), STARTING),
        ((STARTING, BUSY, SILENT), STARTING),
        ((SILENT, BUSY), SILENT),
    ],
)
def test_if_no_joined_peer_describes_the_run_one_that_answered_is_quoted(
    monkeypatch: pytest.MonkeyPatch, answers: Sequence[PeerError | None], found: object
) -> None:
    """A call that takes two seconds leaves one second of doubt about the clocks."""

    async def fetch(_: object, number: int) -> tuple[bytes, float]:
        await asyncio.sleep(2.0)
        if (error := answers[number]) is not None:
            raise error
        return b"{}", 0.5

    async def scenario() -> object:
        try:
            return await first_manifest(Mock(joined=[Mock(peer_id=number) for number in range(len(answers))]))
        except PeerError as error:
            return error

    monkeypatch.setattr(join_handshake, "fetch_manifest", fetch)
    assert virtual_time.run(scenario(), limit_s=9.0) == found


def test_clocks_may_differ_by_half_a_lifetime() -> None:
    check_clock(15.0, unsure_s=0.0, ttl_s=30.0)
    check_clock(-18.0, unsure_s=3.0, ttl_s=30.0)  # the answer took six seconds
    with pytest.raises(ConfigError, match=r"clock is 16\.5 s behind"):
        check_clock(16.5, unsure_s=1.0, ttl_s=30.0)
    with pytest.raises(ConfigError, match=r"clock is 20\.5 s ahead"):
        check_clock(-20.5, unsure_s=1.0, ttl_s=30.0)


def test_dial_backs_for_strangers_are_rate_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_handshake, "DIALS_AT_ONCE", 2)
    monkeypatch.setattr(join_handshake, "DIALS_PER_MINUTE", 3)
    allowance = DialRateLimit()
    assert [allowance.begin(now=0.0) for _ in range(3)] == [True, True, False]
    allowance.end()
    allowance.end()
    assert [allowance.begin(now=1.0) for _ in range(2)] == [True, False]
    allowance.end()
    assert not allowance.begin(now=59.0)
    assert allowance.begin(now=60.0)


def test_a_wildcard_listener_is_reached_at_loopback() -> None:
    hosts = ("0.0.0.0", "::", "127.0.0.1", "10.0.0.5", "fd00::3", "node.example")
    assert [from_here(host) for host in hosts] == [
        "127.0.0.1",
        "[::1]",
        "127.0.0.1",
        "10.0.0.5",
        "[fd00::3]",
        "node.example",
    ]


def test_an_invitation_is_neither_part_of_an_addresss_identity_nor_shown(tmp_path: Path) -> None:
    plain = f"/ip4/10.0.0.1/tcp/4001/p2p/{PEER}"
    address = JoinAddress.parse(f"{plain}/invite/2Uw1bpp")
    assert address.invitation == "2Uw1bpp"
    assert address == JoinAddress.parse(plain)
    assert str(address) == plain
    known = KnownPeers(tmp_path / "known")
    known.remember([address])
    assert "2Uw1bpp" not in (tmp_path / "known").read_text()
    for wrong in ("/invite", "/invite/", "/invite/a-b", f"/invite/{'a' * 257}", "/invite/a/b"):
        with pytest.raises(ConfigError, match="not of the form"):
            JoinAddress.parse(plain + wrong)
