"""Single settings as somebody wrote them, each with its place: a YAML file with line numbers, variables, `--set`.

The keys that exist come from pydantic models; what the values mean is not checked here.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from noloco_p2p.errors import ConfigError

Key = tuple[str, ...]

ENVIRONMENT_PREFIX = "NOLOCO__"
FREE_SECTION: Key = ("model", "config")
"""The one section whose keys are not ours. Given as a section it replaces the default's; single keys change it."""
UNREADABLE = (yaml.YAMLError, ValueError, RecursionError)
"""What PyYAML raises for text that is not YAML."""


class SettingEntry(NamedTuple):
    """One key that somebody has set."""

    key: Key
    value: object
    where: str
    """`file:line`, the variable or the option."""

    @property
    def name(self) -> str:
        """The key with dots."""
        return ".".join(self.key)


class SettingsLoader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-3` as text; everybody means the number."""


SettingsLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def fields(model: type[BaseModel], key: Key = ()) -> Iterator[tuple[Key, FieldInfo]]:
    """Every key of a model that is no section, in the order of the source."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation, (*key, name))
        else:
            yield (*key, name), field


class KnownKeys(NamedTuple):
    """The keys that somebody may set."""

    keys: dict[Key, FieldInfo]
    """In the order of the source."""
    sections: set[Key]
    """The sections that contain them, () included."""

    @classmethod
    def of(cls, *models: type[BaseModel]) -> "KnownKeys":
        """Those of a file that may hold the keys of all these models."""
        keys = {key: field for model in models for key, field in fields(model)}
        return cls(keys, {key[:n] for key in keys for n in range(len(key))})

    def holds(self, key: Key) -> bool:
        """Whether this key or section exists."""
        free = key[:-1] == FREE_SECTION and FREE_SECTION in self.keys
        return key in self.keys or key in self.sections or free

    def longest(self, location: Key) -> Key:
        """The key or section at or above the place of a fault; () where there is none."""
        starts = (location[:n] for n in range(len(location), 0, -1))
        return next((key for key in starts if key in self.keys or key in self.sections), ())

    def nearest(self, key: Key) -> str:
        """The existing key that resembles most one that does not exist."""
        names = {".".join(known): known for known in self.keys}
        near = difflib.get_close_matches(".".join(key), names, 1, 0.75)
        if not near:  # the right name in the wrong section, or the section left out
            last = difflib.get_close_matches(key[-1], [known[-1] for known in self.keys], 1)
            near = [name for name, known in names.items() if last and known[-1] == last[0]]
        return (near or difflib.get_close_matches(".".join(key), names, 1, 0.0))[0]


def read_entries(
    path: Path | None,
    environ: Mapping[str, str],
    sets: Sequence[str],
    known: KnownKeys,
    faults: list[str],
) -> list[SettingEntry]:
    """What the file, the environment (`NOLOCO__A__B`) and the `--set a.b=v` options set, later entries before earlier.

    What is not YAML and keys that do not exist are left out, each with a line in `faults`. Raises ConfigError when
    the file cannot be read at all.
    """
    entries = [] if path is None else _from_file(path, faults, known)
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT_PREFIX):
            key = tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
            entries += _from_text(key, environ[name], name, faults, known)
    for option in sets:
        name, equals, text = (part.strip() for part in option.partition("="))
        if equals:
            entries += _from_text(tuple(name.split(".")), text, f"--set {name}", faults, known)
        else:
            faults.append(f"--set {option}: write it as --set key=value")
    for entry in entries:
        if not known.holds(entry.key):
            faults.append(f"{entry.where}: there is no key {entry.name}; the nearest is {known.nearest(entry.key)}")
    return [entry for entry in entries if known.holds(entry.key)]


def _from_file(path: Path, faults: list[str], known: KnownKeys) -> list[SettingEntry]:
    try:
        loader = SettingsLoader(path.read_text("utf-8"))
        root = loader.get_single_node()
        if root is None:
            return []
        if isinstance(root, yaml.MappingNode):
            return list(_walk(loader, (), root, str(path), faults, known))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}") from error
    except UNREADABLE as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {_problem(error)}") from error
    raise ConfigError(f"{path}:{root.start_mark.line + 1}: a file with lines `key: value` is wanted")


def _from_text(key: Key, text: str, where: str, faults: list[str], known: KnownKeys) -> list[SettingEntry]:
    """The entries of one variable or option; a whole section may be given as `{a: 1, b: 2}`."""
    try:
        loader = SettingsLoader(text)
        node = loader.get_single_node()
        if node is None:
            return [SettingEntry(key, None, where)]
        return [entry._replace(where=where) for entry in _walk(loader, key, node, where, faults, known)]
    except UNREADABLE as error:
        faults.append(f"{where}: not valid YAML: {_problem(error)}")
        return []


def _walk(
    loader: SettingsLoader, key: Key, node: yaml.Node, path: str, faults: list[str], known: KnownKeys
) -> Iterator[SettingEntry]:
    """The entries at and below a node; the line of an entry is that of its key, not of its value."""
    where = f"{path}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        lines = [(str(name.value), f"{path}:{name.start_mark.line + 1}", value) for name, value in node.value]
        for i, (name, place, _) in enumerate(lines):
            if name in [earlier for earlier, *_ in lines[:i]]:
                faults.append(f"{place}: {'.'.join((*key, name))} is set a second time")
        if key == FREE_SECTION:
            yield SettingEntry(key, {}, where)
        if key in known.sections or key == FREE_SECTION:
            for name, place, value in lines:
                for entry in _walk(loader, (*key, name), value, path, faults, known):
                    yield entry._replace(where=place) if entry.key == (*key, name) else entry
            return
    if key in known.sections and isinstance(node, yaml.ScalarNode) and node.value == "":
        return  # a section whose lines are all comments
    yield SettingEntry(key, loader.construct_object(node, deep=True), where)


def _problem(error: Exception) -> str:
    problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else None
    return problem or " ".join(str(error).split()) or type(error).__name__
