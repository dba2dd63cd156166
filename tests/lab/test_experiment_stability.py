"""Experiments 3 and 6: the bounds match the real outer round, and the reports match the runs."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from experiment_answer import answer

from noloco_p2p.core.outer_update import outer_step, round_vector
from noloco_p2p.lab.experiments import bounds, stability, staleness
from noloco_p2p.lab.experiments.results import markdown
from noloco_p2p.lab.experiments.spec import Block, Case, Figures, Result, Table

MATCHINGS_OF_FOUR = ([1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0])


@pytest.mark.parametrize("replicas", [4, 8, 16, None])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.7, 0.9])
def test_the_mean_square_starts_to_grow_at_s1(alpha: float, replicas: int | None) -> None:
    bound = bounds.s1(alpha, replicas)
    assert bounds.growth(alpha, bound, replicas) == pytest.approx(1.0, abs=1e-9)
    assert bounds.growth(alpha, 0.99 * bound, replicas) < 1 - 1e-5
    assert bounds.growth(alpha, 1.01 * bound, replicas) > 1 + 1e-5


def test_the_moments_equal_the_mean_over_all_matchings_of_the_real_outer_round() -> None:
    generator = np.random.default_rng(1)
    phi, momentum = generator.standard_normal((2, 4, 5))
    phi -= phi.mean(0)
    momentum -= momentum.mean(0)
    alpha, gamma = 0.6, 0.9
    after = np.zeros(3)
    for partner in MATCHINGS_OF_FOUR:
        x, delta = bounds.play(phi, momentum, partner, alpha, gamma)
        after += np.array([(x * x).sum(), (x * delta).sum(), (delta * delta).sum()]) / len(MATCHINGS_OF_FOUR)
    before = np.array([(phi * phi).sum(), (phi * momentum).sum(), (momentum * momentum).sum()])
    assert bounds.moments(alpha, gamma, 4) @ before == pytest.approx(after, rel=1e-12)


def test_a_replica_that_is_its_own_partner_merges_its_vector_alone() -> None:
    phi, momentum = np.random.default_rng(2).standard_normal((2, 3, 4))
    factors = {"alpha": 0.5, "gamma": 0.6}
    x, after = bounds.play(phi, momentum, [0, 2, 1], 0.5, 0.6)
    vectors = [round_vector(one, np.zeros(4), beta=0.0, gamma=0.6) for one in phi]
    alone = outer_step(phi[0], momentum[0], vectors[:1], **factors)
    paired = outer_step(phi[1], momentum[1], vectors[1:], **factors)
    np.testing.assert_allclose([x[0], after[0]], alone, rtol=1e-12)
    np.testing.assert_allclose([x[1], after[1]], paired, rtol=1e-12)


def test_nearly_every_run_tolerates_more_than_the_mean_square() -> None:
    bound = bounds.typical_bound(0.5, 8, seed=3, accuracy=0.05)
    assert 1.02 * bounds.s1(0.5, 8) < bound < 1.3 * bounds.s1(0.5, 8)


def short(gamma: float) -> Case:
    sizes = {"rounds": 15, "inner_steps": 1, "hidden_size": 16, "sequence_length": 8, "microbatch_size": 2}
    return Case("short", {"kind": "training", "replicas": 4, "alpha": 0.3, "gamma": gamma, "seed": 5, **sizes})


def test_real_replicas_diverge_only_outside_the_bound() -> None:
    """Further outside, replicas drift apart so fast that the guard clips their vectors, which slows them down."""
    inside, outside = (stability.measure(short(multiple * bounds.s1(0.3, 4))) for multiple in (0.6, 1.3))
    assert inside["growth"] < 0.9
    assert outside["growth"] > 1.05
    for found in (inside, outside):
        assert len(found["spreads"]) == 15


def measured(cases: list[Case], growth: Mapping[str, float | None] | None = None) -> list[Result]:
    """Results as if the spread followed the mean square, except for the named cases."""
    results = []
    for case in cases:
        settings = case.settings
        if settings["kind"] == "typical":
            results.append(Result(case, {"bound": 1.1 * bounds.s1(settings["alpha"])}, 1.0))
            continue
        factor: float | None = bounds.growth(settings["alpha"], settings["gamma"], settings["replicas"])
        figures: Figures = {"loss": 3.0, "merged_loss": 2.9, "stopped": None}
        factor = (growth or {}).get(case.name, factor)
        spreads = [] if factor is None else [factor**round for round in range(settings["rounds"])]
        results.append(Result(case, figures | {"growth": factor, "spreads": spreads}, 1.0))
    return results


def table(blocks: list[Block], column: str) -> list[dict[str, Any]]:
    """The rows of the first table with this column."""
    found = next(block for block in blocks if isinstance(block, Table) and column in block.columns)
    return [dict(zip(found.columns, row, strict=True)) for row in found.rows]


@pytest.mark.parametrize("quick", [False, True])
def test_the_report_finds_the_bound_of_the_runs(quick: bool) -> None:
    blocks = stability.report(measured(stability.cases(quick)))
    assert answer(blocks).startswith("Inside S1 the spread grew at 0 of ")
    verdicts = {row["condition"]: row for row in table(blocks, "right")}
    assert verdicts["S1 for N"]["right"] == "100%"
    assert verdicts["S1"]["allowed, **grew**"] == 0
    assert verdicts["eq. 74, n = 2"]["allowed, **grew**"] > 0
    for row in table(blocks, "S1 for N"):
        crossing = row["γ where the spread began to grow"]
        assert crossing is None or crossing == pytest.approx(row["S1 for N"], rel=0.03)
    assert sum(row["γ where the spread began to grow"] is not None for row in table(blocks, "S1 for N")) > 1


def test_a_stopped_run_counts_as_grown() -> None:
    cases = stability.cases(True)
    stopped = next(case.name for case in cases if case.settings.get("gamma") == 2.8)
    blocks = stability.report(measured(cases, {stopped: None}))
    row = next(row for row in table(blocks, "grew") if row["γ"] == 2.8)
    assert (row["grew"], row["growth"]) == ("**yes**", "not finite")
    assert "stability-n8.svg" in markdown(blocks)


@pytest.mark.parametrize("stale_rounds", [0, 1, 2, 3])
def test_staleness_slows_the_mean_as_the_report_says(stale_rounds: int) -> None:
    past, momentum = [0.0], 0.0
    factors = {"beta": staleness.BETA, "gamma": staleness.GAMMA}
    for _ in range(200):
        old = past[max(0, len(past) - 1 - stale_rounds)]
        vectors = [round_vector(phi, 1.0, **factors) for phi in (past[-1], old)]
        phi, momentum = outer_step(past[-1], momentum, vectors, alpha=staleness.ALPHA, gamma=staleness.GAMMA)
        past.append(phi)
    speed = (past[-1] - past[-2]) * (1 - staleness.ALPHA) / staleness.BETA
    variant = staleness.Variant("matched", stale_rounds)
    assert staleness.outer_step(variant) == pytest.approx(speed, rel=1e-9)


@pytest.mark.soak
def test_lost_partners_are_counted_and_widen_the_spread() -> None:
    sizes = {"replicas": 4, "steps": 24, "inner_steps": 2, "hidden_size": 16}
    sizes |= {"sequence_length": 8, "microbatch_size": 2, "held_out_microbatches": 2}
    results = []
    for variant in (staleness.BASELINE, staleness.Variant("random", 2, 0.5)):
        case = Case(f"{variant}", {**variant._asdict(), "seed": 1, **sizes})
        results.append(Result(case, staleness.measure(case), 1.0))
    assert [sum(one["rounds"].values()) for one in results] == [48, 48]
    assert 12 < results[1]["rounds"]["lost"] < 36
    blocks = staleness.report(results)
    assert answer(blocks).startswith("Against fresh snapshots of matched pairs, in nats per token: ")
    rows = table(blocks, "spread / baseline's")
    assert float(rows[0]["spread / baseline's"]) == 1.0
    assert float(rows[1]["spread / baseline's"]) > 1.1
    assert all(math.isfinite(one["loss"]) for one in results)
