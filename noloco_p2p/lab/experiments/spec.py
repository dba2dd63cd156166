"""What an experiment is: a module with the functions below.

Its docstring is part of the report: the question (the first paragraph), the setting, and after "Limits:" what
the results do not show, in Markdown. `{NAME}` stands for a constant of the module.

    def cases(quick: bool) -> list[Case]: ...         the cases
    def measure(case: Case) -> Figures: ...           measures one case in a process of its own
    def report(results: Results) -> list[Block]: ...  the answer in one sentence, then the other findings

Optional: `further`, cases that depend on the results so far.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, NamedTuple, Self

from noloco_p2p.observe.plotting.plots import Chart

Cell = str | int | float | None
"""A float is shown with four significant digits, None as a dash."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    """Markdown above the table."""


Block = str | Table | Chart
"""A string is a paragraph of Markdown (a heading: `### …`)."""
Figures = dict[str, Any]
"""The measured values of one case: JSON values only. The runner keeps None for what is not finite."""


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement."""

    name: str
    """Short and unique in its experiment."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Everything that determines the figures, JSON values only; `seed` is the seed of all random draws."""

    @classmethod
    def named(cls, name: str, **settings: Any) -> Self:
        """A case with these settings, which also form its name: `n{replicas}-{seed}`."""
        return cls(name.format_map(settings), settings)


def seeded(name: str, variants: Iterable[NamedTuple], seeds: Iterable[int], **settings: Any) -> list[Case]:
    """A case for each variant, whose fields are settings, with each seed."""
    return [Case.named(name, **one._asdict(), seed=seed, **settings) for one in variants for seed in seeds]


@dataclass(frozen=True, slots=True)
class Result:
    """One case and its figures."""

    case: Case
    figures: Figures
    wall_s: float
    """Seconds that it took on this machine, for the report's last lines and never for its findings."""

    def __getitem__(self, name: str) -> Any:
        """The figure with this name, or otherwise the setting. Raises KeyError if there is neither."""
        return self.figures[name] if name in self.figures else self.case.settings[name]


Results = Sequence[Result]
"""In the order of the cases; results that differ only in the seed are in the order of their seeds."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """A question, and everything needed to answer it."""

    name: str
    question: str
    setting: str
    """What is held fixed and what is varied, in Markdown."""
    limits: str
    """What the results do not show, in Markdown."""
    cases: Callable[[bool], list[Case]]
    """The cases, or with True those of `--quick`. Putting long cases first makes the best use of the processes."""
    measure: Callable[[Case], Figures]
    """A function of the case only, at module level, because it runs in newly started processes (one thread each). It
    imports torch and other heavy modules itself."""
    report: Callable[[Results], list[Block]]
    """The report's findings, from the results and `paper.json` only. The first is the answer to the question, in one
    sentence. It must not fail for any valid figures."""
    further: Callable[[bool, Results], list[Case]] = lambda quick, results: []
    """Cases that depend on the results so far. It is called again until it returns no new ones."""

    @classmethod
    def of(cls, name: str, module: Mapping[str, Any]) -> Self:
        """The experiment that a module is, given what it defines."""
        question, setting = str(module["__doc__"]).format_map(module).split("\n\n", 1)
        setting, limits = setting.split("\n\nLimits: ")
        functions = {key: module[key] for key in ("cases", "measure", "report", "further") if key in module}
        return cls(name, " ".join(question.split()), setting, limits.strip(), **functions)


def published() -> dict[str, Any]:
    """The paper's figures (arXiv 2506.10911) by name; `source` names the tables."""
    figures: dict[str, Any] = json.loads(resources.files(__package__).joinpath("paper.json").read_text())
    return figures
