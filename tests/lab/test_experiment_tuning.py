"""Experiment tuning: every setting changes the defaults, all find their rate the same way, verdicts are cautious."""

import dataclasses
from collections.abc import Sequence

import pytest
from experiment_answer import answer
from soak import soak

from noloco_p2p.lab.experiments.results import markdown
from noloco_p2p.lab.experiments.spec import Case, Figures, Result
from noloco_p2p.lab.experiments.tuning import (
    DEFAULT,
    RATES,
    SETTINGS,
    TRIED,
    cases,
    further,
    measure,
    report,
    settings,
    verdict,
)


def figures_of(loss: float | None) -> Figures:
    """Invented figures of a run."""
    return {"validation_loss": loss, "merged_loss": loss, "tokens": 100, "parameters": 10}


def gone_through(loss_at_gamma: float | None) -> list[Result]:
    """Results of all requested cases, if the higher rate is the best and only a change of γ matters."""
    results: list[Result] = []
    todo: Sequence[Case] = cases(quick=False)
    while todo:
        for case in todo:
            one = case.settings
            loss = 2 + 10 * abs(one["rate"] - RATES[1]) + 0.1 * one["seed"]
            changed = one["what"] == "gamma" and one["value"] == TRIED[one["rule"]]["gamma"][0]
            both = None if loss_at_gamma is None else loss + loss_at_gamma + 0.001 * one["seed"]
            results.append(Result(case, figures_of(both if changed else loss), 1.0))
        measured = {one.case.name for one in results}
        todo = [case for case in further(False, results) if case.name not in measured]
    return results


def test_every_setting_has_rates_on_both_sides_of_the_best_and_more_seeds_at_the_best() -> None:
    results = gone_through(0.0)
    assert len(results) == len(SETTINGS) * (3 + 2)
    assert {one["rate"] for one in results if one["seed"] == 1} == {*RATES, 2 * RATES[1]}
    assert {one["rate"] for one in results if one["seed"] > 1} == {RATES[1]}


def test_significant_gains_are_recommended_and_possible_chance_is_not() -> None:
    blocks = report(gone_through(-0.2))
    page = markdown(blocks)
    assert "; `gossip` with 4 replicas: γ = 0.35 (-0.2 ± 0.001); `gossip` with 8 replicas: γ = 0.35" in answer(blocks)
    assert "| γ = 0.4 | 0.028 | 2.002 ± 0.1 | -0.2 ± 0.001 | better |" in page
    assert "`gossip` with 4 replicas: the defaults; `gossip` with 8" in answer(report(gone_through(0.2)))
    lost = markdown(report(gone_through(None)))
    assert "| γ = 0.4 | 0.014 | – | – | unclear |" in lost
    assert [verdict(one) for one in ([-1.0], [-1.0, -1.2, -1.1], [1.0, 1.1], [-1.0, 0.1, -1.2], [0.1, 0.1, 0.9])] == [
        "unclear",
        "better",
        "worse",
        "unclear",
        "unclear",
    ]


@pytest.mark.parametrize("rule", soak(TRIED))
def test_every_change_is_a_valid_setting(rule: str) -> None:
    first = {
        (one.settings["what"], one.settings["value"]): one for one in cases(quick=True) if one.settings["rule"] == rule
    }
    assert set(first) == {(one.what, one.value) for one in settings(rule, 4)}
    losses = set()
    for case in first.values():
        tiny = {"replicas": 4, "steps": 4, "hidden": 16}
        if case.settings["what"] != "inner_steps":
            losses.add(measure(dataclasses.replace(case, settings={**case.settings, **tiny}))["validation_loss"])
    assert None not in losses
    assert DEFAULT in {what for what, _ in first}
