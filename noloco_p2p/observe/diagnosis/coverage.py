"""Where nodes are missing: stages without replicas or with one, and a run that waits for its start. Pure."""

from collections.abc import Iterator

from noloco_p2p.core.members import IN_ROUNDS, PRESENT
from noloco_p2p.core.status import AnyReplica, Resource
from noloco_p2p.humanize import elapsed, plural
from noloco_p2p.observe.diagnosis.findings import Cause, Finding, Report, at_node, named
from noloco_p2p.observe.diagnosis.swarm_view import SwarmView, most_common

ADVERT_OLD_S = 15.0
"""Adverts are renewed every ten seconds by default."""


def missing_nodes(swarm: SwarmView) -> list[Cause]:
    """All places where nodes are missing."""
    if not swarm.statuses:
        return []
    return list(_stages(swarm) if swarm.begun else _start(swarm))


def _stages(swarm: SwarmView) -> Iterator[Cause]:
    if swarm.ended:
        return
    thin: list[int] = []
    for stage in range(swarm.stages):
        replicas = swarm.of_stage(stage, IN_ROUNDS)
        answering = sum(report.status is not None for report in replicas)
        # A replica that has just announced itself trains, perhaps: only its status port may be closed to the observer.
        if not answering and (swarm.deserted_s(stage) > 0 or all(_is_old(report) for report in replicas)):
            yield _empty_stage(swarm, stage, replicas)
        elif answering == 1:
            thin.append(stage)
    if thin:
        which = f"stage {thin[0]} has one replica"
        if len(thin) > 1:
            numbers = ", ".join(map(str, thin)) if len(thin) <= 12 else plural(len(thin), "stage")
            which = f"stages {numbers} have one replica each"
        advice = "start one more node, it goes where it is needed most"
        yield at_node("warning", "stage-thin", None, f"{which}: without it the run stands still", advice)


def _is_old(report: Report) -> bool:
    return report.advert is None or report.age_s > ADVERT_OLD_S


def _empty_stage(swarm: SwarmView, stage: int, silent: list[Report]) -> Cause:
    """`silent` are its replicas that do not answer; without any, those that are paused or starting explain it."""
    empty_s = swarm.deserted_s(stage)
    lasted = f"had no replica for {elapsed(empty_s)}" if empty_s > 0 else "no replica"
    sentence = f"stage {stage} has {lasted}"
    advice = f"start a node (it takes the stage that lacks one): noloco-node --join ADDR --stage {stage}"
    blamed = [report.peer for report in silent]
    if silent:
        sentence += f": {named(blamed)} {'does' if len(silent) == 1 else 'do'} not answer"
        advice = f"start it again, or another node in its place; {silent[0].failure}" if silent[0].failure else advice
    else:
        for state, remedy in (
            ("paused", "noloco resume DIR on its machine, or start another node"),
            ("starting", "wait for it"),
        ):
            peers = [report.peer for report in swarm.of_stage(stage, {state})]
            if peers:
                sentence += f": {named(peers)} {'is' if len(peers) == 1 else 'are'} {state}"
                advice = remedy
                blamed = peers if state == "paused" else []
                break
    peer = blamed[0] if len(blamed) == 1 else None
    return Cause(Finding("error", "stage-empty", peer, sentence, advice), AnyReplica(stage))


def _start(swarm: SwarmView) -> Iterator[Cause]:
    """The run has not begun: is it that nodes are missing?"""
    needed = most_common(status.start_replicas for status in swarm.statuses.values()) or 0
    missing = {stage: needed - len(swarm.of_stage(stage, PRESENT)) for stage in range(swarm.stages)}
    missing = {stage: lack for stage, lack in missing.items() if lack > 0}
    # A node that has not chosen its stage yet will take one that lacks a replica.
    undecided = sum(report.newest is None or report.newest.stage < 0 for report in swarm.reports)
    if sum(missing.values()) > undecided:
        words = [f"{plural(lack, 'more replica')} of stage {stage}" for stage, lack in missing.items()]
        some = ", ".join(words[:3])
        if len(words) > 3:
            some += f" and of {plural(len(words) - 3, 'other stage')}"
        waits = (wait for status in swarm.statuses.values() for wait in status.waits)
        waited_s = max((wait.since_s for wait in waits if wait.whom == Resource.SWARM), default=0.0)
        lasted = f" (for {elapsed(waited_s)})" if waited_s > 0 else ""
        advice = "start more nodes: noloco-node --join ADDR; the run begins by itself"
        yield at_node("warning", "start", None, f"waiting for {some}{lasted}: the run has not begun", advice)
