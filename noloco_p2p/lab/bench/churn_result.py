"""What a disturbed swarm did, worked out from what its nodes left: steps files, logs and summaries."""

from collections import Counter
from statistics import fmean
from typing import Any

from noloco_p2p.lab.bench import churn_stats
from noloco_p2p.lab.bench.churn_schedule import Disturber, StageKiller
from noloco_p2p.lab.bench.churn_watch import BEGIN_S, END_S, HANG_S, Watch
from noloco_p2p.lab.bench.node_fleet import Fleet

DEFINITIONS = {
    "ratio": "validation loss of the disturbed runs over that of undisturbed ones when they had trained on as many "
    "tokens (linear between evaluations); mean over the seeds",
    "stall": "longest time without an inner step of any stage-0 replica that began between a disturbance and the next "
    "one; of a time that had begun before only the part after the disturbance",
    "back_s": "from the start of a killed node's new process to its first inner step",
    "duplicates": "ids that a replica counted although its weights contained them",
    "hangs": f"nodes without an inner step for {HANG_S:g} s while every stage was served, without a first one "
    f"{BEGIN_S:g} s after their start, or still there {END_S:g} s after the last step",
    "too_late": "nodes that were killed so shortly before the end that the others had left when they were back",
    "cold_restart": "from the start of the first node, after all were killed at once, to the first inner step of "
    "stage 0",
}


def outcome(fleet: Fleet, watch: Watch, disturber: Disturber | StageKiller | None, began: float) -> dict[str, Any]:
    """What a run did, from what its nodes left."""
    lines = fleet.first_stage_lines()
    trained_at = [line.at for line in lines if line.at >= began]
    until = max(trained_at, default=began)
    done = [] if disturber is None else [one for one in disturber.done if one.at < until]
    stalls = churn_stats.stalls(trained_at, [one.at for one in done], until)
    counts: dict[str, Counter[str]] = {"rerouted": Counter(), "dropped": Counter()}
    for node in fleet.nodes.values():
        for figure, counter in counts.items():
            counter.update(node.counts[figure])
    told = {
        "seconds": until - began,
        "kills": sum(len(one.nodes) for one in done if one.kind == "kill"),
        "stops": sum(one.kind == "stop" for one in done),
        "stall_after_kill_s": [s for s, one in zip(stalls, done, strict=True) if one.kind == "kill"],
        "stall_after_stop_s": [s for s, one in zip(stalls, done, strict=True) if one.kind == "stop"],
        "back_s": fleet.back_s[len(fleet.nodes) :],
        "microbatches_done": len({one for line in lines for one in line.ids}),
        "rerouted": dict(counts["rerouted"]),
        "dropped": dict(counts["dropped"]),
        "duplicates": sum(_duplicates(fleet, name) for name in fleet.nodes),
        "hangs": watch.hangs,
        "crashes": watch.crashes,
        "too_late": watch.too_late,
        "resumed_from": dict(_sources(fleet)),
        "tokens": sum(line.tokens for line in lines),
        "validation_loss": _final_loss(fleet),
        "curve": _curve(fleet),
    }
    if isinstance(disturber, StageKiller):
        told["rounds_lost"] = [rounds_lost(fleet, stage, at) for stage, at in disturber.deaths]
    return told


def _duplicates(fleet: Fleet, name: str) -> int:
    log = fleet.logged(name)
    lives = [churn_stats.Life(0.0, "start")]
    lives += [churn_stats.Life(one["time"], str(one["source"])) for one in log if one.get("event") == "resumed"]
    peers = fleet.told_peers(name)
    return sum(churn_stats.duplicates([line for line in fleet.lines if line.peer == peer], lives) for peer in peers)


def _sources(fleet: Fleet) -> Counter[str]:
    """Where the nodes that came back had their weights from."""
    logs = (event for name in fleet.nodes for event in fleet.logged(name))
    return Counter(str(event["source"]) for event in logs if event.get("event") == "resumed")


def _final_loss(fleet: Fleet) -> float | None:
    """Mean over the stage-0 replicas that were there at the end."""
    found = [node.child.summary or {} for node in fleet.nodes.values() if node.stage == 0]
    losses = [one["validation_loss"] for one in found if one.get("validation_loss") is not None]
    return fmean(losses) if losses else None


def _curve(fleet: Fleet) -> list[tuple[float, float]]:
    """(tokens trained by all of stage 0 until then, validation loss) at every evaluation of a stage-0 replica."""
    lines = sorted((line.at, line.tokens) for line in fleet.first_stage_lines())
    curve = []
    for node in fleet.nodes.values():
        for event in fleet.logged(node.name) if node.stage == 0 else ():
            if event.get("event") == "evaluation":
                curve.append((float(sum(tokens for at, tokens in lines if at <= event["time"])), event["loss"]))
    return sorted(curve)


def rounds_lost(fleet: Fleet, stage: int, died_at: float) -> dict[str, Any]:
    """The stage's newest outer round before its last replica died, and the one with which it was taken up again."""
    logs = [event for node in fleet.nodes.values() if node.stage == stage for event in fleet.logged(node.name)]
    had = [one["round"] for one in logs if one.get("event") == "outer_round" and one["time"] <= died_at]
    taken = min(
        (one for one in logs if one.get("event") == "resumed" and one["time"] > died_at),
        key=lambda one: float(one["time"]),
        default=None,
    )
    before = max(had, default=0)
    if taken is None:
        return {"stage": stage, "before": before, "after": None, "source": None, "lost": None}
    lost = max(0, before - taken["round"]) if taken["source"] != "fresh" else before
    return {"stage": stage, "before": before, "after": taken["round"], "source": taken["source"], "lost": lost}


def loss_ratio(churned: dict[str, Any], calm: dict[str, Any]) -> dict[str, float | None]:
    """Validation loss over that of the undisturbed run: at equal tokens, and where both ended (equal steps)."""
    mine, theirs = churned["validation_loss"], calm["validation_loss"]
    curve = [*calm["curve"], *([] if theirs is None else [(float(calm["tokens"]), theirs)])]
    equal = churn_stats.at_tokens(curve, churned["tokens"])
    return {
        "equal_tokens": None if mine is None or not equal else mine / equal,
        "equal_steps": None if mine is None or not theirs else mine / theirs,
    }
