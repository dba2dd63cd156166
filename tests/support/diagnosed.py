"""Reports of made-up swarms, for the tests of the diagnosis and of the views that show it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from noloco_p2p.core.messages import Advert, MicrobatchId, PeerId
from noloco_p2p.core.status import (
    AnyReplica,
    ForMicrobatch,
    NodeFigures,
    Purpose,
    Resource,
    SeenPeer,
    Serving,
    Status,
    Trouble,
    Wait,
    WaitTarget,
    for_microbatch,
)
from noloco_p2p.observe.diagnosis.findings import Report

RUN = "ab" * 32


def peer(stage: int, replica: int) -> PeerId:
    """A peer id of the usual length that ends in its stage and replica: `…S1R0`."""
    return "12D3KooW" + "x" * 40 + f"S{stage}R{replica}"


def advert(stage: int, replica: int, state: str = "training", speed: float = 10.0) -> Advert:
    """A node in training at step 1234."""
    return Advert(
        peer_id=peer(stage, replica),
        run_id=RUN,
        stage=stage,
        addresses=(f"192.0.2.{replica + 1}:41{stage:02}",),
        metrics=f"http://192.0.2.{replica + 1}:91{stage:02}/metrics",
        state=state,
        step=1234.5,
        outer_round=12,
        microbatches_per_s=speed,
        version="0.1.0",
    )


def why(counter: int, replica: int = 0) -> ForMicrobatch:
    """A microbatch of replica 0 of stage 0."""
    return for_microbatch(MicrobatchId(peer(0, replica), 7, counter))


def wait(
    what: str,
    whom: WaitTarget,
    since_s: float,
    deadline_s: float | None = None,
    why: Purpose | None = None,
    idle: bool = False,
) -> Wait:
    """A wait."""
    return Wait(what, whom, since_s, deadline_s, why, idle)


def swarm(stages: int = 3, replicas: int = 3, state: str = "training") -> dict[str, Report]:
    """A healthy swarm: `S<stage>R<replica>` → report."""
    found = {}
    everybody = [advert(s, r, state) for s in range(stages) for r in range(replicas)]
    for mine in everybody:
        status = Status(
            advert=mine,
            run_name="tiny",
            stages=stages,
            steps=5000,
            inner_steps=1230,
            start_replicas=replicas,
            waits=(wait("reading of the membership", Resource.DIRECTORY, 3.0, idle=True),),
            seen=tuple(SeenPeer(other) for other in everybody if other is not mine),
            step_took_s=0.5,
            since_step_s=0.2,
            figures=NodeFigures(
                tokens_per_s=2050.0,
                loss=2.31 if mine.stage == 0 else None,
                rounds={"partner": 11, "alone": 1},
                microbatches={"done": 4000},
                disk_free_bytes=50 << 30,
                unix_time_s=1.8e9,
            ),
        )
        found[mine.peer_id[-4:]] = Report(mine.peer_id, mine, status, "", 0.1)
    return found


def with_status(report: Report, **changes: object) -> Report:
    """The same node with another status; a changed `advert` changes in the directory, too."""
    assert report.status is not None
    status = replace(report.status, **changes)  # type: ignore[arg-type]
    return replace(report, status=status, advert=status.advert)


def with_advert(report: Report, **changes: object) -> Report:
    """The same node with another advert."""
    assert report.status is not None
    return with_status(report, advert=replace(report.status.advert, **changes))  # type: ignore[arg-type]


def with_figures(report: Report, **changes: object) -> Report:
    """The same node with other figures."""
    assert report.status is not None
    return with_status(report, figures=replace(report.status.figures, **changes))  # type: ignore[arg-type]


def silent(report: Report, failure: str = "Connection refused") -> Report:
    """The same node, not answering."""
    return replace(report, status=None, failure=failure, clock_ahead_s=None)


def waiting(report: Report, *waits: Wait, serving: Sequence[Serving] = ()) -> Report:
    """The same node with these waits."""
    return with_status(report, waits=waits, serving=tuple(serving))


def aside(report: Report, others: Mapping[PeerId, float]) -> Report:
    """The same node, having set others aside for these seconds."""
    assert report.status is not None
    seen = tuple(replace(each, aside_s=others.get(each.advert.peer_id, 0.0)) for each in report.status.seen)
    return with_status(report, seen=seen)


def troubled(report: Report, name: str, message: str) -> Report:
    """The same node with a trouble."""
    return with_status(report, troubles=(Trouble(name, message, 12.0),))


def gradient_of(stage: int, replica: int, counter: int, since_s: float) -> tuple[Wait, ...]:
    """The two waits of a node that has sent a microbatch on: for any replica of the stage, and for the one called."""
    return (
        wait("gradient", AnyReplica(stage), since_s + 1, None, why(counter)),
        wait("gradient", peer(stage, replica), since_s, 60.0, why(counter)),
    )
