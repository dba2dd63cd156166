"""Experiments 4 and 5: the effect of routes on load and spread, and the relation of the spread to the learning rate."""

from functools import partial
from math import log
from typing import Any

import pytest
from experiment_answer import answer

from noloco_p2p.lab.experiments import routing_policies, spread
from noloco_p2p.lab.experiments.results import charts, markdown
from noloco_p2p.lab.experiments.shards import corpora
from noloco_p2p.lab.experiments.spec import Case, Result
from noloco_p2p.lab.experiments.training import TrainingPlan
from noloco_p2p.observe.plotting.plots import Plot

STEPS = 20


def serve(policy: str, devices: str) -> dict[str, Any]:
    return routing_policies.serve({"policy": policy, "devices": devices, "steps": STEPS, "seed": 1})


# --- load and waiting -----------------------------------------------------------------------------------------------


def test_balanced_loads_are_equal_and_wait_for_the_slowest() -> None:
    equal, one_slow = serve("balanced", "equal"), serve("balanced", "one 3 times slower")
    for found in (equal, one_slow):
        assert set(found["load"].values()) == {2 * STEPS}
        assert found["largest_over_mean"] == 1.0
    assert one_slow["microbatches_per_s"] < 0.6 * equal["microbatches_per_s"], "the slow replica holds all of them back"
    assert one_slow["waited_s"] > equal["waited_s"]


def test_random_routes_send_less_to_the_slow_replica() -> None:
    found = serve("random", "one 3 times slower")
    others = [count for peer, count in found["load"].items() if peer != "s1r0"]
    assert found["load"]["s1r0"] < 0.85 * sum(others) / len(others)
    assert found["busy"] > 0
    assert 0 < found["waited_share"] <= 1


def test_on_fixed_routes_equal_devices_never_wait() -> None:
    found = serve("fixed", "equal")
    assert (found["waited_s"], found["busy"], found["largest_over_mean"]) == (0.0, 0.0, 1.0)


# --- the spread and the learning rate -------------------------------------------------------------------------------


def test_a_power_law_between_spread_and_rate_is_found() -> None:
    rates = [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]
    series = [(10 * step, rate, 3.0 * rate**1.5) for step, rate in enumerate(rates)]
    assert spread.falling(series) == series[1:]
    assert spread.pearson([(step, rate, 2.0 + 3.0 * rate) for step, rate, _ in series]) == pytest.approx(1.0)
    assert spread.pearson([(step, rate, 2.0 - rate) for step, rate, _ in series]) == pytest.approx(-1.0)


def test_the_lag_of_the_spread_behind_the_rate_is_found() -> None:
    rates = [0.5, 1.0, 0.95, 0.8, 0.6, 0.5, 0.45, 0.3, 0.2, 0.1, 0.1, 0.05]
    late = [(step, rate, 2.0 * rates[max(0, step - 2)]) for step, rate in enumerate(rates)]
    found, at_once = spread.delay(late), spread.pearson(late)
    assert found is not None
    assert at_once is not None
    assert found[0] == 2
    assert found[1] == pytest.approx(1.0)
    assert at_once < 0.95
    assert spread.delay([(step, rate, 1.0 - rate) for step, rate, _ in late]) is None, (
        "the spread moves in the opposite direction"
    )


def test_a_constant_rate_has_no_correlation() -> None:
    series = [(step, 1e-3, float(step)) for step in range(1, 9)]
    assert spread.pearson(series) is None
    assert spread.delay(series) is None
    assert spread.remaining(series, 1) == 1.0


def test_the_report_of_the_spread_shows_its_decay_and_correlation() -> None:
    def result(arm: str, seed: int) -> Result:
        series = [(10 * step, 1.0 / step, 0.5 / step) for step in range(1, 11)]
        case = Case(f"{arm}-{seed}", {"arm": arm, "steps": 100, "seed": seed})
        return Result(case, {"spread": [series, series], "validation_loss": None}, 1.0)

    blocks = spread.report([result(arm, seed) for arm in spread.ARMS for seed in (1, 2)])
    assert answer(blocks) == (
        "With m = 10, std and learning rate correlate with r = 1 ± 0; at the end the std is at 0.1 ± 0 of its largest "
        "value, and at 0.1 ± 0 if the rate stays at its peak."
    )
    assert "| m = 5 | 1 | 10 ± 0 | 1 ± 0 | 1 ± 0 |" in markdown(blocks)
    curves = {chart.name: chart for chart in charts(blocks) if isinstance(chart, Plot)}["over-the-run-stage-0"].curves
    assert [curve.label for curve in curves][:2] == ["learning rate", "std, m = 10"]
    rates, stds = ([y for _, y in curve.points] for curve in curves[:2])
    assert rates == pytest.approx(stds), "each curve is relative to its own maximum"


# --- routes and the spread ------------------------------------------------------------------------------------------


def invented(case: Case) -> Result:
    """Fixed routes have std 2 at stage 0 and 4 at stage 1; others half and a quarter of that, and 3 % more perplexity.

    The run on fixed routes has one more observation, which must make no difference.
    """
    if case.settings["kind"] == "serve":
        return Result(case, serve_figures(), 1.0)
    fixed = case.settings["policy"] == "fixed"
    stds = ((2.0, 50.0), (4.0, 50.0)) if fixed else ((1.0,), (1.0,))
    series = [[(10 * look, std) for look, std in enumerate((99.0, *later), 1)] for later in stds]
    loss = 2.0 if fixed else 2.0 + log(1.03)
    figures = {
        "validation_loss": loss,
        "merged_loss": None,
        "tokens": 1000,
        "uneven": (1.0, 1.0),
        "waiting": [0.0, 0.5],
    }
    return Result(case, figures | {"spread": series}, 1.0)


def serve_figures() -> dict[str, Any]:
    figures = {"largest_over_mean": 1.0, "waited_s": 0.0, "waited_share": 0.0, "busy": 0.0, "microbatches_per_s": 10.0}
    return figures | {"idle": {"partner": 0.1}, "inner_steps": [9, 10]}


def test_changes_are_relative_to_fixed_routes_of_the_same_seed() -> None:
    results = [invented(case) for case in routing_policies.cases(quick=False)]
    found = routing_policies.changes(results, "balanced", routing_policies.ARMS[0])
    assert found["std 0"] == pytest.approx([-50.0] * 3)
    assert found["std 1"] == pytest.approx([-75.0] * 3)
    assert found["perplexity"] == pytest.approx([3.0] * 3)
    page = markdown(routing_policies.report(results))
    assert answer(routing_policies.report(results)) == (
        "Compared with fixed routes, random ones change the std of the weights by -62.5 % and the perplexity by 3 % "
        "without outer rounds, and the std of the weights by -62.5 % and the perplexity by 3 % with them."
    )
    assert "| 128 | 0.003 | with | balanced | -50 ± 0 | -75 ± 0 | -62.5 ± 0 | 3 ± 0 |" in page
    assert "-15 (small), -10 (medium)" in page


def test_a_run_that_has_diverged_is_reported_without_a_loss() -> None:
    results = [invented(case) for case in routing_policies.cases(quick=True)]
    for one in results:
        if "validation_loss" in one.figures:
            one.figures.update(validation_loss=None, spread=[[], []])
    page = markdown(routing_policies.report(results))
    assert "| 128 | 0.003 | with | balanced | – | – | – | – |" in page
    assert "the std of the weights by – % and the perplexity by – % with them." in page
    diverged = [
        Result(Case(arm, {"arm": arm, "seed": 1}), {"spread": [[], []], "validation_loss": None}, 1.0)
        for arm in spread.ARMS
    ]
    assert "correlate with r = –; at the end the std is at – of" in answer(spread.report(diverged))


@pytest.mark.soak
def test_random_routes_keep_later_replicas_closer_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real weights before their first merge: replicas of stage 1 that serve all origins drift apart less.

    The effect is a tenth if each origin reads its own kind of text. If all read the same text, it depends on the text.
    """
    monkeypatch.setattr(routing_policies, "TrainingPlan", partial(TrainingPlan, corpora=corpora()[:4]))

    def std(policy: str) -> float:
        settings = {"kind": "train", "policy": policy, "rounds": "with", "rate": 3e-3, "hidden": 64, "replicas": 4}
        found = routing_policies.measure(Case(policy, settings | {"steps": 10, "seed": 1}))
        return float(found["spread"][1][0][1])

    assert std("balanced") < 0.97 * std("fixed")
