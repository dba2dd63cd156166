"""The search for a method's best learning rate: on a geometric grid with the first seed; the others use that rate."""

from collections.abc import Sequence

from noloco_p2p.lab.experiments.results import loss
from noloco_p2p.lab.experiments.spec import Results

MAX_RATES = 5
"""Maximum number of learning rates to try."""


def best_rate(runs: Results) -> float:
    """The rate of the run with the lowest loss. Raises ValueError if there are no runs."""
    return float(min(runs, key=loss)["rate"])


def rate_beyond(runs: Results, grid: Sequence[float]) -> float | None:
    """The next rate to try after these runs, whose rates are on a geometric grid: the one beyond the best rate, if that
    is the lowest or highest so far. None if it is neither, or if MAX_RATES have been tried."""
    best, rates = best_rate(runs), sorted({one["rate"] for one in runs})
    beyond = {rates[0]: best * grid[0] / grid[1], rates[-1]: best * grid[1] / grid[0]}
    return float(f"{beyond[best]:.2g}") if best in beyond and len(rates) < MAX_RATES else None


def next_runs(runs: Results, grid: Sequence[float], seeds: int) -> list[tuple[float, int]]:
    """(rate, seed) of the runs to make after these with seed 1: `rate_beyond`, or else the other seeds at the best."""
    beyond = rate_beyond(runs, grid)
    return [(best_rate(runs), seed) for seed in range(2, seeds + 1)] if beyond is None else [(beyond, 1)]
