"""Durations of operations, and statistics of samples in the form that benches write as JSON."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any


class Stopwatch:
    """Seconds of operations by name, in the order in which they were timed.

    The first `warm_up` measurements of each are ignored. `settle` waits for the end of an operation that runs
    asynchronously, such as on a GPU.
    """

    def __init__(self, warm_up: int = 1, settle: Callable[[], None] = lambda: None) -> None:
        self._seconds: defaultdict[Hashable, list[float]] = defaultdict(list)
        self._warm_up = warm_up
        self._settle = settle

    @contextmanager
    def timed(self, name: Hashable) -> Iterator[None]:
        """Time the body of the `with`."""
        began_at = time.perf_counter()
        yield
        self._settle()
        self._seconds[name].append(time.perf_counter() - began_at)

    def counted(self, name: Hashable) -> list[float]:
        """Seconds of each measurement after the warm-up."""
        return self._seconds[name][self._warm_up :]

    def median_s(self, *names: Hashable) -> float:
        """Median, over the measurements, of the total time of these operations; 0 if there were none."""
        together = [sum(each) for each in zip(*map(self.counted, names), strict=True)]
        return statistics.median(together) if together else 0.0


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed; None for no values."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else None


def mean_and_std(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation (None for a single value) and the values themselves."""
    return {
        "mean": statistics.fmean(values) if values else None,
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "values": list(values),
    }
