"""The history of one node, from its journal: its processes, counts and curves."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from noloco_p2p.core.members import STATES
from noloco_p2p.observe.plotting.time_bins import Increment
from noloco_p2p.observe.report.journals import MAX_CHARACTERS, JournalEvent, clean, staged

TALLIES = ("microbatches", "dropped", "rerouted", "distrusted", "rounds", "idle_s", "bytes", "phase_s")
INCIDENTS = {"warning": "warning", "stuck": "stuck", "deserted": "stage without replica", "moved": "moved"}
"""Events that appear in the list of what went wrong, and what they are called there."""
CURVES = {name: ("progress", name) for name in ("loss", "final_loss", "grad_norm")}
CURVES |= {"validation": ("evaluation", "loss"), "spread": ("replica_std", "value")}
"""Curve → kind and field of the events that give its points."""
UNKNOWN, TRAINED, WORKS = "unknown", "trained", "device works"

Piece = list[tuple[float, float]]
"""The part of a curve that one process wrote: (step, value)."""


class StateSpan(NamedTuple):
    """A span of time, in Unix seconds, in which a node was in one state."""

    began_at: float
    ended_at: float
    state: str
    stage: int | None
    """The stage that it held at the end."""


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
    times: defaultdict[int | None, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Seconds of TRAINED (in state `training`), of WORKS and of each `waits: CAUSE`, by the stage that it held."""
    tallies: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in TALLIES})
    curves: defaultdict[tuple[str, int | None], list[Piece]] = field(default_factory=lambda: defaultdict(list))
    """Curves by name (CURVES) and the stage that the node held; `learning_rate` has None for all stages. `loss` (mean
    since the previous `progress` event), `final_loss` and `validation` are in nats per token; `spread` is the standard
    deviation between replicas."""
    increments: defaultdict[str, list[Increment]] = field(default_factory=lambda: defaultdict(list))
    """Growth of `tokens` (while at stage 0), bytes `in` and `out`, and `rounds RESULT` between `progress` events."""
    round_seconds: list[tuple[float, float]] = field(default_factory=list)
    """(when, seconds) of the outer rounds in the journal."""
    membership: list[tuple[float, float, Counter[str]]] = field(default_factory=list)
    """(from, to, nodes by state), as this node saw the swarm."""
    incidents: list[Incident] = field(default_factory=list)

    def total(self, name: str) -> int:
        """The sum of the increments with this name."""
        return sum(int(each.amount) for each in self.increments[name])

    def seconds(self, what: str) -> float:
        """The seconds of one kind at all stages (`times`)."""
        return sum(spent[what] for spent in self.times.values())

    def last(self, curve: str, stage: int = 0) -> float | None:
        """The newest value of a curve while at a stage; None if it has none."""
        return next((piece[-1][1] for piece in reversed(self.curves[curve, stage]) if piece), None)


def add_process(node: NodeHistory, events: Sequence[JournalEvent]) -> None:
    """Add what one process wrote to the history of its node."""
    by_kind: defaultdict[str, list[JournalEvent]] = defaultdict(list)
    held = [*staged(events, node.stage)]
    node.stage = held[-1][1]
    for event in events:
        by_kind[event.kind].append(event)
        if event.kind in INCIDENTS:
            kind = "recovered" if event.fields.get("well") is True else INCIDENTS[event.kind]
            node.incidents.append(Incident(event.at, node.name, kind, _sentence(event)))
    for event in by_kind["start"]:
        node.peer_id, node.run_id, node.run_name = map(event.text, ("peer_id", "run_id", "name"))
        node.version, node.machine, node.command = map(event.text, ("version", "machine", "command"))
    spans = tuple(_spans(held))
    node.processes.append(ProcessHistory(events[0].at, events[-1].at, spans, events[-1].kind == "end"))
    for span in spans:
        node.times[span.stage].update({TRAINED: (span.ended_at - span.began_at) * (span.state == "training")})
    node.checkpoints += len(by_kind["checkpoint"])
    for stage, stay in itertools.groupby(held, lambda each: each[1]):
        mine = [event for event, _ in stay]
        for name, (kind, value) in CURVES.items():
            node.curves[name, stage].append(_curve([event for event in mine if event.kind == kind], value))
    node.round_seconds += [(event.at, event.number("seconds") or 0.0) for event in by_kind["outer_round"]]
    views = itertools.pairwise([*by_kind["membership"], events[-1]])
    node.membership += [(view.at, after.at, _states(view)) for view, after in views]
    _add_progress(node, [each for each in held if each[0].kind == "progress"], events[0].at)


def _add_progress(node: NodeHistory, progress: Sequence[tuple[JournalEvent, int | None]], began_at: float) -> None:
    """Add the `progress` events of a process, each with the stage that the node held."""
    node.step = max([node.step, *(event.number("step") or 0.0 for event, _ in progress)])
    node.curves["learning_rate", None].append(_curve([event for event, _ in progress], "learning_rate"))
    times = [began_at, *(event.at for event, _ in progress)]
    for n, name, more in _growth([_totals(event) for event, _ in progress]):
        if name != "tokens" or progress[n][1] == 0:
            node.increments[name].append(Increment(times[n], times[n + 1], more))
    for n, name, more in _growth([_times(event) for event, _ in progress]):
        node.times[progress[n][1]].update({name: more})
    for event, _ in progress[-1:]:
        node.inner_steps += int(event.number("inner_steps") or 0)
        node.checkpoints += int(event.tally("held").get("checkpoint", 0))
        for name, tally in node.tallies.items():
            tally.update(event.tally(name))


def _growth(totals: Sequence[Mapping[str, float]]) -> Iterator[tuple[int, str, float]]:
    """(index, name, growth since the one before) of the counts of successive events.

    A count that is missing from an event has not grown, and one that falls is ignored.
    """
    for name in {name: None for each in totals for name in each}:
        highest = [0.0, *itertools.accumulate((each.get(name, 0.0) for each in totals), max)]
        yield from ((n, name, new - old) for n, (old, new) in enumerate(itertools.pairwise(highest)) if new > old)


def _times(event: JournalEvent) -> dict[str, float]:
    """The seconds in a `progress` event, by the names of `NodeHistory.times`."""
    waits = {f"waits: {cause}": seconds for cause, seconds in event.tally("idle_s").items()}
    return {WORKS: event.number("device_s") or 0.0, **waits}


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
    places = event.tally("counts").items()
    return sum((Counter({_known(place.rpartition(" ")[2]): int(count)}) for place, count in places), Counter[str]())


def _known(state: str) -> str:
    return state if state in STATES else UNKNOWN


def _spans(held: Sequence[tuple[JournalEvent, int | None]]) -> Iterator[StateSpan]:
    """The states of a process in sequence, from the events that say it; `starting` until the first of them."""
    state, since, place = "starting", held[0][0].at, held[0][1]
    for event, stage in held:
        found = _known(event.text("state")) if "state" in event.fields else state
        if found != state:
            if event.at > since:
                yield StateSpan(since, event.at, state, place)
            state, since = found, event.at
        place = stage
    yield StateSpan(since, held[-1][0].at, state, place)


def _sentence(event: JournalEvent) -> str:
    """An incident in words."""
    if event.kind == "deserted":
        stages: Any = event.fields.get("stages")
        names = ", ".join(clean(stage) for stage in stages) if isinstance(stages, dict) else ""
        return f"no replica serves stage {names}"[:MAX_CHARACTERS] if names else "every stage has a replica again"
    if event.kind == "moved":
        return f"to stage {event.text('stage')}: {event.text('reason')}"
    return event.text("message")
