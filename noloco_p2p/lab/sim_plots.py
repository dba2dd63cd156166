"""Pictures of one simulated run as PNGs. matplotlib is imported here only, when something is drawn."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_p2p.errors import ConfigError
from noloco_p2p.lab.sim_runs import Run
from noloco_p2p.lab.sim_table import causes
from noloco_p2p.sim import timelines
from noloco_p2p.sim.figures import Figures
from noloco_p2p.sim.outcome import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (7.0, 4.2)
DOTS_PER_INCH = 120
BINS = 60
"""Points of a curve over time."""


def require() -> None:
    """Raises ConfigError when matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plots needs matplotlib: pip install 'noloco_p2p[plots]' brings it")


def draw(run: Run, directory: Path) -> list[Path]:
    """Write the pictures of a run that came to its end into a directory."""
    from matplotlib.figure import Figure

    outcome, found = run.outcome, run.figures
    assert outcome is not None, "this run was made in another process"
    assert found is not None, "this run did not come to its end"
    try:
        directory.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made: {error.strerror}") from error
    tokens = run.request.scenario.tokens_per_microbatch
    pictures: dict[str, Callable[[Axes], None]] = {
        "time": lambda axes: _time(axes, found),
        "tokens": lambda axes: _tokens(axes, outcome, tokens),
        "nodes": lambda axes: _nodes(axes, outcome),
        "rounds": lambda axes: _rounds(axes, outcome),
        "bytes": lambda axes: _bytes(axes, found),
    }
    if any(one.replica_std is not None for one in found.stages):
        pictures["spread"] = lambda axes: _spread(axes, outcome)
    paths: list[Path] = []
    for name, picture in pictures.items():
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        picture(axes)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            figure.legend(loc="outside right upper", fontsize="small")
        paths.append(directory / f"{name}.png")
        figure.savefig(paths[-1], dpi=DOTS_PER_INCH, metadata={"Software": None})
    return paths


def _time(axes: "Axes", found: Figures) -> None:
    """What each stage's nodes did with their time, as shares on top of each other."""
    axes.set(title="Time of the nodes in training", xlabel="stage", ylabel="share", ylim=(0, 1))
    names = [str(one.stage) for one in found.stages]
    bottom = [0.0] * len(names)
    shares = {"in use": [one.utilisation or 0.0 for one in found.stages]}
    for cause in causes(found.stages):
        shares[f"idle: {cause}"] = [one.idle.get(cause, 0.0) for one in found.stages]
    for label, heights in shares.items():
        axes.bar(names, heights, bottom=bottom, label=label)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]


def _tokens(axes: "Axes", outcome: Outcome, tokens_per_microbatch: int) -> None:
    axes.set(title="Throughput", xlabel="virtual seconds", ylabel="tokens/s")
    curve = timelines.tokens_per_s(outcome, tokens_per_microbatch, BINS)
    axes.plot([at_s for at_s, _ in curve], [rate for _, rate in curve])
    axes.set_ylim(bottom=0)


def _nodes(axes: "Axes", outcome: Outcome) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(title="Nodes in training", xlabel="virtual seconds", ylabel="nodes")
    for stage, steps in timelines.nodes_training(outcome).items():
        axes.step([at_s for at_s, _ in steps], [count for _, count in steps], where="post", label=f"stage {stage}")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _rounds(axes: "Axes", outcome: Outcome) -> None:
    """The share of the outer rounds that took no longer, by result."""
    axes.set(title="Outer rounds", xlabel="seconds of a round", ylabel="share that took no longer", ylim=(0, 1))
    for result, seconds in timelines.round_seconds(outcome).items():
        shares = [(number + 1) / len(seconds) for number in range(len(seconds))]
        axes.step([0.0, *seconds], [0.0, *shares], where="post", label=f"{result} ({len(seconds):,})")


def _bytes(axes: "Axes", found: Figures) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set(title="Bytes of tensors per node", xlabel="kind", ylabel="bytes")
    axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    traffic = found.traffic
    for shift, label, counts in ((-0.2, "sent", traffic.sent_per_node), (0.2, "received", traffic.received_per_node)):
        places = [number + shift for number in range(len(counts))]
        axes.bar(places, list(counts.values()), width=0.4, label=label)
    axes.set_xticks(range(len(traffic.sent_per_node)), list(traffic.sent_per_node))


def _spread(axes: "Axes", outcome: Outcome) -> None:
    axes.set(title="Spread of the replicas", xlabel="virtual seconds", ylabel="replica std", yscale="log")
    for stage, points in timelines.replica_stds(outcome).items():
        axes.plot([at_s for at_s, _ in points], [std for _, std in points], ".", markersize=3, label=f"stage {stage}")
