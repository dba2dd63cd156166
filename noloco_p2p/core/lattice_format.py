"""How a replica's vector lies on the wire in few bits: what is asked for, and the bytes of the answer.

`int8` and `int4` of METHOD.md, "Codecs of outer rounds"; `compute.lattice_codec` computes them.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from noloco_p2p.errors import Violation

OuterCodec = Literal["full", "bfloat16", "int8", "int4"]
"""Of the vectors of outer rounds (config.OuterSettings)."""
LATTICE_BITS: dict[str, int] = {"int8": 8, "int4": 4}
"""Bits of an integer that travel, by codec."""
CHUNK = 4096
"""Values with one bound and one digest; the last chunk may be shorter."""
DIGEST_BYTES = 4
PLAIN = 255
"""In the place of a bound: the values of this chunk travel as they are."""
BOUND_ZERO = 127
"""A chunk's bound is one byte, 2^(byte − 127), so that it is exact, and so is whatever is divided by its step."""
LEAST_BOUND, LARGEST_BOUND = BOUND_ZERO - 100, BOUND_ZERO + 100


def chunk_count(parameters: int) -> int:
    """Chunks of a vector of so many values."""
    return -(-parameters // CHUNK)


class LatticeRequest(NamedTuple):
    """What a puller asks of a vector: these chunks, with these bounds."""

    bounds: bytes
    """One for each chunk wanted: `LEAST_BOUND` to `LARGEST_BOUND`, or `PLAIN`."""
    some: tuple[int, ...] = ()
    """Which ones, ascending; empty where all are wanted."""
    widened: int = 0
    """How often they were asked for before, and were wrong. Not sent."""

    @property
    def chunks(self) -> Sequence[int]:
        """Which ones, ascending."""
        return self.some or range(len(self.bounds))

    @property
    def nbytes(self) -> int:
        """Of the request, about."""
        return len(self.bounds) + 4 * len(self.some)


class LatticeFormat(NamedTuple):
    """Answers of a stage: low bits of integers, and of some chunks the values themselves."""

    bits: int
    parameters: int
    value_bytes: int
    """Of a value as it is."""

    def width(self, chunk: int) -> int:
        """Values of a chunk."""
        return min(CHUNK, self.parameters - chunk * CHUNK)

    def code_bytes(self, width: int) -> int:
        """Of the codes of so many values; an odd number is filled up with a zero."""
        return -(-width // 2) * 2 * self.bits // 8

    def plain_values(self, asked: LatticeRequest) -> int:
        """Values that travel as they are."""
        whole = asked.bounds.count(PLAIN) * CHUNK
        return whole - self._missing(asked) if asked.bounds[-1] == PLAIN else whole

    def nbytes(self, asked: LatticeRequest) -> int:
        """Of the answer to a request that makes sense: a digest and a bound for each chunk, codes and plain values."""
        coded = len(asked.bounds) - asked.bounds.count(PLAIN)
        codes = coded * self.code_bytes(CHUNK)
        if asked.bounds[-1] != PLAIN:
            codes += self.code_bytes(CHUNK - self._missing(asked)) - self.code_bytes(CHUNK)
        return len(asked.bounds) * (DIGEST_BYTES + 1) + codes + self.plain_values(asked) * self.value_bytes

    def _missing(self, asked: LatticeRequest) -> int:
        """By how many values the last chunk asked for is shorter than others."""
        return CHUNK - self.width(asked.chunks[-1])

    def check(self, asked: LatticeRequest) -> None:
        """Raises Violation unless these chunks exist, ascend, and have a bound each that makes sense."""
        count, some = chunk_count(self.parameters), asked.some
        if len(asked.bounds) != (len(some) or count):
            raise Violation(f"{len(some) or 'all'} of {count} chunks are asked for, with {len(asked.bounds)} bounds")
        if some and not (some[0] >= 0 and some[-1] < count and all(a < b for a, b in pairwise(some))):
            raise Violation(f"the chunks asked for do not ascend from 0 to {count - 1}")
        if asked.bounds.translate(None, bytes((*range(LEAST_BOUND, LARGEST_BOUND + 1), PLAIN))):
            raise Violation("a bound of a chunk makes no sense")
