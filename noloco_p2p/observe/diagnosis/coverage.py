"""Where nodes are missing: stages without replicas or with one, and a run that waits for its start. Pure."""

from collections.abc import Iterator

from noloco_p2p.core.members import IN_ROUNDS, PRESENT
from noloco_p2p.core.status import AnyReplica, Resource
from noloco_p2p.humanize import elapsed, finite, plural
from noloco_p2p.observe.diagnosis.findings import Finding, Report, named
from noloco_p2p.observe.diagnosis.swarm_view import Swarm, most_common
from noloco_p2p.observe.diagnosis.symptoms import Cause, cause

ADVERT_OLD_S = 15.0
"""Adverts are renewed every ten seconds by default."""


def vacancies(swarm: Swarm) -> list[Cause]:
    """All of them."""
    return [*_stages(swarm), *_start(swarm)]


def _stages(swarm: Swarm) -> Iterator[Cause]:
    if not swarm.begun or swarm.ended or not swarm.statuses:
        return
    thin: list[int] = []
    for stage in range(swarm.stages):
        there = swarm.of_stage(stage, IN_ROUNDS)
        answering = [report for report in there if report.status is not None]
        if not answering and (swarm.deserted_s(stage) > 0 or all(_is_old(report) for report in there)):
            yield _empty_stage(swarm, stage, there)
        elif len(answering) == 1:
            thin.append(stage)
    if thin:
        which = f"stage {thin[0]} has" if len(thin) == 1 else f"stages {_numbers(thin)} have"
        told = f"{which} one replica{'' if len(thin) == 1 else ' each'}: without it the run stands still"
        yield cause("warning", "stage-thin", None, told, "start one more node, it goes where it is needed most")


def _is_old(report: Report) -> bool:
    """It has not announced itself for so long that it may be gone; else only its status port may be closed to us."""
    return report.advert is None or finite(report.age_s) > ADVERT_OLD_S


def _empty_stage(swarm: Swarm, stage: int, silent: list[Report]) -> Cause:
    since_s = swarm.deserted_s(stage)
    since = f" since {elapsed(since_s)}" if since_s > 0 else ""
    told = f"stage {stage} has no replica{since}"
    advice = f"start a node (it takes the stage that lacks one): noloco-node --join ADDR --stage {stage}"
    paused = [r.peer for r in swarm.of_stage(stage, {"paused"})]
    coming = [r.peer for r in swarm.of_stage(stage, {"starting"})]
    if silent:
        told += f": {named([r.peer for r in silent])} {'does' if len(silent) == 1 else 'do'} not answer"
        advice = f"start it again, or another node in its place; {silent[0].failure}" if silent[0].failure else advice
    elif paused:
        told += f": {named(paused)} {'is' if len(paused) == 1 else 'are'} paused"
        advice = "noloco resume DIR on its machine, or start another node"
    elif coming:
        told += f": {named(coming)} {'is' if len(coming) == 1 else 'are'} starting"
        advice = "wait for it"
    peer = (silent[0].peer if silent else paused[0] if paused else None) if len(silent or paused) == 1 else None
    return Cause(Finding("error", "stage-empty", peer, told, advice), AnyReplica(stage))


def _numbers(stages: list[int]) -> str:
    return ", ".join(map(str, stages)) if len(stages) <= 12 else plural(len(stages), "stage")


def _start(swarm: Swarm) -> Iterator[Cause]:
    """The run has not begun, and nodes are missing for it."""
    needed = most_common(status.start_replicas for _, status in swarm.statuses) or 0
    if swarm.begun or not swarm.statuses:
        return
    missing = {s: needed - len(swarm.of_stage(s, PRESENT)) for s in range(swarm.stages)}
    told = [f"{plural(lack, 'more replica')} of stage {stage}" for stage, lack in missing.items() if lack > 0]
    undecided = sum(r.newest is None or r.newest.stage < 0 for r in swarm.reports)
    if sum(lack for lack in missing.values() if lack > 0) > undecided:
        some = ", ".join(told[:3]) + (f" and of {plural(len(told) - 3, 'other stage')}" if len(told) > 3 else "")
        waited_s = max(
            (finite(w.since_s) for _, s in swarm.statuses for w in s.waits if w.whom == Resource.SWARM), default=0.0
        )
        since = f" since {elapsed(waited_s)}" if waited_s > 0 else ""
        advice = "start more nodes: noloco-node --join ADDR; the run begins by itself"
        yield cause("warning", "start", None, f"waiting for {some}{since}: the run has not begun", advice)
