"""A port of a home router: real UPnP in network namespaces, with every answer that routers give."""

import json
import subprocess
import sys
from pathlib import Path

import gateways
import pytest
from gateways import internet

from noloco_p2p.config import ListenSettings
from noloco_p2p.io.dht.port_mapping import LEASE_S, port_mapping

in_namespaces = pytest.mark.skipif(gateways.why_no_namespaces() != "", reason=gateways.why_no_namespaces())
ONCE = str(Path(gateways.__file__).with_name("port_mapping_once.py"))
ADD, DELETE = "AddPortMapping", "DeletePortMapping"
CASES = [
    ("", ["11.1.1.12:5001"] * 2, [(ADD, "5001", LEASE_S)] * 2 + [(DELETE, "5001", None)]),
    (
        "permanent",
        ["11.1.1.12:5001"] * 2,
        [(ADD, "5001", LEASE_S), (ADD, "5001", 0)] * 2 + [(DELETE, "5001", None)],
    ),
    (
        "taken",
        ["11.1.1.12:5002"] * 2,
        [(ADD, "5001", LEASE_S), (ADD, "5002", LEASE_S), (ADD, "5002", LEASE_S), (DELETE, "5002", None)],
    ),
    ("refuses", ["Action not authorized"], [(ADD, "5001", LEASE_S)]),
    ("offline", ["the router has no address outside"], []),
    ("silent", ["no router answers"], []),
]


@in_namespaces
@pytest.mark.parametrize(("how", "printed", "asked"), CASES, ids=[one[0] or "plain" for one in CASES])
def test_a_port_is_mapped_renewed_and_given_back(
    how: str, printed: list[str], asked: list[tuple[str, str, int | None]]
) -> None:
    with internet() as net:
        noted = net.router("home", 12, how)
        words = ["ip", "netns", "exec", net.namespace("at-home"), sys.executable, ONCE]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        net.routers[0].terminate()
        seen = [json.loads(line) for line in noted]
    assert done.stdout.splitlines() == printed
    leases = [int(one["NewLeaseDuration"]) if "NewLeaseDuration" in one else None for one in seen]
    ports = [(one["action"], one["NewExternalPort"]) for one in seen]
    assert [(*port, lease) for port, lease in zip(ports, leases, strict=True)] == asked
    assert all(one["NewInternalClient"] == "192.168.12.2" for one in seen if one["action"] == ADD)


@pytest.mark.parametrize(
    ("host", "upnp", "asks"),
    [
        ("192.168.1.7", True, True),
        ("192.168.1.7", False, False),
        ("8.8.8.8", True, False),
        ("127.0.0.1", True, False),
        ("fd00::7", True, False),
        ("node.example.org", True, False),
    ],
)
def test_only_a_node_at_a_private_address_asks_for_one(host: str, upnp: bool, asks: bool) -> None:
    assert (port_mapping(ListenSettings(upnp=upnp), host, 5001) is not None) == asks
