"""Grafana's JSON for the kinds of panel that the dashboards use, and their layout; boards_*.py has the dashboards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Json = dict[str, object]

DATASOURCE: Json = {"type": "prometheus", "uid": "noloco"}
"""As provisioned in provisioning/datasources/prometheus.yml."""
COLUMNS = 24
STAT_HEIGHT, CHART_HEIGHT = 4, 8

RUN = 'run="$run"'
STAGE = f'{RUN}, node_stage=~"$stage"'
NODE = f'{STAGE}, node_name=~"$node"'
"""Label selectors of the dashboard variables, from wide to narrow."""
SEEN_STAGE = f'{RUN}, stage=~"$stage"'
"""For metrics whose `stage` is one that the node sees, not its own."""
ALERTS = 'ALERTS{alertstate="firing", run=~"$run|"}'
"""Those of the run, and those that belong to none."""
BY_STAGE = "stage {{node_stage}}"
BY_SEEN_STAGE = "stage {{stage}}"
"""Legends."""

GOOD, LOOK, BAD, CALM = "green", "orange", "red", "blue"
STATE_COLOURS = {
    "starting": "light-blue",
    "waiting": "blue",
    "syncing": "purple",
    "training": "green",
    "paused": "yellow",
    "finished": "dark-green",
    "draining": "orange",
    "left": "gray",
}
"""The states, in the order of `core.members.STATES`."""
RESULT_COLOURS = {
    "partner": "green",
    "stale": "yellow",
    "other": "orange",
    "all": "green",
    "some": "yellow",
    "alone": "red",
}
CAUSE_COLOURS = {"gradients": "blue", "microbatches": "purple", "partner": "orange"}


@dataclass(frozen=True)
class Query:
    """A PromQL expression and the legend of its series."""

    expr: str
    legend: str = "{{__name__}}"


def by_node(expr: str, note: str = "", *, operation: str = "max") -> Query:
    """A series for each node, in the order of the stages: the same one when it comes back at another address."""
    own = f"{operation} by (node_stage, node_name) ({expr})"
    return Query(f'label_join({own}, "at", " · ", "node_stage", "node_name")', "{{at}}" + note)


@dataclass(frozen=True)
class Panel:
    """One panel without its position."""

    json: Json
    width: int
    height: int

    def at(self, x: int, y: int, number: int) -> Json:
        """Its JSON at a position in the grid."""
        return {"id": number, **self.json, "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y}}


def stat(
    title: str, expr: str, unit: str, steps: Sequence[tuple[float, str]] = (), *, decimals: int | None = None
) -> Panel:
    """One number over a sparkline. `steps`: (lowest value, colour) pairs; below the first one it is red.

    Grafana draws values that are equal after rounding to `decimals` as a flat line, shares to whole numbers too.
    """
    base = BAD if steps else CALM
    defaults: Json = {
        **_unit(unit, decimals),
        "color": {"mode": "thresholds"},
        "thresholds": _thresholds(base, steps),
        "noValue": "–",
    }
    options = {
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "center",
        "textMode": "value",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
    return _panel("stat", title, [Query(expr, title)], defaults, options, (4, STAT_HEIGHT))


def chart(
    title: str,
    unit: str,
    *queries: Query,
    about: str = "",
    colours: Mapping[str, str] | None = None,
    stack: bool = False,
    steps: Sequence[tuple[float, str]] = (),
    low: float | None = 0,
    high: float | None = None,
    reach: float | None = None,
    decimals: int | None = None,
    extreme: str = "max",
    bars: bool = False,
    log: int | None = None,
    right: tuple[str, str] | None = None,
    below: str | None = None,
) -> Panel:
    """Lines over time.

    `colours`: by legend; `steps`: dashed lines; `low` and `high`: where the axis begins and ends, which `reach` only
    extends; `extreme`: max or min, for the legend; `bars`: one a minute; `log`: base of a logarithmic axis; `right`:
    (pattern of legends, unit) of the series on the right axis; `below`: pattern of those drawn below zero.
    """
    custom: Json = {
        "drawStyle": "bars" if bars else "line",
        "lineWidth": 0 if stack else 2,
        "fillOpacity": 60 if stack or bars else 0,
        "showPoints": "never",
        "spanNulls": 30_000,
        "stacking": {"mode": "normal" if stack else "none", "group": "A"},
        "scaleDistribution": {"type": "log", "log": log} if log else {"type": "linear"},
        "thresholdsStyle": {"mode": "dashed" if steps else "off"},
    }
    if reach is not None:
        custom["axisSoftMax"] = reach
    defaults: Json = {
        **_unit(unit, decimals),
        "color": {"mode": "palette-classic"},
        "custom": custom,
        "thresholds": _thresholds(GOOD, steps),
    }
    if low is not None and not log and below is None:
        defaults["min"] = low
    if high is not None:
        defaults["max"] = high
    legend = {"displayMode": "table", "placement": "right", "sortBy": "Name", "sortDesc": False}
    options = {
        "legend": {**legend, "calcs": ["lastNotNull", extreme], "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    made = _panel("timeseries", title, queries, defaults, options, (COLUMNS // 2, CHART_HEIGHT), about)
    overrides = [
        _override("byName", name, color={"mode": "fixed", "fixedColor": colour})
        for name, colour in (colours or {}).items()
    ]
    if right is not None:
        axis = {"custom.axisPlacement": "right", "unit": right[1]}
        overrides.append(_override("byRegexp", right[0], **axis))
    if below is not None:
        overrides.append(_override("byRegexp", below, **{"custom.transform": "negative-Y"}))
    if bars:
        made.json["interval"] = "1m"
    made.json["fieldConfig"] = {"defaults": defaults, "overrides": overrides}
    return made


def timeline(
    title: str, values: Sequence[tuple[str, str]], *queries: Query, about: str = "", height: int = CHART_HEIGHT
) -> Panel:
    """A bar for each series, coloured by value: `values` has (text, colour) for 0, 1, 2, …"""
    shown = {str(value): {"text": text, "color": colour, "index": value} for value, (text, colour) in enumerate(values)}
    defaults: Json = {
        "color": {"mode": "thresholds"},
        "custom": {"fillOpacity": 75, "lineWidth": 0, "spanNulls": False},
        "mappings": [{"type": "value", "options": shown}],
        "thresholds": _thresholds("gray", ()),
    }
    options = {
        "alignValue": "left",
        "mergeValues": True,
        "rowHeight": 0.85,
        "perPage": 20,
        "showValue": "auto",
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "single"},
    }
    return _panel("state-timeline", title, queries, defaults, options, (COLUMNS, height), about)


def dashboard(uid: str, title: str, about: str, rows: Sequence[Sequence[Panel]]) -> Json:
    """A dashboard of rows of panels, with the variables run, stage and node."""
    placed: list[Json] = []
    y = 0
    for row in rows:
        x = 0
        for panel in row:
            placed.append(panel.at(x, y, len(placed) + 1))
            x += panel.width
        if x != COLUMNS:
            raise ValueError(f"{title}: a row has {x} columns instead of {COLUMNS}")
        y += max(panel.height for panel in row)
    return {
        "uid": uid,
        "title": title,
        "description": about,
        "tags": ["noloco"],
        "editable": False,
        "graphTooltip": 1,
        "schemaVersion": 39,
        "version": 1,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "links": [_LINK],
        "annotations": {"list": [_ALERTS]},
        "templating": {
            "list": [
                _variable("run", "Run", 'label_values(up{job="noloco"}, run)', several=False),
                _variable("stage", "Stage", f'label_values(up{{job="noloco", {RUN}}}, node_stage)', sort=3),
                _variable("node", "Node", f'label_values(up{{job="noloco", {STAGE}}}, node_name)'),
            ]
        },
        "panels": placed,
    }


_LINK: Json = {
    "type": "dashboards",
    "title": "noloco",
    "tags": ["noloco"],
    "asDropdown": False,
    "includeVars": True,
    "keepTime": True,
}
_ALERTS: Json = {
    "name": "Alerts",
    "datasource": DATASOURCE,
    "enable": True,
    "iconColor": BAD,
    # Only its first minute: a region for all the time that it fires would tint the charts.
    "expr": f"max by (alertname, severity) ({ALERTS}) unless max by (alertname, severity) ({ALERTS} offset 1m)",
    "step": "10s",
    "titleFormat": "{{alertname}}",
    "textFormat": "{{severity}}",
}


def _variable(name: str, label: str, query: str, *, several: bool = True, sort: int = 1) -> Json:
    found: Json = {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": sort,  # 1: alphabetically, 3: numerically
        "multi": several,
        "includeAll": several,
    }
    if several:
        found |= {"allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}}
    return found


def _panel(
    kind: str,
    title: str,
    queries: Sequence[Query],
    defaults: Json,
    options: Mapping[str, object],
    size: tuple[int, int],
    about: str = "",
) -> Panel:
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": DATASOURCE,
            "editorMode": "code",
            "range": True,
            "expr": query.expr,
            "legendFormat": query.legend,
        }
        for index, query in enumerate(queries)
    ]
    json: Json = {
        "type": kind,
        "title": title,
        "description": about,
        "datasource": DATASOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": dict(options),
    }
    return Panel(json, *size)


def _unit(unit: str, decimals: int | None) -> Json:
    if decimals is None and unit == "sci":
        decimals = 2
    return {"unit": unit} if decimals is None else {"unit": unit, "decimals": decimals}


def _thresholds(base: str, steps: Sequence[tuple[float, str]]) -> Json:
    shown: list[Json] = [{"color": base, "value": None}]
    return {"mode": "absolute", "steps": [*shown, *({"color": colour, "value": value} for value, colour in steps)]}


def _override(matcher: str, pattern: str, **properties: object) -> Json:
    named = [{"id": name, "value": value} for name, value in properties.items()]
    return {"matcher": {"id": matcher, "options": pattern}, "properties": named}
