"""The parts that experiments share: a runner that keeps measurements, the report, the command that lists them."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_experiment import FAILING, FOLLOWED, MARKS, NOT_FINITE, TOY
from typer.testing import CliRunner

import noloco_p2p
from noloco_p2p.cli.main import app
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.lab.experiments import EXPERIMENTS, find, runner
from noloco_p2p.lab.experiments.results import markdown, mean_std
from noloco_p2p.lab.experiments.spec import Case, Experiment, Table, published
from noloco_p2p.observe.plotting.plots import Curve, Plot, save


class _Here(Executor):
    """Runs submitted work at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except (ArithmeticError, ValueError) as error:
            future.set_exception(error)
        return future


@pytest.fixture(autouse=True)
def _at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace worker processes."""
    monkeypatch.setattr(runner, "workers", lambda jobs, **environment: nullcontext(_Here()))


light = pytest.mark.usefixtures("_light")


def _run(experiment: Experiment, out: str = "out", *, quick: bool = False, jobs: int = 1) -> Path:
    return runner.run(experiment, Path(out), lambda line: None, quick=quick, jobs=jobs)


def _document(out: str = "out") -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Path(out, "results.json").read_text())
    return document


def _marks() -> list[str]:
    return MARKS.read_text().split()


def test_results_are_in_the_order_of_the_cases_and_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "code_digest", lambda: "this")
    report = _run(TOY, "one", jobs=2).read_text()
    assert Path("one", "squares.svg").exists()
    _run(TOY, "other")
    one, other = _document("one"), _document("other")
    assert [run["case"] for run in one["runs"]] == ["case-3", "case-1", "case-2"]
    assert one["runs"][0] == {
        "case": "case-3",
        "settings": {"n": 3, "seed": 3},
        "figures": {"square": 9, "both": [1, 2]},
    }
    assert one.pop("wall")["cases_s"].keys() == other.pop("wall")["cases_s"].keys() == {"case-1", "case-2", "case-3"}
    assert one == other
    assert "What is n²?\n\n**It is n times n.**" in report
    assert "| 3 | 9 |" in report
    assert "seeds 1, 2, 3" in report
    assert "noloco experiment toy`" in report


@light
def test_what_will_run_is_said_before_the_first_case_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "code_digest", lambda: "this")
    said: list[str] = []
    for quick in (True, False):
        runner.run(TOY, Path(f"out-{quick}"), said.append, quick=quick, jobs=1)
    assert said[0] == "toy, quick version: minutes: 1 case, 1 at a time, reported as they end"
    assert said[2].startswith("toy, full version: minutes to hours; --quick takes minutes: 3 cases")
    said.clear()
    runner.run(TOY, Path("out-True"), said.append, quick=True, jobs=1)
    assert said == ["out-True/results.json already has 1 case"], "nothing is left to run"


@light
def test_a_failed_run_continues_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "code_digest", lambda: "this")
    with pytest.raises(ArithmeticError, match="two") as caught:
        _run(FAILING)
    assert "case-2" in caught.value.__notes__[0]
    assert [run["case"] for run in _document()["runs"]] == ["case-3", "case-1"]
    assert not _document()["complete"]
    _run(TOY)
    assert _marks() == ["case-3", "case-1", "case-2", "case-2"]
    assert _document()["complete"]
    # Nothing is left to do until the code changes.
    _run(TOY)
    assert len(_marks()) == 4
    monkeypatch.setattr(runner, "code_digest", lambda: "another")
    _run(TOY)
    assert len(_marks()) == 7


@light
def test_further_cases_follow_from_the_results_and_are_also_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "code_digest", lambda: "this")
    _run(FOLLOWED)
    assert [(run["case"], run["figures"]["square"]) for run in _document()["runs"]][-1] == ("again", 169)
    _run(FOLLOWED)
    assert _marks() == ["case-3", "case-1", "case-2", "again"]


@light
def test_another_experiments_directory_is_refused() -> None:
    _run(TOY, quick=True)
    with pytest.raises(ConfigError, match="quick run of toy"):
        _run(TOY)
    one = {"case": "case-3", "figures": {"square": 9}}
    torn = {"experiment": "toy", "quick": False, "code": runner.code_digest(), "runs": [one], "wall": {"cases_s": {}}}
    for text in ("no JSON", "[" * 100_000, "[]", '"text"', '{"experiment": "toy", "quick": false}', json.dumps(torn)):
        Path("out", "results.json").write_text(text)
        with pytest.raises(ConfigError, match="not a results file"):
            _run(TOY)
        assert Path("out", "results.json").read_text() == text


@light
def test_figures_that_are_not_finite_are_kept_as_none() -> None:
    _run(NOT_FINITE, quick=True)
    assert _document()["runs"][0]["figures"] == {"square": 1, "both": [None, None]}


def test_the_report_links_to_the_charts(tmp_path: Path) -> None:
    curve = Curve("a", [(1, 1), (2, 2), (4, 3)])
    chart = Plot("plot", "Plot", ("x", "y"), [curve])
    assert markdown([chart, "Words."]).split() == ["![Plot](plot.svg)", "Words."]
    assert save(chart, tmp_path) == tmp_path / "plot.svg"


def test_a_report_is_written_in_utf_8_whatever_the_locale() -> None:
    program = "from pathlib import Path; from toy_experiment import TOY; from noloco_p2p.lab.experiments import runner;"
    program += "runner.run(TOY, Path('out'), len, quick=True, jobs=1)"
    ascii_only = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env={**os.environ, **ascii_only, **paths}, timeout=100, check=True)
    assert "What is n²?" in Path("out", "report.md").read_text("utf-8")


@light
def test_a_report_that_cannot_be_written_is_said_in_one_line() -> None:
    _run(TOY, quick=True)
    Path("out", "report.md").unlink()
    Path("out", "report.md").mkdir()
    with pytest.raises(LocalError, match=r"^out cannot be written: Is a directory$"):
        _run(TOY, quick=True)


def test_cells_and_samples_are_formatted() -> None:
    page = markdown([Table(("a|b", "c"), [[1.23456, None], ["x|y", 7]], "Above.")])
    assert page == "Above.\n\n| a|b | c |\n| --- | --- |\n| 1.235 | – |\n| x\\|y | 7 |\n"
    assert mean_std([]) == "–"
    assert mean_std([2.0]) == "2"
    assert mean_std([1.0, 3.0]) == f"2 ± {math.sqrt(2):.2g}"


def test_the_code_digest_covers_all_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    monkeypatch.setattr(noloco_p2p, "__file__", str(tmp_path / "__init__.py"))
    digests = []
    for name, text in (("a.py", "1"), ("a.py", "2"), ("deep/b.py", "2"), ("deep/c.json", ""), ("deep/notes.txt", "3")):
        (tmp_path / name).write_text(text)
        digests.append(runner.code_digest())
    assert len(set(digests)) == 4
    assert digests[-1] == digests[-2], "files other than sources do not matter"


def test_no_more_processes_than_cases_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def workers(jobs: int, **environment: str) -> nullcontext[_Here]:
        started.append(jobs)
        return nullcontext(_Here())

    monkeypatch.setattr(runner, "workers", workers)
    _run(FOLLOWED, jobs=10**20)
    assert started == [3, 1], "a pool starts all its processes at once, so their number is limited"


@light
def test_duplicate_case_names_are_refused() -> None:
    double = replace(TOY, cases=lambda quick: [Case("a"), Case("a", {"n": 1})])
    with pytest.raises(ValueError, match="same name"):
        _run(double)


def test_the_published_figures_name_their_source() -> None:
    assert "2506.10911" in published()["source"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_unique_case_names_and_states_its_limits(name: str) -> None:
    experiment = find(name)
    assert experiment.name == name
    for quick in (True, False):
        cases = experiment.cases(quick)
        assert len({case.name for case in cases}) == len(cases) > 0
        json.dumps([dict(case.settings) for case in cases], allow_nan=False)
    assert experiment.question.endswith("?")
    assert min(len(experiment.setting), len(experiment.limits)) > 100


def test_the_command_lists_the_experiments_and_refuses_another_name() -> None:
    listed = CliRunner().invoke(app, ["experiment"])
    assert [line.split()[0] for line in listed.output.splitlines()] == list(EXPERIMENTS)
    refused = CliRunner().invoke(app, ["experiment", "alchemy"])
    assert isinstance(refused.exception, ConfigError)
    assert "latency" in str(refused.exception)
