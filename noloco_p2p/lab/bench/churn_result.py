"""What a disturbed swarm did, worked out from what its nodes left: steps files, logs and summaries."""

from collections import Counter
from statistics import fmean
from typing import Any

from noloco_p2p.lab.bench import churn_stats
from noloco_p2p.lab.bench.churn_schedule import NodeKiller, StageKiller
from noloco_p2p.lab.bench.churn_watch import BEGIN_S, END_S, HANG_S, ChurnWatch
from noloco_p2p.lab.bench.node_fleet import Fleet

DEFINITIONS = {
    "ratio": "validation loss of the disturbed runs over that of undisturbed ones when they had trained on as many "
    "tokens (linear between evaluations); mean over the seeds",
    "stall": "longest time without an inner step of any stage-0 replica that began between a disturbance and the next "
    "one; of a time that had begun before only the part after the disturbance",
    "back_s": "from the start of a killed node's new process to its first inner step",
    "duplicates": "ids that a replica counted although its weights contained them",
    "hangs": f"nodes without an inner step for {HANG_S:g} s while every stage was served, without a first one "
    f"{BEGIN_S:g} s after their start, or still running {END_S:g} s after the last step",
    "too_late": "nodes that were killed so shortly before the end that the others had left when they were back",
    "cold_restart": "from the start of the first node, after all were killed at once, to the first inner step of "
    "stage 0",
}


def result(fleet: Fleet, watch: ChurnWatch, killer: NodeKiller | StageKiller | None, began: float) -> dict[str, Any]:
    """The figures of one run."""
    lines = fleet.first_stage_lines()
    trained_at = [line.at for line in lines if line.at >= began]
    until = max(trained_at, default=began)
    done = [] if killer is None else [one for one in killer.done if one.at < until]
    stalls = churn_stats.stalls(trained_at, [one.at for one in done], until)
    logged = list(fleet.logged("resumed"))
    first_stage = [node for node in fleet.nodes.values() if node.stage == 0]
    losses = [(node.child.summary or {}).get("validation_loss") for node in first_stage]
    known = [loss for loss in losses if loss is not None]
    figures = {
        "seconds": until - began,
        "kills": sum(len(one.nodes) for one in done if one.kind == "kill"),
        "stops": sum(one.kind == "stop" for one in done),
        "stall_after_kill_s": [s for s, one in zip(stalls, done, strict=True) if one.kind == "kill"],
        "stall_after_stop_s": [s for s, one in zip(stalls, done, strict=True) if one.kind == "stop"],
        "back_s": fleet.back_s[len(fleet.nodes) :],
        "microbatches_done": len({one for line in lines for one in line.ids}),
        "rerouted": churn_stats.total(node.counts["rerouted"] for node in fleet.nodes.values()),
        "dropped": churn_stats.total(node.counts["dropped"] for node in fleet.nodes.values()),
        "duplicates": sum(_duplicates(fleet, name) for name in fleet.nodes),
        "hangs": watch.hangs,
        "crashes": watch.crashes,
        "too_late": watch.too_late,
        "resumed_from": dict(Counter(str(event["source"]) for event in logged)),
        "tokens": sum(line.tokens for line in lines),
        "validation_loss": fmean(known) if known else None,
        "curve": _curve(fleet),
    }
    if isinstance(killer, StageKiller):
        figures["rounds_lost"] = [rounds_lost(fleet, stage, at) for stage, at in killer.deaths]
    return figures


def _duplicates(fleet: Fleet, name: str) -> int:
    sources = [churn_stats.WeightsSource(0.0, "start")]
    sources += [churn_stats.WeightsSource(e["time"], str(e["source"])) for e in fleet.logged("resumed", [name])]
    return sum(
        churn_stats.duplicates([line for line in fleet.lines if line.peer == peer], sources)
        for peer in fleet.peer_ids(name)
    )


def _curve(fleet: Fleet) -> list[tuple[float, float]]:
    """(tokens trained by all of stage 0 until then, validation loss) at every evaluation of a stage-0 replica."""
    lines = fleet.first_stage_lines()
    return sorted(
        (float(sum(line.tokens for line in lines if line.at <= event["time"])), event["loss"])
        for event in fleet.logged("evaluation", fleet.of_stage(0))
    )


def rounds_lost(fleet: Fleet, stage: int, died_at: float) -> dict[str, Any]:
    """The stage's newest outer round before its last replica died, and the one from which it resumed."""
    names = fleet.of_stage(stage)
    before = max((one["round"] for one in fleet.logged("outer_round", names) if one["time"] <= died_at), default=0)
    later = [one for one in fleet.logged("resumed", names) if one["time"] > died_at]
    if not later:
        return {"stage": stage, "before": before, "after": None, "source": None, "lost": None}
    first = min(later, key=lambda one: float(one["time"]))
    lost = max(0, before - first["round"]) if first["source"] != "fresh" else before
    return {"stage": stage, "before": before, "after": first["round"], "source": first["source"], "lost": lost}


def loss_ratio(churned: dict[str, Any], calm: dict[str, Any]) -> dict[str, float | None]:
    """Validation loss over that of the undisturbed run: at equal tokens, and where both ended (equal steps)."""
    mine, theirs = churned["validation_loss"], calm["validation_loss"]
    curve = [*calm["curve"], *([] if theirs is None else [(float(calm["tokens"]), theirs)])]
    equal = churn_stats.at_tokens(curve, churned["tokens"])
    return {
        "equal_tokens": None if mine is None or not equal else mine / equal,
        "equal_steps": None if mine is None or not theirs else mine / theirs,
    }
