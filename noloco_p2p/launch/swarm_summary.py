"""`summary.json` of a swarm, from the nodes' own summaries, and its few lines on the screen."""

from collections.abc import Iterable, Sequence
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

from noloco_p2p.config import RunManifest
from noloco_p2p.launch.node_process import NodeProcess

OF_A_NODE = (
    "inner_steps",
    "outer_rounds",
    "microbatches",
    "rerouted",
    "pulled",
    "alone",
    "bytes_sent",
    "bytes_received",
)
"""Figures of a node that are copied as it wrote them."""
OVERFLOW_NATS = 700.0


def summarise(
    nodes: Sequence[NodeProcess], manifest: RunManifest, resumed_from_step: int | None, wall_s: float
) -> dict[str, Any]:
    """The swarm's summary. It counts what was done since the nodes were started, not what a resumed run did before.

    Losses are means over stage-0 replicas, `replica_std` means over the replicas of each stage; `inner_steps` is the
    mean over stage 0, rounded; `outer_rounds` is the largest number that any replica did. What no node wrote is null;
    one replica has no std.
    """
    found = [node.summary or {} for node in nodes]
    first = [s for node, s in zip(nodes, found, strict=True) if node.stage == 0]
    validation_loss = _mean(s.get("validation_loss") for s in first)
    inner_steps = _mean(s.get("inner_steps") for s in first)
    tokens = sum(s.get("tokens") or 0 for s in first)
    seconds = _training_s(first)
    run_ids = [node.endpoints.run_id for node in nodes if node.endpoints is not None]
    finished = all(s.get("state") == "finished" for s in found)
    return {
        "run_id": run_ids[0] if run_ids else None,
        "completed": finished and all(node.exit_code == 0 for node in nodes),
        "stages": manifest.stages,
        "replicas": manifest.start_replicas,
        "steps": manifest.steps,
        "resumed_from_step": resumed_from_step,
        "inner_steps": None if inner_steps is None else round(inner_steps),
        "outer_rounds": max((s.get("outer_rounds") or 0 for s in found), default=0),
        "first_loss": _mean(s.get("first_loss") for s in first),
        "final_loss": _mean(s.get("final_loss") for s in first),
        "validation_loss": validation_loss,
        "validation_perplexity": perplexity(validation_loss),
        "replica_std": [
            _mean(s.get("replica_std") for node, s in zip(nodes, found, strict=True) if node.stage == stage)
            for stage in range(manifest.stages)
        ],
        "tokens": tokens,
        "tokens_per_s": tokens / seconds if seconds else None,
        "wall_s": wall_s,
        "nodes": [_node(node, s) for node, s in zip(nodes, found, strict=True)],
    }


def perplexity(loss: float | None) -> float | None:
    """exp of a loss in nats per token; None without one, or where it would not be a number of JSON."""
    return None if loss is None or not loss < OVERFLOW_NATS else exp(loss)


def lines(summary: dict[str, Any], path: Path) -> list[str]:
    """The summary for a person."""
    loss, rate = summary["validation_loss"], summary["tokens_per_s"]
    found = [
        f"{'completed' if summary['completed'] else 'not completed'}: {summary['inner_steps'] or 0} inner steps, "
        f"{summary['outer_rounds']} outer rounds, {summary['tokens']:,} tokens in {summary['wall_s']:.0f} s"
    ]
    if loss is not None:
        found.append(f"validation loss {loss:.4f} nats per token, perplexity {summary['validation_perplexity']:.3f}")
    if rate is not None:
        found.append(f"{rate:,.0f} tokens/s while training")
    return [*found, f"summary: {path}"]


def _mean(values: Iterable[Any]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return fmean(known) if known else None


def _training_s(first: Sequence[dict[str, Any]]) -> float | None:
    """Seconds from the first inner step's start to the last one's end, less the mean time spent in evaluations."""
    began = [s["first_step_at"] for s in first if s.get("first_step_at") is not None]
    ended = [s["last_step_at"] for s in first if s.get("last_step_at") is not None]
    if not began or not ended:
        return None
    return float(max(ended) - min(began) - (_mean(s.get("evaluation_s") for s in first) or 0.0))


def _node(node: NodeProcess, found: dict[str, Any]) -> dict[str, Any]:
    peer_id = found.get("peer_id") or (node.endpoints.peer_id if node.endpoints is not None else None)
    figures = {name: found.get(name) for name in OF_A_NODE}
    return {"peer_id": peer_id, "stage": node.stage, **figures, "exit_code": node.exit_code}
