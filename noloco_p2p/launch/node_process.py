"""One `noloco-node` process of a swarm on this machine: start it, read it, end it."""

import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from noloco_p2p.errors import LocalError, Unreachable
from noloco_p2p.launch import node_probe
from noloco_p2p.launch.fork_server_process import ForkedProcess, ForkServerProcess

PROGRAM = ("-m", "noloco_p2p.cli.node")
ASK_AGAIN_S = 0.5
"""From the first request to stop to the second, seconds; a node that is leaving already stops at the first."""
KILL_AFTER_S = 5.0
"""From the second request to SIGKILL, seconds."""
POLL_S = 0.05
METRICS_TIMEOUT_S = 1.0
READINGS_KEPT = 8
"""Tokens per second are averaged over this many readings."""


class NodeProcess:
    """A node process, its directory `<run>/<stage>-<replica>/` and its log `<run>/<stage>-<replica>.log`.

    It is forked (see fork_server), and in a session of its own, so that Ctrl-C at the terminal reaches the launcher
    only; it ends when its standard input does, which is when the launcher is gone.
    """

    def __init__(self, run_dir: Path, stage: int, replica: int) -> None:
        self.name = f"{stage}-{replica}"
        self.stage = stage
        self.replica = replica
        self.dir = run_dir / self.name
        self.log = run_dir / f"{self.name}.log"
        self.host = "127.0.0.1"
        """Where it listens."""
        self.environment: Mapping[str, str] = {}
        """What its process has beside what all have."""
        self.readings: deque[node_probe.MetricsReading] = deque(maxlen=READINGS_KEPT)
        """The last ones of its metrics."""
        self._endpoints: node_probe.NodeEndpoints | None = None
        self._process: ForkedProcess | None = None

    def start(self, server: ForkServerProcess, arguments: Sequence[str]) -> None:
        """Start `noloco-node`, the first time or again; its log is carried on.

        Raises LocalError when its files cannot be made or the process cannot be started.
        """
        program = [*PROGRAM, *arguments, "--set", f"listen.host={self.host}"]
        program += ["--stage", str(self.stage), "--dir", str(self.dir), "--watch-stdin"]
        environment = {**server.environment, **self.environment}
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            (self.dir / node_probe.SUMMARY).unlink(missing_ok=True)
            self._endpoints = None
            self.release()
            with self.log.open("ab") as log:
                output = log.fileno(), log.fileno()
                self._process = server.fork(f"noloco-node {self.name}", program, output, environment, Path.cwd())
        except OSError as error:
            raise LocalError(f"node {self.name} cannot be started: {error}") from error

    @property
    def exit_code(self) -> int | None:
        """The exit code; negative when a signal ended it, None while it runs or when it was never started."""
        return None if self._process is None else self._process.poll()

    @property
    def running(self) -> bool:
        """It was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def summary(self) -> dict[str, Any] | None:
        """What it wrote at its end; None before, when there may be that of an earlier process."""
        return None if self.exit_code is None else node_probe.read_json(self.dir / node_probe.SUMMARY)

    @property
    def endpoints(self) -> node_probe.NodeEndpoints | None:
        """Who it is and where it can be reached; None until its present process has written that."""
        if self._endpoints is None and self._process is not None:
            found = node_probe.read_endpoints(self.dir)
            self._endpoints = found if found is not None and found.pid == self._process.pid else None
        return self._endpoints

    def read_metrics(self) -> node_probe.MetricsReading | None:
        """Its metrics now, which are kept, or None when it gives none."""
        endpoints = self.endpoints
        if not self.running or endpoints is None:
            return None
        try:
            self.readings.append(node_probe.scrape(endpoints.metrics, METRICS_TIMEOUT_S))
        except Unreachable:
            return None
        return self.readings[-1]

    def last_lines(self, count: int) -> list[str]:
        """The end of its log."""
        try:
            with self.log.open(errors="replace") as log:
                return [line.rstrip("\n") for line in deque(log, maxlen=count)]
        except OSError as error:
            return [f"(the log cannot be read: {error})"]

    def terminate(self) -> None:
        """Ask it to leave; asked again, it stops at once."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and what it started."""
        if self._process is not None:
            self._process.kill_group()
            self._process.wait()

    def release(self) -> None:
        """Close our end of its standard input."""
        if self._process is not None:
            self._process.stdin.close()


def wait_all(nodes: Sequence[NodeProcess], seconds: float) -> bool:
    """Wait for all to end, at most `seconds`; True when they have."""
    give_up_at = time.monotonic() + seconds
    while any(node.running for node in nodes):
        if time.monotonic() >= give_up_at:
            return False
        time.sleep(POLL_S)
    return True


def end_all(nodes: Sequence[NodeProcess], kill_after_s: float | None = None) -> None:
    """No process of these is left afterwards: two requests stop a node at once, and what remains is killed."""
    for seconds in (ASK_AGAIN_S, KILL_AFTER_S if kill_after_s is None else kill_after_s):
        for node in nodes:
            node.terminate()
        if wait_all(nodes, seconds):
            break
    for node in nodes:
        node.kill()
    for node in nodes:
        node.release()
