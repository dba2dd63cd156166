"""Counts a node's events, once for all of /metrics, /status, `summary.json` and the journal.

The tables `TALLIES` and `LAST_VALUES` say what is counted for each kind of event. Losses, states and points in time are
attributes of `RunCounters`. Losses are in nats per token.
"""

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_LABELS = 24
"""Most label values of a tally counted separately; the rest count as `other`, because peers may choose them."""
LABEL_CHARACTERS = 40
FINAL_STEPS = 10
"""The final loss of a run is the mean over this many last inner steps."""
WINDOW_S = 10.0
"""Seconds over which a rate is measured, unless its amounts come in lumps that are further apart."""
MARK_S = 1.0
"""Shortest time between two marks of a rate, seconds."""
SILENT_GAPS = 3.0
"""A rate drops to 0 when nothing has been added for WINDOW_S and for this many times the gap between two lumps."""
MOST_TURNS = 2_000
"""How often a node's training can begin or end before its earliest pauses are forgotten."""

Fields = Mapping[str, Any]
Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tally:
    """A sum over the events of one kind, broken down by the values of some of their fields."""

    event: str
    name: str
    labels: Labels
    """Fields of the event to break down by. An event without one of them, or without the amount, does not count."""
    amount: str | None
    """The field to add up; None counts events."""
    help: str | None = None
    """Help text of the metric `noloco_<name>_total`; None if there is no such metric."""
    journal: str | None = None
    """Name in the journal's progress lines; None if it is not there, or not by label."""

    def addition(self, fields: Fields) -> tuple[Labels, float] | None:
        """Label values and the amount that an event with these fields adds to their sum; None if it adds nothing."""
        amount = 1 if self.amount is None else fields.get(self.amount)
        labels = [fields.get(name) for name in self.labels]
        if amount is None or None in labels:
            return None
        return tuple([str(label)[:LABEL_CHARACTERS] for label in labels]), number(amount)


TALLIES = (
    Tally("inner_step", "inner_steps", (), None, "Optimizer steps taken."),
    Tally("inner_step", "tokens", (), "tokens", "Target tokens behind this node's gradients."),
    Tally("inner_step", "device_seconds", (), "busy_s", "Seconds that the device worked for inner steps."),
    Tally("outer_round", "outer_rounds", ("result",), None, "Outer rounds, by what was merged.", "rounds"),
    Tally("outer_round", "pulled_bytes", (), "bytes", "Bytes of the snapshots that outer rounds merged."),
    Tally("microbatch", "microbatches", ("result",), None, "Microbatches, by how they ended here.", "microbatches"),
    Tally("microbatch", "dropped", ("reason",), None, "Microbatches dropped, by reason.", "dropped"),
    Tally("reroute", "rerouted", ("reason",), None, "Microbatches re-routed to another replica.", "rerouted"),
    Tally("distrusted", "distrusted", ("result",), None, "Suspicious data from peers, by outcome.", "distrusted"),
    Tally("busy", "busy_replies", ("direction",), None, "Busy answers sent (in) and received (out).", "busy"),
    Tally("idle", "idle_seconds", ("cause",), "seconds", "Seconds that the device was idle, by cause.", "idle_s"),
    Tally("bytes", "bytes", ("direction", "kind"), "bytes", "Bytes received and sent.", "bytes"),
    Tally("span", "phase_seconds", ("name",), "seconds", None, "phase_s"),
    Tally("membership", "peers_joined", (), "joined", "Nodes that entered this node's view of the swarm."),
    Tally("membership", "peers_departed", (), "departed", "Nodes that left this node's view of the swarm."),
    Tally("evaluation", "evaluations", (), None),
    Tally("checkpoint", "checkpoints", (), None),
    Tally("moved", "moves", (), None),
)


@dataclass(frozen=True, slots=True)
class LastValue:
    """The most recent value of a field of one kind of event: the gauge `noloco_<name>`, 0 before the first event."""

    event: str
    name: str
    field: str
    help: str


LAST_VALUES = (
    LastValue("inner_step", "step", "step", "The node's clock, in steps."),
    LastValue("inner_step", "loss", "loss", "Nats per token of the last inner step."),
    LastValue("inner_step", "learning_rate", "learning_rate", "Learning rate of the last inner step."),
    LastValue("inner_step", "grad_norm", "grad_norm", "L2 norm of this stage's gradient before clipping."),
    LastValue("evaluation", "validation_loss", "loss", "Nats per token of the last evaluation."),
    LastValue("evaluation", "validation_step", "step", "Step of the last evaluation."),
    LastValue("outer_round", "outer_rounds_alone", "alone", "Most recent consecutive outer rounds that ended alone."),
    LastValue("replica_std", "replica_std", "value", "Standard deviation of the weights between the stage's replicas."),
    LastValue("gauge", "parameters", "parameters", "Parameters of the stage that this node holds."),
    LastValue("gauge", "in_flight", "in_flight", "Microbatches admitted here (at a later stage) and not yet ended."),
    LastValue("gauge", "waiting", "waiting", "Microbatches waiting to be admitted."),
    LastValue("line", "upload_bytes_per_second", "up_bytes_per_s", "Upload rate, measured on bodies."),
    LastValue("line", "download_bytes_per_second", "down_bytes_per_s", "Download rate, measured on bodies."),
    LastValue("line", "round_trip_seconds", "round_trip_s", "Round trip of a short request, median over the peers."),
    LastValue("lag", "event_loop_lag_seconds", "seconds", "Delay of the event loop at its last timer."),
    LastValue("checkpoint", "checkpoint_round", "round", "Outer round of the last checkpoint."),
    LastValue("checkpoint", "checkpoint_duration_seconds", "seconds", "How long the last checkpoint took to write."),
    LastValue("checkpoint", "checkpoint_size_bytes", "bytes", "Size of the last checkpoint."),
    LastValue("checkpoint", "checkpoint_timestamp_seconds", "written_at", "When the last checkpoint was written."),
)

EVENTS = {
    each.event: ([t for t in TALLIES if t.event == each.event], [v for v in LAST_VALUES if v.event == each.event])
    for each in (*TALLIES, *LAST_VALUES)
}
"""Kind of event → what is counted for it."""

KNOWN: Mapping[str, tuple[str, ...]] = {
    "outer_rounds": ("partner", "stale", "other", "all", "some", "alone"),
    "microbatches": ("done", "nonfinite", "violation", "dropped"),
    "rerouted": ("unreachable", "declined", "violation", "stalled", "fallback"),
    "dropped": ("violation", "busy", "cancelled", "leaving", "paused", "declined"),
    "distrusted": ("clipped", "refused", "outlier", "gradient", "not_finite", "dissenter"),
    "busy_replies": ("in", "out"),
    "idle_seconds": ("gradients", "microbatches", "partner"),
}
"""Tally with one label → values of that label that are always counted separately, whatever else is counted."""


class RateMeter:
    """An amount per second, measured from lump to lump, so that inner steps of 30 s do not make it jump."""

    def __init__(self) -> None:
        self._total = 0.0
        self._last_at = -math.inf
        self._marks: deque[tuple[float, float]] = deque(maxlen=1 + round(WINDOW_S / MARK_S))
        """(time, total by then), at least MARK_S apart."""

    def add(self, now: float, amount: float) -> None:
        """Add an amount at time `now`, seconds."""
        self._total += amount
        self._last_at = now
        if not self._marks or now - self._marks[-1][0] >= MARK_S:
            self._marks.append((now, self._total))

    def per_s(self, now: float) -> float:
        """The rate over the last WINDOW_S seconds, or since the last lump but one if that is longer ago."""
        earlier = [mark for mark in self._marks if mark[0] < self._last_at]
        if not earlier:
            return 0.0
        old = [mark for mark in earlier if mark[0] <= now - WINDOW_S]
        began, total = old[-1] if old else earlier[0]
        span, silent = self._last_at - began, now - self._last_at
        if silent > max(WINDOW_S, SILENT_GAPS * span):
            return 0.0
        return (self._total - total) / max(span, silent)


class RunCounters:
    """Everything counted for one node. Readers must hold `lock`.

    Points in time (`…_at`, `…_since`) are Unix seconds unless they are said to be monotonic.
    """

    def __init__(self, stages: int) -> None:
        self.lock = threading.RLock()
        self.stages = range(stages)
        self.sums: dict[str, dict[Labels, float]] = {tally.name: {} for tally in TALLIES}
        """Tally → label values → sum."""
        self.created_at: dict[tuple[str, Labels], float] = {}
        """(tally, label values) → when the first amount was added."""
        self.latest: dict[str, float] = {}
        """Name of a LastValue → its value."""
        self.rates = {"tokens": RateMeter(), "bytes": RateMeter()}
        """Tally → amounts per second."""
        self.began_at = time.monotonic()  # monotonic
        self._wall_ahead_s = time.time() - self.began_at
        self.beat_at: float | None = None  # monotonic: when the event loop last ran its heartbeat
        self.largest_lag_s = 0.0
        self.state = ""
        self.stage: int | None = None
        self.training_turns: list[float] = []
        """When the state became `training`, when it ceased to be, and so on. Like `last_step_at`, by `wall_time`. At
        most MOST_TURNS: beyond that, the earliest pause counts as training."""
        self.last_step_at: float | None = None  # when the last inner step ended
        self.first_loss: float | None = None  # of the first inner step that had tokens
        self.loss_sum = self.loss_tokens = 0.0
        """Sums over all inner steps with a finite loss."""
        self.last_losses: deque[tuple[float, float]] = deque(maxlen=FINAL_STEPS)
        """(loss sum, tokens) of the last inner steps."""
        self.resumed: dict[str, object] | None = None  # source, round, step and peer of its weights, as taken last
        self.members: Mapping[tuple[int, str], int] | None = None
        """(stage, state) → number of nodes; None before the first reading of the membership."""
        self.deserted_since: dict[int, float] = {}  # stage that nobody serves → since when, monotonic
        self.guarded_rounds: dict[int, float] = {}  # guarded stage → outer round of the snapshot held for it

    def count(self, kind: str, fields: Fields) -> None:
        """Count an event (`ports.Telemetry.event`). Raises for malformed fields, and then adds nothing of it."""
        with self.lock:
            fields = self._with_derived(kind, fields)
            tallies, last_values = EVENTS.get(kind, ((), ()))
            additions = [(tally, *found) for tally in tallies if (found := tally.addition(fields)) is not None]
            latest = {one.name: number(last) for one in last_values if (last := fields.get(one.field)) is not None}
            self._remember(kind, fields)
            self.latest |= latest
            for tally, labels, amount in additions:
                self._add(tally, labels, amount)

    def wall_time(self) -> float:
        """Unix seconds by the clock of the process's start, so that time spans are right if it has been set since."""
        return time.monotonic() + self._wall_ahead_s

    def total(self, name: str) -> Any:
        """Sum of a tally over all its labels; an integer if its amounts are."""
        return sum(self.sums[name].values())

    def by_label(self, name: str, labels: int | None = None) -> dict[str, Any]:
        """Sums of a tally by its first `labels` label values (all if None), joined by spaces."""
        found: defaultdict[str, Any] = defaultdict(int)
        for values, amount in self.sums[name].items():
            found[" ".join(values[:labels])] += amount
        return dict(found)

    @property
    def final_loss(self) -> float | None:
        """Mean loss of the last FINAL_STEPS inner steps, nats per token; None before the first."""
        tokens = sum(tokens for _, tokens in self.last_losses)
        return sum(loss for loss, _ in self.last_losses) / tokens if tokens else None

    def _with_derived(self, kind: str, fields: Fields) -> Fields:
        """The fields by which an event is counted, some of them derived from those it comes with."""
        match kind:
            case "gauge":
                return {str(fields["name"]): fields["value"]}
            case "outer_round":
                before = self.latest.get("outer_rounds_alone", 0)
                return {**fields, "alone": before + 1 if fields["result"] == "alone" else 0}
            case "checkpoint":
                return {**fields, "written_at": time.time()}
            case "inner_step":
                loss_sum, tokens = number(fields["loss_sum"]), number(fields["loss_tokens"])
                if tokens and math.isfinite(loss_sum):
                    return {**fields, "loss": loss_sum / tokens}
        return fields

    def _remember(self, kind: str, fields: Fields) -> None:
        match kind:
            case "state":
                before, self.state = self.state, str(fields["state"])
                if (before == "training") != (self.state == "training"):
                    self.training_turns.append(self.wall_time())
                    self.rates["tokens"] = RateMeter()  # a pause is no part of the time between two steps
                    if len(self.training_turns) > MOST_TURNS:
                        del self.training_turns[1:3]
            case "stage":
                self.stage = fields["stage"]
                for name in ("loss", "validation_loss", "replica_std"):  # those of the stage held before
                    self.latest.pop(name, None)
            case "inner_step":
                self.last_step_at = self.wall_time()
                if "loss" in fields:
                    self.loss_sum += fields["loss_sum"]
                    self.loss_tokens += fields["loss_tokens"]
                    self.last_losses.append((fields["loss_sum"], fields["loss_tokens"]))
                    self.first_loss = fields["loss"] if self.first_loss is None else self.first_loss
            case "lag":
                self.largest_lag_s = max(number(fields["seconds"]), self.largest_lag_s)
                self.beat_at = time.monotonic()
            case "resumed":
                self.resumed = {name: fields.get(name) for name in ("source", "round", "step", "peer")}
            case "membership":
                self.members = dict(fields["counts"])
            case "deserted":
                now, seconds = time.monotonic(), dict(fields["stages"])
                self.deserted_since = {stage: now - seconds[stage] for stage in self.stages if stage in seconds}
            case "guards":
                self.guarded_rounds = {s: number(round) for s, round in fields["rounds"].items() if s in self.stages}

    def _add(self, tally: Tally, labels: Labels, amount: float) -> None:
        sums = self.sums[tally.name]
        if labels not in sums:
            known = known_labels(tally.name)
            if labels not in known and len({*known, *sums}) >= MAX_LABELS:
                labels = ("other",) * len(labels)
            self.created_at.setdefault((tally.name, labels), time.time())
        sums[labels] = sums.get(labels, 0) + amount
        if tally.name in self.rates:
            self.rates[tally.name].add(time.monotonic(), amount)


def known_labels(tally: str) -> list[Labels]:
    """Label values of a tally that are always counted separately."""
    return [(value,) for value in KNOWN.get(tally, ())]


def number(value: object) -> float:
    """The value. Raises TypeError if it is not a number."""
    if isinstance(value, int | float):
        return value
    raise TypeError(f"{value!r} is not a number")
