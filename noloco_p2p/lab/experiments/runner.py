"""Measures the cases of an experiment in separate processes, and writes `results.json`, `report.md` and the charts.

Every result is written to disk at once. Repeating the command continues where it was stopped, unless the package's code
has changed since.
"""

import hashlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, wait
from dataclasses import dataclass, field
from pathlib import Path

import noloco_p2p
from noloco_p2p.errors import NO_JSON, ConfigError
from noloco_p2p.host import cores
from noloco_p2p.humanize import plural
from noloco_p2p.io.durable_files import writing
from noloco_p2p.lab.experiments.results import charts, markdown
from noloco_p2p.lab.experiments.spec import Case, Experiment, Figures, Result
from noloco_p2p.lab.processes import workers
from noloco_p2p.launch import homes
from noloco_p2p.launch.homes import Home
from noloco_p2p.launch.progress_line import Position, ProgressLine
from noloco_p2p.launch.run_files import write_json
from noloco_p2p.observe.plotting import plots

RESULTS, REPORT = "results.json", "report.md"


def run(experiment: Experiment, out: Path, say: Callable[[str], None], *, quick: bool = False, jobs: int = 2) -> Path:
    """Run an experiment, and write its report to the directory `out`. Returns the report's path. `say` gets a line per
    case.

    `quick` is a smaller version that answers the same question less precisely. `jobs` processes measure at once, with
    one thread each. Raises ConfigError if the directory has another experiment's results, LocalError if it cannot be
    written, and whatever `measure` raises. Results measured before an error stay on disk.
    """
    homes.require("--out ", out, Home.EXPERIMENT, Home.EMPTY)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    file = ResultsFile(experiment, out / RESULTS, quick, jobs, code_digest())
    if kept := file.read():
        say(f"{file.path} already has {plural(kept, 'case')}")

    def position() -> Position:
        done, whole = len(file.found) - kept, len(file.cases) - kept
        return f"{done} of {whole} cases", done / whole if whole else 0.0

    def say_all(words: str) -> None:
        line.clear()
        say(f"{words}; {line.text()}")

    with ProgressLine(position, terminal_only=True) as line:
        if cases := file.missing():
            length = "quick version: minutes" if quick else "full version: minutes to hours; --quick takes minutes"
            say(f"{experiment.name}, {length}: {plural(len(cases), 'case')}, {jobs} at a time, reported as they end")
        while cases := file.missing():
            with workers(min(jobs, len(cases)), OMP_NUM_THREADS="1") as pool:
                _measure(pool, cases, file, say_all)
    file.write(complete=True)
    with writing(out):
        return _report(file)


@dataclass
class ResultsFile:
    """The results so far, in memory and in `results.json`."""

    experiment: Experiment
    path: Path
    quick: bool
    jobs: int
    code: str
    """The version of the code that measures: see `code_digest`."""
    cases: dict[str, Case] = field(default_factory=dict)
    """The cases known so far, by name."""
    found: dict[str, Result] = field(default_factory=dict)
    """By name of the case, in the order of completion."""

    @property
    def results(self) -> list[Result]:
        """The results in the order of the cases, not of their completion."""
        return [self.found[name] for name in self.cases if name in self.found]

    def missing(self) -> list[Case]:
        """The cases still to be measured; if there are none, those that follow from the results."""
        if len(self.found) == len(self.cases):
            ask = self.experiment
            cases = ask.further(self.quick, self.results) if self.cases else ask.cases(self.quick)
            names = [case.name for case in cases]
            if len(set(names)) < len(names) or any(self.cases.get(case.name, case) != case for case in cases):
                raise ValueError(f"two cases have the same name: {sorted(names)}")
            self.cases |= dict(zip(names, cases, strict=True))
        return [case for name, case in self.cases.items() if name not in self.found]

    def read(self) -> int:
        """Read the results of an earlier run with the same code. Returns their number.

        Raises ConfigError if the file is malformed or from another experiment.
        """
        if not self.path.exists():
            return 0
        try:
            old = json.loads(self.path.read_text())
            name, quick, code, walls = old["experiment"], old["quick"], old["code"], old["wall"]["cases_s"]
            kept = {run["case"]: (run["figures"], walls[run["case"]]) for run in old["runs"]}
        except (*NO_JSON, KeyError, TypeError) as error:
            raise ConfigError(f"{self.path} is not a results file of noloco; give another --out") from error
        if (name, quick) != (self.experiment.name, self.quick):
            raise ConfigError(f"{self.path} is from a {'quick' if quick else 'full'} run of {name}; give another --out")
        if code != self.code:
            return 0
        while known := [case for case in self.missing() if case.name in kept]:
            self.found |= {case.name: Result(case, *kept[case.name]) for case in known}
        return len(self.found)

    def write(self, *, complete: bool) -> None:
        """Write everything atomically. Wall times are kept separate, so that the rest is the same for equal runs."""
        runs = [{"case": one.case.name, "settings": one.case.settings, "figures": one.figures} for one in self.results]
        document = {"experiment": self.experiment.name, "quick": self.quick, "complete": complete}
        wall = {"jobs": self.jobs, "cores": cores(), "python": platform.python_version()}
        walls = {"wall": {**wall, "cases_s": {one.case.name: one.wall_s for one in self.results}}}
        write_json(self.path, document | {"code": self.code, "runs": runs} | walls)


def code_digest() -> str:
    """SHA-256 of the package's sources: results are only reused by the same code."""
    root = Path(noloco_p2p.__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.json")]):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


# --- the processes --------------------------------------------------------------------------------------------------


def _measure(pool: Executor, cases: Sequence[Case], file: ResultsFile, say: Callable[[str], None]) -> None:
    waiting = {pool.submit(_timed, file.experiment.measure, case): case for case in cases}
    while waiting:
        done, _ = wait(waiting, return_when=FIRST_COMPLETED)
        # Store the results before a failure ends the run.
        for future in sorted(done, key=lambda one: (one.exception() is not None, waiting[one].name)):
            case = waiting.pop(future)
            if (error := future.exception()) is not None:
                error.add_note(f"in case {case.name} of {file.experiment.name}: {dict(case.settings)}")
                raise error
            file.found[case.name] = result = future.result()
            file.write(complete=False)
            say(f"[{len(file.found)}/{len(file.cases)}] {case.name}: {result.wall_s:.1f} s")


def _timed(measure: Callable[[Case], Figures], case: Case) -> Result:
    began = time.perf_counter()
    figures = measure(case)
    # Keep what a restart would read: tuples become lists, and non-finite numbers None.
    figures = json.loads(json.dumps(figures), parse_constant=lambda constant: None)
    return Result(case, figures, time.perf_counter() - began)


# --- the report -----------------------------------------------------------------------------------------------------


def _report(file: ResultsFile) -> Path:
    experiment, results, out = file.experiment, file.results, file.path.parent
    answer, *blocks = experiment.report(results)
    for chart in charts(blocks):
        plots.save(chart, out)
    seeds = ", ".join(str(seed) for seed in sorted({one["seed"] for one in results if "seed" in one.case.settings}))
    quick = "This is the quick version: fewer and shorter cases than the full one."
    # How it was measured, and how to repeat it.
    made = (
        f"{len(results)} cases{f', seeds {seeds}' if seeds else ''}, each with its settings and figures in"
        f" [{RESULTS}]({RESULTS}). {sum(one.wall_s for one in results):.0f} s of computing in total, {file.jobs} at a"
        f" time on {cores()} cores. To repeat: `noloco experiment {experiment.name}"
        f"{' --quick' if file.quick else ''}`. Code: `{file.code[:12]}`."
    )
    head = [f"# {experiment.name}", experiment.question, f"**{answer}**", *([quick] if file.quick else [])]
    head += ["## Setting", experiment.setting, "## Results"]
    tail = ["## What this does not show", experiment.limits, "## Runs", made]
    (out / REPORT).write_text(markdown([*head, *blocks, *tail]), "utf-8")
    return out / REPORT
