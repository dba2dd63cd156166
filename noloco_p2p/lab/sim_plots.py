"""The plots of one simulated run, as SVG files, and what they show over virtual time."""

import itertools
from pathlib import Path

from noloco_p2p import humanize
from noloco_p2p.errors import ConfigError
from noloco_p2p.lab.sim_runs import SimRun
from noloco_p2p.lab.sim_table import causes
from noloco_p2p.observe.plotting.axes import Points
from noloco_p2p.observe.plotting.plots import Bars, Chart, Curve, Plot, save
from noloco_p2p.observe.plotting.svg import IDLE_COLOURS, SERIES_COLOURS, Colour
from noloco_p2p.observe.plotting.time_bins import Increment, TimeBins
from noloco_p2p.sim.figures import RunFigures
from noloco_p2p.sim.process import Outcome

BINS = 60
"""Points of a curve over time."""


def draw(run: SimRun, directory: Path) -> list[Path]:
    """Write the plots of a run that came to its end into a directory. Raises ConfigError when it cannot be written."""
    assert run.outcome is not None, "this run was made in another process"
    assert run.figures is not None, "this run did not come to its end"
    charts = _charts(run.figures, run.outcome, run.request.scenario.tokens_per_microbatch)
    try:
        directory.mkdir(exist_ok=True)
        return [save(chart, directory) for chart in charts]
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}") from error


def _charts(found: RunFigures, outcome: Outcome, tokens_per_microbatch: int) -> list[Chart]:
    over_time = "virtual seconds"
    throughput = [Curve.through("all nodes", tokens_per_s(outcome, tokens_per_microbatch, BINS))]
    nodes = [Curve.through(f"stage {n}", points, "steps") for n, points in nodes_training(outcome).items()]
    stds = [Curve.through(f"stage {n}", points, "points") for n, points in replica_stds(outcome).items()]
    charts: list[Chart] = [
        _time(found),
        Plot("tokens", "Throughput", (over_time, "tokens/s"), throughput, from_zero=True),
        Plot("nodes", "Nodes in training", (over_time, "nodes"), nodes, from_zero=True),
        _rounds(outcome),
        _bytes(found),
    ]
    if any(one.replica_std is not None for one in found.stages):
        spread = Plot("spread", "Spread of the replicas", (over_time, "replica std"), stds, ("linear", "log"))
        charts.append(spread)
    return charts


def _time(found: RunFigures) -> Bars:
    """What each stage's nodes did with their time."""
    colours = dict(zip(causes(found.stages), itertools.cycle(IDLE_COLOURS), strict=False))
    rows = []
    for one in found.stages:
        waits = [(f"idle: {cause}", one.idle.get(cause, 0.0), colour) for cause, colour in colours.items()]
        rows.append((f"stage {one.stage}", [("in use", one.utilisation or 0.0, Colour.GREEN), *waits]))
    return Bars("time", "Time of the nodes in training", rows)


def _rounds(outcome: Outcome) -> Plot:
    """The share of the outer rounds that took no longer, by result."""
    curves = []
    for result, seconds in round_seconds(outcome).items():
        shares = [(at_s, (n + 1) / len(seconds)) for n, at_s in enumerate(seconds)]
        curves.append(Curve.through(f"{result} ({len(seconds):,})", [(0.0, 0.0), *shares], "steps"))
    axes = ("seconds of a round", "share that took no longer")
    return Plot("rounds", "Outer rounds", axes, curves, from_zero=True)


def _bytes(found: RunFigures) -> Bars:
    """What each node sent and received, on average."""
    rows = []
    for way, counts in (("sent", found.traffic.sent_per_node), ("received", found.traffic.received_per_node)):
        pieces = [(kind, count, SERIES_COLOURS[n]) for n, (kind, count) in enumerate(counts.items())]
        rows.append((f"{way} {humanize.size_text(sum(counts.values()))}", pieces))
    return Bars("bytes", "Bytes of tensors per node, by kind", rows)


def tokens_per_s(outcome: Outcome, tokens_per_microbatch: int, bins: int) -> Points:
    """(middle, tokens per second) of as many equal spans of time, from the start to the end."""
    done = (
        Increment(event.at_s, event.at_s, tokens_per_microbatch)
        for period in outcome.periods()
        for event in period.events
        if period.stage == 0 and event.kind == "microbatch" and event.get("result") == "done"
    )
    return TimeBins(0.0, outcome.ended_at_s, bins).rates(done)


def nodes_training(outcome: Outcome) -> dict[int, Points]:
    """By stage: (when, how many train from then on)."""
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
    """Seconds of the outer rounds, rising, by result."""
    found: dict[str, list[float]] = {}
    for event in outcome.trace.of("outer_round"):
        found.setdefault(str(event.get("result")), []).append(event.number("seconds"))
    return {result: sorted(seconds) for result, seconds in sorted(found.items())}


def replica_stds(outcome: Outcome) -> dict[int, Points]:
    """By stage: (when, standard deviation between a replica and its partner)."""
    found: dict[int, list[tuple[float, float]]] = {}
    for period in outcome.periods():
        for event in period.events:
            if event.kind == "replica_std":
                found.setdefault(period.stage, []).append((event.at_s, event.number("value")))
    return {stage: sorted(points) for stage, points in sorted(found.items())}
