"""The figures of a simulated run: a pure function of its outcome and of the bytes that the network carried.

Seconds are virtual. Tokens and bytes are those of the run being simulated, not of the tiny tensors in the simulator.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from noloco_p2p.core.messages import PeerId
from noloco_p2p.sim.payloads import ByteCounts, totals
from noloco_p2p.sim.process import Outcome, SimProcess, StagePeriod
from noloco_p2p.sim.telemetry import Trace
from noloco_p2p.sim.throughput_bound import ThroughputBound

Shares = dict[str, float]
"""Shares of a whole, by name."""
Counts = dict[str, int]
"""By name."""

PERCENTILES = (50, 95)
ROUND_RESULTS = ("partner", "stale", "other", "all", "some", "alone")
"""Outer rounds by source: the partner at the same round, the partner at another round, another replica; under rules
that take from all replicas, all or some of them; nobody."""


@dataclass(frozen=True, slots=True)
class StageFigures:
    """One stage. Shares refer to the seconds that its nodes together spent training."""

    stage: int
    lives: int
    """Processes that trained in this stage."""
    inner_steps: int
    microbatches: int
    """Microbatches whose gradients its nodes computed."""
    training_s: float
    """Node-seconds."""
    utilisation: float | None
    """Share of time in which the devices worked; none: nobody trained."""
    idle: Shares
    """Share of time spent waiting, by cause: `gradients` (stage 0), `microbatches` (later stages), `partner`. `other`
    is the rest: waits that do not end in an inner step, such as the last one, and outer rounds except for the wait for
    a partner."""
    bound_utilisation: float | None = None
    """Share of time in which the devices would work at the bound; none: there is no bound."""


@dataclass(frozen=True, slots=True)
class MicrobatchFigures:
    """What happened to the microbatches that stage 0 started."""

    done: int
    nonfinite: int
    dropped: Counts
    """By reason."""
    rerouted: Counts
    """Calls of all stages that were then sent to another replica, by reason."""
    busy: int
    """Calls of all stages that were answered with Busy and tried again."""


@dataclass(frozen=True, slots=True)
class TrafficFigures:
    """Tensor bytes by kind: activation, gradient, snapshot, weights, state."""

    sent_per_node: Shares
    """Mean over all nodes that ever existed."""
    received_per_node: Shares
    lost: Counts
    in_flight: Counts
    """Still under way when the run ended."""


@dataclass(frozen=True, slots=True)
class RunFigures:
    """All figures of a run."""

    virtual_s: float
    """From the start of the first node to the end of the last one."""
    train_s: float
    """From the start of training to the last inner step of stage 0."""
    nodes: int
    """Distinct peers."""
    ends: Counts
    """Processes by outcome: `finished`, `left early`, `crashed`, `failed`."""
    tokens: int
    tokens_per_s: float
    """Over `train_s`."""
    step: float
    """Final clock of the stage-0 node that got furthest, in steps."""
    stages: tuple[StageFigures, ...]
    microbatches: MicrobatchFigures
    rounds: Counts
    """Outer rounds of all nodes, by result."""
    round_s: dict[str, float]
    """Duration of an outer round in seconds: `p50` and `p95`; empty without rounds."""
    traffic: TrafficFigures
    trace_hash: str
    bound_tokens_per_s: float | None = None
    """What links and devices allow; none: there is no bound."""
    share_of_bound: float | None = None
    """`tokens_per_s` as a share of the bound."""


BytesOf = Mapping[PeerId, Mapping[str, ByteCounts]]
"""By node and kind."""


def figures(
    outcome: Outcome, bytes_of: BytesOf, tokens_per_microbatch: int, stages: int, bound: ThroughputBound | None = None
) -> RunFigures:
    """The figures of a run. `tokens_per_microbatch` is that of the run being simulated."""
    periods: list[list[StagePeriod]] = [[] for _ in range(stages)]
    for period in outcome.periods():
        periods[period.stage].append(period)
    first, trace, nodes = _events_of(periods[0]), outcome.trace, len(outcome.nodes)
    results = first.totals("microbatch", "result")
    dropped = Counter(str(e.get("reason")) for e in first.of("microbatch") if e.get("result") == "dropped")
    trained_from = min((begin for period in periods[0] for begin, _ in period.training), default=math.inf)
    stepped_at = max((event.at_s for event in first.of("inner_step")), default=0.0)
    train_s = max(0.0, stepped_at - trained_from)
    tokens = results["done"] * tokens_per_microbatch
    tokens_per_s = tokens / train_s if train_s else 0.0
    bound_tokens_per_s = bound.tokens_per_s if bound else None
    bound_shares = bound.utilisation if bound else (None,) * stages
    round_s = [event.number("seconds") for event in trace.of("outer_round")]
    return RunFigures(
        virtual_s=outcome.ended_at_s,
        train_s=train_s,
        nodes=nodes,
        ends=_sorted(Counter(map(_end, outcome.processes))),
        tokens=tokens,
        tokens_per_s=tokens_per_s,
        step=max((process.step for process in outcome.processes if process.stage == 0), default=0.0),
        stages=tuple(_of_stage(stage, held, bound_shares[stage]) for stage, held in enumerate(periods)),
        microbatches=MicrobatchFigures(
            results["done"],
            results["nonfinite"],
            _sorted(dropped),
            _sorted(trace.totals("reroute", "reason")),
            trace.totals("busy", "direction")["out"],
        ),
        rounds=_sorted(trace.totals("outer_round", "result")),
        round_s={f"p{at}": float(np.percentile(round_s, at)) for at in PERCENTILES} if round_s else {},
        traffic=_traffic(bytes_of, nodes),
        trace_hash=trace.trace_hash,
        bound_tokens_per_s=bound_tokens_per_s,
        share_of_bound=tokens_per_s / bound_tokens_per_s if bound_tokens_per_s else None,
    )


def _of_stage(stage: int, periods: Sequence[StagePeriod], bound: float | None) -> StageFigures:
    """The figures of the periods in which a process held this stage."""
    spans, trace = [period.training for period in periods], _events_of(periods)
    steps, results = trace.of("inner_step"), trace.totals("microbatch", "result")
    seconds = sum((end - begin for each in spans for begin, end in each), 0.0)
    busy_s = sum(event.number("busy_s") for event in steps)
    idle_s: dict[str, float] = defaultdict(float)
    for event in trace.of("idle"):
        idle_s[str(event.get("cause"))] += event.number("seconds")
    idle_s = dict(sorted(idle_s.items())) | {"other": max(0.0, seconds - busy_s - sum(idle_s.values()))}
    return StageFigures(
        stage=stage,
        lives=sum(map(bool, spans)),
        inner_steps=len(steps),
        microbatches=results["done"] + results["nonfinite"],
        training_s=seconds,
        utilisation=busy_s / seconds if seconds else None,
        idle={cause: waited_s / seconds for cause, waited_s in idle_s.items()} if seconds else {},
        bound_utilisation=bound,
    )


def _events_of(periods: Iterable[StagePeriod]) -> Trace:
    return Trace([event for period in periods for event in period.events])


def _traffic(bytes_of: BytesOf, nodes: int) -> TrafficFigures:
    by_kind = sorted(totals(bytes_of).items())
    return TrafficFigures(
        sent_per_node={kind: total.sent / nodes for kind, total in by_kind},
        received_per_node={kind: total.received / nodes for kind, total in by_kind},
        lost={kind: total.lost for kind, total in by_kind},
        in_flight={kind: total.in_flight for kind, total in by_kind},
    )


def flat(found: RunFigures) -> dict[str, float]:
    """The figures by which runs are compared, as a flat mapping, without those that the run does not have."""
    values = {"virtual_s": found.virtual_s, "train_s": found.train_s, "tokens_per_s": found.tokens_per_s}
    if found.bound_tokens_per_s is not None and found.share_of_bound is not None:
        values |= {"bound_tokens_per_s": found.bound_tokens_per_s, "share_of_bound": found.share_of_bound}
    values |= {"microbatches": found.microbatches.done, "dropped": sum(found.microbatches.dropped.values())}
    values |= {"rerouted": sum(found.microbatches.rerouted.values()), "busy": found.microbatches.busy}
    for one in found.stages:
        if one.utilisation is not None:
            values[f"utilisation.{one.stage}"] = one.utilisation
        values |= {f"idle.{one.stage}.{cause}": share for cause, share in one.idle.items()}
    values |= {f"rounds.{result}": found.rounds.get(result, 0) for result in ROUND_RESULTS}
    values |= {f"round_s.{name}": seconds for name, seconds in found.round_s.items()}
    return values | {f"sent_per_node.{kind}": count for kind, count in found.traffic.sent_per_node.items()}


def _end(process: SimProcess) -> str:
    """How a process ended."""
    if process.crashed:
        return "crashed"
    if process.error is not None:
        return "failed"
    return "left early" if process.told_to_leave else "finished"


def _sorted(counts: Mapping[str, int]) -> Counts:
    return dict(sorted(counts.items()))
