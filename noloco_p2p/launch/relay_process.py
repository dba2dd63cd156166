"""The relay of `noloco swarm --link` as its launcher sees it: start it, tell nodes of it, read its counts, end it."""

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
"""Of the nodes behind lines, one after the other. Ports are free ones, so that two swarms do not meet."""
START_S, ANSWER_S, END_S = 30.0, 5.0, 5.0
"""For it to listen, to answer, and to end when it is asked to."""


class RelayProcess:
    """The process. It ends when its standard input does, which is when the launcher is gone."""

    def __init__(self, link: str, names: Sequence[str], seed: int) -> None:
        """`link` as in `--link`; `names` of all nodes. Raises ConfigError."""
        LineSpec.parse(link)
        self.link = link
        self._hosts = {name: str(FIRST_HOST + number) for number, name in enumerate(names)}
        self._request = {"link": link, "hosts": list(self._hosts.values()), "seed": seed}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, nodes: Iterable[NodeProcess]) -> None:
        """Start it, and put the nodes behind their lines from their next starts on. Raises LocalError."""
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
            # Only its gRPC goes that way: libp2p knows no proxy. What the user has excepted must not be excepted here.
            door = f"http://{node.host}:{doors[node.name]}"
            node.environment = {"grpc_proxy": door, "no_grpc_proxy": ""}

    @property
    def running(self) -> bool:
        """It was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        assert self._process is not None
        return self._process.pid

    def counts(self) -> dict[str, Any]:
        """`lines`: bytes sent and received by each node, by name; `cpu_s`: of the relay. Raises LocalError."""
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
        """The answer to a line. Raises LocalError when it does not come in time."""
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
        found: dict[str, Any] = json.loads(answer)
        return found
