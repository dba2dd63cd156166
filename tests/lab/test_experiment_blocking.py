"""Experiment 2: a node that waits for its partner agrees with the model of pairs; the models follow their formulas."""

from typing import Any

import numpy as np
import pytest
from experiment_answer import answer
from soak import soak

from noloco_p2p.lab.experiments.blocking import ROUNDS, barrier, in_pairs, measure, report, slowness, swarm
from noloco_p2p.lab.experiments.bounds import members
from noloco_p2p.lab.experiments.spec import Case, Result

SETTINGS: dict[str, Any] = {
    "policy": "patient",
    "nodes": 7,
    "step_std": 0.0,
    "speed_std": 0.5,
    "inner_steps": 2,
    "seed": 1,
}


def test_a_node_that_waits_for_its_partner_takes_the_modelled_time() -> None:
    outcome = swarm(SETTINGS).run(limit_s=1e6)
    began = [node.trace.of("inner_step")[0].number("busy_s") for node in outcome.of_stage(0)]
    first = [node.trace.of("inner_step")[0].at_s for node in outcome.of_stage(0)]
    ended = [node.trace.of("outer_round")[-1].at_s for node in outcome.of_stage(0)]
    spans = [end - (at - busy) for end, at, busy in zip(ended, first, began, strict=True)]
    seconds = 2 * np.array([slowness(SETTINGS)[peer] for peer in members(SETTINGS["nodes"])])
    assert spans == pytest.approx(in_pairs(np.tile(seconds, (ROUNDS, 1)), members(SETTINGS["nodes"]), 1), rel=1e-9)


def test_a_default_node_waits_less_than_a_patient_one() -> None:
    patient, default = (measure(Case("one", SETTINGS | {"policy": policy})) for policy in ("patient", "default"))
    assert patient["node"]["idle"] == pytest.approx(patient["pairs_idle"], rel=0.1), (
        "the pairs differ, the speeds are the same"
    )
    assert patient["node"]["steps_per_clock"] == 1
    assert default["node"]["idle"] < 0.7 * patient["node"]["idle"]
    assert default["node"]["results"]["stale"] > 0


@pytest.mark.parametrize("step_std", [2.0, *soak([0.5, 1.0])])
def test_the_clock_counts_inner_steps_however_noisy_they_are(step_std: float) -> None:
    noisy = SETTINGS | {"policy": "default", "nodes": 16, "step_std": step_std, "speed_std": 0.0, "inner_steps": 10}
    assert measure(Case("one", noisy))["node"]["steps_per_clock"] == pytest.approx(1.0, abs=0.08)


def test_a_barrier_waits_for_the_slowest_node_of_each_round_and_a_pair_for_its_slower_one() -> None:
    work_s = np.array([[1.0, 2.0], [4.0, 1.0], [1.0, 1.0]])
    assert barrier(work_s) == 2 + 4 + 1
    assert list(in_pairs(work_s, ["a", "b"], 0)) == [7, 7]
    wide_s = np.array([[1.0, 1.0, 1.0, 9.0]])
    assert sorted(in_pairs(wide_s, ["a", "b", "c", "d"], 0)) == [1, 1, 9, 9]
    assert sorted(in_pairs(np.array([[1.0, 2.0, 3.0]]), ["a", "b", "c"], 0))[-1] == 3


def test_speeds_have_mean_one_and_depend_on_the_seed() -> None:
    many = SETTINGS | {"nodes": 5000}
    values = list(slowness(many).values())
    assert np.mean(values) == pytest.approx(1.0, abs=0.03)
    assert slowness(SETTINGS) == slowness(SETTINGS | {"policy": "default"}) != slowness(SETTINGS | {"seed": 2})


def test_the_report_shows_both_policies_and_both_models() -> None:
    results = []
    for policy in ("patient", "default"):
        case = Case(
            policy, {**SETTINGS, "nodes": 2, "policy": policy, "speed_std": 0.0, "step_std": 1.0, "inner_steps": 10}
        )
        results.append(Result(case, measure(case), 0.0))
    blocks = report(results)
    page = "\n".join(map(str, blocks))
    assert answer(blocks).startswith("With 2 equal replicas and steps of std/mean 1, a replica waits ")
    assert "barrier (model), %" in page
    assert "waits for its partner" in page
