"""Node processes for measurements, which can be killed, restarted, stopped and continued. None outlives the `with`.

The nodes are observed from outside: through their growing steps files, journals, metrics and summaries.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.host import cores
from noloco_p2p.launch import foreseen
from noloco_p2p.launch.fork_server_process import ForkServerProcess
from noloco_p2p.launch.node_process import NodeProcess
from noloco_p2p.launch.relay_process import RelayProcess
from noloco_p2p.launch.settings import read
from noloco_p2p.launch.swarm_plan import make_plan
from noloco_p2p.observe.report.journals import JournalEvent, read_processes

START_S = 240.0
"""Longest wait for the first node to be reachable, and for a swarm to train."""
ENDLESS_STEPS = 1_000_000
"""More steps than any measurement takes."""
TICK_S = 0.1
JOINED = 2
"""Number of peers that a starting node is told to join, because one of them may be about to die."""


@dataclass(frozen=True, slots=True)
class InnerStepLine:
    """One inner step of one replica, as recorded in its steps file (ARCHITECTURE.md, "Files")."""

    peer: str
    at: float
    """Unix seconds."""
    inner_step: int
    step: int
    tokens: int
    ids: tuple[str, ...]
    """The microbatches counted in it."""


def parsed(peer: str, text: str) -> InnerStepLine | None:
    """A line of a steps file; None if it is malformed, such as when a killed node did not finish it."""
    try:
        found = json.loads(text)
        served = found["microbatches"]
        tokens, ids = sum(one["tokens"] for one in served), tuple(one["id"] for one in served)
        return InnerStepLine(peer, found["at"], found["inner_step"], found["step"], tokens, ids)
    except (ValueError, KeyError, TypeError):
        return None


class FleetNode(NodeProcess):
    """One place in the swarm: its current process, and the directories that earlier nodes left there."""

    def __init__(self, run_dir: Path, stage: int, replica: int) -> None:
        super().__init__(run_dir, stage, replica)
        self.started_at = 0.0
        self.progressed_at = 0.0
        """When it last took an inner step, was started or was continued."""
        self.trains = False
        """Whether its current process has taken an inner step."""
        self.killed = False
        """Whether the fleet killed its newest process."""
        self.stopped_until: float | None = None
        self.restart_at: float | None = None
        self.dirs = [self.dir]
        """Directories of all nodes that were in this place, oldest first; the current one is the last."""

    @property
    def peer(self) -> str | None:
        """Its peer id; None until it is reachable."""
        return None if self.endpoints is None else self.endpoints.peer_id

    @property
    def active(self) -> bool:
        """Whether it trains, and is running and not stopped."""
        return self.trains and self.stopped_until is None and self.running

    def set_aside(self) -> None:
        """Rename its directory, so that the next process is a new node. The journal in the old one is still read."""
        old = self.dir.with_name(f"{self.name}.{len(self.dirs)}")
        self.dir.rename(old)
        self.dirs.insert(-1, old)


class Fleet:
    """All nodes of one run, with their directories below `run_dir`. Use it in a `with`, which leaves no process behind.

    `shape`: stages and replicas; `settings`: those of all nodes, `key=value`; `link`: as for `noloco swarm --link`.
    Raises ConfigError if settings or link are invalid, and LocalError if the machine has no room for the nodes.
    """

    def __init__(
        self, run_dir: Path, shape: tuple[int, int], settings: Sequence[str] = (), link: str | None = None
    ) -> None:
        own = (f"stages={shape[0]}", f"start_replicas={shape[1]}")
        self.plan = make_plan(read(None, {}, (*own, *settings)), None)
        if (self.plan.manifest.stages, self.plan.manifest.start_replicas) != shape:
            raise ConfigError("--set stages, --set start_replicas: give --nodes instead")
        foreseen.check_swarm(self.plan.manifest, self.plan.local, run_dir, lambda _: None)
        self.run_dir = run_dir
        self.stages = shape[0]
        places = (FleetNode(run_dir, stage, replica) for stage, replica in product(*map(range, shape)))
        self.nodes = {node.name: node for node in places}
        self.lines: list[InnerStepLine] = []
        self.step = 0
        """The highest clock in any line."""
        self.back_s: list[float] = []
        """For each process that got there, seconds from its start to its first inner step."""
        self.relay = None if link is None else RelayProcess(link, list(self.nodes), seed=0)
        self._server = ForkServerProcess()
        self._read: dict[Path, int] = {}
        self._wakers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Fleet":
        (self.run_dir / "audit").mkdir(parents=True, exist_ok=True)
        self.plan.write(self.run_dir)
        self._server.start(self.plan.environment(max(1, cores() // len(self.nodes))))
        if self.relay is not None:
            self.relay.start(self.nodes.values())
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all processes; SIGKILL also ends stopped ones."""
        for node in self.nodes.values():
            node.kill()
            node.release()
        self._server.close()
        for waker in self._wakers:
            with suppress(ProcessLookupError):
                os.killpg(waker.pid, signal.SIGKILL)
            waker.wait()
        if self.relay is not None:
            self.relay.close()

    # --- starting and disturbing --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all nodes: the first one, and the others once it is reachable. Raises LocalError if it fails."""
        first, *others = self.nodes.values()
        self.wait(lambda: self._server.ready, "the import of torch", START_S)
        self._start(first)
        self.wait(lambda: first.endpoints is not None, f"node {first.name} to be reachable", START_S)
        for node in others:
            self._start(node)

    def _start(self, node: FleetNode) -> None:
        others = [other for other in self.nodes.values() if other is not node and other.running]
        others.sort(key=lambda other: other.stopped_until is not None)
        known = [one for one in (other.endpoints for other in others) if one is not None][:JOINED]
        joins = [part for one in known for part in ("--join", one.join[0])]
        node.start(self._server, [*self.plan.arguments(self.run_dir), *joins])
        node.started_at = node.progressed_at = time.time()
        node.trains, node.killed, node.stopped_until, node.restart_at = False, False, None, None

    def kill(self, node: FleetNode, restart_in_s: float | None, *, fresh: bool = False) -> None:
        """Send SIGKILL to the node and all that it started. With `fresh` it comes back as a new node without files."""
        node.kill()
        node.trains, node.killed, node.stopped_until = False, True, None
        node.restart_at = None if restart_in_s is None else time.time() + restart_in_s
        if fresh:
            node.set_aside()

    def stop(self, node: FleetNode, seconds: float) -> None:
        """Send SIGSTOP to the node and all that it started, and after `seconds` SIGCONT, even if this program ends."""
        assert node.endpoints is not None, "only a node that trains can be stopped"
        pid = node.endpoints.pid
        os.killpg(pid, signal.SIGSTOP)
        node.stopped_until = time.time() + seconds
        wake = ["sh", "-c", f"sleep {seconds:.2f}; kill -CONT -{pid}"]
        self._wakers.append(subprocess.Popen(wake, start_new_session=True, stderr=subprocess.DEVNULL))

    def tick(self) -> None:
        """Read new lines, restart nodes that are due, and note which stopped nodes continue."""
        now = time.time()
        by_peer = {node.peer: node for node in self.nodes.values()}
        for line in self._new_lines():
            self.lines.append(line)
            self.step = max(self.step, line.step)
            node = by_peer.get(line.peer)
            # New lines of a killed node may be from just before it was killed: they belong to its old process.
            if node is not None and not node.killed and line.at >= node.started_at:
                if not node.trains:
                    self.back_s.append(line.at - node.started_at)
                node.trains, node.progressed_at = True, max(node.progressed_at, line.at)
        for node in self.nodes.values():
            if node.stopped_until is not None and now >= node.stopped_until:
                node.stopped_until, node.progressed_at = None, now
            if node.restart_at is not None and now >= node.restart_at:
                self._start(node)

    def _new_lines(self) -> Iterator[InnerStepLine]:
        for path in sorted((self.run_dir / "audit").glob("steps-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._read[path] = self._read.get(path, 0) + len(whole) + 1
            peer = path.stem.removeprefix("steps-")
            lines = (parsed(peer, text.decode(errors="replace")) for text in whole.splitlines())
            yield from (line for line in lines if line is not None)

    def wait(self, holds: Callable[[], bool], what: str, seconds: float, every_s: float = TICK_S) -> None:
        """Tick until a condition holds. Raises LocalError if it does not in time, or if a node or the relay dies."""
        give_up_at = time.monotonic() + seconds
        while not holds():
            for node in self.crashed():
                last = " | ".join(node.last_lines(3))
                raise LocalError(f"node {node.name} ended with exit code {node.exit_code}: {last}")
            if self.relay is not None and not self.relay.running:
                raise LocalError(f"the relay of {self.relay.link} has died")
            if time.monotonic() >= give_up_at:
                raise LocalError(f"timed out after {seconds:g} s waiting for {what}")
            self.tick()
            time.sleep(every_s)

    # --- observing ----------------------------------------------------------------------------------------------------

    def of_stage(self, stage: int) -> list[FleetNode]:
        """The nodes of a stage."""
        return [node for node in self.nodes.values() if node.stage == stage]

    def training(self) -> dict[int, list[str]]:
        """By stage: the names of the nodes that train now."""
        return {stage: [node.name for node in self.of_stage(stage) if node.active] for stage in range(self.stages)}

    def crashed(self) -> list[FleetNode]:
        """The nodes that ended with an error and that the fleet did not kill."""
        return [node for node in self.nodes.values() if not node.killed and node.exit_code not in (None, 0)]

    def first_stage_lines(self) -> list[InnerStepLine]:
        """The inner steps of stage 0 that had tokens, in the order in which they were read."""
        peers = set(self.peer_ids(self.of_stage(0)))
        return [line for line in self.lines if line.peer in peers and line.tokens]

    def events(self, kind: str, nodes: Iterable[FleetNode] | None = None) -> Iterator[JournalEvent]:
        """The events of a kind in the journals of these nodes (by default all), node by node."""
        for node in self.nodes.values() if nodes is None else nodes:
            processes = (process for directory in node.dirs for process in read_processes(directory))
            yield from (event for process in processes for event in process if event.kind == kind)

    def peer_ids(self, nodes: Iterable[FleetNode]) -> list[str]:
        """Peer ids of these nodes: one for each start with an empty directory."""
        return list(dict.fromkeys(event.text("peer_id") for event in self.events("start", nodes)))
