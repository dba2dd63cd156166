"""All nodes of one run as an observer sees them, and what a diagnosis needs to know about them. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from statistics import fmean
from typing import TypeVar

from noloco_p2p.core.members import IN_ROUNDS, STAGE_0_AT_WORK, TRAINED
from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.status import Purpose, Status, Wait
from noloco_p2p.humanize import short_id
from noloco_p2p.observe.diagnosis.findings import Report

V = TypeVar("V", str, int)

WAITS_LIMIT = 64
"""Upper limit on the waits followed per node; statuses list the longest ones first."""
STAGES_LIMIT = 4096
"""More stages than any honest run has."""


class SwarmView:
    """The reports of one observation, at most one of a peer, sorted by peer id.

    All numbers are finite and below 2^63: whoever decodes a status or an advert refuses others.
    """

    def __init__(self, reports: Sequence[Report]) -> None:
        self.reports = sorted(reports, key=lambda r: r.peer)
        self.run_id = most_common(r.newest.run_id for r in self.reports) or ""
        self.statuses = {r.peer: r.status for r in self.reports if r.status is not None}
        self.waits: dict[tuple[PeerId, Purpose | None], list[Wait]] = {}
        """The waits that hold a node up on behalf of a purpose; with None: all of that node."""
        for peer, status in self.statuses.items():
            for wait in [wait for wait in status.waits if not wait.idle][:WAITS_LIMIT]:
                for why in {None, wait.why}:
                    self.waits.setdefault((peer, why), []).append(wait)
        self.served = {peer: {call.why for call in status.serving} for peer, status in self.statuses.items()}
        """On whose behalf each node is serving calls."""
        self.run_name = most_common(s.run_name for s in self.statuses.values()) or ""
        self.adverts = {r.peer: r.newest for r in self.reports}
        announced = {advert.stage for advert in self.adverts.values()}
        self._of_stage = {n: [r for r in self.reports if r.newest.stage == n] for n in announced}
        claimed = most_common(s.stages for s in self.statuses.values() if 0 < s.stages <= STAGES_LIMIT)
        self.stages = claimed or 1 + max((stage for stage in announced if 0 <= stage < STAGES_LIMIT), default=-1)

    def of_stage(self, stage: int, states: Collection[str]) -> list[Report]:
        """The nodes of a stage whose last known state is one of `states`."""
        return [r for r in self._of_stage.get(stage, ()) if r.newest.state in states]

    def name(self, peer: PeerId) -> str:
        """`node 12D3…Qx7Qf of stage 1`."""
        stage = self.adverts[peer].stage if peer in self.adverts else -1
        return f"node {short_id(peer)}" + (f" of stage {stage}" if stage >= 0 else "")

    @property
    def steps(self) -> int:
        """Length of the run in steps; 0 if no node has reported it."""
        return most_common(status.steps for status in self.statuses.values()) or 0

    @property
    def step(self) -> float:
        """Median step of the stage-0 nodes that train; if none does, of those that may again; 0.0 if there are none."""
        others = [r.newest.step for r in self.of_stage(0, IN_ROUNDS | {"paused"})]
        return median([status.advert.step for status in self._training(0)] or others) or 0.0

    def mean(self, figure: str, stage: int = 0) -> float | None:
        """The mean of one of `NodeFigures` over the nodes of a stage that know it, and that train if any of the stage
        does; None if none knows it."""
        whose = self._training(stage) or [s for s in self.statuses.values() if s.advert.stage == stage]
        known = [value for s in whose if (value := getattr(s.figures, figure)) is not None]
        return fmean(known) if known else None

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second that stage 0 trains on."""
        return sum(status.figures.tokens_per_s for status in self._training(0))

    def _training(self, stage: int) -> list[Status]:
        """What the nodes of a stage report that train now."""
        return [s for s in self.statuses.values() if s.advert.stage == stage and s.advert.state == "training"]

    @property
    def begun(self) -> bool:
        """Whether any node has trained."""
        at_work = any(advert.state in TRAINED for advert in self.adverts.values())
        return at_work or any(status.inner_steps > 0 for status in self.statuses.values())

    @property
    def ended(self) -> bool:
        """Whether stage 0 has reached the last step; after that, nodes leave one by one."""
        finished = any(advert.state == "finished" for advert in self.adverts.values())
        return finished and not self.of_stage(0, STAGE_0_AT_WORK)

    def deserted_s(self, stage: int) -> float:
        """Seconds for which a stage has had no replica, the most that any node reports; 0.0 if none reports it."""
        return max((status.deserted.get(stage, 0.0) for status in self.statuses.values()), default=0.0)


def most_common(values: Iterable[V]) -> V | None:
    """The most frequent value, the smallest one if several are; None if there are no values."""
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], value)) if counts else None


def median(values: Sequence[float]) -> float | None:
    """The median, the lower one for an even count, so that it is one of the values; None if there are none."""
    return sorted(values)[(len(values) - 1) // 2] if values else None
