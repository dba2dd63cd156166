"""The history of one node, from its journal: its processes, counts and curves."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from noloco_p2p.core.members import STATES
from noloco_p2p.observe.plotting.time_bins import Increment
from noloco_p2p.observe.report.journals import MAX_CHARACTERS, JournalEvent, clean

TALLIES = ("microbatches", "dropped", "rerouted", "distrusted", "rounds", "idle_s", "bytes", "phase_s")
INCIDENTS = {"warning": "warning", "stuck": "stuck", "deserted": "stage without replica", "moved": "moved"}
"""Events that appear in the list of what went wrong, and what they are called there."""
UNKNOWN = "unknown"

Piece = list[tuple[float, float]]
"""The part of a curve that one process wrote: (step, value)."""


class StateSpan(NamedTuple):
    """A span of time, in Unix seconds, in which a node was in one state."""

    began_at: float
    ended_at: float
    state: str


class Incident(NamedTuple):
    """One entry of the list of what went wrong."""

    at: float
    """Unix seconds."""
    node: str
    kind: str
    text: str


class ProcessHistory(NamedTuple):
    """One process of a node, from the first line of its journal to the last."""

    began_at: float
    ended_at: float
    spans: tuple[StateSpan, ...]
    ended: bool
    """Whether the last line is an `end` event. If not, the process was killed, or is still running."""


@dataclass(slots=True)
class NodeHistory:
    """All that the journal of one node says about it."""

    name: str
    peer_id: str = ""
    run_id: str = ""
    run_name: str = ""
    version: str = ""
    machine: str = ""
    command: str = ""
    """The command that started the newest process."""
    stage: int | None = None
    """The last stage that it held."""
    processes: list[ProcessHistory] = field(default_factory=list)
    step: float = 0.0
    inner_steps: int = 0
    checkpoints: int = 0
    device_s: float = 0.0
    trained_s: float = 0.0
    """Seconds in state `training`."""
    tallies: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in TALLIES})
    curves: defaultdict[str, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    """`loss` (mean since the previous `progress` event) and `final_loss` while at stage 0, and `validation`, all in
    nats per token; `spread`, the standard deviation between replicas; `learning_rate`; `grad_norm`."""
    increments: defaultdict[str, list[Increment]] = field(default_factory=lambda: defaultdict(list))
    """Growth of `tokens` (while at stage 0), bytes `in` and `out`, and `rounds RESULT` between `progress` events."""
    round_seconds: list[tuple[float, float]] = field(default_factory=list)
    """(when, seconds) of the outer rounds in the journal."""
    membership: list[tuple[float, Counter[str]]] = field(default_factory=list)
    """(when, nodes by state), as this node saw the swarm."""
    incidents: list[Incident] = field(default_factory=list)

    def total(self, name: str) -> int:
        """The sum of the increments with this name."""
        return sum(int(each.amount) for each in self.increments[name])

    def last(self, curve: str) -> float | None:
        """The newest value of a curve; None if it has none."""
        return next((piece[-1][1] for piece in reversed(self.curves[curve]) if piece), None)


def add_process(node: NodeHistory, events: Sequence[JournalEvent]) -> None:
    """Add what one process wrote to the history of its node."""
    by_kind: defaultdict[str, list[JournalEvent]] = defaultdict(list)
    progress: list[tuple[JournalEvent, int | None]] = []
    for event in events:
        by_kind[event.kind].append(event)
        stage = event.number("stage") if event.kind in ("start", "stage", "progress") else None
        node.stage = node.stage if stage is None else int(stage)
        if event.kind == "progress":
            progress.append((event, node.stage))
        if event.kind in INCIDENTS:
            kind = "recovered" if event.fields.get("well") is True else INCIDENTS[event.kind]
            node.incidents.append(Incident(event.at, node.name, kind, _sentence(event)))
    for event in by_kind["start"]:
        node.peer_id, node.run_id, node.run_name = map(event.text, ("peer_id", "run_id", "name"))
        node.version, node.machine, node.command = map(event.text, ("version", "machine", "command"))
    spans = tuple(_spans(events))
    node.processes.append(ProcessHistory(events[0].at, events[-1].at, spans, events[-1].kind == "end"))
    node.trained_s += sum(span.ended_at - span.began_at for span in spans if span.state == "training")
    node.checkpoints += len(by_kind["checkpoint"])
    node.curves["spread"].append(_curve(by_kind["replica_std"], "value"))
    node.curves["validation"].append(_curve(by_kind["evaluation"], "loss"))
    node.round_seconds += [(event.at, event.number("seconds") or 0.0) for event in by_kind["outer_round"]]
    node.membership += [(event.at, _states(event)) for event in by_kind["membership"]]
    _add_progress(node, progress, events[0].at)


def _add_progress(node: NodeHistory, progress: Sequence[tuple[JournalEvent, int | None]], began_at: float) -> None:
    """Add the `progress` events of a process, each with the stage that the node held."""
    node.step = max([node.step, *(event.number("step") or 0.0 for event, _ in progress)])
    for name in ("learning_rate", "grad_norm"):
        node.curves[name].append(_curve([event for event, _ in progress], name))
    for name in ("loss", "final_loss"):
        node.curves[name].append(_curve([event for event, stage in progress if stage == 0], name))
    totals = [_totals(event) for event, _ in progress]
    times = [began_at, *(event.at for event, _ in progress)]
    for name in {name: None for each in totals for name in each}:
        # A count that is missing from an event has not grown, and one that falls is ignored.
        highest = [0.0, *itertools.accumulate((each.get(name, 0.0) for each in totals), max)]
        for n, (_, stage) in enumerate(progress):
            if highest[n + 1] > highest[n] and (name != "tokens" or stage == 0):
                node.increments[name].append(Increment(times[n], times[n + 1], highest[n + 1] - highest[n]))
    for event, _ in progress[-1:]:
        node.inner_steps += int(event.number("inner_steps") or 0)
        node.device_s += event.number("device_s") or 0.0
        for name, tally in node.tallies.items():
            tally.update(event.tally(name))


def _totals(event: JournalEvent) -> dict[str, float]:
    """The counts of a `progress` event, by the names of `NodeHistory.increments`."""
    sizes = event.tally("bytes")
    found = {way: sum(size for kind, size in sizes.items() if kind.startswith(way)) for way in ("in", "out")}
    rounds = {f"rounds {result}": count for result, count in event.tally("rounds").items()}
    return {"tokens": event.number("tokens") or 0.0, **found, **rounds}


def _curve(events: Sequence[JournalEvent], name: str) -> Piece:
    """(step, number) for the events that have a number with this name."""
    return [(event.number("step") or 0.0, value) for event in events if (value := event.number(name)) is not None]


def _states(event: JournalEvent) -> Counter[str]:
    """The number of nodes in each state, over all stages."""
    counts: Counter[str] = Counter()
    for place, count in event.tally("counts").items():
        counts[_known(place.rpartition(" ")[2])] += int(count)
    return counts


def _known(state: str) -> str:
    return state if state in STATES else UNKNOWN


def _spans(events: Sequence[JournalEvent]) -> Iterator[StateSpan]:
    """The states of a process in sequence, from the events that say it; `starting` until the first of them."""
    state, since = "starting", events[0].at
    for event in events:
        found = _known(event.text("state")) if "state" in event.fields else state
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
        return f"no replica serves stage {names}"[:MAX_CHARACTERS] if names else "every stage has a replica again"
    if event.kind == "moved":
        return f"to stage {event.text('stage')}: {event.text('reason')}"
    return event.text("message")
