"""Statistics of a sample of measurements, as the JSON of the benches has them."""

import statistics
from collections.abc import Sequence
from typing import Any


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed; None without any."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else None


def mean_and_std(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation (None for a single value) and the values themselves."""
    return {
        "mean": statistics.fmean(values) if values else None,
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "values": list(values),
    }
