"""One `noloco-node` process of a swarm on this machine: starts it, reads its files and metrics, ends it."""

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
"""From the first request to stop to the second, seconds. A node that is already leaving stops at the first."""
KILL_AFTER_S = 5.0
"""From the second request to SIGKILL, seconds."""
POLL_S = 0.05
METRICS_TIMEOUT_S = 1.0
"""Longest wait for a node's metrics, seconds."""
READINGS_KEPT = 8
"""Tokens per second are averaged over this many readings."""


class NodeProcess:
    """A node process, its directory `<run>/<stage>-<replica>/` and its log `<run>/<stage>-<replica>.log`.

    It is forked (see fork_server) into a session of its own, so that Ctrl-C at the terminal only reaches the launcher.
    It ends when its standard input closes, which is when the launcher is gone.
    """

    def __init__(self, run_dir: Path, stage: int, replica: int) -> None:
        self.name = f"{stage}-{replica}"
        self.stage = stage
        self.dir = run_dir / self.name
        self.log = run_dir / f"{self.name}.log"
        self.host = "127.0.0.1"
        """The address at which it listens."""
        self.environment: Mapping[str, str] = {}
        """Variables of its process, in addition to those of all nodes."""
        self.readings: deque[node_probe.MetricsReading] = deque(maxlen=READINGS_KEPT)
        """The last readings of its metrics."""
        self.missed = 0
        """Readings that have failed since the last one."""
        self._endpoints: node_probe.NodeEndpoints | None = None
        self._process: ForkedProcess | None = None

    def start(self, server: ForkServerProcess, arguments: Sequence[str]) -> None:
        """Start `noloco-node`, for the first time or again; its log is continued.

        Raises LocalError if its files cannot be created or the process cannot be started.
        """
        program = [*PROGRAM, *arguments, "--set", f"listen.host={self.host}"]
        program += ["--stage", str(self.stage), "--dir", str(self.dir), "--watch-stdin"]
        environment = {**server.environment, **self.environment}
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            (self.dir / node_probe.SUMMARY).unlink(missing_ok=True)
            self._endpoints = None
            self.release()
            self.log.touch(0o600 if "--key" in arguments else 0o666)  # with the key it prints an invitation
            with self.log.open("ab") as log:
                output = log.fileno(), log.fileno()
                self._process = server.fork(f"noloco-node {self.name}", program, output, environment, Path.cwd())
        except OSError as error:
            raise LocalError(f"node {self.name} cannot be started: {error}") from error

    @property
    def exit_code(self) -> int | None:
        """The exit code; minus the signal if one ended it; None while it runs or if it was never started."""
        return None if self._process is None else self._process.poll()

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        if self._process is not None and self._process.server_ended:
            return "was killed, because the fork server of all nodes has ended"
        code = self.exit_code or 0
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def summary(self) -> dict[str, Any] | None:
        """The summary that it wrote at its end; None while it runs, when the file may be an earlier process's."""
        return None if self.exit_code is None else node_probe.read_json(self.dir / node_probe.SUMMARY)

    @property
    def endpoints(self) -> node_probe.NodeEndpoints | None:
        """Who it is and where it can be reached; None until its current process has written that."""
        if self._endpoints is None and self._process is not None:
            found = node_probe.read_endpoints(self.dir)
            self._endpoints = found if found is not None and found.pid == self._process.pid else None
        return self._endpoints

    def read_metrics(self) -> node_probe.MetricsReading | None:
        """Its current metrics, which are also added to `readings`; None if it does not return any."""
        endpoints = self.endpoints
        if not self.running or endpoints is None:
            return None
        try:
            self.readings.append(node_probe.scrape(endpoints.metrics, METRICS_TIMEOUT_S))
        except Unreachable:
            self.missed += 1
            return None
        self.missed = 0
        return self.readings[-1]

    def last_lines(self, count: int) -> list[str]:
        """The last lines of its log."""
        try:
            with self.log.open(errors="replace") as log:
                return [line.rstrip("\n") for line in deque(log, maxlen=count)]
        except OSError as error:
            return [f"(the log cannot be read: {error})"]

    def terminate(self) -> None:
        """Ask it to leave. The second time, it stops at once."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it and the processes that it started."""
        if self._process is not None:
            self._process.kill_group()
            self._process.wait()

    def release(self) -> None:
        """Close this process's end of its standard input."""
        if self._process is not None:
            self._process.stdin.close()


def end_all(nodes: Sequence[NodeProcess], kill_after_s: float | None = None) -> None:
    """End all these processes: ask each twice, which stops a node at once, and kill those that remain.

    `kill_after_s`: time between the second request and the kill, by default KILL_AFTER_S.
    """
    for seconds in (ASK_AGAIN_S, KILL_AFTER_S if kill_after_s is None else kill_after_s):
        for node in nodes:
            node.terminate()
        give_up_at = time.monotonic() + seconds
        while any(node.running for node in nodes) and time.monotonic() < give_up_at:
            time.sleep(POLL_S)
    for node in nodes:
        node.kill()
        node.release()
