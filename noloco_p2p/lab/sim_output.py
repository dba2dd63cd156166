"""Shows the figures of simulated runs: tables, plots as SVG files, and the data of those plots."""

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table

from noloco_p2p import humanize
from noloco_p2p.io.durable_files import write_whole, writing
from noloco_p2p.launch.progress_line import Position
from noloco_p2p.observe.plotting.axes import Points
from noloco_p2p.observe.plotting.plots import KIND_COLOURS, Bars, Curve, Plot, save
from noloco_p2p.observe.plotting.svg import IDLE_COLOURS, Colour
from noloco_p2p.observe.plotting.time_bins import Increment, TimeBins
from noloco_p2p.observe.terminal import plain_table
from noloco_p2p.sim.figures import RunFigures, StageFigures, TrafficFigures
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.world import SimSwarm

TRACE_MARK = b" membership counts="
"""Occurs near the start of every trace."""
BINS = 60
"""Number of points of a curve over time."""


# --- progress ---------------------------------------------------------------------------------------------------------


class SwarmPosition:
    """The progress of a simulated swarm. It may be called from another thread."""

    def __init__(self) -> None:
        self.swarm: SimSwarm | None = None
        """None while it is being built."""
        self._began_at = time.monotonic()

    def __call__(self) -> Position:
        """The furthest node's step and the virtual time as text, and the share of the run's steps that is done."""
        if self.swarm is None:
            return "building the swarm", 0.0
        steps = self.swarm.plan.manifest.steps
        processes = list(self.swarm.processes)
        reached = max((process.step for process in processes), default=0.0)
        virtual_s = max((process.trace.events[-1].at_s for process in processes if process.trace.events), default=0.0)
        rate = virtual_s / max(time.monotonic() - self._began_at, 1e-3)
        virtual = f"virtual time {humanize.elapsed(virtual_s)} ({rate:.3g} × real)"
        return f"step {int(reached):,} of {steps:,}, {virtual}", reached / steps


# --- tables -----------------------------------------------------------------------------------------------------------


def of_run(found: RunFigures) -> list[RenderableType]:
    """The summary, stages and bytes of one run."""
    return [_summary(found), "", _stages(found.stages), "", _byte_table(found.traffic)]


def of_seeds(runs: Sequence[Mapping[str, float]]) -> list[RenderableType]:
    """Several runs that differ in their seed, as from `figures.flat`: mean, standard deviation and extremes."""
    columns = ("mean", "std", "least", "most")
    rows = [(name, *(humanize.compact(one[key], 4) for key in columns)) for name, one in spreads(runs).items()]
    return [plain_table(("figure", *columns), ("figure",), rows)]


def spreads(runs: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """By figure, over the runs that have it: `mean`, `std` (sample; 0 for one run), `least`, `most`, `runs`."""
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(name for run in runs for name in run):
        values = [run[name] for run in runs if name in run]
        std = statistics.stdev(values) if len(values) > 1 else 0.0
        extremes = {"least": min(values), "most": max(values)}
        found[name] = {"mean": statistics.fmean(values), "std": std, **extremes, "runs": len(values)}
    return found


def _summary(found: RunFigures) -> Table:
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
    table = plain_table(("", ""), ("",), lines.items())
    table.show_header = False
    table.columns[1].no_wrap = False
    return table


def _bound(found: RunFigures) -> str:
    """The throughput that links and devices allow, and the share of it that was reached."""
    if found.bound_tokens_per_s is None:
        return humanize.DASH
    reached = humanize.percent(found.share_of_bound)
    return f"{found.bound_tokens_per_s:,.0f} tokens/s allowed by links and devices; {reached} of it reached"


def causes(stages: Sequence[StageFigures]) -> list[str]:
    """The causes of idle time in any stage; `other` last."""
    return sorted({cause for one in stages for cause in one.idle}, key=lambda cause: (cause == "other", cause))


def _stages(stages: Sequence[StageFigures]) -> Table:
    """Shares of the time that a stage's nodes spent training. `bound`: the `in use` that links and devices allow."""
    waits = causes(stages)
    columns = ["stage", "processes", "inner\nsteps", "micro-\nbatches", "in use", "bound"]
    columns += [f"idle:\n{cause}" for cause in waits]
    rows = []
    for one in stages:
        cells = [str(one.stage), *(f"{count:,}" for count in (one.lives, one.inner_steps, one.microbatches))]
        shares = one.utilisation, one.bound_utilisation, *(one.idle.get(cause) for cause in waits)
        rows.append([*cells, *map(humanize.percent, shares)])
    return plain_table(columns, (), rows)


def _byte_table(traffic: TrafficFigures) -> Table:
    columns = (traffic.sent_per_node, traffic.received_per_node, traffic.lost)
    rows = [(kind, *(humanize.size_text(column[kind]) for column in columns)) for kind in traffic.sent_per_node]
    return plain_table(("bytes per node", "sent", "received", "lost in total"), ("bytes per node",), rows)


# --- plots ------------------------------------------------------------------------------------------------------------


def write_trace(path: Path, lines: Sequence[str]) -> None:
    """Write a trace; `sha256sum` of the file is its trace_hash. Raises LocalError if it cannot be written."""
    with writing(path):
        write_whole(path, "\n".join(lines).encode())


def draw(found: RunFigures, outcome: Outcome, tokens_per_microbatch: int, directory: Path) -> list[Path]:
    """Write the plots of a run to a directory. Raises LocalError if it cannot be written."""
    over_time = "virtual seconds"
    throughput = [Curve("all nodes", tokens_per_s(outcome, tokens_per_microbatch, BINS))]
    nodes = [Curve(f"stage {n}", points, "steps") for n, points in nodes_training(outcome).items()]
    charts = (
        _time(found),
        Plot("tokens", "Throughput", (over_time, "tokens/s"), throughput, from_zero=True),
        Plot("nodes", "Nodes in training", (over_time, "nodes"), nodes, from_zero=True),
        _rounds(outcome),
        _byte_bars(found),
    )
    with writing(directory):
        directory.mkdir(exist_ok=True)
        return [save(chart, directory) for chart in charts]


def _time(found: RunFigures) -> Bars:
    """How each stage's nodes spent their time."""
    colours = dict(zip(causes(found.stages), itertools.cycle(IDLE_COLOURS), strict=False))
    rows = []
    for one in found.stages:
        waits = [(f"idle: {cause}", one.idle.get(cause, 0.0), colour) for cause, colour in colours.items()]
        rows.append((f"stage {one.stage}", [("in use", one.utilisation or 0.0, Colour.BLUE), *waits]))
    return Bars("time", "Time of the nodes in training", rows)


def _rounds(outcome: Outcome) -> Plot:
    """The cumulative distribution of the durations of outer rounds, by result."""
    curves = []
    for result, seconds in round_seconds(outcome).items():
        shares = [(at_s, (n + 1) / len(seconds)) for n, at_s in enumerate(seconds)]
        curves.append(Curve(f"{result} ({len(seconds):,})", [(0.0, 0.0), *shares], "steps"))
    axes = ("seconds of a round", "share that took no longer")
    return Plot("rounds", "Outer rounds", axes, curves, from_zero=True)


def _byte_bars(found: RunFigures) -> Bars:
    """What each node sent and received on average."""
    rows = []
    for way, counts in (("sent", found.traffic.sent_per_node), ("received", found.traffic.received_per_node)):
        pieces = [(kind, count, KIND_COLOURS[n]) for n, (kind, count) in enumerate(counts.items())]
        rows.append((f"{way} {humanize.size_text(sum(counts.values()))}", pieces))
    return Bars("bytes", "Bytes per node, by kind", rows)


def tokens_per_s(outcome: Outcome, tokens_per_microbatch: int, bins: int) -> Points:
    """(midpoint, tokens per second) of `bins` equal spans of time, from the start to the end."""
    done = (
        Increment(event.at_s, event.at_s, tokens_per_microbatch)
        for period in outcome.periods()
        for event in period.events
        if period.stage == 0 and event.kind == "microbatch" and event.get("result") == "done"
    )
    return TimeBins(0.0, outcome.ended_at_s, bins).rates(done)


def nodes_training(outcome: Outcome) -> dict[int, Points]:
    """By stage: (time, number of nodes that train from then on)."""
    changes: dict[int, list[tuple[float, int]]] = {}
    for period in outcome.periods():
        for begin, end in period.training:
            changes.setdefault(period.stage, []).extend(((begin, 1), (end, -1)))
    found: dict[int, Points] = {}
    for stage, steps in sorted(changes.items()):
        counts = itertools.accumulate(change for _, change in sorted(steps))
        found[stage] = [(0.0, 0), *((at_s, count) for (at_s, _), count in zip(sorted(steps), counts, strict=True))]
    return found


def round_seconds(outcome: Outcome) -> dict[str, list[float]]:
    """Seconds of the outer rounds by result, in ascending order."""
    found: dict[str, list[float]] = {}
    for event in outcome.trace.of("outer_round"):
        found.setdefault(str(event.get("result")), []).append(event.number("seconds"))
    return {result: sorted(seconds) for result, seconds in sorted(found.items())}
