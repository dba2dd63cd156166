"""The figures of simulated runs for a person: a few tables."""

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from noloco_p2p import humanize
from noloco_p2p.observe.terminal import plain_table
from noloco_p2p.sim.figures import RunFigures, StageFigures

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def of_run(found: RunFigures) -> "list[RenderableType]":
    """One run: what it came to, its stages, its bytes."""
    return [_summary(found), "", _stages(found.stages), "", _bytes(found)]


def of_seeds(runs: Sequence[Mapping[str, float]]) -> "list[RenderableType]":
    """Several runs that differ in their seed, as `figures.flat` has them: mean, standard deviation and extremes."""
    table = plain_table(("figure", "mean", "std", "least", "most"), left=("figure",))
    for name, spread in spreads(runs).items():
        table.add_row(name, *(humanize.compact(spread[key], 4) for key in ("mean", "std", "least", "most")))
    return [table]


def spreads(runs: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """By figure, over the runs that have it: `mean`, `std` (of a sample; 0 for one run), `least`, `most`, `runs`."""
    names = {name: None for run in runs for name in run}
    found: dict[str, dict[str, float]] = {}
    for name in names:
        values = [run[name] for run in runs if name in run]
        found[name] = {
            "mean": statistics.fmean(values),
            "std": statistics.stdev(values) if len(values) > 1 else 0.0,
            "least": min(values),
            "most": max(values),
            "runs": len(values),
        }
    return found


def _summary(found: RunFigures) -> "Table":
    table = plain_table(("", ""), left=("",))
    table.show_header = False
    table.columns[1].no_wrap = False
    micro, rounds = found.microbatches, found.round_s
    lines = {
        "virtual time": f"{humanize.duration(found.virtual_s)}, of which training {humanize.duration(found.train_s)}",
        "tokens/s": f"{found.tokens_per_s:,.0f} ({humanize.compact(found.tokens)} tokens in {found.step:g} steps)",
        "bound": _bound(found),
        "nodes": f"{found.nodes:,}; processes: {humanize.tally(found.ends)}",
        "microbatches": f"{micro.done:,} done; dropped: {humanize.tally(micro.dropped)}",
        "calls tried again": f"after a failure: {humanize.tally(micro.rerouted)}; after Busy: {micro.busy:,}",
        "outer rounds": humanize.tally(found.rounds),
        "outer round": ", ".join(f"{name} {humanize.duration(seconds)}" for name, seconds in rounds.items())
        or humanize.DASH,
    }
    if micro.nonfinite:
        lines["not finite"] = f"{micro.nonfinite:,} microbatches"
    for name, text in lines.items():
        table.add_row(name, text)
    return table


def _bound(found: RunFigures) -> str:
    """What links and devices allow, and how much of it was reached."""
    if found.bound_tokens_per_s is None:
        return humanize.DASH
    reached = humanize.percent(found.share_of_bound)
    return f"{found.bound_tokens_per_s:,.0f} tokens/s by links and devices; {reached} of it reached"


def causes(stages: Sequence[StageFigures]) -> list[str]:
    """For what some stage was idle, what is left over last."""
    return sorted({cause for one in stages for cause in one.idle}, key=lambda cause: (cause == "other", cause))


def _stages(stages: Sequence[StageFigures]) -> "Table":
    """Shares are of the time that a stage's nodes trained; `bound` is the share in use that links and devices allow."""
    waits = causes(stages)
    real = any(one.replica_std is not None for one in stages)
    columns = ["stage", "processes", "inner\nsteps", "micro-\nbatches", "in use", "bound"]
    columns += [f"idle:\n{cause}" for cause in waits]
    table = plain_table([*columns, "replica\nstd"] if real else columns, left=())
    for one in stages:
        cells = [str(one.stage), *(f"{count:,}" for count in (one.lives, one.inner_steps, one.microbatches))]
        cells += [humanize.percent(one.utilisation), humanize.percent(one.bound_utilisation)]
        cells += [humanize.percent(one.idle.get(cause)) for cause in waits]
        if real:
            cells.append(humanize.DASH if one.replica_std is None else f"{one.replica_std:.2e}")
        table.add_row(*cells)
    return table


def _bytes(found: RunFigures) -> "Table":
    table = plain_table(("bytes per node", "sent", "received", "lost in all"), left=("bytes per node",))
    traffic = found.traffic
    for kind in traffic.sent_per_node:
        values = traffic.sent_per_node[kind], traffic.received_per_node[kind], traffic.lost[kind]
        table.add_row(kind, *(humanize.size_text(value) for value in values))
    return table
