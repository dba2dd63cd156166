"""The Prometheus metrics of one node (design.md §9), in a registry of their own. What sets them is in telemetry.py."""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from noloco_p2p.core.members import STATES

MOST_LABELS = 24
"""Values of a label that a metric tells apart; further ones are counted as `other`."""

KNOWN = {
    "outer_rounds": ("partner", "stale", "other", "alone"),
    "microbatches": ("done", "repeat", "nonfinite", "violation", "dropped"),
    "rerouted": ("unreachable", "declined", "violation", "hurried", "fallback"),
    "dropped": ("violation", "busy", "cancelled", "leaving", "declined"),
    "busy_replies": ("in", "out"),
    "idle_seconds": ("gradients", "microbatches", "partner"),
}
"""Counters with one label, and the values of it that a node has from the start."""

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Counters:
    """A counter with labels, its children kept by their values, at most MOST_LABELS of them.

    `known` values of its only label are there from the start, at 0: nobody sees an increase from nothing to 1.
    """

    def __init__(self, metric: Counter, labels: int = 1, known: Iterable[str] = ()) -> None:
        self._metric = metric
        self._other = ("other",) * labels
        self._children: dict[tuple[str, ...], Counter] = {(value,): metric.labels(value) for value in known}

    def add(self, amount: float, *values: str) -> None:
        """Increase the child of these label values, or the one called `other`."""
        child = self._children.get(values)
        if child is None:
            values = values if len(self._children) < MOST_LABELS else self._other
            child = self._children.setdefault(values, self._metric.labels(*values))
        child.inc(amount)


class Phases:
    """Seconds by phase; a phase that is not in the table counts as `other`."""

    NAMES = ("forward", "backward", "send", "wait", "step", "outer", "other")

    def __init__(self, metric: Histogram) -> None:
        self._children = {name: metric.labels(name) for name in self.NAMES}
        self.heard: Callable[[str, float], None] | None = None
        """Told of every phase as well: its name and seconds."""

    def span(self, name: str) -> "Span":
        """Measures the seconds inside a `with`."""
        name = name if name in self._children else "other"
        return Span(name, self._children[name], self.heard)


class Span:
    """Puts the seconds inside a `with` into a histogram, and tells them to who wants to hear."""

    __slots__ = ("_began", "_child", "_heard", "_name")

    def __init__(self, name: str, child: Histogram, heard: Callable[[str, float], None] | None) -> None:
        self._name = name
        self._child = child
        self._heard = heard
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._began
        self._child.observe(seconds)
        if self._heard is not None:
            self._heard(self._name, seconds)


class Deserted:
    """Seconds since nobody serves a stage, by stage; they go on by themselves between two updates. 0 when served."""

    def __init__(self, metric: Gauge, stages: int) -> None:
        self._since: dict[int, float] = {}
        """Stage → since when, on the monotonic clock."""
        self._stages = range(stages)
        for stage in self._stages:
            metric.labels(stage).set_function(partial(self._seconds, stage))

    def update(self, seconds: Mapping[int, float]) -> tuple[dict[int, float], dict[int, float]]:
        """Take all deserted stages with their seconds; returns those that have gone, and those that are back."""
        now = time.monotonic()
        before = self._since
        self._since = {stage: now - seconds[stage] for stage in self._stages if stage in seconds}
        gone = {stage: seconds[stage] for stage in self._since if stage not in before}
        back = {stage: now - since for stage, since in before.items() if stage not in self._since}
        return gone, back

    def _seconds(self, stage: int) -> float:
        since = self._since.get(stage)
        return 0.0 if since is None else max(0.0, time.monotonic() - since)


class Metrics:
    """All metrics of a node."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, namespace="noloco", registry=registry)

        def counters(name: str, text: str, label: str) -> Counters:
            return Counters(counter(name, text, label), known=KNOWN[name])

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, namespace="noloco", registry=registry)

        self.node = Info("node", "Who this node is.", namespace="noloco", registry=registry)
        self.inner_steps = counter("inner_steps", "Optimizer steps taken.")
        self.tokens = counter("tokens", "Targets whose loss this node's gradients came from.")
        self.device_seconds = counter("device_seconds", "Seconds that the device worked for inner steps.")
        self.outer_rounds = counters("outer_rounds", "Outer rounds by what was merged.", "result")
        self.microbatches = counters("microbatches", "Microbatches by how they ended here.", "result")
        self.rerouted = counters("rerouted", "Microbatches sent to another replica.", "reason")
        self.dropped = counters("dropped", "Microbatches given up, by reason.", "reason")
        self.busy_replies = counters("busy_replies", "Busy said (in) and heard (out).", "direction")
        self.idle_seconds = counters("idle_seconds", "Seconds that the device waited.", "cause")
        self.bytes = Counters(counter("bytes", "Bytes that travelled, in and out.", "direction", "kind"), labels=2)
        self.loss = gauge("loss", "Nats per token of the last inner step.")
        self.validation_loss = gauge("validation_loss", "Nats per token of the last evaluation.")
        self.learning_rate = gauge("learning_rate", "Learning rate of the last inner step.")
        self.grad_norm = gauge("grad_norm", "L2 norm of this stage's gradient before clipping.")
        self.step = gauge("step", "The node's clock, in steps.")
        self.pulled_bytes = counter("pulled_bytes", "Bytes of the snapshots that outer rounds merged.")
        self.parameters = gauge("parameters", "Parameters of the stage that this node holds.")
        self.rounds_alone = gauge("outer_rounds_alone", "Outer rounds in a row, up to the last, that ended alone.")
        self.in_flight = gauge("in_flight", "Autograd graphs held.")
        self.waiting = gauge("waiting", "Microbatches that wait at the door.")
        self.replica_std = gauge("replica_std", "Standard deviation of the weights between replicas of this stage.")
        self.lag = gauge("event_loop_lag_seconds", "How late the event loop last came to a timer.")
        self.peers = gauge("peers", "Nodes of the swarm, this one included.", "stage", "state")
        self.joined = counter("peers_joined", "Nodes that have come into this node's view of the swarm.")
        self.departed = counter("peers_departed", "Nodes that have gone from this node's view of the swarm.")
        self.state = gauge("state", "1 for the state that this node is in, else 0.", "state")
        self.deserted = gauge("stage_deserted_seconds", "Since when nobody serves a stage; 0 when served.", "stage")
        self.guarded_round = gauge("guarded_round", "Outer round of the snapshot held for another stage.", "stage")
        self.checkpoint_round = gauge("checkpoint_round", "Outer round of the last checkpoint.")
        self.checkpoint_duration = gauge("checkpoint_duration_seconds", "How long the last checkpoint took to write.")
        self.checkpoint_size = gauge("checkpoint_size_bytes", "Size of the last checkpoint.")
        self.checkpoint_timestamp = gauge("checkpoint_timestamp_seconds", "When the last checkpoint was written.")
        phases = Histogram(
            "phase_seconds",
            "Seconds of one phase of the work.",
            ("phase",),
            namespace="noloco",
            registry=registry,
            buckets=SECONDS_BUCKETS,
        )
        self.phases = Phases(phases)
        self.show_state(STATES[0])

    def show_state(self, state: str) -> None:
        """1 for this state, 0 for all others."""
        for each in STATES:
            self.state.labels(each).set(each == state)
