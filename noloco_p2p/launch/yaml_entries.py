"""Single settings as somebody wrote them, each with the place where it stands: YAML read with line numbers.

Which keys there are comes from the models, of config.py by default; their values are not looked at here.
"""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.errors import ConfigError

Key = tuple[str, ...]

FREE_SECTION: Key = ("model", "config")
"""The one section whose keys are not ours. Given as a section it replaces the default's; single keys change it."""


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
    """What keys stand in, () included."""


def vocabulary(*models: type[BaseModel]) -> KnownKeys:
    """Of a file that may hold the keys of all these models."""
    keys = {key: field for model in models for key, field in fields(model)}
    return KnownKeys(keys, {key[:n] for key in keys for n in range(len(key))})


SETTINGS = KEYS, SECTIONS = vocabulary(RunManifest, NodeConfig)


def from_file(path: Path, faults: list[str], known: KnownKeys = SETTINGS) -> list[SettingEntry]:
    """The entries of a YAML file. ConfigError when it cannot be read at all; a key that stands twice is a fault."""
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
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}{_line_of(error)}: not valid YAML: {_problem(error)}") from error
    raise ConfigError(f"{path}:{root.start_mark.line + 1}: a file with lines `key: value` is wanted")


def from_text(key: Key, text: str, where: str, faults: list[str], known: KnownKeys = SETTINGS) -> list[SettingEntry]:
    """The entries of one variable or option; a whole section may be given as `{a: 1, b: 2}`."""
    try:
        loader = SettingsLoader(text)
        node = loader.get_single_node()
        found = (
            [SettingEntry(key, None, where)] if node is None else list(_walk(loader, key, node, where, faults, known))
        )
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        faults.append(f"{where}: not valid YAML: {_problem(error)}")
        return []
    return [entry._replace(where=where) for entry in found]


def unknown(entry: SettingEntry, known: KnownKeys = SETTINGS) -> str | None:
    """The fault of an entry whose key does not exist, with the nearest one that does; None when it exists."""
    free = entry.key[:-1] == FREE_SECTION and FREE_SECTION in known.keys
    if entry.key in known.keys or entry.key in known.sections or free:
        return None
    names = {".".join(key): key for key in known.keys}
    near = difflib.get_close_matches(entry.name, names, 1, 0.75)
    if not near:  # the right name in the wrong section, or the section left out
        last = difflib.get_close_matches(entry.key[-1], [key[-1] for key in known.keys], 1)
        near = [name for name, key in names.items() if last and key[-1] == last[0]]
    near = near or difflib.get_close_matches(entry.name, names, 1, 0.0)
    return f"{entry.where}: there is no key {entry.name}; the nearest is {near[0]}"


def _walk(
    loader: SettingsLoader, key: Key, node: yaml.Node, path: str, faults: list[str], known: KnownKeys
) -> Iterator[SettingEntry]:
    where = f"{path}:{node.start_mark.line + 1}"
    is_section = key in known.sections or key == FREE_SECTION
    if isinstance(node, yaml.MappingNode):
        names = [str(name.value) for name, _ in node.value]
        for i, (name, _) in enumerate(node.value):
            if names[i] in names[:i]:
                place = f"{path}:{name.start_mark.line + 1}"
                faults.append(f"{place}: {'.'.join((*key, names[i]))} stands here a second time")
        if is_section:
            if key == FREE_SECTION:
                yield SettingEntry(key, {}, where)
            for name, value in node.value:
                inner = (*key, str(name.value))
                for entry in _walk(loader, inner, value, path, faults, known):
                    place = f"{path}:{name.start_mark.line + 1}"
                    yield entry._replace(where=place) if entry.key == inner else entry
            return
    if key in known.sections and isinstance(node, yaml.ScalarNode) and node.value == "":
        return  # a section whose lines are all comments
    yield SettingEntry(key, loader.construct_object(node, deep=True), where)


def _line_of(error: Exception) -> str:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    return f":{mark.line + 1}" if mark else ""


def _problem(error: Exception) -> str:
    problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else None
    return problem or " ".join(str(error).split()) or type(error).__name__
