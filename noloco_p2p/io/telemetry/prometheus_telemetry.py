"""The Telemetry port: counts a node's events, and passes them to its log, journal and metrics.

counters.py says what is counted, log.py has the log's lines, and http_server.py the HTTP pages. The Prometheus metrics
(ARCHITECTURE.md, "Metrics") are made from the counters at each scrape.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from noloco_p2p.core.health import HealthProblem, problem, problem_line
from noloco_p2p.core.members import STATES
from noloco_p2p.core.status import Status
from noloco_p2p.host import memory_bytes
from noloco_p2p.io.telemetry import node_figures
from noloco_p2p.io.telemetry.counters import LAST_VALUES, MAX_LABELS, TALLIES, RunCounters, known_labels
from noloco_p2p.io.telemetry.http_server import POLL_S, STARTING, Health, HttpServer, Page, pages, without_addresses
from noloco_p2p.io.telemetry.journal import Journal
from noloco_p2p.io.telemetry.log import EventLog, RepeatLimiter

PHASES = ("forward", "backward", "send", "wait", "step", "outer", "other")
"""Phases of work that are measured; any other name counts as `other`."""
SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the buckets of the histogram of phases, seconds."""
WATCHDOG_PERIOD_S = 1.0

logger = logging.getLogger("noloco_p2p")


class PrometheusTelemetry(Collector):
    """`ports.Telemetry` for a run of `stages` stages and `steps` steps (0: not known); `serve` opens the port."""

    def __init__(self, stages: int, steps: int = 0) -> None:
        self.counters = RunCounters(stages)
        self.registry = CollectorRegistry()
        self._log = EventLog(self.counters, steps)
        self._limiter = RepeatLimiter()
        self._journal: Journal | None = None
        self._status: Callable[[], Status] | None = None
        self._watchdog: Watchdog | None = None
        self._server: HttpServer | None = None
        self._identity: dict[str, str] = {}
        """Peer id, run id, stage and version."""
        self._device_memory: Callable[[], tuple[int, int]] | None = None
        """Returns the used and total bytes of the device's memory; may be called from any thread."""
        self._made_at = time.time()
        self.registry.register(self)
        text = "Seconds of one phase of the work."
        phases = Histogram("noloco_phase_seconds", text, ["phase"], buckets=SECONDS_BUCKETS, registry=self.registry)
        self._phases = {name: phases.labels(name) for name in PHASES}
        ProcessCollector(registry=self.registry)

    def serve(
        self, host: str, port: int, more: Callable[[Health], Mapping[str, Page]] | None = None, *, private: bool = False
    ) -> int:
        """Answer HTTP requests in separate threads; returns the port (0 picks a free one). Raises LocalError if it is
        in use.

        `more` returns further pages, which must not contain addresses. With `private`, clients at public addresses do
        not see any node's address.
        """
        others = {} if more is None else more(self._health)
        inside = {**pages(self.registry, self._health), **others}
        outside = {**pages(self.registry, without_addresses(self._health)), **others} if private else inside
        self._server = HttpServer.open(host, port, inside, outside)
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop the watchdog and the server, which takes half a second at most."""
        if self._watchdog is not None:
            self._watchdog.close()
        if self._server is not None:
            self._server.close()

    def watch(self, status: Callable[[], Status], directory: Path) -> None:
        """Begin watching a node, which works in `directory`; `status` may be called from any thread."""

        def with_figures() -> Status:
            return replace(status(), figures=node_figures.status_figures(self.counters, directory))

        self._status = with_figures
        self._watchdog = Watchdog(with_figures, lambda line, well: self.event("stuck", message=line, well=well))
        self._watchdog.start()

    def measure_memory(self, memory: Callable[[], tuple[int, int]] | None) -> None:
        """Report the device's memory: `memory` returns used and total bytes, from any thread. None stands for the CPU:
        the memory of this process, and all RAM."""
        self._device_memory = memory or (lambda: (node_figures.rss_bytes(), memory_bytes()))

    def record(self, journal: Journal) -> None:
        """Pass every event to a journal, made with `counters`, from now on."""
        self._journal = journal

    def identify(self, **labels: str) -> None:
        """Set the labels of `noloco_node_info`: peer id, run id, stage, version."""
        self._identity = labels

    def event(self, kind: str, /, **fields: object) -> None:
        """See `ports.Telemetry`."""
        try:
            with self.counters.lock:
                self.counters.count(kind, fields)
                self._log.write(kind, fields)
                if self._journal is not None:
                    self._journal.note(kind, fields)
        except Exception:  # telemetry must never stop what it observes
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
        """Everything counted so far, under the names of `summary.json`."""
        return node_figures.run_totals(self.counters)

    def collect(self) -> Iterator[Metric]:
        """All metrics except the histogram of phases. A bug in the status only loses the metrics that come from it."""
        yield InfoMetricFamily("noloco_node", "Who this node is.", self._identity)
        with self.counters.lock:
            counted = [*_of_counters(self.counters, self._made_at), *_of_stages(self.counters)]
        yield from counted
        try:
            found = list(_of_status(*self._health(), self._device_memory))
        except Exception:  # telemetry must never stop what it observes
            logger.debug("the node's status could not be read", exc_info=True)
            found = [_healthy(False)]
        yield from found

    describe = collect

    def _health(self) -> tuple[Status | None, str | None]:
        """See `Health`."""
        if self._status is None:
            return None, STARTING
        status = self._status()
        return status, problem_line(status)


def _of_counters(counters: RunCounters, made_at: float) -> Iterator[Metric]:
    """The metrics listed in TALLIES and LAST_VALUES."""
    for tally in TALLIES:
        if tally.help is not None:
            counter = CounterMetricFamily(f"noloco_{tally.name}", tally.help, labels=tally.labels)
            # Known labels start at 0, because Prometheus sees no increase in a series that appears with the value 1.
            initial = known_labels(tally.name) if tally.labels else [()]
            for labels, amount in (dict.fromkeys(initial, 0) | counters.sums[tally.name]).items():
                first_at = made_at if labels in initial else counters.created_at[tally.name, labels]
                counter.add_metric(labels, amount, created=first_at)
            yield counter
    for value in LAST_VALUES:
        yield _gauge(value.name, value.help, counters.latest.get(value.name, 0))


def _of_stages(counters: RunCounters) -> Iterator[Metric]:
    """The node's state, and what it knows about each stage."""
    now, members, stages = time.monotonic(), counters.members, counters.stages
    states = {(each,): each == (counters.state or STATES[0]) for each in STATES}
    yield _gauges("state", "1 for the state that this node is in, else 0.", ["state"], states)
    peers = {} if members is None else {(str(s), each): members.get((s, each), 0) for s in stages for each in STATES}
    yield _gauges("peers", "Nodes of the swarm, this one included.", ["stage", "state"], peers)
    deserted = {(str(s),): max(0.0, now - counters.deserted_since.get(s, now)) for s in stages}
    text = "Seconds for which nobody has served a stage, from 2 on; 0 when served."
    yield _gauges("stage_deserted_seconds", text, ["stage"], deserted)
    guarded = {(str(stage),): outer_round for stage, outer_round in counters.guarded_rounds.items()}
    yield _gauges("guarded_round", "Outer round of the weights held for another stage.", ["stage"], guarded)


def _of_status(
    status: Status | None, wrong: str | None, device_memory: Callable[[], tuple[int, int]] | None
) -> Iterator[Metric]:
    """Metrics read at the scrape: from the node's status, once there is one, and from the device."""
    yield _healthy(wrong is None)
    if status is not None:
        yield _gauge("run_steps", "Length of the run, in steps.", status.steps)
        longest_s = max((wait.since_s for wait in status.waits if not wait.idle), default=0.0)
        yield _gauge("longest_wait_seconds", "Age of the longest wait that holds something up.", longest_s)
        troubles = {(trouble.name,): 1 for trouble in status.troubles[:MAX_LABELS]}
        yield _gauges("trouble", "1 while something is wrong, by its name.", ["name"], troubles)
        if status.figures.disk_free_bytes is not None:
            yield _gauge("disk_free_bytes", "Free space where the node's directory is.", status.figures.disk_free_bytes)
    if device_memory is not None:
        text = "Memory of the device: used, and in total. Where the CPU is the device: by this process."
        used, total = device_memory()
        yield _gauges("device_memory_bytes", text, ["kind"], {("used",): used, ("total",): total})


def _healthy(well: bool) -> Metric:
    return _gauge("healthy", "1 while /health answers 200, else 0.", well)


def _gauge(name: str, text: str, value: float) -> Metric:
    return _gauges(name, text, [], {(): value})


def _gauges(name: str, text: str, labels: Sequence[str], values: Mapping[Any, float]) -> Metric:
    """A gauge, whose `values` map a tuple of label values to a number."""
    found = GaugeMetricFamily(f"noloco_{name}", text, labels=labels)
    for key, value in values.items():
        found.add_metric(key, value)
    return found


class Watchdog(threading.Thread):
    """Checks a node's status once a second, and reports one line when something goes wrong and one when it is over.

    It is a thread, so that it also notices a stuck event loop. It calls `status` from that thread, and reports with
    `say(line, well)`.
    """

    def __init__(self, status: Callable[[], Status], say: Callable[[str, bool], None]) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._status = status
        self._say = say
        self._problem: HealthProblem | None = None
        self._ended = threading.Event()

    def close(self) -> None:
        """Stop, and wait for the thread to end, unless a check takes long: a disk may hang."""
        self._ended.set()
        self.join(POLL_S)

    def look(self) -> None:
        """Check once, and report a change. The same problem is reported only once, however long it lasts."""
        found, before = problem(self._status()), self._problem
        self._problem = found
        if found is not None and (before is None or before.key != found.key):
            self._say(found.line, False)
        elif found is None and before is not None:
            self._say("the problem is over", True)

    def run(self) -> None:
        """See `Thread`."""
        while not self._ended.wait(WATCHDOG_PERIOD_S):
            try:
                self.look()
            except Exception:  # telemetry must never stop what it observes
                logger.debug("the watchdog failed", exc_info=True)
