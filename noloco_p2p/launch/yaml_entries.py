"""Reads single settings as they were written, each with its place: the line of a YAML file, a variable, or `--set`.

The keys that exist come from pydantic models; the values are not checked here.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from noloco_p2p.errors import ConfigError
from noloco_p2p.humanize import plain

Key = tuple[str, ...]

ENVIRONMENT_PREFIX = "NOLOCO__"
FREE_SECTION: Key = ("model", "config")
"""The one section with arbitrary keys. Given as a whole, it replaces the default section; single keys modify that."""
SUCCESSORS = {("wire_dtype",): "wire.forward, with wire.backward"}
"""Keys of earlier versions → the keys that replace them."""
UNREADABLE = (yaml.YAMLError, ValueError, RecursionError, AttributeError, LookupError)
"""The exceptions that PyYAML raises for text that is not YAML."""
SIGNS_AND_DIGITS = list("-+0123456789")
WITH_EXPONENT = re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
NO_NUMBER = re.compile(r"^[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)$")
"""A time of day, or digits after a zero."""


class SettingEntry(NamedTuple):
    """One key that was set."""

    key: Key
    value: object
    where: str
    """`file:line`, the name of the variable, or the option."""


class SettingsLoader(yaml.SafeLoader):
    """Reads YAML the way people mean it: YAML 1.1 would read `1e-3` as text, `22:00` as 1320 and `010` as 8.

    Aliases of lists and sections are refused, because aliases of aliases can turn a small file into a huge value.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node, or the node that an alias stands for."""
        alias = self.peek_event() if self.check_event(yaml.AliasEvent) else None  # type: ignore[no-untyped-call]
        node: yaml.Node | None = super().compose_node(parent, index)
        if alias is not None and not isinstance(node, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(
                problem="an alias of a list or a section: write it out", problem_mark=alias.start_mark
            )
        return node


SettingsLoader.add_implicit_resolver("tag:yaml.org,2002:float", WITH_EXPONENT, SIGNS_AND_DIGITS)
for first in SIGNS_AND_DIGITS:  # first in the list, because one of YAML's own resolvers would match too
    SettingsLoader.yaml_implicit_resolvers[first].insert(0, ("tag:yaml.org,2002:str", NO_NUMBER))


def fields(model: type[BaseModel], key: Key = ()) -> Iterator[tuple[Key, FieldInfo]]:
    """Every key of a model that is not a section, in the order of the source."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation, (*key, name))
        else:
            yield (*key, name), field


class KnownKeys(NamedTuple):
    """The keys that can be set."""

    keys: dict[Key, FieldInfo]
    """In the order of the source."""
    sections: set[Key]
    """The sections that contain them, including ()."""

    @classmethod
    def of(cls, *models: type[BaseModel]) -> "KnownKeys":
        """The keys of all these models together."""
        keys = {key: field for model in models for key, field in fields(model)}
        return cls(keys, {key[:n] for key in keys for n in range(len(key))})

    def holds(self, key: Key) -> bool:
        """Whether this key or section exists."""
        free = key[:-1] == FREE_SECTION and FREE_SECTION in self.keys
        return key in self.keys or key in self.sections or free

    def longest(self, location: Key) -> Key:
        """The key or section at or above the location of a fault; () if there is none."""
        starts = (location[:n] for n in range(len(location), 0, -1))
        return next((key for key in starts if key in self.keys or key in self.sections), ())

    def nearest(self, key: Key) -> str:
        """The existing key that most resembles an unknown one."""
        if key in SUCCESSORS:
            return SUCCESSORS[key]
        names = {".".join(known): known for known in self.keys}
        same = [name for name, known in names.items() if known[-1] == key[-1]]  # in another section, or in one left out
        near = same or difflib.get_close_matches(".".join(key), names, 1, 0.75)
        if not near:  # the same, mistyped as well
            last = difflib.get_close_matches(key[-1], [known[-1] for known in self.keys], 1, 0.75)
            near = [name for name, known in names.items() if last and known[-1] == last[0]]
        return (near or difflib.get_close_matches(".".join(key), names, 1, 0.0))[0]


def read_entries(
    path: Path | None, environ: Mapping[str, str], sets: Sequence[str], known: KnownKeys, faults: list[str]
) -> list[SettingEntry]:
    """The settings from the file, the environment (`NOLOCO__A__B`) and the `--set a.b=v` options, in that order.

    A later entry overrides an earlier one. Invalid YAML and unknown keys are left out, each with a line in `faults`.
    Raises ConfigError if the file cannot be read at all.
    """
    entries = [] if path is None else _Reader(_text_of(path), str(path), True, known, faults).entries(())
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT_PREFIX):
            key = tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
            entries += _Reader(environ[name], name, False, known, faults).entries(key)
    for option in sets:
        name, equals, text = (part.strip() for part in option.partition("="))
        if name and equals:
            entries += _Reader(text, f"--set {name}", False, known, faults).entries(tuple(name.split(".")))
        else:
            faults.append(f"--set {option}: write it as --set key=value")
    for key, _, place in entries:
        name = ".".join(key)
        if not known.holds(key) and known.holds(parts := tuple(name.split("."))):
            faults.append(f"{place}: dots are for --set; here write {': {'.join(parts)}: …{'}' * (len(parts) - 1)}")
        elif not known.holds(key):
            faults.append(f"{place}: there is no key {name}; the nearest is {known.nearest(key)}")
    return [entry for entry in entries if known.holds(entry.key)]


def _text_of(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}") from error


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads one text: a whole file, or the value of a variable or option, which may be a section (`{a: 1, b: 2}`)."""

    text: str
    source: str
    is_file: bool
    known: KnownKeys
    faults: list[str]

    def entries(self, key: Key) -> list[SettingEntry]:
        """The settings in the text, at and below a key; none, with a line in `faults`, if it is not valid YAML."""
        try:
            loader = SettingsLoader(self.text)
            root = loader.get_single_node()
            if root is None:
                return [] if self.is_file else [SettingEntry(key, None, self.source)]
            if not self.is_file or isinstance(root, yaml.MappingNode):
                return list(self._walk(loader, key, root, self.source))
            self.faults.append(f"{self._place(root.start_mark)}: expected lines of the form `key: value`")
        except UNREADABLE as error:
            problem, mark = None, None
            if isinstance(error, yaml.MarkedYAMLError):
                problem, mark = error.problem, error.problem_mark
                if error.context == "while scanning an alias":  # most likely it is a glob, such as *.txt
                    problem = "text that begins with * must be in quotes"
            problem = problem or " ".join(str(error).split()) or type(error).__name__
            self.faults.append(f"{self._place(mark)}: not valid YAML: {problem}")
        return []

    def _place(self, mark: yaml.Mark | None) -> str:
        return f"{self.source}:{mark.line + 1}" if self.is_file and mark is not None else self.source

    def _walk(self, loader: SettingsLoader, key: Key, node: yaml.Node, place: str) -> Iterator[SettingEntry]:
        """The entries at and below a node; the line of an entry is that of its key, not of its value."""
        if isinstance(node, yaml.MappingNode):
            named = ((plain(str(name.value), 100), name.start_mark, value) for name, value in node.value)
            lines = [((*key, name), self._place(mark), value) for name, mark, value in named]
            for i, (below, where, _) in enumerate(lines):
                if below in [earlier for earlier, *_ in lines[:i]]:
                    self.faults.append(f"{where}: {'.'.join(below)} is set a second time")
            if key == FREE_SECTION:
                yield SettingEntry(key, {}, place)
            if key in self.known.sections or key == FREE_SECTION:
                for below, where, value in lines:
                    yield from self._walk(loader, below, value, where)
                return
        if key in self.known.sections and isinstance(node, yaml.ScalarNode) and node.value == "":
            return  # a section whose lines are all comments
        yield SettingEntry(key, loader.construct_object(node, deep=True), place)
