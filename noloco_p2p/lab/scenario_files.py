"""Reads scenarios: defaults, overridden by a YAML file, overridden by `--set a.b=v`.

All errors are reported together, one line each, with the file and line (or the option) and the nearest key.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from noloco_p2p.errors import NO_JSON, ConfigError
from noloco_p2p.launch.named_configs import SCENARIOS, named
from noloco_p2p.launch.settings import in_words, over_defaults, refuse, where
from noloco_p2p.launch.yaml_entries import Key, KnownKeys, SettingEntry, read_entries
from noloco_p2p.sim.scenario import FaultSettings, Scenario

KNOWN = KnownKeys.of(Scenario)
MEASURED: Key = ("compute", "measured")
COSTS = {
    "forward_s": ("forward_s",),
    "backward_s": ("backward_s",),
    "inner_step_s": ("inner_step_s",),
    "outer_s": ("snapshot_s", "merge_s"),
}
"""Key of `compute` → the keys in the JSON of `noloco bench stage` whose mean it is, for each stage."""
StageCosts = Sequence[Mapping[str, float]]
"""For each stage: seconds of its operations alone, as `noloco bench stage` names them."""


def load(path: Path | None, sets: Sequence[str] = ()) -> Scenario:
    """The scenario from a file (None: the default one) and `--set` options. Raises ConfigError, one line per error."""
    faults: list[str] = []
    path = named(path, SCENARIOS)
    entries = read_entries(path, {}, sets, KNOWN, faults)
    _add_measured(entries, path)
    values = json.dumps(over_defaults(entries, Scenario()), default=str)
    try:
        found = Scenario.model_validate_json(values, strict=True)
    except ValidationError as error:
        faults += _in_words(error, entries)
    refuse(faults)
    return found


def _in_words(error: ValidationError, entries: Sequence[SettingEntry]) -> list[str]:
    lines: dict[Key, str] = {}
    for each in error.errors(include_url=False):
        loc = tuple(str(part) for part in each["loc"])
        key = KNOWN.longest(loc)
        name = loc if key == ("faults",) else key
        words = in_words(name, dict(each))
        place = f"{where(entries, key, words)}: " if key else ""
        if each["type"] == "extra_forbidden":
            near = difflib.get_close_matches(loc[-1], FaultSettings.model_fields, 1, 0.0)
            lines.setdefault(name, f"{place}there is no key {'.'.join(loc)}; the nearest is {near[0]}")
        elif each["type"] == "missing":
            lines.setdefault(name, f"{place}{'.'.join(loc)} is missing")
        else:
            lines.setdefault(name, place + words)
    return list(lines.values())


def _add_measured(entries: list[SettingEntry], path: Path | None) -> None:
    """Insert the costs from the file named by `compute.measured`, before the values that are set after it."""
    places = [at for at, entry in enumerate(entries) if entry.key == MEASURED]
    if not places:
        return
    at, (_, value, place) = places[-1], entries[places[-1]]
    if isinstance(value, str):
        source = Path(value) if path is None or place.startswith("--set") else path.parent / value
        costs = _measured(source, place)
        entries[at + 1 : at + 1] = [SettingEntry(("compute", name), costs[name], str(source)) for name in costs]


def compute_costs(stages: StageCosts) -> dict[str, list[float]]:
    """The keys of `compute` for stages with these costs."""
    return {name: [sum(one[p] for p in parts) / len(parts) for one in stages] for name, parts in COSTS.items()}


def _measured(source: Path, place: str) -> Mapping[str, list[float]]:
    try:
        return compute_costs(json.loads(source.read_text("utf-8"))["stages_costs"])
    except OSError as error:
        raise ConfigError(f"{place}: {source} cannot be read: {error.strerror}") from error
    except (*NO_JSON, KeyError, TypeError) as error:
        raise ConfigError(f"{place}: {source} is not what `noloco bench stage --json` writes") from error
