"""The content of `noloco top` and the web page: one sentence, findings, stages, nodes. Pure, from nodes' reports."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from noloco_p2p.core import health
from noloco_p2p.core.status import Status
from noloco_p2p.io.dht.reach import endpoint
from noloco_p2p.io.telemetry.status_json import WaitInWords
from noloco_p2p.observe.diagnosis.diagnose import diagnose
from noloco_p2p.observe.diagnosis.findings import Finding, Report, Severity, line
from noloco_p2p.observe.diagnosis.swarm_view import SwarmView

ROUNDS = ("partner", "stale", "other", "alone"), ("all", "some", "alone")
"""Results of outer rounds: under rules that pull from one peer, and under those that pull from all replicas."""
NODE_FIGURES: dict[str, Callable[[Status], Any]] = {
    "step": lambda status: status.advert.step,
    "inner_steps": lambda status: status.inner_steps,
    "tokens_per_s": lambda status: status.figures.tokens_per_s,
    # outer rounds by result
    "rounds": lambda status: dict(status.figures.rounds),
    # seconds that its device has spent waiting for partners since the node started
    "partner_wait_s": lambda status: status.figures.idle_s.get("partner", 0.0),
    "bytes_per_s": lambda status: status.figures.bytes_per_s,
    "replica_std": lambda status: status.figures.replica_std,
    "loss": lambda status: status.figures.loss,
    # the longest current wait for a peer; without one, the longest wait that holds something up
    "waits_for": lambda status: (wait := health.longest_wait(status)) and asdict(WaitInWords.of(wait)),
}
"""Figures that a node reports about itself; None for a node that does not answer."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Overview:
    """A swarm at one moment."""

    name: str
    """Name of the run; empty if no node has reported it."""
    sentence: str
    severity: Severity
    """Severity of the sentence."""
    progress: str
    """How far the swarm has come, even if something is wrong."""
    findings: tuple[Finding, ...]
    stages: tuple[Row, ...]
    """`stage`, `replicas`, `states` (number of replicas in each), `tokens_per_s` (sum over those that train: what
    stage 0 trains on, or what a later stage serves)."""
    nodes: tuple[Row, ...]
    """`peer`, `host` (where it answers), `stage`, `state` (from the node itself, otherwise from the directory),
    `answers`, `failure` (why it does not answer), NODE_FIGURES, `clock_ahead_s`, `version`; sorted by stage, then by
    peer id. None: unknown."""

    def as_json(self) -> dict[str, Any]:
        """This overview as plain values. All numbers are finite, as in the statuses that they come from."""
        return asdict(self)


def overview(reports: Sequence[Report]) -> Overview:
    """The overview of the swarm that these reports describe."""
    found, swarm = diagnose(reports), SwarmView(reports)
    severity: Severity = next((f.severity for f in found.findings if f.sentence == found.sentence), "ok")
    nodes = sorted(map(_node, reports), key=lambda n: (n["stage"] is None, n["stage"] or 0, n["peer"]))
    stages = {*range(swarm.stages), *(node["stage"] for node in nodes)} - {None}
    rows = tuple(_stage(stage, [node for node in nodes if node["stage"] == stage]) for stage in sorted(stages))
    return Overview(line(swarm.run_name), found.sentence, severity, found.progress, found.findings, rows, tuple(nodes))


def _stage(stage: int, nodes: Sequence[Row]) -> Row:
    states = Counter(node["state"] if node["answers"] else "silent" for node in nodes)
    rate = sum(node["tokens_per_s"] or 0.0 for node in nodes if node["state"] == "training")
    return {"stage": stage, "replicas": len(nodes), "states": dict(sorted(states.items())), "tokens_per_s": rate}


def _node(report: Report) -> Row:
    advert, status = report.newest, report.status
    at = endpoint(advert.metrics)
    return {
        "peer": report.peer,
        "host": at[0] if at is not None else None,
        "stage": advert.stage if advert.stage >= 0 else None,
        "state": advert.state,
        "answers": status is not None,
        "failure": report.failure if status is None else "",
        **{name: None if status is None else figure(status) for name, figure in NODE_FIGURES.items()},
        "clock_ahead_s": None if status is None else report.clock_ahead_s,
        "version": "" if status is None else status.advert.version,
    }
