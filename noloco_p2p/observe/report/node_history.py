"""What the journal of one node says: its processes, its counts over all of them, and its curves."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from noloco_p2p.core.members import STATES
from noloco_p2p.launch.node_probe import ENDPOINTS, read_json
from noloco_p2p.observe.plotting.time_bins import Increment
from noloco_p2p.observe.report.journals import MOST_CHARACTERS, JournalEvent, clean, read_processes

TALLIES = ("microbatches", "dropped", "rerouted", "rounds", "idle_s", "bytes", "phase_s")
INCIDENTS = {"warning": "warning", "stuck": "stuck", "deserted": "stage without replica", "moved": "moves"}
"""Events in the list of what went wrong, and what they are called there."""
UNKNOWN = "unknown"

Piece = list[tuple[float, float]]


class StateSpan(NamedTuple):
    """A state of a node, from when to when (Unix seconds)."""

    began_at: float
    ended_at: float
    state: str


class Incident(NamedTuple):
    """One entry of the list of what went wrong."""

    at: float
    node: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class ProcessHistory:
    """One process of a node, from its first line to its last."""

    began_at: float
    ended_at: float
    spans: tuple[StateSpan, ...]
    ended: bool
    """In order; else it was killed, or goes on."""


@dataclass(slots=True)
class NodeHistory:
    """One node. Curves are lists of pieces, one for each process; a loss is in nats per token."""

    name: str
    peer_id: str = ""
    run_id: str = ""
    run_name: str = ""
    stage: int | None = None
    """The last one that it held."""
    processes: list[ProcessHistory] = field(default_factory=list)
    inner_steps: int = 0
    tokens: int = 0
    """Trained on while at stage 0."""
    device_s: float = 0.0
    trained_s: float = 0.0
    """In state `training`."""
    step: float = 0.0
    final_loss: float | None = None
    validation_loss: float | None = None
    replica_std: float | None = None
    checkpoints: int = 0
    training_at: float | None = None
    stepped_at: float | None = None
    """When the last line of progress was written that had new tokens."""
    tallies: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in TALLIES})
    loss: list[Piece] = field(default_factory=list)
    """(step, mean loss since the line before)."""
    validation: list[Piece] = field(default_factory=list)
    spread: list[Piece] = field(default_factory=list)
    """(step, standard deviation between replicas)."""
    rate: list[Piece] = field(default_factory=list)
    """(step, learning rate)."""
    token_increments: list[Increment] = field(default_factory=list)
    """Between two lines of progress."""
    byte_increments: dict[str, list[Increment]] = field(default_factory=lambda: {"in": [], "out": []})
    new_rounds: list[tuple[float, str, float]] = field(default_factory=list)
    """(when, result, how many)."""
    round_seconds: list[tuple[float, float]] = field(default_factory=list)
    """(when, seconds) of the outer rounds that have a line."""
    membership: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """(when, nodes by state)."""
    incidents: list[Incident] = field(default_factory=list)

    @property
    def began_at(self) -> float:
        """When its first process began."""
        return self.processes[0].began_at

    @property
    def ended_at(self) -> float:
        """When its last process wrote its last line."""
        return self.processes[-1].ended_at


def read_history(directory: Path, name: str) -> NodeHistory | None:
    """The node whose journal is in a directory; None when there is no line that can be read."""
    processes = read_processes(directory)
    if not processes:
        return None
    history = NodeHistory(name)
    for events in processes:
        _ProcessReader(history, events[0].at).read(events)
    known = read_json(directory / ENDPOINTS) or {}
    history.peer_id = history.peer_id or clean(known.get("peer_id", ""))
    return history


class _ProcessReader:
    """Adds one process to a node's history."""

    def __init__(self, history: NodeHistory, began_at: float) -> None:
        self._history = history
        self._progress: JournalEvent | None = None
        """The last line of progress."""
        self._since_at = began_at
        """When that was written, or this process began."""
        self._counts: dict[str, float] = {}
        """What this process has counted so far, by name; it only grows."""
        for pieces in (history.loss, history.validation, history.spread, history.rate):
            pieces.append([])

    def read(self, events: Sequence[JournalEvent]) -> None:
        """Take the events in order, then what the last line of progress counts."""
        history = self._history
        readers = {
            "start": self._read_start,
            "stage": self._read_stage,
            "state": self._read_state,
            "progress": self._read_progress,
            "outer_round": self._read_outer_round,
            "replica_std": self._read_replica_std,
            "evaluation": self._read_evaluation,
            "membership": self._read_membership,
            "checkpoint": self._read_checkpoint,
        }
        for event in events:
            if event.kind in readers:
                readers[event.kind](event)
            if event.kind in INCIDENTS:
                kind = "well again" if event.fields.get("well") is True else INCIDENTS[event.kind]
                history.incidents.append(Incident(event.at, history.name, kind, _sentence(event)))
        if self._progress is not None:
            history.inner_steps += int(self._progress.number("inner_steps") or 0)
            history.device_s += self._progress.number("device_s") or 0.0
            for name in TALLIES:
                history.tallies[name].update(self._progress.tally(name))
        spans = tuple(_spans(events))
        history.processes.append(ProcessHistory(events[0].at, events[-1].at, spans, events[-1].kind == "end"))
        history.trained_s += sum(span.ended_at - span.began_at for span in spans if span.state == "training")

    def _read_start(self, event: JournalEvent) -> None:
        history = self._history
        history.peer_id, history.run_id = event.text("peer_id"), event.text("run_id")
        history.run_name = event.text("name")
        self._read_stage(event)

    def _read_stage(self, event: JournalEvent) -> None:
        stage = event.number("stage")
        if stage is not None:
            self._history.stage = int(stage)

    def _read_state(self, event: JournalEvent) -> None:
        if event.text("state") == "training" and self._history.training_at is None:
            self._history.training_at = event.at

    def _read_progress(self, event: JournalEvent) -> None:
        history, self._progress = self._history, event
        self._read_stage(event)
        since_at, self._since_at = self._since_at, event.at
        self._read_curves(event)
        tokens = self._added("tokens", event.number("tokens") or 0.0)
        if tokens > 0 and history.stage == 0:
            history.tokens += int(tokens)
            history.token_increments.append(Increment(since_at, event.at, tokens))
            history.stepped_at = event.at
        sizes = event.tally("bytes")
        for way, increments in history.byte_increments.items():
            size = sum(each for label, each in sizes.items() if label.startswith(way))
            increments.append(Increment(since_at, event.at, self._added(way, size)))
        for result, count in event.tally("rounds").items():
            if (new := self._added(f"rounds {result}", count)) > 0:
                history.new_rounds.append((event.at, result, new))

    def _added(self, name: str, count: float) -> float:
        """What has come to a count since the line before; nothing where this line does not have it."""
        added = max(0.0, count - self._counts.get(name, 0.0))
        self._counts[name] = self._counts.get(name, 0.0) + added
        return added

    def _read_curves(self, event: JournalEvent) -> None:
        history, step = self._history, event.number("step")
        if step is None:
            return
        history.step = max(history.step, step)
        rate, loss, final = event.number("learning_rate"), event.number("loss"), event.number("final_loss")
        if rate is not None:
            history.rate[-1].append((step, rate))
        if loss is not None and history.stage == 0:
            history.loss[-1].append((step, loss))
        if final is not None and history.stage == 0:
            history.final_loss = final

    def _read_outer_round(self, event: JournalEvent) -> None:
        self._history.round_seconds.append((event.at, event.number("seconds") or 0.0))

    def _read_replica_std(self, event: JournalEvent) -> None:
        value, step = event.number("value"), event.number("step")
        if value is not None:
            self._history.replica_std = value
            self._history.spread[-1].append((step or 0.0, value))

    def _read_evaluation(self, event: JournalEvent) -> None:
        loss, step = event.number("loss"), event.number("step")
        if loss is not None:
            self._history.validation_loss = loss
            self._history.validation[-1].append((step or 0.0, loss))

    def _read_checkpoint(self, _: JournalEvent) -> None:
        self._history.checkpoints += 1

    def _read_membership(self, event: JournalEvent) -> None:
        counts: Counter[str] = Counter()
        for place, count in event.tally("counts").items():
            counts[_known(place.rpartition(" ")[2])] += int(count)
        self._history.membership.append((event.at, dict(counts)))


def _known(state: str) -> str:
    return state if state in STATES else UNKNOWN


def _spans(events: Sequence[JournalEvent]) -> Iterator[StateSpan]:
    """The states of a process, one after the other; `starting` at first, or what a line of progress says."""
    state, since = "starting", events[0].at
    for event in events:
        says = event.kind in ("state", "progress") and "state" in event.fields
        found = _known(event.text("state")) if says else state
        if found != state:
            if event.at > since:
                yield StateSpan(since, event.at, state)
            state, since = found, event.at
    yield StateSpan(since, events[-1].at, state)


def _sentence(event: JournalEvent) -> str:
    """An incident in words."""
    if event.kind == "deserted":
        stages: Any = event.fields.get("stages")
        names = ", ".join(clean(stage) for stage in stages) if isinstance(stages, dict) else ""
        return f"no replica serves stage {names}"[:MOST_CHARACTERS] if names else "every stage has a replica again"
    if event.kind == "moved":
        return f"to stage {event.text('stage')}: {event.text('reason')}"
    return event.text("message")
