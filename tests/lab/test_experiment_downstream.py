"""Experiment downstream: scores are those of the models, replicas are compared unmerged, the report is robust."""

import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from checkpointed import exported, save_swarm, small_run
from experiment_answer import answer
from transformers import AutoModelForCausalLM

from noloco_p2p.config import NodeConfig
from noloco_p2p.io.data.threaded_batches import make_batches
from noloco_p2p.lab.experiments import convergence, downstream
from noloco_p2p.lab.experiments.downstream import FRESH, METHODS, cases, measure, report
from noloco_p2p.lab.experiments.downstream_scores import replica_divergence, task_scores
from noloco_p2p.lab.experiments.results import markdown
from noloco_p2p.lab.experiments.spec import Case, Figures, Result
from noloco_p2p.lab.made_tasks import TASKS, TaskItem
from noloco_p2p.launch.evaluation import run_generate
from noloco_p2p.launch.finetuning import Recipe, run_finetune

TINY = {"hidden": 16, "layers": 2, "steps": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported model, with the three replicas of which it is the mean."""
    home = tmp_path_factory.mktemp("model")
    save_swarm(small_run(), home / "run", [3, 3])
    return exported(home / "run", home / "out")


def test_the_scores_equal_those_of_greedy_decoding_and_likelihood(tmp_path: Path, model: Path) -> None:
    """Compared with transformers, text by text, on a model that knows some of the answers."""
    choices = ("xyz", "uvw", "rst", "opq")
    items = [TaskItem(f"{key}=", choices[at % 4], choices, at % 4) for at, key in enumerate("abcdefghijkl")]
    data, tuned = tmp_path / "data.jsonl", tmp_path / "tuned"
    data.write_text("".join(json.dumps(one._asdict()) + "\n" for one in items[::2]))
    run_finetune(model, [str(data)], tuned, Recipe(1e-2, steps=40, held_out=0.0), device="cpu", say=lambda line: None)
    causal = AutoModelForCausalLM.from_pretrained(tuned)

    def likelihood(prompt: str, text: str) -> float:
        ids = torch.tensor([*(byte + 3 for byte in (prompt + text).encode()), 1])
        with torch.no_grad():
            chances = causal(input_ids=ids[None, :-1]).logits[0].log_softmax(-1)
        return sum(float(chances[at, ids[at + 1]]) for at in range(len(prompt) - 1, len(ids) - 1))

    said = ["".join(run_generate(tuned, one.prompt, tokens=4, temperature=0, seed=0, device="cpu")) for one in items]
    exact = fmean(text == one.completion for text, one in zip(said, items, strict=True))
    likeliest = [max(choices, key=partial(likelihood, one.prompt)) for one in items]
    choice = fmean(text == one.completion for text, one in zip(likeliest, items, strict=True))
    assert task_scores(tuned, {"some": items}) == {"some": {"exact": exact, "choice": choice}}
    assert 0 < exact < 1
    assert 0 < choice < 1


def test_divergence_is_zero_for_equal_replicas_and_a_mean_over_pairs(model: Path) -> None:
    batches = list(make_batches(small_run(), NodeConfig(), "").validation())
    singles = [model / "replicas" / str(number) for number in range(3)]
    assert replica_divergence([singles[0], singles[0]], batches) == pytest.approx(0, abs=1e-12)
    ids = [torch.tensor(np.frombuffer(one.inputs.data, "<i4").reshape(2, 16)).long() for one in batches]
    with torch.no_grad():
        causal = [AutoModelForCausalLM.from_pretrained(one) for one in singles]
        p = [torch.cat([one(input_ids=tokens).logits for tokens in ids]).double().softmax(-1) for one in causal]
    pairs = [(0, 1), (0, 2), (1, 2)]
    middles = {(i, j): (p[i] + p[j]) / 2 for i, j in pairs}
    kl = [fmean((p[k] * (p[k] / middles[pair]).log()).sum(-1).flatten().tolist()) for pair in pairs for k in pair]
    assert replica_divergence(singles, batches) == pytest.approx(fmean(kl), rel=1e-9)
    assert 0 < fmean(kl) < math.log(2)
    with pytest.raises(ValueError, match="at least one"):
        replica_divergence(singles[:1], batches)


@pytest.mark.soak
def test_a_case_pretrains_exports_fine_tunes_and_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downstream, "QUICK", TINY)
    monkeypatch.setattr(downstream, "QUICK_TUNING_STEPS", 3)
    monkeypatch.setattr(downstream, "EXAMPLES", 20)
    monkeypatch.setattr(downstream, "TEST", 4)
    monkeypatch.setattr(convergence, "HELD_OUT", 2)
    first = {case.settings["method"]: case for case in reversed(cases(quick=True)) if case.settings["seed"] == 1}
    found = {method: measure(case) for method, case in first.items()}
    assert set(found) == {*METHODS, FRESH}
    assert {method: found[method]["tokens"] for method in METHODS} == dict.fromkeys(METHODS, 2 * 8 * 4 * 64)
    assert found["parallel"]["divergence"] is found[FRESH]["divergence"] is None
    assert 0 < found["noloco"]["divergence"] < math.log(2)
    for figures in found.values():
        assert set(figures["tasks"]) == set(TASKS)
        assert figures["text_loss"] != pytest.approx(figures["merged_loss"], rel=1e-6)
        assert figures["completion_loss"] > 0
    assert measure(first["noloco"]) == found["noloco"], "the figures depend only on the seed"


def figures_of(loss: float, right: float) -> Figures:
    """Invented figures of a run."""
    tasks = {task: {"exact": right, "choice": (1 + right) / 2} for task in TASKS}
    figures = {"validation_loss": loss, "merged_loss": loss, "text_loss": loss, "completion_loss": loss, "tasks": tasks}
    return figures | {"exact": right, "choice": (1 + right) / 2, "divergence": None, "tokens": 100, "parameters": 10}


def test_the_report_handles_missing_results() -> None:
    results: list[Result] = []
    todo: list[Case] = cases(quick=False)
    while todo:
        for case in todo:
            loss = 2 + 0.1 * case.settings["seed"] + 0.5 * (case.settings["method"] != "parallel")
            results.append(Result(case, figures_of(loss + abs(case.settings["rate"] - 4e-3), 3 - loss), 1.0))
        measured = {one.case.name for one in results}
        todo = [case for case in downstream.further(False, results) if case.name not in measured]
    assert {(one["method"], one["seed"]) for one in results} == {(m, s) for m in (*METHODS, FRESH) for s in (1, 2, 3)}
    assert answer(report(results)) == (
        "After the same fine-tuning, the share of exactly right items differs from synchronous data parallel's by: "
        "DiLoCo, H = 20 -0.5 ± 0; NoLoCo, m = 10 -0.5 ± 0; gossip, m = 1, int4, overlapped -0.5 ± 0; "
        "without pre-training -0.5 ± 0."
    )
    page = markdown(report(results))
    assert "| NoLoCo, m = 10 | exact | 0.3 ± 0.1 |" in page
    lost = [
        dataclasses.replace(one, figures={**one.figures, "validation_loss": None, "completion_loss": None})
        for one in results
    ]
    assert "| NoLoCo, m = 10 | 0.00064 | – |" in markdown(report(lost))
