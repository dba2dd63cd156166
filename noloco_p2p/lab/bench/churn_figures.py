"""What killed and stopped nodes cost, computed from steps files, journals and summaries.

Points in time are Unix seconds. A steps file has a line for each inner step of one replica (ARCHITECTURE.md, "Files").
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from noloco_p2p.lab.bench.churn_schedule import Disturbance
from noloco_p2p.lab.bench.churn_watch import BEGIN_S, END_S, HANG_S, ChurnWatch
from noloco_p2p.lab.bench.node_fleet import Fleet, FleetNode, InnerStepLine
from noloco_p2p.observe.report.recorded_run import read_runs

DEFINITIONS = {
    "ratio": "validation loss of the disturbed runs over that of undisturbed ones after as many tokens (interpolated "
    "linearly between evaluations); mean over the seeds",
    "stall": "longest time without an inner step of any stage-0 replica that began between a disturbance and the next "
    "one; if it began before the disturbance, only the part after it",
    "back_s": "from the start of a killed node's new process to its first inner step",
    "duplicates": "ids that a replica counted although its weights already contained them",
    "hangs": f"nodes without an inner step for {HANG_S:g} s while every stage was served, without a first one "
    f"{BEGIN_S:g} s after their start, or still running {END_S:g} s after the last step",
    "too_late": "nodes killed so shortly before the end that the others had left by the time they were back",
    "cold_restart": "from the start of the first node, after all were killed at once, to the first inner step of "
    "stage 0",
}

Curve = list[tuple[float, float]]
"""(tokens trained, validation loss)."""


class WeightsSource(NamedTuple):
    """Where a replica's weights came from, from `began_at` on: `shard`, `peer`, …"""

    began_at: float
    source: str


def result(fleet: Fleet, watch: ChurnWatch, disturbances: Sequence[Disturbance], began: float) -> dict[str, Any]:
    """The figures of one run, and its `curve`."""
    lines = fleet.first_stage_lines()
    trained_at = [line.at for line in lines if line.at >= began]
    until = max(trained_at, default=began)
    done = [one for one in disturbances if one.at < until]
    costs = list(zip(done, stalls(trained_at, [one.at for one in done], until), strict=True))
    (counted,) = read_runs([fleet.run_dir]).values()
    return {
        "seconds": until - began,
        "kills": sum(len(one.nodes) for one in done if one.kind == "kill"),
        "stops": sum(one.kind == "stop" for one in done),
        "stall_after_kill_s": [stall_s for one, stall_s in costs if one.kind == "kill"],
        "stall_after_stop_s": [stall_s for one, stall_s in costs if one.kind == "stop"],
        "back_s": fleet.back_s[len(fleet.nodes) :],
        "microbatches_done": len({one for line in lines for one in line.ids}),
        "rerouted": {reason: int(count) for reason, count in counted.total("rerouted").items()},
        "dropped": {reason: int(count) for reason, count in counted.total("dropped").items()},
        "duplicates": sum(_duplicates(fleet, node) for node in fleet.nodes.values()),
        "hangs": watch.hangs,
        "crashes": watch.crashes,
        "too_late": watch.too_late,
        "resumed_from": dict(Counter(event.text("source") for event in fleet.events("resumed"))),
        "tokens": sum(line.tokens for line in lines),
        "validation_loss": counted.validation_loss,
        "curve": _curve(fleet, lines),
    }


def _duplicates(fleet: Fleet, node: FleetNode) -> int:
    resumed = fleet.events("resumed", [node])
    sources = [WeightsSource(0.0, "start"), *(WeightsSource(event.at, event.text("source")) for event in resumed)]
    peers = fleet.peer_ids([node])
    return sum(duplicates([line for line in fleet.lines if line.peer == peer], sources) for peer in peers)


def _curve(fleet: Fleet, lines: Sequence[InnerStepLine]) -> Curve:
    """(tokens trained by all of stage 0 so far, validation loss) at every evaluation of a stage-0 replica."""
    return sorted(
        (float(sum(line.tokens for line in lines if line.at <= event.at)), loss)
        for event in fleet.events("evaluation", fleet.of_stage(0))
        if (loss := event.number("loss")) is not None
    )


def rounds_lost(fleet: Fleet, stage: int, died_at: float) -> dict[str, Any]:
    """The stage's newest outer round before its last replica died, and the round that it resumed from."""
    nodes = fleet.of_stage(stage)
    rounds = [int(event.number("round") or 0) for event in fleet.events("outer_round", nodes) if event.at <= died_at]
    before = max(rounds, default=0)
    later = [event for event in fleet.events("resumed", nodes) if event.at > died_at]
    if not later:
        return {"stage": stage, "before": before, "after": None, "source": None, "lost": None}
    first = min(later, key=lambda event: event.at)
    after, source = int(first.number("round") or 0), first.text("source")
    lost = max(0, before - after) if source != "fresh" else before
    return {"stage": stage, "before": before, "after": after, "source": source, "lost": lost}


def loss_ratio(churned: dict[str, Any], calm: dict[str, Any]) -> dict[str, float | None]:
    """Validation loss over that of the undisturbed run: at equal tokens, and at the end (equal steps)."""
    mine, theirs = churned["validation_loss"], calm["validation_loss"]
    curve = [*calm["curve"], *([] if theirs is None else [(float(calm["tokens"]), theirs)])]
    equal = at_tokens(curve, churned["tokens"])
    return {
        "equal_tokens": None if mine is None or not equal else mine / equal,
        "equal_steps": None if mine is None or not theirs else mine / theirs,
    }


# --- pure -------------------------------------------------------------------------------------------------------------


def duplicates(lines: Iterable[InnerStepLine], sources: Sequence[WeightsSource]) -> int:
    """How often one replica counted an id that its weights already contained.

    `lines` are those of one replica, in the order in which they were written. Weights from the replica's own checkpoint
    contain the steps before that checkpoint; weights from another replica contain none of this replica's steps.
    """
    contained: list[InnerStepLine] = []
    counted: Counter[str] = Counter()
    current, twice = -1, 0
    for line in lines:
        latest = sum(one.began_at <= line.at for one in sources) - 1
        if latest != current:
            current = latest
            own = sources[latest].source == "shard"
            contained = [old for old in contained if own and old.inner_step < line.inner_step]
            counted = Counter(one for old in contained for one in old.ids)
        contained.append(line)
        for one in line.ids:
            twice += counted[one] > 0
            counted[one] += 1
    return twice


def stalls(trained_at: Iterable[float], disturbed_at: Sequence[float], until: float) -> list[float]:
    """For each disturbance: the longest time without a trained token that began before the next disturbance, seconds.

    If that time began before the disturbance, only the part after it counts.
    """
    gaps = list(pairwise([*sorted(trained_at), until]))
    found = []
    for began, following in zip(disturbed_at, [*disturbed_at[1:], until], strict=False):
        longest = (end - max(start, began) for start, end in gaps if end > began and start < following)
        found.append(max(longest, default=0.0))
    return found


def at_tokens(curve: Curve, tokens: float) -> float | None:
    """Loss after a number of tokens, interpolated linearly, constant beyond the ends; None without points."""
    points = sorted(curve)
    return float(np.interp(tokens, [x for x, _ in points], [y for _, y in points])) if points else None
