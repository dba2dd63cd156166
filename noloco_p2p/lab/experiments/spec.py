"""What an experiment is. Each module of this package that is one offers it as `EXPERIMENT`.

def runs(quick: bool) -> list[Case]: ...        which cases there are
def measure(case: Case) -> Figures: ...         one case, in a process of its own
def tell(results: Results) -> list[Block]: ...  what the report says of them

EXPERIMENT = Experiment("latency", question="…", setting="…", limits="…", runs=runs, measure=measure, tell=tell)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from noloco_p2p.lab.experiments.markdown_page import Block

Figures = dict[str, Any]
"""What was measured in one case: JSON values only, no NaN and no infinity (say None)."""


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement."""

    name: str
    """Short, unique in its experiment."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """All that the figures follow from, JSON values only; `seed` is the one of its chance."""


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
"""In the order of the cases."""


def nothing_further(quick: bool, results: Results) -> list[Case]:
    """No case depends on what others gave."""
    return []


@dataclass(frozen=True, slots=True)
class Experiment:
    """A question, and all it takes to answer it."""

    name: str
    """That of its module."""
    question: str
    """One or two sentences."""
    setting: str
    """What is held fixed and what is varied, in Markdown."""
    limits: str
    """What the results do not show, in Markdown."""
    runs: Callable[[bool], list[Case]]
    """The cases; True: those of `--quick`. Long ones first use the processes best."""
    measure: Callable[[Case], Figures]
    """A function of the case only; at module level, as it is called in processes that are started fresh (one thread
    each). Torch and other heavy modules are imported inside it."""
    tell: Callable[[Results], list[Block]]
    """The report's findings, from the results and `paper.json` only; it fails for no legal figures."""
    further: Callable[[bool, Results], list[Case]] = nothing_further
    """Cases that depend on the results so far, asked again until it gives no new ones."""
