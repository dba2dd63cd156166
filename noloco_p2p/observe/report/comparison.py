"""Several runs beside each other: curves in common charts, figures, and the settings in which they differ."""

from collections.abc import Iterator, Mapping, Sequence

from noloco_p2p.observe.plotting.axes import Points
from noloco_p2p.observe.plotting.svg import SERIES_COLOURS, LegendKey
from noloco_p2p.observe.report.charts import NATS, Line, Panel, RunCharts, by_step, over_time, panel
from noloco_p2p.observe.report.journals import clean
from noloco_p2p.observe.report.recorded_run import RecordedRun

Cells = tuple[str, ...]
PageTable = tuple[str, Cells, Sequence[Cells]]
"""(heading, names of the columns, rows)."""
MOST_SETTINGS = 100


def compared(
    runs: Mapping[str, RecordedRun], headlines: Mapping[str, Mapping[str, str]]
) -> list[tuple[str, list[Panel], list[PageTable]]]:
    """(heading, charts, tables) of each section of the page; `headlines`: what each run is called by its figures."""
    keys = [LegendKey(name, SERIES_COLOURS[n % len(SERIES_COLOURS)]) for n, name in enumerate(runs)]
    charts = [RunCharts(run) for run in runs.values()]
    span_s = max(run.ended_at - run.training_at for run in runs.values())

    def lines(found: list[Points]) -> list[Line]:
        return [(key.label, key.colour, points) for key, points in zip(keys, found, strict=True)]

    losses = {"Loss": "loss", "Validation loss": "validation"}
    panels = [
        *(
            panel(by_step(title, lines([one.mean(curve) for one in charts]), from_zero=False), keys, NATS)
            for title, curve in losses.items()
        ),
        panel(over_time("Tokens per second", lines([one.rates("tokens") for one in charts]), span_s), keys, ""),
    ]
    figures = [(name, *(each[name] for each in headlines.values())) for name in next(iter(headlines.values()))]
    settings = [dict(_flat(run.manifest)) for run in runs.values()]
    names = sorted({name for one in settings for name in one})
    different = [(name, *(one.get(name, "") for one in settings)) for name in names]
    different = [row for row in different if len(set(row[1:])) > 1][:MOST_SETTINGS]
    tables: list[PageTable] = [("Figures", ("", *runs), figures)]
    if different:
        tables.append(("Settings that differ", ("", *runs), different))
    return [("Training", panels, []), ("Runs", [], tables)]


def _flat(found: Mapping[str, object], above: str = "") -> Iterator[tuple[str, str]]:
    """Settings by their whole names."""
    for name, value in found.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{clean(name)}.")
        else:
            yield f"{above}{clean(name)}", clean(value)
