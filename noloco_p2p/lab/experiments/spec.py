"""What an experiment is, and what all of them share. Each module that is one offers it as `EXPERIMENT`.

Its docstring is what the report says of it: the question (the first paragraph), the setting, and after "Limits:" what
the results do not show, in Markdown; `{NAME}` stands for a constant of the module.

def cases(quick: bool) -> list[Case]: ...         which cases there are
def measure(case: Case) -> Figures: ...           one case, in a process of its own
def report(results: Results) -> list[Block]: ...  what the report says of them

EXPERIMENT = Experiment("latency", describe(globals()), cases, measure, report)
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Self

from noloco_p2p.lab.experiments.markdown_page import Block

Figures = dict[str, Any]
"""What was measured in one case: JSON values only, no NaN and no infinity (None instead)."""


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement."""

    name: str
    """Short, unique in its experiment."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """All that the figures follow from, JSON values only; `seed` is the one of its random draws."""

    @classmethod
    def named(cls, name: str, **settings: Any) -> Self:
        """The case of these settings, which also make its name: `n{replicas}-{seed}`."""
        return cls(name.format_map(settings), settings)


@dataclass(frozen=True, slots=True)
class Result:
    """One case and what was measured."""

    case: Case
    figures: Figures
    wall_s: float
    """Seconds that it took on this machine: for the report's last lines, never for its findings."""

    def __getitem__(self, name: str) -> Any:
        """A figure, or else a setting. Raises KeyError when it has none of that name."""
        return self.figures[name] if name in self.figures else self.case.settings[name]


Results = Sequence[Result]
"""In the order of the cases; in a group of equal settings by seed."""


@dataclass(frozen=True, slots=True)
class ReportText:
    """What a report says of an experiment before and after its findings, in Markdown."""

    question: str
    setting: str
    """What is held fixed and what is varied."""
    limits: str
    """What the results do not show."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """A question, and all it takes to answer it."""

    name: str
    text: ReportText
    cases: Callable[[bool], list[Case]]
    """The cases; True: those of `--quick`. Long ones first use the processes best."""
    measure: Callable[[Case], Figures]
    """A function of the case only; at module level, as it is called in processes that are started fresh (one thread
    each). Torch and other heavy modules are imported inside it."""
    report: Callable[[Results], list[Block]]
    """The report's findings, from the results and `paper.json` only; no legal figures make it fail."""
    further: Callable[[bool, Results], list[Case]] = lambda quick, results: []
    """Cases that depend on the results so far, asked for again until it gives no new ones."""


def describe(module: Mapping[str, Any]) -> ReportText:
    """From the docstring of an experiment's module, `globals()`."""
    question, setting = str(module["__doc__"]).format_map(module).split("\n\n", 1)
    setting, limits = setting.split("\n\nLimits: ")
    return ReportText(" ".join(question.split()), setting, limits.strip())


def published() -> dict[str, Any]:
    """What the paper reports (arXiv 2506.10911), by name; its `source` says from which tables."""
    figures: dict[str, Any] = json.loads(resources.files(__package__).joinpath("paper.json").read_text())
    return figures
