"""Nodes behind NAT gateways join a members-only run by its address alone, and train: real processes in namespaces.

One case runs with all tests; `pytest -m soak` runs the others.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import gateways
import pytest
from gateways import Internet, internet
from processes import NOLOCO, SMALL, NodeProcess, Nodes, node_processes, settings

pytestmark = pytest.mark.skipif(gateways.why_not() != "", reason=gateways.why_not())

IN_NAMESPACE = str(Path(gateways.__file__).with_name("in_namespace.py"))
Hosts = tuple[str, str, str]


def in_namespace(nodes: Nodes, net: Internet, host: str, *arguments: str) -> NodeProcess:
    command = (NOLOCO[0], IN_NAMESPACE, net.namespace(host))
    return nodes.start(*arguments, command=command, own_dir=host)


def trains(home: Path, build: Callable[[Internet], Hosts], *more: str) -> None:
    """2 × 2: a public node of stage 1, and, on the hosts that `build` creates, two of stage 0 and one of stage 1.

    So half of the microbatches have both ends behind gateways, and so have the outer rounds of stage 0. Joining nodes
    get the address on the command line, and `more` where there is only IPv6.
    """
    with node_processes(home) as nodes, internet() as net:
        public = net.public("public", 1)
        address = f"'{gateways.PUBLIC_6}1'" if more else public
        inside = build(net)
        key = home / "root.key"
        made = nodes.start("key", "new", str(key), command=NOLOCO)
        assert made.end() == 0, made.logged()
        few = settings(steps="12", start_replicas="2", listen__host=address)
        first = in_namespace(nodes, net, "public", *SMALL, *few, "--key", str(key), "--stage", "1")
        first.endpoints()
        invited = nodes.start("invite", "--dir", str(first.dir), "--for", "1h", "--uses", "3", command=NOLOCO)
        assert invited.end() == 0, invited.logged()
        joining = ["--join", invited.printed().split()[2], *more]
        stages = zip(inside, "001", strict=True)
        others = [in_namespace(nodes, net, host, *joining, "--stage", stage) for host, stage in stages]
        nodes.all_end_well()
        nodes.nothing_left()
    for node in others:
        assert "others cannot reach this node at" in node.logged()
        assert "use the address of another node" in node.printed()
    found = [node.summary() for node in (*others, first)]
    assert [one["state"] for one in found] == ["finished"] * 4
    assert [one["outer_rounds"] for one in found[:2]] == [3, 3]
    for one in found:
        assert one["microbatch_results"]["done"] > 0
        assert one["results"].keys() - {"alone"}, "replicas merge with partners"


def carrier_grade(net: Internet) -> str:
    net.gateway("carrier", 12)
    net.gateway("", 13, behind="carrier")
    return "at-at-carrier"


def symmetric_and_carrier_grade_without_udp(net: Internet) -> Hosts:
    net.gateway("home", 11, "--random-fully", drops=("-p", "udp"))
    net.gateway("office", 14)
    return "at-home", "at-office", carrier_grade(net)


def port_restricted(net: Internet, *nat: str, drops: Sequence[str] = ()) -> Hosts:
    for name, number in (("home", 11), ("office", 12), ("shop", 13)):
        net.gateway(name, number, *nat, drops=drops)
    return "at-home", "at-office", "at-shop"


def full_cone(net: Internet) -> Hosts:
    """Anyone may reach a gateway's ports that belong to its outgoing connections."""
    inside = port_restricted(net)
    for host in ("home", "office", "shop"):
        net.run(host, str(gateways.IPTABLES), "-I", "FORWARD", "-i", gateways.WAN, "-j", "ACCEPT")
    return inside


def symmetric(net: Internet) -> Hosts:
    return port_restricted(net, "--random-fully")


def udp_blocked(net: Internet) -> Hosts:
    return port_restricted(net, drops=("-p", "udp"))


def both_carrier_grade(net: Internet) -> Hosts:
    net.gateway("home", 14)
    net.gateway("", 15, behind="home")
    net.gateway("office", 16)
    return "at-at-home", "at-office", carrier_grade(net)


def ipv6_only(net: Internet) -> Hosts:
    for name, number in (("home", 11), ("office", 12), ("shop", 13)):
        net.firewall_6(name, number)
    return "home", "office", "shop"


def test_nodes_behind_three_kinds_of_gateways_and_a_public_one_train(tmp_path: Path) -> None:
    trains(tmp_path, symmetric_and_carrier_grade_without_udp)


@pytest.mark.soak
@pytest.mark.parametrize("build", [port_restricted, full_cone, symmetric, udp_blocked, both_carrier_grade, ipv6_only])
def test_nodes_behind_other_kinds_of_gateways_train(tmp_path: Path, build: Callable[[Internet], Hosts]) -> None:
    trains(tmp_path, build, *(settings(listen__host="'::'") if build is ipv6_only else ()))
