"""What `noloco top` shows of a swarm: one sentence, findings, stages, nodes. Pure, from the nodes' reports."""

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
from noloco_p2p.observe.diagnosis.diagnose import diagnose
from noloco_p2p.observe.diagnosis.findings import Finding, Report, Severity, line
from noloco_p2p.observe.diagnosis.swarm_view import STAGES_LIMIT, most_common

ROUND_RESULTS = ("partner", "stale", "other", "alone")


@dataclass(frozen=True, slots=True)
class StageSummary:
    """One stage."""

    stage: int
    replicas: int
    states: Mapping[str, int]
    """How many replicas are in which state."""
    tokens_per_s: float
    """Of all its replicas: what stage 0 trains on, what a later one serves."""


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """One node. None: not known."""

    peer: PeerId
    stage: int | None
    state: str | None
    """As it says itself, else as the directory says."""
    answers: bool
    """It has sent its status."""
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
    """Seconds that its device has waited for partners since its start."""
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
    """Of the run; empty when nobody has said."""
    sentence: str
    severity: Severity
    """Of the sentence."""
    progress: str
    """How far the swarm has come, whatever is wrong."""
    findings: tuple[Finding, ...]
    stages: tuple[StageSummary, ...]
    nodes: tuple[NodeSummary, ...]
    """Sorted by stage, then by peer id."""

    def as_json(self) -> dict[str, Any]:
        """Plain values, every number finite."""
        found = asdict(self)
        for node, fields in zip(self.nodes, found["nodes"], strict=True):
            if node.waits_for is not None:
                fields["waits_for"] = asdict(WaitInWords.of(node.waits_for))
        return {name: _finite(value) for name, value in found.items()}


def overview(reports: Sequence[Report]) -> Overview:
    """The swarm of these reports."""
    found = diagnose(reports)
    severity: Severity = next((f.severity for f in found.findings if f.sentence == found.sentence), "ok")
    nodes = sorted((_node(report) for report in reports), key=lambda n: (n.stage is None, n.stage or 0, n.peer))
    statuses = [report.status for report in reports if report.status is not None]
    name = line(most_common(status.run_name for status in statuses) or "")
    stages = {node.stage for node in nodes if node.stage is not None}
    stages |= set(range(min(most_common(status.stages for status in statuses) or 0, STAGES_LIMIT)))
    rows = tuple(_stage(stage, [node for node in nodes if node.stage == stage]) for stage in sorted(stages))
    return Overview(name, found.sentence, severity, found.progress, found.findings, rows, tuple(nodes))


def _stage(stage: int, nodes: Sequence[NodeSummary]) -> StageSummary:
    states = Counter(node.state if node.answers and node.state else "silent" for node in nodes)
    rate = sum(finite(node.tokens_per_s) for node in nodes)
    return StageSummary(stage, len(nodes), dict(sorted(states.items())), rate)


def _node(report: Report) -> NodeSummary:
    advert, status = report.newest, report.status
    stage = advert.stage if advert is not None and advert.stage >= 0 else None
    state = advert.state if advert is not None else None
    if status is None:
        return NodeSummary(report.peer, stage, state, False, report.failure)
    figures = status.figures
    return NodeSummary(
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
