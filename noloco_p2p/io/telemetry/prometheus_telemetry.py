"""The Telemetry port: what a node tells of itself goes to its metrics, its totals, its log and its journal.

What an event does is in events.py; an event of another kind is only logged, at debug level. What is answered over HTTP
is in pages.py.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector

from noloco_p2p.core.status import NodeFigures, Status
from noloco_p2p.io.telemetry import process_usage
from noloco_p2p.io.telemetry import recent_rates as figures
from noloco_p2p.io.telemetry.events import QUIET_S, Events
from noloco_p2p.io.telemetry.http_pages import Scraped, Watched, pages
from noloco_p2p.io.telemetry.http_server import WebServer
from noloco_p2p.io.telemetry.journal import Journal
from noloco_p2p.io.telemetry.log import Limiter
from noloco_p2p.io.telemetry.metrics import Metrics
from noloco_p2p.io.telemetry.watchdog import Watchdog

logger = logging.getLogger("noloco_p2p")


class PrometheusTelemetry:
    """Telemetry of ports.py. `stages` bounds the series of `peers`; `serve` opens the port."""

    def __init__(self, stages: int) -> None:
        self.registry = CollectorRegistry()
        self._metrics = Metrics(self.registry)
        self._events = Events(self._metrics, stages)
        self._lock = threading.Lock()
        self._limiter = Limiter(QUIET_S)
        self._journal: Journal | None = None
        self._directory: Path | None = None
        self._watched = Watched()
        self._scraped = Scraped(self._watched)
        self.registry.register(self._scraped)
        ProcessCollector(registry=self.registry)
        self._server = WebServer(pages(self.registry, self._watched))
        self._watchdog: Watchdog | None = None

    def serve(self, host: str, port: int) -> int:
        """Answer from threads of its own; returns the port (0 picks one). LocalError when it is in use."""
        return self._server.open(host, port)

    def close(self) -> None:
        """Stop to look and to answer (a quarter of a second at most)."""
        if self._watchdog is not None:
            self._watchdog.close()
        self._server.close()

    def watch(self, status: Callable[[], Status], directory: Path) -> None:
        """From now on there is a node: `status` tells of it, from any thread. It works in `directory`."""

        def whole() -> Status:
            return replace(status(), figures=self.figures())

        self._directory = directory
        self._watched.watch(whole)
        self._watchdog = Watchdog(whole, lambda line, well: self.event("stuck", message=line, well=well))
        self._watchdog.start()

    def measure_memory(self, memory: Callable[[], tuple[int, int]] | None) -> None:
        """Where the used and total bytes of the device's memory are asked, from any thread; None: the CPU's."""
        self._scraped.memory = memory or (lambda: (process_usage.rss_bytes(), process_usage.memory_bytes()))

    def record(self, journal: Journal) -> None:
        """Let a journal have every event from now on, and the seconds of every phase."""
        self._journal = journal
        self._metrics.phases.heard = lambda name, seconds: journal.note("span", {"name": name, "seconds": seconds})

    def identify(self, **labels: str) -> None:
        """Fill in node_info: peer id, run id, stage, version."""
        self._metrics.node.info(labels)

    def event(self, kind: str, /, **fields: object) -> None:
        """See `ports.Telemetry`."""
        try:
            handler = self._events.handlers.get(kind)
            if handler is None:
                logger.debug("%s %s", kind, fields)
            else:
                with self._lock:
                    handler(fields)
            if self._journal is not None:
                self._journal.note(kind, fields)
        except Exception:  # an instrument may never stop what it watches
            if self._limiter.admit(f"fault {kind[:40]}") is not None:
                logger.debug("telemetry: event %s failed", kind, exc_info=True)

    def span(self, name: str) -> AbstractContextManager[None]:
        """See `ports.Telemetry`."""
        return self._metrics.phases.span(name)

    def totals(self) -> dict[str, object]:
        """See `Totals.told`."""
        with self._lock:
            return self._events.totals.told()

    def figures(self) -> NodeFigures:
        """What has been counted until now, for the node's status; from any thread."""
        with self._lock:
            return figures.figures(self._events.totals, self._events.recent, self._directory)
