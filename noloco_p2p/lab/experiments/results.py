"""What reports do with results: choose and group them, leave out what was not finite, mean ± standard deviation."""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, TypeVar

from noloco_p2p import humanize
from noloco_p2p.lab.experiments.markdown_page import Cell
from noloco_p2p.lab.experiments.spec import Result, Results

Key = TypeVar("Key")


def published() -> dict[str, Any]:
    """What the paper reports (arXiv 2506.10911), by name; its `source` says from which tables."""
    figures: dict[str, Any] = json.loads(resources.files(__package__).joinpath("paper.json").read_text())
    return figures


def select(results: Results, **settings: object) -> list[Result]:
    """The results with these settings, by seed."""
    found = [one for one in results if all(one.case.settings.get(name) == value for name, value in settings.items())]
    return sorted(found, key=lambda one: int(one["seed"]))


def group(results: Results, *names: str) -> dict[tuple[Any, ...], list[Result]]:
    """The results by their values of these settings."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for one in results:
        groups.setdefault(tuple(one[name] for name in names), []).append(one)
    return groups


def known(values: Iterable[float | None]) -> list[float]:
    """Those that are not None: what was finite."""
    return [value for value in values if value is not None]


def differences(pairs: Iterable[tuple[float | None, float | None]]) -> list[float]:
    """The first less the second of each pair, where both were finite."""
    return [mine - other for mine, other in pairs if mine is not None and other is not None]


def mean_std(values: Sequence[float], digits: int = 4) -> str:
    """`mean ± standard deviation` of a sample; of one value only that, of none a dash. `digits`: of the mean."""
    if not values:
        return humanize.DASH
    mean = humanize.figure(statistics.fmean(values), digits)
    return f"{mean} ± {humanize.figure(statistics.stdev(values), 2)}" if len(values) > 1 else mean


def mean_column(
    groups: Mapping[Key, Results], figure: str | Callable[[Result], float | None], digits: int = 4
) -> Callable[[Key], Cell]:
    """A column of a table with a row for each group: mean ± std of a figure over the group, where it was finite."""

    def cell(key: Key) -> Cell:
        return mean_std(known(one[figure] if isinstance(figure, str) else figure(one) for one in groups[key]), digits)

    return cell
