"""Experiment 1: a node's pull compared with log2 N, models with their formulas, ratios with those of the paper."""

import math
import statistics

import numpy as np
import pytest
from experiment_answer import answer

from noloco_p2p.lab.experiments import allreduce
from noloco_p2p.lab.experiments.allreduce import Wire
from noloco_p2p.lab.experiments.latency import BYTES_PER_S, MODELS, measure, ratio, report
from noloco_p2p.lab.experiments.spec import Case, Result, published
from noloco_p2p.sim.links import FIRST_WINDOW_BYTES


def _measured(regime: str, nodes: int, std_over_mean: float, pairing: str = "matched") -> Result:
    case = Case(
        "one",
        {
            "regime": regime,
            "pairing": pairing,
            "nodes": nodes,
            "std_over_mean": std_over_mean,
            "worlds": 1,
            "draws": 3,
            "tree_draws": 3,
            "seed": 5,
        },
    )
    return Result(case, measure(case), 0.0)


def test_a_tree_over_64_replicas_without_spread_takes_six_pulls() -> None:
    found = _measured("latency", 64, 0.0)
    assert ratio(found) == pytest.approx(6, rel=0.05)
    assert found["pull"]["results"] == {"partner": 64}
    assert found["pull"]["begun_apart_s"] == 0


def test_a_pull_takes_two_latencies_its_transfer_time_and_a_slow_start() -> None:
    found = _measured("bandwidth", 8, 0.0)
    doublings = np.log2(0.020 * BYTES_PER_S / FIRST_WINDOW_BYTES)
    how_far = 2 * 0.010  # the round trip to a new partner is measured first
    assert 0 < found["pull"]["last"]["mean_s"] - (2 * 0.010 + 1.0 + how_far) < doublings * 0.020
    crowded = _measured("bandwidth", 8, 0.0, "random")
    assert crowded["pull"]["last"]["mean_s"] > 1.9, "a node chosen by two others shares its line"


@pytest.mark.parametrize("nodes", [2, 8, 64])
def test_without_spread_every_model_equals_its_formula(nodes: int) -> None:
    wire, level = Wire(0.25, 0.0, vector_s=2.0), math.log2(nodes)
    expected = {
        "tree": 2 * level * (0.25 + 4.0),
        "binomial": 2 * level * (0.25 + 2.0),
        "ring": 2 * (nodes - 1) * (0.25 + 2.0 / nodes),
        "butterfly": 2 * (0.25 + 2.0 * (nodes - 1) / nodes),
    }
    found = {name: model(wire, nodes, allreduce.dice(0)) for name, model in MODELS.items()}
    assert found == pytest.approx(expected)


def test_latencies_have_the_given_mean_and_spread() -> None:
    drawn = Wire(0.010, 1.0).draw(allreduce.dice(1), (200_000,))
    assert np.mean(drawn) == pytest.approx(0.010, rel=0.02)
    assert np.std(drawn) / np.mean(drawn) == pytest.approx(1.0, rel=0.05)


def test_the_papers_model_gives_the_papers_ratios() -> None:
    theirs = published()["sync_time_ratio_tree_allreduce_over_pair_n1024"]
    for key in ("0", "0.5", "1", "2", "2.5"):
        wire, rng = Wire(1.0, float(key)), allreduce.dice(3, key)
        tree = statistics.fmean(allreduce.tree_s(wire, 1024, rng) for _ in range(200))
        pair = statistics.fmean(allreduce.exchange_s(wire, rng) for _ in range(20_000))
        assert tree / (2 * pair) == pytest.approx(theirs[key], rel=0.08)


def test_the_report_names_what_it_compares() -> None:
    results = [_measured(regime, 4, 0.0) for regime in ("latency", "bandwidth")]
    blocks = report(results)
    page = "\n".join(map(str, blocks))
    assert "tree (paper)" in page
    assert answer(blocks) == (
        "Compared with the pull of a pair, the quickest all-reduce takes 1 times as long with 4 replicas if "
        "latency-bound and 1.46 times as long with 4 replicas if bandwidth-bound, depending on the spread."
    )
    assert "('bandwidth-bound', 'butterfly', '0 of 1 cases', 1.45" in page.replace("[", "(")
