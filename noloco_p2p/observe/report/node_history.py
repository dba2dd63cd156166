"""What the journal of one node says: its lives, its counts over all of them, and its curves."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from noloco_p2p.core.members import STATES
from noloco_p2p.launch.node_probe import read_json
from noloco_p2p.observe.report.journals import Life, Line, clean, read_lives

TALLIES = ("microbatches", "dropped", "rerouted", "busy", "rounds", "idle_s", "bytes", "phase_s", "held")
NOTES = {"warning": "warning", "stuck": "stuck", "deserted": "stage without replica", "moved": "moves"}
"""Events that stand in the list of what went wrong, and what they are called there."""
UNKNOWN = "unknown"


class Span(NamedTuple):
    """A state of a node, from when to when (Unix seconds)."""

    began_at: float
    ended_at: float
    state: str


class Round(NamedTuple):
    """An outer round that has a line."""

    at: float
    seconds: float
    result: str


class Note(NamedTuple):
    """One entry of the list of what went wrong."""

    at: float
    node: str
    kind: str
    text: str


class Gain(NamedTuple):
    """What was added between two lines of progress."""

    began_at: float
    ended_at: float
    amount: float


@dataclass(frozen=True, slots=True)
class Process:
    """One life of a node."""

    began_at: float
    ended_at: float
    spans: tuple[Span, ...]
    ended: bool
    """In order; else it was killed, or goes on."""


Curve = list[tuple[float, float]]


@dataclass(slots=True)
class Story:
    """One node. Curves are lists of pieces, one for each life; a loss is in nats per token."""

    name: str
    peer_id: str = ""
    run_id: str = ""
    run_name: str = ""
    version: str = ""
    stage: int | None = None
    """The last one that it held."""
    processes: list[Process] = field(default_factory=list)
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
    loss: list[Curve] = field(default_factory=list)
    """(step, mean loss since the line before)."""
    validation: list[Curve] = field(default_factory=list)
    spread: list[Curve] = field(default_factory=list)
    """(step, standard deviation between replicas)."""
    rate: list[Curve] = field(default_factory=list)
    """(step, learning rate)."""
    token_gains: list[Gain] = field(default_factory=list)
    byte_gains: dict[str, list[Gain]] = field(default_factory=lambda: {"in": [], "out": []})
    round_gains: list[tuple[float, str, float]] = field(default_factory=list)
    """(when, result, how many)."""
    rounds: list[Round] = field(default_factory=list)
    membership: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """(when, nodes by state)."""
    notes: list[Note] = field(default_factory=list)

    @property
    def began_at(self) -> float:
        """When its first process began."""
        return self.processes[0].began_at

    @property
    def ended_at(self) -> float:
        """When its last process wrote its last line."""
        return self.processes[-1].ended_at


def tell(directory: Path, name: str) -> Story | None:
    """The story of the node whose journal lies there; None when there is no line that can be read."""
    lives = read_lives(directory)
    if not lives:
        return None
    story = Story(name)
    for life in lives:
        _Teller(story).tell(life)
    known = read_json(directory / "endpoints.json") or {}
    story.peer_id = story.peer_id or clean(known.get("peer_id", ""))
    return story


class _Teller:
    """Adds one life to a story."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._before: Line | None = None
        """The line of progress before."""
        self._since_at = 0.0
        """When that was written, or this life began."""
        self._counts: dict[str, float] = {}
        """What this life has counted so far, by name; it only grows."""
        self._validation: Curve = []
        self._loss: Curve = []
        self._spread: Curve = []
        self._rate: Curve = []

    def tell(self, life: Life) -> None:
        story, lines = self._story, life.lines
        self._since_at = lines[0].at
        heard: dict[str, Callable[[Line], None]] = {
            "start": self._start,
            "stage": self._stage,
            "state": self._state,
            "progress": self._progress,
            "outer_round": self._outer_round,
            "replica_std": self._replica_std,
            "evaluation": self._evaluation,
            "membership": self._membership,
            "checkpoint": self._checkpoint,
        }
        for line in lines:
            if line.event in heard:
                heard[line.event](line)
            if line.event in NOTES:
                kind = "well again" if line.fields.get("well") is True else NOTES[line.event]
                story.notes.append(Note(line.at, story.name, kind, _said(line)))
        self._close()
        spans = tuple(_spans(lines))
        process = Process(lines[0].at, lines[-1].at, spans, life.ended)
        story.processes.append(process)
        story.trained_s += sum(span.ended_at - span.began_at for span in spans if span.state == "training")
        for pieces, piece in (
            (story.loss, self._loss),
            (story.validation, self._validation),
            (story.spread, self._spread),
            (story.rate, self._rate),
        ):
            pieces.append(piece)

    def _close(self) -> None:
        """Counts are those of the last line of progress of a life."""
        last, story = self._before, self._story
        if last is None:
            return
        story.inner_steps += int(last.number("inner_steps") or 0)
        story.device_s += last.number("device_s") or 0.0
        for name in TALLIES:
            story.tallies[name].update(last.tally(name))

    def _start(self, line: Line) -> None:
        story = self._story
        story.peer_id, story.run_id = line.text("peer_id"), line.text("run_id")
        story.run_name, story.version = line.text("name"), line.text("version")
        self._stage(line)

    def _stage(self, line: Line) -> None:
        stage = line.number("stage")
        if stage is not None:
            self._story.stage = int(stage)

    def _state(self, line: Line) -> None:
        if line.text("state") == "training" and self._story.training_at is None:
            self._story.training_at = line.at

    def _progress(self, line: Line) -> None:
        story, self._before = self._story, line
        self._stage(line)
        since_at, self._since_at = self._since_at, line.at
        self._stands(line)
        gained = self._gained("tokens", line.number("tokens") or 0.0)
        if gained > 0 and story.stage == 0:
            story.tokens += int(gained)
            story.token_gains.append(Gain(since_at, line.at, gained))
            story.stepped_at = line.at
        sizes = line.tally("bytes")
        for way, gains in story.byte_gains.items():
            size = sum(each for label, each in sizes.items() if label.startswith(way))
            gains.append(Gain(since_at, line.at, self._gained(way, size)))
        for result, count in line.tally("rounds").items():
            if (new := self._gained(f"rounds {result}", count)) > 0:
                story.round_gains.append((line.at, result, new))

    def _gained(self, name: str, count: float) -> float:
        """What has come to a count since the line before; nothing where this line does not tell it."""
        gained = max(0.0, count - self._counts.get(name, 0.0))
        self._counts[name] = self._counts.get(name, 0.0) + gained
        return gained

    def _stands(self, line: Line) -> None:
        story, step = self._story, line.number("step")
        if step is None:
            return
        story.step = max(story.step, step)
        rate, loss, final = line.number("learning_rate"), line.number("loss"), line.number("final_loss")
        if rate is not None:
            self._rate.append((step, rate))
        if loss is not None and story.stage == 0:
            self._loss.append((step, loss))
        if final is not None and story.stage == 0:
            story.final_loss = final

    def _outer_round(self, line: Line) -> None:
        self._story.rounds.append(Round(line.at, line.number("seconds") or 0.0, line.text("result")))

    def _replica_std(self, line: Line) -> None:
        value, step = line.number("value"), line.number("step")
        if value is not None:
            self._story.replica_std = value
            self._spread.append((step or 0.0, value))

    def _evaluation(self, line: Line) -> None:
        loss, step = line.number("loss"), line.number("step")
        if loss is not None:
            self._story.validation_loss = loss
            self._validation.append((step or 0.0, loss))

    def _checkpoint(self, _: Line) -> None:
        self._story.checkpoints += 1

    def _membership(self, line: Line) -> None:
        counts: Counter[str] = Counter()
        for place, count in line.tally("counts").items():
            counts[_known(place.rpartition(" ")[2])] += int(count)
        self._story.membership.append((line.at, dict(counts)))


def _known(name: str) -> str:
    return name if name in STATES else UNKNOWN


def _spans(lines: Sequence[Line]) -> Iterable[Span]:
    """The states of a life, one after the other; `starting` at first, or what a line of progress says."""
    state, since = "starting", lines[0].at
    for line in lines:
        found = _known(line.text("state")) if line.event in ("state", "progress") and "state" in line.fields else state
        if found != state:
            if line.at > since:
                yield Span(since, line.at, state)
            state, since = found, line.at
    yield Span(since, lines[-1].at, state)


def _said(line: Line) -> str:
    """One entry of the list in words."""
    if line.event == "deserted":
        stages: Any = line.fields.get("stages")
        names = ", ".join(clean(stage) for stage in stages) if isinstance(stages, dict) else ""
        return f"no replica serves stage {names}"[:300] if names else "every stage has a replica again"
    if line.event == "moved":
        return f"to stage {line.text('stage')}: {line.text('reason')}"
    return line.text("message")
