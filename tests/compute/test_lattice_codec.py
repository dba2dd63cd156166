"""Vectors of outer rounds in few bits: unbiased, with the mean of a pair preserved, and no wrong chunk ever merged."""

import dataclasses
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lattice_reference import decoded_difference
from torch import Tensor

from noloco_p2p.compute import lattice_pull
from noloco_p2p.compute.lattice_codec import LatticeAnswer, LatticeCodec, PairDither
from noloco_p2p.compute.lattice_pull import SAFETY, WIDENINGS, LatticePull, ReplicaDistances
from noloco_p2p.core.lattice_format import (
    BOUND_ZERO,
    CHUNK,
    LARGEST_BOUND,
    LATTICE_BITS,
    MIN_BOUND,
    PLAIN,
    LatticeFormat,
    LatticeRequest,
    chunk_count,
)
from noloco_p2p.errors import Declined, Violation

BITS = sorted(LATTICE_BITS.values())
SIZE = 3 * CHUNK + 1001
"""The last chunk has an odd length."""
DTYPES = (torch.float32, torch.float64)


class Pulled(NamedTuple):
    """The vector that became known, and how many chunks had to be requested again."""

    vector: Tensor
    distances: Tensor
    repeated: int


@dataclasses.dataclass
class Replica:
    """One replica of a pair, with the bounds in its requests."""

    vector: Tensor
    bounds: Tensor

    @classmethod
    def at(cls, vector: Tensor, distance: float | Tensor, bits: int) -> "Replica":
        """A replica with bounds for this distance."""
        distances = ReplicaDistances(bits)
        distances.observe(lattice_pull._largest(torch.zeros_like(vector) + distance / SAFETY))
        return cls(vector, distances.bounds(vector))


def normal(seed: int, size: int = SIZE, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make_pair(
    bits: int, size: int = SIZE, dtype: torch.dtype = torch.float32, gap: float = 1e-3, seed: int = 0
) -> tuple[Replica, Replica]:
    """Two replicas about `gap` apart, with bounds that are wide enough."""
    first = normal(seed, size, dtype)
    second = first + gap * normal(seed + 1, size, dtype)
    return Replica.at(first, 8 * gap, bits), Replica.at(second, 8 * gap, bits)


def dither(size: int = SIZE, round: int = 3, pair: tuple[str, str] = ("a", "b")) -> PairDither:
    return PairDither(7, round, pair, size)


def begin(codec: LatticeCodec, mine: Replica) -> LatticePull:
    request = LatticeRequest(bytes(mine.bounds.tolist()))
    return LatticePull(codec, mine.vector, request, mine.vector.clone(), torch.zeros(len(mine.bounds)).double())


def pull(bits: int, mine: Replica, theirs: Replica, shared: PairDither | None = None) -> Pulled:
    """Request the vector until all of it is known."""
    codec = LatticeCodec(bits, len(mine.vector), mine.vector.dtype)
    shared = shared or dither(len(mine.vector))
    pulled, repeated = begin(codec, mine), 0
    while pulled.missing is not None:
        answer = codec.encode(theirs.vector, theirs.bounds, pulled.missing, shared)
        assert len(answer) == codec.format.nbytes(pulled.missing)
        pulled.take(answer, shared)
        repeated += len(pulled.missing.some) if pulled.missing else 0
    return Pulled(pulled.vector, pulled.distances, repeated)


def steps_of(replica: Replica, bits: int) -> Tensor:
    """The lattice step of each value."""
    step_C = 2.0 ** (replica.bounds.to(torch.float64) - BOUND_ZERO) / (1 << (bits - 1))
    return step_C.repeat_interleave(CHUNK)[: len(replica.vector)]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40)
@given(
    size=st.integers(1, 2 * CHUNK + 3),
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([1e-20, 1e-6, 1.0, 1e15]),
    gap=st.sampled_from([0.0, 1e-6, 1e-3, 3.0]),
)
def test_a_decoded_value_is_less_than_a_step_off(
    bits: int, dtype: torch.dtype, size: int, seed: int, scale: float, gap: float
) -> None:
    generator = np.random.default_rng(seed)
    first = torch.from_numpy(scale * generator.standard_t(3, size)).to(dtype)
    second = first + torch.from_numpy(scale * gap * generator.standard_t(3, size)).to(dtype)
    distance = float((second - first).abs().max()) * 4 / 3
    mine, theirs = (Replica.at(vector, distance, bits) for vector in (first, second))
    pulled = pull(bits, mine, theirs)
    assert pulled.repeated == 0
    step = torch.maximum(steps_of(mine, bits), steps_of(theirs, bits))
    slack = 4e-7 * (first.abs() + second.abs()).double()
    assert bool(((pulled.vector - second).double().abs() < step * (1 + 1e-5) + slack).all())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_replicas_of_a_pair_move_by_opposite_amounts(bits: int, dtype: torch.dtype) -> None:
    """Even if their own bounds differ, and if some chunks had to be requested again."""
    mine, theirs = make_pair(bits, dtype=dtype)
    theirs.bounds[0] += 1
    mine.bounds[1] += 2
    mine.bounds[2] -= 6
    theirs.bounds[2] -= 5
    there, back = pull(bits, mine, theirs), pull(bits, theirs, mine)
    assert there.repeated == back.repeated > 0
    moved, opposite = there.vector - mine.vector, back.vector - theirs.vector
    slack = 2 * torch.finfo(dtype).eps * torch.maximum(mine.vector.abs(), theirs.vector.abs())
    assert bool(((moved + opposite).abs() <= 2 * slack).all())
    # Each merges half of the difference. The mean of the two stays, except for rounding.
    merged = [(mine.vector + there.vector) / 2, (theirs.vector + back.vector) / 2]
    assert bool(((sum(merged) - (mine.vector + theirs.vector)).abs() <= 4 * slack).all())


def check_unbiased(bits: int) -> None:
    """The mean of many rounds' decoded vectors is the vector, to five standard errors, at each value and overall."""
    mine, theirs = make_pair(bits, size=CHUNK + 77)
    rounds = 400
    errors = torch.stack(
        [(pull(bits, mine, theirs, dither(CHUNK + 77, one)).vector - theirs.vector) for one in range(rounds)]
    ).double() / steps_of(mine, bits)
    sigma = math.sqrt(1 / 6)  # the difference of two uniform roundings, in steps, unless they coincide
    assert float(errors.mean(0).abs().max()) < 5.5 * sigma / math.sqrt(rounds)
    assert abs(float(errors.mean())) < 5 * sigma / math.sqrt(errors.numel())
    assert float(errors.var()) == pytest.approx(1 / 6, rel=0.2)


@pytest.mark.parametrize("bits", BITS)
def test_it_is_unbiased_over_rounds(bits: int) -> None:
    check_unbiased(bits)


@pytest.mark.parametrize("planted", ["no dither", "the same in every round", "half of its range"])
def test_a_bias_is_found(monkeypatch: pytest.MonkeyPatch, planted: str) -> None:
    right = PairDither.__init__

    def wrong(self: PairDither, seed: int, round: int, pair: tuple[str, str], parameters: int) -> None:
        right(self, seed, 1 if planted == "the same in every round" else round, pair, parameters)
        if planted == "no dither":
            self.place_K, self.chunk_C = torch.zeros_like(self.place_K), torch.zeros_like(self.chunk_C)
        elif planted == "half of its range":
            self.place_K, self.chunk_C = self.place_K // 2, torch.zeros_like(self.chunk_C)

    monkeypatch.setattr(PairDither, "__init__", wrong)
    with pytest.raises(AssertionError):
        check_unbiased(4)


def test_places_and_chunks_have_numbers_of_their_own() -> None:
    """Otherwise the values at place a of chunk b and at place b of chunk a would have the same dither."""
    shared = dither(100 * CHUNK)
    assert len(shared.chunk_C) == 100
    assert int((shared.place_K[:100] == shared.chunk_C).sum()) < 10
    for numbers in (shared.place_K, shared.chunk_C):
        assert 0 <= int(numbers.min()) < 16
        assert 240 <= int(numbers.max()) < 256


@pytest.mark.parametrize("bits", BITS)
def test_what_is_decoded_is_what_the_reference_says(bits: int) -> None:
    mine, theirs = make_pair(bits, dtype=torch.float64)
    shared = dither()
    found = pull(bits, mine, theirs, shared).vector - mine.vector
    places = shared.place_K.double().numpy()[np.arange(SIZE) % CHUNK] / 256
    chunks = shared.chunk_C.double().numpy()[np.arange(SIZE) // CHUNK] / 256
    expected = decoded_difference(
        mine.vector.numpy(), theirs.vector.numpy(), steps_of(mine, bits).numpy(), places + chunks
    )
    assert np.allclose(found.numpy(), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("bits", BITS)
def test_the_same_vector_and_dither_give_the_same_bytes(bits: int) -> None:
    mine, theirs = make_pair(bits)
    codec = LatticeCodec(bits, SIZE, torch.float32)
    asked = LatticeRequest(bytes(mine.bounds.tolist()))
    first = codec.encode(theirs.vector, theirs.bounds, asked, dither())
    again = LatticeCodec(bits, SIZE, torch.float32).encode(
        theirs.vector.clone(), theirs.bounds, asked, dither(pair=("b", "a"))
    )
    assert torch.equal(first, again)
    for other in (dither(round=4), dither(pair=("a", "c"))):
        assert not torch.equal(first, codec.encode(theirs.vector, theirs.bounds, asked, other))
    # A chunk that is requested alone has the same codes as among all chunks.
    alone = codec.encode(theirs.vector, theirs.bounds, LatticeRequest(asked.bounds[1:2], (1,)), dither())
    assert bytes(alone[:4].tolist()) == bytes(first[4:8].tolist())


@pytest.mark.parametrize("bits", BITS)
def test_both_of_a_pair_find_the_same_chunks_wrong(bits: int) -> None:
    """At a distance of exactly 2^(bits − 1) steps, for which one direction has a code and the other has none."""
    mine = Replica.at(torch.zeros(SIZE), 0.9, bits)
    theirs = Replica(mine.vector.index_fill(0, torch.tensor([5]), -1.0), mine.bounds)
    assert pull(bits, mine, theirs).repeated == pull(bits, theirs, mine).repeated == 1


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), narrower=st.integers(3, 12), far=st.sampled_from([1.0, 30.0, 1e4]))
def test_what_is_decoded_with_too_small_a_bound_is_found_wrong(
    bits: int, dtype: torch.dtype, seed: int, narrower: int, far: float
) -> None:
    """Planted: bounds too narrow for all chunks, and single values far away. No wrong value is ever accepted."""
    mine, theirs = make_pair(bits, dtype=dtype, seed=seed)
    theirs.vector[seed % SIZE] += far
    for one in (mine, theirs):
        one.bounds = one.bounds - narrower
    codec, shared = LatticeCodec(bits, SIZE, dtype), dither()
    pulled = begin(codec, mine)
    assert pulled.missing is not None
    pulled.take(codec.encode(theirs.vector, theirs.bounds, pulled.missing, shared), shared)
    step = torch.maximum(steps_of(mine, bits), steps_of(theirs, bits))
    is_off = (theirs.vector - mine.vector).double().abs() > step * (1 << (bits - 1))
    off = {int(at) // CHUNK for at in torch.nonzero(is_off)}
    assert seed % SIZE // CHUNK in off
    assert pulled.missing is not None
    assert off <= set(pulled.missing.chunks)
    for chunk in pulled.missing.chunks:
        where = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        assert torch.equal(pulled.vector[where], mine.vector[where])


@pytest.mark.parametrize("bits", BITS)
def test_wrong_chunks_are_requested_again_alone_wider_and_finally_plain(bits: int) -> None:
    mine, theirs = make_pair(bits)
    theirs.vector[CHUNK + 5] += 1e4
    theirs.vector[-1] -= 0.05
    codec, shared = LatticeCodec(bits, SIZE, torch.float32), dither()
    pulled = begin(codec, mine)
    asked: list[LatticeRequest] = []
    while pulled.missing is not None:
        asked.append(pulled.missing)
        pulled.take(codec.encode(theirs.vector, theirs.bounds, pulled.missing, shared), shared)
    assert [list(one.chunks) for one in asked] == [[0, 1, 2, 3], [1, 3], [1], [1]] or bits == 4
    assert len(asked) == WIDENINGS + 2
    assert list(asked[-1].chunks) == [1]
    assert asked[-1].bounds == bytes([PLAIN])
    assert [one.bounds[0] for one in asked[1:-1]] == [
        asked[0].bounds[1] + 2 * wider for wider in range(1, WIDENINGS + 1)
    ]
    assert torch.equal(pulled.vector[CHUNK : 2 * CHUNK], theirs.vector[CHUNK : 2 * CHUNK])
    assert float(pulled.distances[1]) == pytest.approx(1e4, rel=1e-3)
    assert float((pulled.vector - theirs.vector).abs().max()) < 0.1


CHUNKS = st.frozensets(st.integers(0, 6))


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=20)
@given(some=CHUNKS.filter(bool), far=CHUNKS, plain=CHUNKS)
@example(some=frozenset({0, 2, 5, 6}), far=frozenset(), plain=frozenset())
@example(some=frozenset(range(7)), far=frozenset({2, 6}), plain=frozenset({4}))
def test_a_chunk_is_decoded_as_if_it_were_requested_alone(
    bits: int, some: frozenset[int], far: frozenset[int], plain: frozenset[int]
) -> None:
    """Chunks are computed together, whether they are adjacent or not, and even if some of them are found wrong."""
    mine, theirs = make_pair(bits, size=6 * CHUNK + 1001)
    for chunk in far:
        theirs.vector[chunk * CHUNK + 7] += 1e4
    codec, shared = LatticeCodec(bits, len(mine.vector), torch.float32), dither(len(mine.vector))

    def decoded(*chunks: int) -> tuple[LatticeAnswer, Tensor]:
        bounds = bytes(PLAIN if chunk in plain else int(mine.bounds[chunk]) for chunk in chunks)
        asked, vector = LatticeRequest(bounds, chunks), mine.vector.clone()
        answer = codec.encode(theirs.vector, theirs.bounds, asked, shared)
        return codec.decode(answer, mine.vector, asked, shared, vector), vector

    together, vector = decoded(*sorted(some))
    expected, steps = mine.vector.clone(), torch.maximum(steps_of(mine, bits), steps_of(theirs, bits))
    for at, chunk in enumerate(sorted(some)):
        where = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        alone, known = decoded(chunk)
        expected[where] = known[where]
        assert (int(together.bounds[at]), together.distances[at]) == (int(alone.bounds), alone.distances)
        if chunk in far - plain:
            assert alone.wrong == (chunk,)
            continue
        slack = 0.0 if chunk in plain else float(steps[where].max())
        assert float((known[where] - theirs.vector[where]).abs().max()) <= slack
        apart = float((theirs.vector[where] - mine.vector[where]).abs().max())
        assert float(alone.distances) == pytest.approx(apart, rel=1e-6, abs=slack)
    assert together.wrong == tuple(sorted(some & far - plain))
    assert torch.equal(vector, expected)


@pytest.mark.parametrize("bits", BITS)
def test_one_wrong_value_in_a_chunk_is_found_wherever_and_however_far_away_it_is(bits: int) -> None:
    """It differs by a multiple of 2^bits steps, so its own code says that it is equal: only the digest can tell."""
    count = 128
    mine = Replica(torch.zeros(count * CHUNK), torch.full((count,), BOUND_ZERO + bits - 1, dtype=torch.uint8))
    codec, shared = LatticeCodec(bits, count * CHUNK, torch.float32), dither(count * CHUNK)
    for power in range(bits, 31):
        theirs = mine.vector.clone()
        theirs[torch.arange(count) * (CHUNK + CHUNK // count) + power] = 2.0**power
        pulled = begin(codec, mine)
        assert pulled.missing is not None
        pulled.take(codec.encode(theirs, mine.bounds, pulled.missing, shared), shared)
        assert pulled.missing is not None
        assert pulled.missing.chunks == tuple(range(count)), power


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=60)
@given(st.data())
def test_a_flipped_bit_of_a_digest_or_a_bound_is_found(bits: int, data: st.DataObject) -> None:
    """The chunk is found wrong; for a bound, it may be a Violation. Codes have the digests of their frames."""
    mine, theirs = make_pair(bits)
    codec, shared = LatticeCodec(bits, SIZE, torch.float32), dither()
    pulled = begin(codec, mine)
    assert pulled.missing is not None
    answer = codec.encode(theirs.vector, theirs.bounds, pulled.missing, shared)
    at, bit = data.draw(st.integers(0, 19)), data.draw(st.integers(0, 7))
    answer[at] ^= 1 << bit
    try:
        pulled.take(answer, shared)
    except Violation:
        assert at >= 16
        return
    assert pulled.missing is not None
    assert pulled.missing.chunks == (at // 4 if at < 16 else at - 16,)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.7e-5, 1e25, -1e-35])
def test_equal_vectors_stay_equal_bit_for_bit(bits: int, value: float) -> None:
    vector = torch.full((SIZE,), value)
    mine, theirs = (Replica.at(vector.clone(), 0.0, bits) for _ in range(2))
    pulled = pull(bits, mine, theirs)
    assert torch.equal(pulled.vector, vector)
    assert not pulled.distances.any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_values_beyond_all_bounds_are_declined_and_never_merged(bits: int, value: float) -> None:
    mine, theirs = make_pair(bits)
    theirs = Replica.at(theirs.vector.index_fill(0, torch.tensor([CHUNK]), value), 8e-3, bits)
    assert theirs.bounds.tolist().count(PLAIN) == 1
    with pytest.raises(Declined, match="not finite"):
        pull(bits, mine, theirs)
    # A replica whose own vector is broken can still receive what others have.
    assert torch.equal(pull(bits, theirs, mine).vector[CHUNK : 2 * CHUNK], mine.vector[CHUNK : 2 * CHUNK])


def answer_to(bits: int, **changes: object) -> tuple[LatticeCodec, LatticePull, Tensor]:
    mine, theirs = make_pair(bits)
    mine.bounds[1] = PLAIN
    codec = LatticeCodec(bits, SIZE, torch.float32)
    pulled = begin(codec, mine)
    assert pulled.missing is not None
    return codec, pulled, codec.encode(theirs.vector, theirs.bounds, pulled.missing, dither())


@pytest.mark.parametrize("bits", BITS)
def test_answers_that_do_not_match_the_request_are_violations(bits: int) -> None:
    _, pulled, good = answer_to(bits)
    bounds_at = 4 * 4 + 4 * CHUNK
    for bad in (good[:-1], torch.cat((good, good[:1])), good.view(torch.int8), good[:0]):
        with pytest.raises(Violation, match="bytes, not"):
            pulled.take(bad, dither())
    for chunk, bound in ((0, int(good[bounds_at]) - 1), (2, LARGEST_BOUND + 1), (0, PLAIN), (1, LARGEST_BOUND), (3, 0)):
        bad = good.clone()
        bad[bounds_at + chunk] = bound
        with pytest.raises(Violation, match="bounds that do not match the request"):
            pulled.take(bad, dither())
    bad = good.clone()
    bad[16:20] = torch.tensor([math.nan]).view(torch.uint8)
    with pytest.raises(Violation, match="not finite"):
        pulled.take(bad, dither())
    pulled.take(good, dither())
    assert pulled.missing is None


@pytest.mark.parametrize(
    ("chunks", "bounds", "message"),
    [
        ([], [], "all of 4 chunks are requested, with 0 bounds"),
        ([], [127] * 5, "all of 4 chunks are requested, with 5 bounds"),
        ([0, 1], [127], "2 of 4 chunks are requested, with 1 bounds"),
        ([0, 1, 2, 3, 4], [127] * 5, "do not ascend"),
        ([1, 1], [127, 127], "do not ascend"),
        ([1, 0], [127, 127], "do not ascend"),
        ([-1], [127], "do not ascend"),
        ([4], [127], "do not ascend"),
        ([0], [MIN_BOUND - 1], "is invalid"),
        ([0], [LARGEST_BOUND + 1], "is invalid"),
        ([0], [254], "is invalid"),
        ([0], [0], "is invalid"),
    ],
)
def test_invalid_requests_are_violations(chunks: list[int], bounds: list[int], message: str) -> None:
    theirs = make_pair(4)[1]
    with pytest.raises(Violation, match=message):
        LatticeCodec(4, SIZE, torch.float32).encode(
            theirs.vector, theirs.bounds, LatticeRequest(bytes(bounds), tuple(chunks)), dither()
        )


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 40 * CHUNK + 5])
def test_any_length_of_the_last_chunk(bits: int, size: int) -> None:
    mine, theirs = make_pair(bits, size=size)
    pulled = pull(bits, mine, theirs)
    assert pulled.repeated == 0
    assert bool(((pulled.vector - theirs.vector).abs() <= steps_of(mine, bits) * 1.001).all())


def test_bytes_of_a_parameter() -> None:
    """Of the answer and the request together."""
    parameters = 100_000_000
    for bits, most in ((8, 1.002), (4, 0.502)):
        one = LatticeFormat(bits, parameters, 4)
        asked = LatticeRequest(bytes([BOUND_ZERO]) * chunk_count(parameters))
        assert (one.nbytes(asked) + asked.nbytes) / parameters <= most


@pytest.mark.parametrize("bits", BITS)
def test_bounds_follow_the_distances(bits: int) -> None:
    """They are powers of two: at first from the replica's own movement, later from the largest recent distance, with a
    margin. A step is at least 2^-22 of the largest value."""
    distances, vector = ReplicaDistances(bits), normal(0)
    distances.bounds(vector)
    assert distances.bounds(vector + 1e-3).tolist() == [BOUND_ZERO - 9] * 4
    distances.observe(torch.tensor([1e-3, 2e-3, 0.5, 0.0], dtype=torch.float64))
    found = distances.bounds(vector).tolist()
    assert found[:3] == [BOUND_ZERO - 9, BOUND_ZERO - 8, BOUND_ZERO + 0]
    finest = 2.0 ** (found[3] - BOUND_ZERO - (bits - 1)) / float(vector[3 * CHUNK :].abs().max())
    assert 2**-22 <= finest <= 2**-21
    for _ in range(3):
        distances.observe(torch.tensor([1e-3, 1e-4, 1e-4, 0.0], dtype=torch.float64))
    assert distances.bounds(vector).tolist()[:3] == [BOUND_ZERO - 9, BOUND_ZERO - 10, BOUND_ZERO - 2]
    assert distances.bounds(vector.index_fill(0, torch.tensor([0]), math.nan))[0] == PLAIN
    assert ReplicaDistances(bits).bounds(torch.zeros(SIZE)).tolist() == [MIN_BOUND] * 4
