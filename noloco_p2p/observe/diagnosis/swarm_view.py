"""All nodes of one run as an observer sees them, put in order for the questions of a diagnosis. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from noloco_p2p.core.members import IN_ROUNDS, STAGE_0_AT_WORK, TRAINED
from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.core.status import Status
from noloco_p2p.humanize import finite
from noloco_p2p.observe.diagnosis.findings import Report

V = TypeVar("V", str, int)

STAGES_LIMIT = 4096
"""A run of more stages is a lie."""


class Swarm:
    """The reports of one observation, one a peer, sorted by peer id; none of them is changed."""

    def __init__(self, reports: Sequence[Report]) -> None:
        by_peer: dict[PeerId, Report] = {}
        for report in reports:
            if report.peer not in by_peer or by_peer[report.peer].status is None:
                by_peer[report.peer] = report
        self.everybody = [by_peer[peer] for peer in sorted(by_peer)]
        """Those of other runs too."""
        self.run_id: str | None = most_common(a.run_id for r in self.everybody if (a := r.newest) is not None)
        """The run that most of them work on."""
        self.reports = [r for r in self.everybody if r.newest is None or r.newest.run_id == self.run_id]
        """The nodes of that run, and those of which nothing is known."""
        self.by_peer = {report.peer: report for report in self.reports}
        self.statuses = [(r.peer, _tamed(r.status)) for r in self.reports if r.status is not None]
        self.stages = self._count_stages()

    def _count_stages(self) -> int:
        told = most_common(s.stages for _, s in self.statuses if 0 < s.stages <= STAGES_LIMIT)
        if told is not None:
            return told
        return 1 + max((a.stage for r in self.reports if (a := r.newest) and 0 <= a.stage < STAGES_LIMIT), default=-1)

    def of_stage(self, stage: int, states: Collection[str]) -> list[Report]:
        """The nodes of a stage that are in one of `states`, as far as is known."""
        return [r for r in self.reports if (a := r.newest) is not None and a.stage == stage and a.state in states]

    def advert(self, peer: PeerId) -> Advert | None:
        """The newest that is known of where a node stands."""
        report = self.by_peer.get(peer)
        return None if report is None else report.newest

    @property
    def steps(self) -> int:
        """Length of the run in steps; 0 when nobody told."""
        return most_common(s.steps for _, s in self.statuses) or 0

    @property
    def step(self) -> float:
        """How far stage 0 has come, steps: the median of its nodes."""
        return median([finite(r.newest.step) for r in self.of_stage(0, IN_ROUNDS | {"paused"}) if r.newest]) or 0.0

    @property
    def begun(self) -> bool:
        """Somebody has trained, or does."""
        at_work = any(a.state in TRAINED for r in self.reports if (a := r.newest) is not None)
        return at_work or any(status.inner_steps > 0 for _, status in self.statuses)

    @property
    def training(self) -> bool:
        """Somebody trains, or is about to."""
        return any(s.advert.state in ("training", "syncing") for _, s in self.statuses)

    @property
    def ended(self) -> bool:
        """Stage 0 has come to the last step: from now on nodes leave one after the other."""
        finished = any(a.state == "finished" for r in self.reports if (a := r.newest) is not None)
        return finished and not self.of_stage(0, STAGE_0_AT_WORK)

    def deserted_s(self, stage: int) -> float:
        """The longest time for which a node knows that nobody serves a stage; 0.0: nobody says so."""
        return max((finite(s.deserted.get(stage)) for _, s in self.statuses), default=0.0)


def _tamed(status: Status) -> Status:
    """The same with finite numbers where rules calculate with them that expect such."""
    took_s, since_s = status.step_took_s, status.since_step_s
    return replace(
        status,
        waits=tuple(
            replace(w, since_s=finite(w.since_s), deadline_s=None if w.deadline_s is None else finite(w.deadline_s))
            for w in status.waits
        ),
        step_took_s=None if took_s is None else finite(took_s),
        since_step_s=None if since_s is None else finite(since_s),
        figures=replace(status.figures, loop_silent_s=finite(status.figures.loop_silent_s)),
    )


def most_common(values: Iterable[V]) -> V | None:
    """The value that occurs most; of several the smallest; None of none."""
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], value)) if counts else None


def median(values: Sequence[float]) -> float | None:
    """The lower one of an even number, so that it is one of them; None of none."""
    return sorted(values)[(len(values) - 1) // 2] if values else None
