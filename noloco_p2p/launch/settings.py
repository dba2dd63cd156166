"""Where settings come from: defaults < YAML file < environment (`NOLOCO__A__B`) < `--set a.b=v`.

One flat file may hold the keys of both models of config.py. All faults are reported at once, one line each,
with the file and line (or the variable, or the option) and the nearest key that exists.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from noloco_p2p.config import MANIFEST_LIMIT_BYTES, NodeConfig, RunManifest
from noloco_p2p.errors import ConfigError, Violation
from noloco_p2p.launch.yaml_entries import FREE_SECTION, Key, KnownKeys, SettingEntry, read_entries

WANTED = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "dict": "a section of keys",
    "model": "a section of keys",
}
"""First word of pydantic's error types → what the key wants."""

BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}

KNOWN = KnownKeys.of(RunManifest, NodeConfig)

Model = TypeVar("Model", RunManifest, NodeConfig)


@dataclass(frozen=True, slots=True)
class Overrides:
    """All that somebody has set, later entries before earlier ones. Made by `read`: keys and types are right."""

    entries: tuple[SettingEntry, ...]

    def manifest(self) -> RunManifest:
        """The manifest of a first node. Raises ConfigError when its values do not go together."""
        return self._validated(RunManifest)

    def node(self) -> NodeConfig:
        """The local settings. Raises ConfigError when they do not go together."""
        return self._validated(NodeConfig)

    @property
    def names_the_run(self) -> bool:
        """A key of the manifest is among them."""
        return bool(_of(RunManifest, self.entries))

    def _validated(self, model: type[Model]) -> Model:
        faults = _faults(model, self.entries)
        refuse([f"{where(self.entries, key)}: {fault}" if key else fault for key, fault in faults])
        return model.model_validate_json(_overlaid_json(model, self.entries), strict=True)

    def check_agrees(self, swarm: RunManifest, elsewhere: str = "in the swarm: leave it out") -> None:
        """For a node that joins: ConfigError, a line for each manifest key given here that differs from the swarm's.

        `elsewhere` ends each line: where the other value is set, and what to do.
        """
        theirs = swarm.model_dump(mode="json")
        mine = json.loads(json.dumps(overlaid(_of(RunManifest, self.entries), theirs), default=str))
        lines: dict[Key, str] = {}
        for entry in _of(RunManifest, self.entries):
            keys = [entry.key]
            if entry.key == FREE_SECTION:
                keys = [(*entry.key, name) for name in sorted({*mine["model"]["config"], *theirs["model"]["config"]})]
            for key in keys:
                here, there = _at(mine, key), _at(theirs, key)
                if here != there:
                    lines[key] = f"{entry.where}: {'.'.join(key)} is {_shown(here)} here, {_shown(there)} {elsewhere}"
                else:
                    lines.pop(key, None)
        refuse(list(lines.values()))


def read(
    path: Path | None,
    environ: Mapping[str, str],
    sets: Sequence[str],
    options: Mapping[str, tuple[str, object]] | None = None,
) -> Overrides:
    """What a file, the environment, `--set` and other options set. Raises ConfigError with a line for each fault.

    `options`: name of the option → (key, value); None for an option that was not given.
    """
    faults: list[str] = []
    entries = read_entries(path, environ, sets, KNOWN, faults)
    for option, (name, value) in (options or {}).items():
        entries += [SettingEntry((name,), value, option)] if value is not None else []
    for key, fault in [*_faults(RunManifest, entries), *_faults(NodeConfig, entries)]:
        faults += [f"{where(entries, key)}: {fault}"] if key else []
    refuse(faults)
    return Overrides(tuple(entries))


def load(path: Path | None, environ: Mapping[str, str], sets: Sequence[str]) -> tuple[RunManifest, NodeConfig]:
    """Both models, for a first node. Raises ConfigError with a line for each fault."""
    overrides = read(path, environ, sets)
    return overrides.manifest(), overrides.node()


def manifest_from_json(data: bytes) -> RunManifest:
    """A manifest that a peer has sent. Raises Violation, in one line, when it is not one."""
    if len(data) > MANIFEST_LIMIT_BYTES:
        raise Violation(f"the manifest received has {len(data)} bytes, more than {MANIFEST_LIMIT_BYTES}")
    try:
        return RunManifest.model_validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])[:100]
        message = " ".join(f"{name} {first['msg']}".split())[:300]
        raise Violation(
            f"the manifest received is not valid ({message}): does the peer run another version?"
        ) from error


def _of(model: type[BaseModel], entries: Sequence[SettingEntry]) -> list[SettingEntry]:
    return [entry for entry in entries if entry.key[0] in model.model_fields]


def _overlaid_json(model: type[Model], entries: Sequence[SettingEntry]) -> str:
    return json.dumps(overlaid(_of(model, entries), model().model_dump(mode="json")), default=str)


def overlaid(entries: Sequence[SettingEntry], base: dict[str, Any]) -> dict[str, Any]:
    """A model's values with what somebody has set."""
    found: dict[str, Any] = json.loads(json.dumps(base))
    for entry in entries:
        section = found
        for name in entry.key[:-1]:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        section[entry.key[-1]] = dict(entry.value) if isinstance(entry.value, dict) else entry.value
    return found


def _faults(model: type[Model], entries: Sequence[SettingEntry]) -> list[tuple[Key, str]]:
    """(key, what is wrong) for each fault; the key is () when values do not go together."""
    try:
        model.model_validate_json(_overlaid_json(model, entries), strict=True)
    except ValidationError as error:
        found: dict[Key, str] = {}
        for each in error.errors(include_url=False):
            location = tuple(str(part) for part in each["loc"])
            key = location[:3] if location[:2] == FREE_SECTION else KNOWN.longest(location)
            found.setdefault(key, in_words(key, dict(each)))
        return list(found.items())
    return []


def in_words(key: Key, error: dict[str, Any]) -> str:
    """A fault of pydantic's in plain words."""
    kind, limits = str(error["type"]), dict(error.get("ctx", {}))
    value = "" if isinstance(error.get("input"), dict) else f", not {error.get('input')!r}"
    name = ".".join(key)
    if key[:2] == FREE_SECTION and len(key) == 3:
        return f"{name} must be a number, text, true, false, null, or a list of them"
    if kind == "value_error":
        return str(limits.get("error", error["msg"]))
    bound = next((word for word in BOUNDS if word in limits), None)
    if bound is not None:
        return f"{name} must be {BOUNDS[bound]} {limits[bound]}{value}"
    if kind == "literal_error":
        return f"{name} must be {limits['expected']}{value}"
    if kind == "string_pattern_mismatch":
        return f"{name} must match {limits['pattern']}{value}"
    wanted = WANTED.get(kind.split("_")[0])
    return f"{name} must be {wanted}{value}" if wanted else f"{name}: {error['msg']}"


def where(entries: Sequence[SettingEntry], key: Key) -> str:
    """The place of the last entry for this key, or of one above or below it."""
    for exact in (True, False):
        for entry in reversed(entries):
            n = min(len(key), len(entry.key))
            if entry.key == key or (not exact and entry.key[:n] == key[:n]):
                return entry.where
    return "defaults"


def _at(values: dict[str, Any], key: Key) -> object:
    found: Any = values
    for name in key:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _shown(value: object) -> str:
    return "not set" if value is None else repr(value)


def refuse(lines: list[str]) -> None:
    """ConfigError with these lines, if there are any."""
    if lines:
        raise ConfigError("\n".join(lines))
