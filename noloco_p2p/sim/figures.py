"""What a simulated run came to, in figures: a pure function of its outcome and of the bytes that the network carried.

Seconds are virtual ones. Tokens and bytes are those of the run that is simulated, not of the tiny tensors in it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from noloco_p2p.core.messages import PeerId
from noloco_p2p.sim.outcome import NodeOutcome, Outcome
from noloco_p2p.sim.parts import Part, parts, training
from noloco_p2p.sim.telemetry import Happening
from noloco_p2p.sim.toy_stage import ModelStage
from noloco_p2p.sim.traffic import Account

Shares = dict[str, float]
"""By name, parts of a whole."""
Counts = dict[str, int]
"""By name."""

PERCENTILES = (50, 95)
ROUND_RESULTS = ("partner", "stale", "other", "alone")
"""Of an outer round: from the partner at the same round, at another round, from another replica, from nobody."""


@dataclass(frozen=True, slots=True)
class StageFigures:
    """One stage. Shares are of the seconds that its nodes spent training, all nodes together."""

    stage: int
    lives: int
    """Processes that trained there."""
    inner_steps: int
    microbatches: int
    """Microbatches whose gradients its nodes computed."""
    training_s: float
    """Node-seconds."""
    utilisation: float | None
    """Share in which the devices worked; none: nobody trained."""
    idle: Shares
    """Share that was waited, by cause: `gradients` (stage 0), `microbatches` (later stages), `partner`; `other` is what
    is left: waits that end in no inner step, such as the last one, and an outer round but for its partner."""
    replica_std: float | None
    """Mean of what its nodes last measured between themselves and their partner; none: the weights are no real ones."""


@dataclass(frozen=True, slots=True)
class MicrobatchFigures:
    """What became of the microbatches that stage 0 began."""

    done: int
    nonfinite: int
    dropped: Counts
    """By reason."""
    rerouted: Counts
    """Calls that went to another replica afterwards, by reason; of all stages."""
    busy: int
    """Calls that were answered with Busy, and tried again; of all stages."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of tensors by kind: activation, gradient, snapshot, state."""

    sent_per_node: Shares
    """Mean over all nodes that there were."""
    received_per_node: Shares
    most_sent: int
    """Of all kinds, by the node that sent most."""
    lost: Counts
    in_flight: Counts
    """Still on their way when the run ended."""


@dataclass(frozen=True, slots=True)
class Figures:
    """All of it."""

    virtual_s: float
    """From the first start to the end of the last node."""
    train_s: float
    """From the first moment of training to the last inner step of stage 0."""
    nodes: int
    """Different peers."""
    ends: Counts
    """Processes by how they ended: `finished`, `left early`, `crashed`, `failed`."""
    tokens: int
    tokens_per_s: float
    """Over `train_s`."""
    step: float
    """Where the clock of the furthest node of stage 0 stood at the end, steps."""
    stages: tuple[StageFigures, ...]
    microbatches: MicrobatchFigures
    rounds: Counts
    """Outer rounds by result, all nodes together."""
    round_s: dict[str, float]
    """Seconds of an outer round: `p50` and `p95`; empty without rounds."""
    traffic: Traffic
    trace_hash: str


Ledger = Mapping[PeerId, Mapping[str, Account]]
"""By node and kind."""


@dataclass(slots=True)
class _Sums:
    """Of one stage, while they are gathered."""

    lives: int = 0
    training_s: float = 0.0
    busy_s: float = 0.0
    inner_steps: int = 0
    done: int = 0
    nonfinite: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    idle_s: dict[str, float] = field(default_factory=dict)
    stds: list[float] = field(default_factory=list)
    stepped_at: float = 0.0
    trained_from: float = math.inf


def figures(outcome: Outcome, ledger: Ledger, tokens_per_microbatch: int, stages: int) -> Figures:
    """Everything that is told of a run. `tokens_per_microbatch` are those of the run that is simulated."""
    sums = [_Sums() for _ in range(stages)]
    rerouted: Counter[str] = Counter()
    rounds: Counter[str] = Counter()
    round_s: list[float] = []
    busy = 0
    for life in outcome.lives:
        for part in parts(life, outcome.ended_at_s):
            _gather(part, sums[part.stage])
        for one in life.trace.happenings:
            if one.kind == "reroute":
                rerouted[str(one.get("reason"))] += 1
            elif one.kind == "outer_round":
                rounds[str(one.get("result"))] += 1
                round_s.append(_number(one, "seconds"))
            elif one.kind == "busy" and one.get("direction") == "out":
                busy += 1
    first = sums[0]
    train_s = max(0.0, first.stepped_at - first.trained_from)
    tokens = first.done * tokens_per_microbatch
    real = not any(isinstance(model, ModelStage) for life in outcome.lives for model in life.models)
    return Figures(
        virtual_s=outcome.ended_at_s,
        train_s=train_s,
        nodes=len(outcome.nodes),
        ends=_sorted(Counter(_end(life) for life in outcome.lives)),
        tokens=tokens,
        tokens_per_s=tokens / train_s if train_s else 0.0,
        step=max((life.step for life in outcome.lives if life.stage == 0), default=0.0),
        stages=tuple(_of_stage(stage, one, real) for stage, one in enumerate(sums)),
        microbatches=MicrobatchFigures(first.done, first.nonfinite, _sorted(first.dropped), _sorted(rerouted), busy),
        rounds=_sorted(rounds),
        round_s={f"p{percent}": quantile(round_s, percent / 100) for percent in PERCENTILES} if round_s else {},
        traffic=_traffic(ledger, len(outcome.nodes)),
        trace_hash=outcome.trace.trace_hash,
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie, straight between neighbours. Raises ValueError when there are none."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _gather(part: Part, sums: _Sums) -> None:
    """Add what a process told to the sums of its stage."""
    spans = training(part)
    if spans:
        sums.lives += 1
        sums.training_s += sum(end - begin for begin, end in spans)
        sums.trained_from = min(sums.trained_from, spans[0][0])
    std = None
    for one in part.told:
        match one.kind:
            case "inner_step":
                sums.inner_steps += 1
                sums.busy_s += _number(one, "busy_s")
                sums.stepped_at = max(sums.stepped_at, one.at_s)
            case "idle":
                cause = str(one.get("cause"))
                sums.idle_s[cause] = sums.idle_s.get(cause, 0.0) + _number(one, "seconds")
            case "microbatch":
                result = one.get("result")
                sums.done += result == "done"
                sums.nonfinite += result == "nonfinite"
                if result == "dropped":
                    sums.dropped[str(one.get("reason"))] += 1
            case "replica_std":
                std = _number(one, "value")
    if std is not None:
        sums.stds.append(std)


def _of_stage(stage: int, sums: _Sums, real: bool) -> StageFigures:
    seconds = sums.training_s
    idle_s = dict(sorted(sums.idle_s.items()))
    idle_s["other"] = max(0.0, seconds - sums.busy_s - sum(idle_s.values()))
    return StageFigures(
        stage=stage,
        lives=sums.lives,
        inner_steps=sums.inner_steps,
        microbatches=sums.done + sums.nonfinite,
        training_s=seconds,
        utilisation=sums.busy_s / seconds if seconds else None,
        idle={cause: waited_s / seconds for cause, waited_s in idle_s.items()} if seconds else {},
        replica_std=sum(sums.stds) / len(sums.stds) if real and sums.stds else None,
    )


def _traffic(ledger: Ledger, nodes: int) -> Traffic:
    sums: dict[str, Account] = {}
    for of_node in ledger.values():
        for kind, account in of_node.items():
            sums.setdefault(kind, Account()).add(account)
    totals = sorted(sums.items())
    return Traffic(
        sent_per_node={kind: total.sent / nodes for kind, total in totals},
        received_per_node={kind: total.received / nodes for kind, total in totals},
        most_sent=max((sum(one.sent for one in of_node.values()) for of_node in ledger.values()), default=0),
        lost={kind: total.lost for kind, total in totals},
        in_flight={kind: total.in_flight for kind, total in totals},
    )


def flat(found: Figures) -> dict[str, float]:
    """The figures that several runs are compared by, under names of one level; what a run has none of is left out."""
    told = {"virtual_s": found.virtual_s, "train_s": found.train_s, "tokens_per_s": found.tokens_per_s}
    told |= {"microbatches": found.microbatches.done, "dropped": sum(found.microbatches.dropped.values())}
    told |= {"rerouted": sum(found.microbatches.rerouted.values()), "busy": found.microbatches.busy}
    for one in found.stages:
        if one.utilisation is not None:
            told[f"utilisation.{one.stage}"] = one.utilisation
        told |= {f"idle.{one.stage}.{cause}": share for cause, share in one.idle.items()}
        if one.replica_std is not None:
            told[f"replica_std.{one.stage}"] = one.replica_std
    told |= {f"rounds.{result}": found.rounds.get(result, 0) for result in ROUND_RESULTS}
    told |= {f"round_s.{name}": seconds for name, seconds in found.round_s.items()}
    return told | {f"sent_per_node.{kind}": count for kind, count in found.traffic.sent_per_node.items()}


def _end(life: NodeOutcome) -> str:
    """How a process ended, in words."""
    if life.crashed:
        return "crashed"
    if life.error is not None:
        return "failed"
    early = any(one.get("reason") == "told to leave" for one in life.trace.of("state"))
    return "left early" if early else "finished"


def _number(one: Happening, name: str) -> float:
    value = one.get(name)
    assert isinstance(value, int | float), f"{one.kind} without {name}"
    return float(value)


def _sorted(counts: Mapping[str, int]) -> Counts:
    return dict(sorted(counts.items()))
