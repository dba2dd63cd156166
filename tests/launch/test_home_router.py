"""Nodes behind home routers train, dialled through the router or within its network: real processes in namespaces."""

import json
import subprocess
import sys
from pathlib import Path

import gateways
import pytest
from gateways import internet
from processes import NOLOCO, SMALL, node_processes, settings
from soak import soak
from test_behind_nat import in_namespace

pytestmark = pytest.mark.skipif(gateways.why_no_namespaces() != "", reason=gateways.why_no_namespaces())


@pytest.mark.parametrize("how", soak(["closed", ""]))
def test_a_node_behind_a_home_router_trains(tmp_path: Path, how: str) -> None:
    """It holds the last stage, so the public node dials it: at the router, or over a link if the mapping is false."""
    with node_processes(tmp_path) as nodes, internet() as net:
        address = net.public("public", 1)
        noted = net.router("home", 12, how, known_to=["public"])
        few = settings(steps="4", start_replicas="1", security="open", listen__host=address)
        first = in_namespace(nodes, net, "public", *SMALL, *few, "--stage", "0")
        joining = "--join", first.endpoints().join[0], *settings(listen__host="192.168.12.2")
        doctor = [
            "ip",
            "netns",
            "exec",
            net.namespace("at-home"),
            sys.executable,
            "-m",
            "noloco_p2p.cli.main",
            "doctor",
        ]
        examined = subprocess.run([*doctor, *joining], capture_output=True, text=True, check=False, cwd=tmp_path).stdout
        home = in_namespace(nodes, net, "at-home", *joining, "--stage", "1")
        nodes.all_end_well()
        nodes.nothing_left()
        net.routers[0].terminate()
        seen = [json.loads(line) for line in noted]
    asked = [one for one in seen if one["action"] != "connected"]
    ports_each = 2 * ["AddPortMapping"] + 2 * ["DeletePortMapping"]
    assert [one["action"] for one in asked] == 2 * ports_each, "libp2p and gRPC, by doctor and node"
    ports = [one["NewExternalPort"] for one in asked]
    told = f"reaches this machine at 11.1.1.12:{ports[1]}, a port mapped by this machine's router (UPnP)"
    assert (told in " ".join(examined.split())) == (how == ""), examined
    mapped = f"11.1.1.12:{ports[5]}"
    assert (f"others reach this node at {mapped}" in home.logged()) == (how == "")
    assert ("links that this node keeps open" in home.logged()) == (how == "closed")
    assert ("connected" in [one["action"] for one in seen]) == (how == "")
    assert [one.summary()["state"] for one in (first, home)] == ["finished", "finished"]
    assert home.summary()["microbatch_results"]["done"] > 0


@pytest.mark.soak
def test_two_nodes_behind_one_router_reach_each_other_on_their_own_network(tmp_path: Path) -> None:
    """In an open run no node relays, and no port is mapped, so there is no other route."""
    with node_processes(tmp_path) as nodes, internet() as net:
        address = net.public("public", 1)
        net.router("home", 12, "silent", known_to=["public"])
        net.behind("home", "next", 13, "11.1.1.12", known_to=["public"])
        few = settings(steps="20", start_replicas="1", security="open", listen__host=address)
        first = in_namespace(nodes, net, "public", *SMALL, *few, "--stage", "1")
        joining = "--join", first.endpoints().join[0], "--stage"
        other = in_namespace(nodes, net, "next", *joining, "1", *settings(listen__host="192.168.13.2"))
        other.endpoints()
        origin = in_namespace(nodes, net, "at-home", *joining, "0", *settings(listen__host="192.168.12.2"))
        place = json.loads((other.dir / "endpoints.json").read_text())["grpc"]
        origin.wait_for(lambda: net.connected("at-home", place), f"a connection to {place}")
        nodes.all_end_well()
        nodes.nothing_left()
    assert [one.summary()["state"] for one in (first, other, origin)] == ["finished"] * 3
    assert other.summary()["microbatch_results"]["done"] > 0
    assert origin.summary()["reroutes"] == {}


@pytest.mark.skipif(gateways.why_not() != "", reason=gateways.why_not())
def test_a_run_starts_behind_a_home_router_and_continues_without_a_public_node(tmp_path: Path) -> None:
    """2 × 2: two nodes behind routers that map ports, two that cannot be dialled."""
    with node_processes(tmp_path) as nodes, internet() as net:
        for name, number in (("home", 12), ("office", 13)):
            net.router(name, number)
        for name, number in (("shop", 14), ("school", 15)):
            net.gateway(name, number)
        made = nodes.start("key", "new", str(key := tmp_path / "root.key"), command=NOLOCO)
        assert made.end() == 0, made.logged()
        few = settings(steps="12", start_replicas="2", listen__host="0.0.0.0")
        first = in_namespace(nodes, net, "at-home", *SMALL, *few, "--key", str(key), "--stage", "0")
        first.endpoints()
        address, nearby = (line.split()[-1] for line in first.printed().splitlines()[-2:])
        assert address.startswith("/ip4/11.1.1.12/tcp/")
        assert nearby.startswith("/ip4/192.168.12.2/tcp/")
        wide = settings(listen__host="0.0.0.0")
        second = in_namespace(nodes, net, "at-office", "--join", address, "--stage", "1", *wide)
        joining = "--join", second.endpoints().join[0], "--join", address, *wide, "--stage"
        assert joining[1].startswith("/ip4/11.1.1.13/tcp/")
        hidden = [in_namespace(nodes, net, *of) for of in (("at-shop", *joining, "0"), ("at-school", *joining, "1"))]
        nodes.all_end_well()
        nodes.nothing_left()
    assert "nobody outside has dialled it yet" in first.logged()
    assert "others reach this node at 11.1.1.13:" in second.logged()
    for one in hidden:
        assert "links that this node keeps open" in one.logged()
    for one in (first, second, *hidden):
        assert one.summary()["state"] == "finished"
        assert one.summary()["microbatch_results"]["done"] > 0
