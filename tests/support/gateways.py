"""A small internet in network namespaces: public hosts, and hosts behind all kinds of gateways. It needs Linux, root
and iptables.

Its addresses are public ones, but they lead nowhere else: no namespace is connected to the real internet.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

IPTABLES, IP6TABLES = (shutil.which(f"{name}-nft") or shutil.which(name) for name in ("iptables", "ip6tables"))
PUBLIC, PUBLIC_6 = "11.1.1", "2a10:1::"
WAN = "wan0"


def why_not() -> str:
    """Why there can be no such internet on this machine; empty if there can."""
    if shutil.which("ip") is None or IPTABLES is None or IP6TABLES is None:
        return "needs ip and iptables"
    made = subprocess.run(["unshare", "-n", IPTABLES, "-t", "nat", "-L"], capture_output=True, check=False)
    return "" if made.returncode == 0 and os.access("/run", os.W_OK) else "network namespaces cannot be made here"


def why_no_namespaces() -> str:
    """Why there can be none even without iptables gateways; empty if there can."""
    if shutil.which("ip") is None or shutil.which("sysctl") is None:
        return "needs ip and sysctl"
    made = subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False)
    return "" if made.returncode == 0 and os.access("/run", os.W_OK) else "network namespaces cannot be made here"


@dataclass
class Internet:
    """Made by the context manager `internet`, which also removes it."""

    name: str
    hosts: list[str] = field(default_factory=list)
    routers: list["subprocess.Popen[str]"] = field(default_factory=list)

    def namespace(self, host: str) -> str:
        return f"{self.name}-{host}"

    def run(self, host: str, *words: str) -> None:
        """Run a command on a host; it must succeed."""
        done = subprocess.run(["ip", "netns", "exec", self.namespace(host), *words], capture_output=True, check=False)
        assert done.returncode == 0, (words, done.stderr)

    def connected(self, host: str, address: str) -> bool:
        """Whether a host has a TCP connection to an address (`host:port`)."""
        words = ["ss", "-Htn", "state", "established", "dst", address]
        found = subprocess.run(
            ["ip", "netns", "exec", self.namespace(host), *words], capture_output=True, text=True, check=True
        )
        return bool(found.stdout.strip())

    def host(self, name: str) -> None:
        """A host without a line."""
        subprocess.run(["ip", "netns", "add", self.namespace(name)], check=True)
        self.hosts.append(name)
        self.run(name, "ip", "link", "set", "lo", "up")

    def public(self, name: str, number: int) -> str:
        """A host with a line to all others. Returns its address."""
        self.host(name)
        self._wire("wan", f"to-{name}", name, WAN)
        self.run("wan", "ip", "link", "set", f"to-{name}", "master", "br0")
        for address in (f"{PUBLIC}.{number}/24", f"{PUBLIC_6}{number}/64"):
            self._address(name, WAN, address)
        return f"{PUBLIC}.{number}"

    def gateway(self, name: str, number: int, *nat: str, behind: str | None = None, drops: Sequence[str] = ()) -> None:
        """A gateway for one host, `at-<name>`, at 192.168.<number>.2. `behind` another one's host: carrier-grade NAT.

        `nat`: options after MASQUERADE. Unsolicited packets from outside are dropped, and so are those in `drops`.
        """
        if behind is None:
            self.public(name, number)
            out = WAN
        else:
            name, out = f"at-{behind}", "eth0"
        inside = f"at-{name}"
        self.host(inside)
        self._wire(name, "lan0", inside, "eth0")
        for host, interface, address in ((name, "lan0", 1), (inside, "eth0", 2)):
            self._address(host, interface, f"192.168.{number}.{address}/24")
        self.run(inside, "ip", "route", "add", "default", "via", f"192.168.{number}.1")
        self.run(name, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for words in (
            ("-t", "nat", "-A", "POSTROUTING", "-o", out, "-j", "MASQUERADE", *nat),
            ("-P", "FORWARD", "DROP"),
            *(("-A", "FORWARD", *drop, "-j", "DROP") for drop in [drops] if drop),
            ("-A", "FORWARD", "-i", "lan0", "-j", "ACCEPT"),
            ("-A", "FORWARD", "-m", "state", "--state", "ESTABLISHED,RELATED", "-j", "ACCEPT"),
            ("-A", "INPUT", "-i", out, "-j", "DROP"),
        ):
            self.run(name, str(IPTABLES), *words)

    def router(self, name: str, number: int, how: str = "", *, known_to: Sequence[str] | None = None) -> IO[str]:
        """A home router with UPnP, and a host behind it, `at-<name>`, at 192.168.<number>.2. Returns the router's log.

        With `known_to` there is no NAT, which needs iptables: these hosts have routes to the private addresses instead.
        """
        wan, lan = f"{PUBLIC}.{number}", f"192.168.{number}.1"
        if known_to is None:
            self.gateway(name, number)
            self.run(name, str(IPTABLES), "-P", "INPUT", "ACCEPT")
            self.run(name, str(IPTABLES), "-F", "INPUT")
        else:
            self.public(name, number)
            self.run(name, "sysctl", "-qw", "net.ipv4.ip_forward=1")
            self.behind(name, f"at-{name}", number, wan, known_to)
        script = str(Path(__file__).with_name("home_router.py"))
        words = ["ip", "netns", "exec", self.namespace(name), sys.executable, script, lan, wan, how]
        router = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.routers.append(router)
        assert router.stdout is not None
        assert "ready" in router.stdout.readline()
        return router.stdout

    def behind(self, router: str, host: str, number: int, wan: str, known_to: Sequence[str]) -> None:
        """A host behind a router, whose outside address is `wan`, on its own wire."""
        self.host(host)
        self._wire(router, f"lan{number}", host, "eth0")
        lan, inside = f"192.168.{number}.1", f"192.168.{number}.2"
        self._address(router, f"lan{number}", f"{lan}/24")
        self._address(host, "eth0", f"{inside}/24")
        self.run(host, "ip", "route", "add", "default", "via", lan)
        for one in known_to:
            self.run(one, "ip", "route", "add", f"192.168.{number}.0/24", "via", wan)

    def firewall_6(self, name: str, number: int) -> None:
        """An IPv6-only host to which nobody can open a connection."""
        self.public(name, number)
        self.run(name, "ip", "address", "del", f"{PUBLIC}.{number}/24", "dev", WAN)
        for words in (
            ("-A", "INPUT", "-i", WAN, "-p", "tcp", "-m", "state", "--state", "NEW", "-j", "DROP"),
            ("-A", "INPUT", "-i", WAN, "-p", "udp", "-j", "DROP"),
        ):
            self.run(name, str(IP6TABLES), *words)

    def _wire(self, one: str, end: str, other: str, other_end: str) -> None:
        peer = ("peer", "name", other_end, "netns", self.namespace(other))
        self.run(one, "ip", "link", "add", end, "type", "veth", *peer)
        self.run(one, "ip", "link", "set", end, "up")
        self.run(other, "ip", "link", "set", other_end, "up")

    def _address(self, host: str, interface: str, address: str) -> None:
        more = ("nodad",) if ":" in address else ()
        self.run(host, "ip", "address", "add", address, "dev", interface, *more)


@contextmanager
def internet() -> Iterator[Internet]:
    """An internet that is still empty; afterwards none of its namespaces is left."""
    made = Internet(f"noloco{os.getpid()}")
    try:
        made.host("wan")
        made.run("wan", "ip", "link", "add", "br0", "type", "bridge")
        made.run("wan", "ip", "link", "set", "br0", "up")
        yield made
    finally:
        for router in made.routers:
            router.kill()
            router.communicate()
        for host in made.hosts:
            subprocess.run(["ip", "netns", "del", made.namespace(host)], check=False)
