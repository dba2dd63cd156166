"""Reads settings from all their sources: defaults < YAML file < environment (`NOLOCO__A__B`) < `--set a.b=v`.

A single flat file may hold the keys of both models of `config`. All faults are reported at once, one per line, with the
file and line (or the variable, or the option); for an unknown key, with the nearest key that exists.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from noloco_p2p.config import MANIFEST_LIMIT_BYTES, NodeConfig, RunManifest
from noloco_p2p.errors import ConfigError, Violation
from noloco_p2p.humanize import plain
from noloco_p2p.launch.named_configs import named
from noloco_p2p.launch.yaml_entries import FREE_SECTION, Key, KnownKeys, SettingEntry, read_entries

WANTED = {
    "int": "be a whole number",
    "float": "be a number",
    "finite": "be a finite number",
    "bool": "be true or false",
    "string": "be text",
    "tuple": "be a list",
    "dict": "be a section of keys",
    "model": "be a section of keys",
}
"""First word of a pydantic error type → what the key must do."""

LIMITS = {"ge": "be at least", "gt": "be more than", "le": "be at most", "lt": "be less than", "expected": "be"}
LIMITS |= {"min_length": "have a length of at least", "max_length": "have a length of at most", "form": "be"}
"""Pydantic's name of the limit that a value violates → what the key must do."""

KNOWN = KnownKeys.of(RunManifest, NodeConfig)
CHOICES = (("inner", "optimizer"), ("outer", "rule"))
"""The last two parts of keys on which the defaults of the other keys in their section depend."""

Model = TypeVar("Model", RunManifest, NodeConfig)
SECURITY, ROOT_KEY, OPEN = "security", "root_key", "open"
"""`security: open` means that there is no key, and that a first node that others can reach does not make one either. A
root key of null, the default, does not mean that."""
Options = Mapping[str, tuple[str, object]]
"""Name of an option → (key, value); the value is None if the option was not given."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """All settings that were given; later entries override earlier ones. Made by `read`: keys and types are valid."""

    entries: tuple[SettingEntry, ...]

    def manifest(self) -> RunManifest:
        """The manifest of a first node. Raises ConfigError if its values contradict each other."""
        return self._validated(RunManifest)

    def node(self) -> NodeConfig:
        """The local settings. Raises ConfigError if they contradict each other."""
        return self._validated(NodeConfig)

    @property
    def names_the_run(self) -> bool:
        """Whether a key of the manifest is set. `security` does not count: a node finds the root key with its run."""
        return any(entry.key[0] in RunManifest.model_fields and entry.key[0] != SECURITY for entry in self.entries)

    @property
    def says_who_may_join(self) -> bool:
        """Whether `security`, or a key in it, is set."""
        return any(entry.key[0] == SECURITY for entry in self.entries)

    def for_members(self, root_key: str) -> "Overrides":
        """The same settings for a members-only run whose root key has this public half."""
        return Overrides((*self.entries, SettingEntry((SECURITY, ROOT_KEY), root_key, "--key")))

    def above(self, defaults: Mapping[Key, object]) -> "Overrides":
        """The same settings on top of a command's own defaults."""
        return Overrides((*(SettingEntry(key, value, "defaults") for key, value in defaults.items()), *self.entries))

    def _validated(self, model: type[Model]) -> Model:
        refuse(_faults(model, self.entries))
        return model.model_validate_json(_overlaid_json(model, self.entries), strict=True)

    def check_agrees(self, swarm: RunManifest, elsewhere: str = "in the swarm: leave it out") -> None:
        """Raise ConfigError, with a line for each manifest key given here whose value differs from that of the swarm.

        `elsewhere` is the end of each line: where the other value is set, and what to do.
        """
        theirs = dict(single_values(swarm.model_dump(mode="json")))
        mine = dict(single_values(json.loads(_overlaid_json(RunManifest, self.entries, swarm))))
        lines = []
        for key in dict.fromkeys([*mine, *theirs]):
            here, there = mine.get(key), theirs.get(key)
            if here != there:
                both = f"{'.'.join(key)} is {_shown(here)} here, {_shown(there)}"
                lines.append(f"{where(self.entries, key)}: {both} {elsewhere}")
        refuse(lines)


def read(
    path: Path | None, environ: Mapping[str, str], sets: Sequence[str], options: Options | None = None
) -> Overrides:
    """The settings from a file, the environment, `--set` and options. Raises ConfigError with a line for each fault."""
    faults: list[str] = []
    entries = read_entries(named(path), environ, sets, KNOWN, faults)
    given = [SettingEntry((name,), value, option) for option, (name, value) in (options or {}).items()]
    entries = [*map(_without_word, _without_null(entries)), *(entry for entry in given if entry.value is not None)]
    refuse([*faults, *_faults(RunManifest, entries, together=False), *_faults(NodeConfig, entries, together=False)])
    return Overrides(tuple(entries))


def manifest_from_json(data: bytes) -> RunManifest:
    """A manifest received from a peer. Raises Violation, in one line, if it is not valid."""
    if len(data) > MANIFEST_LIMIT_BYTES:
        raise Violation(f"the manifest received has {len(data)} bytes, more than {MANIFEST_LIMIT_BYTES}")
    try:
        return RunManifest.model_validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])[:100]
        message = f"the manifest received is not valid ({plain(name + ' ' + first['msg'], 300)})"
        raise Violation(f"{message}: does the peer run another version?") from error


def _without_null(entries: Sequence[SettingEntry]) -> Sequence[SettingEntry]:
    """The entries. If the last word on `security` is a root key of null, which is the default, those on it are left
    out: nothing was said."""
    said = [entry for entry in entries if entry.key[0] == SECURITY]
    is_null = bool(said) and said[-1].key[1:] == (ROOT_KEY,) and said[-1].value is None
    return [entry for entry in entries if entry not in said] if is_null else entries


def _without_word(entry: SettingEntry) -> SettingEntry:
    """Replace `security: open` by what it stands for: no root key."""
    is_word = entry.key == (SECURITY,) and entry.value == OPEN
    return SettingEntry((SECURITY, ROOT_KEY), None, entry.where) if is_word else entry


def _overlaid_json(model: type[Model], entries: Sequence[SettingEntry], base: Model | None = None) -> str:
    """`base`, or the model's defaults, overlaid with the entries, as JSON."""
    mine = [entry for entry in entries if entry.key[0] in model.model_fields]
    values = over_defaults(mine, model()) if base is None else overlaid(mine, base.model_dump(mode="json"))
    return json.dumps(values, default=str, skipkeys=True)  # a date is a key in YAML, not in JSON


def over_defaults(entries: Sequence[SettingEntry], defaults: BaseModel) -> dict[str, Any]:
    """The defaults overlaid with the entries. An entry for one of `CHOICES` brings the defaults that go with it."""
    emptied = [SettingEntry(entry.key[:-1], {}, entry.where) for entry in entries if entry.key[-2:] in CHOICES]
    return overlaid([*emptied, *entries], defaults.model_dump(mode="json"))


def overlaid(entries: Sequence[SettingEntry], values: dict[str, Any]) -> dict[str, Any]:
    """A model's values overlaid with the entries. Modifies and returns `values`."""
    for entry in entries:
        section = values
        for name in entry.key[:-1]:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        section[entry.key[-1]] = dict(entry.value) if isinstance(entry.value, dict) else entry.value
    return values


def _faults(model: type[Model], entries: Sequence[SettingEntry], *, together: bool = True) -> list[str]:
    """A line for each fault. `together`: also for values that contradict each other, which have no single place."""
    found: dict[Key, str] = {}
    try:
        model.model_validate_json(_overlaid_json(model, entries), strict=True)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            location = tuple(str(part) for part in each["loc"])
            key = location[:3] if location[:2] == FREE_SECTION else KNOWN.longest(location)
            if key or together:
                words = in_words(key, dict(each))
                found.setdefault(key, f"{where(entries, key, words)}: {words}" if key else words)
    return list(found.values())


def in_words(key: Key, error: dict[str, Any]) -> str:
    """An error of pydantic in plain words."""
    kind, context = str(error["type"]), dict(error.get("ctx", {}))
    name = ".".join(key)
    if key[:2] == FREE_SECTION and len(key) == 3:
        return f"{name} must be a number, text, true, false, null, or a list of them"
    if kind == "value_error":
        return str(context.get("error", error["msg"]))
    if kind == "json_invalid":
        return "a value is not UTF-8 text; it may begin with the name of the current directory"
    limit = next((f"{words} {context[limit]}" for limit, words in LIMITS.items() if limit in context), None)
    wanted = limit or WANTED.get(kind.split("_")[0])
    value = "" if isinstance(error.get("input"), dict) else f", not {error.get('input')!r}"
    return f"{name} must {wanted}{value}" if wanted else f"{name}: {error['msg']}"


def where(entries: Sequence[SettingEntry], key: Key, message: str = "") -> str:
    """The place of the last entry for this key; otherwise of the last one above or below it, if possible of one that
    the `message` names; otherwise `defaults`."""
    exact = [entry.where for entry in entries if entry.key == key]
    related = [entry for entry in entries if entry.key[: len(key)] == key[: len(entry.key)]]
    named = [entry.where for entry in related if entry.key[-1] in re.findall(r"\w+", message)]
    return ["defaults", *(entry.where for entry in related), *named, *exact][-1]


def single_values(section: Mapping[str, Any], key: Key = ()) -> Iterator[tuple[Key, object]]:
    """Every key and value that is not a section."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from single_values(value, (*key, name))
        else:
            yield (*key, name), value


def _shown(value: object) -> str:
    return "not set" if value is None else repr(value)


def refuse(lines: list[str]) -> None:
    """Raise ConfigError with these lines, if there are any."""
    if lines:
        raise ConfigError("\n".join(lines))
