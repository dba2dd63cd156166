"""The charts of a report as PNGs. matplotlib is imported here only, when something is drawn."""

import importlib.util
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noloco_p2p.lab.experiments.markdown_page import Chart, Curve, Heatmap, Plot, Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES = (7.0, 4.2)
DOTS_PER_INCH = 120


def available() -> bool:
    """matplotlib is installed: the `plots` extra brings it."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(chart: Chart, directory: Path) -> Path:
    """Write a chart as `NAME.png`; equal charts give equal files. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(chart.title)
    axes.set_xlabel(chart.axes[0])
    axes.set_ylabel(chart.axes[1])
    if isinstance(chart, Plot):
        _scale(axes, chart.scales)
        axes.grid(alpha=0.3)
    else:
        _cells(figure, axes, chart)
    for curve in chart.curves:
        _curve(axes, curve)
    if chart.curves:
        axes.legend(fontsize="small")
    path = directory / f"{chart.name}.png"
    figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None})
    return path


def _scale(axes: "Axes", scales: tuple[Scale, Scale]) -> None:
    for scale, setter in zip(scales, (axes.set_xscale, axes.set_yscale), strict=True):
        if scale == "log2":
            setter("log", base=2)
        else:
            setter(scale)


def _curve(axes: "Axes", curve: Curve) -> None:
    styles: dict[str, dict[str, Any]] = {
        "line": {"marker": "o", "markersize": 3},
        "dashed": {"linestyle": "--"},
        "points": {"marker": "o", "markersize": 4, "linestyle": "none"},
    }
    axes.errorbar(curve.x, curve.y, yerr=curve.error, label=curve.label, capsize=2, **styles[curve.style])


def _cells(figure: "Figure", axes: "Axes", chart: Heatmap) -> None:
    """Cells of equal size around each grid point; the grid need not be even, its middles are the cells' edges."""
    from matplotlib.colors import LogNorm

    values = [[math.nan if value is None else value for value in row] for row in chart.values]
    norm = LogNorm() if chart.log_values else None
    xs, ys = chart.grid
    mesh = axes.pcolormesh(_edges(xs), _edges(ys), values, norm=norm, cmap="viridis")
    figure.colorbar(mesh, ax=axes, label=chart.axes[2])
    if chart.marked:
        axes.plot([x for x, _ in chart.marked], [y for _, y in chart.marked], "rx", markersize=8, linestyle="none")
    axes.set_xlim(_edges(xs)[0], _edges(xs)[-1])
    axes.set_ylim(_edges(ys)[0], _edges(ys)[-1])


def _edges(points: Sequence[float]) -> list[float]:
    """The borders between neighbours lie in the middle; a single point gets a width of one."""
    if len(points) == 1:
        return [points[0] - 0.5, points[0] + 0.5]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(points)]
    return [2 * points[0] - middles[0], *middles, 2 * points[-1] - middles[-1]]
