"""What `noloco top` tells of a swarm: one sentence, findings, stages, nodes. Pure, from the nodes' reports."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from noloco_p2p.core import health
from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.status import Wait
from noloco_p2p.humanize import finite
from noloco_p2p.io.telemetry.status_json import WaitInWords
from noloco_p2p.observe.diagnosis.diagnose import Finding, Report, findings, headline, progress
from noloco_p2p.observe.diagnosis.findings import Severity, line

ROUND_RESULTS = ("partner", "stale", "other", "alone")


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage."""

    stage: int
    replicas: int
    states: Mapping[str, int]
    """How many replicas are in which state."""
    tokens_per_s: float
    """Of all its replicas: what stage 0 trains on, what a later one serves."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node. None: not known."""

    peer: PeerId
    stage: int | None
    state: str | None
    """As it says itself, else as the directory says."""
    answers: bool
    """It has told its status."""
    failure: str
    """Why not."""
    step: float | None = None
    inner_steps: int | None = None
    tokens_per_s: float | None = None
    microbatches_per_s: float | None = None
    """Of device time."""
    rounds: Mapping[str, int] | None = None
    """Outer rounds by result."""
    partner_wait_s: float | None = None
    """Seconds that its device waited for partners, since its start."""
    bytes_per_s: float | None = None
    replica_std: float | None = None
    loss: float | None = None
    waits_for: Wait | None = None
    """What it waits for now: the longest wait for somebody, else of all that hold something up."""
    clock_ahead_s: float | None = None
    version: str = ""


@dataclass(frozen=True, slots=True)
class Overview:
    """A swarm at one moment."""

    name: str
    """Of the run; empty when nobody told."""
    sentence: str
    severity: Severity
    """Of the sentence."""
    progress: str
    """How far the swarm has come, whatever is wrong."""
    findings: tuple[Finding, ...]
    stages: tuple[Stage, ...]
    nodes: tuple[Node, ...]
    """Sorted by stage, then by peer id."""

    def as_json(self) -> dict[str, Any]:
        """Plain values, every number finite."""
        found = {name: _finite(value) for name, value in asdict(self).items()}
        for node, fields in zip(self.nodes, found["nodes"], strict=True):
            if node.waits_for is not None:
                fields["waits_for"] = _finite(asdict(WaitInWords.of(node.waits_for)))
        return found


def overview(reports: Sequence[Report]) -> Overview:
    """The swarm of these reports."""
    found = findings(reports)
    told = headline(reports, found)
    severity: Severity = next((f.severity for f in found if f.sentence == told), "ok")
    nodes = sorted((_node(report) for report in reports), key=lambda n: (n.stage is None, n.stage or 0, n.peer))
    names = Counter(report.status.run_name for report in reports if report.status is not None)
    name = line(min(names, key=lambda name: (-names[name], name))) if names else ""
    return Overview(name, told, severity, progress(reports), tuple(found), _stages(nodes, reports), tuple(nodes))


def _stages(nodes: Sequence[Node], reports: Sequence[Report]) -> tuple[Stage, ...]:
    """Those that somebody is at, and those that should be there."""
    counts = Counter(report.status.stages for report in reports if report.status is not None)
    stages = {node.stage for node in nodes if node.stage is not None}
    if counts:
        most = min(counts, key=lambda count: (-counts[count], count))
        stages |= set(range(min(most, 4096)))
    found = []
    for stage in sorted(stages):
        mine = [node for node in nodes if node.stage == stage]
        states = Counter(node.state if node.answers and node.state else "silent" for node in mine)
        rate = sum(finite(node.tokens_per_s) for node in mine)
        found.append(Stage(stage, len(mine), dict(sorted(states.items())), rate))
    return tuple(found)


def _node(report: Report) -> Node:
    advert, status = report.newest, report.status
    stage = advert.stage if advert is not None and advert.stage >= 0 else None
    state = advert.state if advert is not None else None
    if status is None:
        return Node(report.peer, stage, state, False, report.failure)
    figures = status.figures
    return Node(
        peer=report.peer,
        stage=stage,
        state=state,
        answers=True,
        failure="",
        step=status.advert.step,
        inner_steps=status.inner_steps,
        tokens_per_s=figures.tokens_per_s,
        microbatches_per_s=status.advert.microbatches_per_s,
        rounds=dict(figures.rounds),
        partner_wait_s=figures.idle_s.get("partner", 0.0),
        bytes_per_s=figures.bytes_per_s,
        replica_std=figures.replica_std,
        loss=figures.loss,
        waits_for=health.longest_wait(status),
        clock_ahead_s=report.clock_ahead_s,
        version=status.advert.version,
    )


def _finite(value: Any) -> Any:
    """The same with None for every number that JSON does not know."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
