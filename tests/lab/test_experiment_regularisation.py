"""Experiment regularisation: noise has the requested size and does not change θ, and the report is robust."""

import dataclasses
import math

import pytest
from experiment_answer import answer

from noloco_p2p.lab.experiments import regularisation
from noloco_p2p.lab.experiments.real_swarm import train
from noloco_p2p.lab.experiments.regularisation import (
    REPLICAS,
    TITLES,
    at_training_loss,
    cases,
    further,
    measure,
    report,
)
from noloco_p2p.lab.experiments.results import markdown
from noloco_p2p.lab.experiments.spec import Figures, Result
from noloco_p2p.lab.experiments.training import TrainingPlan, TrainingSummary, small_manifest


def trained(noise: tuple[tuple[tuple[int, float], ...], ...]) -> TrainingSummary:
    manifest = small_manifest(
        16, 2, microbatch_size=1, sequence_length=16, steps=6, outer={"rule": "sync"}, evaluation={"microbatches": 1}
    )
    return train(TrainingPlan(manifest, (4, 4), 1, noise=noise))


@pytest.mark.soak
def test_gradients_are_computed_with_noise_of_the_given_size_and_replicas_stay_equal() -> None:
    plain, none, noisy = (trained(noise) for noise in ((), (((6, 0.0),),) * 2, (((3, 0.1), (6, 0.2)), ((6, 0.0),))))
    assert none.final_losses == plain.final_losses
    assert noisy.tokens == plain.tokens, "no replica considers its weights different from the others'"
    assert len(set(noisy.final_losses)) == 1
    assert noisy.final_losses != plain.final_losses
    assert noisy.merged_loss == pytest.approx(noisy.validation_loss, rel=1e-6)
    # Around their own mean, four draws have ¾ of the variance. Snapshots hold the weights that noisy gradients update.
    stds = {one.step: one.std for one in noisy.finite_spreads(0)}
    for step, std in stds.items():
        if step:
            assert std == pytest.approx((0.1 if step < 3 else 0.2) * math.sqrt(3 / 4), rel=0.05)
    assert {one.std for one in noisy.finite_spreads(1)} == {0.0}


def test_noise_has_the_spread_measured_with_noloco(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regularisation, "QUICK", {"hidden": 16, "layers": 2})
    monkeypatch.setattr(regularisation, "QUICK_STEPS", (10,))
    monkeypatch.setattr(regularisation, "HELD_OUT", 1)
    noloco = next(case for case in cases(quick=True) if case.settings["method"] == "noloco")
    result = Result(noloco, measure(noloco), 1.0)
    (step, std), *others = result["spread"][0]
    assert (step, others) == (10, [])
    assert std > 0
    assert result["gap"] == pytest.approx(result["held_out"] - result["training"])
    noise, half = (case.settings["noise"] for case in further(True, [result]))
    assert noise[0] == [[10, pytest.approx(std * math.sqrt(REPLICAS / (REPLICAS - 1)))]]
    assert half[1][0][1] == pytest.approx(noise[1][0][1] / 2)


def figures_of(method: str, seed: int) -> Figures:
    """Invented figures of a run."""
    loss = 2 + 0.1 * seed + 0.5 * (method == "noloco") - 0.2 * (method == "noise")
    figures = {"held_out": loss, "training": 1.0, "gap": loss - 1, "epochs": 3.0, "parameters": 10, "tokens": 100}
    return figures | {"spread": [[(10, 0.5)], []]}


def test_the_report_handles_missing_results() -> None:
    todo, results = cases(quick=False), []
    while todo:
        results += [Result(one, figures_of(one.settings["method"], one.settings["seed"]), 1.0) for one in todo]
        known = {one.case.name for one in results}
        todo = [one for one in further(False, results) if one.name not in known]
    assert {one["method"] for one in results} == set(TITLES)
    assert "data parallel's held-out loss, in nats, by -0.2 ± " in answer(report(results))
    page = markdown(report(results))
    assert "| 80 | 3 | NoLoCo, m = 10 | 1 ± 0 | 2.7 ± 0.1 | 1.7 ± 0.1 | 0.5 ± " in page
    nothing: Figures = {"held_out": None, "training": None, "gap": None, "spread": [[], []]}
    lost = [dataclasses.replace(one, figures=one.figures | nothing) for one in results]
    assert "| NoLoCo, m = 10 | – | – | – | – | – | – |" in markdown(report(lost))
    assert "by – after 80 steps and – after 240 steps." in answer(report(lost))
    points = [(2.0, 5.0), (1.0, 3.0), (4.0, 1.0)]
    assert [at_training_loss(points, loss) for loss in (1.0, 1.5, 3.0, 5.0)] == [3.0, 4.0, 3.0, None]
