"""The Telemetry port: a node's events are counted, and go to its log and its journal.

What is counted of an event is in counters.py, what the log says in event_log.py, what is answered over HTTP in
http_pages.py.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector

from noloco_p2p.core.health import problem_line
from noloco_p2p.core.status import NodeFigures, Status
from noloco_p2p.io.telemetry import node_figures
from noloco_p2p.io.telemetry.counters import RunCounters
from noloco_p2p.io.telemetry.event_log import EventLog
from noloco_p2p.io.telemetry.http_pages import STARTING, pages
from noloco_p2p.io.telemetry.http_server import HttpServer
from noloco_p2p.io.telemetry.journal import Journal
from noloco_p2p.io.telemetry.log import RepeatLimiter
from noloco_p2p.io.telemetry.metrics import PHASES, SECONDS_BUCKETS, NodeMetrics
from noloco_p2p.io.telemetry.watchdog import Watchdog

logger = logging.getLogger("noloco_p2p")


class PrometheusTelemetry:
    """Telemetry of ports.py for a run of `stages` stages; `serve` opens the port."""

    def __init__(self, stages: int) -> None:
        self.counters = RunCounters(stages)
        self.registry = CollectorRegistry()
        self._log = EventLog(self.counters)
        self._limiter = RepeatLimiter()
        self._journal: Journal | None = None
        self._directory: Path | None = None
        self._status: Callable[[], Status] | None = None
        self._watchdog: Watchdog | None = None
        self._metrics = NodeMetrics(self.counters, self._health)
        self.registry.register(self._metrics)
        text = "Seconds of one phase of the work."
        phases = Histogram("noloco_phase_seconds", text, ["phase"], buckets=SECONDS_BUCKETS, registry=self.registry)
        self._phases = {name: phases.labels(name) for name in PHASES}
        ProcessCollector(registry=self.registry)
        self._server: HttpServer | None = None

    def serve(self, host: str, port: int) -> int:
        """Answer from threads of its own; returns the port (0 picks one). LocalError when it is in use."""
        self._server = HttpServer.open(host, port, pages(self.registry, self._health))
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop the watchdog and the server (a quarter of a second at most)."""
        if self._watchdog is not None:
            self._watchdog.close()
        if self._server is not None:
            self._server.close()
            self._server = None

    def watch(self, status: Callable[[], Status], directory: Path) -> None:
        """From now on there is a node, which works in `directory`; `status` is called from any thread."""

        def with_figures() -> Status:
            return replace(status(), figures=self.figures())

        self._directory = directory
        self._status = with_figures
        self._watchdog = Watchdog(with_figures, lambda line, well: self.event("stuck", message=line, well=well))
        self._watchdog.start()

    def measure_memory(self, memory: Callable[[], tuple[int, int]] | None) -> None:
        """What gives the used and total bytes of the device's memory, from any thread; None: the CPU's."""
        self._metrics.device_memory = memory or (lambda: (node_figures.rss_bytes(), node_figures.memory_bytes()))

    def record(self, journal: Journal) -> None:
        """Let a journal, made with `counters`, have every event from now on."""
        self._journal = journal

    def identify(self, **labels: str) -> None:
        """Fill in node_info: peer id, run id, stage, version."""
        self._metrics.identity = labels

    def event(self, kind: str, /, **fields: object) -> None:
        """See `ports.Telemetry`."""
        try:
            with self.counters.lock:
                self.counters.count(kind, fields)
                self._log.write(kind, fields)
                if self._journal is not None:
                    self._journal.note(kind, fields)
        except Exception:  # an instrument may never stop what it watches
            if self._limiter.admit(f"fault {kind[:40]}") is not None:
                logger.debug("telemetry: event %s failed", kind, exc_info=True)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """See `ports.Telemetry`."""
        name = name if name in PHASES else "other"
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self._phases[name].observe(seconds)
            self.event("span", name=name, seconds=seconds)

    def totals(self) -> dict[str, Any]:
        """What has been counted until now, under the names of `summary.json`."""
        return node_figures.run_totals(self.counters)

    def figures(self) -> NodeFigures:
        """What has been counted until now, for the node's status; from any thread."""
        return node_figures.status_figures(self.counters, self._directory)

    def _health(self) -> tuple[Status | None, str | None]:
        """The node's status, None before there is one, and what is wrong in one line, None when nothing is."""
        if self._status is None:
            return None, STARTING
        status = self._status()
        return status, problem_line(status)
