"""The Prometheus metrics of one node (ARCHITECTURE.md, "Metrics"), made at a scrape from what was counted."""

import logging
import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from noloco_p2p.core.members import STATES
from noloco_p2p.core.status import Status
from noloco_p2p.io.telemetry.counters import LAST_VALUES, MOST_LABELS, TALLIES, RunCounters, known_labels

PHASES = ("forward", "backward", "send", "wait", "step", "outer", "other")
"""Phases of the work that are measured; any other name counts as `other`."""
SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper ends of the buckets of the histogram of phases."""

logger = logging.getLogger("noloco_p2p")


class NodeMetrics(Collector):
    """All metrics of a node but the histogram of its phases.

    `health` gives its status, None before there is one, and what is wrong in one line, None when nothing is.
    """

    def __init__(self, counters: RunCounters, health: Callable[[], tuple[Status | None, str | None]]) -> None:
        self.identity: dict[str, str] = {}
        """Peer id, run id, stage and version."""
        self.device_memory: Callable[[], tuple[int, int]] | None = None
        """Bytes of the device's memory that are used, and that there are; called from any thread."""
        self._counters = counters
        self._health = health
        self._made_at = time.time()

    def collect(self) -> Iterator[Metric]:
        """See `Collector`. A bug in the status costs the metrics that come from it, and no other."""
        yield InfoMetricFamily("noloco_node", "Who this node is.", self.identity)
        with self._counters.lock:
            counted = [*self._counted(), *self._by_stage()]
        yield from counted
        try:
            found = list(self._of_status())
        except Exception:  # an instrument may never stop what it watches
            logger.debug("the node's status could not be read", exc_info=True)
            found = [_healthy(False)]
        yield from found

    describe = collect

    def _counted(self) -> Iterator[Metric]:
        for tally in TALLIES:
            if tally.help is not None:
                counter = CounterMetricFamily(f"noloco_{tally.name}", tally.help, labels=tally.labels)
                # What is known beforehand is there at 0: nobody sees an increase from nothing to 1.
                initial = known_labels(tally.name) if tally.labels else [()]
                for labels, amount in (dict.fromkeys(initial, 0) | self._counters.sums[tally.name]).items():
                    first_at = self._made_at if labels in initial else self._counters.created_at[tally.name, labels]
                    counter.add_metric(labels, amount, created=first_at)
                yield counter
        for value in LAST_VALUES:
            yield _gauge(value.name, value.help, self._counters.latest.get(value.name, 0))

    def _by_stage(self) -> Iterator[Metric]:
        counters, now = self._counters, time.monotonic()
        state = _gauge("state", "1 for the state that this node is in, else 0.", labels=["state"])
        peers = _gauge("peers", "Nodes of the swarm, this one included.", labels=["stage", "state"])
        deserted = _gauge(
            "stage_deserted_seconds", "Since when nobody serves a stage; 0 when served.", labels=["stage"]
        )
        guarded = _gauge("guarded_round", "Outer round of the snapshot held for another stage.", labels=["stage"])
        for each in STATES:
            state.add_metric([each], each == (counters.state or STATES[0]))
        for stage in counters.stages:
            if counters.members is not None:
                for each in STATES:
                    peers.add_metric([str(stage), each], counters.members.get((stage, each), 0))
            deserted.add_metric([str(stage)], max(0.0, now - counters.deserted_since.get(stage, now)))
        for stage, outer_round in counters.guarded_rounds.items():
            guarded.add_metric([str(stage)], outer_round)
        yield from (state, peers, deserted, guarded)

    def _of_status(self) -> Iterator[Metric]:
        status, wrong = self._health()
        yield _healthy(wrong is None)
        if status is not None:
            yield _gauge("run_steps", "Length of the run, in steps.", status.steps)
            longest_s = max((wait.since_s for wait in status.waits if not wait.idle), default=0.0)
            yield _gauge("longest_wait_seconds", "Age of the longest wait that holds something up.", longest_s)
            troubles = _gauge("trouble", "1 while something is wrong, by its name.", labels=["name"])
            for trouble in status.troubles[:MOST_LABELS]:
                troubles.add_metric([trouble.name], 1)
            yield troubles
            if status.figures.disk_free_bytes is not None:
                free = status.figures.disk_free_bytes
                yield _gauge("disk_free_bytes", "Free space where the node's directory is.", free)
        if self.device_memory is not None:
            text = "Memory of the device: used, and in total. Where the CPU is the device: by this process."
            memory = _gauge("device_memory_bytes", text, labels=["kind"])
            for kind, size in zip(("used", "total"), self.device_memory(), strict=True):
                memory.add_metric([kind], size)
            yield memory


def _healthy(well: bool) -> Metric:
    return _gauge("healthy", "1 while /health answers 200, else 0.", well)


def _gauge(name: str, text: str, value: float | None = None, labels: list[str] | None = None) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"noloco_{name}", text, value, labels)
