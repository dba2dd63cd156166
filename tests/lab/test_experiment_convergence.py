"""Experiment convergence: all methods read the same tokens, their rates are found by one rule, the report is robust."""

import dataclasses
from collections.abc import Collection, Sequence

import pytest
from experiment_answer import answer
from soak import soak

from noloco_p2p.core.snapshots import MIN_SAMPLED
from noloco_p2p.lab.experiments import convergence
from noloco_p2p.lab.experiments.convergence import FULL, METHODS, REPLICAS, STAGES, cases, further, measure, report
from noloco_p2p.lab.experiments.results import markdown
from noloco_p2p.lab.experiments.spec import Case, Figures, Result

TINY = {"hidden": 16, "layers": 2, "steps": 2}
SIX = ("parallel", "noloco", "gossip", "gossip-int4", "gossip-int4-2", "apart")


@pytest.mark.parametrize("methods", [SIX, *soak([METHODS])])
def test_every_method_trains_on_the_same_tokens_and_data_parallel_is_the_mean_gradient(
    methods: Collection[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convergence, "QUICK", TINY)
    monkeypatch.setattr(convergence, "HELD_OUT", 1)
    first = {case.settings["method"]: case for case in cases(quick=True)[::-1]}
    assert first.keys() == METHODS.keys()
    found = {method: measure(first[method]) for method in methods}
    assert {figures["tokens"] for figures in found.values()} == {TINY["steps"] * REPLICAS * 4 * 64}
    steps = {method: figures["optimizer_steps"] for method, figures in found.items()}
    assert steps == dict.fromkeys(methods, TINY["steps"])
    # Nothing is merged or averaged before the first step ends, so all have the same batches and the same weights.
    firsts = [figures["curve"][0][1] for figures in found.values()]
    assert firsts == pytest.approx([firsts[0]] * len(firsts), rel=1e-5)
    assert len(found["apart"]["final_losses"]) == REPLICAS
    assert len(set(found["apart"]["final_losses"])) == REPLICAS
    parameters = found["parallel"]["parameters"]
    assert found["parallel"]["per_parameter_step"] == 2 * 7 / 8 * 4
    # One round, at the last step: for each stage a float32 vector and the sample, which has its smallest size here.
    values = parameters + STAGES * MIN_SAMPLED
    assert found["noloco"]["per_parameter_step"] == pytest.approx(4 * values / (TINY["steps"] * parameters))
    assert found["gossip"]["per_parameter_step"] == pytest.approx(4 * values / parameters), "a round at every step"
    assert 0 < found["gossip-int4-2"]["per_parameter_step"] < found["gossip-int4"]["per_parameter_step"]
    assert found["apart"]["per_parameter_step"] == 0.0


def figures_of(loss: float | None) -> Figures:
    """Invented figures of a run."""
    figures = {"validation_loss": loss, "merged_loss": loss, "tokens": 100, "optimizer_steps": 2, "parameters": 10}
    return figures | {"curve": [[50.0, loss], [100.0, loss]], "between_stages": 5.0, "per_parameter_step": 1.0}


def gone_through(best: float) -> list[Result]:
    """Results of all requested cases, if the loss is smallest at the rate `best` and diverges far above it."""
    results: list[Result] = []
    todo: Sequence[Case] = cases(quick=False)
    while todo:
        for case in todo:
            ratio = case.settings["rate"] / best
            loss = None if ratio > 4 else 1 + abs(ratio - 1) + 0.01 * case.settings["seed"]
            results.append(Result(case, figures_of(loss), 1.0))
        measured = {one.case.name for one in results}
        todo = [case for case in further(False, results) if case.name not in measured]
    return results


@pytest.mark.parametrize(
    ("optimizer", "best", "tried", "chosen"),
    [
        ("adamw", 4e-3, [1.6e-3, 4e-3, 1e-2], 4e-3),
        ("adamw", 1e-2, [1.6e-3, 4e-3, 1e-2, 2.5e-2], 1e-2),
        ("adamw", 6.4e-4, [2.6e-4, 6.4e-4, 1.6e-3, 4e-3, 1e-2], 6.4e-4),
        ("adamw", 2e-4, [2.6e-4, 6.4e-4, 1.6e-3, 4e-3, 1e-2], 2.6e-4),
        ("muon", 1e-2, [7.1e-3, 1e-2, 1.4e-2, 2e-2], 1e-2),
    ],
)
def test_further_rates_follow_while_the_best_is_at_the_edge_then_further_seeds_at_the_best(
    optimizer: str, best: float, tried: list[float], chosen: float
) -> None:
    results = gone_through(best)
    for method in [name for name, one in METHODS.items() if one.optimizer == optimizer]:
        mine = [one.case.settings for one in results if one["method"] == method]
        assert sorted(one["rate"] for one in mine if one["seed"] == 1 and not one["long"]) == tried
        assert [(one["rate"], one["seed"]) for one in mine if one["seed"] > 1] == [(chosen, 2), (chosen, 3)]
        long = [(one["rate"], one["seed"], one["steps"]) for one in mine if one["long"]]
        assert long == ([(chosen, 1, 8 * FULL["steps"])] if METHODS[method].long else [])


def test_the_report_handles_missing_results() -> None:
    results = gone_through(4e-3)
    above = {"gossip-int4": 0.1, "apart": 0.6, "parallel": 0.0, "parallel-muon": 0.0}
    apart = [
        dataclasses.replace(one, figures=figures_of(one["validation_loss"] + above.get(one["method"], 0.3)))
        for one in results
        if one["validation_loss"] is not None
    ]
    assert answer(report(apart)).startswith(
        "The method closest to synchronous data parallel with the same optimizer is gossip, m = 1, int4, overlapped: "
        "its loss is 0.1 ± "
    )
    assert "for 1 bytes per parameter and inner step; without communication it is 0.6 ± " in answer(report(apart))
    page = markdown(report(results))
    assert "| NoLoCo, m = 10 | 0.004 | 2 | 1.02 ± 0.01 |" in page
    assert f"| {METHODS['gossip-int4'].title} | 0.004 | 2 | 1.01 |" in page, "the row of the long runs"
    lost = [dataclasses.replace(one, figures=figures_of(None)) if one["method"] == "apart" else one for one in results]
    page = markdown(report(lost))
    assert "| no communication | 0.0016 | 2 | – | – |" in page
    assert "; no communication –; " in page
    assert "without communication it is – nats higher" in answer(report(lost))
