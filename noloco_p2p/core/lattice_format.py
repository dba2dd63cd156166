"""The wire format of a replica's vector in few bits: the request, and the layout and size of the answer.

`int8` and `int4` of METHOD.md, "Codecs of outer rounds"; `compute.lattice_codec` computes them.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from noloco_p2p.errors import Violation

OuterCodec = Literal["full", "bfloat16", "int8", "int4"]
"""The codecs of the vectors of outer rounds (config.OuterSettings)."""
LATTICE_BITS: dict[str, int] = {"int8": 8, "int4": 4}
"""How many low bits of an integer travel, by codec."""
CHUNK = 4096
"""Number of values that share one bound and one digest; the last chunk may be shorter."""
DIGEST_BYTES = 4
PLAIN = 255
"""In place of a bound: the values of this chunk travel unencoded."""
BOUND_ZERO = 127
"""A chunk's bound is one byte that stands for 2^(byte − 127): powers of two are exact, and so is dividing by a step."""
MIN_BOUND, LARGEST_BOUND = BOUND_ZERO - 100, BOUND_ZERO + 100


def chunk_count(parameters: int) -> int:
    """Number of chunks in a vector of this many values."""
    return -(-parameters // CHUNK)


class LatticeRequest(NamedTuple):
    """What a puller requests of a vector: these chunks, with these bounds."""

    bounds: bytes
    """One for each requested chunk: `MIN_BOUND` to `LARGEST_BOUND`, or `PLAIN`."""
    some: tuple[int, ...] = ()
    """The requested chunks, ascending; empty if all are requested."""
    widened: int = 0
    """How often these chunks have been requested before and were wrong. Not sent."""

    @property
    def chunks(self) -> Sequence[int]:
        """The requested chunks, ascending."""
        return self.some or range(len(self.bounds))

    @property
    def nbytes(self) -> int:
        """Approximate size of the request."""
        return len(self.bounds) + 4 * len(self.some)


class LatticeFormat(NamedTuple):
    """The answers of a stage: low bits of integers, and for some chunks the values themselves."""

    bits: int
    parameters: int
    value_bytes: int
    """Size of an unencoded value."""

    def width(self, chunk: int) -> int:
        """Number of values in a chunk."""
        return min(CHUNK, self.parameters - chunk * CHUNK)

    def code_bytes(self, width: int) -> int:
        """Size of the codes of `width` values; an odd number is padded with a zero."""
        return -(-width // 2) * 2 * self.bits // 8

    def plain_values(self, asked: LatticeRequest) -> int:
        """Number of values that travel unencoded."""
        whole = asked.bounds.count(PLAIN) * CHUNK
        return whole - self._shortfall(asked) if asked.bounds[-1] == PLAIN else whole

    def nbytes(self, asked: LatticeRequest) -> int:
        """Size of the answer to a valid request: a digest and a bound for each chunk, codes, and plain values."""
        coded = len(asked.bounds) - asked.bounds.count(PLAIN)
        codes = coded * self.code_bytes(CHUNK)
        if asked.bounds[-1] != PLAIN:
            codes += self.code_bytes(CHUNK - self._shortfall(asked)) - self.code_bytes(CHUNK)
        return len(asked.bounds) * (DIGEST_BYTES + 1) + codes + self.plain_values(asked) * self.value_bytes

    def _shortfall(self, asked: LatticeRequest) -> int:
        """By how many values the last requested chunk is shorter than a full one."""
        return CHUNK - self.width(asked.chunks[-1])

    def check(self, asked: LatticeRequest) -> None:
        """Raises Violation unless the requested chunks exist, ascend, and have one valid bound each."""
        count, some = chunk_count(self.parameters), asked.some
        if len(asked.bounds) != (len(some) or count):
            raise Violation(f"{len(some) or 'all'} of {count} chunks are requested, with {len(asked.bounds)} bounds")
        if some and not (some[0] >= 0 and some[-1] < count and all(a < b for a, b in pairwise(some))):
            raise Violation(f"the requested chunks do not ascend within 0 to {count - 1}")
        if asked.bounds.translate(None, bytes((*range(MIN_BOUND, LARGEST_BOUND + 1), PLAIN))):
            raise Violation("the bound of a chunk is invalid")
