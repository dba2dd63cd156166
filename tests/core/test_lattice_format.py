"""The size of an answer in few bits, and which requests are valid."""

from itertools import product

import pytest

from noloco_p2p.core.lattice_format import (
    CHUNK,
    DIGEST_BYTES,
    LARGEST_BOUND,
    MIN_BOUND,
    PLAIN,
    LatticeFormat,
    LatticeRequest,
)
from noloco_p2p.errors import Violation

WIDTHS = (CHUNK, CHUNK, 5)


@pytest.mark.parametrize(("bits", "last_code_bytes"), [(8, 6), (4, 3)])
@pytest.mark.parametrize("some", [(), (0,), (2,), (0, 2), (0, 1)])
def test_an_answer_has_a_head_for_each_chunk_and_its_codes_or_values(
    bits: int, last_code_bytes: int, some: tuple[int, ...]
) -> None:
    lattice, widths = LatticeFormat(bits, sum(WIDTHS), 4), [WIDTHS[chunk] for chunk in some or range(3)]
    for bounds in product((MIN_BOUND, PLAIN), repeat=len(widths)):
        asked = LatticeRequest(bytes(bounds), some)
        lattice.check(asked)
        sizes = {CHUNK: CHUNK * bits // 8, 5: last_code_bytes}
        bodies = [4 * width if bound == PLAIN else sizes[width] for bound, width in zip(bounds, widths, strict=True)]
        assert lattice.nbytes(asked) == len(widths) * (DIGEST_BYTES + 1) + sum(bodies)
        assert asked.nbytes == len(bounds) + 4 * len(some)


@pytest.mark.parametrize("bound", [MIN_BOUND - 1, LARGEST_BOUND + 1, 0, PLAIN - 1])
def test_a_bound_beyond_the_range_is_a_violation(bound: int) -> None:
    lattice = LatticeFormat(8, sum(WIDTHS), 4)
    lattice.check(LatticeRequest(bytes([MIN_BOUND, LARGEST_BOUND, PLAIN])))
    with pytest.raises(Violation, match="the bound of a chunk is invalid"):
        lattice.check(LatticeRequest(bytes([MIN_BOUND, bound, PLAIN])))
