"""Node processes that are killed, restarted, stopped and continued. None of them outlives the `with`.

What the nodes do is seen from outside: their steps files as they grow, their metrics, their logs and summaries.
"""

import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from noloco_p2p.errors import LocalError
from noloco_p2p.lab.bench.churn_stats import InnerStepLine, events, parsed
from noloco_p2p.launch.node_probe import MetricsReading
from noloco_p2p.launch.node_process import NodeProcess

START_S = 240.0
"""For the first node to be reachable."""
TICK_S = 0.1
WAKE_MARGIN_S = 3.0
JOINED = 2
"""A node that is started again is given this many others to join; one of them may be about to die."""
COUNTERS = {"rerouted": "reroutes", "dropped": "dropped"}
"""Figure, of which there is the metric `<figure>_total` by reason, and its name in a node's summary."""


class NodeSlot:
    """One place in the swarm: its current process, and what earlier ones counted."""

    def __init__(self, run_dir: Path, stage: int, replica: int) -> None:
        self.child = NodeProcess(run_dir, stage, replica)
        self.name, self.stage = self.child.name, stage
        self.started_at = 0.0
        self.progressed_at = 0.0
        """When it last took an inner step, was started or was continued."""
        self.trains = False
        """Its current process has taken an inner step."""
        self.killed = False
        """Its last process was killed by us."""
        self.stopped_until: float | None = None
        self.restart_at: float | None = None
        self.metrics: MetricsReading | None = None
        self.counts: dict[str, Counter[str]] = {figure: Counter() for figure in COUNTERS}

    @property
    def peer(self) -> str | None:
        """Its peer id; None until it can be reached."""
        return None if self.child.endpoints is None else self.child.endpoints.peer_id

    @property
    def active(self) -> bool:
        """It trains, and is neither stopped nor gone."""
        return self.trains and self.stopped_until is None and self.child.running

    def read_metrics(self) -> None:
        """Read its metrics, if it answers."""
        if self.child.running and self.stopped_until is None:
            self.metrics = self.child.read_metrics() or self.metrics

    def book(self) -> None:
        """Its process has ended: keep what it counted, by its last metrics or its own summary."""
        summary = self.child.summary
        for figure, name in COUNTERS.items():
            if summary is not None:
                self.counts[figure].update(summary.get(name) or {})
            elif self.metrics is not None:
                found = self.metrics.by("reason", f"{figure}_total")
                self.counts[figure].update({reason: int(count) for reason, count in found.items()})
        self.metrics = None


class Fleet:
    """All nodes of one run below `run_dir`. Use it in a `with`: afterwards no process of it is left."""

    def __init__(self, run_dir: Path, shape: tuple[int, int], arguments: Sequence[str], threads: int) -> None:
        self.run_dir = run_dir
        self.stages, self.replicas = shape
        self.nodes = {f"{s}-{r}": NodeSlot(run_dir, s, r) for s, r in product(range(self.stages), range(self.replicas))}
        self.lines: list[InnerStepLine] = []
        self.step = 0
        """The largest clock that any line had."""
        self.back_s: list[float] = []
        """From the start of each process to its first inner step, seconds."""
        self._arguments = [*arguments, "--log-json"]
        own = {key: value for key, value in os.environ.items() if not key.startswith("NOLOCO__")}
        self._environment = {**own, "OMP_NUM_THREADS": str(threads)}
        self._read: dict[Path, int] = {}
        self._wakers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Fleet":
        self.run_dir.mkdir(parents=True, exist_ok=True)
        (self.run_dir / "audit").mkdir(exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Stopped processes take SIGKILL as well."""
        for node in self.nodes.values():
            node.child.kill()
            node.child.release()
        for waker in self._wakers:
            waker.kill()
            waker.wait()

    # --- what is done to them -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """All of them: the first, and when it can be reached the others. Raises LocalError."""
        first, *others = self.nodes.values()
        self._start(first)
        self.wait(lambda: first.child.endpoints is not None, f"node {first.name} can be reached", START_S)
        for node in others:
            self._start(node)

    def _start(self, node: NodeSlot) -> None:
        others = [other for other in self.nodes.values() if other is not node and other.child.running]
        others.sort(key=lambda other: other.stopped_until is not None)
        known = [one for one in (other.child.endpoints for other in others) if one is not None][:JOINED]
        joins = [part for one in known for part in ("--join", one.join[0])]
        node.child.start([*self._arguments, *joins], self._environment)
        node.started_at = node.progressed_at = time.time()
        node.trains, node.killed, node.stopped_until, node.restart_at = False, False, None, None

    def kill(self, node: NodeSlot, restart_in_s: float | None, *, fresh: bool = False) -> None:
        """kill -9 of the node and of what it started. With `fresh` it comes back as a new node without any files."""
        node.child.kill()
        node.book()
        node.trains, node.killed, node.stopped_until = False, True, None
        node.restart_at = None if restart_in_s is None else time.time() + restart_in_s
        if fresh:
            shutil.rmtree(node.child.dir, ignore_errors=True)

    def stop(self, node: NodeSlot, seconds: float) -> None:
        """SIGSTOP to the node and what it started, SIGCONT after `seconds`, also when this program is gone by then."""
        endpoints = node.child.endpoints
        assert endpoints is not None, "only a node that trains is stopped"
        os.killpg(endpoints.pid, signal.SIGSTOP)
        node.stopped_until = time.time() + seconds
        wake = f"sleep {seconds + WAKE_MARGIN_S:.0f}; kill -CONT -{endpoints.pid}"
        self._wakers.append(subprocess.Popen(["sh", "-c", wake], start_new_session=True, stderr=subprocess.DEVNULL))

    def tick(self) -> None:
        """Read the new lines; continue and restart what is due."""
        now = time.time()
        by_peer = {node.peer: node for node in self.nodes.values()}
        for line in self._new_lines():
            self.lines.append(line)
            self.step = max(self.step, line.step)
            node = by_peer.get(line.peer)
            # Of a killed node the lines may be new that it wrote a moment before: they are of its old process.
            if node is not None and not node.killed and line.at >= node.started_at:
                if not node.trains:
                    self.back_s.append(line.at - node.started_at)
                node.trains, node.progressed_at = True, max(node.progressed_at, line.at)
        for node in self.nodes.values():
            if node.stopped_until is not None and now >= node.stopped_until and node.child.running:
                endpoints = node.child.endpoints
                assert endpoints is not None, "it was running when it was stopped"
                os.killpg(endpoints.pid, signal.SIGCONT)
                node.stopped_until, node.progressed_at = None, now
            if node.restart_at is not None and now >= node.restart_at:
                self._start(node)

    def _new_lines(self) -> Iterator[InnerStepLine]:
        for path in sorted((self.run_dir / "audit").glob("steps-*.jsonl")):
            done = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(done)
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._read[path] = done + len(whole) + 1
            peer = path.stem.removeprefix("steps-")
            for text in whole.splitlines():
                line = parsed(peer, text.decode(errors="replace"))
                if line is not None:
                    yield line

    # --- what they did ------------------------------------------------------------------------------------------------

    def of_stage(self, stage: int) -> list[str]:
        """The names of a stage's nodes."""
        return [node.name for node in self.nodes.values() if node.stage == stage]

    def first_stage_lines(self) -> list[InnerStepLine]:
        """The inner steps of stage 0 that had tokens, in the order in which they were read."""
        peers = {peer for name in self.of_stage(0) for peer in self.peer_ids(name)}
        return [line for line in self.lines if line.peer in peers and line.tokens]

    def training(self) -> dict[int, list[str]]:
        """By stage: the names of the nodes that train now and are not stopped."""
        return {s: [name for name in self.of_stage(s) if self.nodes[name].active] for s in range(self.stages)}

    def crashed(self) -> list[NodeSlot]:
        """Those that ended with an error, not by our kill."""
        return [node for node in self.nodes.values() if not node.killed and node.child.exit_code not in (None, 0)]

    def wait(self, holds: Callable[[], bool], what: str, seconds: float) -> None:
        """Tick until it holds. Raises LocalError when it does not in time, or when a node has crashed."""
        give_up_at = time.monotonic() + seconds
        while not holds():
            for node in self.crashed():
                last = " | ".join(node.child.last_lines(3))
                raise LocalError(f"node {node.name} ended with exit code {node.child.exit_code}: {last}")
            if time.monotonic() >= give_up_at:
                raise LocalError(f"not within {seconds:g} s: {what}")
            self.tick()
            time.sleep(TICK_S)

    def logged(self, kind: str, names: Iterable[str] | None = None) -> Iterator[dict[str, Any]]:
        """The events of a kind in the logs of these nodes, of all their processes; without names: of all nodes."""
        for name in self.nodes if names is None else names:
            yield from (event for event in events(self._log(name)) if event.get("event") == kind)

    def peer_ids(self, name: str) -> list[str]:
        """Peer ids of a place, one for each time that it was started with an empty directory."""
        lines = [line for line in self._log(name).splitlines() if line.startswith("peer id  ")]
        return list(dict.fromkeys(line.split()[-1] for line in lines))

    def _log(self, name: str) -> str:
        try:
            return self.nodes[name].child.log.read_text("utf-8", errors="replace")
        except OSError:
            return ""
