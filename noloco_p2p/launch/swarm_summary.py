"""A swarm's summary for its owner: the content of `summary.json`, and the same as lines of text."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import exp
from statistics import fmean
from typing import Any

from noloco_p2p.config import RunManifest
from noloco_p2p.humanize import figure, plural
from noloco_p2p.launch.node_process import NodeProcess

COPIED = ("inner_steps", "outer_rounds", "microbatches", "rerouted", "pulled", "alone", "bytes_sent", "bytes_received")
"""Figures copied from the summary of each node."""
OVERFLOW_NATS = 700.0
"""Losses from here on have no perplexity: exp would overflow."""


def summarise(
    nodes: Sequence[NodeProcess], manifest: RunManifest, resumed_from_step: int | None, wall_s: float
) -> dict[str, Any]:
    """The swarm's summary. It counts only what was done since the nodes were started, even if the run was resumed.

    `resumed_from_step`: from where it was to continue; the nodes may have begun elsewhere, and say so.

    Losses are means over the stage-0 replicas, that of validation as in `newest_validation`; `replica_std` has a mean
    for each stage; `inner_steps` is the mean over stage 0, rounded; `outer_rounds` is the largest number of any
    replica. Figures that no node wrote are null; a single replica has no std.
    """
    found = [(node, node.summary or {}) for node in nodes]
    if resumed_from_step is not None:
        began = [s["resumed"]["step"] for _, s in found if s.get("resumed")]
        resumed_from_step = int(min(began, default=resumed_from_step))
    stages = [[s for node, s in found if node.stage == stage] for stage in range(manifest.stages)]
    first = stages[0]
    inner_steps = _mean(first, "inner_steps")
    measured = [(s["validation_step"], s["validation_loss"]) for s in first if s.get("validation_loss") is not None]
    validation_loss = newest_validation(measured, manifest.steps, manifest.evaluation.every_steps)
    tokens = sum(s.get("tokens") or 0 for s in first)
    seconds = _training_s(first)
    return {
        "run_id": next((node.endpoints.run_id for node in nodes if node.endpoints is not None), None),
        "completed": all(s.get("state") == "finished" and node.exit_code == 0 for node, s in found),
        "stages": manifest.stages,
        "replicas": manifest.start_replicas,
        "steps": manifest.steps,
        "resumed_from_step": resumed_from_step,
        "inner_steps": None if inner_steps is None else round(inner_steps),
        "outer_rounds": max((s.get("outer_rounds") or 0 for _, s in found), default=0),
        "first_loss": _mean(first, "first_loss"),
        "final_loss": _mean(first, "final_loss"),
        "validation_loss": validation_loss,
        "validation_perplexity": perplexity(validation_loss),
        "replica_std": [_mean(mine, "replica_std") for mine in stages],
        "tokens": tokens,
        "tokens_per_s": tokens / seconds if seconds > 0 else None,
        "wall_s": wall_s,
        "nodes": [_of_node(node, s) for node, s in found],
    }


def newest_validation(evaluations: Collection[tuple[float, float]], steps: float, every: float | None) -> float | None:
    """The mean loss of the last evaluations of some replicas, given as (step, loss); None if there are none.

    Replicas evaluate at different steps, so evaluations less than `every` steps before the newest count, too; those
    before the end of the run do not count beside one at its end (`steps`).
    """
    newest = max((step for step, _ in evaluations), default=0.0)
    oldest = steps if newest >= steps else newest - (every or 1) + 1
    known = [loss for step, loss in evaluations if step >= oldest]
    return fmean(known) if known else None


def perplexity(loss: float | None) -> float | None:
    """exp of a loss in nats per token; None if there is no loss, or if the result would be too large for JSON."""
    return None if loss is None or not loss < OVERFLOW_NATS else exp(loss)


def covered_s(spans: Iterable[tuple[float, float]], end: float) -> float:
    """Seconds up to `end` in at least one of these spans of time, which are given by their beginning and end."""
    seconds = until = 0.0
    for began_at, ended_at in sorted(spans):
        seconds += max(0.0, min(ended_at, end) - max(began_at, until))
        until = max(until, ended_at)
    return seconds


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """The summary for people."""
    loss, perplexed, rate = (summary[name] for name in ("validation_loss", "validation_perplexity", "tokens_per_s"))
    found = [
        f"{'completed' if summary['completed'] else 'not completed'} after {summary['wall_s']:.0f} s: "
        f"{plural(summary['inner_steps'] or 0, 'inner step')}, {plural(summary['outer_rounds'], 'outer round')}"
    ]
    if loss is not None:
        found.append(f"validation loss {loss:.4f} nats per token, perplexity {figure(perplexed, 4)}")
    speed = "" if rate is None else f", {rate:,.0f} tokens/s while training"
    found.append(f"{summary['tokens']:,} tokens{speed}")
    if killed := sum(node["inner_steps"] is None and (node["exit_code"] or 0) < 0 for node in summary["nodes"]):
        found.append(f"without {plural(killed, 'killed node')}: see noloco report")
    return found


def _mean(summaries: Iterable[Mapping[str, Any]], figure: str) -> float | None:
    known = [float(s[figure]) for s in summaries if s.get(figure) is not None]
    return fmean(known) if known else None


def _training_s(first: Sequence[Mapping[str, Any]]) -> float:
    """Seconds in which any node trained, up to the last inner step, less the mean time spent on evaluation."""
    spans = [(began_at, until) for s in first for began_at, until in s.get("training", ())]
    ended_at = max((s.get("last_step_at") or 0.0 for s in first), default=0.0)
    return covered_s(spans, ended_at) - (_mean(first, "evaluation_s") or 0.0)


def _of_node(node: NodeProcess, found: Mapping[str, Any]) -> dict[str, Any]:
    peer_id = found.get("peer_id") or (node.endpoints.peer_id if node.endpoints is not None else None)
    return {"peer_id": peer_id, "stage": node.stage, **{n: found.get(n) for n in COPIED}, "exit_code": node.exit_code}
