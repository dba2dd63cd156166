"""`noloco eval --tasks`: the harness agrees with our own decoding and likelihoods, and missing parts are reported."""

import importlib.util
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from checkpointed import exported, save_swarm, small_run
from typer.testing import CliRunner

from noloco_p2p.cli.main import app
from noloco_p2p.errors import ConfigError
from noloco_p2p.lab.experiments.downstream_scores import task_scores
from noloco_p2p.lab.made_tasks import write_tasks
from noloco_p2p.launch.evaluation import run_generate
from noloco_p2p.launch.finetuning import Recipe, run_finetune
from noloco_p2p.launch.task_evaluation import run_tasks, task_lines


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported model with 64 positions."""
    home = tmp_path_factory.mktemp("model")
    manifest = small_run(model={"max_position_embeddings": 64}).model_copy(update={"sequence_length": 64})
    save_swarm(manifest, home / "run", [1, 1])
    return exported(home / "run", home / "out")


def test_missing_requirements_are_reported_in_one_line(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="--task-dir: there is no directory"):
        run_tasks(model, ["addition"], tmp_path / "nowhere", device="cpu")
    with pytest.raises(ConfigError, match="there is no such directory"):
        run_tasks(tmp_path / "nowhere", ["addition"], tmp_path, device="cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '.\[eval\]' in a checkout"):
        run_tasks(model, ["addition"], tmp_path, device="cpu")


@pytest.mark.parametrize(("asked", "named"), [("a_tag", "'a_tag'"), ("a_group", "'sample_len'")])
def test_the_name_of_several_tasks_is_an_error_in_one_line(
    asked: str, named: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness lists them with the tasks, but has no results for a tag, and no number of items for a group. One
    without items used to end with a traceback."""
    results = {"one": {"acc,none": 1.0, "sample_len": 2}, "a_group": {"acc,none": 1.0, "alias": "a_group"}}
    members: dict[str, dict[str, object]] = {
        "lm_eval": {"simple_evaluate": lambda *_, **__: {"results": results}},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": lambda *_, **__: None},
        "lm_eval.tasks": {
            "TaskManager": lambda **_: SimpleNamespace(all_tasks=["one", "a_tag", "a_group", "without_items"])
        },
    }
    for name, found in members.items():
        module = ModuleType(name)
        module.__dict__.update(found, __spec__=ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)
    assert run_tasks(model, ["one"], tmp_path, device="cpu") == {"one": {"items": 2, "acc": 1.0}}
    with pytest.raises(ConfigError, match=f"a task cannot be evaluated: {named}"):
        run_tasks(model, ["one", asked], tmp_path, device="cpu")

    def evaluate(*_: object, **__: object) -> None:
        raise IndexError("Invalid key: 0 is out of bounds for size 0")

    monkeypatch.setattr(sys.modules["lm_eval"], "simple_evaluate", evaluate)
    with pytest.raises(ConfigError, match="a task cannot be evaluated: Invalid key: 0 is out of bounds"):
        run_tasks(model, ["without_items"], tmp_path, device="cpu")


def test_each_metric_has_a_line() -> None:
    figures = {"a": {"items": 10, "acc": 0.25, "acc_stderr": 0.125}, "abc": {"items": 1000, "exact_match": 1.0}}
    assert task_lines(figures) == [
        "a    acc 0.2500 ± 0.1250  10 items",
        "abc  exact_match 1.0000 ± 0.0000  1,000 items",
    ]


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="the extra eval is not installed")
def test_the_harness_agrees_with_our_own_scores(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model that knows some of the answers."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tested = write_tasks(tmp_path / "tasks", 1, 100, 50)
    data, tuned = str(tmp_path / "tasks" / "recall.jsonl"), tmp_path / "tuned"
    run_finetune(model, [data], tuned, Recipe(1e-2, steps=40, held_out=0.0), device="cpu", say=lambda line: None)
    monkeypatch.chdir(tmp_path)
    options = ["--tasks", "recall,recall_choice,copying_choice", "--task-dir", "tasks", "--device", "cpu", "--json"]
    done = CliRunner().invoke(app, ["eval", "tuned", *options], catch_exceptions=False)
    found = json.loads(done.stdout.splitlines()[-1])
    said = [
        "".join(run_generate(tuned, one.prompt, tokens=3, temperature=0, seed=0, device="cpu"))
        for one in tested["recall"]
    ]
    exact = sum(one == item.completion for one, item in zip(said, tested["recall"], strict=True)) / 50
    assert found["recall"]["items"] == 50
    assert found["recall"]["exact_match"] == pytest.approx(exact)
    assert 0.05 < exact < 1
    ours = task_scores(tuned, tested)
    assert ours["recall"]["exact"] == pytest.approx(exact)
    assert found["recall_choice"]["acc"] == pytest.approx(ours["recall"]["choice"], abs=0.05)
    assert found["copying_choice"]["acc"] == pytest.approx(ours["copying"]["choice"], abs=0.1)
    with pytest.raises(ConfigError, match="has no task nothing; there are: addition, addition_choice, brackets"):
        run_tasks(tuned, ["nothing"], tmp_path / "tasks", device="cpu")
    (tmp_path / "tasks" / "sorting.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"a task cannot be evaluated: .*sorting\.jsonl"):
        run_tasks(tuned, ["sorting"], tmp_path / "tasks", device="cpu")
