"""The sampled coordinates of a stage, and the estimate of the spread from them (METHOD.md, "Measures")."""

import random
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st
from soak import soak

from noloco_p2p.core.lattice_format import CHUNK, LatticeRequest
from noloco_p2p.core.messages import HostTensor, TensorSpec
from noloco_p2p.core.snapshots import (
    MAX_SAMPLED,
    MIN_SAMPLED,
    SAMPLED_SHARE,
    FrozenRound,
    PartnerVector,
    RoundGroup,
    SnapshotRequest,
    answer_specs,
    largest_accepted,
    pair_std,
    partner_bytes,
    round_group,
    sample_size,
    sampled_coordinates,
    snapshot_specs,
)


@given(st.integers(1, 10**11), st.integers(0, 2**63 - 1), st.integers(0, 40), st.integers(0, 10**6))
def test_the_sample_is_small_in_order_and_within_the_stage(parameters: int, seed: int, stage: int, round: int) -> None:
    size = sample_size(parameters)
    assert size == min(parameters, MIN_SAMPLED) or size <= min(MAX_SAMPLED, parameters // SAMPLED_SHARE)
    places = sampled_coordinates(seed, stage, round, parameters)
    assert len(places) == size
    assert places == tuple(sorted(places)) == sampled_coordinates(seed, stage, round, parameters)
    assert 0 <= places[0] <= places[-1] < parameters
    length = parameters / size
    assert all(n * length - 1 <= place <= (n + 1) * length for n, place in enumerate(places)), "one in each stratum"


def test_all_of_a_tiny_stage_and_others_by_seed_stage_and_round() -> None:
    assert sampled_coordinates(1, 0, 3, MIN_SAMPLED) == tuple(range(MIN_SAMPLED))
    assert sampled_coordinates(1, 0, 3, 5) == (0, 1, 2, 3, 4)
    drawn = [sampled_coordinates(*which, 10**6) for which in ((1, 0, 3), (2, 0, 3), (1, 1, 3), (1, 0, 4))]
    assert all(one != other for n, one in enumerate(drawn) for other in drawn[:n])


@pytest.mark.parametrize("parameters", [2047, *soak([1500, 2049])])
def test_every_coordinate_has_the_same_chance(parameters: int) -> None:
    """Even where strata end within a coordinate. The bound is five sigma of a count over 4,000 draws."""
    rounds = 4000
    counts = [0] * parameters
    for round in range(rounds):
        for place in sampled_coordinates(7, 1, round, parameters):
            counts[place] += 1
    chance = sample_size(parameters) / parameters
    sigma = sqrt(rounds * chance * (1 - chance))
    assert max(abs(count - rounds * chance) for count in counts) < 5 * sigma


def test_the_estimate_of_the_variance_is_unbiased() -> None:
    """Even for very unequal differences: a few parameters, next to each other, hold most of the spread."""
    parameters, rounds = 5000, 2000
    rng = random.Random(1)
    gaps = [rng.gauss(0.0, 1.0 if n > 4900 else 0.01) for n in range(parameters)]
    exact = pair_std(sum(gap * gap for gap in gaps), parameters) ** 2
    estimates = []
    for round in range(rounds):
        places = sampled_coordinates(3, 0, round, parameters)
        estimates.append(pair_std(sum(gaps[place] ** 2 for place in places), len(places)) ** 2)
    mean = sum(estimates) / rounds
    error = sqrt(sum((one - mean) ** 2 for one in estimates) / rounds / rounds)
    assert abs(mean - exact) < 4 * error
    assert error < 0.01 * exact


def test_bytes_are_counted_by_kind_of_request() -> None:
    assert SnapshotRequest(1, 4).kind == "snapshot"
    assert SnapshotRequest(1, 4, weights="bfloat16").kind == "weights"


def test_a_round_merges_the_vectors_in_the_order_of_their_peers() -> None:
    a, b, c, theta = (HostTensor("vector", "float32", (1,), memoryview(bytes(4 * [n]))) for n in range(4))
    mine = FrozenRound("b", 3, 30, b, theta)
    theirs = [PartnerVector("c", 3, 34, c, theta), PartnerVector("a", 3, 28, a, theta)]
    assert round_group(mine, theirs, True) == RoundGroup([a, b, c], 1, 3.0)
    assert round_group(mine, theirs, False) == RoundGroup([a, c], -1, 3.0), "it does not count, and stays as late"
    assert round_group(mine, [], True) == RoundGroup([b], 0, 0.0)


def test_an_answer_has_what_was_requested_and_a_repeated_one_no_sample() -> None:
    parameters = 2 * CHUNK + 1
    sample = TensorSpec("sample", "float32", (MIN_SAMPLED,))
    for codec, dtype in (("full", "float32"), ("bfloat16", "bfloat16")):
        plain, lattice = snapshot_specs(codec, parameters, 2 * parameters, "float32")  # type: ignore[arg-type]
        assert plain == (TensorSpec("vector", dtype, (2 * parameters,)), sample)
        assert answer_specs(plain, lattice, None) == plain
    sparse = (TensorSpec("vector", "float32", (7,)), TensorSpec("places", "int16", (7,)), sample)
    assert snapshot_specs("full", parameters, parameters, "float32", 7) == (sparse, None)
    whole, lattice = snapshot_specs("int8", parameters, parameters, "float32")
    assert lattice is not None
    for asked, others in ((LatticeRequest(bytes([127] * 3)), (sample,)), (LatticeRequest(bytes([127]), (2,)), ())):
        codes = TensorSpec("lattice", "uint8", (lattice.nbytes(asked),))
        assert answer_specs(whole, lattice, asked) == (codes, *others)
    assert partner_bytes("int8", parameters, parameters, "float32") == sum(spec.nbytes for spec in whole) + 3
    assert partner_bytes("full", parameters, parameters, "float32") == 4 * (parameters + MIN_SAMPLED)
    assert SnapshotRequest(0, 1, lattice=LatticeRequest(bytes(3))).nbytes == 3
    assert SnapshotRequest(0, 1).nbytes == 0


def test_a_value_may_be_a_thousand_times_the_largest_of_ones_own_or_a_thousand() -> None:
    assert [largest_accepted(own) for own in (0.0, 1.0, 3.0)] == [1024.0, 1024.0, 3072.0]
