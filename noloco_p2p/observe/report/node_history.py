"""What the journal of one node says: its processes, its counts over all of them, and its curves."""

import itertools
from collections import Counter, defaultdict
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
    device_s: float = 0.0
    trained_s: float = 0.0
    """In state `training`."""
    step: float = 0.0
    final_loss: float | None = None
    checkpoints: int = 0
    training_at: float | None = None
    tallies: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in TALLIES})
    loss: list[Piece] = field(default_factory=list)
    """(step, mean loss since the line before)."""
    validation: list[Piece] = field(default_factory=list)
    spread: list[Piece] = field(default_factory=list)
    """(step, standard deviation between replicas)."""
    rate: list[Piece] = field(default_factory=list)
    """(step, learning rate)."""
    token_increments: list[Increment] = field(default_factory=list)
    """Trained on while at stage 0, between two lines of progress."""
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

    @property
    def tokens(self) -> int:
        """Trained on while at stage 0."""
        return sum(int(each.amount) for each in self.token_increments)

    @property
    def stepped_at(self) -> float | None:
        """When the last line of progress was written that had new tokens."""
        return self.token_increments[-1].ended_at if self.token_increments else None

    @property
    def validation_loss(self) -> float | None:
        """Of the last evaluation."""
        return _last(self.validation)

    @property
    def replica_std(self) -> float | None:
        """Of the last outer round that measured it."""
        return _last(self.spread)


def _last(pieces: Sequence[Piece]) -> float | None:
    return next((piece[-1][1] for piece in reversed(pieces) if piece), None)


def read_history(directory: Path, name: str) -> NodeHistory | None:
    """The node whose journal is in a directory; None when there is no line that can be read."""
    processes = read_processes(directory)
    if not processes:
        return None
    history = NodeHistory(name)
    for events in processes:
        _add_process(history, events)
    known = read_json(directory / ENDPOINTS) or {}
    history.peer_id = history.peer_id or clean(known.get("peer_id", ""))
    return history


def _add_process(history: NodeHistory, events: Sequence[JournalEvent]) -> None:
    """Take what one process wrote."""
    by_kind: defaultdict[str, list[JournalEvent]] = defaultdict(list)
    held: list[int | None] = []
    for event in events:
        by_kind[event.kind].append(event)
        stage = event.number("stage") if event.kind in ("start", "stage", "progress") else None
        history.stage = history.stage if stage is None else int(stage)
        if event.kind == "progress":
            held.append(history.stage)
        if event.kind in INCIDENTS:
            kind = "well again" if event.fields.get("well") is True else INCIDENTS[event.kind]
            history.incidents.append(Incident(event.at, history.name, kind, _sentence(event)))
    for event in by_kind["start"]:
        history.peer_id, history.run_id, history.run_name = map(event.text, ("peer_id", "run_id", "name"))
    if history.training_at is None:
        training = (event.at for event in by_kind["state"] if event.text("state") == "training")
        history.training_at = next(training, None)
    spans = tuple(_spans(events))
    history.processes.append(ProcessHistory(events[0].at, events[-1].at, spans, events[-1].kind == "end"))
    history.trained_s += sum(span.ended_at - span.began_at for span in spans if span.state == "training")
    history.checkpoints += len(by_kind["checkpoint"])
    history.spread.append(_curve(by_kind["replica_std"], "value"))
    history.validation.append(_curve(by_kind["evaluation"], "loss"))
    history.round_seconds += [(event.at, event.number("seconds") or 0.0) for event in by_kind["outer_round"]]
    history.membership += [(event.at, _states(event)) for event in by_kind["membership"]]
    _add_progress(history, by_kind["progress"], held, events[0].at)


def _add_progress(
    history: NodeHistory, progress: Sequence[JournalEvent], held: Sequence[int | None], began_at: float
) -> None:
    """Take a process's lines of progress; `held`: the stage at each."""
    stepped = [(event, stage) for event, stage in zip(progress, held, strict=True) if event.number("step") is not None]
    of_stage_0 = [event for event, stage in stepped if stage == 0]
    history.step = max([history.step, *(event.number("step") or 0.0 for event, _ in stepped)])
    history.rate.append(_curve([event for event, _ in stepped], "learning_rate"))
    history.loss.append(_curve(of_stage_0, "loss"))
    if final := _curve(of_stage_0, "final_loss"):
        history.final_loss = final[-1][1]
    times = [began_at, *(event.at for event in progress)]
    tokens = _increments(times, [event.number("tokens") or 0.0 for event in progress])
    history.token_increments += [new for new, stage in zip(tokens, held, strict=True) if new.amount > 0 and stage == 0]
    sizes = [event.tally("bytes") for event in progress]
    for way, increments in history.byte_increments.items():
        totals = [sum(size for kind, size in each.items() if kind.startswith(way)) for each in sizes]
        increments += _increments(times, totals)
    rounds = [event.tally("rounds") for event in progress]
    for result in {name: None for each in rounds for name in each}:
        increments = _increments(times, [each.get(result, 0.0) for each in rounds])
        history.new_rounds += [(new.ended_at, result, new.amount) for new in increments if new.amount > 0]
    if progress:
        history.inner_steps += int(progress[-1].number("inner_steps") or 0)
        history.device_s += progress[-1].number("device_s") or 0.0
        for name, tally in history.tallies.items():
            tally.update(progress[-1].tally(name))


def _increments(times: Sequence[float], counts: Sequence[float]) -> list[Increment]:
    """What came to a count before each line; nothing where a line does not have it. `times`: the start, the lines."""
    highest = [0.0, *itertools.accumulate(counts, max)]
    added = [high - low for low, high in itertools.pairwise(highest)]
    return [Increment(low, high, amount) for (low, high), amount in zip(itertools.pairwise(times), added, strict=True)]


def _curve(events: Sequence[JournalEvent], name: str) -> Piece:
    """(step, number of this name) of the events that have one."""
    return [(event.number("step") or 0.0, value) for event in events if (value := event.number(name)) is not None]


def _states(event: JournalEvent) -> dict[str, float]:
    """Nodes by state, over all stages."""
    counts: Counter[str] = Counter()
    for place, count in event.tally("counts").items():
        counts[_known(place.rpartition(" ")[2])] += int(count)
    return dict(counts)


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
