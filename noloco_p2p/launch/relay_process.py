"""The relay of `noloco swarm --link`, as the launcher uses it: starts it, sends nodes to it, reads counts, ends it."""

import json
import select
import subprocess
import sys
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address
from subprocess import PIPE
from typing import Any

from noloco_p2p.errors import LocalError
from noloco_p2p.launch.line_spec import LineSpec
from noloco_p2p.launch.node_process import NodeProcess

FIRST_HOST = IPv4Address("127.1.0.1")
"""Address of the first node; the others follow. Two swarms may share addresses, because the ports are free ones."""
START_S, ANSWER_S, END_S = 30.0, 5.0, 5.0
"""Time limits for the relay to listen, to answer, and to end, seconds."""


class RelayProcess:
    """The process. It ends when its standard input closes, which is when the launcher is gone."""

    def __init__(self, link: str, names: Sequence[str], seed: int) -> None:
        """`link` as in `--link`; `names` of all nodes. Raises ConfigError."""
        LineSpec.parse(link)
        self.link = link
        self._hosts = {name: str(FIRST_HOST + number) for number, name in enumerate(names)}
        self._request = {"link": link, "hosts": list(self._hosts.values()), "seed": seed}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, nodes: Iterable[NodeProcess]) -> None:
        """Start it, and put the nodes behind their lines from their next start on. Raises LocalError."""
        command = [sys.executable, "-m", "noloco_p2p.launch.relay"]
        try:
            self._process = subprocess.Popen(command, bufsize=0, stdin=PIPE, stdout=PIPE, start_new_session=True)
        except OSError as error:
            raise LocalError(f"the relay of --link cannot be started: {error}") from error
        try:
            ports = self._ask(json.dumps(self._request), START_S)["ports"]
        except LocalError:
            self.close()
            raise
        doors = dict(zip(self._hosts, ports, strict=True))
        for node in nodes:
            node.host = self._hosts[node.name]
            # Only gRPC uses the door: libp2p knows no proxies. The user's own exceptions must not apply here.
            node.environment = {"grpc_proxy": f"http://{node.host}:{doors[node.name]}", "no_grpc_proxy": ""}

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def counts(self) -> dict[str, Any]:
        """`lines`: bytes sent and received by each node, by name; `cpu_s`: the relay's CPU time. Raises LocalError."""
        found = self._ask("counts", ANSWER_S)
        return {**found, "lines": {name: found["lines"][host] for name, host in self._hosts.items()}}

    def close(self) -> None:
        """End it, and wait until it has ended."""
        if self._process is not None:
            try:
                self._process.communicate(timeout=END_S)  # closes its standard input
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.communicate()

    def _ask(self, line: str, seconds: float) -> dict[str, Any]:
        """The answer to a line. Raises LocalError if it does not come in time."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line.encode() + b"\n")
            readable, _, _ = select.select([process.stdout], [], [], seconds)
            answer = process.stdout.readline() if readable else b""
        except OSError:
            answer = b""
        if not answer:
            raise LocalError(f"the relay of --link {self.link} does not answer: see its output")
        return dict(json.loads(answer))
